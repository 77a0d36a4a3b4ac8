/** The edges between the visible boxes of a graph's picture. Edges of nodes in a closed group are edges of the group. */

import { isGroup } from './graphModel';
import type { Branch, IGroup, IItem, IStageTree } from './graphModel';

/** An edge between two halves, with the nodes whose values go along it. */
export interface ICrossLink {
  readonly from: Branch;
  readonly to: Branch;
  readonly values: Set<IItem>;
}

export interface ILinks {
  /** The edges between the members of each open group, as indices of its children. */
  readonly inside: ReadonlyMap<IGroup, readonly (readonly [number, number])[]>;
  readonly across: readonly ICrossLink[];
}

/** Whether the members of a group are visible. The half itself, which has no parent, is always open. */
export type IsOpen = (group: IGroup) => boolean;

/** The visible box of a node: the node itself, or the outermost closed group around it. */
export function shownOf(item: IItem, isOpen: IsOpen): Branch {
  let shown: Branch = item;
  for (let group = item.parent; group !== null; group = group.parent) {
    if (!isOpen(group)) {
      shown = group;
    }
  }
  return shown;
}

/** The groups around a box, outermost first. */
export function groupsAround(branch: Branch): IGroup[] {
  const groups: IGroup[] = [];
  for (let group = branch.parent; group !== null; group = group.parent) {
    groups.unshift(group);
  }
  return groups;
}

export function linksOf(tree: IStageTree, isOpen: IsOpen): ILinks {
  const shown = new Map(tree.items.map(item => [item, shownOf(item, isOpen)]));
  const chains = new Map([...new Set(shown.values())].map(box => [box, [...groupsAround(box), box]]));
  const positions = new Map(
    [...chains.values()]
      .flat()
      .filter(isGroup)
      .flatMap(group => group.children.map((child, index) => [child, index]))
  );
  const inside = new Map<IGroup, Map<string, readonly [number, number]>>();
  const across = new Map<Branch, Map<Branch, ICrossLink>>();
  for (const item of tree.items) {
    const from = shown.get(item) ?? item;
    for (const user of item.users) {
      const to = shown.get(user) ?? user;
      if (from === to) {
        continue;
      }
      if (item.half !== user.half) {
        const ofBox = across.get(from) ?? new Map<Branch, ICrossLink>();
        const link = ofBox.get(to) ?? { from, to, values: new Set() };
        link.values.add(item);
        across.set(from, ofBox.set(to, link));
        continue;
      }
      // The edge belongs to the innermost group that contains both boxes, and connects two of its members.
      const [a, b] = [chains.get(from) ?? [], chains.get(to) ?? []];
      const level = a.findIndex((box, index) => box !== b[index]);
      const group = a[level - 1];
      const ends = [positions.get(a[level] ?? from), positions.get(b[level] ?? to)] as const;
      if (group !== undefined && isGroup(group) && ends[0] !== undefined && ends[1] !== undefined) {
        const ofGroup = inside.get(group) ?? new Map<string, readonly [number, number]>();
        inside.set(group, ofGroup.set(ends.join(' '), [ends[0], ends[1]]));
      }
    }
  }
  return {
    inside: new Map([...inside].map(([group, edges]) => [group, [...edges.values()]])),
    across: [...across.values()].flatMap(links => [...links.values()])
  };
}
