/** The storage map: each storage as a bar of bytes, each tensor in it as the bytes that it has. */

import { common, runs, union, windowRuns } from '../model/layout';
import type { Range } from '../model/layout';
import { countsOf, inTrees } from '../model/counts';
import type { Graph, Input, Output, Span, Storage, TensorInfo } from '../model/report';
import { amount, dataSize, grouped, known, listed, notHere } from '../model/words';
import { fold } from './context';
import type { Context, Entry } from './context';
import { h, soft, svg, uniqueId } from './dom';
import type { Child } from './dom';
import { graphHeading } from './graph';
import { table } from './table';
import { partName } from './tensor';

/** How many storages of one graph are drawn before the reader asks for the rest; of few, all that tell something are. */
const MOST_STORAGES = 40;
const FEW_STORAGES = 8;

/** In memory of no more elements than this each is marked off. */
const FEW_ELEMENTS = 64;

/** Gaps of less than this part of the width are not seen. */
const FINEST = 1 / 1500;

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

/** Bytes that are written: all of each range, or some. */
interface Marks {
  readonly all: readonly Range[];
  readonly some: readonly Range[];
}

/** A span with the bytes that belong to it. */
interface Drawn {
  readonly span: Span;
  readonly start: number;
  readonly stop: number;
  /** Null where only the ends are known. */
  readonly runs: readonly Range[] | null;
  readonly marks: Marks;
  /** How many bytes it has. */
  readonly size: number;
  /** How many bytes an element has; null where that is not known. */
  readonly item: number | null;
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
  const telling = storages.filter(storage => !['unwritten', 'unknown'].includes(kindOf(storage)));
  const drawn = telling.length <= FEW_STORAGES ? telling : telling.filter(storage => kindOf(storage) === 'part');
  const rest = storages.filter(storage => !drawn.includes(storage));
  const more = drawn.slice(MOST_STORAGES);
  const counts = countsOf(entry.graph);
  const left = counts.storages - storages.length;
  return [
    graphHeading(context, entry, `${amount(counts.storages, 'storage')}, ${grouped(counts.shared)} shared`),
    wrappers(context, entry),
    drawn.length > 0 ? map(drawn.slice(0, MOST_STORAGES)) : null,
    more.length > 0
      ? fold(context, `storages more ${entry.key}`, [`${amount(more.length, 'more storage')}: ${sum(more)}`], () => [map(more)])
      : null,
    ...(['whole', 'made', 'unwritten', 'unknown'] as const).map(kind => {
      const alike = rest.filter(storage => kindOf(storage) === kind);
      return alike.length > 0 ? folded(context, entry, kind, alike) : null;
    }),
    left > 0 ? soft(notHere(left, 'storage')) : null
  ];
}

/** An argument or output that is a wrapper, or a wrapper in one. */
interface Wrapper {
  readonly row: Input | Output;
  readonly depth: number;
  readonly parts: readonly (Input | Output)[];
  readonly others: readonly string[];
}

/** Where the memory below each wrapper is, and who else has it. */
function wrappers(context: Context, entry: Entry): HTMLElement | null {
  const { inputs, outputs, storages } = entry.graph;
  const owners = new Map(storages.map(storage => [storage.number, holders(storage)]));
  const rows = [inputs, outputs].flatMap((rows: readonly (Input | Output)[]) =>
    inTrees(rows).flatMap(({ row, whole, depth }): Wrapper[] => {
      const parts = rows.filter(each => each.part_of === row.name && !('kind' in each && each.kind === 'gradient'));
      const below = parts.map(part => (part.storage === null ? undefined : owners.get(part.storage)) ?? []);
      const others = below.flat().filter(name => name !== whole.name && name !== `a part of ${whole.name}`);
      return parts.length === 0 ? [] : [{ row, depth, parts, others: [...new Set(others)] }];
    })
  );
  if (rows.length === 0) {
    return null;
  }
  return table<Wrapper>(context, {
    name: 'wrappers',
    label: 'Wrappers and the memory below them',
    columns: [
      { name: 'name', title: 'wrapper', kind: 'code', cell: ({ row, depth }) => partName(row, depth) },
      { name: 'tensor', title: 'type', lesser: '', cell: ({ row }) => row.tensor?.type_name.split('.').at(-1) ?? '' },
      {
        name: 'parts',
        title: 'parts',
        help: 'What it consists of, and the storage of each',
        kind: 'code',
        cell: ({ row, parts }) => parts.map(part => partText(row, part)).join(', ')
      },
      {
        name: 'shared',
        title: 'memory shared with',
        help: 'What else has some of the memory below it',
        kind: 'words',
        cell: ({ others }) => listed(others) || '–'
      }
    ],
    rows,
    key: ({ row }) => row.name,
    data: { 'data-frame': entry.frame.name, 'data-graph': String(entry.graph.index) }
  });
}

/** Write `.a #7`. */
function partText(wrapper: Input | Output, part: Input | Output): string {
  const name = part.name.startsWith(`${wrapper.name}.`) ? part.name.slice(wrapper.name.length) : part.name;
  return part.storage === null ? name : `${name} #${part.storage}`;
}

