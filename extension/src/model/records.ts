/* eslint-disable */
/** The records of a report and their readers. `.ci/generate.py` writes this file from the JSON schema. */

import { flag, list, maybe, number, orNumber, plain, record, text } from './reading';
import type { Reader } from './reading';

export type Access = {
  readonly storage: number;
  readonly tensor: string;
  readonly bytes: Written | null;
  readonly nbytes: number | null;
};

export const readAccess: Reader<Access> = record(() => ({
  storage: number(),
  tensor: text(),
  bytes: maybe(readWritten),
  nbytes: maybe(number())
}));

export type AppliedChoice = {
  readonly frame: string;
  readonly graph: number;
  readonly partitioner: string;
  readonly budget: number | null;
  readonly save: ReadonlyArray<string>;
  readonly recompute: ReadonlyArray<string>;
  readonly equal: boolean | null;
  readonly forward_ns: number | null;
  readonly backward_ns: number | null;
  readonly before_forward_ns: number | null;
  readonly before_backward_ns: number | null;
  readonly curve: MemoryCurve | null;
  readonly before: MemoryCurve | null;
};

export const readAppliedChoice: Reader<AppliedChoice> = record(() => ({
  frame: text(),
  graph: number(),
  partitioner: text(),
  budget: maybe(number()),
  save: list(text()),
  recompute: list(text()),
  equal: maybe(flag()),
  forward_ns: maybe(number()),
  backward_ns: maybe(number()),
  before_forward_ns: maybe(number()),
  before_backward_ns: maybe(number()),
  curve: maybe(readMemoryCurve),
  before: maybe(readMemoryCurve)
}));

export type AutogradNode = {
  readonly number: number;
  readonly makes: ReadonlyArray<string>;
  readonly goes_to: ReadonlyArray<string>;
};

export const readAutogradNode: Reader<AutogradNode> = record(() => ({
  number: number(),
  makes: list(text()),
  goes_to: list(text())
}));

export type BudgetRow = {
  readonly partitioner: string;
  readonly budget: number | null;
  readonly saved: ReadonlyArray<number>;
  readonly copies: boolean;
  readonly saved_bytes: number;
  readonly peak_bytes: number;
  readonly recomputed: number;
  readonly cost: number;
  readonly current: boolean;
};

export const readBudgetRow: Reader<BudgetRow> = record(() => ({
  partitioner: text(),
  budget: maybe(number()),
  saved: list(number()),
  copies: flag(),
  saved_bytes: number(),
  peak_bytes: number(),
  recomputed: number(),
  cost: number(),
  current: flag()
}));

export type Call = {
  readonly at_ns: number;
  readonly duration_ns: number;
  readonly graph: number | null;
  readonly compiled: boolean;
  readonly cold: boolean;
};

export const readCall: Reader<Call> = record(() => ({
  at_ns: number(),
  duration_ns: number(),
  graph: maybe(number()),
  compiled: flag(),
  cold: flag()
}));

export type Calls = {
  readonly total: number;
  readonly compiled: number;
  readonly eager: number;
  readonly recent: ReadonlyArray<Call>;
};

export const readCalls: Reader<Calls> = record(() => ({
  total: number(),
  compiled: number(),
  eager: number(),
  recent: list(readCall)
}));

export type Cell = {
  readonly source: string;
  readonly identifier: string | null;
  readonly execution_count: number | null;
  readonly options: string;
  readonly kind: string;
  readonly error: string | null;
  readonly error_line: number | null;
  readonly stopped: string;
  readonly parts: ReadonlyArray<CellPart>;
  readonly mutated_outside: ReadonlyArray<Input>;
  readonly groups: ReadonlyArray<Group>;
};

export const readCell: Reader<Cell> = record(() => ({
  source: text(),
  identifier: maybe(text()),
  execution_count: maybe(number()),
  options: text(),
  kind: text("statements"),
  error: maybe(text()),
  error_line: maybe(number()),
  stopped: text(),
  parts: list(readCellPart),
  mutated_outside: list(readInput),
  groups: list(readGroup)
}));

export type CellPart = {
  readonly first_line: number;
  readonly last_line: number;
  readonly how: string;
  readonly frames: ReadonlyArray<string>;
  readonly reason: string;
  readonly compared: string;
  readonly ways: ReadonlyArray<string>;
};

