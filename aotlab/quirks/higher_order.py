"""Higher-order ops, such as ``torch.cond``: ops that take functions. A graph stores each function as a subgraph.

    true_graph_0 = self.true_graph_0; false_graph_0 = self.false_graph_0
    cond = torch.ops.higher_order.cond(gt, true_graph_0, false_graph_0, (x, w))

Each function is traced on fake tensors like those that the op passes to it. The derivative of a higher-order op is
again a higher-order op; its functions compute the derivatives of the original functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from aotlab import _torch as internals
from aotlab._torch import has_effects, pytree
from aotlab._torch.higher_order_ops import parts
from aotlab._torch.replaced import replaced
from aotlab.capture.signals import RunEagerly
from aotlab.errors import DoubleBackwardError
from aotlab.guards.user_code import user_line
from aotlab.ir.fx_graphs import Phase, may_have_effects
from aotlab.trace.escapes import Handler
from aotlab.trace.inputs import value_of
from aotlab.trace.quirk import Quirk
from aotlab.trace.recorder import Recorder, running
from aotlab.trace.tape import Tape

_Function = Callable[..., Any]
#: The name of a function in the graph, the function, and the arguments with which the op calls it.
_Call = tuple[str, _Function, Sequence[Any]]


class HigherOrder(Quirk):
    """Records higher-order ops, as the docstring of this file describes."""

    name = "hops"

    def claims(self) -> Mapping[Any, Handler]:
        return dict.fromkeys(_RULES, lambda guard, op, args, kwargs: _RULES[op].call(*args, **kwargs))


class _Nested(TorchFunctionMode):
    """Records the higher-order ops that are called inside a function of another higher-order op."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _RULES:
            return _RULES[func].call(*args, **(kwargs or {}))
        with internals.disable_torch_function():  # skips the `EscapeGuard`, the function mode around the trace
            return func(*args, **(kwargs or {}))


class _Rule:
    """The rules for one higher-order op ``op``: how it calls its functions, and how it is differentiated."""

    op: Any
    #: Whether the op copies the results of its functions. Then a function may return one of its arguments, because the
    #: result of the op does not share memory with that argument.
    copies = False
    #: Whether the op does not return the results of its functions, but only computes with them. Then, too, a function
    #: may return one of its arguments.
    computes = False
    #: The backward of the op takes the first ``needs`` results of the op.
    needs = 0
    #: The phases in which the functions may draw random numbers. In the backward they may, if eager draws again there.
    may_draw: tuple[Phase, ...] = ()
    #: The mode under which the op calls its functions.
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext

    def calls(self, *args: Any) -> list[_Call]:
        """Return the functions among the arguments, each with the arguments with which the op calls it."""
        raise NotImplementedError

    def fake(self, graphs: Sequence[fx.GraphModule], *args: Any) -> Any:
        """Compute the result of the op on fake tensors. ``graphs`` are the graphs of the functions in `calls`."""
        return self.op(*args)

    def keeping(self, *args: Any) -> tuple[tuple[Any, ...], Sequence[Any]]:
        """Return other arguments for the op, with which the op also returns the values that its backward needs.

        These values become the last results of the op. The second item of the returned pair has one item for each of
        these values, after the op was recorded. For example, `scan` is called with a step function that also returns
        the carried values before the step.
        """
        return args, ()

    def backward(self, wanted: Any, args: Any, saved: Sequence[Tensor], tangents: Sequence[Tensor]) -> Sequence[Any]:
        """Return the gradients of the tensors in ``args`` that are marked in ``wanted``, in order.

        ``wanted`` is nested like ``args``, with a bool for each leaf. ``saved`` are the first ``needs`` results of the
        op, then the results that `keeping` adds. ``tangents`` are the gradients of the floating-point results.
        """
        raise DoubleBackwardError(
            f"aotlab cannot compute this second derivative, because it has no rule for the derivative of `{self.op}`",
            line=user_line(),
            suggestion="replace the higher-order op by a Python loop or by ordinary ops",
        )

    def call(self, *args: Any) -> Any:
        """Handle a call of the op in a trace."""
        leaves, spec = pytree.tree_flatten(args)
        if torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            *results, count = _Differentiable.apply(self, spec, *leaves)  # type: ignore[no-untyped-call]  # untyped in torch
            return tuple(results[:count])
        return self.record(*args)

    def record(self, *args: Any) -> Any:
        """Record the op, with the graphs of its functions."""
        recorder = running.recorders[-1]
        args = pytree.tree_map_only(Tensor, lambda each: value_of(each, f"an argument of `{self.op}`"), args)
        with internals.outside_of_trace():
            calls = self.calls(*args)
        graphs = [_traced(recorder, self, *each) for each in calls]
        of = {id(function): graph for (_, function, _), graph in zip(calls, graphs, strict=True)}
        args = pytree.tree_map(lambda leaf: of.get(id(leaf), leaf), args)
        mode = recorder.fake_mode
        constants = replaced(mode, "allow_non_fake_inputs", True)  # the graphs may contain real tensors as constants
        # higher-order ops inside the graphs need a shape environment
        shape_env = replaced(mode, "shape_env", mode.shape_env or internals.ShapeEnv())
        with (
            internals.disable_torch_function(),
            internals.outside_of_trace(),
            torch.no_grad(),
            mode,
            constants,
            shape_env,
        ):
            results = self.fake(graphs, *args)
        recorder.append(self.op, args, {}, results)
        return pytree.tree_map_only(Tensor, internals.to_functional, results)


