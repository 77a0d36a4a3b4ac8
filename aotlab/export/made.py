"""From a call to a flat graph: the trace of what is exported, and the graph that is written from its tape."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from aotlab import _torch as internals
from aotlab import config, quirks
from aotlab._torch import pytree
from aotlab._torch.pre_dispatch import function_modes_again
from aotlab._torch.replaced import replaced
from aotlab.capture import call as capture
from aotlab.capture import dedupe, synthetic_bases
from aotlab.capture.call import Target
from aotlab.capture.signals import RunEagerly
from aotlab.capture.varying import chosen
from aotlab.errors import RefusedError, UntraceableError, UsageError
from aotlab.export.pre_dispatch import kept_as_called
from aotlab.frontends.direct import FunctionTarget, ModuleTarget
from aotlab.ir.graphs import is_size, output_args, placeholders
from aotlab.ir.metadata import InputAliasInfo
from aotlab.ir.size_rules import rules_of
from aotlab.pipeline import refusal_of
from aotlab.trace import stage as trace
from aotlab.trace.deriver import Deriver, Tangents
from aotlab.trace.edges import edge_of
from aotlab.trace.records import SizeOf
from aotlab.trace.running import here
from aotlab.trace.segments import Segment
from aotlab.trace.surroundings import Printed

Decompositions = Mapping[internals.OpOverload, Any]
#: What a graph can return.
_RETURNED = (
    Tensor, int, float, bool, complex, str, type(None), torch.SymInt, torch.SymFloat, torch.dtype, torch.device,
)  # fmt: skip


def refuse(seen: str, suggestion: str) -> NoReturn:
    """Refuse what a graph without a run-time function cannot do."""
    raise RefusedError(seen, why="an exported graph cannot express that", suggestion=suggestion)


class _Sized(TorchFunctionMode):
    """Gives ops whose kernels know no sizes that vary tensors of those of this call, which the graph then assumes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.lstm, torch.stft, Tensor.stft):
            varying = internals.is_symbolic
            args = pytree.tree_map_only(Tensor, lambda x: x.expand([*map(int, x.shape)]) if varying(x) else x, args)
        return func(*args, **(kwargs or {}))


