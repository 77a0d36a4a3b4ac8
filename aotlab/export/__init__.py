"""Export: a module as one flat graph without side effects, and what its inputs and outputs are.

    graph, signature = aotlab.aot_export_module(model, (x,), trace_joint=True, output_loss_index=0)
    graph(*parameters, *buffers, x)      # → (*new values of what is mutated, *outputs, *gradients)
    aotlab.export.save("model.json", graph, signature)

The stages are those of `aotlab.pipeline`, up to the trace. There is no run-time function to restore what a graph cannot
do (writes, aliases, histories): so the writes are returned as values, and what else there is to restore is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn

from aotlab._torch import pytree
from aotlab.capture import nesting
from aotlab.errors import MetadataMutationError, OutputError, UsageError
from aotlab.export.made import Decompositions, ExportedFunction, ExportedModule, refuse, traced
from aotlab.export.saved import load, save
from aotlab.export.signature import BackwardSignature, GraphSignature, signature_of
from aotlab.ir.graphs import output_args, placeholders
from aotlab.ir.metadata import InputAliasInfo, OutputType

__all__ = ["BackwardSignature", "GraphSignature", "aot_export_joint_simple", "aot_export_module", "load", "save"]


def aot_export_module(
    mod: nn.Module,
    args: Iterable[Any],
    *,
    trace_joint: bool,
    output_loss_index: int | None = None,
    pre_dispatch: bool = False,
    dynamic_shapes: bool | None = None,
    decompositions: Decompositions | None = None,
) -> tuple[fx.GraphModule, GraphSignature]:
    """Make of a module one flat graph, with its gradients or without, and a description of what goes in and out.

    Parameters
    ----------
    mod
        The module; it may write its buffers and arguments, and without ``trace_joint`` its parameters.
    args
        Example arguments, pytrees of tensors and plain values, which are taken as constant. They are not written.
    trace_joint
        The graph computes gradients, too; else the module is traced under ``no_grad``, or with ``pre_dispatch`` as is.
    output_loss_index
        Which of the flat outputs is the scalar loss, the only one that may require grad.
    pre_dispatch
        Ops that torch computes by others, such as ``linear``, stand in the graph as they are called, unless they write
        or return their arguments or autocast is on. So do changes of grad mode: run it in the mode of the export. What
        is written under ``no_grad`` is a value there, without a history.
    dynamic_shapes
        True: the sizes of the arguments may vary; None: those marked by ``torch._dynamo.mark_dynamic``, and the symbols
        of fake tensors; False: none. What the graph assumes of them is in its ``meta["assumes"]``.
    decompositions
        Ops to be replaced while tracing, as a backend may need it.

    Returns the graph, from ``(*parameters, *buffers, *user inputs)`` to ``(*new values, *user outputs, *gradients)``,
    and its `GraphSignature`. A parameter with several names has an input for each; the graph uses the first, which gets
    the gradient. Raises `RefusedError` for what such a graph cannot express; nothing was changed then. After
    ``torch._functorch.aot_autograd.aot_export_module`` of torch 2.13.

    Examples
    --------
    >>> import torch, aotlab
    >>> graph, signature = aotlab.aot_export_module(torch.nn.Linear(2, 1), (torch.ones(3, 2),), trace_joint=False)
    >>> signature.inputs_to_parameters
    {'arg0_1': 'weight', 'arg1_1': 'bias'}
    >>> graph(torch.ones(1, 2), torch.zeros(1), torch.ones(3, 2))
    (tensor([[2.],
            [2.],
            [2.]]),)
    """
    if not isinstance(mod, nn.Module):
        raise UsageError(f"aot_export_module takes a module, not {mod!r:.80}")
    if pre_dispatch and trace_joint:
        raise UsageError("pre_dispatch=True keeps ops that have no derivative in a graph: pass trace_joint=False")
    if trace_joint and output_loss_index is None:
        raise UsageError("trace_joint=True needs a loss to differentiate: pass its number, output_loss_index")
    parameters = dict(mod.named_parameters(remove_duplicate=False))
    buffers = dict(mod.named_buffers(remove_duplicate=False))
    own, loss = {**parameters, **buffers}, output_loss_index if trace_joint else None
    ways: dict[str, Any] = {"dynamic": dynamic_shapes, "loss": loss, "decompositions": decompositions}
    made = traced(ExportedModule(mod), args, own, joint=trace_joint, pre_dispatch=pre_dispatch, **ways)
    _check_inputs(made.infos, trace_joint)
    writes = [n for n, info in made.places if info.mutates_data]
    wanted = [n for n, info in made.places if trace_joint and info.requires_grad]
    if trace_joint:
        made.check_gradients()
    graph = made.graph("arg{}_1", 0, [*map(made.new_value, writes), *made.outputs, *map(made.gradient, wanted)])
    if loss is not None:
        _differentiate_loss(graph, len(writes) + loss)
    in_spec, out_spec = map(pytree.tree_structure, (((*own.values(), *made.args), {}), made.result))
    kinds: dict[str, Any] = {"output_count": len(made.outputs), "writes": writes, "gradients": wanted, "loss": loss}
    return graph, signature_of(graph, [*parameters], [*buffers], in_spec=in_spec, out_spec=out_spec, **kinds)


def aot_export_joint_simple(
    fn: Callable[..., Any], args: Iterable[Any], *, trace_joint: bool, decompositions: Decompositions | None = None
) -> fx.GraphModule:
    """Make of a function one graph with the function's own calling convention, with its gradients or without.

    Parameters
    ----------
    fn
        Takes tensors and plain values, and returns a tuple or list of them. It may write none of its arguments, and
        return neither these nor views, nor use other tensors.
    args, decompositions
        Example arguments, and ops to be replaced while tracing.
    trace_joint
        With gradients: the graph then goes from ``(*args, *tangents)`` to ``(*outputs, *gradients)``, with a tangent
        for each output that requires grad and a gradient, or None, for each argument; `aotlab.default_partition`
        splits it. Else, or if nothing requires grad, it goes from ``args`` to the outputs.

    Raises `RefusedError` for what such a graph cannot express. After
    ``torch._functorch.aot_autograd.aot_export_joint_simple`` of torch 2.13, whose joint graph takes two lists.

    Examples
    --------
    >>> import torch, aotlab
    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> graph = aotlab.aot_export_joint_simple(lambda x: (x * x,), (x,), trace_joint=True)
    >>> graph(x.detach(), torch.ones(2))
    (tensor([1., 4.]), tensor([2., 4.]))
    """
    if not callable(fn):
        raise UsageError(f"aot_export_joint_simple takes a function, not {fn!r:.80}")
    made = traced(ExportedFunction(fn), args, {}, joint=trace_joint, dynamic=None, decompositions=decompositions)
    if any(map(nesting.is_container, made.args)):
        refuse("an argument is a container", "pass what it holds as arguments of their own")
    if type(made.result) not in (tuple, list) or any(map(nesting.is_container, made.result)):
        refuse(f"the function returns a `{type(made.result).__qualname__}` or nests its outputs", "return a flat tuple")
    _check_inputs(made.infos, joint=True)
    written = next((info for info in made.infos if info.mutates_data), None)
    if written is not None:
        refuse(f"the function writes its argument `{written.name}`", "return the new value")
    for info in made.live.metadata.output_info:
        if info.output_type not in (OutputType.NON_ALIAS, OutputType.UNSAFE_VIEW_ALIAS):
            raise OutputError(f"`{info.name}` shares memory with an argument or output", suggestion="return a clone")
    if not made.gradients:
        return made.graph("arg{}_1", 0, made.outputs)
    return made.graph("primals_{}", 1, [*made.outputs, *map(made.gradient, range(len(made.values)))])


def _check_inputs(infos: Sequence[InputAliasInfo], joint: bool) -> None:
    """Refuse what the function may do to its inputs in a compiled call only."""
    for info in infos:
        if info.mutates_metadata:
            raise MetadataMutationError(
                f"`{info.name}` changes its sizes or strides in place",
                argument=info.name,
                why="an exported graph cannot do that to its inputs",
                suggestion="use the out-of-place form, as t() for t_()",
            )
        if joint and info.mutates_data and (info.requires_grad or info.requires_grad_after):
            how = "requires grad" if info.requires_grad else "gets an autograd history"
            refuse(f"`{info.name}` is written and {how}", "write detached values, or return the new value")


def _differentiate_loss(module: fx.GraphModule, position: int) -> None:
    """Let the backward in a graph begin with one, the gradient of the loss, in the place of a tangent."""
    graph = module.graph
    loss, tangent = output_args(graph)[position], placeholders(graph)[-1]
    assert loss is not None
    value = loss.meta["val"]
    with graph.inserting_after(loss):
        kind = {"dtype": value.dtype, "device": value.device}
        ones = graph.call_function(torch.ops.aten.full.default, ([1] * value.dim(), 1), kind)
    ones.meta.update(tangent.meta, partitioner_tag="is_backward")
    tangent.replace_all_uses_with(ones)
    graph.erase_node(tangent)
    graph.lint()
    module.recompile()
