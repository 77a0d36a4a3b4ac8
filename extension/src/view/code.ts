/**
 * Code with colours, line numbers, search and copying.
 *
 * Names of the graph may be shown as the user's. A line that comes from a line of the user's program can be chosen, see
 * `selection.ts`. Of long code only the lines in sight stand in the page.
 */

import type { Context } from './context';
import { copied } from './copy';
import { h } from './dom';
import type { Child } from './dom';
import { Code } from './tokens';
import type { Token } from './tokens';

export interface CodeOptions {
  /** What it is, for those who do not see it. */
  readonly label: string;
  readonly language: string;
  readonly text: string;
  /** What the user calls the graph's names. */
  readonly names?: ReadonlyMap<string, string>;
  /** The user's lines, by their numbers in the selection, that a line of the code comes from. */
  readonly links?: (line: string) => readonly number[];
}

/** Code of more lines can be searched; of still more lines, those in sight are drawn. */
const FEW_LINES = 40;
export const MOST_LINES = 400;

/** The height of a line, as `report.css` sets it, and of the box until that is known, in pixels. */
const LINE = 18;
const BOX = 400;

/** So many lines are drawn before and after those in sight. */
const AROUND = 30;

interface Match {
  readonly line: number;
  readonly start: number;
  readonly end: number;
}

const blocks = new WeakMap<Element, CodeBlock>();

/** Draw all code below `root` anew: names are shown another way. */
export function redrawCode(root: Element): void {
  root.querySelectorAll('.al-codebox').forEach(each => blocks.get(each)?.rename());
}

/** Scroll the code in `root` to its first line that comes from a line of the user's; false if there is none. */
export function revealLine(root: Element, id: number): boolean {
  const box = root.querySelector('.al-codebox');
  return box !== null && blocks.get(box)?.reveal(id) === true;
}

/** Make a block of code. */
export function codeBlock(context: Context, options: CodeOptions): HTMLElement {
  return new CodeBlock(context, options).root;
}

class CodeBlock {
  readonly root: HTMLElement;
  private readonly code: Code;
  private readonly raw: readonly string[];
  private readonly links: readonly (readonly number[])[];
  private readonly names: ReadonlyMap<string, string>;
  private readonly inner = h('div', { class: 'al-lines' });
  private readonly box: HTMLElement;
  private readonly found = h('span', { class: 'al-soft', role: 'status' });
  private matches: readonly Match[] = [];
  private current = -1;
  private first = -1;
  private last = -1;
  /** The line whose number the Tab key leads to. */
  private active: number;

  constructor(
    private readonly context: Context,
    options: CodeOptions
  ) {
    const text = options.text.replace(/\n$/, '');
    this.code = new Code(text, options.language);
    this.raw = this.code.lines;
    this.links = this.raw.map(line => options.links?.(line) ?? []);
    this.active = this.links.findIndex(ids => ids.length > 0);
    const names = [...(options.names ?? [])];
    this.names = names.some(([name]) => text.includes(name)) ? new Map(names) : new Map();
    this.box = h('div', { class: 'al-scroller', tabindex: '0', role: 'group', 'aria-label': options.label }, this.inner);
    this.box.addEventListener('scroll', () => this.draw());
    this.box.addEventListener('keydown', event => this.onKey(event));
    this.root = h('div', { class: 'al-codebox' }, this.tools(), this.box);
    blocks.set(this.root, this);
    this.rename();
  }

  /** Draw the code with the names that are wanted now. */
  rename(): void {
    const named = (word: string): string => this.names.get(word) ?? word;
    const renamed = (line: string): string => (this.context.selection.names ? line.replace(/[A-Za-z_]\w*/g, named) : line);
    const text = this.names.size === 0 ? this.raw : this.raw.map(renamed);
    const widest = text.reduce((most, line) => Math.max(most, line.length), 0);
    this.inner.style.width = `max(100%, calc(${widest}ch + 5.5em))`;
    const check = this.root.querySelector<HTMLInputElement>('input[type=checkbox]');
    if (check !== null) {
      check.checked = this.context.selection.names;
    }
    this.search();
  }

  /** Scroll to the first line that comes from a user's line. */
  reveal(id: number): boolean {
    const line = this.links.findIndex(ids => ids.includes(id));
    if (line >= 0) {
      this.scrollTo(line);
    }
    return line >= 0;
  }

  private shownToken({ kind, text }: Token): string {
    const known = kind === 'name' && this.context.selection.names ? this.names.get(text) : undefined;
    return known ?? text;
  }

  private shown(line: number): string {
    return this.code.tokens(line).map(token => this.shownToken(token)).join('');
  }

  private tools(): HTMLElement {
    const { selection } = this.context;
    const copy = h('button', { type: 'button', class: 'al-button al-copy' }, 'Copy');
    copy.addEventListener('click', () => {
      const text = this.raw.map((_, index) => this.shown(index)).join('\n');
      void copied(text, this.root).then(done => {
        copy.textContent = done ? 'Copied' : 'Not copied';
        setTimeout(() => copy.replaceChildren('Copy'), 1500);
      });
    });
    const check = h('input', { type: 'checkbox' });
    check.addEventListener('change', () => selection.useNames(check.checked));
    const names = this.names.size === 0 ? null : h('label', {}, check, ' your names');
    return h('div', { class: 'al-tools' }, ...(this.raw.length > FEW_LINES ? this.searchTools() : []), names, copy);
  }

