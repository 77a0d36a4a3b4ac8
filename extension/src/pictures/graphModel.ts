/**
 * The picture of a graph as data: the stages that have nodes, and the nodes of one stage in nested groups. Each half of
 * a stage (forward, backward) is a tree of groups.
 */

import type { Graph, Node, Saved } from '../model/report';
import { mutated } from '../model/rows';
import { dataSize, place } from '../model/words';

export type Half = 'forward' | 'backward';
/** How a node differs from the node with the same name of the stage before. */
export type Change = 'added' | 'removed' | 'changed' | 'same';
export type MarkKind = 'mutated' | 'aliased' | 'saved' | 'recomputed' | 'output' | 'gradient';

export interface IStage {
  readonly key: string;
  readonly title: string;
  readonly rows: readonly Node[];
  /** Whether the nodes are grouped by the kernels that compute them, and not by modules. */
  readonly byKernel: boolean;
}

export interface IMark {
  readonly kind: MarkKind;
  readonly text: string;
}

/** A node of the picture. */
export interface IItem {
  readonly key: string;
  readonly title: string;
  readonly row: Node;
  readonly half: Half;
  readonly change: Change;
  readonly marks: readonly IMark[];
  /** The saved value that the node computes; null if the forward does not save its value. */
  readonly saved: Saved | null;
  readonly inputs: IItem[];
  readonly users: IItem[];
  /** The segments of the path of the module (or the kernel) that the node belongs to. */
  path: readonly string[];
  parent: IGroup | null;
}

/** A module, a kernel or a run of nodes. */
export interface IGroup {
  /** The same for the same module in all stages and both halves. */
  readonly key: string;
  readonly half: Half;
  readonly path: readonly string[];
  readonly children: readonly Branch[];
  readonly items: readonly IItem[];
  title: string;
  parent: IGroup | null;
}

export type Branch = IItem | IGroup;

export interface IStageTree {
  readonly halves: readonly IGroup[];
  readonly items: readonly IItem[];
}

/** A group has at most this many members. More members are divided into groups of consecutive nodes. */
const MOST_MEMBERS = 60;
/** The number of groups into which the members are divided. */
const PIECES = 30;
/** If more inputs than this belong to no module, they become a group. */
const MOST_INPUTS = 8;

export function isGroup(branch: Branch): branch is IGroup {
  return 'children' in branch;
}

/** Identify a group or a node in one picture. A module has the same `key` in both halves, and so another `idOf`. */
export function idOf(branch: Branch): string {
  return isGroup(branch) ? `${branch.half} group ${branch.key}` : branch.key;
}

const TITLES: Readonly<Record<string, string>> = {
  capture: 'Captured',
  trace: 'Traced',
  partition: 'Partitioned',
  compile: 'Compiled',
  passes: 'After compiler passes',
  backward: 'Further backward'
};

/** The stages of a graph that have nodes, in order. The kernels, if their nodes are known, are the last stage. */
export function stagesOf(graph: Graph, nodes: readonly Node[]): IStage[] {
  const stages: { key: string; title: string; rows: Node[]; names: Set<string>; byKernel: boolean }[] = [];
  for (const row of nodes) {
    const name = `${row.part} ${row.name}`;
    const same = stages.filter(each => each.rows[0]?.stage === row.stage);
    let stage = same.at(-1);
    // Several further backwards, each for other tangents, have nodes of the same names.
    if (stage === undefined || stage.names.has(name)) {
      const title = row.part === 'joint' ? 'Joint' : (TITLES[row.stage] ?? row.stage);
      const number = same.length + 1;
      const suffix = number > 1 ? ` ${number}` : '';
      stage = {
        key: row.stage + suffix,
        title: title + suffix,
        rows: [],
        names: new Set(),
        byKernel: false
      };
      stages.push(stage);
    }
    stage.rows.push(row);
    stage.names.add(name);
  }
  for (const stage of stages) {
    if (stage.key === 'partition' && stage.rows.some(row => row.part === 'backward')) {
      stage.title = 'Forward and backward';
    }
  }
  const last = stages.filter(({ key }) => key === 'passes' || key === 'compile').at(-1);
  if (last !== undefined && graph.kernels.some(kernel => kernel.nodes.length > 0)) {
    stages.push({ ...last, key: 'kernels', title: 'Kernels', byKernel: true });
  }
  return stages;
}

