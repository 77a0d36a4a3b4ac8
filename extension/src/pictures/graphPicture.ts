/**
 * The graph's picture: the nodes of a stage in groups by module, which open and close. The reader chooses a stage,
 * searches for nodes, selects them, and compares a stage with the stage before.
 */

import { countsOf } from '../model/report';
import type { Node as GraphNode } from '../model/report';
import { amount } from '../model/words';
import { fold } from '../view/context';
import type { IContext, IEntry } from '../view/context';
import { h, soft, svg, uniqueId } from '../view/dom';
import type { Child } from '../view/dom';
import { cutGraphsNotice, graphFacts } from '../view/graph';
import type { Selection } from '../view/selection';
import { choiceNotice, withChoice } from './choice';
import { detailsOf, legendOf, linkIds, searchText, stageList } from './graphDetails';
import { boxesOf, drawBox, drawCut, drawEdgesOf, labelOf, sceneOf } from './graphDrawing';
import type { IScene, IShown } from './graphDrawing';
import { groupsAround } from './graphLinks';
import { idOf, isGroup, openAtFirst, stagesOf, treeOf } from './graphModel';
import type { Branch, IGroup, IItem, IStage, IStageTree } from './graphModel';
import { GraphView } from './graphView';
import { placed } from './layouts';

/** If a line caused at most this many nodes, the groups around them are opened when the line is chosen. */
const MOST_OPENED = 24;
/** If a graph has more stages, its further backwards are in a list. */
const MOST_BUTTONS = 8;

/** The reader's choices, which stay when the report is drawn again. */
interface IState {
  stage: string;
  /** The keys of the open groups of each stage; a stage is added when it is drawn for the first time. */
  readonly open: Map<string, Set<string>>;
  compare: boolean;
  /** The id of the selected box; empty if no box is selected. */
  selected: string;
  /** The number of the chosen line whose nodes were last moved into view. */
  line: number | null;
  /** The row of a table, such as a saved value, by which the line was chosen; see `Selection.row`. */
  row: string;
}

const pictures = new WeakMap<Selection, Map<string, Picture>>();

/** Draw the panel. */
export function graphPanel(context: IContext): Child[] {
  const traced = context.chosen.filter(({ graph }) => countsOf(graph).nodes > 0 || graph.nodes.length > 0);
  const entries = traced.map(entry => withChoice(context, entry));
  const [first] = entries;
  if (first === undefined) {
    return [soft('Nothing was traced, so there is no graph.')];
  }
  if (entries.length === 1) {
    return [...choiceNotice(context), pictureOf(context, first), cutGraphsNotice(context)];
  }
  const folds = entries.map((entry, index) =>
    fold(
      context,
      `graph ${entry.key}`,
      [h('code', {}, entry.title), ' ', h('small', {}, graphFacts(entry.graph).join(' · '))],
      () => [pictureOf(context, entry)],
      index === 0
    )
  );
  return [...choiceNotice(context), ...folds, cutGraphsNotice(context)];
}

function pictureOf(context: IContext, entry: IEntry): HTMLElement {
  const { frame, graph } = entry;
  const nodes = graph.nodes.length > 0 ? graph.nodes : context.source.nodes(frame.name, graph.index);
  if (nodes === null) {
    return soft(
      context.source.live
        ? 'The kernel is asked for the nodes …'
        : 'This output has no nodes. A kernel that has the report, and report.to_html(), show the graph.'
    );
  }
  const known = pictures.get(context.selection) ?? new Map<string, Picture>();
  pictures.set(context.selection, known);
  const old = known.get(entry.key);
  const picture =
    old?.nodes === nodes && old.entry.graph === graph ? old : new Picture(context, entry, nodes, old?.state);
  known.set(entry.key, picture);
  picture.refresh(old ?? null);
  return picture.element;
}

