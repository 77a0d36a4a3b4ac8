/** Show a report in a tab of JupyterLab's main area, beside its notebook. */

import type { ILabShell } from '@jupyterlab/application';
import type { NotebookPanel } from '@jupyterlab/notebook';
import type { Message } from '@lumino/messaging';
import { Widget } from '@lumino/widgets';

import { Connection } from './live/connection';
import { ReportSource } from './live/source';
import type { Reading } from './model/report';
import type { IDisposable } from './source';
import { uniqueId } from './view/dom';
import { mount } from './view/view';

/**
 * A function that shows a report in a tab. `panel` is the notebook that contains the report; the tab asks the
 * notebook's kernel for more. It is null if the report is in no notebook.
 */
export type OpenTab = (reading: Reading, panel: NotebookPanel | null) => void;

class ReportTab extends Widget {
  // The tab has its own source. So it keeps its report when the cell runs again or is deleted.
  private readonly source = new ReportSource();
  private readonly connection: Connection | null;
  private readonly view: IDisposable;

  constructor(reading: Reading, panel: NotebookPanel | null) {
    super();
    this.id = uniqueId();
    this.addClass('aotlab-tab');
    this.addClass('aotlab-whole');
    const { name = '', cell = null } = reading.report ?? {};
    const count = cell?.execution_count ?? null;
    const reportTitle = name !== '' ? name : count === null ? 'report' : `report of [${count}]`;
    this.title.label = [reportTitle, panel?.title.label ?? ''].filter(text => text !== '').join(' – ');
    this.title.caption = `aotlab: ${this.title.label}`;
    this.title.closable = true;
    this.source.update({ reading });
    this.view = mount(this.node, this.source);
    this.connection = panel === null ? null : new Connection(panel.sessionContext, this.source);
  }

  override dispose(): void {
    if (!this.isDisposed) {
      this.connection?.dispose();
      this.view.dispose();
    }
    super.dispose();
  }

  protected override onCloseRequest(message: Message): void {
    super.onCloseRequest(message);
    this.dispose();
  }
}

/** The open tabs, by the identifier of the report. */
const tabs = new Map<string, ReportTab>();

/** Make a function that opens tabs in `shell`. Each report has one tab; the function shows that tab if it is open. */
export function tabOpener(shell: ILabShell): OpenTab {
  return (reading, panel) => {
    const key = reading.report?.identifier ?? '';
    let tab = tabs.get(key);
    if (tab === undefined || tab.isDisposed) {
      const last = [...tabs.values()].at(-1);
      tab = new ReportTab(reading, panel);
      tabs.set(key, tab);
      tab.disposed.connect(() => tabs.delete(key));
      const beside = panel === null ? {} : ({ mode: 'split-right', ref: panel.id } as const);
      shell.add(tab, 'main', last === undefined ? beside : { mode: 'tab-after', ref: last.id });
    }
    shell.activateById(tab.id);
  };
}
