/**
 * Inputs: the description of each tensor and its changes. Many inputs of one variable that changed in the same way are
 * a group with one row.
 */

import type { Group, Input } from '../model/report';
import { inTrees, mutated, withoutParts } from '../model/rows';
import { amount, dataSize, grouped, sizeValue } from '../model/words';
import type { IContext } from './context';
import { h, heading, mark, soft } from './dom';
import type { Child } from './dom';
import { byGraph, graphColumn, graphData, ofGraphs, rowsOf, total } from './graph';
import type { IGraphRow } from './graph';
import { MUTATION_TYPES, mutationLegend } from './legend';
import { table } from './table';
import type { Column } from './table';
import { autograd, inGraph, partName, storageCell, tensorCell } from './tensor';

/** The row of an input, or of a group of inputs (`row` is then the first of them). */
interface IRow extends IGraphRow<Input> {
  readonly group: Group | null;
  /** Its depth in the tree of a wrapper and its parts; 0 for an argument. */
  readonly depth: number;
}

const MEANINGS: ReadonlyMap<string, string> = new Map(MUTATION_TYPES);

/** List as marks the changes of an input, and the inputs that it shares memory with. */
export function changeMarks(row: Input): HTMLElement[] {
  const marks: HTMLElement[] = [];
  const add = (applies: boolean | null, text: string, tone: string, help = ''): void => {
    if (applies === true) {
      const pill = mark(text, tone);
      pill.title = help;
      marks.push(pill);
    }
  };
  add(row.varies && row.tensor === null, 'any number', 'plain', 'The same graph serves other numbers too');
  add(row.kind === 'new', 'new', 'plain', 'This gradient did not exist before');
  add(row.mutates_data, 'data mutated', 'write', 'Its values changed');
  add(row.mutates_metadata, 'metadata mutated', 'write', 'Its sizes, strides or offset changed');
  add(row.mutates_storage, 'storage replaced', 'write', 'It got other memory');
  if (mutated(row)) {
    const type = row.mutation_type ?? '';
    // A write can be hidden from autograd only if the tensor requires grad.
    const hidden = row.mutation_hidden_from_autograd === true && row.tensor?.requires_grad === true;
    add(hidden, 'hidden from autograd', 'plain', 'Every write was hidden from autograd, for example by detach()');
    add(row.mutation_under_no_grad, 'under no_grad', 'plain', 'Every write happened under no_grad or inference_mode');
    add(type.startsWith('mutated '), type.replace('mutated ', ''), 'plain', MEANINGS.get(type));
    row.steps.forEach(step => add(true, step, 'write'));
  }
  const windowOf = row.kind === 'base' ? '' : 'window of ';
  add(row.synthetic_base !== null, `${windowOf}synthetic base ${row.synthetic_base}`, 'alias');
  add(row.duplicate_of !== null, `same tensor as ${row.duplicate_of}`, 'alias');
  add(row.overlaps.length > 0, `shares bytes with ${row.overlaps.join(', ')}`, 'alias');
  const changesRequiresGrad =
    row.requires_grad_after !== null && row.requires_grad_after !== (row.tensor?.requires_grad ?? false);
  add(changesRequiresGrad, `requires_grad becomes ${row.requires_grad_after === true ? 'True' : 'False'}`, 'brand');
  return marks;
}

function changesCell({ row, group }: IRow): Child {
  const marks = changeMarks(row);
  if (marks.length === 0) {
    return row.tensor === null && group === null ? null : soft(row.mutates_data === null ? 'not traced' : '–');
  }
  return h('span', { class: 'al-marks' }, ...marks);
}

/**
 * The columns of the table. `hasParts` says that some tensors are parts of wrappers; only then placeholders are shown.
 */
