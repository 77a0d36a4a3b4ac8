"""The calls of a program that is text: live arguments, and what the caller does, from the functions of its module.

Such a module has ``program``; ``inputs_0()``, ``inputs_1()``, …, each of which returns the arguments of a call and the
tensors to look at besides; and, if the program has it,

- ``before(out, a, b)`` and ``after(out, a, b)``: functions of the list of returned tensors and of the inputs by name,
  which return a list of what the caller does before and after the backward;
- ``grad_modes``: for each call whether it is made with grad mode on;
- ``seen``: the list to which ``hook`` adds what a hook got.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from aotlab.verification.clones import argument_tensors
from aotlab.verification.observables import Call, CallerStep


def call_of(module: dict[str, Any], index: int, *, texts: Mapping[str, Sequence[str]] | None = None) -> Call:
    """Make fresh arguments for call number ``index`` of the program in ``module``, from 0.

    ``texts`` says how the things are called that the caller does ``before`` and ``after``; else they are counted.
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
        given = texts[when] if texts is not None else [f"{when} {number}" for number in range(1, len(steps) + 1)]
        return [
            CallerStep(text=text, run=run, differentiates=bool({"backward", "autograd"} & set(run.__code__.co_names)))
            for text, run in zip(given, steps, strict=True)
        ]

    return make
