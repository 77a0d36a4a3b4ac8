/**
 * The time line: the activities of the run and the phases of the compilations as nested bars. The axis leaves out the
 * time without an activity. Bars that would be narrower than a pixel are drawn as one. Graph breaks and recompiles are
 * moments: they are marks on the axis, and the list below the picture gives their reasons.
 */

import type { TimelineRow } from '../model/report';
import { amount, duration, short } from '../model/words';
import type { IContext } from './context';
import { h, heading, prose, svg } from './dom';
import type { Child } from './dom';
import { allGraphsChosen } from './graph';

const ROW = 17;
const AXIS = 18;
/** The height of the name of a thread or a process. */
const NAME = 16;
/** About a pixel, in percent of the width. */
const PIXEL = 0.1;
/** The width of the place where the axis leaves time out, in percent. */
const BREAK = 1.2;

/** The layers of the compiler: the class of their bars, their names, and their stages. */
const LAYERS: readonly (readonly [string, string, readonly string[]])[] = [
  ['dynamo', 'Dynamo', ['dynamo', 'guards', 'rest of Dynamo']],
  ['aotlab', 'aotlab', ['dedupe', 'synthetic_bases', 'runtime', 'between', 'backward']],
  ['inductor', 'the backend', ['compile', 'rest of the backend']],
  ['other', 'stock torch.compile', ['upstream']],
  ['verification', 'comparison with eager', ['verification']],
  ['calls', 'calls', ['compiled', 'eager']],
  ['caches', 'measurements and the report', ['timing', 'recording']],
  ['aot', 'AOTAutograd', ['metadata', 'trace', 'partition', 'wrappers', 'rest of AOTAutograd']],
  [
    'inductor',
    'Inductor',
    ['pre-grad passes', 'joint passes', 'post-grad passes', 'lowering', 'code generation', 'rest of Inductor']
  ],
  ['kernels', 'compilation of kernels', ['compilation of kernels', 'kernel', 'header']],
  ['autotuning', 'autotuning', ['autotuning']],
  ['caches', 'caches', ['caches']]
];
const OTHER = ['other', 'other', []] as const;
/** The layers of the stages whose name both engines use. */
const SHARED_STAGES: Readonly<Record<string, Readonly<Record<string, string>>>> = {
  capture: { aotlab: 'aotlab', upstream: 'dynamo' },
  trace: { aotlab: 'aotlab', upstream: 'aot' },
  partition: { aotlab: 'aotlab', upstream: 'aot' }
};
/** The stages of rows without a duration, each with its mark. */
const MOMENTS: Readonly<Record<string, string>> = { 'graph break': '✂', recompile: '↻' };

/** The bars of the picture: a phase, or several neighbours that are too short to be drawn each. */
interface IBar {
  readonly rows: readonly TimelineRow[];
  /** The number of the bar's line in the picture. */
  readonly line: number;
  readonly x: number;
  readonly width: number;
}

/** A part of the axis without a break. `x` and `width` are in percent. */
interface ISpan {
  readonly start: number;
  readonly end: number;
  readonly x: number;
  readonly width: number;
}

/** Draw the time line of the chosen graphs; nothing if the report has no phases. */
export function timeline(context: IContext): Child[] {
  const chosen = new Set(context.chosen.map(entry => entry.key));
  const allChosen = allGraphsChosen(context);
  const rows = context.report.timeline_rows
    .filter(row => allChosen || chosen.has(`${row.frame}/${row.graph}`))
    .sort((a, b) => a.start_ns - b.start_ns || a.depth - b.depth);
  if (rows.length === 0) {
    return [];
  }
  const phases = rows.filter(row => MOMENTS[row.stage] === undefined);
  const moments = rows.filter(row => MOMENTS[row.stage] !== undefined);
  const layers = [...LAYERS, OTHER].filter(layer => phases.some(row => layerOf(row) === layer));
  return [
    heading('Time line', `${amount(phases.length, 'phase')}, on the clock`),
    h(
      'p',
      { class: 'al-key' },
      ...layers.map(([name, title]) =>
        h(
          'span',
          {},
          svg(
            'svg',
            { width: 10, height: 10, class: `al-swatch al-layer-${name}`, 'aria-hidden': 'true' },
            svg('rect', { width: 10, height: 10 })
          ),
          title
        )
      )
    ),
    new Picture(phases, moments).element,
    momentList(moments)
  ];
}

