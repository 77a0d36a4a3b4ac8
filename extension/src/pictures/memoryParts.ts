/** Small parts of the pictures of memory: swatches, names, units. */

import type { IHolder, Kind } from '../model/memory';
import { amount } from '../model/words';
import type { IEntry } from '../view/context';
import { dotted, h, svg } from '../view/dom';
import type { Child } from '../view/dom';
import { userName } from '../view/graph';

/** The engines of measured curves, with the dashes of their lines and their names. */
const ENGINES: Readonly<Record<string, readonly [string, string]>> = {
  aotlab: ['', 'aotlab, measured'],
  eager: ['2 3', 'eager, measured'],
  upstream: ['8 4', 'stock torch.compile, measured']
};

/** The module that allocated storages; without a module, the names of the storages. */
export function placeOf(entry: IEntry, { module, names }: IHolder): Child {
  const [first = ''] = names;
  const others = names.length > 1 ? ` and ${amount(names.length - 1, 'other')}` : '';
  return module !== '' ? dotted(module) : h('span', {}, userName(entry, first), others);
}

export function legendItem(title: string, shape: SVGElement, width = 10): HTMLElement {
  return h('span', {}, svg('svg', { width, height: 10, class: 'al-swatch', 'aria-hidden': 'true' }, shape), title);
}

export function engineOf(engine: string): readonly [string, string] {
  return ENGINES[engine] ?? ['1 2', `${engine}, measured`];
}

export function swatch(kind: Kind): SVGElement {
  const square = svg('rect', { width: 10, height: 10, class: `al-memory-${kind}` });
  return svg('svg', { width: 10, height: 10, class: 'al-swatch', 'aria-hidden': 'true' }, square);
}

export function percent(part: number, whole: number): string {
  return `${((100 * part) / Math.max(whole, 1)).toFixed(1)} %`;
}

export function unitOf(bytes: number): readonly [string, number] {
  const units = [['GiB', 2 ** 30] as const, ['MiB', 2 ** 20] as const, ['KiB', 2 ** 10] as const];
  return units.find(([, length]) => bytes >= length) ?? ['B', 1];
}
