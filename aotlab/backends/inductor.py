"""The Inductor backend: Triton kernels on the GPU, C++ on the CPU.

It uses Inductor's inner entry, with the decompositions and joint-graph passes that `torch.compile` uses, so that the
same graph gets the same code. Around these it changes graphs where Inductor would compute something else than eager.

*Random numbers* are by default those of `torch.compile`: a graph draws a seed for each random op, and kernels make
numbers of these, others than eager's. With ``torch._inductor.config.fallback_random = True``, read when a graph is
compiled, they are eager's, from torch's generators in eager's order. So they are in notebooks' cells and in
`aotlab.verify`, under `config.functionalize_rng_ops`, and in a graph with a checkpoint that draws.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, fx

from aotlab import _torch as internals
from aotlab import config
from aotlab._torch import FakeTensorMode
from aotlab.backends.base import Backend, CompileRequest, KernelSource
from aotlab.backends.numbers import numbers_as_tensors, takes_numbers
from aotlab.ir.graphs import STAYS, is_random, is_view, output_args, phase_of, placeholders, return_from
from aotlab.trace.effects import thread_tokens
from aotlab.trace.random_state import STATE_OF

_ATEN = torch.ops.aten


class InductorBackend(Backend):
    """Compile graphs by Inductor."""

    name = "inductor"
    takes_fakes = False

    def __init__(self, *, draws: Literal["torch", "eager"] = "torch", max_autotune: bool = False) -> None:
        """Make the backend.

        ``draws`` says whose random numbers it takes: eager's, or those of `torch.compile`. With ``max_autotune`` it
        tries several kernels for a matrix product or convolution, and takes the fastest.
        """
        self._draws = draws
        self._max_autotune = max_autotune

    @property
    def _exact(self) -> bool:
        return self._draws == "eager" or config.functionalize_rng_ops or internals.inductor_draws_as_eager()

    def needs_states(self, module: fx.GraphModule | None) -> bool:
        """Tell whether random ops have to take states of generators, since Inductor may change their order."""
        if internals.inductor_keeps_draws_in_order():
            return False
        return self._exact if module is None else _reads_states(module)

    def takes(self, module: fx.GraphModule) -> bool:
        """Tell whether it can compile a graph for all values of the numbers in it."""
        return takes_numbers(module)

    def decompositions(self) -> dict[Any, Callable[..., Any]]:
        """Return Inductor's table; without random ops, if they are to draw as eager does."""
        table = internals.inductor_decompositions()
        exact = self._exact
        return with_checks({op: function for op, function in table.items() if not (exact and is_random(op))})

    def prepare(self, module: fx.GraphModule, fake_mode: FakeTensorMode) -> None:
        """Run Inductor's pattern matching over the joint graph."""
        exact = self._exact or _reads_states(module)
        if not exact:
            _drop_unused_draws(module)
        count = keep_unused(module)
        with torch.no_grad(), internals.disable_autocast(), _copies_kept(module):
            internals.inductor_joint_passes(module, fake_mode, exact_random=exact)
        drop_unused(module, count)

    def compile(self, request: CompileRequest) -> Callable[..., Any]:
        """Compile one graph; the callable is boxed."""
        module = request.module
        floats = numbers_as_tensors(module, request.fake_mode)
        _plain_complex_numbers(module)
        _copied_constants(module)
        _put_into_copies(module)
        thread_tokens(module, request.fake_mode)
        exact = self._exact or _reads_states(module) or request.kind == "backward"
        if not exact:
            _drop_unused_draws(module)
        count = keep_unused(module)
        output = next(node for node in reversed(module.graph.nodes) if node.op == "output")
        # A backward is compiled for the strides that the trace saw, also of what is saved: Inductor must keep them all.
        kept = output.args[0] if request.kind == "forward" else output.args[0][: request.visible_outputs]
        output.meta["user_visible_output_idxs"] = [i for i, node in enumerate(kept) if isinstance(node, fx.Node)]
        with torch.no_grad(), internals.disable_autocast(), internals.tracing_context(request.fake_mode):
            if request.kind == "forward" and not exact:  # of what is in several parts no joint graph was prepared
                internals.inductor_replace_random(module, request.fake_mode)
            if request.kind == "inference":
                internals.inductor_joint_passes(module, request.fake_mode, exact_random=exact)
            results = (node.meta.get("val") if isinstance(node, fx.Node) else None for node in output.args[0][:count])
            groups = None if request.kind == "backward" else _memory(results)
            targets = [node.target for node in module.graph.nodes]
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
            )
        return _around(compiled, floats, groups) if floats or groups is not None else compiled

    def source(self, compiled: Any) -> str | None:
        """Return Inductor's output code."""
        source = getattr(compiled, "source_code", None)
        return source if isinstance(source, str) and source else None

    def kernels(self, compiled: Any) -> tuple[KernelSource, ...]:
        """Read the kernels off Inductor's output code, and their nodes off what it says beside."""
        source = self.source(compiled)
        origins = json.loads(getattr(compiled, "inductor_provenance_mapping_str", None) or "{}")
        return () if source is None else kernels_in(source, origins.get("cppCodeToPost", {}))


