"""The Inductor backend: Triton kernels on the GPU, C++ on the CPU.

It calls Inductor's ``compile_fx_inner`` entry, with the decompositions and joint-graph passes that `torch.compile`
uses, so that the same graph gets the same code. Before that, it rewrites the parts of a graph for which Inductor's
results would differ from eager's.

*Random numbers* equal `torch.compile`'s by default: a graph draws a seed for each random op, and kernels compute random
numbers from the seeds, which differ from eager's. With ``torch._inductor.config.fallback_random = True`` (read when a
graph is compiled), the numbers equal eager's: they are drawn from torch's generators in eager's order. The numbers also
equal eager's in cells of notebooks, in `aotlab.verify`, under `config.functionalize_rng_ops`, and in a graph with a
checkpoint that draws random numbers.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, fx

from aotlab import _torch as internals
from aotlab import config, events
from aotlab._torch import FakeTensorMode, HigherOrderOperator
from aotlab.backends import kernel_cache
from aotlab.backends.base import Backend, CompileRequest, KernelSource
from aotlab.backends.numbers import numbers_as_tensors, takes_numbers
from aotlab.capture.signals import RunEagerly
from aotlab.ir.fx_graphs import (
    STAYS,
    is_random,
    is_view,
    line_of,
    nodes_in,
    output_args,
    phase_of,
    placeholders,
    return_from,
)
from aotlab.trace.effects import chain_effects
from aotlab.trace.random_state import READ_STATE

_ATEN = torch.ops.aten


class InductorBackend(Backend):
    """Compiles graphs with Inductor."""

    name = "inductor"
    exact_draws = False
    takes_fakes = False

    def __init__(self, *, draws: Literal["torch", "eager"] = "torch", max_autotune: bool = False) -> None:
        """Make the backend.

        With ``draws="eager"``, random numbers equal eager's. With ``draws="torch"``, they equal `torch.compile`'s. With
        ``max_autotune``, Inductor measures several kernels for each matrix product and convolution, and uses the
        fastest.
        """
        self._draws = draws
        self._max_autotune = max_autotune

    @property
    def _exact(self) -> bool:
        return self._draws == "eager" or config.functionalize_rng_ops or internals.inductor_draws_as_eager()

    def needs_states(self, module: fx.GraphModule | None) -> bool:
        """Tell whether the random ops of a graph must take the states of generators as inputs.

        They must if the random numbers must equal eager's and Inductor may change the order of the random ops.
        """
        if internals.inductor_keeps_draws_in_order():
            return False
        return self._exact if module is None else _reads_states(module)

    def takes(self, module: fx.GraphModule) -> bool:
        """Tell whether the backend can compile a graph for all values of the symbolic floats in it."""
        return takes_numbers(module)

    def decompositions(self) -> dict[Any, Callable[..., Any]]:
        """Return Inductor's table of decompositions, without random ops if the random numbers must equal eager's."""
        table = internals.inductor_decompositions()
        exact = self._exact
        return with_checks({op: function for op, function in table.items() if not (exact and is_random(op))})

    def prepare(self, module: fx.GraphModule, fake_mode: FakeTensorMode) -> None:
        """Run Inductor's pattern matching over the joint graph."""
        exact = self._exact or _reads_states(module)
        if not exact:
            _drop_unused_draws(module)
        count = keep_unused(module)
        with torch.no_grad(), internals.disable_autocast(), _copies_hidden(module):
            internals.inductor_joint_passes(module, fake_mode, exact_random=exact)
        drop_unused(module, count)

    def compile(self, request: CompileRequest) -> Callable[..., Any]:
        """Compile one graph; the callable is boxed."""
        module = request.module
        floats = numbers_as_tensors(module, request.fake_mode)
        _plain_complex_numbers(module)
        _copied_constants(module)
        _put_into_copies(module)
        chain_effects(module, request.fake_mode)
        exact = self._exact or _reads_states(module)
        if exact:
            _check_functions(module)
        elif request.kind != "backward":
            _drop_unused_draws(module)
        count = keep_unused(module)
        output = next(node for node in reversed(module.graph.nodes) if node.op == "output")
        # A backward is compiled for the traced strides of its inputs, also of saved values. So Inductor must keep the
        # strides of all outputs of a forward.
        outputs_with_strides = (
            output.args[0] if request.kind == "forward" else output.args[0][: request.visible_outputs]
        )
        output.meta["user_visible_output_idxs"] = [
            i for i, node in enumerate(outputs_with_strides) if isinstance(node, fx.Node)
        ]
        with (
            torch.no_grad(),
            internals.disable_autocast(),
            internals.tracing_context(request.fake_mode),
            kernels_announced(request.graph_id),
            kernel_cache.disk_needed(),
        ):
            if request.kind == "forward" and not exact:  # with several segments, `prepare` has not done this
                internals.inductor_replace_random(module, request.fake_mode)
            if request.kind == "inference":
                internals.inductor_joint_passes(module, request.fake_mode, exact_random=exact)
            _share_symbols(module, request.fake_mode)
            results = (node.meta.get("val") if isinstance(node, fx.Node) else None for node in output.args[0][:count])
            groups = None if request.kind == "backward" else _storage_keys(results)
            targets = [node.target for node in nodes_in([module])]
            compiled = internals.inductor_compile(
                module,
                [node.meta["val"] for node in placeholders(module.graph)],
                fake_mode=request.fake_mode,
                is_inference=request.kind == "inference",
                is_backward=request.kind == "backward",
                static_inputs=request.static_inputs,
                graph_id=request.graph_id,
                shared=request.shared,
                exact_random=any(map(is_random, targets)) and not any(map(internals.is_inductors_draw, targets)),
                max_autotune=self._max_autotune,
                shows_passes=events.listening(),
                cached=config.cache and kernel_cache.is_ours(),
            )
            compiled.cache_miss = "" if compiled.from_cache else kernel_cache.miss(compiled.cache_key)
        return _adapted(compiled, floats, groups, request.visible_outputs) if floats or groups is not None else compiled

    def source(self, compiled: Any) -> str | None:
        """Return Inductor's output code."""
        source = getattr(compiled, "source_code", None)
        return source if isinstance(source, str) and source else None

    def kernels(self, compiled: Any) -> tuple[KernelSource, ...]:
        """Find the kernels in Inductor's output code, and their nodes in the mapping that Inductor stores with it."""
        source = self.source(compiled)
        origins = json.loads(getattr(compiled, "inductor_provenance_mapping_str", None) or "{}")
        kernels = () if source is None else kernels_in(source, origins.get("cppCodeToPost", {}))
        facts = {"from_cache": compiled.from_cache, "cache_miss": compiled.cache_miss}
        return tuple(replace(kernel, **facts) for kernel in kernels)


