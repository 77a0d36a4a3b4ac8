/** Graph breaks: where Dynamo stopped and Python took over, and why. */

import type { GraphBreakRow } from '../model/report';
import { amount, duration } from '../model/words';
import { AT } from './calls';
import { fold } from './context';
import type { Context } from './context';
import { h, heading, soft, spoken } from './dom';
import type { Child } from './dom';
import { table } from './table';

/** Draw the panel. */
export function breaksPanel(context: Context): Child[] {
  const rows = context.report.graph_break_rows;
  const all = context.head.breaks;
  if (all === 0) {
    return [soft('None: what was handed to Dynamo was captured whole.')];
  }
  return [
    heading('Graph breaks', `${amount(all, 'place')} where Dynamo stopped and Python took over`),
    table({
      name: 'graph_breaks',
      label: 'Graph breaks',
      columns: [
        { name: 'frame', title: 'where', kind: 'code', cell: row => row.where },
        { name: 'code', title: 'line', kind: 'code', cell: row => row.code },
        { name: 'reason', title: 'why', kind: 'words', cell: row => why(context, row) },
        { name: 'at_ns', title: 'at', help: AT, kind: 'number', cell: row => duration(row.at_ns) }
      ],
      rows,
      total: all,
      key: row => row.frame
    })
  ];
}

/** Our words first; Dynamo's, where they say more, behind a fold. */
function why(context: Context, row: GraphBreakRow): Child {
  return row.reason === row.words
    ? spoken(row.words)
    : h(
        'div',
        {},
        spoken(row.words),
        fold(context, `break ${row.frame} ${row.at_ns}`, [h('small', {}, 'in Dynamo’s words')], () => [
          h('pre', { class: 'al-code', tabindex: '0' }, row.reason)
        ])
      );
}
