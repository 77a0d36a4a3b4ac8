/** Saved: what each graph keeps for its backward, and why. */

import { countsOf } from '../model/counts';
import type { Counts, Saved } from '../model/report';
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

/** What a partitioner says of each value that does not choose; it is said once. */
const AGAIN = '; this partitioner computes nothing again';

/** Why a value is kept; what it is, its name and the mark say. */
function why(row: Saved): Child {
  const named = row.is_input ? /^the input `[^`]*`; / : /^computed by `[^`]*`; /;
  const reason = row.reason.replace(named, '').replace(AGAIN, '').replace('the backward needs it', 'needed');
  const held = row.shares !== '' ? `memory of ${row.shares}` : row.is_input ? 'an input' : row.is_output ? 'an output' : '';
  // Of a long reason the end may not be seen.
  return held === '' ? reason : h('span', {}, mark(held), ' ', spoken(reason));
}

/** What that graph of each function holds which saves most: a call is served by one. */
function largestOf({ chosen }: Context): Counts[] {
  const most = new Map<string, Counts>();
  for (const { frame, graph } of chosen) {
    const counts = countsOf(graph);
    if (counts.saved_bytes >= (most.get(frame.name)?.saved_bytes ?? 0)) {
      most.set(frame.name, counts);
    }
  }
  return [...most.values()];
}

/** Draw the panel. */
export function savedPanel(context: Context): Child[] {
  const saved = total(context, counts => counts.saved);
  if (saved === 0) {
    return [soft('Nothing is saved for a backward.')];
  }
  const largest = largestOf(context);
  const sum = (count: (counts: Counts) => number): number => largest.reduce((all, each) => all + count(each), 0);
  const held = sum(counts => counts.held_bytes);
  const most = largest.length < context.chosen.length ? '; one call of each function keeps at most ' : ', ';
  const rows = rowsOf(context, graph => graph.saved);
  return [
    heading(
      'Saved for backward',
      `${amount(saved, 'value')}${ofGraphs(context)}${most}${newMemory(sum(counts => counts.saved_bytes))}` +
        (held > 0 ? `; ${dataSize(held)} that the caller holds anyway` : '')
    ),
    rows.some(({ row }) => row.reason.endsWith(AGAIN))
      ? soft('This partitioner computes nothing again: the backward is given all of the forward that it needs.')
      : null,
    table(context, {
      name: 'saved',
      label: 'Values that are kept for the backward',
      columns: [{ name: 'name', title: 'name', kind: 'code', cell: ({ entry, row }) => yours(entry, row.name) }, ...graphColumn<Saved>(context), ...columns(context)],
      rows,
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
