/**
 * Tables: one row per thing, named cells. Each can be sorted, searched and copied; of a long one only the rows in sight
 * stand in the page.
 */

import MEANINGS from '../model/meanings.json';
import { grouped, notHere } from '../model/words';
import type { Context } from './context';
import { copied } from './copy';
import { h, spoken } from './dom';
import type { Child } from './dom';

/** What a row is sorted by in a column; nothing comes last. */
type Value = number | string | null;

interface Named<T> {
  /** The column's name in the report's tables. */
  readonly name: string;
  /** What stands above it. */
  readonly title: string;
  /** What it means, shown on hover, where it is not what Python says of a column of this name. */
  readonly help?: string;
  /** The cell's content. */
  readonly cell: (row: T) => Child;
  /** Where there is little room it stands below the row's name, after these words, and in no column of its own. */
  readonly lesser?: string;
}

/** `number` is aligned to the right and sorted by its value, `code` is monospace, `words` may wrap. */
export type Column<T> = Named<T> &
  (
    | { readonly kind: 'number'; readonly value: (row: T) => Value }
    | { readonly kind?: 'code' | 'words'; readonly value?: (row: T) => Value }
  );

export interface TableOptions<T> {
  /** The table's name, the same in every report. */
  readonly name: string;
  /** The report's table that documents the columns, if that has another name. */
  readonly meanings?: string;
  /** What the table shows, for those who do not see it. */
  readonly label: string;
  readonly columns: readonly Column<T>[];
  readonly rows: readonly T[];
  /** The rows that are searched and sorted, where some of `rows` stand for several. */
  readonly all?: readonly T[];
  /** How many rows there were before the report was cut to fit a notebook. */
  readonly total?: number;
  /** The name of the thing in a row. */
  readonly key: (row: T) => string;
  /** A class for the whole row. */
  readonly tone?: (row: T) => string | null;
  /** More attributes of a row. */
  readonly rowData?: (row: T) => Readonly<Record<string, string>>;
  /** More attributes of the table. */
  readonly data?: Readonly<Record<string, string>>;
}

/** What the reader did to a table; it outlives the table, which is made anew when the report changes. */
export interface TableState {
  /** The name of the column that it is sorted by; empty for the report's own order. */
  sorted: string;
  down: boolean;
  search: string;
  top: number;
  left: number;
}

/** Cells of more characters can be read in full on hover, and in a table of which each row is one line all that are long. */
const LONG = 40;
const LONG_LINE = 12;

/** Tables of more rows can be searched. */
const FEW_ROWS = 8;

/** Of tables of more rows those in sight are drawn. */
export const MOST_ROWS = 200;

/** So many rows are drawn before and after those in sight. */
const AROUND = 10;

/** The height of a row of such a table, and of its box, until they are known, in pixels. */
const ROW = 24;
const BOX = 400;

const collator = new Intl.Collator('en', { numeric: true });

/** Make a table, in a box that scrolls. */
export function table<T>(context: Context, options: TableOptions<T>): HTMLElement {
  return new Table(context.tables, options).root;
}

class Table<T> {
  readonly root: HTMLElement;
  private readonly options: TableOptions<T>;
  private readonly state: TableState;
  private readonly all: readonly T[];
  private readonly long: boolean;
  private readonly head: HTMLElement;
  private readonly body = h('tbody');
  private readonly table: HTMLElement;
  private readonly box: HTMLElement;
  private readonly found = h('span', { class: 'al-soft', role: 'status' });
  /** The texts of the cells of the rows that were asked for. */
  private readonly texts = new Map<T, readonly string[]>();
  /** The rows that are shown, in order, and which of these stand in the page. */
  private shown: readonly T[] = [];
  private first = 0;
  private last = 0;
  /** The height of each row: with little room it has a second line. */
  private height = ROW;

  constructor(states: Map<string, TableState>, options: TableOptions<T>) {
    this.options = options;
    const { name, label, columns, rows, data } = options;
    const key = [name, label, ...Object.values(data ?? {})].join(' ');
    this.state = states.get(key) ?? { sorted: '', down: false, search: '', top: 0, left: 0 };
    states.set(key, this.state);
    this.all = options.all ?? rows;
    this.long = this.all.length > MOST_ROWS;
    this.head = h('tr', { 'aria-rowindex': this.long ? 1 : null }, ...columns.map(column => this.heading(column, key)));
    const widths = this.long ? this.widths() : null;
    this.table = h('table', { 'data-table': name, 'aria-label': label, ...data }, h('thead', {}, this.head, widths), this.body);
    this.box = h('div', { class: this.long ? 'al-scroll al-long' : 'al-scroll' }, this.table);
    this.box.addEventListener('scroll', () => this.scrolled());
    const left = (options.total ?? rows.length) - rows.length;
    const rest = left > 0 ? h('p', { class: 'al-soft', 'data-cut': String(left) }, notHere(left, 'row')) : null;
    this.root = h('div', { class: 'al-table' }, this.tools(key), this.box, rest);
    this.arrange();
    const { top } = this.state;
    // It can scroll when it stands in the page.
    queueMicrotask(() => {
      this.box.scrollTop = top;
      this.box.scrollLeft = this.state.left;
      if (this.long && this.measured()) {
        this.fill();
      }
    });
  }

