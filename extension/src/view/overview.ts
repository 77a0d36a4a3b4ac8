/** Overview: the cell with what became of each line, and what happened to the user's tensors, in a few lines. */

import { countsOf, frameCountsOf } from '../model/counts';
import type { Cell, CellPart, Environment, Frame, GraphBreakRow } from '../model/report';
import { comparedLines } from '../model/verdict';
import type { Head } from '../model/verdict';
import { amount, dataSize, duration, grouped, place, short } from '../model/words';
import type { Context } from './context';
import { fold } from './context';
import { h, spoken, heading, mark, soft } from './dom';
import type { Child } from './dom';
import { table } from './table';
import type { Column } from './table';

/** What each way of running is called, how it is marked, and what it means. */
const WAYS: Readonly<Record<string, readonly [string, string, string]>> = {
  compiled: ['good', '●', 'run by compiled graphs'],
  eager: ['warn', '◐', 'handed to the compiler, which compiled nothing of it'],
  python: ['plain', '○', 'plain Python, not handed to the compiler'],
  'not run': ['bad', '✕', 'not run'],
  'compiled in part': ['warn', '◐', 'compiled graphs ran some of it, Python the rest']
};

/** Draw the panel. */
export function overviewPanel(context: Context): Child[] {
  const { report } = context;
  return [
    h('p', { class: 'al-sentence' }, spoken(context.head.sentence)),
    ...happened(context.head),
    ...notes(context),
    ...(report.cell === null ? [] : cellSource(context, report.cell)),
    ...frameTable(context),
    environmentFold(context)
  ];
}

function notes({ report, source }: Context): HTMLElement[] {
  // A kernel that answers gives what was cut when it is looked at.
  const texts = report.notes.filter(note => !source.live || !note.startsWith('This output is cut to fit a notebook'));
  const [first] = source.reading.damage;
  if (first !== undefined) {
    texts.push(`This report is damaged; what could not be read is left out. First: ${first}.`);
  }
  return texts.map(text => h('p', { class: 'al-note' }, spoken(text)));
}

// The cell

const CELL_COLUMNS: readonly (readonly [string, string])[] = [
  ['line', 'Counted from the magic’s own line'],
  ['source', 'As you wrote it'],
  ['ran', 'How the line ran'],
  ['why', 'Why it, or some of it, is not compiled']
];

function cellSource(context: Context, cell: Cell): Child[] {
  const count = cell.execution_count === null ? '' : `In [${cell.execution_count}]`;
  const definitions = cell.kind === 'definitions' ? 'its functions compile when they are called' : '';
  const lines = cell.source.replace(/\n$/, '').split('\n');
  const rows = lines.map((text, index) => sourceRow(context, text, index + 1, cell));
  const compared = comparedLines(context.report);
  return [
    heading('The cell', [count, definitions].filter(each => each !== '').join(' · ')),
    ...(compared === '' ? [] : [soft(compared)]),
    h(
      'div',
      { class: 'al-scroll al-source' },
      h(
        'table',
        { 'data-table': 'cell', 'aria-label': 'The cell, line by line' },
        h(
          'thead',
          {},
          h('tr', {}, ...CELL_COLUMNS.map(([title, help]) => h('th', { scope: 'col', title: help }, title)))
        ),
        h('tbody', {}, ...rows)
      )
    )
  ];
}

function sourceRow(context: Context, text: string, line: number, cell: Cell): HTMLElement {
  const part = cell.parts.find(each => holds(each, line));
  const word = part === undefined ? '' : wayOf(part, line);
  const [tone, symbol, meaning] = WAYS[word] ?? ['plain', '', ''];
  const first = part?.first_line === line;
  const { selection } = context;
  const ended = cell.error !== null && cell.error_line === line;
  const origin = selection.lines(false).inCell(line);
  const ids = origin === null ? [] : [origin.id];
  const button = origin === null ? String(line) : selection.originButton(origin, String(line));
  const how = word === '' ? null : h('span', { class: `al-way al-${tone}`, title: meaning }, `${symbol} `, word);
  return h(
    'tr',
    {
      ...selection.linked(ids),
      'data-line': line,
      'data-how': part?.how ?? '',
      class: `${part === undefined ? 'al-no-part' : `al-part al-${tone}${first ? ' al-first' : ''}`}${ended ? ' al-ended' : ''}`
    },
    h('td', { class: 'al-number al-soft', 'data-column': 'line' }, button),
    h('td', { class: 'al-line', 'data-column': 'source' }, text),
    h('td', { 'data-column': 'how' }, how),
    h('td', { class: 'al-words al-soft', 'data-column': 'reason' }, ...reasons(context, cell, line, part))
  );
}

/** How a line ran; empty for one of a branch of which no graph holds anything. */
function wayOf({ how, reason, ways, first_line: first }: CellPart, line: number): string {
  const known = ways[line - first];
  return known === 'in part' || (known === undefined && how === 'compiled' && reason !== '') ? 'compiled in part' : (known ?? how);
}

/** The reason of a part, at the line that has the call which it names, or else at the first. */
function reasonAt({ source, error, error_line: failed }: Cell, { first_line: first, last_line: last, reason }: CellPart, line: number): string {
  if (failed !== null && first <= failed && failed <= last && /^\w+(Error|Exception): /.test(reason)) {
    return line === failed && reason !== error ? reason : ''; // Dynamo's words for the error that ended the cell
  }
  const called = /^calls (.*?)(\(\))?$/.exec(reason)?.[1] ?? '';
  const lines = source.split('\n').slice(first - 1, last);
  const at = called === '' ? 0 : lines.findIndex(text => text.includes(`${called}(`));
  // Of a loop of which lines are told by themselves the first line has the reason of one of these.
  return line !== first + Math.max(at, 0) ? '' : at < 0 ? `within it: ${reason}` : reason;
}

