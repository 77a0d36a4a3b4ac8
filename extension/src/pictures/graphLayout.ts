/**
 * Compute the positions of boxes with dagre. The boxes inside of an open box have a separate layout, so that no
 * layout has many boxes. This file runs in a worker, and on pages that forbid workers in the page itself.
 */

import { Graph, layout } from '@dagrejs/dagre';
import type { Point } from '@dagrejs/dagre';

/** A box to place. An open box has `children`, and gets the size that they need. */
export interface IBox {
  readonly id: string;
  readonly width: number;
  readonly height: number;
  readonly children?: readonly IBox[];
  /** The edges between children: the indices of both. */
  readonly edges?: readonly (readonly [number, number])[];
  /** Whether the edges go up. */
  readonly up?: boolean;
}

/** A placed box. `x` and `y` are its left upper corner, within the box that contains it. */
export interface IPlaced {
  readonly id: string;
  readonly x: number;
  readonly y: number;
  readonly width: number;
  readonly height: number;
  readonly children: readonly IPlaced[];
  /** The edges between children, with the points of each. */
  readonly edges: readonly { readonly from: string; readonly to: string; readonly points: readonly Point[] }[];
}

/** The space in an open box: around its children, and above them for its title. */
const PADDING = 12;
const TITLE = 24;

/** The layouts of open boxes by their content, because most of them stay the same when the reader opens a group. */
const known = new Map<string, IPlaced>();
const MOST_KNOWN = 500;

/** Place the boxes inside of a box. */
export function layOut(box: IBox): IPlaced {
  const key = JSON.stringify(box);
  const placed = known.get(key) ?? placeChildren(box);
  if (known.size >= MOST_KNOWN) {
    known.clear();
  }
  known.set(key, placed);
  return placed;
}

function placeChildren({ id, width, height, children = [], edges = [], up = false }: IBox): IPlaced {
  if (children.length === 0) {
    return { id, x: 0, y: 0, width, height, children: [], edges: [] };
  }
  const inner = children.map(layOut);
  const graph = new Graph();
  graph.setGraph({ rankdir: up ? 'BT' : 'TB', nodesep: 16, ranksep: 30, edgesep: 8 });
  graph.setDefaultEdgeLabel(() => ({}));
  inner.forEach((child, index) => graph.setNode(String(index), { width: child.width, height: child.height }));
  edges.forEach(([from, to]) => graph.setEdge(String(from), String(to)));
  layout(graph);
  const [left, top] = [PADDING, PADDING + TITLE];
  return {
    id,
    x: 0,
    y: 0,
    width: Math.max(width, (graph.graph().width ?? 0) + 2 * PADDING),
    height: (graph.graph().height ?? 0) + 2 * PADDING + TITLE,
    children: inner.map((child, index) => {
      const { x = 0, y = 0 } = graph.node(String(index));
      return { ...child, x: left + x - child.width / 2, y: top + y - child.height / 2 };
    }),
    edges: graph.edges().map(edge => ({
      from: inner[Number(edge.v)]?.id ?? '',
      to: inner[Number(edge.w)]?.id ?? '',
      points: (graph.edge(edge).points ?? []).map(({ x, y }: Point) => ({ x: x + left, y: y + top }))
    }))
  };
}
