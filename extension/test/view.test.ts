import assert from 'node:assert/strict';
import { afterEach, beforeEach, test } from 'node:test';

import { JSDOM } from 'jsdom';

import { ReportSource } from '../src/live/source';
import { readReport } from '../src/model/report';
import type { Disposable } from '../src/source';
import { mount } from '../src/view/view';
import { sample } from './sample';
import type { Json } from './sample';

let dom: JSDOM;
let host: HTMLElement;
let source: ReportSource;
let view: Disposable;

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

function show(report: unknown): HTMLElement {
  source.update({ reading: readReport(report) });
  view = mount(host, source);
  return one('.aotlab-report');
}

function one(selector: string): HTMLElement {
  const [found, ...more] = all(selector);
  assert.ok(found !== undefined, `no ${selector}`);
  assert.equal(more.length, 0, `several ${selector}`);
  return found;
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

function press(element: HTMLElement, key: string): KeyboardEvent {
  const event = new dom.window.KeyboardEvent('keydown', { key, bubbles: true, cancelable: true });
  element.dispatchEvent(event);
  return event as unknown as KeyboardEvent;
}

const NAMES = [
  'overview', 'inputs', 'outputs', 'storages', 'stages', 'saved', 'kernels', 'breaks', 'calls', 'timing', 'verification'
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
  assert.match(text('.al-sentence'), /^1 graph compiled; NOT equal to eager/);
  assert.deepEqual(all('.al-chip').map(each => each.dataset['chip']), [
    'verification', 'stages', 'inputs', 'outputs', 'saved', 'breaks', 'calls'
  ]);
  for (const chip of all('.al-chip')) {
    chip.click();
    assert.equal(one('[role=tabpanel]:not([hidden])').dataset['panel'], chip.dataset['chip']);
    assert.equal(document.activeElement, one(`[data-tab=${chip.dataset['chip']}]`));
  }
  assert.equal(text('[data-tab=inputs]'), 'Inputs 3');
  assert.deepEqual(all('[role=tab].al-empty'), []);
  view.dispose();
  show({ ...sample(), graph_break_rows: [], timing_rows: [] });
  assert.deepEqual(all('[role=tab].al-empty').map(each => each.textContent), ['Graph breaks', 'Timing']);
});

test('there is one tab and one panel per part, and one panel is shown', () => {
  show(sample());
  assert.deepEqual(all('[role=tab]').map(each => each.dataset['tab']), NAMES);
  assert.deepEqual(all('[role=tabpanel]').map(each => each.dataset['panel']), NAMES);
  for (const name of NAMES) {
    tab(name);
    assert.deepEqual(all('[role=tabpanel]:not([hidden])').map(each => each.dataset['panel']), [name]);
    assert.notEqual(text(`[data-panel=${name}]`), '');
    const chosen = one('[role=tab][aria-selected=true]');
    assert.equal(chosen.getAttribute('aria-controls'), one(`[data-panel=${name}]`).id);
  }
});

