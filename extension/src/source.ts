/** What the view draws from: a report that may change, and what can be asked of whoever made it. */

import type { Node, Reading } from './model/report';

export interface Source {
  /** The report as it stands, or why there is none. */
  readonly reading: Reading;
  /** What the kernel is doing for us right now; empty if nothing. */
  readonly progress: string;
  /** Whether a measurement runs, as far as we know; another one would be refused. */
  readonly busy: boolean;
  /** Why the last thing that was asked of the kernel failed; empty if it did not. */
  readonly failure: string;
  /** Whether a kernel answers for this report. */
  readonly live: boolean;
  /** Call `callback` after every change, until the function that is returned is called. */
  onChange(callback: () => void): () => void;
  /** Ask the kernel for a graph of which rows or code were cut to fit a notebook; only of use while live. */
  askGraph(frame: string, index: number): void;
  /** The nodes of a graph, which no notebook holds; null, and the kernel is asked for them, until it has sent them. */
  nodes(frame: string, index: number): readonly Node[] | null;
  /** Ask the kernel for all rows of the verification, or of what changed outside of the graphs; only of use while live. */
  askRows(kind: 'verification' | 'outside'): void;
  /** Ask the kernel to time the report's graphs beside eager; only of use while live. */
  measure(): void;
}

/** Something that holds on to the page or the kernel until it is disposed. */
export interface Disposable {
  dispose(): void;
}
