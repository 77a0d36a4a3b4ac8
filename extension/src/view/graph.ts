/** What panels say of the graph that a table belongs to. */

import type { Graph } from '../model/report';
import type { Context, Entry } from './context';
import { h } from './dom';

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
