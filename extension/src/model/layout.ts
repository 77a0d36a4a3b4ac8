/**
 * Compute the bytes of a storage that belong to a tensor, and the bytes that are written.
 *
 * A tensor with strides may skip bytes between its first and its last byte. So its bytes are *runs*, ranges of
 * consecutive bytes.
 */

import type { Size, TensorInfo, Written } from './report';

/** The bytes from `start` to `stop`, without `stop`. */
export interface IRange {
  readonly start: number;
  readonly stop: number;
}

/** If a tensor has more runs of bytes than this, they are not drawn one by one. */
const MOST_RUNS = 512;

function numbers(values: readonly Size[]): number[] | null {
  const plainNumbers = values.filter((value): value is number => typeof value === 'number');
  return plainNumbers.length === values.length ? plainNumbers : null;
}

/**
 * The runs of bytes of the tensor's elements, in order; runs that touch are merged. `start` is the first byte.
 *
 * The result is null if the sizes are symbolic, or if there are too many runs.
 */
export function runs(tensor: TensorInfo, start: number): readonly IRange[] | null {
  const shape = numbers(tensor.shape);
  const strides = numbers(tensor.stride);
  if (shape === null || strides === null || shape.length !== strides.length || typeof tensor.nbytes !== 'number') {
    return null;
  }
  const count = shape.reduce((product, length) => product * length, 1);
  if (count === 0) {
    return [];
  }
  const itemSize = tensor.nbytes / count;
  if (!Number.isInteger(itemSize) || itemSize <= 0 || strides.some(stride => stride < 0)) {
    return null;
  }
  // From the innermost dimension outwards; a stride of 0 repeats the same bytes and adds none.
  const dimensions = shape
    .map((length, index) => ({ length, step: (strides[index] ?? 0) * itemSize }))
    .filter(dimension => dimension.length > 1)
    .sort((a, b) => a.step - b.step);
  let block = itemSize;
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
 * The runs of bytes that a `Written` describes; `whole` tells whether all bytes of these runs are written.
 *
 * If there are too many runs, the runs of the inner dimensions are merged, including the gaps between them.
 */
export function windowRuns(window: Written): { readonly runs: readonly IRange[]; readonly whole: boolean } {
  let starts = [window.start];
  let block = window.length;
  let whole = window.certain;
  window.counts.forEach((count, index) => {
    const step = window.steps[index] ?? 0;
    if (block === window.length && starts.length * count <= MOST_RUNS) {
      starts = starts.flatMap(start => Array.from({ length: count }, (_, repeat) => start + repeat * step));
    } else {
      block += (count - 1) * step;
      whole = false;
    }
  });
  return { runs: union(starts.map(start => ({ start, stop: start + block }))), whole };
}

/** The intersection of two ordered lists of ranges. */
export function intersection(ranges: readonly IRange[], others: readonly IRange[]): IRange[] {
  return ranges.flatMap(range =>
    others
      .map(other => ({ start: Math.max(range.start, other.start), stop: Math.min(range.stop, other.stop) }))
      .filter(range => range.start < range.stop)
  );
}

/** Merge ranges that overlap or touch, or that have a gap of at most `least` bytes. The result is in order. */
export function union(ranges: readonly IRange[], least = 0): readonly IRange[] {
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
