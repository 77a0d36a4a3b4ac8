/**
 * The choice of saved values: a slider of the memory budget under a small chart of what each budget takes, a table with
 * a switch for each value, and the button that compiles and measures the choice.
 */

import { axisLeft } from 'd3-axis';
import { scaleLinear } from 'd3-scale';
import { select } from 'd3-selection';

import type { ILifetimes, IPlan } from '../model/choices';
import { KINDS, peakOf, stepsOf, storagesOf } from '../model/memory';
import type { AppliedChoice } from '../model/report';
import { amount, dataSize, duration, grouped, listed } from '../model/words';
import type { IContext, IEntry } from '../view/context';
import { fold } from '../view/context';
import { copyText } from '../view/copy';
import { dotted, h, mark, prose, svg, uniqueId } from '../view/dom';
import type { Child } from '../view/dom';
import { userName } from '../view/graph';
import { table } from '../view/table';
import { againFold, againSentence } from './again';
import { Choosing } from './choice';
import { percent, unitOf } from './memoryParts';

/** In pixels: the height of the chart, and the margins around its bars. */
const HEIGHT = 130;
const MARGIN = { top: 16, right: 22, bottom: 18, left: 66 };

/** A sentence names at most this many values. */
const MOST_NAMED = 3;

/** A value in the table: its position, and the memory that saving it takes. */
interface IValue {
  readonly node: number;
  readonly bytes: number;
  readonly saved: boolean;
  readonly again: boolean;
}

export class CutPanel {
  readonly parts: readonly Child[];
  /** The memory of the reader's choice, and of the choice of this run; null if the reader chose nothing else. */
  shown: ILifetimes | null = null;
  before: ILifetimes | null = null;
  private readonly choosing: Choosing | null;
  private readonly chart = h('div', { class: 'al-cut-chart' });
  private readonly slider = h('input', { type: 'range', class: 'al-cut-slider', min: 0, step: 1 });
  private readonly words = h('p', { class: 'al-sentence', role: 'status', id: uniqueId() });
  private readonly actions = h('div', { class: 'al-cut-actions' });
  private readonly values = h('div');
  private readonly peaks: readonly number[] = [];
  private width = 0;

  constructor(
    private readonly context: IContext,
    private readonly entry: IEntry,
    private readonly onChange: (shown: ILifetimes | null, before: ILifetimes | null) => void
  ) {
    this.choosing = Choosing.of(context, entry);
    const { choosing } = this;
    if (choosing === null) {
      this.parts = [];
      return;
    }
    this.peaks = choosing.rows.map(row => row.peak_bytes);
    this.slider.max = String(choosing.rows.length - 1);
    this.slider.setAttribute('aria-label', 'Memory budget');
    this.slider.setAttribute('aria-describedby', this.words.id);
    this.slider.dataset['key'] = `cut ${entry.key}`;
    this.slider.addEventListener('input', () => this.choose(Number(this.slider.value)));
    this.update();
    const box = h(
      'section',
      { class: 'al-cut', 'data-frame': entry.frame.name, 'data-graph': entry.graph.index },
      h('p', { class: 'al-sentence' }, h('b', {}, 'Which values are saved for the backward?'), ' Move the slider: '),
      this.chart,
      this.slider,
      h(
        'p',
        { class: 'al-cut-ends al-soft' },
        h('span', {}, '← recompute everything'),
        h('span', {}, 'save everything →')
      ),
      this.words,
      this.actions,
      this.values
    );
    if (typeof ResizeObserver !== 'undefined') {
      new ResizeObserver(([size]) => {
        this.width = Math.round(size?.contentRect.width ?? 0);
        this.drawChart();
      }).observe(this.chart);
    }
    this.parts = [box];
  }

  /** The measurement of the choice that is shown. */
  get applied(): AppliedChoice | undefined {
    return this.choosing?.applied(this.context.report.applied_rows);
  }

  private choose(position: number): void {
    this.choosing?.choose(position);
    this.changed();
  }

  private changed(): void {
    this.update();
    this.onChange(this.shown, this.before);
  }

