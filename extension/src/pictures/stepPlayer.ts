/**
 * The player of the storage map. It moves through the steps of a program: the calls, and then the steps after the
 * graph. At each step it shows the line, the call, the ops of the graph and the epilogue beside each other, and the
 * bytes that the step reads and writes.
 */

import type { Step } from '../model/report';
import {
  isCall,
  marksIn,
  pendingAt,
  playedSteps,
  sharedStorages,
  stepStorage,
  storageName,
  storagesIn
} from '../model/steps';
import type { IStepStorage } from '../model/steps';
import { amount, grouped, listed } from '../model/words';
import { AXIS, BAR, ROW, axis, hatchPatterns } from '../view/bars';
import type { IContext, IEntry } from '../view/context';
import { h, soft, svg, uniqueId } from '../view/dom';
import type { Child } from '../view/dom';
import { accessText, legend, markRects, rowsOf, tensorRow } from './stepDrawing';

/** At most this many storages are always drawn, and twice as many at one step. */
const MOST_STORAGES = 6;

/** How long a step is shown while the player runs, in milliseconds: if there are few steps, and if there are many. */
const [SLOW, FAST, MANY] = [1600, 700, 40];

/** The height of the strip below a bar, in pixels. */
const STRIP = 5;

/** The steps that the reader chose, by report and graph. They are kept when the panel is drawn again. */
const chosenSteps = new Map<string, number>();

/** Make the player of a graph; `whole` are the elements that show the whole program, before the first step. */
export function stepPlayer(context: IContext, entry: IEntry, whole: readonly Child[]): Child[] {
  const { graph, frame } = entry;
  if (graph.steps.length > 0) {
    return [new Player(context, entry, whole).root];
  }
  const reason =
    frame.engine === 'upstream'
      ? 'The logs of stock torch.compile do not say which bytes a call reads and writes. So its program cannot be played step by step.'
      : graph.cut
        ? 'The steps of the program were left out of this output to fit a notebook; report.to_html(path) writes them.'
        : graph.status === 'compiled'
          ? 'No steps of this program were recorded, so it cannot be played.'
          : null;
  return [...whole, reason === null ? null : soft(reason)];
}

class Player {
  readonly root: HTMLElement;
  private readonly shared: ReadonlySet<number>;
  private readonly storages = new Map<number, IStepStorage>();
  private readonly stage = h('div');
  private readonly words = h('div', { class: 'al-step', role: 'status' });
  private readonly place = h('span', { class: 'al-step-place' });
  private readonly slider: HTMLInputElement;
  private readonly buttons: Readonly<Record<'back' | 'play' | 'forward', HTMLButtonElement>>;
  private readonly key: string;
  private readonly allKey: string;
  private timer: number | null = null;

  constructor(
    private readonly context: IContext,
    private readonly entry: IEntry,
    private readonly whole: readonly Child[]
  ) {
    this.shared = sharedStorages(entry.graph);
    this.key = `${context.report.identifier} ${entry.key}`;
    this.allKey = `all steps ${entry.key}`;
    this.slider = h('input', {
      type: 'range',
      class: 'al-step-slider',
      min: 0,
      step: 1,
      'aria-label': 'Step of the program',
      'data-key': `step ${this.key}`
    });
    this.slider.addEventListener('input', () => this.choose(Number(this.slider.value)));
    this.buttons = {
      back: this.button('back', 'Step back', '←', () => this.choose(this.position - 1)),
      play: this.button('play', 'Play', '▶ Play', () => this.toggle()),
      forward: this.button('forward', 'Step forward', '→', () => this.choose(this.position + 1))
    };
    const controls = h(
      'div',
      { class: 'al-step-controls' },
      this.buttons.play,
      this.buttons.back,
      this.slider,
      this.buttons.forward,
      this.place,
      this.allButton()
    );
    this.root = h(
      'section',
      {
        class: 'al-player',
        'aria-label': 'The program step by step',
        'data-frame': entry.frame.name,
        'data-graph': entry.graph.index
      },
      controls,
      this.words,
      this.stage
    );
    controls.addEventListener('keydown', event => this.onKey(event));
    this.show();
  }

  /** Whether the steps that touch no shared or written storage are shown, too. */
  private get showsAll(): boolean {
    return this.context.folds.get(this.allKey) === true || !this.hasChoice;
  }

  private get hasChoice(): boolean {
    const count = playedSteps(this.entry.graph, this.shared).length;
    return count > 0 && count < this.entry.graph.steps.length;
  }

  /** The numbers of the steps that the slider moves through. */
  private get played(): readonly number[] {
    return playedSteps(this.entry.graph, this.showsAll ? null : this.shared);
  }

  /** The position of the slider: 0 for the whole program, then one position for each step. */
  private get position(): number {
    const step = chosenSteps.get(this.key) ?? -1;
    return this.played.filter(index => index <= step).length;
  }

