/**
 * The report, version 1, as far as the view reads it.
 *
 * Python's `aotlab/report/model.py` documents the fields; `tests/test_extension.py` holds the names here to the schema.
 */

import { flag, list, maybe, number, orNull, plain, record, text } from './reading';
import type { Damage, Read, Reader, RecordReader } from './reading';

/** The MIME type of a report in a notebook's output. */
export const MIME_TYPE = 'application/vnd.aotlab.report.v1+json';

/** The version that this view reads. */
export const VERSION = 1;

const symbol = record('SymExpr', { expression: text(), hint: maybe(number()) });

/** A size in elements or bytes: a number, or an expression with the value that it had in the traced call. */
export type Size = number | Read<typeof symbol>;

const size: Reader<Size> = (value, path, damage) =>
  typeof value === 'object' && value !== null ? symbol(value, path, damage) : number()(value, path, damage);

const line = record('UserLine', { file: text(), line: number(), function: text(), code: text() });
const tensor = record('TensorInfo', {
  dtype: text(),
  device: text(),
  layout: text('strided'),
  shape: list(size),
  stride: list(size),
  offset: size,
  byte_offset: size,
  nbytes: size,
  requires_grad: flag(),
  is_leaf: flag(true),
  type_name: text('torch.Tensor')
});
const code = record('Code', { title: text(), language: text(), text: text() });
const stage = record('Stage', {
  name: text(),
  duration_ns: number(),
  node_count: maybe(number()),
  summary: text(),
  codes: list(code)
});
const node = record('Node', {
  stage: text(),
  part: text(),
  name: text(),
  target: text(),
  phase: text(),
  dtype: maybe(text()),
  shape: maybe(list(size)),
  nbytes: maybe(size),
  line: maybe(line)
});
const input = record('Input', {
  name: text(),
  kind: text(),
  value: maybe(text()),
  tensor: maybe(tensor),
  varies: flag(),
  storage: maybe(number()),
  duplicate_of: maybe(text()),
  overlaps: list(text()),
  mutates_data: maybe(flag()),
  mutates_metadata: maybe(flag()),
  mutates_storage: maybe(flag()),
  mutation_hidden_from_autograd: maybe(flag()),
  mutation_under_no_grad: maybe(flag()),
  mutation_type: maybe(text()),
  requires_grad_after: maybe(flag()),
  steps: list(text()),
  synthetic_base: maybe(number()),
  part_of: text(),
  placeholder: text(),
  gradient: text()
});
const output = record('Output', {
  name: text(),
  output_type: text(),
  raw_type: text(),
  tensor: maybe(tensor),
  storage: maybe(number()),
  base_kind: maybe(text()),
  base: maybe(text()),
  views: maybe(text()),
  relation: text(),
  requires_grad: flag(),
  part_of: text(),
  node: text(),
  tangent: text()
});
const span = record('Span', {
  name: text(),
  role: text(),
  start: maybe(number()),
  stop: maybe(number()),
  mutated: orNull(flag()),
  writes: maybe(number()),
  may_write: number(),
  part_of: text()
});
const written = record('Written', {
  start: number(),
  length: number(),
  counts: list(number()),
  steps: list(number()),
  certain: flag(true)
});
const storage = record('Storage', {
  number: number(),
  owner: text(),
  nbytes: maybe(size),
  device: text(),
  spans: list(span),
  written: maybe(list(written))
});
const saved = record('Saved', {
  name: text(),
  tensor: maybe(tensor),
  nbytes: size,
  reason: text(),
  is_input: flag(),
  is_output: flag(),
  shares: text(),
  line: maybe(line)
});
const kernel = record('Kernel', {
  name: text(),
  language: text(),
  graph_name: text(),
  kind: text(),
  source: text(),
  nodes: list(text()),
  registers: maybe(number()),
  shared_bytes: maybe(number()),
  spilled_bytes: maybe(number()),
  blocks: maybe(number()),
  bytes_read: maybe(number()),
  bytes_written: maybe(number())
});
const placeholder = record('Placeholder', { name: text(), user_name: text() });
const guard = record('Guard', { kind: text(), subject: text(), sentence: text(), line: maybe(line) });
const counts = record('Counts', {
  stages: number(),
  stages_ns: number(),
  nodes: number(),
  inputs: number(),
  mutated: number(),
  outputs: number(),
  aliased: number(),
  storages: number(),
  shared: number(),
  storage_bytes: number(),
  saved: number(),
  saved_bytes: number(),
  held_bytes: number(),
  kernels: number(),
  kernels_called: number(),
  guards: number()
});
const miss = record('Miss', {
  graph: maybe(number()),
  sentence: text(),
  line: maybe(line),
  suggestion: text()
});
const graph = record('Graph', {
  index: number(),
  status: text(),
  frontend: text(),
  backend: text(),
  misses: list(miss),
  training: maybe(flag()),
  at_ns: maybe(number()),
  duration_ns: maybe(number()),
  calls: number(),
  stages: list(stage),
  nodes: list(node),
  placeholders: list(placeholder),
  inputs: list(input),
  outputs: list(output),
  storages: list(storage),
  saved: list(saved),
  kernels: list(kernel),
  guards: list(guard),
  backward_error: maybe(text()),
  reused: flag(),
  counts: maybe(counts)
});
const call = record('Call', {
  at_ns: number(),
  duration_ns: number(),
  graph: maybe(number()),
  compiled: flag(),
  cold: flag()
});
const calls = record('Calls', { total: number(), compiled: number(), eager: number(), recent: list(call) });
const refusal = record('Refusal', {
  graph: number(),
  error: text(),
  reason: text(),
  message: text(),
  line: maybe(line),
  outcome: text(),
  at_ns: number()
});
const frameCounts = record('FrameCounts', { graphs: number(), refusals: number(), compile_ns: number() });
const frame = record('Frame', {
  name: text(),
  function: text(),
  line: maybe(line),
  graphs: list(graph),
  refusals: list(refusal),
  calls,
  counts: maybe(frameCounts)
});
const part = record('CellPart', {
  first_line: number(),
  last_line: number(),
  how: text(),
  frames: list(text()),
  reason: text(),
  compared: text(),
  ways: list(text())
});
const cell = record('Cell', {
  source: text(),
  execution_count: maybe(number()),
  options: text(),
  kind: text('statements'),
  error: maybe(text()),
  error_line: maybe(number()),
  parts: list(part),
  mutated_outside: list(input)
});
const device = record('Device', { kind: text(), index: maybe(number()), name: text() });
const setting = record('Switch', { name: text(), value: plain });
const environment = record('Environment', {
  aotlab: text('?'),
  torch: text('?'),
  python: text('?'),
  platform: text(),
  threads: maybe(number()),
  devices: list(device),
  config: list(setting)
});
const graphBreak = record('GraphBreakRow', {
  frame: text(),
  where: text(),
  line: maybe(line),
  cell_line: maybe(number()),
  words: text(),
  reason: text(),
  at_ns: number()
});
const time = record('TimeRow', { kind: text(), duration_ns: number(), count: number(1) });
const ratio = record('Ratio', { over: text(), median: number(), p10: number(), p90: number(), noise: text() });
const timing = record('TimingRow', {
  engine: text(),
  phase: text(),
  median_ns: number(),
  min_ns: number(),
  p10_ns: number(),
  p90_ns: number(),
  repeats: number(),
  device: text('cpu'),
  frame: maybe(text()),
  graph: maybe(number()),
  ratios: list(ratio),
  again: number()
});
const verification = record('VerificationRow', {
  engine: text(),
  kind: text(),
  subject: text(),
  equal: flag(),
  expected: text(),
  actual: text(),
  sentence: text(),
  call: maybe(number()),
  frame: maybe(text()),
  graph: maybe(number()),
  against: text()
});
const fact = record('Fact', { key: text(), title: text(), sentence: text() });
const summary = record('Summary', {
  sentence: text(),
  state: text(),
  facts: list(fact),
  frames: number(),
  compared: number(),
  different: number(),
  status: text(),
  graphs: number(),
  recompiles: number(),
  refused: number(),
  mutated: number(),
  new: number(),
  outside: number(),
  breaks: number(),
  eager_lines: number(),
  speed: text(),
  counts: maybe(counts)
});
const report = record('Report', {
  name: text(),
  identifier: text(),
  created: text(),
  duration_ns: number(),
  cell: maybe(cell),
  environment,
  frames: list(frame),
  graph_break_rows: list(graphBreak),
  time_rows: list(time),
  timing_rows: list(timing),
  verification_rows: list(verification),
  notes: list(text()),
  summary: maybe(summary)
});

