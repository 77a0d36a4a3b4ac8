import assert from 'node:assert/strict';
import { afterEach, beforeEach, test } from 'node:test';

import { JSDOM } from 'jsdom';

import { ReportSource } from '../src/live/source';
import { readReport } from '../src/model/report';
import type { IDisposable } from '../src/source';
import { mount } from '../src/view/view';
import { counted } from './counted';
import { sample } from './sample';
import type { IJson } from './sample';

let dom: JSDOM;
let host: HTMLElement;
let source: ReportSource;
let view: IDisposable;

beforeEach(() => {
  dom = new JSDOM('<!DOCTYPE html><body></body>', { pretendToBeVisual: true });
  const { window } = dom;
  Object.assign(globalThis, {
    document: window.document,
    Element: window.Element,
    HTMLElement: window.HTMLElement,
    Node: window.Node
  });
  host = document.createElement('div');
  document.body.append(host);
  source = new ReportSource();
});

afterEach(() => {
  view.dispose();
  dom.window.close();
});

function show(report: IJson): HTMLElement {
  source.update({ reading: readReport(counted(report)) });
  view = mount(host, source);
  return one('.aotlab-report');
}

function one(selector: string): HTMLElement {
  const [element, ...others] = all(selector);
  assert.ok(element !== undefined, `no ${selector}`);
  assert.equal(others.length, 0, `several ${selector}`);
  return element;
}

function all(selector: string): HTMLElement[] {
  return [...host.querySelectorAll<HTMLElement>(selector)];
}

function text(selector: string): string {
  return one(selector).textContent ?? '';
}

function tab(name: string): void {
  one(`[data-tab=${name}]`).click();
}

function firstGraph(report: IJson): IJson {
  return ((report['frames'] as IJson[])[0]?.['graphs'] as IJson[])[0] as IJson;
}

function press(element: HTMLElement, key: string): KeyboardEvent {
  const event = new dom.window.KeyboardEvent('keydown', { key, bubbles: true, cancelable: true });
  element.dispatchEvent(event);
  return event as unknown as KeyboardEvent;
}

const NAMES = [
  'overview',
  'inputs',
  'outputs',
  'graph',
  'storages',
  'stages',
  'saved',
  'memory',
  'kernels',
  'breaks',
  'calls',
  'timing',
  'verification'
];

test('the verdict comes first, and the root says whose report it is and how it went', () => {
  const root = show(sample());
  assert.equal(root.dataset['identifier'], 'r-1');
  assert.equal(root.dataset['live'], 'false');
  assert.equal(root.dataset['state'], 'different');
  assert.match(root.firstElementChild?.textContent ?? '', /NOT equal to eager/);
  assert.match(text('.al-environment'), /torch 2\.13\.0.*cpu \(a processor\)/);
});

test('the status and the numbers open their tabs, and tabs of nothing are dimmed', () => {
  show(sample());
  assert.equal(text('.al-sentence'), 'Python’s sentence.');
  assert.deepEqual(
    all('.al-chip').map(each => each.dataset['chip']),
    ['verification', 'stages', 'inputs', 'outputs', 'saved', 'breaks', 'calls']
  );
  for (const chip of all('.al-chip')) {
    chip.click();
    assert.equal(one('[role=tabpanel]:not([hidden])').dataset['panel'], chip.dataset['chip']);
    assert.equal(document.activeElement, one(`[data-tab=${chip.dataset['chip']}]`));
  }
  assert.equal(text('[data-tab=inputs]'), 'Inputs 3');
  assert.deepEqual(all('[role=tab].al-empty'), []);
  view.dispose();
  show({ ...sample(), graph_break_rows: [], timing_rows: [] });
  assert.deepEqual(
    all('[role=tab].al-empty').map(each => each.textContent),
    ['Graph breaks', 'Timing']
  );
});

test('a report can be opened in a tab only where somebody can do so', () => {
  show(sample());
  assert.equal(all('[data-action=open]').length, 0);
  view.dispose();
  let opened = 0;
  view = mount(host, source, () => {
    opened += 1;
  });
  one('[data-action=open]').click();
  assert.equal(opened, 1);
});

test('there is one tab and one panel per part, and one panel is shown', () => {
  show(sample());
  assert.deepEqual(
    all('[role=tab]').map(each => each.dataset['tab']),
    NAMES
  );
  assert.deepEqual(
    all('[role=tabpanel]')
      .map(each => each.dataset['panel'])
      .filter(name => !['engines', 'ranks', 'runs'].includes(name ?? '')),
    NAMES
  );
  for (const name of NAMES) {
    tab(name);
    assert.deepEqual(
      all('[role=tabpanel]:not([hidden])').map(each => each.dataset['panel']),
      [name]
    );
    assert.notEqual(text(`[data-panel=${name}]`), '');
    const chosen = one('[role=tab][aria-selected=true]');
    assert.equal(chosen.getAttribute('aria-controls'), one(`[data-panel=${name}]`).id);
  }
});

test('the graph is drawn where there are no workers, and a box that is activated says what it is', async () => {
  show(sample());
  tab('graph');
  await new Promise(resolve => setTimeout(resolve));
  const box = one('[data-panel=graph] [data-id="forward mm"]');
  press(box, 'Enter');
  assert.equal(box.getAttribute('aria-selected'), 'true');
  assert.match(text('.al-graph-details'), /^mm *aten\.mm *saved, 32 B/);
  press(box, 'ArrowLeft');
  assert.equal(document.activeElement?.getAttribute('data-id'), 'forward group ');
  press(one('[data-panel=graph] [data-id="forward group "]'), 'Escape');
  assert.equal(box.getAttribute('aria-selected'), 'false');
});

test('the edges of a node lead from its inputs to its users, and the search knows its marks', async () => {
  const report = sample();
  const node = (name: string, inputs: string[], module: string): IJson => ({
    ...{ stage: 'trace', part: 'joint', name, op: 'call_function', target: 'aten.t', phase: 'backward', inputs, module }
  });
  const graph = firstGraph(report);
  const chain = [node('first', [], ''), node('second', ['first'], 'net'), node('third', ['second'], 'net')];
  graph['nodes'] = [...(graph['nodes'] as IJson[]), ...chain];
  show(report);
  tab('graph');
  await new Promise(resolve => setTimeout(resolve));
  press(one('[data-panel=graph] [data-id="backward second"]'), 'Enter');
  const chosen = all('.al-graph-chosen > path').map(path => path.getAttribute('d') ?? '');
  const heights = chosen.map(d => [...d.matchAll(/,([\d.]+)/g)].map(([, y]) => Number(y)));
  // The backward goes up.
  assert.deepEqual(
    heights.map(each => (each[0] ?? 0) > (each.at(-1) ?? 0)),
    [true, true]
  );
  // The edge to its neighbour is the edge of the picture, which it covers.
  assert.ok(all('.al-graph-edge:not(.al-graph-chosen > *)').some(path => path.getAttribute('d') === chosen[1]));
  const field = one('[data-panel=graph] .al-search') as HTMLInputElement;
  field.value = 'Saved';
  field.dispatchEvent(new dom.window.Event('input'));
  assert.equal(text('.al-graph-tools > [role=status]'), '1 of 1');
});

test('two engines are side by side, and the other tabs show aotlab’s graphs', () => {
  const report = sample();
  const [ours] = report['frames'] as IJson[];
  const theirs = { ...ours, name: 'step [upstream]', engine: 'upstream' };
  const row = (fact: string, subject: string, same: boolean | null): IJson => ({
    ...{ frame: 'step', graph: 0, fact, subject, same, aotlab: `ours ${subject}`, upstream: `theirs ${subject}` }
  });
  const rows = [row('mutation', 'x', false), row('output', 'y', true), row('time', 'compile time', null)];
  const summary = { engines: 3, apart: 1, listed: 1, counts: { inputs: 7 } };
  show({ ...report, frames: [ours, theirs], engine_rows: rows, summary });
  assert.equal(one('[data-chip=engines]').textContent, '1 fact differs upstream');
  tab('engines');
  const cells = all('[data-panel=engines] tbody tr').map(each =>
    ['subject', 'aotlab', 'upstream', 'same'].map(name => each.querySelector(`[data-column=${name}]`)?.textContent)
  );
  assert.deepEqual(cells, [
    ['x', 'ours x', 'theirs x', 'differs'],
    ['y', 'ours y', 'theirs y', 'yes'],
    ['compile time', 'ours compile time', 'theirs compile time', '']
  ]);
  assert.deepEqual(
    all('[data-key=graphs] option').map(each => each.textContent?.split(' · ')[0]),
    ['All 1 graph of aotlab', 'step', 'step [upstream]']
  );
  tab('inputs');
  assert.deepEqual(
    [...new Set(all('[data-panel=inputs] tr[data-frame]').map(each => each.dataset['frame']))],
    ['step']
  );
  const list = one('[data-key=graphs]') as HTMLSelectElement;
  list.value = 'step [upstream]/0';
  list.dispatchEvent(new dom.window.Event('change'));
  assert.deepEqual(
    [...new Set(all('[data-panel=inputs] tr[data-frame]').map(each => each.dataset['frame']))],
    ['step [upstream]']
  );
});