  private update(): void {
    const { choosing } = this;
    if (choosing === null) {
      return;
    }
    const { model } = choosing;
    const plan = choosing.plan();
    const now = choosing.now();
    // In a large graph, lifetimes take a while to compute. The lifetimes of this run are in the report.
    this.shown = choosing.isOther ? model.lifetimes(plan) : null;
    this.before = choosing.isOther ? model.lifetimes(now) : null;
    const peakNow = choosing.rows[choosing.current]?.peak_bytes ?? 0;
    const peak = this.shown === null ? peakNow : peakBytes(this.shown);
    this.slider.value = String(choosing.position);
    this.slider.setAttribute('aria-valuetext', this.nameOf(choosing.position));
    this.words.replaceChildren(...this.sentences(plan, now, peak, peakNow));
    this.actions.replaceChildren(...this.buttons());
    this.drawChart();
    this.values.replaceChildren(
      againFold(this.context, this.entry, plan) ?? '',
      fold(this.context, `cut values ${this.entry.key}`, ['Choose for each value'], () => [this.valueTable(plan, now)])
    );
  }

  private nameOf(position: number): string {
    const row = this.choosing?.rows[position];
    return row === undefined
      ? ''
      : row.budget === null
        ? row.partitioner === 'default'
          ? 'the default partitioner, which saves what eager saves'
          : row.partitioner
        : `memory budget ${row.budget}`;
  }

  private sentences(plan: IPlan, now: IPlan, peak: number, peakNow: number): (Node | string)[] {
    const { choosing, applied } = this;
    if (choosing === null) {
      return [];
    }
    const name = this.nameOf(choosing.position);
    const changes = choosing.changed(true).length + choosing.changed(false).length;
    const than = (bytes: number, other: number): string =>
      choosing.isOther ? ` (this run: ${dataSize(other)}, ${difference(bytes, other)})` : '';
    const data = this.words.dataset;
    data['held'] = String(plan.heldBytes);
    data['peak'] = String(peak);
    data['recomputed'] = String(plan.ops.length);
    return [
      h('b', {}, `${name.slice(0, 1).toUpperCase()}${name.slice(1)}`),
      changes > 0 ? `, with ${amount(changes, 'value')} chosen by you` : '',
      choosing.isOther ? ': ' : ' (this run): ',
      `the forward holds ${dataSize(plan.heldBytes)} for the backward${than(plan.heldBytes, now.heldBytes)}. `,
      `The peak is ${dataSize(peak)}${than(peak, peakNow)}, by the model of the ops. `,
      ...(this.shown === null || this.before === null || peak <= peakNow
        ? []
        : whyHigher(
            this.shown,
            this.before,
            plan.again.map(node => choosing.model.choices.names[node] ?? '')
          )),
      ...runWords(this.entry, peakNow),
      againSentence(plan),
      ...(applied === undefined ? [] : [' ', ...measuredWords(applied, baseBytes(this.entry))])
    ];
  }

  private buttons(): (Node | string)[] {
    const { choosing } = this;
    const { source } = this.context;
    if (choosing?.isOther !== true) {
      return [];
    }
    const line = `%%aotcompile ${choosing.options}`;
    const copy = h('button', { type: 'button', class: 'al-button', 'data-action': 'copy-options' }, 'Copy');
    copy.addEventListener('click', () => {
      void copyText(line, this.actions).then(success => (copy.textContent = success ? 'Copied' : 'Not copied'));
    });
    const back = h('button', { type: 'button', class: 'al-button', 'data-action': 'this-run' }, 'Back to this run');
    back.addEventListener('click', () => {
      this.choose(choosing.current);
      this.slider.focus();
    });
    const apply = h(
      'button',
      { type: 'button', class: 'al-button', 'data-action': 'apply', 'data-key': 'apply', disabled: source.busy },
      'Apply'
    );
    apply.title =
      'Compile the graph with this choice, compare it with eager, and measure time and memory beside this run';
    apply.addEventListener('click', () => source.apply(this.request(choosing)));
    const told = source.progress !== '' ? source.progress : source.failure;
    return [
      ...(source.live ? [apply] : []),
      back,
      h('span', {}, 'Use it in the cell: ', h('code', {}, line), ' '),
      copy,
      source.live && told !== '' ? h('span', { class: 'al-soft', role: 'status' }, told) : null
    ].filter(each => each !== null);
  }

