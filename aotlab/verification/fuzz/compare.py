"""What a saved cell compares with: the same calls eagerly and on the engine, and a sentence for each difference."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from aotlab.verification.clones import argument_tensors, random_state_restored
from aotlab.verification.differential import judge
from aotlab.verification.observables import Backward, Call, CallerStep, observe

#: Makes the arguments of one call, and the tensors to look at besides them, by name.
Inputs = Callable[[], tuple[tuple[Any, ...], dict[str, torch.Tensor]]]

#: Makes, of the returned tensors and the inputs by name, what the caller does, step by step.
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
    """Call ``program`` eagerly and as ``compiled``, each on arguments of its own, and say what differs.

    Parameters
    ----------
    inputs
        One for each call; all calls of one side go to the same callable.
    backward
        Which outputs are differentiated afterwards.
    before, after
        What the caller does before and after that.
    grad_modes
        Whether grad mode is on, call by call.
    seen
        The list to which the program's hooks write.
    exact
        Whether gradients have to be equal to the last bit.

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
    given = [names.get(name) for name in list(inspect.signature(steps).parameters)[1:]]

    def make(out: list[torch.Tensor]) -> list[CallerStep]:
        return [
            CallerStep(
                text=f"{when}[{index}]",
                run=step,
                differentiates=bool({"backward", "autograd"} & set(step.__code__.co_names)),
            )
            for index, step in enumerate(steps(out, *given))
        ]

    return make
