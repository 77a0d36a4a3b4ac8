/** The choice of saved values that the reader makes in the tab Memory. The picture of the graph follows it, too. */

import { ChoiceModel, TANGENT } from '../model/choices';
import type { IChoice, IPlan } from '../model/choices';
import { readSaved } from '../model/report';
import type { AppliedChoice, BudgetRow, Graph, Node } from '../model/report';
import type { IContext, IEntry } from '../view/context';
import { soft } from '../view/dom';
import type { Child } from '../view/dom';

/** A row of the memory budgets, and the values for which the reader chose otherwise. */
interface IState {
  readonly row: number;
  readonly changes: ReadonlyMap<number, boolean>;
}

/** The choices that readers made, by report and graph. They are kept when the panel is drawn again. */
const states = new Map<string, IState>();

const models = new WeakMap<Graph, Choosing>();

/** The choices of one graph, and the one that the reader made. */
export class Choosing {
  readonly model: ChoiceModel;
  readonly rows: readonly BudgetRow[];
  /** The position of the row that this run used. */
  readonly current: number;
  private made: { readonly options: string; readonly nodes: readonly Node[]; readonly graph: Graph } | null = null;

  private constructor(
    private readonly key: string,
    private readonly entry: IEntry,
    choices: NonNullable<Graph['choices']>
  ) {
    this.model = new ChoiceModel(choices);
    this.rows = choices.rows;
    this.current = Math.max(
      0,
      this.rows.findIndex(row => row.current)
    );
  }

  /** The choices of a graph; null if the report does not contain them. */
  static of(context: IContext, entry: IEntry): Choosing | null {
    const { choices } = entry.graph;
    const known = models.get(entry.graph);
    if (known !== undefined || choices === null || choices.rows.length === 0) {
      return known ?? null;
    }
    const made = new Choosing(`${context.report.identifier} ${entry.key}`, entry, choices);
    models.set(entry.graph, made);
    return made;
  }

  private get state(): IState {
    const state = states.get(this.key);
    return state !== undefined && state.row < this.rows.length ? state : { row: this.current, changes: new Map() };
  }

  get position(): number {
    return this.state.row;
  }

  get row(): BudgetRow | undefined {
    return this.rows[this.position];
  }

  /** Whether the reader chose something else than this run did. */
  get isOther(): boolean {
    return this.position !== this.current || this.state.changes.size > 0;
  }

  choose(position: number): void {
    states.set(this.key, { row: position, changes: new Map() });
  }

  /** Save a value, or compute it again, whatever the budget chose. */
  change(node: number, save: boolean): void {
    const changes = new Map(this.state.changes);
    if (changes.has(node)) {
      changes.delete(node);
    } else {
      changes.set(node, save);
    }
    states.set(this.key, { row: this.position, changes });
  }

  /** The choice of a row, without the reader's changes. */
  choiceAt(position: number): IChoice {
    const row = this.rows[position];
    return row === undefined ? { preferred: new Set(), copies: false } : this.model.choiceOf(row);
  }

  /** The plan of this run. */
  now(): IPlan {
    return this.model.plan(this.choiceAt(this.current));
  }

  plan(): IPlan {
    const { preferred, copies } = this.choiceAt(this.position);
    const chosen = new Set(preferred);
    this.state.changes.forEach((save, node) => (save ? chosen.add(node) : chosen.delete(node)));
    return this.model.plan({ preferred: chosen, copies });
  }

  /** The names of the values that the reader chose to save (true) or to compute again (false). */
  changed(save: boolean): string[] {
    const { names } = this.model.choices;
    return [...this.state.changes].filter(([, saves]) => saves === save).map(([node]) => names[node] ?? '');
  }

