"""Build the calls of a program that is given as a Python module, as `Program.source` writes it.

Such a module has the function ``program`` and the functions ``inputs_0()``, ``inputs_1()``, …. Each ``inputs_*``
function makes the arguments of one call. It returns a pair: the arguments, and a dictionary of other tensors to
observe, for example the base of an argument that is a view. The module may also have:

- ``before(out, a, b)`` and ``after(out, a, b)``: functions that take the list of returned tensors and the inputs by
  name. They return the *caller's steps* before and after the backward: callables that use the outputs as a user would,
  for example ``lambda: out[0].mul_(2)``;
- ``grad_modes``: for each call, whether grad mode is on;
- ``seen``: the list to which the caller's hooks append the gradients that they receive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from aotlab.verification.clones import argument_tensors
from aotlab.verification.observables import Call, CallerStep


def call_of(module: dict[str, Any], index: int, *, texts: Mapping[str, Sequence[str]] | None = None) -> Call:
    """Make new arguments for call number ``index`` (from 0) of the program in ``module``.

    ``module`` is the namespace of the module. ``texts`` maps ``"before"`` and ``"after"`` to the source of each step of
    the caller. Comparisons use this source as the name of the step. Without ``texts``, the names of the steps are
    ``before 1``, ``before 2``, ….
    """
    seen: list[tuple[str, torch.Tensor]] | None = None
    if "seen" in module:
        seen = module["seen"] = []
    args, watched = module[f"inputs_{index}"]()
    function = module["program"]
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    if all(isinstance(value, torch.Tensor) for value in args):
        inputs = tuple(zip(names, args, strict=True))
    else:
        inputs = tuple(argument_tensors(function, args, {}))
    named = {**dict(zip(names, args, strict=True)), **watched}
    modes = module.get("grad_modes")
    return Call(
        args=args,
        inputs=inputs,
        watched=tuple(watched.items()),
        grad_mode=None if modes is None else modes[index],
        before=_steps(module, "before", named, texts),
        after=_steps(module, "after", named, texts),
        seen=seen,
    )


def _steps(
    module: Mapping[str, Any], when: str, named: Mapping[str, Any], texts: Mapping[str, Sequence[str]] | None
) -> Callable[[list[torch.Tensor]], list[CallerStep]] | None:
    function = module.get(when)
    if function is None:
        return None
    names = function.__code__.co_varnames[1 : function.__code__.co_argcount]

    def make(out: list[torch.Tensor]) -> list[CallerStep]:
        steps = function(out, *(named[name] for name in names))
        step_texts = texts[when] if texts is not None else [f"{when} {number}" for number in range(1, len(steps) + 1)]
        return [
            CallerStep(text=text, run=run, differentiates=bool({"backward", "autograd"} & set(run.__code__.co_names)))
            for text, run in zip(step_texts, steps, strict=True)
        ]

    return make