export const readCellPart: Reader<CellPart> = record(() => ({
  first_line: number(),
  last_line: number(),
  how: text(),
  frames: list(text()),
  reason: text(),
  compared: text(),
  ways: list(text())
}));

export type Choices = {
  readonly names: ReadonlyArray<string>;
  readonly roles: ReadonlyArray<number>;
  readonly inputs: ReadonlyArray<ReadonlyArray<number>>;
  readonly storages: ReadonlyArray<ReadonlyArray<number>>;
  readonly nbytes: ReadonlyArray<number>;
  readonly again: ReadonlyArray<number>;
  readonly bans: ReadonlyArray<number>;
  readonly fuses: ReadonlyArray<number>;
  readonly lines: ReadonlyArray<number>;
  readonly modules: ReadonlyArray<number>;
  readonly storage_bytes: ReadonlyArray<number>;
  readonly needed: ReadonlyArray<number>;
  readonly early: ReadonlyArray<number>;
  readonly late: ReadonlyArray<number>;
  readonly outputs: ReadonlyArray<number>;
  readonly writes: ReadonlyArray<number>;
  readonly gradients: ReadonlyArray<number>;
  readonly copies: ReadonlyArray<number>;
  readonly cloned: ReadonlyArray<number>;
  readonly cloned_bytes: ReadonlyArray<number>;
  readonly ban_table: ReadonlyArray<string>;
  readonly line_table: ReadonlyArray<UserLine>;
  readonly module_table: ReadonlyArray<string>;
  readonly traffic: number;
  readonly rows: ReadonlyArray<BudgetRow>;
};

export const readChoices: Reader<Choices> = record(() => ({
  names: list(text()),
  roles: list(number()),
  inputs: list(list(number())),
  storages: list(list(number())),
  nbytes: list(number()),
  again: list(number()),
  bans: list(number()),
  fuses: list(number()),
  lines: list(number()),
  modules: list(number()),
  storage_bytes: list(number()),
  needed: list(number()),
  early: list(number()),
  late: list(number()),
  outputs: list(number()),
  writes: list(number()),
  gradients: list(number()),
  copies: list(number()),
  cloned: list(number()),
  cloned_bytes: list(number()),
  ban_table: list(text()),
  line_table: list(readUserLine),
  module_table: list(text()),
  traffic: number(),
  rows: list(readBudgetRow)
}));

export type Code = {
  readonly title: string;
  readonly language: string;
  readonly text: string;
};

export const readCode: Reader<Code> = record(() => ({
  title: text(),
  language: text(),
  text: text()
}));

export type Collective = {
  readonly part: string;
  readonly name: string;
  readonly op: string;
  readonly input_bytes: number;
  readonly output_bytes: number;
  readonly line: UserLine | null;
};

export const readCollective: Reader<Collective> = record(() => ({
  part: text(),
  name: text(),
  op: text(),
  input_bytes: number(),
  output_bytes: number(),
  line: maybe(readUserLine)
}));

export type CompiledGraph = {
  readonly kind: string;
  readonly name: string;
  readonly backend: string;
  readonly compile_ns: number;
  readonly node_count: number;
  readonly pattern: ReadonlyArray<boolean>;
};

export const readCompiledGraph: Reader<CompiledGraph> = record(() => ({
  kind: text(),
  name: text(),
  backend: text(),
  compile_ns: number(),
  node_count: number(),
  pattern: list(flag())
}));

export type Counts = {
  readonly stages: number;
  readonly stages_ns: number;
  readonly nodes: number;
  readonly inputs: number;
  readonly mutated: number;
  readonly outputs: number;
  readonly aliased: number;
  readonly storages: number;
  readonly shared: number;
  readonly storage_bytes: number;
  readonly saved: number;
  readonly saved_bytes: number;
  readonly held_bytes: number;
  readonly kernels: number;
  readonly kernels_called: number;
  readonly guards: number;
};

export const readCounts: Reader<Counts> = record(() => ({
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
}));

export type Device = {
  readonly kind: string;
  readonly index: number | null;
  readonly name: string;
};

export const readDevice: Reader<Device> = record(() => ({
  kind: text(),
  index: maybe(number()),
  name: text()
}));

export type EngineRow = {
  readonly frame: string;
  readonly graph: number | null;
  readonly fact: string;
  readonly subject: string;
  readonly aotlab: string;
  readonly upstream: string;
  readonly same: boolean | null;
};

