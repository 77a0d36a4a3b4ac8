/**
 * Let the reader choose a line of the user's program, and highlight everything in the view that this line caused:
 * nodes, saved values, kernels, and lines of code.
 *
 * Each line has a number (`IOrigin.id`). The attribute `data-links` of an element has the numbers of the lines that
 * caused the element. Clicks on it choose the first of these lines, then the next, and at last no line.
 */

import { countsOf } from '../model/report';
import type { Kernel, Node as GraphNode, Report, Saved, UserLine } from '../model/report';
import { howLineRan } from '../model/rows';
import { amount, place } from '../model/words';
import type { ISource } from '../source';
import { entriesOf } from './context';
import type { IEntry } from './context';
import { redrawCode } from './code';
import { h } from './dom';
import type { Child } from './dom';

/** A row of the report that a line caused, with its graph. */
interface ICausedRow<T> {
  readonly entry: IEntry;
  readonly row: T;
}

/** A line of the user's program, and everything that it caused. */
export interface IOrigin {
  readonly id: number;
  /** The line's number in the cell; null if it is not a line of the cell. */
  readonly inCell: number | null;
  readonly where: string;
  readonly code: string;
  readonly nodes: ICausedRow<GraphNode>[];
  readonly saved: ICausedRow<Saved>[];
  readonly kernels: ICausedRow<number>[];
}

/** The ways in which a line ran (see `howLineRan`) that may have caused something in a graph. */
const COMPILED = ['compiled', 'compiled in part', 'calls compiled code'];

/** The lines of a report, each with everything that it caused. */
export class Origins {
  readonly byId = new Map<number, IOrigin>();
  /**
   * The numbers of the lines that caused a node. The key is its graph, stage, part and name; or the same without stage.
   */
  private readonly idsOfNodes = new Map<string, readonly number[]>();
  private readonly cell: readonly string[];

  constructor(
    private readonly report: Report | null,
    private readonly numbers: Map<string, number>,
    nodesOf: (entry: IEntry) => readonly GraphNode[]
  ) {
    this.cell = report?.cell?.source.split('\n') ?? [];
    for (const part of report?.cell?.parts ?? []) {
      for (let line = part.first_line; line <= part.last_line; line += 1) {
        if (COMPILED.includes(howLineRan(part, line))) {
          this.cellOrigin(line);
        }
      }
    }
    for (const entry of report === null ? [] : entriesOf(report)) {
      for (const row of nodesOf(entry)) {
        const origins = this.causesOf(entry, row.line);
        origins.forEach(origin => origin.nodes.push({ entry, row }));
        const ids = origins.map(origin => origin.id);
        this.idsOfNodes.set(`${entry.key} ${row.stage} ${row.part} ${row.name}`, ids);
        this.idsOfNodes.set(`${entry.key} ${row.part} ${row.name}`, ids);
      }
      for (const row of entry.graph.saved) {
        this.causesOf(entry, row.line).forEach(origin => origin.saved.push({ entry, row }));
      }
      entry.graph.kernels.forEach((kernel, row) => {
        for (const id of this.idsOfKernel(entry, kernel)) {
          this.byId.get(id)?.kernels.push({ entry, row });
        }
      });
    }
  }

  /** Return the line to which a record of the report refers; null for null. */
  originOf(line: UserLine | null): IOrigin | null {
    if (line === null) {
      return null;
    }
    const inCell = this.cellLine(line);
    return inCell === null
      ? this.make(`${line.file}:${line.line}`, null, place(line), line.code)
      : this.cellOrigin(inCell);
  }

  /** Return a line of the cell by its number; null if it caused nothing. */
  inCell(line: number): IOrigin | null {
    return [...this.byId.values()].find(each => each.inCell === line) ?? null;
  }

  private cellOrigin(line: number): IOrigin {
    return this.make(`cell ${line}`, line, `line ${line}`, this.cell[line - 1]?.trim() ?? '');
  }

