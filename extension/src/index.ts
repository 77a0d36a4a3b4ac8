/** The plugins of the JupyterLab extension. */

import { ILabShell } from '@jupyterlab/application';
import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { INotebookTracker } from '@jupyterlab/notebook';
import { IRenderMimeRegistry } from '@jupyterlab/rendermime';

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

export default [renderer];
