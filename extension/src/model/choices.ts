/**
 * The choices of the values that a forward saves for its backward.
 *
 * A report has the values of the joint graph with their costs. From these, this model computes for any choice which ops
 * the backward computes again, and the memory over time. `aotlab.partition.joint_values` and `aotlab.report.memory` are
 * the same model in Python; a test compares the two.
 */

import type { BudgetRow, Choices } from './report';
import type { ILive, Kind } from './memory';

/** The roles of values. */
const OP = 0;
const PARAMETER = 1;
export const TANGENT = 3;
/** A value that the compiler computes inside of the kernels that read it. */
const INLINED = 2;

/** A choice: the values that are saved as far as the backward needs them. All others are computed again if possible. */
export interface IChoice {
  readonly preferred: ReadonlySet<number>;
  /** Whether values are computed again from copies of the tensors that the caller can write. */
  readonly copies: boolean;
}

/** The consequences of a choice. */
export interface IPlan {
  readonly saved: readonly number[];
  /** The nodes of the forward and of the backward, in the order in which they run. */
  readonly early: readonly number[];
  readonly late: readonly number[];
  /** The nodes of the forward that the backward computes again; `ops` are those that allocate memory, so no views. */
  readonly again: readonly number[];
  readonly ops: readonly number[];
  /** The memory that is held only for the backward, in bytes. */
  readonly heldBytes: number;
  /** The estimated time of computing again, as a fraction of forward and backward. */
  readonly cost: number;
}

/** The modelled memory of a choice: its storages, and the numbers of steps of the whole and of the forward. */
export interface ILifetimes {
  readonly storages: readonly ILive[];
  readonly steps: number;
  readonly forwardSteps: number;
}

/** A storage while its lifetime is computed; `begin` and `end` are positions in the list of all nodes. */
interface IStorage {
  readonly node: number;
  readonly bytes: number;
  readonly begin: number;
  end: number;
  kind: Kind;
}

export class ChoiceModel {
  private readonly copies: ReadonlySet<number>;
  private readonly lateNodes: ReadonlySet<number>;
  private readonly cloned: ReadonlyMap<number, number>;
  private readonly computables = new Map<boolean, readonly boolean[]>();

  constructor(readonly choices: Choices) {
    this.copies = new Set(choices.copies);
    this.lateNodes = new Set(choices.late);
    this.cloned = new Map(choices.cloned.map((node, index) => [node, choices.cloned_bytes[index] ?? 0]));
  }

  /** The choice of a row of the table. */
  choiceOf(row: BudgetRow): IChoice {
    return { preferred: new Set(row.saved), copies: row.copies };
  }

  /** Why a value cannot be computed again; empty if it can. */
  ban(node: number, copies: boolean): string {
    const { choices } = this;
    if (this.computable(copies)[node] === true) {
      return '';
    }
    const own = choices.ban_table[choices.bans[node] ?? -1];
    const ofInput = this.inputsOf(node, copies).map(each => choices.ban_table[choices.bans[each] ?? -1]);
    return own ?? ofInput.find(each => each !== undefined) ?? 'it depends on an op that must not run twice';
  }

  plan({ preferred, copies }: IChoice): IPlan {
    const { choices } = this;
    const again = this.computable(copies);
    const saved = new Set<number>();
    this.visit(choices.needed, node => {
      const keep = (choices.nbytes[node] ?? -1) >= 0 && (preferred.has(node) || again[node] !== true);
      if (keep) {
        saved.add(node);
      }
      return keep ? [] : this.inputsOf(node, copies);
    });
    const body = new Set(choices.early);
    this.visit(saved, node => {
      const isNew = !body.has(node);
      body.add(node);
      return isNew ? this.inputsOf(node, copies) : [];
    });
    const late = this.lateOrder(saved, copies);
    const recomputed = late.filter(node => !this.lateNodes.has(node));
    const costs = recomputed.map(node => Math.max(choices.again[node] ?? 0, 0));
    const inOrder = (nodes: Iterable<number>): number[] => [...nodes].sort((a, b) => a - b);
    return {
      saved: inOrder(saved),
      early: inOrder(body),
      late,
      again: recomputed,
      ops: recomputed.filter(node => (choices.again[node] ?? 0) > 0 && this.allocates(node, copies)),
      heldBytes: this.heldBytes(saved),
      cost: costs.reduce((sum, cost) => sum + cost, 0) / Math.max(choices.traffic, 1)
    };
  }

