/** What a report holds in numbers; where tables were cut to fit a notebook, Python counted before, in `counts.py`. */

import type { Counts, Frame, FrameCounts, Graph, Input, Output, Saved } from './report';
import { known } from './words';

/** Whether anything about the tensor changed. */
export function mutated(input: Input): boolean {
  return input.mutates_data === true || input.mutates_metadata === true || input.mutates_storage === true;
}

/** The rows of arguments or outputs themselves, without those of parts of wrappers. */
export function wholes<T extends Input | Output>(rows: readonly T[]): readonly T[] {
  return inTrees(rows).filter(({ depth }) => depth === 0).map(({ row }) => row);
}

/** How many outputs share memory with something, or have a part that does. */
function aliased(rows: readonly Output[]): number {
  const trees = inTrees(rows);
  return new Set(trees.filter(({ row }) => row.base !== null).map(({ whole }) => whole)).size;
}

/** A row with the row of the argument or output that it is a part of, and how deep it lies in that. */
export interface InTree<T> {
  readonly row: T;
  readonly whole: T;
  readonly depth: number;
}

/** Find the trees in rows in which the parts of each wrapper follow it. */
export function inTrees<T extends Input | Output>(rows: readonly T[]): InTree<T>[] {
  const known = new Map<string, InTree<T>>();
  return rows.map(row => {
    const above = row.part_of === '' ? undefined : known.get(row.part_of);
    const found = { row, whole: above?.whole ?? row, depth: above === undefined ? 0 : above.depth + 1 };
    known.set(row.name, found);
    return found;
  });
}

/** What values take; those in the memory of others take none. */
function bytes(rows: readonly Saved[]): number {
  return rows.filter(row => row.shares === '').reduce((sum, row) => sum + (known(row.nbytes) ?? 0), 0);
}

/** Count what the tables of a graph hold, or held before they were cut. */
export function countsOf(graph: Graph): Counts {
  return (
    graph.counts ?? {
      stages: graph.stages.length,
      stages_ns: graph.stages.reduce((sum, stage) => sum + stage.duration_ns, 0),
      nodes: graph.nodes.filter(node => node.stage === 'trace').length,
      inputs: wholes(graph.inputs).length,
      mutated: wholes(graph.inputs).filter(row => mutated(row) && row.duplicate_of === null).length,
      outputs: wholes(graph.outputs).length,
      aliased: aliased(graph.outputs),
      storages: graph.storages.length,
      shared: graph.storages.filter(storage => storage.spans.length > 1).length,
      storage_bytes: graph.storages.reduce((sum, storage) => sum + (known(storage.nbytes) ?? 0), 0),
      saved: graph.saved.length,
      saved_bytes: bytes(graph.saved.filter(row => !row.is_input && !row.is_output)),
      held_bytes: bytes(graph.saved.filter(row => row.is_input || row.is_output)),
      kernels: graph.kernels.length,
      kernels_called: graph.kernels.filter(kernel => kernel.language === 'extern').length,
      guards: graph.guards.length
    }
  );
}

/** Count the graphs and refusals of a function, or those that there were before the report was cut. */
export function frameCountsOf(frame: Frame): FrameCounts {
  return (
    frame.counts ?? {
      graphs: frame.graphs.length,
      refusals: frame.refusals.length,
      compile_ns: frame.graphs.reduce((sum, graph) => sum + (graph.duration_ns ?? 0), 0)
    }
  );
}