class _Exported(Target):
    """Keeps the traced ``result``; ``loss`` is the output to differentiate, ``composites`` what becomes of such ops.

    ``stand_ins`` are what is traced in the place of parameters and buffers, by the ids of those.
    """

    loss: int | None = None
    composites: Decompositions | None = None
    result: Any = None
    stand_ins: Mapping[int, Tensor] = {}

    def run(self, lifted: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it, and look at what it returns."""
        self.stand_ins = dict(zip(map(id, self.lifted()), lifted, strict=True))
        given = [*lifted, *pytree.tree_leaves(args)]

        def run() -> Any:
            with _Sized():
                return super(_Exported, self).run(lifted, args, kwargs)

        result = run() if self.composites is None else kept_as_called(run, self.composites, given)
        self.result = _checked(result, given, self.loss)
        return self.result


class ExportedModule(_Exported, ModuleTarget):
    """A module to be exported."""


class ExportedFunction(_Exported, FunctionTarget):
    """A function to be exported."""


def _cond(around: tuple[int, Any, _Exported], pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    """Stand for ``torch.cond``, which would have Dynamo capture its functions: let the trace take them as they are."""
    thread, otherwise, target = around
    if not isinstance(pred, Tensor) or threading.get_ident() != thread:
        return otherwise(pred, true_fn, false_fn, operands)
    (leaves, nest), specs = pytree.tree_flatten(tuple(operands)), list[Any]()
    lifting = _Lifting(target)

    def flat(function: Any, *given: Any) -> tuple[Any, ...]:
        lifting.own = {id(each): own for each, own in zip(lifting.found, given[len(leaves) :], strict=True)}
        with function_modes_again(), lifting:  # a backward leaves them out
            found, spec = pytree.tree_flatten(function(*pytree.tree_unflatten(given[: len(leaves)], nest)))
        found = pytree.tree_map_only(Tensor, lifting.lifted, found)
        if len(lifting.found) > len(given) - len(leaves):
            raise _UsedMoreError
        specs.append(spec)
        return tuple(found)

    while True:
        with suppress(_UsedMoreError):
            functions = partial(flat, true_fn), partial(flat, false_fn)
            results = internals.COND(pred, *functions, (*leaves, *lifting.found))
            return pytree.tree_unflatten(results, specs[-1])


class _UsedMoreError(Exception):
    """A function of ``torch.cond`` used tensors that are now among its operands."""


class _Lifting(TorchFunctionMode):
    """Gives a function the tensors around it that it uses by ``own`` ones, as operands; ``found`` are those so far."""

    def __init__(self, target: _Exported) -> None:
        super().__init__()
        self.target, self.found, self.own = target, list[Tensor](), dict[int, Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, self.lifted, (args, kwargs or {}))
        return func(*args, **kwargs)

    def lifted(self, value: Tensor) -> Tensor:
        """Return what the function is to have in place of a tensor."""
        value = self.target.stand_ins.get(id(value), value)  # a backward finds those that are not traced
        tape = here.active[-1].tape
        if not internals.is_functional(value) or tape.knows(internals.from_functional(value)):
            return value
        frame: FrameType | None = sys._getframe() if value.requires_grad else None
        while frame is not None and frame.f_code.co_name != "flat":
            in_module = isinstance(next(iter(frame.f_locals.values()), None), torch.nn.Module)
            own = frame.f_code.co_name == "forward" and not in_module and not torch.is_grad_enabled()
            if own or frame.f_globals["__name__"] == "torch.autograd.function":  # there it has got a history already
                refuse("in `torch.cond` an autograd function is given a tensor from outside", "pass it as an operand")
            frame = frame.f_back
        if id(value) not in self.own:
            self.found.append(value)
            empty = partial(torch.empty_strided, dtype=value.dtype, device=value.device)
            self.own[id(value)] = empty(value.shape, value.stride())
        return self.own[id(value)]


def _checked(result: Any, given: Sequence[Any], loss: int | None) -> Any:
    """Return a result in containers of its own, as a pytree of tensors and plain values."""
    leaves, spec = pytree.tree_flatten(result)
    for leaf in leaves:
        if not isinstance(leaf, _RETURNED):
            refuse(f"an output is or holds a `{type(leaf).__qualname__}`", "return tensors, plain values, and pytrees")
    if loss is not None:
        _make_loss(leaves, given, loss)
    return pytree.tree_unflatten(leaves, spec)


def _make_loss(leaves: list[Any], given: Sequence[Any], index: int) -> None:
    """Check that one output, and no other, can be differentiated as a loss; make it a tensor of its own."""
    if not 0 <= index < len(leaves):
        refuse(f"output_loss_index is {index}, and there are {len(leaves)} outputs", "pass the number of one")
    loss = leaves[index]
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        refuse(f"output {index}, the loss, does not require grad", "return one that does, or pass trace_joint=False")
    if loss.numel() != 1:
        refuse(f"output {index}, the loss, has the shape {tuple(loss.shape)}", "return a scalar, as by `.sum()`")
    for n, leaf in enumerate(leaves):
        if n != index and isinstance(leaf, Tensor) and leaf.requires_grad:
            refuse(f"output {n} requires grad, and only output {index} is the loss", "return its `.detach()`")
    with internals.disable_torch_function():
        is_view = internals.base_of(loss) is not None
    if is_view or any(loss is each for each in given):
        leaves[index] = loss.clone()


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A trace to be exported.

    ``args`` are as given; ``names`` and ``values`` are those of all graph inputs, of the module's tensors first,
    ``shift`` places further back than in the call; ``kept`` are their numbers among the kept inputs, None for plain
    values, what is not used, and further names of a tensor. ``gradients`` are by such numbers; ``result`` and
    ``outputs`` are what came out, nested and flat; ``assumes`` is what must hold for sizes that vary.
    """

    args: tuple[Any, ...]
    names: list[str]
    values: list[Any]
    shift: int
    kept: list[int | None]
    live: trace.Trace
    gradients: Mapping[int, Tensor | None]
    result: Any
    outputs: list[Any]
    assumes: tuple[str, ...]

    @property
    def infos(self) -> tuple[InputAliasInfo, ...]:
        """What became of the kept inputs."""
        return self.live.metadata.input_info

    @property
    def places(self) -> list[tuple[int, InputAliasInfo]]:
        """The same, with their numbers among the graph's inputs, in the order of those."""
        return [(n, self.infos[k]) for n, k in enumerate(self.kept) if k is not None]

    def new_value(self, n: int) -> Tensor | None:
        """Return what the function leaves in an input."""
        k = self.kept[n]
        return None if k is None else self.live.value_of(trace.Source("input", k))

    def gradient(self, n: int) -> Tensor | None:
        """Return the gradient of an input."""
        k = self.kept[n]
        return None if k is None else self.gradients.get(k)

    def check_gradients(self) -> None:
        """Refuse an input that requires grad and gets none."""
        reached = {id(value) for n, value in enumerate(self.values) if self.gradient(n) is not None}
        for name, value in zip(self.names, self.values, strict=True):
            if isinstance(value, Tensor) and value.requires_grad and id(value) not in reached:
                refuse(f"no gradient reaches `{name}`", "let it not require grad, or use it in the loss")

    def graph(self, name: str, first: int, outputs: Sequence[Any]) -> fx.GraphModule:
        """Write the graph that returns ``outputs``; its inputs are called ``name`` with numbers from ``first``."""
        live = self.live
        fakes = [None if k is None else live.inputs.fakes[k] for k in self.kept]
        inputs = [(name.format(n), fake) for n, fake in enumerate(fakes, first)]
        sizes = [each for each in live.inputs.placeholders if not isinstance(each[1], Tensor)]
        tangents = [(f"tangents_{n + 1}", fake) for n, fake in enumerate(live.tangents.fakes[: len(live.roots)])]
        tangents = tangents if self.gradients else []
        tensors = [each if isinstance(each, Tensor) else None for each in outputs]
        module = live.tape.graph("Exported", [*inputs, *sizes, *tangents], tensors, keep_impure="forward")
        nodes = placeholders(module.graph)
        for node, value, fake in zip(nodes, self.values, fakes, strict=False):
            if fake is None:  # a plain value, an unused parameter, or one more name of a tensor
                is_tensor = isinstance(value, Tensor)
                node.meta["val"] = live.fake_mode.from_tensor(value, static_shapes=True) if is_tensor else value
        symbols = {size.node.expr: node for (_, size), node in zip(sizes, nodes[len(inputs) :], strict=False)}
        returned: list[Any] = []
        with module.graph.inserting_before(module.graph.output_node()):
            for made, value in zip(output_args(module.graph), outputs, strict=True):
                if made is None:
                    is_symbol = isinstance(value, torch.SymInt | torch.SymFloat)
                    returned.append(internals.write_size(value, symbols) if is_symbol else value)
                elif made not in returned:
                    returned.append(made)
                else:  # each output has a name of its own
                    returned.append(module.graph.call_function(torch.ops.aten.alias.default, (made,)))
                    returned[-1].meta.update(made.meta)
        module.graph.output_node().args = (tuple(returned),)
        self._read_sizes(module.graph, nodes)
        module.graph.lint()
        module.recompile()
        module.meta["assumes"] = self.assumes
        return module

    def _read_sizes(self, graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
        """Let a graph read sizes from its inputs, where those of other stages take them."""
        behind = next(node for node in graph.nodes if node.op != "placeholder")
        of_sizes = [source for source in self.live.inputs.sources if isinstance(source, SizeOf)]
        for node, source in zip(filter(is_size, nodes), of_sizes, strict=True):
            with graph.inserting_before(behind):
                given = nodes[source.position + self.shift]
                read = graph.call_function(torch.ops.aten.sym_size.int, (given, source.dim))
            read.meta.update(node.meta)
            node.replace_all_uses_with(read)
            graph.erase_node(node)
            if not read.users:
                graph.erase_node(read)


def _gradients(live: trace.Trace) -> dict[int, Tensor | None]:
    """Differentiate all outputs at once, as one node; return the gradients of the kept inputs."""
    numbers = list(range(len(live.roots)))
    edges = {source.index: edge for edge, source in live.sources.items() if source.kind == "input"}
    roots, ends = tuple(map(edge_of, live.root_wrappers)), tuple(edges.values())
    whole = Segment(tuple(numbers), roots, ends, frozenset(ends), None)
    fakes, wrappers = ([each[n] for n in numbers] for each in (live.tangents.fakes, live.tangents.wrappers))
    tangents = Tangents(fakes=fakes, wrappers=wrappers, of_entries=[numbers])
    deriver = Deriver(live.recorder, [whole], [[(end, None, 0) for end in ends]], tangents, live.deriver.holder)
    return dict(zip(edges, deriver.derive(0, [True] * len(numbers)), strict=True))


def _check_call(call: capture.Call, leaves: Sequence[Any], own: Mapping[str, Tensor]) -> None:
    """Refuse what the function uses besides its arguments, and a tensor that is passed twice."""
    lifted, given, names = call.values[: call.lifted_count], call.values[call.lifted_count :], call.state.names
    known = {id(tensor): name for name, tensor in own.items()}
    for name, tensor in zip(names, lifted, strict=False):
        if id(tensor) not in known:
            refuse(f"`{name}` is used, which is no argument", "pass it as one; a module may register it as a buffer")
    if len(given) != len(leaves) or any(a is not b for a, b in zip(given, leaves, strict=True)):
        refuse("an argument is a container that is no pytree", "register it by torch.utils._pytree, or pass a dict")
    for name, value in zip(names, call.values, strict=True):
        if isinstance(value, Tensor) and value.requires_grad and internals.is_hooked(value):
            refuse(f"`{name}` has a hook, which the graph would not call", "remove it for the export")
    for name, value in zip(names[call.lifted_count :], given, strict=True):
        if isinstance(value, Tensor):
            if id(value) in known:
                refuse(f"`{name}` and `{known[id(value)]}` are the same tensor", "pass a clone")
            known[id(value)] = name


def traced(
    target: ExportedModule | ExportedFunction,
    args: Iterable[Any],
    own: Mapping[str, Tensor],
    *,
    joint: bool,
    dynamic: bool | None,
    decompositions: Decompositions | None,
    loss: int | None = None,
    pre_dispatch: bool = False,
) -> Made:
    """Take a call through the stages up to the trace; ``own`` are the module's parameters and buffers."""
    if config.functionalize_rng_ops:
        raise UsageError("an exported graph takes no states of generators: set config.functionalize_rng_ops to False")
    if isinstance(args, Tensor):
        raise UsageError("args is a tensor; pass a tuple of the arguments")
    target.loss, target.composites = loss, (decompositions or {}) if pre_dispatch else None
    arguments, call, printed, surroundings = tuple(args), None, Printed(), internals.Surroundings()
    arguments = pytree.tree_map(internals.marked, arguments)
    leaves = pytree.tree_leaves(arguments)
    try:
        of_cond = replaced(torch, "cond", partial(_cond, (threading.get_ident(), torch.cond, target)))
        with of_cond, nullcontext() if joint or pre_dispatch else torch.no_grad():
            _, call = capture.run(target, arguments, {})
            capture.check_modes(call.values)
            _check_call(call, leaves, own)
            deduped = dedupe.run(call, "drop")
            based, bases = synthetic_bases.run(call, deduped)
            varying = chosen(call, dynamic, None)
            shared = [" and ".join(f"`{deduped.names[k]}`" for k in group) for group in based.bases]
            if shared and varying:
                refuse(f"{shared[0]} share memory, and sizes vary", "pass clones, or dynamic_shapes=False")
            ways: dict[str, Any] = {"exact": True, "quirks": quirks.chosen(), "bases": bases, "varying": varying}
            ways |= {"decompositions": dict(decompositions or {}), "static_inputs": len(own)}
            try:
                with printed:
                    _, live = trace.run(call, deduped, keep_input_mutations=False, **ways)
                gradients = _gradients(live) if joint and live.training else {}
            except (RefusedError, RunEagerly):
                raise
            except Exception as error:
                if not varying:
                    raise
                why = "dynamic_shapes=False exports it for the sizes of the arguments"
                raise UntraceableError(f"it cannot be traced with sizes that vary: {error}", suggestion=why) from error
    except (RefusedError, RunEagerly, trace.TraceFailed) as error:
        raise refusal_of(error, target, None if call is None else call.state) from error
    except KeyboardInterrupt:
        surroundings.restore()
        raise
    printed.release()
    if live.side_effects.hooks or live.metadata.grad_enabled_mutation is not None:
        refuse("the function registers a hook or leaves another grad mode behind", "do that outside of it")
    if live.deriver.live or (gradients and live.metadata.backward_tokens):
        refuse("the backward calls an op with effects, or a checkpoint in it writes a buffer", "leave that out")
    if live.bases:
        refuse(f"{shared[0]} share memory, and it is written", "pass clones")
    values, results = [*own.values(), *leaves], pytree.tree_leaves(target.result)
    places = {id(value): n for n, value in reversed(list(enumerate(values)))}
    numbers = {places[id(call.values[position])]: k for k, position in enumerate(deduped.kept)}
    rules = rules_of(live.recorder.sizes, call.state.names, dict(zip(deduped.kept, live.inputs.fakes, strict=True)))
    return Made(
        args=arguments,
        names=[*own, *call.state.names[call.lifted_count :]],
        values=values,
        shift=len(own) - call.lifted_count,
        kept=[numbers.get(n) for n in range(len(values))],
        live=live,
        gradients=gradients,
        result=target.result,
        outputs=[internals.from_functional(t) if isinstance(t, Tensor) else t for t in results],
        assumes=() if rules is None else rules.texts,
    )
