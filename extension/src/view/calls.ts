/** Recompiles and calls: why each graph was compiled, which calls it served, the refusals, and the guards. */

import { countsOf, frameCountsOf } from '../model/report';
import type { Call, Frame, FrameCounts, Guard, Miss, Refusal } from '../model/report';
import { amount, duration, grouped, listed, place, short } from '../model/words';
import { fold } from './context';
import type { IContext, IEntry } from './context';
import { h, heading, mark, prose, soft, svg } from './dom';
import type { Child } from './dom';
import { allGraphsChosen } from './graph';
import { table } from './table';
import type { Column } from './table';

/** The time line shows at most this many calls. */
const MOST_CALLS = 200;
const HEIGHT = 44;

/** Draw the panel. It describes functions, so it shows all graphs of the functions that the reader chose. */
export function callsPanel(context: IContext): Child[] {
  const { report } = context;
  const frames = framesOf(context);
  const chosen = new Set(frames);
  const entries = context.entries.filter(entry => chosen.has(entry.frame));
  const refusalTotal = count(context, frames, 'refusals', 'refused');
  const refusals = frames.flatMap(frame => frame.refusals.map(refusal => ({ frame, refusal })));
  const drawn: Child[] = [];
  if (entries.length > 0) {
    const [graphTotal, recompileTotal] = [
      count(context, frames, 'graphs', 'listed'),
      count(context, frames, 'recompiles', 'recompiles')
    ];
    drawn.push(
      heading(
        'Graphs',
        recompileTotal > 0
          ? `${grouped(graphTotal)}, ${grouped(recompileTotal)} of them recompiles`
          : grouped(graphTotal)
      ),
      table(context, {
        name: 'recompiles',
        label: 'Why each graph was compiled, and how many calls it served',
        columns: graphColumns(context),
        rows: entries,
        total: graphTotal,
        key: entry => entry.key
      }),
      ...advice(entries)
    );
  }
  for (const frame of frames) {
    drawn.push(...frameCalls(frame, report.frames.length > 1));
  }
  if (refusals.length > 0) {
    drawn.push(
      heading('Refused', amount(refusalTotal, 'compilation')),
      table(context, {
        name: 'refusals',
        label: 'Compilations that were refused',
        columns: REFUSAL_COLUMNS,
        rows: refusals,
        total: refusalTotal,
        key: row => `${row.frame.name}/${row.refusal.graph}`
      })
    );
  }
  drawn.push(...entries.flatMap(entry => guards(context, entry)));
  return drawn.length > 0 ? drawn : [soft('No calls were recorded.')];
}

export const AT_HELP = 'When, counted from the beginning of the recording';

const graphColumns = (context: IContext): readonly Column<IEntry>[] => [
  { name: 'frame', title: 'function', kind: 'code', cell: entry => short(entry.frame.name) },
  {
    name: 'graph',
    title: 'graph',
    kind: 'number',
    lesser: 'graph ',
    value: entry => entry.graph.index,
    cell: entry => String(entry.graph.index)
  },
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
    help: 'The failed guard of the most similar earlier graph',
    kind: 'words',
    cell: entry => reason(context, entry)
  },
  {
    name: 'calls',
    title: 'calls',
    help: 'How many calls it served',
    kind: 'number',
    value: ({ graph }) => graph.calls,
    cell: ({ graph }) => grouped(graph.calls)
  },
  {
    name: 'at_ns',
    title: 'at',
    help: AT_HELP,
    kind: 'number',
    lesser: 'at ',
    value: ({ graph }) => graph.at_ns,
    cell: ({ graph }) => duration(graph.at_ns)
  },
  {
    name: 'duration_ns',
    title: 'took',
    kind: 'number',
    value: ({ graph }) => graph.duration_ns,
    cell: ({ graph }) => duration(graph.duration_ns)
  }
];

/** Why the most similar earlier graph did not accept the call; a fold has the reasons of the other graphs. */
function reason(context: IContext, { graph, key }: IEntry): Child {
  const [nearest, ...others] = graph.misses;
  if (nearest === undefined) {
    return soft('the first');
  }
  const title = [h('small', {}, amount(others.length, 'other graph'))];
  return h(
    'div',
    {},
    missed(nearest),
    others.length > 0 ? fold(context, `reason ${key}`, title, () => others.map(missed)) : null
  );
}

/** Why one earlier graph did not accept the call, and which line caused the guard. */
function missed(miss: Miss): Child {
  const earlier = miss.graph === null ? '' : `graph ${miss.graph}: `;
  const lineText = miss.line === null ? '' : ` ${place(miss.line)}.`;
  const origin = h('span', { class: 'al-soft', title: miss.line?.code ?? null }, `.${lineText}`);
  return h('div', {}, earlier, prose(miss.sentence), origin);
}

