/**
 * The steps of a program, and the storages that they touch: the tensors in a storage at a step, and the bytes that the
 * program has written and that the caller's memory does not have yet.
 */

import { intersection, runs, union, windowRuns } from './layout';
import type { IRange } from './layout';
import type { Access, Graph, Step, Written } from './report';
import { dataSize, grouped, listed, sizeValue } from './words';

/** A tensor in a storage. It exists at the steps `from` to `until`, without `until`. */
export interface IStepTensor {
  readonly name: string;
  /** Whose tensor it is: the caller passed it, the program made it, or the epilogue made it. */
  readonly role: 'input' | 'program' | 'epilogue';
  /** Its bytes in the storage; null if they are unknown. */
  readonly runs: readonly IRange[] | null;
  readonly from: number;
  readonly until: number;
}

/** A storage of a program. Its number is negative if it exists only while the program runs. */
export interface IStepStorage {
  readonly number: number;
  readonly nbytes: number;
  /** Its size, its device and its owner, in words. */
  readonly about: string;
  readonly isCallers: boolean;
  readonly tensors: readonly IStepTensor[];
}

const OWNERS: Readonly<Record<string, string>> = { input: 'memory of the caller', intermediate: 'the base of outputs' };

/** All storages that a step reads, writes or makes. */
export function storagesIn(step: Step): readonly number[] {
  return [...new Set([...step.writes, ...step.reads, ...step.makes].map(access => access.storage))];
}

/** The storages that are written in place, that several tensors of the caller share, or that are bases of outputs. */
export function sharedStorages(graph: Graph): ReadonlySet<number> {
  return new Set([
    ...graph.storages
      .filter(({ spans, owner }) => owner === 'intermediate' || spans.length > 1 || spans.some(span => span.mutated))
      .map(storage => storage.number),
    ...graph.steps.flatMap(step => step.writes.map(access => access.storage))
  ]);
}

/**
 * The numbers of the steps that the player shows: all, or those that touch the storages `shared` or change an input. The
 * bytes of a call on a tensor subclass are unknown, so it is shown, too.
 */
export function playedSteps(graph: Graph, shared: ReadonlySet<number> | null): readonly number[] {
  const all = graph.steps.map((_, index) => index);
  return shared === null ? all : all.filter(index => touches(graph.steps[index], shared));
}

function touches(step: Step | undefined, shared: ReadonlySet<number>): boolean {
  const storages = step === undefined ? [] : storagesIn(step);
  return storages.length === 0 || storages.some(number => shared.has(number));
}

/** The name of a storage: `#0`, or `t1` for the first storage that exists only while the program runs. */
export function storageName(number: number): string {
  return number < 0 ? `t${-number}` : `#${number}`;
}

/** The name of the tensor of an access. */
export function tensorName(step: Step, access: Access): string {
  return access.tensor === '' ? step.text : access.tensor;
}

/** Whether a step belongs to the program; the other steps come after its graph. */
export function isCall(step: Step | undefined): boolean {
  return step?.kind === 'call';
}

/** Describe a storage and all tensors that it holds at any step. */
export function stepStorage(graph: Graph, number: number): IStepStorage {
  const { steps } = graph;
  const storage = graph.storages.find(each => each.number === number);
  const border = steps.findIndex(step => !isCall(step));
  const end = border < 0 ? steps.length : border;
  const accesses = steps.flatMap((step, from) => step.makes.map(access => ({ step, from, access })));
  const mine = accesses.filter(({ access }) => access.storage === number);
  const inputs = (storage?.spans ?? []).filter(span => span.role === 'input');
  const tensors: IStepTensor[] = inputs.map(({ name, start, stop }) => ({
    name,
    role: 'input',
    runs: inputRuns(graph, number, name) ?? (start === null || stop === null ? null : [{ start, stop }]),
    from: 0,
    until: steps.length
  }));
  for (const { step, from, access } of mine) {
    const name = tensorName(step, access);
    const isProgram = isCall(step);
    if (!tensors.some(each => each.name === name && each.from < (isProgram ? end : 0) && each.role !== 'input')) {
      const role = isProgram ? 'program' : 'epilogue';
      tensors.push({ name, role, runs: runsOf(access.bytes), from, until: isProgram ? end : steps.length });
    }
  }
  const first = mine.find(({ access }) => access.nbytes !== null);
  const stops = tensors.map(tensor => tensor.runs?.at(-1)?.stop ?? 0);
  const nbytes = sizeValue(storage?.nbytes ?? first?.access.nbytes ?? null) ?? 0;
  const owner =
    storage === undefined ? 'exists only while the program runs' : (OWNERS[storage.owner] ?? 'made for an output');
  const size = dataSize(storage?.nbytes ?? first?.access.nbytes ?? null);
  return {
    number,
    nbytes: Math.max(nbytes, ...stops, 1),
    about: `${size}${storage === undefined ? '' : ` on ${storage.device}`}, ${owner}`,
    isCallers: storage?.owner === 'input',
    tensors
  };
}

