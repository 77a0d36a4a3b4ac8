/**
 * One line of the user's program, chosen anywhere: all that comes from it lights up, wherever it stands.
 *
 * Lines have numbers. An element that comes from lines carries these in `data-links`; a click on it, or on a button in
 * it, chooses the first, then the next, then none.
 */

import { countsOf } from '../model/counts';
import type { Kernel, Node as GraphNode, Report, Saved, UserLine } from '../model/report';
import { amount, place } from '../model/words';
import type { Source } from '../source';
import { entriesOf } from './context';
import type { Entry } from './context';
import { redrawCode } from './code';
import { h } from './dom';
import type { Child } from './dom';

/** What comes from a line, in the graph that it stands in. */
interface In<T> {
  readonly entry: Entry;
  readonly row: T;
}

/** A line of the user's program, and what comes from it. */
export interface Origin {
  readonly id: number;
  /** The line in the cell, where it is one of the cell's. */
  readonly inCell: number | null;
  readonly where: string;
  readonly code: string;
  readonly nodes: In<GraphNode>[];
  readonly saved: In<Saved>[];
  readonly kernels: In<number>[];
}

/** The lines of a report, each with what comes from it. */
export class Origins {
  readonly all = new Map<number, Origin>();
  /** Of each graph the numbers of its nodes' lines, by stage, part and name, and by part and name. */
  private readonly named = new Map<string, readonly number[]>();
  private readonly cell: readonly string[];

  constructor(
    private readonly report: Report | null,
    private readonly numbers: Map<string, number>,
    nodesOf: (entry: Entry) => readonly GraphNode[]
  ) {
    this.cell = report?.cell?.source.split('\n') ?? [];
    for (const part of report?.cell?.parts ?? []) {
      for (let line = part.first_line; part.how === 'compiled' && line <= part.last_line; line += 1) {
        this.ofCell(line);
      }
    }
    for (const entry of report === null ? [] : entriesOf(report)) {
      for (const row of nodesOf(entry)) {
        const origins = this.behind(entry, row.line);
        origins.forEach(origin => origin.nodes.push({ entry, row }));
        const ids = origins.map(origin => origin.id);
        this.named.set(`${entry.key} ${row.stage} ${row.part} ${row.name}`, ids);
        this.named.set(`${entry.key} ${row.part} ${row.name}`, ids);
      }
      for (const row of entry.graph.saved) {
        this.behind(entry, row.line).forEach(origin => origin.saved.push({ entry, row }));
      }
      entry.graph.kernels.forEach((kernel, row) => {
        for (const id of this.ofKernel(entry, kernel)) {
          this.all.get(id)?.kernels.push({ entry, row });
        }
      });
    }
  }

  /** The line that a record names. */
  of(line: UserLine | null): Origin | null {
    if (line === null) {
      return null;
    }
    const inCell = this.cellLine(line);
    return inCell === null ? this.make(`${line.file}:${line.line}`, null, place(line), line.code) : this.ofCell(inCell);
  }

  /** A line of the cell that something comes from. */
  inCell(line: number): Origin | null {
    return [...this.all.values()].find(each => each.inCell === line) ?? null;
  }

  private ofCell(line: number): Origin {
    return this.make(`cell ${line}`, line, `line ${line}`, this.cell[line - 1]?.trim() ?? '');
  }

  /** The lines that something in a graph comes from: its own, and the cell's that called the function with it. */
  behind({ frame }: Entry, line: UserLine | null): readonly Origin[] {
    const own = this.of(line);
    if (own === null || own.inCell !== null) {
      return own === null ? [] : [own];
    }
    const parts = (this.report?.cell?.parts ?? []).filter(part => part.frames.includes(frame.name));
    const [part] = parts;
    // Of several lines nobody knows which it was.
    const known = parts.length === 1 && part !== undefined && part.first_line === part.last_line;
    return known ? [own, this.ofCell(part.first_line)] : [own];
  }

  /** The lines that a node comes from; of any stage if none is given. */
  ofNode(entry: Entry, part: string, name: string, stage = ''): readonly number[] {
    return this.named.get([entry.key, stage, part, name].filter(each => each !== '').join(' ')) ?? [];
  }

  /** The lines that a kernel comes from. */
  ofKernel(entry: Entry, kernel: Kernel): readonly number[] {
    return [...new Set(kernel.nodes.flatMap(name => this.ofNode(entry, kernel.kind, name)))].sort((a, b) => a - b);
  }

