/** What every panel is given: the report, which of its graphs are looked at, and what the reader opened. */

import type { Frame, Graph, Report } from '../model/report';
import type { Head } from '../model/verdict';
import { short } from '../model/words';
import type { Source } from '../source';
import { h } from './dom';
import type { Child } from './dom';
import type { Selection } from './selection';
import type { TableState } from './table';

/** A graph and the function that it was compiled for. */
export interface Entry {
  readonly frame: Frame;
  readonly graph: Graph;
  /** What it is called in headings and in the list of graphs. */
  readonly title: string;
  /** The same, unique in the report and stable while it grows. */
  readonly key: string;
}

export interface Context {
  readonly source: Source;
  readonly report: Report;
  /** The report in words and numbers. */
  readonly head: Head;
  /** All graphs of the report. */
  readonly entries: readonly Entry[];
  /** Those that the reader chose. */
  readonly chosen: readonly Entry[];
  /** The keys of the folds that the reader opened (true) or closed (false). */
  readonly folds: Map<string, boolean>;
  /** The line of the program that is chosen, and all that comes from it. */
  readonly selection: Selection;
  /** What the reader did to the tables, by their keys. */
  readonly tables: Map<string, TableState>;
  /** Draw the panel anew, after a change of what is open. */
  readonly redraw: () => void;
}

/** List the graphs of a report. */
export function entriesOf(report: Report): Entry[] {
  return report.frames.flatMap(frame =>
    frame.graphs.map(graph => ({
      frame,
      graph,
      title: `${short(frame.name)} · graph ${graph.index}`,
      key: `${frame.name}/${graph.index}`
    }))
  );
}

/** A fold whose content is made when it is first opened, and which stays as the reader left it when redrawn. */
export function fold(
  context: Context,
  key: string,
  title: readonly Child[],
  content: () => readonly Child[],
  opened = false
): HTMLDetailsElement {
  const inside = h('div', { class: 'al-inside' });
  const details = h(
    'details',
    { class: 'al-fold', open: context.folds.get(key) ?? opened },
    h('summary', { 'data-key': `fold ${key}` }, ...title),
    inside
  );
  let filled = false;
  const show = (): void => {
    if (details.open && !filled) {
      filled = true;
      inside.append(...content().filter((child): child is Node | string => child !== null));
    }
  };
  show();
  details.addEventListener('toggle', () => {
    context.folds.set(key, details.open);
    show();
  });
  return details;
}
