/** Where the time went: a table of the time that each kind of work took. */

import type { TimeRow } from '../model/report';
import { duration, grouped } from '../model/words';
import type { IContext } from './context';
import { h, heading } from './dom';
import type { Child } from './dom';
import { table } from './table';

export const SHARE_HELP = 'Its share of the whole time';

/** The names of the kinds of `TimeRow`. */
const TIME: Readonly<Record<string, string>> = {
  dynamo: 'Dynamo captures',
  capture: 'capture of the arguments',
  dedupe: 'duplicates',
  synthetic_bases: 'synthetic bases',
  trace: 'trace',
  partition: 'partition',
  compile: 'compilation by the backend',
  runtime: 'the run-time function is written',
  between: 'guards, and work between the stages',
  backward: 'further backwards are derived',
  verification: 'comparison with eager',
  recording: 'the report itself',
  compiled: 'compiled calls',
  eager: 'calls that run eagerly',
  timing: 'measurements for --time',
  rest: 'Python, backward, everything else'
};

/** The names of the kinds of `TimeRow` in a report of stock `torch.compile`, if they are not the stages' names. */
const UPSTREAM_TIME: Readonly<Record<string, string>> = { rest: 'other phases' };

/**
 * A table of the time that each kind of work took. The rows add up to the time of the cell or of the recording, or in a
 * report of stock `torch.compile` to the time of the compilations.
 */
export function timeTable(context: IContext): Child[] {
  const { report } = context;
  const rows = report.time_rows.filter(row => row.duration_ns > 0);
  const total = rows.reduce((sum, row) => sum + row.duration_ns, 0);
  if (rows.length < 2) {
    return [];
  }
  return [
    heading('Where the time went', `${duration(total)}, each moment counted once`),
    table<TimeRow>(context, {
      name: 'time',
      label: 'Where the time went',
      columns: [
        {
          name: 'kind',
          title: 'what',
          kind: 'words',
          cell: row => (row.engine === 'upstream' ? UPSTREAM_TIME : TIME)[row.kind] ?? row.kind
        },
        {
          name: 'count',
          title: 'times',
          kind: 'number',
          value: row => (row.kind === 'rest' ? null : row.count),
          cell: row => (row.kind === 'rest' ? null : grouped(row.count))
        },
        {
          name: 'share',
          title: 'share',
          help: SHARE_HELP,
          value: row => row.duration_ns,
          cell: row => share(row.duration_ns, total)
        },
        {
          name: 'duration_ns',
          title: 'time',
          kind: 'number',
          value: row => row.duration_ns,
          cell: row => duration(row.duration_ns)
        }
      ],
      rows,
      key: row => `${row.engine} ${row.kind}`
    })
  ];
}

export function share(part: number, total: number): HTMLElement {
  const percent = total > 0 ? (100 * part) / total : 0;
  const bar = h('i');
  bar.style.width = `${percent}%`;
  return h('span', { class: 'al-track', title: `${percent.toFixed(0)} % of the time` }, bar);
}