def kernels_announced(entry: int, engine: str = "aotlab") -> AbstractContextManager[None]:
    """Emit events about the kernels that Inductor compiles in a block, for the entry with the number ``entry``."""

    def report(what: internals.KernelEvent, name: str, duration_ns: int) -> None:
        if what == "header begins":
            events.emit(events.Begun(kind="header"))
        elif what == "header":
            events.emit(events.Spent(kind="header", duration_ns=duration_ns))
        elif what == "kernel begins":
            events.emit(events.KernelStarted(entry=entry, name=name, engine=engine))
        else:
            spent, cached = {"duration_ns": duration_ns}, what == "cached kernel"
            events.emit(events.KernelFinished(entry=entry, name=name, cached=cached, engine=engine, **spent))

    return internals.kernels_reported(report) if events.listening() else nullcontext()


_EXTERN = re.compile(r"^\s*(?:\w+ = )?((?:extern_kernels\.|torch\.ops\.)[\w.]+)\(.*$", re.MULTILINE)


def kernels_in(source: str, origins: Mapping[str, Sequence[str]]) -> tuple[KernelSource, ...]:
    """Find the kernels in Inductor's output code: the kernels that it defines, and the library kernels that it calls.

    ``origins`` maps the name of each kernel call to the names of its graph nodes.
    """
    kernels = []

    def nodes_of(call: str) -> tuple[str, ...]:  # a key is the kernel's name, then a colon and a number
        return tuple(name for key, names in origins.items() if f"{key}:".startswith(f"{call}:") for name in names)

    for statement in ast.parse(source).body:
        if not (isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)):
            continue
        function_name = ast.unparse(statement.value.func)
        texts = [a.value for a in statement.value.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        target = statement.targets[0]
        if not function_name.startswith("async_compile.") or not texts or not isinstance(target, ast.Name):
            continue
        language = "triton" if function_name.endswith("triton") else "c++"
        text, nodes = texts[-1].strip(), nodes_of(target.id)
        kernels.append(KernelSource(name=target.id, language=language, source=text, nodes=nodes))  # type: ignore[arg-type]
    for match in _EXTERN.finditer(source):
        comment_start = source.rfind(f"handles] {match[1]}:", 0, match.start())
        nodes = nodes_of(source[comment_start : match.start()].partition("\n")[0].removeprefix("handles] "))
        kernels.append(KernelSource(name=match[1], language="extern", source=match[0].strip(), nodes=nodes))
    return tuple(kernels)


def _storage_keys(values: Iterable[Any]) -> list[int | None]:
    """Return the storage key of each tensor; None for a value that is not a tensor."""
    return [internals.storage_key(value) if isinstance(value, Tensor) else None for value in values]


def _copy(value: Tensor) -> Tensor:
    """Copy a tensor into new memory, with the same strides. `clone` changes the strides of some views."""
    copy = value.clone()
    if copy.stride() == value.stride():
        return copy
    storage = value.untyped_storage().clone()
    return value.new_empty(0).set_(storage, value.storage_offset(), value.shape, value.stride())


def _adapted(compiled: Any, floats: Sequence[int], groups: list[int | None] | None, visible: int) -> Callable[..., Any]:
    """Wrap a compiled graph: pass some floats as tensors, and copy results that share memory by mistake.

    ``floats`` are the positions of inputs that are floats in the call and zero-dim tensors in the compiled graph.

    ``groups`` has the storage key of each result in the traced graph, and is None for a backward. Results with the same
    key also share memory in eager, and are not copied. Inductor may make other results share memory, too, for example
    as slices of the result of a ``cat``. The first call finds these results, and later calls copy the same results.

    The caller sees the first ``visible`` results. The others are saved values. They may share memory with each other,
    because nobody writes to them. A copy could have other strides than those that the backward was compiled for.
    """
    copied: list[int] | None = None

    def call(inputs: list[Any]) -> Any:
        nonlocal copied
        for n in floats:
            inputs[n] = torch.tensor(inputs[n], dtype=torch.float64)
        results = compiled(inputs)
        if groups is None:
            return results
        if len(results) > len(groups):  # `keep_unused` appended the results of unused ops
            results = results[: len(groups)]
        if copied is None:
            group_of_key: dict[int | None, int | None] = {}
            copied = []
            for i, (key, group) in enumerate(zip(_storage_keys(results), groups, strict=True)):
                if key is not None and i < visible:
                    group_of_key.setdefault(key, group)
                if group_of_key.get(key, group) != group:
                    copied.append(i)
        if copied:
            results = list(results)
            for i in copied:
                results[i] = _copy(results[i])
        return results

    call._boxed_call = True  # type: ignore[attr-defined]  # the mark that upstream's users look for
    for name in ("source_code", "inductor_provenance_mapping_str", "from_cache", "cache_miss"):
        setattr(call, name, getattr(compiled, name, None))
    return call


# --- graphs that Inductor cannot compile ----------------------------------------------------------------------------


def _plain_complex_numbers(module: fx.GraphModule) -> None:
    """Replace calls of ``complex`` by complex numbers.

    The recorder writes these calls because the printed graph would otherwise lose the sign of a zero.
    """
    numbers = {node: complex(*node.args) for node in module.graph.nodes if node.target is complex}
    for call in list(numbers):
        for user in list(call.users):  # torch 2.11's Inductor cannot compile the conjugate of a number
            if user.target is internals.CONJUGATE and all(each.op != "output" for each in user.users):
                numbers[user] = numbers[call].conjugate()
    for call in reversed(numbers):
        for user in list(call.users):
            user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda node: numbers.get(node, node))
        module.graph.erase_node(call)


