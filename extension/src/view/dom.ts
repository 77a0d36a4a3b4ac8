/** Elements with their children. Text always goes through text nodes: what a report holds never becomes markup. */

export type Child = Node | string | null;

const SVG = 'http://www.w3.org/2000/svg';

type Attributes = Readonly<Record<string, string | number | boolean | null>>;

function fill<E extends Element>(element: E, attributes: Attributes, children: readonly Child[]): E {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) {
      element.setAttribute(name, value === true ? '' : String(value));
    }
  }
  element.append(...children.filter((child): child is Node | string => child !== null));
  return element;
}

/** Make an HTML element. Attributes that are null or false are left out. */
export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  return fill(document.createElement(tag), attributes, children);
}

/** Make an SVG element. */
export function svg<K extends keyof SVGElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): SVGElementTagNameMap[K] {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

let made = 0;

/** An id that no other element of the page has: other outputs are drawn by the same code or another copy of it. */
export function uniqueId(): string {
  made += 1;
  return `aotlab-${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}-${made}`;
}

/** A sentence in which names stand in backticks, with these as code. */
export function spoken(text: string): HTMLElement {
  const pieces = text.split('`');
  const even = pieces.length % 2 === 0;
  const shown = even ? [text] : pieces.map((piece, index) => (index % 2 === 1 ? h('code', {}, piece) : piece));
  return h('span', {}, ...shown);
}

/** A pill with a word in it. */
export function mark(word: string, tone = 'plain'): HTMLElement {
  return h('span', { class: `al-mark al-${tone}` }, word);
}

/** A heading within a panel, with a remark beside it. */
export function heading(title: string, remark = ''): HTMLElement {
  return h('h4', { class: 'al-heading' }, title, remark === '' ? null : ' ', remark === '' ? null : h('small', {}, remark));
}

/** A paragraph in a softer tone. */
export function soft(text: string): HTMLElement {
  return h('p', { class: 'al-soft' }, text);
}
