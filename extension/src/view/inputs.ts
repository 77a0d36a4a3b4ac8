/** Inputs: what each tensor is and what happened to it; those of one module with the same fate stand in one row. */

import { inTrees, mutated, wholes } from '../model/counts';
import type { Input } from '../model/report';
import { amount, dataSize, grouped, known } from '../model/words';
import type { Context } from './context';
import { h, heading, mark, soft } from './dom';
import type { Child } from './dom';
import { byGraph, graphColumn, graphData, ofGraphs, rowsOf, total } from './graph';
import type { OfGraph } from './graph';
import { MUTATION_TYPES, mutationLegend } from './legend';
import { table } from './table';
import type { Column } from './table';
import { autograd, inGraph, partName, storageCell, tensorCell } from './tensor';

/** An input, or several in one row. */
interface Row extends OfGraph<Input> {
  readonly group: readonly Input[] | null;
  /** How deep it lies in a wrapper. */
  readonly depth: number;
}

/** So many inputs that nothing happened to, and so many to which the same happened, are worth a row for all of them. */
const LEAST_QUIET = 3;
const LEAST_CHANGED = 8;

const MEANINGS: ReadonlyMap<string, string> = new Map(MUTATION_TYPES);

/** Say what happened to an input, and with whom it shares memory: one mark for each. */
export function happenings(row: Input): HTMLElement[] {
  const marks: HTMLElement[] = [];
  const add = (said: boolean | null, text: string, tone: string, help = ''): void => {
    if (said === true) {
      const made = mark(text, tone);
      made.title = help;
      marks.push(made);
    }
  };
  add(row.varies && row.tensor === null, 'any number', 'plain', 'The same graph serves other numbers too');
  add(row.kind === 'new', 'new', 'plain', 'There was no such gradient before');
  add(row.mutates_data, 'data mutated', 'write', 'Its values changed');
  add(row.mutates_metadata, 'metadata mutated', 'write', 'Its sizes, strides or offset changed');
  add(row.mutates_storage, 'storage replaced', 'write', 'It was given other memory');
  if (mutated(row)) {
    const type = row.mutation_type ?? '';
    // Without a gradient there is nothing that a write could be hidden from.
    const hidden = row.mutation_hidden_from_autograd === true && row.tensor?.requires_grad === true;
    add(hidden, 'hidden from autograd', 'plain', 'Every write went through detach() or the like');
    add(row.mutation_under_no_grad, 'under no_grad', 'plain', 'Every write happened under no_grad or inference_mode');
    add(type.startsWith('mutated '), type.replace('mutated ', ''), 'plain', MEANINGS.get(type));
    row.steps.forEach(step => add(true, step, 'write'));
  }
  add(row.synthetic_base !== null, `window of synthetic base ${row.synthetic_base}`, 'alias');
  add(row.duplicate_of !== null, `same tensor as ${row.duplicate_of}`, 'alias');
  add(row.overlaps.length > 0, `shares bytes with ${row.overlaps.join(', ')}`, 'alias');
  const becomes = row.requires_grad_after !== null && row.requires_grad_after !== (row.tensor?.requires_grad ?? false);
  add(becomes, `requires_grad becomes ${row.requires_grad_after === true ? 'True' : 'False'}`, 'brand');
  return marks;
}

function happened({ row, group }: Row): Child {
  const marks = happenings(row);
  if (marks.length === 0) {
    return row.tensor === null && group === null ? null : soft(row.mutates_data === null ? 'not traced' : '–');
  }
  return h('span', { class: 'al-marks' }, ...marks);
}

/** The columns; what stands for each tensor in the graph is told where some are parts of wrappers. */
function columns(context: Context, trees: boolean): readonly Column<Row>[] {
  return [
    { name: 'name', title: 'name', kind: 'code', cell: row => nameCell(context, row) },
    ...graphColumn<Input>(context),
    { name: 'kind', title: 'kind', lesser: '', cell: ({ row }) => row.kind },
    {
      name: 'placeholder',
      title: 'graph input',
      help: 'The graph’s input that stands for it, and what is its gradient in the graph',
      kind: 'code',
      lesser: '→ ',
      cell: ({ row, group }) => (group === null && trees ? inGraph(row.placeholder, row.gradient && `gradient ${row.gradient}`) : null)
    },
    {
      name: 'tensor',
      title: 'tensor or value',
      help: 'Element type, sizes, and what is unusual about it; of what is no tensor, the value',
      kind: 'code',
      lesser: '',
      cell: ({ row, group }) => (group !== null ? null : row.tensor === null ? row.value : tensorCell(row.tensor))
    },
    {
      name: 'nbytes',
      title: 'bytes',
      kind: 'number',
      value: ({ row }) => known(row.tensor?.nbytes ?? null),
      cell: ({ row, group }) => (group === null ? (row.tensor === null ? null : dataSize(row.tensor.nbytes)) : dataSize(bytes(group)))
    },
    {
      name: 'storage',
      title: 'storage',
      help: 'Its storage in the storage map',
      kind: 'number',
      lesser: '',
      value: ({ row }) => row.storage,
      cell: ({ row, group }) => (group === null ? storageCell(row.storage) : null)
    },
    {
      name: 'autograd',
      title: 'autograd',
      help: 'Whether it required grad at the call, and was a leaf',
      lesser: '',
      cell: ({ row }) => autograd(row.tensor?.requires_grad ?? false, row.tensor?.is_leaf ?? true)
    },
    { name: 'happened', title: 'what happened to it', help: 'How it was mutated, and what it shares memory with', kind: 'words', cell: happened }
  ];
}

