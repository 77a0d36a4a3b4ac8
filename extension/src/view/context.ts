/**
 * The context of every panel: the report, the graphs that the reader chose, and the folds that the reader opened. A
 * *fold* is a `details` element.
 */

import type { Frame, Graph, Report } from '../model/report';
import type { Head } from '../model/verdict';
import { short } from '../model/words';
import type { ISource } from '../source';
import { h } from './dom';
import type { Child } from './dom';
import type { Selection } from './selection';
import type { ITableState } from './table';

/** A graph and the function that it was compiled for. */
export interface IEntry {
  readonly frame: Frame;
  readonly graph: Graph;
  /** The graph's name in headings and in the list of graphs. */
  readonly title: string;
  /** A key of the graph, unique in the report and stable while the report grows. */
  readonly key: string;
}

export interface IContext {
  readonly source: ISource;
  readonly report: Report;
  /** The report of all ranks of a distributed job, of which `report` is one; else `report` itself. */
  readonly gathered: Report;
  /** Show the report of another rank. */
  readonly chooseRank: (rank: number) => void;
  /** The verdict on the report, and its counts. */
  readonly head: Head;
  /** All graphs of the report. */
  readonly entries: readonly IEntry[];
  /** The graphs that the reader chose. */
  readonly chosen: readonly IEntry[];
  /** The keys of the folds that the reader opened (true) or closed (false). */
  readonly folds: Map<string, boolean>;
  /** The line of the program that the reader chose, and everything that it caused. */
  readonly selection: Selection;
  /** The reader's sorting, search and scrolling of each table, by the table's key. */
  readonly tables: Map<string, ITableState>;
  /** Draw the panel again, after a fold was opened or closed. */
  readonly redraw: () => void;
}

/** List the graphs of a report. */
export function entriesOf(report: Report): IEntry[] {
  return report.frames.flatMap(frame =>
    frame.graphs.map(graph => ({
      frame,
      graph,
      title: `${short(frame.name)} · graph ${graph.index}`,
      key: `${frame.name}/${graph.index}`
    }))
  );
}

/** The graphs that served the calls: aotlab's, if stock torch.compile compiled the same code for comparison. */
export function servingOf(entries: readonly IEntry[]): readonly IEntry[] {
  const ours = entries.filter(({ frame }) => frame.engine !== 'upstream');
  return ours.length > 0 ? ours : entries;
}

/**
 * Make a fold. Its content is made when it is first opened. If the reader opened or closed the fold with this `key`,
 * the new fold has the same state; else `opened` decides.
 */
export function fold(
  context: IContext,
  key: string,
  title: readonly Child[],
  content: () => readonly Child[],
  opened = false
): HTMLDetailsElement {
  const contentBox = h('div', { class: 'al-inside' });
  const details = h(
    'details',
    { class: 'al-fold', open: context.folds.get(key) ?? opened },
    h('summary', { 'data-key': `fold ${key}` }, ...title),
    contentBox
  );
  let filled = false;
  const show = (): void => {
    if (details.open && !filled) {
      filled = true;
      contentBox.append(...content().filter((child): child is Node | string => child !== null));
    }
  };
  show();
  details.addEventListener('toggle', () => {
    context.folds.set(key, details.open);
    show();
  });
  return details;
}
