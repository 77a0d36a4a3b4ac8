/**
 * Small readers that turn what JSON holds into typed values, whatever it holds.
 *
 * A report comes out of a file that anybody may have written. A reader never throws: what is missing takes its
 * default, what has another type than it should is noted as damage and takes its default as well.
 */

/** Collects the places where the report was not what it should be. */
export interface Damage {
  note(path: string, expected: string): void;
}

/** Reads one value; `path` says where it stands. */
export type Reader<T> = (value: unknown, path: string, damage: Damage) => T;

/** What a reader returns. */
export type Read<R> = R extends Reader<infer T> ? T : never;

/** The readers of a record's fields, by name. */
type Fields = Record<string, Reader<unknown>>;

/** A record reader, which knows its fields; a test compares them with the schema. */
export interface RecordReader<T> extends Reader<T> {
  readonly title: string;
  readonly fields: readonly string[];
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

/** Text, by default empty. */
export function text(fallback = ''): Reader<string> {
  return (value, path, damage) => {
    if (typeof value === 'string') {
      return value;
    }
    if (value !== undefined) {
      damage.note(path, 'text');
    }
    return fallback;
  };
}

/** A number, by default 0. */
export function number(fallback = 0): Reader<number> {
  return (value, path, damage) => {
    if (typeof value === 'number' && Number.isFinite(value)) {
      return value;
    }
    if (value !== undefined) {
      damage.note(path, 'a number');
    }
    return fallback;
  };
}

/** A boolean. */
export function flag(fallback = false): Reader<boolean> {
  return (value, path, damage) => {
    if (typeof value === 'boolean') {
      return value;
    }
    if (value !== undefined) {
      damage.note(path, 'true or false');
    }
    return fallback;
  };
}

/** The value as it is; for the few fields that may hold anything plain. */
export const plain: Reader<boolean | number | string | null> = (value, path, damage) => {
  if (value === null || typeof value === 'boolean' || typeof value === 'number' || typeof value === 'string') {
    return value;
  }
  if (value !== undefined) {
    damage.note(path, 'a plain value');
  }
  return null;
};

/** What `reader` reads, or null. */
export function maybe<T>(reader: Reader<T>): Reader<T | null> {
  return (value, path, damage) => (value === null || value === undefined ? null : reader(value, path, damage));
}

/** The same, but what is missing is the reader's default. */
export function orNull<T>(reader: Reader<T>): Reader<T | null> {
  return (value, path, damage) => (value === null ? null : reader(value, path, damage));
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

/** An object with known fields; others are ignored. `title` is its name in the schema. */
export function record<F extends Fields>(
  title: string,
  fields: F
): RecordReader<{ readonly [K in keyof F]: Read<F[K]> }> {
  type T = { readonly [K in keyof F]: Read<F[K]> };
  const names = Object.keys(fields);
  const read = (value: unknown, path: string, damage: Damage): T => {
    const found = isObject(value) ? value : {};
    if (!isObject(value) && value !== undefined) {
      damage.note(path, 'an object');
    }
    const result: Record<string, unknown> = {};
    for (const name of names) {
      result[name] = fields[name]?.(found[name], `${path}.${name}`, damage);
    }
    return result as T;
  };
  return Object.assign(read, { title, fields: names });
}