def _copied_constants(module: fx.GraphModule) -> None:
    """Insert a copy of each constant before its uses. Some of Inductor's lowerings cannot use a zero-dim constant."""
    for constant in [node for node in module.graph.nodes if node.op == "get_attr"]:
        if not isinstance(constant.meta.get("val"), Tensor):
            continue
        with module.graph.inserting_after(constant):
            copy = module.graph.call_function(_ATEN.lift_fresh_copy.default, (constant,))
        copy.meta.update(constant.meta)
        constant.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)


def _share_symbols(module: fx.GraphModule, fake_mode: FakeTensorMode) -> None:
    """Let ops that compute sizes or numbers from the same tensor bind one symbol.

        x[mask], x[mask.detach()]

    Both ops read one tensor of the graph, because the trace drops the ``detach``. When Inductor runs the graph with
    fake tensors, both results have the symbol that this tensor remembers. If the second op bound another symbol, torch
    would raise an AssertionError. An op with equal arguments is replaced by the first one.
    """
    equal: dict[str, fx.Node] = {}
    symbols_of: dict[Any, list[Any]] = {}
    for node in list(module.graph.nodes):
        own = list(node.meta.get("unbacked_bindings") or ())
        if not own or not str(node.target).startswith("aten."):  # equal calls of a custom op may have different results
            continue
        first = equal.setdefault(f"{node.target}{node.args}{node.kwargs}", node)
        key: Any = first
        if node.target is _ATEN.nonzero.default:
            key = (node.args[0],)
        elif node.target is _ATEN._unique2.default:  # the other arguments do not change the size
            key = (node.target, node.args[0])
        elif node.target is _ATEN.index.Tensor:  # it calls `nonzero` for each mask
            key = tuple(each for each in node.args[1] if each is not None and each.meta["val"].dtype is torch.bool)
        symbols = symbols_of.setdefault(key, own)
        if symbols is not own and len(symbols) == len(own):
            internals.equate_symbols(fake_mode, own, symbols)
            del node.meta["unbacked_bindings"]
        if first is not node:
            node.replace_all_uses_with(first)
            module.graph.erase_node(node)