_EXTERN = re.compile(r"^\s*(?:\w+ = )?((?:extern_kernels\.|torch\.ops\.)[\w.]+)\(.*$", re.MULTILINE)


def kernels_in(source: str, origins: Mapping[str, Sequence[str]]) -> tuple[KernelSource, ...]:
    """Find the kernels in Inductor's output code: those that it defines, and the library calls that it makes."""
    found = []

    def made_of(call: str) -> tuple[str, ...]:  # a call goes by the kernel's name and a number, as in comments above it
        return tuple(name for key, names in origins.items() if f"{key}:".startswith(f"{call}:") for name in names)

    for statement in ast.parse(source).body:
        if not (isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)):
            continue
        called = ast.unparse(statement.value.func)
        texts = [a.value for a in statement.value.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        target = statement.targets[0]
        if not called.startswith("async_compile.") or not texts or not isinstance(target, ast.Name):
            continue
        language = "triton" if called.endswith("triton") else "c++"
        text, nodes = texts[-1].strip(), made_of(target.id)
        found.append(KernelSource(name=target.id, language=language, source=text, nodes=nodes))  # type: ignore[arg-type]
    for match in _EXTERN.finditer(source):
        above = source.rfind(f"handles] {match[1]}:", 0, match.start())
        nodes = made_of(source[above : match.start()].partition("\n")[0].removeprefix("handles] "))
        found.append(KernelSource(name=match[1], language="extern", source=match[0].strip(), nodes=nodes))
    return tuple(found)


def _memory(values: Iterable[Any]) -> list[int | None]:
    """Name the memory of each tensor; None for what is none."""
    return [internals.storage_key(value) if isinstance(value, Tensor) else None for value in values]


def _around(compiled: Any, floats: Sequence[int], groups: list[int | None] | None) -> Callable[..., Any]:
    """Hand over tensors in the place of some floats; copy results that share memory, as by a ``cat``.

    Not those in ``groups``, the graph's, and the same ones each time.
    """
    copied: list[int] | None = None

    def call(inputs: list[Any]) -> Any:
        nonlocal copied
        for n in floats:
            inputs[n] = torch.tensor(inputs[n], dtype=torch.float64)
        results = compiled(inputs)
        if groups is None:
            return results
        if len(results) > len(groups):  # what is computed only because it may raise, or draws
            results = results[: len(groups)]
        if copied is None:
            seen: dict[int, int | None] = {}
            pairs = enumerate(zip(_memory(results), groups, strict=True))
            copied = [i for i, (key, group) in pairs if key is not None and seen.setdefault(key, group) != group]
        if copied:
            results = list(results)
            for i in copied:
                results[i] = results[i].clone()
        return results

    call._boxed_call = True  # type: ignore[attr-defined]  # the mark that upstream's users look for
    for name in ("source_code", "inductor_provenance_mapping_str"):  # Inductor's own
        setattr(call, name, getattr(compiled, name, None))
    return call


# --- what Inductor cannot take -------------------------------------------------------------------------------------


def _plain_complex_numbers(module: fx.GraphModule) -> None:
    """Put complex numbers where the recorder has calls of ``complex``, which keep a zero's sign in a graph's text."""
    numbers = {node: complex(*node.args) for node in module.graph.nodes if node.target is complex}
    for call in list(numbers):
        for user in list(call.users):  # torch 2.11's Inductor cannot take the conjugate of a number
            if user.target is internals.CONJUGATE and all(each.op != "output" for each in user.users):
                numbers[user] = numbers[call].conjugate()
    for call in reversed(numbers):
        for user in list(call.users):
            user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda node: numbers.get(node, node))
        module.graph.erase_node(call)


