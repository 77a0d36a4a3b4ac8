/** Helpers for rows and tables that belong to a graph. */

import { countsOf, frameCountsOf } from '../model/report';
import type { Counts, Graph } from '../model/report';
import { cutNotice, grouped, short } from '../model/words';
import { servingOf } from './context';
import type { IContext, IEntry } from './context';
import { dotted, h, soft } from './dom';
import type { Child } from './dom';
import type { Column } from './table';

/** The graph's status, whether it is for training, and whether it is reused: `compiled`, `training`, `reused`. */
export function graphFacts(graph: Graph): string[] {
  const status = graph.status === 'earlier' ? 'compiled before the recording began' : graph.status;
  const kind = graph.training === null ? '' : graph.training ? 'training' : 'inference';
  return [status, kind, graph.reused ? 'reused' : ''].filter(fact => fact !== '');
}

/** A heading above one graph's table, without the graph's name if the report has only one graph. */
export function graphHeading(context: IContext, entry: IEntry, remark: string): HTMLElement {
  const title = context.entries.length > 1 ? [h('code', {}, entry.title), ' '] : [];
  return h('h4', { class: 'al-heading' }, ...title, h('small', {}, remark));
}

/** A row of a table together with its graph, because one table shows the rows of all chosen graphs. */
export interface IGraphRow<T> {
  /** Null for a change outside of every graph. */
  readonly entry: IEntry | null;
  readonly row: T;
}

/** The rows of all chosen graphs. */
export function rowsOf<T>(context: IContext, rows: (graph: Graph) => readonly T[]): IGraphRow<T>[] {
  return context.chosen.flatMap(entry => rows(entry.graph).map(row => ({ entry, row })));
}

/** Group rows by their graph. */
export function byGraph<T>(rows: readonly IGraphRow<T>[]): IGraphRow<T>[][] {
  const rowsOfGraphs = new Map<IEntry | null, IGraphRow<T>[]>();
  for (const row of rows) {
    rowsOfGraphs
      .set(row.entry, rowsOfGraphs.get(row.entry) ?? [])
      .get(row.entry)
      ?.push(row);
  }
  return [...rowsOfGraphs.values()];
}

/**
 * Whether the reader chose all graphs that served the calls. Then the counts in the head apply, which include graphs that were
 * cut.
 */
export function allGraphsChosen({ chosen, entries }: IContext): boolean {
  const serving = servingOf(entries);
  return chosen.length === serving.length && chosen.every(entry => serving.includes(entry));
}

/** Add up a count over all chosen graphs. */
export function total(context: IContext, count: (counts: Counts) => number): number {
  const { chosen, head } = context;
  return allGraphsChosen(context)
    ? count(head.counts)
    : chosen.reduce((sum, entry) => sum + count(countsOf(entry.graph)), 0);
}

/** Count the graphs that the reader chose, including those that were cut. */
export function graphCount(context: IContext): number {
  return allGraphsChosen(context) ? context.head.listed : context.chosen.length;
}

/** Say that a table has rows of several graphs: ` of 3 graphs`. A tensor may have a row for each of them. */
export function ofGraphs(context: IContext): string {
  const count = graphCount(context);
  return count > 1 ? ` of ${grouped(count)} graphs` : '';
}

/** Say how many of the graphs that the reader chose were cut. */
export function cutGraphsNotice(context: IContext): Child {
  const cutCount = graphCount(context) - context.chosen.length;
  return cutCount > 0 ? soft(cutNotice(cutCount, 'graph')) : null;
}

/** The graph's short name, with its number if its function has several graphs. */
function graphName({ frame, graph }: IEntry): string {
  return `${short(frame.name)}${frameCountsOf(frame).graphs > 1 ? ` · ${graph.index}` : ''}`;
}

/** A column with the graph's name; empty if the report has only one graph. */
export function graphColumn<T>(context: IContext): Column<IGraphRow<T>>[] {
  return context.entries.length < 2
    ? []
    : [
        {
          name: 'graph',
          title: 'graph',
          help: 'The function, and the kind of its graph',
          kind: 'code',
          lesser: '',
          cell: ({ entry }) => (entry === null ? null : graphName(entry))
        }
      ];
}

/** The graph of a row as `data-` attributes, for programs that read the page. */
export function graphData({ entry }: IGraphRow<unknown>): Readonly<Record<string, string>> {
  return entry === null ? {} : { 'data-frame': entry.frame.name, 'data-graph': String(entry.graph.index) };
}

/** The user's names for a graph's placeholders. */
export function userNames({ graph }: IEntry): ReadonlyMap<string, string> {
  return new Map(graph.placeholders.map(each => [each.name, each.user_name]));
}

/** The number of characters at the end of a long name that are always visible. */
const END = 14;

/** The user's name for a node of a graph, or the node's own name if it is unknown. */
export function userName(entry: IEntry | null, name: string): Child {
  const placeholder = entry?.graph.placeholders.find(each => each.name === name);
  if (placeholder === undefined) {
    return name;
  }
  // On narrow pages the end stays visible, because the end of a parameter's name tells the most.
  const [begin, end] = [placeholder.user_name.slice(0, -END), placeholder.user_name.slice(-END)];
  return h(
    'span',
    { class: 'al-yours', title: `${placeholder.user_name}\n${name} in the code` },
    h('span', {}, dotted(begin)),
    end
  );
}
