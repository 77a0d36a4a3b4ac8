/** The compressed form of a report, the verdict alone, and the marks in a cell's gutter. */

import assert from 'node:assert/strict';
import { afterEach, beforeEach, test } from 'node:test';
import { gzipSync } from 'node:zlib';

import { JSDOM } from 'jsdom';

import { lineMarks } from '../src/lab/lineMarks';
import { ReportSource } from '../src/live/source';
import { MOST_BYTES, readPacked } from '../src/model/packed';
import { readReport } from '../src/model/report';
import type { IDisposable } from '../src/source';
import { mount } from '../src/view/view';
import { counted } from './counted';
import { sample } from './sample';
import type { IJson } from './sample';

let dom: JSDOM;
const views: IDisposable[] = [];

beforeEach(() => {
  dom = new JSDOM('<!DOCTYPE html><body></body>', { pretendToBeVisual: true });
  const { document, Element, HTMLElement, Node } = dom.window;
  Object.assign(globalThis, { document, Element, HTMLElement, Node });
});

afterEach(() => {
  views.splice(0).forEach(view => view.dispose());
  dom.window.close();
});

// The compressed form

function gzip(value: unknown): string {
  return gzipSync(typeof value === 'string' ? value : JSON.stringify(value)).toString('base64');
}

const NODES = [
  { stage: 'trace', part: 'joint', name: 'add', op: 'call_function', target: 'aten.add', phase: 'forward' }
];

function packed(changes: IJson = {}): IJson {
  const { version, environment, identifier, summary } = counted(sample(2)) as IJson;
  const [node = {}] = NODES;
  const columns = Object.fromEntries(Object.entries(node).map(([name, value]) => [name, [value, value]]));
  const lines = [{ file: 'a.py', line: 3 }];
  const nodes = [['', gzip({ lines, columns: { ...columns, line: [null, 0] } })]];
  return { version, environment, identifier, summary, gzip: gzip(counted(sample(2))), gzip_nodes: nodes, ...changes };
}

test('a compressed report is read whole, with the nodes of its graphs', async () => {
  const whole = counted(sample(2));
  const { report, damage, problem } = await readPacked(packed());
  assert.equal(problem, null);
  assert.deepEqual(damage, []);
  const [first, second] = report?.frames[0]?.graphs ?? [];
  assert.deepEqual(first, readReport(whole).report?.frames[0]?.graphs[0]);
  assert.deepEqual(
    second?.nodes.map(({ name, users, line }) => [name, users, line?.line ?? null]),
    [
      ['add', 0, null],
      ['add', 0, 3]
    ]
  );
  const source = new ReportSource();
  source.update({ reading: await readPacked(packed()) });
  assert.equal(source.nodes('step', 1)?.length, 2);
});

test('a report that is not compressed is read as before', async () => {
  for (const value of [counted(sample(2)), sample(), null, { version: 2, environment: {} }]) {
    assert.deepEqual(await readPacked(value), readReport(value));
  }
});

test('compressed data that are damaged or too large are said in a sentence', async () => {
  const nested = '['.repeat(100_000);
  const damaged: IJson[] = [
    { gzip: 'no base64 !' },
    { gzip: 5 },
    { gzip: Buffer.from('no gzip').toString('base64') },
    { gzip: gzip(counted(sample())).slice(0, -40) },
    { gzip: gzip('{') },
    { gzip: gzip(nested) },
    { gzip_nodes: [['', 'no base64 !']] }
  ];
  for (const changes of damaged) {
    const { report, problem } = await readPacked(packed(changes));
    assert.equal(report, null, JSON.stringify(changes).slice(0, 80));
    assert.match(problem ?? '', /damaged: its compressed data cannot be read/);
  }
  for (const odd of [{ gzip_nodes: 7 }, { gzip_nodes: [[]] }, { gzip: gzip({ ...sample(), frames: 'none' }) }]) {
    assert.ok((await readPacked(packed(odd))) !== null); // neither throws nor hangs
  }
  const bomb = gzip(' '.repeat(MOST_BYTES + 1));
  assert.match((await readPacked(packed({ gzip: bomb }))).problem ?? '', /more than 64 MB/);
  assert.match((await readPacked(packed({ gzip_nodes: [['', bomb]] }))).problem ?? '', /more than 64 MB/);
});

// The verdict alone