def _put_into_copies(module: fx.GraphModule) -> None:
    """Let eager's kernel run an ``index_put`` whose values share memory with the tensor that they are put into.

    Inductor's kernel for such an op would write the tensor while it reads the values.
    """
    for node in module.graph.nodes:
        if node.target in internals.PUTS and _storage_keys([node.args[0].meta["val"]]) == _storage_keys(
            [node.args[2].meta["val"]]
        ):
            node.target = internals.PUT_BY_KERNEL


# --- random numbers ------------------------------------------------------------------------------------------------

#: Ops for which Inductor draws a seed. A kernel then computes the random numbers from it.
_SEEDED = (_ATEN.rand.default, _ATEN.randn.default, _ATEN.randint.low)


def _drop_unused_draws(module: fx.GraphModule) -> None:
    """Remove random ops without users, as `torch.compile` does. With them, later ops would draw other numbers.

    Higher-order ops without users are in a graph only because their functions draw, so they are removed, too.
    """
    for node in reversed(list(nodes_in([module]))):
        if not node.users and (node.target in _SEEDED or isinstance(node.target, HigherOrderOperator)):
            node.graph.erase_node(node)


def _check_functions(module: fx.GraphModule) -> None:
    """Run eagerly if a function of a higher-order op draws random numbers that must equal eager's.

    Inductor keeps the order of random ops only in one graph, and removes higher-order ops whose results are unused.
    """
    if any(is_random(node.target) for node in nodes_in([module]) if node.graph is not module.graph):
        op = next(node for node in module.graph.nodes if isinstance(node.target, HigherOrderOperator))
        what, instead = "draws random numbers that must equal eager's", "draw them outside of the function"
        raise RunEagerly("function-unfit-for-op", op=op.target, what=what, instead=instead, at=line_of(op))


