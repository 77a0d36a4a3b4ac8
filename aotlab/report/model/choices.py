"""Records of the choices of saved values: the values of a joint graph, and the choice of each memory budget."""

from __future__ import annotations

from dataclasses import dataclass

from aotlab.errors import UserLine
from aotlab.report.model.memory import MemoryCurve


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRow:
    """One choice of the values that the forward saves, with the memory and the time that it takes by the model.

    Attributes
    ----------
    partitioner
        ``"default"`` or ``"min-cut"``, or the name of another partitioner.
    budget
        The memory budget; None if the partitioner takes none.
    saved
        The positions of the saved values in `Choices.names`.
    copies
        Whether values are computed again from copies of the tensors that the caller can write.
    saved_bytes
        The memory that is held only for the backward.
    peak_bytes
        The peak of the modelled memory of a training step.
    recomputed
        The number of ops that the backward computes again. Views and items of results are not counted.
    cost
        The estimated time of these ops, as a fraction of the time of forward and backward without them.
    current
        Whether the graph was compiled with this choice.
    """

    partitioner: str
    budget: float | None = None
    saved: tuple[int, ...] = ()
    copies: bool = False
    saved_bytes: int = 0
    peak_bytes: int = 0
    recomputed: int = 0
    cost: float = 0.0
    current: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The values of a joint graph with their costs, from which a page models every choice of saved values.

    A value is a node of the joint graph, and has a position. Nodes that equal an earlier node are left out. Item ``i``
    of each of the tuples ``names`` to ``modules`` describes value ``i``.

    Attributes
    ----------
    names
        The names of the nodes.
    roles
        0 for an op, 1 for a parameter or buffer, 2 for another input, 3 for an incoming gradient.
    inputs
        The positions of the node's inputs.
    storages
        The positions of the storages of the value in ``storage_bytes``.
    nbytes
        The memory that is held only because the value is saved, in bytes; -1 if the value cannot be saved.
    again
        The estimated memory traffic of computing the value again from its inputs, in bytes; -1 if this is impossible.
    bans
        The index in ``ban_table`` of the reason why the value is not computed again; -1 if there is no reason.
    fuses
        2 if the compiler usually computes the value inside the kernels that read it, 1 if it usually computes the
        inputs inside of the node's kernel, 0 if inputs and result are in memory.
    lines, modules
        The index of the user line in ``line_table`` (-1 if it is unknown), and of the module in ``module_table``.
    storage_bytes
        The sizes of the storages.
    needed, early, late
        The values that the backward reads, the nodes of the forward, and the nodes that only the backward can run.
    outputs, writes, gradients
        The outputs of the forward, the new values of mutated inputs, and the results of the backward.
    copies
        The copies of values that the caller can write before the backward.
    cloned, cloned_bytes
        The values that share memory with an input that the call overwrites, and their sizes. If such a value is saved,
        a clone of it is saved.
    ban_table, line_table, module_table
        The reasons, lines and modules.
    traffic
        The estimated memory traffic of forward and backward in bytes, if nothing is computed again.
    rows
        The choices of the memory budgets, from the least memory to the most, and the choice of this graph.
    """

    names: tuple[str, ...] = ()
    roles: tuple[int, ...] = ()
    inputs: tuple[tuple[int, ...], ...] = ()
    storages: tuple[tuple[int, ...], ...] = ()
    nbytes: tuple[int, ...] = ()
    again: tuple[int, ...] = ()
    bans: tuple[int, ...] = ()
    fuses: tuple[int, ...] = ()
    lines: tuple[int, ...] = ()
    modules: tuple[int, ...] = ()
    storage_bytes: tuple[int, ...] = ()
    needed: tuple[int, ...] = ()
    early: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()
    cloned: tuple[int, ...] = ()
    cloned_bytes: tuple[int, ...] = ()
    ban_table: tuple[str, ...] = ()
    line_table: tuple[UserLine, ...] = ()
    module_table: tuple[str, ...] = ()
    traffic: int = 0
    rows: tuple[BudgetRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedChoice:
    """A choice of saved values that was compiled and measured beside the choice of the cell.

    Attributes
    ----------
    frame, graph
        The graph that was compiled again.
    partitioner, budget, save, recompute
        The choice: the options of ``%%aotcompile`` with these names.
    equal
        Whether the results equal eager's.
    forward_ns, backward_ns
        The median times; None if the phase was not timed.
    before_forward_ns, before_backward_ns
        The median times of the cell's own choice in the same run.
    curve, before
        The measured memory of this choice and of the cell's own choice; None if it could not be measured.
    """

    frame: str
    graph: int
    partitioner: str
    budget: float | None = None
    save: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    equal: bool | None = None
    forward_ns: int | None = None
    backward_ns: int | None = None
    before_forward_ns: int | None = None
    before_backward_ns: int | None = None
    curve: MemoryCurve | None = None
    before: MemoryCurve | None = None
