"""LSTMs in training: on the CPU, eager runs a oneDNN kernel, and this kernel reads grad mode when it runs.

A compiled forward runs without grad mode. So it calls an op that turns grad mode on for the kernel. For a short
sequence, backends that need not match eager bit for bit get the ops that define an LSTM instead, because they can fuse
these. The number of these ops grows with the length of the sequence. For two layers of 32 steps, Inductor took minutes
to compile them, and they took 1.7 times as long as the kernel. So for a longer sequence, such backends get the kernel,
too. If sizes are symbolic, each backend gets the kernel, with one call for each layer and direction, because torch's
own loop over layers reads sizes as numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.trace.escapes import EscapeGuard, Handler
from aotlab.trace.quirk import Quirk
from aotlab.trace.recorder import OpHandler, Recorder
from aotlab.trace.running_recorder import is_exact

#: The largest sequence length × layers × directions for which the loop is unrolled in training.
UNROLLED = 16


class Lstm(Quirk):
    """Records each LSTM layer as an op that also returns the values that its backward needs."""

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
    if is_exact() or (_is_for_kernel(*args) and _steps(*args) > UNROLLED):
        with internals.no_python_dispatcher():  # torch's Python dispatcher would compute the LSTM by other ops
            return func(*args, **kwargs)
    with internals.without_onednn():
        return func(*args, **kwargs)


def _is_for_kernel(x: Tensor, hidden: Any, weights: Any, *flags: Any) -> bool:
    """Tell whether eager runs the oneDNN kernel for a call of `torch.lstm`.

    Eager runs other kernels for packed sequences, for projections, under autocast, and for dtypes other than float32.
    """
    if isinstance(hidden, Tensor) or hidden[0].shape[2] != hidden[1].shape[2] or internals.any_autocast_enabled():
        return False
    is_float = all(each.is_cpu and each.dtype == torch.float32 for each in (x, *hidden, *weights))
    return is_float and bool(torch.backends.mkldnn.enabled)


def _steps(x: Tensor, _hidden: Any, _weights: Any, *flags: Any) -> int:
    """Return the number of steps that the loops of a call of `torch.lstm` have in all layers and directions."""
    _, layers, _, _, both, batch_first = flags
    steps: int = x.shape[1 if batch_first else 0] * layers * (1 + both)
    return steps


def _by_layers(x: Tensor, hidden: Any, weights: Any, *flags: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute an LSTM with one call of the oneDNN kernel for each layer and direction."""
    biases, layers, dropout, train, both, batch_first = flags
    x, ends, of_one = (x.transpose(0, 1) if batch_first else x).contiguous(), [], 4 if biases else 2
    for layer in range(layers):
        directions: list[Tensor] = []
        for n in range(layer * (1 + both), (layer + 1) * (1 + both)):
            parameters = weights[n * of_one : (n + 1) * of_one]
            parameters = parameters if biases else [*parameters, *map(torch.zeros_like, parameters)]
            states = [each.contiguous()[n] for each in hidden]
            rest = (states[0].shape[1], layers, biases, both, batch_first, train)
            y, *end, _ = internals.ONEDNN_RNN_LAYER(x, *parameters, *states, len(directions) == 1, [], 2, *rest)
            directions.append(y)
            ends.append(end)
        x = torch.cat(directions, -1) if both else directions[0]
        if dropout and train and layer < layers - 1:
            x = torch.dropout(x, dropout, train=True)
    h, c = map(torch.stack, zip(*ends, strict=True))
    return x.transpose(0, 1) if batch_first else x, h, c


def _layer(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return recorder.record(_keeping_layer(), args, kwargs) if torch.is_grad_enabled() else NotImplemented


@functools.cache
def _keeping_layer() -> Any:
    """Register and return the op that runs the oneDNN kernel of one layer with grad mode on.

    In grad mode, the kernel also returns the values that its backward needs.
    """

    def layer(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with torch.enable_grad():
            results: tuple[Tensor, Tensor, Tensor, Tensor] = internals.ONEDNN_RNN_LAYER(*args)
        return results

    name, schema = internals.KEEPING_RNN_LAYER, str(internals.ONEDNN_RNN_LAYER._schema)
    torch.library.define(name, schema[schema.index("(") :])
    torch.library.impl(name, "CPU", layer)
    torch.library.register_fake(name, lambda *args: internals.ONEDNN_RNN_LAYER(*args))
    return torch.ops.aotlab.onednn_rnn_layer.default
