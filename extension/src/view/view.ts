/** The report, drawn: the verdict, the environment, and tabs; redrawn when the source changes. */

import type { Environment, Report } from '../model/report';
import { verdict } from '../model/verdict';
import type { State } from '../model/verdict';
import { amount } from '../model/words';
import type { Disposable, Source } from '../source';
import { breaksPanel } from './breaks';
import { callsPanel } from './calls';
import { entriesOf } from './context';
import type { Context, Entry } from './context';
import { h, spoken, uniqueId } from './dom';
import type { Child } from './dom';
import { graphFacts } from './graph';
import { inputsPanel } from './inputs';
import { kernelsPanel } from './kernels';
import { outputsPanel } from './outputs';
import { overviewPanel } from './overview';
import { savedPanel } from './saved';
import { stagesPanel } from './stages';
import { storagesPanel } from './storages';
import { measuring, timingPanel } from './timing';
import { verificationPanel } from './verification';

interface Tab {
  readonly name: string;
  readonly title: string;
  readonly draw: (context: Context) => Child[];
}

const TABS: readonly Tab[] = [
  { name: 'overview', title: 'Overview', draw: overviewPanel },
  { name: 'inputs', title: 'Inputs', draw: inputsPanel },
  { name: 'outputs', title: 'Outputs', draw: outputsPanel },
  { name: 'storages', title: 'Storage map', draw: storagesPanel },
  { name: 'stages', title: 'Stages', draw: stagesPanel },
  { name: 'saved', title: 'Saved', draw: savedPanel },
  { name: 'kernels', title: 'Kernels', draw: kernelsPanel },
  { name: 'breaks', title: 'Graph breaks', draw: breaksPanel },
  { name: 'calls', title: 'Recompiles & calls', draw: callsPanel },
  { name: 'timing', title: 'Timing', draw: timingPanel },
  { name: 'verification', title: 'Verification', draw: verificationPanel }
];

const SYMBOLS: Readonly<Record<State, string>> = {
  verified: '✓',
  unverified: '●',
  different: '✗',
  partly: '!',
  nothing: '!'
};

/** Keys that mean something to a focused control, and that a notebook would take for its own. */
const KEYS: ReadonlySet<string> = new Set([
  'ArrowLeft', 'ArrowRight', 'ArrowUp', 'ArrowDown', 'Home', 'End', 'PageUp', 'PageDown', 'Enter', ' '
]);

/** The tabs that show what may have been cut from a graph. */
const WHOLE_GRAPHS: ReadonlySet<string> = new Set([
  'inputs', 'outputs', 'storages', 'stages', 'saved', 'kernels', 'calls'
]);

/** So many graphs of one function are asked for at most. */
const MOST_ASKED = 500;

/** The value of the list of graphs that stands for all of them. */
const ALL = '*';

/**
 * Draw `source` into `host` and keep it up to date until disposed.
 *
 * Only the panel that is looked at is drawn.
 */
export function mount(host: HTMLElement, source: Source): Disposable {
  return new View(host, source);
}

class View implements Disposable {
  private readonly source: Source;
  private readonly root = h('div', { class: 'aotlab-report aotlab-view' });
  private readonly prefix = uniqueId();
  private readonly folds = new Map<string, boolean>();
  private readonly unsubscribe: () => void;
  private tab = 'overview';
  private scope = ALL;
  private drawn: Report | null = null;
  private before: Pick<Source, 'reading' | 'figure' | 'live'> | null = null;

  constructor(host: HTMLElement, source: Source) {
    this.source = source;
    host.append(this.root);
    this.root.addEventListener('keydown', this.onKey);
    this.unsubscribe = source.onChange(() => this.onChange());
    this.draw();
  }

  dispose(): void {
    this.unsubscribe();
    this.root.removeEventListener('keydown', this.onKey);
    this.root.remove();
  }

