/**
 * The head of the page: the report in a line, in a word, and in numbers.
 *
 * Python words and counts it, in `aotlab/report/verdict.py` and `counts.py`, and every report in a notebook carries it.
 * For one that does not (a file that was saved and shown by hand) what is here counts, and is never better than Python.
 */

import { countsOf, frameCountsOf } from './counts';
import { NO_COUNTS } from './report';
import type { CellPart, Counts, Report, Summary } from './report';
import { amount, dataSize, grouped, listed } from './words';

export const STATES = ['verified', 'unverified', 'different', 'partly', 'nothing'] as const;

/** How it went; `verdict.py` says what each means. */
export type State = (typeof STATES)[number];

/** The head of a report, whole. */
export type Head = Omit<Summary, 'state' | 'counts'> & { readonly state: State; readonly counts: Counts };

/** What each state is called where the report has no words for it. */
const WORDS: Readonly<Record<State, string>> = {
  verified: 'equal to eager',
  unverified: 'not compared with eager',
  different: 'NOT equal to eager',
  partly: 'only in part compiled or compared',
  nothing: 'nothing was compiled'
};

function isState(value: string): value is State {
  return (STATES as readonly string[]).includes(value);
}

/** The head of a report: Python's, or what can be counted here. */
export function headOf(report: Report): Head {
  const { summary } = report;
  const state = summary?.state ?? '';
  if (summary === null || !isState(state)) {
    return counted(report);
  }
  if (summary.status !== '') {
    // Of a single graph they stand with it.
    return { ...summary, state, counts: summary.counts ?? added(report) };
  }
  // That of an earlier version of aotlab, which did not count.
  const { sentence, facts, frames, compared, different } = summary;
  return { ...counted(report), sentence, state, facts, frames, compared, different, status: WORDS[state] };
}

/** Add up what the graphs hold, or held before they were cut. */
function added(report: Report): Counts {
  const all = report.frames.flatMap(frame => frame.graphs.map(countsOf));
  const names = Object.keys(NO_COUNTS) as (keyof Counts)[];
  const sums = names.map(name => [name, all.reduce((sum, each) => sum + each[name], 0)]);
  return { ...NO_COUNTS, ...(Object.fromEntries(sums) as Counts) };
}

function counted(report: Report): Head {
  const refused = report.frames.reduce((sum, frame) => sum + frameCountsOf(frame).refusals, 0);
  const also = refused > 0 ? ` ${amount(refused, 'compilation')} refused.` : '';
  const compiled = report.frames.filter(frame => frame.graphs.some(graph => graph.status === 'compiled'));
  const graphs = compiled.flatMap(frame => frame.graphs.filter(graph => graph.status === 'compiled'));
  const rows = report.verification_rows.filter(row => row.engine === 'aotlab');
  const different = rows.filter(row => !row.equal).length;
  const counts = added(report);
  const head = {
    facts: [],
    frames: report.frames.length,
    compared: report.verification_rows.length,
    different: report.verification_rows.filter(row => !row.equal).length,
    graphs: graphs.length,
    recompiles: graphs.filter(graph => graph.misses.length > 0).length,
    refused,
    mutated: counts.mutated,
    new: report.cell?.mutated_outside.filter(row => row.kind === 'new').length ?? 0,
    outside: report.cell?.mutated_outside.length ?? 0,
    breaks: report.graph_break_rows.length,
    eager_lines: 0,
    speed: '',
    counts
  };
  if (graphs.length === 0) {
    return { ...head, sentence: `Nothing was compiled.${also}`, state: 'nothing', status: WORDS.nothing };
  }
  const covered = new Set(rows.map(row => row.frame));
  const whole = covered.has(null) || compiled.every(frame => covered.has(frame.name));
  // Lines that were not compiled, or not all of them.
  const parts = report.cell?.parts ?? [];
  const gaps = refused > 0 || parts.some(part => part.how === 'eager' || (part.how === 'compiled' && part.reason !== ''));
  let state: State = rows.length === 0 ? 'unverified' : 'verified';
  let found = rows.length === 0 ? 'not verified' : `equal to eager on ${amount(rows.length, 'observable')}`;
  if (different > 0) {
    state = 'different';
    found = `NOT equal to eager: ${different} of ${amount(rows.length, 'observable')} differ`;
  } else if (gaps || (rows.length > 0 && !whole)) {
    state = 'partly';
    found += rows.length > 0 && !whole ? ', but not everything was compared' : '';
  }
  return { ...head, sentence: `${amount(graphs.length, 'graph')} compiled; ${found}.${also}`, state, status: WORDS[state] };
}

