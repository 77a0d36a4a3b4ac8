/** Verification: the comparisons with eager, differences first. */

import type { VerificationRow } from '../model/report';
import { amount, grouped, listed, short } from '../model/words';
import type { IContext } from './context';
import { h, heading, mark, soft } from './dom';
import type { Child } from './dom';
import { allGraphsChosen } from './graph';
import { table } from './table';
import type { Column } from './table';

const AGAINST: Readonly<Record<string, string>> = { python: 'its Python', graph: 'captured graph' };

const COLUMNS: readonly Column<VerificationRow>[] = [
  { name: 'subject', title: 'of', kind: 'code', cell: row => row.subject },
  { name: 'kind', title: 'what was compared', cell: row => row.kind },
  { name: 'equal', title: 'equal', cell: row => mark(row.equal ? 'yes' : 'no', row.equal ? 'good' : 'bad') },
  { name: 'expected', title: 'eager has', kind: 'code', cell: row => row.expected },
  { name: 'actual', title: 'compiled has', kind: 'code', cell: row => row.actual },
  { name: 'sentence', title: 'difference', kind: 'words', cell: row => row.sentence },
  {
    name: 'absolute',
    title: 'largest difference',
    kind: 'number',
    lesser: 'apart by ',
    value: row => row.absolute,
    cell: differenceText
  },
  { name: 'against', title: 'compared with', lesser: 'with ', cell: row => AGAINST[row.against] ?? '' },
  { name: 'engine', title: 'engine', lesser: '', cell: row => row.engine },
  {
    name: 'call',
    title: 'call',
    kind: 'number',
    lesser: 'call ',
    value: row => row.call,
    cell: row => (row.call === null ? null : String(row.call))
  },
  {
    name: 'frame',
    title: 'function',
    kind: 'code',
    lesser: '',
    cell: row => (row.frame === null ? null : short(row.frame))
  },
  {
    name: 'graph',
    title: 'graph',
    kind: 'number',
    lesser: 'graph ',
    value: row => row.graph,
    cell: row => (row.graph === null ? null : String(row.graph))
  }
];

/** Write the largest absolute and relative difference of two values; return null if they are equal. */
function differenceText({ absolute, relative }: VerificationRow): string | null {
  const relativeText = relative === null ? '' : ` (${relative.toExponential(1)} relative)`;
  return absolute === null || absolute === 0 ? null : absolute.toExponential(1) + relativeText;
}

/** Draw the panel. */
export function verificationPanel(context: IContext): Child[] {
  const chosen = new Set(context.chosen.map(entry => entry.key));
  const frames = new Set(context.chosen.map(entry => entry.frame.name));
  const allChosen = allGraphsChosen(context);
  const isChosen = (row: VerificationRow): boolean =>
    allChosen ||
    row.frame === null ||
    (row.graph === null ? frames.has(row.frame) : chosen.has(`${row.frame}/${row.graph}`));
  const { summary, verification_rows: allRows } = context.report;
  const rows = allRows.filter(isChosen);
  const isCut = (summary?.compared ?? 0) > allRows.length;
  if (rows.length === 0 && !(isCut && allChosen)) {
    return [soft('Nothing was compared with eager.')];
  }
  const different = rows.filter(row => !row.equal);
  // If the report was cut, the number of rows is known only for all graphs together. Rows that differ are cut last.
  const [compared, differing] =
    allChosen && summary !== null
      ? [summary.compared, summary.different]
      : [isCut ? null : rows.length, different.length];
  const engines = listed([...new Set(rows.map(row => row.engine))]);
  const drawn: Child[] = [
    h(
      'p',
      { class: 'al-counts' },
      (differing ?? 0) > 0
        ? mark(`${grouped(differing)}${compared === null ? '' : ` of ${grouped(compared)}`} differ`, 'bad')
        : mark(`all ${amount(compared ?? rows.length, 'observable')} equal`, 'good'),
      h(
        'span',
        { class: 'al-soft' },
        rows.length > 0 ? `${engines} against eager` : 'a kernel that has the report lists them'
      )
    ),
    ...[context.head.against, context.head.tolerance].filter(line => line !== '').map(line => soft(line))
  ];
  if (rows.length === 0) {
    return drawn;
  }
  if (different.length > 0) {
    drawn.push(heading('Differences'), verificationTable(context, 'differences', different));
  }
  drawn.push(
    heading('Everything that was compared'),
    verificationTable(context, 'verification', rows, compared ?? rows.length)
  );
  return drawn;
}

function verificationTable(
  context: IContext,
  name: string,
  rows: readonly VerificationRow[],
  total = rows.length
): HTMLElement {
  return table(context, {
    name,
    meanings: 'verification',
    label: name === 'differences' ? 'Differences from eager' : 'Everything that was compared with eager',
    columns: COLUMNS.filter(
      column =>
        rows.some(row => (column.cell(row) ?? '') !== '') &&
        (column.name !== 'engine' || rows.some(row => row.engine !== rows[0]?.engine))
    ),
    rows,
    total,
    key: row => row.subject
  });
}