/** What has its memory in a storage: names, and wrappers of which a part has. */
function holders(storage: Storage): string[] {
  return [...new Set(storage.spans.map(span => (span.part_of === '' ? span.name : `a part of ${span.part_of}`)))];
}

type Kind = 'part' | 'whole' | 'made' | 'unwritten' | 'unknown';

/** What a storage tells: of one tensor little, if it is written as a whole, made by the graph or left as it was. */
function kindOf(storage: Storage): Kind {
  const [only, another] = storage.spans;
  if (only === undefined || another !== undefined) {
    return 'part';
  }
  if (only.mutated === null) {
    return 'unknown';
  }
  if (only.mutated) {
    return only.writes !== null && only.writes === storage.nbytes ? 'whole' : 'part';
  }
  return storage.owner === 'input' ? 'unwritten' : 'made';
}

const FOLDED = {
  whole: 'with one tensor each, written as a whole',
  made: 'with one tensor each, made by the graph',
  unwritten: 'with one tensor each, unwritten',
  unknown: 'with one tensor each, of a graph that was not traced'
};

function sum(storages: readonly Storage[]): string {
  return dataSize(storages.reduce((bytes, storage) => bytes + (known(storage.nbytes) ?? 0), 0));
}

/** Storages that are only counted, in a line that opens to a table. */
function folded(context: Context, entry: Entry, kind: keyof typeof FOLDED, storages: readonly Storage[]): HTMLElement {
  const title = `${amount(storages.length, 'storage')} ${FOLDED[kind].replace(storages.length === 1 ? ' each' : '', '')}: ${sum(storages)}`;
  return fold(context, `storages ${kind} ${entry.key}`, [title], () => [
    table<Storage>(context, {
      name: 'storages',
      label: title,
      columns: [
        { name: 'storage', title: 'storage', cell: storage => `#${storage.number}` },
        { name: 'tensor', title: 'tensor', kind: 'code', cell: storage => storage.spans[0]?.name ?? '' },
        { name: 'nbytes', title: 'size', kind: 'number', value: storage => known(storage.nbytes), cell: storage => dataSize(storage.nbytes) },
        { name: 'device', title: 'device', cell: storage => storage.device }
      ],
      rows: storages,
      key: storage => String(storage.number)
    })
  ]);
}

