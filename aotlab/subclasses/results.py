"""What a traced function did: which of its outputs are wrappers and how they come about, and what it wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from aotlab import _torch as internals
from aotlab._torch import parts_of
from aotlab.capture import nesting
from aotlab.capture.signals import RunEagerly
from aotlab.ir import specs
from aotlab.ir.subclasses import AnchoredGradient, SubclassOutput, SubclassWrite
from aotlab.subclasses.edges import Again, Ways, unwrapped
from aotlab.subclasses.parts import spec_of, state_of
from aotlab.subclasses.passing import Passing
from aotlab.subclasses.sparse import SparseGradient

if TYPE_CHECKING:
    from aotlab.subclasses.target import Entered


@dataclass(slots=True)
class Results:
    """How the function's results are made from what the compiled one returns, nested as ``tree``.

    ``shown`` are the outputs' names and looks; ``views`` those that are views, by their numbers, as they were traced.
    """

    tree: Any
    shown: list[tuple[str, specs.TensorSpec | None]]
    outputs: list[SubclassOutput] = field(default_factory=list)
    besides: list[SubclassOutput] = field(default_factory=list)
    writes: list[SubclassWrite] = field(default_factory=list)
    views: dict[int, Tensor] = field(default_factory=dict)


def read_results(
    result: Any, entered: Sequence[Entered], given: Mapping[int, None], ways: Ways, mixed: set[int], passing: Passing
) -> tuple[Results, tuple[Any, ...]]:
    """Take the result of a traced function apart; ``given`` are the containers and objects that it knows, by ``id``.

    ``mixed`` is the memory that was viewed in and out of grad mode.
    """
    leaves, names, tree = nesting.flatten_result(result, given)
    reader = _Reader(leaves, names, entered, Results(tree, []), ways, mixed, passing)
    reader.run()  # refuses what has no such sizes
    for n, x in zip(names, leaves, strict=True):
        reader.results.shown.append((n, specs.spec_of(x) if isinstance(x, Tensor) else None))
    return reader.results, tuple(reader.returned)


class _Reader:
    def __init__(
        self,
        leaves: Sequence[Any],
        names: Sequence[str],
        entered: Sequence[Entered],
        results: Results,
        ways: Ways,
        mixed: set[int],
        passing: Passing,
    ) -> None:
        self.leaves, self.names, self.results = leaves, names, results
        self._ways, self._mixed, self._passing = ways, mixed, passing
        self.returned: list[Any] = []
        self._calls: set[int] = set()
        self._inputs = {id(item.wrapper): k for k, item in reversed([*enumerate(entered)])}
        self._entered = entered
        self._hidden = {internals.storage_key(p) for item in entered if item.item.hidden for p in item.parts}
        self._memory = {internals.storage_key(item.wrapper): item.wrapper for item in entered}

    def run(self) -> None:
        wrappers = [(i, leaf) for i, leaf in enumerate(self.leaves) if self._is_ours(leaf)]
        self._check_histories(wrappers)
        first = {id(leaf): i for i, leaf in reversed(wrappers)}
        for i, leaf in enumerate(self.leaves):
            if id(leaf) in first and first[id(leaf)] != i:
                self.results.outputs.append(SubclassOutput(kind="same", of=first[id(leaf)]))
            elif id(leaf) in first:
                self.results.outputs.append(self._wrapper(i, leaf))
            else:
                if any(leaf is part for item in self._entered if item.item.gradient for part in item.parts):
                    raise RunEagerly(f"`{self.names[i]}` is a part of a tensor subclass that requires grad")
                if isinstance(leaf, Tensor) and leaf.requires_grad and self._has_gradients_of_two_kinds():
                    raise RunEagerly("a plain argument has gradients of two kinds")
                self.results.outputs.append(SubclassOutput(kind="plain", first=len(self.returned)))
                self._return([leaf], self.names[i])
        self._bases(wrappers)
        for k, item in enumerate(self._entered):
            if item.item.same_as == k:
                self._written(k, item)

    def _has_gradients_of_two_kinds(self) -> bool:
        """Tell whether a plain argument has a gradient that is a wrapper: a plain result gives it another."""
        plain = [item.item.gradient for item in self._entered if item.item.spec is None]
        specs = [each.spec for each in plain if isinstance(each, AnchoredGradient)]
        return any(spec is not None and spec.type is not SparseGradient for spec in specs)

    def _is_ours(self, leaf: Any) -> bool:
        """Tell whether an output is a wrapper, or an input that is looked after here, or a view of one."""
        if not isinstance(leaf, Tensor) or internals.is_wrapper(leaf):
            return isinstance(leaf, Tensor)
        return id(leaf) in self._inputs or id(internals.base_of(leaf)) in self._inputs

    def _wrapper(self, i: int, leaf: Tensor) -> SubclassOutput:
        if id(leaf) in self._inputs:
            return SubclassOutput(kind="input", of=self._inputs[id(leaf)])
        base = internals.base_of(leaf)
        if base is not None and (id(base) in self._inputs or internals.is_wrapper(base)):
            self._check_view(leaf, base)
            self.results.views[i] = leaf
        in_grad_mode = not internals.was_made_under_no_grad(leaf)
        if internals.storage_key(leaf) in self._mixed or not (in_grad_mode or leaf.is_leaf):
            raise RunEagerly(f"`{self.names[i]}` is viewed both in grad mode and out of it")
        if base is not None and id(base) in self._inputs:
            of = self._inputs[id(base)]
            return SubclassOutput(kind="view of input", of=of, requires_grad=in_grad_mode)
        if base is not None and internals.is_wrapper(base):
            return SubclassOutput(kind="view of output", of=-1, requires_grad=in_grad_mode)  # see `_bases`
        return self._detached_or_fresh(leaf, self.names[i])

    def _detached_or_fresh(self, leaf: Tensor, name: str) -> SubclassOutput:
        key = internals.storage_key(leaf)
        for k, item in enumerate(self._entered):
            looks = [(t.dtype, t.shape, t.stride(), t.storage_offset()) for t in (leaf, item.wrapper)]
            if key == internals.storage_key(item.wrapper) and looks[0] == looks[1] and not leaf.requires_grad:
                return SubclassOutput(kind="detached input", of=k)
        if self._memory.setdefault(key, leaf) is not leaf and not leaf.is_inference():
            raise RunEagerly(f"`{name}` is a detached view of a tensor subclass")
        return self._fresh(leaf, name)

    def _check_view(self, view: Tensor, base: Tensor) -> None:
        """Refuse a view that takes a size which varies: it could not be made anew."""

        def see(size: Any) -> Any:
            if internals.is_symbolic(size):
                raise RunEagerly("a view of a tensor subclass takes a size that varies, and is returned")
            return size

        several, under_no_grad = internals.is_one_of_several_views(view), internals.was_made_under_no_grad(view)
        if view.dtype != base.dtype or not (several or under_no_grad or internals.keeps_through_writes(view)):
            raise RunEagerly("a view of a tensor subclass, of another dtype or made by a custom Function, is returned")
        internals.view_again(view, base, see)

    def _fresh(self, leaf: Tensor, name: str) -> SubclassOutput:
        if leaf.requires_grad and leaf.is_leaf:
            raise RunEagerly(f"`{name}` is a leaf that the function made to require grad")
        if not internals.is_wrapper(leaf):
            self._return([leaf], name)
            return SubclassOutput(kind="new", first=len(self.returned) - 1, requires_grad=leaf.requires_grad)
        parts: Sequence[Tensor] = parts_of(leaf)
        tangent = None
        if leaf.requires_grad:
            tangent, parts = self._passing.way(leaf) or unwrapped(leaf, name)
        if any(internals.has_data_mutation(part) and not _fills_its_memory(part) for part in parts):
            raise RunEagerly(f"`{name}` is a part of what was written, in a tensor subclass")
        first, grad, passes = len(self.returned), leaf.requires_grad, self._passing.way(leaf) is not None
        self._return(parts, name)
        spec = spec_of(leaf, name, parts)
        return SubclassOutput(kind="new", first=first, spec=spec, tangent=tangent, requires_grad=grad, passes=passes)

    def _return(self, values: Sequence[Any], name: str) -> None:
        """Let the body return some values; what shares memory with a hidden input cannot be told from it."""
        for value in values if self._hidden else ():
            if isinstance(value, Tensor) and internals.storage_key(value) in self._hidden:
                raise RunEagerly(f"`{name}` shares memory with an argument that is changed")
        self.returned += values

    def _bases(self, wrappers: Sequence[tuple[int, Tensor]]) -> None:
        """Find what outputs are views of: another output, or a wrapper that is returned besides."""
        outputs = self.results.outputs
        numbers = {id(leaf): i for i, leaf in reversed(wrappers)}
        for i, leaf in wrappers:
            if outputs[i].kind == "view of output":
                base = internals.base_of(leaf)
                assert base is not None
                if id(base) not in numbers:
                    numbers[id(base)] = len(self.leaves) + len(self.results.besides)
                    made = self._detached_or_fresh(base, f"the base of {self.names[i]}")
                    self.results.besides.append(made)
                of, grad = numbers[id(base)], outputs[i].requires_grad
                outputs[i] = SubclassOutput(kind="view of output", of=of, requires_grad=grad)

    def _written(self, k: int, entered: Entered) -> None:
        """See what became of an input."""
        item, tensor = entered.item, entered.wrapper
        parts, state = zip(parts_of(tensor), entered.parts, strict=True), state_of(tensor)
        if state != entered.state or any(a is not b for a, b in parts):
            raise RunEagerly(f"`{item.name}` is changed in place other than in its values")
        versions = 0 if tensor.is_inference() else internals.version_of(tensor) - entered.version
        if not versions and tensor.requires_grad == (item.gradient is not None):
            return
        if (item.gradient is not None or tensor.requires_grad) and not item.hidden:
            self._ways.hide(item.position)
        if not item.hidden:
            self.results.writes.append(SubclassWrite(input=k, versions=versions))
            return
        history = tensor.grad_fn is not entered.history
        if history and item.requires_grad and item.is_leaf:
            raise RunEagerly(f"`{item.name}` is a leaf that requires grad, and is changed")
        self._hidden = set()
        if history:
            value = self._fresh(tensor, item.name)
        else:
            spec = spec_of(tensor, item.name) if item.spec else None
            value = SubclassOutput(kind="new", first=len(self.returned), spec=spec)
            self.returned += [part.detach() for part in entered.parts]
        self.results.writes.append(SubclassWrite(input=k, versions=versions, value=value, history=history))

    def _check_histories(self, wrappers: Sequence[tuple[int, Tensor]]) -> None:
        """See whether of an output another is computed: its gradient would not know of the other's."""
        ours = [(i, leaf) for i, leaf in wrappers if leaf.grad_fn is not None and id(leaf) not in self._inputs]
        nodes = {leaf.grad_fn: leaf for _, leaf in ours if self._passing.way(leaf) is None}
        bases = {id(leaf): internals.base_of(leaf) for _, leaf in wrappers}  # of which views are made anew
        written = [item.wrapper for item in self._entered if item.wrapper.grad_fn is not item.history]
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        starts = [leaf if (base := bases.get(id(leaf))) is None else base for leaf in tensors]
        self._check_history([*starts, *written], nodes | {leaf.grad_fn: leaf for leaf in written})
        views = [leaf for _, leaf in wrappers if bases[id(leaf)] is not None]
        self._check_history(views, {node: leaf for node, leaf in nodes.items() if any(leaf is each for each in views)})
        if self._calls:
            self._ways.passing |= self._calls
            raise Again

    def _name(self, tensor: Tensor) -> str:
        written = ((entered.wrapper, entered.item.name) for entered in self._entered)
        return next(n for t, n in [*zip(self.leaves, self.names, strict=True), *written] if t is tensor)

    def _check_history(self, starts: Sequence[Tensor], nodes: Mapping[Any, Tensor]) -> None:
        todo = [leaf.grad_fn for leaf in starts if leaf.grad_fn is not None]
        seen = set(todo)
        while todo:
            for node, _ in todo.pop().next_functions:
                if node in nodes and (number := self._passing.number(nodes[node])):
                    self._calls.add(number)
                elif node in nodes:
                    reason = "is a tensor subclass, returned or written with what is computed of it"
                    suggestion = "return it detached, to have it compiled"
                    raise RunEagerly(f"`{self._name(nodes[node])}` {reason}", suggestion=suggestion)
                if node is not None and node not in seen:
                    seen.add(node)
                    todo.append(node)


def _fills_its_memory(part: Tensor) -> bool:
    value = internals.from_functional(part)
    return bool(value.untyped_storage().nbytes() == value.numel() * value.element_size())
