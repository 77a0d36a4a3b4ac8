/** Facts about single rows of a report. */

import type { CellPart, Input, Output } from './report';

/** Whether the function changed the tensor in any way. */
export function mutated(input: Input): boolean {
  return input.mutates_data === true || input.mutates_metadata === true || input.mutates_storage === true;
}

/** The rows of arguments or outputs, without the rows of the parts of wrappers. */
export function withoutParts<T extends Input | Output>(rows: readonly T[]): readonly T[] {
  return inTrees(rows)
    .filter(({ depth }) => depth === 0)
    .map(({ row }) => row);
}

/**
 * A row in a tree of wrapper subclasses: the row itself, the row of the argument or output that contains it
 * (`outermost`), and its depth in the tree (0 for an argument or output).
 */
export interface ITreeRow<T> {
  readonly row: T;
  readonly outermost: T;
  readonly depth: number;
}

/** Build the trees of wrappers and their parts. In `rows`, the parts of a wrapper follow the wrapper. */
export function inTrees<T extends Input | Output>(rows: readonly T[]): ITreeRow<T>[] {
  const rowsByName = new Map<string, ITreeRow<T>>();
  return rows.map(row => {
    const wrapper = row.part_of === '' ? undefined : rowsByName.get(row.part_of);
    const treeRow = { row, outermost: wrapper?.outermost ?? row, depth: wrapper === undefined ? 0 : wrapper.depth + 1 };
    rowsByName.set(row.name, treeRow);
    return treeRow;
  });
}

/**
 * How a line of a part of the cell ran; empty for a line of a branch that is in no graph.
 *
 * Python's `how_line_ran` has the same rule: if a compiled part has a reason why some of it is not compiled, and does
 * not say which lines that concerns, each of its lines is compiled in part.
 */
export function howLineRan({ how, reason, ways, first_line: first }: CellPart, line: number): string {
  const lineWay = ways[line - first];
  return lineWay === 'in part' || (lineWay === undefined && how === 'compiled' && reason !== '')
    ? 'compiled in part'
    : (lineWay ?? how);
}

/** For each way in which a line can run (see `howLineRan`): the colour, the symbol and the meaning. */
export const WAYS: Readonly<Record<string, readonly [string, string, string]>> = {
  compiled: ['good', '●', 'run by compiled graphs'],
  eager: ['warn', '◐', 'computes with tensors, and nothing of it is compiled'],
  python: ['plain', '○', 'plain Python, not handed to the compiler'],
  'not run': ['plain', '✕', 'not run'],
  'compiled in part': ['warn', '◐', 'compiled graphs ran some of it, Python the rest'],
  'calls compiled code': ['plain', '○', 'plain Python, which calls functions that are compiled']
};
