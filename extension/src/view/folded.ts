/** Show the verdict of a report alone, so that the report does not push the cell's results out of view. */

import type { Report } from '../model/report';
import { h } from './dom';

/** The reports that the reader folded to their verdict (true) or unfolded (false), by their identifiers. */
const chosen = new Map<string, boolean>();

/** Whether a report shows its verdict alone: as the reader chose, or else as the setting `open` says. */
export function isFolded({ identifier, environment }: Report): boolean {
  const setting = environment.config.find(({ name }) => name === 'open')?.value;
  return chosen.get(identifier) ?? setting === 'verdict';
}

/** Remember the reader's choice for a report. */
export function setFolded({ identifier }: Report, folded: boolean): void {
  chosen.set(identifier, folded);
}

/** The button that shows the report, or the verdict alone. */
export function foldButton(folded: boolean, onClick: () => void): HTMLElement {
  const label = folded ? 'Show the report' : 'Show the verdict alone';
  const button = h(
    'button',
    {
      type: 'button',
      class: 'al-button al-fold-all',
      'data-key': 'fold all',
      'data-action': 'fold',
      'aria-label': label,
      'aria-expanded': String(!folded),
      title: label
    },
    folded ? `▸ ${label}` : '▾'
  );
  button.addEventListener('click', onClick);
  return button;
}
