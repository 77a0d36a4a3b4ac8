/** Bars of bytes: patterns for the bytes that are written or read, and the axis below a bar. */

import { union } from '../model/layout';
import type { IRange } from '../model/layout';
import { grouped } from '../model/words';
import { svg } from './dom';

/** Gaps smaller than this fraction of the width are not drawn, because they would be invisible. */
const FINEST = 1 / 1500;

/** Heights in pixels: the bar of a storage, the row of a tensor, the box in the row, and the axis. */
export const BAR = 16;
export const ROW = 30;
export const BOX = 11;
export const AXIS = 18;

/**
 * The bytes with a mark: in the ranges of `all`, every byte is written; in the ranges of `some`, perhaps not every byte;
 * the ranges of `read` are read.
 */
export interface IMarks {
  readonly all?: readonly IRange[];
  readonly some?: readonly IRange[];
  readonly read?: readonly IRange[];
}

/** Marks on bytes. */
export function hatchRects(marks: IMarks, y: number, height: number, total: number, id: string): SVGElement[] {
  return (['read', 'some', 'all'] as const).flatMap(kind =>
    union(marks[kind] ?? [], total * FINEST).map(range =>
      hatchRect(range, y, height, bytes => `${(100 * bytes) / total}%`, id, kind)
    )
  );
}

/** A mark on a range of bytes. */
export function hatchRect(
  range: IRange,
  y: number,
  height: number,
  percent: (bytes: number) => string,
  id: string,
  kind: 'all' | 'some' | 'read'
): SVGElement {
  const width = percent(range.stop - range.start);
  const look = { class: `al-hatch al-hatch-${kind}`, fill: `url(#${id}-${kind})` };
  return svg('rect', { ...look, x: percent(range.start), y, width, height });
}

/** The patterns of the marks: hatched for writes, dots for reads. Their ids begin with `id`. */
export function hatchPatterns(id: string): SVGDefsElement {
  const shape = (kind: string, side: number): Record<string, string | number> => ({
    ...{ id: `${id}-${kind}`, width: side, height: side },
    ...{ patternUnits: 'userSpaceOnUse', patternTransform: 'rotate(45)' }
  });
  return svg(
    'defs',
    {},
    svg('pattern', shape('all', 5), svg('rect', { class: 'al-hatch-line', width: 2, height: 5 })),
    svg('pattern', shape('some', 9), svg('rect', { class: 'al-hatch-line', width: 1, height: 9 })),
    svg('pattern', shape('read', 4), svg('circle', { class: 'al-read-dot', cx: 2, cy: 2, r: 1.1 }))
  );
}

/** The axis below a storage, with about five ticks at multiples of a power of two. */
export function axis(y: number, total: number, percent: (bytes: number) => string): SVGGElement {
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
