/** Timing: the time line of compilations; where the time went; eager, stock torch.compile and aotlab side by side, for each phase; and the button that measures. */

import type { Report, TimingRow } from '../model/report';
import { duration, grouped, listed, short } from '../model/words';
import type { ISource } from '../source';
import type { IContext } from './context';
import { h, heading } from './dom';
import type { Child } from './dom';
import { allGraphsChosen } from './graph';
import { timeline } from './timeline';
import { timeTable } from './timeTable';

const ENGINES = ['eager', 'upstream', 'aotlab'];
const PHASES = ['forward', 'backward', 'total'];

/** Draw the panel. */
export function timingPanel(context: IContext): Child[] {
  const { report, source } = context;
  const chosen = new Set(context.chosen.map(entry => entry.key));
  const allChosen = allGraphsChosen(context);
  const rows = report.timing_rows.filter(
    row => allChosen || row.frame === null || row.graph === null || chosen.has(`${row.frame}/${row.graph}`)
  );
  const drawn: Child[] = [...timeline(context), ...timeTable(context), measureLine(source, report)];
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

/** The button that measures, with its progress; if no kernel answers, words about how to measure. */
export function measureLine(source: ISource, report: Report | null): HTMLElement {
  const measured = (report?.timing_rows.length ?? 0) > 0;
  const row = h('p', { class: 'al-measuring al-soft' });
  if (source.live) {
    const button = h(
      'button',
      { type: 'button', class: 'al-button', 'data-key': 'measure', 'data-action': 'measure', disabled: source.busy },
      measured ? 'Measure again' : 'Measure'
    );
    button.addEventListener('click', () => source.measure());
    const explanation = measured
      ? ''
      : 'Times forward and backward of each graph, eager, by stock torch.compile and by aotlab in turns.';
    const words = source.failure === '' ? explanation : `It could not be measured: ${source.failure}`;
    row.append(button, h('span', { role: 'status' }, source.progress === '' ? words : source.progress));
  } else if (!measured) {
    row.append(
      report !== null && report.cell === null
        ? 'Not measured. Graphs of a cell under %%aotcompile can be measured here; report.with_timings(…) adds measurements of your own.'
        : 'Not measured. Run the cell again with the option --time.'
    );
  }
  return row;
}

function rank(order: readonly string[], name: string): number {
  const index = order.indexOf(name);
  return index < 0 ? order.length : index;
}

/** The measurements of one graph. Its phases have one scale, so that the reader can compare forward and backward. */
function group(rows: readonly TimingRow[]): HTMLElement {
  const [first] = rows;
  // On a busy machine the slowest tenth may take a hundred times the median. Limit the scale so that bars stay visible.
  const longest = Math.max(...rows.map(row => row.median_ns), 1);
  const scale = Math.min(Math.max(...rows.map(row => row.p90_ns), longest), 2 * longest);
  const phases = [...new Set(rows.map(row => row.phase))].sort((a, b) => rank(PHASES, a) - rank(PHASES, b));
  const titleParts = [
    first?.frame === null || first === undefined ? '' : short(first.frame),
    first?.graph === null || first === undefined ? '' : `graph ${first.graph}`,
    first === undefined ? '' : `on ${first.device}`
  ];
  return h(
    'section',
    { class: 'al-timing' },
    h('h5', {}, titleParts.filter(part => part !== '').join(' · ')),
    h(
      'div',
      { class: 'al-cards' },
      ...phases.map(phase =>
        card(
          phase,
          rows.filter(row => row.phase === phase),
          scale
        )
      )
    )
  );
}

function card(phase: string, rows: readonly TimingRow[], scale: number): HTMLElement {
  const noiseRatio = rows.find(row => row.again > 0)?.again;
  const noise = [...new Set(rows.flatMap(row => row.ratios.map(ratio => ratio.noise)))].filter(text => text !== '');
  const repeats = listed([...new Set(rows.map(row => grouped(row.repeats)))]);
  const ended = listed([...new Set(rows.map(row => row.ended).filter(text => text !== ''))]);
  const ordered = [...rows].sort((a, b) => rank(ENGINES, a.engine) - rank(ENGINES, b.engine));
  return h(
    'table',
    { 'data-table': 'timings', 'data-phase': phase, class: 'al-bars' },
    h(
      'caption',
      {},
      phase,
      ' ',
      h(
        'small',
        { title: 'Noise: the difference between two timings of the same code' },
        repeats === '1' ? '1 call' : `${repeats} calls`,
        ended === '' ? '' : ` in ${ended}`,
        noiseRatio === undefined ? '' : `, ${(100 * Math.abs(noiseRatio - 1)).toFixed(0)}% noise`
      ),
      noise.length > 0 ? h('p', { class: 'al-soft', 'data-noise': '' }, `Too close to call: ${noise.join('; ')}.`) : ''
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
  const percentiles = `10 % ${duration(row.p10_ns)}, median ${duration(row.median_ns)}, 90 % ${duration(row.p90_ns)}`;
  const ratios = row.ratios.map(ratio => {
    const rival = ratio.over === 'upstream' ? 'torch.compile' : ratio.over;
    const range = `(${ratio.p10.toFixed(2)}–${ratio.p90.toFixed(2)})`;
    return `${ratio.noise === '' ? '' : 'noise: '}${ratio.median.toFixed(2)}× ${rival} ${range}`;
  });
  return h(
    'tr',
    { 'data-name': row.engine, title: percentiles },
    h('th', { scope: 'row', 'data-column': 'engine' }, row.engine),
    h('td', { class: 'al-bar-cell' }, h('span', { class: 'al-track' }, length, whisker)),
    h('td', { class: 'al-number', 'data-column': 'median_ns' }, duration(row.median_ns)),
    h('td', { class: 'al-soft', 'data-column': 'ratio' }, row.incomparable, ...ratios.map(ratio => h('div', {}, ratio)))
  );
}
