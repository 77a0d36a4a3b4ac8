/** Ranks: the processes of a distributed job, their differences, their collectives, and the time in them. */

import { frameCountsOf } from '../model/report';
import type { RankRow, Report, WaitRow } from '../model/report';
import { headOf } from '../model/verdict';
import { amount, dataSize, duration, grouped, listed, short } from '../model/words';
import type { IContext } from './context';
import { h, heading, mark, prose, soft } from './dom';
import type { Child } from './dom';
import { table } from './table';
import type { Column } from './table';

/** The headings of the kinds of differences, in the order of the page. */
const KINDS: readonly (readonly [title: string, subject: string, facts: readonly string[]])[] = [
  ['Graphs, node by node', 'node', ['graph', 'node']],
  ['Guards', 'guard of', ['guard']],
  ['Mutations, outputs and saved values', 'of', ['mutation', 'output', 'saved']],
  ['Kernels', 'kernel', ['kernel']],
  ['Code, times, versions and settings', 'of', ['code', 'time', 'run']]
];

/** The reports of all ranks that sent one. */
export function reportsOf(gathered: Report): readonly Report[] {
  return [gathered, ...gathered.rank_reports];
}

/** Draw the panel: the differences that can stop the job, a table of the ranks, the other differences, collectives. */
export function ranksPanel(context: IContext): Child[] {
  const { gathered } = context;
  const rows = gathered.rank_rows;
  const sentences = [...new Set(rows.map(row => row.sentence).filter(sentence => sentence !== ''))];
  const suggestions = [...new Set(rows.map(row => row.suggestion).filter(text => text !== ''))];
  const count = headOf(gathered).apart_ranks;
  return [
    h(
      'p',
      { class: 'al-counts' },
      count > 0 ? mark(amount(count, 'difference'), 'write') : mark('no differences', 'good'),
      h('span', { class: 'al-soft' }, `between the ${amount(gathered.world_size, 'rank')}`)
    ),
    ...sentences.map(text => h('p', { class: 'al-note', 'data-rank-note': '' }, h('strong', {}, prose(text)))),
    rows.some(row => row.fact === 'recompile')
      ? soft(
          'While a rank compiles, the others wait at their next collective. If they wait longer than the timeout of ' +
            'the process group, or if the new graph has other collectives than theirs, the job ends with an error or ' +
            'hangs.'
        )
      : null,
    ...suggestions.map(text => h('p', {}, prose(`To avoid the recompile: ${text}.`))),
    heading('Ranks', 'choose a rank to see its report in the other tabs'),
    rankTable(context),
    ...KINDS.flatMap(([title, subject, facts]) => differenceTable(context, title, subject, facts)),
    ...collectiveTable(context),
    ...waitTable(context)
  ];
}

// The ranks

interface IRank {
  readonly rank: number;
  /** Its report; null if it sent none. */
  readonly report: Report | null;
}

function countColumn(name: string, title: string, help: string, value: (report: Report) => number): Column<IRank> {
  const read = ({ report }: IRank): number | null => (report === null ? null : value(report));
  return {
    name,
    title,
    help,
    kind: 'number',
    value: read,
    cell: row => {
      const count = read(row);
      return count === null ? '–' : grouped(count);
    }
  };
}

function timeColumn(name: string, title: string, help: string, value: (report: Report) => number): Column<IRank> {
  return {
    ...countColumn(name, title, help, value),
    cell: ({ report }) => duration(report === null ? null : value(report))
  };
}

/** The sum of a number over the functions of a report. */
function sum(report: Report, value: (frame: Report['frames'][number]) => number): number {
  return report.frames.reduce((total, frame) => total + value(frame), 0);
}