class Picture {
  readonly element: HTMLElement;
  readonly state: IState;
  private readonly stages: readonly IStage[];
  private readonly view: GraphView;
  private readonly status = h('span', { class: 'al-soft', role: 'status' });
  private readonly details = h('div', { class: 'al-graph-details', role: 'status' });
  private readonly legend = h('div');
  private readonly markerId = uniqueId();
  private readonly trees = new Map<string, IStageTree>();
  private scene: IScene | null = null;
  private active = '';
  private turn = 0;
  private matches: readonly IItem[] = [];
  private match = -1;

  constructor(
    private readonly context: IContext,
    readonly entry: IEntry,
    readonly nodes: readonly GraphNode[],
    state: IState | undefined
  ) {
    this.stages = stagesOf(entry.graph, nodes);
    this.state = state ?? { stage: '', open: new Map(), compare: false, selected: '', line: null, row: '' };
    const arrow = svg('path', { class: 'al-graph-arrow', d: 'M0 0L6 3L0 6Z' });
    const marker = { id: this.markerId, refX: 6, refY: 3, markerWidth: 6, markerHeight: 6, orient: 'auto' };
    this.view = new GraphView(`Nodes of ${entry.title}`, svg('defs', {}, svg('marker', marker, arrow)));
    this.view.picture.style.setProperty('--al-arrow', `url(#${this.markerId})`);
    this.view.picture.addEventListener('click', event => this.onClick(event));
    this.view.picture.addEventListener('keydown', event => this.onKey(event));
    this.element = h('figure', { class: 'al-graph', 'data-frame': entry.frame.name, 'data-graph': entry.graph.index });
    this.element.append(this.tools(), this.view.element, this.details, this.legend);
  }

  /**
   * Draw the picture, and show the nodes of a line that the reader chose elsewhere. `old` is the picture of an earlier
   * state of the report.
   */
  refresh(old: Picture | null): void {
    if (old !== null && old !== this) {
      this.view.adopt(old.view);
    }
    const { id, row } = this.context.selection;
    if (id !== this.state.line || row !== this.state.row) {
      Object.assign(this.state, { line: id, row });
      const items = id === null ? [] : this.tree().items.filter(item => this.idsOf(item).includes(id));
      const node = items.find(item => row === `${this.entry.key} ${item.row.name}`);
      if (items.length <= MOST_OPENED) {
        items.forEach(item => this.openAround(item));
      }
      if (node !== undefined) {
        this.openAround(node);
        this.state.selected = node.key;
      }
      void this.draw(node ?? items[0]);
    } else {
      void this.draw();
    }
  }

  private get stage(): IStage {
    const find = (key: string): IStage | undefined => this.stages.find(each => each.key === key);
    return (
      find(this.state.stage) ?? find('partition') ?? this.stages[0] ?? { key: '', title: '', rows: [], byKernel: false }
    );
  }

  /**
   * The stage that the reader can compare with the chosen stage. The kernels have the nodes of their stage. The
   * captured nodes cannot be compared, because the trace gives new names to all nodes.
   */
  private get before(): IStage | null {
    const before = this.stages[this.stages.indexOf(this.stage) - 1];
    return this.stage.byKernel || before === undefined || before.key === 'capture' ? null : before;
  }

  private get compared(): boolean {
    return this.state.compare && this.before !== null;
  }

  private tree(): IStageTree {
    const key = `${this.stage.key} ${this.compared}`;
    const tree = this.trees.get(key) ?? treeOf(this.entry.graph, this.stage, this.compared ? this.before : null);
    this.trees.set(key, tree);
    return tree;
  }

  private open(): Set<string> {
    const { open } = this.state;
    const keys = open.get(this.stage.key) ?? openAtFirst(this.tree().halves);
    open.set(this.stage.key, keys);
    return keys;
  }

  private readonly isOpen = (group: IGroup): boolean => group.parent === null || this.open().has(group.key);

  private idsOf(branch: Branch): number[] {
    return linkIds(this.context, this.entry, branch);
  }

  private openAround(item: IItem): void {
    groupsAround(item).forEach(group => this.open().add(group.key));
  }

