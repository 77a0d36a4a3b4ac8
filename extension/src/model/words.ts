/** Write numbers and lists in words, as Python's `aotlab/report/text.py` does. */

import type { Size, TensorInfo, UserLine } from './report';

function three(value: number): string {
  return value >= 99.95 ? value.toFixed(0) : value >= 9.995 ? value.toFixed(1) : value.toFixed(2);
}

/** Write a whole number with commas between groups: `12,345`. It does not depend on the reader's locale. */
export function grouped(value: number): string {
  return String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, ',');
}

/** Write a time in nanoseconds with three digits and a suitable unit: `1.24 s`. */
export function duration(ns: number | null): string {
  if (ns === null) {
    return '–';
  }
  for (const [unit, length] of [
    ['s', 1e9],
    ['ms', 1e6],
    ['µs', 1e3]
  ] as const) {
    if (ns >= length * 0.9995) {
      return `${three(ns / length)} ${unit}`;
    }
  }
  return `${Math.round(ns)} ns`;
}

/** Write a size: a number, or an expression with its value in the traced call. */
export function sizeText(size: Size): string {
  if (typeof size === 'number') {
    return String(size);
  }
  return size.hint === null ? size.expression : `${size.expression.replaceAll(' ', '')}=${size.hint}`;
}

/** The value of a size in the traced call; null if it is unknown. */
export function sizeValue(size: Size | null): number | null {
  return size === null || typeof size === 'number' ? size : size.hint;
}

/** Write a number of bytes with a suitable unit: `1.5 KiB`. */
export function dataSize(size: Size | null): string {
  if (size === null) {
    return '–';
  }
  if (typeof size !== 'number') {
    return size.hint === null ? `${size.expression} B` : dataSize(size.hint);
  }
  for (const [unit, length] of [
    ['GiB', 2 ** 30],
    ['MiB', 2 ** 20],
    ['KiB', 2 ** 10]
  ] as const) {
    if (size >= length) {
      return `${three(size / length)} ${unit}`;
    }
  }
  return `${size} B`;
}

/** Write `no new memory` or `12 B of new memory`. */
export function newMemory(bytes: number): string {
  return bytes === 0 ? 'no new memory' : `${dataSize(bytes)} of new memory`;
}

/** Write a shape or strides: `[2, 3]`. */
export function sizes(values: readonly Size[]): string {
  return `[${values.map(sizeText).join(', ')}]`;
}

/** Write `1 graph` or `3 graphs`. */
export function amount(count: number, noun: string): string {
  return `${grouped(count)} ${noun}${count === 1 ? '' : 's'}`;
}

/** Write `a, b and c`. If there are more than `most` items, only count the rest: `a, b and 7 more`. */
export function listed(items: readonly string[], most = 6): string {
  if (items.length > most) {
    return `${items.slice(0, most).join(', ')} and ${items.length - most} more`;
  }
  return items.length > 1 ? `${items.slice(0, -1).join(', ')} and ${items.at(-1)}` : (items[0] ?? '');
}

/** Say how many items were cut from a report to fit a notebook. */
export function cutNotice(count: number, noun: string): string {
  return `${amount(count, `more ${noun}`)}, cut from this output to fit a notebook.`;
}

/** Return a function's name without the enclosing functions. */
export function short(name: string): string {
  return name.split('<locals>.').at(-1) ?? name;
}

/** Name a line of the user's program, `train.py:12`, or of a notebook's cell, `In [3], line 12`. */
export function place(line: UserLine | null): string {
  if (line === null) {
    return '';
  }
  const input = /^<ipython-input-(\d+)-/.exec(line.file);
  if (input !== null) {
    return `In [${input[1]}], line ${line.line}`;
  }
  if (/ipykernel_\d+[\\/]\d+\.py$/.test(line.file)) {
    return `a cell, line ${line.line}`;
  }
  return `${line.file.split(/[\\/]/).at(-1) ?? ''}:${line.line}`;
}

/** Write a tensor's dtype and shape: `float32[2, 3]`. */
export function tensorText(tensor: TensorInfo): string {
  return `${tensor.dtype}${sizes(tensor.shape)}`;
}