function rankTable(context: IContext): HTMLElement {
  const { gathered, report: shown } = context;
  const lost = gathered.rank_rows.filter(row => row.fact === 'missing').map(row => ({ rank: row.rank, report: null }));
  const waited = reportsOf(gathered).some(report => report.wait_rows.length > 0);
  const present = reportsOf(gathered).map(report => ({ rank: report.rank ?? 0, report }));
  const columns: Column<IRank>[] = [
    {
      name: 'rank',
      title: 'rank',
      value: ({ rank }) => rank,
      cell: ({ rank, report }) => {
        if (report === null) {
          return h('span', {}, `${rank} `, mark('missing', 'bad'));
        }
        const chosen = report.rank === shown.rank;
        const button = h(
          'button',
          { type: 'button', class: 'al-button', 'data-key': `rank ${rank}`, 'aria-pressed': String(chosen) },
          `rank ${rank}${chosen ? ' (shown)' : ''}`
        );
        button.addEventListener('click', () => context.chooseRank(rank));
        return button;
      }
    },
    countColumn('graphs', 'graphs', 'How many graphs were compiled', report => headOf(report).graphs),
    {
      name: 'recompiles',
      title: 'recompiles',
      help: 'How many graphs were compiled because no earlier graph accepted the call',
      kind: 'number',
      value: ({ report }) => (report === null ? null : headOf(report).recompiles),
      cell: ({ rank, report }) => {
        const count = report === null ? '–' : grouped(headOf(report).recompiles);
        const alone = gathered.rank_rows.some(row => row.fact === 'recompile' && row.rank === rank);
        return alone ? mark(count, 'warn') : count;
      }
    },
    countColumn('breaks', 'graph breaks', 'Where Python took over', report => headOf(report).breaks),
    countColumn('refused', 'refused', 'The number of refused compilations', report => headOf(report).refused),
    countColumn('calls', 'calls', 'How often compiled functions were called', report =>
      sum(report, frame => frame.calls.total)
    ),
    countColumn('eager', 'eager', 'How many of these calls ran eagerly', report =>
      sum(report, frame => frame.calls.eager)
    ),
    timeColumn('compile_ns', 'compiling took', 'Wall time of all compilations', report =>
      sum(report, frame => frameCountsOf(frame).compile_ns)
    ),
    timeColumn('called_ns', 'compiled calls took', 'Wall time of compiled calls, without the compilations', report =>
      report.time_rows.filter(row => row.kind === 'compiled').reduce((total, row) => total + row.duration_ns, 0)
    ),
    ...(waited
      ? [
          timeColumn(
            'wait_ns',
            'in collectives',
            'Total duration of the collectives: the transfer, and the wait for other ranks',
            waitOf
          )
        ]
      : []),
    timeColumn('duration_ns', 'recorded', 'Wall time of the recording', report => report.duration_ns),
    {
      name: 'ended',
      title: 'ended with',
      help: 'The error that ended the block or script',
      kind: 'words',
      cell: ({ report }) => report?.ended ?? ''
    }
  ];
  const errors = present.some(({ report }) => report.ended !== '');
  return table(context, {
    name: 'rank list',
    label: 'The ranks of the job',
    columns: errors ? columns : columns.slice(0, -1),
    rows: [...present, ...lost].sort((one, other) => one.rank - other.rank),
    key: ({ rank }) => `rank ${rank}`
  });
}

// The other differences

function differenceTable(context: IContext, title: string, subject: string, facts: readonly string[]): Child[] {
  const rows = context.gathered.rank_rows.filter(row => facts.includes(row.fact));
  if (rows.length === 0) {
    return [];
  }
  const references = [...new Set(rows.map(row => row.reference))];
  const columns: Column<RankRow>[] = [
    { name: 'subject', title: subject, kind: 'code', cell: row => row.subject },
    { name: 'rank', title: 'rank', kind: 'number', value: row => row.rank, cell: row => String(row.rank) },
    {
      name: 'graph',
      title: 'graph',
      kind: 'code',
      lesser: '',
      cell: row => (row.frame === null ? '' : `${short(row.frame)}${row.graph === null ? '' : ` · ${row.graph}`}`)
    },
    ...(rows.some(row => row.part !== '')
      ? [{ name: 'part', title: 'part', lesser: '', cell: (row: RankRow) => row.part }]
      : []),
    { name: 'expected', title: `rank ${references.join(', ')} has`, kind: 'words', cell: row => row.expected },
    { name: 'value', title: 'this rank has', kind: 'words', cell: row => row.value },
    { name: 'change', title: 'change', kind: 'words', cell: row => mark(row.change || 'differs', 'plain') }
  ];
  return [
    heading(title, 'differences'),
    table(context, { name: `ranks ${facts[0]}`, meanings: 'ranks', label: title, columns, rows, key: rowKey })
  ];
}

function rowKey(row: RankRow): string {
  return `rank ${row.rank} ${row.subject}`;
}

// Collectives

/** The collectives of one kind in a graph that is equal on some ranks. */
interface ICollectives {
  readonly ranks: readonly number[];
  readonly graph: string;
  readonly part: string;
  readonly op: string;
  readonly count: number;
  readonly input: number;
  readonly output: number;
}

