"""How the outputs of a traced function relate to its inputs and to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.given import is_constant
from aotlab.capture.signals import RunEagerly
from aotlab.errors import OutputError
from aotlab.ir.metadata import OutputAliasInfo, OutputType, ViewStep
from aotlab.ir.specs import StorageNumbers, spec_of
from aotlab.trace import views as view_ops
from aotlab.trace.chronicle import Chronicle
from aotlab.trace.inputs import Entered, owner_of, value_of
from aotlab.trace.tape import Tape
from aotlab.trace.write_calls import overlaps_itself

_LAZY = ("aten._conj.default", "aten._neg_view.default")
_CLONE = "return a clone, to have it compiled"


@dataclass(slots=True, kw_only=True)
class Outputs:
    """The outputs as read off, and what the forward graph must return for them."""

    infos: list[OutputAliasInfo] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)
    returned: list[tuple[int, Tensor, Tensor | None]] = field(default_factory=list)  # (output, value, root)
    bases: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)  # (value, root)
    tensors: dict[int, Tensor] = field(default_factory=dict)  # output → what the program returned


@dataclass(slots=True)
class OutputReader:
    """Classifies the outputs of a trace; ``chronicle`` tells which views were made before a write."""

    tape: Tape
    leaves: Sequence[Any]
    names: Sequence[str]
    inputs: Sequence[Entered]
    chronicle: Chronicle
    read: Outputs = field(default_factory=Outputs)
    values: dict[int, Tensor] = field(default_factory=dict)
    _infos: dict[int, OutputAliasInfo] = field(default_factory=dict)
    _storages: StorageNumbers = field(default_factory=StorageNumbers)
    _first_of: dict[int, int] = field(default_factory=dict)
    _calls: dict[Any, int] = field(default_factory=dict)

    def run(self) -> Outputs:
        """Classify the outputs by the memory that they have."""
        windows: dict[int, list[int]] = {}
        for k, item in enumerate(self.inputs):
            windows.setdefault(internals.storage_key(item.wrapper), []).append(k)
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
                by_input.setdefault(self._made_from(i, windows[key]), []).append(i)
            for k, own in by_input.items():
                self._aliases(own, k, self.inputs[k])
        self.read.infos = [self._infos[i] for i in range(len(self.leaves))]
        return self.read

    def _constant(self, i: int, leaf: Any) -> None:
        name, kind = self.names[i], type(leaf)
        if not is_constant(leaf):
            raise OutputError(
                f"`{name}` is a `{kind.__module__}.{kind.__qualname__}`",
                why="a compiled call would return the same object each time, holding traced tensors perhaps",
                suggestion="return tensors, plain values and containers of them",
            )
        self.read.constants[i] = leaf
        self._infos[i] = OutputAliasInfo(
            index=i, name=name, output_type=OutputType.NON_ALIAS, raw_type=kind.__qualname__, spec=None
        )

    def _enter(self, i: int, leaf: Tensor) -> None:
        self.values[i] = value_of(leaf, f"`{self.names[i]}`")
        self.read.tensors[i] = leaf
        if any(leaf is item.wrapper for item in self.inputs):
            return
        if view_ops.is_new_leaf(leaf):
            raise OutputError(
                f"`{self.names[i]}` is a leaf that the function made to require grad",
                why="what is computed from it would accumulate its gradient inside the graph, out of reach",
                suggestion="create it outside and pass it in",
            )
        if vars(leaf) or type(leaf) is not Tensor:
            what = next((f"has the attribute `{name}`" for name in vars(leaf)), f"is a `{type(leaf).__qualname__}`")
            raise OutputError(
                f"`{self.names[i]}` {what}", why="a compiled call returns a plain tensor", suggestion="do that outside"
            )

    def _info(self, i: int, kind: OutputType, base: int | None = None, views: tuple[ViewStep, ...] = ()) -> None:
        leaf = self.leaves[i]
        item = None if base is None or kind is not OutputType.ALIAS_OF_INPUT else self.inputs[base]
        several = view_ops.call_of_several(leaf)
        if several is not None and views and all(step.item is None for step in views):
            raise RunEagerly(f"`{self.names[i]}` is one of several views that were made together, and is made anew")
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
            made_together=None if several is None else self._calls.setdefault(several, len(self._calls)),
        )

    def _precedes_write(self, i: int, item: Entered) -> bool:
        """Tell whether an output is a view of an input from before a write, which the epilogue makes before its own."""
        output = self.leaves[i]
        if output is item.wrapper or not self.chronicle.is_older(output):
            return False
        if output.requires_grad or item.base is not None or internals.is_one_of_several_views(output):
            raise RunEagerly(f"`{self.names[i]}` is a view of `{item.name}` from before that was changed")
        return True  # the caller may let its base require grad, which then asks for its history

    # --- views of inputs

    def _made_from(self, i: int, windows: Sequence[int]) -> int:
        """Return the input that an output is to be made from, of those in its memory."""
        if len(windows) == 1:
            return windows[0]
        found = [k for k in windows if self.inputs[k].wrapper is self.leaves[i]]
        if not found:
            values = {k: internals.from_functional(self.inputs[k].wrapper) for k in windows}
            ways = {k: view_ops.views_between(self.tape, value, self.values[i]) for k, value in values.items()}
            found = [k for k, way in ways.items() if way is not None]
        if len(found) == 1:
            return found[0]
        raise RunEagerly(
            "an output shares memory with several inputs, and is not known to be a view of one of them",
            suggestion=_CLONE,
        )

    def _aliases(self, members: Sequence[int], k: int, item: Entered) -> None:
        """Classify outputs that live in the storage of input ``k``."""
        base_value = internals.from_functional(item.wrapper)
        for i in members:
            output, name = self.leaves[i], self.names[i]
            if output is item.wrapper:
                self._info(i, OutputType.IS_INPUT, k, ())
                continue
            if output.requires_grad and not view_ops.is_view_of(output, item.wrapper):
                raise RunEagerly(
                    f"`{name}` shares memory with `{item.name}` and has an autograd history of its own",
                    suggestion=_CLONE,
                )
            moved = item.version != internals.version_of(item.wrapper)
            if output.requires_grad and moved and overlaps_itself(item.real):
                # autograd makes the history again by sizes and strides, which share gradients out among equal places
                raise RunEagerly(f"a view of `{item.name}`, which overlaps itself and is changed, is returned")
            views = self._views(i, base_value, item.wrapper)
            if len(views) > 1 and any(step.target in _LAZY for step in views):
                raise RunEagerly(f"the views from `{item.name}` to `{name}` cannot be made again", suggestion=_CLONE)
            self._info(i, OutputType.ALIAS_OF_INPUT, k, views)

    def _views(self, i: int, base: Tensor, root: Tensor | None) -> tuple[ViewStep, ...]:
        views = view_ops.views_between(self.tape, base, self.values[i])
        if views is None:
            raise RunEagerly(f"the views to `{self.names[i]}` cannot be made again", suggestion=_CLONE)
        return view_ops.with_detach(views, self.leaves[i], root)

    # --- intermediates

    def _intermediates(self, members: Sequence[int]) -> None:
        """Classify outputs that share the storage of one intermediate."""
        leaves, values = self.leaves, self.values
        distinct = list({id(leaves[i]): i for i in reversed(members)}.values())[::-1]
        lone = distinct[0]
        if len(distinct) == 1 and view_ops.covers_storage(values[lone]) and not self._is_made_by_views(lone):
            made = self.tape.producer(values[lone])
            unsafe = made is not None and made[0].target is internals.UNSAFE_VIEW
            self._info(lone, OutputType.UNSAFE_VIEW_ALIAS if unsafe else OutputType.NON_ALIAS)
            self.read.returned.append((lone, values[lone], leaves[lone] if leaves[lone].requires_grad else None))
            for again in members[1:]:
                self._info(again, OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT, lone, ())
            return
        base, root = self._common_base(distinct)
        owner = next((i for i in distinct if values[i] is base and leaves[i].requires_grad == (root is not None)), None)
        if owner is not None:
            self._info(owner, OutputType.NON_ALIAS)
            self.read.returned.append((owner, base, root))
            where, kind = owner, OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT
        else:
            if any(internals.base_of(leaves[i]) is leaves[j] for i in distinct for j in distinct):
                raise RunEagerly(f"`{self.names[lone]}` and a view of it are returned, and were written by the view")
            where, kind = len(self.read.bases), OutputType.ALIAS_OF_INTERMEDIATE_SAVE_AS_OUTPUT
            self.read.bases.append((base, root))
        for i in (i for i in members if i != owner):
            if self.chronicle.is_made_again(leaves[i]):
                raise RunEagerly(f"`{self.names[i]}` is a view of an intermediate from before that was written")
            self._info(i, kind, where, self._views(i, base, root))
            if owner is None:
                kind = OutputType.ALIAS_OF_INTERMEDIATE

    def _is_made_by_views(self, i: int) -> bool:
        """Tell whether what has its memory to itself is a view for the caller, who may write it, all the same."""
        output = self.leaves[i]
        if internals.base_of(output) is None or internals.is_inference(output):
            return False
        return output.requires_grad or view_ops.top_of(self.tape, self.values[i]) is not self.values[i]

    def _common_base(self, distinct: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Return the value that outputs on one intermediate are made from, and the tensor to differentiate for them."""
        differentiable = [self.leaves[i] for i in distinct if self.leaves[i].requires_grad]
        if not differentiable:
            base = value_of(owner_of(self.leaves[distinct[0]]), "a base")
            known = all(view_ops.views_between(self.tape, base, self.values[i]) is not None for i in distinct)
            return base if known else view_ops.top_of(self.tape, self.values[distinct[0]]), None
        root = owner_of(differentiable[0])
        named = ", ".join(f"`{self.names[i]}`" for i in distinct)
        if view_ops.is_new_leaf(root):
            raise RunEagerly(f"{named} are views of a leaf that the function made to require grad")
        if not all(view_ops.is_view_of(output, root) for output in differentiable):
            raise RunEagerly(
                f"the outputs {named} share memory in a way that cannot be made again from one tensor",
                suggestion="return clones, to have it compiled",
            )
        return value_of(root, "a base"), root