/** List the graph breaks and recompiles with their times and reasons. The result is null if nothing happened. */
function momentList(moments: readonly TimelineRow[]): Child {
  return moments.length === 0
    ? null
    : h(
        'ul',
        { class: 'al-moments', 'aria-label': 'Graph breaks and recompiles' },
        ...moments.map(row =>
          h('li', {}, h('b', {}, `${MOMENTS[row.stage]} ${duration(row.start_ns)} `), prose(momentText(row)))
        )
      );
}

function momentText(row: TimelineRow): string {
  return `${row.stage}${row.frame === null ? '' : ` of ${graphName(row)}`}: ${row.phase}`;
}

function layerOf(row: TimelineRow): (typeof LAYERS)[number] {
  const name = SHARED_STAGES[row.stage]?.[row.engine];
  return (
    LAYERS.find(([layer, , stages]) => (name === undefined ? stages.includes(row.stage) : layer === name)) ?? OTHER
  );
}

function endOf(row: TimelineRow): number {
  return row.start_ns + row.duration_ns;
}

class Picture {
  readonly element = h('figure', { class: 'al-timeline' });
  private bars: readonly IBar[] = [];
  private readonly words = h('figcaption', { class: 'al-soft', role: 'status' });
  private readonly whole = h('button', { type: 'button', class: 'al-button', 'data-action': 'whole' }, 'Show all');

  constructor(
    private readonly rows: readonly TimelineRow[],
    private readonly moments: readonly TimelineRow[]
  ) {
    this.whole.addEventListener('click', () => this.draw(null));
    this.element.addEventListener('keydown', event => this.onKey(event));
    for (const kind of ['focusin', 'pointerover', 'click']) {
      this.element.addEventListener(kind, event => {
        const bar = this.barAt(event.target);
        if (bar !== null && kind === 'click') {
          this.draw(bar);
        } else if (bar !== null) {
          this.words.textContent = about(bar.rows);
        }
      });
    }
    this.draw(null);
  }

  /** Draw all phases, or those during a bar. */
  private draw(zoomed: IBar | null): void {
    const rows = zoomed?.rows ?? this.rows;
    const begin = rows[0]?.start_ns ?? 0; // the rows are sorted
    const end = rows.reduce((last, row) => Math.max(last, endOf(row)), begin + 1);
    const shown = this.rows.filter(row => row.start_ns < end && endOf(row) > begin);
    const spans = axis(shown, begin, end);
    const lines = linesOf(shown);
    this.bars = lines.flatMap(({ rows }, line) => barsOf(rows, line, spans));
    const leftOut = spans.length > 1 ? ' A dashed line leaves out idle time.' : '';
    this.words.textContent =
      zoomed === null
        ? `Choose a phase to enlarge it. Arrow keys move between the phases.${leftOut}`
        : about(zoomed.rows);
    const height = Math.max(...lines.map(line => line.y)) + ROW + 1;
    const picture = svg(
      'svg',
      { width: '100%', height, role: 'group', 'aria-label': `Time line, ${duration(end - begin)}` },
      ...axisMarks(spans, height),
      ...lines.map(({ name, y }) => (name === '' ? null : svg('text', { x: 0, y: y - 4, class: 'al-lane' }, name))),
      ...this.moments
        .filter(row => row.start_ns >= begin && row.start_ns <= end)
        .map(row => momentMark(row, percent(place(row.start_ns, spans)), height)),
      ...this.bars.map((bar, index) => drawn(bar, index, lines[bar.line]?.y ?? 0))
    );
    this.whole.hidden = zoomed === null;
    const hadFocus = this.element.contains(document.activeElement);
    this.element.replaceChildren(h('div', { class: 'al-timeline-head' }, this.words, this.whole), picture);
    const same = this.bars.findIndex(bar => bar.rows[0] === zoomed?.rows[0]);
    this.moveTo(Math.max(same, 0), hadFocus);
  }

  private barAt(target: EventTarget | null): IBar | null {
    const element = target instanceof Element ? target.closest('[data-phase]') : null;
    return this.bars[Number(element?.getAttribute('data-phase') ?? NaN)] ?? null;
  }

  /** Make a bar the one that the Tab key reaches, and focus it. */
  private moveTo(index: number, focus: boolean): void {
    this.element.querySelector('[data-phase][tabindex="0"]')?.setAttribute('tabindex', '-1');
    const element = this.element.querySelector<SVGElement>(`[data-phase="${index}"]`);
    element?.setAttribute('tabindex', '0');
    if (focus) {
      element?.focus({ preventScroll: false });
    }
  }