test('the cell’s lines say how they ran in words, with the reason once', () => {
  show(sample());
  const ran = all('table[data-table=cell] tr[data-line]').map(row =>
    ['source', 'how', 'reason'].map(name => row.querySelector(`[data-column=${name}]`)?.textContent)
  );
  assert.deepEqual(ran, [
    ['%%aotcompile', '', ''],
    ['import torch', '○ python', 'an import'],
    ['x.add_(1)', '● compiled', ''],
    ['loss.backward()', '✕ not run', 'an error came first']
  ]);
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

test('the inputs of a module that nothing happened to stand in one row, which opens', () => {
  const report = sample();
  const [frame] = report['frames'] as Json[];
  const [graph] = (frame?.['graphs'] ?? []) as Json[];
  const [x, weight] = (graph?.['inputs'] ?? []) as Json[];
  assert.ok(graph !== undefined);
  const layers = Array.from({ length: 5 }, (_, index) => ({ ...weight, name: `model.${index}.weight` }));
  // One alias a row, and what was written by itself.
  const others = [{ ...weight, name: 'model.tied', duplicate_of: 'model.0.weight' }, { ...x, name: 'model.steps' }];
  graph['inputs'] = [x, ...layers, ...others];
  show(report);
  tab('inputs');
  const names = (): (string | null)[] => all('table[data-table=inputs] td[data-column=name]').map(each => each.textContent);
  assert.deepEqual(names(), ['x', '5 parameters of model', 'model.tied', 'model.steps']);
  assert.equal(text('tr[data-group] td[data-column=nbytes]'), '240 B');
  one('button[data-group]').focus();
  one('button[data-group]').click();
  assert.equal(names().length, 9);
  assert.equal(document.activeElement, one('button[data-group][aria-expanded=true]'));
  one('button[data-group]').click();
  assert.equal(names().length, 4);
});

test('the outputs’ table says what shares memory with what', () => {
  show(sample());
  tab('outputs');
  const row = 'table[data-table=outputs] tr[data-name="out[1]"]';
  const cells = ['tensor', 'storage', 'autograd', 'relation'].map(column => text(`${row} td[data-column=${column}]`));
  assert.deepEqual(cells, ['float32[2]stride [3]', '#0', '', 'view of input x: x.select(1, 0) alias of input']);
  assert.equal(text(`${row} code`), 'x.select(1, 0)');
  assert.equal(text(`${row} .al-mark`), 'alias of input');
});

test('the storage map draws the bytes that tensors have, hatches what is written, and says it in words', () => {
  show(sample());
  tab('storages');
  const map = one('svg[data-storage="0"]');
  assert.match(
    map.getAttribute('aria-label') ?? '',
    /Storage 0, 24 B on cpu.*input x: bytes 0 to 24, mutated; output out\[1\]: bytes 0 to 16 in 2 runs\./
  );
  const spans = [...map.querySelectorAll('g[data-span]')].map(each => [
    each.getAttribute('data-span'),
    each.getAttribute('data-mutated'),
    each.querySelectorAll('rect:not(.al-hatch)').length,
    each.querySelectorAll('rect.al-hatch').length
  ]);
  assert.deepEqual(spans, [
    ['x', 'true', 1, 1],
    ['out[1]', 'false', 2, 0]
  ]);
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
  source.update({ reading: readReport({ ...sample(), name: 'again' }) });
  assert.equal((one('details[data-stage=trace]') as HTMLDetailsElement).open, true);
  assert.notEqual(one('details[data-stage=trace]').querySelector('.al-codebox'), null);
});

test('stages, saved tensors, kernels and graph breaks have tabs of their own', () => {
  show(sample());
  tab('stages');
  assert.deepEqual(all('table[data-table=stages] td').map(each => each.textContent), ['trace', '1.00 ms', '', '4', 'traced']);
  tab('saved');
  assert.deepEqual(
    all('table[data-table=saved] td').map(each => each.textContent),
    ['mm', 'float32[2, 4]', '32 B', 'read by relu’s backward', '']
  );
  tab('kernels');
  assert.equal(all('details[data-kernel=kernel_0]').length, 1);
  tab('breaks');
  assert.match(text('table[data-table=graph_breaks] td[data-column=reason]'), /^print\(\) is called/);
});

test('recompiles have reasons, refusals outcomes, and calls are counted', () => {
  show(sample(2));
  tab('calls');
  const reasons = all('table[data-table=recompiles] td[data-column=reason]').map(each => each.textContent);
  assert.deepEqual(reasons, ['the first', 'graph 0: x has another shape. To avoid it: pad.']);
  assert.deepEqual(all('td[data-column=reused]').map(each => each.textContent), ['yes', 'no']);
  assert.equal(text('table[data-table=refusals] td[data-column=outcome]'), 'ran eagerly');
  assert.deepEqual(all('[data-count]').map(each => each.textContent), ['3 in all', '2 compiled', '1 eager']);
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
    ['aotlab', '1.00 µs', 'noise: 0.50× eager (0.25–1.50); 0.75× torch.compile (0.70–0.80)']
  ]);
  assert.equal(text('table[data-table=timings] small'), '9 repeats, the same code against itself 1.01×');
  assert.equal(text('table[data-table=timings] [data-noise]'), 'Noise: it changed.');
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
  assert.deepEqual(all('tr[data-name=x] td[data-column=graph]').map(each => each.textContent), ['step · 0', 'step · 1', 'step · 2']);
  const select = one('select') as HTMLSelectElement;
  select.value = 'step/1';
  select.dispatchEvent(new dom.window.Event('change'));
  assert.deepEqual(graphs(), ['1']);
  // The choice outlives a change of the report.
  source.update({ reading: readReport(sample(4)) });
  assert.deepEqual(graphs(), ['1']);
});

test('a long table is cut until the reader asks for all of it', () => {
  const report = sample();
  const row = (report['verification_rows'] as Json[])[0];
  report['verification_rows'] = Array.from({ length: 450 }, () => row);
  show(report);
  tab('verification');
  assert.equal(all('table[data-table=verification] tbody tr').length, 200);
  one('[data-panel=verification] .al-button').click();
  assert.equal(all('table[data-table=verification] tbody tr').length, 450);
});

