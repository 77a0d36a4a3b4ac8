import assert from 'node:assert/strict';
import { afterEach, beforeEach, test } from 'node:test';

import { JSDOM } from 'jsdom';

import { ReportSource } from '../src/live/source';
import { readReport } from '../src/model/report';
import type { IDisposable } from '../src/source';
import { MOST_LINES } from '../src/view/code';
import { Code } from '../src/view/tokens';
import type { IToken } from '../src/view/tokens';
import { mount } from '../src/view/view';
import { counted } from './counted';
import { sample } from './sample';
import type { IJson } from './sample';

let dom: JSDOM;
let host: HTMLElement;
let source: ReportSource;
let view: IDisposable | null = null;

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
  view?.dispose();
  view = null;
  dom.window.close();
});

function all(selector: string): HTMLElement[] {
  return [...host.querySelectorAll<HTMLElement>(selector)];
}

function one(selector: string): HTMLElement {
  const elements = all(selector);
  assert.equal(elements.length, 1, `${elements.length} times ${selector}`);
  return elements[0] as HTMLElement;
}

async function opened(selector: string): Promise<HTMLElement> {
  const details = one(selector) as HTMLDetailsElement;
  const toggled = new Promise(resolve => details.addEventListener('toggle', resolve));
  details.open = true;
  await toggled;
  return details;
}

function key(target: HTMLElement, name: string, modifiers: object = {}): void {
  target.dispatchEvent(
    new dom.window.KeyboardEvent('keydown', { key: name, bubbles: true, cancelable: true, ...modifiers })
  );
}

const FILE = '<ipython-input-3-0123456789ab>';
const LOSS = { file: FILE, line: 3, function: '<module>', code: 'loss = (x @ model.weight).relu().sum()' };
const SCALED = { file: '/home/user/model.py', line: 12, function: 'scaled', code: 'return x * 2' };
const JOINT = [
  'def joint(self, primals_1, primals_10, tangents_1):',
  '    mul = torch.ops.aten.mul.Tensor(primals_1, 2)  # float32[2, 3]',
  '    mm = torch.ops.aten.mm.default(mul, primals_10)  # of primals_10',
  '    relu = torch.ops.aten.relu.default(mm)  # float32[2, 4]',
  "    t = torch.ops.aten.t.default(tangents_1, 'primals_1')",
  '    return (relu, t)'
].join('\n');

/** The sample, with a cell of two lines and a function, whose nodes are known. */
function linked(): IJson {
  const report = sample();
  const [frame] = report['frames'] as IJson[];
  const [graph] = (frame?.['graphs'] ?? []) as IJson[];
  assert.ok(graph !== undefined);
  const node = (name: string, line: object | null, fields: object = {}): object => ({
    stage: 'trace',
    part: 'joint',
    name,
    op: 'call_function',
    target: `aten.${name}`,
    phase: 'forward',
    line,
    ...fields
  });
  const nodes = [
    node('primals_1', null),
    node('mul', SCALED),
    node('mm', LOSS),
    node('relu', LOSS),
    node('t', LOSS, { phase: 'backward' })
  ];
  const compiled = nodes.map(each => ({ ...each, stage: 'compile', part: 'forward' }));
  Object.assign(graph, {
    nodes: [...nodes, ...compiled],
    placeholders: [
      { name: 'primals_1', user_name: 'x' },
      { name: 'primals_10', user_name: 'model.weight' },
      { name: 'tangents_1', user_name: 'grad_of_loss' }
    ],
    stages: [{ name: 'trace', duration_ns: 1, codes: [{ title: 'joint graph', language: 'python', text: JOINT }] }],
    saved: [
      { name: 'relu', tensor: null, nbytes: 32, reason: 'read by relu’s backward', line: LOSS },
      { name: 'primals_10', tensor: null, nbytes: 48, reason: 'an input', line: null }
    ],
    kernels: [
      {
        name: 'fused_mul_relu',
        language: 'c++',
        graph_name: 'g',
        kind: 'forward',
        source: 'int main() {}',
        nodes: ['mul', 'relu']
      },
      {
        name: 'extern.mm',
        language: 'extern',
        graph_name: 'g',
        kind: 'forward',
        source: 'mm(primals_10)',
        nodes: ['mm', 'unknown']
      },
      { name: 'other', language: 'c++', graph_name: 'g', kind: 'forward', source: '' }
    ]
  });
  const parts = [{ first_line: 2, last_line: 3, how: 'compiled', frames: ['step'], reason: '' }];
  const cell = { source: `%%aotcompile\ny = scaled(x)\n${LOSS.code}\nloss.backward()`, execution_count: 3, parts };
  return { ...report, cell };
}