test('two runs are side by side at first, and a change has its word', () => {
  const row = (fact: string, subject: string, same: boolean | null, change = ''): IJson => ({
    ...{
      frame: 'step',
      graph: 0,
      fact,
      part: '',
      subject,
      same,
      change,
      before: `old ${subject}`,
      after: `new ${subject}`
    }
  });
  const rows = [
    row('node', '<b>', false, 'added'),
    row('saved', 'all values', false, '+1.5 MiB'),
    row('time', 'aotlab', true, 'no difference beyond the noise'),
    row('run', 'torch', true)
  ];
  const report = { ...sample(), run_names: ['run 3', 'run 8'], run_rows: rows, summary: { runs: 4, runs_apart: 2 } };
  show(report);
  assert.equal(one('[data-chip=runs]').textContent, '2 facts differ between the runs');
  assert.equal(one('[role=tab][aria-selected=true]').textContent, 'Two runs');
  assert.deepEqual(
    all('[data-panel=runs] tbody tr').map(each =>
      ['subject', 'before', 'after', 'change'].map(name => each.querySelector(`[data-column=${name}]`)?.textContent)
    ),
    [
      ['aotlab', 'old aotlab', 'new aotlab', 'no difference beyond the noise'],
      ['all values', 'old all values', 'new all values', '+1.5 MiB'],
      ['<b>', 'old <b>', 'new <b>', 'added'],
      ['torch', 'old torch', 'new torch', 'same']
    ]
  );
  assert.deepEqual(
    all('[data-panel=runs] table:first-of-type thead th')
      .slice(1, 3)
      .map(each => each.textContent),
    ['run 3', 'run 8']
  );
});

test('the cell’s lines say how they ran in words, with the reason once', () => {
  show(sample());
  const ran = all('table[data-table=cell] tr[data-line]').map(row =>
    ['source', 'how', 'reason'].map(name => row.querySelector(`[data-column=${name}]`)?.textContent)
  );
  assert.deepEqual(ran, [
    ['%%aotcompile', '', ''],
    ['import torch', '○ python', 'an import'],
    ['x.add_(1)', '● compiled', 'traced directly'],
    ['loss.backward()', '✕ not run', 'an error came first']
  ]);
});

test('of lines that are compiled in part only those that really are say so', () => {
  const report = sample();
  const cell = report['cell'] as IJson;
  cell['source'] =
    '%%aotcompile\nfor i in range(3):\n    optimizer.zero_grad()\n    a = f(x)\n    if a > 0:\n        b = 1\n    b.backward()\nc = g(x)';
  cell['parts'] = [
    { first_line: 2, last_line: 3, how: 'python', reason: 'calls .zero_grad()' },
    { first_line: 4, last_line: 7, how: 'compiled', reason: 'why', ways: ['compiled', 'in part', '', 'eager'] },
    { first_line: 8, last_line: 8, how: 'compiled', reason: 'it recompiles too often' }
  ];
  show(report);
  const ran = all('table[data-table=cell] td[data-column=how]').map(each => each.textContent);
  assert.deepEqual(ran, [
    '',
    '○ python',
    '○ python',
    '● compiled',
    '◐ compiled in part',
    '',
    '◐ eager',
    '◐ compiled in part'
  ]);
  const why = all('table[data-table=cell] td[data-column=reason]').map(each => each.textContent);
  assert.deepEqual(why, ['', '', 'calls .zero_grad()', 'why', '', '', '', 'it recompiles too often']);
});

test('the lines of a function have their own states, and a break inside of it stands at its line', () => {
  const report = sample();
  const cell = report['cell'] as IJson;
  cell['source'] =
    '%%aotcompile\ndef f(t):\n    m = t.max().item()\n    return t + m\nfor i in range(3):\n    y = f(x[i])';
  cell['parts'] = [
    { first_line: 2, last_line: 4, how: 'compiled', ways: ['compiled', 'in part', 'compiled'] },
    { first_line: 5, last_line: 6, how: 'python', reason: 'why', ways: ['python', 'calls compiled code'] }
  ];
  report['graph_break_rows'] = [{ frame: 'f', where: 'line 3', cell_line: 6, words: '`.item()` is called' }];
  show(report);
  const texts = (column: string): (string | null)[] =>
    all(`table[data-table=cell] td[data-column=${column}]`).map(each => each.textContent);
  assert.deepEqual(texts('how'), [
    '',
    '● compiled',
    '◐ compiled in part',
    '● compiled',
    '○ python',
    '○ calls compiled code'
  ]);
  assert.deepEqual(texts('reason'), [
    '',
    '',
    'break .item() is called',
    '',
    'why',
    'break .item() is called, at line 3'
  ]);
  // Only lines that something in graphs comes from can be chosen.
  assert.deepEqual(
    all('tr[data-line][data-links]').map(each => each.dataset['line']),
    ['2', '3', '4', '6']
  );
});

test('a break and an error are marked at their own lines', () => {
  const report = sample();
  const cell = report['cell'] as IJson;
  const part = (first: number, last: number, reason: string): IJson => ({
    first_line: first,
    last_line: last,
    how: 'compiled',
    reason
  });
  cell['source'] = '%%aotcompile\na = f(x)\nprint(a)\nb = helper(a)\nb.fail()';
  cell['parts'] = [part(2, 4, '`print()` is called'), part(5, 5, 'why not')];
  Object.assign(cell, { error: 'TypeError: no', error_line: 5 });
  const row = (line: number, where: string): IJson => ({
    frame: 'f',
    where,
    cell_line: line,
    words: '`print()` is called'
  });
  const libraryRow = { ...row(2, 'frame.py:7'), words: 'calls pandas', library: 'pandas' };
  report['graph_break_rows'] = [row(3, 'line 3'), row(3, 'line 3'), row(4, 'In [1], line 2'), libraryRow];
  show(report);
  const why = all('table[data-table=cell] td[data-column=reason]');
  assert.deepEqual(
    why.map(each => [...each.children].map(child => child.textContent)),
    [
      [],
      ['calls pandas, at frame.py:7'],
      ['break print() is called'],
      ['break print() is called, at In [1], line 2'],
      ['error TypeError: no', 'why not']
    ]
  );
  const marks = why.flatMap(each => [...each.querySelectorAll<HTMLElement>('.al-mark')]);
  assert.equal(marks[0]?.title, 'Dynamo stopped here, and Python took over: print() is called');
  assert.deepEqual(
    all('.al-ended').map(each => each.dataset['line']),
    ['5']
  );
  // A call of a library without tensors counts as no break.
  assert.ok(all('.al-chip').some(each => each.textContent === '3 breaks'));
  one('[data-tab=breaks]').click();
  assert.equal(all('table[data-table=graph_breaks] tbody tr').length, 3);
  assert.match(text('table[data-table=library_breaks] td[data-column=reason]'), /^calls pandas/);
  view.dispose();
  show({ ...report, graph_break_rows: [libraryRow] });
  assert.equal(one('[data-tab=breaks]').textContent, 'Graph breaks');
  assert.ok(!one('[data-tab=breaks]').classList.contains('al-empty'));
  tab('breaks');
  assert.match(text('[data-panel=breaks]'), /^Graph breaks in libraries and optimizers.*calls pandas/s);
});

test('a cell that failed has a chip, and the reason stands at the line that failed', () => {
  const report = sample();
  const cell = report['cell'] as IJson;
  const reason = 'RuntimeError: 3 is not 4';
  cell['source'] = '%%aotcompile\na = torch.ones(3)\nb = a + torch.ones(4)';
  cell['parts'] = [{ first_line: 2, last_line: 3, how: 'eager', reason }];
  Object.assign(cell, { error: 'RuntimeError: no', error_line: 3 });
  const facts = [{ key: 'error', title: 'ended with', sentence: 'RuntimeError: no (line 3)' }];
  show({ ...report, summary: { sentence: 'Nothing was compiled.', state: 'nothing', facts } });
  assert.ok(all('.al-chip').some(each => each.textContent === 'the cell failed'));
  assert.deepEqual(
    all('table[data-table=cell] td[data-column=reason]').map(each => each.textContent),
    ['', '', `error RuntimeError: no${reason}`]
  );
});

test('an interrupted cell and one without anything to compile have no fault', () => {
  const report = sample();
  const cell = report['cell'] as IJson;
  cell['source'] = '%%aotcompile\nimport torch\nb = a + 1';
  cell['parts'] = [
    { first_line: 2, last_line: 2, how: 'python', reason: 'imports' },
    { first_line: 3, last_line: 3, how: 'not run' }
  ];
  Object.assign(cell, { error: 'KeyboardInterrupt', error_line: 3 });
  const facts = [{ key: 'interrupted', title: 'interrupted', sentence: 'KeyboardInterrupt (line 3)' }];
  show({
    ...report,
    frames: [],
    summary: { sentence: 'Nothing was compiled.', state: 'idle', status: 'interrupted', breaks: 0, facts }
  });
  assert.equal(one('.aotlab-report').querySelectorAll('.al-state-idle').length, 1);
  assert.deepEqual(
    all('.al-chip.al-warn, .al-part.al-warn, .al-part.al-bad, .al-mark.al-bad').map(each => each.textContent),
    []
  );
  assert.ok(all('.al-chip').some(each => each.textContent === 'interrupted'));
  assert.equal(
    all('table[data-table=cell] td[data-column=reason]').at(-1)?.textContent,
    'interrupted KeyboardInterrupt'
  );
});

