"""Stage 4, trace: run the function ONCE, and record its ops, its mutations and its aliases.

    def f(x, y):
        x.mul_(2)              # x is mutated
        z = x * y              # an intermediate
        return x.t(), z[0], z  # a view of an input, a view of an intermediate, the intermediate

The function runs on *traced tensors*: fake tensors in wrappers of torch's functionalization. A traced tensor behaves
like the real tensor, and it may be mutated. But it passes only pure ops to the `recorder`, which writes them on the
`tape`::

    mul = x * 2                # the new value of x, to be copied into the caller's x
    z   = mul * y

After the run, the traced tensors show which inputs were written, and how. They also show which outputs are inputs, and
which outputs share the storage of an input or of an intermediate. For an output that is a view of an intermediate, the
graph returns the *base* of the view. For each output that is a view, the trace notes the view ops that lead from the
base to the output (``x -> t()``, ``z -> select(0, 0)``). The epilogue repeats these ops, and so makes a true alias.

Each mutated input, new output and intermediate base that requires grad gets a *tangent*, and `torch.autograd.grad`
runs under the same recorder. The tape is then the joint graph::

    joint(primals, tangents) = (mutated inputs, outputs, bases, gradients of the primals)

The trace holds the autograd graph of the traced tensors. If a later backward starts from only some of the outputs, the
graph of this backward is derived in the same way. An input on which these outputs do not depend then gets None as its
gradient, as in eager.

Read the modules in this order. Each of the other files is about one topic, and you can read them later:

    entering, inputs                the traced tensors of the inputs, and the mutations of the inputs
    function_run, recorder, tape    the run and its tape; `escapes` and `storage_notes` see each torch function called,
                                    and `program_calls` notes them for a report
    output_aliases, view_ops        the classification of outputs, and the view ops that make them
    forward_outputs                 the outputs of the forward graph
    sources, segments               the edges of the autograd graph that the caller can reach, and the cuts there
    joint_graph, deriver            the joint graph; `records` and `live_trace` contain the results of this stage
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

from aotlab._torch import Sizes, SymbolicMemo, fake_mode, settle_without_gpus
from aotlab.capture.call import Call
from aotlab.capture.dedupe import DedupeRecord
from aotlab.capture.dynamic_sizes import NUMBER
from aotlab.capture.signals import RunEagerly
from aotlab.capture.synthetic_bases import Base, are_unchanged
from aotlab.trace.conditions import Conditions
from aotlab.trace.entering import enter_inputs
from aotlab.trace.function_run import run_function
from aotlab.trace.joint_graph import make_joint
from aotlab.trace.live_trace import Trace
from aotlab.trace.memo import cached_under
from aotlab.trace.quirk import Quirk, op_handlers_of
from aotlab.trace.recorder import Recorder
from aotlab.trace.records import Pattern, Source, TraceFailed, TraceRecord, Write, is_full
from aotlab.trace.tangent_layouts import is_right_for_layouts
from aotlab.trace.tape import Tape

__all__ = [
    "Pattern",
    "Source",
    "Trace",
    "TraceFailed",
    "TraceRecord",
    "Write",
    "is_full",
    "is_right_for_layouts",
    "run",
]

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
    exact_draws: bool = True,
    functional_draws: bool = False,
    quirks: Sequence[Quirk] = (),
    varying: Mapping[int, Collection[int]] = MappingProxyType({}),
    sizes_from_values: bool = False,
    guards_conditions: bool = False,
) -> tuple[TraceRecord, Trace]:
    """Run the function once on fake tensors and differentiate it.

    - ``decompositions`` maps ops to functions that the recorder runs instead.
    - ``keep_input_mutations``: a forward graph without a backward writes mutated inputs itself.
    - ``static_inputs``: this many inputs, the first ones, are parameters and buffers.
    - ``bases`` are the synthetic bases of inputs that share memory.
    - ``varying`` has, by the position of a flat argument, the dimensions whose sizes become symbols.
    - ``exact``: gradients are summed in eager's order everywhere.
    - ``exact_draws``: random ops must draw eager's numbers.
    - ``functional_draws``: random ops take and return the states of generators.
    - ``quirks`` handle the rare cases that they claim.
    - ``sizes_from_values``: sizes and numbers may depend on the values of tensors; they become unbacked symbols.
    - ``guards_conditions``: Python may ask for conditions that are cheap to compute from the inputs, and the entry
      guards the answers.

    Raises `RefusedError`, `RunEagerly` or `TraceFailed` if the call must run eagerly.
    """
    count, sizes = sum(map(len, varying.values())), None
    if varying or sizes_from_values:
        sizes = Sizes(call.state.names, count, from_values=sizes_from_values)
    mode = fake_mode(None if sizes is None else sizes.env)
    mode.cache_enabled = sizes is None  # with symbolic sizes, the cache keys take more time than the cache saves
    options: dict[str, Any] = {
        "exact": exact,
        "exact_draws": exact_draws,
        "functional": functional_draws,
        "sizes": sizes,
    }
    cached_results = cached_under(call.state.settings)
    memo = cached_results if sizes is None else {} if sizes_from_values else SymbolicMemo(cached_results, sizes)
    recorder = Recorder(Tape(), mode, decompositions, shared_memo=memo, op_handlers=op_handlers_of(quirks), **options)
    for position, dims in varying.items():
        if sizes is not None and NUMBER in dims:
            sizes.enter_number(position, call.values[position])
    inputs = enter_inputs(recorder, call, dedupe, bases, varying)
    answers = guards_conditions and not call.state.dispatch_modes
    with Conditions(recorder, inputs) if answers else nullcontext():
        findings = run_function(call, dedupe, recorder, inputs, quirks)
    if not are_unchanged([base for base in bases if base.traced is None], findings.infos):
        raise RunEagerly("no-synthetic-base")
    return make_joint(
        findings, quirks, keep_input_mutations=keep_input_mutations, static_inputs=static_inputs, exact=exact
    )
