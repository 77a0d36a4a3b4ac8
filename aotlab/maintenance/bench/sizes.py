"""Train a model on batches of twelve sizes with empty caches, and compare results, compilations and times.

aotlab and ``torch.compile`` run in turns, in alternating order, each time with empty caches. Afterwards each of them
computes single steps with batches of the same sizes. The errors of these steps are measured as in `courses`.
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
from aotlab import events
from aotlab.maintenance.bench.courses import NEAR, Training, Wrap, by_ours, by_stock, eagerly, errors_of_each
from aotlab.maintenance.bench.models import Trained

#: Errors of one step: of the loss, the gradients, and the buffers.
StepErrors = tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cold:
    """The costs of training steps that start with empty caches, with one compiler.

    ``compiled`` is the number of compilations, ``calls`` the number of calls of compiled functions of aotlab, ``eager``
    the number of these calls that ran eagerly, and ``seconds`` the total time.
    """

    compiled: int
    calls: int
    eager: int
    seconds: float


def from_cold(trained: Trained, wrap: Wrap, device: torch.device) -> tuple[Training, Cold]:
    """Run a training step of each of `Trained.sizes` with empty caches; return the training and its costs.

    The compiled code can be used until the next call of this function, which resets the compilers. If aotlab ran, its
    compilations are counted, otherwise the graphs that Dynamo passed to its backend. A step in which no compiled
    function of aotlab was called counts as one call that ran eagerly.
    """
    torch.compiler.reset()
    emitted: list[events.Event] = []
    calls: list[bool] = []
    before = internals.dynamo_graphs()
    with internals.cold_caches(), events.listen(emitted.append):
        training = Training(trained, wrap, device)
        batches = [training.batch(size) for size in trained.sizes]
        begin = time.perf_counter()
        for batch in batches:
            heard = len(emitted)
            training.step(batch).item()
            calls += [e.entry is not None for e in emitted[heard:] if isinstance(e, events.Called)] or [False]
        seconds = time.perf_counter() - begin
    ours = sum(isinstance(e, (events.CompileFinished, events.CompileFailed)) for e in emitted)
    compiled = ours or internals.dynamo_graphs() - before
    return training, Cold(compiled=compiled, calls=len(calls), eager=calls.count(False), seconds=seconds)


def varied(
    trained: Trained, device: torch.device, *, backend: str, rounds: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measure steps of all sizes; return the fields of a `ModelFigure` whose names begin with ``sizes``.

    ``backend`` is the backend of aotlab. If it is ``"eager"``, ``torch.compile`` uses ``"aot_eager"``. In each of
    ``rounds`` rounds, both compilers train once. Their order alternates between rounds.
    """
    wraps: dict[str, Wrap] = {
        "ours": partial(by_ours, backend=backend, min_cut=True),
        "stock": partial(by_stock, backend="aot_eager" if backend == "eager" else backend),
    }
    if not trained.by_stock:
        del wraps["stock"]
    measured: dict[str, list[Cold]] = {name: [] for name in wraps}
    trainings: dict[str, Training] = {"eager": Training(trained, eagerly, device)}
    errors: dict[str, list[StepErrors]] = {}
    for turn in range(rounds):
        for name in wraps if turn % 2 == 0 else reversed(wraps):
            say(f"{len(trained.sizes)} sizes, {name}")
            training, cold = from_cold(trained, wraps[name], device)
            measured[name].append(cold)
            if turn == 0:
                dtype = torch.float32 if backend == "eager" else torch.float64
                each = errors_of_each(trained, [training, trainings["eager"]], trained.sizes, device, dtype)
                errors[name], errors["eager"] = (list(column) for column in zip(*each, strict=True))
    ours, stock = measured["ours"], measured.get("stock", [])
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


def as_near(steps: Sequence[StepErrors], others: Sequence[StepErrors]) -> list[bool]:
    """Tell for each step whether its errors are at most twice the largest errors in ``others``, or at most `NEAR`.

    ``others`` has the errors of all steps of ``torch.compile`` and eager. In some steps, rounding changes the sign of a
    ReLU's input. Then the gradient error is much larger than in other steps. These steps differ between compilers. So
    the limit for each step is computed from the largest error of all steps. If ``others`` is empty, the errors must be
    zero.
    """
    limits = [max(NEAR, 2 * max(kind)) for kind in zip(*others, strict=True)] if others else [0.0] * 3
    return [all(error <= limit for error, limit in zip(step, limits, strict=True)) for step in steps]
