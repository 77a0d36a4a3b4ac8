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
    return [soft(none(context))];
  }
  return [
    heading('Graph breaks', `${amount(all, 'place')} where Dynamo stopped and Python took over`),
    table(context, {
      name: 'graph_breaks',
      label: 'Graph breaks',
      columns: [
        {
          name: 'cell_line',
          title: 'line',
          kind: 'number',
          value: row => row.cell_line,
          cell: row => (row.cell_line === null ? null : String(row.cell_line))
        },
        { name: 'frame', title: 'where', help: 'The line that stops, in the cell or in what it calls', kind: 'code', cell: where },
        { name: 'reason', title: 'why', kind: 'words', cell: row => why(context, row) },
        { name: 'at_ns', title: 'at', help: AT, kind: 'number', value: row => row.at_ns, cell: row => duration(row.at_ns) }
      ],
      rows,
      total: all,
      key: row => row.frame
    })
  ];
}

/** Why there are none; where nothing was captured, that says nothing good. */
function none({ report }: Context): string {
  const frontends = report.frames.flatMap(frame => frame.graphs.map(graph => graph.frontend));
  if (frontends.includes('dynamo')) {
    return 'None: what Dynamo captured, it captured whole.';
  }
  return frontends.length > 0 ? 'None: the calls themselves were traced, without Dynamo.' : 'None are known: Dynamo captured nothing.';
}

/** The line that stops, in the cell or in what it calls. */
function where({ where: at, line, cell_line: cell }: GraphBreakRow): Child {
  if (line === null || line.code === '') {
    return at;
  }
  return h('span', {}, line.code, at === `line ${cell}` ? null : h('span', { class: 'al-below' }, at));
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