/** The bytes of an input: those that a step reads, or those that its sizes and strides give. */
function inputRuns(graph: Graph, number: number, name: string): readonly IRange[] | null {
  const reads = graph.steps.flatMap(step => step.reads);
  const access = reads.find(each => each.storage === number && each.tensor === name);
  const tensor = graph.inputs.find(row => row.name === name)?.tensor;
  const start = tensor === null || tensor === undefined ? null : sizeValue(tensor.byte_offset);
  return runsOf(access?.bytes ?? null) ?? (tensor && start !== null ? runs(tensor, start) : null);
}

function runsOf(bytes: Written | null): readonly IRange[] | null {
  return bytes === null ? null : bytes.length === 0 ? [] : windowRuns(bytes).runs;
}

/** The bytes of a storage that a step reads or writes; `all` for certain, `some` perhaps not all of them. */
export interface IStepMarks {
  readonly read: readonly IRange[];
  readonly all: readonly IRange[];
  readonly some: readonly IRange[];
}

/** The marks of a step in a storage. With `name`, only those of this tensor. */
export function marksIn(step: Step, number: number, name: string | null = null): IStepMarks {
  const ranges = (accesses: readonly Access[], whole: boolean | null): readonly IRange[] =>
    union(
      accesses
        .filter(each => each.storage === number && (name === null || tensorName(step, each) === name))
        .flatMap(({ bytes }) => (bytes === null ? [] : [windowRuns(bytes)]))
        .flatMap(window => (whole === null || window.whole === whole ? window.runs : []))
    );
  return { read: ranges(step.reads, null), all: ranges(step.writes, true), some: ranges(step.writes, false) };
}

/** The bytes of a caller's storage that the program has written before the end of a step and no copy has stored yet. */
export function pendingAt(graph: Graph, number: number, index: number): readonly IRange[] {
  let pending: readonly IRange[] = [];
  for (const step of graph.steps.slice(0, index + 1)) {
    const { all, some } = marksIn(step, number);
    const written = union([...all, ...some]);
    pending = isCall(step) ? union([...pending, ...written]) : without(pending, written);
  }
  return pending;
}

/** The bytes of `ranges` that are not in `others`. */
function without(ranges: readonly IRange[], others: readonly IRange[]): readonly IRange[] {
  const starts = [-Infinity, ...others.map(each => each.stop)];
  const stops = [...others.map(each => each.start), Infinity];
  return intersection(
    ranges,
    starts.map((start, n) => ({ start, stop: stops[n] ?? Infinity }))
  );
}

/** Describe the bytes of an access: `bytes 0–4, 16–20 and 32–36`. */
export function bytesText(bytes: Written | null): string {
  const count = bytes?.counts.reduce((product, each) => product * each, 1) ?? 0;
  return `${bytes?.certain === false ? 'perhaps not all of ' : ''}${runsText(runsOf(bytes), count)}`;
}

/** Describe runs of bytes. `count` is their number, if some of them were merged. */
export function runsText(parts: readonly IRange[] | null, count = 0): string {
  if (parts === null) {
    return 'unknown bytes (a size is symbolic)';
  }
  const shown = parts.slice(0, 3).map(({ start, stop }) => `${grouped(start)}–${grouped(stop)}`);
  const more = parts.length > 3 ? `${shown.join(', ')}, … (${grouped(Math.max(count, parts.length))} runs)` : '';
  return parts.length === 0 ? 'no bytes' : `bytes ${more || listed(shown)}`;
}