function show(report: IJson): void {
  source.update({ reading: readReport(counted(report)) });
  view = mount(host, source);
}

function tokenLines(text: string, language: string): (readonly IToken[])[] {
  const code = new Code(text, language);
  return code.lines.map((_, index) => code.tokens(index));
}

test('code is read into tokens that are the code', () => {
  const python = "def f(x):  # it's\n    return r'a\\'b' + 1e-3 * x.sin()\ns = '''one\ntwo'''\nopen = \"no end";
  const lines = tokenLines(python, 'python');
  assert.equal(lines.map(line => line.map(token => token.text).join('')).join('\n'), python);
  const textsOfKind = (kind: string): string[] =>
    lines
      .flat()
      .filter(token => token.kind === kind)
      .map(token => token.text);
  assert.deepEqual(textsOfKind('keyword'), ['def', 'return']);
  assert.deepEqual(textsOfKind('string'), ["r'a\\'b'", "'''one", "two'''", '"no end']);
  assert.deepEqual(textsOfKind('comment'), ["# it's"]);
  assert.deepEqual(textsOfKind('number'), ['1e-3']);
  assert.deepEqual(textsOfKind('call'), ['f', 'sin']);
  assert.deepEqual(textsOfKind('name'), ['x', 'x', 's', 'open']);
  const cpp = '#include "a.h"\nfor (int64_t x0=0L; x0<32; x0++) /* a\nb */ out[x0] = f(1.0f); // end';
  const cppLines = tokenLines(cpp, 'c++');
  assert.equal(cppLines.map(line => line.map(token => token.text).join('')).join('\n'), cpp);
  assert.deepEqual(
    cppLines
      .flat()
      .filter(token => token.kind === 'keyword')
      .map(token => token.text),
    ['#include', 'for', 'int64_t']
  );
  assert.deepEqual(
    cppLines
      .flat()
      .filter(token => token.kind === 'comment')
      .map(token => token.text),
    ['/* a', 'b */', '// end']
  );
  assert.deepEqual(
    cppLines
      .flat()
      .filter(token => token.kind === 'number')
      .map(token => token.text),
    ['0L', '32', '1.0f']
  );
});

