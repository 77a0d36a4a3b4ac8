"""Read the result of a traced function: which outputs are wrappers, how to build them, and which inputs it wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from aotlab import _torch as internals
from aotlab._torch import parts_of
from aotlab.capture import nesting
from aotlab.capture.signals import RunEagerly
from aotlab.errors import SubclassError
from aotlab.ir import specs
from aotlab.ir.subclass_records import AnchoredGradient, SubclassInput, SubclassOutput, SubclassWrite
from aotlab.subclasses.edges import TraceFindings, unwrap_result
from aotlab.subclasses.parts import spec_of, state_of
from aotlab.subclasses.rewrap import RewrapMode
from aotlab.subclasses.sparse import SparseGradient


@dataclass(slots=True)
class TracedInput:
    """An input in the trace: the wrapper that the function gets, and its state before the function ran.

    ``version``, ``history`` and ``state`` are the version counter, the ``grad_fn`` and the result of `state_of` at that
    time.
    """

    item: SubclassInput
    wrapper: Tensor
    parts: list[Tensor]
    version: int
    history: Any
    state: tuple[Any, ...]

    @property
    def versions(self) -> int:
        """The number of times that the function has written the wrapper, read from its version counter."""
        return 0 if self.wrapper.is_inference() else internals.version_of(self.wrapper) - self.version

    @property
    def is_changed(self) -> bool:
        """Whether the function wrote the wrapper, or changed whether the wrapper requires grad."""
        return bool(self.versions) or self.wrapper.requires_grad != (self.item.gradient is not None)

    @property
    def must_be_copied(self) -> bool:
        """Whether the function must get a copy of the input in the next trace.

        That is so if the function changes the input, and autograd sees the change.
        """
        sees = self.item.gradient is not None or self.wrapper.requires_grad
        return sees and not self.item.is_copied and self.is_changed


@dataclass(slots=True)
class Results:
    """Instructions to build the function's results from the outputs of the compiled function.

    The results are nested as in ``tree``, and ``outputs`` says how to build each of them. ``shown`` has the name and
    the tensor spec of each output, for the report. ``extra_bases`` are wrappers that must be built only because outputs
    are views of them. ``writes`` are the writes to inputs. ``views`` maps the index of an output that is a view to the
    traced view.
    """

    tree: Any
    shown: list[tuple[str, specs.TensorSpec | None]]
    outputs: list[SubclassOutput] = field(default_factory=list)
    extra_bases: list[SubclassOutput] = field(default_factory=list)
    writes: list[SubclassWrite] = field(default_factory=list)
    views: dict[int, Tensor] = field(default_factory=dict)


def read_results(
    result: Any,
    inputs: Sequence[TracedInput],
    objects_before: Mapping[int, None],
    findings: TraceFindings,
    mixed: set[int],
    rewrapping: RewrapMode,
) -> tuple[Results, tuple[Any, ...]]:
    """Flatten and unwrap the result of a traced function; return the instructions and the plain tensors.

    ``inputs`` are the inputs that are wrappers, or whose gradients are. ``objects_before`` has the ids of the
    containers and objects that existed before the call. ``findings`` receives facts that another trace needs. ``mixed``
    has the keys of storages that were viewed both in grad mode and outside it. ``rewrapping`` is the mode under which
    the function was traced.
    """
    leaves, names, tree = nesting.flatten_result(result, objects_before)
    reader = _Reader(leaves, names, inputs, Results(tree, []), findings, mixed, rewrapping)
    reader.run()  # before `specs.spec_of`, which cannot describe the tensors without plain sizes that `run` refuses
    for n, x in zip(names, leaves, strict=True):
        reader.results.shown.append((n, specs.spec_of(x) if isinstance(x, Tensor) else None))
    return reader.results, tuple(reader.returned)


class _Reader:
    def __init__(
        self,
        leaves: Sequence[Any],
        names: Sequence[str],
        inputs: Sequence[TracedInput],
        results: Results,
        findings: TraceFindings,
        mixed: set[int],
        rewrapping: RewrapMode,
    ) -> None:
        self.leaves, self.names, self.results = leaves, names, results
        self._findings, self._mixed, self._rewrapping = findings, mixed, rewrapping
        self.returned: list[Any] = []
        self._calls_to_rewrap: set[int] = set()
        self._inputs = {id(item.wrapper): k for k, item in reversed([*enumerate(inputs)])}
        self._traced = inputs
        self._copied = {internals.storage_key(p) for item in inputs if item.item.is_copied for p in item.parts}
        self._memory = {internals.storage_key(item.wrapper): item.wrapper for item in inputs}

    def run(self) -> None:
        wrappers = [(i, leaf) for i, leaf in enumerate(self.leaves) if self._is_ours(leaf)]
        self._check_histories(wrappers)
        # If the call must be traced again, find all inputs to copy first, so that one more trace is enough.
        if self._findings.has_news:
            for item in self._traced:
                if item.must_be_copied:
                    self._findings.copy_input(item.item.position)
            self._findings.check()
        first = {id(leaf): i for i, leaf in reversed(wrappers)}
        for i, leaf in enumerate(self.leaves):
            if id(leaf) in first and first[id(leaf)] != i:
                self.results.outputs.append(SubclassOutput(kind="same", of=first[id(leaf)]))
            elif id(leaf) in first:
                self.results.outputs.append(self._wrapper(i, leaf))
            else:
                if any(leaf is part for item in self._traced if item.item.gradient for part in item.parts):
                    raise RunEagerly("subclass-part-returned", name=self.names[i])
                if isinstance(leaf, Tensor) and leaf.requires_grad and self._has_gradients_of_two_kinds():
                    raise RunEagerly("subclass-and-plain-gradient")
                self.results.outputs.append(SubclassOutput(kind="plain", first=len(self.returned)))
                self._return([leaf], self.names[i])
        self._bases(wrappers)
        for k, item in enumerate(self._traced):
            if item.item.same_as == k:
                self._written(k, item)
        self._findings.check()

    def _has_gradients_of_two_kinds(self) -> bool:
        """Tell whether a plain argument has a gradient that is a wrapper.

        A plain result would give that argument a plain gradient as well, and the backward has only one form.
        """
        plain = [item.item.gradient for item in self._traced if item.item.spec is None]
        specs = [each.spec for each in plain if isinstance(each, AnchoredGradient)]
        return any(spec is not None and spec.type is not SparseGradient for spec in specs)

    def _is_ours(self, leaf: Any) -> bool:
        """Tell whether an output must be built here: a wrapper, an item of ``inputs``, or a view of such an item."""
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
            raise RunEagerly("subclass-in-both-grad-modes", name=f"`{self.names[i]}`", done="viewed")
        if base is not None and id(base) in self._inputs:
            of = self._inputs[id(base)]
            return SubclassOutput(kind="view of input", of=of, requires_grad=in_grad_mode)
        if base is not None and internals.is_wrapper(base):
            return SubclassOutput(kind="view of output", of=-1, requires_grad=in_grad_mode)  # `_bases` sets ``of``
        return self._detached_or_fresh(leaf, self.names[i])

    def _detached_or_fresh(self, leaf: Tensor, name: str) -> SubclassOutput:
        key = internals.storage_key(leaf)
        for k, item in enumerate(self._traced):
            layouts = [(t.dtype, t.shape, t.stride(), t.storage_offset()) for t in (leaf, item.wrapper)]
            if key == internals.storage_key(item.wrapper) and layouts[0] == layouts[1] and not leaf.requires_grad:
                return SubclassOutput(kind="detached input", of=k)
        if self._memory.setdefault(key, leaf) is not leaf and not leaf.is_inference():
            raise RunEagerly("subclass-view-returned", why=f"`{name}` is a detached view")
        return self._fresh(leaf, name)

    def _check_view(self, view: Tensor, base: Tensor) -> None:
        """Refuse a view that depends on a symbolic size, because the view could not be regenerated."""

        def refuse_symbolic(size: Any) -> Any:
            if internals.is_symbolic(size):
                raise SubclassError("the function returns a view of a tensor subclass that takes a size that varies")
            return size

        several, under_no_grad = internals.is_one_of_several_views(view), internals.was_made_under_no_grad(view)
        if view.dtype != base.dtype or not (several or under_no_grad or internals.keeps_through_writes(view)):
            raise RunEagerly("subclass-view-returned", why="it has another dtype, or is made by a custom Function")
        internals.view_again(view, base, refuse_symbolic)

    def _fresh(self, leaf: Tensor, name: str) -> SubclassOutput:
        if leaf.requires_grad and leaf.is_leaf:
            raise RunEagerly("subclass-made-to-require-grad", name=name)
        if not internals.is_wrapper(leaf):
            self._return([leaf], name)
            return SubclassOutput(kind="new", first=len(self.returned) - 1, requires_grad=leaf.requires_grad)
        parts: Sequence[Tensor] = parts_of(leaf)
        rewrapped, tangent = self._rewrapping.unwrapped_result(leaf), None
        if leaf.requires_grad:
            tangent, parts = rewrapped or unwrap_result(leaf, name)
        if any(internals.has_data_mutation(part) and not _fills_its_memory(part) for part in parts):
            raise RunEagerly("subclass-view-returned", why=f"`{name}` views memory that is written")
        first, grad = len(self.returned), leaf.requires_grad
        self._return(parts, name)
        return SubclassOutput(
            kind="new",
            first=first,
            spec=spec_of(leaf, name, parts),
            tangent=tangent,
            requires_grad=grad,
            is_rewrapped=rewrapped is not None,
        )

    def _return(self, values: Sequence[Any], name: str) -> None:
        """Add tensors to the results that the compiled function of plain tensors returns.

        ``values`` are the parts of one result of the user's function, or the result itself. ``name`` is the name of
        this result in the notice. The call runs eagerly if one of the tensors shares memory with the copy of an input:
        in eager, the result would share memory with the input itself, and would change with it.
        """
        for value in values if self._copied else ():
            if isinstance(value, Tensor) and internals.storage_key(value) in self._copied:
                raise RunEagerly("subclass-changed-and-shared", name="an argument", other=f"the result `{name}`")
        self.returned += values

    def _bases(self, wrappers: Sequence[tuple[int, Tensor]]) -> None:
        """Find the base of each output that is a view. A base that is not an output becomes an additional result."""
        outputs = self.results.outputs
        numbers = {id(leaf): i for i, leaf in reversed(wrappers)}
        for i, leaf in wrappers:
            if outputs[i].kind == "view of output":
                base = internals.base_of(leaf)
                assert base is not None
                if id(base) not in numbers:
                    numbers[id(base)] = len(self.leaves) + len(self.results.extra_bases)
                    result = self._detached_or_fresh(base, f"the base of {self.names[i]}")
                    self.results.extra_bases.append(result)
                of, grad = numbers[id(base)], outputs[i].requires_grad
                outputs[i] = SubclassOutput(kind="view of output", of=of, requires_grad=grad)

    def _written(self, k: int, traced: TracedInput) -> None:
        """Check how the function changed input ``k``, and add the write to the instructions."""
        item, tensor = traced.item, traced.wrapper
        parts, state = zip(parts_of(tensor), traced.parts, strict=True), state_of(tensor)
        if state != traced.state or any(a is not b for a, b in parts):
            raise RunEagerly("subclass-changed-beyond-values", name=item.name)
        versions = traced.versions
        if not traced.is_changed:
            return
        if traced.must_be_copied:
            self._findings.copy_input(item.position)
        if not item.is_copied:
            self.results.writes.append(SubclassWrite(input=k, versions=versions))
            return
        history = tensor.grad_fn is not traced.history
        if history and item.requires_grad and item.is_leaf:
            raise RunEagerly("subclass-leaf-changed", name=item.name)
        self._copied = set()
        if history:
            value = self._fresh(tensor, item.name)
        else:
            spec = spec_of(tensor, item.name) if item.spec else None
            value = SubclassOutput(kind="new", first=len(self.returned), spec=spec)
            self.returned += [part.detach() for part in traced.parts]
        self.results.writes.append(SubclassWrite(input=k, versions=versions, value=value, history=history))

    def _check_histories(self, wrappers: Sequence[tuple[int, Tensor]]) -> None:
        """Check whether another result is computed from a wrapper that the caller receives.

        The caller receives the wrappers among the outputs, and the new values of written inputs. ``wrappers`` are the
        outputs that `_is_ours` selects, each with its index. The gradient of the other result must flow through the
        wrapper that the caller receives. But the compiled function computes only the parts of this wrapper.

        If the user's function got the wrapper from a call of a torch function, request another trace. That trace
        unwraps the result of the torch function, and wraps it again (`aotlab.subclasses.rewrap`). Otherwise raise
        `RunEagerly`.
        """
        ours = [(i, leaf) for i, leaf in wrappers if leaf.grad_fn is not None and id(leaf) not in self._inputs]
        nodes = {leaf.grad_fn: leaf for _, leaf in ours if self._rewrapping.unwrapped_result(leaf) is None}
        # The base of each output that is a view. The view is regenerated from its base, so the gradient of the view
        # flows through the base.
        bases = {id(leaf): internals.base_of(leaf) for _, leaf in wrappers}
        written = [item.wrapper for item in self._traced if item.wrapper.grad_fn is not item.history]
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        starts = [leaf if (base := bases.get(id(leaf))) is None else base for leaf in tensors]
        self._check_history([*starts, *written], nodes | {leaf.grad_fn: leaf for leaf in written})
        views = [leaf for _, leaf in wrappers if bases[id(leaf)] is not None]
        self._check_history(views, {node: leaf for node, leaf in nodes.items() if any(leaf is each for each in views)})
        self._findings.rewrap_calls(self._calls_to_rewrap)

    def _name(self, tensor: Tensor) -> str:
        written = ((item.wrapper, item.item.name) for item in self._traced)
        return next(n for t, n in [*zip(self.leaves, self.names, strict=True), *written] if t is tensor)

    def _check_history(self, starts: Sequence[Tensor], nodes: Mapping[Any, Tensor]) -> None:
        todo = [leaf.grad_fn for leaf in starts if leaf.grad_fn is not None]
        seen = set(todo)
        while todo:
            for node, _ in todo.pop().next_functions:
                if node in nodes and (number := self._rewrapping.number_of_call(nodes[node])):
                    self._calls_to_rewrap.add(number)
                elif node in nodes:
                    # Another result is computed from this wrapper, and the wrapper cannot be wrapped again in the
                    # trace, for example because it is a written input. The gradient of the other result would not flow
                    # through the wrapper that the caller has.
                    raise RunEagerly("subclass-beside-what-it-computes", name=f"`{self._name(nodes[node])}`")
                if node is not None and node not in seen:
                    seen.add(node)
                    todo.append(node)


def _fills_its_memory(part: Tensor) -> bool:
    value = internals.from_functional(part)
    return bool(value.untyped_storage().nbytes() == value.numel() * value.element_size())
