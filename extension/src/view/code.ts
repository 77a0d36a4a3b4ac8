/**
 * Code with colours, line numbers, search and copying.
 *
 * Names in the graph, such as `primals_1`, may be replaced by the user's names. If a line of the user's program
 * caused a line of the code, the reader can choose it; see `selection.ts`. Of long code, the page contains only the
 * visible lines.
 */

import type { IContext } from './context';
import { copyText } from './copy';
import { h } from './dom';
import type { Child } from './dom';
import { Code } from './tokens';
import type { IToken } from './tokens';

export interface ICodeOptions {
  /** A label for screen readers. */
  readonly label: string;
  readonly language: string;
  readonly text: string;
  /** Maps names in the graph to the user's names. */
  readonly names?: ReadonlyMap<string, string>;
  /** Returns the numbers (see `IOrigin`) of the user's lines that caused a line of the code. */
  readonly links?: (line: string) => readonly number[];
}

/**
 * Code with more than `FEW_LINES` lines can be searched. If it has more than `MOST_LINES` lines, only the visible lines
 * are drawn.
 */
const FEW_LINES = 40;
export const MOST_LINES = 400;

/** In pixels: the height of a line, as in `report.css`, and the height of the box as long as it is not known. */
const LINE = 18;
const BOX = 400;

/** This many lines are drawn before and after the visible lines. */
const AROUND = 30;

interface IMatch {
  readonly line: number;
  readonly start: number;
  readonly end: number;
}

const blocks = new WeakMap<Element, CodeBlock>();

/** Draw all code below `root` again, after the reader switched between the graph's names and the user's. */
export function redrawCode(root: Element): void {
  root.querySelectorAll('.al-codebox').forEach(each => blocks.get(each)?.rename());
}

/**
 * Scroll the code in `root` to the first line that the user's line with the number `id` caused; return false if there
 * is no such line.
 */
export function revealLine(root: Element, id: number): boolean {
  const box = root.querySelector('.al-codebox');
  return box !== null && blocks.get(box)?.reveal(id) === true;
}

/** Make a block of code. */
export function codeBlock(context: IContext, options: ICodeOptions): HTMLElement {
  return new CodeBlock(context, options).root;
}

class CodeBlock {
  readonly root: HTMLElement;
  private readonly code: Code;
  private readonly sourceLines: readonly string[];
  private readonly links: readonly (readonly number[])[];
  private readonly names: ReadonlyMap<string, string>;
  private readonly inner = h('div', { class: 'al-lines' });
  private readonly box: HTMLElement;
  private readonly matchStatus = h('span', { class: 'al-soft', role: 'status' });
  private matches: readonly IMatch[] = [];
  private current = -1;
  private first = -1;
  private last = -1;
  /** The index of the line whose number the Tab key reaches; the arrow keys move it. */
  private active: number;

  constructor(
    private readonly context: IContext,
    options: ICodeOptions
  ) {
    const text = options.text.replace(/\n$/, '');
    this.code = new Code(text, options.language);
    this.sourceLines = this.code.lines;
    this.links = this.sourceLines.map(line => options.links?.(line) ?? []);
    this.active = this.links.findIndex(ids => ids.length > 0);
    const names = [...(options.names ?? [])];
    this.names = names.some(([name]) => text.includes(name)) ? new Map(names) : new Map();
    this.box = h(
      'div',
      { class: 'al-scroller', tabindex: '0', role: 'group', 'aria-label': options.label },
      this.inner
    );
    this.box.addEventListener('scroll', () => this.draw());
    this.box.addEventListener('keydown', event => this.onKey(event));
    this.root = h('div', { class: 'al-codebox' }, this.tools(), this.box);
    blocks.set(this.root, this);
    this.rename();
  }

  /** Draw the code with the graph's names or the user's, as the reader chose. */
  rename(): void {
    const userName = (word: string): string => this.names.get(word) ?? word;
    const renamed = (line: string): string =>
      this.context.selection.names ? line.replace(/[A-Za-z_]\w*/g, userName) : line;
    const text = this.names.size === 0 ? this.sourceLines : this.sourceLines.map(renamed);
    const widest = text.reduce((most, line) => Math.max(most, line.length), 0);
    this.inner.style.width = `max(100%, calc(${widest}ch + 5.5em))`;
    const check = this.root.querySelector<HTMLInputElement>('input[type=checkbox]');
    if (check !== null) {
      check.checked = this.context.selection.names;
    }
    this.search();
  }

  /** Scroll to the first line that the user's line with the number `id` caused. */
  reveal(id: number): boolean {
    const line = this.links.findIndex(ids => ids.includes(id));
    if (line >= 0) {
      this.scrollTo(line);
    }
    return line >= 0;
  }

  private tokenText({ kind, text }: IToken): string {
    const userName = kind === 'name' && this.context.selection.names ? this.names.get(text) : undefined;
    return userName ?? text;
  }

  private lineText(line: number): string {
    return this.code
      .tokens(line)
      .map(token => this.tokenText(token))
      .join('');
  }

