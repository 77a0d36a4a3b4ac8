/** The activity of a running cell, with its seconds, and the steps that have ended. */

import type { Report, Running, TimelineRow } from '../model/report';
import { duration, short } from '../model/words';
import type { IDisposable, ISource } from '../source';
import { h } from './dom';

/** How often the seconds are drawn again, in milliseconds. */
const TICK_MS = 500;

/** When each state of a running cell arrived, on the clock of the page. */
const arrivals = new WeakMap<Running, number>();

/** The nanoseconds since the begin of the run. They stand still if no kernel answers for the report. */
function elapsed(running: Running, live: boolean): number {
  const now = performance.now();
  const arrival = arrivals.get(running) ?? now;
  arrivals.set(running, arrival);
  return running.elapsed_ns + (live ? (now - arrival) * 1e6 : 0);
}

/** Whole seconds, so that the text does not change its width with each tick: "4 s", "2 min 5 s". */
function seconds(ns: number): string {
  const whole = Math.max(Math.floor(ns / 1e9), 0);
  return whole < 60 ? `${whole} s` : `${Math.floor(whole / 60)} min ${whole % 60} s`;
}

/** The seconds of the run, or of its present activity. */
function clock(running: Running, live: boolean, ofActivity: boolean): HTMLElement {
  const time = h('time', { class: 'al-clock', 'data-of': ofActivity ? 'activity' : 'run' });
  time.textContent = seconds(elapsed(running, live) - (ofActivity ? running.since_ns : 0));
  return time;
}

/** The seconds of the whole run and the present activity, for the head of the page. */
export function runningWords(running: Running, live: boolean): HTMLElement {
  return h('span', { class: 'al-now', title: running.text }, clock(running, live, false), ` · ${running.text}`);
}

function sentence(text: string): string {
  return text.slice(0, 1).toUpperCase() + text.slice(1);
}

/**
 * The steps that have ended, and the present activity as the last row. The result is null if the cell does not run.
 * The list keeps its height while it grows, so that the results of the cell below it do not move.
 */
export function runningSteps({ running }: Report, source: ISource): HTMLElement | null {
  if (running === null) {
    return null;
  }
  const list = h(
    'div',
    { class: 'al-steps', tabindex: '0', 'data-key': 'steps' },
    h(
      'table',
      { 'data-table': 'steps', 'aria-label': 'What the cell has done so far' },
      h('tbody', {}, ...running.steps.map(stepRow), presentRow(running, source.live))
    )
  );
  // The newest step is the last one. The caller adds the list to the page at once.
  queueMicrotask(() => {
    list.scrollTop = list.scrollHeight;
  });
  return list;
}

function stepRow(row: TimelineRow): HTMLElement {
  const graph = row.frame === null ? '' : `${short(row.frame)} · graph ${row.graph ?? 0}`;
  return h(
    'tr',
    { 'data-name': row.stage },
    h('td', { class: 'al-good' }, h('span', { class: 'al-symbol' }, '✓'), ` ${sentence(row.phase)}`),
    h('td', { class: 'al-soft' }, graph),
    h('td', { class: 'al-number' }, duration(row.duration_ns))
  );
}

function presentRow(running: Running, live: boolean): HTMLElement {
  const { kernels, kernels_done: done } = running;
  const bar = kernels > 0 ? h('progress', { max: kernels, value: done, 'aria-label': 'Kernels that are done' }) : null;
  return h(
    'tr',
    { 'data-name': 'now', class: 'al-present' },
    h('td', {}, h('span', { class: 'al-symbol' }, '◌'), ` ${running.text}`),
    h('td', {}, bar),
    h('td', { class: 'al-number' }, clock(running, live, true))
  );
}

/** Keeps the seconds inside of an element up to date while a cell runs and its kernel answers. */
export class Clock implements IDisposable {
  private timer: ReturnType<typeof setInterval> | undefined;

  constructor(
    private readonly root: HTMLElement,
    private readonly source: ISource
  ) {}

  /** Start or stop, as the present state of the source requires. */
  follow(): void {
    this.dispose();
    if (this.source.live && this.source.reading.report?.running) {
      this.timer = setInterval(() => this.tick(), TICK_MS);
    }
  }

  dispose(): void {
    clearInterval(this.timer);
  }

  private tick(): void {
    const running = this.source.reading.report?.running ?? null;
    if (running !== null) {
      for (const each of this.root.querySelectorAll<HTMLElement>('.al-clock')) {
        each.textContent = clock(running, true, each.dataset['of'] === 'activity').textContent;
      }
    }
  }
}