/** What lines of a cell were compared with. */
const AGAINST: Readonly<Record<string, string>> = { python: 'Python', graph: 'the captured graph', nothing: 'nothing' };

/** Which compiled lines of the cell were compared with what, in a line; empty where the report does not tell. */
export function comparedLines({ cell, frames }: Report): string {
  const parts = cell?.parts ?? [];
  // Of what Dynamo captured gradients are compared with the captured graph's, whatever the lines are compared with.
  const graphs = frames.flatMap(frame => frame.graphs).filter(graph => graph.status === 'compiled');
  const trained = graphs.some(graph => graph.training === true && graph.frontend === 'dynamo');
  const gradients = trained && parts.some(part => part.compared === 'python') ? ['gradients'] : [];
  const clauses = Object.entries(AGAINST).flatMap(([kind, words]) => {
    const lines = parts.filter(part => part.compared === kind).map(linesOf);
    const all = kind === 'graph' ? [...gradients, ...lines] : lines;
    return all.length === 0 ? [] : [`${listed(all, 4)} with ${words}`];
  });
  return clauses.join(', ').replace(' with ', ' compared with ');
}

function linesOf({ first_line: first, last_line: last }: CellPart): string {
  return first === last ? `line ${first}` : `lines ${first}–${last}`;
}

/** A number of the head that opens the tab which lists what was counted. */
export interface Chip {
  readonly tab: string;
  readonly text: string;
  readonly tone?: 'warn' | 'write';
}

/** What stands beside the verdict: only what there is. */
export function chips(head: Head): Chip[] {
  const { counts } = head;
  const saved = counts.saved_bytes > 0 ? dataSize(counts.saved_bytes) : grouped(counts.saved);
  const told = (key: string): number => (head.facts.some(fact => fact.key === key) ? 1 : 0);
  const all: (Chip & { readonly count: number })[] = [
    { tab: 'overview', count: told('error'), text: 'the cell failed', tone: 'warn' },
    { tab: 'stages', count: head.graphs, text: amount(head.graphs, 'graph') },
    { tab: 'inputs', count: head.mutated, text: `${grouped(head.mutated)} mutated`, tone: 'write' },
    { tab: 'inputs', count: head.new, text: amount(head.new, 'new gradient') },
    { tab: 'outputs', count: counts.aliased, text: `${grouped(counts.aliased)} alias${counts.aliased === 1 ? '' : 'es'}` },
    { tab: 'saved', count: counts.saved, text: `${saved} saved` },
    { tab: 'overview', count: head.eager_lines, text: `${amount(head.eager_lines, 'line')} eager`, tone: 'warn' },
    { tab: 'breaks', count: head.breaks, text: amount(head.breaks, 'break'), tone: 'warn' },
    { tab: 'calls', count: head.refused, text: `${grouped(head.refused)} refused`, tone: 'warn' },
    { tab: 'calls', count: told('limit'), text: 'recompile limit', tone: 'warn' },
    { tab: 'calls', count: head.recompiles, text: amount(head.recompiles, 'recompile') },
    { tab: 'timing', count: head.speed.length, text: head.speed }
  ];
  return all.filter(chip => chip.count > 0);
}
