/** Draw a step of a program in a storage: the tensors, and the bytes that the step reads and writes through them. */

import type { Access, Step } from '../model/report';
import { bytesText, isCall, marksIn, runsText, storageName, tensorName } from '../model/steps';
import type { IStepMarks, IStepStorage, IStepTensor } from '../model/steps';
import { listed } from '../model/words';
import { hatchPatterns, hatchRects } from '../view/bars';
import { h, svg, uniqueId } from '../view/dom';

/** At most this many tensors of a storage have a row. */
const MOST_TENSORS = 8;

/** The height of the box of a tensor, in pixels. */
const BOX = 14;

/**
 * The tensors of a storage that have a row at a step, and the number of rows. If there are few tensors, the number of rows
 * is the same at all steps, and a tensor keeps its row.
 */
export function rowsOf(
  { number, tensors }: IStepStorage,
  step: Step,
  index: number
): { readonly rows: readonly IStepTensor[]; readonly count: number } {
  const of = (role: IStepTensor['role']): readonly IStepTensor[] =>
    tensors.filter(each => each.role === 'input' || each.role === role);
  const count = Math.max(of('program').length, of('epilogue').length);
  const candidates = of(isCall(step) ? 'program' : 'epilogue');
  if (count <= MOST_TENSORS) {
    return { rows: candidates, count };
  }
  const names = [...step.reads, ...step.writes, ...step.makes]
    .filter(access => access.storage === number)
    .map(access => tensorName(step, access));
  const alive = candidates.filter(each => each.from <= index);
  const chosen = [...alive.filter(each => names.includes(each.name)), ...[...alive].reverse()];
  const rows = new Set(chosen.slice(0, MOST_TENSORS));
  return { rows: alive.filter(each => rows.has(each)), count: Math.min(alive.length, MOST_TENSORS) };
}

/** The row of a tensor: its name, its bytes, and the marks of the bytes that the step reads and writes through it. */
export function tensorRow(
  tensor: IStepTensor,
  step: Step,
  { number, nbytes }: IStepStorage,
  index: number,
  y: number,
  percent: (bytes: number) => string,
  id: string
): SVGGElement {
  const { name, role } = tensor;
  const parts = tensor.runs ?? [];
  const marks = marksIn(step, number, name);
  const done = [
    tensor.from === index && role !== 'input' ? (role === 'program' ? 'made now' : 'made again now') : '',
    marks.read.length > 0 ? 'read' : '',
    marks.all.length + marks.some.length > 0 ? 'written' : ''
  ].filter(each => each !== '');
  const text = `${name}: ${runsText(tensor.runs)}${done.length > 0 ? ` – ${done.join(', ')}` : ''}`;
  const start = parts[0]?.start ?? 0;
  const inRightHalf = start > nbytes * 0.55;
  const label = { class: 'al-span-label', x: percent(inRightHalf ? nbytes : start), y: y + 11 };
  return svg(
    'g',
    { 'data-tensor': name, 'data-role': role, class: tensor.from === index && role !== 'input' ? 'al-new' : '' },
    svg('title', {}, text),
    ...parts.map(part =>
      svg('rect', {
        class: `al-tensor-${role}`,
        x: percent(part.start),
        y: y + 14,
        width: percent(part.stop - part.start),
        height: BOX
      })
    ),
    ...markRects(marks, y + 14, BOX, nbytes, id),
    svg('text', { ...label, 'text-anchor': inRightHalf ? 'end' : 'start' }, text)
  );
}

/** The marks in a bar: reads in its upper half, writes in its lower half. */
export function markRects(marks: IStepMarks, y: number, height: number, total: number, id: string): SVGElement[] {
  return [
    ...hatchRects({ read: marks.read }, y, height / 2, total, id),
    ...hatchRects({ all: marks.all, some: marks.some }, y + height / 2, height / 2, total, id)
  ];
}

/** Describe the bytes that a step reads, writes and makes, in all storages or in one. */
export function accessText(step: Step, number: number | null = null): string {
  const ofStorage = (accesses: readonly Access[]): readonly Access[] =>
    accesses.filter(each => number === null || each.storage === number);
  const text = (access: Access): string => {
    const place = `${bytesText(access.bytes)} of ${storageName(access.storage)}`;
    return access.tensor === '' || number !== null ? place : `${place} through ${access.tensor}`;
  };
  const reads = ofStorage(step.reads).map(text);
  const writes = ofStorage(step.writes).map(text);
  const makes = ofStorage(step.makes);
  const both = writes.filter(each => reads.includes(each));
  const onlyRead = ofStorage(step.reads).filter(each => !both.includes(text(each)));
  const views = makes.filter(each => each.nbytes === null);
  const parts: readonly (readonly [string, readonly string[]])[] = [
    // The map shows the bytes of all tensors; a list of many would hide the other facts.
    ['reads', onlyRead.length > 2 ? [listed(onlyRead.map(each => storageName(each.storage)))] : onlyRead.map(text)],
    ['reads and writes', both],
    ['writes', writes.filter(each => !reads.includes(each))],
    ['makes a view of', views.map(each => `${bytesText(each.bytes)} of ${storageName(each.storage)}`)],
    [
      'makes',
      makes.filter(each => each.nbytes !== null).map(each => `${storageName(each.storage)}, ${bytesText(each.bytes)}`)
    ]
  ];
  const texts = parts.filter(([, each]) => each.length > 0).map(([verb, each]) => `${verb} ${listed(each, 3)}`);
  const none = isCall(step) && number === null ? 'unknown bytes: the call takes a tensor subclass' : 'touches no bytes';
  return texts.join('; ') || none;
}

/** The key of the picture. */
export function legend(): HTMLElement {
  const sample = (word: string, ...shapes: readonly SVGElement[]): HTMLElement =>
    h('span', {}, svg('svg', { width: 26, height: BOX, 'aria-hidden': 'true', class: 'al-swatch' }, ...shapes), word);
  const marked = (kind: 'read' | 'all'): SVGElement[] => {
    const id = uniqueId();
    return [hatchPatterns(id), ...hatchRects({ [kind]: [{ start: 0, stop: 1 }] }, 2, BOX - 4, 1, id)];
  };
  const box = (kind: string): SVGElement =>
    svg('rect', { class: `al-tensor-${kind}`, x: 1, y: 2, width: 24, height: BOX - 4 });
  return h(
    'p',
    { class: 'al-key' },
    sample('read: dots', ...marked('read')),
    sample('written: hatched', ...marked('all')),
    sample(
      'written by the program, not yet in the caller’s memory',
      svg('rect', { class: 'al-pending', x: 1, y: 5, width: 24, height: 4 })
    ),
    sample('input', box('input')),
    sample('tensor of the program: dashed', box('program')),
    sample('made by the epilogue', box('epilogue')),
    h('span', {}, 'Each bar has its own scale; its axis counts bytes.')
  );
}
