/** Outputs: what each tensor is and what it shares memory with. */

import { countsOf } from '../model/counts';
import type { Output } from '../model/report';
import { amount, grouped, sizes } from '../model/words';
import type { Context } from './context';
import { h, mark, soft } from './dom';
import type { Child } from './dom';
import { graphHeading } from './graph';
import { OUTPUT_TYPES, outputLegend } from './legend';
import { table } from './table';
import type { Column } from './table';

const MEANINGS: ReadonlyMap<string, string> = new Map(OUTPUT_TYPES);

function outputType(row: Output): Child {
  if (row.tensor === null) {
    return row.raw_type;
  }
  const word = mark(row.output_type, row.base === null ? 'plain' : 'alias');
  word.title = MEANINGS.get(row.output_type) ?? '';
  return word;
}

const COLUMNS: readonly Column<Output>[] = [
  { name: 'name', title: 'name', kind: 'code', cell: row => row.name },
  { name: 'shape', title: 'shape', kind: 'code', cell: row => (row.tensor === null ? null : sizes(row.tensor.shape)) },
  { name: 'dtype', title: 'dtype', cell: row => row.tensor?.dtype ?? null },
  { name: 'output_type', title: 'output type', cell: outputType },
  {
    name: 'storage',
    title: 'storage',
    help: 'Its storage in the storage map',
    kind: 'number',
    value: row => row.storage,
    cell: row => (row.storage === null ? null : `#${row.storage}`)
  },
  { name: 'base', title: 'base', help: 'The name of what it is made from', kind: 'code', cell: row => row.base },
  { name: 'relation', title: 'relation', kind: 'words', cell: row => row.relation },
  {
    name: 'requires_grad',
    title: 'requires grad',
    cell: row => (row.tensor === null ? null : row.requires_grad ? 'yes' : 'no')
  },
  { name: 'device', title: 'device', cell: row => row.tensor?.device ?? null },
  { name: 'views', title: 'views', kind: 'code', cell: row => row.views }
];

/** Draw the panel. */
export function outputsPanel(context: Context): Child[] {
  const drawn: Child[] = [];
  for (const entry of context.chosen) {
    const outputs = entry.graph.outputs;
    const counts = countsOf(entry.graph);
    drawn.push(
      graphHeading(context, entry, `${amount(counts.outputs, 'output')}, ${grouped(counts.aliased)} aliased`),
      outputs.length > 0
        ? table(context, {
            name: 'outputs',
            label: `Outputs of ${entry.title}`,
            columns: COLUMNS,
            rows: outputs,
            total: counts.outputs,
            key: row => row.name,
            data: { 'data-frame': entry.frame.name, 'data-graph': String(entry.graph.index) }
          })
        : soft(entry.graph.status === 'compiled' ? 'It returns nothing.' : 'Not known: it was not traced to its end.')
    );
  }
  if (drawn.length === 0) {
    drawn.push(soft('Nothing was compiled, so no outputs were recorded.'));
  }
  drawn.push(h('div', {}, outputLegend(context)));
  return drawn;
}
