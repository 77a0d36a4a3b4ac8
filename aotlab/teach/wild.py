"""The exercises of page 12, `12_in_the_wild`. They are written as in `course`."""

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
    """Compile a function with ``torch.compile(backend="aotlab")``, make the calls, and return the report."""
    torch.compiler.reset()
    compiled = torch.compile(function, backend="aotlab", options={"compiler": "eager"})
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # Dynamo logs each graph break, in eleven lines
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
    """Write `answer(x)`, which returns the same as this program, and becomes one graph without a graph break.

    - The branch depends on a value, and a graph knows no values. Can you compute both results, and select one? Test a
      sum of zero.
    - There is an op that selects from two tensors. Its condition is a tensor.
    - `torch.where(condition, one, other)`.
    """
    calls = [(torch.tensor(values),) for values in ([2.0, -1.0], [-3.0, 1.0], [1.0, -1.0], [-1.0, 3.0])]
    for (x,) in calls:
        result, expected = answer(x), branching(x)
        require(torch.equal(result, expected), f"of {x.tolist()} it makes {result.tolist()}, not {expected.tolist()}")
    report = _behind_dynamo(answer, *calls)
    breaks = report.graph_breaks
    require(not len(breaks), f"there is a graph break: {', '.join(breaks['reason']) if len(breaks) else ''}")
    require(len(report.calls) == len(calls), "no graph was made")


@new_exercise("wild")
def read_the_report(answer: Answer) -> None:
    """Write `answer(report)`: how many bytes does the forward save for the backward, without the inputs?

    - One table of the report has a row for each saved value.
    - The caller holds the inputs anyway, so do not count them. A column says which saved values are inputs.
    - The table is `report.saved`, with its columns `is_input` and `nbytes`; `query("not is_input")` selects the rows
      that are not inputs.
    """
    w = torch.ones(4, 4, requires_grad=True)
    for function in (lambda x, w: (x @ w).exp().sum(), lambda x, w: ((x @ w).tanh() @ w).sin()):
        report = _behind_dynamo(function, (torch.ones(8, 4), w))
        nbytes, saved = answer(report), report.saved
        require(
            nbytes == saved["nbytes"][~saved["is_input"]].sum(),
            f"of a report with the bytes {report.saved['nbytes'].tolist()} it makes {nbytes}",
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
    """`f` claims to behave like this program. Write `answer(f)`, which calls `f`: False if `f` is wrong, else True.

    - `f` may lose the write: check `x` after the call, too.
    - `f` may read `y` too early. When does that make a difference? (See `06_inputs_that_share`.)
    - Call `f` with two separate tensors, and with the same tensor twice. Compare the results and the written tensors.
    """
    for function, right, what in (
        (keeps_order, True, "the program itself"),
        (loses, False, "one that does not write `x`"),
        (swaps, False, "one that reads `y` before the write"),
        (takes_one, False, "one that takes `x` for `y`"),
        (writes_both, False, "one that writes `y`, too"),
        (lambda x, y: x.mul_(2).add(y), True, "one that does the same with other ops"),
    ):
        said = answer(function)
        require(bool(said) is right, f"of {what} it says {said}")