  // --- the controls above the picture

  private tools(): HTMLElement {
    const field = h('input', {
      type: 'search',
      class: 'al-search',
      placeholder: 'Search',
      title: 'Search for nodes by name, op, module or mark, such as saved',
      'aria-label': 'Search for a node by its name, op, module or mark',
      'data-key': `graph search ${this.entry.key}`
    });
    const choose = (key: string): void => {
      this.state.stage = key;
      this.state.selected = '';
      this.view.again();
      void this.draw();
      this.find(field.value);
    };
    const isListed = ({ key }: IStage): boolean => this.stages.length > MOST_BUTTONS && key.startsWith('backward');
    const buttons = this.stages
      .filter(stage => !isListed(stage))
      .map(stage => {
        const button = this.button(stage.title, `stage ${stage.key}`, () => choose(stage.key));
        button.dataset['stage'] = stage.key;
        return button;
      });
    const stages = [...buttons, stageList(this.stages.filter(isListed), this.entry.key, choose)];
    field.addEventListener('input', () => this.find(field.value));
    field.addEventListener('keydown', event => {
      event.stopPropagation();
      if (event.key === 'Enter') {
        event.preventDefault();
        this.nextMatch(event.shiftKey ? -1 : 1);
      } else if (event.key === 'Escape') {
        field.value = '';
        this.find('');
      }
    });
    const compare = this.button('Compare with the stage before', 'compare', () => {
      this.state.compare = !this.state.compare;
      void this.draw();
    });
    compare.dataset['compare'] = '';
    return h(
      'div',
      { class: 'al-graph-tools' },
      h('div', { role: 'group', 'aria-label': 'Stage of the graph', class: 'al-graph-stages' }, ...stages),
      compare,
      field,
      this.status,
      this.button('Fit', 'fit', () => this.view.fit()),
      this.button('+', 'larger', () => this.view.zoomBy(1), 'Zoom in'),
      this.button('−', 'smaller', () => this.view.zoomBy(-1), 'Zoom out')
    );
  }

  private button(text: string, key: string, onClick: () => void, label = ''): HTMLElement {
    const button = h(
      'button',
      {
        ...{ type: 'button', class: 'al-button', 'data-key': `graph ${key} ${this.entry.key}` },
        ...(label === '' ? {} : { 'aria-label': label, title: label })
      },
      text
    );
    button.addEventListener('click', onClick);
    return button;
  }

  private updateTools(): void {
    const list = this.element.querySelector<HTMLSelectElement>('.al-graph-stages select');
    if (list !== null) {
      list.value = [...list.options].some(each => each.value === this.stage.key) ? this.stage.key : '';
    }
    for (const button of this.element.querySelectorAll<HTMLElement>('[data-stage]')) {
      button.setAttribute('aria-pressed', String(button.dataset['stage'] === this.stage.key));
    }
    const compare = this.element.querySelector<HTMLButtonElement>('[data-compare]');
    compare?.setAttribute('aria-pressed', String(this.compared));
    compare?.toggleAttribute('disabled', this.before === null);
    if (this.compared && this.matches.length === 0) {
      const changes = this.tree().items.map(item => item.change);
      const counts = (['added', 'removed', 'changed'] as const)
        .map(change => [changes.filter(each => each === change).length, change] as const)
        .filter(([count]) => count > 0);
      this.status.textContent = counts.map(each => each.join(' ')).join(', ') || 'no node differs';
    }
    this.legend.replaceChildren(legendOf(this.tree().items, this.compared));
  }

  // --- search

  private find(text: string): void {
    const words = text.trim().toLowerCase();
    this.matches = words === '' ? [] : this.tree().items.filter(item => searchText(item).includes(words));
    this.match = -1;
    this.status.textContent = words === '' ? '' : amount(this.matches.length, 'node');
    this.nextMatch(1);
  }

