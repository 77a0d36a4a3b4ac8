"""Model the memory of a training step from its graphs: which storage is alive at which op.

The model follows the generated code. A temporary value is freed after its last use. The results of the forward are
alive until the forward returns. The caller holds parameters, inputs and outputs. A saved value is freed after its last
use in the backward, because compiled graphs are boxed: they empty the list of their inputs. Incoming gradients are
alive during the whole backward. A view keeps the storage of its base alive.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from aotlab.errors import UserLine
from aotlab.ir.fx_graphs import NodeRecord
from aotlab.ir.specs import Size, SymExpr
from aotlab.report.model import Input, Memory, Result
from aotlab.report.text import in_cell, known_size


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPair:
    """The nodes of a forward graph and of its backward graph, after partitioning.

    ``returned`` has the names of the nodes that the forward returns, with an empty name for None. The first
    ``output_count`` of them are forward outputs, and the others are the saved values. ``saved_names`` are the names of
    the saved values' placeholders in the backward.
    """

    forward: tuple[NodeRecord, ...]
    backward: tuple[NodeRecord, ...]
    returned: tuple[str, ...]
    output_count: int
    saved_names: tuple[str, ...]


@dataclass(slots=True, eq=False)
class _Storage:
    """A storage that ``node`` allocates; ``begin`` and ``end`` are positions in the list of all nodes."""

    node: NodeRecord
    module: str
    nbytes: Size
    kind: str
    begin: int
    end: int


@dataclass(slots=True)
class _Lifetimes:
    """The storages of both graphs, in the order of their allocation.

    ``of_nodes`` maps the name of a node in the present graph to the storages of its value.
    """

    storages: list[_Storage] = field(default_factory=list)
    of_nodes: dict[str, list[_Storage]] = field(default_factory=dict)

    def run(self, nodes: Sequence[NodeRecord], start: int, given: Mapping[str, Sequence[_Storage]], kind: str) -> None:
        """Walk through a graph whose first node has the position ``start``.

        ``given`` has the storages of placeholders that exist already. ``kind`` is the kind of other placeholders.
        """
        self.of_nodes = {}
        numbered: dict[int, _Storage] = {}
        for node in nodes:
            if node.op == "placeholder":
                numbered.update(zip([number for number, _ in node.storages], given.get(node.name, ()), strict=False))
        for position, node in enumerate(nodes, start):
            is_input = node.op == "placeholder"
            for number, nbytes in node.storages:
                if number not in numbered:
                    begin, kind_of = (start, kind) if is_input else (position, "temporary")
                    numbered[number] = _Storage(node, node.module, nbytes, kind_of, begin, position)
                    self.storages.append(numbered[number])
            self.of_nodes[node.name] = [numbered[number] for number, _ in node.storages]
            if not is_input and node.op != "output":
                self.keep((*node.inputs, node.name), position)

    def keep(self, names: Iterable[str], position: int) -> list[_Storage]:
        """Let the storages of the nodes ``names`` live at least until ``position``, and return them."""
        storages = [each for name in names for each in self.of_nodes.get(name, ())]
        for each in storages:
            each.end = max(each.end, position)
        return storages


def graph_memory(
    pair: GraphPair,
    inputs: Collection[Input],
    results: Sequence[Result],
    *,
    generated: Sequence[NodeRecord] = (),
    backwards: Sequence[Sequence[NodeRecord]] = (),
    receivers: Sequence[Sequence[str]] = (),
) -> Memory:
    """Model the memory of a training step.

    Parameters
    ----------
    pair
        The graphs.
    inputs, results
        The rows about the arguments, and about the traced graph's outputs. Dynamo's graphs do not say which arguments
        are buffers. So an attribute of a module with parameters counts as a buffer.
    generated
        The statements of the forward's generated code, which run in place of the nodes of ``pair.forward``.
    backwards
        The backwards that run in place of ``pair.backward``, one after another: other graphs, or generated code. A
        function with several autograd nodes has a backward for each of them.
    receivers
        For each of ``backwards``, the names of the inputs, outputs and nodes that receive its gradients.
    """
    forward, backwards = generated or pair.forward, backwards or [pair.backward] * bool(pair.backward)
    returned = generated[-1].inputs if generated else pair.returned
    lifetimes = _Lifetimes()
    # The positions: the nodes of the forward (its `output` node is the end of the forward), then of the backwards.
    forward_end = len(forward) - 1
    end = forward_end + sum(map(len, backwards))
    lifetimes.run(forward, 0, {}, "inputs")
    lifetimes.keep([node.name for node in forward if node.op == "placeholder"], end)
    modules = {_module_of(row) for row in inputs if _is_parameter(row)} - {""}
    tops = {node.module.partition(".")[0] for node in forward} - {""}
    for row in inputs:
        if _is_parameter(row) or _module_of(row) in modules:
            for each in lifetimes.of_nodes.get(row.placeholder, ()):
                each.kind, each.module = "parameters", below(_module_of(row), tops)
    lifetimes.keep(returned, forward_end)
    writes = {row.name for row in results if row.kind.startswith("mutated") and not row.in_graph}
    is_write = [name in writes for name in pair.returned[: pair.output_count]]
    outputs = [name for name, write in zip(returned, is_write, strict=False) if not write]
    written = [name for name, write in zip(returned, is_write, strict=False) if write]
    for each in _temporary(lifetimes.keep(outputs, end)):
        each.kind = "outputs"
    saved = {
        name: lifetimes.of_nodes.get(node, [])
        for node, name in zip(returned[pair.output_count :], pair.saved_names, strict=False)
    }
    new_values = {id(each) for name in written for each in lifetimes.of_nodes.get(name, ()) if _on_cpu(each)}
    if backwards:
        # On the CPU, the tensor into which a new value is copied is saved in place of the value. All saved values are
        # alive until the last backward begins.
        for each in _temporary(storage for storages in saved.values() for storage in storages):
            if id(each) not in new_values:
                each.kind, each.end = "saved", end - len(backwards[-1]) + 1
        given = lifetimes.of_nodes | {
            name: [replace(each) if id(each) in new_values else each for each in storages]
            for name, storages in saved.items()
        }
        _run_backwards(lifetimes, backwards, receivers, {row.name for row in inputs}, forward_end + 1, given)
    return replace(_record(lifetimes.storages, forward_end, end), from_code=bool(generated))


def _run_backwards(
    lifetimes: _Lifetimes,
    backwards: Sequence[Sequence[NodeRecord]],
    receivers: Sequence[Sequence[str]],
    inputs: Collection[str],
    start: int,
    given: Mapping[str, Sequence[_Storage]],
) -> None:
    """Walk through the backwards, the first of which has the position ``start``.

    ``receivers`` has, for each backward, the names of the tensors and nodes that receive its gradients. Autograd adds
    up the gradients of an input, so the first of them stays alive. A backward's tangent is a gradient that an earlier
    backward returned for no input, if there is one of the same size.
    """
    gradients: dict[str, list[_Storage]] = {}
    passed_on: list[_Storage] = []
    if len(receivers) != len(backwards):
        receivers = [()] * len(backwards)
    for backward, names in zip(backwards, receivers, strict=True):
        given_here = dict(given)
        tangents = [node for node in backward if node.op == "placeholder" and "tangents" in node.target]
        for node in tangents:
            same = [each for each in passed_on if [each.nbytes] == [nbytes for _, nbytes in node.storages]][:1]
            given_here.update({node.name: same} if same else {})
            passed_on = [each for each in passed_on if each not in same]
        lifetimes.run(backward, start, given_here, "gradients")
        start += len(backward)
        lifetimes.keep([node.name for node in tangents], start - 1)
        returned = backward[-1].inputs
        for name, receiver in zip(returned, names if len(names) == len(returned) else returned, strict=True):
            storages = lifetimes.keep([name], start - 1)
            for each in _temporary(storages):
                each.kind = "gradients"
            if receiver in inputs or receiver == name:
                gradients.setdefault(receiver, storages)
            else:
                passed_on += [each for each in storages if each.kind == "gradients"]
    for each in (each for storages in gradients.values() for each in storages):
        each.end = start - 1


def _is_parameter(row: Input) -> bool:
    kind = row.tensor.type_name if row.tensor is not None else ""
    return row.kind in ("parameter", "buffer") or kind.endswith(".Parameter")


def _module_of(row: Input) -> str:
    """Return the path of the module that an argument belongs to, in the form in which nodes have it."""
    return row.name.rpartition(".")[0].removeprefix("self.").removeprefix("fn.")


def below(path: str, tops: Collection[str]) -> str:
    """Return the part of a module's path that begins with one of ``tops``, or else the whole path.

    The paths of nodes begin at the module whose code Dynamo captured, which may be a part of the user's module.
    """
    parts = path.split(".")
    return next((".".join(parts[n:]) for n, part in enumerate(parts) if part in tops), path)


def _temporary(storages: Iterable[_Storage]) -> list[_Storage]:
    return [each for each in storages if each.kind == "temporary"]


def _on_cpu(storage: _Storage) -> bool:
    spec = storage.node.spec
    return spec is None or spec.device.type == "cpu"


def _record(storages: Sequence[_Storage], forward_end: int, end: int) -> Memory:
    """Return the record: number the steps, and write the storages in columns."""
    starts = {0, forward_end, *([forward_end + 1, end] if end > forward_end else ())}
    steps = sorted(starts | {each.begin for each in storages})

    def step(position: int) -> int:
        return bisect_right(steps, position) - 1

    lines: dict[UserLine, int] = {}
    modules: dict[str, int] = {}
    return Memory(
        steps=len(steps),
        forward_steps=step(forward_end) + 1,
        names=tuple([each.node.name for each in storages]),
        kinds=tuple([each.kind for each in storages]),
        nbytes=tuple([known_size(each.nbytes) for each in storages]),
        begins=tuple([step(each.begin) for each in storages]),
        ends=tuple([step(each.end) for each in storages]),
        lines=tuple(
            [
                -1 if (line := each.node.line) is None else lines.setdefault(in_cell(line), len(lines))
                for each in storages
            ]
        ),
        modules=tuple([modules.setdefault(each.module, len(modules)) for each in storages]),
        line_table=tuple(lines),
        module_table=tuple(modules),
        unknown=sum(isinstance(each.nbytes, SymExpr) and each.nbytes.hint is None for each in storages),
    )
