/** What panels say of the graph that a row or a table belongs to. */

import { countsOf, frameCountsOf } from '../model/counts';
import type { Counts, Graph } from '../model/report';
import { short } from '../model/words';
import type { Context, Entry } from './context';
import { h } from './dom';
import type { Child } from './dom';
import type { Column } from './table';

/** `training, compiled` and the like. */
export function graphFacts(graph: Graph): string[] {
  const status = graph.status === 'earlier' ? 'compiled before the recording began' : graph.status;
  const kind = graph.training === null ? '' : graph.training ? 'training' : 'inference';
  return [status, kind, graph.reused ? 'reused' : ''].filter(fact => fact !== '');
}

/** A heading above what one graph's table shows; the graph's name is left out where the report has only one. */
export function graphHeading(context: Context, entry: Entry, remark: string): HTMLElement {
  const title = context.entries.length > 1 ? [h('code', {}, entry.title), ' '] : [];
  return h('h4', { class: 'al-heading' }, ...title, h('small', {}, remark));
}

/** A row of a graph's table, with the graph: the rows of all graphs stand in one table. */
export interface OfGraph<T> {
  /** Null for what happened outside of every graph. */
  readonly entry: Entry | null;
  readonly row: T;
}

/** The rows of one kind of all graphs that are looked at. */
export function rowsOf<T>(context: Context, rows: (graph: Graph) => readonly T[]): OfGraph<T>[] {
  return context.chosen.flatMap(entry => rows(entry.graph).map(row => ({ entry, row })));
}

/** The same rows, graph by graph. */
export function byGraph<T>(rows: readonly OfGraph<T>[]): OfGraph<T>[][] {
  const found = new Map<Entry | null, OfGraph<T>[]>();
  for (const each of rows) {
    found.set(each.entry, found.get(each.entry) ?? []).get(each.entry)?.push(each);
  }
  return [...found.values()];
}

/** Add up something that is counted in each graph that is looked at. */
export function total(context: Context, count: (counts: Counts) => number): number {
  return context.chosen.reduce((sum, entry) => sum + count(countsOf(entry.graph)), 0);
}

/** How many graphs a table is about, where that is worth a word: the same tensor may be in several. */
export function ofGraphs({ chosen }: Context): string {
  return chosen.length > 1 ? ` of ${chosen.length} graphs` : '';
}

/** The graph in a few letters: its number is said where its function has several. */
function graphName({ frame, graph }: Entry): string {
  return `${short(frame.name)}${frameCountsOf(frame).graphs > 1 ? ` · ${graph.index}` : ''}`;
}

/** A column that names the graph, where there are several. */
export function graphColumn<T>(context: Context): Column<OfGraph<T>>[] {
  return context.entries.length < 2
    ? []
    : [{ name: 'graph', title: 'graph', help: 'The function, and which of its graphs', kind: 'code', lesser: '', cell: ({ entry }) => (entry === null ? null : graphName(entry)) }];
}

/** The graph of a row, for those who read the page by program. */
export function graphData({ entry }: OfGraph<unknown>): Readonly<Record<string, string>> {
  return entry === null ? {} : { 'data-frame': entry.frame.name, 'data-graph': String(entry.graph.index) };
}

/** What the user calls what a graph takes. */
export function userNames({ graph }: Entry): ReadonlyMap<string, string> {
  return new Map(graph.placeholders.map(each => [each.name, each.user_name]));
}

/** So many letters of a long name are always seen. */
const END = 14;

/** A name in the code of a graph, or what the user calls it. */
export function yours(entry: Entry | null, name: string): Child {
  const known = entry?.graph.placeholders.find(each => each.name === name);
  if (known === undefined) {
    return name;
  }
  // Where there is little room its end is seen: that of a parameter's name says most.
  const [begin, end] = [known.user_name.slice(0, -END), known.user_name.slice(-END)];
  return h('span', { class: 'al-yours', title: `${known.user_name}\n${name} in the code` }, h('span', {}, begin), end);
}
