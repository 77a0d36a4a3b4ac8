/** The tabs of a report. */

import type { Report } from '../model/report';
import type { Head } from '../model/verdict';
import { graphPanel } from '../pictures/graphPicture';
import { memoryPanel } from '../pictures/memoryPicture';
import { breaksPanel, libraryBreaks } from './breaks';
import { callsPanel } from './calls';
import type { IContext } from './context';
import type { Child } from './dom';
import { enginesPanel } from './engines';
import { inputsPanel } from './inputs';
import { kernelsPanel } from './kernels';
import { outputsPanel } from './outputs';
import { overviewPanel } from './overview';
import { ranksPanel } from './ranks';
import { runsPanel } from './runs';
import { savedPanel } from './saved';
import { stagesPanel } from './stages';
import { storagesPanel } from './storages';
import { timingPanel } from './timing';
import { verificationPanel } from './verification';

export interface ITab {
  readonly name: string;
  readonly title: string;
  readonly draw: (context: IContext) => Child[];
  /** The number of rows or other things in the tab. If it is 0 without `others`, the tab's title is dimmed. */
  readonly size: (head: Head, report: Report) => number;
  /** Whether the tab's title shows the number. */
  readonly counted?: boolean;
  /** The number of rows that the tab shows and does not count. */
  readonly others?: (report: Report) => number;
  /** Whether the tab is left out if there is nothing in it. */
  readonly optional?: boolean;
}

export const TABS: readonly ITab[] = [
  { name: 'overview', title: 'Overview', draw: overviewPanel, size: () => 1 },
  { name: 'ranks', title: 'Ranks', draw: ranksPanel, size: (_, { world_size: size }) => size - 1, optional: true },
  { name: 'runs', title: 'Two runs', draw: runsPanel, size: ({ runs }) => runs, optional: true },
  { name: 'engines', title: 'Engines', draw: enginesPanel, size: ({ engines }) => engines, optional: true },
  {
    name: 'inputs',
    title: 'Inputs',
    draw: inputsPanel,
    size: ({ counts, outside }) => counts.inputs || outside,
    counted: true
  },
  { name: 'outputs', title: 'Outputs', draw: outputsPanel, size: ({ counts }) => counts.outputs, counted: true },
  { name: 'graph', title: 'Graph', draw: graphPanel, size: ({ counts }) => counts.nodes },
  { name: 'storages', title: 'Storage map', draw: storagesPanel, size: ({ counts }) => counts.storages },
  { name: 'stages', title: 'Stages', draw: stagesPanel, size: ({ counts }) => counts.stages },
  { name: 'saved', title: 'Saved', draw: savedPanel, size: ({ counts }) => counts.saved, counted: true },
  { name: 'memory', title: 'Memory', draw: memoryPanel, size: ({ counts }) => counts.stages },
  { name: 'kernels', title: 'Kernels', draw: kernelsPanel, size: ({ counts }) => counts.kernels, counted: true },
  {
    name: 'breaks',
    title: 'Graph breaks',
    draw: breaksPanel,
    size: ({ breaks }) => breaks,
    counted: true,
    others: report => libraryBreaks(report).length
  },
  { name: 'calls', title: 'Recompiles & calls', draw: callsPanel, size: ({ frames }) => frames },
  {
    name: 'timing',
    title: 'Timing',
    draw: timingPanel,
    size: (_, report) => report.timing_rows.length + report.timeline_rows.length
  },
  {
    name: 'verification',
    title: 'Verification',
    draw: verificationPanel,
    size: ({ compared }) => compared,
    counted: true
  }
];

/** The tabs that show rows or code of graphs. If these were cut, the view asks the kernel for the whole graphs. */
export const WHOLE_GRAPHS: ReadonlySet<string> = new Set([
  'inputs',
  'outputs',
  'graph',
  'storages',
  'stages',
  'saved',
  'memory',
  'kernels',
  'calls'
]);