test('what is saved is that of one call, and a partitioner that does not choose is named once', () => {
  const report = sample();
  const [frame] = report['frames'] as { graphs: IJson[] }[];
  const [graph] = frame?.graphs ?? [];
  const saved = (name: string, nbytes: number): IJson => ({
    name,
    tensor: {},
    nbytes,
    reason: `computed by \`sin\`; the backward needs it for \`${name}\`; this partitioner recomputes nothing`
  });
  const graphs = [
    { ...graph, saved: [saved('a', 8), saved('b', 4)] },
    { ...graph, index: 1, saved: [saved('c', 2)] }
  ];
  show({ ...report, frames: [{ ...frame, graphs }] });
  tab('saved');
  assert.match(
    text('[data-panel=saved] .al-heading'),
    /3 values of 2 graphs; one call of each function keeps at most 12 B of new memory$/
  );
  assert.equal(text('[data-panel=saved]').split('recomputes nothing').length, 2);
  assert.equal(all('table[data-table=saved] td[data-column=reason]')[0]?.textContent, 'needed for a');
});

test('the page says which lines were compared with what', () => {
  const against = 'lines 2–3 compared with Python, line 4 with the captured graph';
  for (const comparison of [against, '']) {
    show({ ...sample(), summary: { against: comparison } });
    for (const name of ['overview', 'verification']) {
      tab(name);
      const paragraphs = all(`[data-panel=${name}] p.al-soft`).map(each => each.textContent);
      assert.equal(paragraphs.includes(against), comparison !== '', name);
      assert.equal(paragraphs.includes(''), false);
    }
    view.dispose();
  }
});

test('the inputs’ table says exactly what was mutated, also outside of the graphs', () => {
  show(sample());
  tab('inputs');
  const cell = (row: string, column: string, table = 'inputs'): string =>
    text(`table[data-table=${table}] tr[data-name="${row}"] td[data-column=${column}]`);
  assert.deepEqual(
    ['name', 'kind', 'tensor', 'nbytes', 'storage', 'autograd'].map(column => cell('x', column)),
    ['x', 'input', 'float32[2, 3]', '24 B', '#0', '']
  );
  const marks = (row: string, table = 'inputs'): (string | null)[] =>
    all(`table[data-table=${table}] tr[data-name="${row}"] .al-marks > *`).map(each => each.textContent);
  assert.deepEqual(marks('x'), ['data mutated', 'under no_grad', 'out of graph']);
  assert.equal(cell('weight', 'happened'), '–');
  assert.equal(cell('weight', 'autograd'), 'requires grad');
  assert.equal(cell('scale', 'tensor'), '2.5');
  assert.equal(cell('scale', 'happened'), '');
  assert.deepEqual(marks('weight.grad', 'outside'), ['data mutated']);
});

test('the inputs of a group stand in one row, which opens', () => {
  const report = sample();
  const [frame] = report['frames'] as IJson[];
  const [graph] = (frame?.['graphs'] ?? []) as IJson[];
  const [x, weight] = (graph?.['inputs'] ?? []) as IJson[];
  assert.ok(graph !== undefined);
  const layers = Array.from({ length: 6 }, (_, index) => ({ ...weight, name: `model.${index}.weight`, group: 0 }));
  // One alias a row, and what was written by itself.
  const others = [
    { ...weight, name: 'model.tied', duplicate_of: 'model.0.weight' },
    { ...x, name: 'model.steps' }
  ];
  graph['inputs'] = [x, ...layers, ...others];
  graph['input_groups'] = [{ title: '6 parameters of model', count: 6, nbytes: 288 }];
  show(report);
  tab('inputs');
  const names = (): (string | null)[] =>
    all('table[data-table=inputs] td[data-column=name]').map(each => each.textContent);
  assert.deepEqual(names(), ['x', '6 parameters of model', 'model.tied', 'model.steps']);
  assert.equal(text('tr[data-group] td[data-column=nbytes]'), '288 B');
  one('button[data-group]').focus();
  one('button[data-group]').click();
  assert.equal(names().length, 10);
  assert.equal(document.activeElement, one('button[data-group][aria-expanded=true]'));
  one('button[data-group]').click();
  assert.equal(names().length, 4);
  // What is sought may stand behind it.
  search('model.3');
  assert.deepEqual(names(), ['model.3.weight']);
  search('');
  assert.equal(names().length, 4);
  sortBy('inputs', 'nbytes');
  assert.equal(names().length, 9);
});

test('what a narrow page has no column for stands below the row’s name', () => {
  show(sample());
  tab('inputs');
  const name = one('table[data-table=inputs] tr[data-name=x] td[data-column=name]');
  assert.equal(name.dataset['below'], 'input · float32[2, 3] · #0');
  const narrowTitles = all('table[data-table=inputs] thead th:not(.al-lesser)').map(each => each.textContent);
  assert.deepEqual(narrowTitles, ['name', 'bytes', 'what happened to it']);
  tab('calls');
  assert.match(
    all('table[data-table=recompiles] tbody td')[0]?.dataset['below'] ?? '',
    /^graph 0 · compiled · reused: yes/
  );
});

test('wrappers are trees: their parts stand below them, and lead to the inputs and outputs of the graph', () => {
  const report = sample();
  const graph = firstGraph(report);
  const [x] = graph['inputs'] as IJson[];
  const [out] = graph['outputs'] as IJson[];
  const plain = { mutates_data: false, mutation_under_no_grad: false, mutation_type: 'not mutated', storage: null };
  const wrapper = (name: string, part_of = ''): IJson[] => [
    { ...x, ...plain, name, part_of, tensor: { ...(x?.['tensor'] as object), type_name: 'a.b.Two' } },
    { ...x, ...plain, name: `${name}.a`, part_of: name, placeholder: `of ${name}`, gradient: 'mm', storage: 7 },
    { ...x, ...plain, name: `${name}.b`, part_of: name, storage: 8 }
  ];
  const weights = [1, 2, 3].flatMap(number => wrapper(`model.w${number}`)).map(row => ({ ...row, group: 0 }));
  graph['input_groups'] = [{ title: '3 tensors of model', count: 3, nbytes: 72 }];
  graph['inputs'] = [...wrapper('t'), ...weights];
  const ownMemory = { base: null, base_kind: null, views: null, relation: 'memory of its own' };
  graph['outputs'] = [
    { ...out, ...ownMemory, name: 'out' },
    { ...out, ...ownMemory, name: 'out.a', part_of: 'out', base: 't.a', node: 'mul', tangent: 'tangents_1' }
  ];
  const span = { role: 'input', start: 0, stop: 24, mutated: false };
  graph['storages'] = [
    {
      number: 7,
      owner: 'input',
      nbytes: 24,
      device: 'cpu',
      spans: [
        { ...span, name: 't.a', part_of: 't' },
        { ...span, name: 'p' }
      ]
    }
  ];
  show(report);
  tab('inputs');
  const names = (): (string | null)[] =>
    all('table[data-table=inputs] td[data-column=name]').map(each => each.textContent);
  assert.deepEqual(names(), ['t', 't.a', 't.b', '3 tensors of model']);
  assert.equal(text('table[data-table=inputs] tr[data-name="t"] .al-below'), 'Two');
  assert.equal(one('tr[data-name="t.a"] .al-part').dataset['depth'], '1');
  assert.equal(text('tr[data-name="t.a"] td[data-column=placeholder]'), 'of t gradient mm');
  assert.match(all('[data-panel=inputs] small')[0]?.textContent ?? '', /^4 inputs, 0 mutated/);
  one('button[data-group]').click();
  assert.equal(names().length, 13);
  tab('outputs');
  assert.equal(text('tr[data-name="out.a"] td[data-column=node]'), 'mul tangents_1');
  assert.match(all('[data-panel=outputs] small')[0]?.textContent ?? '', /^1 output, 1 aliased/);
  tab('storages');
  assert.equal(text('table[data-table=wrappers] tr[data-name=t] td[data-column=parts]'), '.a #7, .b #8');
  assert.equal(text('table[data-table=wrappers] tr[data-name=t] td[data-column=shared]'), 'p');
  assert.match(text('figcaption'), /: a part of t and p$/);
});

test('the outputs’ table says what shares memory with what', () => {
  show(sample());
  tab('outputs');
  const row = 'table[data-table=outputs] tr[data-name="out[1]"]';
  const cells = ['tensor', 'storage', 'autograd', 'relation'].map(column => text(`${row} td[data-column=${column}]`));
  assert.deepEqual(cells, ['float32[2] stride [3]', '#0', '', 'view of input x: x.select(1, 0) alias of input']);
  assert.equal(text(`${row} code`), 'x.select(1, 0)');
  assert.equal(text(`${row} .al-mark`), 'alias of input');
});