/** What happened at a line; the reason of a part stands at its first line, unless a break's line has it. */
function reasons({ report }: Context, cell: Cell, line: number, part: CellPart | undefined): HTMLElement[] {
  const breaks = report.graph_break_rows;
  const here = new Set(breaks.filter(row => row.cell_line === line).map(breakWords));
  const within = breaks.filter(row => part !== undefined && row.cell_line !== null && holds(part, row.cell_line));
  const reason = part === undefined || within.some(row => row.words === part.reason) ? '' : reasonAt(cell, part, line);
  return [
    ...(cell.error !== null && cell.error_line === line ? [told('error', 'bad', 'The cell ended here', cell.error)] : []),
    ...[...here].map(words => told('break', 'warn', 'Dynamo stopped here, and Python took over', words)),
    ...(reason === '' ? [] : [h('div', {}, spoken(reason))])
  ];
}

function holds(part: CellPart, line: number): boolean {
  return part.first_line <= line && line <= part.last_line;
}

function told(word: string, tone: string, help: string, words: string): HTMLElement {
  const pill = mark(word, tone);
  pill.title = `${help}: ${words.replaceAll('`', '')}`;
  return h('div', {}, pill, ' ', spoken(words));
}

/** Why Dynamo stopped, and where if that is in a function that the line calls. */
function breakWords({ words, where, cell_line: line }: GraphBreakRow): string {
  return where === `line ${line}` ? words : `${words}, at ${where}`;
}

// What happened

function happened({ facts }: Head): Child[] {
  if (facts.length === 0) {
    return [];
  }
  return [
    h('dl', { class: 'al-facts' }, ...facts.flatMap(({ key, title, sentence }) => [
        h('dt', {}, title),
        h('dd', { 'data-fact': key }, spoken(sentence))
      ]))
  ];
}

// The functions

/** A column of counts; `warn` if any is worth a second look. */
function count(name: string, title: string, help: string, value: (frame: Frame) => number, warn = false): Column<Frame> {
  const cell = (frame: Frame): Child => (warn && value(frame) > 0 ? mark(grouped(value(frame)), 'warn') : grouped(value(frame)));
  return { name, title, help, kind: 'number', value, cell };
}

const FRAME_COLUMNS: readonly Column<Frame>[] = [
  { name: 'frame', title: 'function', help: 'A function that was compiled or called', kind: 'code', cell: frame => short(frame.name) },
  { name: 'line', title: 'where', help: 'Where it is defined; of what Dynamo captured, where its first capture ended', kind: 'code', lesser: '', cell: frame => place(frame.line) },
  count('graphs', 'graphs', 'How many graphs were compiled for it', frame => frameCountsOf(frame).graphs),
  count('calls', 'calls', 'How often it was called', frame => frame.calls.total),
  count('compiled', 'compiled', 'How many calls ran compiled code', frame => frame.calls.compiled),
  count('eager', 'eager', 'How many calls ran eagerly', frame => frame.calls.eager, true),
  count('refused', 'refused', 'How many compilations did not come about', frame => frameCountsOf(frame).refusals, true),
  {
    name: 'compile_ns',
    title: 'compiling took',
    help: 'Wall time of all compilations',
    kind: 'number',
    value: frame => frameCountsOf(frame).compile_ns,
    cell: frame => duration(frameCountsOf(frame).compile_ns)
  }
];

function frameTable(context: Context): Child[] {
  const { report } = context;
  const count = Math.max(report.summary?.frames ?? 0, report.frames.length);
  if (count === 0) {
    return [soft('No function was compiled or called.')];
  }
  return [
    heading('Functions', amount(count, 'function')),
    table(context, {
      name: 'frames',
      label: 'Functions that were compiled or called',
      columns: FRAME_COLUMNS,
      rows: report.frames,
      total: count,
      key: frame => frame.name
    })
  ];
}

/** Name a device. */
export function deviceText({ kind, index, name }: Environment['devices'][number]): string {
  const place = index === null ? kind : `${kind}:${index}`;
  return name === '' ? place : `${place} (${name})`;
}

function environmentFold(context: Context): HTMLElement {
  const { environment, duration_ns: took, created } = context.report;
  const rows: (readonly [string, string])[] = [
    ['versions', `torch ${environment.torch}, Python ${environment.python}, aotlab ${environment.aotlab}`],
    ['devices', environment.devices.map(deviceText).join(', ')],
    ['platform', environment.platform],
    ['threads', environment.threads === null ? '' : String(environment.threads)],
    ['recorded', [created, took > 0 ? `over ${duration(took)}` : ''].filter(each => each !== '').join(', ')],
    ['storages', storageTotal(context)],
    ...environment.config.map(setting => [setting.name, String(setting.value)] as const)
  ];
  return fold(context, 'environment', ['Environment and switches'], () => [
    h(
      'dl',
      { class: 'al-facts' },
      ...rows.filter(([, text]) => text !== '').flatMap(([name, text]) => [h('dt', {}, name), h('dd', {}, text)])
    )
  ]);
}

function storageTotal(context: Context): string {
  const counts = context.entries.map(entry => countsOf(entry.graph));
  const storages = counts.reduce((sum, each) => sum + each.storages, 0);
  const bytes = counts.reduce((sum, each) => sum + each.storage_bytes, 0);
  return storages === 0
    ? ''
    : `${amount(storages, 'storage')} of inputs and outputs, ${dataSize(bytes)} summed over graphs`;
}