export const readEngineRow: Reader<EngineRow> = record(() => ({
  frame: text(),
  graph: maybe(number()),
  fact: text(),
  subject: text(),
  aotlab: text(),
  upstream: text(),
  same: maybe(flag())
}));

export type Environment = {
  readonly aotlab: string;
  readonly torch: string;
  readonly python: string;
  readonly platform: string;
  readonly threads: number | null;
  readonly devices: ReadonlyArray<Device>;
  readonly config: ReadonlyArray<Switch>;
};

export const readEnvironment: Reader<Environment> = record(() => ({
  aotlab: text(),
  torch: text(),
  python: text(),
  platform: text(),
  threads: maybe(number()),
  devices: list(readDevice),
  config: list(readSwitch)
}));

export type Fact = {
  readonly key: string;
  readonly title: string;
  readonly sentence: string;
};

export const readFact: Reader<Fact> = record(() => ({
  key: text(),
  title: text(),
  sentence: text()
}));

export type Frame = {
  readonly name: string;
  readonly function: string;
  readonly engine: string;
  readonly line: UserLine | null;
  readonly graphs: ReadonlyArray<Graph>;
  readonly refusals: ReadonlyArray<Refusal>;
  readonly calls: Calls;
  readonly limit: string;
  readonly counts: FrameCounts | null;
};

export const readFrame: Reader<Frame> = record(() => ({
  name: text(),
  function: text(),
  engine: text("aotlab"),
  line: maybe(readUserLine),
  graphs: list(readGraph),
  refusals: list(readRefusal),
  calls: readCalls,
  limit: text(),
  counts: maybe(readFrameCounts)
}));

export type FrameCounts = {
  readonly graphs: number;
  readonly refusals: number;
  readonly compile_ns: number;
  readonly recompiles: number;
  readonly served: number;
  readonly reused: number;
};

export const readFrameCounts: Reader<FrameCounts> = record(() => ({
  graphs: number(),
  refusals: number(),
  compile_ns: number(),
  recompiles: number(),
  served: number(),
  reused: number()
}));

export type Graph = {
  readonly index: number;
  readonly entry: number;
  readonly status: string;
  readonly frontend: string;
  readonly backend: string;
  readonly misses: ReadonlyArray<Miss>;
  readonly training: boolean | null;
  readonly grad_mode: boolean | null;
  readonly at_ns: number | null;
  readonly duration_ns: number | null;
  readonly calls: number;
  readonly stages: ReadonlyArray<Stage>;
  readonly nodes: ReadonlyArray<Node>;
  readonly placeholders: ReadonlyArray<Placeholder>;
  readonly results: ReadonlyArray<Result>;
  readonly inputs: ReadonlyArray<Input>;
  readonly outputs: ReadonlyArray<Output>;
  readonly storages: ReadonlyArray<Storage>;
  readonly steps: ReadonlyArray<Step>;
  readonly autograd: ReadonlyArray<AutogradNode>;
  readonly saved: ReadonlyArray<Saved>;
  readonly compiled: ReadonlyArray<CompiledGraph>;
  readonly kernels: ReadonlyArray<Kernel>;
  readonly guards: ReadonlyArray<Guard>;
  readonly input_groups: ReadonlyArray<Group>;
  readonly storage_groups: ReadonlyArray<Group>;
  readonly collectives: ReadonlyArray<Collective>;
  readonly random_ops: ReadonlyArray<string>;
  readonly static_since: string;
  readonly reused: boolean;
  readonly counts: Counts | null;
  readonly cut: boolean;
  readonly memory: Memory | null;
  readonly choices: Choices | null;
};

export const readGraph: Reader<Graph> = record(() => ({
  index: number(),
  entry: number(),
  status: text(),
  frontend: text(),
  backend: text(),
  misses: list(readMiss),
  training: maybe(flag()),
  grad_mode: maybe(flag()),
  at_ns: maybe(number()),
  duration_ns: maybe(number()),
  calls: number(),
  stages: list(readStage),
  nodes: list(readNode),
  placeholders: list(readPlaceholder),
  results: list(readResult),
  inputs: list(readInput),
  outputs: list(readOutput),
  storages: list(readStorage),
  steps: list(readStep),
  autograd: list(readAutogradNode),
  saved: list(readSaved),
  compiled: list(readCompiledGraph),
  kernels: list(readKernel),
  guards: list(readGuard),
  input_groups: list(readGroup),
  storage_groups: list(readGroup),
  collectives: list(readCollective),
  random_ops: list(text()),
  static_since: text(),
  reused: flag(),
  counts: maybe(readCounts),
  cut: flag(),
  memory: maybe(readMemory),
  choices: maybe(readChoices)
}));

