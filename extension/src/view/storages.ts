/**
 * The storage map. A storage is a bar of bytes. Below it, each of its tensors has a row with boxes for the tensor's
 * bytes.
 */

import { intersection, runs, union, windowRuns } from '../model/layout';
import type { IRange } from '../model/layout';
import { countsOf } from '../model/report';
import type { Graph, Group, Input, Output, Span, Storage, TensorInfo } from '../model/report';
import { inTrees } from '../model/rows';
import { amount, cutNotice, dataSize, grouped, listed, sizeValue } from '../model/words';
import { stepPlayer } from '../pictures/stepPlayer';
import { AXIS, BAR, BOX, ROW, axis, hatchPatterns, hatchRect, hatchRects } from './bars';
import type { IMarks } from './bars';
import { fold } from './context';
import type { IContext, IEntry } from './context';
import { h, soft, svg, uniqueId } from './dom';
import type { Child } from './dom';
import { cutGraphsNotice, graphHeading } from './graph';
import { table } from './table';
import { partName } from './tensor';

/** The page draws at most this many storages of one graph; a fold has the rest. */
const MOST_STORAGES = 40;

/** If a storage has at most this many elements, lines separate them. */
const FEW_ELEMENTS = 64;

const OWNERS: Readonly<Record<string, string>> = {
  input: 'memory of the caller',
  intermediate: 'made by the graph',
  output: 'made by the graph for one output'
};

/** A tensor in a storage (`span`), with the bytes that belong to it and the bytes that are written. */
interface IDrawn {
  readonly span: Span;
  readonly start: number;
  readonly stop: number;
  /** The runs of bytes that belong to the tensor; null if only the first and the last byte are known. */
  readonly runs: readonly IRange[] | null;
  readonly marks: Required<Omit<IMarks, 'read'>>;
  /** The number of bytes that belong to the tensor. */
  readonly size: number;
  /** The number of bytes of an element; null if unknown. */
  readonly elementSize: number | null;
}

/** Draw the panel. */
export function storagesPanel(context: IContext): Child[] {
  if (context.chosen.length === 0) {
    return [soft('Nothing was compiled, so no storages were recorded.')];
  }
  return [...context.chosen.flatMap(entry => storagesOf(context, entry)), cutGraphsNotice(context)];
}

function storagesOf(context: IContext, entry: IEntry): Child[] {
  const { storages } = entry.graph;
  const tensors = tensorsOf(entry.graph);
  const map = (drawnStorages: readonly Storage[]): HTMLElement =>
    h(
      'div',
      { class: 'al-map', 'data-frame': entry.frame.name, 'data-graph': entry.graph.index },
      ...drawnStorages.map(storage => storageFigure(storage, tensors))
    );
  const groups = entry.graph.storage_groups;
  const drawn = storages.filter(({ group }) => group === null || groups[group] === undefined);
  const foldedStorages = drawn.slice(MOST_STORAGES);
  const counts = countsOf(entry.graph);
  const cutCount = counts.storages - drawn.length - groups.reduce((sum, group) => sum + group.count, 0);
  const whole = [
    drawn.length > 0 && entry === context.chosen[0] ? shapeLegend() : null,
    drawn.length > 0 ? map(drawn.slice(0, MOST_STORAGES)) : null,
    foldedStorages.length > 0
      ? fold(
          context,
          `storages more ${entry.key}`,
          [`${amount(foldedStorages.length, 'more storage')}: ${totalSize(foldedStorages)}`],
          () => [map(foldedStorages)]
        )
      : null,
    ...groups.map((group, number) => groupFold(context, entry, group, number)),
    cutCount > 0 ? soft(cutNotice(cutCount, 'storage')) : null
  ];
  return [
    graphHeading(context, entry, `${amount(counts.storages, 'storage')}, ${grouped(counts.shared)} shared`),
    wrappers(context, entry),
    ...stepPlayer(context, entry, whole)
  ];
}

/**
 * A wrapper subclass: an argument, an output, or an inner wrapper of one. `parts` are the rows of its parts, and
 * `others` the names of other tensors in the storages of these parts.
 */
interface IWrapper {
  readonly row: Input | Output;
  readonly depth: number;
  readonly parts: readonly (Input | Output)[];
  readonly others: readonly string[];
}

