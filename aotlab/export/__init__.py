"""Export a module as one flat graph without side effects, with a signature that describes its inputs and outputs.

    graph, signature = aotlab.aot_export_module(model, (x,), trace_joint=True, output_loss_index=0)
    graph(*parameters, *buffers, x)      # → (*new values of mutated inputs, *outputs, *gradients)
    aotlab.export.save("model.json", graph, signature)

Export runs the stages of `aotlab.pipeline` up to the trace. An exported graph has no run-time function, which could
write inputs, regenerate aliases or build autograd history. So the graph returns the new values of mutated inputs, and
export refuses all programs that need a run-time function for other effects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn

from aotlab._torch import pytree
from aotlab.capture import nesting
from aotlab.errors import MetadataMutationError, OutputError, UsageError
from aotlab.export.export_trace import Decompositions, ExportedFunction, ExportedModule, refuse, trace_for_export
from aotlab.export.graph_files import load, save
from aotlab.export.signature import BackwardSignature, GraphSignature, signature_of
from aotlab.ir.fx_graphs import output_args, placeholders
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
    """Export a module as one flat graph, with or without gradients, and describe its inputs and outputs.

    Parameters
    ----------
    mod
        The module. It may write its buffers and arguments and, without ``trace_joint``, its parameters.
    args
        Example arguments: pytrees of tensors and plain values. The plain values become constants. The export does not
        write the arguments.
    trace_joint
        If true, the graph also computes gradients. Otherwise the module is traced under ``no_grad``, or in the present
        grad mode with ``pre_dispatch``.
    output_loss_index
        The position of the scalar loss among the flat outputs. The other outputs must not require grad.
    pre_dispatch
        If true, the graph calls a composite op (an op that torch computes by other ops, for example ``linear``) as the
        program does. If the op writes or returns its arguments, or if autocast is on, the graph calls the other ops.
        The graph also contains the changes of grad mode, so it must run in the grad mode of the export. A value that
        was written under ``no_grad`` has no autograd history in the graph.
    dynamic_shapes
        True makes the sizes of all arguments dynamic. None makes a size dynamic only if ``torch._dynamo.mark_dynamic``
        marked it, or if it is a symbolic size of a fake tensor. False makes no size dynamic. ``meta["assumes"]`` of the
        graph has the conditions on the sizes under which the graph is correct.
    decompositions
        A table that maps ops to functions that the trace records in their place.

    Returns the graph, from ``(*parameters, *buffers, *user inputs)`` to ``(*new values, *user outputs, *gradients)``,
    and its `GraphSignature`. A parameter with several names has one input per name. The graph uses only the first of
    these inputs, which gets the gradient. Raises `RefusedError` if such a graph cannot express the program. Then the
    export has changed nothing.
    Source: ``torch._functorch.aot_autograd.aot_export_module`` of torch 2.13.

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
        raise UsageError("trace_joint=True needs a loss to differentiate: pass its index as output_loss_index")
    parameters = dict(mod.named_parameters(remove_duplicate=False))
    buffers = dict(mod.named_buffers(remove_duplicate=False))
    module_tensors, loss = {**parameters, **buffers}, output_loss_index if trace_joint else None
    settings: dict[str, Any] = {"dynamic": dynamic_shapes, "loss": loss, "decompositions": decompositions}
    exported = trace_for_export(
        ExportedModule(mod), args, module_tensors, joint=trace_joint, pre_dispatch=pre_dispatch, **settings
    )
    _check_inputs(exported.infos, trace_joint)
    writes = [n for n, info in exported.places if info.mutates_data]
    with_gradient = [n for n, info in exported.places if trace_joint and info.requires_grad]
    if trace_joint:
        exported.check_gradients()
    graph = exported.graph(
        "arg{}_1", 0, [*map(exported.new_value, writes), *exported.outputs, *map(exported.gradient, with_gradient)]
    )
    if loss is not None:
        _differentiate_loss(graph, len(writes) + loss)
    in_spec, out_spec = map(pytree.tree_structure, (((*module_tensors.values(), *exported.args), {}), exported.result))
    positions: dict[str, Any] = {"writes": writes, "gradients": with_gradient, "loss": loss}
    return graph, signature_of(
        graph,
        [*parameters],
        [*buffers],
        output_count=len(exported.outputs),
        in_spec=in_spec,
        out_spec=out_spec,
        **positions,
    )


def aot_export_joint_simple(
    fn: Callable[..., Any], args: Iterable[Any], *, trace_joint: bool, decompositions: Decompositions | None = None
) -> fx.GraphModule:
    """Export a function as one graph with the function's own calling convention, with or without gradients.

    Parameters
    ----------
    fn
        A function of tensors and plain values that returns a flat tuple or list of them. It must not write its
        arguments, return an argument or a view of one, or use tensors that are not arguments.
    args, decompositions
        Example arguments, and a table that maps ops to functions that the trace records in their place.
    trace_joint
        If true, the graph also computes gradients. It takes ``(*args, *tangents)`` and returns ``(*outputs,
        *gradients)``, with one tangent per output that requires grad, and one gradient or None per argument.
        `aotlab.default_partition` can split it. If false, or if nothing requires grad, the graph takes ``args`` and
        returns the outputs.

    Raises `RefusedError` if such a graph cannot express the function. Source:
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
    exported = trace_for_export(
        ExportedFunction(fn), args, {}, joint=trace_joint, dynamic=None, decompositions=decompositions
    )
    if any(map(nesting.is_container, exported.args)):
        refuse("an argument is a container", "pass its contents as separate arguments")
    if type(exported.result) not in (tuple, list) or any(map(nesting.is_container, exported.result)):
        refuse(
            f"the function returns a `{type(exported.result).__qualname__}` or nests its outputs", "return a flat tuple"
        )
    _check_inputs(exported.infos, joint=True)
    mutated = next((info for info in exported.infos if info.mutates_data), None)
    if mutated is not None:
        refuse(f"the function writes its argument `{mutated.name}`", "return the new value")
    for info in exported.live.metadata.output_info:
        if info.output_type not in (OutputType.NON_ALIAS, OutputType.UNSAFE_VIEW_ALIAS):
            raise OutputError(f"`{info.name}` shares memory with an argument or output", suggestion="return a clone")
    if not exported.gradients:
        return exported.graph("arg{}_1", 0, exported.outputs)
    return exported.graph("primals_{}", 1, [*exported.outputs, *map(exported.gradient, range(len(exported.values)))])


def _check_inputs(infos: Sequence[InputAliasInfo], joint: bool) -> None:
    """Raise if the function mutates an input in a way that a graph without a run-time function cannot express.

    ``joint`` says whether the graph also computes gradients.
    """
    for info in infos:
        if info.mutates_metadata:
            raise MetadataMutationError(
                f"the function changes the sizes or strides of `{info.name}` in place",
                argument=info.name,
                why="an exported graph cannot change the sizes or strides of its inputs",
                suggestion="use the form that returns a new tensor, for example t() instead of t_()",
            )
        if info.made_to_require_grad:
            refuse(f"`requires_grad_()` is called on `{info.name}`", "call it outside of the function")
        if joint and info.mutates_data and (info.requires_grad or info.requires_grad_after):
            reason = "requires grad" if info.requires_grad else "gets an autograd history"
            refuse(f"`{info.name}` is written and {reason}", "write detached values, or return the new value")


def _differentiate_loss(module: fx.GraphModule, position: int) -> None:
    """Replace the tangent of the loss by a tensor of ones, so that the backward needs no tangent as input.

    The loss is the output at ``position``.
    """
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