  /** The options of `%%aotcompile` that make this choice. */
  get options(): string {
    const { row } = this;
    const save = this.changed(true);
    const recompute = this.changed(false);
    return [
      `--partitioner ${row?.partitioner ?? 'default'}`,
      ...(row === undefined || row.budget === null ? [] : [`--memory-budget ${row.budget}`]),
      ...(save.length > 0 ? [`--save ${save.join(',')}`] : []),
      ...(recompute.length > 0 ? [`--recompute ${recompute.join(',')}`] : [])
    ].join(' ');
  }

  /** The graph with the nodes and the saved values of the reader's choice, written from the nodes of the joint graph. */
  graphOf(graph: Graph, nodes: readonly Node[]): Graph {
    const { made, options } = this;
    if (made?.options === options && made.nodes === nodes) {
      return made.graph;
    }
    const plan = this.plan();
    const { names, inputs, nbytes, roles } = this.model.choices;
    const nameOf = (node: number): string => names[node] ?? '';
    const joint = new Map(nodes.filter(row => row.part === 'joint').map(row => [row.name, row]));
    const rowsOf = (list: readonly number[], part: string, change: (node: number) => Partial<Node>): Node[] =>
      list.flatMap(node => {
        const row = joint.get(nameOf(node));
        return row === undefined ? [] : [{ ...row, stage: 'partition', part, ...change(node) }];
      });
    const read = (node: number): Partial<Node> => ({ inputs: (inputs[node] ?? []).map(nameOf) });
    const given = (): Partial<Node> => ({ op: 'placeholder', inputs: [] });
    const tangents = roles.flatMap((role, node) => (role === TANGENT ? [node] : []));
    const saved = plan.saved.map(node => ({
      ...readSaved({ name: nameOf(node), nbytes: nbytes[node] ?? 0, is_input: (nbytes[node] ?? 0) === 0 }),
      ...graph.saved.find(row => row.name === nameOf(node))
    }));
    const rows = [
      ...nodes.filter(row => row.stage === 'trace'),
      ...rowsOf(plan.early, 'forward', read),
      ...rowsOf(plan.saved, 'backward', given),
      ...rowsOf([...tangents, ...plan.late], 'backward', read)
    ];
    const changed = { ...graph, nodes: rows, saved };
    this.made = { options, nodes, graph: changed };
    return changed;
  }

  /** The measurement of the reader's choice; undefined if it was not applied. */
  applied(rows: readonly AppliedChoice[]): AppliedChoice | undefined {
    return this.appliedTo(rows, this.row, this.changed(true), this.changed(false));
  }

  /** The measurement of the choice of a row. */
  appliedTo(
    rows: readonly AppliedChoice[],
    row: BudgetRow | undefined,
    save: readonly string[] = [],
    recompute: readonly string[] = []
  ): AppliedChoice | undefined {
    const { frame, graph } = this.entry;
    return rows.find(
      each =>
        each.frame === frame.name &&
        each.graph === graph.index &&
        each.partitioner === row?.partitioner &&
        each.budget === row.budget &&
        each.save.join() === save.join() &&
        each.recompute.join() === recompute.join()
    );
  }
}

/** A notice that the pictures show another choice than this run's, or nothing. */
export function choiceNotice(context: IContext): Child[] {
  const others = context.chosen.flatMap(entry => {
    const choosing = Choosing.of(context, entry);
    return choosing?.isOther === true ? [choosing.options] : [];
  });
  return others.length === 0
    ? []
    : [soft(`Forward and backward follow the choice in the tab Memory (${others.join('; ')}), not this run.`)];
}

/** The entry with the nodes and the saved values of the reader's choice, if it is another one than this run's. */
export function withChoice(context: IContext, entry: IEntry): IEntry {
  const { frame, graph } = entry;
  const choosing = Choosing.of(context, entry);
  const nodes = graph.nodes.length > 0 ? graph.nodes : context.source.nodes(frame.name, graph.index);
  return choosing?.isOther !== true || nodes === null ? entry : { ...entry, graph: choosing.graphOf(graph, nodes) };
}