test('the storage map draws the bytes that tensors have, hatches what is written, and says it in words', () => {
  show(sample());
  tab('storages');
  const map = one('svg[data-storage="0"]');
  assert.match(
    map.getAttribute('aria-label') ?? '',
    /Storage 0, 24 B on cpu.*input x: bytes 0 to 24, writes 8 of 24 bytes, and some of 4 more; output out\[1\]: bytes 0 to 16 in 2 runs\./
  );
  const spans = [...map.querySelectorAll('g[data-span]')].map(each => [
    each.getAttribute('data-span'),
    each.getAttribute('data-mutated'),
    each.querySelectorAll('rect:not(.al-hatch)').length,
    [...each.querySelectorAll('rect.al-hatch')].map(one => [
      one.classList.item(1),
      ...['x', 'width'].map(name => (parseFloat(one.getAttribute(name) ?? '') * 24) / 100)
    ])
  ]);
  assert.deepEqual(spans, [
    [
      'x',
      'true',
      1,
      [
        ['al-hatch-some', 20, 4],
        ['al-hatch-all', 4, 4],
        ['al-hatch-all', 16, 4]
      ]
    ],
    ['out[1]', 'false', 2, []]
  ]);
  assert.equal(map.querySelectorAll('g[data-span=x] .al-element-input').length, 5);
});

test('of a report that does not say which bytes are written, the whole tensor is hatched', () => {
  const old = sample();
  const [storage] = firstGraph(old)['storages'] as IJson[];
  delete storage?.['written'];
  delete (storage?.['spans'] as IJson[])[0]?.['writes'];
  show(old);
  tab('storages');
  assert.match(one('svg[data-storage="0"]').getAttribute('aria-label') ?? '', /input x: bytes 0 to 24, mutated;/);
  assert.equal(all('g[data-span=x] rect.al-hatch-all').length, 1);
});

test('a storage of one tensor that is not written is a line that opens to a table', () => {
  show(sample());
  tab('storages');
  assert.equal(all('svg[data-storage="1"]').length, 0);
  assert.equal(text('[data-panel=storages] summary'), '1 storage with one tensor, unwritten: 48 B');
});

test('of a report that was cut, groups and headings have the numbers of the whole report', () => {
  const report = sample(2);
  const graph = firstGraph(report);
  const [x, weight] = graph['inputs'] as IJson[];
  const [frame] = report['frames'] as IJson[];
  assert.ok(frame !== undefined);
  graph['inputs'] = [x, { ...weight, name: 'net.0', group: 0 }, { ...weight, name: 'net.1', group: 0 }];
  graph['input_groups'] = [{ title: '40 parameters of net', count: 40, nbytes: 902_144 }];
  graph['storage_groups'] = [{ title: '40 storages with one tensor each, unwritten', count: 40, nbytes: 902_144 }];
  const counts = { inputs: 43, mutated: 3, storages: 42, storage_bytes: 902_244, saved: 70, saved_bytes: 1024 };
  graph['counts'] = counts;
  frame['counts'] = { graphs: 7, refusals: 4, compile_ns: 9, recompiles: 6 };
  const head = {
    sentence: 'Compiled.',
    state: 'verified',
    status: 'equal to eager',
    graphs: 7,
    recompiles: 6,
    refused: 4
  };
  report['summary'] = { ...head, listed: 7, counts: { ...counts, inputs: 301, saved: 490 } };
  show(report);
  const options = all('[data-key=graphs] option').map(each => each.textContent);
  assert.deepEqual(
    [options[0], options.at(-1)],
    ['All 7 graphs', '5 more graphs, cut from this output to fit a notebook.']
  );
  tab('inputs');
  const remark = (panel: string): string | null | undefined =>
    all(`[data-panel=${panel}] .al-heading small`)[0]?.textContent;
  assert.equal(remark('inputs'), '301 inputs of 7 graphs, 3 mutated');
  assert.equal(text('button[data-group]'), '40 parameters of net');
  assert.equal(text('tr[data-group] td[data-column=nbytes]'), '881 KiB');
  assert.equal(one('[data-panel=inputs] [data-cut]').dataset['cut'], String(301 - 3 - 38 - 3));
  one('button[data-group]').click();
  assert.equal(one('[data-panel=inputs] [data-cut]').dataset['cut'], String(301 - 3 - 3));
  tab('saved');
  assert.match(remark('saved') ?? '', /^490 values of 7 graphs; one call of each function keeps at most 1.00 KiB/);
  tab('storages');
  assert.match(text('[data-panel=storages]'), /40 storages with one tensor each, unwritten: 881 KiB/);
  assert.match(text('[data-panel=storages]'), /5 more graphs, cut from this output/);
  tab('calls');
  assert.equal(remark('calls'), '7, 6 of them recompiles');
  assert.match(text('[data-panel=calls]'), /4 compilations/);
});

test('code is put on the page when its fold is opened', async () => {
  show(sample());
  tab('stages');
  const details = one('details[data-stage=trace]');
  assert.equal(details.querySelector('.al-codebox'), null);
  const toggled = new Promise(resolve => details.addEventListener('toggle', resolve));
  (details as HTMLDetailsElement).open = true;
  await toggled;
  assert.equal(details.querySelector('.al-lines')?.textContent, 'def forward(x):  # a.py:7\n    return x\n');
  // What was open stays open when the report changes.
  source.update({ reading: readReport(counted({ ...sample(), name: 'again' })) });
  assert.equal((one('details[data-stage=trace]') as HTMLDetailsElement).open, true);
  assert.notEqual(one('details[data-stage=trace]').querySelector('.al-codebox'), null);
});

test('backwards that were compiled later stand in one fold, with their code', async () => {
  const report = sample();
  const graph = firstGraph(report);
  const [stage] = graph['stages'] as IJson[];
  const backward = (tangent: number): IJson => ({ ...stage, name: 'backward', summary: `for tangents ${tangent}` });
  graph['stages'] = [stage, backward(1), backward(2)];
  show(report);
  tab('stages');
  assert.equal(all('details[data-stage=trace]').length, 1);
  assert.equal(all('details[data-stage=backward]').length, 0);
  const fold = one('[data-key^="fold backwards"]').closest('details');
  assert.ok(fold !== null);
  const toggled = new Promise(resolve => fold.addEventListener('toggle', resolve));
  fold.open = true;
  await toggled;
  assert.equal(fold.querySelectorAll('details[data-stage=backward]').length, 2);
});

test('why a value is kept comes first, not its name again', () => {
  const report = sample();
  const row = (name: string, reason: string, is_input: boolean): IJson => ({
    name,
    tensor: null,
    nbytes: 4,
    line: null,
    reason,
    is_input
  });
  firstGraph(report)['saved'] = [
    row('primals_1', 'the input `model.weight`; the backward needs it for `mm`', true),
    row('relu', 'computed by `relu`; the backward needs it for `mul`', false),
    { ...row('view', 'computed by `view`; the backward needs it for `sin`', false), shares: 'relu' }
  ];
  show(report);
  tab('saved');
  assert.deepEqual(
    all('table[data-table=saved] td[data-column=reason]').map(each => each.textContent),
    ['an input needed for mm', 'needed for mul', 'memory of relu needed for sin']
  );
  assert.match(text('[data-panel=saved]'), /3 values, 4 B of new memory; 4 B that the caller holds anyway/);
});

test('stages, saved tensors, kernels and graph breaks have tabs of their own', () => {
  show(sample());
  tab('stages');
  assert.deepEqual(
    all('table[data-table=stages] td').map(each => each.textContent),
    ['trace', '1.00 ms', '', '4', 'traced']
  );
  tab('saved');
  assert.deepEqual(
    all('table[data-table=saved] td').map(each => each.textContent),
    ['mm', '', 'float32[2, 4]', '32 B', 'read by relu’s backward']
  );
  tab('kernels');
  assert.equal(text('details[data-kernel=kernel_0] small'), 'c++ · forward · g · from the cache on disk');
  tab('breaks');
  assert.match(text('table[data-table=graph_breaks] td[data-column=reason]'), /^print\(\) is called/);
});

test('recompiles have reasons, refusals outcomes, and calls are counted', () => {
  show(sample(2));
  tab('calls');
  const reasons = all('table[data-table=recompiles] td[data-column=reason]').map(each => each.textContent);
  assert.deepEqual(reasons, ['the first', 'graph 0: x has another shape.']);
  assert.equal(text('[data-advice]'), 'To avoid recompiles for x.size(0): pad.');
  assert.deepEqual(
    all('td[data-column=reused]').map(each => each.textContent),
    ['yes', 'no']
  );
  assert.equal(text('table[data-table=refusals] td[data-column=outcome]'), 'ran eagerly');
  assert.deepEqual(
    all('[data-count]').map(each => each.textContent),
    ['3 in all', '2 compiled', '1 eager']
  );
  assert.equal(all('[data-call]').length, 3);
});

test('timings stand beside eager, with the ratios, and what is noise says so first', () => {
  show(sample());
  tab('timing');
  const rows = all('table[data-table=timings] tr[data-name]').map(row => [
    row.dataset['name'],
    row.querySelector('[data-column=median_ns]')?.textContent,
    row.querySelector('[data-column=ratio]')?.textContent
  ]);
  assert.deepEqual(rows, [
    ['eager', '2.00 µs', ''],
    ['aotlab', '1.00 µs', 'noise: 0.50× eager (0.25–1.50)0.75× torch.compile (0.70–0.80)']
  ]);
  assert.equal(text('table[data-table=timings] small'), '9 calls in 9 rounds, 1% noise');
  assert.equal(text('table[data-table=timings] [data-noise]'), 'Too close to call: it changed.');
});

