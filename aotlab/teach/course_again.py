"""The exercises of the course's pages from 08 on; see `course`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

import aotlab
from aotlab.teach.exercises import new_exercise, require
from aotlab.teach.truth import window

Answer = Callable[..., Any]


def _graphs(function: Answer, *calls: tuple[Any, ...]) -> int:
    """Compile a function, make some calls, and count the graphs that they needed."""
    compiled = aotlab.compile(function, backend="eager")
    with warnings.catch_warnings(), aotlab.Report.record() as recording:
        warnings.simplefilter("ignore")
        for call in calls:
            compiled(*call)
    return sum(graph.status == "compiled" for frame in recording.report().frames for graph in frame.graphs)


# --- 08_again_and_again ----------------------------------------------------------------------------------------------


@new_exercise("recompiles")
def another_graph(answer: Answer) -> None:
    """Write `answer(x)`: a tensor of the shape, dtype and values of `x`, which the same graph does not serve.

    - Go through the guards of a tensor: of what do they speak besides shape and dtype?
    - Strides are guarded, and whether gradients are wanted.
    - A copy in another order of memory, or one that requires grad.
    """
    x = torch.arange(6.0).view(2, 3)
    found = answer(x)
    require(isinstance(found, torch.Tensor), f"the result is of type {type(found).__name__}, and is to be a tensor")
    require(found.dtype == x.dtype, f"the result has dtype {found.dtype}")
    require(torch.equal(found, x), f"of {x.tolist()} it makes {found.tolist()}")
    served = f"it is served, too: {window(found)}, as `x`, and requires_grad={found.requires_grad}, as `x`"
    require(_graphs(lambda x: x * 2, (x,), (found,)) == 2, served)


def folded(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 5:
        return x[:5].sum()
    return x.sum()


@new_exercise("recompiles", takes="number", program=folded)
def how_many_graphs(answer: float) -> None:
    """How many graphs does this program need, if it is called with 3, 4, 2, 8, 5, 1 and 9 elements, in this order?

    - The first graph is for 3 elements alone. At the second call the size has become another one.
    - A graph with a symbol holds for the sizes that go the same way at the `if`.
    - And there is a size that is never a symbol.
    """
    graphs = _graphs(folded, *((torch.ones(size),) for size in (3, 4, 2, 8, 5, 1, 9)))
    require(answer == graphs, f"it is not {answer}")


def doubled(x: torch.Tensor, n: int) -> torch.Tensor:
    for _ in range(n):
        x = x * 2
    return x


@new_exercise("recompiles", program=doubled)
def fewer_graphs(answer: Answer) -> None:
    """Write `answer(x, n)`, which returns the same as this program, and needs two graphs for all `n` from 1 to 8.

    - The loop fixes `n`, since each `n` makes another list of ops. Calculate with `n` instead.
    - To multiply by 2 so often is to multiply once, by a power of 2.
    - Python's operator for powers works for numbers, and an op of a graph can take what comes out.
    """
    x = torch.tensor([1.0, -3.0])
    for n in range(1, 9):
        found, expected = answer(x, n), doubled(x, n)
        wrong = f"for n = {n} it makes {found.tolist()} of {x.tolist()}, and not {expected.tolist()}"
        require(torch.equal(found, expected), wrong)
    graphs = _graphs(answer, *((x, n) for n in range(1, 9)))
    require(graphs, "it cannot be compiled, and runs eagerly")
    require(graphs <= 2, f"it needs {graphs} graphs")
