/** Read a report, version 1, from a notebook's output, a page or a kernel's message. */

import { list } from './reading';
import type { IDamage, Reader } from './reading';
import * as records from './records';
import type {
  Counts,
  Frame,
  FrameCounts,
  Graph,
  Input,
  Node,
  Report,
  Saved,
  SymExpr,
  VerificationRow
} from './records';

export type * from './records';

/** The MIME type of a report in a notebook's output. */
export const MIME_TYPE = 'application/vnd.aotlab.report.v1+json';

/** The version that this view reads. */
export const VERSION = 1;

/** A size in elements or bytes: a number, or an expression with its value in the traced call. */
export type Size = number | SymExpr;

/** Read a part of a report that a kernel sent separately. Damaged places become defaults without a note. */
function readPart<T>(reader: Reader<T>, value: unknown): T {
  return reader(value, '$', { note: () => undefined });
}

const NO_COUNTS: Counts = readPart(records.readCounts, {});

/** The number of rows in each table of a graph before the report was cut. */
export function countsOf(graph: Graph): Counts {
  return graph.counts ?? NO_COUNTS;
}

const NO_FRAME_COUNTS: FrameCounts = readPart(records.readFrameCounts, {});

/** The number of graphs and refusals of a function before the report was cut. */
export function frameCountsOf(frame: Frame): FrameCounts {
  return frame.counts ?? NO_FRAME_COUNTS;
}

/** Read a graph that a kernel sent separately. */
export function readGraph(value: unknown): Graph {
  return readPart(records.readGraph, value);
}

/** Read the nodes of a graph that a kernel sent separately. */
export function readNodes(value: unknown): readonly Node[] {
  return readPart(list(records.readNode), value);
}

/** Make the row of a saved value from some of its fields. */
export function readSaved(value: object): Saved {
  return readPart(records.readSaved, value);
}

/** Read the rows about changes outside of the graphs that a kernel sent separately. */
export function readOutside(value: unknown): readonly Input[] {
  return readPart(list(records.readInput), value);
}

/** Read the rows of a verification that a kernel sent separately. */
export function readVerification(value: unknown): readonly VerificationRow[] {
  return readPart(list(records.readVerificationRow), value);
}

/**
 * The result of reading: a report, or in `problem` a sentence that explains why it cannot be read. `damage` names the
 * places of the report that could not be read.
 */
export type Reading =
  | { readonly report: Report; readonly problem: null; readonly damage: readonly string[] }
  | { readonly report: null; readonly problem: string; readonly damage: readonly string[] };

/** At most this many damaged places of a report are remembered. */
const MOST_DAMAGE = 20;

/** Read a report from parsed JSON. Never throws. */
export function readReport(value: unknown): Reading {
  const failed = (problem: string): Reading => ({ report: null, problem, damage: [] });
  if (typeof value !== 'object' || value === null || Array.isArray(value)) {
    return failed('This is not an aotlab report.');
  }
  const fields = value as Record<string, unknown>;
  if (!Object.hasOwn(fields, 'version') || !Object.hasOwn(fields, 'environment')) {
    return failed('This is not an aotlab report: it has no version or no environment.');
  }
  if (fields['version'] !== VERSION) {
    const versionText = typeof fields['version'] === 'number' ? String(fields['version']) : 'of another kind';
    return failed(
      `This report has version ${versionText}, and this view reads version ${VERSION}: use a newer aotlab.`
    );
  }
  for (const name of ['environment', 'frames']) {
    if (fields[name] !== undefined && Array.isArray(fields[name]) !== (name === 'frames')) {
      return failed(`This report is damaged: its ${name} cannot be read.`);
    }
  }
  const damagedPlaces: string[] = [];
  const damage: IDamage = {
    note: (path, expected) => {
      if (damagedPlaces.length < MOST_DAMAGE) {
        damagedPlaces.push(`${path} should be ${expected}`);
      }
    }
  };
  try {
    return { report: records.readReport(value, '$', damage), problem: null, damage: damagedPlaces };
  } catch {
    return failed('This report is damaged: it is nested too deeply.');
  }
}