  private heading(column: Column<T>, key: string): HTMLElement {
    const { meanings, name } = this.options;
    const button = h('button', { type: 'button', class: 'al-sort', 'data-key': `sort ${column.name} ${key}` }, column.title);
    button.addEventListener('click', () => {
      const { state } = this;
      const again = state.sorted === column.name;
      // Up, then down, then as it was.
      [state.sorted, state.down] = again && state.down ? ['', false] : [column.name, again];
      this.arrange();
    });
    const help = column.help ?? meaning(meanings ?? name, column.name);
    return h('th', { scope: 'col', class: kindClass(column), title: help, 'data-sort': column.name }, button);
  }

  /** A search field where there is much to search, and a button that copies. */
  private tools(key: string): HTMLElement {
    const { label } = this.options;
    const copy = h('button', { type: 'button', class: 'al-button al-copy', title: 'Copy the rows that are shown' }, 'Copy');
    copy.addEventListener('click', () => {
      void copied(this.asText(), this.root).then(done => {
        copy.textContent = done ? 'Copied' : 'Not copied';
        setTimeout(() => copy.replaceChildren('Copy'), 1500);
      });
    });
    if (this.all.length <= FEW_ROWS && this.state.search === '') {
      return h('div', { class: 'al-tools al-few' }, copy);
    }
    const input = h('input', {
      type: 'search',
      class: 'al-search',
      placeholder: 'Search',
      'aria-label': `Search: ${label}`,
      'data-key': `search ${key}`
    });
    input.value = this.state.search;
    input.addEventListener('input', () => {
      this.state.search = input.value;
      this.state.top = this.box.scrollTop = 0;
      this.arrange();
    });
    input.addEventListener('keydown', event => {
      // The notebook around us would take letters for commands.
      if (!event.ctrlKey && !event.metaKey) {
        event.stopPropagation();
      }
    });
    return h('div', { class: 'al-tools' }, input, this.found, copy);
  }

  /** Find and order the rows that are shown, and show them: those with the text that is sought in a cell, or else with its words. */
  private arrange(): void {
    const { columns, rows } = this.options;
    const { sorted, down, search } = this.state;
    for (const heading of this.head.querySelectorAll<HTMLElement>('th')) {
      const direction = down ? 'descending' : 'ascending';
      heading.setAttribute('aria-sort', heading.dataset['sort'] === sorted ? direction : 'none');
    }
    const sought = search.trim().toLowerCase();
    this.shown = sought === '' && sorted === '' ? rows : this.all;
    if (sought !== '') {
      const texts = this.all.map(row => this.textsOf(row).join('\n').toLowerCase());
      const having = (words: readonly string[]): T[] =>
        this.all.filter((_, index) => words.every(word => texts[index]?.includes(word)));
      const found = having([sought]);
      this.shown = found.length > 0 ? found : having(sought.split(/\s+/));
    }
    const at = columns.findIndex(column => column.name === sorted);
    const column = columns[at];
    if (column !== undefined) {
      const value = (row: T): Value => (column.value ? column.value(row) : (this.textsOf(row)[at] ?? ''));
      const values = this.shown.map(row => [row, value(row) ?? ''] as const);
      this.shown = values.sort(([, a], [, b]) => compared(a, b, down)).map(([row]) => row);
    }
    this.found.textContent = sought === '' ? '' : `${grouped(this.shown.length)} of ${grouped(this.all.length)}`;
    if (this.long) {
      this.table.setAttribute('aria-rowcount', String(this.shown.length + 1));
    }
    this.draw();
  }

  private draw(): void {
    const { shown } = this;
    if (!this.long) {
      this.body.replaceChildren(...shown.map(row => this.row(row)));
      return;
    }
    this.fill();
    if (this.measured()) {
      this.fill();
    }
  }

  /** Draw those rows of a long table that are in sight. */
  private fill(): void {
    const { shown, state } = this;
    const height = this.box.clientHeight || BOX;
    this.first = Math.max(Math.min(Math.floor(state.top / this.height), shown.length) - AROUND, 0);
    this.last = Math.min(this.first + Math.ceil(height / this.height) + 2 * AROUND, shown.length);
    const drawn = shown.slice(this.first, this.last).map((each, place) => {
      const row = this.row(each);
      row.setAttribute('aria-rowindex', String(this.first + place + 2));
      return row;
    });
    this.body.replaceChildren(this.space(this.first), ...drawn, this.space(shown.length - this.last));
  }

  /** Look how high the rows are, and tell whether that is another height than before. */
  private measured(): boolean {
    const before = this.height;
    this.height = this.body.querySelector<HTMLElement>('tr[data-name]')?.getBoundingClientRect().height || before;
    return Math.abs(this.height - before) > 0.1;
  }

