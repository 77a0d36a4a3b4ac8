import assert from 'node:assert/strict';
import { test } from 'node:test';

import { readGraph } from '../src/model/report';
import { bytesText, marksIn, pendingAt, playedSteps, sharedStorages, stepStorage } from '../src/model/steps';

const access = (storage: number, start: number, length: number, rest: object = {}): object => ({
  storage,
  bytes: { start, length },
  ...rest
});
const row = access(0, 16, 4, { tensor: 'x[4]' });
/** Two writes to rows of an input, a tensor that only the program uses, and a copy that stores one of the writes. */
const graph = readGraph({
  storages: [
    {
      number: 0,
      owner: 'input',
      nbytes: 32,
      device: 'cpu',
      spans: [{ name: 'x', role: 'input', start: 0, stop: 32, mutated: true }]
    }
  ],
  steps: [
    { kind: 'call', text: 'x[0]', makes: [access(0, 0, 4)] },
    { kind: 'call', text: 'x[0].zero_()', writes: [access(0, 0, 4, { tensor: 'x[0]' })] },
    { kind: 'call', text: 'ones(2)', makes: [access(-1, 0, 8, { tensor: 'ones(…)', nbytes: 8 })] },
    { kind: 'call', text: 'x[4].exp_()', reads: [row], writes: [row] },
    { kind: 'epilogue', text: 'x.copy_(…)', writes: [access(0, 0, 18, { tensor: 'x' })] }
  ]
});

test('written bytes are pending until a copy after the graph stores them', () => {
  const pending = graph.steps.map((_, index) => pendingAt(graph, 0, index).map(({ start, stop }) => [start, stop]));
  const [row0, row4] = [
    [0, 4],
    [16, 20]
  ];
  assert.deepEqual(pending, [[], [row0], [row0], [row0, row4], [[18, 20]]]);
});

test('the player shows the steps with shared or written storages, or all', () => {
  const shared = sharedStorages(graph);
  assert.deepEqual([...shared], [0]);
  assert.deepEqual(playedSteps(graph, shared), [0, 1, 3, 4]);
  assert.deepEqual(playedSteps(graph, null), [0, 1, 2, 3, 4]);
});

test('a tensor exists from the step that makes it, and a tensor of the program until its graph ends', () => {
  const tensors = stepStorage(graph, 0).tensors.map(each => [each.name, each.role, each.from, each.until]);
  assert.deepEqual(tensors, [
    ['x', 'input', 0, 5],
    ['x[0]', 'program', 0, 4]
  ]);
  assert.equal(stepStorage(graph, -1).nbytes, 8);
});

test('reads and writes have separate marks, and unknown bytes are not drawn but named', () => {
  const [step] = graph.steps.slice(3);
  assert.ok(step);
  assert.deepEqual(marksIn(step, 0), { read: [{ start: 16, stop: 20 }], all: [{ start: 16, stop: 20 }], some: [] });
  const grid = { start: 0, length: 4, counts: [3], steps: [16], certain: true };
  assert.equal(bytesText(grid), 'bytes 0–4, 16–20 and 32–36');
  assert.equal(bytesText({ ...grid, certain: false }), 'perhaps not all of bytes 0–4, 16–20 and 32–36');
  assert.equal(bytesText({ ...grid, counts: [9] }), 'bytes 0–4, 16–20, 32–36, … (9 runs)');
  assert.match(bytesText(null), /^unknown bytes/);
});
