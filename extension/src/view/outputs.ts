/** Outputs: the description of each tensor, and the tensors that it shares memory with. */

import type { Output } from '../model/report';
import { inTrees, withoutParts } from '../model/rows';
import { amount, dataSize, grouped, sizeValue } from '../model/words';
import type { IContext } from './context';
import { h, heading, mark, prose, soft } from './dom';
import type { Child } from './dom';
import { byGraph, graphColumn, graphData, ofGraphs, rowsOf, total } from './graph';
import type { IGraphRow } from './graph';
import { OUTPUT_TYPES, outputLegend } from './legend';
import { table } from './table';
import type { Column } from './table';
import { autograd, inGraph, partName, storageCell, tensorCell } from './tensor';

const MEANINGS: ReadonlyMap<string, string> = new Map(OUTPUT_TYPES);

/** Say how an output is related to inputs and intermediate bases, with the views as code. */
function relation(row: Output): Child {
  if (row.tensor === null) {
    return null;
  }
  const type = mark(row.output_type, row.base === null ? 'plain' : 'alias');
  type.title = MEANINGS.get(row.output_type) ?? '';
  const endsWithViews = row.views !== null && row.relation.endsWith(row.views);
  const words = endsWithViews ? row.relation.slice(0, -(row.views ?? '').length) : row.relation;
  const relationText = h('span', { 'data-said': '' }, prose(words), endsWithViews ? h('code', {}, row.views) : null);
  return h('span', {}, relationText, ' ', type);
}

/** The row of an output, and its depth in the tree of a wrapper and its parts. */
interface IRow extends IGraphRow<Output> {
  readonly depth: number;
}

const COLUMNS: readonly Column<IRow>[] = [
  {
    name: 'node',
    title: 'graph output',
    help: 'The node that returns it, and the graph’s input for its gradient',
    kind: 'code',
    lesser: '← ',
    cell: ({ row }) => inGraph(row.node, row.tangent)
  },
  {
    name: 'tensor',
    title: 'tensor or type',
    help: 'Element type, sizes and unusual properties of a tensor; the type of another value',
    kind: 'code',
    lesser: '',
    cell: ({ row }) => (row.tensor === null ? row.raw_type : tensorCell(row.tensor))
  },
  {
    name: 'nbytes',
    title: 'bytes',
    kind: 'number',
    value: ({ row }) => sizeValue(row.tensor?.nbytes ?? null),
    cell: ({ row }) => (row.tensor === null ? null : dataSize(row.tensor.nbytes))
  },
  {
    name: 'storage',
    title: 'storage',
    help: 'Its storage in the storage map',
    kind: 'number',
    lesser: '',
    value: ({ row }) => row.storage,
    cell: ({ row }) => storageCell(row.storage)
  },
  {
    name: 'autograd',
    title: 'autograd',
    help: 'Whether it requires grad',
    lesser: '',
    cell: ({ row }) => autograd(row.requires_grad)
  },
  {
    name: 'relation',
    title: 'what it is',
    help: 'The tensor that it shares memory with, and its output type',
    kind: 'words',
    cell: ({ row }) => relation(row)
  }
];

/** Draw the panel. */
export function outputsPanel(context: IContext): Child[] {
  const outputCount = total(context, counts => counts.outputs);
  if (outputCount === 0) {
    return [
      soft(
        context.chosen.length > 0
          ? 'None, or none that are known.'
          : 'Nothing was compiled, so no outputs were recorded.'
      )
    ];
  }
  const rows = byGraph(rowsOf(context, graph => graph.outputs)).flatMap(graphRows =>
    inTrees(graphRows.map(({ row }) => row)).map(({ row, depth }): IRow => ({
      entry: graphRows[0]?.entry ?? null,
      row,
      depth
    }))
  );
  const hasParts = rows.some(({ depth }) => depth > 0);
  const columns = COLUMNS.filter(({ name }) => hasParts || name !== 'node');
  const aliased = total(context, counts => counts.aliased);
  return [
    heading('Outputs', `${amount(outputCount, 'output')}${ofGraphs(context)}, ${grouped(aliased)} aliased`),
    table(context, {
      name: 'outputs',
      label: 'Outputs of the graphs',
      columns: [
        { name: 'name', title: 'name', kind: 'code', cell: ({ row, depth }) => partName(row, depth) },
        ...graphColumn<Output>(context),
        ...columns
      ],
      rows,
      total: rows.length + outputCount - withoutParts(rows.map(({ row }) => row)).length,
      key: ({ row }) => row.name,
      rowData: graphData
    }),
    outputLegend(context)
  ];
}