function show(report: IJson, whole = false): HTMLElement {
  const host = document.createElement('div');
  host.className = whole ? 'aotlab-whole' : '';
  document.body.append(host);
  const source = new ReportSource();
  source.update({ reading: readReport(counted(report)) });
  views.push(mount(host, source));
  return host;
}

function withOpen(value: string, identifier: string): IJson {
  const report = sample();
  return {
    ...report,
    identifier,
    environment: { ...(report['environment'] as object), config: [{ name: 'open', value }] }
  };
}

const isFolded = (host: HTMLElement): boolean => host.querySelector('.al-folded') !== null;
const button = (host: HTMLElement): HTMLElement | null => host.querySelector('[data-action=fold]');

test('the setting shows the verdict alone, and the page remembers a click for this report', () => {
  const host = show(withOpen('verdict', 'a'));
  assert.ok(isFolded(host));
  assert.equal(host.querySelector('[role=tabpanel]')?.childElementCount, 0);
  assert.match(button(host)?.textContent ?? '', /Show the report/);
  button(host)?.click();
  assert.ok(!isFolded(host));
  assert.ok((host.querySelector('[role=tabpanel]')?.childElementCount ?? 0) > 0);
  assert.equal(button(host)?.getAttribute('aria-expanded'), 'true');
  assert.ok(!isFolded(show(withOpen('verdict', 'a')))); // drawn again
  assert.ok(isFolded(show(withOpen('verdict', 'b')))); // another report
  assert.ok(!isFolded(show(withOpen('report', 'c'))));
  assert.ok(!isFolded(show(withOpen('verdict', 'd'), true))); // in a tab or in a page
  assert.equal(button(show(withOpen('verdict', 'e'), true)), null);
});

test('a click on a count of a folded report shows the report at that count', () => {
  const host = show(withOpen('verdict', 'f'));
  host.querySelector<HTMLElement>('[data-chip=inputs]')?.click();
  assert.ok(!isFolded(host));
  assert.equal(host.querySelector('[aria-selected=true]')?.getAttribute('data-tab'), 'inputs');
});

// The marks

test('each line of the cell has a mark with the facts about it', () => {
  const report = sample();
  const [frame] = report['frames'] as IJson[];
  const [graph] = frame?.['graphs'] as IJson[];
  const [input] = graph?.['inputs'] as IJson[];
  const inCell = { file: '<ipython-input-3-abc>', line: 3, function: '<module>', code: 'x.add_(1)' };
  const elsewhere = {
    ...inCell,
    file: '/home/user/model.py',
    line: 9,
    callers: [{ ...inCell, line: 6, code: 'f(x)' }]
  };
  Object.assign(input ?? {}, { name: 'x', written_at: [inCell, elsewhere, { ...inCell, line: 2 }] });
  const cell = {
    ...(report['cell'] as object),
    source: '%%aotcompile\nimport torch\nx.add_(1)\n\n# a comment\nf(x)\nprint(x)',
    parts: [
      { first_line: 2, last_line: 2, how: 'python', frames: [], reason: 'an import' },
      {
        first_line: 3,
        last_line: 6,
        how: 'compiled',
        frames: ['step'],
        reason: '',
        ways: ['compiled', '', '', 'in part']
      },
      { first_line: 7, last_line: 7, how: 'not run', frames: [], reason: 'an error came first' }
    ]
  };
  const breaks = [
    { frame: 'a.py:1', cell_line: 6, words: 'a print', reason: 'print' },
    { frame: 'a.py:1', cell_line: 6, words: 'inside', reason: 'inside', line: inCell },
    { frame: 'a.py:2', cell_line: 2, words: 'numpy', reason: 'numpy', library: 'numpy' }
  ];
  const read = readReport({ ...report, cell, graph_break_rows: breaks }).report;
  assert.ok(read !== null);
  const marks = lineMarks(read);
  assert.deepEqual(
    [...marks].map(([line, { symbol, flags, tone }]) => [line, symbol, flags, tone]),
    [
      [2, '○', '', 'plain'],
      [3, '●', '!M', 'good'],
      [6, '◐', '!M', 'warn'],
      [7, '✕', '', 'plain']
    ]
  );
  assert.equal(
    marks.get(3)?.title,
    'Line 3: compiled (run by compiled graphs)\nGraphs: step, graph 0\nGraph break: inside\nMutates: x'
  );
  assert.match(marks.get(6)?.title ?? '', /Graph break: a print\nMutates: x/);
  assert.match(marks.get(2)?.title ?? '', /an import/);
  assert.equal(lineMarks({ ...read, cell: null }).size, 0);
});