  private nextMatch(direction: number): void {
    const count = this.matches.length;
    if (count > 0) {
      this.match = this.match < 0 ? 0 : (this.match + direction + count) % count;
      this.status.textContent = `${this.match + 1} of ${count}`;
      const item = this.matches[this.match];
      if (item !== undefined) {
        this.go(item);
      }
    }
  }

  /** Open the groups around a node, move it to the middle and select it. */
  private go(item: IItem): void {
    this.openAround(item);
    this.state.selected = item.key;
    void this.draw(item);
  }

  // --- the picture

  /**
   * Compute the layout and draw it. Move `shown` to the middle; without it, keep the box `anchor` in its place, unless
   * the box is open and partly outside.
   */
  private async draw(shown?: IItem, anchor = ''): Promise<void> {
    this.turn += 1;
    const { turn } = this;
    const tree = this.tree();
    const places = await placed(boxesOf(tree, this.isOpen, this.compared));
    if (turn !== this.turn) {
      return;
    }
    const oldRect = this.scene?.boxes.get(anchor)?.rect;
    const scene = sceneOf(tree, this.isOpen, places);
    this.scene = scene;
    this.drawScene(scene);
    this.view.setBounds(
      scene.width,
      scene.height,
      [...scene.boxes.values()].map(({ rect }) => rect)
    );
    const newRect = scene.boxes.get(anchor)?.rect;
    if (oldRect !== undefined && newRect !== undefined) {
      this.view.keep(oldRect, newRect);
      if (scene.boxes.get(anchor)?.open === true) {
        this.view.include(newRect);
      }
    }
    const rect = shown === undefined ? undefined : scene.boxes.get(idOf(this.visible(shown)))?.rect;
    if (rect !== undefined) {
      this.view.centre(rect);
    }
    this.updateTools();
    this.showDetails();
  }

  private visible(item: IItem): Branch {
    return groupsAround(item).find(group => !this.isOpen(group)) ?? item;
  }

  private drawScene(scene: IScene): void {
    const hadFocus = this.view.picture.contains(document.activeElement);
    if (!scene.boxes.has(this.active)) {
      this.active = scene.boxes.keys().next().value ?? '';
    }
    const layers = { areas: svg('g'), edges: svg('g'), boxes: svg('g') };
    for (const [id, shown] of scene.boxes) {
      (shown.open ? layers.areas : layers.boxes).append(this.box(id, shown));
    }
    layers.edges.append(
      ...scene.edges.map(({ d }) => svg('path', { class: 'al-graph-edge', d })),
      ...drawCut(scene),
      svg('g', { class: 'al-graph-chosen' })
    );
    this.view.content.replaceChildren(layers.areas, layers.edges, layers.boxes);
    if (hadFocus) {
      this.elementOf(this.active)?.focus({ preventScroll: true });
    }
  }

  private box(id: string, shown: IShown): SVGElement {
    const { branch, open, level } = shown;
    const group = isGroup(branch);
    const kind = group ? (open ? 'open' : 'group') : branch.row.op === 'placeholder' ? 'input' : 'node';
    const differs = group && !open && this.compared && branch.items.some(item => item.change !== 'same');
    const change = group ? (differs ? 'differs' : 'same') : branch.change;
    return svg(
      'g',
      {
        class: `al-graph-box al-graph-${kind} al-graph-${change}`,
        role: 'treeitem',
        'data-id': id,
        tabindex: id === this.active ? 0 : -1,
        'aria-level': level,
        'aria-label': labelOf(branch, this.compared),
        ...(group ? { 'aria-expanded': String(open) } : {}),
        // The members of an open group show which of them a line caused.
        ...(open ? {} : this.context.selection.linked(this.idsOf(branch)))
      },
      ...drawBox(shown, this.compared)
    );
  }

  private elementOf(id: string): SVGElement | null {
    const elements = [...this.view.content.querySelectorAll<SVGElement>('[data-id]')];
    return elements.find(element => element.dataset['id'] === id) ?? null;
  }