  private button(name: string, help: string, text: string, act: () => void): HTMLButtonElement {
    const attributes = { type: 'button', class: 'al-button', 'data-action': name, 'aria-label': help, title: help };
    const button = h('button', attributes, text);
    button.addEventListener('click', act);
    return button;
  }

  private allButton(): HTMLElement | null {
    if (!this.hasChoice) {
      return null;
    }
    const { graph } = this.entry;
    const title = `Show all ${amount(graph.steps.length, 'step')}, not only those that touch shared or written memory`;
    const button = h('button', { type: 'button', class: 'al-button', 'data-action': 'all', title }, 'All steps');
    const press = (): void => button.setAttribute('aria-pressed', String(this.showsAll));
    button.addEventListener('click', () => {
      this.context.folds.set(this.allKey, !this.showsAll);
      press();
      this.show();
    });
    press();
    return button;
  }

  private onKey(event: KeyboardEvent): void {
    const onSlider = event.target === this.slider;
    const act = {
      ArrowLeft: () => this.choose(this.position - 1),
      ArrowRight: () => this.choose(this.position + 1),
      ArrowDown: () => this.choose(this.position - 1),
      ArrowUp: () => this.choose(this.position + 1),
      Home: () => this.choose(0),
      End: () => this.choose(this.played.length),
      ...(onSlider ? { ' ': () => this.toggle() } : {})
    }[event.key];
    if (act !== undefined && !event.ctrlKey && !event.metaKey && !event.altKey && !event.shiftKey) {
      event.preventDefault();
      event.stopPropagation();
      act();
    }
  }

  /** Start or stop playing. At the end, start at the first step. */
  private toggle(): void {
    if (this.timer !== null) {
      this.pause();
      return;
    }
    const { length } = this.played;
    const next = (): void => {
      this.timer = null;
      if (this.root.isConnected && this.position < length) {
        this.move(this.position + 1);
        this.timer = this.position < length ? window.setTimeout(next, length > MANY ? FAST : SLOW) : null;
      }
      this.mark();
    };
    this.move(this.position < length ? this.position : 0);
    next();
  }

  private pause(): void {
    if (this.timer !== null) {
      window.clearTimeout(this.timer);
      this.timer = null;
    }
    this.mark();
  }

  /** Show the state of playing on the buttons. */
  private mark(): void {
    const runs = this.timer !== null;
    this.buttons.play.textContent = runs ? '❚❚ Pause' : '▶ Play';
    this.buttons.play.setAttribute('aria-label', runs ? 'Pause' : 'Play');
    this.buttons.back.disabled = this.position === 0;
    this.buttons.forward.disabled = this.position === this.played.length;
  }

  private choose(position: number): void {
    this.move(position);
    this.pause();
  }

  private move(position: number): void {
    const { played } = this;
    const index = Math.min(Math.max(position, 0), played.length) - 1;
    chosenSteps.set(this.key, index < 0 ? -1 : (played[index] ?? -1));
    this.show();
  }

  /** Show the chosen step, or the whole program. */
  private show(): void {
    const { position, played } = this;
    const index = position === 0 ? null : (played[position - 1] ?? null);
    const step = index === null ? undefined : this.entry.graph.steps[index];
    this.slider.max = String(played.length);
    this.slider.value = String(position);
    this.root.dataset['step'] = index === null ? '' : String(index);
    if (index === null || step === undefined) {
      this.place.textContent = `the whole program, ${amount(played.length, 'step')}`;
      this.words.replaceChildren(this.introduction());
      this.stage.replaceChildren(...this.whole.filter((each): each is Node | string => each !== null));
    } else {
      this.place.textContent = `step ${grouped(position)} of ${grouped(played.length)}`;
      this.words.replaceChildren(...this.columns(step, index));
      this.stage.replaceChildren(legend(), this.map(step, index));
    }
    this.slider.setAttribute('aria-valuetext', `${this.place.textContent ?? ''}${step ? `: ${step.text}` : ''}`);
    this.mark();
  }

  private introduction(): HTMLElement {
    const { steps } = this.entry.graph;
    const left = steps.length - this.played.length;
    const words = left > 0 ? ` ${amount(left, 'step')} that touch no shared or written memory are left out.` : '';
    return soft(
      `Play the program to see which bytes each call reads and writes, and what the graph does instead.${words}`
    );
  }

