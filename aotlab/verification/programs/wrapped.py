"""Change programs so that they receive wrapper subclasses: torch's ``TwoTensor``, which runs each op on two parts."""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from aotlab.verification.programs.choices import Choices, RejectedError, chance
from aotlab.verification.programs.drawing import made_by, trial
from aotlab.verification.programs.program import Program, Setup


def wrapped(program: Program, choices: Choices) -> Program:
    """Change the calls of a program so that they pass some of the tensor arguments as ``TwoTensor``.

    If the same tensor is passed twice, it stays one tensor. Other arguments that share memory no longer share it after
    wrapping.

    Raises
    ------
    RejectedError
        If the program has no tensor arguments, or if its first call raises after wrapping.
    """
    named = {name for setup in program.setups for text in setup.arguments for name in re.findall(r"\b[a-d]\b", text)}
    names = [name for name in sorted(named) if all(_is_tensor(setup, name) for setup in program.setups)]
    chosen = [name for name in names if chance(choices, 700)] or names[:1]
    if not chosen:
        raise RejectedError
    result = replace(program, setups=tuple(_with_wrappers(setup, chosen) for setup in program.setups))
    error, _ = trial(result.parameters, result.body, result.result, result.setups[0])
    if error:
        raise RejectedError
    return result


def _is_tensor(setup: Setup, name: str) -> bool:
    (value,) = made_by(replace(setup, arguments=(name,)))
    return isinstance(value, torch.Tensor)


def _with_wrappers(setup: Setup, names: list[str]) -> Setup:
    lines, watched = [*setup.lines], [*setup.watched]
    for name in names:
        # A second name of a wrapped argument is bound to the same wrapper.
        same = re.search(rf"(?m)^{name} = ([a-d])$", "\n".join(setup.lines))
        if same is not None and same[1] in names:
            lines.append(f"{name} = {same[1]}")
        else:
            lines.append(f"{name}_two, {name} = two({name})")
            watched.append(f"{name}_two")
    return replace(setup, lines=tuple(lines), watched=tuple(watched))
