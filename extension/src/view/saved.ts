/** Saved: what each graph keeps for its backward, and why. */

import type { Saved } from '../model/report';
import { amount, dataSize, known, newMemory } from '../model/words';
import type { Context } from './context';
import { h, heading, mark, soft, spoken } from './dom';
import type { Child } from './dom';
import { graphColumn, graphData, ofGraphs, rowsOf, total, yours } from './graph';
import type { OfGraph } from './graph';
import { table } from './table';
import type { Column } from './table';
import { tensorCell } from './tensor';

const columns = ({ selection }: Context): readonly Column<OfGraph<Saved>>[] => [
  {
    name: 'line',
    title: 'line',
    help: 'The line of your program that made it',
    kind: 'code',
    cell: ({ row }) => selection.lineButton(row.line)
  },
  { name: 'tensor', title: 'tensor', help: 'Element type, sizes, and what is unusual about it', kind: 'code', lesser: '', cell: ({ row }) => tensorCell(row.tensor) },
  { name: 'nbytes', title: 'bytes', kind: 'number', value: ({ row }) => known(row.nbytes), cell: ({ row }) => dataSize(row.nbytes) },
  { name: 'reason', title: 'why it is kept', kind: 'words', cell: ({ row }) => why(row) }
];

/** Why a value is kept; what it is, its name and the mark say. */
function why(row: Saved): Child {
  const named = row.is_input ? /^the input `[^`]*`; / : /^computed by `[^`]*`; /;
  const reason = row.reason.replace(named, '');
  const held = row.is_input ? 'an input' : row.is_output ? 'an output' : '';
  return held === '' ? reason : h('span', {}, spoken(reason), ' ', mark(held));
}

/** Draw the panel. */
export function savedPanel(context: Context): Child[] {
  const saved = total(context, counts => counts.saved);
  if (saved === 0) {
    return [soft('Nothing is saved for a backward.')];
  }
  const held = total(context, counts => counts.held_bytes);
  const fresh = newMemory(total(context, counts => counts.saved_bytes));
  return [
    heading(
      'Saved for backward',
      `${amount(saved, 'value')}${ofGraphs(context)}, ${fresh}${held > 0 ? `; ${dataSize(held)} that the caller holds anyway` : ''}`
    ),
    table(context, {
      name: 'saved',
      label: 'Values that are kept for the backward',
      columns: [{ name: 'name', title: 'name', kind: 'code', cell: ({ entry, row }) => yours(entry, row.name) }, ...graphColumn<Saved>(context), ...columns(context)],
      rows: rowsOf(context, graph => graph.saved),
      total: saved,
      key: ({ row }) => row.name,
      rowData: each => {
        const { selection } = context;
        const origins = each.entry === null ? [] : selection.lines(false).behind(each.entry, each.row.line);
        return { ...graphData(each), ...selection.linked(origins.map(origin => origin.id)) };
      }
    })
  ];
}