  private readonly onKey = (event: KeyboardEvent): void => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey || !KEYS.has(event.key)) {
      return;
    }
    // The notebook around us must not move to another cell or open its editor.
    event.stopPropagation();
    const target = event.target instanceof Element ? event.target.closest('[role=tab]') : null;
    const at = TABS.findIndex(tab => tab.name === target?.getAttribute('data-tab'));
    const last = TABS.length - 1;
    const next = { ArrowRight: at === last ? 0 : at + 1, ArrowLeft: at === 0 ? last : at - 1, Home: 0, End: last };
    if (at >= 0 && event.key in next) {
      event.preventDefault();
      this.select(TABS[next[event.key as keyof typeof next]]?.name ?? 'overview', true);
    }
  };

  private onChange(): void {
    const { reading, figure, live } = this.source;
    if (reading === this.before?.reading && figure === this.before.figure && live === this.before.live) {
      // Progress comes often: nothing else is drawn anew for it.
      this.root.querySelector('.al-measuring')?.replaceWith(measuring(this.source, this.drawn));
    } else {
      this.draw();
    }
  }

  private select(name: string, focus: boolean): void {
    this.tab = name;
    for (const tab of this.root.querySelectorAll<HTMLElement>('[role=tab]')) {
      const chosen = tab.dataset['tab'] === name;
      tab.setAttribute('aria-selected', String(chosen));
      tab.tabIndex = chosen ? 0 : -1;
      if (chosen && focus) {
        tab.focus();
      }
    }
    this.drawPanels();
  }

  private draw(): void {
    const { reading, figure, live } = this.source;
    this.before = { reading, figure, live };
    const focused = this.focusedKey();
    const { report } = reading;
    const scroll = this.panel()?.scrollTop ?? 0;
    // The height that the reader gave it by pulling.
    const height = this.panel()?.style.height ?? '';
    const same = report !== null && report.identifier === this.drawn?.identifier;
    this.drawn = report;
    this.root.dataset['live'] = String(live);
    if (report === null) {
      this.root.dataset['identifier'] = '';
      this.root.dataset['state'] = 'unreadable';
      this.root.replaceChildren(h('p', { class: 'al-verdict al-state-unreadable' }, h('b', {}, '!'), reading.problem));
      return;
    }
    const found = verdict(report);
    this.root.dataset['identifier'] = report.identifier;
    this.root.dataset['state'] = found.state;
    const entries = entriesOf(report);
    if (!entries.some(entry => entry.key === this.scope)) {
      this.scope = ALL;
    }
    this.root.replaceChildren(
      h('p', { class: `al-verdict al-state-${found.state}` }, h('b', {}, SYMBOLS[found.state]), spoken(found.sentence)),
      this.environmentLine(report),
      ...notes(report, reading.damage, live),
      h('div', { class: 'al-bar' }, this.tabList(), this.graphList(entries)),
      ...TABS.map(tab => this.emptyPanel(tab))
    );
    this.drawPanels();
    const panel = this.panel();
    if (same && panel !== null) {
      panel.style.height = height;
      panel.scrollTop = scroll;
    }
    if (focused !== null) {
      this.focus(focused);
    }
  }

  private focusedKey(): string | null {
    const focused = document.activeElement;
    return focused instanceof HTMLElement && this.root.contains(focused) ? (focused.dataset['key'] ?? null) : null;
  }

  private focus(key: string): void {
    const all = [...this.root.querySelectorAll<HTMLElement>('[data-key]')];
    all.find(each => each.dataset['key'] === key)?.focus({ preventScroll: true });
  }

  private panel(): HTMLElement | null {
    return this.root.querySelector<HTMLElement>('[role=tabpanel]:not([hidden])');
  }

  private environmentLine(report: Report): HTMLElement {
    const live = this.source.live ? h('span', { class: 'al-live', title: 'The kernel answers for this report' }, 'live') : null;
    return h('p', { class: 'al-environment' }, live, environmentText(report.environment, report.name));
  }

  private tabList(): HTMLElement {
    const list = h('div', { role: 'tablist', 'aria-label': 'Parts of the report' });
    for (const { name, title } of TABS) {
      const chosen = name === this.tab;
      const button = h(
        'button',
        {
          type: 'button',
          role: 'tab',
          id: `${this.prefix}-tab-${name}`,
          'data-tab': name,
          'data-key': `tab ${name}`,
          'aria-selected': String(chosen),
          'aria-controls': `${this.prefix}-panel-${name}`,
          tabindex: chosen ? '0' : '-1'
        },
        title
      );
      button.addEventListener('click', () => this.select(name, false));
      list.append(button);
    }
    return list;
  }

  private graphList(entries: readonly Entry[]): HTMLElement | null {
    if (entries.length < 2) {
      return null;
    }
    const select = h(
      'select',
      { class: 'al-select', 'aria-label': 'Which graph to show', 'data-key': 'graphs' },
      h('option', { value: ALL }, `All ${amount(entries.length, 'graph')}`),
      ...entries.map(entry =>
        h('option', { value: entry.key }, `${entry.title} · ${graphFacts(entry.graph).join(' · ')}`)
      )
    );
    select.value = this.scope;
    select.addEventListener('change', () => {
      this.scope = select.value;
      this.drawPanels();
    });
    return select;
  }

  private emptyPanel({ name }: Tab): HTMLElement {
    return h('div', {
      role: 'tabpanel',
      id: `${this.prefix}-panel-${name}`,
      'aria-labelledby': `${this.prefix}-tab-${name}`,
      'data-panel': name,
      class: 'al-panel',
      tabindex: '0',
      hidden: true
    });
  }

  private drawPanels(): void {
    const report = this.drawn;
    if (report === null) {
      return;
    }
    const entries = entriesOf(report);
    const chosen = this.scope === ALL ? entries : entries.filter(entry => entry.key === this.scope);
    const context: Context = { source: this.source, report, entries, chosen, folds: this.folds };
    for (const tab of TABS) {
      const panel = this.root.querySelector<HTMLElement>(`[data-panel=${tab.name}]`);
      const shown = tab.name === this.tab;
      if (panel !== null) {
        panel.hidden = !shown;
        panel.replaceChildren(...(shown ? tab.draw(context).filter((each): each is Node | string => each !== null) : []));
      }
    }
    if (this.source.live) {
      this.askForMore(context);
    }
  }

  /** Ask the kernel for what was cut from the part that is looked at. */
  private askForMore({ report, chosen }: Context): void {
    if (this.tab === 'verification' && (report.summary?.compared ?? 0) > report.verification_rows.length) {
      this.source.askVerification();
    }
    if (!WHOLE_GRAPHS.has(this.tab)) {
      return;
    }
    for (const { frame, graph } of chosen.filter(entry => entry.graph.counts !== null)) {
      this.source.askGraph(frame.name, graph.index);
    }
    for (const frame of this.scope === ALL ? report.frames : []) {
      const known = new Set(frame.graphs.map(graph => graph.index));
      for (let index = 0; index < Math.min(frame.counts?.graphs ?? 0, MOST_ASKED); index += 1) {
        if (!known.has(index)) {
          this.source.askGraph(frame.name, index);
        }
      }
    }
  }
}

function environmentText(environment: Environment, name: string): string {
  const devices = environment.devices.slice(0, 8).map(device => {
    const place = device.index === null ? device.kind : `${device.kind}:${device.index}`;
    return device.name === '' ? place : `${place} (${device.name})`;
  });
  const versions = [`torch ${environment.torch}`, `Python ${environment.python}`, `aotlab ${environment.aotlab}`];
  return [name, ...versions, ...devices].filter(each => each !== '').join(' · ');
}

function notes(report: Report, damage: readonly string[], live: boolean): HTMLElement[] {
  // A kernel that answers gives what was cut when it is looked at.
  const texts = report.notes.filter(note => !live || !note.startsWith('This output is cut to fit a notebook'));
  const [first] = damage;
  if (first !== undefined) {
    texts.push(`This report is damaged; what could not be read is left out. First: ${first}.`);
  }
  return texts.map(text => h('p', { class: 'al-note' }, text));
}
