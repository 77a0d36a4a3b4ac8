/**
 * Memory: the bytes in use over a training step, as a stack of areas, one for each kind of memory. The reader chooses a
 * step, and a table shows the storages in memory at this step.
 */

import { axisBottom, axisLeft } from 'd3-axis';
import { scaleLinear } from 'd3-scale';
import { select } from 'd3-selection';
import { area, curveStepAfter, line as linePath, stack } from 'd3-shape';

import { holdersAt, KINDS, peakOf, stepsOf, storagesOf, thinned } from '../model/memory';
import type { IHolder, ILive, IStep, Kind } from '../model/memory';
import { countsOf } from '../model/report';
import type { Memory, MemoryCurve } from '../model/report';
import { amount, dataSize, grouped, listed } from '../model/words';
import type { IContext, IEntry } from '../view/context';
import { fold } from '../view/context';
import { dotted, h, soft, svg, uniqueId } from '../view/dom';
import type { Child } from '../view/dom';
import { cutGraphsNotice, graphHeading } from '../view/graph';
import { table } from '../view/table';
import type { Column } from '../view/table';
import { CutPanel } from './cutPanel';
import { engineOf, legendItem, measuredWords, percent, placeOf, swatch, unitOf, withModules } from './memoryParts';

/** The page draws at most this many graphs; a fold has the rest. */
const MOST_GRAPHS = 4;

/** In pixels: the size of the picture, if its width is not known yet, and the margins around the areas. */
const [WIDTH, HEIGHT] = [940, 260];
const MARGIN = { top: 20, right: 22, bottom: 34, left: 66 };

/** The key in `folds` of the choice to group by layer. */
const LAYERS = 'memory by layer';

/** The steps that the reader chose, by report and graph. They are kept when the panel is drawn again. */
const chosenSteps = new Map<string, number>();

/** Draw the panel. */
export function memoryPanel(context: IContext): Child[] {
  const { chosen } = context;
  if (chosen.length === 0) {
    return [soft('Nothing was compiled, so no memory was modelled.')];
  }
  const rest = chosen.slice(MOST_GRAPHS);
  return [
    ...chosen.slice(0, MOST_GRAPHS).flatMap(entry => memoryOf(context, entry)),
    rest.length === 0
      ? null
      : fold(context, 'memory rest', [amount(rest.length, 'more graph')], () =>
          rest.flatMap(entry => memoryOf(context, entry))
        ),
    cutGraphsNotice(context)
  ];
}

function memoryOf(context: IContext, entry: IEntry): Child[] {
  const { memory, nodes, status } = entry.graph;
  if (memory === null || memory.names.length === 0) {
    const isCut = memory === null && nodes.length === 0 && countsOf(entry.graph).nodes > 0;
    const reason =
      entry.frame.engine === 'upstream'
        ? 'unknown: the logs of stock torch.compile do not say which values share memory'
        : isCut
          ? 'left out of this output to fit a notebook; report.to_html(path) writes it'
          : status === 'compiled'
            ? 'not part of this report'
            : 'unknown, because the graph was not compiled in this recording';
    return [graphHeading(context, entry, `Memory over time is ${reason}.`)];
  }
  const measured = context.report.memory_curves.filter(
    each => each.frame === entry.frame.name && (each.graph === null || each.graph === entry.graph.index)
  );
  return new Picture(context, entry, memory, measured).parts;
}

class Picture {
  readonly parts: Child[];
  private storages: readonly ILive[] = [];
  private steps: readonly IStep[] = [];
  private forwardSteps = 0;
  private peak = 0;
  /** The bytes that the caller holds during the whole step. */
  private readonly base: number;
  private readonly sentence = h('div');
  private readonly keys = h('p', { class: 'al-key' });
  private readonly cut: CutPanel;
  private readonly figure = h('figure', { class: 'al-memory' });
  private readonly words = h('p', { class: 'al-sentence', role: 'status' });
  private readonly composition = h('div');
  private readonly key: string;
  private width = WIDTH;