function halfOf({ part, phase }: Node): Half {
  return part === 'backward' || (part === 'joint' && phase === 'backward') ? 'backward' : 'forward';
}

function nodeKey(half: Half, name: string): string {
  return `${half} ${name}`;
}

/** The nodes of a stage without the node that returns the results; the backward shares the values that were saved. */
function rowsByKey(stage: IStage): Map<string, Node> {
  const rows = stage.rows.filter(row => row.op !== 'output');
  const forwardNames = new Set(rows.filter(row => halfOf(row) === 'forward').map(row => row.name));
  return new Map(
    rows
      .filter(row => !(row.op === 'placeholder' && row.part === 'backward' && forwardNames.has(row.name)))
      .map(row => [nodeKey(halfOf(row), row.name), row])
  );
}

function changeOf(row: Node, earlier: Node | undefined): Change {
  if (earlier === undefined) {
    return 'added';
  }
  return earlier.target !== row.target || earlier.inputs.join(' ') !== row.inputs.join(' ') ? 'changed' : 'same';
}

/** Build the trees of a stage. If `before` is a stage, the nodes are compared with its nodes. */
export function treeOf(graph: Graph, stage: IStage, before: IStage | null): IStageTree {
  const rows = rowsByKey(stage);
  const earlierRows = before === null ? null : rowsByKey(before);
  const removed = [...(earlierRows ?? [])].filter(([key]) => !rows.has(key));
  const items = new Map<string, IItem>();
  const markers = new Markers(graph);
  const names = new Map(graph.placeholders.map(each => [each.name, each.user_name]));
  for (const [key, row] of [...rows, ...removed]) {
    const half = halfOf(row);
    const change = earlierRows === null ? 'same' : rows.has(key) ? changeOf(row, earlierRows.get(key)) : 'removed';
    const recomputed = half === 'backward' && row.op !== 'placeholder' && row.phase === 'forward' && !row.view;
    items.set(key, {
      ...{ key, row, half, change, path: [], parent: null, inputs: [], users: [] },
      title: names.get(row.name) ?? row.name,
      marks: markers.of(row.name, half, recomputed),
      saved: half === 'forward' ? (markers.saved.get(row.name) ?? null) : null
    });
  }
  for (const item of items.values()) {
    for (const name of new Set(item.row.inputs)) {
      // A name that the backward does not define is a value of the forward.
      const input = items.get(nodeKey(item.half, name)) ?? items.get(nodeKey('forward', name));
      if (input !== undefined && input !== item) {
        item.inputs.push(input);
        input.users.push(item);
      }
    }
  }
  const all = [...items.values()];
  setPaths(graph, stage, all);
  const halves = (['forward', 'backward'] as const).flatMap(half => {
    const members = all.filter(item => item.half === half);
    return members.length > 0 ? [makeGroup('', half, [], branchesOf(members, half, []), members)] : [];
  });
  halves.forEach(half => (half.title = half.half));
  return { halves, items: all };
}

/** The facts of the report about nodes, by the names of the nodes. */
class Markers {
  readonly saved: ReadonlyMap<string, Saved>;
  private readonly marks = new Map<string, IMark[]>();

  constructor(graph: Graph) {
    this.saved = new Map(graph.saved.map(row => [row.name, row]));
    for (const input of graph.inputs) {
      if (mutated(input)) {
        this.add(input.placeholder, 'mutated', `${input.name} is mutated`);
      }
      for (const name of input.gradient.split(', ')) {
        this.add(name, 'gradient', `gradient of ${input.name}`);
      }
    }
    for (const result of graph.results.filter(each => each.kind.startsWith('mutated'))) {
      this.add(result.name, 'mutated', `new value of ${result.target}`);
    }
    for (const output of graph.outputs) {
      const base = graph.inputs.find(input => output.base_kind === 'input' && input.name === output.base);
      const name = output.node || (base?.placeholder ?? '');
      if (output.base === null) {
        this.add(name, 'output', `returned as ${output.name}`);
      } else {
        this.add(name, 'aliased', `${output.name}: ${output.relation}`);
      }
    }
  }