export type GraphBreakRow = {
  readonly frame: string;
  readonly where: string;
  readonly line: UserLine | null;
  readonly cell_line: number | null;
  readonly library: string;
  readonly words: string;
  readonly reason: string;
  readonly at_ns: number;
};

export const readGraphBreakRow: Reader<GraphBreakRow> = record(() => ({
  frame: text(),
  where: text(),
  line: maybe(readUserLine),
  cell_line: maybe(number()),
  library: text(),
  words: text(),
  reason: text(),
  at_ns: number()
}));

export type Group = {
  readonly title: string;
  readonly count: number;
  readonly nbytes: number;
};

export const readGroup: Reader<Group> = record(() => ({
  title: text(),
  count: number(),
  nbytes: number()
}));

export type Guard = {
  readonly kind: string;
  readonly subject: string;
  readonly sentence: string;
  readonly line: UserLine | null;
};

export const readGuard: Reader<Guard> = record(() => ({
  kind: text(),
  subject: text(),
  sentence: text(),
  line: maybe(readUserLine)
}));

export type InnerTensor = {
  readonly name: string;
  readonly tensor: TensorInfo;
};

export const readInnerTensor: Reader<InnerTensor> = record(() => ({
  name: text(),
  tensor: readTensorInfo
}));

export type Input = {
  readonly name: string;
  readonly kind: string;
  readonly value: string | null;
  readonly tensor: TensorInfo | null;
  readonly varies: boolean;
  readonly storage: number | null;
  readonly duplicate_of: string | null;
  readonly overlaps: ReadonlyArray<string>;
  readonly mutates_data: boolean | null;
  readonly mutates_metadata: boolean | null;
  readonly mutates_storage: boolean | null;
  readonly mutation_hidden_from_autograd: boolean | null;
  readonly mutation_under_no_grad: boolean | null;
  readonly mutation_type: string | null;
  readonly requires_grad_after: boolean | null;
  readonly steps: ReadonlyArray<string>;
  readonly written_at: ReadonlyArray<UserLine>;
  readonly synthetic_base: number | null;
  readonly part_of: string;
  readonly placeholder: string;
  readonly gradient: string;
  readonly group: number | null;
};

export const readInput: Reader<Input> = record(() => ({
  name: text(),
  kind: text(),
  value: maybe(text()),
  tensor: maybe(readTensorInfo),
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
  written_at: list(readUserLine),
  synthetic_base: maybe(number()),
  part_of: text(),
  placeholder: text(),
  gradient: text(),
  group: maybe(number())
}));

export type Kernel = {
  readonly name: string;
  readonly language: string;
  readonly graph_name: string;
  readonly kind: string;
  readonly source: string;
  readonly nodes: ReadonlyArray<string>;
  readonly from_cache: boolean;
  readonly cache_miss: string;
  readonly registers: number | null;
  readonly shared_bytes: number | null;
  readonly spilled_bytes: number | null;
  readonly blocks: number | null;
  readonly bytes_read: number | null;
  readonly bytes_written: number | null;
};

export const readKernel: Reader<Kernel> = record(() => ({
  name: text(),
  language: text(),
  graph_name: text(),
  kind: text(),
  source: text(),
  nodes: list(text()),
  from_cache: flag(),
  cache_miss: text(),
  registers: maybe(number()),
  shared_bytes: maybe(number()),
  spilled_bytes: maybe(number()),
  blocks: maybe(number()),
  bytes_read: maybe(number()),
  bytes_written: maybe(number())
}));

export type Memory = {
  readonly steps: number;
  readonly forward_steps: number;
  readonly names: ReadonlyArray<string>;
  readonly kinds: ReadonlyArray<string>;
  readonly nbytes: ReadonlyArray<number>;
  readonly begins: ReadonlyArray<number>;
  readonly ends: ReadonlyArray<number>;
  readonly lines: ReadonlyArray<number>;
  readonly modules: ReadonlyArray<number>;
  readonly line_table: ReadonlyArray<UserLine>;
  readonly module_table: ReadonlyArray<string>;
  readonly unknown: number;
  readonly from_code: boolean;
};