/** What the shapes mean. */
function key(): HTMLElement {
  const sample = (kind: 'whole' | 'input' | 'output' | 'all' | 'some', word: string): HTMLElement => {
    const id = uniqueId();
    const picture = svg('svg', { width: 26, height: BOX, 'aria-hidden': 'true', class: 'al-swatch' });
    if (kind === 'all' || kind === 'some') {
      picture.append(hatching(id), hatched({ start: 0, stop: 1 }, 0, BOX, bytes => `${100 * bytes}%`, id, kind));
    } else {
      picture.append(svg('rect', { class: kind === 'whole' ? 'al-whole' : `al-span-${kind}`, x: 1, y: 1, width: 24, height: BOX - 2, rx: 2 }));
    }
    return h('span', {}, picture, word);
  };
  return h(
    'p',
    { class: 'al-key' },
    sample('whole', 'the whole storage, where tensors share it: grey'),
    sample('input', 'input: solid'),
    sample('output', 'output: outlined'),
    sample('all', 'bytes that the function writes: hatched'),
    sample('some', 'some of these bytes: hatched lightly')
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
  const wrapped = storage.spans.some(span => span.part_of !== '');
  const about = `${dataSize(storage.nbytes)} on ${storage.device}, ${owner}${wrapped ? `: ${listed(holders(storage))}` : ''}`;
  const marks = marksOf(storage);
  const drawn = storage.spans.flatMap(span => drawnSpan(span, tensors.get(span.name), marks));
  const symbolic = storage.spans.filter(span => span.start === null || span.stop === null);
  const total = Math.max(known(storage.nbytes) ?? 0, ...drawn.map(each => each.stop), 1);
  return h(
    'figure',
    { class: 'al-storage' },
    h('figcaption', {}, h('b', {}, `#${storage.number}`), ` ${about}`),
    picture(storage, about, drawn, total, marks),
    symbolic.length > 0
      ? soft(`Of symbolic place, not drawn: ${symbolic.map(span => `${span.role} ${span.name}`).join(', ')}.`)
      : null
  );
}

/** Which bytes of a storage are written; null where a report does not know more than of which tensors. */
function marksOf(storage: Storage): Marks | null {
  if (storage.written === null) {
    return null;
  }
  const found = storage.written.map(windowRuns);
  const ranges = (whole: boolean): readonly Range[] =>
    union(found.filter(each => each.whole === whole).flatMap(each => each.runs));
  return { all: ranges(true), some: ranges(false) };
}

function drawnSpan(span: Span, tensor: TensorInfo | undefined, marks: Marks | null): Drawn[] {
  const { start, stop } = span;
  if (start === null || stop === null) {
    return [];
  }
  const found = tensor === undefined ? null : runs(tensor, start);
  // Believe the tensor's strides only where they end where the span does.
  const fits = found !== null && (found.at(-1)?.stop ?? start) === stop;
  const own = fits ? found : [{ start, stop }];
  const mine =
    !span.mutated || start === stop
      ? { all: [], some: [] }
      : marks === null
        ? { all: own, some: [] }
        : { all: common(own, marks.all), some: common(own, marks.some) };
  const elements = tensor?.shape.reduce<number>((product, size) => product * (known(size) ?? 0), 1) ?? 0;
  const nbytes = typeof tensor?.nbytes === 'number' ? tensor.nbytes : stop - start;
  const size = fits ? found.reduce((bytes, run) => bytes + run.stop - run.start, 0) : Math.min(nbytes, stop - start);
  const item = elements > 0 ? nbytes / elements : null;
  return [{ span, start, stop, runs: fits ? found : null, marks: mine, size, item }];
}

function sentence(drawn: Drawn): string {
  const { span, start, stop, runs: parts } = drawn;
  const gaps = parts !== null && parts.length > 1 ? ` in ${grouped(parts.length)} runs` : '';
  const size = stop === start ? 'no bytes' : `bytes ${grouped(start)} to ${grouped(stop)}${gaps}`;
  return `${span.role} ${span.name}: ${size}${span.mutated ? `, ${writes(drawn)}` : ''}`;
}

/** How much of a tensor that the function changes is written. */
function writes({ span, size, marks }: Drawn): string {
  const more = span.may_write;
  if (span.writes === null) {
    return marks.some.length > 0 ? 'writes some of these bytes' : 'mutated';
  }
  if (span.writes === 0) {
    const some = more === size ? 'these' : `${grouped(more)} of its`;
    return more === 0 ? 'writes none of its bytes' : `writes some of ${some} bytes`;
  }
  const all = span.writes === size ? `all of its ${grouped(size)} bytes` : `${grouped(span.writes)} of ${grouped(size)} bytes`;
  return `writes ${all}${more > 0 ? `, and some of ${grouped(more)} more` : ''}`;
}

function picture(storage: Storage, about: string, drawn: readonly Drawn[], total: number, marks: Marks | null): SVGSVGElement {
  const id = uniqueId();
  const percent = (bytes: number): string => `${(100 * bytes) / total}%`;
  const written = marks ?? { all: union(drawn.flatMap(each => each.marks.all)), some: [] };
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
          ...hatches(written, 1, BAR - 2, total, id)
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
  const boxes = parts.map(range =>
    svg('rect', {
      class: `al-span-${span.role === 'input' ? 'input' : 'output'}`,
      x: percent(range.start),
      y: y + 16,
      width: percent(Math.max(range.stop - range.start, 0)),
      height: BOX,
      rx: parts.length > 1 ? 0 : 2
    })
  );
  return svg(
    'g',
    { 'data-span': span.name, 'data-role': span.role, 'data-mutated': String(span.mutated) },
    svg('title', {}, sentence(each)),
    ...boxes,
    ...elementMarks(each, parts, y + 16, total, percent),
    ...hatches(each.marks, y + 16, BOX, total, id),
    label
  );
}

/** Where memory has few elements, lines between them. */
function elementMarks(
  { span, item }: Drawn,
  parts: readonly Range[],
  y: number,
  total: number,
  percent: (bytes: number) => string
): SVGElement[] {
  if (item === null || !Number.isInteger(item) || item * FEW_ELEMENTS < total) {
    return [];
  }
  return parts.flatMap(({ start, stop }) =>
    Array.from({ length: Math.ceil((stop - start) / item) - 1 }, (_, index) => percent(start + (index + 1) * item)).map(x =>
      svg('line', { class: `al-element-${span.role === 'input' ? 'input' : 'output'}`, x1: x, x2: x, y1: y + 1, y2: y + BOX - 1 })
    )
  );
}

function hatches(marks: Marks, y: number, height: number, total: number, id: string): SVGElement[] {
  return (['some', 'all'] as const).flatMap(kind =>
    union(marks[kind], total * FINEST).map(range =>
      hatched(range, y, height, bytes => `${(100 * bytes) / total}%`, id, kind)
    )
  );
}

function hatched(
  range: Range,
  y: number,
  height: number,
  percent: (bytes: number) => string,
  id: string,
  kind: 'all' | 'some'
): SVGElement {
  const width = percent(range.stop - range.start);
  const look = { class: `al-hatch al-hatch-${kind}`, fill: `url(#${id}-${kind})` };
  return svg('rect', { ...look, x: percent(range.start), y, width, height });
}

function hatching(id: string): SVGDefsElement {
  const shape = (kind: string, side: number): Record<string, string | number> => ({
    ...{ id: `${id}-${kind}`, width: side, height: side },
    ...{ patternUnits: 'userSpaceOnUse', patternTransform: 'rotate(45)' }
  });
  return svg(
    'defs',
    {},
    svg('pattern', shape('all', 5), svg('rect', { class: 'al-hatch-line', width: 2, height: 5 })),
    svg('pattern', shape('some', 9), svg('rect', { class: 'al-hatch-line', width: 1, height: 9 }))
  );
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