  constructor(
    private readonly context: IContext,
    private readonly entry: IEntry,
    private readonly memory: Memory,
    private readonly measured: readonly MemoryCurve[]
  ) {
    const callers = storagesOf(memory).filter(({ kind }) => kind === 'parameters' || kind === 'inputs');
    this.base = callers.reduce((sum, each) => sum + each.bytes, 0);
    this.key = `${context.report.identifier} ${entry.key}`;
    this.figure.dataset['frame'] = entry.frame.name;
    this.figure.dataset['graph'] = String(entry.graph.index);
    this.figure.addEventListener('click', event => this.onClick(event));
    this.figure.addEventListener('keydown', event => this.onKey(event));
    this.cut = new CutPanel(context, entry, () => this.use());
    this.use();
    this.watchWidth();
    this.parts = [
      graphHeading(context, entry, `Memory over time, modelled from ${amount(this.storages.length, 'allocation')}`),
      this.sentence,
      ...this.cut.parts,
      this.keys,
      this.figure,
      this.words,
      this.composition
    ];
  }

  /** Show the memory of the reader's choice of saved values, or of this run. */
  private use(): void {
    const { memory } = this;
    const { shown } = this.cut;
    const own = storagesOf(memory);
    this.storages = shown === null ? own : withModules(shown.storages, own);
    this.steps = stepsOf(shown?.steps ?? memory.steps, this.storages);
    this.forwardSteps = shown?.forwardSteps ?? memory.forward_steps;
    this.peak = peakOf(this.steps);
    this.sentence.replaceChildren(...this.sentences().filter(each => each !== null));
    this.keys.replaceChildren(...this.legend());
    this.draw();
  }

  /** The measured curves; if the reader chose other saved values, the measurement of this choice. */
  private get curves(): readonly MemoryCurve[] {
    if (this.cut.shown === null) {
      return this.measured;
    }
    const curve = this.cut.applied?.curve ?? null;
    return [...this.measured.filter(each => each.engine !== 'aotlab'), ...(curve === null ? [] : [curve])];
  }

  private get step(): number {
    return Math.min(chosenSteps.get(this.key) ?? this.peak, this.steps.length - 1);
  }

  /** Draw again if the width of the page changes. */
  private watchWidth(): void {
    if (typeof ResizeObserver !== 'undefined') {
      new ResizeObserver(([entry]) => {
        const width = Math.round(entry?.contentRect.width ?? 0);
        if (width > 0 && width !== this.width) {
          this.width = width;
          this.draw();
        }
      }).observe(this.figure);
    }
  }

  private sentences(): Child[] {
    const { backend } = this.entry.graph;
    const { unknown, from_code } = this.memory;
    const { selection } = this.context;
    const at = this.steps[this.peak];
    const allocated = this.allocatedAt(this.peak);
    const total = at?.total ?? 0;
    const shares = KINDS.filter(kind => (at?.of[kind] ?? 0) >= total / 1000)
      .sort((a, b) => (at?.of[b] ?? 0) - (at?.of[a] ?? 0))
      .map(kind => `${percent(at?.of[kind] ?? 0, total)} ${kind}`);
    const module = allocated?.module ?? '';
    return [
      h(
        'p',
        { class: 'al-sentence' },
        h('b', {}, `The peak is ${dataSize(total)}`),
        `, in the ${this.partOf(this.peak)}`,
        ...(allocated === undefined ? [] : [', where ', h('code', {}, allocated.name), ' is allocated']),
        ...(module === '' ? [] : [' in ', h('code', {}, dotted(module))]),
        ...(allocated?.line ? [' by ', selection.lineButton(allocated.line)] : []),
        ` – ${listed(shares)}.`
      ),
      h('p', { class: 'al-sentence' }, measuredWords(this.curves, this.base, total, this.context.source.live)),
      from_code && this.cut.shown === null
        ? soft('The model follows the buffers in the code that the backend generated: buf1 is a name in this code.')
        : backend === 'inductor' && this.cut.shown !== null
          ? soft('The model of another choice follows the ops, fused as Inductor usually fuses them.')
          : backend === 'inductor'
            ? soft(
                'The model has every op of the graph. Inductor fuses ops, so the compiled code has fewer temporary values.'
              )
            : null,
      unknown > 0
        ? soft(
            `The sizes of ${amount(unknown, 'storage')} are unknown, because they are symbolic. They count as 0 bytes.`
          )
        : null
    ];
  }