  /** The lifetimes of all storages of a training step. */
  lifetimes(plan: IPlan): ILifetimes {
    const { choices } = this;
    const { early, late, saved } = plan;
    const clones = saved.filter(node => this.cloned.has(node));
    const tangents = choices.roles.flatMap((role, node) => (role === TANGENT ? [node] : []));
    const primals = early.filter(node => choices.roles[node] !== OP);
    const forwardEnd = early.length + clones.length;
    const start = forwardEnd + 1;
    const end = forwardEnd + saved.length + tangents.length + late.length + 1;
    const all: IStorage[] = [];
    const keep = (storages: readonly IStorage[], position: number): readonly IStorage[] => {
      storages.forEach(each => (each.end = Math.max(each.end, position)));
      return storages;
    };
    const relabel = (storages: readonly IStorage[], kind: Kind, last: number): void =>
      storages
        .filter(each => each.kind === 'temporary')
        .forEach(each => {
          each.kind = kind;
          each.end = last;
        });
    const allocate = (node: number, bytes: number, kind: Kind, begin: number): IStorage => {
      const storage = { node, bytes, kind, begin, end: begin };
      all.push(storage);
      return storage;
    };
    /** Run a list of nodes whose first one has a position. `of` maps the number of a storage to the storage. */
    const run = (nodes: readonly number[], first: number, of: Map<number, IStorage>, gone: ReadonlySet<number>): void =>
      nodes.forEach((node, index) => {
        const own = (choices.storages[node] ?? []).filter(each => !gone.has(each));
        for (const number of own.filter(each => !of.has(each))) {
          const kind = this.kindOf(node);
          const begin = choices.roles[node] === OP ? first + index : kind === 'gradients' ? start : 0;
          of.set(number, allocate(node, choices.storage_bytes[number] ?? 0, kind, begin));
        }
        if (choices.roles[node] === OP) {
          const read = [node, ...(choices.inputs[node] ?? [])].flatMap(each => choices.storages[each] ?? []);
          keep(
            read.flatMap(number => of.get(number) ?? []),
            first + index
          );
        }
      });
    const forward = new Map<number, IStorage>();
    const stored = (nodes: readonly number[]): IStorage[] =>
      nodes.flatMap(node => (choices.storages[node] ?? []).flatMap(number => forward.get(number) ?? []));
    run(early, 0, forward, this.inlined(early, primals, [...saved, ...choices.outputs, ...choices.writes]));
    all.filter(each => each.kind !== 'temporary').forEach(each => (each.end = end));
    const ownClones = new Map(
      clones.map((node, index) => [node, allocate(node, this.cloned.get(node) ?? 0, 'temporary', early.length + index)])
    );
    const savedStorages = saved.flatMap(node => ownClones.get(node) ?? stored([node]));
    keep([...stored([...choices.outputs, ...choices.writes]), ...savedStorages], forwardEnd);
    relabel(stored(choices.outputs), 'outputs', end);
    // The tensor into which a new value is copied is saved in place of the value. It is an input, so it is counted.
    const newValues = new Set(stored(choices.writes));
    relabel(
      savedStorages.filter(each => !newValues.has(each)),
      'saved',
      start
    );
    const backward = new Map<number, IStorage>();
    for (const node of saved) {
      for (const number of choices.storages[node] ?? []) {
        const storage = ownClones.get(node) ?? forward.get(number);
        if (storage !== undefined) {
          backward.set(number, newValues.has(storage) ? { ...storage } : storage);
        }
      }
    }
    run(
      [...tangents, ...late],
      start + saved.length,
      backward,
      this.inlined(late, [...saved, ...tangents], choices.gradients)
    );
    const results = [...tangents, ...choices.gradients].flatMap(node =>
      (choices.storages[node] ?? []).flatMap(number => backward.get(number) ?? [])
    );
    relabel(keep(results, end), 'gradients', end);
    return this.numbered(all, forwardEnd, end);
  }

  /** For each value, whether it can be computed again. */
  private computable(copies: boolean): readonly boolean[] {
    const known = this.computables.get(copies);
    if (known !== undefined) {
      return known;
    }
    const { again, nbytes } = this.choices;
    const can: boolean[] = [];
    again.forEach((cost, node) => {
      const inputs = this.inputsOf(node, copies);
      can.push(cost >= 0 && inputs.every(each => can[each] === true || (nbytes[each] ?? -1) >= 0));
    });
    this.computables.set(copies, can);
    return can;
  }

  private allocates(node: number, copies: boolean): boolean {
    const read = new Set(this.inputsOf(node, copies).flatMap(each => this.choices.storages[each] ?? []));
    return (this.choices.storages[node] ?? []).some(each => !read.has(each));
  }

