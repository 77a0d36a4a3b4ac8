/** Graph breaks: where Dynamo stopped and Python took over, and why. */

import { amount, duration } from '../model/words';
import { AT } from './calls';
import type { Context } from './context';
import { h, heading, soft, spoken } from './dom';
import type { Child } from './dom';
import { table } from './table';

/** Draw the panel. */
export function breaksPanel({ report }: Context): Child[] {
  const rows = report.graph_break_rows;
  if (rows.length === 0) {
    return [soft('No graph breaks: what was handed to Dynamo was captured whole.')];
  }
  return [
    heading('Graph breaks', `${amount(rows.length, 'place')} where Dynamo split a function`),
    table({
      name: 'graph_breaks',
      label: 'Graph breaks',
      columns: [
        { name: 'frame', title: 'where', kind: 'code', cell: row => row.where },
        { name: 'reason', title: 'reason', kind: 'words', cell: row => h('span', { title: row.reason }, spoken(row.words)) },
        { name: 'at_ns', title: 'at', help: AT, kind: 'number', cell: row => duration(row.at_ns) }
      ],
      rows,
      key: row => row.frame
    })
  ];
}