  /** The four columns about a step. */
  private columns(step: Step, index: number): HTMLElement[] {
    const { selection } = this.context;
    const { nodes } = step;
    const column = (title: string, ...children: readonly Child[]): HTMLElement =>
      h('div', { class: 'al-step-column', 'data-column': title }, h('small', {}, title), ...children);
    const code = (text: string): HTMLElement => h('code', {}, text);
    const ops = nodes.flatMap((node, n) => [n > 0 ? ', ' : '', code(node)]);
    const line = step.line === null ? null : selection.lineButton(step.line);
    if (isCall(step)) {
      return [
        column('your line', line, step.line === null ? 'unknown' : code(step.line.code)),
        column('the call', code(step.text), h('p', {}, accessText(step))),
        column('the graph', ...this.graphWords(step, ops)),
        column('the epilogue', ...this.laterWords(step, index))
      ];
    }
    const own = [code(step.text), h('p', {}, accessText(step))];
    const isGraph = step.kind === 'graph';
    return [
      column('your line', 'none: the program has ended'),
      column('the call', 'none'),
      column('the graph', ...(isGraph ? own : nodes.length > 0 ? ['returned the value ', ...ops] : ['has ended'])),
      column('the epilogue', ...(isGraph ? ['comes later'] : own))
    ];
  }

  private graphWords(step: Step, ops: readonly Child[]): Child[] {
    if (ops.length === 0) {
      return [step.makes.length > 0 && step.writes.length === 0 ? 'no op: a view computes no value' : 'no op'];
    }
    const written = [...new Set(step.writes.map(access => storageName(access.storage)))];
    const after = `compute a new value of ${listed(written)}. The memory itself does not change.`;
    return [...ops, written.length > 0 ? h('p', {}, after) : null];
  }

  /** Say which later steps store the bytes that a call has written. */
  private laterWords(step: Step, index: number): Child[] {
    const written = new Set(step.writes.map(access => access.storage));
    if (written.size === 0) {
      return ['nothing to do for this call'];
    }
    const later = this.entry.graph.steps
      .slice(index + 1)
      .filter(each => !isCall(each) && each.writes.some(access => written.has(access.storage)));
    const texts = later.slice(0, 4).flatMap((each, n) => [n > 0 ? ', ' : '', h('code', {}, each.text)]);
    return later.length === 0
      ? ['no copy: the caller cannot see this memory']
      : [later[0]?.kind === 'graph' ? 'none; the graph ends with ' : 'later ', ...texts];
  }

  /** Draw the storages at a step. */
  private map(step: Step, index: number): HTMLElement {
    const touched = storagesIn(step);
    const always = this.shared.size <= MOST_STORAGES ? [...this.shared] : [];
    // Storages that are always drawn keep their places. Those that only this step touches come after them.
    const drawn = [...new Set([...always.sort(byNumber), ...touched])].slice(0, 2 * MOST_STORAGES);
    return h('div', { class: 'al-map' }, ...drawn.map(number => this.storageFigure(this.storage(number), step, index)));
  }

  private storage(number: number): IStepStorage {
    const known = this.storages.get(number) ?? stepStorage(this.entry.graph, number);
    this.storages.set(number, known);
    return known;
  }

  private storageFigure(storage: IStepStorage, step: Step, index: number): HTMLElement {
    const { number, nbytes } = storage;
    const id = uniqueId();
    const percent = (bytes: number): string => `${(100 * bytes) / nbytes}%`;
    const pending = storage.isCallers ? pendingAt(this.entry.graph, number, index) : [];
    const { rows, count } = rowsOf(storage, step, index);
    const top = BAR + STRIP + 6;
    const state = pending.length > 0 ? '. The caller’s memory does not have the new values yet' : '';
    const accesses = accessText(step, number);
    const picture = svg(
      'svg',
      {
        'data-storage': number,
        role: 'img',
        width: '100%',
        height: top + count * ROW + AXIS,
        'aria-label': `Storage ${storageName(number)}, ${storage.about}: ${accesses}${state}.`
      },
      hatchPatterns(id),
      svg('rect', { class: 'al-whole', x: 0, y: 1, width: '100%', height: BAR - 2, rx: 2 }),
      ...markRects(marksIn(step, number), 1, BAR - 2, nbytes, id),
      ...pending.map(({ start, stop }) =>
        svg('rect', {
          class: 'al-pending',
          x: percent(start),
          y: BAR + 1,
          width: percent(stop - start),
          height: STRIP - 1
        })
      ),
      ...rows.flatMap((tensor, row) =>
        tensor.from <= index ? [tensorRow(tensor, step, storage, index, top + row * ROW, percent, id)] : []
      ),
      axis(top + count * ROW, nbytes, percent)
    );
    return h(
      'figure',
      { class: 'al-storage', 'data-pending': pending.map(({ start, stop }) => `${start}-${stop}`).join(' ') },
      h('figcaption', {}, h('b', {}, storageName(number)), ` ${storage.about}${state}`),
      picture
    );
  }
}

/** The order of storages: the report's storages first, then those that exist only while the program runs. */
function byNumber(a: number, b: number): number {
  return Number(a < 0) - Number(b < 0) || Math.abs(a) - Math.abs(b);
}
