import assert from 'node:assert/strict';
import { test } from 'node:test';

import { readGraph } from '../src/model/report';
import type { Graph } from '../src/model/report';
import { layOut } from '../src/pictures/graphLayout';
import { boxesOf } from '../src/pictures/graphDrawing';
import { linksOf, shownOf } from '../src/pictures/graphLinks';
import { idOf, isGroup, openAtFirst, stagesOf, treeOf } from '../src/pictures/graphModel';
import type { Branch, IGroup, IStageTree } from '../src/pictures/graphModel';
import type { IJson } from './sample';

function node(name: string, fields: IJson = {}): IJson {
  const base = { stage: 'partition', part: 'forward', name, op: 'call_function', target: 'aten.add.Tensor' };
  return { ...base, phase: 'forward', dtype: 'float32', shape: [2], nbytes: 8, inputs: [], ...fields };
}

function backward(name: string, fields: IJson = {}): IJson {
  return node(name, { part: 'backward', phase: 'backward', ...fields });
}

/** Two layers, whose second op the forward saves; the backward computes `a` again. */
const NODES: readonly IJson[] = [
  node('primals_1', { op: 'placeholder' }),
  node('primals_2', { op: 'placeholder' }),
  node('a', { module: 'net.h.0', inputs: ['primals_1'] }),
  node('b', { module: 'net.h.0.mlp', inputs: ['a', 'primals_2'] }),
  node('c', { module: 'net.h.0.mlp', inputs: ['b'] }),
  node('d', { module: 'net.h.1', inputs: ['c'] }),
  node('e', { module: 'net.h.1', inputs: ['d'] }),
  node('output', { op: 'output', inputs: ['e', 'b'] }),
  backward('b', { op: 'placeholder', phase: 'forward' }),
  backward('tangents_1', { op: 'placeholder' }),
  backward('f', { module: 'net.h.1', inputs: ['tangents_1'] }),
  backward('a', { phase: 'forward', module: 'net.h.0', inputs: ['primals_1'] }),
  backward('g', { module: 'net.h.0', inputs: ['f', 'b', 'a'] })
];

function graph(nodes: readonly IJson[], fields: IJson = {}): Graph {
  const input = { kind: 'input', tensor: {}, mutates_data: true };
  return readGraph({
    inputs: [{ ...input, name: 'x', placeholder: 'primals_1', gradient: 'g' }],
    outputs: [{ name: 'out[0]', base: 'x', base_kind: 'input', relation: 'view of x' }],
    saved: [{ name: 'b', tensor: {}, nbytes: 8 }],
    placeholders: [{ name: 'primals_1', user_name: 'x' }],
    nodes,
    ...fields
  });
}

function tree(nodes: readonly IJson[], before: readonly IJson[] | null = null): IStageTree {
  const [stage] = stagesOf(graph([]), graph(nodes).nodes);
  const [earlier] = before === null ? [] : stagesOf(graph([]), graph(before).nodes);
  assert.ok(stage !== undefined);
  return treeOf(graph(nodes), stage, earlier ?? null);
}

function outline(branch: Branch): unknown {
  return isGroup(branch) ? { [branch.title]: branch.children.map(outline) } : branch.row.name;
}

test('nodes are grouped by module, and an input belongs to the module that uses it', () => {
  // A list of modules is no group.
  assert.deepEqual(tree(NODES).halves.map(outline), [
    { forward: [{ net: [{ 'h.0': ['primals_1', { mlp: ['primals_2', 'b', 'c'] }, 'a'] }, { 'h.1': ['d', 'e'] }] }] },
    { backward: [{ net: [{ 'h.1': ['tangents_1', 'f'] }, { 'h.0': ['a', 'g'] }] }] }
  ]);
});