  /**
   * The lines that caused something with the user line `line` in a graph: this line, and the lines of notebook cells
   * that called its code.
   */
  causesOf({ frame }: IEntry, line: UserLine | null): readonly IOrigin[] {
    const origins = [line, ...(line?.callers ?? [])]
      .map(cause => this.originOf(cause))
      .filter(origin => origin !== null);
    if (origins.length === 0 || origins.some(origin => origin.inCell !== null)) {
      return origins;
    }
    const parts = (this.report?.cell?.parts ?? []).filter(part => part.frames.includes(frame.name));
    const [part] = parts;
    // If the part has several lines, it is unknown which of them led to the call.
    const isOneLine = parts.length === 1 && part !== undefined && part.first_line === part.last_line;
    return isOneLine ? [...origins, this.cellOrigin(part.first_line)] : origins;
  }

  /** The numbers of the lines that caused a node. If `stage` is empty, the node may be of any stage. */
  idsOfNode(entry: IEntry, part: string, name: string, stage = ''): readonly number[] {
    return this.idsOfNodes.get([entry.key, stage, part, name].filter(each => each !== '').join(' ')) ?? [];
  }

  /** The numbers of the lines that caused the nodes of a kernel. */
  idsOfKernel(entry: IEntry, kernel: Kernel): readonly number[] {
    return [...new Set(kernel.nodes.flatMap(name => this.idsOfNode(entry, kernel.kind, name)))].sort((a, b) => a - b);
  }

  /**
   * The number of a line in the report's cell; null if it is not a line of the cell. A file name does not tell to which
   * cell it belongs, so the text of the line is compared.
   */
  private cellLine({ file, line, code }: UserLine): number | null {
    const isCell = /^<ipython-input-|ipykernel_\d+[\\/]\d+\.py$/.test(file);
    return isCell && this.cell[line - 1]?.trim() === code.trim() ? line : null;
  }

  private make(key: string, inCell: number | null, where: string, code: string): IOrigin {
    const id = this.numbers.get(key) ?? this.numbers.size;
    this.numbers.set(key, id);
    const origin = this.byId.get(id) ?? { id, inCell, where, code, nodes: [], saved: [], kernels: [] };
    this.byId.set(id, origin);
    return origin;
  }
}

/** Where an element that a line caused is shown: the tab, the graph, and the keys of the folds around it. */
export interface ITarget {
  readonly tab: string;
  readonly entry: IEntry | null;
  readonly folds: readonly string[];
}

/** The part of the view that the selection uses. */
interface IPage {
  readonly root: HTMLElement;
  readonly source: ISource;
  /** The report that the view draws. */
  report(): Report | null;
  /** Open the tab and the folds, show the graph, scroll to an element that line `id` caused, and focus it. */
  show(target: ITarget, id: number): void;
}

export class Selection {
  /** The number of the chosen line. */
  id: number | null = null;
  /** The row by which the line was chosen: the key of its graph (see `IEntry`) and its name. Empty without a row. */
  row = '';
  /** Whether graphs are shown with the user's names. */
  names = true;
  /** The bar that shows the chosen line, with buttons that lead to everything that it caused. */
  readonly bar = h('div', { class: 'al-chosen', role: 'status', hidden: true });
  private readonly numbers = new Map<string, number>();
  private origins: Origins | null = null;
  private hasNodes = false;

  constructor(private readonly page: IPage) {
    page.root.addEventListener('click', event => this.onClick(event));
    page.root.addEventListener('keydown', event => {
      if (event.key === 'Escape' && this.id !== null && !event.defaultPrevented) {
        event.stopPropagation();
        this.choose(null);
      }
    });
  }

  /**
   * Return the lines of the report, with everything that they caused. If `withNodes` is true, nodes that the report
   * lacks are requested from the kernel; by default this is done after the reader chose a line.
   */
  lines(withNodes = this.id !== null): Origins {
    const { source } = this.page;
    const nodesOf = ({ frame, graph }: IEntry): readonly GraphNode[] =>
      graph.nodes.length > 0
        ? graph.nodes
        : ((withNodes && source.live ? source.nodes(frame.name, graph.index) : null) ?? []);
    if (this.origins === null || (withNodes && !this.hasNodes)) {
      this.hasNodes = withNodes;
      this.origins = new Origins(this.page.report(), this.numbers, nodesOf);
    }
    return this.origins;
  }