export const readMemory: Reader<Memory> = record(() => ({
  steps: number(),
  forward_steps: number(),
  names: list(text()),
  kinds: list(text()),
  nbytes: list(number()),
  begins: list(number()),
  ends: list(number()),
  lines: list(number()),
  modules: list(number()),
  line_table: list(readUserLine),
  module_table: list(text()),
  unknown: number(),
  from_code: flag()
}));

export type MemoryCurve = {
  readonly engine: string;
  readonly device: string;
  readonly forward: ReadonlyArray<number>;
  readonly backward: ReadonlyArray<number>;
  readonly frame: string | null;
  readonly graph: number | null;
};

export const readMemoryCurve: Reader<MemoryCurve> = record(() => ({
  engine: text(),
  device: text("cpu"),
  forward: list(number()),
  backward: list(number()),
  frame: maybe(text()),
  graph: maybe(number())
}));

export type Miss = {
  readonly graph: number | null;
  readonly subject: string;
  readonly before: string;
  readonly after: string;
  readonly sentence: string;
  readonly line: UserLine | null;
  readonly suggestion: string;
};

export const readMiss: Reader<Miss> = record(() => ({
  graph: maybe(number()),
  subject: text(),
  before: text(),
  after: text(),
  sentence: text(),
  line: maybe(readUserLine),
  suggestion: text()
}));

export type Node = {
  readonly stage: string;
  readonly part: string;
  readonly name: string;
  readonly op: string;
  readonly target: string;
  readonly phase: string;
  readonly dtype: string | null;
  readonly shape: ReadonlyArray<number | SymExpr> | null;
  readonly device: string | null;
  readonly nbytes: number | SymExpr | null;
  readonly inputs: ReadonlyArray<string>;
  readonly users: number;
  readonly line: UserLine | null;
  readonly module: string;
  readonly view: boolean;
};

export const readNode: Reader<Node> = record(() => ({
  stage: text(),
  part: text(),
  name: text(),
  op: text(),
  target: text(),
  phase: text(),
  dtype: maybe(text()),
  shape: maybe(list(orNumber(readSymExpr))),
  device: maybe(text()),
  nbytes: maybe(orNumber(readSymExpr)),
  inputs: list(text()),
  users: number(),
  line: maybe(readUserLine),
  module: text(),
  view: flag()
}));

export type Output = {
  readonly name: string;
  readonly output_type: string;
  readonly raw_type: string;
  readonly tensor: TensorInfo | null;
  readonly storage: number | null;
  readonly base_kind: string | null;
  readonly base: string | null;
  readonly views: string | null;
  readonly relation: string;
  readonly requires_grad: boolean;
  readonly part_of: string;
  readonly node: string;
  readonly tangent: string;
};

export const readOutput: Reader<Output> = record(() => ({
  name: text(),
  output_type: text(),
  raw_type: text(),
  tensor: maybe(readTensorInfo),
  storage: maybe(number()),
  base_kind: maybe(text()),
  base: maybe(text()),
  views: maybe(text()),
  relation: text(),
  requires_grad: flag(),
  part_of: text(),
  node: text(),
  tangent: text()
}));

export type Placeholder = {
  readonly name: string;
  readonly user_name: string;
  readonly value: string;
  readonly kind: string;
};

export const readPlaceholder: Reader<Placeholder> = record(() => ({
  name: text(),
  user_name: text(),
  value: text(),
  kind: text()
}));

export type RankRow = {
  readonly rank: number;
  readonly reference: number;
  readonly fact: string;
  readonly frame: string | null;
  readonly graph: number | null;
  readonly part: string;
  readonly subject: string;
  readonly value: string;
  readonly expected: string;
  readonly change: string;
  readonly sentence: string;
  readonly suggestion: string;
};

export const readRankRow: Reader<RankRow> = record(() => ({
  rank: number(),
  reference: number(),
  fact: text(),
  frame: maybe(text()),
  graph: maybe(number()),
  part: text(),
  subject: text(),
  value: text(),
  expected: text(),
  change: text(),
  sentence: text(),
  suggestion: text()
}));

export type Ratio = {
  readonly over: string;
  readonly median: number;
  readonly p10: number;
  readonly p90: number;
  readonly noise: string;
};