function columns(context: IContext, hasParts: boolean): readonly Column<IRow>[] {
  return [
    { name: 'name', title: 'name', kind: 'code', cell: row => nameCell(context, row) },
    ...graphColumn<Input>(context),
    { name: 'kind', title: 'kind', lesser: '', cell: ({ row }) => row.kind },
    {
      name: 'placeholder',
      title: 'graph input',
      help: 'Its placeholder in the graph, and the node that computes its gradient',
      kind: 'code',
      lesser: '→ ',
      cell: ({ row, group }) =>
        group === null && hasParts ? inGraph(row.placeholder, row.gradient && `gradient ${row.gradient}`) : null
    },
    {
      name: 'tensor',
      title: 'tensor or value',
      help: 'Element type, sizes and unusual properties of a tensor; the value of another argument',
      kind: 'code',
      lesser: '',
      cell: ({ row, group }) => (group !== null ? null : row.tensor === null ? row.value : tensorCell(row.tensor))
    },
    {
      name: 'nbytes',
      title: 'bytes',
      kind: 'number',
      value: ({ row }) => sizeValue(row.tensor?.nbytes ?? null),
      cell: ({ row, group }) =>
        group === null ? (row.tensor === null ? null : dataSize(row.tensor.nbytes)) : dataSize(group.nbytes)
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
    {
      name: 'happened',
      title: 'what happened to it',
      help: 'Its mutations, and the tensors that share memory with it',
      kind: 'words',
      cell: changesCell
    }
  ];
}

// Groups. Python forms and counts them before a report is cut.

/** The group that an input belongs to. */
function groupOf(context: IContext, { entry, row }: IGraphRow<Input>): Group | null {
  const groups = entry === null ? (context.report.cell?.groups ?? []) : entry.graph.input_groups;
  return row.group === null ? null : (groups[row.group] ?? null);
}

function groupKey({ entry, row }: IGraphRow<Input>): string {
  return `inputs ${entry?.key ?? ''} ${row.group}`;
}

/** Put a row for each group in the place of its inputs. If the reader opened the group, its inputs follow. */
function withGroups(context: IContext, rows: readonly IRow[]): IRow[] {
  const startedGroups = new Set<string>();
  return rows.flatMap(inputRow => {
    const group = groupOf(context, inputRow);
    if (group === null) {
      return [inputRow];
    }
    const key = groupKey(inputRow);
    const groupRows = startedGroups.has(key) ? [] : [{ ...inputRow, group }];
    startedGroups.add(key);
    return context.folds.get(key) === true ? [...groupRows, inputRow] : groupRows;
  });
}

/**
 * Return how many of `inputCount` inputs were cut. Inputs that were cut from a closed group do not count, because the
 * row of the group has the number of its inputs. `rows` are the inputs in the report, and `tableRows` the rows of the
 * table.
 */
function cutInputCount(
  context: IContext,
  inputCount: number,
  rows: readonly IGraphRow<Input>[],
  tableRows: readonly IRow[]
): number {
  const present = withoutParts(rows.map(({ row }) => row));
  const cutFromGroups = tableRows.map(groupRow => {
    const closed = groupRow.group !== null && context.folds.get(groupKey(groupRow)) !== true;
    const members = rows.filter(({ entry, row }) => entry === groupRow.entry && row.group === groupRow.row.group);
    return closed ? groupRow.group.count - withoutParts(members.map(({ row }) => row)).length : 0;
  });
  return inputCount - present.length - cutFromGroups.reduce((sum, count) => sum + count, 0);
}

function nameCell(context: IContext, inputRow: IRow): Child {
  const { row, group, depth } = inputRow;
  if (group === null) {
    return partName(row, depth);
  }
  const key = groupKey(inputRow);
  const open = context.folds.get(key) === true;
  const button = h(
    'button',
    { type: 'button', class: 'al-opener', 'data-key': key, 'data-group': '', 'aria-expanded': String(open) },
    group.title
  );
  button.addEventListener('click', () => {
    context.folds.set(key, !open);
    context.redraw();
  });
  return button;
}

/** A table of inputs; `inputCount` is the number of inputs before the report was cut. */
function inputTable(
  context: IContext,
  name: string,
  label: string,
  rows: readonly IGraphRow<Input>[],
  inputCount: number
): HTMLElement {
  const inputRows = byGraph(rows).flatMap(graphRows =>
    inTrees(graphRows.map(({ row }) => row)).map(({ row, depth }): IRow => ({
      entry: graphRows[0]?.entry ?? null,
      row,
      depth,
      group: null
    }))
  );
  const tableRows = withGroups(context, inputRows);
  const usedColumns = columns(
    context,
    inputRows.some(({ depth }) => depth > 0)
  ).filter(column => inputRows.some(row => (column.cell(row) ?? '') !== ''));
  return table<IRow>(context, {
    name,
    meanings: 'inputs',
    label,
    columns: usedColumns,
    rows: tableRows,
    singleRows: inputRows,
    total: tableRows.length + cutInputCount(context, inputCount, rows, tableRows),
    key: ({ row }) => row.name,
    tone: ({ row }) => (mutated(row) ? 'al-written' : null),
    rowData: row => (row.group === null ? graphData(row) : { 'data-group': '' })
  });
}

/** Draw the panel: the inputs of the chosen graphs, and the tensors that the cell changed outside of graphs. */
export function inputsPanel(context: IContext): Child[] {
  const drawn: Child[] = [];
  const rows = rowsOf(context, graph => graph.inputs);
  const inputCount = total(context, counts => counts.inputs);
  if (inputCount > 0) {
    const changed = total(context, counts => counts.mutated);
    const tensors = rows.filter(({ row }) => row.tensor !== null);
    const traced = tensors.length === 0 || tensors.some(({ row }) => row.mutates_data !== null);
    drawn.push(
      heading(
        'Inputs',
        `${amount(inputCount, 'input')}${ofGraphs(context)}, ${traced ? `${grouped(changed)} mutated` : 'not traced'}`
      ),
      inputTable(context, 'inputs', 'Inputs of the graphs', rows, inputCount)
    );
  }
  const outsideRows = (context.report.cell?.mutated_outside ?? []).map(row => ({ entry: null, row }));
  const { outside: outsideCount, new: newGradients } = context.head;
  if (outsideCount > 0) {
    const changed = outsideCount - newGradients;
    const remarks = [
      changed > 0 ? `${amount(changed, 'tensor')} that the cell changed in Python or in autograd` : ''
    ].concat(newGradients > 0 ? amount(newGradients, 'new gradient') : '');
    const label = 'Tensors that the cell changed or made outside of every compiled graph';
    drawn.push(
      heading('Outside the graphs', remarks.filter(remark => remark !== '').join(', ')),
      inputTable(context, 'outside', label, outsideRows, outsideCount)
    );
  }
  if (drawn.length === 0) {
    drawn.push(
      soft(
        context.chosen.length > 0
          ? 'None, or none that are known.'
          : 'Nothing was compiled, so no inputs were recorded.'
      )
    );
  }
  drawn.push(mutationLegend(context));
  return drawn;
}