def _copied_constants(module: fx.GraphModule) -> None:
    """Let each constant be copied before it is used; some of Inductor's lowerings cannot take a bare one of no size."""
    for constant in [node for node in module.graph.nodes if node.op == "get_attr"]:
        if not isinstance(constant.meta.get("val"), Tensor):
            continue
        with module.graph.inserting_after(constant):
            copy = module.graph.call_function(_ATEN.lift_fresh_copy.default, (constant,))
        copy.meta.update(constant.meta)
        constant.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)


def _put_into_copies(module: fx.GraphModule) -> None:
    """Let kernels copy a tensor of which parts are put into itself, where Inductor would write while it reads."""
    for node in module.graph.nodes:
        if node.target in internals.PUTS and _memory([node.args[0].meta["val"]]) == _memory([node.args[2].meta["val"]]):
            node.target = internals.PUT_BY_KERNEL


# --- random numbers ------------------------------------------------------------------------------------------------

#: Ops for which Inductor takes a seed.
_SEEDED = (_ATEN.rand.default, _ATEN.randn.default, _ATEN.randint.low)


def _drop_unused_draws(module: fx.GraphModule) -> None:
    """Leave out draws that nobody uses, as `torch.compile` does: they would take seeds."""
    for node in reversed(list(module.graph.nodes)):
        if node.target in _SEEDED and not node.users:
            module.graph.erase_node(node)


def _reads_states(module: fx.GraphModule) -> bool:
    """Tell whether a graph reads the state of a generator, which is then to be moved on as eager moves it on."""
    return any(node.target is STATE_OF for node in module.graph.nodes)


# --- what eager's kernels refuse and Inductor's would take ---------------------------------------------------------

#: Ops that take no negative index, and the position of their index.
_NOT_NEGATIVE = {_ATEN.index_select.default: 2, _ATEN.index_add.default: 2, _ATEN.index_copy.default: 2}
#: Ops that Inductor's own decomposition computes otherwise than eager: with targets that end early, by torch 2.13.
_COMPUTED_OTHERWISE = (_ATEN.multilabel_margin_loss_forward.default,)

Decomposition = Callable[..., Any]


def with_checks(table: dict[Any, Decomposition]) -> dict[Any, Decomposition]:
    """Return a table of decompositions whose results raise where eager's kernels do.

        x.index_select(0, i)     # eager: index out of range, if i is negative; Inductor counts from the end

    A graph that raises is as good as eager's error: eager then runs the call.
    """
    found = {op: function for op, function in table.items() if op not in _COMPUTED_OTHERWISE}
    found[_ATEN._assert_async.default] = lambda condition: _ATEN._assert_async.msg(condition, "assertion failed")
    for op, position in _NOT_NEGATIVE.items():
        found[op] = _after_check(table.get(op), lambda *args, at=position: args[at] >= 0)
    loss = _ATEN.binary_cross_entropy.default
    found[loss] = _after_check(table.get(loss), lambda x, *_: (x >= 0) & (x <= 1))
    return found


