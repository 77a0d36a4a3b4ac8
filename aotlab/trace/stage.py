"""Stage 4, trace: ONE run of the function says what it computes, what it mutates and what aliases what.

    def f(x, y):
        x.mul_(2)              # x is mutated
        z = x * y              # an intermediate
        return x.t(), z[0], z  # a view of an input, a view of an intermediate, the intermediate

The function runs on fake tensors in wrappers of torch's functionalization. A wrapper behaves like the tensor that it
stands for, mutation included, but passes on only pure ops, which `recorder` writes on the `tape`::

    mul = x * 2                # the new value of x, to be copied into the caller's x
    z   = mul * y

Then the wrappers are asked what happened: which inputs were written, and how; which outputs are inputs, or share
their storage, or that of an intermediate. The graph returns the *base* of such an output, and the views that lead to
it are noted (``x -> t()``, ``z -> select(0, 0)``), so that the epilogue can make a true alias.

Each mutated input, fresh output and intermediate base that requires grad gets a *tangent*, and `torch.autograd.grad`
runs under the same recorder. What stands on the tape then is the joint graph::

    joint(primals, tangents) = (mutated inputs, outputs, bases, gradients of the primals)

The autograd graph of the wrappers is kept: when later a backward starts from some of the outputs only, its graph is
derived in the same way, and an input that those do not reach gets None, as in eager.

To be read in this order; the other files are about one thing each, and can be left for later:

    entering, inputs            the wrappers, and what happened to them
    function, recorder, tape    the run and what it writes; `escapes` and `chronicle` watch it at Python's level
    outputs, views              what is an input, what shares memory, by which view ops
    forward_outputs             what the forward graph returns
    sources, segments           where the caller can get hold of the autograd graph, and how it is cut there
    joint, deriver              the joint graph; `records` and `live` hold what is handed on
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from aotlab._torch import Sizes, SymbolicMemo, fake_mode, settle_without_gpus
from aotlab.capture.call import Call
from aotlab.capture.dedupe import DedupeRecord
from aotlab.capture.signals import RunEagerly
from aotlab.capture.synthetic_bases import Base, are_unchanged
from aotlab.capture.varying import NUMBER
from aotlab.trace.entering import enter_inputs
from aotlab.trace.function import run_function
from aotlab.trace.joint import make_joint
from aotlab.trace.live import Trace
from aotlab.trace.memo import known_under
from aotlab.trace.quirk import Quirk
from aotlab.trace.recorder import Recorder
from aotlab.trace.records import Pattern, Source, TraceFailed, TraceRecord, Write, is_full
from aotlab.trace.tangent_layouts import does_the_same
from aotlab.trace.tape import Tape

__all__ = ["Pattern", "Source", "Trace", "TraceFailed", "TraceRecord", "Write", "does_the_same", "is_full", "run"]

settle_without_gpus()


def run(
    call: Call,
    dedupe: DedupeRecord,
    *,
    decompositions: dict[Any, Callable[..., Any]] | None,
    keep_input_mutations: bool,
    static_inputs: int,
    bases: Sequence[Base] = (),
    exact: bool = False,
    functional_draws: bool = False,
    quirks: Sequence[Quirk] = (),
    varying: Mapping[int, Collection[int]] = MappingProxyType({}),
) -> tuple[TraceRecord, Trace]:
    """Run the function once on fake tensors and differentiate it.

    ``decompositions`` are ops to replace while recording; with ``keep_input_mutations`` an inference graph writes
    mutated inputs itself. The first ``static_inputs`` inputs are parameters and buffers, ``bases`` those that share
    memory, ``varying`` the dimensions, by flat argument, whose sizes become symbols. With ``exact`` gradients are
    summed in eager's order everywhere; with ``functional_draws`` random ops take and return states of generators.
    ``quirks`` look after the corners that they claim.

    Raises `RefusedError`, `RunEagerly`, `TraceFailed`: eager has to run this call.
    """
    sizes = Sizes(call.state.names, sum(map(len, varying.values()))) if varying else None
    mode = fake_mode(None if sizes is None else sizes.env)
    mode.cache_enabled = sizes is None  # keys of symbolic sizes take longer than what they are to save
    ways: dict[str, Any] = {"exact": exact, "functional": functional_draws, "quirks": quirks, "sizes": sizes}
    known = known_under(call.state.settings)
    memo = known if sizes is None else SymbolicMemo(known, sizes)
    recorder = Recorder(Tape(), mode, decompositions, known=memo, **ways)
    for position, dims in varying.items():
        if sizes is not None and NUMBER in dims:
            sizes.enter_number(position, call.values[position])
    inputs = enter_inputs(recorder, call, dedupe, bases, varying)
    findings = run_function(call, dedupe, recorder, inputs)
    if not are_unchanged([base for base in bases if base.wrapper is None], findings.infos):
        raise RunEagerly("inputs share memory as no synthetic base can express, and are changed")
    return make_joint(findings, keep_input_mutations=keep_input_mutations, static_inputs=static_inputs, exact=exact)
