"""The function that a saved cell calls: compare the same calls in eager and in the engine, and describe differences."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from aotlab.verification.clones import argument_tensors, random_state_restored
from aotlab.verification.judgement import judge
from aotlab.verification.observables import Backward, Call, CallerStep, observe

#: A function that returns the arguments of one call, and a dictionary of other tensors to observe, by name.
Inputs = Callable[[], tuple[tuple[Any, ...], dict[str, torch.Tensor]]]

#: A function that returns the caller's steps. Its first argument is the list of returned tensors. Its other parameters
#: have the names of inputs and receive these inputs.
Steps = Callable[..., Sequence[Callable[[], Any]]]


def differences(
    program: Callable[..., Any],
    compiled: Callable[..., Any],
    inputs: Sequence[Inputs],
    *,
    backward: Backward = "all",
    before: Steps | None = None,
    after: Steps | None = None,
    grad_modes: Sequence[bool] | None = None,
    seen: list[tuple[str, torch.Tensor]] | None = None,
    exact: bool = True,
) -> list[str]:
    """Call ``program`` and ``compiled``, each on its own arguments, and return a sentence for each difference.

    Parameters
    ----------
    inputs
        One function for each call, which makes the arguments. ``compiled`` is not compiled again between calls.
    backward
        Which outputs are differentiated after a call.
    before, after
        The caller's steps before and after the backward.
    grad_modes
        Whether grad mode is on in each call.
    seen
        The list to which the caller's hooks append the gradients that they receive.
    exact
        Whether gradients have to be equal bit for bit.

    Examples
    --------
    >>> inputs = lambda: ((torch.ones(2),), {})
    >>> differences(lambda a: a * 2, lambda a: a + 2, [inputs])
    ['`out` differs in 2 of 2 elements: at (0,) eager has 2.0, the engine 3.0']
    """
    sentences = []
    for number, make in enumerate(inputs):
        observations = []
        for function in (program, compiled):
            if seen is not None:
                seen.clear()
            args, watched = make()
            values = dict(zip(inspect.signature(program).parameters, args, strict=True))
            tensors = tuple(argument_tensors(program, args, {}))
            names = {**values, **dict(tensors), **watched}
            call = Call(
                args=args,
                inputs=tensors,
                watched=tuple(watched.items()),
                grad_mode=True if grad_modes is None else grad_modes[number],
                before=_caller(before, names, "before"),
                after=_caller(after, names, "after"),
                seen=seen,
            )
            with random_state_restored(), torch.enable_grad():
                torch.manual_seed(number)
                observations.append(observe(function, call, backward=backward))
        rows = judge(*observations, call=number + 1, exact_gradients=exact)
        sentences += [row.sentence for row in rows if not row.equal and row.kind != "refused"]
    return sentences


def _caller(
    steps: Steps | None, names: dict[str, Any], when: str
) -> Callable[[list[torch.Tensor]], list[CallerStep]] | None:
    if steps is None:
        return None
    arguments = [names.get(name) for name in list(inspect.signature(steps).parameters)[1:]]

    def make(out: list[torch.Tensor]) -> list[CallerStep]:
        return [
            CallerStep(
                text=f"{when}[{index}]",
                run=step,
                differentiates=bool({"backward", "autograd"} & set(step.__code__.co_names)),
            )
            for index, step in enumerate(steps(out, *arguments))
        ]

    return make