const phase = (name: string, start: number, length: number, fields: object = {}): object => ({
  phase: name,
  stage: 'rest of Dynamo',
  frame: 'step',
  graph: 0,
  start_ns: start,
  duration_ns: length,
  own_ns: length,
  ...fields
});

const phases = (): string[] =>
  all('.al-phase').map(bar => {
    const label = bar.querySelector('.al-phase-label')?.textContent ?? '';
    return [bar.dataset['name'], bar.getAttribute('x'), bar.getAttribute('width'), bar.getAttribute('y'), label].join(
      ' '
    );
  });

function pressKey(key: string): void {
  const focused = document.activeElement;
  focused?.dispatchEvent(new dom.window.KeyboardEvent('keydown', { key, bubbles: true, cancelable: true }));
}

test('the time line nests phases, joins narrow ones, and leaves out the time without an activity', () => {
  const narrow = Array.from({ length: 50 }, (_, index) => phase('pass', 10 * index, 5, { depth: 2, own_ns: 0 }));
  show({
    ...sample(),
    timing_rows: [],
    timeline_rows: [
      phase('dynamo', 0, 1_000_000, { own_ns: 600_000, engine: 'upstream' }),
      phase('compile_file', 300_000, 400_000, { depth: 1, stage: 'compilation of kernels' }),
      ...narrow,
      phase('compile_file', 500_000, 100_000, { thread: 1, frame: null, graph: null }),
      phase('unknown <b>', 9_000_000, 1_000_000, { stage: 'news' })
    ]
  });
  tab('timing');
  const names = phases();
  assert.deepEqual(names.slice(0, 4), [
    'dynamo 0% 49.4% 18 dynamo: step · graph 0',
    'unknown <b> 50.6% 49.4% 18 unknown <b>: step · graph 0',
    'compile_file 14.82% 19.76% 35 compile_file',
    'pass 0% 0.1% 52 '
  ]);
  assert.equal(names.length, 5);
  assert.deepEqual(
    all('.al-timeline .al-lane').map(each => each.textContent),
    ['another thread']
  );
  assert.equal(text('.al-left-out title'), '8.00 ms without an activity');
  const titles = all('.al-phase > title').map(each => each.textContent);
  assert.equal(titles[0], 'dynamo: 1.00 ms, 600 µs of it its own · rest of Dynamo · step · graph 0');
  assert.equal(titles[3], '50 phases, 250 ns: pass');
  assert.match(titles[4] ?? '', /in another thread/);
  assert.equal(all('.al-layer-kernels.al-phase').length, 1);
  assert.equal(all('.al-layer-other.al-phase').length, 1);
  assert.deepEqual(
    all('.al-tick').map(each => each.textContent),
    ['0.0 ms', '0.5 ms', '1.0 ms', '9.5 ms']
  );
});

test('a phase of the time line is chosen with the mouse or with keys', () => {
  const rows = [phase('dynamo', 0, 100), phase('a', 0, 40, { depth: 1 }), phase('b', 50, 50, { depth: 1 })];
  show({ ...sample(), timeline_rows: rows });
  tab('timing');
  assert.equal(all('.al-phase[tabindex="0"]').length, 1);
  (one('.al-phase[tabindex="0"]') as HTMLElement).focus();
  assert.match(text('.al-timeline figcaption'), /^dynamo: 100 ns/);
  pressKey('ArrowDown');
  assert.match(text('.al-timeline figcaption'), /^a: 40 ns/);
  pressKey('ArrowRight');
  pressKey('ArrowRight');
  assert.match(text('.al-timeline figcaption'), /^b: 50 ns/);
  pressKey('Enter');
  assert.deepEqual(phases(), ['dynamo 0% 100% 18 dynamo: step · graph 0', 'b 0% 100% 35 b']);
  assert.equal(document.activeElement?.getAttribute('data-name'), 'b');
  pressKey('ArrowUp');
  assert.match(text('.al-timeline figcaption'), /^dynamo: 100 ns/);
  pressKey('Escape');
  assert.equal(phases().length, 3);
  all('.al-phase')[1]?.dispatchEvent(new dom.window.MouseEvent('click', { bubbles: true }));
  assert.equal(phases().length, 2);
  one('[data-action=whole]').click();
  assert.equal(phases().length, 3);
});

test('graph breaks and recompiles are marks of the time line, with their reasons below it', () => {
  const reason = '`x.size(0)` is 6 where <b> was 4';
  const moments = [
    phase('`print()` is called, at In [1], line 6', 20, 0, { stage: 'graph break', frame: null, graph: null }),
    phase(reason, 50, 0, { stage: 'recompile' })
  ];
  show({ ...sample(), timeline_rows: [phase('trace', 0, 100, { stage: 'trace', engine: 'aotlab' }), ...moments] });
  tab('timing');
  assert.deepEqual(phases(), ['trace 0% 100% 18 trace: step · graph 0']);
  assert.deepEqual(
    all('[data-moment]').map(
      each => `${each.getAttribute('data-moment')} ${each.querySelector('line')?.getAttribute('x1')}`
    ),
    ['graph break 20%', 'recompile 50%']
  );
  assert.deepEqual(
    all('.al-moments li').map(each => each.textContent),
    [
      '✂ 20 ns graph break: print() is called, at In [1], line 6',
      `↻ 50 ns recompile of step · graph 0: ${reason.replaceAll('`', '')}`
    ]
  );
});

test('without phases there is no time line; a chosen graph has its own', () => {
  show(sample());
  tab('timing');
  assert.equal(all('.al-timeline').length, 0);
  view.dispose();
  const other = phase('other', 100, 100, { graph: 1 });
  show({ ...sample(2), timeline_rows: [phase('dynamo', 0, 100), other] });
  tab('timing');
  assert.equal(phases().length, 2);
  const list = one('[data-key=graphs]') as HTMLSelectElement;
  list.value = 'step/1';
  list.dispatchEvent(new dom.window.Event('change'));
  assert.deepEqual(phases(), ['other 0% 100% 18 other: step · graph 1']);
});

test('a timing of few rounds says so in the place of a ratio', () => {
  const [eager, ours] = sample().timing_rows as [object, object];
  show({
    ...sample(),
    timing_rows: [eager, { ...ours, ratios: [], again: 0, incomparable: 'not comparable: 2 rounds' }]
  });
  tab('timing');
  assert.deepEqual(
    all('[data-column=ratio]').map(each => each.textContent),
    ['', 'not comparable: 2 rounds']
  );
});

test('differences come before everything that was compared', () => {
  show(sample());
  tab('verification');
  const tables = all('table').map(each => each.dataset['table']);
  assert.deepEqual(tables, ['differences', 'verification']);
  assert.equal(text('table[data-table=differences] td[data-column=sentence]'), 'strides differ');
  assert.equal(all('table[data-table=verification] tbody tr').length, 2);
});

test('the reader chooses one of several graphs', () => {
  show(sample(3));
  tab('inputs');
  const graphs = (): string[] => [
    ...new Set(all('table[data-table=inputs] tr[data-graph]').map(each => each.dataset['graph'] ?? ''))
  ];
  assert.deepEqual(graphs(), ['0', '1', '2']);
  assert.equal(all('table[data-table=inputs]').length, 1);
  assert.deepEqual(
    all('tr[data-name=x] td[data-column=graph]').map(each => each.textContent),
    ['step · 0', 'step · 1', 'step · 2']
  );
  const select = one('select') as HTMLSelectElement;
  select.value = 'step/1';
  select.dispatchEvent(new dom.window.Event('change'));
  assert.deepEqual(graphs(), ['1']);
  // The choice outlives a change of the report.
  source.update({ reading: readReport(counted(sample(4))) });
  assert.deepEqual(graphs(), ['1']);
});

/** A report whose one graph has so many nodes; the later ones are larger. */
function withNodes(count: number): IJson {
  const report = sample();
  const [graph] = ((report['frames'] as IJson[])[0]?.['graphs'] ?? []) as IJson[];
  assert.ok(graph !== undefined);
  const line = { file: '/home/user/a.py', line: 7, function: 'step', code: 'y = x @ w' };
  graph['nodes'] = Array.from({ length: count }, (_, index) => ({
    stage: 'trace',
    part: 'joint',
    name: `mm_${index}`,
    target: 'aten.mm.default',
    phase: 'forward',
    dtype: 'float32',
    shape: [2, index],
    nbytes: 8 * index,
    line,
    module: 'h.3.mlp'
  }));
  return report;
}

async function openNodes(): Promise<void> {
  tab('stages');
  const details = one('details[data-nodes]') as HTMLDetailsElement;
  const toggled = new Promise(resolve => details.addEventListener('toggle', resolve));
  details.open = true;
  await toggled;
}

function rows(table: string): (string | undefined)[] {
  return all(`table[data-table=${table}] tr[data-name]`).map(row => row.dataset['name']);
}

function sortBy(table: string, column: string): void {
  one(`table[data-table=${table}] th[data-sort=${column}] button`).click();
}

