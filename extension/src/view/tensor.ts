/** A tensor in a cell: its type, and below it its unusual properties. */

import type { Input, Output, TensorInfo } from '../model/report';
import { sizes, sizeText, sizeValue, tensorText } from '../model/words';
import { dotted, h, mark } from './dom';
import type { Child } from './dom';

const PLAIN_TYPES: ReadonlySet<string> = new Set(['torch.Tensor', 'torch.nn.parameter.Parameter']);

/** Write `float32[2, 3]`, and below it the stride, offset, device and type if they are unusual. */
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

/** The name of a row, indented by its depth in a wrapper; the wrapper's name is in a softer colour. */
export function partName(row: Input | Output, depth: number): Child {
  if (depth === 0) {
    return dotted(row.name);
  }
  const prefix = row.name.startsWith(`${row.part_of}.`) ? row.part_of : '';
  const soft = prefix === '' ? null : h('span', { class: 'al-soft' }, prefix);
  const cell = h('span', { class: 'al-part', 'data-depth': depth }, soft, row.name.slice(prefix.length));
  cell.style.paddingInlineStart = `${1.2 * depth}em`;
  return cell;
}

/** The placeholder or node of a tensor in a graph, and below it the placeholder or node of its gradient. */
export function inGraph(name: string, gradient: string): Child {
  return name === ''
    ? null
    : gradient === ''
      ? name
      : h('span', {}, name, ' ', h('span', { class: 'al-below' }, gradient));
}

function contiguous(tensor: TensorInfo): boolean {
  let expected = 1;
  for (let dim = tensor.shape.length - 1; dim >= 0; dim -= 1) {
    const [size, step] = [sizeValue(tensor.shape[dim] ?? null), sizeValue(tensor.stride[dim] ?? null)];
    if (size === null || step === null || (size !== 1 && step !== expected)) {
      return false;
    }
    expected *= Math.max(size, 1);
  }
  return true;
}

/** Write whether a tensor requires grad, and if so, whether it is a non-leaf. */
export function autograd(requires: boolean, leaf = true): Child {
  return requires ? h('span', {}, mark('requires grad', 'brand'), leaf ? '' : ' non-leaf') : null;
}

/** Name a storage as in the storage map: `#7`. */
export function storageCell(number: number | null): string | null {
  return number === null ? null : `#${number}`;
}