class _Differentiable(torch.autograd.Function):
    """The autograd function that records a call of a higher-order op whose arguments require grad.

    Its outputs include the values that the backward needs. So these values have a ``grad_fn`` for higher derivatives.
    """

    @staticmethod
    def forward(ctx: Any, rule: _Rule, spec: Any, *leaves: Any) -> Any:
        args, kept = rule.keeping(*pytree.tree_unflatten(leaves, spec))
        results = tuple(rule.record(*args))
        ctx.rule, ctx.spec, ctx.result_count = rule, spec, len(results) - len(kept)
        ctx.zeros = [partial(torch.zeros, each.shape, dtype=each.dtype, device=each.device) for each in results]
        casting = internals.under_autocast_as_now
        others = {n: leaf for n, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
        ctx.others = {n: casting(leaf) if callable(leaf) else leaf for n, leaf in others.items()}
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        ctx.save_for_backward(*tensors, *results[: rule.needs], *results[ctx.result_count :])
        ctx.floats = _floats(results)
        ctx.mark_non_differentiable(*(each for n, each in enumerate(results) if n not in ctx.floats))
        ctx.set_materialize_grads(False)
        return (*results, ctx.result_count)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradients = gradients[:-1]  # the last result is a number
        saved, needed = iter(ctx.saved_tensors), ctx.needs_input_grad[2:]
        leaves = [ctx.others[n] if n in ctx.others else next(saved) for n in range(len(needed))]
        args, wanted = pytree.tree_unflatten(leaves, ctx.spec), pytree.tree_unflatten(needed, ctx.spec)
        last = ctx.result_count
        # In a higher derivative, the results that `keeping` added may have gradients, too. Then the arguments that
        # `keeping` returns are differentiated.
        if any(each is not None for each in gradients[last:]):
            last, (args, _) = len(gradients), ctx.rule.keeping(*args)
        tangents = [ctx.zeros[n]() if gradients[n] is None else gradients[n] for n in ctx.floats if n < last]
        leaf_gradients = iter(ctx.rule.backward(wanted, args, tuple(saved), tangents))
        return None, None, *(next(leaf_gradients) if needs else None for needs in needed)


def _joint(function: _Function, count: int, wanted: Sequence[int]) -> _Function:
    """Make the function that computes the gradients of ``function``.

    It takes the ``count`` arguments of ``function`` and the gradients of the results. It returns the gradients of the
    arguments at the positions ``wanted``.
    """

    def joint(*args: Any) -> list[Tensor]:
        inputs = list(args[:count])
        create_graph = any(isinstance(each, Tensor) and each.requires_grad for each in args)
        for n in wanted:
            inputs[n] = inputs[n] if inputs[n].requires_grad else inputs[n].detach().requires_grad_()
        with torch.enable_grad():
            results = _several(function(*inputs))
            floats = [results[n] for n in _floats(results)]
        pairs = [(each, tangent) for each, tangent in zip(floats, args[count:], strict=True) if each.requires_grad]
        targets = [inputs[n] for n in wanted]
        gradients: Sequence[Any] = [None] * len(targets)
        if pairs and targets:
            outputs, tangents = zip(*pairs, strict=True)
            gradients = torch.autograd.grad(outputs, targets, tangents, allow_unused=True, create_graph=create_graph)
        distinct: list[Tensor] = []  # with clones, because a function must not return an argument, or a tensor twice
        storages = {internals.storage_key(each) for each in args if isinstance(each, Tensor)}
        for each, gradient in zip(targets, gradients, strict=True):
            value = torch.zeros_like(each) if gradient is None else gradient
            distinct.append(value.clone() if internals.storage_key(value) in storages else value)
            storages.add(internals.storage_key(value))
        return distinct

    return joint


def _several(results: Any) -> Sequence[Any]:
    return [results] if isinstance(results, Tensor) else results


def _traced(recorder: Recorder, rule: _Rule, name: str, function: _Function, args: Sequence[Any]) -> fx.GraphModule:
    """Trace one function of a higher-order op on fake tensors like ``args``; return its graph.

    ``name`` is the name of the function in the graph of the op. The call of the compiled function runs eagerly if
    ``function`` does something that the op does not support, for example a write to its argument.
    """

    def like(each: Tensor) -> Tensor:
        return internals.new_fake(recorder.fake_mode, each.shape, each.stride(), each.dtype, each.device)

    tape, outer = Tape(), recorder.tape
    may_draw = recorder.states.are_live and recorder.phase in rule.may_draw
    with internals.outside_of_trace():
        fakes = [tape.enter(like(each)) if isinstance(each, Tensor) else each for each in args]
    traced = [internals.to_functional(each) if isinstance(each, Tensor) else each for each in fakes]
    recorder.tape = tape
    try:
        with _Nested(), rule.mode(), replaced(recorder, "states", recorder.states.live()):
            results = function(*traced)
        several = [each.clone() if rule.copies and each is not None else each for each in _several(results)]
        values = [each if each is None else value_of(each, f"a result in `{rule.op}`") for each in several]
    finally:
        recorder.tape = outer
    storages = [internals.storage_key(each) for each in (*fakes, *values) if isinstance(each, Tensor)]
    drawing = [each for each in tape.operations if each.is_random]
    used, _ = tape.needed([each for each in values if each is not None], {id(each) for each in fakes})
    what, instead = "", ""
    if any(isinstance(each, Tensor) and internals.has_data_mutation(each) for each in traced):
        what, instead = "writes its argument", "return the new value"
    elif not rule.computes and len(set(storages)) < len(storages):
        what, instead = "returns its argument, or one tensor twice", "return a clone"
    elif not (may_draw and all(o.draws_as for o in drawing)) and drawing:
        what, instead = "draws random numbers", "draw them outside, and pass them as an operand"
    elif any(
        may_have_effects(each.target) and (each.index not in used or has_effects(each.target))
        for each in tape.operations
    ):
        what, instead = (
            "calls an op with side effects",
            "call that op outside of the function",
        )  # a backend may run the function twice, or not at all
    if what:
        raise RunEagerly("function-unfit-for-op", op=rule.op, what=what, instead=instead, at=user_line())
    inputs = [(f"arg{n}_1", each) for n, each in enumerate(fakes)]
    graph = tape.graph(f"{name}_graph", inputs, values, keep_impure=recorder.phase)
    output = graph.graph.output_node()
    nodes: Any = output.args[0]
    output.args = nodes if isinstance(results, Tensor) else (type(results)(nodes),)
    graph.recompile()
    return graph


class _Cond(_Rule):
    """``cond(predicate, true, false, operands)``."""

    op = internals.COND
    may_draw = ("forward", "backward")

    def calls(self, predicate: Any, true: _Function, false: _Function, operands: Sequence[Any]) -> list[_Call]:
        return [("true", true, operands), ("false", false, operands)]

    def fake(self, graphs: Sequence[fx.GraphModule], *args: Any) -> Any:
        result, other = (graph(*args[3]) for graph in graphs)
        if _kinds(result) != _kinds(other):
            raise RunEagerly(
                "results-of-functions-differ", op=self.op, what="the results of its two functions", at=user_line()
            )
        return result

    def backward(self, wanted: Any, args: Any, saved: Sequence[Tensor], tangents: Sequence[Tensor]) -> Sequence[Any]:
        predicate, true, false, operands = args
        which = _which(wanted[3])
        joints = [_joint(each, len(operands), which) for each in (true, false)]
        gradients: Sequence[Any] = self.call(predicate, *joints, (*operands, *tangents))
        return gradients


class _Map(_Rule):
    """``map_impl(body, stacked, additional_inputs)``.

    The op calls ``body`` once for each index of the first dimension of the tensors in ``stacked``. The arguments are
    the item of each of these tensors at this index, and the values ``additional_inputs``, which are the same in each
    call.
    """

    op = internals.MAP
    copies = True
    may_draw = ("forward", "backward")

    def call(self, *args: Any, mutated_arg_indices: str = "") -> Any:
        """Handle a call; ignore ``mutated_arg_indices`` (torch 2.15), because the trace finds writes."""
        return super().call(*args)

    def calls(self, body: _Function, stacked: Sequence[Tensor], additional_inputs: Sequence[Any]) -> list[_Call]:
        return [("body", body, (*(each[0] for each in stacked), *additional_inputs))]

    def backward(self, wanted: Any, args: Any, saved: Sequence[Tensor], tangents: Sequence[Tensor]) -> Sequence[Any]:
        body, stacked, additional_inputs = args
        which = _which((*wanted[1], *wanted[2]))
        joint = _joint(body, len(stacked) + len(additional_inputs), which)

        def body_back(*inputs: Any) -> Any:
            items, by_results, others = parts(inputs, len(stacked), len(tangents), len(additional_inputs))
            return joint(*items, *others, *by_results)

        gradients = self.call(body_back, (*stacked, *tangents), additional_inputs)
        return [each if n < len(stacked) else each.sum(0) for n, each in zip(which, gradients, strict=True)]


class _Scan(_Rule):
    """``scan(step, carried, stacked, additional_inputs)``.

    The op calls ``step`` once for each index of the first dimension of the tensors in ``stacked``. A step takes the
    carried values, the item of each of these tensors at this index, and the values ``additional_inputs``, which are the
    same in each step. It returns the new carried values, then outputs. ``scan`` stacks the outputs of all steps.
    """

    op = internals.SCAN
    copies = True
    may_draw = ("forward",)

    def calls(self, step: _Function, carried: Any, stacked: Any, additional_inputs: Any) -> list[_Call]:
        return [("step", step, (*carried, *(each[0] for each in stacked), *additional_inputs))]

    def keeping(
        self, step: _Function, carried: Any, stacked: Any, additional_inputs: Any
    ) -> tuple[tuple[Any, ...], Sequence[Any]]:
        kept: list[Any] = []

        def keeps(*inputs: Any) -> Any:
            results = step(*inputs)
            kept[:] = *inputs[: len(carried)], *map(internals.to_functional, running.recorders[-1].states.drawn)
            return (*results, *kept)

        return (keeps, carried, stacked, additional_inputs), kept

    def backward(self, wanted: Any, args: Any, saved: Sequence[Tensor], tangents: Sequence[Tensor]) -> Sequence[Any]:
        step, carried, stacked, additional_inputs = args
        count = len(saved)
        floats = _floats(carried)
        of_stacked, of_additional = _which(wanted[2]), _which(wanted[3])
        which = [*floats, *(count + n for n in of_stacked), *(count + len(stacked) + n for n in of_additional)]

        def repeats(*inputs: Any) -> Any:
            before, drawn, others = inputs[: len(carried)], inputs[len(carried) : count], inputs[count:]
            values = iter([value_of(each, "a random number") for each in drawn])
            with replaced(running.recorders[-1].states, "repeated", values):
                return step(*before, *others)

        joint = _joint(repeats, count + len(stacked) + len(additional_inputs), which)
        by_carried, by_stacked = tangents[: len(floats)], tangents[len(floats) :]

        def step_back(*inputs: Any) -> Any:
            items = count + len(stacked)
            sizes = len(floats), len(of_additional), items, len(by_stacked), len(additional_inputs)
            by_state, sums, values, by_results, others = parts(inputs, *sizes)
            step_gradients = joint(*values, *others, *by_state, *by_results)
            first, middle, last = parts(step_gradients, len(floats), len(of_stacked), len(of_additional))
            return (*first, *(total + each for total, each in zip(sums, last, strict=True)), *middle)

        zeros = [torch.zeros_like(additional_inputs[n]) for n in of_additional]
        backwards = [each.flip(0) for each in (*saved, *stacked, *by_stacked)]
        gradients = self.call(step_back, (*by_carried, *zeros), backwards, additional_inputs)
        first, sums, last = parts(gradients, len(floats), len(zeros), len(of_stacked))
        of_carried = [each for n, each in zip(floats, first, strict=True) if wanted[1][n]]
        return [*of_carried, *(each.flip(0) for each in last), *sums]


class _WhileLoop(_Rule):
    """``while_loop(condition, body, carried, additional_inputs)``.

    Both functions take the carried values and the values ``additional_inputs``, which are the same in each step.
    ``body`` returns the new carried values. For the backward, `keeping` adds a carried value that counts the steps.
    """

    op = internals.WHILE_LOOP
    may_draw = ("forward",)

    def calls(self, condition: _Function, body: _Function, carried: Any, additional_inputs: Any) -> list[_Call]:
        if not all(isinstance(each, Tensor) for each in carried):
            raise RunEagerly("loop-carries-numbers", op=self.op, at=user_line())
        inputs = (*carried, *additional_inputs)
        return [("condition", condition, inputs), ("body", body, inputs)]

    def fake(self, graphs: Sequence[fx.GraphModule], *args: Any) -> Any:
        carried, results = args[2], graphs[1](*args[2], *args[3])
        if _kinds(carried) != _kinds(results):
            what = "the arguments and the results of its body"
            raise RunEagerly("results-of-functions-differ", op=self.op, what=what, at=user_line())
        return tuple(results)

    def keeping(
        self, condition: _Function, body: _Function, carried: Any, additional_inputs: Any
    ) -> tuple[tuple[Any, ...], Sequence[Any]]:
        count = len(carried)

        def counts(*inputs: Any) -> Any:
            return (*body(*inputs[:count], *inputs[count + 1 :]), inputs[count] + 1)

        steps = torch.zeros((), dtype=torch.int64, device=carried[0].device)
        return (
            lambda *inputs: condition(*inputs[:count], *inputs[count + 1 :]),
            counts,
            (*carried, steps),
            additional_inputs,
        ), (steps,)

    def backward(self, wanted: Any, args: Any, saved: Sequence[Tensor], tangents: Sequence[Tensor]) -> Sequence[Any]:
        _, body, carried, additional_inputs = args
        floats, of_additional = _floats(carried), _which(wanted[3])
        joint = _joint(
            body, len(carried) + len(additional_inputs), [*floats, *(len(carried) + n for n in of_additional)]
        )

        def step_back(*inputs: Any) -> Any:
            by_state, sums, values = parts(
                inputs, len(tangents), len(of_additional), len(carried) + len(additional_inputs)
            )
            first, last = parts([each.contiguous() for each in joint(*values, *by_state)], len(tangents), len(sums))
            return (*first, *(total + each for total, each in zip(sums, last, strict=True)))

        starts = [
            each.contiguous() for each in (*tangents, *(torch.zeros_like(additional_inputs[n]) for n in of_additional))
        ]
        gradients = _RULES[internals.LOOP_BACKWARD].call(body, step_back, *saved, carried, additional_inputs, starts)
        return [*(gradients[i] for i, n in enumerate(floats) if wanted[2][n]), *gradients[len(tangents) :]]


class _LoopBackward(_Rule):
    """``loop_backward(body, body_backward, steps, carried, additional_inputs, gradients_and_sums)``.

    ``body`` is the body of the loop, and ``steps`` the number of steps that the loop made. ``gradients_and_sums`` are
    the gradients of the results of the loop, then tensors of zeros. To these zeros, each step adds its gradients of
    ``additional_inputs``. ``body_backward`` takes the gradients and these sums after a step, the carried values before
    the step, and ``additional_inputs``. It returns the gradients and the sums before the step.
    """

    op = internals.LOOP_BACKWARD

    def calls(self, body: _Function, body_backward: _Function, *args: Any) -> list[_Call]:
        _, carried, additional_inputs, tangents = args
        return [
            ("body", body, (*carried, *additional_inputs)),
            ("back", body_backward, (*tangents, *carried, *additional_inputs)),
        ]


class _FlexAttention(_Rule):
    """``flex_attention(query, key, value, score, mask, scale, options, of_score, of_mask)``.

    ``score`` is the function that changes a score (``score_mod``). ``mask`` is a block mask, as a tuple whose last item
    is the function that masks scores (``mask_mod``). ``of_score`` and ``of_mask`` are the tensors that these two
    functions take after their other arguments (``score_mod_other_buffers`` and ``mask_mod_other_buffers``).
    """

    op = internals.FLEX_ATTENTION
    computes = True
    needs = 2
    mode = internals.IndexesByTensors

    def call(self, *args: Any, score_mod_other_buffers: Any = (), mask_mod_other_buffers: Any = ()) -> Any:
        """Handle a call of the op; the last two arguments, ``of_score`` and ``of_mask``, are optional."""
        return super().call(*args, *(score_mod_other_buffers, mask_mod_other_buffers)[len(args) - 7 :])

    def calls(self, query: Tensor, *args: Any) -> list[_Call]:
        _, _, score, mask, _, _, *further = args
        return _calls_of_attention(query, score, None, mask, *further)

    def backward(self, wanted: Any, args: Any, saved: Sequence[Tensor], tangents: Sequence[Tensor]) -> Sequence[Any]:
        query, key, value, score, *rest, of_score, of_mask = args
        which = _which(wanted[-2])
        joint = _joint(score, 5 + len(of_score), (0, *(5 + n for n in which)))

        def score_back(*inputs: Any) -> Any:
            of_scores, *further_gradients = joint(*inputs[:5], *inputs[6:], inputs[5])
            by_further = dict(zip(which, further_gradients, strict=True))
            return [of_scores, *[None] * 4, *(by_further.get(n) for n in range(len(of_score)))]

        call = _RULES[internals.FLEX_ATTENTION_BACKWARD].call
        further = score, score_back, *rest, of_score, of_mask
        *gradients, of_further = call(query, key, value, *saved, *tangents[:2], *further)
        return [
            *(each for each, needs in zip(gradients, wanted[:3], strict=True) if needs),
            *(of_further[n] for n in which),
        ]


class _FlexAttentionBackward(_Rule):
    """``flex_attention_backward``, the backward of ``flex_attention``.

    After ``query``, ``key`` and ``value``, the op takes the first two results of ``flex_attention`` (the output and the
    logsumexp), the gradients of these two results, ``score``, and ``joint``. Then it takes the other arguments of
    ``flex_attention``, from ``mask`` on. ``joint`` is the function that differentiates ``score``: it takes the
    arguments of ``score`` and the gradient of the changed score, and returns the gradients of the arguments.
    """

    op = internals.FLEX_ATTENTION_BACKWARD
    computes = True
    mode = internals.IndexesByTensors

    def calls(self, query: Tensor, *args: Any) -> list[_Call]:
        score, joint, mask, _, _, *further = args[6:]
        return _calls_of_attention(query, score, joint, mask, *further)


def _calls_of_attention(query: Tensor, score: Any, joint: Any, mask: Any, of_score: Any, of_mask: Any) -> list[_Call]:
    at = [torch.empty((), dtype=torch.int32, device=query.device) for _ in range(4)]
    number = query.new_empty(())
    calls: list[_Call] = [("score", score, (number, *at, *of_score)), ("mask", mask[-1], (*at, *of_mask))]
    return calls if joint is None else [*calls, ("joint", joint, (number, *at, number, *of_score))]


def _kinds(values: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    return [(tuple(each.shape), each.stride(), each.dtype, each.device) for each in values]


def _floats(values: Sequence[Tensor]) -> list[int]:
    return _which([each.is_floating_point() or each.is_complex() for each in values])


def _which(flags: Sequence[bool]) -> list[int]:
    return [n for n, flag in enumerate(flags) if flag]


_RULES = {
    rule.op: rule
    for rule in (_Cond(), _Map(), _Scan(), _WhileLoop(), _LoopBackward(), _FlexAttention(), _FlexAttentionBackward())
}
