/** Small parts of the pictures of memory: swatches, names, units. */

import type { IHolder, ILive, Kind } from '../model/memory';
import type { MemoryCurve } from '../model/report';
import { amount, dataSize, listed } from '../model/words';
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

/** The storages of a modelled choice. Parameters and inputs get the lines and the modules that they have in this run. */
export function withModules(storages: readonly ILive[], own: readonly ILive[]): ILive[] {
  const callers = new Map(own.map(each => [`${each.kind} ${each.name}`, each]));
  return storages.map(each => {
    const isCallers = each.kind === 'parameters' || each.kind === 'inputs';
    const { line, module } = (isCallers ? callers.get(`${each.kind} ${each.name}`) : undefined) ?? each;
    return { ...each, line, module };
  });
}

/** The measured peaks beside the modelled one. `base` are the bytes that the caller holds during the whole step. */
export function measuredWords(curves: readonly MemoryCurve[], base: number, modelled: number, live: boolean): string {
  const peaks = curves.map(curve => {
    const bytes = base + Math.max(0, ...curve.forward, ...curve.backward);
    const engine = curve.engine === 'upstream' ? 'stock torch.compile' : curve.engine;
    const off = `${modelled >= bytes ? '+' : '−'}${Math.abs((100 * (modelled - bytes)) / bytes).toFixed(1)} %`;
    return `${dataSize(bytes)} with ${engine}${curve.engine === 'aotlab' ? ` (the model differs by ${off})` : ''}`;
  });
  return peaks.length > 0
    ? `The measured peak is ${listed(peaks)}, on ${curves[0]?.device ?? ''}.`
    : live
      ? 'The memory was not measured. The button Measure of the tab Timing measures it, and so does %%aotcompile --time.'
      : 'The memory was not measured. Run the cell again with --time.';
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
