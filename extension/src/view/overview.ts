/** Overview: the cell and how each line ran, and facts about the user's tensors, in a few lines. */

import { frameCountsOf } from '../model/report';
import type { Cell, CellPart, Environment, Frame, GraphBreakRow, Report } from '../model/report';
import { howLineRan, WAYS } from '../model/rows';
import type { Head } from '../model/verdict';
import { amount, dataSize, duration, grouped, place, short } from '../model/words';
import type { IContext } from './context';
import { fold } from './context';
import { h, heading, mark, prose, soft } from './dom';
import type { Child } from './dom';
import { runningSteps } from './running';
import { table } from './table';
import type { Column } from './table';

/** Draw the panel. */
export function overviewPanel(context: IContext): Child[] {
  const { report } = context;
  return [
    h('p', { class: 'al-sentence' }, prose(context.head.sentence)),
    runningSteps(report, context.source),
    ...factList(context.head),
    ...notes(context),
    ...(report.cell === null ? [] : cellSource(context, report.cell)),
    ...frameTable(context),
    environmentFold(context)
  ];
}

function notes({ report, source }: IContext): HTMLElement[] {
  // A live view needs no note about cut rows, because the kernel sends them when the reader opens their tab.
  const texts = report.notes.filter(note => !source.live || !note.startsWith('This output is cut to fit a notebook'));
  const [first] = source.reading.damage;
  if (first !== undefined) {
    texts.push(`This report is damaged; what could not be read is left out. First: ${first}.`);
  }
  return texts.map(text => h('p', { class: 'al-note' }, prose(text)));
}

// The cell

const CELL_COLUMNS: readonly (readonly [string, string])[] = [
  ['line', 'Counted from the magic’s own line'],
  ['source', 'As you wrote it'],
  ['ran', 'How the line ran'],
  ['why', 'Why it, or some of it, is not compiled']
];