  private showDetails(): void {
    const { scene } = this;
    const shown = scene?.boxes.get(this.state.selected);
    for (const element of this.view.content.querySelectorAll('[data-id]')) {
      element.setAttribute('aria-selected', String(element.getAttribute('data-id') === this.state.selected));
    }
    const chosen = shown === undefined || isGroup(shown.branch) || scene === null ? null : shown.branch;
    this.view.content
      .querySelector('.al-graph-chosen')
      ?.replaceChildren(...(chosen === null || scene === null ? [] : drawEdgesOf(chosen, scene, this.isOpen)));
    const facts =
      shown === undefined
        ? [h('span', { class: 'al-soft' }, 'Select a node to see its line, its inputs and its users.')]
        : detailsOf(this.context, shown.branch, this.compared, item => this.go(item));
    this.details.replaceChildren(...facts.filter(child => child !== null));
  }

  // --- clicks and keys

  private onClick(event: MouseEvent): void {
    const target = event.target instanceof Element ? event.target : null;
    const id = target?.closest('[data-id]')?.getAttribute('data-id') ?? '';
    const shown = this.scene?.boxes.get(id);
    // The area of an open group is the background of its members.
    if (shown !== undefined && !(shown.open && target?.matches('.al-graph-shape'))) {
      this.activate(id, shown);
    }
  }

  private activate(id: string, { branch }: IShown): void {
    const { selection } = this.context;
    this.setActive(id);
    this.state.selected = id;
    if (isGroup(branch)) {
      this.toggle(branch);
      return;
    }
    const [line] = this.idsOf(branch);
    if (line !== undefined) {
      Object.assign(this.state, { line, row: '' });
      selection.choose(line);
    }
    this.showDetails();
  }

  private toggle(group: IGroup): void {
    const open = this.open();
    if (group.parent !== null && !open.delete(group.key)) {
      open.add(group.key);
    }
    void this.draw(undefined, idOf(group));
  }

  private setActive(id: string): void {
    this.elementOf(this.active)?.setAttribute('tabindex', '-1');
    this.active = id;
    const element = this.elementOf(id);
    element?.setAttribute('tabindex', '0');
    element?.focus({ preventScroll: true });
  }

  private onKey(event: KeyboardEvent): void {
    this.setActive((event.target as Element).closest('[data-id]')?.getAttribute('data-id') ?? this.active);
    const shown = this.scene?.boxes.get(this.active);
    if (shown === undefined || event.ctrlKey || event.metaKey || event.altKey) {
      return;
    }
    const { branch, open } = shown;
    const ids = [...(this.scene?.boxes.keys() ?? [])];
    const position = ids.indexOf(this.active);
    const closed = isGroup(branch) && !open;
    const actions: Readonly<Record<string, () => void>> = {
      Enter: () => this.activate(this.active, shown),
      ' ': () => this.activate(this.active, shown),
      ArrowDown: () => this.step(ids[position + 1]),
      ArrowUp: () => this.step(ids[position - 1]),
      Home: () => this.step(ids[0]),
      End: () => this.step(ids.at(-1)),
      ArrowRight: () => (closed ? this.toggle(branch) : this.step(open ? ids[position + 1] : undefined)),
      ArrowLeft: () =>
        open && isGroup(branch) && branch.parent !== null
          ? this.toggle(branch)
          : this.step(branch.parent === null ? undefined : idOf(branch.parent)),
      '+': () => this.view.zoomBy(1),
      '-': () => this.view.zoomBy(-1),
      Escape: () => {
        this.state.selected = '';
        this.showDetails();
      }
    };
    const action = actions[event.key];
    if (action !== undefined) {
      action();
      if (event.key !== 'Escape') {
        event.preventDefault();
        event.stopPropagation();
      }
    }
  }

  private step(id: string | undefined): void {
    const rect = id === undefined ? undefined : this.scene?.boxes.get(id)?.rect;
    if (id !== undefined && rect !== undefined) {
      this.view.reveal(rect);
      this.setActive(id);
    }
  }
}
