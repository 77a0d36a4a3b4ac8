/**
 * Tables with named columns. The reader can sort, search and copy each table. Of a long table, the page contains only
 * the visible rows.
 */

import MEANINGS from '../model/meanings.json';
import { cutNotice, grouped } from '../model/words';
import type { IContext } from './context';
import { copyText } from './copy';
import { h, prose } from './dom';
import type { Child } from './dom';

/** The value of a column by which rows are sorted; rows with null come last. */
type Value = number | string | null;

interface INamed<T> {
  /** The column's name in the report's tables. */
  readonly name: string;
  /** The column's heading. */
  readonly title: string;
  /** The column's meaning, shown on hover. By default it is the meaning in `aotlab/report/columns.py`. */
  readonly help?: string;
  /** The cell's content. */
  readonly cell: (row: T) => Child;
  /** If this is set, narrow pages hide the column and show its value below the row's name, after these words. */
  readonly lesser?: string;
}

/** `number` is aligned to the right and sorted by its value, `code` is monospace, `words` may wrap. */
export type Column<T> = INamed<T> &
  (
    | { readonly kind: 'number'; readonly value: (row: T) => Value }
    | { readonly kind?: 'code' | 'words'; readonly value?: (row: T) => Value }
  );

export interface ITableOptions<T> {
  /** The table's name, the same in every report. */
  readonly name: string;
  /** The name of the report's table with these columns, if it differs from `name`. */
  readonly meanings?: string;
  /** A label for screen readers. */
  readonly label: string;
  readonly columns: readonly Column<T>[];
  readonly rows: readonly T[];
  /** All single rows, if some of `rows` represent groups. The search and the sorting use them. */
  readonly singleRows?: readonly T[];
  /** The number of rows before the report was cut to fit a notebook. */
  readonly total?: number;
  /** The name of a row. */
  readonly key: (row: T) => string;
  /** The CSS class of a row. */
  readonly tone?: (row: T) => string | null;
  /** More attributes of a row. */
  readonly rowData?: (row: T) => Readonly<Record<string, string>>;
  /** Whether it can be searched even if it has few rows now, because its rows change. */
  readonly search?: boolean;
  /** More attributes of the table. */
  readonly data?: Readonly<Record<string, string>>;
}

/** The reader's sorting, search and scrolling of a table. It is kept when a changed report replaces the table. */
export interface ITableState {
  /** The name of the column that it is sorted by; empty for the report's own order. */
  sorted: string;
  down: boolean;
  search: string;
  top: number;
  left: number;
}

/**
 * The text of a cell is shown on hover if it has more than `LONG` characters. In a long table, whose rows have one line
 * each, it is shown if it has more than `LONG_LINE` characters.
 */
const LONG = 40;
const LONG_LINE = 12;

/** CSS classes of tables with names of more characters. On narrow pages, such names get a second line. */
const LONG_NAMES = [
  ['al-longest', 46],
  ['al-longer', 33]
] as const;

/** Tables with more rows can be searched. */
const FEW_ROWS = 8;

/** For tables with more rows, only visible rows are drawn. */
export const MOST_ROWS = 200;

/** This many rows are drawn before and after the visible rows. */
const AROUND = 10;

/** In pixels: the heights of a row of a long table and of the table's box, as long as they are not known. */
const ROW = 24;
const BOX = 400;

const collator = new Intl.Collator('en', { numeric: true });

/** Make a table, in a box that scrolls. */
export function table<T>(context: IContext, options: ITableOptions<T>): HTMLElement {
  return new Table(context.tables, options).root;
}

class Table<T> {
  readonly root: HTMLElement;
  private readonly options: ITableOptions<T>;
  private readonly state: ITableState;
  private readonly singleRows: readonly T[];
  private readonly long: boolean;
  private readonly head: HTMLElement;
  private readonly body = h('tbody');
  private readonly table: HTMLElement;
  private readonly box: HTMLElement;
  private readonly matchStatus = h('span', { class: 'al-soft', role: 'status' });
  /** The texts of a row's cells, cached. */
  private readonly texts = new Map<T, readonly string[]>();
  /** The rows that match the search, in their order. The page contains the rows from `first` to `last`. */
  private arrangedRows: readonly T[] = [];
  private first = 0;
  private last = 0;
  /** The height of each row. On narrow pages a row has a second line. */
  private height = ROW;