  private onKey(event: KeyboardEvent): void {
    const bar = this.barAt(event.target);
    if (event.key === 'Escape' && !this.whole.hidden) {
      event.stopPropagation();
      this.draw(null);
    }
    if (bar === null || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) {
      return;
    }
    const index = this.bars.indexOf(bar);
    const overlapping = (line: number): number =>
      this.bars.findIndex(each => each.line === line && each.x < bar.x + bar.width && each.x + each.width > bar.x);
    const next = {
      ArrowLeft: this.bars[index - 1]?.line === bar.line ? index - 1 : -1,
      ArrowRight: this.bars[index + 1]?.line === bar.line ? index + 1 : -1,
      ArrowUp: overlapping(bar.line - 1),
      ArrowDown: overlapping(bar.line + 1)
    }[event.key];
    if (event.key === 'Enter' || event.key === ' ') {
      event.preventDefault();
      this.draw(bar);
    } else if (next !== undefined) {
      event.preventDefault();
      this.moveTo(next < 0 ? index : next, true);
    }
  }
}

/** The lines of the picture: each depth of each thread of each process, with its name above its first line. */
function linesOf(rows: readonly TimelineRow[]): { name: string; y: number; rows: TimelineRow[] }[] {
  const threads = new Map<string, TimelineRow[][]>();
  for (const row of rows) {
    const key = JSON.stringify([row.process, row.thread]);
    const depths = threads.get(key) ?? [];
    threads.set(key, depths);
    (depths[row.depth] ??= []).push(row);
  }
  const ordered = [...threads].sort(([, a], [, b]) => compare(a.flat()[0], b.flat()[0]));
  const several = new Set(rows.map(row => row.process)).size > 1;
  let y = AXIS;
  return ordered.flatMap(([, depths]) => {
    const first = depths.flat()[0];
    const other = first?.stage === 'kernel' ? 'kernels' : 'another thread';
    const thread = first === undefined || first.thread === 0 ? '' : other;
    const process = several && first?.process === '' && thread === '' ? 'this run' : (first?.process ?? '');
    const name = threads.size < 2 ? '' : [process, thread].filter(each => each !== '').join(', ');
    y += name === '' ? 0 : NAME;
    // A line may be empty: the phases around are missing if the report was cut.
    return Array.from(depths, (members = [], depth) => {
      y += ROW;
      return { name: depth === 0 ? name : '', y: y - ROW, rows: members };
    });
  });
}

function compare(a: TimelineRow | undefined, b: TimelineRow | undefined): number {
  return (a?.process ?? '').localeCompare(b?.process ?? '') || (a?.thread ?? 0) - (b?.thread ?? 0);
}

/** Divide the axis: between the spans is time without a phase. */
function axis(rows: readonly TimelineRow[], begin: number, end: number): ISpan[] {
  const busy: { start: number; end: number }[] = [];
  for (const row of rows) {
    const [start, stop] = [Math.max(row.start_ns, begin), Math.min(endOf(row), end)];
    const last = busy.at(-1);
    if (last !== undefined && start - last.end <= (end - begin) * 0.02) {
      last.end = Math.max(last.end, stop);
    } else {
      busy.push({ start, end: stop });
    }
  }
  const total = busy.reduce((sum, each) => sum + each.end - each.start, 0);
  const gap = Math.min(BREAK, 30 / busy.length);
  let x = 0;
  return busy.map(each => {
    const width = ((100 - gap * (busy.length - 1)) * (each.end - each.start)) / Math.max(total, 1);
    const left = x;
    x += width + gap;
    return { ...each, x: left, width };
  });
}

/** The place of a time on the axis, in percent. */
function place(time: number, spans: readonly ISpan[]): number {
  const span = spans.find(each => time <= each.end) ?? spans.at(-1);
  if (span === undefined) {
    return 0;
  }
  const part = (time - span.start) / Math.max(span.end - span.start, 1);
  return span.x + span.width * Math.min(Math.max(part, 0), 1);
}

function percent(part: number): string {
  return `${Number(part.toFixed(3))}%`;
}

function barsOf(rows: readonly TimelineRow[], line: number, spans: readonly ISpan[]): IBar[] {
  const bars: { rows: TimelineRow[]; line: number; x: number; width: number }[] = [];
  for (const row of rows) {
    const x = place(row.start_ns, spans);
    const width = place(endOf(row), spans) - x;
    const last = bars.at(-1);
    if (last !== undefined && Math.max(width, last.width) < PIXEL && x + width - last.x < PIXEL) {
      last.rows.push(row);
      last.width = Math.max(last.width, x + width - last.x);
    } else {
      bars.push({ rows: [row], line, x, width });
    }
  }
  return bars;
}