export type UserLine = Read<typeof line>;
export type TensorInfo = Read<typeof tensor>;
export type Code = Read<typeof code>;
export type Stage = Read<typeof stage>;
export type Node = Read<typeof node>;
export type Input = Read<typeof input>;
export type Output = Read<typeof output>;
export type Span = Read<typeof span>;
export type Written = Read<typeof written>;
export type Storage = Read<typeof storage>;
export type Saved = Read<typeof saved>;
export type Kernel = Read<typeof kernel>;
export type Counts = Read<typeof counts>;
export type Guard = Read<typeof guard>;
export type Miss = Read<typeof miss>;
export type Graph = Read<typeof graph>;
export type Call = Read<typeof call>;
export type Refusal = Read<typeof refusal>;
export type FrameCounts = Read<typeof frameCounts>;
export type Frame = Read<typeof frame>;
export type CellPart = Read<typeof part>;
export type Cell = Read<typeof cell>;
export type GraphBreakRow = Read<typeof graphBreak>;
export type Summary = Read<typeof summary>;
export type Environment = Read<typeof environment>;
export type TimeRow = Read<typeof time>;
export type TimingRow = Read<typeof timing>;
export type VerificationRow = Read<typeof verification>;
export type Report = Read<typeof report>;

/** The counts of nothing. */
export const NO_COUNTS: Counts = counts({}, '$', { note: () => undefined });