def _reads_states(module: fx.GraphModule) -> bool:
    """Tell whether a graph reads the state of a generator. Then its random numbers must equal eager's."""
    return any(node.target is READ_STATE for node in module.graph.nodes)


# --- arguments that eager's kernels reject and Inductor's accept ----------------------------------------------------

#: Ops whose index must not be negative, with the position of the index among the arguments.
_NOT_NEGATIVE = {_ATEN.index_select.default: 2, _ATEN.index_add.default: 2, _ATEN.index_copy.default: 2}
#: Ops whose decomposition in Inductor differs from eager. In torch 2.13, `multilabel_margin_loss` differs if a row of
#: targets ends before its last column.
_DECOMPOSED_DIFFERENTLY = (_ATEN.multilabel_margin_loss_forward.default,)

Decomposition = Callable[..., Any]


def with_checks(table: dict[Any, Decomposition]) -> dict[Any, Decomposition]:
    """Return a table of decompositions that raise for the same arguments as eager's kernels.

        x.index_select(0, i)     # eager: index out of range, if i is negative; Inductor counts from the end

    The text of the assertion does not matter, because a call whose graph raises runs again eagerly and raises eager's
    error.
    """
    table_with_checks = {op: function for op, function in table.items() if op not in _DECOMPOSED_DIFFERENTLY}
    table_with_checks[_ATEN._assert_async.default] = lambda condition: _ATEN._assert_async.msg(
        condition, "assertion failed"
    )
    for op, position in _NOT_NEGATIVE.items():
        table_with_checks[op] = _after_check(table.get(op), lambda *args, index=position: args[index] >= 0)
    loss = _ATEN.binary_cross_entropy.default
    table_with_checks[loss] = _after_check(table.get(loss), lambda x, *_: (x >= 0) & (x <= 1))
    return table_with_checks


def _after_check(decomposition: Decomposition | None, condition: Callable[..., Tensor]) -> Decomposition:
    """Return a decomposition that first asserts ``condition``, a function of the op's arguments.

    Without a ``decomposition``, the op itself is used after the assertion. The condition is asserted only on the CPU,
    because only kernels on the CPU can report a failed assertion.
    """

    def checked(*args: Any, **kwargs: Any) -> Any:
        if args[0].device.type == "cpu":
            _ATEN._assert_async.msg(condition(*args).all(), "a value that eager refuses")
        return NotImplemented if decomposition is None else decomposition(*args, **kwargs)

    return checked


def keep_unused(module: fx.GraphModule) -> int:
    """Append the unused results of ops that must stay (marked with `STAYS`) to the outputs of a graph.

    Otherwise Inductor would remove these ops, and the errors that they may raise would be lost. Returns the number of
    outputs that the graph had before.
    """
    outputs = output_args(module.graph)
    unused = [node for node in module.graph.nodes if STAYS in node.meta and not node.users]
    extra_outputs = [result for node in unused if (result := _tensor_of(module, node)) is not None]
    return_from(module.graph, (*outputs, *extra_outputs))
    return len(outputs)


