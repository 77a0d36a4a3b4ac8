/** Recompiles and calls: why each graph was made, which calls it served, what was refused, and the guards. */

import { countsOf } from '../model/counts';
import type { Call, Frame, Guard, Miss, Refusal } from '../model/report';
import { amount, duration, grouped, place, short } from '../model/words';
import { fold } from './context';
import type { Context, Entry } from './context';
import { h, heading, mark, soft, spoken, svg } from './dom';
import type { Child } from './dom';
import { table } from './table';
import type { Column } from './table';

/** How many calls the time line shows. */
const MOST_CALLS = 200;
const HEIGHT = 44;

/** Draw the panel. It is about functions, so it shows all graphs of those that the reader chose. */
export function callsPanel(context: Context): Child[] {
  const { report } = context;
  const frames = framesOf(context);
  const chosen = new Set(frames);
  const entries = context.entries.filter(entry => chosen.has(entry.frame));
  const refusals = frames.flatMap(frame => frame.refusals.map(refusal => ({ frame, refusal })));
  const drawn: Child[] = [];
  if (entries.length > 0) {
    const again = entries.filter(entry => entry.graph.misses.length > 0).length;
    drawn.push(
      heading('Graphs', again > 0 ? `${entries.length}, ${again} of them because no earlier one served` : `${entries.length}`),
      table(context, {
        name: 'recompiles',
        label: 'Why each graph was compiled, and how many calls it served',
        columns: GRAPH_COLUMNS,
        rows: entries,
        key: entry => entry.key
      })
    );
  }
  for (const frame of frames) {
    drawn.push(...frameCalls(frame, report.frames.length > 1));
  }
  if (refusals.length > 0) {
    drawn.push(
      heading('Refused', `${amount(refusals.length, 'compilation')} that did not come about`),
      table(context, {
        name: 'refusals',
        label: 'Compilations that were refused',
        columns: REFUSAL_COLUMNS,
        rows: refusals,
        key: row => `${row.frame.name}/${row.refusal.graph}`
      })
    );
  }
  drawn.push(...entries.flatMap(entry => guards(context, entry)));
  return drawn.length > 0 ? drawn : [soft('No calls were recorded.')];
}

export const AT = 'When, counted from the beginning of the recording';

const GRAPH_COLUMNS: readonly Column<Entry>[] = [
  { name: 'frame', title: 'function', kind: 'code', cell: entry => short(entry.frame.name) },
  { name: 'graph', title: 'graph', kind: 'number', lesser: 'graph ', value: entry => entry.graph.index, cell: entry => String(entry.graph.index) },
  {
    name: 'status',
    title: 'status',
    lesser: '',
    cell: ({ graph }) => mark(graph.status, graph.status === 'compiled' ? 'good' : 'warn')
  },
  {
    name: 'reused',
    title: 'reused',
    lesser: 'reused: ',
    help: 'It was compiled by an earlier run of the same cell',
    cell: ({ graph }) => (graph.reused ? 'yes' : 'no')
  },
  {
    name: 'reason',
    title: 'why no earlier graph served',
    help: 'What each earlier graph expected and the call did not meet',
    kind: 'words',
    cell: ({ graph }) => (graph.misses.length > 0 ? h('div', {}, ...graph.misses.map(missed)) : soft('the first'))
  },
  {
    name: 'calls',
    title: 'calls',
    help: 'How many calls it served',
    kind: 'number',
    value: ({ graph }) => graph.calls,
    cell: ({ graph }) => grouped(graph.calls)
  },
  { name: 'at_ns', title: 'at', help: AT, kind: 'number', lesser: 'at ', value: ({ graph }) => graph.at_ns, cell: ({ graph }) => duration(graph.at_ns) },
  {
    name: 'duration_ns',
    title: 'took',
    kind: 'number',
    value: ({ graph }) => graph.duration_ns,
    cell: ({ graph }) => duration(graph.duration_ns)
  }
];

/** Why one earlier graph did not serve, where the guard comes from, and what would avoid it. */
function missed(miss: Miss): Child {
  const earlier = miss.graph === null ? '' : `graph ${miss.graph}: `;
  const where = miss.line === null ? '' : ` ${place(miss.line)}.`;
  const hint = miss.suggestion === '' ? '' : ` To avoid it: ${miss.suggestion}.`;
  return h(
    'div',
    {},
    earlier,
    spoken(miss.sentence),
    h('span', { class: 'al-soft', title: miss.line?.code ?? null }, `.${where}${hint}`)
  );
}

interface RefusalRow {
  readonly frame: Frame;
  readonly refusal: Refusal;
}