  /**
   * Start again after the report was replaced. If `same` is true, it is a newer state of the report: keep the choice.
   */
  renew(same: boolean): void {
    this.origins = null;
    this.id = same ? this.id : null;
    this.light();
  }

  /** The attributes of an element that the lines with the numbers `ids` caused. */
  linked(ids: readonly number[], button = false): Record<string, string> {
    const lit = this.id !== null && ids.includes(this.id);
    return {
      ...(ids.length > 0 ? { 'data-links': ids.join(' ') } : {}),
      ...(lit ? { 'data-lit': '' } : {}),
      ...(button ? { 'aria-pressed': String(lit) } : {})
    };
  }

  /** A button that names a line and chooses it. */
  lineButton(line: UserLine | null): HTMLElement | null {
    const origin = this.lines(false).originOf(line);
    return origin === null ? null : this.originButton(origin, origin.where);
  }

  /** A button with the given text that chooses a line. */
  originButton({ id, code }: IOrigin, text: string): HTMLElement {
    const help = `${code}\nShow all that comes from this line`;
    return h('button', { type: 'button', class: 'al-origin', title: help, ...this.linked([id], true) }, text);
  }

  useNames(useUserNames: boolean): void {
    this.names = useUserNames;
    redrawCode(this.page.root);
  }

  choose(id: number | null, row = ''): void {
    this.id = id;
    this.row = row;
    this.light();
  }

  private onClick(event: MouseEvent): void {
    const target = event.target instanceof Element ? event.target : null;
    const linked = target?.closest<HTMLElement>('[data-links]');
    const control = target?.closest('button, input, select, label, summary, a');
    const hasSelectedText = document.getSelection()?.isCollapsed === false;
    if (
      !linked ||
      !linked.matches('.al-row, tr, button') ||
      (control && control !== linked) ||
      (hasSelectedText && !control)
    ) {
      return;
    }
    const ids = (linked.dataset['links'] ?? '').split(' ').map(Number);
    const next = this.id === null || !ids.includes(this.id) ? 0 : ids.indexOf(this.id) + 1;
    const { frame, graph } = linked.closest<HTMLElement>('[data-frame]')?.dataset ?? {};
    const name = linked.closest('tr')?.dataset['name'];
    this.choose(ids[next] ?? null, name === undefined ? '' : `${frame}/${graph} ${name}`);
  }

  /** Highlight everything that the chosen line caused, and nothing else. */
  private light(): void {
    for (const element of this.page.root.querySelectorAll<HTMLElement>('[data-links]')) {
      const lit = this.id !== null && (element.dataset['links'] ?? '').split(' ').includes(String(this.id));
      element.toggleAttribute('data-lit', lit);
      if (element.hasAttribute('aria-pressed')) {
        element.setAttribute('aria-pressed', String(lit));
      }
    }
    const origin = this.id === null ? null : (this.lines().byId.get(this.id) ?? null);
    this.bar.hidden = origin === null;
    this.bar.replaceChildren(...(origin === null ? [] : this.inBar(origin)).filter(child => child !== null));
  }

