/**
 * Small readers that convert any JSON to typed values. `records.ts` combines them.
 *
 * A report comes from a file that anybody may have written, so a reader never throws. A missing value becomes the
 * default. A value with a wrong type is noted as damage and becomes the default too.
 */

/** Collects the damaged places of a report. */
export interface IDamage {
  note(path: string, expected: string): void;
}

/** A function that reads one value; `path` is the value's place in the report, and `damage` collects bad places. */
export type Reader<T> = (value: unknown, path: string, damage: IDamage) => T;

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

/** Make a reader of values for which `accepts` is true; `expected` names this kind of value for notes about damage. */
function accepting<T>(accepts: (value: unknown) => value is T, expected: string, fallback: T): Reader<T> {
  return (value, path, damage) => {
    if (accepts(value)) {
      return value;
    }
    if (value !== undefined) {
      damage.note(path, expected);
    }
    return fallback;
  };
}

/** Text, by default empty. */
export function text(fallback = ''): Reader<string> {
  return accepting((value): value is string => typeof value === 'string', 'text', fallback);
}

/** A number, by default 0. */
export function number(fallback = 0): Reader<number> {
  return accepting((value): value is number => Number.isFinite(value), 'a number', fallback);
}

/** A boolean, by default false. */
export function flag(fallback = false): Reader<boolean> {
  return accepting((value): value is boolean => typeof value === 'boolean', 'true or false', fallback);
}

/** The value unchanged; for the few fields that may contain any plain value. */
export const plain: Reader<boolean | number | string | null> = accepting(
  (value): value is boolean | number | string | null =>
    value === null || ['boolean', 'number', 'string'].includes(typeof value),
  'a plain value',
  null
);

/** A value that `reader` reads, or null. */
export function maybe<T>(reader: Reader<T>, fallback: T | null = null): Reader<T | null> {
  return (value, path, damage) =>
    value === undefined ? fallback : value === null ? null : reader(value, path, damage);
}

/** A number, or an object that `reader` reads. */
export function orNumber<T>(reader: Reader<T>): Reader<T | number> {
  return (value, path, damage) => (isObject(value) ? reader(value, path, damage) : number()(value, path, damage));
}

/** A list, by default empty. */
export function list<T>(reader: Reader<T>): Reader<readonly T[]> {
  return (value, path, damage) => {
    if (Array.isArray(value)) {
      return value.map((item: unknown, index) => reader(item, `${path}[${index}]`, damage));
    }
    if (value !== undefined) {
      damage.note(path, 'a list');
    }
    return [];
  };
}

/**
 * An object with known fields; other fields are ignored. `fields` is a function, because records contain each other.
 */
export function record<T>(fields: () => { readonly [K in keyof T]: Reader<T[K]> }): Reader<T> {
  let readers: [string, Reader<unknown>][] | null = null;
  return (value, path, damage) => {
    const fieldValues = isObject(value) ? value : {};
    if (!isObject(value) && value !== undefined) {
      damage.note(path, 'an object');
    }
    readers ??= Object.entries<Reader<unknown>>(fields());
    return Object.fromEntries(
      readers.map(([name, reader]) => [name, reader(fieldValues[name], `${path}.${name}`, damage)])
    ) as T;
  };
}
