/** Draw a report: the verdict, the environment, and tabs. When the source changes, the report is drawn again. */

import { ReportSource } from '../live/source';
import { frameCountsOf } from '../model/report';
import type { Report } from '../model/report';
import { chips, headOf, rankChips, SYMBOLS } from '../model/verdict';
import type { Head } from '../model/verdict';
import { amount, cutNotice, grouped } from '../model/words';
import type { IDisposable, ISource } from '../source';
import { revealLine } from './code';
import { entriesOf, servingOf } from './context';
import type { IContext, IEntry } from './context';
import { h, uniqueId } from './dom';
import { foldButton, isFolded, setFolded } from './folded';
import { graphFacts } from './graph';
import { environmentText } from './overview';
import { reportsOf } from './ranks';
import { Clock, runningSteps, runningWords } from './running';
import { Selection } from './selection';
import type { ITarget } from './selection';
import type { ITableState } from './table';
import { TABS, WHOLE_GRAPHS } from './tabs';
import type { ITab } from './tabs';
import { measureLine } from './timing';

/** Keys that a focused control uses, and that a notebook would handle as commands. */
const KEYS: ReadonlySet<string> = new Set([
  'ArrowLeft',
  'ArrowRight',
  'ArrowUp',
  'ArrowDown',
  'Home',
  'End',
  'PageUp',
  'PageDown',
  'Enter',
  ' '
]);

/** The view requests at most this many graphs of one function. */
const MOST_ASKED = 500;

/** The value of the entry "all graphs" in the list of graphs. */
const ALL = '*';

/**
 * Draw the report of `source` into `host`, and draw it again after each change until the result is disposed.
 *
 * Only the visible panel is drawn. `open` shows the report in a separate tab of JupyterLab; it is null if there are no
 * such tabs.
 */
export function mount(host: HTMLElement, source: ISource, open: (() => void) | null = null): IDisposable {
  return new Ranks(host, source, open);
}

/** A view of one rank of a distributed job at a time. A report of one process has one view. */
class Ranks implements IDisposable {
  private view: View;

  constructor(
    private readonly host: HTMLElement,
    /** The source of the gathered report. */
    private readonly source: ISource,
    private readonly open: (() => void) | null
  ) {
    this.view = new View(host, source, open, this);
  }

  get gathered(): Report | null {
    return this.source.reading.report;
  }

  /** Show a rank, and open a tab. */
  choose(rank: number, tab: string): void {
    const report = this.gathered?.rank_reports.find(each => each.rank === rank);
    let source = this.source;
    if (report !== undefined) {
      const rankSource = new ReportSource();
      rankSource.update({ reading: { report, problem: null, damage: [] } });
      source = rankSource;
    }
    this.view.dispose();
    this.view = new View(this.host, source, this.open, this, tab);
  }

  dispose(): void {
    this.view.dispose();
  }
}

class View implements IDisposable {
  private readonly source: ISource;
  /** Whether the report fills a page or a tab. Then it is always shown in full. */
  private readonly whole: boolean;
  private readonly root = h('div', { class: 'aotlab-report aotlab-view' });
  private readonly prefix = uniqueId();
  private readonly folds = new Map<string, boolean>();
  private readonly selection: Selection;
  private readonly tables = new Map<string, ITableState>();
  private readonly unsubscribe: () => void;
  private readonly clock: Clock;
  private scope = ALL;
  private drawnReport: Report | null = null;
  private lastState: Pick<ISource, 'reading' | 'live'> | null = null;

  constructor(
    host: HTMLElement,
    source: ISource,
    private readonly open: (() => void) | null,
    private readonly ranks: Ranks,
    private tab = ''
  ) {
    this.source = source;
    this.whole = host.classList.contains('aotlab-whole');
    host.append(this.root);
    this.selection = new Selection({
      root: this.root,
      source,
      report: () => this.drawnReport,
      show: (target, id) => this.show(target, id)
    });
    this.root.addEventListener('keydown', this.onKey);
    this.unsubscribe = source.onChange(() => this.onChange());
    this.clock = new Clock(this.root, source);
    this.draw();
  }

  dispose(): void {
    this.unsubscribe();
    this.clock.dispose();
    this.root.removeEventListener('keydown', this.onKey);
    this.root.remove();
  }

