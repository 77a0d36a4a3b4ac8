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

/** The storages that one line and module hold at a step. */
export interface IHolder {
  readonly kind: Kind;
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

/** The storages that are alive at a step, grouped by line and module, the largest group first. */
export function holdersAt(step: number, storages: readonly ILive[]): IHolder[] {
  const groups = new Map<string, { names: string[]; bytes: number } & Pick<IHolder, 'kind' | 'line' | 'module'>>();
  for (const { name, kind, bytes, begin, end, line, module } of storages) {
    if (begin <= step && step <= end && bytes > 0) {
      const key = JSON.stringify([kind, line?.file, line?.line, module]);
      const group = groups.get(key) ?? { kind, line, module, names: [], bytes: 0 };
      groups.set(key, group);
      group.names.push(name);
      group.bytes += bytes;
    }
  }
  return [...groups.values()].sort((a, b) => b.bytes - a.bytes);
}
