/** The report, drawn: the verdict, the environment, and tabs; redrawn when the source changes. */

import type { Environment, Report } from '../model/report';
import { chips, headOf } from '../model/verdict';
import type { Head, State } from '../model/verdict';
import { amount, grouped } from '../model/words';
import type { Disposable, Source } from '../source';
import { breaksPanel } from './breaks';
import { callsPanel } from './calls';
import { revealLine } from './code';
import { entriesOf } from './context';
import type { Context, Entry } from './context';
import { h, uniqueId } from './dom';
import type { Child } from './dom';
import { graphFacts } from './graph';
import { inputsPanel } from './inputs';
import { kernelsPanel } from './kernels';
import { outputsPanel } from './outputs';
import { deviceText, overviewPanel } from './overview';
import { savedPanel } from './saved';
import { Selection } from './selection';
import type { Target } from './selection';
import { stagesPanel } from './stages';
import { storagesPanel } from './storages';
import type { TableState } from './table';
import { measuring, timingPanel } from './timing';
import { verificationPanel } from './verification';

interface Tab {
  readonly name: string;
  readonly title: string;
  readonly draw: (context: Context) => Child[];
  /** How many things there are; a tab that has none is dimmed. */
  readonly size: (head: Head, report: Report) => number;
  /** Whether the number stands beside the title. */
  readonly counted?: boolean;
}