  private legend(): HTMLElement[] {
    const present = KINDS.filter(kind => this.storages.some(each => each.kind === kind));
    const line = (title: string, attributes: Record<string, string>): HTMLElement =>
      legendItem(title, svg('path', { d: 'M0,5H22', ...attributes }), 22);
    return [
      ...present.map(kind => legendItem(kind, svg('rect', { width: 10, height: 10, class: `al-memory-${kind}` }))),
      ...(this.cut.before === null ? [] : [line('this run', { class: 'al-outline' })]),
      ...this.curves.map(({ engine }) =>
        line(engineOf(engine)[1], { class: 'al-curve', 'stroke-dasharray': engineOf(engine)[0] })
      )
    ];
  }

  /** Draw the areas and the lines, and then the chosen step. */
  private draw(): void {
    const { steps } = this;
    const measured = this.curves.map(curve => ({ engine: curve.engine, points: this.pointsOf(curve) }));
    const before = this.pointsBefore();
    const highest = Math.max(
      1,
      steps[this.peak]?.total ?? 0,
      ...before.map(each => each[1]),
      ...measured.flatMap(({ points }) => points.map(each => each[1]))
    );
    const [unit, length] = unitOf(highest);
    const x = scaleLinear([0, steps.length], [MARGIN.left, this.width - MARGIN.right]);
    const y = scaleLinear([0, highest / length], [HEIGHT - MARGIN.bottom, MARGIN.top]).nice(5);
    const shown = thinned(steps);
    const last = shown.at(-1);
    const points = last === undefined ? [] : [...shown, { ...last, step: steps.length }];
    const layers = stack<IStep, Kind>()
      .keys(KINDS)
      .value((each, kind) => each.of[kind] / length)(points);
    const shape = area<(typeof layers)[number][number]>()
      .x(each => x(each.data.step))
      .y0(each => y(each[0]))
      .y1(each => y(each[1]))
      .curve(curveStepAfter);
    const path = linePath<readonly [number, number]>()
      .x(each => x(each[0]))
      .y(each => y(each[1] / length));
    const focused = this.figure.contains(document.activeElement);
    const bottom = HEIGHT - MARGIN.bottom;
    const picture = svg(
      'svg',
      {
        width: '100%',
        height: HEIGHT,
        role: 'slider',
        tabindex: '0',
        'data-key': `memory ${this.key}`,
        'aria-label': 'Memory over time. Arrow keys choose a step.',
        'aria-valuemin': 1,
        'aria-valuemax': steps.length,
        'aria-describedby': (this.words.id ||= uniqueId())
      },
      ...layers.map(layer =>
        svg('path', { d: shape(layer) ?? '', class: `al-memory-${layer.key}`, 'data-kind': layer.key })
      ),
      before.length === 0 ? null : svg('path', { d: path(before) ?? '', class: 'al-outline' }),
      ...measured.flatMap(({ engine, points: all }) =>
        ['al-curve-halo', 'al-curve'].map(kind =>
          svg('path', {
            d: path(all) ?? '',
            class: kind,
            'data-engine': engine,
            'stroke-dasharray': engineOf(engine)[0]
          })
        )
      ),
      ...this.regions(x, bottom),
      svg('path', {
        class: 'al-peak',
        d: `M${x(this.peak + 0.5)},${y((steps[this.peak]?.total ?? 0) / length)}l-5,-8h10z`
      }),
      svg('line', { class: 'al-cursor', y1: MARGIN.top - 4, y2: bottom })
    );
    const axes = select(picture).append('g').attr('class', 'al-axes');
    const ticks = axisBottom(x)
      .ticks(Math.min(8, steps.length))
      .tickFormat(step => grouped(Number(step)))
      .tickSizeOuter(0);
    axes.append('g').attr('transform', `translate(0,${bottom})`).call(ticks);
    axes
      .append('g')
      .attr('transform', `translate(${MARGIN.left},0)`)
      .call(
        axisLeft(y)
          .ticks(5)
          .tickFormat(each => `${String(each)} ${unit}`)
      );
    this.figure.replaceChildren(picture);
    if (focused) {
      picture.focus();
    }
    this.show(this.step);
  }