function cellSource(context: IContext, cell: Cell): Child[] {
  const count = cell.execution_count === null ? '' : `In [${cell.execution_count}]`;
  const definitions = cell.kind === 'definitions' ? 'its functions compile when they are called' : '';
  const lines = cell.source.replace(/\n$/, '').split('\n');
  const rows = lines.map((text, index) => sourceRow(context, text, index + 1, cell));
  const compared = context.head.against;
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

function sourceRow(context: IContext, text: string, line: number, cell: Cell): HTMLElement {
  const part = cell.parts.find(each => containsLine(each, line));
  const howRan = part === undefined ? '' : howLineRan(part, line);
  const [tone, symbol, meaning] = WAYS[howRan] ?? ['plain', '', ''];
  const isFirst = part?.first_line === line;
  const { selection } = context;
  const ended = cell.error !== null && cell.error_line === line && !interrupted(cell);
  const origin = selection.lines(false).inCell(line);
  const ids = origin === null ? [] : [origin.id];
  const button = origin === null ? String(line) : selection.originButton(origin, String(line));
  const how = howRan === '' ? null : h('span', { class: `al-way al-${tone}`, title: meaning }, `${symbol} `, howRan);
  return h(
    'tr',
    {
      ...selection.linked(ids),
      'data-line': line,
      'data-how': part?.how ?? '',
      class: `${part === undefined ? 'al-no-part' : `al-part al-${tone}${isFirst ? ' al-first' : ''}`}${ended ? ' al-ended' : ''}`
    },
    h('td', { class: 'al-number al-soft', 'data-column': 'line' }, button),
    h('td', { class: 'al-line', 'data-column': 'source' }, text),
    h('td', { 'data-column': 'how' }, how),
    h('td', { class: 'al-words al-soft', 'data-column': 'reason' }, ...reasons(context, cell, line, part))
  );
}

/**
 * The reason why a part was not compiled, if it is shown at `line`, else an empty text.
 *
 * It is shown at the line with the call that the reason names, or else at the first line of the part.
 */
function reasonAt(
  { source, error, error_line: errorLine }: Cell,
  { first_line: first, last_line: last, reason }: CellPart,
  line: number
): string {
  if (errorLine !== null && first <= errorLine && errorLine <= last && /^\w+(Error|Exception): /.test(reason)) {
    // The reason is the error that ended the cell, perhaps in Dynamo's words.
    return line === errorLine && reason !== error ? reason : '';
  }
  const calledName = /^calls (.*?)(\(\))?$/.exec(reason)?.[1] ?? '';
  const lines = source.split('\n').slice(first - 1, last);
  const callIndex = calledName === '' ? 0 : lines.findIndex(text => text.includes(`${calledName}(`));
  // A reason may name a call that no line contains under this name. Then the first line shows the reason.
  return line !== first + Math.max(callIndex, 0) ? '' : callIndex < 0 ? `within it: ${reason}` : reason;
}

/**
 * Everything to say about a line: the error that ended the cell there, graph breaks, calls of libraries without
 * tensors, and the reason why its part was not compiled, unless the line of a graph break has the same reason.
 */
function reasons({ report }: IContext, cell: Cell, line: number, part: CellPart | undefined): HTMLElement[] {
  const breaks = report.graph_break_rows;
  const stops = breaks.filter(row => row.cell_line === line || row.where === `line ${line}`);
  const breaksHere = new Set(stops.filter(row => row.library === '').map(row => breakWords(row, line)));
  const libraryCalls = new Set(stops.filter(row => row.library !== '').map(row => breakWords(row, line)));
  const partBreaks = breaks.filter(
    row => part !== undefined && row.cell_line !== null && containsLine(part, row.cell_line)
  );
  const reason =
    part === undefined || partBreaks.some(row => row.words === part.reason) ? '' : reasonAt(cell, part, line);
  return [
    ...(cell.error !== null && cell.error_line === line ? [errorEvent(cell, cell.error)] : []),
    ...[...breaksHere].map(words => eventLine('break', 'warn', 'Dynamo stopped here, and Python took over', words)),
    ...[...libraryCalls].map(words => h('div', {}, prose(words))),
    ...(part?.first_line === line ? capturedBy(report, part) : []),
    ...(reason === '' ? [] : [h('div', {}, prose(reason))])
  ];
}

/** If the direct frontend traced a part of the cell: the frontend whose graphs ran `part`. */
function capturedBy({ cell, frames }: Report, part: CellPart): HTMLElement[] {
  const graphs = frames.filter(frame => part.frames.includes(frame.name)).flatMap(frame => frame.graphs);
  const traced = frames.some(frame => frame.graphs.some(graph => graph.frontend === 'direct'));
  if (cell?.kind !== 'statements' || !traced || graphs.length === 0) {
    return [];
  }
  return [h('div', {}, graphs.every(graph => graph.frontend === 'direct') ? 'traced directly' : 'captured by Dynamo')];
}

function containsLine(part: CellPart, line: number): boolean {
  return part.first_line <= line && line <= part.last_line;
}

function eventLine(word: string, tone: string, help: string, words: string): HTMLElement {
  const pill = mark(word, tone);
  pill.title = `${help}: ${words.replaceAll('`', '')}`;
  return h('div', {}, pill, ' ', prose(words));
}

function interrupted(cell: Cell): boolean {
  return cell.error?.startsWith('KeyboardInterrupt') === true;
}

/** The error that ended the cell, or a note that the user interrupted it. */
function errorEvent(cell: Cell, error: string): HTMLElement {
  return interrupted(cell)
    ? eventLine('interrupted', 'plain', 'You interrupted the cell here', error)
    : eventLine('error', 'bad', 'The cell ended here', error);
}

/** Why Dynamo stopped, with the place if it is in a function that the line calls. */
function breakWords({ words, where }: GraphBreakRow, line: number): string {
  return where === `line ${line}` ? words : `${words}, at ${where}`;
}

// Facts about the tensors

function factList({ facts }: Head): Child[] {
  if (facts.length === 0) {
    return [];
  }
  return [
    h(
      'dl',
      { class: 'al-facts' },
      ...facts.flatMap(({ key, title, sentence }) => [
        h('dt', {}, title),
        h('dd', { 'data-fact': key }, prose(sentence))
      ])
    )
  ];
}

// Functions

/** A count of calls; null if nobody counted the calls, because stock torch.compile was only observed. */
function counted({ calls, engine }: Frame, count: number): number | null {
  return engine === 'upstream' && calls.total === 0 ? null : count;
}

/** A column of counts. If `warn` is true, counts above 0 are marked as a warning. */
function countColumn(
  name: string,
  title: string,
  help: string,
  value: (frame: Frame) => number | null,
  warn = false
): Column<Frame> {
  const cell = (frame: Frame): Child => {
    const count = value(frame);
    return count === null ? '–' : warn && count > 0 ? mark(grouped(count), 'warn') : grouped(count);
  };
  return { name, title, help, kind: 'number', value, cell };
}

const FRAME_COLUMNS: readonly Column<Frame>[] = [
  {
    name: 'frame',
    title: 'function',
    help: 'A function that was compiled or called',
    kind: 'code',
    cell: frame => short(frame.name)
  },
  {
    name: 'line',
    title: 'where',
    help: 'The line of its definition; for code that Dynamo captured, the line where its first capture ended',
    kind: 'code',
    lesser: '',
    cell: frame => place(frame.line)
  },
  countColumn('graphs', 'graphs', 'How many graphs were compiled for it', frame => frameCountsOf(frame).graphs),
  countColumn('calls', 'calls', 'How often it was called', frame => counted(frame, frame.calls.total)),
  countColumn('compiled', 'compiled', 'How many calls ran compiled code', frame =>
    counted(frame, frame.calls.compiled)
  ),
  countColumn('eager', 'eager', 'How many calls ran eagerly', frame => counted(frame, frame.calls.eager), true),
  countColumn('refused', 'refused', 'The number of refused compilations', frame => frameCountsOf(frame).refusals, true),
  {
    name: 'compile_ns',
    title: 'compiling took',
    help: 'Wall time of all compilations',
    kind: 'number',
    value: frame => frameCountsOf(frame).compile_ns,
    cell: frame => duration(frameCountsOf(frame).compile_ns)
  }
];

function frameTable(context: IContext): Child[] {
  const { report } = context;
  const count = context.head.frames;
  if (count === 0) {
    return [soft(report.running === null ? 'No function was compiled or called.' : 'No function is compiled yet.')];
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

/** The report's name, torch's version and the devices in one line; the overview tab has the whole environment. */
export function environmentText(environment: Environment, name: string): string {
  const devices = environment.devices.slice(0, 8).map(deviceText);
  return [name, `torch ${environment.torch}`, ...devices].filter(each => each !== '').join(' · ');
}

/** Name a device. */
export function deviceText({ kind, index, name }: Environment['devices'][number]): string {
  const place = index === null ? kind : `${kind}:${index}`;
  return name === '' ? place : `${place} (${name})`;
}

function environmentFold(context: IContext): HTMLElement {
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

function storageTotal({ head }: IContext): string {
  const { storages, storage_bytes: bytes } = head.counts;
  return storages === 0 ? '' : `${amount(storages, 'storage')} of inputs and outputs, ${dataSize(bytes)}`;
}
