/** The words beside the picture of a graph: the facts of the selected box, and the legend. */

import { amount, dataSize, sizes } from '../model/words';
import type { IContext, IEntry } from '../view/context';
import { h, svg } from '../view/dom';
import type { Child } from '../view/dom';
import { isGroup, newBytes } from './graphModel';
import type { Branch, IGroup, IItem, IStage, MarkKind } from './graphModel';

/** At most this many inputs and users of a node are listed. */
const MOST_LISTED = 12;

export const MARK_WORDS: Readonly<Record<MarkKind, string>> = {
  mutated: 'mutated input, or its new value',
  aliased: 'an output is a view of it',
  saved: 'saved for the backward',
  recomputed: 'recomputed in the backward',
  output: 'returned',
  gradient: 'gradient of an input'
};

/** The description of a value: dtype, sizes and bytes; empty if the node's value is no tensor. */
export function valueText({ row }: IItem): string {
  return row.shape === null ? '' : `${row.dtype ?? ''}${sizes(row.shape)}`;
}

/** The words of a node that the search compares. */
export function searchText({ title, row, marks }: IItem): string {
  const words = [title, row.name, row.target, row.module, ...marks.flatMap(({ kind, text }) => [kind, text])];
  return words.join('\n').toLowerCase();
}

/** The bytes that the forward saves of the nodes of a box. */
export function savedBytes(items: readonly IItem[]): number {
  return items.reduce((sum, { saved }) => sum + (saved === null ? 0 : newBytes(saved)), 0);
}

/** A sentence about a closed group: `42 nodes · 1.5 MiB saved`. */
export function groupText({ items }: IGroup, compared: boolean): string {
  const saved = savedBytes(items);
  const changes = (['added', 'removed', 'changed'] as const).map(
    change => [change, items.filter(item => item.change === change).length] as const
  );
  return [
    amount(items.length, 'node'),
    saved > 0 ? `${dataSize(saved)} saved` : '',
    ...changes.map(([change, count]) => (compared && count > 0 ? `${count} ${change}` : ''))
  ]
    .filter(text => text !== '')
    .join(' · ');
}

/** The facts of a box as words and buttons. `go` shows another node. */
export function detailsOf(context: IContext, branch: Branch, compared: boolean, go: (item: IItem) => void): Child[] {
  if (isGroup(branch)) {
    return [h('b', {}, branch.path.join('.') || branch.title), ' ', groupText(branch, compared)];
  }
  const { row } = branch;
  const buttons = (title: string, items: readonly IItem[]): Child[] =>
    items.length === 0
      ? []
      : [
          h('span', { class: 'al-soft' }, title),
          ...items.slice(0, MOST_LISTED).map(item => {
            const button = h('button', { type: 'button', class: 'al-origin' }, item.title);
            button.addEventListener('click', event => {
              event.stopPropagation();
              go(item);
            });
            return button;
          }),
          items.length > MOST_LISTED ? h('span', { class: 'al-soft' }, `and ${items.length - MOST_LISTED} more`) : null
        ];
  const facts = [
    row.target === row.name ? '' : row.target,
    valueText(branch),
    row.nbytes === null ? '' : dataSize(row.nbytes),
    row.module,
    branch.change === 'same' ? '' : branch.change,
    ...branch.marks.map(mark => mark.text)
  ];
  return [
    h('b', {}, branch.title),
    ...facts.filter(fact => fact !== '').map(fact => h('span', {}, fact)),
    context.selection.lineButton(row.line),
    row.line === null ? null : h('code', {}, row.line.code),
    ...buttons('reads', branch.inputs),
    ...buttons('read by', branch.users)
  ];
}

/** The legend: the marks and the kinds of edges that the picture contains. */
export function legendOf(items: readonly IItem[], compared: boolean): HTMLElement {
  const kinds = (Object.keys(MARK_WORDS) as MarkKind[]).filter(kind =>
    items.some(item => item.marks.some(mark => mark.kind === kind))
  );
  const swatch = (kind: string, shape: SVGElement): SVGElement =>
    svg('svg', { class: `al-swatch al-graph-${kind}`, width: 16, height: 11, 'aria-hidden': 'true' }, shape);
  const entries: [SVGElement, string][] = kinds.map(kind => [
    swatch(kind, svg('rect', { class: 'al-graph-mark', width: 5, height: 11 })),
    MARK_WORDS[kind]
  ]);
  if (items.some(({ saved, users }) => saved !== null && users.some(user => user.half === 'backward'))) {
    entries.push([
      swatch('kept', svg('path', { class: 'al-graph-edge', d: 'M0 6H16' })),
      'saved value, with its bytes'
    ]);
  }
  for (const change of compared ? ['added', 'changed', 'removed'] : []) {
    entries.push([swatch(change, svg('rect', { class: 'al-graph-shape', x: 1, y: 1, width: 14, height: 9 })), change]);
  }
  return h(
    'div',
    { class: 'al-key' },
    ...entries.map(([picture, words]) => h('span', {}, picture, words)),
    h('span', {}, 'Click or Enter opens a group; drag moves; Ctrl and the wheel zoom.')
  );
}

/** The numbers of the lines that caused the nodes of a box; see `IOrigin`. */
export function linkIds(context: IContext, entry: IEntry, branch: Branch): number[] {
  const origins = context.selection.lines(true);
  const items = isGroup(branch) ? branch.items : [branch];
  return [...new Set(items.flatMap(({ row }) => origins.idsOfNode(entry, row.part, row.name, row.stage)))];
}

/** A list of stages for which there is no room as buttons. */
export function stageList(stages: readonly IStage[], entry: string, choose: (key: string) => void): Child {
  if (stages.length === 0) {
    return null;
  }
  const list = h(
    'select',
    { class: 'al-select', 'aria-label': 'Further backward', 'data-key': `graph backwards ${entry}` },
    h('option', { value: '' }, `${stages.length} further backwards`),
    ...stages.map(stage => h('option', { value: stage.key }, stage.title))
  );
  list.addEventListener('change', () => (list.value === '' ? undefined : choose(list.value)));
  return list;
}
