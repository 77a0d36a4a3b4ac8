/** Draw the boxes and edges of a graph's picture as SVG, from their positions. */

import { curveBasis, line, linkHorizontal, linkVertical } from 'd3-shape';

import { dataSize } from '../model/words';
import { svg } from '../view/dom';
import { groupText, savedBytes, valueText } from './graphDetails';
import type { IBox, IPlaced } from './graphLayout';
import { isGroup, idOf } from './graphModel';
import type { Branch, IItem, IStageTree } from './graphModel';
import { linksOf, shownOf } from './graphLinks';
import type { ICrossLink, ILinks, IsOpen } from './graphLinks';

export interface IRect {
  readonly x: number;
  readonly y: number;
  readonly width: number;
  readonly height: number;
}

type Point = readonly [number, number];

/** In pixels at a scale of 1: the space between the halves, the heights of boxes, and a letter. */
const CUT = 150;
const NODE = 36;
const TITLE = 20;
const LETTER = 6.6;
const [NARROW, WIDE] = [90, 210];

const spline = line<{ x: number; y: number }>()
  .x(point => point.x)
  .y(point => point.y)
  .curve(curveBasis);
const acrossPath = linkHorizontal<unknown, Point>();
const downPath = linkVertical<unknown, Point>();

/** A visible box: a node, a closed group or an open group. */
export interface IShown {
  readonly branch: Branch;
  readonly rect: IRect;
  readonly open: boolean;
  readonly level: number;
}

/** An edge between two boxes of one half: their ids, and its path. */
interface IEdge {
  readonly from: string;
  readonly to: string;
  readonly d: string;
}

/** All visible boxes with their positions, and their edges. */
export interface IScene {
  /** The visible boxes by their ids, each group before its members. */
  readonly boxes: ReadonlyMap<string, IShown>;
  readonly edges: readonly IEdge[];
  readonly links: ILinks;
  readonly width: number;
  readonly height: number;
  /** The right edge of the forward, and the left edge of the backward; null if the stage has one half. */
  readonly cut: Point | null;
}

/** The boxes to place: one for each half. */
export function boxesOf(tree: IStageTree, isOpen: IsOpen, compared: boolean): IBox[] {
  const { inside } = linksOf(tree, isOpen);
  const boxOf = (branch: Branch): IBox => {
    const texts = isGroup(branch) ? [branch.title, groupText(branch, compared)] : [branch.title, secondLine(branch)];
    const letters = Math.max(...texts.map(text => text.length)) + 5;
    const width = Math.round(Math.min(WIDE, Math.max(NARROW, letters * LETTER)));
    return isGroup(branch) && isOpen(branch)
      ? {
          ...{ id: idOf(branch), width, height: NODE, up: branch.half === 'backward' },
          ...{ children: branch.children.map(boxOf), edges: inside.get(branch) ?? [] }
        }
      : { id: idOf(branch), width, height: NODE };
  };
  return tree.halves.map(boxOf);
}

/** Combine the layouts of the halves: the forward is on the left, the backward on the right. */
export function sceneOf(tree: IStageTree, isOpen: IsOpen, placed: readonly IPlaced[]): IScene {
  const boxes = new Map<string, IShown>();
  const edges: IEdge[] = [];
  const add = (branch: Branch, { x, y, ...rest }: IPlaced, left: number, top: number, level: number): void => {
    const open = isGroup(branch) && isOpen(branch);
    const [boxLeft, boxTop] = [left + x, top + y];
    const rect = { x: boxLeft, y: boxTop, width: rest.width, height: rest.height };
    boxes.set(rest.id, { branch, rect, open, level });
    for (const { from, to, points } of rest.edges) {
      edges.push({ from, to, d: spline(points.map(point => ({ x: point.x + boxLeft, y: point.y + boxTop }))) ?? '' });
    }
    const children = isGroup(branch) ? branch.children : [];
    rest.children.forEach((child, index) => {
      const member = children[index];
      if (member !== undefined) {
        add(member, child, boxLeft, boxTop, level + 1);
      }
    });
  };
  let left = 0;
  tree.halves.forEach((half, index) => {
    const place = placed[index];
    if (place !== undefined) {
      add(half, place, left, 0, 1);
      left += place.width + CUT;
    }
  });
  const first = placed[0]?.width ?? 0;
  return {
    ...{ boxes, edges, links: linksOf(tree, isOpen), width: Math.max(left - CUT, 0) },
    height: Math.max(0, ...placed.map(each => each.height)),
    cut: placed.length > 1 ? [first, first + CUT] : null
  };
}

function secondLine(item: IItem): string {
  const [mark] = item.marks;
  // The details say more about a recomputed node than its box has room for.
  return mark?.kind === 'recomputed' ? mark.kind : (mark?.text ?? valueText(item));
}

