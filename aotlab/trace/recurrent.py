"""oneDNN's LSTM, by which eager trains on the CPU.

Its kernel looks at grad mode when it runs: without it, it keeps nothing for the backward. A compiled forward runs
without, and so does not call it itself, but an op that turns grad mode on for it. Compilers that do not compute bit for
bit what eager does get the ops that define an LSTM instead, which they can join.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.trace import running


def lstm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``torch.lstm`` in a trace that may be differentiated."""
    if running.is_exact():
        keeping_layer()
        with internals.no_python_dispatcher():  # which has another LSTM
            return func(*args, **kwargs)
    with internals.without_onednn():
        return func(*args, **kwargs)


@functools.cache
def keeping_layer() -> Any:
    """Make the op, when it is first needed, that stands in a graph for a layer of which a backward is wanted."""

    def layer(
        input: Tensor,  # as the op's own schema has it
        weight0: Tensor,
        weight1: Tensor,
        weight2: Tensor,
        weight3: Tensor,
        hx: Tensor,
        cx: Tensor,
        reverse: bool,
        batch_sizes: list[int],
        mode: int,
        hidden_size: int,
        num_layers: int,
        has_biases: bool,
        bidirectional: bool,
        batch_first: bool,
        train: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        given = (input, weight0, weight1, weight2, weight3, hx, cx, reverse, batch_sizes, mode, hidden_size)
        with torch.enable_grad():
            found: tuple[Tensor, Tensor, Tensor, Tensor] = internals.ONEDNN_RNN_LAYER(
                *given, num_layers, has_biases, bidirectional, batch_first, train
            )
        return found

    made = torch.library.custom_op("aotlab::onednn_rnn_layer", layer, mutates_args=())
    made.register_fake(lambda *given: internals.ONEDNN_RNN_LAYER(*given))
    return torch.ops.aotlab.onednn_rnn_layer.default
