/** Kernels: the code that the backend generated, and the kernels that it calls from libraries. */

import { countsOf } from '../model/report';
import type { Kernel } from '../model/report';
import { cutNotice, dataSize, grouped } from '../model/words';
import { codeBlock } from './code';
import { fold } from './context';
import type { IContext, IEntry } from './context';
import { h, soft } from './dom';
import type { Child } from './dom';
import { cutGraphsNotice, graphHeading, userNames } from './graph';

/** Draw the panel. */
export function kernelsPanel(context: IContext): Child[] {
  const drawn = context.chosen.flatMap(entry => graphKernels(context, entry));
  return drawn.length > 0
    ? [...drawn, cutGraphsNotice(context)]
    : [soft('No kernels: the backend wrote none, or nothing was compiled.')];
}

function graphKernels(context: IContext, entry: IEntry): Child[] {
  const { kernels } = entry.graph;
  const counts = countsOf(entry.graph);
  if (counts.kernels === 0) {
    return [];
  }
  const [calledCount, writtenCount, cutCount] = [
    counts.kernels_called,
    counts.kernels - counts.kernels_called,
    counts.kernels - kernels.length
  ];
  const remarks = [
    writtenCount > 0 ? `${grouped(writtenCount)} written` : '',
    calledCount > 0 ? `${grouped(calledCount)} called from libraries` : ''
  ];
  return [
    graphHeading(context, entry, remarks.filter(remark => remark !== '').join(', ')),
    ...kernels.map((kernel, index) => kernelFold(context, entry, kernel, index)),
    cutCount > 0 ? soft(cutNotice(cutCount, 'kernel')) : null
  ];
}

/**
 * The registers, the memory and other resources that a kernel uses, and the bytes that a call reads and writes. They
 * are known only for a kernel that was compiled for a GPU that this machine does not have (a rehearsal).
 */
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
  return h(
    'dl',
    { class: 'al-measures' },
    ...facts.flatMap(([name, value]) => [h('dt', {}, name), h('dd', {}, value)])
  );
}

function kernelFold(context: IContext, entry: IEntry, kernel: Kernel, index: number): HTMLElement {
  const facts = [kernel.language, kernel.kind, kernel.graph_name, kernel.from_cache ? 'from the cache on disk' : '']
    .filter(fact => fact !== '')
    .join(' · ');
  const { selection } = context;
  const origins = selection.lines(true);
  const ids = origins.idsOfKernel(entry, kernel);
  const lines = ids
    .flatMap(id => origins.byId.get(id) ?? [])
    .map(origin => selection.originButton(origin, origin.where));
  const details = fold(
    context,
    `kernel ${entry.key} ${index}`,
    [h('code', {}, kernel.name), ' ', h('small', {}, facts), h('span', { class: 'al-from' }, ...lines)],
    () => [
      measures(kernel),
      kernel.cache_miss ? soft(`Its graph was not in Inductor's cache on disk: ${kernel.cache_miss}.`) : '',
      codeBlock(context, {
        label: kernel.name,
        language: kernel.language,
        text: kernel.source,
        names: userNames(entry)
      })
    ]
  );
  details.dataset['kernel'] = kernel.name;
  for (const [name, value] of Object.entries(selection.linked(ids))) {
    details.setAttribute(name, value);
  }
  return details;
}