  private request(choosing: Choosing): Parameters<IContext['source']['apply']>[0] {
    const { frame, graph } = this.entry;
    const { partitioner = 'default', budget = null } = choosing.row ?? {};
    return {
      frame: frame.name,
      index: graph.index,
      partitioner,
      budget,
      save: choosing.changed(true),
      recompute: choosing.changed(false)
    };
  }

  /** Draw for each position of the slider the bytes that are held, the peak, and the measured peak. */
  private drawChart(): void {
    const { choosing, entry, context } = this;
    if (choosing === null || this.width === 0) {
      return;
    }
    const { rows } = choosing;
    const base = baseBytes(entry);
    const measured = rows.map(row => {
      const bytes = choosing.appliedTo(context.report.applied_rows, row)?.curve;
      return bytes ? base + Math.max(0, ...bytes.forward, ...bytes.backward) : null;
    });
    const highest = Math.max(1, ...this.peaks, ...measured.map(each => each ?? 0));
    const [unit, length] = unitOf(highest);
    const x = scaleLinear([0, Math.max(rows.length - 1, 1)], [MARGIN.left + 8, this.width - MARGIN.right - 8]);
    const y = scaleLinear([0, highest / length], [HEIGHT - MARGIN.bottom, MARGIN.top]).nice(3);
    const bar = Math.min(26, (0.6 * (this.width - MARGIN.left - MARGIN.right)) / rows.length);
    const picture = svg('svg', { width: '100%', height: HEIGHT, 'aria-hidden': 'true' });
    rows.forEach((row, position) => {
      const at = x(position);
      const title = `${this.nameOf(position)}: ${dataSize(row.saved_bytes)} held, peak ${dataSize(row.peak_bytes)}`;
      const column = svg(
        'g',
        { class: 'al-cut-column', 'data-position': position, 'data-chosen': position === choosing.position },
        svg('title', {}, title),
        svg('rect', { x: at - bar, y: 0, width: 2 * bar, height: HEIGHT, class: 'al-cut-back' }),
        svg('rect', {
          x: at - bar / 2,
          y: y(row.saved_bytes / length),
          width: bar,
          height: Math.max(0, y(0) - y(row.saved_bytes / length)),
          class: 'al-memory-saved'
        }),
        svg('path', { d: `M${at - bar / 2 - 4},${y(row.peak_bytes / length)}h${bar + 8}`, class: 'al-cut-peak' }),
        svg(
          'text',
          { x: at, y: HEIGHT - 4, 'text-anchor': 'middle', class: 'al-region' },
          position === choosing.current ? 'this run' : row.budget === null ? row.partitioner : String(row.budget)
        )
      );
      const peak = measured[position] ?? null;
      if (peak !== null) {
        const top = y(peak / length);
        column.append(
          svg('path', { d: `M${at},${top - 5}l5,5l-5,5l-5,-5z`, class: 'al-cut-measured', 'data-bytes': peak })
        );
      }
      column.addEventListener('click', () => this.choose(position));
      picture.append(column);
    });
    const axes = select(picture).append('g').attr('class', 'al-axes');
    const ticks = axisLeft(y)
      .ticks(3)
      .tickFormat(each => `${String(each)} ${unit}`);
    axes
      .append('g')
      .attr('transform', `translate(${MARGIN.left - 12},0)`)
      .call(ticks);
    const key = h(
      'p',
      { class: 'al-key' },
      keyItem('held for the backward', svg('rect', { width: 10, height: 10, class: 'al-memory-saved' })),
      keyItem('peak of the step', svg('path', { d: 'M0,5h10', class: 'al-cut-peak' })),
      ...(measured.some(each => each !== null)
        ? [keyItem('measured peak', svg('path', { d: 'M5,0l5,5l-5,5l-5,-5z', class: 'al-cut-measured' }))]
        : [])
    );
    this.chart.replaceChildren(key, picture);
  }

