/** Give a sample the counts and the head that Python gives to every report that it shows. */

import { readReport } from '../src/model/report';
import type { Counts, Graph, Report, Saved } from '../src/model/report';
import { mutated, withoutParts } from '../src/model/rows';
import { sizeValue } from '../src/model/words';
import type { IJson } from './sample';

function bytes(rows: readonly Saved[]): number {
  return rows.filter(row => row.shares === '').reduce((sum, row) => sum + (sizeValue(row.nbytes) ?? 0), 0);
}

function count(graph: Graph): Counts {
  const outputs = withoutParts(graph.outputs);
  const aliased = new Set(graph.outputs.filter(row => row.base !== null).map(row => row.part_of || row.name));
  const held = graph.saved.filter(row => row.is_input || row.is_output);
  return {
    stages: graph.stages.length,
    stages_ns: graph.stages.reduce((sum, stage) => sum + stage.duration_ns, 0),
    nodes: graph.nodes.filter(node => node.stage === 'trace').length,
    inputs: withoutParts(graph.inputs).length,
    mutated: withoutParts(graph.inputs).filter(row => mutated(row) && row.duplicate_of === null).length,
    outputs: outputs.length,
    aliased: outputs.filter(row => aliased.has(row.name)).length,
    storages: graph.storages.length,
    shared: graph.storages.filter(storage => storage.spans.length > 1).length,
    storage_bytes: graph.storages.reduce((sum, storage) => sum + (sizeValue(storage.nbytes) ?? 0), 0),
    saved: graph.saved.length,
    saved_bytes: bytes(graph.saved.filter(row => !held.includes(row))),
    held_bytes: bytes(held),
    kernels: graph.kernels.length,
    kernels_called: graph.kernels.filter(kernel => kernel.language === 'extern').length,
    guards: graph.guards.length
  };
}

function headOf(report: Report, graphCounts: readonly Counts[]): IJson {
  const graphs = report.frames.flatMap(frame => frame.graphs);
  const different = report.verification_rows.filter(row => !row.equal).length;
  const names = Object.keys(graphCounts[0] ?? {}) as (keyof Counts)[];
  const mostSavedBytes = Math.max(0, ...graphCounts.map(each => each.saved_bytes)); // every sample has one function
  const sums = names.map(name => [name, graphCounts.reduce((sum, each) => sum + each[name], 0)]);
  const counts: IJson = { ...Object.fromEntries(sums), saved_bytes: mostSavedBytes };
  return {
    sentence: 'Python’s sentence.',
    state: different > 0 ? 'different' : 'verified',
    status: different > 0 ? 'NOT equal to eager' : 'equal to eager',
    frames: report.frames.length,
    compared: report.verification_rows.length,
    different,
    graphs: graphs.length,
    listed: graphs.length,
    recompiles: graphs.filter(graph => graph.misses.length > 0).length,
    refused: report.frames.reduce((sum, frame) => sum + frame.refusals.length, 0),
    mutated: counts['mutated'],
    new: report.cell?.mutated_outside.filter(row => row.kind === 'new').length ?? 0,
    outside: report.cell?.mutated_outside.length ?? 0,
    breaks: report.graph_break_rows.filter(row => row.library === '').length,
    counts
  };
}

/** Count a sample. Counts and fields of the head that the sample has already are not changed. */
export function counted(json: IJson): IJson {
  const { report } = readReport(json);
  if (report === null) {
    return json;
  }
  const frames = report.frames.map(frame => ({
    ...frame,
    graphs: frame.graphs.map(graph => ({ ...graph, counts: graph.counts ?? count(graph) })),
    counts: frame.counts ?? {
      graphs: frame.graphs.length,
      refusals: frame.refusals.length,
      compile_ns: frame.graphs.reduce((sum, graph) => sum + (graph.duration_ns ?? 0), 0),
      recompiles: frame.graphs.filter(graph => graph.misses.length > 0).length
    }
  }));
  const head = headOf(
    report,
    frames.flatMap(frame => frame.graphs.map(graph => graph.counts))
  );
  return { ...json, frames, summary: { ...head, ...(json['summary'] as object | null) } };
}