  /** The points of this run's curve, if the picture shows another choice. */
  private pointsBefore(): (readonly [number, number])[] {
    const { before } = this.cut;
    if (before === null) {
      return [];
    }
    const totals = thinned(stepsOf(before.steps, before.storages));
    const part = (early: boolean): number[] =>
      totals.filter(each => each.step < before.forwardSteps === early).map(each => each.total - this.base);
    return this.pointsOf({ forward: part(true), backward: part(false) });
  }

  /** The names of the parts, and the line between forward and backward. */
  private regions(x: (step: number) => number, bottom: number): SVGElement[] {
    const {
      steps: { length: steps },
      forwardSteps: border
    } = this;
    const name = (text: string, at: number): SVGElement =>
      svg('text', { x: at + 4, y: MARGIN.top - 8, class: 'al-region' }, text);
    const about = svg('text', { x: x(steps / 2), y: HEIGHT - 3, 'text-anchor': 'middle' }, 'op that allocates memory');
    return border >= steps
      ? [name('forward', x(0)), about]
      : [
          name('forward', x(0)),
          name('backward', x(border)),
          svg('line', { class: 'al-border', x1: x(border), x2: x(border), y1: 2, y2: bottom }),
          about
        ];
  }

  /** The points of a measured curve: its forward and its backward have the same places on the axis as the model's. */
  private pointsOf({ forward, backward }: Pick<MemoryCurve, 'forward' | 'backward'>): (readonly [number, number])[] {
    const {
      steps: { length: steps },
      forwardSteps: border
    } = this;
    const placed = (values: readonly number[], begin: number, end: number): (readonly [number, number])[] =>
      values.map(
        (bytes, index) => [begin + ((end - begin) * (index + 0.5)) / values.length, this.base + bytes] as const
      );
    return [...placed(forward, 0, border), ...placed(backward, border, steps)];
  }

  private partOf(step: number): string {
    return step < this.forwardSteps ? 'forward' : 'backward';
  }

  /** The storage that the op at a step allocates: the largest one, if there are several. */
  private allocatedAt(step: number): ILive | undefined {
    const allocated = step === 0 ? [] : this.storages.filter(each => each.begin === step);
    return allocated.sort((a, b) => b.bytes - a.bytes)[0];
  }

  private onClick(event: MouseEvent): void {
    const box = this.figure.getBoundingClientRect();
    const part = (event.clientX - box.left - MARGIN.left) / (this.width - MARGIN.left - MARGIN.right);
    this.choose(Math.floor(part * this.steps.length));
  }

  private onKey(event: KeyboardEvent): void {
    const far = Math.max(10, Math.round(this.steps.length / 20));
    const next = {
      ArrowLeft: this.step - 1,
      ArrowRight: this.step + 1,
      ArrowDown: this.step - 1,
      ArrowUp: this.step + 1,
      PageDown: this.step - far,
      PageUp: this.step + far,
      Home: 0,
      End: this.steps.length - 1,
      Enter: this.peak,
      Escape: this.peak
    }[event.key];
    const isModified = event.ctrlKey || event.metaKey || event.altKey || event.shiftKey;
    if (next !== undefined && !isModified && !(event.key === 'Escape' && this.step === this.peak)) {
      event.preventDefault();
      event.stopPropagation();
      this.choose(next);
    }
  }

  private choose(step: number): void {
    chosenSteps.set(this.key, Math.min(Math.max(step, 0), this.steps.length - 1));
    this.show(this.step);
  }

