/** The storage map: each storage as a bar of bytes, each tensor in it as the bytes that it has. */

import { runs, union } from '../model/layout';
import type { Range } from '../model/layout';
import { countsOf } from '../model/counts';
import type { Graph, Span, Storage, TensorInfo } from '../model/report';
import { amount, dataSize, grouped, known, notHere } from '../model/words';
import { fold } from './context';
import type { Context, Entry } from './context';
import { h, soft, svg, uniqueId } from './dom';
import type { Child } from './dom';
import { graphHeading } from './graph';

/** How many storages of one graph are drawn before the reader asks for the rest; of few, all are. */
const MOST_STORAGES = 40;
const FEW_STORAGES = 8;

const OWNERS: Readonly<Record<string, string>> = {
  input: 'the caller’s',
  intermediate: 'made by the graph',
  output: 'made by the graph for one output'
};

/** Heights in pixels: of the storage's own bar, of a tensor's row, and of what is in it. */
const BAR = 16;
const ROW = 30;
const BOX = 11;
const AXIS = 18;

/** A span with the bytes that belong to it. */
interface Drawn {
  readonly span: Span;
  readonly start: number;
  readonly stop: number;
  /** Null where only the ends are known. */
  readonly runs: readonly Range[] | null;
}

/** Draw the panel. */
export function storagesPanel(context: Context): Child[] {
  if (context.chosen.length === 0) {
    return [soft('Nothing was compiled, so no storages were recorded.')];
  }
  return [key(), ...context.chosen.flatMap(entry => storagesOf(context, entry))];
}

function storagesOf(context: Context, entry: Entry): Child[] {
  const { storages } = entry.graph;
  const tensors = tensorsOf(entry.graph);
  const map = (some: readonly Storage[]): HTMLElement =>
    h(
      'div',
      { class: 'al-map', 'data-frame': entry.frame.name, 'data-graph': entry.graph.index },
      ...some.map(storage => storageFigure(storage, tensors))
    );
  // Something happens in it: it is shared or written.
  const telling = storages.filter(storage => storage.spans.length > 1 || storage.spans.some(span => span.mutated));
  const plain = storages.filter(storage => !telling.includes(storage));
  const first = storages.length <= FEW_STORAGES ? [...telling, ...plain] : telling;
  const rest = storages.filter(storage => !first.includes(storage));
  const counts = countsOf(entry.graph);
  const left = counts.storages - storages.length;
  return [
    graphHeading(context, entry, `${amount(counts.storages, 'storage')}, ${grouped(counts.shared)} shared`),
    first.length > 0 ? map(first.slice(0, MOST_STORAGES)) : null,
    first.length > MOST_STORAGES ? others(context, entry, 'more', first.slice(MOST_STORAGES), map) : null,
    rest.length > 0 ? others(context, entry, 'plain', rest, map) : null,
    left > 0 ? soft(notHere(left, 'storage')) : null
  ];
}

function others(
  context: Context,
  entry: Entry,
  kind: 'more' | 'plain',
  storages: readonly Storage[],
  map: (some: readonly Storage[]) => HTMLElement
): HTMLElement {
  const bytes = storages.reduce((sum, storage) => sum + (known(storage.nbytes) ?? 0), 0);
  const about = kind === 'more' ? '' : ' of one tensor each, not written';
  return fold(
    context,
    `storages ${kind} ${entry.key}`,
    [`${amount(storages.length, kind === 'more' ? 'more storage' : 'storage')}${about} `, h('small', {}, dataSize(bytes))],
    () => [map(storages)]
  );
}

/** What the shapes mean. */
function key(): HTMLElement {
  const sample = (kind: string, word: string): HTMLElement => {
    const id = uniqueId();
    const picture = svg('svg', { width: 26, height: BOX, 'aria-hidden': 'true', class: 'al-swatch' });
    if (kind === 'written') {
      picture.append(hatching(id), svg('rect', { class: 'al-hatch', width: 26, height: BOX, fill: `url(#${id})` }));
    } else {
      picture.append(svg('rect', { class: `al-span-${kind}`, x: 1, y: 1, width: 24, height: BOX - 2, rx: 2 }));
    }
    return h('span', {}, picture, word);
  };
  return h(
    'p',
    { class: 'al-key' },
    sample('input', 'input: solid'),
    sample('output', 'output: outlined'),
    sample('written', 'hatched: of a tensor that the function writes')
  );
}

function tensorsOf(graph: Graph): ReadonlyMap<string, TensorInfo> {
  const found = new Map<string, TensorInfo>();
  for (const each of [...graph.inputs, ...graph.outputs]) {
    if (each.tensor !== null) {
      found.set(each.name, each.tensor);
    }
  }
  return found;
}

function storageFigure(storage: Storage, tensors: ReadonlyMap<string, TensorInfo>): HTMLElement {
  const owner = OWNERS[storage.owner] ?? storage.owner;
  const about = `${dataSize(storage.nbytes)} on ${storage.device}, ${owner}`;
  const drawn = storage.spans.flatMap(span => drawnSpan(span, tensors.get(span.name)));
  const symbolic = storage.spans.filter(span => span.start === null || span.stop === null);
  const total = Math.max(known(storage.nbytes) ?? 0, ...drawn.map(each => each.stop), 1);
  return h(
    'figure',
    { class: 'al-storage' },
    h('figcaption', {}, h('b', {}, `#${storage.number}`), ` ${about}`),
    picture(storage, about, drawn, total),
    symbolic.length > 0
      ? soft(`Of symbolic place, not drawn: ${symbolic.map(span => `${span.role} ${span.name}`).join(', ')}.`)
      : null
  );
}

