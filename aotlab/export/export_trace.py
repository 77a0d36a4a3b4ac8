"""Trace the program that is exported, and write a flat graph from the tape."""

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
from aotlab._torch.pre_dispatch_level import function_modes_again
from aotlab._torch.replaced import replaced
from aotlab.capture import call as capture
from aotlab.capture import dedupe, synthetic_bases
from aotlab.capture.call import Target
from aotlab.capture.dynamic_sizes import choose_dynamic_sizes
from aotlab.capture.signals import RunEagerly, TraceEnds
from aotlab.errors import OutputError, RefusedError, UntraceableError, UsageError
from aotlab.export.composite_ops import keep_composites
from aotlab.frontends.direct import FunctionTarget, ModuleTarget
from aotlab.ir.fx_graphs import is_size, output_args, placeholders
from aotlab.ir.metadata import InputAliasInfo, OutputAliasInfo
from aotlab.ir.size_rules import rules_of
from aotlab.pipeline import refusal_of
from aotlab.trace import trace_stage as trace
from aotlab.trace.autograd_edges import edge_of
from aotlab.trace.deriver import Deriver, Tangents
from aotlab.trace.recorder import running
from aotlab.trace.records import SizeOf
from aotlab.trace.segments import Segment
from aotlab.trace.surroundings import HeldOutput

Decompositions = Mapping[internals.OpOverload, Any]
#: The types of values that a graph can return.
_RETURNED = (
    Tensor, int, float, bool, complex, str, type(None), torch.SymInt, torch.SymFloat, torch.dtype, torch.device,
)  # fmt: skip


def refuse(fact: str, suggestion: str) -> NoReturn:
    """Raise `RefusedError`, because a graph without a run-time function cannot express ``fact``."""
    raise RefusedError(fact, why="an exported graph cannot express that", suggestion=suggestion)


class _FixedSizes(TorchFunctionMode):
    """Specializes the sizes of the arguments of ops whose kernels do not support symbolic sizes (LSTM, STFT)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.lstm, torch.stft, Tensor.stft):
            varying = internals.is_symbolic
            args = pytree.tree_map_only(Tensor, lambda x: x.expand([*map(int, x.shape)]) if varying(x) else x, args)
        return func(*args, **(kwargs or {}))


class _Exported(Target):
    """The function or module that is exported.

    ``loss`` is the position of the output to differentiate. ``composites`` is None without ``pre_dispatch``. With
    ``pre_dispatch``, it is the table of decompositions, and composite ops that are not in the table are recorded as
    they were called. ``result`` is the traced result. ``stand_ins`` maps the ids of parameters and buffers to the
    traced tensors that replace them.
    """

    lifts_numbers = repeats_changes = False
    loss: int | None = None
    composites: Decompositions | None = None
    result: Any = None
    stand_ins: Mapping[int, Tensor] = {}

    def run(self, lifted: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function, check its result and store it."""
        self.stand_ins = dict(zip(map(id, self.lifted()), lifted, strict=True))
        inputs = [*lifted, *pytree.tree_leaves(args)]

        def run_sized() -> Any:
            with _FixedSizes():
                return super(_Exported, self).run(lifted, args, kwargs)

        result = run_sized() if self.composites is None else keep_composites(run_sized, self.composites, inputs)
        self.result = _checked(result, inputs, self.loss)
        return self.result


class ExportedModule(_Exported, ModuleTarget):
    """A module to be exported."""


class ExportedFunction(_Exported, FunctionTarget):
    """A function to be exported."""