  private inputsOf(node: number, copies: boolean): readonly number[] {
    const inputs = this.choices.inputs[node] ?? [];
    return copies
      ? inputs
      : inputs.map(each => (this.copies.has(each) ? (this.choices.inputs[each]?.[0] ?? each) : each));
  }

  /** Call `next` once for each of the nodes `begin` and for each node that it returns. */
  private visit(begin: Iterable<number>, next: (node: number) => readonly number[]): void {
    const seen = new Set<number>();
    const todo = [...begin];
    for (let node = todo.pop(); node !== undefined; node = todo.pop()) {
      if (!seen.has(node)) {
        seen.add(node);
        todo.push(...next(node));
      }
    }
  }

  /** The backward's nodes, in an order in which each value is computed again just before its first use. */
  private lateOrder(saved: ReadonlySet<number>, copies: boolean): readonly number[] {
    const { choices } = this;
    const done = new Set([...saved, ...choices.roles.flatMap((role, node) => (role === OP ? [] : [node]))]);
    const order: number[] = [];
    for (const end of [...new Set([...choices.late, ...choices.gradients])].sort((a, b) => a - b)) {
      const todo = [end];
      for (let node = todo.at(-1); node !== undefined; node = todo.at(-1)) {
        const missing = done.has(node) ? [] : this.inputsOf(node, copies).filter(each => !done.has(each));
        if (missing.length > 0) {
          todo.push(...missing);
          continue;
        }
        todo.pop();
        if (!done.has(node)) {
          done.add(node);
          order.push(node);
        }
      }
    }
    return order;
  }

  private heldBytes(saved: ReadonlySet<number>): number {
    const { choices } = this;
    const inputs = choices.roles.flatMap((role, node) => (role === OP || role === TANGENT ? [] : [node]));
    const free = new Set(
      [...inputs, ...choices.outputs, ...choices.writes].flatMap(node => choices.storages[node] ?? [])
    );
    const held = new Map<number, number>();
    for (const node of saved) {
      const storages = choices.storages[node] ?? [];
      if (storages.length === 0 || this.cloned.has(node)) {
        held.set(-1 - node, this.cloned.get(node) ?? choices.nbytes[node] ?? 0);
      }
      for (const number of storages.filter(each => !free.has(each))) {
        held.set(number, choices.storage_bytes[number] ?? 0);
      }
    }
    return [...held.values()].reduce((sum, bytes) => sum + bytes, 0);
  }

  /** The storages that are not in memory, because the compiler computes their values inside of other kernels. */
  private inlined(
    order: readonly number[],
    given: readonly number[],
    returned: readonly number[]
  ): ReadonlySet<number> {
    const { storages, fuses, inputs } = this.choices;
    const storagesOf = (nodes: readonly number[]): number[] => nodes.flatMap(node => storages[node] ?? []);
    const inlined = new Set<number>();
    const stored = new Set(storagesOf(returned));
    const made = new Set(storagesOf(given));
    for (const node of order) {
      const own = storages[node] ?? [];
      own.filter(each => !made.has(each)).forEach(each => (fuses[node] === INLINED ? inlined : stored).add(each));
      own.forEach(each => made.add(each));
      if (fuses[node] === 0) {
        const read = storagesOf(inputs[node] ?? []);
        read.filter(each => !own.includes(each)).forEach(each => stored.add(each));
      }
    }
    return new Set([...inlined].filter(each => !stored.has(each)));
  }

  private kindOf(node: number): Kind {
    const role = this.choices.roles[node];
    return role === OP ? 'temporary' : role === PARAMETER ? 'parameters' : role === TANGENT ? 'gradients' : 'inputs';
  }

  /** Number the steps: a step for each op that allocates memory, and for the begins and ends of forward and backward. */
  private numbered(all: readonly IStorage[], forwardEnd: number, end: number): ILifetimes {
    const { choices } = this;
    const borders = [0, forwardEnd, forwardEnd + 1, end];
    const steps = [...new Set([...borders, ...all.map(each => each.begin)])].sort((a, b) => a - b);
    const at = new Map<number, number>();
    let step = -1;
    for (let position = 0; position <= end; position += 1) {
      step += steps[step + 1] === position ? 1 : 0;
      at.set(position, step);
    }
    const storages = all.map(({ node, bytes, kind, begin, end: last }) => ({
      name: choices.names[node] ?? '',
      kind,
      bytes,
      begin: at.get(begin) ?? 0,
      end: at.get(last) ?? 0,
      line: choices.line_table[choices.lines[node] ?? -1] ?? null,
      module: choices.module_table[choices.modules[node] ?? 0] ?? ''
    }));
    return { storages, steps: steps.length, forwardSteps: (at.get(forwardEnd) ?? 0) + 1 };
  }
}
