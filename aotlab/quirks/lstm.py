"""LSTMs that are trained: on the CPU, eager runs a kernel of oneDNN's, which looks at grad mode when it runs.

A compiled forward runs without grad mode, and so calls an op that turns it on for the kernel. Compilers that do not
compute bit for bit what eager does get the ops that define an LSTM instead, which they can join. Of sizes that vary all
get the kernel, a call for each layer and direction: torch's own loop over these reads sizes as numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.trace.escapes import EscapeGuard
from aotlab.trace.quirk import Handler, OpHandler, Quirk
from aotlab.trace.recorder import Recorder
from aotlab.trace.running import is_exact


class Lstm(Quirk):
    """Records the layer that keeps what its backward needs."""

    name = "lstm"

    def claims(self) -> Mapping[Any, Handler]:
        return {torch.lstm: _lstm}

    def ops(self) -> Mapping[Any, OpHandler]:
        return {internals.ONEDNN_RNN_LAYER: _layer}


def _lstm(guard: EscapeGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if internals.is_symbolic(args[0]) and _is_for_kernel(*args):
        return _by_layers(*args, **kwargs)
    if not torch.is_grad_enabled():
        return guard.run(func, args, kwargs)
    if is_exact():
        with internals.no_python_dispatcher():  # which has another LSTM
            return func(*args, **kwargs)
    with internals.without_onednn():
        return func(*args, **kwargs)


def _is_for_kernel(x: Tensor, hidden: Any, weights: Any, *flags: Any) -> bool:
    """Tell whether eager runs the kernel: not for packed sequences, projections or other dtypes."""
    if isinstance(hidden, Tensor) or hidden[0].shape[2] != hidden[1].shape[2] or internals.any_autocast_enabled():
        return False
    is_float = all(each.is_cpu and each.dtype == torch.float32 for each in (x, *hidden, *weights))
    return is_float and bool(torch.backends.mkldnn.enabled)


def _by_layers(x: Tensor, hidden: Any, weights: Any, *flags: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute an LSTM by the kernel."""
    biases, layers, dropout, train, both, batch_first = flags
    x, ends, of_one = (x.transpose(0, 1) if batch_first else x).contiguous(), [], 4 if biases else 2
    for layer in range(layers):
        found: list[Tensor] = []
        for n in range(layer * (1 + both), (layer + 1) * (1 + both)):
            given = weights[n * of_one : (n + 1) * of_one]
            given = given if biases else [*given, *map(torch.zeros_like, given)]
            states = [each.contiguous()[n] for each in hidden]
            rest = (states[0].shape[1], layers, biases, both, batch_first, train)
            y, *end, _ = internals.ONEDNN_RNN_LAYER(x, *given, *states, len(found) == 1, [], 2, *rest)
            found.append(y)
            ends.append(end)
        x = torch.cat(found, -1) if both else found[0]
        if dropout and train and layer < layers - 1:
            x = torch.dropout(x, dropout, train=True)
    h, c = map(torch.stack, zip(*ends, strict=True))
    return x.transpose(0, 1) if batch_first else x, h, c


def _layer(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return recorder.record(_keeping_layer(), args, kwargs) if torch.is_grad_enabled() else NotImplemented


@functools.cache
def _keeping_layer() -> Any:
    """Make the op, when it is first needed, that stands in a graph for a layer of which a backward is wanted."""

    def layer(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with torch.enable_grad():
            found: tuple[Tensor, Tensor, Tensor, Tensor] = internals.ONEDNN_RNN_LAYER(*given)
        return found

    name, schema = "aotlab::onednn_rnn_layer", str(internals.ONEDNN_RNN_LAYER._schema)
    torch.library.define(name, schema[schema.index("(") :])
    torch.library.impl(name, "CPU", layer)
    torch.library.register_fake(name, lambda *given: internals.ONEDNN_RNN_LAYER(*given))
    return torch.ops.aotlab.onednn_rnn_layer.default