export const readRatio: Reader<Ratio> = record(() => ({
  over: text(),
  median: number(),
  p10: number(),
  p90: number(),
  noise: text()
}));

export type Refusal = {
  readonly graph: number;
  readonly error: string;
  readonly reason: string;
  readonly case: string;
  readonly message: string;
  readonly argument: string | null;
  readonly line: UserLine | null;
  readonly outcome: string;
  readonly at_ns: number;
};

export const readRefusal: Reader<Refusal> = record(() => ({
  graph: number(),
  error: text(),
  reason: text(),
  case: text(),
  message: text(),
  argument: maybe(text()),
  line: maybe(readUserLine),
  outcome: text(),
  at_ns: number()
}));

export type Report = {
  readonly version: number;
  readonly name: string;
  readonly identifier: string;
  readonly created: string;
  readonly duration_ns: number;
  readonly cell: Cell | null;
  readonly running: Running | null;
  readonly environment: Environment;
  readonly frames: ReadonlyArray<Frame>;
  readonly graph_break_rows: ReadonlyArray<GraphBreakRow>;
  readonly time_rows: ReadonlyArray<TimeRow>;
  readonly timeline_rows: ReadonlyArray<TimelineRow>;
  readonly timing_rows: ReadonlyArray<TimingRow>;
  readonly memory_curves: ReadonlyArray<MemoryCurve>;
  readonly applied_rows: ReadonlyArray<AppliedChoice>;
  readonly verification_rows: ReadonlyArray<VerificationRow>;
  readonly engine_rows: ReadonlyArray<EngineRow>;
  readonly run_names: ReadonlyArray<string>;
  readonly run_rows: ReadonlyArray<RunRow>;
  readonly rank: number | null;
  readonly world_size: number;
  readonly ended: string;
  readonly rank_reports: ReadonlyArray<Report>;
  readonly rank_rows: ReadonlyArray<RankRow>;
  readonly wait_rows: ReadonlyArray<WaitRow>;
  readonly notes: ReadonlyArray<string>;
  readonly summary: Summary | null;
};

export const readReport: Reader<Report> = record(() => ({
  version: number(1),
  name: text(),
  identifier: text(),
  created: text(),
  duration_ns: number(),
  cell: maybe(readCell),
  running: maybe(readRunning),
  environment: readEnvironment,
  frames: list(readFrame),
  graph_break_rows: list(readGraphBreakRow),
  time_rows: list(readTimeRow),
  timeline_rows: list(readTimelineRow),
  timing_rows: list(readTimingRow),
  memory_curves: list(readMemoryCurve),
  applied_rows: list(readAppliedChoice),
  verification_rows: list(readVerificationRow),
  engine_rows: list(readEngineRow),
  run_names: list(text()),
  run_rows: list(readRunRow),
  rank: maybe(number()),
  world_size: number(1),
  ended: text(),
  rank_reports: list(readReport),
  rank_rows: list(readRankRow),
  wait_rows: list(readWaitRow),
  notes: list(text()),
  summary: maybe(readSummary)
}));

export type Result = {
  readonly name: string;
  readonly kind: string;
  readonly target: string;
  readonly in_graph: boolean;
};

export const readResult: Reader<Result> = record(() => ({
  name: text(),
  kind: text(),
  target: text(),
  in_graph: flag()
}));

export type RunRow = {
  readonly frame: string | null;
  readonly graph: number | null;
  readonly fact: string;
  readonly part: string;
  readonly subject: string;
  readonly before: string;
  readonly after: string;
  readonly same: boolean | null;
  readonly change: string;
};

export const readRunRow: Reader<RunRow> = record(() => ({
  frame: maybe(text()),
  graph: maybe(number()),
  fact: text(),
  part: text(),
  subject: text(),
  before: text(),
  after: text(),
  same: maybe(flag()),
  change: text()
}));

export type Running = {
  readonly text: string;
  readonly kind: string;
  readonly since_ns: number;
  readonly elapsed_ns: number;
  readonly kernels: number;
  readonly kernels_done: number;
  readonly steps: ReadonlyArray<TimelineRow>;
};

export const readRunning: Reader<Running> = record(() => ({
  text: text(),
  kind: text(),
  since_ns: number(),
  elapsed_ns: number(),
  kernels: number(),
  kernels_done: number(),
  steps: list(readTimelineRow)
}));

