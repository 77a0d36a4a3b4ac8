"""How the outputs of a traced function relate to its inputs and to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aotlab import torch_internals as internals
from aotlab.analysis.containers import is_constant
from aotlab.analysis.edges import Edge, edge_of, next_edges
from aotlab.analysis.inputs import Entered, value_of
from aotlab.analysis.views import (
    call_of_several,
    canonical_base,
    common_base,
    covers_storage,
    is_made_of,
    is_new_leaf,
    is_view_of,
    or_else,
    reaches,
    view_parent,
    views_between,
    views_from_window,
    views_past_detaches,
    with_detach,
    with_several,
)
from aotlab.errors import OutputError, SymbolicShapeError
from aotlab.guards import extent_bytes
from aotlab.ir.metadata import OutputAliasInfo, OutputType, ViewStep
from aotlab.ir.specs import StorageNumbers, spec_of
from aotlab.recorder import Chronicle, NeedsInputsApart, RunEagerly, Tape, overlaps_itself

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
    cut: list[int] = field(default_factory=list)  # views of views made under no_grad, where their gradients end


def read_outputs(
    tape: Tape,
    leaves: Sequence[Any],
    names: Sequence[str],
    inputs: Sequence[Entered],
    chronicle: Chronicle,
) -> Outputs:
    """Classify every output.

    ``chronicle`` tells what views were made of, and when inputs were written.
    """
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
        groups.setdefault(internals.storage_key(leaf), []).append(i)

    first_of: dict[int, int] = {}
    calls: dict[Any, int] = {}

    def info(
        i: int,
        kind: OutputType,
        base: int | None = None,
        views: tuple[ViewStep, ...] | None = None,
        no_grad_views: int = 0,
    ) -> None:
        item = inputs[base] if kind is OutputType.ALIAS_OF_INPUT and base is not None else None
        precedes = item is not None and early(i, item)
        first = first_of.setdefault(id(leaves[i]), i)
        several = call_of_several(leaves[i])
        infos[i] = OutputAliasInfo(
            index=i,
            name=names[i],
            output_type=kind,
            raw_type="torch.Tensor",
            spec=spec_of(leaves[i], storages),
            base_idx=base,
            requires_grad=leaves[i].requires_grad,
            views=with_several(views, leaves[i]),
            no_grad_views=no_grad_views,
            same_as=None if first == i else first,
            under_no_grad=views != () and not (leaves[i].requires_grad and not leaves[i].is_leaf),
            is_detached=views is None and not leaves[i].requires_grad and internals.base_of(leaves[i]) is None,
            made_in_no_grad_mode=views != () and internals.was_made_under_no_grad(leaves[i]),
            is_new_leaf=kind not in _OF_INPUTS and is_new_leaf(leaves[i]),
            made_by=_name_of(leaves[i].grad_fn) if kind is OutputType.CUSTOM_FUNCTION_VIEW else None,
            precedes_write=precedes,
            is_inference=_is_inference(leaves[i]),
            made_together=None if several is None else calls.setdefault(several, len(calls)),
        )

    def early(i: int, item: Entered) -> bool:
        output = leaves[i]
        if output is item.wrapper or not chronicle.is_older(output):
            return False
        if not output.requires_grad:  # the caller may let its base require grad, which then asks for its history
            differentiable = output.is_floating_point() or output.is_complex()
            if item.wrapper.requires_grad or not differentiable:
                return False
        if item.base is not None or item.steps or internals.is_one_of_several_views(output):
            raise RunEagerly(f"`{names[i]}` is a view of `{item.name}` from before that was changed")
        return True

    roots = [t for t in [*(leaves[i] for i in values), *(item.wrapper for item in inputs)] if t.requires_grad]
    for key, members in groups.items():
        windows = of_storage.get(key)
        if windows is not None:
            for k, own in _nearest_inputs(tape, leaves, values, members, windows, inputs, chronicle).items():
                if any(leaves[i] is not inputs[k].wrapper and leaves[i].requires_grad for i in own):
                    _check_history_made_again(inputs[k])
                _read_input_aliases(tape, leaves, values, names, own, k, inputs[k], read, info)
        else:
            _read_intermediate_group(tape, leaves, values, names, members, read, roots, chronicle, info)
    read.infos = [infos[i] for i in range(len(leaves))]
    return read


def _check_history_made_again(item: Entered) -> None:
    """Leave views to eager whose history autograd makes again from sizes and strides.

    That shares gradients out among the elements at one place of memory; the ops that made a view do not.
    """
    if overlaps_itself(item.real) and internals.version_of(item.wrapper) != item.version:
        raise RunEagerly(f"a view of `{item.name}`, which overlaps itself and is changed, is returned")


def _name_of(node: Any) -> str:
    """Return the name by which autograd's errors call what made a node."""
    return str(node.name()).rsplit("::", 1)[-1].split("Backward")[0]