function search(words: string): void {
  const input = one('[type=search]') as HTMLInputElement;
  input.value = words;
  input.dispatchEvent(new dom.window.Event('input'));
}

test('of a long table only the rows in sight stand in the page, and the reader’s place outlives a change', async () => {
  show(withNodes(3000));
  await openNodes();
  assert.equal(one('table[data-table=nodes]').getAttribute('aria-rowcount'), '3001');
  assert.ok(rows('nodes').length < 100);
  assert.equal(rows('nodes')[0], 'mm_0');
  const box = (): HTMLElement => one('details[data-nodes] .al-scroll');
  box().scrollTop = 2990 * 24;
  box().dispatchEvent(new dom.window.Event('scroll'));
  assert.equal(rows('nodes').at(-1), 'mm_2999');
  assert.ok(rows('nodes').length < 100);
  assert.equal(one('tr[data-name=mm_2999]').getAttribute('aria-rowindex'), '3001');
  const heights = all('tr.al-space').map(row => parseInt(row.style.height));
  assert.equal(heights[0], (3000 - rows('nodes').length) * 24);
  source.update({ reading: readReport(counted({ ...withNodes(3000), name: 'again' })) });
  await Promise.resolve();
  assert.equal(rows('nodes').at(-1), 'mm_2999');
  assert.equal(box().scrollTop, 2990 * 24);
});

test('a column sorts up, down and back, numbers by number', async () => {
  show(withNodes(12));
  await openNodes();
  const order = rows('nodes');
  const header = (): (string | null)[] =>
    ['nbytes', 'name'].map(name => one(`table[data-table=nodes] th[data-sort=${name}]`).getAttribute('aria-sort'));
  sortBy('nodes', 'nbytes');
  assert.deepEqual(header(), ['ascending', 'none']);
  sortBy('nodes', 'nbytes');
  assert.deepEqual(header(), ['descending', 'none']);
  assert.deepEqual(rows('nodes'), [...order].reverse());
  source.update({ reading: readReport(counted({ ...withNodes(12), name: 'again' })) });
  assert.deepEqual(rows('nodes'), [...order].reverse());
  sortBy('nodes', 'nbytes');
  assert.deepEqual(header(), ['none', 'none']);
  assert.deepEqual(rows('nodes'), order);
  // Names with numbers come as people count.
  sortBy('nodes', 'name');
  assert.deepEqual(rows('nodes'), order);
  tab('inputs');
  sortBy('inputs', 'storage');
  assert.deepEqual(rows('inputs'), ['x', 'weight', 'scale']);
  sortBy('inputs', 'storage');
  // What has no value comes last either way.
  assert.deepEqual(rows('inputs'), ['weight', 'x', 'scale']);
});

test('a table is searched in all its cells, and the notebook hears nothing of it', async () => {
  show(withNodes(370));
  let notebookKeys = 0;
  document.body.addEventListener('keydown', () => {
    notebookKeys += 1;
  });
  await openNodes();
  press(one('[type=search]'), 'd');
  assert.equal(notebookKeys, 0);
  assert.equal(text('details[data-nodes] [role=status]'), '');
  search('MM_36 trace');
  assert.equal(text('details[data-nodes] [role=status]'), '11 of 370');
  assert.deepEqual(rows('nodes').slice(0, 2), ['mm_36', 'mm_360']);
  one('[type=search]').focus();
  source.update({ reading: readReport(counted({ ...withNodes(370), name: 'again' })) });
  assert.equal(rows('nodes').length, 11);
  assert.equal(document.activeElement, one('[type=search]'));
  search('[2, 17]');
  assert.deepEqual(rows('nodes'), ['mm_17']);
  search('nothing like this');
  assert.deepEqual(rows('nodes'), []);
  search('');
  assert.equal(rows('nodes')[0], 'mm_0');
  // Short tables have nothing to search.
  tab('inputs');
  assert.equal(all('[type=search]').length, 0);
});

test('the rows that are shown are copied as text, also where the page may not write to the clipboard', async () => {
  show(withNodes(370));
  await openNodes();
  search('mm_36');
  sortBy('nodes', 'nbytes');
  sortBy('nodes', 'nbytes');
  const clipboardTexts: string[] = [];
  Object.assign(document, {
    execCommand: () => {
      clipboardTexts.push((one('textarea') as HTMLTextAreaElement).value);
      return true;
    }
  });
  one('details[data-nodes] .al-copy').click();
  await new Promise(resolve => setTimeout(resolve));
  assert.equal(text('details[data-nodes] .al-copy'), 'Copied');
  assert.equal(all('textarea').length, 0);
  const lines = (clipboardTexts[0] ?? '').split('\n');
  assert.equal(lines.length, 12);
  assert.equal(lines[0], 'name\tstage\tgraph\tphase\top\tmodule\tvalue\tline\tbytes\tcode');
  assert.equal(
    lines[1],
    'mm_369\ttrace\tjoint\tforward\taten.mm.default\th.3.mlp\tfloat32[2, 369]\ta.py:7\t2.88 KiB\ty = x @ w'
  );
});

test('the largest saved value comes first, with the module that made it', () => {
  const report = sample();
  const [graph] = ((report['frames'] as IJson[])[0]?.['graphs'] ?? []) as IJson[];
  assert.ok(graph !== undefined);
  const [mm] = graph['saved'] as IJson[];
  graph['saved'] = [mm, { ...mm, name: 'tanh', nbytes: 64, module: 'h.3.mlp' }, { ...mm, name: 'view', nbytes: 48 }];
  show(report);
  tab('saved');
  assert.deepEqual(rows('saved').slice(0, 3), ['tanh', 'view', 'mm']);
  const modules = all('table[data-table=saved] td[data-column=module]').map(each => each.textContent);
  assert.deepEqual(modules.slice(0, 3), ['h.3.mlp', '', '']);
});

test('every column of every table says on hover what it means', () => {
  const report = withNodes(9);
  show({ ...report, time_rows: ['trace', 'rest'].map(kind => ({ kind, duration_ns: 5, count: 1 })) });
  for (const name of NAMES) {
    tab(name);
    for (const details of all('details')) {
      (details as HTMLDetailsElement).open = true;
      details.dispatchEvent(new dom.window.Event('toggle'));
    }
    const silent = all('th[scope=col]').filter(heading => heading.title === '');
    assert.deepEqual(
      silent.map(each => `${name}: ${each.textContent}`),
      []
    );
  }
  tab('inputs');
  assert.equal(one('table[data-table=inputs] th[data-sort=name]').title, "The caller's name for the argument");
});

test('nodes, which no notebook holds, are asked for when their fold is opened, and kept', async () => {
  show(withNodes(0));
  assert.equal(all('details[data-nodes]').length, 0);
  const requests: unknown[] = [];
  source.onAsk = request => requests.push(request);
  source.receive({ kind: 'report', report: withNodes(0) });
  requests.length = 0;
  await openNodes();
  assert.match(text('details[data-nodes] .al-inside'), /asked/);
  assert.deepEqual(requests, [{ kind: 'nodes', frame: 'step', index: 0 }]);
  const [graph] = ((withNodes(3)['frames'] as IJson[])[0]?.['graphs'] ?? []) as IJson[];
  source.receive({ kind: 'nodes', frame: 'step', index: 0, nodes: graph?.['nodes'] });
  assert.deepEqual(rows('nodes'), ['mm_0', 'mm_1', 'mm_2']);
  source.receive({ kind: 'report', report: withNodes(0) });
  assert.deepEqual(rows('nodes'), ['mm_0', 'mm_1', 'mm_2']);
  assert.equal(requests.length, 1);
});

test('arrows move between tabs, and the notebook hears nothing of them', () => {
  show(sample());
  let notebookKeys = 0;
  document.body.addEventListener('keydown', () => {
    notebookKeys += 1;
  });
  const openPanel = (): string | undefined => one('[role=tabpanel]:not([hidden])').dataset['panel'];
  press(one('[data-tab=overview]'), 'ArrowRight');
  assert.equal(openPanel(), 'inputs');
  assert.equal(document.activeElement, one('[data-tab=inputs]'));
  press(one('[data-tab=inputs]'), 'End');
  assert.equal(openPanel(), 'verification');
  press(one('[data-tab=verification]'), 'ArrowRight');
  assert.equal(openPanel(), 'overview');
  assert.equal(notebookKeys, 0);
  press(one('[data-tab=overview]'), 's');
  assert.equal(notebookKeys, 1);
  assert.deepEqual(
    all('[role=tab]').map(each => each.tabIndex),
    NAMES.map((_, index) => (index === 0 ? 0 : -1))
  );
});

test('only a live report offers to measure, and says how far it is', () => {
  show(sample());
  tab('timing');
  assert.equal(all('[data-action=measure]').length, 0);
  let requestCount = 0;
  source.onAsk = () => {
    requestCount += 1;
  };
  source.receive({ kind: 'report', report: sample() });
  assert.equal(one('.aotlab-report').dataset['live'], 'true');
  one('[data-action=measure]').click();
  one('[data-action=measure]').click();
  assert.equal(requestCount, 1);
  source.receive({ kind: 'progress', text: 'step, forward' });
  assert.equal(text('.al-measuring [role=status]'), 'step, forward');
  source.receive({ kind: 'error', message: 'no memory' });
  assert.match(text('.al-measuring [role=status]'), /no memory/);
  assert.equal((one('[data-action=measure]') as HTMLButtonElement).disabled, false);
  source.leave();
  assert.equal(one('.aotlab-report').dataset['live'], 'false');
  assert.equal(all('[data-action=measure]').length, 0);
});