  private valueTable(plan: IPlan, now: IPlan): HTMLElement {
    const { context, entry, choosing } = this;
    if (choosing === null) {
      return h('div');
    }
    const { model } = choosing;
    const { names, nbytes, again, modules, module_table, lines, line_table } = model.choices;
    const copies = choosing.row?.copies === true;
    const saved = new Set(plan.saved);
    const computed = new Set(plan.again);
    const candidates = new Set([...plan.saved, ...now.saved, ...choosing.rows.flatMap(row => row.saved)]);
    const rows: IValue[] = [...candidates]
      .map(node => ({ node, bytes: nbytes[node] ?? 0, saved: saved.has(node), again: computed.has(node) }))
      .filter(({ bytes }) => bytes > 0)
      .sort((a, b) => b.bytes - a.bytes);
    const toggle = (row: IValue): Child => {
      const ban = model.ban(row.node, copies);
      if (ban !== '') {
        return h('span', {}, mark('saved'), ' ', prose(ban));
      }
      const button = h(
        'button',
        {
          type: 'button',
          class: 'al-button',
          'data-action': 'switch',
          'aria-pressed': row.saved,
          'data-key': `switch ${entry.key} ${row.node}`
        },
        row.saved ? 'save' : row.again ? 'compute again' : 'not needed'
      );
      button.setAttribute('aria-pressed', String(row.saved));
      button.title = row.saved ? 'Compute it again in the backward' : 'Save it';
      button.addEventListener('click', () => {
        choosing.change(row.node, !row.saved);
        this.changed();
        this.values.querySelector<HTMLElement>(`tr[data-node="${row.node}"] button`)?.focus();
      });
      return button;
    };
    return table<IValue>(context, {
      name: 'choices',
      label: 'Values that can be saved or computed again',
      columns: [
        { name: 'name', title: 'value', kind: 'code', cell: ({ node }) => userName(entry, names[node] ?? '') },
        {
          name: 'module',
          title: 'module',
          kind: 'code',
          cell: ({ node }) => dotted(module_table[modules[node] ?? 0] ?? '')
        },
        {
          name: 'line',
          title: 'line',
          kind: 'code',
          cell: ({ node }) => context.selection.lineButton(line_table[lines[node] ?? -1] ?? null)
        },
        {
          name: 'nbytes',
          title: 'bytes',
          help: 'The memory that saving it takes',
          kind: 'number',
          value: row => row.bytes,
          cell: row => dataSize(row.bytes)
        },
        {
          name: 'cost',
          title: 'work',
          help: 'The estimated work of computing it again from its inputs, in percent of forward and backward',
          kind: 'number',
          value: ({ node }) => again[node] ?? -1,
          cell: ({ node }) => workOf(again[node] ?? -1, model.choices.traffic)
        },
        { name: 'choice', title: 'choice', kind: 'words', value: row => Number(row.saved), cell: toggle }
      ],
      rows,
      key: ({ node }) => names[node] ?? '',
      rowData: ({ node, saved: isSaved }) => ({ 'data-node': String(node), 'data-saved': String(isSaved) }),
      data: { 'data-frame': entry.frame.name, 'data-graph': String(entry.graph.index) }
    });
  }
}

/** The words about a measurement of a choice, beside the choice of this run. */
function measuredWords(applied: AppliedChoice, base: number): (Node | string)[] {
  const peak = (curve: AppliedChoice['curve']): string =>
    dataSize(base + Math.max(0, ...(curve?.forward ?? []), ...(curve?.backward ?? [])));
  const { curve, before, forward_ns, backward_ns, before_forward_ns, before_backward_ns, equal } = applied;
  const memory =
    curve === null
      ? 'its memory was not measured'
      : `peak ${peak(curve)}${before === null ? '' : ` (this run: ${peak(before)})`}`;
  const time = [
    ['forward', forward_ns, before_forward_ns] as const,
    ['backward', backward_ns, before_backward_ns] as const
  ].flatMap(([phase, ns, other]) =>
    ns === null ? [] : [`${phase} ${duration(ns)}${other === null ? '' : ` (this run: ${duration(other)})`}`]
  );
  const verdict =
    equal === true
      ? 'the results equal eager’s'
      : equal === false
        ? 'the results differ from eager’s'
        : 'the results were not compared';
  return [h('b', {}, 'Measured'), `: ${[memory, ...time].join(', ')}; ${verdict}.`];
}

