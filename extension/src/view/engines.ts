/** Engines: aotlab beside stock torch.compile, fact by fact. */

import type { EngineRow } from '../model/report';
import { amount, short } from '../model/words';
import type { IContext } from './context';
import { h, heading, mark, soft } from './dom';
import type { Child } from './dom';
import { table } from './table';
import type { Column } from './table';

/** The headings of the kinds of facts, in the order of the page. */
const KINDS: readonly (readonly [title: string, remark: string, facts: readonly string[]])[] = [
  ['Graphs', '', ['graph', 'graphs']],
  ['Mutations', 'inputs that the code writes, and where each engine writes them', ['mutation']],
  ['Outputs', 'tensors that own their memory, and views that the runtime regenerates', ['output']],
  ['Saved for backward', 'values of the same line, element type and sizes', ['saved']],
  ['Sizes and times', '', ['size', 'guards', 'recompile', 'time']]
];

const COLUMNS: readonly Column<EngineRow>[] = [
  { name: 'subject', title: 'of', kind: 'code', cell: row => row.subject },
  { name: 'aotlab', title: 'aotlab', kind: 'words', cell: row => row.aotlab },
  { name: 'upstream', title: 'stock torch.compile', kind: 'words', cell: row => row.upstream },
  {
    name: 'same',
    title: 'same',
    cell: row => (row.same === null ? null : mark(row.same ? 'yes' : 'differs', row.same ? 'plain' : 'write'))
  }
];

/** Draw the panel: a table for each kind of fact. */
export function enginesPanel(context: IContext): Child[] {
  const rows = context.report.engine_rows.filter(row => isChosen(context, row));
  if (rows.length === 0) {
    return [soft('Only one engine compiled this.')];
  }
  const apart = rows.filter(row => row.same === false).length;
  const frames = new Set(rows.map(row => `${row.frame}/${row.graph}`));
  const name: Column<EngineRow>[] =
    frames.size < 2
      ? []
      : [
          {
            name: 'graph',
            title: 'graph',
            kind: 'code',
            lesser: '',
            cell: row => `${short(row.frame)}${row.graph === null ? '' : ` · ${row.graph}`}`
          }
        ];
  return [
    h(
      'p',
      { class: 'al-counts' },
      apart > 0
        ? mark(`${amount(apart, 'fact')} differ${apart === 1 ? 's' : ''}`, 'write')
        : mark('no fact differs', 'good'),
      h('span', { class: 'al-soft' }, `of ${amount(rows.length, 'fact')} about the graphs of both engines`)
    ),
    soft('aotlab’s graphs served the calls. Stock torch.compile compiled the same captured graphs for comparison.'),
    ...KINDS.flatMap(([title, remark, facts]) => {
      const chosen = rows.filter(row => facts.includes(row.fact));
      return chosen.length === 0
        ? []
        : [
            heading(title, remark),
            table(context, {
              name: `engines ${facts[0] ?? ''}`,
              meanings: 'engines',
              label: title,
              columns: [...name, ...COLUMNS],
              rows: chosen,
              key: row => row.subject
            })
          ];
    })
  ];
}

/** Whether the reader chose the graph of a row: aotlab's, or its counterpart. */
function isChosen({ chosen }: IContext, row: EngineRow): boolean {
  return chosen.some(
    ({ frame, graph }) => frame.name.startsWith(row.frame) && (row.graph ?? graph.index) === graph.index
  );
}
