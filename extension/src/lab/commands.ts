/** The commands of JupyterLab's palette and of the notebook's toolbar. */

import type { JupyterFrontEnd } from '@jupyterlab/application';
import { Notification } from '@jupyterlab/apputils';
import type { ICommandPalette } from '@jupyterlab/apputils';
import { NotebookActions } from '@jupyterlab/notebook';
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';

import { readPacked } from '../model/packed';
import type { OpenTab } from '../tab';
import { icon } from './icon';
import { PANEL_ID } from './panel';
import { reportsOf } from './reports';

/** The first line of a cell that aotlab compiles. */
const MAGIC = '%%aotcompile';

/** Loads the extension if the kernel has not loaded it. It must define no name in the user's namespace. */
const LOAD =
  "get_ipython().run_line_magic('load_ext', 'aotlab')" +
  " if 'aotcompile' not in get_ipython().magics_manager.magics['cell'] else None";

/** Write the magic at the top of the active cell if it is missing, and run the cell. */
async function compileCell({ content, sessionContext }: NotebookPanel): Promise<void> {
  const cell = content.activeCell;
  if (cell === null || cell.model.type !== 'code') {
    Notification.warning('Select a code cell. aotlab compiles only code.', { autoClose: 5000 });
    return;
  }
  const source = cell.model.sharedModel.getSource();
  const magic = /^\s*(%%\w*)/.exec(source)?.[1] ?? '';
  if (magic !== '' && magic !== MAGIC) {
    Notification.warning(`This cell begins with ${magic}. A cell can have one cell magic.`, { autoClose: 5000 });
    return;
  }
  await sessionContext.ready;
  const kernel = sessionContext.session?.kernel ?? null;
  const { content: reply } =
    (await kernel?.requestExecute({ code: LOAD, silent: true, store_history: false }).done) ?? {};
  if (reply?.status === 'error') {
    Notification.error(`The kernel cannot load aotlab: ${reply.ename}: ${reply.evalue}`);
    return;
  }
  if (magic === '') {
    cell.model.sharedModel.setSource(`${MAGIC}\n${source}`);
  }
  await NotebookActions.run(content, sessionContext);
}

/** Add the commands. `open` shows a report in a tab; it is null in an application without tabs and side panels. */
export function addCommands(
  { commands, shell }: JupyterFrontEnd,
  tracker: INotebookTracker,
  palette: ICommandPalette | null,
  open: OpenTab | null
): void {
  const add = (command: string, label: string, caption: string, execute: (panel: NotebookPanel) => unknown): void => {
    commands.addCommand(command, {
      label,
      caption,
      icon,
      isEnabled: () => tracker.currentWidget !== null,
      execute: () => (tracker.currentWidget === null ? undefined : execute(tracker.currentWidget))
    });
    palette?.addItem({ command, category: 'aotlab' });
  };
  add('aotlab:compile-cell', 'Compile This Cell with aotlab', 'Run the active cell with %%aotcompile', compileCell);
  if (open !== null) {
    add('aotlab:open-newest-report', 'Open the Newest aotlab Report in a Tab', '', async panel => {
      const [newest] = reportsOf(panel);
      if (newest === undefined) {
        Notification.info('No cell of this notebook has a report.', { autoClose: 5000 });
      } else {
        open(await readPacked(newest.data), panel);
      }
    });
    add('aotlab:show-reports', 'Show the aotlab Reports of This Notebook', '', () => shell.activateById(PANEL_ID));
  }
}