def _after_check(decomposition: Decomposition | None, condition: Callable[..., Tensor]) -> Decomposition:
    """Make a decomposition that asks for a condition first, where kernels can say that it does not hold."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        if args[0].device.type == "cpu":
            _ATEN._assert_async.msg(condition(*args).all(), "a value that eager refuses")
        return NotImplemented if decomposition is None else decomposition(*args, **kwargs)

    return checked


def keep_unused(module: fx.GraphModule) -> int:
    """Return unused results of ops that stay behind a graph's outputs; return how many outputs there were."""
    outputs = output_args(module.graph)
    kept = [node for node in module.graph.nodes if STAYS in node.meta and not node.users]
    more = [result for node in kept if (result := _tensor_of(module, node)) is not None]
    return_from(module.graph, (*outputs, *more))
    return len(outputs)


def _tensor_of(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """Return a node for the first tensor among an op's results."""
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
    """Take back what `keep_unused` did to a graph that had ``count`` outputs: its passes may have replaced nodes."""
    outputs = output_args(module.graph)
    return_from(module.graph, outputs[:count])
    for node in outputs[count:]:
        if node is not None:
            node.meta[STAYS] = True


# --- copies that the passes over a joint graph must not leave out --------------------------------------------------

#: Ops of new memory whose result may be what they are given, element by element.
_COPIES = {
    _ATEN.clone.default, _ATEN._to_copy.default, torch.ops.prims.convert_element_type.default, _ATEN.repeat.default,
    _ATEN.constant_pad_nd.default, _ATEN.cat.default, _ATEN.pow.Tensor_Scalar, _ATEN.copy.default,
    _ATEN.slice_scatter.default, _ATEN.ceil.default, _ATEN.floor.default, _ATEN.round.default, _ATEN.trunc.default,
    _ATEN.mul.Tensor, _ATEN.div.Tensor, _ATEN.add.Tensor, _ATEN.sub.Tensor,
}  # fmt: skip


class _Unknown:
    """Stands for an op while the passes look at a graph."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.__name__ = self.__qualname__ = f"kept_{op.__name__}"
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)


@contextmanager
def _copies_kept(joint: fx.GraphModule) -> Iterator[None]:
    """Hide the copies in a joint graph that the backward uses, of what is within the caller's reach.

    Of ``x.clone() * w`` eager keeps the copy, which does not change when ``x`` is written; the passes would give the
    backward ``x`` itself. So they see an op that they do not know.
    """
    graph = joint.graph
    outputs = [node for node in output_args(graph) if node is not None and phase_of(node) == "forward"]
    within_reach = {_key(node) for node in [*graph.find_nodes(op="placeholder"), *outputs]} - {None}
    for node in graph.nodes:
        if node.target in _COPIES and phase_of(node) == "forward" and _key(node) not in within_reach:
            like = [each for each in node.all_input_nodes if _key(each) in within_reach and _alike(each, node)]
            if like and _is_used_late(node):
                node.target = _Unknown(node.target)
    try:
        yield
    finally:
        for node in graph.nodes:
            if isinstance(node.target, _Unknown):
                node.target = node.target.op
        joint.recompile()


def _key(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return internals.storage_key(value) if isinstance(value, Tensor) and value.layout == torch.strided else None


def _alike(node: fx.Node, other: fx.Node) -> bool:
    one, two = node.meta["val"], other.meta["val"]
    return bool(one.shape == two.shape and one.dtype == two.dtype and one.device == two.device)


def _is_used_late(node: fx.Node) -> bool:
    """Tell whether a node, or a view of it, is used by the backward."""
    calls = (user for user in node.users if user.op == "call_function")
    return any(phase_of(user) == "backward" or (is_view(user) and _is_used_late(user)) for user in calls)