  private add(name: string, kind: MarkKind, text: string): void {
    this.marks.set(name, [...(name === '' ? [] : (this.marks.get(name) ?? [])), { kind, text }]);
  }

  of(name: string, half: Half, recomputed: boolean): readonly IMark[] {
    if (recomputed) {
      return [{ kind: 'recomputed', text: 'recomputed: the backward computes it again' }];
    }
    const saved = half === 'forward' ? this.saved.get(name) : undefined;
    const marks = this.marks.get(name) ?? [];
    return saved === undefined ? marks : [...marks, { kind: 'saved', text: savedText(saved) }];
  }
}

function savedText(saved: Saved): string {
  return newBytes(saved) > 0 ? `saved, ${dataSize(saved.nbytes)}` : 'saved, takes no new memory';
}

/** The new memory that saving a value takes, in bytes. */
export function newBytes({ nbytes, is_input: isInput, is_output: isOutput, shares }: Saved): number {
  const bytes = typeof nbytes === 'number' ? nbytes : (nbytes.hint ?? 0);
  return isInput || isOutput || shares !== '' ? 0 : bytes;
}

/**
 * Set the path of each node. An input without a module belongs to the innermost module that contains all its users. An
 * op without a module, such as the sum of two gradients, belongs to the innermost module that contains all its inputs.
 */
function setPaths(graph: Graph, stage: IStage, items: readonly IItem[]): void {
  const kernels = new Map<string, string>();
  for (const kernel of stage.byKernel ? graph.kernels : []) {
    const half = kernel.kind === 'backward' ? 'backward' : 'forward';
    kernel.nodes.forEach(name => kernels.set(nodeKey(half, name), kernels.get(nodeKey(half, name)) ?? kernel.name));
  }
  for (const item of items) {
    const kernel = kernels.get(item.key);
    const { module } = item.row;
    item.path = stage.byKernel ? (kernel === undefined ? [] : [kernel]) : module === '' ? [] : module.split('.');
  }
  const isInput = ({ row }: IItem): boolean => ['placeholder', 'get_attr'].includes(row.op) && row.module === '';
  for (const item of items.filter(isInput)) {
    const paths = item.users.filter(user => user.half === item.half).map(user => user.path);
    item.path = paths.length > 0 ? paths.reduce(commonPath) : [];
  }
  for (const item of stage.byKernel ? [] : items.filter(each => each.path.length === 0 && !isInput(each))) {
    const paths = item.inputs.filter(({ half, path }) => half === item.half && path.length > 0).map(({ path }) => path);
    item.path = paths.length > 0 ? paths.reduce(commonPath) : [];
  }
  for (const half of ['forward', 'backward']) {
    const inputs = items.filter(item => item.half === half && item.path.length === 0 && isInput(item));
    if (inputs.length > MOST_INPUTS) {
      inputs.forEach(item => (item.path = ['inputs']));
    }
  }
}

function commonPath(a: readonly string[], b: readonly string[]): readonly string[] {
  const end = a.findIndex((segment, index) => segment !== b[index]);
  return end < 0 ? a : a.slice(0, end);
}

/** The groups and nodes directly inside of the module with the path `prefix`, in the order of their first nodes. */
function branchesOf(items: readonly IItem[], half: Half, prefix: readonly string[]): Branch[] {
  const parts = new Map<string, IItem[]>();
  for (const item of items) {
    const segment = item.path[prefix.length];
    const key = segment === undefined ? `node ${item.key}` : `path ${segment}`;
    parts
      .set(key, parts.get(key) ?? [])
      .get(key)
      ?.push(item);
  }
  return [...parts.values()].flatMap((members): readonly Branch[] => {
    // A group of one node would hide the node and say nothing.
    if (members.length === 1) {
      return members;
    }
    const path = [...prefix, members[0]?.path[prefix.length] ?? ''];
    const children = branchesOf(members, half, path);
    const isOnlyGroup = children.length === 1 && children.every(isGroup);
    // A list of modules runs no op. Its members are shown as children of the module that contains the list.
    const isList = members.every(item => /^\d+$/.test(item.path[path.length] ?? ''));
    return isOnlyGroup || isList ? children : [makeGroup(path.join('.'), half, path, children, members)];
  });
}

