/** Stages: the result of each stage of the pipeline. */

import { countsOf } from '../model/report';
import type { Code, Stage } from '../model/report';
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
import { SHARE_HELP, share } from './timeTable';

/** Draw the panel: the stages of each graph; several graphs have a fold each. */
export function stagesPanel(context: IContext): Child[] {
  const [firstEntry] = context.chosen;
  if (firstEntry === undefined) {
    return [soft('Nothing was compiled, so there are no stages.')];
  }
  if (context.chosen.length === 1) {
    return graphStages(context, firstEntry);
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
  return [...graphs, cutGraphsNotice(context)];
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
