"""LSTMs that are trained: on the CPU, eager runs a kernel of oneDNN's, which looks at grad mode when it runs.

A compiled forward runs without grad mode, and so calls an op that turns it on for the kernel. Compilers that do not
compute bit for bit what eager does get the ops that define an LSTM instead, which they can join.
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
    if not torch.is_grad_enabled():
        return guard.run(func, args, kwargs)
    if is_exact():
        with internals.no_python_dispatcher():  # which has another LSTM
            return func(*args, **kwargs)
    with internals.without_onednn():
        return func(*args, **kwargs)


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
