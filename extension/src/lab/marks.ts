/** Marks in the gutter of the editors of compiled cells. An edit of a cell removes its marks. */

import { Compartment, EditorState } from '@codemirror/state';
import type { Extension } from '@codemirror/state';
import { gutter, GutterMarker } from '@codemirror/view';
import type { EditorView } from '@codemirror/view';
import type { CodeCell } from '@jupyterlab/cells';
import { CodeMirrorEditor } from '@jupyterlab/codemirror';
import type { INotebookTracker } from '@jupyterlab/notebook';

import { lineMarks } from './lineMarks';
import type { ILineMark } from './lineMarks';
import { readPacked } from '../model/packed';
import type { IDisposable } from '../source';
import { h } from '../view/dom';
import { codeCells, onNotebookChange, reportOf } from './reports';

/** The place of the gutter in the configuration of an editor. It is empty in an editor without marks. */
const place = new Compartment();

/** The extension that every editor of a notebook needs. */
export const extension: Extension = place.of([]);

class Marker extends GutterMarker {
  constructor(private readonly mark: ILineMark) {
    super();
  }

  override eq(other: Marker): boolean {
    return other.mark === this.mark;
  }

  override toDOM(): Node {
    const { tone, symbol, flags, title } = this.mark;
    const flag = h('span', { class: 'aotlab-flag' }, flags);
    return h('span', { class: `aotlab-mark al-${tone}`, role: 'img', 'aria-label': title, title }, symbol, flag);
  }
}

/** Show `marks`, by the number of the line, until the text is edited. */
export function showMarks(view: EditorView, marks: ReadonlyMap<number, ILineMark>): void {
  const gutterOfMarks = gutter({
    class: 'aotlab-gutter',
    lineMarker: ({ state }, { from }) => {
      const mark = marks.get(state.doc.lineAt(from).number);
      return mark === undefined ? null : new Marker(mark);
    }
  });
  const cleared = { effects: place.reconfigure([]) };
  const clear = EditorState.transactionExtender.of(({ docChanged }) => (docChanged ? cleared : null));
  view.dispatch(marks.size === 0 ? cleared : { effects: place.reconfigure([gutterOfMarks, clear]) });
}

/** Keep the marks of the current notebook's cells up to date until the result is disposed. */
export function markCells(tracker: INotebookTracker): IDisposable {
  /** The report whose marks a cell shows, as the notebook stores it. */
  const shown = new WeakMap<CodeCell, unknown>();
  const update = async (cell: CodeCell, data: unknown): Promise<void> => {
    const { report } = data === null ? { report: null } : await readPacked(data);
    await cell.ready;
    const { editor } = cell;
    if (cell.isDisposed || shown.get(cell) !== data || !(editor instanceof CodeMirrorEditor)) {
      return;
    }
    const isSame = report?.cell?.source.trimEnd() === cell.model.sharedModel.getSource().trimEnd();
    showMarks(editor.editor, report !== null && isSame ? lineMarks(report) : new Map());
  };
  return onNotebookChange(tracker, panel => {
    for (const cell of panel === null ? [] : codeCells(panel)) {
      const data = reportOf(cell)?.data ?? null;
      if ((shown.get(cell) ?? null) !== data) {
        shown.set(cell, data);
        void update(cell, data);
      }
    }
  });
}
