/** The nodes of a graph, stage by stage, each with the line of the program that caused it. */

import { countsOf } from '../model/report';
import type { Node } from '../model/report';
import { dataSize, grouped, sizes, sizeValue } from '../model/words';
import { fold } from './context';
import type { IContext, IEntry } from './context';
import { h, soft } from './dom';
import { userName } from './graph';
import { table } from './table';
import type { Column } from './table';

const columns = ({ selection }: IContext, entry: IEntry): readonly Column<Node>[] => [
  { name: 'name', title: 'name', kind: 'code', cell: row => userName(entry, row.name) },
  { name: 'stage', title: 'stage', kind: 'code', cell: row => row.stage },
  { name: 'part', title: 'graph', kind: 'code', cell: row => row.part },
  { name: 'phase', title: 'phase', kind: 'code', cell: row => row.phase },
  { name: 'target', title: 'op', kind: 'code', cell: row => row.target },
  { name: 'module', title: 'module', kind: 'code', cell: row => row.module },
  {
    name: 'tensor',
    title: 'value',
    help: 'Element type and sizes of its value',
    kind: 'code',
    cell: row => `${row.dtype ?? ''}${row.shape === null ? '' : sizes(row.shape)}`
  },
  {
    name: 'line',
    title: 'line',
    help: 'The line of your program that caused it',
    kind: 'code',
    cell: row => selection.lineButton(row.line)
  },
  {
    name: 'nbytes',
    title: 'bytes',
    kind: 'number',
    value: row => sizeValue(row.nbytes),
    cell: row => (row.nbytes === null ? null : dataSize(row.nbytes))
  },
  { name: 'code', title: 'code', kind: 'code', cell: row => row.line?.code ?? null }
];

/** Draw the fold with the nodes of one graph; null if the graph was not traced, or if its nodes are unknown. */
export function nodesFold(context: IContext, entry: IEntry): HTMLElement | null {
  const { frame, graph } = entry;
  const count = countsOf(graph).nodes;
  if (count === 0 && !(context.source.live && graph.stages.length > 0)) {
    return null;
  }
  const remark = count > 0 ? `${grouped(count)} in the trace, and what later stages made of them` : '';
  const details = fold(context, `nodes ${entry.key}`, ['Nodes ', h('small', {}, remark)], () => {
    const rows = graph.nodes.length > 0 ? graph.nodes : context.source.nodes(frame.name, graph.index);
    if (rows === null) {
      return [
        soft(context.source.live ? 'The kernel is asked for them …' : 'A kernel that has the report lists them.')
      ];
    }
    const data = { 'data-frame': frame.name, 'data-graph': String(graph.index) };
    const { selection } = context;
    const rowData = (row: Node): Record<string, string> =>
      selection.linked(
        selection
          .lines(true)
          .causesOf(entry, row.line)
          .map(origin => origin.id)
      );
    return [
      table(context, {
        name: 'nodes',
        label: `Nodes of ${entry.title}`,
        columns: columns(context, entry),
        rows,
        key: row => row.name,
        data,
        rowData
      })
    ];
  });
  details.dataset['nodes'] = '';
  return details;
}
