/** Graph breaks: where Dynamo stopped and Python took over, and why. */

import type { GraphBreakRow, Report } from '../model/report';
import { amount, duration } from '../model/words';
import { AT_HELP } from './calls';
import { fold } from './context';
import type { IContext } from './context';
import { h, heading, prose, soft } from './dom';
import type { Child } from './dom';
import { table } from './table';

/** Draw the panel: the graph breaks, and then those in libraries and optimizers. */
export function breaksPanel(context: IContext): Child[] {
  const others = libraryBreaks(context.report);
  const rows = context.report.graph_break_rows.filter(row => row.library === '');
  const breakCount = context.head.breaks;
  return [
    ...(breakCount > 0
      ? [
          heading('Graph breaks', `${amount(breakCount, 'place')} where Dynamo stopped and Python took over`),
          breakTable(context, 'graph_breaks', 'Graph breaks', rows, breakCount)
        ]
      : others.length > 0
        ? []
        : [soft(whyNoBreaks(context))]),
    ...(others.length > 0
      ? [
          heading(
            'Graph breaks in libraries and optimizers',
            'Not counted: Python runs calls of libraries without tensors, and steps of optimizers'
          ),
          breakTable(context, 'library_breaks', 'Graph breaks in libraries and optimizers', others, others.length)
        ]
      : [])
  ];
}

/** The graph breaks at calls of libraries without tensors, and at the steps of optimizers. They are not counted. */
export function libraryBreaks(report: Report): GraphBreakRow[] {
  return report.graph_break_rows.filter(row => row.library !== '');
}

function breakTable(
  context: IContext,
  name: string,
  label: string,
  rows: readonly GraphBreakRow[],
  total: number
): HTMLElement {
  return table(context, {
    ...{ name, meanings: 'graph_breaks', label, rows, total },
    key: row => row.frame,
    columns: [
      {
        name: 'cell_line',
        title: 'line',
        kind: 'number',
        value: row => row.cell_line,
        cell: row => (row.cell_line === null ? null : String(row.cell_line))
      },
      {
        name: 'frame',
        title: 'where',
        help: 'The line where Dynamo stopped, in the cell or in code that it calls',
        kind: 'code',
        cell: placeCell
      },
      { name: 'reason', title: 'why', kind: 'words', cell: row => whyCell(context, row) },
      {
        name: 'at_ns',
        title: 'at',
        help: AT_HELP,
        kind: 'number',
        value: row => row.at_ns,
        cell: row => duration(row.at_ns)
      }
    ]
  });
}

/** Say why there are no graph breaks: Dynamo may have captured everything, or nothing. */
function whyNoBreaks({ report }: IContext): string {
  const frontends = report.frames.flatMap(frame => frame.graphs.map(graph => graph.frontend));
  if (frontends.includes('dynamo')) {
    return 'None: Dynamo captured everything without a break.';
  }
  return frontends.length > 0
    ? 'None: the calls themselves were traced, without Dynamo.'
    : 'None are known: Dynamo captured nothing.';
}

/** The code of the line at which Dynamo stopped, and its place unless it is the line of the cell. */
function placeCell({ where: place, line, cell_line: cell }: GraphBreakRow): Child {
  if (line === null || line.code === '') {
    return place;
  }
  return h('span', {}, line.code, place === `line ${cell}` ? null : h('span', { class: 'al-below' }, place));
}

/** The reason of a graph break in the report's words; if Dynamo's words differ, a fold shows them. */
function whyCell(context: IContext, row: GraphBreakRow): Child {
  return row.reason === row.words
    ? prose(row.words)
    : h(
        'div',
        {},
        prose(row.words),
        fold(context, `break ${row.frame} ${row.at_ns}`, [h('small', {}, 'in Dynamo’s words')], () => [
          h('pre', { class: 'al-code', tabindex: '0' }, row.reason)
        ])
      );
}