function clipped(text: string, width: number): string {
  const most = Math.floor((width - 14) / LETTER);
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

/** The words of a box for screen readers. */
export function labelOf(branch: Branch, compared: boolean): string {
  if (isGroup(branch)) {
    return `${branch.half} group ${branch.title}, ${groupText(branch, compared)}`;
  }
  const facts = [branch.title, branch.row.target, valueText(branch), ...branch.marks.map(mark => mark.text)];
  return facts.filter(fact => fact !== '').join(', ');
}

/** Draw a box without its attributes, which the picture adds. */
export function drawBox({ branch, rect, open }: IShown, compared: boolean): SVGElement[] {
  const { x, y, width, height } = rect;
  const shape = svg('rect', { class: 'al-graph-shape', x, y, width, height, rx: isGroup(branch) ? 6 : 3 });
  const text = (content: string, top: number, kind: string): SVGElement =>
    svg('text', { class: kind, x: x + 9, y: y + top }, clipped(content, width));
  if (isGroup(branch)) {
    const title = text(`${open ? '▾' : '▸'} ${branch.title}`, 15, 'al-graph-title');
    return open
      ? [shape, svg('rect', { class: 'al-graph-head', x, y, width, height: TITLE, rx: 6 }), title]
      : [shape, title, text(groupText(branch, compared), 29, 'al-graph-words')];
  }
  const marks = branch.marks.map(({ kind }, index) =>
    svg(
      'g',
      { class: `al-graph-${kind}` },
      svg('rect', { class: 'al-graph-mark', x: x + width - 5 * (index + 1), y, width: 5, height })
    )
  );
  return [
    shape,
    ...marks,
    text(branch.title, 15, 'al-graph-title'),
    text(secondLine(branch), 29, 'al-graph-words'),
    svg('title', {}, labelOf(branch, compared))
  ];
}

/** Draw an edge between the halves. The edge of a saved value is thick. */
function drawLink(link: ICrossLink, scene: IScene): SVGElement[] {
  const [from, to] = [scene.boxes.get(idOf(link.from))?.rect, scene.boxes.get(idOf(link.to))?.rect];
  if (from === undefined || to === undefined || scene.cut === null) {
    return [];
  }
  const forward = from.x < to.x;
  const [start, end] = forward ? [from.x + from.width, to.x] : [from.x, to.x + to.width];
  const [a, b] = forward ? scene.cut : [scene.cut[1], scene.cut[0]];
  const [startY, endY] = [from.y + from.height / 2, to.y + to.height / 2];
  const curve = acrossPath({ source: [a, startY], target: [b, endY] }) ?? '';
  const kept = [...link.values].filter(item => item.saved !== null);
  const kind = savedBytes(kept) > 0 ? 'kept' : kept.length > 0 ? 'held' : 'crossing';
  const d = `M${start},${startY}H${a}${curve.replace('M', 'L')}H${end}`;
  return [svg('g', { class: `al-graph-${kind}` }, svg('path', { class: 'al-graph-edge', d }))];
}

/** Draw the edges between the halves, and for each box of the forward the bytes that are saved of it. */
export function drawCut(scene: IScene): SVGElement[] {
  if (scene.cut === null) {
    return [];
  }
  const saved = new Map<Branch, Set<IItem>>();
  for (const { from, values } of scene.links.across) {
    const ofBox = saved.get(from) ?? new Set();
    values.forEach(item => ofBox.add(item));
    saved.set(from, ofBox);
  }
  let last = -Infinity;
  const labels = [...saved]
    .map(([branch, items]) => ({ bytes: savedBytes([...items]), rect: scene.boxes.get(idOf(branch))?.rect }))
    .flatMap(({ bytes, rect }) => (bytes > 0 && rect !== undefined ? [{ bytes, y: rect.y + rect.height / 2 - 4 }] : []))
    .sort((a, b) => a.y - b.y)
    .map(({ bytes, y }) => {
      last = Math.max(y, last + 12); // boxes of one height share a place
      return svg('text', { class: 'al-graph-bytes', x: (scene.cut?.[0] ?? 0) + 6, y: last }, dataSize(bytes));
    });
  return [...scene.links.across.flatMap(link => drawLink(link, scene)), ...labels];
}

/** Draw the edges of one node, each from box to box. An edge that the scene has covers the edge of the scene. */
export function drawEdgesOf(item: IItem, scene: IScene, isOpen: IsOpen): SVGElement[] {
  const edge = (source: IItem, target: IItem): SVGElement[] => {
    const [fromId, toId] = [idOf(shownOf(source, isOpen)), idOf(shownOf(target, isOpen))];
    const [from, to] = [scene.boxes.get(fromId)?.rect, scene.boxes.get(toId)?.rect];
    if (from === undefined || to === undefined || from === to) {
      return [];
    }
    const across = source.half !== target.half;
    const isDown = from.y < to.y;
    const direct = across
      ? acrossPath({ source: middle(from, from.x < to.x ? 1 : 0, 0.5), target: middle(to, from.x < to.x ? 0 : 1, 0.5) })
      : downPath({ source: middle(from, 0.5, isDown ? 1 : 0), target: middle(to, 0.5, isDown ? 0 : 1) });
    const drawn = scene.edges.find(each => each.from === fromId && each.to === toId);
    return [svg('path', { class: 'al-graph-edge', d: drawn?.d ?? direct ?? '' })];
  };
  return [...item.inputs.flatMap(input => edge(input, item)), ...item.users.flatMap(user => edge(item, user))];
}

function middle(rect: IRect, x: number, y: number): Point {
  return [rect.x + x * rect.width, rect.y + y * rect.height];
}
