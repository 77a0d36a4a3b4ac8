/** The memory of a graph over time: the modelled curve, its peak, and its composition at a step. */

import type { Memory, UserLine } from './report';

/** The kinds of memory, in the order in which the picture stacks them. */
export const KINDS = ['parameters', 'inputs', 'outputs', 'saved', 'temporary', 'gradients'] as const;
export type Kind = (typeof KINDS)[number];

/** For drawing, a longer curve is reduced to about this many steps. */
export const MOST_STEPS = 2000;

/** A storage with its lifetime. */
export interface ILive {
  readonly name: string;
  readonly kind: Kind;
  readonly bytes: number;
  /** The first and the last step at which the storage is alive. */
  readonly begin: number;
  readonly end: number;
  readonly line: UserLine | null;
  readonly module: string;
}

/** The bytes in use at one step. */
export interface IStep {
  readonly step: number;
  readonly total: number;
  readonly of: Readonly<Record<Kind, number>>;
}

/** The storages that one line and module, or one layer, hold at a step. */
export interface IHolder {
  /** The kinds of the storages, the one with the most bytes first. */
  readonly kinds: readonly Kind[];
  /** Null for a layer. */
  readonly line: UserLine | null;
  readonly module: string;
  readonly names: readonly string[];
  readonly bytes: number;
}

/** The storages of a graph as rows. Rows of a damaged report that make no sense are left out. */
export function storagesOf(memory: Memory): ILive[] {
  return memory.names.flatMap((name, index) => {
    const [kind, begin = -1, end = -1] = [memory.kinds[index], memory.begins[index], memory.ends[index]];
    const known = KINDS.find(each => each === kind);
    return known === undefined || begin < 0 || end < begin || end >= memory.steps
      ? []
      : {
          name,
          kind: known,
          bytes: memory.nbytes[index] ?? 0,
          begin,
          end,
          line: memory.line_table[memory.lines[index] ?? -1] ?? null,
          module: memory.module_table[memory.modules[index] ?? 0] ?? ''
        };
  });
}

/** The bytes in use at each step. */
export function stepsOf(count: number, storages: readonly ILive[]): IStep[] {
  const changes = Array.from({ length: count + 1 }, () => noBytes());
  for (const { kind, bytes, begin, end } of storages) {
    (changes[begin] ?? noBytes())[kind] += bytes;
    (changes[end + 1] ?? noBytes())[kind] -= bytes;
  }
  const used = noBytes();
  return changes.slice(0, count).map((change, step) => {
    KINDS.forEach(kind => (used[kind] += change[kind]));
    return { step, of: { ...used }, total: KINDS.reduce((sum, kind) => sum + used[kind], 0) };
  });
}

function noBytes(): Record<Kind, number> {
  return { parameters: 0, inputs: 0, outputs: 0, saved: 0, temporary: 0, gradients: 0 };
}

/** The first step with the most bytes. */
export function peakOf(steps: readonly IStep[]): number {
  return steps.reduce((best, each) => (each.total > (steps[best]?.total ?? 0) ? each.step : best), 0);
}

/** Reduce the steps so that they are drawn fast: of each group of neighbours, keep the one with the most bytes. */
export function thinned(steps: readonly IStep[]): readonly IStep[] {
  const size = Math.ceil((2 * steps.length) / MOST_STEPS);
  if (steps.length <= MOST_STEPS) {
    return steps;
  }
  return Array.from({ length: Math.ceil(steps.length / size) }, (_, group) =>
    steps.slice(group * size, (group + 1) * size).reduce((a, b) => (b.total > a.total ? b : a))
  );
}

/**
 * The storages that are alive at a step, the largest group first. They are grouped by kind, line and module, or by layer.
 */
export function holdersAt(step: number, storages: readonly ILive[], byLayer = false): IHolder[] {
  const groups = new Map<string, ILive[]>();
  for (const each of storages) {
    if (each.begin <= step && step <= each.end && each.bytes > 0) {
      const { kind, line, module } = each;
      const key = byLayer ? layerOf(module) : JSON.stringify([kind, line?.file, line?.line, module]);
      const members = groups.get(key) ?? [];
      groups.set(key, members);
      members.push(each);
    }
  }
  const bytesOf = (members: readonly ILive[], kind?: Kind): number =>
    members.reduce((sum, each) => sum + (kind === undefined || each.kind === kind ? each.bytes : 0), 0);
  return [...groups.values()]
    .map(members => ({
      kinds: KINDS.filter(kind => bytesOf(members, kind) > 0).sort((a, b) => bytesOf(members, b) - bytesOf(members, a)),
      line: byLayer ? null : (members[0]?.line ?? null),
      module: byLayer ? layerOf(members[0]?.module ?? '') : (members[0]?.module ?? ''),
      names: members.map(each => each.name),
      bytes: bytesOf(members)
    }))
    .sort((a, b) => b.bytes - a.bytes);
}

/** The layer of a module: its path up to the first number, `transformer.h.3`, or the first two parts of its path. */
export function layerOf(module: string): string {
  return /^.*?\.\d+(?=\.|$)|^\d+(?=\.|$)/.exec(module)?.[0] ?? module.split('.').slice(0, 2).join('.');
}
