"""How the outputs of a traced function relate to its inputs and to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aotlab import torch_internals as internals
from aotlab.analysis.containers import is_constant
from aotlab.analysis.history import Edge, edge_of, next_edges
from aotlab.analysis.inputs import Entered, value_of
from aotlab.analysis.views import (
    canonical_base,
    common_base,
    covers_storage,
    is_new_leaf,
    is_view_of,
    or_else,
    reaches,
    views_between,
    views_from_window,
    with_detach,
)
from aotlab.errors import OutputError, SymbolicShapeError
from aotlab.guards import extent_bytes
from aotlab.ir.metadata import OutputAliasInfo, OutputType, ViewStep
from aotlab.ir.specs import StorageNumbers, spec_of
from aotlab.recorder import Tape

_OF_INPUTS = (OutputType.ALIAS_OF_INPUT, OutputType.IS_INPUT)
_LAZY = ("aten._conj.default", "aten._neg_view.default")


@dataclass(slots=True, kw_only=True)
class Outputs:
    """The outputs as read off, and what the forward graph must return for them."""

    infos: list[OutputAliasInfo] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)
    returned: list[tuple[int, Tensor, Tensor | None]] = field(default_factory=list)  # (output, value, root)
    bases: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)  # (value, root)
    tensors: dict[int, Tensor] = field(default_factory=dict)  # output → what the program returned


def read_outputs(tape: Tape, leaves: Sequence[Any], names: Sequence[str], inputs: Sequence[Entered]) -> Outputs:
    """Classify every output."""
    read = Outputs()
    storages = StorageNumbers()
    of_storage: dict[int, list[int]] = {}
    for k, item in enumerate(inputs):
        of_storage.setdefault(internals.storage_key(item.wrapper), []).append(k)
    groups: dict[int, list[int]] = {}
    values: dict[int, Tensor] = {}
    infos: dict[int, OutputAliasInfo] = {}
    for i, (leaf, name) in enumerate(zip(leaves, names, strict=True)):
        if not isinstance(leaf, Tensor):
            if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
                raise SymbolicShapeError(f"`{name}` is a symbolic number", why="that is not supported yet")
            if not is_constant(leaf):
                raise OutputError(
                    f"`{name}` is a `{type(leaf).__module__}.{type(leaf).__qualname__}`",
                    why="a compiled call would return the same object each time, holding traced tensors perhaps",
                    suggestion="return tensors, plain values and containers of them",
                )
            read.constants[i] = leaf
            kind = type(leaf)
            infos[i] = OutputAliasInfo(
                index=i, name=name, output_type=OutputType.NON_ALIAS, raw_type=kind.__qualname__, spec=None
            )
            continue
        values[i] = value_of(leaf, f"`{name}`")
        read.tensors[i] = leaf
        if vars(leaf) and not any(leaf is item.wrapper for item in inputs):
            raise OutputError(
                f"`{name}` has the attribute `{next(iter(vars(leaf)))}`",
                why="a compiled call would return a tensor without it",
                suggestion="return the value",
            )
        if leaf.is_inference() and not torch.is_inference_mode_enabled():
            raise OutputError(
                f"`{name}` was made under inference_mode inside the function",
                why="a compiled call would return an ordinary tensor",
                suggestion="use no_grad inside, or inference_mode around the call",
            )
        groups.setdefault(internals.storage_key(leaf), []).append(i)

    first_of: dict[int, int] = {}

    def info(i: int, kind: OutputType, base: int | None = None, views: tuple[ViewStep, ...] | None = None) -> None:
        first = first_of.setdefault(id(leaves[i]), i)
        infos[i] = OutputAliasInfo(
            index=i,
            name=names[i],
            output_type=kind,
            raw_type="torch.Tensor",
            spec=spec_of(leaves[i], storages),
            base_idx=base,
            requires_grad=leaves[i].requires_grad,
            views=views,
            same_as=None if first == i else first,
            under_no_grad=bool(views) and not (leaves[i].requires_grad and not leaves[i].is_leaf),
            is_new_leaf=kind not in _OF_INPUTS and is_new_leaf(leaves[i]),
        )

    roots = [t for t in [*(leaves[i] for i in values), *(item.wrapper for item in inputs)] if t.requires_grad]
    for key, members in groups.items():
        windows = of_storage.get(key)
        if windows is not None:
            for k, own in _nearest_inputs(tape, leaves, values, members, windows, inputs).items():
                _read_input_aliases(tape, leaves, values, names, own, k, inputs[k], info)
        else:
            _read_intermediate_group(tape, leaves, values, names, members, read, roots, info)
    read.infos = [infos[i] for i in range(len(leaves))]
    return read


def _nearest_inputs(
    tape: Tape,
    leaves: Sequence[Any],
    values: dict[int, Tensor],
    members: Sequence[int],
    windows: Sequence[int],
    inputs: Sequence[Entered],
) -> dict[int, list[int]]:
    """Say for each output in the memory of some inputs from which of them it is to be made.

    Raises
    ------
    OutputError
        From none of them.
    """
    if len(windows) == 1:
        return {windows[0]: list(members)}
    found: dict[int, list[int]] = {}
    for i in members:
        output = leaves[i]
        root = or_else(internals.base_of(output), output)
        related = [k for k in windows if or_else(internals.base_of(inputs[k].wrapper), inputs[k].wrapper) is root]
        same = [k for k in windows if inputs[k].wrapper is output]
        steps = {k: _steps_to(tape, inputs[k], values[i]) for k in related or windows}
        reached = sorted((k for k in steps if steps[k] is not None), key=lambda k: len(steps[k] or ()))
        # windows at one place are told apart by the counter that a view shares with what it is a view of
        reached.sort(key=lambda k: not internals.share_version(inputs[k].wrapper, output))
        # and equal ones by the way that the gradient goes, past the hooks that the caller has on one of them
        passed = _edges_passed(output)
        reached.sort(key=lambda k: inputs[k].edge not in passed)
        around = [k for k in related or windows if not output.requires_grad and _contains(inputs[k].wrapper, output)]
        if not (same or reached or around):
            raise OutputError(
                "an output shares memory with several inputs and is an ordinary view of none of them",
                suggestion="return a clone",
            )
        found.setdefault([*same, *reached, *around][0], []).append(i)
    return found


def _edges_passed(output: Tensor) -> set[Edge]:
    """Return the edges that the gradient of a view passes as long as there is only one way."""
    if output.grad_fn is None:
        return set()
    found = [edge_of(output)]
    while len(following := next_edges(found[-1][0])) == 1:
        found += following
    return set(found)


def _steps_to(tape: Tape, item: Entered, value: Tensor) -> tuple[ViewStep, ...] | None:
    window = internals.from_functional(item.wrapper)
    between = views_between(tape, window, value)
    return views_from_window(tape, window, value) if between is None else between


def _contains(tensor: Tensor, other: Tensor) -> bool:
    if tensor.dtype != other.dtype or not internals.is_dense(tensor):
        return False

    def span(t: Tensor) -> tuple[int, int]:
        start = int(t.storage_offset()) * t.element_size()
        return start, start + extent_bytes(tuple(t.shape), tuple(t.stride()), t.element_size())

    (a, b), (c, d) = span(tensor), span(other)
    return a <= c and d <= b


def _read_input_aliases(
    tape: Tape,
    leaves: Sequence[Any],
    values: dict[int, Tensor],
    names: Sequence[str],
    members: Sequence[int],
    k: int,
    item: Entered,
    info: Callable[..., None],
) -> None:
    """Classify outputs that live in the storage of input ``k``."""
    base_value = internals.from_functional(item.wrapper)
    for i in members:
        output = leaves[i]
        if output is item.wrapper:
            info(i, OutputType.IS_INPUT, k, ())
            continue
        if output.requires_grad and not is_view_of(output, item.wrapper):
            raise OutputError(
                f"`{names[i]}` shares memory with `{item.name}` but has an autograd history of its own",
                why="the epilogue can make views of an input only by ordinary view ops",
                suggestion="return a clone",
                argument=item.name,
            )
        between = views_between(tape, base_value, values[i])
        if between is None and item.base is not None:
            between = views_from_window(tape, base_value, values[i])
        views = with_detach(between, output, item.wrapper)
        if views is not None and len(views) > 1 and any(step.target in _LAZY for step in views):
            raise OutputError(
                f"`{names[i]}` is a part of a lazy conjugate or negative of `{item.name}`",
                why="its views cannot be replayed",
                suggestion="call resolve_conj() or resolve_neg() first",
                argument=item.name,
            )
        if views is None and values[i].dtype != base_value.dtype:
            raise OutputError(
                f"`{names[i]}` views `{item.name}` as another dtype in a way that cannot be replayed",
                suggestion="return a clone",
                argument=item.name,
            )
        info(i, OutputType.ALIAS_OF_INPUT, k, views)


def _read_intermediate_group(
    tape: Tape,
    leaves: Sequence[Any],
    values: dict[int, Tensor],
    names: Sequence[str],
    members: Sequence[int],
    read: Outputs,
    roots: Sequence[Tensor],
    info: Callable[..., None],
) -> None:
    """Classify outputs that share the storage of one intermediate.

    ``roots`` are all tensors that the caller can differentiate.
    """
    distinct = list({id(leaves[i]): i for i in reversed(members)}.values())[::-1]
    new_leaf = next((i for i in distinct if is_new_leaf(leaves[i])), None)
    if new_leaf is not None and (len(distinct) > 1 or any(reaches(o, leaves[new_leaf]) for o in roots)):
        raise OutputError(
            f"`{names[new_leaf]}` is a leaf that the function made to require grad, and uses or views",
            why="its gradient would be accumulated inside the graph, out of reach",
            suggestion="create it outside and pass it in",
        )
    differentiable = [leaves[i] for i in distinct if leaves[i].requires_grad and new_leaf is None]
    lone = leaves[distinct[0]]
    under_no_grad = lone.requires_grad and lone.is_leaf and new_leaf is None
    if len(distinct) == 1 and covers_storage(values[distinct[0]]) and not under_no_grad:
        i = distinct[0]
        made = tape.producer(values[i])
        unsafe = made is not None and made[0].target is internals.UNSAFE_VIEW
        info(i, OutputType.UNSAFE_VIEW_ALIAS if unsafe else OutputType.NON_ALIAS)
        read.returned.append((i, values[i], leaves[i] if leaves[i].requires_grad and new_leaf is None else None))
        for again in members[1:]:
            info(again, OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT, i, ())
        return

    bases = {id(r): r for r in (or_else(internals.base_of(o), o) for o in differentiable)}
    starts = [value_of(or_else(internals.base_of(leaves[i]), leaves[i]), f"`{names[i]}`") for i in distinct]
    base = common_base(tape, [canonical_base(tape, start) for start in starts])
    root = next(iter(bases.values()), None)
    connected = root is None or all(is_view_of(o, root) for o in differentiable)
    if base is None or not connected or (root is not None and value_of(root, "a base") is not base):
        listed = ", ".join(f"`{names[i]}`" for i in distinct)
        raise OutputError(
            f"the outputs {listed} share memory in a way that cannot be made again from one tensor",
            suggestion="return clones",
        )
    owner = next((i for i in distinct if values[i] is base and leaves[i].requires_grad == (root is not None)), None)
    if owner is not None:
        info(owner, OutputType.NON_ALIAS)
        read.returned.append((owner, base, root))
        where, first = owner, OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT
        following = first
    else:
        where = len(read.bases)
        read.bases.append((base, root))
        first, following = OutputType.ALIAS_OF_INTERMEDIATE_SAVE_AS_OUTPUT, OutputType.ALIAS_OF_INTERMEDIATE
    for i in members:
        if i == owner:
            continue
        views = views_between(tape, base, values[i])
        if views is None and leaves[i].requires_grad:
            raise OutputError(
                f"`{names[i]}` is a view of an intermediate that changed its sizes or strides in place",
                suggestion="use the out-of-place form, as t() for t_()",
            )
        if views is None and values[i].dtype != base.dtype:
            raise OutputError(f"`{names[i]}` views an intermediate as another dtype in a way that cannot be replayed")
        info(i, first, where, with_detach(views, leaves[i], root))
        first = following