/** Every record and its fields, for the test that compares them with the schema. */
export const RECORDS: readonly RecordReader<unknown>[] = [
  symbol, line, tensor, code, stage, node, placeholder, input, output, span, written, storage, saved, kernel, guard,
  counts, graph, call, calls,
  refusal, frameCounts, frame, part, cell, device, setting, environment, graphBreak, ratio, timing, verification, fact, summary,
  report
];

/** Read a graph that a kernel sent by itself. */
export function readGraph(value: unknown): Graph {
  return graph(value, '$', { note: () => undefined });
}

/** Read nodes of a graph that a kernel sent by themselves. */
export function readNodes(value: unknown): readonly Node[] {
  return list(node)(value, '$', { note: () => undefined });
}

/** Read rows about what changed outside of the graphs that a kernel sent by themselves. */
export function readOutside(value: unknown): readonly Input[] {
  return list(input)(value, '$', { note: () => undefined });
}

/** Read rows of a verification that a kernel sent by themselves. */
export function readVerification(value: unknown): readonly VerificationRow[] {
  return list(verification)(value, '$', { note: () => undefined });
}

/** What became of reading: a report, or a sentence that says why there is none. */
export type Reading =
  | { readonly report: Report; readonly problem: null; readonly damage: readonly string[] }
  | { readonly report: null; readonly problem: string; readonly damage: readonly string[] };

/** Most places that are remembered where a report is damaged. */
const MOST_DAMAGE = 20;

/** Read a report from what JSON held. Never throws. */
export function readReport(value: unknown): Reading {
  const failed = (problem: string): Reading => ({ report: null, problem, damage: [] });
  if (typeof value !== 'object' || value === null || Array.isArray(value)) {
    return failed('This is no aotlab report.');
  }
  const fields = value as Record<string, unknown>;
  if (!Object.hasOwn(fields, 'version') || !Object.hasOwn(fields, 'environment')) {
    return failed('This is no aotlab report: it has no version or no environment.');
  }
  if (fields['version'] !== VERSION) {
    const seen = typeof fields['version'] === 'number' ? String(fields['version']) : 'of another kind';
    return failed(`This report has version ${seen}, and this view reads version ${VERSION}: use a newer aotlab.`);
  }
  for (const name of ['environment', 'frames']) {
    if (fields[name] !== undefined && Array.isArray(fields[name]) !== (name === 'frames')) {
      return failed(`This report is damaged: its ${name} cannot be read.`);
    }
  }
  const places: string[] = [];
  const damage: Damage = {
    note: (path, expected) => {
      if (places.length < MOST_DAMAGE) {
        places.push(`${path} should be ${expected}`);
      }
    }
  };
  return { report: report(value, '$', damage), problem: null, damage: places };
}