test('graphs are shown with the user’s names, whole names and no others', async () => {
  show(linked());
  one('[data-tab=stages]').click();
  const code = await opened('details[data-code="joint graph"]');
  const lines = (): string[] => [...code.querySelectorAll('.al-row')].map(each => (each.textContent ?? '').trimEnd());
  assert.equal(lines()[0], 'def joint(self, x, model.weight, grad_of_loss):');
  assert.match(lines()[2] ?? '', /default\(mul, model\.weight\) {2}# of primals_10$/);
  assert.match(lines()[4] ?? '', /\(grad_of_loss, 'primals_1'\)$/);
  assert.deepEqual(
    [...code.querySelectorAll<HTMLElement>('.al-t-yours')].slice(0, 3).map(each => each.title),
    ['primals_1', 'primals_10', 'tangents_1']
  );
  const yours = lines().join('\n');
  const clipboardTexts: string[] = [];
  Object.defineProperty(globalThis, 'navigator', {
    value: { clipboard: { writeText: (text: string) => Promise.resolve(void clipboardTexts.push(text)) } },
    configurable: true
  });
  const copy = [...code.querySelectorAll('button')].find(each => each.textContent === 'Copy');
  copy?.click();
  const check = code.querySelector<HTMLInputElement>('input[type=checkbox]');
  assert.equal(check?.checked, true);
  check?.click();
  assert.equal(lines().join('\n'), JOINT);
  copy?.click();
  assert.deepEqual(clipboardTexts, [yours, JOINT]);
  await new Promise(resolve => setTimeout(resolve, 0));
  assert.equal(copy?.textContent, 'Copied');
  one('[data-tab=saved]').click();
  assert.equal(one('tr[data-name=primals_10] td[data-column=name]').textContent, 'model.weight');
});

test('of long code the lines in sight are drawn, and all of it is searched', async () => {
  const report = linked();
  const [frame] = report['frames'] as IJson[];
  const [graph] = (frame?.['graphs'] ?? []) as IJson[];
  assert.ok(graph !== undefined);
  const text = Array.from({ length: 10_000 }, (_, index) => `    v${index} = f(primals_1, ${index % 600})`).join('\n');
  graph['stages'] = [{ name: 'trace', duration_ns: 1, codes: [{ title: 'joint graph', language: 'python', text }] }];
  show(report);
  one('[data-tab=stages]').click();
  const code = await opened('details[data-code="joint graph"]');
  assert.ok(code.querySelectorAll('.al-row').length < MOST_LINES);
  const field = code.querySelector<HTMLInputElement>('input[type=search]');
  assert.ok(field !== null);
  const matchStatus = (): string => code.querySelector('[role=status]')?.textContent ?? '';
  field.value = '(X, 599)';
  field.dispatchEvent(new dom.window.Event('input'));
  assert.equal(matchStatus(), '1 of 16');
  const keysOfNotebook: string[] = [];
  host.addEventListener('keydown', event => keysOfNotebook.push(event.key));
  key(field, 'Enter');
  key(field, 'Enter');
  assert.equal(matchStatus(), '3 of 16');
  assert.equal(
    code.querySelector('mark.al-now')?.closest('.al-row')?.querySelector('.al-n')?.getAttribute('data-n'),
    '1800'
  );
  key(field, 'Enter', { shiftKey: true });
  assert.equal(matchStatus(), '2 of 16');
  assert.deepEqual(keysOfNotebook, []);
  field.value = 'nowhere';
  field.dispatchEvent(new dom.window.Event('input'));
  assert.equal(matchStatus(), 'no match');
});

test('a line that is chosen lights up with all that comes from it', async () => {
  show(linked());
  const bar = (): string[] => [...one('.al-chosen').querySelectorAll('button')].map(each => each.textContent ?? '');
  assert.equal(one('.al-chosen').hidden, true);
  // Of what no graph ran nothing comes.
  assert.equal(one('tr[data-line="4"]').dataset['links'], undefined);
  one('tr[data-line="3"] td[data-column=source]').click();
  assert.match(one('.al-chosen').textContent ?? '', /^line 3: loss = \(x @ model.weight\).relu\(\).sum\(\)/);
  assert.deepEqual(bar(), ['the cell', '2 nodes forward', '1 backward', '1 saved', '2 kernels', 'the graph', '✕']);
  assert.deepEqual(
    all('tr[data-lit]').map(each => each.dataset['line']),
    ['3']
  );
  // To the nodes: their stage’s code is opened.
  [...all('.al-chosen button')].find(each => each.textContent === '1 backward')?.click();
  assert.equal(one('[data-tab=stages]').getAttribute('aria-selected'), 'true');
  const litLines = (): (string | null | undefined)[] =>
    all('.al-row[data-lit]').map(each => each.querySelector('.al-n')?.getAttribute('data-n'));
  assert.deepEqual(litLines(), ['3', '4', '5']);
  one('[data-tab=saved]').click();
  assert.deepEqual(
    all('tr[data-lit]').map(each => each.dataset['name']),
    ['relu']
  );
  one('[data-tab=kernels]').click();
  assert.deepEqual(
    all('details[data-lit]').map(each => each.dataset['kernel']),
    ['fused_mul_relu', 'extern.mm']
  );
  assert.deepEqual(
    all('details[data-kernel=fused_mul_relu] .al-from button').map(each => each.textContent),
    ['line 3', 'model.py:12']
  );
  // It stays when the report is drawn anew, and goes with Escape.
  source.update({ reading: readReport(counted({ ...linked(), name: 'again' })) });
  assert.equal(all('details[data-lit]').length, 2);
  key(one('[data-tab=kernels]'), 'Escape');
  assert.equal(all('[data-lit]').length, 0);
  assert.equal(one('.al-chosen').hidden, true);
});

test('a line of the notebook lights up with what the modules that it calls compute', () => {
  const report = linked();
  const [frame] = report['frames'] as IJson[];
  const [graph] = (frame?.['graphs'] ?? []) as IJson[];
  assert.ok(graph !== undefined);
  const callerLine = {
    file: '<ipython-input-2-fedcba987654>',
    line: 7,
    function: 'forward',
    code: 'return self.layer(t)'
  };
  const libraryLine = { ...SCALED, callers: [callerLine, { ...LOSS }] };
  const [first] = graph['nodes'] as IJson[];
  const nodes = ['mul', 'relu', 'tanh'].map(name => ({ ...first, name, line: libraryLine }));
  graph['nodes'] = [...nodes, ...nodes.map(each => ({ ...each, stage: 'compile', part: 'forward' }))];
  graph['saved'] = [{ name: 'relu', tensor: null, nbytes: 32, reason: 'why', line: libraryLine }];
  show(report);
  one('tr[data-line="3"] td[data-column=source]').click();
  assert.match(one('.al-chosen').textContent ?? '', /3 nodes forward1 saved1 kernel/);
  // The line of another cell, too.
  one('[data-tab=saved]').click();
  const row = one('tr[data-name=relu]');
  assert.equal(row.dataset['links']?.split(' ').length, 3);
  key(row, 'Escape');
  row.click();
  assert.match(one('.al-chosen').textContent ?? '', /^model\.py:12: return x \* 2/);
  row.click();
  assert.match(one('.al-chosen').textContent ?? '', /^In \[2\], line 7: return self\.layer\(t\)3 nodes forward/);
});

test('a line is chosen in the code too, by mouse or keyboard, once and back', async () => {
  show(linked());
  one('[data-tab=stages]').click();
  await opened('details[data-code="joint graph"]');
  const numbers = all('button.al-n');
  assert.deepEqual(
    numbers.map(each => [each.dataset['n'], each.tabIndex]),
    [
      ['2', 0],
      ['3', -1],
      ['4', -1],
      ['5', -1]
    ]
  );
  numbers[0]?.focus();
  numbers[0]?.click();
  assert.match(one('.al-chosen').textContent ?? '', /^model\.py:12: return x \* 2/);
  assert.equal(numbers[0]?.getAttribute('aria-pressed'), 'true');
  key(numbers[0] as HTMLElement, 'ArrowDown');
  assert.equal((document.activeElement as HTMLElement).dataset['n'], '3');
  all('.al-row')[1]?.click();
  assert.equal(one('.al-chosen').hidden, true);
  one('[data-tab=saved]').click();
  one('tr[data-name=relu] .al-origin').click();
  assert.match(one('.al-chosen').textContent ?? '', /^line 3/);
});

test('without a kernel, a report without nodes says where they are shown once a line is chosen', () => {
  const report = linked();
  const [graph] = ((report['frames'] as IJson[])[0]?.['graphs'] ?? []) as IJson[];
  assert.ok(graph !== undefined);
  const nodes = graph['nodes'];
  Object.assign(graph, { nodes: [], counts: { nodes: 3 } });
  show(report);
  one('tr[data-line="3"] td[data-column=source]').click();
  const remark = (): string | undefined => all('.al-chosen > .al-soft').map(each => each.textContent ?? '')[0];
  assert.equal(remark(), 'its nodes are shown while the kernel runs, and in report.to_html()');
  source.receive({ kind: 'report', report });
  assert.equal(remark(), 'asking the kernel …');
  source.receive({ kind: 'nodes', frame: 'step', index: 0, nodes });
  assert.equal(remark(), undefined);
});

test('the nodes of a cut report are asked for once a line is chosen', () => {
  const report = linked();
  const [frame] = report['frames'] as IJson[];
  const [graph] = (frame?.['graphs'] ?? []) as IJson[];
  assert.ok(graph !== undefined);
  const nodes = graph['nodes'];
  graph['nodes'] = [];
  const requests: unknown[] = [];
  source.onAsk = request => requests.push(request);
  show(report);
  source.receive({ kind: 'report', report });
  assert.deepEqual(requests, []);
  one('tr[data-line="3"] td[data-column=source]').click();
  assert.deepEqual(requests, [{ kind: 'nodes', frame: 'step', index: 0 }]);
  source.receive({ kind: 'nodes', frame: 'step', index: 0, nodes });
  assert.match(one('.al-chosen').textContent ?? '', /2 nodes forward1 backward1 saved2 kernels/);
});