/** Give each piece of advice on recompiles once, with all the values that it applies to. */
function advice(entries: readonly IEntry[]): Child[] {
  const subjects = new Map<string, Set<string>>();
  for (const { graph } of entries) {
    const [nearest] = graph.misses;
    if (nearest !== undefined && nearest.suggestion !== '') {
      const names = subjects.get(nearest.suggestion) ?? new Set();
      subjects.set(nearest.suggestion, names.add(nearest.subject === '' ? 'this' : `\`${nearest.subject}\``));
    }
  }
  return [...subjects].map(([text, names]) =>
    h('p', { 'data-advice': '' }, prose(`To avoid recompiles for ${listed([...names])}: ${text}.`))
  );
}

interface IRefusalRow {
  readonly frame: Frame;
  readonly refusal: Refusal;
}

const REFUSAL_COLUMNS: readonly Column<IRefusalRow>[] = [
  { name: 'frame', title: 'function', kind: 'code', cell: row => short(row.frame.name) },
  {
    name: 'graph',
    title: 'graph',
    kind: 'number',
    lesser: 'graph ',
    value: row => row.refusal.graph,
    cell: row => String(row.refusal.graph)
  },
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

/**
 * Add up a count over some functions: `frameCount` is its name in the counts of a function, `headCount` its name in
 * the head. If the reader chose all graphs, the head's count is used, because it includes functions that were cut.
 */
function count(
  context: IContext,
  frames: readonly Frame[],
  frameCount: keyof FrameCounts,
  headCount: 'listed' | 'recompiles' | 'refused'
): number {
  return allGraphsChosen(context)
    ? context.head[headCount]
    : frames.reduce((sum, frame) => sum + frameCountsOf(frame)[frameCount], 0);
}

function framesOf(context: IContext): Frame[] {
  if (allGraphsChosen(context)) {
    return [...context.report.frames];
  }
  return [...new Set(context.chosen.map(entry => entry.frame))];
}

function frameCalls(frame: Frame, withName: boolean): Child[] {
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
  return [heading(withName ? `Calls of ${name}` : 'Calls'), counts, ...timeLine(frame)];
}

/** The recent calls as bars in order. The height of a bar is the logarithm of the call's time. */
function timeLine(frame: Frame): Child[] {
  const recent = frame.calls.recent.slice(-MOST_CALLS);
  if (recent.length < 2) {
    return [];
  }
  const logs = recent.map(call => Math.log10(Math.max(call.duration_ns, 1)));
  const low = Math.min(...logs);
  const range = Math.max(Math.max(...logs) - low, 1);
  const times = recent.map(call => call.duration_ns);
  const description =
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
  const kindNames: Readonly<Record<string, string>> = {
    warm: 'compiled code',
    cold: 'compiled first',
    eager: 'eager (outlined)'
  };
  return [
    svg(
      'svg',
      {
        class: 'al-calls',
        width: '100%',
        height: HEIGHT,
        role: 'img',
        'aria-label': description,
        'data-calls': frame.name
      },
      ...bars
    ),
    h(
      'p',
      { class: 'al-key' },
      description,
      ...kinds.map(kind =>
        h(
          'span',
          {},
          svg(
            'svg',
            { width: 10, height: 10, class: 'al-swatch', 'aria-hidden': 'true' },
            svg('rect', { class: `al-call-${kind}`, x: 1, y: 1, width: 8, height: 8 })
          ),
          kindNames[kind] ?? kind
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
  const graphName = call.graph === null ? 'an unknown graph' : `graph ${call.graph}`;
  return `${duration(call.duration_ns)}, ${graphName}${call.cold ? ', compilation included' : ''}`;
}

/** A guard in words, with the line of the program that caused it. */
function assumption({ sentence, line }: Guard): Child {
  const lineText = line === null ? null : h('span', { class: 'al-soft', title: line.code }, ` ${place(line)}`);
  return h('span', {}, prose(sentence), lineText);
}

function guards(context: IContext, entry: IEntry): Child[] {
  const rows = entry.graph.guards;
  const { guards: total } = countsOf(entry.graph);
  if (total === 0) {
    return [];
  }
  const name = context.entries.length > 1 ? [h('code', {}, entry.title), ' '] : [];
  const title = [
    'Guards ',
    ...name,
    h('small', {}, `${amount(total, 'assumption')} that a call must meet to be served`)
  ];
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