test('arrows move between tabs, and the notebook hears nothing of them', () => {
  show(sample());
  let heard = 0;
  document.body.addEventListener('keydown', () => {
    heard += 1;
  });
  const shown = (): string | undefined => one('[role=tabpanel]:not([hidden])').dataset['panel'];
  press(one('[data-tab=overview]'), 'ArrowRight');
  assert.equal(shown(), 'inputs');
  assert.equal(document.activeElement, one('[data-tab=inputs]'));
  press(one('[data-tab=inputs]'), 'End');
  assert.equal(shown(), 'verification');
  press(one('[data-tab=verification]'), 'ArrowRight');
  assert.equal(shown(), 'overview');
  assert.equal(heard, 0);
  press(one('[data-tab=overview]'), 's');
  assert.equal(heard, 1);
  assert.deepEqual(all('[role=tab]').map(each => each.tabIndex), NAMES.map((_, index) => (index === 0 ? 0 : -1)));
});

test('only a live report offers to measure, and says how far it is', () => {
  show(sample());
  tab('timing');
  assert.equal(all('[data-action=measure]').length, 0);
  let asked = 0;
  source.onAsk = () => {
    asked += 1;
  };
  source.receive({ kind: 'report', report: sample(), figure: '<svg xmlns="http://www.w3.org/2000/svg"/>' });
  assert.equal(one('.aotlab-report').dataset['live'], 'true');
  one('[data-action=measure]').click();
  one('[data-action=measure]').click();
  assert.equal(asked, 1);
  source.receive({ kind: 'progress', text: 'step, forward' });
  assert.equal(text('.al-measuring [role=status]'), 'step, forward');
  source.receive({ kind: 'error', message: 'no memory' });
  assert.match(text('.al-measuring [role=status]'), /no memory/);
  assert.equal((one('[data-action=measure]') as HTMLButtonElement).disabled, false);
  source.leave();
  assert.equal(one('.aotlab-report').dataset['live'], 'false');
  assert.equal(all('[data-action=measure]').length, 0);
});

test('the figure is an image, so that nothing in it can run', () => {
  show(sample());
  source.receive({ kind: 'report', report: sample(), figure: '<svg onload="alert(1)">#</svg>' });
  tab('timing');
  assert.equal(
    (one('img') as HTMLImageElement).src,
    `data:image/svg+xml;charset=utf-8,${encodeURIComponent('<svg onload="alert(1)">#</svg>')}`
  );
});

test('a report that cannot be read is one line, and the next report is drawn', () => {
  const root = show({ version: 99, environment: {} });
  assert.equal(root.dataset['state'], 'unreadable');
  assert.match(root.textContent ?? '', /^! This report has version 99/);
  source.update({ reading: readReport(sample()) });
  assert.equal(all('[role=tab]').length, NAMES.length);
});

test('damage and notes are said in the overview', () => {
  show({ ...sample(), notes: ['cut `to` fit'], graph_break_rows: 'none' });
  assert.deepEqual(
    all('.al-note').map(each => each.textContent),
    ['cut to fit', 'This report is damaged; what could not be read is left out. First: $.graph_break_rows should be a list.']
  );
});

test('nothing in a report becomes markup', () => {
  const attack = '"><img src=x onerror="alert(1)"><script>alert(2)</script>';
  const poison = (value: unknown, key = ''): unknown => {
    if (typeof value === 'string') {
      // What the view compares with is left alone, so that every table is drawn.
      return ['status', 'role', 'output_type', 'engine', 'phase', 'how'].includes(key) ? value : attack;
    }
    if (Array.isArray(value)) {
      return value.map(each => poison(each));
    }
    if (typeof value === 'object' && value !== null) {
      return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, poison(each, name)]));
    }
    return value;
  };
  show(poison({ ...sample(2), notes: ['a note'], summary: { sentence: 'fine', state: 'verified' } }));
  for (const name of NAMES) {
    tab(name);
    for (const details of all('details')) {
      (details as HTMLDetailsElement).open = true;
      details.dispatchEvent(new dom.window.Event('toggle'));
    }
    assert.deepEqual(all('img, script, iframe, object, a').map(each => each.outerHTML), []);
    const handlers = all('*').flatMap(each => each.getAttributeNames().filter(attribute => attribute.startsWith('on')));
    assert.deepEqual(handlers, []);
  }
  tab('inputs');
  assert.equal(all('table[data-table=inputs] td[data-column=name]')[0]?.textContent, attack);
});

test('a cell that compiled nothing says so first, and every panel has words', () => {
  const report = { ...sample(), frames: [], timing_rows: [], verification_rows: [], graph_break_rows: [], cell: null };
  const root = show(report);
  assert.equal(root.dataset['state'], 'nothing');
  for (const name of NAMES) {
    tab(name);
    assert.notEqual(text(`[data-panel=${name}]`).trim(), '');
  }
});

