/** Stages: where the time went, and the result of each stage of the pipeline. */

import { countsOf } from '../model/report';
import type { Code, Stage, TimeRow } from '../model/report';
import { amount, duration, grouped } from '../model/words';
import { codeBlock } from './code';
import { fold } from './context';
import type { IContext, IEntry } from './context';
import { h, heading, soft } from './dom';
import type { Child } from './dom';
import { cutGraphsNotice, graphFacts, userNames } from './graph';
import { nodesFold } from './nodes';
import { codeKey, partOf } from './selection';
import { table } from './table';
import type { Column } from './table';

/** Draw the panel: where the time went, and the stages of each graph; several graphs have a fold each. */
export function stagesPanel(context: IContext): Child[] {
  const [firstEntry] = context.chosen;
  const time = timeTable(context);
  if (firstEntry === undefined) {
    return [...time, soft('Nothing was compiled, so there are no stages.')];
  }
  if (context.chosen.length === 1) {
    return [...time, ...graphStages(context, firstEntry)];
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
  return [...time, ...graphs, cutGraphsNotice(context)];
}

/** The names of the kinds of `TimeRow`. */
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

/** The names of the kinds of `TimeRow` in a report of stock `torch.compile`, if they are not the stages' names. */
const UPSTREAM_TIME: Readonly<Record<string, string>> = { rest: 'other phases' };

/**
 * A table of the time that each kind of work took. The rows add up to the time of the cell or of the recording, or in a
 * report of stock `torch.compile` to the time of the compilations.
 */
function timeTable(context: IContext): Child[] {
  const { report } = context;
  const rows = report.time_rows.filter(row => row.duration_ns > 0);
  const total = rows.reduce((sum, row) => sum + row.duration_ns, 0);
  if (rows.length < 2) {
    return [];
  }
  return [
    heading('Where the time went', `${duration(total)}, each moment counted once`),
    table<TimeRow>(context, {
      name: 'time',
      label: 'Where the time went',
      columns: [
        {
          name: 'kind',
          title: 'what',
          kind: 'words',
          cell: row => (row.engine === 'upstream' ? UPSTREAM_TIME : TIME)[row.kind] ?? row.kind
        },
        {
          name: 'count',
          title: 'times',
          kind: 'number',
          value: row => (row.kind === 'rest' ? null : row.count),
          cell: row => (row.kind === 'rest' ? null : grouped(row.count))
        },
        {
          name: 'share',
          title: 'share',
          help: SHARE_HELP,
          value: row => row.duration_ns,
          cell: row => share(row.duration_ns, total)
        },
        {
          name: 'duration_ns',
          title: 'time',
          kind: 'number',
          value: row => row.duration_ns,
          cell: row => duration(row.duration_ns)
        }
      ],
      rows,
      key: row => `${row.engine} ${row.kind}`
    })
  ];
}

function graphStages(context: IContext, entry: IEntry): Child[] {
  return [
    ...stageTable(context, entry),
    nodesFold(context, entry),
    ...stageCodes(context, entry, stage => stage.name !== 'backward' || !hasManyBackwards(entry))
  ];
}

/** Whether several backwards were compiled after the forward, each for other tangents. They are shown in one fold. */
function hasManyBackwards({ graph }: IEntry): boolean {
  return graph.stages.filter(stage => stage.name === 'backward').length > 1;
}

const SHARE_HELP = 'Its share of the whole time';

const STAGE_COLUMNS = (total: number): readonly Column<Stage>[] => [
  { name: 'stage', title: 'stage', kind: 'code', cell: row => row.name },
  {
    name: 'duration_ns',
    title: 'wall time',
    kind: 'number',
    value: row => row.duration_ns,
    // A stage of stock torch.compile may have records and no time.
    cell: row => (row.duration_ns > 0 ? duration(row.duration_ns) : null)
  },
  {
    name: 'share',
    title: 'share',
    help: SHARE_HELP,
    value: row => row.duration_ns,
    cell: row => share(row.duration_ns, total)
  },
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

function stageTable(context: IContext, entry: IEntry): Child[] {
  const { stages } = entry.graph;
  if (stages.length === 0) {
    const refusal = entry.graph.status === 'refused' ? 'The compilation was refused before a stage was done.' : '';
    return [soft(refusal || 'No stages were recorded.')];
  }
  const counts = countsOf(entry.graph);
  const total = counts.stages_ns;
  const backwards = hasManyBackwards(entry) ? stages.filter(stage => stage.name === 'backward') : [];
  const rows = backwards.length > 0 ? stages.filter(stage => stage.name !== 'backward') : stages;
  const columns = STAGE_COLUMNS(total);
  const data = { 'data-frame': entry.frame.name, 'data-graph': String(entry.graph.index) };
  const label = `Stages of ${entry.title}`;
  const cutCount = counts.stages - stages.length;
  const children: Child[] = [
    heading('Stages', `${duration(total)} in ${amount(counts.stages, 'stage')}`),
    table(context, { name: 'stages', label, columns, rows, total: rows.length + cutCount, key: row => row.name, data })
  ];
  if (backwards.length > 0) {
    const took = duration(backwards.reduce((sum, stage) => sum + stage.duration_ns, 0));
    children.push(
      fold(
        context,
        `backwards ${entry.key}`,
        [`${amount(backwards.length, 'further backward')}, each for gradients of other results `, h('small', {}, took)],
        () => [
          table(context, {
            name: 'backwards',
            meanings: 'stages',
            label: `${label}, backward`,
            columns,
            rows: backwards,
            key: row => row.summary
          }),
          ...stageCodes(context, entry, stage => stage.name === 'backward')
        ]
      )
    );
  }
  return children;
}

function stageCodes(context: IContext, entry: IEntry, isIncluded: (stage: Stage) => boolean): Child[] {
  return entry.graph.stages.flatMap((stage, position) =>
    (isIncluded(stage) ? stage.codes : []).map((code, index) => {
      const details = fold(
        context,
        codeKey(entry, position, index),
        [h('code', {}, stage.name), ' ', code.title, ' ', h('small', {}, lineCount(code))],
        () => {
          const label = `${stage.name}: ${code.title}`;
          return [
            codeBlock(context, { ...code, label, names: userNames(entry), links: linksOf(context, entry, stage, code) })
          ];
        }
      );
      details.dataset['stage'] = stage.name;
      details.dataset['code'] = code.title;
      return details;
    })
  );
}

/**
 * Make the function that returns, for a line of a stage's code, the numbers of the user's lines that caused it. In the
 * code of a graph these are the lines that caused the node, in the compiler's code the lines that caused the kernel.
 */
function linksOf(context: IContext, entry: IEntry, stage: Stage, code: Code): (line: string) => readonly number[] {
  const origins = context.selection.lines(true);
  const part = partOf(code.title);
  if (part !== '') {
    return line => origins.idsOfNode(entry, part, /^ {4}(\w+) = /.exec(line)?.[1] ?? '', stage.name);
  }
  const kernels = entry.graph.kernels.filter(kernel => code.title.endsWith(` for ${kernel.graph_name}`));
  const kernelOfText = new Map(
    kernels.map(kernel => [kernel.language === 'extern' ? kernel.source : kernel.name, kernel])
  );
  return line => {
    const text = line.trim();
    const kernel =
      kernelOfText.get(text) ?? kernelOfText.get(/^(\w+)(?: = async_compile\.|\(|\.run\()/.exec(text)?.[1] ?? '');
    return kernel === undefined ? [] : origins.idsOfKernel(entry, kernel);
  };
}

function lineCount(code: Code): string {
  return amount(code.text.trimEnd().split('\n').length, 'line');
}
