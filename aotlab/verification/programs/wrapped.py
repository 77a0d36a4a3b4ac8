"""Programs whose arguments are tensor subclasses: torch's own ``TwoTensor``, which does every op on two tensors."""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from aotlab.verification.programs.choices import Choices, RejectedError, chance
from aotlab.verification.programs.drawing import made_by, trial
from aotlab.verification.programs.program import Program, Setup


def wrapped(program: Program, choices: Choices) -> Program:
    """Wrap some arguments of a program, at each call; `RejectedError` if it then raises at the first one, or has none.

    Those that are the same tensor stay so; other memory that arguments share they then have twice.
    """
    named = {name for setup in program.setups for text in setup.arguments for name in re.findall(r"\b[a-d]\b", text)}
    names = [name for name in sorted(named) if all(_is_tensor(setup, name) for setup in program.setups)]
    chosen = [name for name in names if chance(choices, 700)] or names[:1]
    if not chosen:
        raise RejectedError
    made = replace(program, setups=tuple(_with_wrappers(setup, chosen) for setup in program.setups))
    error, _ = trial(made.parameters, made.body, made.result, made.setups[0])
    if error:
        raise RejectedError
    return made


def _is_tensor(setup: Setup, name: str) -> bool:
    (value,) = made_by(replace(setup, arguments=(name,)))
    return isinstance(value, torch.Tensor)


def _with_wrappers(setup: Setup, names: list[str]) -> Setup:
    lines, watched = [*setup.lines], [*setup.watched]
    for name in names:
        # One that is another name for an argument stays so.
        same = re.search(rf"(?m)^{name} = ([a-d])$", "\n".join(setup.lines))
        if same is not None and same[1] in names:
            lines.append(f"{name} = {same[1]}")
        else:
            lines.append(f"{name}_two, {name} = two({name})")
            watched.append(f"{name}_two")
    return replace(setup, lines=tuple(lines), watched=tuple(watched))
