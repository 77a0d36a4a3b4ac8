/** Stages: where the time went, and what each step of the pipeline handed on. */

import { countsOf } from '../model/counts';
import type { Code, Stage, TimeRow } from '../model/report';
import { amount, duration, grouped } from '../model/words';
import { codeBlock } from './code';
import { fold } from './context';
import type { Context, Entry } from './context';
import { h, heading, soft, spoken } from './dom';
import type { Child } from './dom';
import { graphFacts, userNames } from './graph';
import { nodesFold } from './nodes';
import { codeKey, partOf } from './selection';
import { table } from './table';
import type { Column } from './table';

/** Draw the panel: one fold per graph where there are several. */
export function stagesPanel(context: Context): Child[] {
  const [only] = context.chosen;
  const time = timeTable(context);
  if (only === undefined) {
    return [...time, soft('Nothing was compiled, so there are no stages.')];
  }
  if (context.chosen.length === 1) {
    return [...time, ...graphStages(context, only)];
  }
  const graphs = context.chosen.map((entry, index) =>
    fold(
      context,
      `stages ${entry.key}`,
      [h('code', {}, entry.title), ' ', h('small', {}, graphFacts(entry.graph).join(' · '))],
      () => graphStages(context, entry),
      index === 0
    )
  );
  return [...time, ...graphs];
}

/** What the kinds of `TimeRow` are called. */
const TIME: Readonly<Record<string, string>> = {
  dynamo: 'Dynamo captures',
  capture: 'capture of the arguments',
  dedupe: 'duplicates',
  synthetic_bases: 'synthetic bases',
  trace: 'trace',
  partition: 'partition',
  compile: 'compilation by the backend',
  runtime: 'the run-time function is written',
  between: 'guards, and between the stages',
  backward: 'further backwards are derived',
  verification: 'comparison with eager',
  recording: 'the report itself',
  compiled: 'compiled calls',
  eager: 'calls that run eagerly',
  timing: 'measurements for --time',
  rest: 'Python, backward, everything else'
};

/** Where the time of the cell, or of the recording, went: the rows add up to it. */
function timeTable(context: Context): Child[] {
  const { report } = context;
  const rows = report.time_rows.filter(row => row.duration_ns > 0);
  const total = report.duration_ns;
  if (rows.length < 2) {
    return [];
  }
  return [
    heading('Where the time went', `${duration(total)}, each moment counted once`),
    table<TimeRow>(context, {
      name: 'time',
      label: 'Where the time went',
      columns: [
        { name: 'kind', title: 'what', kind: 'words', cell: row => TIME[row.kind] ?? row.kind },
        { name: 'count', title: 'times', kind: 'number', value: row => (row.kind === 'rest' ? null : row.count), cell: row => (row.kind === 'rest' ? null : grouped(row.count)) },
        { name: 'share', title: 'share', help: SHARE, value: row => row.duration_ns, cell: row => share(row.duration_ns, total) },
        { name: 'duration_ns', title: 'time', kind: 'number', value: row => row.duration_ns, cell: row => duration(row.duration_ns) }
      ],
      rows,
      key: row => row.kind
    })
  ];
}

function graphStages(context: Context, entry: Entry): Child[] {
  const { graph } = entry;
  return [
    graph.backward_error === null ? null : h('p', { class: 'al-note' }, 'The backward raises: ', spoken(graph.backward_error)),
    ...stageTable(context, entry),
    nodesFold(context, entry),
    ...stageCodes(context, entry, stage => stage.name !== 'backward' || !hasMany(entry))
  ];
}

/** Whether several backwards were compiled later, each for other tangents: they stand in one fold. */
function hasMany({ graph }: Entry): boolean {
  return graph.stages.filter(stage => stage.name === 'backward').length > 1;
}

const SHARE = 'Its share of the whole time';

