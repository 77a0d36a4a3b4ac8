"""Train a model with batches of twelve sizes, from cold: what is compiled, how long it takes, whether it is eager's.

Ours and ``torch.compile`` take turns, there and back, each time with empty caches. Afterwards each computes single
steps of the same sizes, that are compared with eager's as those of one size are (see `aotlab.bench.courses`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from aotlab import _torch as internals
from aotlab import observe
from aotlab.bench.courses import NEAR, Training, Wrap, by_ours, by_stock, eagerly, errors_of_each
from aotlab.bench.models import Trained

#: Errors of one step: of the loss, the gradients, the buffers.
StepErrors = tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cold:
    """What steps from cold took: graphs ``compiled``, calls of ours, of them the ``eager`` ones, and ``seconds``."""

    compiled: int
    calls: int
    eager: int
    seconds: float


def from_cold(trained: Trained, wrap: Wrap, device: torch.device) -> tuple[Training, Cold]:
    """Take a step of each size, with nothing compiled before; what was compiled is of use until the next time.

    Compilations are those of our engine, if it is ours, else the graphs that Dynamo handed over. A step in which no
    graph was called at all counts as one call that ran eagerly.
    """
    torch.compiler.reset()
    events: list[observe.Event] = []
    calls: list[bool] = []
    before = internals.dynamo_graphs()
    with internals.cold_caches(), observe.listen(events.append):
        training = Training(trained, wrap, device)
        batches = [training.batch(size) for size in trained.sizes]
        begin = time.perf_counter()
        for batch in batches:
            heard = len(events)
            training.step(batch).item()
            calls += [e.entry is not None for e in events[heard:] if isinstance(e, observe.Called)] or [False]
        seconds = time.perf_counter() - begin
    ours = sum(isinstance(e, (observe.CompileFinished, observe.CompileFailed)) for e in events)
    compiled = ours or internals.dynamo_graphs() - before
    return training, Cold(compiled=compiled, calls=len(calls), eager=calls.count(False), seconds=seconds)


def varied(
    trained: Trained, device: torch.device, *, backend: str, rounds: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measure steps of all sizes: the fields of a row whose names begin with ``sizes``.

    ``backend`` is ours; on ``"eager"`` stock takes ``"aot_eager"``. Rounds go there and back, by turns.
    """
    ways: dict[str, Wrap] = {
        "ours": partial(by_ours, backend=backend, min_cut=True),
        "stock": partial(by_stock, backend="aot_eager" if backend == "eager" else backend),
    }
    if not trained.by_stock:
        del ways["stock"]
    found: dict[str, list[Cold]] = {name: [] for name in ways}
    trainings: dict[str, Training] = {"eager": Training(trained, eagerly, device)}
    errors: dict[str, list[StepErrors]] = {}
    for turn in range(rounds):
        for name in ways if turn % 2 == 0 else reversed(ways):
            say(f"{len(trained.sizes)} sizes, {name}")
            training, cold = from_cold(trained, ways[name], device)
            found[name].append(cold)
            if turn == 0:
                dtype = torch.float32 if backend == "eager" else torch.float64
                each = errors_of_each(trained, [training, trainings["eager"]], trained.sizes, device, dtype)
                errors[name], errors["eager"] = (list(column) for column in zip(*each, strict=True))
    ours, stock = found["ours"], found.get("stock", [])
    alike = as_near(errors["ours"], [] if backend == "eager" else errors.get("stock", []) + errors["eager"])
    row = {
        "sizes": len(trained.sizes),
        "sizes_alike": alike.count(True),
        "sizes_wrong": tuple([size for size, is_alike in zip(trained.sizes, alike, strict=True) if not is_alike]),
        "sizes_our_compilations": ours[0].compiled,
        "sizes_eager_share": ours[0].eager / ours[0].calls,
        "sizes_our_seconds": median(each.seconds for each in ours),
        "sizes_again": ours[-1].seconds / ours[0].seconds if len(ours) > 1 else float("nan"),
    }
    if stock:
        row |= {
            "sizes_stock_compilations": stock[0].compiled,
            "sizes_stock_seconds": median(each.seconds for each in stock),
            "sizes_ratio": median(a.seconds / b.seconds for a, b in zip(ours, stock, strict=True)),
        }
    return row


def as_near(found: Sequence[StepErrors], others: Sequence[StepErrors]) -> list[bool]:
    """Tell of each step whether its errors are at most twice the largest of the ``others``, or near enough.

    Without others they must be none. The largest of stock's and eager's: at a ReLU's corner gradients jump in all.
    """
    limits = [max(NEAR, 2 * max(kind)) for kind in zip(*others, strict=True)] if others else [0.0] * 3
    return [all(error <= limit for error, limit in zip(step, limits, strict=True)) for step in found]
