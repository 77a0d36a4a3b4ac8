/** Two runs: an earlier and a later run of the same code, fact by fact. */

import type { RunRow } from '../model/report';
import { amount, short } from '../model/words';
import type { IContext } from './context';
import { h, heading, mark, soft } from './dom';
import type { Child } from './dom';
import { table } from './table';
import type { Column } from './table';

/** The headings of the kinds of facts, in the order of the page, with the title of the column of names. */
const KINDS: readonly (readonly [title: string, remark: string, subject: string, facts: readonly string[]])[] = [
  ['Code', 'lines that differ', 'line', ['code']],
  ['Times', 'median, and the 10th to the 90th percentile', 'of', ['time']],
  ['Saved for backward', 'values of the same code, element type and sizes', 'value', ['saved']],
  ['Kernels', 'kernels whose source differs', 'kernel', ['kernel']],
  ['Graphs, node by node', 'nodes that differ', 'node', ['graph', 'node']],
  ['Guards', 'guards that differ', 'guard of', ['guard']],
  ['Mutations and outputs', 'inputs and outputs that differ', 'of', ['mutation', 'output']],
  ['Versions and settings', '', 'of', ['run']]
];

/** The colours of changes. All other changes have the same neutral colour. */
const TONES: Readonly<Record<string, string>> = { added: 'good', removed: 'write' };

/** Draw the panel: a table for each kind of fact. */
export function runsPanel(context: IContext): Child[] {
  const { run_names: names, run_rows: rows } = context.report;
  const [before = 'before', after = 'after'] = names;
  const apart = rows.filter(row => row.same === false).length;
  return [
    h(
      'p',
      { class: 'al-counts' },
      apart > 0
        ? mark(`${amount(apart, 'fact')} differ${apart === 1 ? 's' : ''}`, 'write')
        : mark('no fact differs', 'good'),
      h('span', { class: 'al-soft' }, `between ${before} and ${after}`)
    ),
    soft(`The other tabs show ${after}. A time differs only if the difference is larger than the noise.`),
    ...KINDS.flatMap(([title, remark, subject, facts]) => {
      const chosen = rows.filter(row => facts.includes(row.fact));
      return chosen.length === 0
        ? []
        : [
            heading(title, chosen.some(row => row.same === false) ? remark : ''),
            table(context, {
              name: `runs ${facts[0] ?? ''}`,
              meanings: 'runs',
              label: title,
              columns: columnsOf(chosen, subject, before, after),
              rows: chosen,
              key: row => row.subject
            })
          ];
    })
  ];
}

function columnsOf(rows: readonly RunRow[], subject: string, before: string, after: string): Column<RunRow>[] {
  const graphs = new Set(rows.map(row => `${row.frame}/${row.graph}`));
  const graph: Column<RunRow> = {
    name: 'graph',
    title: 'graph',
    kind: 'code',
    lesser: '',
    cell: row => (row.frame === null ? '' : `${short(row.frame)}${row.graph === null ? '' : ` · ${row.graph}`}`)
  };
  const part: Column<RunRow> = { name: 'part', title: 'part', lesser: '', cell: row => row.part };
  const kind = rows.some(row => row.fact === 'code' || row.fact === 'node') ? 'code' : 'words';
  return [
    { name: 'subject', title: subject, kind: 'code', cell: row => row.subject },
    ...(graphs.size > 1 ? [graph] : []),
    ...(rows.some(row => row.part !== '') ? [part] : []),
    { name: 'before', title: before, kind, cell: row => row.before },
    { name: 'after', title: after, kind, cell: row => row.after },
    { name: 'change', title: 'change', kind: 'words', cell: changeOf }
  ];
}

function changeOf(row: RunRow): Child {
  if (row.same === false) {
    return mark(row.change || 'differs', TONES[row.change] ?? 'plain');
  }
  return h('span', { class: 'al-soft' }, row.change === '' && row.same === true ? 'same' : row.change);
}
