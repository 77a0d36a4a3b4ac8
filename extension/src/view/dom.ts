/** Make elements with children. Text is always added as a text node, so the report's text never becomes markup. */

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

let idCount = 0;

/** Return an id that is unique in the page, even if another copy of this code draws other outputs in the page. */
export function uniqueId(): string {
  idCount += 1;
  return `aotlab-${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}-${idCount}`;
}

/** Make an element with a sentence, in which names in backticks become code. */
export function prose(text: string): HTMLElement {
  const pieces = text.split('`');
  const isUnpaired = pieces.length % 2 === 0;
  const children = isUnpaired ? [text] : pieces.map((piece, index) => (index % 2 === 1 ? h('code', {}, piece) : piece));
  return h('span', {}, ...children);
}

/** A word in a coloured box; `tone` selects the colour. */
export function mark(word: string, tone = 'plain'): HTMLElement {
  return h('span', { class: `al-mark al-${tone}` }, word);
}

/** A heading within a panel, with a remark after it. */
export function heading(title: string, remark = ''): HTMLElement {
  return h(
    'h4',
    { class: 'al-heading' },
    title,
    remark === '' ? null : ' ',
    remark === '' ? null : h('small', {}, remark)
  );
}

/** A paragraph in a softer tone. */
export function soft(text: string): HTMLElement {
  return h('p', { class: 'al-soft' }, text);
}

/** A path that may wrap after each of its dots. */
export function dotted(path: string): Child {
  const [first = '', ...others] = path.split(/(?<=\.)/);
  return others.length === 0 ? path : h('span', {}, first, ...others.flatMap(each => [h('wbr'), each]));
}