const COLLECTIVES: readonly Column<ICollectives>[] = [
  { name: 'op', title: 'collective', kind: 'code', cell: row => row.op },
  { name: 'rank', title: 'ranks', cell: row => listed(row.ranks.map(String)) },
  { name: 'graph', title: 'graph', kind: 'code', lesser: '', cell: row => row.graph },
  { name: 'part', title: 'part', lesser: '', cell: row => row.part },
  {
    name: 'count',
    title: 'per call',
    help: 'How often one call of the graph calls it',
    kind: 'number',
    value: row => row.count,
    cell: row => grouped(row.count)
  },
  {
    name: 'input_bytes',
    title: 'bytes in',
    help: 'The bytes that the process passes to all of them',
    kind: 'number',
    value: row => row.input,
    cell: row => dataSize(row.input)
  },
  {
    name: 'output_bytes',
    title: 'bytes out',
    help: 'The bytes of their results',
    kind: 'number',
    value: row => row.output,
    cell: row => dataSize(row.output)
  }
];

function collectiveTable(context: IContext): Child[] {
  const rows = collectivesOf(context.gathered);
  if (rows.length === 0) {
    return [
      heading('Collectives'),
      soft(
        'No graph contains a collective. DDP and FSDP exchange gradients and parameters outside of the graphs of the ' +
          'modules that they wrap.'
      )
    ];
  }
  return [
    heading('Collectives', 'in the graphs'),
    table(context, {
      name: 'collectives',
      label: 'Collectives in the graphs',
      columns: COLLECTIVES,
      rows,
      key: row => row.op
    })
  ];
}

function collectivesOf(gathered: Report): ICollectives[] {
  const kinds = new Map<string, ICollectives>();
  for (const report of reportsOf(gathered)) {
    const here = new Map<string, ICollectives>();
    for (const frame of report.frames) {
      for (const each of frame.graphs.flatMap(graph => graph.collectives.map(row => ({ graph, row })))) {
        const { part, op, input_bytes: input, output_bytes: output } = each.row;
        const graph = `${short(frame.name)} · ${each.graph.index}`;
        const key = [frame.name, each.graph.index, part, op].join('/');
        const kind = here.get(key) ?? { ranks: [report.rank ?? 0], graph, part, op, count: 0, input: 0, output: 0 };
        here.set(key, { ...kind, count: kind.count + 1, input: kind.input + input, output: kind.output + output });
      }
    }
    for (const [key, kind] of here) {
      const wholeKey = [key, kind.count, kind.input, kind.output].join('/');
      const known = kinds.get(wholeKey);
      kinds.set(wholeKey, known === undefined ? kind : { ...known, ranks: [...known.ranks, ...kind.ranks] });
    }
  }
  return [...kinds.values()];
}

// Waiting

/** The time that a rank spent in collectives, of one kind. */
interface IWait {
  readonly rank: number;
  readonly row: WaitRow;
}

const WAITS: readonly Column<IWait>[] = [
  { name: 'op', title: 'collective', kind: 'code', cell: ({ row }) => row.op },
  { name: 'rank', title: 'rank', kind: 'number', value: ({ rank }) => rank, cell: ({ rank }) => String(rank) },
  {
    name: 'count',
    title: 'calls',
    kind: 'number',
    value: ({ row }) => row.count,
    cell: ({ row }) => grouped(row.count)
  },
  {
    name: 'duration_ns',
    title: 'in progress',
    help: 'For gloo, from the call to the result; for NCCL, the kernel. If several run at a time, it counts once',
    kind: 'number',
    value: ({ row }) => row.duration_ns,
    cell: ({ row }) => duration(row.duration_ns)
  }
];

function waitOf(report: Report): number {
  return report.wait_rows.reduce((total, row) => total + row.duration_ns, 0);
}

function waitTable(context: IContext): Child[] {
  const rows = reportsOf(context.gathered).flatMap(report =>
    report.wait_rows.map(row => ({ rank: report.rank ?? 0, row }))
  );
  if (rows.length === 0) {
    return [];
  }
  const least = context.gathered.rank_rows.find(row => row.fact === 'waiting');
  return [
    heading('Time in collectives', 'also of those outside of the graphs'),
    least === undefined
      ? null
      : h(
          'p',
          { 'data-waited-least': '' },
          `Rank ${least.rank} spent least time in collectives, ${least.value}; ${least.change} (rank ${least.reference}: ${least.expected}).`
        ),
    table(context, {
      name: 'waits',
      label: 'The time of each rank in collectives',
      columns: WAITS,
      rows,
      key: ({ rank, row }) => `rank ${rank} ${row.op}`
    })
  ];
}
