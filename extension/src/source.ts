/**
 * The source of a view: a report that may change, and requests to the kernel that recorded it.
 *
 * A source is *live* while a kernel answers for its report. A report in a notebook is *cut*: long texts and tables are
 * shortened, and only the kernel has the rest.
 */

import type { Node, Reading } from './model/report';

/** A choice of saved values of one graph, by the options of `%%aotcompile`. */
export type AskedChoice = {
  readonly frame: string;
  readonly index: number;
  readonly partitioner: string;
  readonly budget: number | null;
  readonly save: string[];
  readonly recompute: string[];
};

export interface ISource {
  /** The report at this moment, or the reason why it cannot be read. */
  readonly reading: Reading;
  /** The task that the kernel does for this view now, in words; empty if it does nothing. */
  readonly progress: string;
  /** Whether a measurement runs, as far as the view knows. The kernel does not start a second one meanwhile. */
  readonly busy: boolean;
  /** Why the last request to the kernel failed; empty if it did not fail. */
  readonly failure: string;
  /** Whether a kernel answers for this report. */
  readonly live: boolean;
  /** Call `callback` after every change. Call the returned function to stop that. */
  onChange(callback: () => void): () => void;
  /** Ask the kernel for a graph whose rows or code were cut to fit a notebook; has an effect only while live. */
  askGraph(frame: string, index: number): void;
  /**
   * The nodes of a graph. If the report lacks them, the first call asks the kernel. The result is null until the kernel
   * has sent them.
   */
  nodes(frame: string, index: number): readonly Node[] | null;
  /**
   * Ask the kernel for all rows of the verification, or of the changes outside of the graphs; has an effect only while
   * live.
   */
  askRows(kind: 'verification' | 'outside'): void;
  /**
   * Ask the kernel to compile a graph again with another choice of saved values, and to measure it; has an effect only
   * while live.
   */
  apply(choice: AskedChoice): void;
  /** Ask the kernel to time the report's graphs beside eager; has an effect only while live. */
  measure(): void;
}

/** An object that uses resources of the page or the kernel until it is disposed. */
export interface IDisposable {
  dispose(): void;
}