  private readonly onKey = (event: KeyboardEvent): void => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey || !KEYS.has(event.key)) {
      return;
    }
    // The notebook must not see the key: it would select another cell or open the cell's editor.
    event.stopPropagation();
    const target = event.target instanceof Element ? event.target.closest('[role=tab]') : null;
    const tabs = [...this.root.querySelectorAll<HTMLElement>('[role=tab]')];
    const tabIndex = tabs.findIndex(tab => tab === target);
    const last = tabs.length - 1;
    const next = {
      ArrowRight: tabIndex === last ? 0 : tabIndex + 1,
      ArrowLeft: tabIndex === 0 ? last : tabIndex - 1,
      Home: 0,
      End: last
    };
    if (tabIndex >= 0 && event.key in next) {
      event.preventDefault();
      this.select(tabs[next[event.key as keyof typeof next]]?.dataset['tab'] ?? 'overview', true);
    }
  };

  private onChange(): void {
    const { reading, live } = this.source;
    if (reading === this.lastState?.reading && live === this.lastState.live) {
      // Only the progress of a measurement changed. This is frequent, so only the words about it are drawn again.
      this.root.querySelector('.al-measuring')?.replaceWith(measureLine(this.source, this.drawnReport));
    } else if (!this.drawRunning(reading.report)) {
      this.draw();
    }
  }

  /** If only the activity of the cell has changed, draw only the activity, and return true. */
  private drawRunning(report: Report | null): boolean {
    const drawn = this.drawnReport;
    const { reading, live } = this.source;
    if (report === null || report.running === null || !drawn?.running) {
      return false;
    }
    if (report.frames !== drawn.frames || live !== this.lastState?.live) {
      return false;
    }
    this.lastState = { reading, live };
    this.drawnReport = report;
    this.root.querySelector('.al-now')?.replaceWith(runningWords(report.running, live));
    const steps = runningSteps(report, this.source);
    if (steps !== null) {
      this.root.querySelector('.al-steps')?.replaceWith(steps);
    }
    return true;
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
    this.lastState = { reading, live };
    this.clock.follow();
    const focused = this.focusedKey();
    const { report } = reading;
    const scroll = this.panel()?.scrollTop ?? 0;
    // The reader may have changed the height of the panel by dragging. Keep it.
    const height = this.panel()?.style.height ?? '';
    const same = report !== null && report.identifier === this.drawnReport?.identifier;
    this.drawnReport = report;
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
    if (!same && report.run_rows.length > 0) {
      this.tab = 'runs';
    } else if (this.tab === '') {
      this.tab = report.world_size > 1 ? 'ranks' : 'overview';
    }
    const folded = this.isFolded(report);
    this.root.classList.toggle('al-folded', folded);
    const lines = [
      this.verdictLine(head, folded),
      this.environmentLine(report, entries, head.listed),
      this.tabList(head, report)
    ];
    if (same) {
      // Replace only lines that changed: a button that is replaced while the reader presses it gets no click.
      lines.forEach((line, index) => {
        const oldLine = this.root.children[index];
        if (oldLine?.isEqualNode(line) !== true) {
          oldLine?.replaceWith(line);
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
    const keyedElements = [...this.root.querySelectorAll<HTMLElement>('[data-key]')];
    keyedElements.find(element => element.dataset['key'] === key)?.focus({ preventScroll: true });
  }

  private panel(): HTMLElement | null {
    return this.root.querySelector<HTMLElement>('[role=tabpanel]:not([hidden])');
  }

  /** The line with the status and the counts. Each is a button that opens its tab. */
  private verdictLine(head: Head, folded: boolean): HTMLElement {
    const running = this.drawnReport?.running ?? null;
    const tab = running === null ? 'verification' : 'overview';
    const status = { tab, text: `${SYMBOLS[head.state]} ${head.status}`, tone: 'status' };
    const gathered = this.ranks.gathered;
    const buttons = [status, ...(gathered === null ? [] : rankChips(gathered)), ...chips(head)].map(
      ({ tab, text, tone }) => {
        const title = TABS.find(each => each.name === tab)?.title ?? tab;
        const button = h(
          'button',
          {
            type: 'button',
            class: `al-chip al-${tone ?? 'plain'}`,
            'data-chip': tab,
            'data-key': `chip ${tab} ${tone ?? ''}`,
            title: `Open ${title}`
          },
          ...(running !== null && tone === 'status'
            ? [`${SYMBOLS.running} `, runningWords(running, this.source.live)]
            : [text])
        );
        button.addEventListener('click', () => {
          this.fold(false);
          this.select(tab, true);
        });
        return button;
      }
    );
    return h(
      'div',
      { class: `al-verdict al-state-${head.state}`, role: 'group', 'aria-label': 'How it went' },
      ...buttons,
      this.whole ? null : foldButton(folded, () => this.fold(!folded))
    );
  }

  private isFolded(report: Report): boolean {
    return !this.whole && isFolded(report);
  }

  private fold(folded: boolean): void {
    const report = this.drawnReport;
    if (report !== null && this.isFolded(report) !== folded) {
      setFolded(report, folded);
      this.draw();
    }
  }

  private environmentLine(report: Report, entries: readonly IEntry[], graphs: number): HTMLElement {
    const live = this.source.live
      ? h('span', { class: 'al-live', title: 'The kernel answers for this report' }, 'live')
      : null;
    const text = environmentText(report.environment, report.name);
    return h(
      'div',
      { class: 'al-environment' },
      live,
      h('span', { class: 'al-about', title: text }, text),
      this.rankList(report),
      this.graphList(entries, graphs),
      this.openButton()
    );
  }

  private openButton(): HTMLElement | null {
    const { open } = this;
    if (open === null) {
      return null;
    }
    const button = h(
      'button',
      { type: 'button', class: 'al-button', 'data-key': 'open', 'data-action': 'open' },
      'Open in a tab'
    );
    button.addEventListener('click', open);
    return button;
  }

  private tabList(head: Head, report: Report): HTMLElement {
    const list = h('div', { role: 'tablist', 'aria-label': 'Parts of the report' });
    for (const { name, title, size, counted, others, optional } of TABS) {
      const chosen = name === this.tab;
      const count = size(head, report);
      if (optional === true && count === 0) {
        continue;
      }
      const button = h(
        'button',
        {
          type: 'button',
          role: 'tab',
          id: `${this.prefix}-tab-${name}`,
          class: count + (others?.(report) ?? 0) > 0 ? null : 'al-empty',
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

  /** The list from which the reader chooses a graph; `graphs` is their number before the report was cut. */
  private graphList(entries: readonly IEntry[], graphs: number): HTMLElement | null {
    if (graphs < 2 && entries.length < 2) {
      return null;
    }
    const serving = servingOf(entries);
    const cutCount = graphs - serving.length;
    const whose = serving.length < entries.length ? ' of aotlab' : '';
    const select = h(
      'select',
      { class: 'al-select', 'aria-label': 'Which graph to show', 'data-key': 'graphs' },
      h('option', { value: ALL }, `All ${amount(graphs, 'graph')}${whose}`),
      ...entries.map(entry =>
        h('option', { value: entry.key }, `${entry.title} · ${graphFacts(entry.graph).join(' · ')}`)
      ),
      cutCount > 0 ? h('option', { disabled: true }, cutNotice(cutCount, 'graph')) : null
    );
    select.value = this.scope;
    select.addEventListener('change', () => {
      this.scope = select.value;
      this.drawPanels();
    });
    return select;
  }

  /** The list from which the reader chooses a rank of a distributed job. */
  private rankList({ rank }: Report): HTMLElement | null {
    const { gathered } = this.ranks;
    if (gathered === null || gathered.rank_reports.length === 0) {
      return null;
    }
    const select = h(
      'select',
      { class: 'al-select', 'aria-label': 'Which rank to show', 'data-key': 'ranks' },
      ...reportsOf(gathered).map(each => h('option', { value: String(each.rank) }, `Rank ${each.rank}`))
    );
    select.value = String(rank);
    select.addEventListener('change', () => this.ranks.choose(Number(select.value), this.tab));
    return select;
  }

  private emptyPanel({ name }: ITab): HTMLElement {
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
    const report = this.drawnReport;
    if (report === null || this.isFolded(report)) {
      return;
    }
    const entries = entriesOf(report);
    const chosen = this.scope === ALL ? servingOf(entries) : entries.filter(entry => entry.key === this.scope);
    const context: IContext = {
      source: this.source,
      report,
      gathered: this.ranks.gathered ?? report,
      chooseRank: rank => this.ranks.choose(rank, this.tab),
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
      const isOpen = tab.name === this.tab;
      if (panel !== null) {
        panel.hidden = !isOpen;
        panel.replaceChildren(
          ...(isOpen ? tab.draw(context).filter((child): child is Node | string => child !== null) : [])
        );
      }
    }
    if (this.source.live) {
      this.askForCutRows(context);
    }
  }

  /** Show an element that the line with the number `id` caused. */
  private show({ tab, entry, folds }: ITarget, id: number): void {
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
    if (place) {
      revealLine(place, id);
      place.scrollIntoView?.({ block: 'nearest' });
      (fold ?? place.querySelector<HTMLElement>('button') ?? place).focus({ preventScroll: true });
    }
  }

  /** Draw the panel again, and keep the focus. */
  private redraw(): void {
    const focused = this.focusedKey();
    const scroll = this.panel()?.scrollTop ?? 0;
    this.drawPanels();
    this.panel()?.scrollTo?.({ top: scroll });
    if (focused !== null) {
      this.focus(focused);
    }
  }

  /** Ask the kernel for the rows and graphs of the visible tab that were cut. */
  private askForCutRows({ report, head, chosen }: IContext): void {
    if (this.tab === 'verification' && head.compared > report.verification_rows.length) {
      this.source.askRows('verification');
    }
    if (this.tab === 'inputs' && report.cell !== null && head.outside > report.cell.mutated_outside.length) {
      this.source.askRows('outside');
    }
    if (!WHOLE_GRAPHS.has(this.tab)) {
      return;
    }
    for (const { frame, graph } of chosen.filter(entry => entry.graph.cut)) {
      this.source.askGraph(frame.name, graph.index);
    }
    for (const frame of this.scope === ALL ? report.frames : []) {
      const presentIndices = new Set(frame.graphs.map(graph => graph.index));
      for (let index = 0; index < Math.min(frameCountsOf(frame).graphs, MOST_ASKED); index += 1) {
        if (!presentIndices.has(index)) {
          this.source.askGraph(frame.name, index);
        }
      }
    }
  }
}