function drawn(bar: IBar, index: number, y: number): SVGElement {
  const [first] = bar.rows;
  const title = about(bar.rows);
  const longest = bar.rows.reduce((a, b) => (b.duration_ns > a.duration_ns ? b : a));
  return svg(
    'svg',
    {
      class: `al-phase${bar.width < 1 ? ' al-thin' : ''} al-layer-${layerOf(longest)[0]}`,
      x: percent(bar.x),
      y,
      width: percent(Math.max(bar.width, PIXEL)),
      height: ROW - 1,
      role: 'button',
      tabindex: '-1',
      'aria-label': title,
      'data-phase': index,
      'data-name': first?.phase ?? ''
    },
    svg('title', {}, title),
    svg('rect', { width: '100%', height: '100%' }),
    bar.width < 2 || first === undefined
      ? null
      : svg('foreignObject', { width: '100%', height: ROW - 1 }, h('div', { class: 'al-phase-label' }, label(first)))
  );
}

function momentMark(row: TimelineRow, x: string, height: number): SVGElement {
  return svg(
    'g',
    { class: 'al-moment', 'data-moment': row.stage },
    svg('title', {}, momentText(row)),
    svg('line', { x1: x, x2: x, y1: AXIS - 4, y2: height }),
    svg('text', { x, y: 11, 'text-anchor': 'middle' }, MOMENTS[row.stage] ?? '')
  );
}

/** The text in a bar; that of the outermost bar names the graph. */
function label(row: TimelineRow): string {
  return row.depth > 0 || row.frame === null ? row.phase : `${row.phase}: ${graphName(row)}`;
}

function graphName(row: TimelineRow): string {
  return `${short(row.frame ?? '')} · graph ${row.graph ?? 0}`;
}

function about(rows: readonly TimelineRow[]): string {
  const [row] = rows;
  if (row === undefined) {
    return '';
  }
  if (rows.length > 1) {
    const names = [...new Set(rows.map(each => each.phase))];
    const sum = rows.reduce((all, each) => all + each.duration_ns, 0);
    const more = names.length > 3 ? ', …' : '';
    return `${amount(rows.length, 'phase')}, ${duration(sum)}: ${names.slice(0, 3).join(', ')}${more}`;
  }
  const own = row.own_ns > 0 && row.own_ns < row.duration_ns ? `, ${duration(row.own_ns)} of it its own` : '';
  const thread = row.thread > 0 ? ', in another thread' : '';
  const graph = row.frame === null ? '' : ` · ${graphName(row)}`;
  const stage = row.engine === 'aotlab' ? '' : ` · ${row.stage}`;
  return `${row.phase}: ${duration(row.duration_ns)}${own}${thread}${stage}${graph}`;
}

/** The axis: times since the begin of the recording, and lines through the picture. A dashed line is where time was left out. */
function axisMarks(spans: readonly ISpan[], height: number): SVGElement[] {
  const total = spans.reduce((sum, span) => sum + span.end - span.start, 0);
  const step = niceStep(total / 8);
  const marks: SVGElement[] = [];
  let last = -Infinity;
  spans.forEach((span, index) => {
    const before = spans[index - 1];
    if (before !== undefined) {
      const x = percent((before.x + before.width + span.x) / 2);
      const title = `${duration(span.start - before.end)} without an activity`;
      const line = svg('line', { x1: x, x2: x, y1: AXIS - 4, y2: height });
      marks.push(svg('g', { class: 'al-left-out' }, svg('title', {}, title), line));
    }
    for (let tick = Math.ceil(span.start / step) * step; tick <= span.end; tick += step) {
      const at = place(tick, [span]);
      // A label takes up to 40 pixels to the right of its line.
      if (at - last >= 6 && at < 92) {
        last = at;
        const x = percent(at);
        const line = svg('line', { x1: x, x2: x, y1: 4, y2: height });
        marks.push(svg('g', { class: 'al-tick' }, line, svg('text', { x, dx: 3, y: 11 }, tickText(tick, step))));
      }
    }
  });
  return marks;
}

/** The smallest of 1, 2, 5, 10, 20, 50, … that is not less than `least`. */
function niceStep(least: number): number {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return power * ([1, 2, 5].find(each => each * power >= least) ?? 10);
}

/** Write a time with as many digits as the step between two ticks needs. */
function tickText(ns: number, step: number): string {
  const [unit, length] = (
    [
      ['s', 1e9],
      ['ms', 1e6],
      ['µs', 1e3]
    ] as const
  ).find(each => step >= each[1] / 10) ?? ['ns', 1];
  return `${(ns / length).toFixed(step < length ? 1 : 0)} ${unit}`;
}
