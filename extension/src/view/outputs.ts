/** Outputs: what each tensor is and what it shares memory with. */

import { inTrees, wholes } from '../model/counts';
import type { Output } from '../model/report';
import { amount, dataSize, grouped, known } from '../model/words';
import type { Context } from './context';
import { h, heading, mark, soft, spoken } from './dom';
import type { Child } from './dom';
import { byGraph, graphColumn, graphData, ofGraphs, rowsOf, total } from './graph';
import type { OfGraph } from './graph';
import { OUTPUT_TYPES, outputLegend } from './legend';
import { table } from './table';
import type { Column } from './table';
import { autograd, inGraph, partName, storageCell, tensorCell } from './tensor';

const MEANINGS: ReadonlyMap<string, string> = new Map(OUTPUT_TYPES);

/** Say how an output is related to inputs and to what is made inside, with the views as code. */
function relation(row: Output): Child {
  if (row.tensor === null) {
    return null;
  }
  const type = mark(row.output_type, row.base === null ? 'plain' : 'alias');
  type.title = MEANINGS.get(row.output_type) ?? '';
  const coded = row.views !== null && row.relation.endsWith(row.views);
  const words = coded ? row.relation.slice(0, -(row.views ?? '').length) : row.relation;
  const said = h('span', { 'data-said': '' }, spoken(words), coded ? h('code', {}, row.views) : null);
  return h('span', {}, said, ' ', type);
}

/** An output, and how deep it lies in a wrapper. */
interface Row extends OfGraph<Output> {
  readonly depth: number;
}

const COLUMNS: readonly Column<Row>[] = [
  {
    name: 'node',
    title: 'graph output',
    help: 'What returns it in the graph, and the graph’s input that is its gradient',
    kind: 'code',
    lesser: '← ',
    cell: ({ row }) => inGraph(row.node, row.tangent)
  },
  {
    name: 'tensor',
    title: 'tensor or type',
    help: 'Element type, sizes, and what is unusual about it; of what is no tensor, the type',
    kind: 'code',
    lesser: '',
    cell: ({ row }) => (row.tensor === null ? row.raw_type : tensorCell(row.tensor))
  },
  { name: 'nbytes', title: 'bytes', kind: 'number', value: ({ row }) => known(row.tensor?.nbytes ?? null), cell: ({ row }) => (row.tensor === null ? null : dataSize(row.tensor.nbytes)) },
  {
    name: 'storage',
    title: 'storage',
    help: 'Its storage in the storage map',
    kind: 'number',
    lesser: '',
    value: ({ row }) => row.storage,
    cell: ({ row }) => storageCell(row.storage)
  },
  { name: 'autograd', title: 'autograd', help: 'Whether it requires grad', lesser: '', cell: ({ row }) => autograd(row.requires_grad) },
  { name: 'relation', title: 'what it is', help: 'What it shares memory with, in words, and its output type', kind: 'words', cell: ({ row }) => relation(row) }
];

/** Draw the panel. */
export function outputsPanel(context: Context): Child[] {
  const all = total(context, counts => counts.outputs);
  if (all === 0) {
    return [soft(context.chosen.length > 0 ? 'None, or none that are known.' : 'Nothing was compiled, so no outputs were recorded.')];
  }
  const rows = byGraph(rowsOf(context, graph => graph.outputs)).flatMap(some =>
    inTrees(some.map(({ row }) => row)).map(({ row, depth }): Row => ({ entry: some[0]?.entry ?? null, row, depth }))
  );
  const trees = rows.some(({ depth }) => depth > 0);
  const columns = COLUMNS.filter(({ name }) => trees || name !== 'node');
  const aliased = total(context, counts => counts.aliased);
  return [
    heading('Outputs', `${amount(all, 'output')}${ofGraphs(context)}, ${grouped(aliased)} aliased`),
    table(context, {
      name: 'outputs',
      label: 'Outputs of the graphs',
      columns: [
        { name: 'name', title: 'name', kind: 'code', cell: ({ row, depth }) => partName(row, depth) },
        ...graphColumn<Output>(context),
        ...columns
      ],
      rows,
      total: rows.length + all - wholes(rows.map(({ row }) => row)).length,
      key: ({ row }) => row.name,
      rowData: graphData
    }),
    outputLegend(context)
  ];
}