test('what was refused is said to be refused, not to have mutated nothing', () => {
  const report = sample();
  const [frame] = report['frames'] as Json[];
  const [graph] = (frame?.['graphs'] ?? []) as Json[];
  assert.ok(graph !== undefined);
  Object.assign(graph, { status: 'refused', stages: [], outputs: [], training: null });
  graph['inputs'] = [{ name: 'x', kind: 'input', tensor: { dtype: 'float32', device: 'cpu', shape: [], stride: [] } }];
  show({ ...report, cell: null });
  assert.deepEqual(all('[data-fact]').map(each => each.textContent), []);
  tab('inputs');
  assert.equal(text('tr[data-name=x] td[data-column=happened]'), 'not traced');
});

test('a cut report counts what the whole one held, and says what is missing', () => {
  const report = sample();
  const [frame] = report['frames'] as Json[];
  const [graph] = (frame?.['graphs'] ?? []) as Json[];
  assert.ok(frame !== undefined && graph !== undefined);
  graph['counts'] = { inputs: 2900, mutated: 31, saved: 370, saved_bytes: 2 ** 20 };
  frame['counts'] = { graphs: 71, refusals: 0, compile_ns: 5e9 };
  const facts = [{ key: 'saved', title: 'saved for backward', sentence: '370 values, 1.00 MiB of new memory' }];
  show({ ...report, summary: { sentence: 'fine', state: 'verified', facts, compared: 4000, different: 1 } });
  assert.equal(text('[data-fact=saved]'), '370 values, 1.00 MiB of new memory');
  assert.match(text('table[data-table=frames] td[data-column=graphs]'), /^71$/);
  tab('inputs');
  assert.match(text('[data-panel=inputs] .al-heading:first-child'), /2,900 inputs, 31 mutated/);
  assert.match(text('[data-panel=inputs] [data-cut]'), /more rows, cut from this output/);
  tab('saved');
  assert.match(text('[data-panel=saved]'), /370 values, 1.00 MiB of new memory/);
  tab('verification');
  assert.match(text('[data-panel=verification] .al-counts'), /1 of 4,000 differ/);
  view.dispose();
  show({ ...report, verification_rows: [], summary: { sentence: 'fine', state: 'verified', compared: 36 } });
  tab('verification');
  assert.equal(
    text('[data-panel=verification]'),
    '36 observables compared with eager, 0 differ; a kernel that has the report lists them.'
  );
});

test('while the kernel answers, what was cut is asked for once, and shown', () => {
  const cut = sample();
  const [frame] = cut['frames'] as Json[];
  const [graph] = (frame?.['graphs'] ?? []) as Json[];
  assert.ok(frame !== undefined && graph !== undefined);
  const whole = structuredClone(graph);
  graph['inputs'] = [];
  graph['counts'] = { inputs: 3 };
  frame['counts'] = { graphs: 2 };
  const rows = cut['verification_rows'] as Json[];
  const note = 'This output is cut to fit a notebook: 0 of 3 inputs.';
  const summary = { sentence: 'fine', state: 'verified', compared: rows.length };
  show({ ...cut, verification_rows: [], notes: [note], summary });
  assert.equal(text('.al-note'), note);
  const asked: unknown[] = [];
  source.onAsk = request => asked.push(request);
  tab('inputs');
  assert.deepEqual(asked, []); // nobody answers
  source.receive({ kind: 'report', report: { ...cut, verification_rows: [], notes: [note], summary }, figure: null });
  assert.equal(all('.al-note').length, 0);
  const name = frame['name'];
  assert.deepEqual(asked, [
    { kind: 'graph', frame: name, index: 0 },
    { kind: 'graph', frame: name, index: 1 }
  ]);
  assert.equal(all('tr[data-name=x]').length, 0);
  source.receive({ kind: 'graph', frame: name as string, graph: { ...whole, index: 1 } });
  source.receive({ kind: 'graph', frame: name as string, graph: whole });
  assert.equal(all('tr[data-name=x]').length, 2);
  tab('verification');
  source.receive({ kind: 'verification', rows });
  assert.equal(all('table[data-table=verification] tbody tr').length, rows.length);
  assert.equal(asked.length, 3);
  // Another report may be cut elsewhere.
  source.receive({ kind: 'report', report: { ...cut, verification_rows: [], summary }, figure: null });
  assert.equal(asked.length, 4);
});

test('when disposed, the view leaves nothing behind', () => {
  const root = show(sample());
  view.dispose();
  assert.equal(host.childNodes.length, 0);
  // Nor does it draw what nobody sees.
  const before = root.innerHTML;
  source.update({ reading: readReport(sample(2)) });
  assert.equal(root.innerHTML, before);
});