  /** The number of a line in the cell, if it is one of it: files of cells have names that nobody knows. */
  private cellLine({ file, line, code }: UserLine): number | null {
    const isCell = /^<ipython-input-|ipykernel_\d+[\\/]\d+\.py$/.test(file);
    return isCell && this.cell[line - 1]?.trim() === code.trim() ? line : null;
  }

  private make(key: string, inCell: number | null, where: string, code: string): Origin {
    const id = this.numbers.get(key) ?? this.numbers.size;
    this.numbers.set(key, id);
    const origin = this.all.get(id) ?? { id, inCell, where, code, nodes: [], saved: [], kernels: [] };
    this.all.set(id, origin);
    return origin;
  }
}

/** Where something that comes from a line stands: a tab, the folds to be opened, and how to find it there. */
export interface Target {
  readonly tab: string;
  readonly entry: Entry | null;
  readonly folds: readonly string[];
}

/** What the view does for the selection. */
interface Page {
  readonly root: HTMLElement;
  readonly source: Source;
  /** The report that is drawn. */
  report(): Report | null;
  /** Open the folds and the tab, with the graph in it, scroll to what comes from a line, and focus it. */
  show(target: Target, id: number): void;
}

export class Selection {
  /** The line that is chosen. */
  id: number | null = null;
  /** Whether graphs are shown with the user's names. */
  names = true;
  /** What is chosen, and where all of it is. */
  readonly bar = h('div', { class: 'al-chosen', role: 'status', hidden: true });
  private readonly numbers = new Map<string, number>();
  private origins: Origins | null = null;
  private hasNodes = false;

  constructor(private readonly page: Page) {
    page.root.addEventListener('click', event => this.onClick(event));
    page.root.addEventListener('keydown', event => {
      if (event.key === 'Escape' && this.id !== null && !event.defaultPrevented) {
        event.stopPropagation();
        this.choose(null);
      }
    });
  }

  /** The lines of the report. The nodes of graphs are asked for, where they have to be, once there is a choice. */
  lines(withNodes = this.id !== null): Origins {
    const { source } = this.page;
    const nodesOf = ({ frame, graph }: Entry): readonly GraphNode[] =>
      graph.nodes.length > 0 ? graph.nodes : ((withNodes && source.live ? source.nodes(frame.name, graph.index) : null) ?? []);
    if (this.origins === null || (withNodes && !this.hasNodes)) {
      this.hasNodes = withNodes;
      this.origins = new Origins(this.page.report(), this.numbers, nodesOf);
    }
    return this.origins;
  }

  /** Begin anew with another state of the report; `same`: of the same one. */
  renew(same: boolean): void {
    this.origins = null;
    this.id = same ? this.id : null;
    this.light();
  }

