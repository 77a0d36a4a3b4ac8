/** Read a report, compressed or not. `aotlab/report/packing.py` describes the compressed form. */

import { readReport } from './report';
import type { Reading } from './report';

/** A report that has more bytes than this after decompression is not read. Python has the same limit. */
export const MOST_BYTES = 64 * 1024 * 1024;

type Fields = Record<string, unknown>;

function fieldsOf(value: unknown): Fields {
  return typeof value === 'object' && value !== null ? (value as Fields) : {};
}

function listOf(value: unknown): readonly unknown[] {
  return Array.isArray(value) ? value : [];
}

class TooLarge extends Error {}

/** Decompress base64 of gzip, and parse it as JSON. `budget.left` is the number of bytes that may still be read. */
async function expand(text: string, budget: { left: number }): Promise<unknown> {
  const bytes = Uint8Array.from(atob(text), character => character.charCodeAt(0));
  const reader = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip')).getReader();
  const decoder = new TextDecoder();
  let json = '';
  for (;;) {
    const { done, value } = await reader.read();
    if (done) {
      return JSON.parse(json + decoder.decode());
    }
    budget.left -= value.length;
    if (budget.left < 0) {
      await reader.cancel();
      throw new TooLarge();
    }
    json += decoder.decode(value, { stream: true });
  }
}

/** The nodes of a graph, which are stored by columns, as rows. */
function rowsOf(packed: Fields): Fields[] {
  const columns = Object.entries(fieldsOf(packed['columns']));
  const lines = listOf(packed['lines']);
  const [first] = columns;
  return listOf(first?.[1]).map((_, index) => {
    const row = Object.fromEntries(columns.map(([name, values]) => [name, listOf(values)[index]]));
    return { ...row, line: lines[row['line'] as number] ?? null };
  });
}

/** Decompress a report, and put the nodes into its graphs. */
async function unpack(packed: Fields): Promise<unknown> {
  const budget = { left: MOST_BYTES };
  const report = fieldsOf(await expand(String(packed['gzip']), budget));
  const texts = listOf(packed['gzip_nodes']);
  for (const [number, frame] of listOf(report['frames']).entries()) {
    const textsOfFrame = listOf(texts[number]);
    for (const [index, graph] of listOf(fieldsOf(frame)['graphs']).entries()) {
      const text = textsOfFrame[index];
      if (typeof text === 'string' && text !== '') {
        fieldsOf(graph)['nodes'] = rowsOf(fieldsOf(await expand(text, budget)));
      }
    }
  }
  return { ...report, version: packed['version'] };
}

/** Read a report from parsed JSON, which may have the compressed form. Never throws. */
export async function readPacked(value: unknown): Promise<Reading> {
  const head = readReport(value);
  if (head.report === null || !Object.hasOwn(fieldsOf(value), 'gzip')) {
    return head;
  }
  const failed = (problem: string): Reading => ({ report: null, problem, damage: [] });
  try {
    return readReport(await unpack(fieldsOf(value)));
  } catch (error) {
    return failed(
      error instanceof TooLarge
        ? 'This report has more than 64 MB of data, and is not read.'
        : 'This report is damaged: its compressed data cannot be read.'
    );
  }
}