  constructor(states: Map<string, ITableState>, options: ITableOptions<T>) {
    this.options = options;
    const { name, label, columns, rows, data } = options;
    const key = [name, label, ...Object.values(data ?? {})].join(' ');
    this.state = states.get(key) ?? { sorted: '', down: false, search: '', top: 0, left: 0 };
    states.set(key, this.state);
    this.singleRows = options.singleRows ?? rows;
    this.long = this.singleRows.length > MOST_ROWS;
    this.head = h('tr', { 'aria-rowindex': this.long ? 1 : null }, ...columns.map(column => this.heading(column, key)));
    const widths = this.long ? this.widths() : null;
    this.table = h(
      'table',
      { 'data-table': name, 'aria-label': label, ...data },
      h('thead', {}, this.head, widths),
      this.body
    );
    const longest = this.long ? Math.max(...this.singleRows.map(row => this.textsOf(row)[0]?.length ?? 0)) : 0;
    const names = LONG_NAMES.filter(([, letters]) => longest > letters).map(([kind]) => ` ${kind}`);
    this.box = h('div', { class: `al-scroll${this.long ? ' al-long' : ''}${names.join('')}` }, this.table);
    this.box.addEventListener('scroll', () => this.onScroll());
    const cutCount = (options.total ?? rows.length) - rows.length;
    const cutRemark =
      cutCount > 0 ? h('p', { class: 'al-soft', 'data-cut': String(cutCount) }, cutNotice(cutCount, 'row')) : null;
    this.root = h('div', { class: 'al-table' }, this.tools(key), this.box, cutRemark);
    this.arrange();
    const { top } = this.state;
    // The box can scroll only after it was added to the page.
    queueMicrotask(() => {
      this.box.scrollTop = top;
      this.box.scrollLeft = this.state.left;
      if (this.long && this.rowHeightChanged()) {
        this.fill();
      }
    });
  }

  private heading(column: Column<T>, key: string): HTMLElement {
    const { meanings, name } = this.options;
    const button = h(
      'button',
      { type: 'button', class: 'al-sort', 'data-key': `sort ${column.name} ${key}` },
      column.title
    );
    button.addEventListener('click', () => {
      const { state } = this;
      const sameColumn = state.sorted === column.name;
      // First ascending, then descending, then the report's order.
      [state.sorted, state.down] = sameColumn && state.down ? ['', false] : [column.name, sameColumn];
      this.arrange();
    });
    const help = column.help ?? meaning(meanings ?? name, column.name);
    return h('th', { scope: 'col', class: kindClass(column), title: help, 'data-sort': column.name }, button);
  }

