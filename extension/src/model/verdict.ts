/**
 * The head of the page: the verdict as a sentence and in a few words, and the numbers beside it. Python computes it.
 */

import { readSummary } from './records';
import type { Report, Summary } from './report';
import { amount, dataSize, grouped } from './words';

export const STATES = ['verified', 'unverified', 'different', 'partly', 'nothing', 'idle', 'running'] as const;

/** The verdict's state; `Verdict` in `aotlab/report/verdict.py` explains each value. */
export type State = (typeof STATES)[number];

/** The symbol of each state. */
export const SYMBOLS: Readonly<Record<State, string>> = {
  verified: '✓',
  unverified: '●',
  different: '✗',
  partly: '!',
  nothing: '!',
  idle: '○',
  running: '◌'
};

/** The head of a report, with a known state. */
export type Head = Summary & { readonly state: State };

/** The verdict of a report without a summary, or with a state that this page does not know. */
const NO_VERDICT = { sentence: 'This report has no verdict.', status: 'no verdict', state: 'unverified' } as const;

/** The head of a report without a summary, or with a summary that cannot be read. */
const NO_HEAD: Head = { ...readSummary({}, '$', { note: () => undefined }), ...NO_VERDICT };

function isKnown(head: Summary): head is Head {
  return (STATES as readonly string[]).includes(head.state);
}

/** The head of a report. If its state is unknown, the result has no verdict, but it has the counts. */
export function headOf({ summary }: Report): Head {
  if (summary === null) {
    return NO_HEAD;
  }
  return isKnown(summary) ? summary : { ...summary, ...NO_VERDICT };
}

/** A button in the head with a number. A click opens the tab that shows the counted things. */
export interface IChip {
  readonly tab: string;
  readonly text: string;
  readonly tone?: 'warn' | 'write';
}

/** The chip about the differences between the ranks of a distributed job; none for a report of one process. */
export function rankChips(gathered: Report): IChip[] {
  const { alone, apart_ranks: count } = headOf(gathered);
  const text = count > 0 ? `${amount(count, 'difference')} between the ranks` : 'same on all ranks';
  const chip: IChip = alone === '' ? { tab: 'ranks', text } : { tab: 'ranks', text: alone, tone: 'warn' };
  return gathered.world_size > 1 ? [chip] : [];
}

/** The chips beside the verdict. A chip whose count is 0 is left out. */
export function chips(head: Head): IChip[] {
  const { counts } = head;
  const saved = counts.saved_bytes > 0 ? dataSize(counts.saved_bytes) : grouped(counts.saved);
  const factCount = (key: string): number => (head.facts.some(fact => fact.key === key) ? 1 : 0);
  const allChips: (IChip & { readonly count: number })[] = [
    { tab: 'overview', count: factCount('error'), text: 'the cell failed', tone: 'warn' },
    { tab: 'overview', count: factCount('interrupted'), text: 'interrupted' },
    { tab: 'stages', count: head.graphs, text: amount(head.graphs, 'graph') },
    { tab: 'inputs', count: head.mutated, text: `${grouped(head.mutated)} mutated`, tone: 'write' },
    { tab: 'inputs', count: head.new, text: amount(head.new, 'new gradient') },
    {
      tab: 'outputs',
      count: counts.aliased,
      text: `${grouped(counts.aliased)} alias${counts.aliased === 1 ? '' : 'es'}`
    },
    { tab: 'saved', count: counts.saved, text: `${saved} saved` },
    {
      tab: 'runs',
      count: head.runs,
      text:
        head.runs_apart > 0
          ? `${amount(head.runs_apart, 'fact')} differ${head.runs_apart === 1 ? 's' : ''} between the runs`
          : 'same in both runs'
    },
    {
      tab: 'engines',
      count: head.engines,
      text:
        head.apart > 0
          ? `${amount(head.apart, 'fact')} differ${head.apart === 1 ? 's' : ''} upstream`
          : 'same as upstream'
    },
    { tab: 'overview', count: head.eager_lines, text: `${amount(head.eager_lines, 'line')} eager`, tone: 'warn' },
    { tab: 'breaks', count: head.breaks, text: amount(head.breaks, 'break'), tone: 'warn' },
    { tab: 'calls', count: head.refused, text: `${grouped(head.refused)} refused`, tone: 'warn' },
    { tab: 'calls', count: factCount('limit'), text: 'recompile limit', tone: 'warn' },
    { tab: 'calls', count: head.recompiles, text: amount(head.recompiles, 'recompile') },
    { tab: 'timing', count: head.speed.length, text: head.speed }
  ];
  return allChips.filter(chip => chip.count > 0);
}