def _cond(context: tuple[int, Any, _Exported], pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    """Replace ``torch.cond`` during the trace: call the op with the functions themselves, without Dynamo.

    Tensors that the functions use and that are not operands become operands. ``context`` has the id of the exporting
    thread, the original ``torch.cond`` and the export target.
    """
    thread, original_cond, target = context
    if not isinstance(pred, Tensor) or threading.get_ident() != thread:
        return original_cond(pred, true_fn, false_fn, operands)
    (leaves, nest), specs = pytree.tree_flatten(tuple(operands)), list[Any]()
    lifting = _Lifting(target)

    def flat(function: Any, *operands_given: Any) -> tuple[Any, ...]:
        lifting.operands = {
            id(outer): operand
            for outer, operand in zip(lifting.outer_tensors, operands_given[len(leaves) :], strict=True)
        }
        # function modes are off in a backward, where a checkpoint or a custom Function may call this function
        with function_modes_again(), lifting:
            results_of_function, spec = pytree.tree_flatten(
                function(*pytree.tree_unflatten(operands_given[: len(leaves)], nest))
            )
        results_of_function = pytree.tree_map_only(Tensor, lifting.lifted, results_of_function)
        if len(lifting.outer_tensors) > len(operands_given) - len(leaves):
            raise _MoreOperandsError
        specs.append(spec)
        return tuple(results_of_function)

    while True:
        with suppress(_MoreOperandsError):
            functions = partial(flat, true_fn), partial(flat, false_fn)
            results = internals.COND(pred, *functions, (*leaves, *lifting.outer_tensors))
            return pytree.tree_unflatten(results, specs[-1])


class _MoreOperandsError(Exception):
    """Raised if a function of ``torch.cond`` used tensors that are not operands yet.

    `_cond` catches this error, and calls the op again with these tensors as additional operands.
    """


class _Lifting(TorchFunctionMode):
    """Turns the outer tensors that a function of ``torch.cond`` uses into operands.

    ``outer_tensors`` are the outer tensors that were found so far. ``operands`` maps their ids to the operands that
    replace them.
    """

    def __init__(self, target: _Exported) -> None:
        super().__init__()
        self.target, self.outer_tensors, self.operands = target, list[Tensor](), dict[int, Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, self.lifted, (args, kwargs or {}))
        return func(*args, **kwargs)

    def lifted(self, value: Tensor) -> Tensor:
        """Return the operand that replaces an outer tensor; any other tensor is returned unchanged."""
        # In a backward, the module has its real parameters again: replace them by the traced ones.
        value = self.target.stand_ins.get(id(value), value)
        tape = running.recorders[-1].tape
        if not internals.is_functional(value) or tape.knows(internals.from_functional(value)):
            return value
        frame: FrameType | None = sys._getframe() if value.requires_grad else None
        while frame is not None and frame.f_code.co_name != "flat":
            in_module = isinstance(next(iter(frame.f_locals.values()), None), torch.nn.Module)
            in_function = frame.f_code.co_name == "forward" and not in_module and not torch.is_grad_enabled()
            # refused, because the autograd function has already connected the outer tensor with its own node
            if in_function or frame.f_globals["__name__"] == "torch.autograd.function":
                refuse("an autograd function in `torch.cond` takes a tensor from outside", "pass it as an operand")
            frame = frame.f_back
        if id(value) not in self.operands:
            self.outer_tensors.append(value)
            empty = partial(torch.empty_strided, dtype=value.dtype, device=value.device)
            self.operands[id(value)] = empty(value.shape, value.stride())
        return self.operands[id(value)]


def _checked(result: Any, inputs: Sequence[Any], loss: int | None) -> Any:
    """Check that the leaves of the result are tensors and plain values, and check the loss; return a new pytree."""
    leaves, spec = pytree.tree_flatten(result)
    for leaf in leaves:
        if not isinstance(leaf, _RETURNED):
            refuse(f"an output is or holds a `{type(leaf).__qualname__}`", "return tensors, plain values, and pytrees")
    if loss is not None:
        _make_loss(leaves, inputs, loss)
    return pytree.tree_unflatten(leaves, spec)


def _make_loss(leaves: list[Any], inputs: Sequence[Any], index: int) -> None:
    """Check that the loss is a scalar that requires grad, and that no other output requires grad.

    If the loss is an argument or a view, it is replaced in ``leaves`` by a clone.
    """
    if not 0 <= index < len(leaves):
        refuse(f"output_loss_index is {index}, and there are {len(leaves)} outputs", "pass the index of one of them")
    loss = leaves[index]
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        refuse(f"output {index}, the loss, does not require grad", "return a loss that does, or pass trace_joint=False")
    if loss.numel() != 1:
        refuse(f"output {index}, the loss, has the shape {tuple(loss.shape)}", "return a scalar, for example `.sum()`")
    for n, leaf in enumerate(leaves):
        if n != index and isinstance(leaf, Tensor) and leaf.requires_grad:
            refuse(f"output {n} requires grad, and only output {index} is the loss", "return its `.detach()`")
    with internals.disable_torch_function():
        is_view = internals.base_of(loss) is not None
    if is_view or any(loss is value for value in inputs):
        leaves[index] = loss.clone()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportTrace:
    """A trace that is ready to be exported.

    - ``args`` are the arguments that the user passed.
    - ``names`` and ``values`` are the names and values of the inputs of the exported graph. The parameters and buffers
      of the module come first. The position of an argument among these inputs is its position in the captured call plus
      ``shift``.
    - ``dedupe_numbers`` has for each graph input the index of its kept input (the input after deduplication). It has
      None for plain values, for unused tensors, and for every name of a tensor except the first.
    - ``live`` is the trace. ``gradients`` maps the indices of kept inputs to their gradients.
    - ``result`` is the traced result as a pytree, and ``outputs`` are its leaves.
    - ``assumptions`` are the conditions on symbolic sizes, as texts.
    """

    args: tuple[Any, ...]
    names: list[str]
    values: list[Any]
    shift: int
    dedupe_numbers: list[int | None]
    live: trace.Trace
    gradients: Mapping[int, Tensor | None]
    result: Any
    outputs: list[Any]
    assumptions: tuple[str, ...]

    @property
    def infos(self) -> tuple[InputAliasInfo, ...]:
        """The metadata of the kept inputs, for example whether they are mutated."""
        return self.live.metadata.input_info

    @property
    def places(self) -> list[tuple[int, InputAliasInfo]]:
        """A pair for each kept input: its position among the inputs of the exported graph, and its metadata.

        The pairs are in the order of the positions.
        """
        return [(n, self.infos[k]) for n, k in enumerate(self.dedupe_numbers) if k is not None]

    def new_value(self, n: int) -> Tensor | None:
        """Return the new value of graph input ``n``, which the function mutates."""
        k = self.dedupe_numbers[n]
        return None if k is None else self.live.value_of(trace.Source("input", k))

    def gradient(self, n: int) -> Tensor | None:
        """Return the gradient of graph input ``n``; None means that no gradient reaches it."""
        k = self.dedupe_numbers[n]
        return None if k is None else self.gradients.get(k)

    def check_gradients(self) -> None:
        """Raise if an input requires grad and no gradient reaches it."""
        with_gradient = {id(value) for n, value in enumerate(self.values) if self.gradient(n) is not None}
        for name, value in zip(self.names, self.values, strict=True):
            if isinstance(value, Tensor) and value.requires_grad and id(value) not in with_gradient:
                refuse(f"no gradient reaches `{name}`", "use it in the loss, or set its requires_grad to False")

    def graph(self, name: str, first_number: int, outputs: Sequence[Any]) -> fx.GraphModule:
        """Write the graph that returns ``outputs``.

        ``name`` is the format string for the names of the graph's inputs, which are numbered from ``first_number``.
        """
        live = self.live
        fakes = [None if k is None else live.inputs.fakes[k] for k in self.dedupe_numbers]
        inputs = [(name.format(n), fake) for n, fake in enumerate(fakes, first_number)]
        sizes = [each for each in live.inputs.placeholders if not isinstance(each[1], Tensor)]
        tangents = [(f"tangents_{n + 1}", fake) for n, fake in enumerate(live.tangents.fakes[: len(live.roots)])]
        tangents = tangents if self.gradients else []
        tensors = [each if isinstance(each, Tensor) else None for each in outputs]
        module = live.tape.graph("Exported", [*inputs, *sizes, *tangents], tensors, keep_impure="forward")
        nodes = placeholders(module.graph)
        for node, value, fake in zip(nodes, self.values, fakes, strict=False):
            if fake is None:  # a plain value, an unused tensor, or another name of a tensor
                is_tensor = isinstance(value, Tensor)
                node.meta["val"] = live.fake_mode.from_tensor(value, static_shapes=True) if is_tensor else value
        symbols = {size.node.expr: node for (_, size), node in zip(sizes, nodes[len(inputs) :], strict=False)}
        results: list[Any] = []
        with module.graph.inserting_before(module.graph.output_node()):
            for result, value in zip(output_args(module.graph), outputs, strict=True):
                if result is None:
                    is_symbol = isinstance(value, torch.SymInt | torch.SymFloat)
                    results.append(internals.write_size(value, symbols) if is_symbol else value)
                elif result not in results:
                    results.append(result)
                else:  # each output needs a node with a different name
                    results.append(module.graph.call_function(torch.ops.aten.alias.default, (result,)))
                    results[-1].meta.update(result.meta)
        module.graph.output_node().args = (tuple(results),)
        self._read_sizes(module.graph, nodes)
        module.graph.lint()
        module.recompile()
        module.meta["assumes"] = self.assumptions
        return module

    def _read_sizes(self, graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
        """Replace size placeholders by ops that read the sizes from the input tensors."""
        first_op = next(node for node in graph.nodes if node.op != "placeholder")
        sizes = [source for source in self.live.inputs.sources if isinstance(source, SizeOf)]
        for node, source in zip(filter(is_size, nodes), sizes, strict=True):
            with graph.inserting_before(first_op):
                argument = nodes[source.position + self.shift]
                read = graph.call_function(torch.ops.aten.sym_size.int, (argument, source.dim))
            read.meta.update(node.meta)
            node.replace_all_uses_with(read)
            graph.erase_node(node)
            if not read.users:
                graph.erase_node(read)


def _gradients(live: trace.Trace) -> dict[int, Tensor | None]:
    """Derive the backward of all outputs as one segment. Return the gradients by the indices of the kept inputs."""
    numbers = list(range(len(live.roots)))
    edges = {source.index: edge for edge, source in live.sources.items() if source.kind == "input"}
    roots, ends = tuple(map(edge_of, live.traced_roots)), tuple(edges.values())
    segment = Segment(tuple(numbers), roots, ends, frozenset(ends), None)
    fakes, traced = ([each[n] for n in numbers] for each in (live.tangents.fakes, live.tangents.traced))
    tangents = Tangents(fakes=fakes, traced=traced, of_entries=[numbers])
    deriver = Deriver(
        live.recorder,
        live.deriver.quirks,
        [segment],
        [[(end, None, 0) for end in ends]],
        tangents,
        live.deriver.holder,
    )
    return dict(zip(edges, deriver.derive(0, [True] * len(numbers)), strict=True))


def _check_call(call: capture.Call, leaves: Sequence[Any], module_tensors: Mapping[str, Tensor]) -> None:
    """Refuse a call that an exported graph cannot serve.

    Such a call uses tensors besides its arguments and ``module_tensors``, passes a tensor twice, or has hooks on
    inputs. ``leaves`` are the leaves of the arguments as a pytree.
    """
    lifted, arguments, names = call.values[: call.lifted_count], call.values[call.lifted_count :], call.state.names
    names_by_id = {id(tensor): name for name, tensor in module_tensors.items()}
    for name, tensor in zip(names, lifted, strict=False):
        if id(tensor) not in names_by_id:
            refuse(f"the function uses `{name}`, which is not an argument", "pass it, or register it as a buffer")
    if len(arguments) != len(leaves) or any(a is not b for a, b in zip(arguments, leaves, strict=True)):
        refuse("an argument is a container that is not a pytree", "register it in torch.utils._pytree, or pass a dict")
    for name, value in zip(names, call.values, strict=True):
        if isinstance(value, Tensor) and value.requires_grad and internals.is_hooked(value):
            refuse(f"`{name}` has a hook, which the graph would not call", "remove it for the export")
    for name, value in zip(names[call.lifted_count :], arguments, strict=True):
        if isinstance(value, Tensor):
            if id(value) in names_by_id:
                refuse(f"`{name}` and `{names_by_id[id(value)]}` are the same tensor", "pass a clone")
            names_by_id[id(value)] = name


def _check_trace(live: trace.Trace, gradients: Mapping[Any, Any], shared: Sequence[str]) -> None:
    """Refuse the side effects that an exported graph cannot express.

    ``shared`` has a text with the names of the inputs for each group of inputs that share memory.
    """
    if live.side_effects.hooks or live.metadata.grad_enabled_mutation is not None:
        refuse("the function registers a hook, or leaves grad mode changed", "do this outside of the function")
    if live.deriver.live or (gradients and live.metadata.backward_tokens):
        refuse("the backward calls an op with side effects, or writes a tensor", "leave this out")
    if live.bases:
        refuse(f"{shared[0]} share memory, and the function writes to it", "pass clones")


def _refuse_new_leaves(infos: Sequence[OutputAliasInfo]) -> None:
    for info in infos:
        if info.is_new_leaf:
            raise OutputError(
                f"`{info.name}` is a leaf that the function made to require grad",
                why="an exported graph returns plain results",
                suggestion="call requires_grad_() on the result of the exported graph",
            )


def trace_for_export(
    target: ExportedModule | ExportedFunction,
    args: Iterable[Any],
    module_tensors: Mapping[str, Tensor],
    *,
    joint: bool,
    dynamic: bool | None,
    decompositions: Decompositions | None,
    loss: int | None = None,
    pre_dispatch: bool = False,
) -> ExportTrace:
    """Run the stages of the pipeline up to the trace for a call of ``target`` with ``args``.

    ``module_tensors`` are the module's parameters and buffers by name. With ``joint``, the gradients are derived, too.
    ``dynamic`` and ``loss`` are the arguments ``dynamic_shapes`` and ``output_loss_index`` of `aot_export_module`;
    ``decompositions`` and ``pre_dispatch`` have the same names there.
    """
    if config.functionalize_rng_ops:
        raise UsageError("an exported graph takes no states of generators: set config.functionalize_rng_ops to False")
    if isinstance(args, Tensor):
        raise UsageError("args is a tensor; pass a tuple of the arguments")
    target.loss, target.composites = loss, (decompositions or {}) if pre_dispatch else None
    arguments, call, printed, surroundings = tuple(args), None, HeldOutput(), internals.Surroundings()
    arguments = pytree.tree_map(internals.marked, arguments)
    leaves = pytree.tree_leaves(arguments)
    try:
        cond_replacement = replaced(torch, "cond", partial(_cond, (threading.get_ident(), torch.cond, target)))
        with cond_replacement, nullcontext() if joint or pre_dispatch else torch.no_grad():
            _, call = capture.run(target, arguments, {})
            capture.check_modes(call.values)
            _check_call(call, leaves, module_tensors)
            deduped = dedupe.run(call, "drop")
            based, bases = synthetic_bases.run(call, deduped)
            varying = choose_dynamic_sizes(call, dynamic, None)
            shared = [" and ".join(f"`{deduped.names[k]}`" for k in group) for group in based.bases]
            if shared and varying:
                refuse(f"{shared[0]} share memory, and sizes vary", "pass clones, or dynamic_shapes=False")
            settings: dict[str, Any] = {"quirks": quirks.for_export(), "bases": bases, "varying": varying}
            settings |= {"decompositions": dict(decompositions or {}), "static_inputs": len(module_tensors)}
            try:
                with printed:
                    _, live = trace.run(call, deduped, keep_input_mutations=False, exact=True, **settings)
                _refuse_new_leaves(live.metadata.output_info)
                gradients = _gradients(live) if joint and live.training else {}
            except (RefusedError, TraceEnds):
                raise
            except Exception as error:
                if not varying:
                    raise
                suggestion = "pass dynamic_shapes=False to export it for the sizes of the arguments"
                raise UntraceableError(
                    f"the function cannot be traced with sizes that vary: {error}", suggestion=suggestion
                ) from error
    except (RefusedError, RunEagerly, trace.TraceFailed) as error:
        raise refusal_of(error, target, None if call is None else call.state) from error
    except KeyboardInterrupt:
        surroundings.restore()
        raise
    printed.release()
    _check_trace(live, gradients, shared)
    values, results = [*module_tensors.values(), *leaves], pytree.tree_leaves(target.result)
    places = {id(value): n for n, value in reversed(list(enumerate(values)))}
    numbers = {places[id(call.values[position])]: k for k, position in enumerate(deduped.kept)}
    rules = rules_of(live.recorder.sizes, call.state.names, dict(zip(deduped.kept, live.inputs.fakes, strict=True)))
    return ExportTrace(
        args=arguments,
        names=[*module_tensors, *call.state.names[call.lifted_count :]],
        values=values,
        shift=len(module_tensors) - call.lifted_count,
        dedupe_numbers=[numbers.get(n) for n in range(len(values))],
        live=live,
        gradients=gradients,
        result=target.result,
        outputs=[internals.from_functional(t) if isinstance(t, Tensor) else t for t in results],
        assumptions=() if rules is None else rules.texts,
    )