function peakBytes({ steps, storages }: ILifetimes): number {
  const all = stepsOf(steps, storages);
  return all[peakOf(all)]?.total ?? 0;
}

/** Why the peak of a choice is higher than this run's. `again` has the names of the values that are computed again. */
function whyHigher(shown: ILifetimes, before: ILifetimes, again: readonly string[]): (Node | string)[] {
  const steps = stepsOf(shown.steps, shown.storages);
  const at = peakOf(steps);
  const names = new Set(again);
  const alive = shown.storages
    .filter(({ name, begin, end }) => names.has(name) && begin >= shown.forwardSteps && begin <= at && at <= end)
    .sort((a, b) => b.bytes - a.bytes);
  const bytes = alive.reduce((sum, each) => sum + each.bytes, 0);
  if ((steps[at]?.total ?? 0) - bytes <= peakBytes(before)) {
    const shares = alive.slice(0, MOST_NAMED).map(each => `${each.name} (${dataSize(each.bytes)})`);
    const rest = alive.length > MOST_NAMED ? [amount(alive.length - MOST_NAMED, 'other')] : [];
    return [
      `It is higher than this run’s, because ${amount(alive.length, 'value')} that the backward computes again ` +
        `${alive.length === 1 ? 'is' : 'are'} in memory together at step ${grouped(at + 1)}, ${dataSize(bytes)}: ` +
        `${listed([...shares, ...rest])}. `
    ];
  }
  const all = stepsOf(before.steps, before.storages);
  const then = all[peakOf(all)];
  const more = KINDS.map(kind => [kind, (steps[at]?.of[kind] ?? 0) - (then?.of[kind] ?? 0)] as const)
    .filter(([, difference]) => difference > 0)
    .map(([kind, difference]) => `${dataSize(difference)} more of the kind ${kind}`);
  return [`It is higher than this run’s: at its peak, step ${grouped(at + 1)}, there are ${listed(more)}. `];
}

/** The words about the peak of the run itself, if the model with the graphs of the run has another peak. */
function runWords({ graph: { memory, autograd } }: IEntry, peakNow: number): string[] {
  const all = memory === null ? [] : stepsOf(memory.steps, storagesOf(memory));
  const peak = all[peakOf(all)]?.total ?? peakNow;
  const own = memory?.from_code
    ? `With the code that the backend generated, the peak of this run is ${dataSize(peak)}.`
    : autograd.length > 1
      ? `This run has ${amount(autograd.length, 'autograd node')}, whose backwards run one after another, and its peak is ${dataSize(peak)}.`
      : `With the graphs of this run, the peak is ${dataSize(peak)}.`;
  return dataSize(peak) === dataSize(peakNow)
    ? []
    : [`${own} So that they can be compared, all choices are modelled with one backward. `];
}

/** The bytes that the caller holds during the whole step, which a measured curve does not count. */
function baseBytes({ graph: { memory } }: IEntry): number {
  return (memory?.nbytes ?? []).reduce(
    (sum, bytes, index) => sum + (['parameters', 'inputs'].includes(memory?.kinds[index] ?? '') ? bytes : 0),
    0
  );
}

/** The work of an op as a share of forward and backward; empty if the op cannot run again. */
function workOf(cost: number, traffic: number): string {
  return cost < 0 ? '' : 1000 * cost < traffic ? '< 0.1 %' : percent(cost, traffic);
}

function difference(bytes: number, other: number): string {
  const change = (100 * (bytes - other)) / Math.max(other, 1);
  return Math.abs(change) < 0.5 ? 'the same' : `${change < 0 ? '−' : '+'}${Math.abs(change).toFixed(0)} %`;
}

function keyItem(title: string, shape: SVGElement): HTMLElement {
  return h('span', {}, svg('svg', { width: 10, height: 10, class: 'al-swatch', 'aria-hidden': 'true' }, shape), title);
}
