"""Higher-order ops, such as ``torch.cond``: ops that take functions, which stand in a graph as graphs of their own.

    true_graph_0 = self.true_graph_0; false_graph_0 = self.false_graph_0
    cond = torch.ops.higher_order.cond(gt, true_graph_0, false_graph_0, (x, w))

Each function is traced on tensors like those that the op gives it. The derivative of such an op is one again, of
functions that compute theirs.
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
from aotlab._torch.higher_order import parts
from aotlab._torch.replaced import replaced
from aotlab.capture.signals import RunEagerly
from aotlab.errors import DoubleBackwardError
from aotlab.guards.places import user_line
from aotlab.ir.graphs import acts
from aotlab.trace.inputs import value_of
from aotlab.trace.quirk import Handler, Quirk
from aotlab.trace.recorder import Recorder
from aotlab.trace.running import here
from aotlab.trace.tape import Tape

_Function = Callable[..., Any]
#: What a function is called in its graph, the function, and what its op calls it with.
_Call = tuple[str, _Function, Sequence[Any]]
_ALIKE = "let them have the same shape, strides and dtype, to have it compiled"


class HigherOrder(Quirk):
    """Records ops that take functions."""

    name = "hops"

    def claims(self) -> Mapping[Any, Handler]:
        return dict.fromkeys(_RULES, lambda guard, op, args, kwargs: _RULES[op].call(*args, **kwargs))


class _Nested(TorchFunctionMode):
    """Record the higher-order ops in a function that one takes."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _RULES:
            return _RULES[func].call(*args, **(kwargs or {}))
        with internals.disable_torch_function():  # of the guard around the trace
            return func(*args, **(kwargs or {}))


class _Rule:
    """How one op calls its functions, and what its derivative is."""

    op: Any
    #: Whether it copies what they return, which then may be what they were given.
    copies = False
    #: Whether it computes with what they return, which then may be that, too.
    computes = False
    #: How many of its results its backward takes.
    needs = 0
    #: The mode under which it calls them.
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext

    def calls(self, *args: Any) -> list[_Call]:
        """Return the functions among the arguments, with what the op calls them with."""
        raise NotImplementedError

    def fake(self, graphs: Sequence[fx.GraphModule], *args: Any) -> Any:
        """Compute the op on fake tensors."""
        return self.op(*args)

    def keeping(self, *args: Any) -> tuple[tuple[Any, ...], int]:
        """Return arguments of a call that also returns, at the end, what the backward needs; and how much that is."""
        return args, 0

    def backward(self, wanted: Any, args: Any, kept: Sequence[Tensor], by: Sequence[Tensor]) -> Sequence[Any]:
        """Return the gradients of the ``wanted`` arguments, ``by`` those of the results that are floats."""
        raise DoubleBackwardError(f"`{self.op}` is differentiated", line=user_line(), suggestion="let eager run it")

    def call(self, *args: Any) -> Any:
        """Call the op in a trace."""
        leaves, spec = pytree.tree_flatten(args)
        if torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            _, count = self.keeping(*args)
            results = _Differentiable.apply(self, spec, *leaves)  # type: ignore[no-untyped-call]  # untyped in torch
            return results[: len(results) - count]
        return self.record(*args)

    def record(self, *args: Any) -> Any:
        """Record the op with the graphs of its functions."""
        recorder = here.active[-1]
        args = pytree.tree_map_only(Tensor, lambda each: value_of(each, f"an argument of `{self.op}`"), args)
        with internals.outside_of_trace():
            calls = self.calls(*args)
        graphs = [_traced(recorder, self, *each) for each in calls]
        of = {id(function): graph for (_, function, _), graph in zip(calls, graphs, strict=True)}
        args = pytree.tree_map(lambda leaf: of.get(id(leaf), leaf), args)
        mode = recorder.fake_mode
        own = replaced(mode, "allow_non_fake_inputs", True)  # constants of the graphs
        env = replaced(mode, "shape_env", mode.shape_env or internals.ShapeEnv())  # which those in graphs ask for
        with internals.disable_torch_function(), internals.outside_of_trace(), torch.no_grad(), mode, own, env:
            results = self.fake(graphs, *args)
        recorder.append(self.op, args, {}, results)
        return pytree.tree_map_only(Tensor, internals.to_functional, results)