function makeGroup(
  key: string,
  half: Half,
  path: readonly string[],
  members: readonly Branch[],
  items: readonly IItem[]
): IGroup {
  const children = divided(members, key, half, path);
  const group: IGroup = { key, half, path, children, items, title: key, parent: null };
  for (const child of children) {
    child.parent = group;
    if (isGroup(child) && child.path.length > path.length) {
      child.title = child.path.slice(path.length).join('.');
    }
  }
  return group;
}

/** Divide many members into groups: of nodes with the same user line, or else of the same number of members. */
function divided(members: readonly Branch[], key: string, half: Half, path: readonly string[]): readonly Branch[] {
  if (members.length <= MOST_MEMBERS) {
    return members;
  }
  const runs: Branch[][] = [];
  members.forEach((member, index) => {
    const line = lineKey(member);
    if (index > 0 && line !== '' && line === lineKey(members[index - 1] ?? member)) {
      runs.at(-1)?.push(member);
    } else {
      runs.push([member]);
    }
  });
  const length = Math.ceil(members.length / PIECES);
  const slices = Array.from({ length: Math.ceil(members.length / length) }, (_, index) =>
    members.slice(index * length, (index + 1) * length)
  );
  const pieces = runs.length > 1 && runs.length <= MOST_MEMBERS ? runs : slices;
  return pieces.flatMap(piece => {
    if (piece.length === 1) {
      return piece;
    }
    const items = piece.flatMap(member => (isGroup(member) ? member.items : [member]));
    const name = items[0]?.row.name ?? '';
    const group = makeGroup(`${key} from ${name}`, half, path, piece, items);
    group.title = !hasOneLine(members) && hasOneLine(piece) ? lineTitle(items[0]) : `from ${name}`;
    return [group];
  });
}

function lineKey(branch: Branch): string {
  return isGroup(branch) || branch.row.line === null ? '' : `${branch.row.line.file}:${branch.row.line.line}`;
}

function hasOneLine(members: readonly Branch[]): boolean {
  const keys = new Set(members.map(lineKey));
  return keys.size === 1 && !keys.has('');
}

function lineTitle(item: IItem | undefined): string {
  const line = item?.row.line ?? null;
  return line === null ? `from ${item?.row.name ?? ''}` : `${place(line)}: ${line.code}`;
}

/**
 * Choose the groups that are open at first: level by level, as long as at most `most` boxes are visible. If the whole
 * next level does not fit, open of it only what fits, unless much is visible already.
 */
export function openAtFirst(halves: readonly IGroup[], most = MOST_MEMBERS): Set<string> {
  const open = new Set<string>();
  let visible = halves.reduce((sum, half) => sum + half.children.length, 0);
  let level = halves.flatMap(half => half.children.filter(isGroup));
  while (level.length > 0) {
    const growth = (groups: readonly IGroup[]): number =>
      groups.reduce((sum, group) => sum + group.children.length - 1, 0);
    const isSmall = visible < most / 4;
    const opened: IGroup[] = [];
    if (visible + growth(level) <= most) {
      opened.push(...level);
    } else if (isSmall) {
      // The same module of both halves is opened or closed at once.
      for (const key of new Set(level.map(group => group.key))) {
        const same = level.filter(group => group.key === key);
        if (visible + growth([...opened, ...same]) <= most) {
          opened.push(...same);
        }
      }
    }
    opened.forEach(group => open.add(group.key));
    visible += growth(opened);
    level = opened.length < level.length ? [] : opened.flatMap(group => group.children.filter(isGroup));
  }
  return open;
}