  private searchTools(): Child[] {
    const field = h('input', { type: 'search', class: 'al-search', placeholder: 'Search', 'aria-label': 'Search in this code' });
    field.addEventListener('input', () => this.search());
    field.addEventListener('keydown', event => {
      // The notebook around us has keys of its own, and Escape here means the search.
      event.stopPropagation();
      if (event.key === 'Enter') {
        event.preventDefault();
        this.step(event.shiftKey ? -1 : 1);
      } else if (event.key === 'Escape' && field.value !== '') {
        event.preventDefault();
        field.value = '';
        this.search();
      }
    });
    const button = (sign: string, label: string, by: number): HTMLElement => {
      const made = h('button', { type: 'button', class: 'al-button al-copy', 'aria-label': label, title: label }, sign);
      made.addEventListener('click', () => this.step(by));
      return made;
    };
    return [field, button('↑', 'Previous match', -1), button('↓', 'Next match', 1), this.found];
  }

  private search(): void {
    const wanted = this.root.querySelector<HTMLInputElement>('.al-search')?.value.toLowerCase() ?? '';
    const matches: Match[] = [];
    for (let line = 0; wanted !== '' && line < this.raw.length; line += 1) {
      const text = this.shown(line).toLowerCase();
      for (let start = text.indexOf(wanted); start >= 0; start = text.indexOf(wanted, start + wanted.length)) {
        matches.push({ line, start, end: start + wanted.length });
      }
    }
    this.matches = matches;
    this.current = -1;
    this.draw(true);
    this.found.textContent = wanted === '' ? '' : 'no match';
    this.step(1);
  }

  private step(by: number): void {
    const count = this.matches.length;
    if (count === 0) {
      return;
    }
    this.current = this.current < 0 ? 0 : (this.current + by + count) % count;
    this.found.textContent = `${this.current + 1} of ${count}`;
    this.scrollTo(this.matches[this.current]?.line ?? 0);
  }

  private scrollTo(line: number): void {
    const height = this.box.clientHeight || BOX;
    const top = line * LINE;
    if (top < this.box.scrollTop + LINE || top > this.box.scrollTop + height - 2 * LINE) {
      this.box.scrollTop = Math.max(0, top - height / 3);
    }
    this.draw(true);
  }

  private onKey(event: KeyboardEvent): void {
    const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    const target = event.target instanceof HTMLElement ? event.target : null;
    if (by === undefined || target?.dataset['n'] === undefined) {
      return;
    }
    event.preventDefault();
    let line = Number(target.dataset['n']) - 1 + by;
    while (line >= 0 && line < this.raw.length && this.links[line]?.length === 0) {
      line += by;
    }
    if (line >= 0 && line < this.raw.length) {
      this.active = line;
      this.scrollTo(line);
      this.inner.querySelector<HTMLElement>(`button[data-n="${line + 1}"]`)?.focus({ preventScroll: true });
    }
  }

  private draw(anew = false): void {
    const all = this.raw.length;
    const begin = Math.floor(this.box.scrollTop / LINE) - AROUND;
    const [first, last] =
      all <= MOST_LINES
        ? [0, all]
        : [Math.max(0, begin), Math.min(all, begin + Math.ceil((this.box.clientHeight || BOX) / LINE) + 2 * AROUND)];
    if (!anew && first === this.first && last === this.last) {
      return;
    }
    [this.first, this.last] = [first, last];
    this.inner.style.height = `${all * LINE}px`;
    this.inner.style.paddingTop = `${first * LINE}px`;
    this.inner.replaceChildren(...this.raw.slice(first, last).map((_, index) => this.line(first + index)));
  }

  private line(index: number): HTMLElement {
    const ids = this.links[index] ?? [];
    const { selection } = this.context;
    const number = String(index + 1);
    const button = {
      type: 'button',
      tabindex: index === this.active ? '0' : '-1',
      'aria-label': `Line ${number}: show all that comes from its line of the program`
    };
    return h(
      'div',
      { class: 'al-row', ...selection.linked(ids) },
      ids.length > 0
        ? h('button', { class: 'al-n', 'data-n': number, ...button, ...selection.linked(ids, true) })
        : h('span', { class: 'al-n', 'data-n': number }),
      ...this.pieces(index),
      '\n'
    );
  }

  /** The tokens of a line, cut where matches of the search begin and end. */
  private pieces(index: number): Child[] {
    const matches = this.matches.filter(match => match.line === index);
    let at = 0;
    return this.code.tokens(index).map(token => {
      const text = this.shownToken(token);
      const [from, to] = [at, (at += text.length)];
      const parts: Child[] = [];
      let done = from;
      for (const match of matches) {
        const [start, end] = [Math.max(match.start, done), Math.min(match.end, to)];
        if (start < end) {
          const now = this.matches[this.current] === match;
          parts.push(text.slice(done - from, start - from), h('mark', { class: now ? 'al-now' : null }, text.slice(start - from, end - from)));
          done = end;
        }
      }
      parts.push(text.slice(done - from));
      const renamed = text !== token.text;
      if (!renamed && (token.kind === 'plain' || token.kind === 'name') && parts.length === 1) {
        return text;
      }
      return h('span', { class: renamed ? 'al-t-yours' : `al-t-${token.kind}`, title: renamed ? token.text : null }, ...parts);
    });
  }
}
