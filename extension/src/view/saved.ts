/** Saved for backward: the values that each graph saves for its backward, and why. */

import { frameCountsOf } from '../model/report';
import type { Saved } from '../model/report';
import { amount, dataSize, newMemory, sizeValue } from '../model/words';
import { againFold, againSentence } from '../pictures/again';
import { Choosing } from '../pictures/choice';
import type { IContext } from './context';
import { dotted, h, heading, mark, prose, soft } from './dom';
import type { Child } from './dom';
import { allGraphsChosen, graphColumn, graphData, ofGraphs, rowsOf, total, userName } from './graph';
import type { IGraphRow } from './graph';
import { table } from './table';
import type { Column } from './table';
import { tensorCell } from './tensor';

const columns = ({ selection }: IContext, rows: readonly IGraphRow<Saved>[]): readonly Column<IGraphRow<Saved>>[] => [
  ...(rows.some(({ row }) => row.module !== '')
    ? [
        {
          name: 'module',
          title: 'module',
          kind: 'code',
          lesser: '',
          cell: ({ row }) => dotted(row.module)
        } as const satisfies Column<IGraphRow<Saved>>
      ]
    : []),
  {
    name: 'line',
    title: 'line',
    help: 'The line of your program that made it',
    kind: 'code',
    cell: ({ row }) => selection.lineButton(row.line)
  },
  {
    name: 'tensor',
    title: 'tensor',
    help: 'Element type, sizes and unusual properties',
    kind: 'code',
    lesser: '',
    cell: ({ row }) => tensorCell(row.tensor)
  },
  {
    name: 'nbytes',
    title: 'bytes',
    kind: 'number',
    value: ({ row }) => sizeValue(row.nbytes),
    cell: ({ row }) => dataSize(row.nbytes)
  },
  { name: 'reason', title: 'why it is kept', kind: 'words', cell: ({ row }) => reasonCell(row) }
];

/** The end of each reason if the partitioner rematerializes nothing. The panel says it once, not in each row. */
const RECOMPUTES_NOTHING = '; this partitioner recomputes nothing';

/** Why a value is saved, without the facts that its row already shows. */
function reasonCell(row: Saved): Child {
  const namePrefix = row.is_input ? /^the input `[^`]*`; / : /^computed by `[^`]*`; /;
  const reason = row.reason
    .replace(namePrefix, '')
    .replace(RECOMPUTES_NOTHING, '')
    .replace('the backward needs it', 'needed');
  const holder =
    row.shares !== '' ? `memory of ${row.shares}` : row.is_input ? 'an input' : row.is_output ? 'an output' : '';
  // The mark comes first, because a cell may hide the end of a long reason.
  return holder === '' ? reason : h('span', {}, mark(holder), ' ', prose(reason));
}

/** Draw the panel. */
export function savedPanel(context: IContext): Child[] {
  const savedCount = total(context, counts => counts.saved);
  if (savedCount === 0) {
    return [soft('Nothing is saved for a backward.')];
  }
  // A call is served by one graph. So of a function with several graphs, the head counts the graph that saves the most.
  const heldBytes = total(context, counts => counts.held_bytes);
  const hasSeveralGraphs = context.chosen.some(({ frame }) => frameCountsOf(frame).graphs > 1);
  const bytesPrefix =
    allGraphsChosen(context) && hasSeveralGraphs ? '; one call of each function keeps at most ' : ', ';
  const rows = [...rowsOf(context, graph => graph.saved)].sort(
    (a, b) => (sizeValue(b.row.nbytes) ?? 0) - (sizeValue(a.row.nbytes) ?? 0)
  );
  const plans = context.chosen.flatMap(entry => {
    const plan = Choosing.of(context, entry)?.now();
    return plan === undefined ? [] : [{ entry, plan }];
  });
  return [
    heading(
      'Saved for backward',
      `${amount(savedCount, 'value')}${ofGraphs(context)}${bytesPrefix}${newMemory(total(context, counts => counts.saved_bytes))}` +
        (heldBytes > 0 ? `; ${dataSize(heldBytes)} that the caller holds anyway` : '')
    ),
    rows.some(({ row }) => row.reason.endsWith(RECOMPUTES_NOTHING))
      ? soft(
          plans.some(({ plan }) => plan.ops.length > 0)
            ? 'This partitioner saves all forward values that the backward needs. A tensor of bools is saved in place of numbers that are computed from it, and the backward computes these numbers again.'
            : 'This partitioner recomputes nothing: all forward values that the backward needs are saved.'
        )
      : null,
    ...plans.flatMap(({ entry, plan }) => [
      soft(`${plans.length > 1 ? `${entry.title}: ` : ''}${againSentence(plan)}`),
      againFold(context, entry, plan)
    ]),
    table(context, {
      name: 'saved',
      label: 'Values that are kept for the backward',
      columns: [
        { name: 'name', title: 'name', kind: 'code', cell: ({ entry, row }) => userName(entry, row.name) },
        ...graphColumn<Saved>(context),
        ...columns(context, rows)
      ],
      rows,
      total: savedCount,
      key: ({ row }) => row.name,
      rowData: savedRow => {
        const { selection } = context;
        const origins =
          savedRow.entry === null ? [] : selection.lines(false).causesOf(savedRow.entry, savedRow.row.line);
        return { ...graphData(savedRow), ...selection.linked(origins.map(origin => origin.id)) };
      }
    })
  ];
}
