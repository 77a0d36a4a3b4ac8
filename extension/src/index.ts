/** The plugins of the JupyterLab extension. */

import { ILabShell } from '@jupyterlab/application';
import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { INotebookTracker } from '@jupyterlab/notebook';
import { IRenderMimeRegistry } from '@jupyterlab/rendermime';

import { rendererFactory } from './renderer';
import { tabOpener } from './tab';

/** Lower ranks are preferred: a bundle of ours also holds text/html, which has 50. */
const RANK = 0;

/** Draws reports. Activated before notebooks are restored: each of them copies the registry as it then is. */
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
