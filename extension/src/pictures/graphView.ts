/** The visible part of a graph's picture: zoom, pan and the minimap. It shows a scene, and knows nothing of nodes. */

import { select } from 'd3-selection';
import { zoom, zoomIdentity } from 'd3-zoom';
import type { D3ZoomEvent, ZoomTransform } from 'd3-zoom';

import { h, svg } from '../view/dom';
import type { IRect } from './graphDrawing';

/** The scale below which words cannot be read, and the scales that the reader can choose. */
const READABLE = 0.6;
const [SMALLEST, LARGEST] = [0.02, 3];
/** The space around the whole picture, in pixels. */
const MARGIN = 12;
/** By how much a button or a key zooms. */
const STEP = 1.4;

export class GraphView {
  readonly content = svg('g');
  readonly picture: SVGSVGElement;
  readonly element: HTMLElement;
  private readonly window = svg('rect', { class: 'al-graph-window' });
  private readonly map: SVGSVGElement;
  private readonly overview = svg('g');
  private readonly behaviour = zoom<SVGSVGElement, unknown>();
  private transform: ZoomTransform = zoomIdentity;
  private bounds: IRect = { x: 0, y: 0, width: 1, height: 1 };
  private isPlaced = false;

  constructor(label: string, ...markers: readonly SVGElement[]) {
    const zoomed = svg('g', {}, this.content);
    this.picture = svg('svg', { class: 'al-graph-picture', role: 'tree', 'aria-label': label }, ...markers, zoomed);
    this.map = svg('svg', { class: 'al-graph-map', 'aria-hidden': 'true' }, this.overview, this.window);
    this.element = h('div', { class: 'al-graph-view' }, this.picture, this.map);
    this.behaviour
      .scaleExtent([SMALLEST, LARGEST])
      .touchable(true)
      .extent(() => [
        [0, 0],
        [this.width, this.height]
      ])
      .filter((event: Event) => this.mayZoom(event))
      .on('zoom', (event: D3ZoomEvent<SVGSVGElement, unknown>) => {
        this.transform = event.transform;
        zoomed.setAttribute('transform', event.transform.toString());
        this.drawWindow();
      });
    select(this.picture).call(this.behaviour).on('dblclick.zoom', null);
    for (const kind of ['pointerdown', 'pointermove'] as const) {
      this.map.addEventListener(kind, event => this.onMap(event));
    }
  }

  private get width(): number {
    return this.picture.clientWidth || 800;
  }

  private get height(): number {
    return this.picture.clientHeight || 500;
  }

  /** The wheel scrolls the page, unless the reader holds Ctrl or works in the picture. */
  private mayZoom(event: Event): boolean {
    const { ctrlKey, metaKey, button } = event as WheelEvent;
    return event.type === 'wheel'
      ? ctrlKey || metaKey || this.picture.contains(document.activeElement)
      : !ctrlKey && button === 0;
  }

  /** Set the size of the content, and draw its boxes in the minimap. At first, and after `again`, show its begin. */
  setBounds(width: number, height: number, boxes: readonly IRect[]): void {
    this.overview.replaceChildren(...boxes.map(rect => svg('rect', { class: 'al-graph-shape', ...rect })));
    this.bounds = { x: -MARGIN, y: -MARGIN, width: width + 2 * MARGIN, height: height + 2 * MARGIN };
    const { x, y } = this.bounds;
    this.map.setAttribute('viewBox', [x, y, this.bounds.width, this.bounds.height].join(' '));
    // A picture that is not attached yet has no size.
    if (!this.isPlaced && this.picture.clientWidth > 0) {
      this.isPlaced = true;
      this.showBegin();
    }
    this.drawWindow();
  }

  /** When the next scene is shown, choose the visible part again. */
  again(): void {
    this.isPlaced = false;
  }

  /** Show the same part of the content as another view. */
  adopt(other: GraphView): void {
    this.isPlaced = other.isPlaced;
    this.move(other.transform);
  }

  /** Show the whole width and the upper end, in a scale in which words can be read. */
  private showBegin(): void {
    const { width, height } = this.bounds;
    const whole = Math.min(this.width / width, this.height / height);
    const scale = Math.max(Math.min(1, whole), Math.min(1, Math.max(READABLE, Math.min(1, this.width / width))));
    const left = (this.width - scale * width) / 2 + scale * MARGIN;
    const top = Math.max(0, (this.height - scale * height) / 2) + scale * MARGIN;
    this.move(zoomIdentity.translate(left, top).scale(scale));
  }

  /** Show everything. */
  fit(): void {
    const { width, height } = this.bounds;
    const scale = Math.min(1, this.width / width, this.height / height);
    const [left, top] = [(this.width - scale * width) / 2, (this.height - scale * height) / 2];
    this.move(zoomIdentity.translate(left + scale * MARGIN, top + scale * MARGIN).scale(scale));
  }

  zoomBy(direction: 1 | -1): void {
    this.behaviour.scaleBy(select(this.picture), direction > 0 ? STEP : 1 / STEP);
  }

  /** Move a box to the middle, in a scale in which its words can be read. */
  centre(rect: IRect): void {
    const scale = Math.max(this.transform.k, READABLE);
    const [x, y] = [rect.x + rect.width / 2, rect.y + Math.min(rect.height / 2, this.height / 2 / scale)];
    this.move(zoomIdentity.translate(this.width / 2 - scale * x, this.height / 2 - scale * y).scale(scale));
  }

  /** Move a box into the visible part, if it is outside. */
  reveal(rect: IRect): void {
    const [x, y] = this.transform.apply([rect.x, rect.y]);
    const isInside = x >= 0 && y >= 0 && x + 40 < this.width && y + 20 < this.height;
    if (!isInside) {
      this.centre(rect);
    }
  }

  /** Move the picture so that a box that was at `before` and is now at `after` stays in its place on the screen. */
  keep(before: IRect, after: IRect): void {
    this.move(this.transform.translate(before.x - after.x, before.y - after.y));
  }

  /** Move a box into the visible part, with all its members if there is room, and else with its begin. */
  include({ x, y, width, height }: IRect): void {
    const { k } = this.transform;
    const [left, top] = this.transform.apply([x, y]);
    const end = this.height - this.map.clientHeight; // the minimap covers the rest
    this.move(this.transform.translate(shift(left, width * k, this.width) / k, shift(top, height * k, end) / k));
  }

  private move(transform: ZoomTransform): void {
    this.behaviour.transform(select(this.picture), transform);
  }

  private drawWindow(): void {
    const [x, y] = this.transform.invert([0, 0]);
    const [width, height] = [this.width / this.transform.k, this.height / this.transform.k];
    for (const [name, value] of Object.entries({ x, y, width, height })) {
      this.window.setAttribute(name, String(value));
    }
    const { bounds } = this;
    const isWhole =
      x <= bounds.x + MARGIN &&
      y <= bounds.y + MARGIN &&
      x + width >= bounds.width - 2 * MARGIN &&
      y + height >= bounds.height - 2 * MARGIN;
    this.map.classList.toggle('al-whole-seen', isWhole);
  }

  private onMap(event: PointerEvent): void {
    const matrix = this.map.getScreenCTM();
    if (event.buttons === 1 && matrix !== null) {
      const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(matrix.inverse());
      this.behaviour.translateTo(select(this.picture), x, y);
      event.preventDefault();
    }
  }
}

/** The distance by which an interval must move to be between 0 and `end`; if it is too long, to begin there. */
function shift(begin: number, length: number, end: number): number {
  return Math.max(MARGIN, Math.min(begin, end - MARGIN - length)) - begin;
}