export type Saved = {
  readonly name: string;
  readonly tensor: TensorInfo;
  readonly nbytes: number | SymExpr;
  readonly reason: string;
  readonly is_input: boolean;
  readonly is_output: boolean;
  readonly shares: string;
  readonly used_by: ReadonlyArray<string>;
  readonly line: UserLine | null;
  readonly module: string;
};

export const readSaved: Reader<Saved> = record(() => ({
  name: text(),
  tensor: readTensorInfo,
  nbytes: orNumber(readSymExpr),
  reason: text(),
  is_input: flag(),
  is_output: flag(),
  shares: text(),
  used_by: list(text()),
  line: maybe(readUserLine),
  module: text()
}));

export type Span = {
  readonly name: string;
  readonly role: string;
  readonly start: number | null;
  readonly stop: number | null;
  readonly mutated: boolean | null;
  readonly writes: number | null;
  readonly may_write: number;
  readonly part_of: string;
};

export const readSpan: Reader<Span> = record(() => ({
  name: text(),
  role: text(),
  start: maybe(number()),
  stop: maybe(number()),
  mutated: maybe(flag(), false),
  writes: maybe(number()),
  may_write: number(),
  part_of: text()
}));

export type Stage = {
  readonly name: string;
  readonly duration_ns: number;
  readonly node_count: number | null;
  readonly summary: string;
  readonly codes: ReadonlyArray<Code>;
};

export const readStage: Reader<Stage> = record(() => ({
  name: text(),
  duration_ns: number(),
  node_count: maybe(number()),
  summary: text(),
  codes: list(readCode)
}));

export type Step = {
  readonly kind: string;
  readonly text: string;
  readonly line: UserLine | null;
  readonly nodes: ReadonlyArray<string>;
  readonly reads: ReadonlyArray<Access>;
  readonly writes: ReadonlyArray<Access>;
  readonly makes: ReadonlyArray<Access>;
};

export const readStep: Reader<Step> = record(() => ({
  kind: text(),
  text: text(),
  line: maybe(readUserLine),
  nodes: list(text()),
  reads: list(readAccess),
  writes: list(readAccess),
  makes: list(readAccess)
}));

export type Storage = {
  readonly number: number;
  readonly owner: string;
  readonly nbytes: number | SymExpr | null;
  readonly device: string;
  readonly spans: ReadonlyArray<Span>;
  readonly written: ReadonlyArray<Written> | null;
  readonly group: number | null;
};

export const readStorage: Reader<Storage> = record(() => ({
  number: number(),
  owner: text(),
  nbytes: maybe(orNumber(readSymExpr)),
  device: text(),
  spans: list(readSpan),
  written: maybe(list(readWritten)),
  group: maybe(number())
}));

export type Summary = {
  readonly sentence: string;
  readonly state: string;
  readonly facts: ReadonlyArray<Fact>;
  readonly frames: number;
  readonly compared: number;
  readonly different: number;
  readonly status: string;
  readonly graphs: number;
  readonly recompiles: number;
  readonly refused: number;
  readonly mutated: number;
  readonly new: number;
  readonly outside: number;
  readonly breaks: number;
  readonly eager_lines: number;
  readonly speed: string;
  readonly tolerance: string;
  readonly against: string;
  readonly engines: number;
  readonly apart: number;
  readonly runs: number;
  readonly runs_apart: number;
  readonly apart_ranks: number;
  readonly alone: string;
  readonly counts: Counts;
  readonly listed: number;
};

export const readSummary: Reader<Summary> = record(() => ({
  sentence: text(),
  state: text(),
  facts: list(readFact),
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
  tolerance: text(),
  against: text(),
  engines: number(),
  apart: number(),
  runs: number(),
  runs_apart: number(),
  apart_ranks: number(),
  alone: text(),
  counts: readCounts,
  listed: number()
}));

export type Switch = {
  readonly name: string;
  readonly value: boolean | number | string | null;
};

export const readSwitch: Reader<Switch> = record(() => ({
  name: text(),
  value: plain
}));

export type SymExpr = {
  readonly expression: string;
  readonly hint: number | null;
};

export const readSymExpr: Reader<SymExpr> = record(() => ({
  expression: text(),
  hint: maybe(number())
}));

