/** The words about the ops that a backward computes again, and the list of these ops. */

import type { IPlan } from '../model/choices';
import { amount } from '../model/words';
import type { IContext, IEntry } from '../view/context';
import { fold } from '../view/context';
import { dotted } from '../view/dom';
import { table } from '../view/table';
import { Choosing } from './choice';
import { percent } from './memoryParts';

export function againSentence(plan: IPlan): string {
  return plan.ops.length === 0
    ? `The backward computes no op again${plan.again.length > 0 ? ', only views' : ''}.`
    : `The backward computes ${amount(plan.ops.length, 'op')} again, without views: about ${percent(plan.cost, 1)} more work.`;
}

/** A fold with the ops that are computed again; null if no op is computed again. */
export function againFold(context: IContext, entry: IEntry, { ops }: IPlan): HTMLElement | null {
  const choices = Choosing.of(context, entry)?.model.choices;
  if (choices === undefined || ops.length === 0) {
    return null;
  }
  const { names, modules, module_table, lines, line_table } = choices;
  return fold(
    context,
    `again ${entry.key}`,
    [`The ${amount(ops.length, 'op')} that the backward computes again`],
    () => [
      table<number>(context, {
        name: 'again',
        label: 'Ops that the backward computes again',
        columns: [
          { name: 'name', title: 'op', kind: 'code', cell: node => names[node] ?? '' },
          {
            name: 'module',
            title: 'module',
            kind: 'code',
            cell: node => dotted(module_table[modules[node] ?? 0] ?? '')
          },
          {
            name: 'line',
            title: 'line',
            kind: 'code',
            cell: node => context.selection.lineButton(line_table[lines[node] ?? -1] ?? null)
          }
        ],
        rows: ops,
        key: node => names[node] ?? '',
        data: { 'data-frame': entry.frame.name, 'data-graph': String(entry.graph.index) }
      })
    ]
  );
}
