/** Copy text to the clipboard. */

import { h } from './dom';

/**
 * Copy text to the clipboard, and return whether that succeeded. If the browser does not allow it, try again with a
 * temporary text field in `place`.
 */
export async function copyText(text: string, place: HTMLElement): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = h('textarea', { class: 'al-aside', 'aria-hidden': 'true' });
    field.value = text;
    const focused = document.activeElement;
    place.append(field);
    field.select();
    const success = document.execCommand('copy');
    field.remove();
    if (focused instanceof HTMLElement) {
      focused.focus({ preventScroll: true });
    }
    return success;
  }
}
