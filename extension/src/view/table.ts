/** Tables: one row per thing, named cells, long ones cut until the reader asks for all. */

import { notHere } from '../model/words';
import { h, spoken } from './dom';
import type { Child } from './dom';

export interface Column<T> {
  /** The column's name in the report's tables. */
  readonly name: string;
  /** What stands above it. */
  readonly title: string;
  /** What it means, shown on hover. */
  readonly help?: string;
  /** `number` is aligned to the right, `code` is monospace, `words` may wrap. */
  readonly kind?: 'number' | 'code' | 'words';
  /** The cell's content. */
  readonly cell: (row: T) => Child;
}

export interface TableOptions<T> {
  /** The table's name, the same in every report. */
  readonly name: string;
  /** What the table shows, for those who do not see it. */
  readonly label: string;
  readonly columns: readonly Column<T>[];
  readonly rows: readonly T[];
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

/** Cells of more characters can be read in full on hover. */
const LONG = 40;

/** How many rows a table shows at first. */
export const MOST_ROWS = 200;

/** Make a table, in a box that scrolls sideways. Columns in which every cell is empty are left out if `sparse`. */
export function table<T>(options: TableOptions<T>): HTMLElement {
  const { columns, rows } = options;
  const head = h(
    'tr',
    {},
    ...columns.map(column =>
      h('th', { scope: 'col', class: kindClass(column), title: column.help ?? null }, column.title)
    )
  );
  const body = h('tbody');
  const append = (some: readonly T[]): void => {
    body.append(...some.map(row => tableRow(row, options)));
  };
  append(rows.slice(0, MOST_ROWS));
  const box = h(
    'div',
    { class: 'al-scroll' },
    h('table', { 'data-table': options.name, 'aria-label': options.label, ...options.data }, h('thead', {}, head), body)
  );
  const left = (options.total ?? rows.length) - rows.length;
  const rest = left > 0 ? h('p', { class: 'al-soft', 'data-cut': String(left) }, notHere(left, 'row')) : null;
  if (rows.length > MOST_ROWS) {
    const button = h('button', { type: 'button', class: 'al-button' }, `Show all ${rows.length} rows`);
    button.addEventListener('click', () => {
      append(rows.slice(MOST_ROWS));
      button.remove();
    });
    return h('div', {}, box, button, rest);
  }
  return rest === null ? box : h('div', {}, box, rest);
}

function tableRow<T>(row: T, options: TableOptions<T>): HTMLElement {
  return h(
    'tr',
    { 'data-name': options.key(row), class: options.tone?.(row) ?? null, ...options.rowData?.(row) },
    ...options.columns.map((column, index) => {
      const attributes = { class: kindClass(column), 'data-column': column.name };
      // The first cell names the row, for those who hear the table.
      const cell = h('td', index === 0 ? { ...attributes, role: 'rowheader' } : attributes, shown(column, row));
      const text = cell.textContent ?? '';
      if (text.length > LONG) {
        // Where it does not fit, its end is not seen.
        cell.title = text;
      }
      return cell;
    })
  );
}

function shown<T>(column: Column<T>, row: T): Child {
  const child = column.cell(row);
  return column.kind === 'words' && typeof child === 'string' ? spoken(child) : child;
}

function kindClass<T>(column: Column<T>): string | null {
  return column.kind === undefined ? null : `al-${column.kind}`;
}