  private inBar(origin: IOrigin): Child[] {
    const { source } = this.page;
    const traced = origin.nodes.filter(({ row }) => row.stage === 'trace');
    const ofPhase = (phase: string): ICausedRow<GraphNode>[] => traced.filter(({ row }) => row.phase === phase);
    const [forward, backward] = [ofPhase('forward'), ofPhase('backward')];
    const buttons = [
      this.jump(amount(forward.length, 'node') + ' forward', forward.length, () => codeTargets(origin, 'forward')),
      this.jump(`${backward.length} backward`, backward.length, () => codeTargets(origin, 'backward')),
      this.jump(`${origin.saved.length} saved`, origin.saved.length, () =>
        origin.saved.map(({ entry }) => ({ tab: 'saved', entry, folds: [] }))
      ),
      this.jump(amount(origin.kernels.length, 'kernel'), origin.kernels.length, () =>
        origin.kernels.map(({ entry }) => ({ tab: 'kernels', entry, folds: [] }))
      ),
      this.jump('the graph', origin.nodes.length, () =>
        [...new Set(origin.nodes.map(({ entry }) => entry))].map(entry => ({
          ...{ tab: 'graph', entry },
          folds: [`graph ${entry.key}`]
        }))
      )
    ].filter(each => each !== null);
    const cell = origin.inCell;
    const clearButton = h(
      'button',
      { type: 'button', class: 'al-button', 'aria-label': 'Clear the choice of a line', title: 'Clear (Escape)' },
      '✕'
    );
    clearButton.addEventListener('click', () => this.choose(null));
    // A large report lacks the nodes of some graphs. Find the graphs whose nodes the kernel has not sent either.
    const report = this.page.report();
    const cutEntries = (report === null ? [] : entriesOf(report)).filter(
      ({ graph }) => graph.nodes.length === 0 && countsOf(graph).nodes > 0
    );
    const nodesMissing = cutEntries.some(
      ({ frame, graph }) => !source.live || source.nodes(frame.name, graph.index) === null
    );
    let remark = buttons.length > 0 ? '' : 'nothing here is known to come from it';
    if (nodesMissing && origin.nodes.length === 0) {
      remark = source.live
        ? 'asking the kernel …'
        : 'its nodes are shown while the kernel runs, and in report.to_html()';
    }
    return [
      h('span', { class: 'al-chosen-line' }, `${origin.where}: `, h('code', {}, origin.code)),
      cell === null ? null : this.toCell(),
      ...buttons,
      remark === '' ? null : h('span', { class: 'al-soft' }, remark),
      clearButton
    ];
  }

  private toCell(): HTMLElement {
    return this.button('the cell', () => this.page.show({ tab: 'overview', entry: null, folds: [] }, this.id ?? 0));
  }

  /** A button that shows the first of `targets`, at the next click the second, and so on. */
  private jump(text: string, count: number, targets: () => readonly ITarget[]): HTMLElement | null {
    if (count === 0) {
      return null;
    }
    let turn = 0;
    return this.button(text, () => {
      const places = targets();
      const target = places[turn % places.length];
      turn += 1;
      if (target !== undefined && this.id !== null) {
        this.page.show(target, this.id);
      }
    });
  }

  private button(text: string, onClick: () => void): HTMLElement {
    const button = h('button', { type: 'button', class: 'al-button', title: `Go to ${text}` }, text);
    button.addEventListener('click', onClick);
    return button;
  }
}

/** The places of stages' code that contains nodes of a phase (forward or backward) that a line caused. */
function codeTargets(origin: IOrigin, phase: string): ITarget[] {
  const targets = new Map<string, ITarget & { readonly ofPartition: boolean }>();
  for (const { entry, row } of origin.nodes.filter(each => each.row.phase === phase)) {
    entry.graph.stages.forEach((stage, position) =>
      stage.codes.forEach((code, index) => {
        if (stage.name === row.stage && partOf(code.title) === row.part) {
          const key = codeKey(entry, position, index);
          const folds = [`stages ${entry.key}`, ...(stage.name === 'backward' ? [`backwards ${entry.key}`] : []), key];
          targets.set(key, { tab: 'stages', entry, folds, ofPartition: stage.name === 'partition' });
        }
      })
    );
  }
  // The forward and backward graphs come first, because the joint graph contains both phases.
  return [...targets.values()].sort((a, b) => Number(b.ofPartition) - Number(a.ofPartition));
}

/** The graph that a stage's code shows: `joint`, `forward`, `backward` or `inference`; empty for other code. */
export function partOf(title: string): string {
  return /^(joint|forward|backward|inference) graph/.exec(title)?.[1] ?? '';
}

/** The key of the fold with a stage's code. */
export function codeKey(entry: IEntry, stage: number, index: number): string {
  return `code ${entry.key} ${stage} ${index}`;
}
