/** Inputs: what each tensor is, whether it was mutated and how, which are the same or share bytes. */

import { countsOf, mutated } from '../model/counts';
import type { Input } from '../model/report';
import { amount, grouped, sizes } from '../model/words';
import type { Context, Entry } from './context';
import { heading, mark, soft } from './dom';
import type { Child } from './dom';
import { graphHeading } from './graph';
import { mutationLegend } from './legend';
import { table } from './table';
import type { Column } from './table';

/** Yes or no about a tensor; nothing for an argument that is none. */
function answer(input: Input, value: boolean | null): Child {
  if (value === null) {
    return input.tensor === null ? null : 'not known';
  }
  return value ? mark('yes', 'write') : 'no';
}

const COLUMNS: readonly Column<Input>[] = [
  { name: 'name', title: 'name', kind: 'code', cell: row => row.name },
  { name: 'kind', title: 'kind', cell: row => row.kind },
  { name: 'shape', title: 'shape', kind: 'code', cell: row => (row.tensor === null ? null : sizes(row.tensor.shape)) },
  { name: 'dtype', title: 'dtype', cell: row => row.tensor?.dtype ?? null },
  {
    name: 'requires_grad',
    title: 'requires grad',
    cell: row => (row.tensor === null ? null : row.tensor.requires_grad ? 'yes' : 'no')
  },
  {
    name: 'mutates_data',
    title: 'mutates data',
    cell: row => answer(row, row.mutates_data)
  },
  {
    name: 'mutates_metadata',
    title: 'mutates metadata',
    cell: row => answer(row, row.mutates_metadata)
  },
  {
    name: 'mutates_storage',
    title: 'mutates storage',
    cell: row => answer(row, row.mutates_storage)
  },
  {
    name: 'duplicate_of',
    title: 'same tensor as',
    kind: 'code',
    cell: row => row.duplicate_of
  },
  {
    name: 'overlaps',
    title: 'shares bytes with',
    kind: 'code',
    cell: row => row.overlaps.join(', ')
  },
  {
    name: 'storage',
    title: 'storage',
    help: 'Its storage in the storage map',
    kind: 'number',
    value: row => row.storage,
    cell: row => (row.storage === null ? null : `#${row.storage}`)
  },
  {
    name: 'mutation_type',
    title: 'mutation type',
    help: 'Who writes the new value: the graph, or the code after it',
    cell: row => row.mutation_type
  },
  {
    name: 'mutation_hidden_from_autograd',
    title: 'hidden from autograd',
    cell: row => (mutated(row) ? yesNo(row.mutation_hidden_from_autograd) : null)
  },
  {
    name: 'mutation_under_no_grad',
    title: 'under no_grad',
    cell: row => (mutated(row) ? yesNo(row.mutation_under_no_grad) : null)
  },
  {
    name: 'requires_grad_after',
    title: 'requires grad after',
    help: 'requires_grad when the function had returned, where that is another than before',
    cell: row =>
      row.requires_grad_after === null || row.requires_grad_after === row.tensor?.requires_grad
        ? null
        : yesNo(row.requires_grad_after)
  },
  { name: 'device', title: 'device', cell: row => row.tensor?.device ?? null },
  { name: 'value', title: 'value', kind: 'code', cell: row => row.value }
];

/** Columns that say nothing for most functions: shown only where they say something. */
const RARE: ReadonlySet<string> = new Set(['requires_grad_after', 'value']);

function yesNo(value: boolean | null): string | null {
  return value === null ? null : value ? 'yes' : 'no';
}

function columnsFor(rows: readonly Input[]): readonly Column<Input>[] {
  return COLUMNS.filter(column => !RARE.has(column.name) || rows.some(row => column.cell(row) !== null));
}

/** The table of inputs of one graph. */
function inputTable(context: Context, entry: Entry): HTMLElement {
  const rows = entry.graph.inputs;
  return table(context, {
    name: 'inputs',
    label: `Inputs of ${entry.title}`,
    columns: columnsFor(rows),
    rows,
    total: countsOf(entry.graph).inputs,
    key: row => row.name,
    tone: row => (mutated(row) ? 'al-written' : null),
    data: { 'data-frame': entry.frame.name, 'data-graph': String(entry.graph.index) }
  });
}

/** Draw the panel. */
export function inputsPanel(context: Context): Child[] {
  const drawn: Child[] = [];
  for (const entry of context.chosen) {
    const inputs = entry.graph.inputs;
    const counts = countsOf(entry.graph);
    drawn.push(graphHeading(context, entry, `${amount(counts.inputs, 'input')}, ${grouped(counts.mutated)} mutated`));
    drawn.push(inputs.length > 0 ? inputTable(context, entry) : soft(entry.graph.status === 'compiled' ? 'It takes none.' : 'Not known: it was not traced.'));
  }
  const outside = context.report.cell?.mutated_outside ?? [];
  if (outside.length > 0) {
    drawn.push(
      heading('Outside the graphs', `${amount(outside.length, 'tensor')} that the cell changed in Python or in autograd`),
      table(context, {
        name: 'outside',
        meanings: 'inputs',
        label: 'Tensors that the cell changed outside of every compiled graph',
        columns: columnsFor(outside),
        rows: outside,
        key: row => row.name,
        tone: row => (mutated(row) ? 'al-written' : null)
      })
    );
  }
  if (drawn.length === 0) {
    drawn.push(soft('Nothing was compiled, so no inputs were recorded.'));
  }
  drawn.push(mutationLegend(context));
  return drawn;
}