  /** A search field for tables with many rows, and a button that copies. */
  private tools(key: string): HTMLElement {
    const { label } = this.options;
    const copy = h(
      'button',
      { type: 'button', class: 'al-button al-copy', title: 'Copy the rows that are shown' },
      'Copy'
    );
    copy.addEventListener('click', () => {
      void copyText(this.asText(), this.root).then(success => {
        copy.textContent = success ? 'Copied' : 'Not copied';
        setTimeout(() => copy.replaceChildren('Copy'), 1500);
      });
    });
    if (this.singleRows.length <= FEW_ROWS && this.state.search === '' && this.options.search !== true) {
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
      // The notebook would handle letters as commands.
      if (!event.ctrlKey && !event.metaKey) {
        event.stopPropagation();
      }
    });
    return h('div', { class: 'al-tools' }, input, this.matchStatus, copy);
  }

  /**
   * Search, sort and draw the rows. A row matches if it contains the searched text. If no row does, a row matches if it
   * contains each word of the text.
   */
  private arrange(): void {
    const { columns, rows } = this.options;
    const { sorted, down, search } = this.state;
    for (const heading of this.head.querySelectorAll<HTMLElement>('th')) {
      const direction = down ? 'descending' : 'ascending';
      heading.setAttribute('aria-sort', heading.dataset['sort'] === sorted ? direction : 'none');
    }
    const sought = search.trim().toLowerCase();
    this.arrangedRows = sought === '' && sorted === '' ? rows : this.singleRows;
    if (sought !== '') {
      const texts = this.singleRows.map(row => this.textsOf(row).join('\n').toLowerCase());
      const rowsWith = (words: readonly string[]): T[] =>
        this.singleRows.filter((_, index) => words.every(word => texts[index]?.includes(word)));
      const wholeMatches = rowsWith([sought]);
      this.arrangedRows = wholeMatches.length > 0 ? wholeMatches : rowsWith(sought.split(/\s+/));
    }
    const sortIndex = columns.findIndex(column => column.name === sorted);
    const column = columns[sortIndex];
    if (column !== undefined) {
      const value = (row: T): Value => (column.value ? column.value(row) : (this.textsOf(row)[sortIndex] ?? ''));
      const values = this.arrangedRows.map(row => [row, value(row) ?? ''] as const);
      this.arrangedRows = values.sort(([, a], [, b]) => compareValues(a, b, down)).map(([row]) => row);
    }
    this.matchStatus.textContent =
      sought === '' ? '' : `${grouped(this.arrangedRows.length)} of ${grouped(this.singleRows.length)}`;
    if (this.long) {
      this.table.setAttribute('aria-rowcount', String(this.arrangedRows.length + 1));
    }
    this.draw();
  }

  private draw(): void {
    const { arrangedRows } = this;
    if (!this.long) {
      this.body.replaceChildren(...arrangedRows.map(row => this.row(row)));
      return;
    }
    this.fill();
    if (this.rowHeightChanged()) {
      this.fill();
    }
  }

  /** Draw the visible rows of a long table. */
  private fill(): void {
    const { arrangedRows, state } = this;
    const height = this.box.clientHeight || BOX;
    this.first = Math.max(Math.min(Math.floor(state.top / this.height), arrangedRows.length) - AROUND, 0);
    this.last = Math.min(this.first + Math.ceil(height / this.height) + 2 * AROUND, arrangedRows.length);
    const drawn = arrangedRows.slice(this.first, this.last).map((item, place) => {
      const row = this.row(item);
      row.setAttribute('aria-rowindex', String(this.first + place + 2));
      return row;
    });
    this.body.replaceChildren(this.space(this.first), ...drawn, this.space(arrangedRows.length - this.last));
  }

  /** Measure the height of the rows, and return whether it changed. */
  private rowHeightChanged(): boolean {
    const oldHeight = this.height;
    this.height = this.body.querySelector<HTMLElement>('tr[data-name]')?.getBoundingClientRect().height || oldHeight;
    return Math.abs(this.height - oldHeight) > 0.1;
  }

  /** An empty row with the height of `rows` rows, which takes the space of rows that are not in the page. */
  private space(rows: number): HTMLElement {
    const row = h('tr', { class: 'al-space', 'aria-hidden': 'true' });
    row.style.height = `${rows * this.height}px`;
    return row;
  }

  private onScroll(): void {
    const { box, state } = this;
    [state.top, state.left] = [box.scrollTop, box.scrollLeft];
    const heightChanged = this.long && this.rowHeightChanged();
    const [firstVisible, lastVisible] = [state.top / this.height, (state.top + box.clientHeight) / this.height];
    if (
      heightChanged ||
      (this.long &&
        ((firstVisible < this.first && this.first > 0) ||
          (lastVisible > this.last && this.last < this.arrangedRows.length)))
    ) {
      this.draw();
    }
  }

  private row(row: T): HTMLElement {
    const { columns, key, tone, rowData } = this.options;
    const texts = columns.some(({ lesser }) => lesser !== undefined) ? this.textsOf(row) : [];
    // All rows of a long table must have the same height. So the second line of a row without values gets a space.
    const blankLine = this.long && texts.length > 0 ? '\u00a0' : null;
    const lesser = columns.map((column, place) => (texts[place] ? column.lesser?.concat(texts[place]) : undefined));
    const secondLine = lesser.filter(text => text !== undefined).join(' · ') || blankLine;
    return h(
      'tr',
      { 'data-name': key(row), class: tone?.(row) ?? null, ...rowData?.(row) },
      ...columns.map((column, place) => {
        const content = cellContent(column, row);
        // For screen readers, the first cell is the row's header.
        const role = place === 0 ? 'rowheader' : null;
        const cellChild = this.long && content !== null ? h('div', {}, content) : content;
        const cell = h(
          'td',
          { class: kindClass(column), 'data-column': column.name, role, 'data-below': place === 0 ? secondLine : null },
          cellChild
        );
        const text = cell.textContent ?? '';
        if (text.length > (this.long ? LONG_LINE : LONG)) {
          // Show a long text on hover, because the cell may hide its end.
          cell.title = text;
        }
        return cell;
      })
    );
  }

  /**
   * An invisible row that fixes the widths of the columns, so that they do not change while the reader scrolls. It has
   * space for all names and for nine in ten of the other texts. The columns of kind `words` share the rest of the
   * width.
   */
  private widths(): HTMLElement {
    const cells = this.options.columns.map((column, place) => {
      const widthBox = h('div');
      if (column.kind !== 'words') {
        const lengths = this.singleRows.map(row => this.textsOf(row)[place]?.length ?? 0).sort((a, b) => a - b);
        const usual = lengths[Math.floor((place === 0 ? 1 : 0.9) * (lengths.length - 1))] ?? 0;
        // The unit `ch` is the width of a digit. Letters are narrower, and a mark has a margin.
        const letters = column.kind === 'code' ? usual : 0.85 * usual + (column.kind === 'number' ? 0.5 : 2);
        widthBox.style.width =
          column.kind === 'code' ? `min(${letters}ch, ${place === 0 ? 26 : 16}cqi)` : `${letters}ch`;
      }
      return h('td', { class: kindClass(column) }, widthBox);
    });
    return h('tr', { class: 'al-widths', 'aria-hidden': 'true' }, ...cells);
  }

  private textsOf(row: T): readonly string[] {
    const texts = this.texts.get(row) ?? this.options.columns.map(column => textOf(column, row));
    this.texts.set(row, texts);
    return texts;
  }

  private asText(): string {
    const lines = [
      this.options.columns.map(column => column.title),
      ...this.arrangedRows.map(row => this.textsOf(row))
    ];
    return lines.map(cells => cells.map(cell => cell.replace(/\s+/g, ' ')).join('\t')).join('\n');
  }
}

