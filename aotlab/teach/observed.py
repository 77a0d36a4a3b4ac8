"""The exercises of page 13, `13_read_what_torch_compile_did`. They are written as in `course`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from aotlab.report.model import Report
from aotlab.teach.exercises import new_exercise, require
from aotlab.upstream import observe

Answer = Callable[..., Any]


def _observed(function: Answer, *calls: tuple[Any, ...]) -> Report:
    """Compile a function with stock `torch.compile`, make the calls, and return the report."""
    return _observed_form(torch.compile(function, backend="aot_eager"), *calls)


def _observed_form(compiled: Answer, *calls: tuple[Any, ...]) -> Report:
    torch.compiler.reset()
    with observe() as observation:
        for call in calls:
            compiled(*call)
    return observation.report()


@new_exercise("observed")
def written_arguments(answer: Answer) -> None:
    """Write `answer(report)`: the set of the names of the tensors that the observed function writes.

    - One table of the report has a row for each input of each graph.
    - A column of this table says whether the input is written. With several graphs, a name occurs several times.
    - The table is `report.inputs`, with its columns `name` and `mutated`. `set(...)` removes repeated names.
    """

    def none(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    def second(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y.mul_(2) + x

    def both(x: torch.Tensor, y: torch.Tensor) -> None:
        x.add_(1)
        y.view(-1).sub_(1)

    one, other = (torch.ones(2), torch.ones(2)), (torch.ones(3), torch.ones(3))
    for function, names in ((none, set()), (second, {"y"}), (both, {"x", "y"})):
        said = answer(_observed(function, one, other))
        written = " and ".join(sorted(names)) or "nothing"
        require(said == names, f"of a function that writes {written} it makes {said}")


@new_exercise("observed")
def compiled_once(answer: Answer) -> None:
    """Write `answer(function)`: compile it with stock `torch.compile`, so that one graph serves all sizes of `x`.

    - `torch.compile(function, backend="aot_eager")` makes the first graph for one size only.
    - An option of `torch.compile` makes each size a symbol from the first call on.
    - The option is `dynamic=True`.
    """

    def program(x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(0) * x.size(0)

    compiled = answer(program)
    require(callable(compiled), f"it returns {compiled}, which cannot be called")
    calls = [(torch.arange(float(size)),) for size in (3, 4, 6)]
    report = _observed_form(compiled, *calls)
    graphs = sum(len(frame.graphs) for frame in report.frames)
    require(graphs, "`torch.compile` compiled nothing")
    require(graphs == 1, f"there are {graphs} graphs: {', '.join(report.recompiles['reason'])}")
    for (x,) in calls:
        require(torch.equal(compiled(x), program(x)), f"for {x.tolist()} it computes {compiled(x).tolist()}")


@new_exercise("observed")
def lines_that_break(answer: Answer) -> None:
    """Write `answer(report)`: the lines of code at which the graphs of the observed function break, as a list of texts.

    - One table of the report has a row for each graph break.
    - Its columns `file`, `line` and `code` name the place. Use the code.
    - The table is `report.graph_breaks`; `.tolist()` makes a list of a column.
    """

    def whole(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def printing(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        print(end="")
        y = y * 2
        print("", end="")
        return y - 1

    for function, lines in ((whole, []), (printing, ['print(end="")', 'print("", end="")'])):
        said = answer(_observed(function, (torch.ones(2),)))
        require(said == lines, f"of a function with {len(lines)} graph breaks it makes {said}")