function drawnSpan(span: Span, tensor: TensorInfo | undefined): Drawn[] {
  if (span.start === null || span.stop === null) {
    return [];
  }
  const found = tensor === undefined ? null : runs(tensor, span.start);
  // Believe the tensor's strides only where they end where the span does.
  const fits = found !== null && (found.at(-1)?.stop ?? span.start) === span.stop;
  return [{ span, start: span.start, stop: span.stop, runs: fits ? found : null }];
}

function sentence({ span, start, stop, runs: parts }: Drawn): string {
  const gaps = parts !== null && parts.length > 1 ? ` in ${parts.length} runs` : '';
  const size = stop === start ? 'no bytes' : `bytes ${grouped(start)} to ${grouped(stop)}${gaps}`;
  return `${span.role} ${span.name}: ${size}${span.mutated ? ', mutated' : ''}`;
}

function picture(storage: Storage, about: string, drawn: readonly Drawn[], total: number): SVGSVGElement {
  const id = uniqueId();
  const percent = (bytes: number): string => `${(100 * bytes) / total}%`;
  const written = union(
    drawn.filter(each => each.span.mutated).flatMap(each => each.runs ?? [{ start: each.start, stop: each.stop }])
  );
  // One tensor that has all of the storage would be the same bar once more.
  const [only] = drawn;
  const whole = drawn.length === 1 && only?.start === 0 && only.stop === total && (only.runs?.length ?? 1) === 1;
  const top = whole ? 0 : BAR + 6;
  const image = svg(
    'svg',
    {
      'data-storage': storage.number,
      role: 'img',
      'aria-label': `Storage ${storage.number}, ${about}. ${drawn.map(sentence).join('; ')}.`,
      width: '100%',
      height: top + drawn.length * ROW + AXIS
    },
    hatching(id),
    ...(whole
      ? []
      : [
          svg('rect', { class: 'al-whole', x: 0, y: 1, width: '100%', height: BAR - 2, rx: 2 }),
          ...written.map(range => hatched(range, 1, BAR - 2, percent, id))
        ]),
    ...drawn.map((each, index) => spanRow(each, top + index * ROW, total, percent, id)),
    axis(top + drawn.length * ROW, total, percent)
  );
  return image;
}

function spanRow(
  each: Drawn,
  y: number,
  total: number,
  percent: (bytes: number) => string,
  id: string
): SVGGElement {
  const { span, start, stop } = each;
  const parts = each.runs ?? [{ start, stop }];
  // A label begins where its bytes do, or ends where they do if they lie to the right.
  const right = start > total * 0.55;
  const label = svg(
    'text',
    { class: 'al-span-label', x: percent(right ? stop : start), y: y + 12, 'text-anchor': right ? 'end' : 'start' },
    sentence(each)
  );
  const boxes = parts.flatMap(range => {
    const box = svg('rect', {
      class: `al-span-${span.role === 'input' ? 'input' : 'output'}`,
      x: percent(range.start),
      y: y + 16,
      width: percent(Math.max(range.stop - range.start, 0)),
      height: BOX,
      rx: parts.length > 1 ? 0 : 2
    });
    return span.mutated ? [box, hatched(range, y + 16, BOX, percent, id)] : [box];
  });
  return svg(
    'g',
    { 'data-span': span.name, 'data-role': span.role, 'data-mutated': String(span.mutated) },
    svg('title', {}, sentence(each)),
    ...boxes,
    label
  );
}

function hatched(range: Range, y: number, height: number, percent: (bytes: number) => string, id: string): SVGElement {
  const width = percent(range.stop - range.start);
  return svg('rect', { class: 'al-hatch', x: percent(range.start), y, width, height, fill: `url(#${id})` });
}

function hatching(id: string): SVGDefsElement {
  const shape = { id, width: 5, height: 5, patternUnits: 'userSpaceOnUse', patternTransform: 'rotate(45)' };
  return svg('defs', {}, svg('pattern', shape, svg('rect', { class: 'al-hatch-line', width: 2, height: 5 })));
}

/** The scale: multiples of a power of two, about five of them. */
function axis(y: number, total: number, percent: (bytes: number) => string): SVGGElement {
  const step = 2 ** Math.max(Math.ceil(Math.log2(total / 5)), 0);
  const ticks = [0];
  for (let tick = step; tick < total - step * 0.45; tick += step) {
    ticks.push(tick);
  }
  ticks.push(total);
  return svg(
    'g',
    { class: 'al-axis', 'aria-hidden': 'true' },
    ...ticks.flatMap(tick => [
      svg('line', { x1: percent(tick), x2: percent(tick), y1: y + 1, y2: y + 5 }),
      svg(
        'text',
        { x: percent(tick), y: y + 15, 'text-anchor': tick === 0 ? 'start' : tick === total ? 'end' : 'middle' },
        tick === total ? `${grouped(tick)} B` : grouped(tick)
      )
    ])
  );
}