/**
 * The meaning of a column in `aotlab/report/columns.py`, without the unit, because the page shows units in the cells.
 */
function meaning(name: string, column: string): string | null {
  const meaningsOfTables: Readonly<Record<string, Readonly<Record<string, string>> | undefined>> = MEANINGS;
  const text = meaningsOfTables[name]?.[column]?.replace(/,? in (ns|bytes)\b|`/g, '') ?? null;
  return text === null ? null : text.slice(0, 1).toUpperCase() + text.slice(1);
}

function compareValues(a: number | string, b: number | string, down: boolean): number {
  if (a === '' || b === '') {
    return Number(a === '') - Number(b === '');
  }
  const order = typeof a === 'number' && typeof b === 'number' ? a - b : collator.compare(String(a), String(b));
  return down ? -order : order;
}

function cellContent<T>(column: Column<T>, row: T): Child {
  const child = column.cell(row);
  return column.kind === 'words' && typeof child === 'string' ? prose(child) : child;
}

/** The text of a cell; for a picture, its text on hover. */
function textOf<T>(column: Column<T>, row: T): string {
  const child = column.cell(row);
  if (child === null || (typeof child === 'string' && (column.kind !== 'words' || !child.includes('`')))) {
    return child ?? '';
  }
  const content = typeof child === 'string' ? prose(child) : child;
  return content.textContent || (content instanceof HTMLElement ? content.title : '');
}

function kindClass<T>({ kind, lesser }: Column<T>): string | null {
  return (
    [...(kind === undefined ? [] : [`al-${kind}`]), ...(lesser === undefined ? [] : ['al-lesser'])].join(' ') || null
  );
}