const REFUSAL_COLUMNS: readonly Column<RefusalRow>[] = [
  { name: 'frame', title: 'function', kind: 'code', cell: row => short(row.frame.name) },
  { name: 'graph', title: 'graph', kind: 'number', lesser: 'graph ', value: row => row.refusal.graph, cell: row => String(row.refusal.graph) },
  { name: 'reason', title: 'reason', cell: row => mark(row.refusal.reason, 'warn') },
  { name: 'outcome', title: 'what happened instead', cell: row => row.refusal.outcome },
  { name: 'message', title: 'message', kind: 'words', cell: row => row.refusal.message },
  {
    name: 'line',
    title: 'line',
    help: 'The line of your program',
    kind: 'code',
    cell: ({ refusal }) => (refusal.line === null ? null : h('span', { title: refusal.line.code }, place(refusal.line)))
  }
];

function framesOf(context: Context): Frame[] {
  if (context.chosen.length === context.entries.length) {
    return [...context.report.frames];
  }
  return [...new Set(context.chosen.map(entry => entry.frame))];
}

function frameCalls(frame: Frame, named: boolean): Child[] {
  const { calls } = frame;
  const name = short(frame.name);
  if (calls.total === 0) {
    return [];
  }
  const counts = h(
    'p',
    { class: 'al-counts', 'data-frame': frame.name },
    h('span', { 'data-count': 'total' }, `${grouped(calls.total)} in all`),
    h('span', { 'data-count': 'compiled' }, `${grouped(calls.compiled)} compiled`),
    h('span', { 'data-count': 'eager' }, `${grouped(calls.eager)} eager`)
  );
  return [heading(named ? `Calls of ${name}` : 'Calls'), counts, ...timeLine(frame)];
}

/** The recent calls as bars in order, whose heights are the logarithms of their times. */
function timeLine(frame: Frame): Child[] {
  const recent = frame.calls.recent.slice(-MOST_CALLS);
  if (recent.length < 2) {
    return [];
  }
  const logs = recent.map(call => Math.log10(Math.max(call.duration_ns, 1)));
  const low = Math.min(...logs);
  const range = Math.max(Math.max(...logs) - low, 1);
  const times = recent.map(call => call.duration_ns);
  const about =
    `The last ${recent.length} calls, ${duration(Math.min(...times))} to ${duration(Math.max(...times))}, ` +
    'on a logarithmic scale.';
  const step = Math.min(100 / recent.length, 2);
  const bars = recent.map((call, index) => {
    const height = Math.round((HEIGHT - 2) * (0.15 + (0.85 * ((logs[index] ?? low) - low)) / range));
    return svg(
      'g',
      { 'data-call': index },
      svg('title', {}, aboutCall(call)),
      svg('rect', {
        class: `al-call-${callKind(call)}`,
        x: `${index * step}%`,
        y: HEIGHT - 1 - height,
        width: `${step * 0.8}%`,
        height
      })
    );
  });
  const kinds = [...new Set(recent.map(callKind))];
  const words: Readonly<Record<string, string>> = {
    warm: 'compiled code',
    cold: 'compiled first',
    eager: 'eager (outlined)'
  };
  return [
    svg(
      'svg',
      { class: 'al-calls', width: '100%', height: HEIGHT, role: 'img', 'aria-label': about, 'data-calls': frame.name },
      ...bars
    ),
    h(
      'p',
      { class: 'al-key' },
      about,
      ...kinds.map(kind =>
        h(
          'span',
          {},
          svg(
            'svg',
            { width: 10, height: 10, class: 'al-swatch', 'aria-hidden': 'true' },
            svg('rect', { class: `al-call-${kind}`, x: 1, y: 1, width: 8, height: 8 })
          ),
          words[kind] ?? kind
        )
      )
    )
  ];
}

function callKind(call: Call): string {
  return !call.compiled ? 'eager' : call.cold ? 'cold' : 'warm';
}

function aboutCall(call: Call): string {
  if (!call.compiled) {
    return `${duration(call.duration_ns)}, eager`;
  }
  const served = call.graph === null ? 'an unknown graph' : `graph ${call.graph}`;
  return `${duration(call.duration_ns)}, ${served}${call.cold ? ', compilation included' : ''}`;
}

/** What is assumed, and the line of the program that does. */
function assumption({ sentence, line }: Guard): Child {
  const where = line === null ? null : h('span', { class: 'al-soft', title: line.code }, ` ${place(line)}`);
  return h('span', {}, spoken(sentence), where);
}

function guards(context: Context, entry: Entry): Child[] {
  const rows = entry.graph.guards;
  const { guards: total } = countsOf(entry.graph);
  if (total === 0) {
    return [];
  }
  const name = context.entries.length > 1 ? [h('code', {}, entry.title), ' '] : [];
  const title = ['Guards ', ...name, h('small', {}, `${amount(total, 'assumption')} that a call must meet to be served`)];
  return [
    fold(context, `guards ${entry.key}`, title, () => [
      table(context, {
        name: 'guards',
        label: `Guards of ${entry.title}`,
        columns: [
          { name: 'subject', title: 'about', kind: 'code', cell: row => row.subject },
          { name: 'kind', title: 'kind', cell: row => row.kind },
          { name: 'sentence', title: 'assumption', kind: 'words', cell: assumption }
        ],
        rows,
        total,
        key: row => row.subject
      })
    ])
  ];
}