  /** A row in place of so many. */
  private space(rows: number): HTMLElement {
    const row = h('tr', { class: 'al-space', 'aria-hidden': 'true' });
    row.style.height = `${rows * this.height}px`;
    return row;
  }

  private scrolled(): void {
    const { box, state } = this;
    [state.top, state.left] = [box.scrollTop, box.scrollLeft];
    const moved = this.long && this.measured();
    const [from, to] = [state.top / this.height, (state.top + box.clientHeight) / this.height];
    if (moved || (this.long && ((from < this.first && this.first > 0) || (to > this.last && this.last < this.shown.length)))) {
      this.draw();
    }
  }

  private row(row: T): HTMLElement {
    const { columns, key, tone, rowData } = this.options;
    const texts = columns.some(({ lesser }) => lesser !== undefined) ? this.textsOf(row) : [];
    // Rows of one height whatever is in them.
    const empty = this.long && texts.length > 0 ? '\u00a0' : null;
    const lesser = columns.map((column, place) => (texts[place] ? column.lesser?.concat(texts[place]) : undefined));
    const below = lesser.filter(text => text !== undefined).join(' · ') || empty;
    return h(
      'tr',
      { 'data-name': key(row), class: tone?.(row) ?? null, ...rowData?.(row) },
      ...columns.map((column, place) => {
        const content = shown(column, row);
        // The first cell names the row, for those who hear the table.
        const role = place === 0 ? 'rowheader' : null;
        const inside = this.long && content !== null ? h('div', {}, content) : content;
        const cell = h('td', { class: kindClass(column), 'data-column': column.name, role, 'data-below': place === 0 ? below : null }, inside);
        const text = cell.textContent ?? '';
        if (text.length > (this.long ? LONG_LINE : LONG)) {
          // Where it does not fit, its end is not seen.
          cell.title = text;
        }
        return cell;
      })
    );
  }

  /** A row that nobody sees, whose widths are the table's, whichever rows are in sight: nine texts in ten fit; words take the rest. */
  private widths(): HTMLElement {
    const cells = this.options.columns.map((column, place) => {
      const inside = h('div');
      if (column.kind !== 'words') {
        const lengths = this.all.map(row => this.textsOf(row)[place]?.length ?? 0).sort((a, b) => a - b);
        const usual = lengths[Math.floor(0.9 * lengths.length)] ?? 0;
        // Letters are narrower than the digits that `ch` measures, and may stand in a mark.
        const letters = column.kind === 'code' ? usual : 0.85 * usual + (column.kind === 'number' ? 0.5 : 2);
        inside.style.width = column.kind === 'code' ? `min(${letters}ch, 18cqi)` : `${letters}ch`;
      }
      return h('td', { class: kindClass(column) }, inside);
    });
    return h('tr', { class: 'al-widths', 'aria-hidden': 'true' }, ...cells);
  }

  private textsOf(row: T): readonly string[] {
    const texts = this.texts.get(row) ?? this.options.columns.map(column => textOf(column, row));
    this.texts.set(row, texts);
    return texts;
  }

  private asText(): string {
    const lines = [this.options.columns.map(column => column.title), ...this.shown.map(row => this.textsOf(row))];
    return lines.map(cells => cells.map(cell => cell.replace(/\s+/g, ' ')).join('\t')).join('\n');
  }
}

/** What Python says of a column; times and sizes are shown with units that fit. */
function meaning(name: string, column: string): string | null {
  const known: Readonly<Record<string, Readonly<Record<string, string>> | undefined>> = MEANINGS;
  const text = known[name]?.[column]?.replace(/,? in (ns|bytes)\b|`/g, '') ?? null;
  return text === null ? null : text.slice(0, 1).toUpperCase() + text.slice(1);
}

function compared(a: number | string, b: number | string, down: boolean): number {
  if (a === '' || b === '') {
    return Number(a === '') - Number(b === '');
  }
  const order = typeof a === 'number' && typeof b === 'number' ? a - b : collator.compare(String(a), String(b));
  return down ? -order : order;
}

function shown<T>(column: Column<T>, row: T): Child {
  const child = column.cell(row);
  return column.kind === 'words' && typeof child === 'string' ? spoken(child) : child;
}

/** What is read in a cell; of a picture, what is read on hover. */
function textOf<T>(column: Column<T>, row: T): string {
  const child = column.cell(row);
  if (child === null || (typeof child === 'string' && (column.kind !== 'words' || !child.includes('`')))) {
    return child ?? '';
  }
  const made = typeof child === 'string' ? spoken(child) : child;
  return made.textContent || (made instanceof HTMLElement ? made.title : '');
}

function kindClass<T>({ kind, lesser }: Column<T>): string | null {
  return [...(kind === undefined ? [] : [`al-${kind}`]), ...(lesser === undefined ? [] : ['al-lesser'])].join(' ') || null;
}