/** A table of the wrappers: the storages of their parts, and other tensors in these storages. */
function wrappers(context: IContext, entry: IEntry): HTMLElement | null {
  const { inputs, outputs, storages } = entry.graph;
  const owners = new Map(storages.map(storage => [storage.number, holders(storage)]));
  const rows = [inputs, outputs].flatMap((rows: readonly (Input | Output)[]) =>
    inTrees(rows).flatMap(({ row, outermost, depth }): IWrapper[] => {
      const parts = rows.filter(each => each.part_of === row.name && !('kind' in each && each.kind === 'gradient'));
      const ownersOfParts = parts.map(part => (part.storage === null ? undefined : owners.get(part.storage)) ?? []);
      const others = ownersOfParts
        .flat()
        .filter(name => name !== outermost.name && name !== `a part of ${outermost.name}`);
      return parts.length === 0 ? [] : [{ row, depth, parts, others: [...new Set(others)] }];
    })
  );
  if (rows.length === 0) {
    return null;
  }
  return table<IWrapper>(context, {
    name: 'wrappers',
    label: 'Wrappers and the memory below them',
    columns: [
      { name: 'name', title: 'wrapper', kind: 'code', cell: ({ row, depth }) => partName(row, depth) },
      { name: 'tensor', title: 'type', lesser: '', cell: ({ row }) => row.tensor?.type_name.split('.').at(-1) ?? '' },
      {
        name: 'parts',
        title: 'parts',
        help: 'Its parts, and the storage of each part',
        kind: 'code',
        cell: ({ row, parts }) => parts.map(part => partText(row, part)).join(', ')
      },
      {
        name: 'shared',
        title: 'memory shared with',
        help: 'Other tensors that share memory with its parts',
        kind: 'words',
        cell: ({ others }) => listed(others) || '–'
      }
    ],
    rows,
    key: ({ row }) => row.name,
    data: { 'data-frame': entry.frame.name, 'data-graph': String(entry.graph.index) }
  });
}

/** Write the attribute and the storage of a wrapper's part: `.a #7`. */
function partText(wrapper: Input | Output, part: Input | Output): string {
  const name = part.name.startsWith(`${wrapper.name}.`) ? part.name.slice(wrapper.name.length) : part.name;
  return part.storage === null ? name : `${name} #${part.storage}`;
}

/** Name everything with memory in a storage: a tensor by its name, the part of a wrapper as `a part of x`. */
function holders(storage: Storage): string[] {
  return [...new Set(storage.spans.map(span => (span.part_of === '' ? span.name : `a part of ${span.part_of}`)))];
}

function totalSize(storages: readonly Storage[]): string {
  return dataSize(storages.reduce((bytes, storage) => bytes + (sizeValue(storage.nbytes) ?? 0), 0));
}

/** A fold for a group of storages that are not drawn: its title has their number and size, its content is a table. */
function groupFold(context: IContext, entry: IEntry, group: Group, number: number): HTMLElement {
  const title = `${group.title}: ${dataSize(group.nbytes)}`;
  const rows = entry.graph.storages.filter(storage => storage.group === number);
  return fold(context, `storages ${number} ${entry.key}`, [title], () => [
    table<Storage>(context, {
      name: 'storages',
      label: title,
      columns: [
        { name: 'storage', title: 'storage', cell: storage => `#${storage.number}` },
        { name: 'tensor', title: 'tensor', kind: 'code', cell: storage => storage.spans[0]?.name ?? '' },
        {
          name: 'nbytes',
          title: 'size',
          kind: 'number',
          value: storage => sizeValue(storage.nbytes),
          cell: storage => dataSize(storage.nbytes)
        },
        { name: 'device', title: 'device', cell: storage => storage.device }
      ],
      rows,
      total: group.count,
      key: storage => String(storage.number)
    })
  ]);
}