  /** Show the chosen step: the line in the picture, the words, and the table. */
  private show(step: number): void {
    const { selection } = this.context;
    const total = this.steps[step]?.total ?? 0;
    const allocated = this.allocatedAt(step);
    const x = MARGIN.left + ((step + 0.5) / this.steps.length) * (this.width - MARGIN.left - MARGIN.right);
    const cursor = this.figure.querySelector('.al-cursor');
    cursor?.setAttribute('x1', String(x));
    cursor?.setAttribute('x2', String(x));
    const what =
      allocated !== undefined
        ? [h('code', {}, allocated.name), ` allocates ${dataSize(allocated.bytes)}`]
        : [step === 0 ? 'begin' : step >= this.steps.length - 1 ? 'end' : `end or begin of the ${this.partOf(step)}`];
    this.words.replaceChildren(
      `Step ${grouped(step + 1)} of ${grouped(this.steps.length)}, ${this.partOf(step)}${step === this.peak ? ', the peak' : ''}: `,
      ...what,
      ...(allocated?.line ? [' by ', selection.lineButton(allocated.line) ?? ''] : []),
      ` – ${dataSize(total)} in use.`
    );
    const slider = this.figure.querySelector('[role=slider]');
    slider?.setAttribute('aria-valuenow', String(step + 1));
    slider?.setAttribute('aria-valuetext', this.words.textContent ?? '');
    this.figure.dataset['step'] = String(step);
    this.composition.replaceChildren(this.grouping(), this.tableAt(step, total));
  }

  /** Whether the table is grouped by layer. At first it is, if there are modules. */
  private get byLayer(): boolean {
    return this.context.folds.get(LAYERS) ?? this.storages.some(each => each.module !== '');
  }

  /** The button that groups the table by layer, or by line and module. */
  private grouping(): HTMLElement {
    const { folds } = this.context;
    const pressed = this.byLayer;
    const button = h(
      'button',
      { type: 'button', class: 'al-button', 'data-action': 'layers', 'aria-pressed': String(pressed) },
      pressed ? 'Group by line and module' : 'Group by layer'
    );
    button.addEventListener('click', () => {
      folds.set(LAYERS, !pressed);
      this.show(this.step);
      this.composition.querySelector('button')?.focus();
    });
    return h('p', {}, button);
  }

  /** The table of the storages that are alive at a step. */
  private tableAt(step: number, total: number): HTMLElement {
    const { context, entry } = this;
    const { selection } = context;
    const { byLayer } = this;
    return table<IHolder>(context, {
      name: 'memory',
      label: 'What holds the memory at the chosen step',
      search: true,
      columns: [
        {
          name: 'module',
          title: byLayer ? 'layer' : 'module',
          kind: 'code',
          cell: row => placeOf(entry, row)
        },
        ...(byLayer
          ? []
          : ([
              { name: 'line', title: 'line', kind: 'code', cell: row => selection.lineButton(row.line) }
            ] as const satisfies readonly Column<IHolder>[])),
        {
          name: 'kind',
          title: 'kind',
          cell: ({ kinds }) => h('span', {}, ...kinds.flatMap(kind => [swatch(kind), `${kind} `]))
        },
        {
          name: 'count',
          title: 'storages',
          help: 'The number of storages',
          kind: 'number',
          value: row => row.names.length,
          cell: row => grouped(row.names.length)
        },
        { name: 'nbytes', title: 'bytes', kind: 'number', value: row => row.bytes, cell: row => dataSize(row.bytes) },
        {
          name: 'share',
          title: 'share',
          help: 'The share of the bytes in use at this step',
          kind: 'number',
          value: row => row.bytes,
          cell: row => percent(row.bytes, total)
        }
      ],
      rows: holdersAt(step, this.storages, byLayer),
      key: row => `${row.kinds.join(' ')} ${row.module}`,
      rowData: row => ({
        'data-bytes': String(row.bytes),
        ...selection.linked(
          selection
            .lines(false)
            .causesOf(entry, row.line)
            .map(origin => origin.id)
        )
      }),
      data: { 'data-frame': entry.frame.name, 'data-graph': String(entry.graph.index) }
    });
  }
}
