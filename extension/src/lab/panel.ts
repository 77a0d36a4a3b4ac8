/** The side panel with the reports of the current notebook. */

import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import { Widget } from '@lumino/widgets';

import { readPacked } from '../model/packed';
import { chips, headOf, SYMBOLS } from '../model/verdict';
import type { IDisposable } from '../source';
import type { OpenTab } from '../tab';
import { h, soft } from '../view/dom';
import { icon } from './icon';
import { onNotebookChange, reportsOf } from './reports';
import type { IShownReport } from './reports';

export const PANEL_ID = 'aotlab-reports';

/** Lists the reports of the current notebook, newest first. */
export class ReportsPanel extends Widget {
  private readonly list = h('ul', { 'aria-label': 'Reports of this notebook, newest first' });
  private readonly changes: IDisposable;

  constructor(
    tracker: INotebookTracker,
    private readonly open: OpenTab
  ) {
    super();
    this.id = PANEL_ID;
    this.title.icon = icon;
    this.title.caption = 'aotlab reports';
    this.addClass('aotlab-panel');
    const root = h('div', { class: 'aotlab-report aotlab-view' }, h('h4', { class: 'al-heading' }, 'aotlab reports'));
    root.append(this.list);
    this.node.append(root);
    this.list.addEventListener('keydown', this.onKey);
    this.changes = onNotebookChange(tracker, panel => this.draw(panel));
  }

  override dispose(): void {
    if (!this.isDisposed) {
      this.changes.dispose();
    }
    super.dispose();
  }

  private readonly onKey = (event: KeyboardEvent): void => {
    const buttons = [...this.list.querySelectorAll('button')];
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const next = buttons[buttons.findIndex(button => button === document.activeElement) + (step ?? 0)];
    if (step !== undefined && next !== undefined) {
      event.preventDefault();
      next.focus();
    }
  };

  private draw(panel: NotebookPanel | null): void {
    const reports = panel === null ? [] : reportsOf(panel);
    const focused = [...this.list.children].findIndex(item => item.contains(document.activeElement));
    const items = reports.map(report => h('li', {}, this.button(report, panel)));
    const hint =
      panel === null
        ? 'Open a notebook to see its reports.'
        : 'No cell of this notebook has a report. Write %%aotcompile at the top of a cell and run it.';
    this.list.replaceChildren(...(items.length > 0 ? items : [h('li', {}, soft(hint))]));
    items[focused]?.querySelector('button')?.focus();
  }

  private button(report: IShownReport, panel: NotebookPanel | null): HTMLElement {
    const { head, cell } = report;
    const summary = headOf(head);
    const count = head.cell?.execution_count ?? null;
    const place = count === null ? '' : `In [${count}]`;
    const code = cell.model.sharedModel.getSource().split('\n');
    const firstLine = code.find(line => line.trim() !== '' && !line.startsWith('%')) ?? '';
    const name = head.name !== '' ? head.name : firstLine.trim();
    const created = new Date(head.created);
    const time = Number.isNaN(created.getTime()) ? '' : created.toLocaleTimeString();
    const counts = chips(summary).map(chip => chip.text);
    const button = h(
      'button',
      { type: 'button', class: `al-report al-state-${summary.state}`, title: summary.sentence },
      h('span', { class: 'al-symbol', 'aria-hidden': 'true' }, SYMBOLS[summary.state]),
      h('span', { class: 'al-name' }, name),
      h('span', {}, summary.status),
      h('small', {}, counts.join(' · ')),
      h('small', {}, [place, time].filter(text => text !== '').join(' · '))
    );
    button.addEventListener('click', () => void this.reveal(report, panel));
    return button;
  }

  /** Scroll to the cell of a report, and open the report in a tab. */
  private async reveal({ cell, data }: IShownReport, panel: NotebookPanel | null): Promise<void> {
    if (panel === null || panel.isDisposed || cell.isDisposed) {
      return;
    }
    panel.content.activeCellIndex = panel.content.widgets.indexOf(cell);
    await panel.content.scrollToCell(cell);
    this.open(await readPacked(data), panel);
  }
}
