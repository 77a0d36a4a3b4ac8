/** The marks in the gutter of a cell's editor: how each line ran, and what happened in it. */

import type { CellPart, Report } from '../model/report';
import { howLineRan, WAYS } from '../model/rows';
import { entriesOf } from '../view/context';
import { Origins } from '../view/selection';

export interface ILineMark {
  /** The name of the colour. */
  readonly tone: string;
  readonly symbol: string;
  /** "!" for a line with a graph break, and "M" for a line that mutates a tensor. */
  readonly flags: string;
  /** The facts about the line, one per line of text. */
  readonly title: string;
}

function graphsOf({ frames }: Report, part: CellPart): string {
  const graphs = frames
    .filter(frame => part.frames.includes(frame.name) && frame.engine !== 'upstream')
    .flatMap(frame => frame.graphs.map(graph => `${frame.name}, graph ${graph.index}`));
  return graphs.length > 3 ? `${graphs.slice(0, 3).join('; ')} and ${graphs.length - 3} more` : graphs.join('; ');
}

/** The names of the tensors that each line of the cell mutated, by the number of the line. */
function mutations(report: Report, origins: Origins): Map<number, Set<string>> {
  const names = new Map<number, Set<string>>();
  for (const entry of entriesOf(report)) {
    for (const input of entry.graph.inputs) {
      for (const { inCell } of input.written_at.flatMap(line => origins.causesOf(entry, line))) {
        if (inCell !== null) {
          names.set(inCell, (names.get(inCell) ?? new Set()).add(input.name));
        }
      }
    }
  }
  return names;
}

/** The marks of the lines of the report's cell, by the number of the line. Lines without code have no mark. */
export function lineMarks(report: Report): Map<number, ILineMark> {
  const { cell } = report;
  const marks = new Map<number, ILineMark>();
  if (cell === null) {
    return marks;
  }
  const lines = cell.source.split('\n');
  const origins = new Origins(report, new Map(), () => []);
  const mutated = mutations(report, origins);
  // A graph break is marked at its own line if this line is in the cell, else at the line that called its code.
  const breakRows = report.graph_break_rows
    .filter(row => row.library === '')
    .map(row => ({ row, at: origins.originOf(row.line)?.inCell ?? row.cell_line }));
  for (const part of cell.parts) {
    for (let line = part.first_line; line <= Math.min(part.last_line, lines.length); line += 1) {
      const howRan = howLineRan(part, line);
      const [tone, symbol, meaning] = WAYS[howRan] ?? ['plain', '', ''];
      if (symbol === '' || /^\s*(#|$)/.test(lines[line - 1] ?? '')) {
        continue;
      }
      const breaks = breakRows.filter(({ at }) => at === line);
      const names = [...(mutated.get(line) ?? [])];
      const graphs = howRan.includes('compiled') ? graphsOf(report, part) : '';
      marks.set(line, {
        tone,
        symbol,
        flags: `${breaks.length > 0 ? '!' : ''}${names.length > 0 ? 'M' : ''}`,
        title: [
          `Line ${line}: ${howRan} (${meaning})`,
          ...(graphs === '' ? [] : [`Graphs: ${graphs}`]),
          ...breaks.map(({ row }) => `Graph break: ${row.words || row.reason}`),
          ...(names.length === 0 ? [] : [`Mutates: ${names.join(', ')}`]),
          ...(part.reason === '' || breaks.length > 0 ? [] : [part.reason])
        ].join('\n')
      });
    }
  }
  return marks;
}
