import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';

import { runs, union } from '../src/model/layout';
import { readPacked } from '../src/model/packed';
import { readReport } from '../src/model/report';
import type { Report } from '../src/model/report';
import { chips, headOf } from '../src/model/verdict';
import { amount, dataSize, duration, grouped, listed, place, short, sizes } from '../src/model/words';
import { counted } from './counted';
import { sample } from './sample';
import type { IJson } from './sample';

function read(value: unknown): Report {
  const { report, problem } = readReport(value);
  assert.equal(problem, null);
  assert.ok(report !== null);
  return report;
}

test('a whole report is read without damage', () => {
  const reading = readReport(sample(2));
  assert.deepEqual(reading.damage, []);
  assert.equal(reading.report?.frames[0]?.graphs[1]?.inputs[0]?.mutation_type, 'mutated out of graph');
});

test('fields that are not known are ignored, missing ones take their defaults', () => {
  const report = read({ version: 1, environment: {}, tomorrow: { is: 'new' }, frames: [{ name: 'f' }] });
  assert.equal('tomorrow' in report, false);
  assert.deepEqual(report.frames[0]?.calls, { total: 0, compiled: 0, eager: 0, recent: [] });
  assert.equal(report.cell, null);
});

test('what is no report, or another version, or damaged, is said in a sentence', () => {
  for (const value of [null, undefined, 3, 'report', [], {}, { version: 1 }]) {
    const { report, problem } = readReport(value);
    assert.equal(report, null);
    assert.match(problem ?? '', /^This is not an aotlab report/);
  }
  assert.match(readReport({ version: 2, environment: {} }).problem ?? '', /has version 2.*reads version 1/);
  assert.match(readReport({ version: 1, environment: {}, frames: {} }).problem ?? '', /damaged: its frames/);
  assert.match(readReport({ version: 1, environment: [] }).problem ?? '', /damaged: its environment/);
});

test('a value of another type is left out, and its place is named', () => {
  const damaged = { version: 1, environment: { devices: 'none' }, frames: [{ name: 3, graphs: [7] }], notes: ['kept'] };
  const { report, damage } = readReport(damaged);
  assert.deepEqual(report?.notes, ['kept']);
  assert.equal(report?.frames[0]?.name, '');
  assert.deepEqual(damage, [
    '$.environment.devices should be a list',
    '$.frames[0].name should be text',
    '$.frames[0].graphs[0] should be an object'
  ]);
});

test('a report that is nested too deeply is refused', () => {
  let line: object = {};
  for (let depth = 0; depth < 100_000; depth += 1) {
    line = { callers: [line] };
  }
  const { problem } = readReport({ version: 1, environment: {}, frames: [{ line }] });
  assert.equal(problem, 'This report is damaged: it is nested too deeply.');
});

test('a report with a million damaged places is read with a few notes', () => {
  const { damage } = readReport({ version: 1, environment: {}, frames: Array.from({ length: 1000 }, () => 5) });
  assert.equal(damage.length, 20);
});

test('symbolic sizes are read', () => {
  const symbol = { expression: 's0*4', hint: 12 };
  const report = read({
    version: 1,
    environment: {},
    frames: [{ graphs: [{ storages: [{ nbytes: symbol }], inputs: [{ tensor: { shape: [symbol, 3] } }] }] }]
  });
  assert.deepEqual(report.frames[0]?.graphs[0]?.storages[0]?.nbytes, symbol);
  assert.equal(dataSize(report.frames[0]?.graphs[0]?.storages[0]?.nbytes ?? null), '12 B');
  assert.equal(dataSize({ expression: 's0*4', hint: null }), 's0*4 B');
  assert.equal(
    sizes([{ expression: 'x.size(0) + 1', hint: 3 }, { expression: 's0', hint: null }, 4]),
    '[x.size(0)+1=3, s0, 4]'
  );
});

test('numbers and lists are written as in Python', () => {
  assert.deepEqual([0, 999, 1000, 12_345, 1_240_000_000].map(duration), [
    '0 ns',
    '999 ns',
    '1.00 µs',
    '12.3 µs',
    '1.24 s'
  ]);
  assert.equal(duration(null), '–');
  assert.deepEqual([0, 1023, 1536, 3 * 2 ** 20].map(dataSize), ['0 B', '1023 B', '1.50 KiB', '3.00 MiB']);
  assert.deepEqual([grouped(7), grouped(1234), grouped(1_234_567)], ['7', '1,234', '1,234,567']);
  assert.deepEqual([amount(1, 'graph'), amount(2000, 'graph')], ['1 graph', '2,000 graphs']);
  assert.deepEqual([listed([]), listed(['a']), listed(['a', 'b', 'c'])], ['', 'a', 'a, b and c']);
  assert.equal(listed(['a', 'b', 'c', 'd'], 2), 'a, b and 2 more');
  assert.deepEqual(['f', 'a.b', 'f.<locals>.<lambda>', 'a.<locals>.b.<locals>.c'].map(short), [
    'f',
    'a.b',
    '<lambda>',
    'c'
  ]);
});

test('places in notebooks are not named by files that nobody knows', () => {
  const placeIn = (file: string): string => place({ file, line: 2, function: '', code: '', callers: [] });
  assert.equal(placeIn('/home/user/model.py'), 'model.py:2');
  assert.equal(placeIn('C:\\work\\model.py'), 'model.py:2');
  assert.equal(placeIn('/tmp/ipykernel_123/514483204.py'), 'a cell, line 2');
  assert.equal(placeIn('<ipython-input-7-5d3c>'), 'In [7], line 2');
});