  /** The attributes of an element that comes from some lines. */
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
    const origin = this.lines(false).of(line);
    return origin === null ? null : this.originButton(origin, origin.where);
  }

  /** The same for a line that is known by its number. */
  originButton({ id, code }: Origin, text: string): HTMLElement {
    const help = `${code}\nShow all that comes from this line`;
    return h('button', { type: 'button', class: 'al-origin', title: help, ...this.linked([id], true) }, text);
  }

  useNames(wanted: boolean): void {
    this.names = wanted;
    redrawCode(this.page.root);
  }

  choose(id: number | null): void {
    this.id = id;
    this.light();
  }

  private onClick(event: MouseEvent): void {
    const target = event.target instanceof Element ? event.target : null;
    const linked = target?.closest<HTMLElement>('[data-links]');
    const control = target?.closest('button, input, select, label, summary, a');
    const marked = document.getSelection()?.isCollapsed === false;
    if (linked == null || !linked.matches('.al-row, tr, button') || (control != null && control !== linked) || (marked && control == null)) {
      return;
    }
    const ids = (linked.dataset['links'] ?? '').split(' ').map(Number);
    const next = this.id === null || !ids.includes(this.id) ? 0 : ids.indexOf(this.id) + 1;
    this.choose(ids[next] ?? null);
  }

  /** Light up what comes from the chosen line, and no more. */
  private light(): void {
    for (const each of this.page.root.querySelectorAll<HTMLElement>('[data-links]')) {
      const lit = this.id !== null && (each.dataset['links'] ?? '').split(' ').includes(String(this.id));
      each.toggleAttribute('data-lit', lit);
      if (each.hasAttribute('aria-pressed')) {
        each.setAttribute('aria-pressed', String(lit));
      }
    }
    const origin = this.id === null ? null : (this.lines().all.get(this.id) ?? null);
    this.bar.hidden = origin === null;
    this.bar.replaceChildren(...(origin === null ? [] : this.inBar(origin)).filter(child => child !== null));
  }

  private inBar(origin: Origin): Child[] {
    const { source } = this.page;
    const traced = origin.nodes.filter(({ row }) => row.stage === 'trace');
    const ofPhase = (phase: string): In<GraphNode>[] => traced.filter(({ row }) => row.phase === phase);
    const [forward, backward] = [ofPhase('forward'), ofPhase('backward')];
    const buttons = [
      this.jump(amount(forward.length, 'node') + ' forward', forward.length, () => codes(origin, 'forward')),
      this.jump(`${backward.length} backward`, backward.length, () => codes(origin, 'backward')),
      this.jump(`${origin.saved.length} saved`, origin.saved.length, () =>
        origin.saved.map(({ entry }) => ({ tab: 'saved', entry, folds: [] }))
      ),
      this.jump(amount(origin.kernels.length, 'kernel'), origin.kernels.length, () =>
        origin.kernels.map(({ entry }) => ({ tab: 'kernels', entry, folds: [] }))
      )
    ].filter(each => each !== null);
    const cell = origin.inCell;
    const clear = h('button', { type: 'button', class: 'al-button', 'aria-label': 'Clear the choice of a line', title: 'Clear (Escape)' }, '✕');
    clear.addEventListener('click', () => this.choose(null));
    // A notebook does not hold the nodes.
    const report = this.page.report();
    const cut = (report === null ? [] : entriesOf(report)).filter(({ graph }) => graph.nodes.length === 0 && countsOf(graph).nodes > 0);
    const absent = cut.some(({ frame, graph }) => !source.live || source.nodes(frame.name, graph.index) === null);
    let remark = buttons.length > 0 ? '' : 'nothing here is known to come from it';
    if (absent && origin.nodes.length === 0) {
      remark = source.live ? 'asking the kernel …' : 'its nodes are shown while the kernel runs, and in report.to_html()';
    }
    return [
      h('span', { class: 'al-chosen-line' }, `${origin.where}: `, h('code', {}, origin.code)),
      cell === null ? null : this.toCell(),
      ...buttons,
      remark === '' ? null : h('span', { class: 'al-soft' }, remark),
      clear
    ];
  }

  private toCell(): HTMLElement {
    return this.button('the cell', () => this.page.show({ tab: 'overview', entry: null, folds: [] }, this.id ?? 0));
  }

  /** A button that leads to one place after the other. */
  private jump(text: string, count: number, targets: () => readonly Target[]): HTMLElement | null {
    if (count === 0) {
      return null;
    }
    let turn = 0;
    return this.button(text, () => {
      const found = targets();
      const target = found[turn % found.length];
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

/** The code of the stages in which nodes of a phase stand that come from a line. */
function codes(origin: Origin, phase: string): Target[] {
  const found = new Map<string, Target & { readonly own: boolean }>();
  for (const { entry, row } of origin.nodes.filter(each => each.row.phase === phase)) {
    entry.graph.stages.forEach((stage, position) =>
      stage.codes.forEach((code, index) => {
        if (stage.name === row.stage && partOf(code.title) === row.part) {
          const key = codeKey(entry, position, index);
          const folds = [`stages ${entry.key}`, ...(stage.name === 'backward' ? [`backwards ${entry.key}`] : []), key];
          found.set(key, { tab: 'stages', entry, folds, own: stage.name === 'partition' });
        }
      })
    );
  }
  // The graph that has nothing else first.
  return [...found.values()].sort((a, b) => Number(b.own) - Number(a.own));
}

/** Which graph a stage's code is: `joint`, `forward`, `backward` or `inference`; empty if it is none. */
export function partOf(title: string): string {
  return /^(joint|forward|backward|inference) graph/.exec(title)?.[1] ?? '';
}

/** The key of the fold that holds a stage's code. */
export function codeKey(entry: Entry, stage: number, index: number): string {
  return `code ${entry.key} ${stage} ${index}`;
}
