"""Classify the outputs of a traced function: inputs, views of inputs, views of intermediates, new tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.caller_objects import is_constant
from aotlab.capture.signals import RunEagerly
from aotlab.errors import OutputError
from aotlab.ir.metadata import OutputAliasInfo, OutputType, ViewStep
from aotlab.ir.specs import StorageNumbers, spec_of
from aotlab.trace import view_ops
from aotlab.trace.inputs import TracedInput, owner_of, value_of
from aotlab.trace.storage_notes import StorageNotes
from aotlab.trace.tape import Tape
from aotlab.trace.write_calls import overlaps_itself

_LAZY = ("aten._conj.default", "aten._neg_view.default")


@dataclass(slots=True, kw_only=True)
class Outputs:
    """The classified outputs, and the values that the forward graph must return for them.

    - ``infos`` describes each flat output.
    - ``constants`` are the outputs that are not tensors.
    - ``returned`` has the outputs that the graph returns, and ``bases`` has the intermediate bases. Each of these
      values has a *root*: the traced tensor from which its gradient is computed, or None if it does not require grad.
    - ``tensors`` has the traced tensors that the function returned, by the index of the output.
    """

    infos: list[OutputAliasInfo] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)
    returned: list[tuple[int, Tensor, Tensor | None]] = field(default_factory=list)  # (output, value, root)
    bases: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)  # (value, root)
    tensors: dict[int, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class OutputReader:
    """Classifies the outputs of a traced function: alias of an input, alias of an intermediate, or new tensor.

    ``leaves`` are the flat outputs and ``names`` their names. ``storage_notes`` says which views were made before a
    write. ``values`` has, by index, the fake tensor of each output.
    """

    tape: Tape
    leaves: Sequence[Any]
    names: Sequence[str]
    inputs: Sequence[TracedInput]
    storage_notes: StorageNotes
    outputs: Outputs = field(default_factory=Outputs)
    values: dict[int, Tensor] = field(default_factory=dict)
    _infos: dict[int, OutputAliasInfo] = field(default_factory=dict)
    _storages: StorageNumbers = field(default_factory=StorageNumbers)
    _first_of: dict[int, int] = field(default_factory=dict)
    _calls: dict[Any, int] = field(default_factory=dict)

    def run(self) -> Outputs:
        """Classify all outputs. Outputs in the same storage are classified together."""
        windows: dict[int, list[int]] = {}
        for k, item in enumerate(self.inputs):
            windows.setdefault(internals.storage_key(item.traced), []).append(k)
        groups: dict[int, list[int]] = {}
        for i, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor):
                self._enter(i, leaf)
                groups.setdefault(internals.storage_key(leaf), []).append(i)
            else:
                self._constant(i, leaf)
        for key, members in groups.items():
            if key not in windows:
                self._intermediates(members)
                continue
            by_input: dict[int, list[int]] = {}
            for i in members:
                by_input.setdefault(self._source_input(i, windows[key]), []).append(i)
            for k, outputs in by_input.items():
                self._aliases(outputs, k, self.inputs[k])
        self.outputs.infos = [self._infos[i] for i in range(len(self.leaves))]
        return self.outputs

    def _constant(self, i: int, leaf: Any) -> None:
        name, kind = self.names[i], type(leaf)
        if not is_constant(leaf):
            raise OutputError(
                f"`{name}` is a `{kind.__module__}.{kind.__qualname__}`",
                why="a compiled call would return the same object each time, perhaps with traced tensors in it",
                suggestion="return tensors, plain values and containers of them",
            )
        self.outputs.constants[i] = leaf
        self._infos[i] = OutputAliasInfo(
            index=i, name=name, output_type=OutputType.NON_ALIAS, raw_type=kind.__qualname__, spec=None
        )

    def _enter(self, i: int, leaf: Tensor) -> None:
        self.values[i] = value_of(leaf, f"`{self.names[i]}`")
        self.outputs.tensors[i] = leaf
        if any(leaf is item.traced for item in self.inputs):
            return
        if vars(leaf) or type(leaf) is not Tensor:
            problem = next((f"has the attribute `{name}`" for name in vars(leaf)), f"is a `{type(leaf).__qualname__}`")
            raise OutputError(
                f"`{self.names[i]}` {problem}",
                why="a compiled call returns a plain tensor",
                suggestion="return a plain tensor, and convert or annotate it outside of the function",
            )

    def _info(self, i: int, kind: OutputType, base: int | None = None, views: tuple[ViewStep, ...] = ()) -> None:
        leaf = self.leaves[i]
        item = None if base is None or kind is not OutputType.ALIAS_OF_INPUT else self.inputs[base]
        several = view_ops.multi_output_node(leaf)
        if several is not None and views and all(step.item is None for step in views):
            raise RunEagerly("view-cannot-be-repeated", output=self.names[i])
        first = self._first_of.setdefault(id(leaf), i)
        self._infos[i] = OutputAliasInfo(
            index=i,
            name=self.names[i],
            output_type=kind,
            raw_type="torch.Tensor",
            spec=spec_of(leaf, self._storages),
            base_idx=base,
            requires_grad=leaf.requires_grad,
            views=views,
            same_as=None if first == i else first,
            made_under_no_grad=bool(views) and internals.was_made_under_no_grad(leaf),
            precedes_write=item is not None and self._precedes_write(i, item),
            is_new_leaf=view_ops.is_new_leaf(leaf) and kind is not OutputType.IS_INPUT,
            made_in_function=kind is OutputType.NON_ALIAS and internals.was_made_in_function(leaf),
            made_together=None if several is None else self._calls.setdefault(several, len(self._calls)),
        )

    def _precedes_write(self, i: int, item: TracedInput) -> bool:
        """Tell whether output ``i`` is a view of the input ``item`` from before a write to the input.

        The epilogue makes such a view before it writes to the input.
        """
        output = self.leaves[i]
        if output is item.traced or not self.storage_notes.is_older(output):
            return False
        lost = item.base is not None or internals.is_one_of_several_views(output)
        if output.requires_grad:
            self.storage_notes.viewed_under_no_grad.add(item.storage)
            lost = lost or internals.was_made_under_no_grad(output)
            lost = lost or self.storage_notes.is_regenerated_differently(output)
        if lost:
            raise RunEagerly("output-before-write", output=self.names[i], base=f"`{item.name}`")
        # A view without a history is right even if the caller makes the base require grad later: autograd then
        # regenerates the view's history, as in eager. A view of an input whose sizes changed was made after that.
        return not item.steps

    # --- views of inputs

    def _source_input(self, i: int, windows: Sequence[int]) -> int:
        """Return the index of the input from which the epilogue makes output ``i``.

        ``windows`` are the indices of the inputs in the storage of the output.
        """
        if len(windows) == 1:
            return windows[0]
        candidates = [k for k in windows if self.inputs[k].traced is self.leaves[i]]
        if not candidates:
            views_from = {k: views for k in windows if (views := self._views_from(k, i)) is not None}
            nodes = list(view_ops.nodes_before(self.leaves[i]))
            # From two inputs that are equal views of one base, take the one to which the output's gradient flows.
            nearest = [k for k in views_from if self.inputs[k].traced.grad_fn in nodes] or list(views_from)
            shortest = min((len(views_from[k]) for k in nearest), default=0)
            candidates = [k for k in nearest if len(views_from[k]) == shortest]
        if len(candidates) == 1 or (candidates and not self.leaves[i].requires_grad):
            return candidates[0]
        raise RunEagerly("output-of-several-inputs")

    def _views_from(self, k: int, i: int) -> tuple[ViewStep, ...] | None:
        """Return the view ops that make output ``i`` from input ``k``, or None if the output is no view of the input.

        After a write, functionalization makes all views again from the new value of the base. So for an input that is
        a view of a base, or whose sizes or strides changed, the view ops that make the input must be the first of those
        that make the output.
        """
        item, value = self.inputs[k], internals.from_functional(self.inputs[k].traced)
        views = view_ops.views_between(self.tape, value, self.values[i])
        if views is not None or (item.view_of is None and not item.steps):
            return views
        base_value = view_ops.base_value(self.tape, value)
        own = view_ops.views_between(self.tape, base_value, value)
        all_views = view_ops.views_between(self.tape, base_value, self.values[i])
        return all_views[len(own) :] if own and all_views and all_views[: len(own)] == own else None

    def _aliases(self, members: Sequence[int], k: int, item: TracedInput) -> None:
        """Classify the outputs ``members``, which are in the storage of input ``k``."""
        for i in members:
            output, name = self.leaves[i], self.names[i]
            if output is item.traced:
                self._info(i, OutputType.IS_INPUT, k, ())
                continue
            is_new_leaf = view_ops.is_new_leaf(output)
            if internals.was_made_under_no_grad(output):
                self._precedes_write(i, item)  # refuses a view that a write made invalid: reading its history raises
            if output.requires_grad and not is_new_leaf and not view_ops.is_view_of(output, item.traced):
                raise RunEagerly("view-with-own-history", output=name, name=item.name)
            moved = item.version != internals.version_of(item.traced)
            if output.requires_grad and moved and overlaps_itself(item.real):
                # After the write, autograd regenerates the view's history from sizes and strides (`as_strided`). The
                # backward of `as_strided` divides a gradient among the indices that share an element.
                raise RunEagerly("writes-part-of-expanded", way="expanded")
            views = self._views(i, self._views_from(k, i), item.traced)
            if len(views) > 1 and any(step.target in _LAZY for step in views):
                raise RunEagerly("view-cannot-be-repeated", output=name)
            self._info(i, OutputType.ALIAS_OF_INPUT, k, views)

    def _views(self, i: int, views: tuple[ViewStep, ...] | None, root: Tensor | None) -> tuple[ViewStep, ...]:
        if views is None:
            raise RunEagerly("view-cannot-be-repeated", output=self.names[i])
        return view_ops.with_detach(views, self.leaves[i], root)

    # --- intermediates

    def _intermediates(self, members: Sequence[int]) -> None:
        """Classify the outputs ``members``, which are in the storage of one intermediate."""
        leaves, values = self.leaves, self.values
        distinct = list({id(leaves[i]): i for i in reversed(members)}.values())[::-1]
        lone = distinct[0]
        if len(distinct) == 1 and view_ops.covers_storage(values[lone]) and not self._is_made_by_views(lone):
            producer = self.tape.producer(values[lone])
            unsafe = producer is not None and producer[0].target is internals.UNSAFE_VIEW
            self._info(lone, OutputType.UNSAFE_VIEW_ALIAS if unsafe else OutputType.NON_ALIAS)
            is_root = leaves[lone].requires_grad and not view_ops.is_new_leaf(leaves[lone])
            self.outputs.returned.append((lone, values[lone], leaves[lone] if is_root else None))
            for duplicate in members[1:]:
                self._info(duplicate, OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT, lone, ())
            return
        base, root = self._common_base(distinct)
        owner = next((i for i in distinct if values[i] is base and leaves[i].requires_grad == (root is not None)), None)
        if owner is not None:
            self._info(owner, OutputType.NON_ALIAS)
            self.outputs.returned.append((owner, base, None if root is None or view_ops.is_new_leaf(root) else root))
            base_number, kind = owner, OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT
        else:
            if any(internals.base_of(leaves[i]) is leaves[j] for i in distinct for j in distinct):
                raise RunEagerly("view-cannot-be-repeated", output=self.names[lone])
            base_number, kind = len(self.outputs.bases), OutputType.ALIAS_OF_INTERMEDIATE_SAVE_AS_OUTPUT
            self.outputs.bases.append((base, root))
        for i in (i for i in members if i != owner):
            if self.storage_notes.is_regenerated_differently(leaves[i]):
                raise RunEagerly("output-before-write", output=self.names[i], base="an intermediate")
            views = view_ops.views_between(self.tape, base, values[i])
            self._info(i, kind, base_number, self._views(i, views, root))
            if owner is None:
                kind = OutputType.ALIAS_OF_INTERMEDIATE

    def _is_made_by_views(self, i: int) -> bool:
        """Tell whether output ``i`` must be returned as a view although no other output is in its storage.

        This is so if autograd treats the output as a view of an intermediate, because the caller can observe this. For
        example, a write to the output gives it another history than a write to a tensor that is not a view.
        """
        output = self.leaves[i]
        if internals.base_of(output) is None or internals.is_inference(output):
            return False
        if internals.was_made_in_function(output):
            return False
        return output.requires_grad or view_ops.base_value(self.tape, self.values[i]) is not self.values[i]

    def _common_base(self, distinct: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Return the intermediate base of the outputs ``distinct``, which share a storage, and its traced tensor.

        The epilogue makes the outputs as views of the base. Gradients of the base are computed from the traced tensor,
        which is None if no output requires grad.
        """
        differentiable = [self.leaves[i] for i in distinct if self.leaves[i].requires_grad]
        if not differentiable:
            base = value_of(owner_of(self.leaves[distinct[0]]), "a base")
            all_are_views = all(view_ops.views_between(self.tape, base, self.values[i]) is not None for i in distinct)
            return base if all_are_views else view_ops.base_value(self.tape, self.values[distinct[0]]), None
        root = owner_of(differentiable[0])
        named = ", ".join(f"`{self.names[i]}`" for i in distinct)
        if view_ops.is_new_leaf(root) and all(leaf is not root for leaf in self.leaves):
            raise RunEagerly("view-of-new-leaf", outputs=named)
        if not all(view_ops.is_view_of(output, root) for output in differentiable):
            raise RunEagerly("outputs-without-common-base", outputs=named)
        return value_of(root, "a base"), root