const STEP = { phase: 'trace', stage: 'trace', frame: 'step', graph: 0, start_ns: 1e9, duration_ns: 2e9 };

/** What a running cell does: the second of two steps. */
function runningState(text: string, done: number): IJson {
  return { text, kind: 'compile', since_ns: 3e9, elapsed_ns: 65e9, kernels: 7, kernels_done: done, steps: [STEP] };
}

test('a running cell says what it does, with seconds, steps and kernels', () => {
  show({ ...sample(), running: runningState('Inductor compiles f', 2) });
  assert.match(text('.al-status'), /^◌ 1 min 5 s · Inductor compiles f$/);
  const rows = all('[data-table=steps] tr').map(row => [...row.children].map(cell => cell.textContent));
  assert.deepEqual(rows, [
    ['✓ Trace', 'step · graph 0', '2.00 s'],
    ['◌ Inductor compiles f', '', '1 min 2 s']
  ]);
  const bar = one('progress') as HTMLProgressElement;
  assert.deepEqual([bar.value, bar.max], [2, 7]);
});

test('a change of the running cell leaves the rest of the page in its place', () => {
  show({ ...sample(), running: runningState('first', 0) });
  source.update({ live: true });
  const { running } = readReport({ ...sample(), running: runningState('second', 5) }).report ?? { running: null };
  const [chip, panel] = [one('[data-chip=inputs]'), one('[data-table=cell]')];
  source.follow(running);
  assert.match(text('.al-status'), /second$/);
  assert.match(text('[data-name=now]'), /second/);
  assert.deepEqual([one('[data-chip=inputs]'), one('[data-table=cell]')], [chip, panel]);
  source.receive({ kind: 'report', report: counted(sample()) });
  assert.equal(all('.al-now, [data-table=steps]').length, 0);
  // A late message about the run does not bring the running cell back.
  source.follow(running);
  assert.equal(all('.al-now, [data-table=steps]').length, 0);
});

test('the seconds go on while the kernel answers, and stand still if it does not', async () => {
  const before = performance.now.bind(performance);
  let now = 1000;
  performance.now = () => now;
  try {
    show({ ...sample(), running: runningState('f', 0) });
    now += 3000;
    await new Promise(resolve => setTimeout(resolve, 700));
    assert.equal(text('.al-now time'), '1 min 5 s');
    source.update({ live: true });
    now += 3000;
    await new Promise(resolve => setTimeout(resolve, 700));
    assert.equal(text('.al-now time'), '1 min 11 s');
  } finally {
    performance.now = before;
  }
});

test('a report that cannot be read is one line, and the next report is drawn', () => {
  const root = show({ version: 99, environment: {} });
  assert.equal(root.dataset['state'], 'unreadable');
  assert.match(root.textContent ?? '', /^! This report has version 99/);
  source.update({ reading: readReport(counted(sample())) });
  assert.equal(all('[role=tab]').length, NAMES.length);
});

test('damage and notes are said in the overview', () => {
  show({ ...sample(), notes: ['cut `to` fit'], graph_break_rows: 'none' });
  assert.deepEqual(
    all('.al-note').map(each => each.textContent),
    [
      'cut to fit',
      'This report is damaged; what could not be read is left out. First: $.graph_break_rows should be a list.'
    ]
  );
});

test('nothing in a report becomes markup', () => {
  const attack = '"><img src=x onerror="alert(1)"><script>alert(2)</script>';
  const poison = (value: unknown, key = ''): unknown => {
    if (typeof value === 'string') {
      // What the view compares with is left alone, so that every table is drawn.
      return ['status', 'state', 'role', 'output_type', 'engine', 'phase', 'how'].includes(key) ? value : attack;
    }
    if (Array.isArray(value)) {
      return value.map(each => poison(each));
    }
    if (typeof value === 'object' && value !== null) {
      return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, poison(each, name)]));
    }
    return value;
  };
  show(poison(counted({ ...sample(2), notes: ['a note'] })) as IJson);
  for (const name of NAMES) {
    tab(name);
    for (const details of all('details')) {
      (details as HTMLDetailsElement).open = true;
      details.dispatchEvent(new dom.window.Event('toggle'));
    }
    assert.deepEqual(
      all('img, script, iframe, object, a').map(each => each.outerHTML),
      []
    );
    const handlers = all('*').flatMap(each => each.getAttributeNames().filter(attribute => attribute.startsWith('on')));
    assert.deepEqual(handlers, []);
  }
  tab('inputs');
  assert.equal(all('table[data-table=inputs] td[data-column=name]')[0]?.textContent, attack);
});

test('a cell that compiled nothing says so first, and every panel has words', () => {
  const report = { ...sample(), frames: [], timing_rows: [], verification_rows: [], graph_break_rows: [], cell: null };
  show({ ...report, summary: { state: 'nothing' } });
  for (const name of NAMES) {
    tab(name);
    assert.notEqual(text(`[data-panel=${name}]`).trim(), '');
  }
});

