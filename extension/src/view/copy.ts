/** Copying text. */

import { h } from './dom';

/** Put text on the clipboard, by way of a field in `place` where the browser does not give the clipboard. */
export async function copied(text: string, place: HTMLElement): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = h('textarea', { class: 'al-aside', 'aria-hidden': 'true' });
    field.value = text;
    const focused = document.activeElement;
    place.append(field);
    field.select();
    const done = document.execCommand('copy');
    field.remove();
    if (focused instanceof HTMLElement) {
      focused.focus({ preventScroll: true });
    }
    return done;
  }
}
