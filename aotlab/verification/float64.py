"""Compare a value with a float64 run, if ``torch.testing.assert_close`` rejects it with its default tolerances.

The engine's value may differ from the float64 value by an allowed error, and in addition by the default tolerances of
``assert_close``. The allowed error is twice the error of the *yardstick*: the largest difference between an element of
the yardstick's value and the same element of the float64 value. The yardstick is stock ``torch.compile``, or eager if
stock ``torch.compile`` is the engine under test.

A sum in another order rounds differently, so the yardstick's error in one value may be small by chance. The allowed
error therefore has a floor: a fraction of the largest absolute value of an element of the float64 value. The fraction
is twice the largest relative error that eager or the yardstick has in any value of the call, but at most
`MOST_RELATIVE`.

Some programs have no float64 run: their arguments cannot be copied to float64, or they draw other random numbers there.
Then the default tolerances of ``assert_close`` decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from aotlab.errors import UsageError
from aotlab.verification.observables import Candidate, Observation, eager
from aotlab.verification.values import close_but_for, largest, largest_error, relative_error

#: The allowed error is never smaller than a fraction of the largest element (see the module's docstring). This is the
#: largest possible fraction. Without this limit, a large error in one value would excuse errors in all values.
MOST_RELATIVE = 1e-4
#: The name of the rule that is used if the program has no float64 run.
NO_FLOAT64 = "assert_close's defaults, because there is no float64 run"


#: A function that decides about a value of the engine that ``assert_close`` rejects. It takes the key of the value
#: (``"out[0]"``, ``"x.grad.0"``) and the value. It returns whether the value is close enough, and the name of the rule.
Appeal = Callable[[str, torch.Tensor], tuple[bool, str]]


class Float64Appeal:
    """Decides about the values that ``assert_close`` rejects, for all calls of one comparison.

    When it receives the first such value, it runs the program in float64 and with the yardstick. It stores the
    observations for the later values.

    Parameters
    ----------
    run
        A function that takes a reference or yardstick and a dtype. It makes all calls of the comparison on arguments of
        this dtype and returns their observations. If the dtype is None, the arguments are not converted.
    reference, yardstick
        Functions that turn the program into a callable. The reference is run in float64.
    """

    def __init__(
        self,
        run: Callable[[Candidate, torch.dtype | None], list[Observation]],
        reference: Candidate,
        yardstick: Candidate,
    ) -> None:
        self._run = run
        self._reference = reference
        self._yardstick = yardstick
        self._runs: tuple[list[Observation], list[Observation]] | None = None
        self._failed = False
        name = "eager" if yardstick is eager else "stock torch.compile"
        self._rule = f"twice {name}'s error against float64"

    def appeal(self, index: int, expected: Observation) -> Appeal:
        """Return the function that decides about the values of call number ``index`` (from 0).

        ``expected`` is eager's observation of that call.
        """

        def decide(key: str, actual: torch.Tensor) -> tuple[bool, str]:
            if self._runs is None and not self._failed:
                try:
                    self._runs = (self._run(self._reference, torch.float64), self._run(self._yardstick, None))
                except UsageError:
                    self._failed = True
            if self._runs is None or _drawn(self._runs[0][index]) != _drawn(expected):
                return False, NO_FLOAT64
            truths, measures = (_values(side[index]) for side in self._runs)
            truth, measure = truths.get(key), measures.get(key)
            if truth is None or measure is None or not truth.shape == measure.shape == actual.shape:
                return False, NO_FLOAT64
            relative = max(
                relative_error(largest_error(side[name], exact), exact)
                for side in (measures, _values(expected))
                for name, exact in truths.items()
                if name in side and side[name].shape == exact.shape
            )
            excused = min(2 * relative, MOST_RELATIVE) * largest(truth)
            error = largest_error(measure, truth)
            return close_but_for(max(2 * error if math.isfinite(error) else 0.0, excused), truth, actual), self._rule

        return decide


def _values(observation: Observation) -> dict[str, torch.Tensor]:
    """Return the values and gradients of a call by key (see `Appeal`), without sparse and boolean tensors."""
    values = {state.name: state.value for state in observation.tensors}
    values |= {f"{each.leaf}.grad.{each.step}": each.value for each in observation.gradients if each.value is not None}
    return {key: value for key, value in values.items() if value.layout == torch.strided and value.dtype != torch.bool}


def _drawn(observation: Observation) -> tuple[str, str]:
    """Return the random state after a call and after its backward.

    Two runs from the same random state drew equally many random numbers if these states are equal.
    """
    return observation.random_state, observation.random_state_left