const STAGE_COLUMNS = (total: number): readonly Column<Stage>[] => [
  { name: 'stage', title: 'stage', kind: 'code', cell: row => row.name },
  { name: 'duration_ns', title: 'wall time', kind: 'number', value: row => row.duration_ns, cell: row => duration(row.duration_ns) },
  { name: 'share', title: 'share', help: SHARE, value: row => row.duration_ns, cell: row => share(row.duration_ns, total) },
  {
    name: 'nodes',
    title: 'nodes',
    kind: 'number',
    value: row => row.node_count,
    cell: row => (row.node_count === null ? null : grouped(row.node_count))
  },
  { name: 'summary', title: 'what it did', kind: 'words', cell: row => row.summary }
];

function share(part: number, total: number): HTMLElement {
  const percent = total > 0 ? (100 * part) / total : 0;
  const bar = h('i');
  bar.style.width = `${percent}%`;
  return h('span', { class: 'al-track', title: `${percent.toFixed(0)} % of the time` }, bar);
}

function stageTable(context: Context, entry: Entry): Child[] {
  const { stages } = entry.graph;
  if (stages.length === 0) {
    const why = entry.graph.status === 'refused' ? 'The compilation was refused before a stage was done.' : '';
    return [soft(why || 'No stages were recorded.')];
  }
  const counts = countsOf(entry.graph);
  const total = counts.stages_ns;
  const later = hasMany(entry) ? stages.filter(stage => stage.name === 'backward') : [];
  const rows = later.length > 0 ? stages.filter(stage => stage.name !== 'backward') : stages;
  const columns = STAGE_COLUMNS(total);
  const data = { 'data-frame': entry.frame.name, 'data-graph': String(entry.graph.index) };
  const label = `Stages of ${entry.title}`;
  const missing = counts.stages - stages.length;
  const shown: Child[] = [
    heading('Stages', `${duration(total)} in ${amount(counts.stages, 'stage')}`),
    table(context, { name: 'stages', label, columns, rows, total: rows.length + missing, key: row => row.name, data })
  ];
  if (later.length > 0) {
    const took = duration(later.reduce((sum, stage) => sum + stage.duration_ns, 0));
    shown.push(
      fold(
        context,
        `backwards ${entry.key}`,
        [`${amount(later.length, 'further backward')}, each for gradients of other results `, h('small', {}, took)],
        () => [
          table(context, { name: 'backwards', meanings: 'stages', label: `${label}, backward`, columns, rows: later, key: row => row.summary }),
          ...stageCodes(context, entry, stage => stage.name === 'backward')
        ]
      )
    );
  }
  return shown;
}

function stageCodes(context: Context, entry: Entry, which: (stage: Stage) => boolean): Child[] {
  return entry.graph.stages.flatMap((stage, position) =>
    (which(stage) ? stage.codes : []).map((code, index) => {
      const details = fold(
        context,
        codeKey(entry, position, index),
        [h('code', {}, stage.name), ' ', code.title, ' ', h('small', {}, lines(code))],
        () => {
          const label = `${stage.name}: ${code.title}`;
          return [codeBlock(context, { ...code, label, names: userNames(entry), links: linksOf(context, entry, stage, code) })];
        }
      );
      details.dataset['stage'] = stage.name;
      details.dataset['code'] = code.title;
      return details;
    })
  );
}

/** The user's lines behind the lines of a stage's code: those of nodes in a graph, of kernels in the compiler's code. */
function linksOf(context: Context, entry: Entry, stage: Stage, code: Code): (line: string) => readonly number[] {
  const origins = context.selection.lines(true);
  const part = partOf(code.title);
  if (part !== '') {
    return line => origins.ofNode(entry, part, /^ {4}(\w+) = /.exec(line)?.[1] ?? '', stage.name);
  }
  const called = entry.graph.kernels.filter(kernel => code.title.endsWith(` for ${kernel.graph_name}`));
  const written = new Map(called.map(kernel => [kernel.language === 'extern' ? kernel.source : kernel.name, kernel]));
  return line => {
    const text = line.trim();
    const kernel = written.get(text) ?? written.get(/^(\w+)(?: = async_compile\.|\(|\.run\()/.exec(text)?.[1] ?? '');
    return kernel === undefined ? [] : origins.ofKernel(entry, kernel);
  };
}

function lines(code: Code): string {
  return amount(code.text.trimEnd().split('\n').length, 'line');
}