def _nearest_inputs(
    tape: Tape,
    leaves: Sequence[Any],
    values: dict[int, Tensor],
    members: Sequence[int],
    windows: Sequence[int],
    inputs: Sequence[Entered],
    chronicle: Chronicle,
) -> dict[int, list[int]]:
    """Say for each output in the memory of some inputs from which of them it is to be made.

    Raises
    ------
    NeedsInputsApart
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
        # without a write no guard holds them together, so the very input matters; a write hides which one it is
        reached.sort(key=lambda k: not is_made_of(tape, internals.from_functional(inputs[k].wrapper), values[i]))
        made_from = _made_from(tape, values[i], {id(internals.from_functional(inputs[k].wrapper)): k for k in windows})
        # and equal ones by the way that the gradient goes, past the hooks that the caller has on one of them
        passed = _edges_passed(output)
        reached.sort(key=lambda k: inputs[k].edge not in passed)
        around = [k for k in related or windows if not output.requires_grad and _contains(inputs[k].wrapper, output)]
        origin = chronicle.origin_of(output)  # what the gradient goes to, at one place or not, through writes too
        made_from = [*(k for k in [*reached, *around] if inputs[k].wrapper is origin), *made_from]
        past = [] if same or reached or around else _past_detaches(tape, output, values[i], windows, inputs)
        if not (same or reached or around or past):
            raise NeedsInputsApart(
                "an output shares memory with several inputs and is an ordinary view of none of them",
                suggestion="return a clone, to have it compiled",
            )
        chosen = [*same, *made_from, *reached, *around, *past][0]
        own = [k for k in windows if inputs[k].wrapper is origin]
        if own and internals.storage_key(inputs[own[0]].real) != internals.storage_key(inputs[chosen].real):
            # one memory in two storages, which can be told apart
            raise RunEagerly(f"an output is a view of what `{inputs[own[0]].name}` was before it changed its sizes")
        found.setdefault(chosen, []).append(i)
    return found


def _past_detaches(
    tape: Tape, output: Tensor, value: Tensor, windows: Sequence[int], inputs: Sequence[Entered]
) -> list[int]:
    """Return the inputs of which an output without a gradient is a view, if detaches are left out of account."""
    if output.requires_grad:
        return []
    return [
        k for k in windows if views_past_detaches(tape, internals.from_functional(inputs[k].wrapper), value) is not None
    ]


def _made_from(tape: Tape, value: Tensor, windows: Mapping[int, int]) -> list[int]:
    """Return the window that the program made a value from, none where a write has hidden that.

    Windows may lie at one place in this call and at several in the next, if none of them is written. Then each is still
    the tensor that the program was given, by identity.
    """
    while id(value) not in windows:
        parent = view_parent(tape, value)
        if parent is None:
            return []
        value = parent[0]
    return [windows[id(value)]]


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
    read: Outputs,
    info: Callable[..., None],
) -> None:
    """Classify outputs that live in the storage of input ``k``."""
    base_value = internals.from_functional(item.wrapper)
    made: list[int] = []
    for i in sorted(members, key=lambda i: not internals.is_lone_function_result(leaves[i])):
        output = leaves[i]
        if output is item.wrapper:
            info(i, OutputType.IS_INPUT, k, ())
            continue
        if output.requires_grad and item.base is not None and _ends_nowhere(output):
            raise NeedsInputsApart(f"`{names[i]}` is a view of a view that was made under no_grad, in shared memory")
        if output.requires_grad and item.base is None:
            views = views_between(tape, base_value, values[i])
            made_without = None if views is None else _made_without_history(output, views)
            if made_without:
                if or_else(internals.base_of(output), output) is not item.wrapper:
                    raise RunEagerly(f"`{names[i]}` is a no_grad view of an alias with a history of its own")
                read.cut.append(i)
                info(i, OutputType.ALIAS_OF_INPUT, k, views, no_grad_views=made_without)
                continue
        if output.requires_grad and not is_view_of(output, item.wrapper):
            if item.base is None and _read_function_view(tape, leaves, values, i, k, item, made, read, info):
                continue
            raise OutputError(
                f"`{names[i]}` shares memory with `{item.name}` but has an autograd history of its own",
                why="the epilogue can make views of an input only by ordinary view ops",
                suggestion="return a clone",
                argument=item.name,
            )
        between = views_between(tape, base_value, values[i])
        if between is None and item.base is not None:
            between = views_from_window(tape, base_value, values[i])
            if between is None and not output.requires_grad:
                between = views_past_detaches(tape, base_value, values[i])
        views = with_detach(between, output, item.wrapper)
        if views is not None and len(views) > 1 and any(step.target in _LAZY for step in views):
            raise OutputError(
                f"`{names[i]}` is a part of a lazy conjugate or negative of `{item.name}`",
                why="its views cannot be replayed",
                suggestion="call resolve_conj() or resolve_neg() first",
                argument=item.name,
            )
        if views is None and _reads_otherwise(values[i], base_value):
            raise OutputError(
                f"`{names[i]}` views `{item.name}` as another dtype, conjugate or negative",
                why="its views cannot be replayed",
                suggestion="return a clone",
                argument=item.name,
            )
        info(i, OutputType.ALIAS_OF_INPUT, k, views)


def _read_function_view(
    tape: Tape,
    leaves: Sequence[Any],
    values: dict[int, Tensor],
    i: int,
    k: int,
    item: Entered,
    made: list[int],
    read: Outputs,
    info: Callable[..., None],
) -> bool:
    """Classify a view of input ``k`` that a custom Function made, or a view of that; tell whether it is one.

    ``made`` are the outputs that such functions made; the function may return nothing else, since autograd has other
    rules for views of several at once.
    """
    output = leaves[i]
    for j in made:
        again = output is leaves[j]
        views = () if again else views_between(tape, values[j], values[i])
        if again or (views and is_view_of(output, leaves[j])):
            info(i, OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT, j, views)
            return True
    views = views_between(tape, internals.from_functional(item.wrapper), values[i])
    same_owner = or_else(internals.base_of(output), output) is or_else(internals.base_of(item.wrapper), item.wrapper)
    if views is None or not same_owner or not internals.is_lone_function_result(output):
        return False
    info(i, OutputType.CUSTOM_FUNCTION_VIEW, k, views)
    read.returned.append((i, values[i], output))
    made.append(i)
    return True


def _ends_nowhere(output: Tensor) -> bool:
    """Tell whether the gradient of ``output`` ends at a view that was made under ``no_grad``."""
    node = output.grad_fn
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
        if node is None:
            return True
    return False


def _made_without_history(output: Tensor, views: Sequence[ViewStep]) -> int | None:
    """Tell how many of ``views`` were made under ``no_grad``, so that the others' gradients end there.

    None if what autograd has of ``output`` is something else than the last of ``views``.
    """
    chain: list[str] = []
    node = output.grad_fn
    while node is not None:
        if internals.is_custom_function_node(node) or len(node.next_functions) != 1:
            return None
        chain.append(node.name().rpartition("Backward")[0].lower())
        node = node.next_functions[0][0]
    ops = [step.target.split(".")[1].replace("_", "") for step in reversed(views)]
    return len(ops) - len(chain) if len(chain) < len(ops) and chain == ops[: len(chain)] else None


def _reads_otherwise(value: Tensor, base: Tensor) -> bool:
    """Tell whether the bytes of two aliases mean different numbers: no ``as_strided`` makes one of the other."""
    ways = [(t.dtype, t.is_conj(), t.is_neg()) for t in (value, base)]
    return ways[0] != ways[1]


def _is_inference(output: Tensor) -> bool:
    return output.is_inference() and not torch.is_inference_mode_enabled()


def _read_intermediate_group(
    tape: Tape,
    leaves: Sequence[Any],
    values: dict[int, Tensor],
    names: Sequence[str],
    members: Sequence[int],
    read: Outputs,
    roots: Sequence[Tensor],
    chronicle: Chronicle,
    info: Callable[..., None],
) -> None:
    """Classify outputs that share the storage of one intermediate.

    ``roots`` are all tensors that the caller can differentiate.
    """
    distinct = list({id(leaves[i]): i for i in reversed(members)}.values())[::-1]
    made_there = [i for i in distinct if _is_inference(leaves[i])]
    if made_there and len(made_there) < len(distinct):
        raise OutputError(
            f"`{names[made_there[0]]}` was made under inference_mode inside the function, and shares memory",
            why="a compiled call can make inference tensors of whole results and their views only",
            suggestion="use no_grad inside, or inference_mode around the call",
        )
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
    # one that may not be written in place is made by the very view, so that autograd says so again
    several = new_leaf is None and lone.requires_grad and internals.is_one_of_several_views(lone)
    cut = lone.requires_grad and internals.base_of(lone) is not None and _ends_nowhere(lone)
    # what the caller's later write makes of its history and hooks is another thing for a view
    view = new_leaf is None and lone.requires_grad and internals.base_of(lone) is not None
    view = view and not internals.is_view_by_custom_function(lone)
    # nor can a view be detached in place, or one that was made under no_grad be written, where it has no history either
    plain = new_leaf is None and not lone.requires_grad and _is_plain_view(tape, lone, values[distinct[0]])
    apart = under_no_grad or several or cut or view or plain
    if len(distinct) == 1 and covers_storage(values[distinct[0]]) and not apart:
        i = distinct[0]
        made = tape.producer(values[i])
        unsafe = made is not None and made[0].target is internals.UNSAFE_VIEW
        if new_leaf is None and lone.requires_grad and internals.is_view_by_custom_function(lone):
            info(i, OutputType.CUSTOM_FUNCTION_VIEW)
        else:
            info(i, OutputType.UNSAFE_VIEW_ALIAS if unsafe else OutputType.NON_ALIAS)
        read.returned.append((i, values[i], leaves[i] if leaves[i].requires_grad and new_leaf is None else None))
        for again in members[1:]:
            info(again, OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT, i, ())
        return

    bases = {id(r): r for r in (or_else(internals.base_of(o), o) for o in differentiable)}
    starts = [value_of(or_else(internals.base_of(leaves[i]), leaves[i]), f"`{names[i]}`") for i in distinct]
    base = common_base(tape, [canonical_base(tape, start) for start in starts])
    root = next(iter(bases.values()), None)
    if root is not None and is_new_leaf(root) and all(root is not leaves[i] for i in distinct):
        raise RunEagerly(f"`{names[distinct[0]]}` is a view of a leaf that the function made to require grad")
    if base is not None and root is not None:
        top = value_of(root, "a base")
        if all(views_between(tape, top, values[i]) is not None for i in distinct):
            base = top  # also where it is an alias of something else, or was made a part of its memory in place
    no_grad_views = (
        {} if base is None else _made_under_no_grad(tape, base, {i: (leaves[i], values[i]) for i in distinct})
    )
    connected = root is None or all(
        is_view_of(leaves[i], root) or i in no_grad_views for i in distinct if leaves[i].requires_grad
    )
    if cut and len(distinct) == 1 and not no_grad_views:
        raise RunEagerly(f"`{names[distinct[0]]}` is a view of a view that was made under no_grad")
    read.cut += no_grad_views
    if base is None or not connected or (root is not None and value_of(root, "a base") is not base):
        listed = ", ".join(f"`{names[i]}`" for i in distinct)
        raise OutputError(
            f"the outputs {listed} share memory",
            why="they do so in a way that cannot be made again from one tensor",
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
                why="its views cannot be replayed",
                suggestion="use the out-of-place form, as t() for t_()",
            )
        if views is None and _reads_otherwise(values[i], base):
            raise OutputError(
                f"`{names[i]}` views an intermediate as another dtype, conjugate or negative",
                why="its views cannot be replayed",
                suggestion="return a clone",
            )
        if i not in no_grad_views and chronicle.is_made_again(leaves[i]):
            raise RunEagerly(f"`{names[i]}` is a view of an intermediate from before that was written")
        views = with_detach(views, leaves[i], root)
        info(i, first, where, views, no_grad_views=no_grad_views.get(i, 0))
        first = following


def _is_plain_view(tape: Tape, output: Tensor, value: Tensor) -> bool:
    """Tell whether an output is a view of an intermediate that can be made again from it."""
    base = internals.base_of(output)
    if base is None or output.is_inference():
        return False
    top = canonical_base(tape, value_of(base, "a base"))
    return top is not value and (views_between(tape, top, value) is not None or not _reads_otherwise(value, top))


def _made_under_no_grad(tape: Tape, base: Tensor, found: Mapping[int, tuple[Tensor, Tensor]]) -> dict[int, int]:
    """Say of the outputs whose gradients end at a view made under ``no_grad`` by how many views that was made.

    ``found`` has each output with its value, ``base`` is the value of what they are views of.
    """
    counts: dict[int, int] = {}
    for i, (output, value) in found.items():
        views = views_between(tape, base, value) if output.requires_grad and output.grad_fn is not None else None
        count = _made_without_history(output, views) if views else None
        if count:
            counts[i] = count
    return counts