test('an op without a module belongs to the innermost module that contains its inputs', () => {
  const nodes = [
    node('a', { module: 'net.h.0.mlp' }),
    node('b', { module: 'net.h.0' }),
    node('sum', { inputs: ['a', 'b'] }),
    node('c', { module: 'net.h.1' }),
    node('all', { inputs: ['sum', 'c'] }),
    node('alone')
  ];
  const paths = tree(nodes).items.map(({ title, path }) => `${title}: ${path.join('.')}`);
  assert.deepEqual(paths.slice(2), ['sum: net.h.0', 'c: net.h.1', 'all: net.h', 'alone: ']);
});

test('saved, recomputed, mutated and aliased values have marks, and values cross the cut', () => {
  const stage = tree(NODES);
  const marks = (key: string): string[] =>
    stage.items.find(item => item.key === key)?.marks.map(mark => mark.kind) ?? [];
  assert.deepEqual(marks('forward primals_1'), ['mutated', 'aliased']);
  assert.deepEqual(marks('forward b'), ['saved']);
  assert.deepEqual(marks('backward a'), ['recomputed']);
  const viewed = tree(NODES.map(each => (each['name'] === 'a' ? { ...each, view: true } : each)));
  assert.deepEqual(viewed.items.find(item => item.key === 'backward a')?.marks, []);
  assert.deepEqual(marks('backward g'), ['gradient']);
  const across = linksOf(stage, () => false).across.map(({ from, to, values }) => [
    ...[idOf(from), idOf(to)],
    [...values].map(item => item.title)
  ]);
  // `a` is computed again from `primals_1`, whose name for the user is `x`.
  assert.deepEqual(across, [['forward group ', 'backward group ', ['x', 'b']]]);
});

test('edges connect the visible members of the innermost common group', () => {
  const stage = tree(NODES);
  const edges = (open: readonly string[]): string[] =>
    [...linksOf(stage, group => group.parent === null || open.includes(group.key)).inside].flatMap(([group, pairs]) =>
      pairs.map(pair => pair.map(index => titleOf(group.children[index])).join(' → '))
    );
  const titleOf = (branch: Branch | undefined): string => branch?.title ?? '';
  assert.deepEqual(edges([]), []);
  const open = ['x → a', 'a → mlp', 'h.0 → h.1', 'h.1 → h.0', 'a → g'];
  assert.deepEqual(edges(['net', 'net.h.0']), open);
  const [placed] = boxesOf(stage, group => group.parent === null, false).map(layOut);
  const tops = placed?.children.map(child => child.y) ?? [];
  assert.deepEqual(
    tops,
    [...tops].sort((a, b) => a - b)
  );
});

test('a stage is compared with the stage before by the names of nodes', () => {
  const target = 'aten.mul.Tensor';
  const before = [
    ...NODES.filter(({ name }) => name !== 'd').map(each => ({ ...each, ...(each['name'] === 'c' ? { target } : {}) })),
    node('gone', { module: 'net.h.1', inputs: ['b'] })
  ];
  const changes = tree(NODES, before).items.filter(item => item.change !== 'same');
  assert.deepEqual(Object.fromEntries(changes.map(item => [item.row.name, item.change])), {
    c: 'changed',
    d: 'added',
    gone: 'removed'
  });
});

test('ten thousand nodes without modules are divided, and at first few boxes are visible', () => {
  const nodes = Array.from({ length: 10_000 }, (_, index) => node(`n${index}`, { inputs: [`n${index - 1}`] }));
  const stage = tree(nodes);
  const sizes = (group: IGroup): number[] => [
    group.children.length,
    ...group.children.filter(isGroup).flatMap(child => sizes(child))
  ];
  assert.ok(Math.max(...stage.halves.flatMap(sizes)) <= 60);
  const open = openAtFirst(stage.halves);
  const isOpen = (group: IGroup): boolean => group.parent === null || open.has(group.key);
  assert.ok(new Set(stage.items.map(item => shownOf(item, isOpen))).size <= 60);
  assert.equal(new Set(stage.halves.flatMap(half => idsIn(half))).size, stage.halves.flatMap(idsIn).length);
});

function idsIn(branch: Branch): string[] {
  return [idOf(branch), ...(isGroup(branch) ? branch.children.flatMap(idsIn) : [])];
}