test('a strided tensor has gaps, a contiguous or expanded one has none', () => {
  const tensor = (shape: number[], stride: number[]): Parameters<typeof runs>[0] => ({
    dtype: 'float32',
    device: 'cpu',
    shape,
    stride,
    byte_offset: 0,
    nbytes: 4 * shape.reduce((product, length) => product * length, 1),
    requires_grad: false,
    is_leaf: true,
    type_name: '',
    layout: 'strided',
    offset: 0,
    inner: []
  });
  assert.deepEqual(runs(tensor([2, 3], [3, 1]), 0), [{ start: 0, stop: 24 }]);
  assert.deepEqual(runs(tensor([3, 2], [1, 3]), 8), [{ start: 8, stop: 32 }]);
  assert.deepEqual(runs(tensor([2, 2], [4, 1]), 4), [
    { start: 4, stop: 12 },
    { start: 20, stop: 28 }
  ]);
  assert.deepEqual(runs(tensor([3, 2], [0, 1]), 0), [{ start: 0, stop: 8 }]);
  assert.deepEqual(runs(tensor([], []), 4), [{ start: 4, stop: 8 }]);
  assert.deepEqual(runs(tensor([0, 2], [2, 1]), 4), []);
  // Windows that overlap each other, as unfold makes them.
  assert.deepEqual(runs(tensor([3, 2], [1, 1]), 0), [{ start: 0, stop: 16 }]);
  assert.equal(runs(tensor([100_000], [2]), 0), null);
  assert.deepEqual(
    union([
      { start: 8, stop: 9 },
      { start: 0, stop: 4 },
      { start: 4, stop: 6 }
    ]),
    [
      { start: 0, stop: 6 },
      { start: 8, stop: 9 }
    ]
  );
});

/** The head in what tests compare. */
function verdict(report: Report): { sentence: string; state: string } {
  const { sentence, state } = headOf(report);
  return { sentence, state };
}

test('the verdict is Python’s; a head with an unknown state keeps its counts alone', () => {
  const knownVerdict = { sentence: 'It went well.', state: 'verified' };
  assert.deepEqual(verdict(read({ ...sample(), summary: knownVerdict })), knownVerdict);
  for (const summary of [null, {}, { sentence: 'Trust me.', state: 'perfect' }]) {
    assert.deepEqual(verdict(read({ ...sample(), summary })), {
      sentence: 'This report has no verdict.',
      state: 'unverified'
    });
  }
  const { counts } = headOf(read({ ...sample(), summary: { state: 'perfect', counts: { inputs: 12 } } }));
  assert.equal(counts.inputs, 12);
});

test('the chips are Python’s numbers where the report has them, and only those that are not zero', () => {
  const counts = { inputs: 12, aliased: 1, saved: 370, saved_bytes: 6.6 * 2 ** 20 };
  const numbers = {
    status: 'equal to eager',
    graphs: 2,
    mutated: 3,
    new: 148,
    breaks: 1,
    recompiles: 5,
    speed: 'noise: 3.8× faster',
    counts
  };
  const head = headOf(read({ ...sample(), summary: { sentence: 'fine', state: 'verified', ...numbers } }));
  assert.equal(head.status, 'equal to eager');
  assert.deepEqual(
    chips(head).map(({ tab, text }) => `${tab}: ${text}`),
    [
      'stages: 2 graphs',
      'inputs: 3 mutated',
      'inputs: 148 new gradients',
      'outputs: 1 alias',
      'saved: 6.60 MiB saved',
      'breaks: 1 break'
    ].concat(['calls: 5 recompiles', 'timing: noise: 3.8× faster'])
  );
  assert.deepEqual(
    chips(headOf(read(counted(sample(2))))).map(chip => chip.text),
    ['2 graphs', '2 mutated', '2 aliases', '32 B saved', '1 break', '1 refused', '1 recompile']
  );
});

const reportsPath = process.env['AOTLAB_REPORTS'];

/** The counts of each graph. */
function countsOf({ frames }: Report): unknown {
  return frames.map(frame => frame.graphs.map(graph => graph.counts));
}

function counts(report: unknown): unknown {
  return countsOf(read(report));
}

test(
  'reports that Python made are read whole, and have Python’s verdict',
  { skip: reportsPath === undefined },
  async () => {
    const reports = JSON.parse(readFileSync(reportsPath ?? '', 'utf8')) as {
      recorded: IJson;
      sparse: unknown;
      shown: IJson;
      sentence: string;
      state: string;
    }[];
    assert.ok(reports.length > 0);
    for (const { recorded, sparse, shown, sentence, state } of reports) {
      const reading = readReport(recorded);
      assert.deepEqual(reading.damage, []);
      assert.deepEqual(readReport(sparse), reading); // fields that are left out have the same defaults here
      const { report: unpacked, damage } = await readPacked(shown);
      assert.deepEqual(damage, []);
      assert.ok(unpacked !== null);
      assert.deepEqual(verdict(unpacked), { sentence, state });
      assert.deepEqual(verdict(read(shown)), { sentence, state }); // the head alone
      assert.deepEqual(counts(counted(recorded)), countsOf(unpacked)); // the samples are counted as in Python
      assert.ok(
        unpacked.frames
          .flatMap(({ graphs }) => graphs)
          .every(({ nodes, status }) => nodes.length > 0 || status !== 'compiled')
      );
    }
  }
);
