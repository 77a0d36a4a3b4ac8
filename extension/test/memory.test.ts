import assert from 'node:assert/strict';
import { test } from 'node:test';

import { holdersAt, KINDS, layerOf, MOST_STEPS, peakOf, stepsOf, storagesOf, thinned } from '../src/model/memory';
import { readMemory } from '../src/model/records';

const MEMORY = {
  steps: 5,
  forward_steps: 3,
  names: ['w', 'a', 'b', 'g'],
  kinds: ['parameters', 'saved', 'temporary', 'gradients'],
  nbytes: [10, 20, 5, 10],
  begins: [0, 1, 1, 3],
  ends: [4, 3, 1, 4],
  lines: [-1, 0, 0, -1],
  modules: [0, 1, 1, 0],
  line_table: [{ file: 'a.py', line: 3 }],
  module_table: ['', 'mlp']
};
const read = (fields: object): ReturnType<typeof readMemory> =>
  readMemory({ ...MEMORY, ...fields }, '$', { note: () => undefined });

test('the curve adds up the storages that are alive, and the peak is its highest step', () => {
  const steps = stepsOf(5, storagesOf(read({})));
  assert.deepEqual(
    steps.map(each => each.total),
    [10, 35, 30, 40, 20]
  );
  assert.equal(peakOf(steps), 3);
  assert.deepEqual(
    KINDS.map(kind => steps[3]?.of[kind]),
    [10, 0, 0, 20, 0, 10]
  );
});

test('the composition groups by kind, line and module, the largest first', () => {
  const holders = holdersAt(1, storagesOf(read({ kinds: ['parameters', 'saved', 'saved', 'gradients'] })));
  assert.deepEqual(
    holders.map(each => [each.module, each.line?.line ?? null, each.bytes, each.names]),
    [
      ['mlp', 3, 25, ['a', 'b']],
      ['', null, 10, ['w']]
    ]
  );
});

test('a layer is a path up to its first number, and has storages of several kinds', () => {
  assert.deepEqual(['transformer.h.3.mlp.act', '0.relu', 'up_blocks.1', 'model.norm.inner', ''].map(layerOf), [
    'transformer.h.3',
    '0',
    'up_blocks.1',
    'model.norm',
    ''
  ]);
  const holders = holdersAt(1, storagesOf(read({ module_table: ['h.1.mlp', 'h.1.attn'] })), true);
  assert.deepEqual(
    holders.map(each => [each.module, each.line, each.bytes, each.kinds]),
    [['h.1', null, 35, ['saved', 'parameters', 'temporary']]]
  );
});

test('a damaged record loses only the rows that make no sense', () => {
  const storages = storagesOf(
    read({ kinds: ['parameters', 'nothing', 'saved'], ends: [9, 3, 2, 4], lines: [-1, 0, 7] })
  );
  assert.deepEqual(
    storages.map(each => [each.name, each.line]),
    [['b', null]]
  );
});

test('a long curve is drawn with fewer steps, and keeps its peak', () => {
  const storages = Array.from({ length: 9001 }, (_, begin) => ({
    ...storagesOf(read({}))[0]!,
    begin,
    end: begin,
    bytes: begin === 4321 ? 1e6 : begin % 7
  }));
  const few = thinned(stepsOf(9001, storages));
  assert.ok(few.length <= MOST_STEPS);
  assert.deepEqual(
    few.filter(each => each.total === 1e6).map(each => each.step),
    [4321]
  );
});
