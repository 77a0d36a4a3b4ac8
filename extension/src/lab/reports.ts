/** The reports in the outputs of a notebook. */

import type { CodeCell } from '@jupyterlab/cells';
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';

import { MIME_TYPE, readReport } from '../model/report';
import type { Report } from '../model/report';
import type { IDisposable } from '../source';

/** A report that a cell shows. */
export interface IShownReport {
  readonly cell: CodeCell;
  /** The report as the notebook stores it. */
  readonly data: unknown;
  /** The head of the report. If the report is compressed, the other fields have their defaults. */
  readonly head: Report;
}

const heads = new WeakMap<object, Report>();

function headOf(data: unknown): Report | null {
  if (typeof data !== 'object' || data === null) {
    return null;
  }
  const known = heads.get(data) ?? readReport(data).report;
  if (known !== null) {
    heads.set(data, known);
  }
  return known;
}

/** The code cells of a notebook, in order. */
export function codeCells(panel: NotebookPanel): CodeCell[] {
  return panel.content.widgets.filter((cell): cell is CodeCell => cell.model.type === 'code');
}

/** The last report that a cell shows; null if it shows none. */
export function reportOf(cell: CodeCell): IShownReport | null {
  const { outputs } = cell.model;
  for (let index = outputs.length - 1; index >= 0; index -= 1) {
    const data = outputs.get(index).data[MIME_TYPE];
    const head = headOf(data);
    if (head !== null) {
      return { cell, data, head };
    }
  }
  return null;
}

/** The reports of a notebook, newest first. */
export function reportsOf(panel: NotebookPanel): IShownReport[] {
  const time = ({ head }: IShownReport): number => Date.parse(head.created) || 0;
  const count = ({ head }: IShownReport): number => head.cell?.execution_count ?? 0;
  return codeCells(panel)
    .flatMap(cell => reportOf(cell) ?? [])
    .sort((a, b) => time(b) - time(a) || count(b) - count(a));
}

/** How long to wait after a change of a notebook, in milliseconds, because one run of a cell makes many changes. */
const PAUSE_MS = 150;

/**
 * Call `callback` soon after the content of a notebook changed, or after another notebook became the current one. Stop
 * when the result is disposed.
 */
export function onNotebookChange(
  tracker: INotebookTracker,
  callback: (panel: NotebookPanel | null) => void
): IDisposable {
  let current: NotebookPanel | null = null;
  let timer: ReturnType<typeof setTimeout> | undefined;
  const change = (): void => {
    timer ??= setTimeout(() => {
      timer = undefined;
      callback(current === null || current.isDisposed ? null : current);
    }, PAUSE_MS);
  };
  const follow = (): void => {
    current?.content.modelContentChanged.disconnect(change);
    current = tracker.currentWidget;
    current?.content.modelContentChanged.connect(change);
    void current?.context.ready.then(change);
    change();
  };
  tracker.currentChanged.connect(follow);
  follow();
  return {
    dispose: () => {
      clearTimeout(timer);
      tracker.currentChanged.disconnect(follow);
      current?.content.modelContentChanged.disconnect(change);
    }
  };
}