  private tools(): HTMLElement {
    const { selection } = this.context;
    const copy = h('button', { type: 'button', class: 'al-button al-copy' }, 'Copy');
    copy.addEventListener('click', () => {
      const text = this.sourceLines.map((_, index) => this.lineText(index)).join('\n');
      void copyText(text, this.root).then(success => {
        copy.textContent = success ? 'Copied' : 'Not copied';
        setTimeout(() => copy.replaceChildren('Copy'), 1500);
      });
    });
    const check = h('input', { type: 'checkbox' });
    check.addEventListener('change', () => selection.useNames(check.checked));
    const names = this.names.size === 0 ? null : h('label', {}, check, ' your names');
    return h(
      'div',
      { class: 'al-tools' },
      ...(this.sourceLines.length > FEW_LINES ? this.searchTools() : []),
      names,
      copy
    );
  }

  private searchTools(): Child[] {
    const field = h('input', {
      type: 'search',
      class: 'al-search',
      placeholder: 'Search',
      'aria-label': 'Search in this code'
    });
    field.addEventListener('input', () => this.search());
    field.addEventListener('keydown', event => {
      // The notebook has its own keys, and here Escape clears the search.
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
      const stepButton = h(
        'button',
        { type: 'button', class: 'al-button al-copy', 'aria-label': label, title: label },
        sign
      );
      stepButton.addEventListener('click', () => this.step(by));
      return stepButton;
    };
    return [field, button('↑', 'Previous match', -1), button('↓', 'Next match', 1), this.matchStatus];
  }

  private search(): void {
    const searchText = this.root.querySelector<HTMLInputElement>('.al-search')?.value.toLowerCase() ?? '';
    const matches: IMatch[] = [];
    for (let line = 0; searchText !== '' && line < this.sourceLines.length; line += 1) {
      const text = this.lineText(line).toLowerCase();
      for (
        let start = text.indexOf(searchText);
        start >= 0;
        start = text.indexOf(searchText, start + searchText.length)
      ) {
        matches.push({ line, start, end: start + searchText.length });
      }
    }
    this.matches = matches;
    this.current = -1;
    this.draw(true);
    this.matchStatus.textContent = searchText === '' ? '' : 'no match';
    this.step(1);
  }

  private step(direction: number): void {
    const count = this.matches.length;
    if (count === 0) {
      return;
    }
    this.current = this.current < 0 ? 0 : (this.current + direction + count) % count;
    this.matchStatus.textContent = `${this.current + 1} of ${count}`;
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
    const direction = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    const target = event.target instanceof HTMLElement ? event.target : null;
    if (direction === undefined || target?.dataset['n'] === undefined) {
      return;
    }
    event.preventDefault();
    let line = Number(target.dataset['n']) - 1 + direction;
    while (line >= 0 && line < this.sourceLines.length && this.links[line]?.length === 0) {
      line += direction;
    }
    if (line >= 0 && line < this.sourceLines.length) {
      this.active = line;
      this.scrollTo(line);
      this.inner.querySelector<HTMLElement>(`button[data-n="${line + 1}"]`)?.focus({ preventScroll: true });
    }
  }

  private draw(anew = false): void {
    const lineCount = this.sourceLines.length;
    const begin = Math.floor(this.box.scrollTop / LINE) - AROUND;
    const [first, last] =
      lineCount <= MOST_LINES
        ? [0, lineCount]
        : [
            Math.max(0, begin),
            Math.min(lineCount, begin + Math.ceil((this.box.clientHeight || BOX) / LINE) + 2 * AROUND)
          ];
    if (!anew && first === this.first && last === this.last) {
      return;
    }
    [this.first, this.last] = [first, last];
    this.inner.style.height = `${lineCount * LINE}px`;
    this.inner.style.paddingTop = `${first * LINE}px`;
    this.inner.replaceChildren(...this.sourceLines.slice(first, last).map((_, index) => this.line(first + index)));
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

  /** The elements of a line: one per token, in which the matches of the search are marked. */
  private pieces(index: number): Child[] {
    const matches = this.matches.filter(match => match.line === index);
    let column = 0;
    return this.code.tokens(index).map(token => {
      const text = this.tokenText(token);
      const [tokenStart, tokenEnd] = [column, (column += text.length)];
      const children: Child[] = [];
      let pieceStart = tokenStart;
      for (const match of matches) {
        const [start, end] = [Math.max(match.start, pieceStart), Math.min(match.end, tokenEnd)];
        if (start < end) {
          const isCurrent = this.matches[this.current] === match;
          children.push(
            text.slice(pieceStart - tokenStart, start - tokenStart),
            h('mark', { class: isCurrent ? 'al-now' : null }, text.slice(start - tokenStart, end - tokenStart))
          );
          pieceStart = end;
        }
      }
      children.push(text.slice(pieceStart - tokenStart));
      const renamed = text !== token.text;
      if (!renamed && (token.kind === 'plain' || token.kind === 'name') && children.length === 1) {
        return text;
      }
      return h(
        'span',
        { class: renamed ? 'al-t-yours' : `al-t-${token.kind}`, title: renamed ? token.text : null },
        ...children
      );
    });
  }
}