test('what was refused is said to be refused, not to have mutated nothing', () => {
  const report = sample();
  const [frame] = report['frames'] as IJson[];
  const [graph] = (frame?.['graphs'] ?? []) as IJson[];
  assert.ok(graph !== undefined);
  Object.assign(graph, { status: 'refused', stages: [], outputs: [], training: null });
  graph['inputs'] = [{ name: 'x', kind: 'input', tensor: { dtype: 'float32', device: 'cpu', shape: [], stride: [] } }];
  const span = { name: 'x', role: 'input', start: 0, stop: 24, mutated: null };
  graph['storages'] = [{ number: 0, owner: 'input', nbytes: 24, device: 'cpu', spans: [span], written: null }];
  graph['storage_groups'] = [];
  show({ ...report, cell: null });
  assert.deepEqual(
    all('[data-fact]').map(each => each.textContent),
    []
  );
  tab('inputs');
  assert.equal(text('tr[data-name=x] td[data-column=happened]'), 'not traced');
  assert.match(text('[data-panel=inputs] .al-heading:first-child'), /1 input, not traced$/);
  tab('storages');
  assert.match(text('[data-panel=storages] figcaption'), /^#0 24 B/);
});

test('a cut report counts what the whole one held, and says what is missing', () => {
  const report = sample();
  const [frame] = report['frames'] as IJson[];
  const [graph] = (frame?.['graphs'] ?? []) as IJson[];
  assert.ok(frame !== undefined && graph !== undefined);
  graph['counts'] = { inputs: 2900, mutated: 31, saved: 370, saved_bytes: 2 ** 20 };
  frame['counts'] = { graphs: 71, refusals: 0, compile_ns: 5e9 };
  const facts = [{ key: 'saved', title: 'saved for backward', sentence: '370 values, 1.00 MiB of new memory' }];
  show({
    ...report,
    summary: { sentence: 'fine', state: 'verified', facts, compared: 4000, different: 1, listed: 71 }
  });
  assert.equal(text('[data-fact=saved]'), '370 values, 1.00 MiB of new memory');
  assert.match(text('table[data-table=frames] td[data-column=graphs]'), /^71$/);
  tab('inputs');
  assert.match(text('[data-panel=inputs] .al-heading:first-child'), /2,900 inputs of 71 graphs, 31 mutated/);
  assert.match(text('[data-panel=inputs] [data-cut]'), /more rows, cut from this output/);
  tab('saved');
  assert.match(
    text('[data-panel=saved]'),
    /370 values of 71 graphs; one call of each function keeps at most 1.00 MiB of new memory/
  );
  tab('verification');
  assert.match(text('[data-panel=verification] .al-counts'), /1 of 4,000 differ/);
  view.dispose();
  show({ ...report, verification_rows: [], summary: { sentence: 'fine', state: 'verified', compared: 36 } });
  tab('verification');
  assert.equal(text('[data-panel=verification] .al-mark'), 'all 36 observables equal');
  assert.match(text('[data-panel=verification]'), /a kernel that has the report lists them/);
});

test('while the kernel answers, what was cut is asked for once, and shown', () => {
  const cut = sample();
  const [frame] = cut['frames'] as IJson[];
  const [graph] = (frame?.['graphs'] ?? []) as IJson[];
  assert.ok(frame !== undefined && graph !== undefined);
  const whole = firstGraph(counted(cut));
  graph['inputs'] = [];
  Object.assign(graph, { counts: { inputs: 3 }, cut: true });
  frame['counts'] = { graphs: 2 };
  const rows = cut['verification_rows'] as IJson[];
  const note = 'This output is cut to fit a notebook: 0 of 3 inputs.';
  const summary = { sentence: 'fine', state: 'verified', compared: rows.length, outside: 2, status: 'equal to eager' };
  show({ ...cut, verification_rows: [], notes: [note], summary });
  assert.equal(text('.al-note'), note);
  const requests: unknown[] = [];
  source.onAsk = request => requests.push(request);
  tab('inputs');
  assert.deepEqual(requests, []); // nobody answers
  source.receive({ kind: 'report', report: counted({ ...cut, verification_rows: [], notes: [note], summary }) });
  assert.equal(all('.al-note').length, 0);
  const name = frame['name'];
  assert.deepEqual(requests, [
    { kind: 'outside' },
    { kind: 'graph', frame: name, index: 0 },
    { kind: 'graph', frame: name, index: 1 }
  ]);
  source.receive({
    kind: 'outside',
    rows: [
      { name: 'a.grad', kind: 'new' },
      { name: 'b', mutates_data: true }
    ]
  });
  assert.deepEqual(
    all('table[data-table=outside] tbody tr').map(row => row.dataset['name']),
    ['a.grad', 'b']
  );
  assert.equal(all('tr[data-name=x]').length, 0);
  source.receive({ kind: 'graph', frame: name as string, graph: { ...whole, index: 1 } });
  source.receive({ kind: 'graph', frame: name as string, graph: whole });
  assert.equal(all('tr[data-name=x]').length, 2);
  tab('verification');
  source.receive({ kind: 'verification', rows });
  assert.equal(all('table[data-table=verification] tbody tr').length, rows.length);
  assert.equal(requests.length, 4);
  // Another report may be cut elsewhere.
  source.receive({ kind: 'report', report: counted({ ...cut, verification_rows: [], summary }) });
  assert.equal(requests.length, 5);
});

test('what the kernel sends leaves a button that is being pressed in its place', () => {
  show(sample(2));
  const buttons = all('[role=tab], [data-chip]');
  source.update({ live: true });
  source.update({ reading: readReport(counted({ ...sample(2), name: 'again' })) });
  assert.deepEqual(
    all('[role=tab], [data-chip]').map((each, index) => each === buttons[index]),
    buttons.map(() => true)
  );
  assert.match(text('.al-environment'), /live.*again/);
  tab('outputs');
  assert.equal(one('[role=tabpanel]:not([hidden])').dataset['panel'], 'outputs');
});

test('when disposed, the view leaves nothing behind', () => {
  const root = show(sample());
  view.dispose();
  assert.equal(host.childNodes.length, 0);
  // Nor does it draw what nobody sees.
  const before = root.innerHTML;
  source.update({ reading: readReport(counted(sample(2))) });
  assert.equal(root.innerHTML, before);
});

test('that there are no breaks or times is said as it is for what was recorded', () => {
  const breaks = (frontend: string | null): string => {
    const report: IJson = { ...sample(), graph_break_rows: [], timing_rows: [], cell: null };
    const [frame] = report['frames'] as IJson[];
    assert.ok(frame !== undefined);
    frame['graphs'] = frontend === null ? [] : [{ ...firstGraph(report), frontend }];
    show(report);
    tab('breaks');
    const sentence = text('[data-panel=breaks]');
    tab('timing');
    assert.match(text('[data-panel=timing]'), /Not measured\. Graphs of a cell under %%aotcompile can be measured/);
    view.dispose();
    return sentence;
  };
  assert.equal(breaks('dynamo'), 'None: Dynamo captured everything without a break.');
  assert.equal(breaks('direct'), 'None: the calls themselves were traced, without Dynamo.');
  assert.equal(breaks(null), 'None are known: Dynamo captured nothing.');
});

test('the memory shows the composition of its peak, and arrow keys choose another step', () => {
  const report = sample();
  firstGraph(report)['memory'] = {
    steps: 4,
    forward_steps: 2,
    names: ['w', 'a', 'g'],
    kinds: ['parameters', 'saved', 'gradients'],
    nbytes: [1024, 2048, 512],
    begins: [0, 1, 3],
    ends: [3, 3, 3],
    lines: [-1, -1, -1],
    modules: [0, 1, 1],
    module_table: ['h.0.mlp', 'h.0.attn']
  };
  report['memory_curves'] = [{ engine: 'aotlab', frame: 'step', graph: 0, forward: [2048], backward: [3072, 512] }];
  show(report);
  tab('memory');
  const rows = (): (string | undefined)[] => all('[data-table=memory] tbody tr').map(row => row.dataset['bytes']);
  assert.match(
    text('[data-panel=memory]'),
    /The peak is 3\.50 KiB, in the backward, where g is allocated in h\.0\.attn/
  );
  assert.match(text('[data-panel=memory]'), /4\.00 KiB with aotlab \(the model differs by −12\.5 %\)/);
  assert.deepEqual(rows(), ['3584']);
  one('[data-action=layers]').click();
  assert.deepEqual(rows(), ['2048', '1024', '512']);
  const slider = one('[role=slider]');
  press(slider, 'Home');
  assert.deepEqual([slider.getAttribute('aria-valuenow'), ...rows()], ['1', '1024']);
  press(slider, 'ArrowRight');
  assert.deepEqual([slider.getAttribute('aria-valuenow'), ...rows()], ['2', '2048', '1024']);
  assert.deepEqual(
    all('[data-engine]').map(each => each.getAttribute('data-engine')),
    ['aotlab', 'aotlab']
  );
});

test('the page of several ranks opens with their differences, and shows the report of the chosen rank', () => {
  const rank = (number: number, graphs: number): IJson => ({
    ...sample(graphs),
    identifier: `rank-${number}`,
    rank: number,
    world_size: 3
  });
  const row = {
    rank: 1,
    reference: 0,
    fact: 'recompile',
    frame: 'step',
    graph: 1,
    subject: 'x.size(0)',
    sentence: 'Rank 1 alone recompiled `step`.',
    suggestion: 'let `x` vary'
  };
  const lost = { rank: 2, reference: 2, fact: 'missing', subject: 'rank 2', sentence: 'Rank 2 sent no report.' };
  const guard = {
    rank: 1,
    reference: 0,
    fact: 'guard',
    frame: 'step',
    graph: 0,
    subject: 'y',
    expected: 'a',
    value: 'b'
  };
  const collective = { part: 'forward graph', name: 'sum', op: 'all_reduce', input_bytes: 1024, output_bytes: 2048 };
  const first = rank(0, 1);
  firstGraph(first)['collectives'] = [collective, { ...collective, name: 'sum_1' }];
  const waiting = {
    rank: 1,
    reference: 0,
    fact: 'waiting',
    subject: 'in collectives',
    value: '100 ms of 4.00 s',
    expected: '3.20 s of 4.00 s',
    change: 'the others probably waited for it'
  };
  const waits = (duration_ns: number): IJson => ({ wait_rows: [{ op: 'barrier', count: 3, duration_ns }] });
  const second = counted({ ...rank(1, 2), ...waits(1e8) });
  const report = counted({
    ...first,
    ...waits(3.2e9),
    rank_rows: [lost, row, guard, waiting],
    rank_reports: [second]
  });
  Object.assign(report['summary'] as IJson, { alone: 'rank 2 is missing', apart_ranks: 3 });
  show(report);
  assert.equal(one('[role=tab][aria-selected=true]').dataset['tab'], 'ranks');
  assert.equal(text('[data-chip=ranks]'), 'rank 2 is missing');
  assert.deepEqual(
    all('[data-rank-note]').map(each => each.textContent),
    ['Rank 2 sent no report.', 'Rank 1 alone recompiled step.']
  );
  assert.match(text('[data-panel=ranks]'), /To avoid the recompile: let x vary\./);
  assert.deepEqual(
    all('[data-table="rank list"] tbody tr').map(each => each.firstElementChild?.textContent),
    ['rank 0 (shown)', 'rank 1', '2 missing']
  );
  assert.match(text('[data-table="ranks guard"] tbody'), /y.*a.*b/);
  assert.match(text('[data-table=collectives] tbody'), /all_reduce.*2.*2\.00 KiB.*4\.00 KiB/);
  assert.match(text('[data-table=waits] tbody'), /barrier.*0.*3.*3\.20 s.*barrier.*1.*3.*100.* ms/);
  assert.match(text('[data-table="rank list"] tbody'), /rank 0 \(shown\).*3\.20 s/);
  assert.equal(
    text('[data-waited-least]'),
    'Rank 1 spent least time in collectives, 100 ms of 4.00 s; the others probably waited for it (rank 0: 3.20 s of 4.00 s).'
  );
  one('[data-key="rank 1"]').click();
  assert.equal(one('.aotlab-report').dataset['identifier'], 'rank-1');
  assert.equal(one('[role=tab][aria-selected=true]').dataset['tab'], 'ranks');
  assert.equal(text('[data-chip=stages]'), '2 graphs');
  tab('calls');
  const list = one('[data-key=ranks]') as HTMLSelectElement;
  assert.equal(list.value, '1');
  list.value = '0';
  list.dispatchEvent(new dom.window.Event('change'));
  assert.equal(one('.aotlab-report').dataset['identifier'], 'rank-0');
  assert.equal(one('[role=tab][aria-selected=true]').dataset['tab'], 'calls');
});

test('a report of one process has no ranks', () => {
  show(sample());
  assert.deepEqual(
    [...all('[data-tab=ranks]'), ...all('[data-table=waits]'), ...all('[data-chip=ranks]'), ...all('[data-key=ranks]')],
    []
  );
});