export type TensorInfo = {
  readonly dtype: string;
  readonly device: string;
  readonly layout: string;
  readonly shape: ReadonlyArray<number | SymExpr>;
  readonly stride: ReadonlyArray<number | SymExpr>;
  readonly offset: number | SymExpr;
  readonly byte_offset: number | SymExpr;
  readonly nbytes: number | SymExpr;
  readonly requires_grad: boolean;
  readonly is_leaf: boolean;
  readonly type_name: string;
  readonly inner: ReadonlyArray<InnerTensor>;
};

export const readTensorInfo: Reader<TensorInfo> = record(() => ({
  dtype: text(),
  device: text(),
  layout: text("strided"),
  shape: list(orNumber(readSymExpr)),
  stride: list(orNumber(readSymExpr)),
  offset: orNumber(readSymExpr),
  byte_offset: orNumber(readSymExpr),
  nbytes: orNumber(readSymExpr),
  requires_grad: flag(),
  is_leaf: flag(true),
  type_name: text("torch.Tensor"),
  inner: list(readInnerTensor)
}));

export type TimeRow = {
  readonly kind: string;
  readonly duration_ns: number;
  readonly count: number;
  readonly engine: string;
};

export const readTimeRow: Reader<TimeRow> = record(() => ({
  kind: text(),
  duration_ns: number(),
  count: number(1),
  engine: text("aotlab")
}));

export type TimelineRow = {
  readonly process: string;
  readonly frame: string | null;
  readonly graph: number | null;
  readonly phase: string;
  readonly stage: string;
  readonly start_ns: number;
  readonly duration_ns: number;
  readonly own_ns: number;
  readonly thread: number;
  readonly depth: number;
  readonly engine: string;
};

export const readTimelineRow: Reader<TimelineRow> = record(() => ({
  process: text(),
  frame: maybe(text()),
  graph: maybe(number()),
  phase: text(),
  stage: text(),
  start_ns: number(),
  duration_ns: number(),
  own_ns: number(),
  thread: number(),
  depth: number(),
  engine: text("aotlab")
}));

export type TimingRow = {
  readonly engine: string;
  readonly phase: string;
  readonly median_ns: number;
  readonly min_ns: number;
  readonly p10_ns: number;
  readonly p90_ns: number;
  readonly repeats: number;
  readonly device: string;
  readonly frame: string | null;
  readonly graph: number | null;
  readonly ratios: ReadonlyArray<Ratio>;
  readonly again: number;
  readonly incomparable: string;
  readonly ended: string;
};

export const readTimingRow: Reader<TimingRow> = record(() => ({
  engine: text(),
  phase: text(),
  median_ns: number(),
  min_ns: number(),
  p10_ns: number(),
  p90_ns: number(),
  repeats: number(),
  device: text("cpu"),
  frame: maybe(text()),
  graph: maybe(number()),
  ratios: list(readRatio),
  again: number(),
  incomparable: text(),
  ended: text()
}));

export type UserLine = {
  readonly file: string;
  readonly line: number;
  readonly function: string;
  readonly code: string;
  readonly callers: ReadonlyArray<UserLine>;
};

export const readUserLine: Reader<UserLine> = record(() => ({
  file: text(),
  line: number(),
  function: text(),
  code: text(),
  callers: list(readUserLine)
}));

export type VerificationRow = {
  readonly engine: string;
  readonly kind: string;
  readonly subject: string;
  readonly equal: boolean;
  readonly expected: string;
  readonly actual: string;
  readonly sentence: string;
  readonly call: number | null;
  readonly frame: string | null;
  readonly graph: number | null;
  readonly against: string;
  readonly tolerance: string;
  readonly absolute: number | null;
  readonly relative: number | null;
};

export const readVerificationRow: Reader<VerificationRow> = record(() => ({
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
  against: text(),
  tolerance: text(),
  absolute: maybe(number()),
  relative: maybe(number())
}));

export type WaitRow = {
  readonly op: string;
  readonly count: number;
  readonly duration_ns: number;
};

export const readWaitRow: Reader<WaitRow> = record(() => ({
  op: text(),
  count: number(),
  duration_ns: number()
}));

export type Written = {
  readonly start: number;
  readonly length: number;
  readonly counts: ReadonlyArray<number>;
  readonly steps: ReadonlyArray<number>;
  readonly certain: boolean;
};

export const readWritten: Reader<Written> = record(() => ({
  start: number(),
  length: number(),
  counts: list(number()),
  steps: list(number()),
  certain: flag(true)
}));
