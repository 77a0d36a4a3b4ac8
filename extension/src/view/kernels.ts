/** Kernels: the code that the backend wrote, and what it calls from libraries. */

import { countsOf } from '../model/counts';
import type { Kernel } from '../model/report';
import { dataSize, grouped, notHere } from '../model/words';
import { codeBlock } from './code';
import { fold } from './context';
import type { Context, Entry } from './context';
import { h, soft } from './dom';
import type { Child } from './dom';
import { graphHeading, userNames } from './graph';

/** Draw the panel. */
export function kernelsPanel(context: Context): Child[] {
  const drawn = context.chosen.flatMap(entry => kernels(context, entry));
  return drawn.length > 0 ? drawn : [soft('No kernels: the backend wrote none, or nothing was compiled.')];
}

function kernels(context: Context, entry: Entry): Child[] {
  const all = entry.graph.kernels;
  const counts = countsOf(entry.graph);
  if (counts.kernels === 0) {
    return [];
  }
  const [called, written, left] = [
    counts.kernels_called,
    counts.kernels - counts.kernels_called,
    counts.kernels - all.length
  ];
  const about = [
    written > 0 ? `${grouped(written)} written` : '',
    called > 0 ? `${grouped(called)} called from libraries` : ''
  ];
  return [
    graphHeading(context, entry, about.filter(each => each !== '').join(', ')),
    ...all.map((kernel, index) => kernelFold(context, entry, kernel, index)),
    left > 0 ? soft(notHere(left, 'kernel')) : null
  ];
}

/** What Triton made of a rehearsed kernel, and what a call of it moves. */
function measures(kernel: Kernel): HTMLElement | null {
  if (kernel.registers === null) {
    return null;
  }
  const facts: [string, string][] = [
    ['registers of a thread', grouped(kernel.registers)],
    ['shared memory of a block', dataSize(kernel.shared_bytes)],
    ['spilled', dataSize(kernel.spilled_bytes)],
    ['blocks', grouped(kernel.blocks ?? 0)],
    ['read', dataSize(kernel.bytes_read)],
    ['written', dataSize(kernel.bytes_written)]
  ];
  return h('dl', { class: 'al-measures' }, ...facts.flatMap(([name, value]) => [h('dt', {}, name), h('dd', {}, value)]));
}

function kernelFold(context: Context, entry: Entry, kernel: Kernel, index: number): HTMLElement {
  const facts = [kernel.language, kernel.kind, kernel.graph_name].filter(fact => fact !== '').join(' · ');
  const { selection } = context;
  const origins = selection.lines(true);
  const ids = origins.ofKernel(entry, kernel);
  const lines = ids.flatMap(id => origins.all.get(id) ?? []).map(origin => selection.originButton(origin, origin.where));
  const details = fold(
    context,
    `kernel ${entry.key} ${index}`,
    [h('code', {}, kernel.name), ' ', h('small', {}, facts), h('span', { class: 'al-from' }, ...lines)],
    () => [measures(kernel), codeBlock(context, { label: kernel.name, language: kernel.language, text: kernel.source, names: userNames(entry) })]
  );
  details.dataset['kernel'] = kernel.name;
  for (const [name, value] of Object.entries(selection.linked(ids))) {
    details.setAttribute(name, value);
  }
  return details;
}