class _Differentiable(torch.autograd.Function):
    """A call of an op of which a backward may be wanted; what it keeps is returned, too, so that it has a history."""

    @staticmethod
    def forward(ctx: Any, rule: _Rule, spec: Any, *leaves: Any) -> Any:
        args, count = rule.keeping(*pytree.tree_unflatten(leaves, spec))
        results = tuple(rule.record(*args))
        ctx.rule, ctx.spec, ctx.own = rule, spec, len(results) - count
        ctx.zeros = [partial(torch.zeros, each.shape, dtype=each.dtype, device=each.device) for each in results]
        casting = internals.under_autocast_as_now
        others = {n: leaf for n, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
        ctx.others = {n: casting(leaf) if callable(leaf) else leaf for n, leaf in others.items()}
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        ctx.save_for_backward(*tensors, *results[: rule.needs], *results[ctx.own :])
        ctx.floats = _floats(results)
        ctx.mark_non_differentiable(*(each for n, each in enumerate(results) if n not in ctx.floats))
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        saved, needed = iter(ctx.saved_tensors), ctx.needs_input_grad[2:]
        leaves = [ctx.others[n] if n in ctx.others else next(saved) for n in range(len(needed))]
        args, wanted = pytree.tree_unflatten(leaves, ctx.spec), pytree.tree_unflatten(needed, ctx.spec)
        last = ctx.own
        if any(each is not None for each in gradients[last:]):  # in a derivative of this derivative
            last, (args, _) = len(gradients), ctx.rule.keeping(*args)
        by = [ctx.zeros[n]() if gradients[n] is None else gradients[n] for n in ctx.floats if n < last]
        found = iter(ctx.rule.backward(wanted, args, tuple(saved), by))
        return None, None, *(next(found) if needs else None for needs in needed)


def _joint(function: _Function, count: int, wanted: Sequence[int]) -> _Function:
    """Make what is given ``count`` arguments and gradients of the results, and returns those of the ``wanted``."""

    def joint(*given: Any) -> list[Tensor]:
        inputs = list(given[:count])
        again = any(isinstance(each, Tensor) and each.requires_grad for each in given)
        for n in wanted:
            inputs[n] = inputs[n] if inputs[n].requires_grad else inputs[n].detach().requires_grad_()
        with torch.enable_grad():
            found = _several(function(*inputs))
            results = [found[n] for n in _floats(found)]
        pairs = [(each, by) for each, by in zip(results, given[count:], strict=True) if each.requires_grad]
        asked = [inputs[n] for n in wanted]
        found = [None] * len(asked)
        if pairs and asked:
            outputs, by = zip(*pairs, strict=True)
            found = torch.autograd.grad(outputs, asked, by, allow_unused=True, create_graph=again)
        made: list[Tensor] = []
        known = {internals.storage_key(each) for each in given if isinstance(each, Tensor)}
        for each, gradient in zip(asked, found, strict=True):
            own = torch.zeros_like(each) if gradient is None else gradient
            made.append(own.clone() if internals.storage_key(own) in known else own)
            known.add(internals.storage_key(own))
        return made

    return joint


def _several(results: Any) -> Sequence[Any]:
    return [results] if isinstance(results, Tensor) else results


def _traced(recorder: Recorder, rule: _Rule, name: str, function: _Function, given: Sequence[Any]) -> fx.GraphModule:
    """Trace a function on tensors like those of ``given``."""

    def like(each: Tensor) -> Tensor:
        return internals.new_fake(recorder.fake_mode, each.shape, each.stride(), each.dtype, each.device)

    tape, outer = Tape(), recorder.tape
    with internals.outside_of_trace():
        fakes = [tape.enter(like(each)) if isinstance(each, Tensor) else each for each in given]
    wrappers = [internals.to_functional(each) if isinstance(each, Tensor) else each for each in fakes]
    recorder.tape = tape
    try:
        with _Nested(), rule.mode():
            results = function(*wrappers)
        several = [each.clone() if rule.copies and each is not None else each for each in _several(results)]
        values = [each if each is None else value_of(each, f"a result in `{rule.op}`") for each in several]
    finally:
        recorder.tape = outer
    storages = [internals.storage_key(each) for each in (*fakes, *values) if isinstance(each, Tensor)]
    used, _ = tape.needed([each for each in values if each is not None], {id(each) for each in fakes})
    what, instead = "", ""
    if any(isinstance(each, Tensor) and internals.has_data_mutation(each) for each in wrappers):
        what, instead = "writes what it is given", "return the new value"
    elif not rule.computes and len(set(storages)) < len(storages):
        what, instead = "returns what it is given, or the same twice", "return a clone"
    elif not (recorder.draws_in_choices and rule.op is internals.COND) and any(o.is_random for o in tape.operations):
        what, instead = "draws random numbers", "pass them as an operand"
    elif any(acts(each.target) and (each.index not in used or has_effects(each.target)) for each in tape.operations):
        what, instead = "calls an op with effects", "call it outside"  # backends may run it twice, or not at all
    if what:
        raise RunEagerly(
            f"a function in `{rule.op}` {what}, at {user_line()}", suggestion=f"{instead}, to have it compiled"
        )
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

    def calls(self, predicate: Any, true: _Function, false: _Function, operands: Sequence[Any]) -> list[_Call]:
        return [("true", true, operands), ("false", false, operands)]

    def fake(self, graphs: Sequence[fx.GraphModule], *args: Any) -> Any:
        result, other = (graph(*args[3]) for graph in graphs)
        if _kinds(result) != _kinds(other):
            raise RunEagerly(
                f"the functions of `cond` return tensors of different kinds, at {user_line()}", suggestion=_ALIKE
            )
        return result

    def backward(self, wanted: Any, args: Any, kept: Sequence[Tensor], by: Sequence[Tensor]) -> Sequence[Any]:
        predicate, true, false, operands = args
        which = _which(wanted[3])
        joints = [_joint(each, len(operands), which) for each in (true, false)]
        found: Sequence[Any] = self.call(predicate, *joints, (*operands, *by))
        return found


class _Map(_Rule):
    """``map_impl(body, stacked, further)``, which gives the body an item of each of ``stacked``."""

    op = internals.MAP
    copies = True

    def call(self, *args: Any, mutated_arg_indices: str = "") -> Any:
        """Call it; which arguments the body writes, torch 2.15 says, is seen when it is traced."""
        return super().call(*args)

    def calls(self, body: _Function, stacked: Sequence[Tensor], further: Sequence[Any]) -> list[_Call]:
        return [("body", body, (*(each[0] for each in stacked), *further))]

    def backward(self, wanted: Any, args: Any, kept: Sequence[Tensor], by: Sequence[Tensor]) -> Sequence[Any]:
        body, stacked, further = args
        which = _which((*wanted[1], *wanted[2]))
        joint = _joint(body, len(stacked) + len(further), which)

        def body_back(*given: Any) -> Any:
            items, by_results, others = parts(given, len(stacked), len(by), len(further))
            return joint(*items, *others, *by_results)

        found = self.call(body_back, (*stacked, *by), further)
        return [each if n < len(stacked) else each.sum(0) for n, each in zip(which, found, strict=True)]


class _Scan(_Rule):
    """``scan(step, carried, stacked, further)``; a step returns what is carried on, and what is to be stacked."""

    op = internals.SCAN
    copies = True

    def calls(self, step: _Function, carried: Any, stacked: Any, further: Any) -> list[_Call]:
        return [("step", step, (*carried, *(each[0] for each in stacked), *further))]

    def keeping(self, step: _Function, carried: Any, stacked: Any, further: Any) -> tuple[tuple[Any, ...], int]:
        def keeps(*given: Any) -> Any:
            return (*step(*given), *given[: len(carried)])

        return (keeps, carried, stacked, further), len(carried)

    def backward(self, wanted: Any, args: Any, kept: Sequence[Tensor], by: Sequence[Tensor]) -> Sequence[Any]:
        step, carried, stacked, further = args
        count = len(carried)
        floats = _floats(carried)
        of_stacked, of_further = _which(wanted[2]), _which(wanted[3])
        which = [*floats, *(count + n for n in of_stacked), *(count + len(stacked) + n for n in of_further)]
        joint = _joint(step, count + len(stacked) + len(further), which)
        by_carried, by_stacked = by[: len(floats)], by[len(floats) :]

        def step_back(*given: Any) -> Any:
            items = count + len(stacked)
            sizes = len(floats), len(of_further), items, len(by_stacked), len(further)
            by_state, sums, values, by_results, others = parts(given, *sizes)
            found = joint(*values, *others, *by_state, *by_results)
            first, middle, last = parts(found, len(floats), len(of_stacked), len(of_further))
            return (*first, *(total + each for total, each in zip(sums, last, strict=True)), *middle)

        zeros = [torch.zeros_like(further[n]) for n in of_further]
        backwards = [each.flip(0) for each in (*kept, *stacked, *by_stacked)]
        found = self.call(step_back, (*by_carried, *zeros), backwards, further)
        first, sums, last = parts(found, len(floats), len(zeros), len(of_stacked))
        of_carried = [each for n, each in zip(floats, first, strict=True) if wanted[1][n]]
        return [*of_carried, *(each.flip(0) for each in last), *sums]


class _WhileLoop(_Rule):
    """``while_loop(condition, body, carried, further)``."""

    op = internals.WHILE_LOOP

    def calls(self, condition: _Function, body: _Function, carried: Any, further: Any) -> list[_Call]:
        if not all(isinstance(each, Tensor) for each in carried):
            raise RunEagerly(f"`while_loop` carries numbers, at {user_line()}", suggestion="carry tensors")
        given = (*carried, *further)
        return [("condition", condition, given), ("body", body, given)]

    def fake(self, graphs: Sequence[fx.GraphModule], *args: Any) -> Any:
        carried, found = args[2], graphs[1](*args[2], *args[3])
        if _kinds(carried) != _kinds(found):
            what = "the body of `while_loop` returns other kinds of tensors than it takes"
            raise RunEagerly(f"{what}, at {user_line()}", suggestion=_ALIKE)
        return tuple(found)

    def keeping(self, condition: _Function, body: _Function, carried: Any, further: Any) -> tuple[tuple[Any, ...], int]:
        count = len(carried)

        def counts(*given: Any) -> Any:
            return (*body(*given[:count], *given[count + 1 :]), given[count] + 1)

        steps = torch.zeros((), dtype=torch.int64, device=carried[0].device)
        return (lambda *given: condition(*given[:count], *given[count + 1 :]), counts, (*carried, steps), further), 1

    def backward(self, wanted: Any, args: Any, kept: Sequence[Tensor], by: Sequence[Tensor]) -> Sequence[Any]:
        _, body, carried, further = args
        floats, of_further = _floats(carried), _which(wanted[3])
        joint = _joint(body, len(carried) + len(further), [*floats, *(len(carried) + n for n in of_further)])

        def step_back(*given: Any) -> Any:
            by_state, sums, values = parts(given, len(by), len(of_further), len(carried) + len(further))
            first, last = parts([each.contiguous() for each in joint(*values, *by_state)], len(by), len(sums))
            return (*first, *(total + each for total, each in zip(sums, last, strict=True)))

        gradients = [each.contiguous() for each in (*by, *(torch.zeros_like(further[n]) for n in of_further))]
        found = _RULES[internals.LOOP_BACKWARD].call(body, step_back, *kept, carried, further, gradients)
        return [*(found[i] for i, n in enumerate(floats) if wanted[2][n]), *found[len(by) :]]


class _LoopBackward(_Rule):
    """``loop_backward(body, back, steps, carried, further, gradients)``."""

    op = internals.LOOP_BACKWARD

    def calls(self, body: _Function, back: _Function, *args: Any) -> list[_Call]:
        _, carried, further, by = args
        return [("body", body, (*carried, *further)), ("back", back, (*by, *carried, *further))]


class _FlexAttention(_Rule):
    """``flex_attention(query, key, value, score, mask, scale, options, further of score, further of mask)``."""

    op = internals.FLEX_ATTENTION
    computes = True
    needs = 2
    mode = internals.IndexesByTensors

    def call(self, *args: Any, score_mod_other_buffers: Any = (), mask_mod_other_buffers: Any = ()) -> Any:
        """Call it; what the functions take further may be left out."""
        return super().call(*args, *(score_mod_other_buffers, mask_mod_other_buffers)[len(args) - 7 :])

    def calls(self, query: Tensor, *args: Any) -> list[_Call]:
        _, _, score, mask, _, _, *further = args
        return _calls_of_attention(query, score, None, mask, *further)

    def backward(self, wanted: Any, args: Any, kept: Sequence[Tensor], by: Sequence[Tensor]) -> Sequence[Any]:
        query, key, value, score, *rest, of_score, of_mask = args
        which = _which(wanted[-2])
        joint = _joint(score, 5 + len(of_score), (0, *(5 + n for n in which)))

        def score_back(*given: Any) -> Any:
            of_scores, *found = joint(*given[:5], *given[6:], given[5])
            by_further = dict(zip(which, found, strict=True))
            return [of_scores, *[None] * 4, *(by_further.get(n) for n in range(len(of_score)))]

        call = _RULES[internals.FLEX_ATTENTION_BACKWARD].call
        further = score, score_back, *rest, of_score, of_mask
        *found, of_further = call(query, key, value, *kept, *by[:2], *further)
        return [
            *(each for each, needs in zip(found, wanted[:3], strict=True) if needs),
            *(of_further[n] for n in which),
        ]


class _FlexAttentionBackward(_Rule):
    """The same with the results, their gradients, and a function that computes those of ``score``."""

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
