/** A tensor in a cell: its type, and below it what is unusual about it. */

import type { Input, Output, TensorInfo } from '../model/report';
import { known, sizes, sizeText, tensorText } from '../model/words';
import { h, mark } from './dom';
import type { Child } from './dom';

const PLAIN_TYPES: ReadonlySet<string> = new Set(['torch.Tensor', 'torch.nn.parameter.Parameter']);

/** Write `float32[2, 3]`, and strides, an offset, a device and a type that one does not expect. */
export function tensorCell(tensor: TensorInfo | null): Child {
  if (tensor === null) {
    return null;
  }
  const unusual = [
    tensor.layout !== 'strided' ? tensor.layout : contiguous(tensor) ? '' : `stride ${sizes(tensor.stride)}`,
    tensor.offset === 0 ? '' : `offset ${sizeText(tensor.offset)}`,
    tensor.device.startsWith('cpu') ? '' : tensor.device,
    PLAIN_TYPES.has(tensor.type_name) ? '' : (tensor.type_name.split('.').at(-1) ?? '')
  ].filter(each => each !== '');
  return h(
    'span',
    { 'data-device': tensor.device, title: `${tensor.type_name}, stride ${sizes(tensor.stride)} on ${tensor.device}` },
    h('span', { 'data-said': '' }, tensorText(tensor)),
    ...(unusual.length > 0 ? [' ', h('span', { class: 'al-below' }, unusual.join(', '))] : [])
  );
}

/** The name of a row, further to the right the deeper it lies in a wrapper; what the wrapper is called is said softly. */
export function partName(row: Input | Output, depth: number): Child {
  if (depth === 0) {
    return row.name;
  }
  const above = row.name.startsWith(`${row.part_of}.`) ? row.part_of : '';
  const soft = above === '' ? null : h('span', { class: 'al-soft' }, above);
  const made = h('span', { class: 'al-part', 'data-depth': depth }, soft, row.name.slice(above.length));
  made.style.paddingInlineStart = `${1.2 * depth}em`;
  return made;
}

/** What stands for a tensor in a graph, and below it what stands for its gradient. */
export function inGraph(name: string, gradient: string): Child {
  return name === '' ? null : gradient === '' ? name : h('span', {}, name, ' ', h('span', { class: 'al-below' }, gradient));
}

function contiguous(tensor: TensorInfo): boolean {
  let expected = 1;
  for (let dim = tensor.shape.length - 1; dim >= 0; dim -= 1) {
    const [size, step] = [known(tensor.shape[dim] ?? null), known(tensor.stride[dim] ?? null)];
    if (size === null || step === null || (size !== 1 && step !== expected)) {
      return false;
    }
    expected *= Math.max(size, 1);
  }
  return true;
}

/** Say that a tensor requires grad, and where it is said also that it is no leaf. */
export function autograd(requires: boolean, leaf = true): Child {
  return requires ? h('span', {}, mark('requires grad', 'brand'), leaf ? '' : ' non-leaf') : null;
}

/** Name a storage as the storage map does. */
export function storageCell(number: number | null): string | null {
  return number === null ? null : `#${number}`;
}
