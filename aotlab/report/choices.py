"""Model the choices of saved values of a graph: the saved values, recomputed ops and the peak of each memory budget."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import replace

from aotlab.errors import UserLine
from aotlab.ir.fx_graphs import NodeRecord, shares_memory
from aotlab.partition.joint_values import BudgetChoice, JointValues, Plan
from aotlab.report.memory import GraphPair, graph_memory
from aotlab.report.model import BudgetRow, Choices, Input, Memory, Result
from aotlab.report.text import in_cell, known_size

#: The value of `JointValues.fuses` of a value that is computed inside of the kernels that read it.
INLINED = 2


def graph_choices(
    values: JointValues,
    saved_names: Collection[str],
    partitioner: str,
    inputs: Collection[Input],
    results: Sequence[Result],
    *,
    fuses: bool,
) -> Choices:
    """Describe the choices of saved values of a graph.

    ``saved_names`` are the values that the graph saves now, as ``partitioner`` chose them. ``inputs`` and ``results``
    are rows of the graph. ``fuses`` says whether the backend fuses ops.
    """
    if not fuses:
        values = replace(values, fuses=(0,) * len(values.nodes))
    named = [
        replace(node, inputs=tuple([values.nodes[each].name for each in values.inputs[n]]))
        for n, node in enumerate(values.nodes)
    ]
    values = replace(values, nodes=tuple(named))
    names = [node.name for node in values.nodes]
    now = BudgetChoice(
        budget=None, saved=frozenset([n for n, name in enumerate(names) if name in saved_names]), copies=True
    )
    if values.copies.isdisjoint(now.saved) and not values.unsure:
        now = replace(now, copies=False)

    def memory_of(plan: Plan) -> Memory:
        return graph_memory(_pair(values, plan), inputs, results)

    current = _row(values, now, partitioner, memory_of)
    titles = [("default" if choice.budget is None else "min-cut", choice) for choice in values.budgets()]
    rows = [_row(values, choice, title, memory_of) for title, choice in titles]
    rows = [replace(row, current=_alike(row, current)) for i, row in enumerate(rows) if not _alike(row, *rows[:i])]
    if not any(row.current for row in rows):
        rows.append(replace(current, current=True))
    return _with_columns(Choices(rows=tuple(rows)), values, inputs, {row.name for row in results if _is_write(row)})


def _is_write(row: Result) -> bool:
    return row.kind.startswith("mutated") and not row.in_graph


def _alike(row: BudgetRow, *others: BudgetRow) -> bool:
    return any((row.saved, row.recomputed) == (other.saved, other.recomputed) for other in others)


def _row(values: JointValues, choice: BudgetChoice, partitioner: str, memory_of: Callable[[Plan], Memory]) -> BudgetRow:
    view = values if choice.copies else values.without_copies()
    plan = view.plan(choice.saved)
    costs = {n: values.costs[n].recompute or 0 for n in plan.again}
    return BudgetRow(
        partitioner=partitioner,
        budget=choice.budget,
        saved=plan.saved,
        copies=choice.copies,
        saved_bytes=values.held_bytes(plan.saved),
        peak_bytes=max(memory_of(plan).totals()),
        recomputed=sum(
            cost > 0 and not shares_memory(values.nodes[n], [values.nodes[each] for each in view.inputs[n]])
            for n, cost in costs.items()
        ),
        cost=round(sum(costs.values()) / max(values.traffic, 1), 4),
    )


def _pair(values: JointValues, plan: Plan) -> GraphPair:
    """Return the forward and the backward graph that a plan leads to."""
    nodes = values.nodes
    tangent_positions = [n for n, node in enumerate(nodes) if _is_tangent(node)]
    tangents = [nodes[n] for n in tangent_positions]
    outputs = [nodes[n].name if n >= 0 else "" for n in values.outputs]
    fresh = 1 + max((number for node in nodes for number, _ in node.storages), default=0)
    clones: dict[str, NodeRecord] = {}
    for n in plan.saved:
        node = nodes[n]
        if node.spec is not None and any(number in values.written for number, _ in node.storages):
            own = ((fresh + n, node.spec.nbytes),)
            clones[node.name] = replace(node, name=f"{node.name}_clone", op="call_function", storages=own)
    saved = [clones.get(nodes[n].name, nodes[n]) for n in plan.saved]
    inputs = [n for n in plan.early if nodes[n].op == "placeholder"]
    early = _stored(values, plan.early, inputs, {*plan.saved, *values.outputs})
    late = _stored(values, plan.late, [*plan.saved, *tangent_positions], values.gradients)
    placeholders = [
        replace(each, name=nodes[n].name, op="placeholder", inputs=())
        for n, each in zip(plan.saved, saved, strict=True)
    ]
    returned = (*outputs, *[each.name for each in saved])
    gradients = tuple([nodes[n].name if n >= 0 else "" for n in values.gradients])
    return GraphPair(
        forward=(*early, *clones.values(), _output(returned)),
        backward=(*placeholders, *tangents, *late, _output(gradients)),
        returned=returned,
        output_count=len(outputs),
        saved_names=tuple([each.name for each in placeholders]),
    )


def _output(returned: tuple[str, ...]) -> NodeRecord:
    return NodeRecord(
        name="output",
        op="output",
        target="output",
        phase="forward",
        spec=None,
        inputs=returned,
        users=0,
        line=None,
        module="",
    )


def _is_tangent(node: NodeRecord) -> bool:
    return node.op == "placeholder" and "tangents" in node.target


def _stored(
    values: JointValues, order: Sequence[int], given: Collection[int], returned: Collection[int]
) -> list[NodeRecord]:
    """Return nodes in the order in which they run, without the storages of values that the compiler fuses away.

    ``given`` are the inputs of the graph, and ``returned`` its results.
    """
    nodes, fuses = values.nodes, values.fuses

    def storages(some: Iterable[int]) -> set[int]:
        return {number for n in some if n >= 0 for number, _ in nodes[n].storages}

    inlined: set[int] = set()
    stored, made = storages(returned), storages(given)
    for n in order:
        own = storages([n])
        (inlined if fuses[n] == INLINED else stored).update(own - made)
        made |= own
        if fuses[n] == 0:
            stored |= storages(values.inputs[n]) - own
    gone = inlined - stored
    return [
        replace(nodes[n], storages=tuple([each for each in nodes[n].storages if each[0] not in gone]))
        if any(number in gone for number, _ in nodes[n].storages)
        else nodes[n]
        for n in order
    ]


class _Table:
    """Numbers the distinct items of a column, in the order in which they occur."""

    def __init__(self) -> None:
        self.items: dict[Hashable, int] = {}

    def __call__(self, item: Hashable) -> int:
        return self.items.setdefault(item, len(self.items))


def _with_columns(choices: Choices, values: JointValues, inputs: Iterable[Input], writes: Collection[str]) -> Choices:
    nodes, costs = values.nodes, values.costs
    storages, bans, lines, modules = _Table(), _Table(), _Table(), _Table()
    memory = graph_memory(_pair(values, values.plan(())), list(inputs), ())
    parameters = {name for name, kind in zip(memory.names, memory.kinds, strict=True) if kind == "parameters"}
    sizes = {storages(number): known_size(size) for node in nodes for number, size in node.storages}

    cloned = [
        (n, node.spec)
        for n, node in enumerate(nodes)
        if node.spec is not None and any(number in values.written for number, _ in node.storages)
    ]

    def role(node: NodeRecord) -> int:
        if node.op != "placeholder":
            return 0
        return 3 if _is_tangent(node) else 1 if node.name in parameters else 2

    def ban(n: int) -> int:
        return bans(costs[n].ban) if n in costs and costs[n].recompute is None else -1

    def line(found: UserLine | None) -> int:
        return -1 if found is None else lines(in_cell(found))

    return replace(
        choices,
        names=tuple([node.name for node in nodes]),
        roles=tuple(map(role, nodes)),
        inputs=tuple([values.inputs[n] for n in range(len(nodes))]),
        storages=tuple([tuple([storages(number) for number, _ in node.storages]) for node in nodes]),
        nbytes=tuple([costs[n].nbytes if n in costs and costs[n].save is not None else -1 for n in range(len(nodes))]),
        again=tuple([_or_minus(costs[n].recompute if n in costs else None) for n in range(len(nodes))]),
        bans=tuple(map(ban, range(len(nodes)))),
        fuses=values.fuses,
        lines=tuple([line(node.line) for node in nodes]),
        modules=tuple([modules(node.module) for node in nodes]),
        storage_bytes=tuple([sizes[n] for n in range(len(sizes))]),
        needed=tuple(sorted(values.needed)),
        early=tuple(sorted(values.early)),
        late=tuple(sorted(values.late)),
        outputs=tuple([n for n in values.outputs if n >= 0 and nodes[n].name not in writes]),
        writes=tuple([n for n in values.outputs if n >= 0 and nodes[n].name in writes]),
        gradients=tuple([n for n in values.gradients if n >= 0]),
        copies=tuple(sorted(values.copies)),
        cloned=tuple([n for n, _ in cloned]),
        cloned_bytes=tuple([known_size(spec.nbytes) for _, spec in cloned]),
        ban_table=tuple(map(str, bans.items)),
        line_table=tuple([each for each in lines.items if isinstance(each, UserLine)]),
        module_table=tuple(map(str, modules.items)),
        traffic=values.traffic,
    )


def _or_minus(cost: int | None) -> int:
    return -1 if cost is None else cost