def _tensor_of(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """Return a node for the first tensor among the results of an op, or None if no result is a tensor.

    If the op returns several results, a ``getitem`` node is added.
    """
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return node
    for i, item in enumerate(value if isinstance(value, (tuple, list)) else ()):
        if isinstance(item, Tensor):
            with module.graph.inserting_after(node):
                result = module.graph.call_function(operator.getitem, (node, i))
            result.meta.update(node.meta, val=item)
            return result
    return None


def drop_unused(module: fx.GraphModule, count: int) -> None:
    """Remove the outputs that `keep_unused` appended. ``count`` is the number of outputs that the graph had before.

    Also mark the nodes of these outputs with `STAYS` again, because Inductor's passes may have replaced the marked
    nodes by nodes without the mark.
    """
    outputs = output_args(module.graph)
    return_from(module.graph, outputs[:count])
    for node in outputs[count:]:
        if node is not None:
            node.meta[STAYS] = True


# --- copies that Inductor's joint-graph passes must not remove ------------------------------------------------------

#: Ops that allocate new memory, and whose result may have the same values as their input.
_COPIES = {
    _ATEN.clone.default, _ATEN._to_copy.default, torch.ops.prims.convert_element_type.default, _ATEN.repeat.default,
    _ATEN.constant_pad_nd.default, _ATEN.cat.default, _ATEN.pow.Tensor_Scalar, _ATEN.copy.default,
    _ATEN.slice_scatter.default, _ATEN.ceil.default, _ATEN.floor.default, _ATEN.round.default, _ATEN.trunc.default,
    _ATEN.mul.Tensor, _ATEN.div.Tensor, _ATEN.add.Tensor, _ATEN.sub.Tensor,
}  # fmt: skip


class _HiddenOp:
    """A function that replaces an op during Inductor's passes, so that no pattern of the passes matches the op."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.__name__ = self.__qualname__ = f"kept_{op.__name__}"
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)


@contextmanager
def _copies_hidden(joint: fx.GraphModule) -> Iterator[None]:
    """Hide some copies in a joint graph from Inductor's passes while the context is open.

    A copy is hidden if the backward uses it and the caller can reach the tensor that was copied. For ``x.clone() * w``,
    eager saves the copy, which does not change when ``x`` is written. Inductor's passes would remove the copy, and the
    backward would use ``x`` itself. So each hidden copy is replaced by a `_HiddenOp`, which no pass removes.
    """
    graph = joint.graph
    outputs = [node for node in output_args(graph) if node is not None and phase_of(node) == "forward"]
    within_reach = {_key(node) for node in [*graph.find_nodes(op="placeholder"), *outputs]} - {None}
    for node in graph.nodes:
        if node.target in _COPIES and phase_of(node) == "forward" and _key(node) not in within_reach:
            sources = [
                each for each in node.all_input_nodes if _key(each) in within_reach and _have_same_metadata(each, node)
            ]
            if sources and _is_used_late(node):
                node.target = _HiddenOp(node.target)
    try:
        yield
    finally:
        for node in graph.nodes:
            if isinstance(node.target, _HiddenOp):
                node.target = node.target.op
        joint.recompile()


def _key(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return internals.storage_key(value) if isinstance(value, Tensor) and value.layout == torch.strided else None


def _have_same_metadata(node: fx.Node, other: fx.Node) -> bool:
    value, other_value = node.meta["val"], other.meta["val"]
    return bool(
        value.shape == other_value.shape and value.dtype == other_value.dtype and value.device == other_value.device
    )


def _is_used_late(node: fx.Node) -> bool:
    """Tell whether the backward uses the result of a node or a view of this result."""
    calls = (user for user in node.users if user.op == "call_function")
    return any(phase_of(user) == "backward" or (is_view(user) and _is_used_late(user)) for user in calls)