function bytes(rows: readonly Input[]): number {
  return rows.reduce((sum, row) => sum + (known(row.tensor?.nbytes ?? 0) ?? 0), 0);
}

// Groups

/** What a tensor is called among others of its kind. */
function noun(row: Input): string {
  if (row.kind === 'parameter' || row.tensor?.type_name === 'torch.nn.parameter.Parameter') {
    return 'parameter';
  }
  return row.kind === 'buffer' ? 'buffer' : row.name.endsWith('.grad') ? 'gradient' : 'tensor';
}

/** The variable that a tensor belongs to, `model` of `model.0.weight`; empty if it is one by itself. */
function owner(row: Input): string {
  const end = row.name.search(/[.[]/);
  return end > 0 && row.tensor !== null ? row.name.slice(0, end) : '';
}

/** What inputs have in common that may share a row; empty for one that shares memory: each alias has its own. */
function groupKey({ entry, row }: OfGraph<Input>): string {
  const alone = row.duplicate_of !== null || row.overlaps.length > 0 || row.synthetic_base !== null;
  if (owner(row) === '' || alone) {
    return '';
  }
  const fate = happenings(row).map(each => each.textContent);
  return JSON.stringify([entry?.key, owner(row), noun(row), row.tensor?.requires_grad, row.mutates_data, fate]);
}

/** Put inputs that belong together behind one row, which the reader opens; parts of wrappers go with these. */
function withGroups(context: Context, rows: readonly Row[], wholeOf: ReadonlyMap<Input, Input>): Row[] {
  const keys = new Map(rows.map(each => [each.row, groupKey(each)]));
  const groups = new Map<string, Input[]>();
  for (const { row } of rows.filter(({ depth }) => depth === 0)) {
    const key = keys.get(row) ?? '';
    groups.set(key, groups.get(key) ?? []).get(key)?.push(row);
  }
  return rows.flatMap(own => {
    const whole = wholeOf.get(own.row) ?? own.row;
    const key = keys.get(whole) ?? '';
    const group = groups.get(key) ?? [];
    if (key === '' || group.length < (mutated(whole) ? LEAST_CHANGED : LEAST_QUIET)) {
      return [own];
    }
    const head = group[0] === own.row ? [{ ...own, group }] : [];
    return context.folds.get(`inputs ${key}`) === true ? [...head, own] : head;
  });
}

function nameCell(context: Context, { entry, row, group, depth }: Row): Child {
  if (group === null) {
    return partName(row, depth);
  }
  const key = `inputs ${groupKey({ entry, row })}`;
  const open = context.folds.get(key) === true;
  const button = h(
    'button',
    { type: 'button', class: 'al-opener', 'data-key': key, 'data-group': '', 'aria-expanded': String(open) },
    `${amount(group.length, noun(row))} of ${owner(row)}`
  );
  button.addEventListener('click', () => {
    context.folds.set(key, !open);
    context.redraw();
  });
  return button;
}

/** A table of inputs; `all` is how many there were before the report was cut. */
function inputTable(context: Context, name: string, label: string, rows: readonly OfGraph<Input>[], all: number): HTMLElement {
  const single: Row[] = [];
  const wholeOf = new Map<Input, Input>();
  for (const some of byGraph(rows)) {
    inTrees(some.map(({ row }) => row)).forEach(({ row, whole, depth }) => {
      wholeOf.set(row, whole);
      single.push({ entry: some[0]?.entry ?? null, row, depth, group: null });
    });
  }
  const shown = withGroups(context, single, wholeOf);
  const known = columns(context, single.some(({ depth }) => depth > 0)).filter(column => single.some(row => (column.cell(row) ?? '') !== ''));
  return table<Row>(context, {
    name,
    meanings: 'inputs',
    label,
    columns: known,
    rows: shown,
    all: single,
    total: shown.length + all - wholes(rows.map(({ row }) => row)).length,
    key: ({ row }) => row.name,
    tone: ({ row }) => (mutated(row) ? 'al-written' : null),
    rowData: row => (row.group === null ? graphData(row) : { 'data-group': '' })
  });
}

/** Draw the panel. */
export function inputsPanel(context: Context): Child[] {
  const drawn: Child[] = [];
  const rows = rowsOf(context, graph => graph.inputs);
  const all = total(context, counts => counts.inputs);
  if (all > 0) {
    const changed = total(context, counts => counts.mutated);
    const tensors = rows.filter(({ row }) => row.tensor !== null);
    const traced = tensors.length === 0 || tensors.some(({ row }) => row.mutates_data !== null);
    drawn.push(
      heading('Inputs', `${amount(all, 'input')}${ofGraphs(context)}, ${traced ? `${grouped(changed)} mutated` : 'not traced'}`),
      inputTable(context, 'inputs', 'Inputs of the graphs', rows, all)
    );
  }
  const outside = (context.report.cell?.mutated_outside ?? []).map(row => ({ entry: null, row }));
  const { outside: allOutside, new: fresh } = context.head;
  if (allOutside > 0) {
    const changed = allOutside - fresh;
    const told = [changed > 0 ? `${amount(changed, 'tensor')} that the cell changed in Python or in autograd` : '']
      .concat(fresh > 0 ? amount(fresh, 'new gradient') : '');
    const label = 'Tensors that the cell changed or made outside of every compiled graph';
    drawn.push(
      heading('Outside the graphs', told.filter(each => each !== '').join(', ')),
      inputTable(context, 'outside', label, outside, allOutside)
    );
  }
  if (drawn.length === 0) {
    drawn.push(soft(context.chosen.length > 0 ? 'None, or none that are known.' : 'Nothing was compiled, so no inputs were recorded.'));
  }
  drawn.push(mutationLegend(context));
  return drawn;
}
