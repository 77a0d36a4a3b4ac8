/**
 * The report in one line.
 *
 * Python words it, in `aotlab/report/verdict.py`, and every report in a notebook carries its words. For one that does
 * not (a file that was saved and shown by hand) the sentence here counts, and is never better than Python's.
 */

import type { Report } from './report';
import { amount } from './words';

export const STATES = ['verified', 'unverified', 'different', 'partly', 'nothing'] as const;

/** How it went; `verdict.py` says what each means. */
export type State = (typeof STATES)[number];

export interface Verdict {
  readonly sentence: string;
  readonly state: State;
}

function isState(value: string): value is State {
  return (STATES as readonly string[]).includes(value);
}

/** Say in one line what the report tells. */
export function verdict(report: Report): Verdict {
  const { summary } = report;
  return summary !== null && isState(summary.state) ? { sentence: summary.sentence, state: summary.state } : counted(report);
}

function counted(report: Report): Verdict {
  const refusals = report.frames.flatMap(frame => frame.refusals);
  const refused = refusals.length > 0 ? ` ${amount(refusals.length, 'compilation')} refused.` : '';
  const compiled = report.frames.filter(frame => frame.graphs.some(graph => graph.status === 'compiled'));
  const graphs = compiled.flatMap(frame => frame.graphs.filter(graph => graph.status === 'compiled'));
  if (graphs.length === 0) {
    return { sentence: `Nothing was compiled.${refused}`, state: 'nothing' };
  }
  const rows = report.verification_rows.filter(row => row.engine === 'aotlab');
  const different = rows.filter(row => !row.equal).length;
  const covered = new Set(rows.map(row => row.frame));
  const whole = covered.has(null) || compiled.every(frame => covered.has(frame.name));
  // Lines that were not compiled, or not all of them.
  const parts = report.cell?.parts ?? [];
  const gaps = refused !== '' || parts.some(part => part.how === 'eager' || (part.how === 'compiled' && part.reason !== ''));
  let state: State = rows.length === 0 ? 'unverified' : 'verified';
  let found = rows.length === 0 ? 'not verified' : `equal to eager on ${amount(rows.length, 'observable')}`;
  if (different > 0) {
    state = 'different';
    found = `NOT equal to eager: ${different} of ${amount(rows.length, 'observable')} differ`;
  } else if (gaps || (rows.length > 0 && !whole)) {
    state = 'partly';
    found += rows.length > 0 && !whole ? ', but not everything was compared' : '';
  }
  return { sentence: `${amount(graphs.length, 'graph')} compiled; ${found}.${refused}`, state };
}
