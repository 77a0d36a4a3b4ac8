/** Timing: eager beside stock torch.compile and aotlab, by phase, and the button that measures now. */

import type { Report, TimingRow } from '../model/report';
import { duration, grouped, listed, short } from '../model/words';
import type { Source } from '../source';
import type { Context } from './context';
import { h, heading } from './dom';
import type { Child } from './dom';

const ENGINES = ['eager', 'upstream', 'aotlab'];
const PHASES = ['forward', 'backward', 'total'];

/** Draw the panel. */
export function timingPanel(context: Context): Child[] {
  const { report, source } = context;
  const chosen = new Set(context.chosen.map(entry => entry.key));
  const all = context.chosen.length === context.entries.length;
  const rows = report.timing_rows.filter(
    row => all || row.frame === null || row.graph === null || chosen.has(`${row.frame}/${row.graph}`)
  );
  const drawn: Child[] = [measuring(source, report)];
  const groups = new Map<string, TimingRow[]>();
  for (const row of rows) {
    const key = `${row.frame ?? ''}/${row.graph ?? ''}/${row.device}`;
    groups.set(key, [...(groups.get(key) ?? []), row]);
  }
  if (groups.size > 0) {
    drawn.push(heading('Medians', 'lines, and ranges of ratios, go from the 10th to the 90th percentile'));
  }
  for (const members of groups.values()) {
    drawn.push(group(members));
  }
  return drawn;
}

/** The button that measures, and what came of it; without a kernel, why there is none. */
export function measuring(source: Source, report: Report | null): HTMLElement {
  const measured = (report?.timing_rows.length ?? 0) > 0;
  const row = h('p', { class: 'al-measuring al-soft' });
  if (source.live) {
    const button = h(
      'button',
      { type: 'button', class: 'al-button', 'data-key': 'measure', 'data-action': 'measure', disabled: source.busy },
      measured ? 'Measure again' : 'Measure'
    );
    button.addEventListener('click', () => source.measure());
    const about = measured ? '' : 'Times forward and backward of each graph, eager, by stock torch.compile and by aotlab in turns.';
    const words = source.failure === '' ? about : `It could not be measured: ${source.failure}`;
    row.append(button, h('span', { role: 'status' }, source.progress === '' ? words : source.progress));
  } else if (!measured) {
    row.append(
      report !== null && report.cell === null
        ? 'Not measured. Graphs of a cell under %%aotcompile can be measured here; report.with_timings(…) adds measurements of your own.'
        : 'Not measured. It can be while the kernel that ran the cell is alive, and with the option --time.'
    );
  }
  return row;
}

function rank(order: readonly string[], name: string): number {
  const index = order.indexOf(name);
  return index < 0 ? order.length : index;
}

/** What was measured of one graph; its phases share a scale, so that forward and backward can be compared too. */
function group(rows: readonly TimingRow[]): HTMLElement {
  const [first] = rows;
  // On a busy machine the slowest tenth may take a hundred times the median: the bars must still be seen.
  const longest = Math.max(...rows.map(row => row.median_ns), 1);
  const scale = Math.min(Math.max(...rows.map(row => row.p90_ns), longest), 2 * longest);
  const phases = [...new Set(rows.map(row => row.phase))].sort((a, b) => rank(PHASES, a) - rank(PHASES, b));
  const name = [
    first?.frame === null || first === undefined ? '' : short(first.frame),
    first?.graph === null || first === undefined ? '' : `graph ${first.graph}`,
    first === undefined ? '' : `on ${first.device}`
  ];
  return h(
    'section',
    { class: 'al-timing' },
    h('h5', {}, name.filter(each => each !== '').join(' · ')),
    h('div', { class: 'al-cards' }, ...phases.map(phase => card(phase, rows.filter(row => row.phase === phase), scale)))
  );
}

function card(phase: string, rows: readonly TimingRow[], scale: number): HTMLElement {
  const again = rows.find(row => row.again > 0)?.again;
  const noise = [...new Set(rows.flatMap(row => row.ratios.map(each => each.noise)))].filter(each => each !== '');
  const repeats = listed([...new Set(rows.map(row => grouped(row.repeats)))]);
  const ordered = [...rows].sort((a, b) => rank(ENGINES, a.engine) - rank(ENGINES, b.engine));
  return h(
    'table',
    { 'data-table': 'timings', 'data-phase': phase, class: 'al-bars' },
    h(
      'caption',
      {},
      phase,
      ' ',
      h('small', { title: 'Noise: how far the same code, timed twice, came from itself' }, repeats === '1' ? '1 repeat' : `${repeats} repeats`, again === undefined ? '' : `, ${(100 * Math.abs(again - 1)).toFixed(0)}% noise`),
      noise.length > 0 ? h('p', { class: 'al-soft', 'data-noise': '' }, `Noise is where ${noise.join(', or where ')}.`) : ''
    ),
    h('tbody', {}, ...ordered.map(row => bar(row, scale)))
  );
}

function bar(row: TimingRow, scale: number): HTMLElement {
  const engine = ENGINES.includes(row.engine) ? row.engine : 'eager';
  const length = h('i', { class: `al-engine-${engine}` });
  length.style.width = `${(100 * row.median_ns) / scale}%`;
  const whisker = h('i', { class: 'al-whisker' });
  whisker.style.left = `${(100 * row.p10_ns) / scale}%`;
  whisker.style.width = `${(100 * Math.max(Math.min(row.p90_ns, scale) - row.p10_ns, 0)) / scale}%`;
  const about = `10 % ${duration(row.p10_ns)}, median ${duration(row.median_ns)}, 90 % ${duration(row.p90_ns)}`;
  const ratios = row.ratios.map(each => {
    const other = each.over === 'upstream' ? 'torch.compile' : each.over;
    const range = `(${each.p10.toFixed(2)}–${each.p90.toFixed(2)})`;
    return `${each.noise === '' ? '' : 'noise: '}${each.median.toFixed(2)}× ${other} ${range}`;
  });
  return h(
    'tr',
    { 'data-name': row.engine, title: about },
    h('th', { scope: 'row', 'data-column': 'engine' }, row.engine),
    h('td', { class: 'al-bar-cell' }, h('span', { class: 'al-track' }, length, whisker)),
    h('td', { class: 'al-number', 'data-column': 'median_ns' }, duration(row.median_ns)),
    h('td', { class: 'al-soft', 'data-column': 'ratio' }, ...ratios.map(each => h('div', {}, each)))
  );
}
