/** Which bytes of a storage a tensor really has: with strides, not all between its first and its last. */

import type { Size, TensorInfo, Written } from './report';

/** Bytes from `start` up to, not including, `stop`. */
export interface Range {
  readonly start: number;
  readonly stop: number;
}

/** More runs than this are not worth drawing one by one. */
const MOST_RUNS = 512;

function numbers(values: readonly Size[]): number[] | null {
  const found = values.filter((value): value is number => typeof value === 'number');
  return found.length === values.length ? found : null;
}

/**
 * The runs of bytes that the tensor's elements take, in order, merged where they touch.
 *
 * Null where they cannot be known (symbolic sizes) or are too many.
 */
export function runs(tensor: TensorInfo, start: number): readonly Range[] | null {
  const shape = numbers(tensor.shape);
  const strides = numbers(tensor.stride);
  if (shape === null || strides === null || shape.length !== strides.length || typeof tensor.nbytes !== 'number') {
    return null;
  }
  const count = shape.reduce((product, length) => product * length, 1);
  if (count === 0) {
    return [];
  }
  const item = tensor.nbytes / count;
  if (!Number.isInteger(item) || item <= 0 || strides.some(stride => stride < 0)) {
    return null;
  }
  // From the innermost dimension outwards; a stride of 0 repeats the same bytes and adds none.
  const dimensions = shape
    .map((length, index) => ({ length, step: (strides[index] ?? 0) * item }))
    .filter(each => each.length > 1)
    .sort((a, b) => a.step - b.step);
  let block = item;
  let offsets = [0];
  for (const { length, step } of dimensions) {
    if (step <= block) {
      block += step * (length - 1);
      continue;
    }
    if (offsets.length * length > MOST_RUNS) {
      return null;
    }
    offsets = Array.from({ length }, (_, index) => offsets.map(offset => offset + index * step)).flat();
  }
  return union(offsets.map(offset => ({ start: start + offset, stop: start + offset + block })));
}

/**
 * The runs of bytes of a window that is written; `whole` says whether all bytes of them are.
 *
 * Of too many, those of the inner dimensions are taken together with the gaps between them.
 */
export function windowRuns(window: Written): { readonly runs: readonly Range[]; readonly whole: boolean } {
  let starts = [window.start];
  let block = window.length;
  let whole = window.certain;
  window.counts.forEach((count, index) => {
    const step = window.steps[index] ?? 0;
    if (block === window.length && starts.length * count <= MOST_RUNS) {
      starts = starts.flatMap(start => Array.from({ length: count }, (_, each) => start + each * step));
    } else {
      block += (count - 1) * step;
      whole = false;
    }
  });
  return { runs: union(starts.map(start => ({ start, stop: start + block }))), whole };
}

/** What two lists of ranges, each in order, have in common. */
export function common(some: readonly Range[], others: readonly Range[]): Range[] {
  return some.flatMap(one =>
    others
      .map(other => ({ start: Math.max(one.start, other.start), stop: Math.min(one.stop, other.stop) }))
      .filter(range => range.start < range.stop)
  );
}

/** The same bytes as ranges that neither overlap nor touch, in order; gaps of up to `least` bytes are closed. */
export function union(ranges: readonly Range[], least = 0): readonly Range[] {
  const merged: { start: number; stop: number }[] = [];
  for (const range of [...ranges].sort((a, b) => a.start - b.start)) {
    const last = merged.at(-1);
    if (last !== undefined && range.start <= last.stop + least) {
      last.stop = Math.max(last.stop, range.stop);
    } else {
      merged.push({ start: range.start, stop: range.stop });
    }
  }
  return merged;
}
