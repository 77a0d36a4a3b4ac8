/** The plugins of the JupyterLab extension. */

import { ILabShell, ILayoutRestorer } from '@jupyterlab/application';
import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette } from '@jupyterlab/apputils';
import { EditorExtensionRegistry, IEditorExtensionRegistry } from '@jupyterlab/codemirror';
import { INotebookTracker } from '@jupyterlab/notebook';
import { IRenderMimeRegistry } from '@jupyterlab/rendermime';

import { addCommands } from './lab/commands';
import { extension, markCells } from './lab/marks';
import { PANEL_ID, ReportsPanel } from './lab/panel';
import { rendererFactory } from './renderer';
import { tabOpener } from './tab';

/**
 * JupyterLab draws the type with the lowest rank. An output with a report also contains text/html, which has rank 50.
 */
const RANK = 0;

/**
 * The plugin that draws reports. JupyterLab must activate it before it restores notebooks, because each notebook copies
 * the registry of renderers.
 */
const renderer: JupyterFrontEndPlugin<void> = {
  id: 'aotlab:renderer',
  description: 'Draws the reports of aotlab.',
  autoStart: true,
  requires: [IRenderMimeRegistry],
  optional: [INotebookTracker, ILabShell],
  activate: (
    _app: JupyterFrontEnd,
    rendermime: IRenderMimeRegistry,
    tracker: INotebookTracker | null,
    shell: ILabShell | null
  ) => {
    rendermime.addFactory(rendererFactory(tracker, shell === null ? null : tabOpener(shell)), RANK);
  }
};

/** The plugin that adds the commands, the toolbar's button, the side panel and the marks in the gutter. */
const place: JupyterFrontEndPlugin<void> = {
  id: 'aotlab:place',
  description: 'Lists the reports of a notebook, compiles cells by command, and marks their lines.',
  autoStart: true,
  requires: [INotebookTracker],
  optional: [ILabShell, ICommandPalette, ILayoutRestorer, IEditorExtensionRegistry],
  activate: (
    app: JupyterFrontEnd,
    tracker: INotebookTracker,
    shell: ILabShell | null,
    palette: ICommandPalette | null,
    restorer: ILayoutRestorer | null,
    editors: IEditorExtensionRegistry | null
  ) => {
    const open = shell === null ? null : tabOpener(shell);
    addCommands(app, tracker, palette, open);
    if (shell !== null && open !== null) {
      const panel = new ReportsPanel(tracker, open);
      shell.add(panel, 'right', { rank: 850 });
      restorer?.add(panel, PANEL_ID);
    }
    if (editors !== null) {
      editors.addExtension({
        name: 'aotlab:marks',
        factory: () => EditorExtensionRegistry.createImmutableExtension(extension)
      });
      markCells(tracker);
    }
  }
};

export default [renderer, place];
