"""The exercises of `12_in_the_wild`; see `course`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch

import aotlab
from aotlab.report.model import Report
from aotlab.teach.exercises import new_exercise, require

Answer = Callable[..., Any]


def _behind_dynamo(function: Answer, *calls: tuple[Any, ...]) -> Report:
    """Make calls behind Dynamo, and return what the report says."""
    torch.compiler.reset()
    compiled = torch.compile(function, backend="aotlab", options={"compiler": "eager"})
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # Dynamo logs each break, in eleven lines
    try:
        with warnings.catch_warnings(), aotlab.Report.record() as recording:
            warnings.simplefilter("ignore")
            for call in calls:
                compiled(*call)
    finally:
        logging.disable(disabled)
    return recording.report()


def branching(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x * 2
    return -x


@new_exercise("wild", program=branching)
def one_graph(answer: Answer) -> None:
    """Write `answer(x)`, which returns the same as this program, and becomes one graph without a break.

    - The branch depends on a value, and a graph has no values. Can both results be computed, and one be chosen? Mind a
      sum of zero.
    - There is an op that chooses between two tensors by a condition that is a tensor.
    - `torch.where(condition, one, other)`.
    """
    calls = [(torch.tensor(values),) for values in ([2.0, -1.0], [-3.0, 1.0], [1.0, -1.0], [-1.0, 3.0])]
    for (x,) in calls:
        found, expected = answer(x), branching(x)
        require(torch.equal(found, expected), f"of {x.tolist()} it makes {found.tolist()}, not {expected.tolist()}")
    report = _behind_dynamo(answer, *calls)
    breaks = report.graph_breaks
    require(not len(breaks), f"there is a graph break: {', '.join(breaks['reason']) if len(breaks) else ''}")
    require(len(report.calls) == len(calls), "no graph was made")


@new_exercise("wild")
def read_the_report(answer: Answer) -> None:
    """Write `answer(report)`: how many bytes does the forward keep for the backward that the caller does not hold?

    - One table of the report has a row for each value that is kept.
    - The caller holds the inputs, so they do not count. A column says which these are.
    - `report.saved`, with its columns `is_input` and `nbytes`; `query("not is_input")` takes the other rows.
    """
    w = torch.ones(4, 4, requires_grad=True)
    for function in (lambda x, w: (x @ w).exp().sum(), lambda x, w: ((x @ w).tanh() @ w).sin()):
        report = _behind_dynamo(function, (torch.ones(8, 4), w))
        found, saved = answer(report), report.saved
        require(
            found == saved["nbytes"][~saved["is_input"]].sum(),
            f"of a report with the bytes {report.saved['nbytes'].tolist()} it makes {found}",
        )


def keeps_order(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x + y


def swaps(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result = x * 2 + y
    x.mul_(2)
    return result


def loses(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * 2 + y


def takes_one(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.mul_(2).add(x)


def writes_both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result = x.mul_(2) + y
    if x is not y:
        y.zero_()
    return result


@new_exercise("wild", program=keeps_order)
def find_the_bug(answer: Answer) -> None:
    """`f` claims to do what this program does. Write `answer(f)`, which calls `f`: False if you catch it, else True.

    - A layer can lose the write: look at `x` after the call, too.
    - A layer can read `y` too early. When does that make a difference? (See `06_inputs_that_share`.)
    - Call `f` with tensors of their own and with one that is both arguments. Compare results and what was written.
    """
    for function, right, what in (
        (keeps_order, True, "the program itself"),
        (loses, False, "one that does not write `x`"),
        (swaps, False, "one that reads `y` before the write"),
        (takes_one, False, "one that takes `x` for `y`"),
        (writes_both, False, "one that writes `y`, too"),
        (lambda x, y: x.mul_(2).add(y), True, "one that does the same with other ops"),
    ):
        found = answer(function)
        require(bool(found) is right, f"of {what} it says {found}")