/** The key of the map: the meaning of each shape. */
function shapeLegend(): HTMLElement {
  const sample = (kind: 'whole' | 'input' | 'output' | 'all' | 'some', word: string): HTMLElement => {
    const id = uniqueId();
    const picture = svg('svg', { width: 26, height: BOX, 'aria-hidden': 'true', class: 'al-swatch' });
    if (kind === 'all' || kind === 'some') {
      picture.append(
        hatchPatterns(id),
        hatchRect({ start: 0, stop: 1 }, 0, BOX, bytes => `${100 * bytes}%`, id, kind)
      );
    } else {
      picture.append(
        svg('rect', {
          class: kind === 'whole' ? 'al-whole' : `al-span-${kind}`,
          x: 1,
          y: 1,
          width: 24,
          height: BOX - 2,
          rx: 2
        })
      );
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
    sample('some', 'some of these bytes: hatched lightly'),
    h('span', {}, 'Each bar has its own scale; its axis counts bytes.')
  );
}

function tensorsOf(graph: Graph): ReadonlyMap<string, TensorInfo> {
  const tensors = new Map<string, TensorInfo>();
  for (const row of [...graph.inputs, ...graph.outputs]) {
    if (row.tensor !== null) {
      tensors.set(row.name, row.tensor);
    }
  }
  return tensors;
}

function storageFigure(storage: Storage, tensors: ReadonlyMap<string, TensorInfo>): HTMLElement {
  const owner = OWNERS[storage.owner] ?? storage.owner;
  const wrapped = storage.spans.some(span => span.part_of !== '');
  const description = `${dataSize(storage.nbytes)} on ${storage.device}, ${owner}${wrapped ? `: ${listed(holders(storage))}` : ''}`;
  const marks = marksOf(storage);
  const drawn = storage.spans.flatMap(span => drawnSpan(span, tensors.get(span.name), marks));
  const symbolic = storage.spans.filter(span => span.start === null || span.stop === null);
  const total = Math.max(sizeValue(storage.nbytes) ?? 0, ...drawn.map(each => each.stop), 1);
  return h(
    'figure',
    { class: 'al-storage' },
    h('figcaption', {}, h('b', {}, `#${storage.number}`), ` ${description}`),
    picture(storage, description, drawn, total, marks),
    symbolic.length > 0
      ? soft(`Of symbolic place, not drawn: ${symbolic.map(span => `${span.role} ${span.name}`).join(', ')}.`)
      : null
  );
}

/** The bytes of a storage that are written; null if the report knows only which tensors are written. */
function marksOf(storage: Storage): IDrawn['marks'] | null {
  if (storage.written === null) {
    return null;
  }
  const windows = storage.written.map(windowRuns);
  const ranges = (whole: boolean): readonly IRange[] =>
    union(windows.filter(window => window.whole === whole).flatMap(window => window.runs));
  return { all: ranges(true), some: ranges(false) };
}

function drawnSpan(span: Span, tensor: TensorInfo | undefined, marks: IDrawn['marks'] | null): IDrawn[] {
  const { start, stop } = span;
  if (start === null || stop === null) {
    return [];
  }
  const tensorRuns = tensor === undefined ? null : runs(tensor, start);
  // Use the runs that the tensor's strides give only if they end at the end of the span.
  const fits = tensorRuns !== null && (tensorRuns.at(-1)?.stop ?? start) === stop;
  const spanRuns = fits ? tensorRuns : [{ start, stop }];
  const spanMarks =
    !span.mutated || start === stop
      ? { all: [], some: [] }
      : marks === null
        ? { all: spanRuns, some: [] }
        : { all: intersection(spanRuns, marks.all), some: intersection(spanRuns, marks.some) };
  const elements = tensor?.shape.reduce<number>((product, size) => product * (sizeValue(size) ?? 0), 1) ?? 0;
  const nbytes = typeof tensor?.nbytes === 'number' ? tensor.nbytes : stop - start;
  const size = fits
    ? tensorRuns.reduce((bytes, run) => bytes + run.stop - run.start, 0)
    : Math.min(nbytes, stop - start);
  const elementSize = elements > 0 ? nbytes / elements : null;
  return [{ span, start, stop, runs: fits ? tensorRuns : null, marks: spanMarks, size, elementSize }];
}

function sentence(drawn: IDrawn): string {
  const { span, start, stop, runs: parts } = drawn;
  const gaps = parts !== null && parts.length > 1 ? ` in ${grouped(parts.length)} runs` : '';
  const size = stop === start ? 'no bytes' : `bytes ${grouped(start)} to ${grouped(stop)}${gaps}`;
  return `${span.role} ${span.name}: ${size}${span.mutated ? `, ${writes(drawn)}` : ''}`;
}

/** Say how many bytes of a tensor that the function changes are written. */
function writes({ span, size, marks }: IDrawn): string {
  const maybeWritten = span.may_write;
  if (span.writes === null) {
    return marks.some.length > 0 ? 'writes some of these bytes' : 'mutated';
  }
  if (span.writes === 0) {
    const ofBytes = maybeWritten === size ? 'these' : `${grouped(maybeWritten)} of its`;
    return maybeWritten === 0 ? 'writes none of its bytes' : `writes some of ${ofBytes} bytes`;
  }
  const writtenBytes =
    span.writes === size ? `all of its ${grouped(size)} bytes` : `${grouped(span.writes)} of ${grouped(size)} bytes`;
  return `writes ${writtenBytes}${maybeWritten > 0 ? `, and some of ${grouped(maybeWritten)} more` : ''}`;
}

function picture(
  storage: Storage,
  description: string,
  drawn: readonly IDrawn[],
  total: number,
  marks: IDrawn['marks'] | null
): SVGSVGElement {
  const id = uniqueId();
  const percent = (bytes: number): string => `${(100 * bytes) / total}%`;
  const storageMarks = marks ?? { all: union(drawn.flatMap(each => each.marks.all)), some: [] };
  // If one tensor covers the whole storage, leave out the storage's bar, because it would look like the tensor's box.
  const [firstSpan] = drawn;
  const coversStorage =
    drawn.length === 1 && firstSpan?.start === 0 && firstSpan.stop === total && (firstSpan.runs?.length ?? 1) === 1;
  const top = coversStorage ? 0 : BAR + 6;
  const image = svg(
    'svg',
    {
      'data-storage': storage.number,
      role: 'img',
      'aria-label': `Storage ${storage.number}, ${description}. ${drawn.map(sentence).join('; ')}.`,
      width: '100%',
      height: top + drawn.length * ROW + AXIS
    },
    hatchPatterns(id),
    ...(coversStorage
      ? []
      : [
          svg('rect', { class: 'al-whole', x: 0, y: 1, width: '100%', height: BAR - 2, rx: 2 }),
          ...hatchRects(storageMarks, 1, BAR - 2, total, id)
        ]),
    ...drawn.map((each, index) => spanRow(each, top + index * ROW, total, percent, id)),
    axis(top + drawn.length * ROW, total, percent)
  );
  return image;
}

function spanRow(drawn: IDrawn, y: number, total: number, percent: (bytes: number) => string, id: string): SVGGElement {
  const { span, start, stop } = drawn;
  const parts = drawn.runs ?? [{ start, stop }];
  // A label begins at the tensor's first byte. In the right half, it ends at the tensor's last byte.
  const inRightHalf = start > total * 0.55;
  const label = svg(
    'text',
    {
      class: 'al-span-label',
      x: percent(inRightHalf ? stop : start),
      y: y + 12,
      'text-anchor': inRightHalf ? 'end' : 'start'
    },
    sentence(drawn)
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
    svg('title', {}, sentence(drawn)),
    ...boxes,
    ...elementMarks(drawn, parts, y + 16, total, percent),
    ...hatchRects(drawn.marks, y + 16, BOX, total, id),
    label
  );
}

/** Lines between the elements of a tensor; none if the storage has more than `FEW_ELEMENTS` elements. */
function elementMarks(
  { span, elementSize }: IDrawn,
  parts: readonly IRange[],
  y: number,
  total: number,
  percent: (bytes: number) => string
): SVGElement[] {
  if (elementSize === null || !Number.isInteger(elementSize) || elementSize * FEW_ELEMENTS < total) {
    return [];
  }
  return parts.flatMap(({ start, stop }) =>
    Array.from({ length: Math.ceil((stop - start) / elementSize) - 1 }, (_, index) =>
      percent(start + (index + 1) * elementSize)
    ).map(x =>
      svg('line', {
        class: `al-element-${span.role === 'input' ? 'input' : 'output'}`,
        x1: x,
        x2: x,
        y1: y + 1,
        y2: y + BOX - 1
      })
    )
  );
}