const TABS: readonly Tab[] = [
  { name: 'overview', title: 'Overview', draw: overviewPanel, size: () => 1 },
  {
    name: 'inputs',
    title: 'Inputs',
    draw: inputsPanel,
    size: ({ counts, outside }) => counts.inputs || outside,
    counted: true
  },
  { name: 'outputs', title: 'Outputs', draw: outputsPanel, size: ({ counts }) => counts.outputs, counted: true },
  { name: 'storages', title: 'Storage map', draw: storagesPanel, size: ({ counts }) => counts.storages },
  { name: 'stages', title: 'Stages', draw: stagesPanel, size: ({ counts }) => counts.stages },
  { name: 'saved', title: 'Saved', draw: savedPanel, size: ({ counts }) => counts.saved, counted: true },
  { name: 'kernels', title: 'Kernels', draw: kernelsPanel, size: ({ counts }) => counts.kernels, counted: true },
  { name: 'breaks', title: 'Graph breaks', draw: breaksPanel, size: ({ breaks }) => breaks, counted: true },
  { name: 'calls', title: 'Recompiles & calls', draw: callsPanel, size: ({ frames }) => frames },
  { name: 'timing', title: 'Timing', draw: timingPanel, size: (_, { timing_rows: rows }) => rows.length },
  { name: 'verification', title: 'Verification', draw: verificationPanel, size: ({ compared }) => compared, counted: true }
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
 * Only the panel that is looked at is drawn. `open`, where it can be done, shows the report in a tab of its own.
 */
export function mount(host: HTMLElement, source: Source, open: (() => void) | null = null): Disposable {
  return new View(host, source, open);
}

class View implements Disposable {
  private readonly source: Source;
  private readonly root = h('div', { class: 'aotlab-report aotlab-view' });
  private readonly prefix = uniqueId();
  private readonly folds = new Map<string, boolean>();
  private readonly selection: Selection;
  private readonly tables = new Map<string, TableState>();
  private readonly unsubscribe: () => void;
  private tab = 'overview';
  private scope = ALL;
  private drawn: Report | null = null;
  private before: Pick<Source, 'reading' | 'live'> | null = null;

  constructor(
    host: HTMLElement,
    source: Source,
    private readonly open: (() => void) | null
  ) {
    this.source = source;
    host.append(this.root);
    this.selection = new Selection({
      root: this.root,
      source,
      report: () => this.drawn,
      show: (target, id) => this.show(target, id)
    });
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
    const { reading, live } = this.source;
    if (reading === this.before?.reading && live === this.before.live) {
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
    const { reading, live } = this.source;
    this.before = { reading, live };
    const focused = this.focusedKey();
    const { report } = reading;
    const scroll = this.panel()?.scrollTop ?? 0;
    // The height that the reader gave it by pulling.
    const height = this.panel()?.style.height ?? '';
    const same = report !== null && report.identifier === this.drawn?.identifier;
    this.drawn = report;
    this.selection.renew(same);
    this.root.dataset['live'] = String(live);
    if (report === null) {
      this.root.dataset['identifier'] = '';
      this.root.dataset['state'] = 'unreadable';
      this.root.replaceChildren(h('p', { class: 'al-verdict al-state-unreadable' }, `! ${reading.problem}`));
      return;
    }
    const head = headOf(report);
    this.root.dataset['identifier'] = report.identifier;
    this.root.dataset['state'] = head.state;
    const entries = entriesOf(report);
    if (!entries.some(entry => entry.key === this.scope)) {
      this.scope = ALL;
    }
    const lines = [this.verdictLine(head), this.environmentLine(report, entries), this.tabList(head, report)];
    if (same) {
      // A button that is replaced while it is pressed is never clicked.
      lines.forEach((line, at) => {
        const before = this.root.children[at];
        if (before?.isEqualNode(line) !== true) {
          before?.replaceWith(line);
        }
      });
    } else {
      this.root.replaceChildren(...lines, this.selection.bar, ...TABS.map(tab => this.emptyPanel(tab)));
    }
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

  /** The status and the numbers, each of which opens its tab. */
  private verdictLine(head: Head): HTMLElement {
    const status = { tab: 'verification', text: `${SYMBOLS[head.state]} ${head.status}`, tone: 'status' };
    const buttons = [status, ...chips(head)].map(({ tab, text, tone }) => {
      const title = TABS.find(each => each.name === tab)?.title ?? tab;
      const button = h(
        'button',
        { type: 'button', class: `al-chip al-${tone ?? 'plain'}`, 'data-chip': tab, 'data-key': `chip ${tab} ${tone ?? ''}`, title: `Open ${title}` },
        text
      );
      button.addEventListener('click', () => this.select(tab, true));
      return button;
    });
    return h('div', { class: `al-verdict al-state-${head.state}`, role: 'group', 'aria-label': 'How it went' }, ...buttons);
  }

  private environmentLine(report: Report, entries: readonly Entry[]): HTMLElement {
    const live = this.source.live ? h('span', { class: 'al-live', title: 'The kernel answers for this report' }, 'live') : null;
    const text = environmentText(report.environment, report.name);
    return h(
      'div',
      { class: 'al-environment' },
      live,
      h('span', { class: 'al-about', title: text }, text),
      this.graphList(entries),
      this.openButton()
    );
  }

  private openButton(): HTMLElement | null {
    const { open } = this;
    if (open === null) {
      return null;
    }
    const button = h('button', { type: 'button', class: 'al-button', 'data-key': 'open', 'data-action': 'open' }, 'Open in a tab');
    button.addEventListener('click', open);
    return button;
  }

  private tabList(head: Head, report: Report): HTMLElement {
    const list = h('div', { role: 'tablist', 'aria-label': 'Parts of the report' });
    for (const { name, title, size, counted } of TABS) {
      const chosen = name === this.tab;
      const count = size(head, report);
      const button = h(
        'button',
        {
          type: 'button',
          role: 'tab',
          id: `${this.prefix}-tab-${name}`,
          class: count > 0 ? null : 'al-empty',
          'data-tab': name,
          'data-key': `tab ${name}`,
          'aria-selected': String(chosen),
          'aria-controls': `${this.prefix}-panel-${name}`,
          tabindex: chosen ? '0' : '-1'
        },
        title,
        counted === true && count > 0 ? h('small', {}, ` ${grouped(count)}`) : null
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
    const context: Context = {
      source: this.source,
      report,
      head: headOf(report),
      entries,
      chosen,
      folds: this.folds,
      selection: this.selection,
      tables: this.tables,
      redraw: () => this.redraw()
    };
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

  /** Go to what comes from a line of the program. */
  private show({ tab, entry, folds }: Target, id: number): void {
    const list = this.root.querySelector<HTMLSelectElement>('[data-key=graphs]');
    if (entry !== null && this.scope !== entry.key && list !== null) {
      list.value = this.scope = ALL;
    }
    folds.forEach(key => this.folds.set(key, true));
    this.select(tab, false);
    const panel = this.panel();
    const fold = [...(panel?.querySelectorAll<HTMLElement>('summary') ?? [])].find(
      each => each.dataset['key'] === `fold ${folds.at(-1)}`
    );
    const place = fold?.parentElement ?? panel?.querySelector<HTMLElement>(`[data-links~="${id}"]`);
    if (place != null) {
      revealLine(place, id);
      place.scrollIntoView?.({ block: 'nearest' });
      (fold ?? place.querySelector<HTMLElement>('button') ?? place).focus({ preventScroll: true });
    }
  }

  /** Draw the panel anew; what had the focus keeps it. */
  private redraw(): void {
    const focused = this.focusedKey();
    const scroll = this.panel()?.scrollTop ?? 0;
    this.drawPanels();
    this.panel()?.scrollTo?.({ top: scroll });
    if (focused !== null) {
      this.focus(focused);
    }
  }

  /** Ask the kernel for what was cut from the part that is looked at. */
  private askForMore({ report, head, chosen }: Context): void {
    if (this.tab === 'verification' && (report.summary?.compared ?? 0) > report.verification_rows.length) {
      this.source.askRows('verification');
    }
    if (this.tab === 'inputs' && report.cell !== null && head.outside > report.cell.mutated_outside.length) {
      this.source.askRows('outside');
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

/** Where it ran, in a line; all of it is in the overview. */
function environmentText(environment: Environment, name: string): string {
  const devices = environment.devices.slice(0, 8).map(deviceText);
  return [name, `torch ${environment.torch}`, ...devices].filter(each => each !== '').join(' · ');
}
