"""Draw the caller's steps: expressions that write to the results, register hooks on them, or differentiate them.

The steps are not run while they are drawn. So a step may raise in eager, for example after an in-place op on an output.
Then the engine must raise too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from aotlab.verification.programs.choices import Choices, chance, one_of, weighted

#: Each write increments a version counter, because a backward notices only these writes. So the list has no write
#: through ``.data``, no new memory (``x.data = y``) and no ``detach_()``. Two writes are listed twice. If the
#: repetitions were removed, each seed would give another program.
_WRITES = (
    "{t}.mul_(2)",
    "{t}.add_(1)",
    "{t}.detach().add_(1)",
    "{t}.zero_()",
    "{t}[..., :1].mul_(2)",
    "{t}.copy_({t} * 2)",
    "{t}.detach().mul_(2)",
    "{t}.unsqueeze_(0)",
    "{t}.add_(1)",
    "{t}.mul_(2)",
)

_WRITE = re.compile(r"_\(")  # a call of an in-place method

_BEFORE = weighted(
    (6, "write an output"),
    (3, "write an input"),
    (4, "hook an output"),
    (3, "retain an output"),
    (4, "between outputs"),
    (3, "to an input"),
    (3, "backward one"),
)

_AFTER = weighted((4, "write an output"), (3, "write an input"), (3, "backward again"), (2, "to an input again"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The caller's steps ``before`` and ``after`` the backward, as the text of Python expressions."""

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def draw_script(choices: Choices, outputs: list[torch.Tensor], inputs: list[str], *, unsaved: bool) -> Script:
    """Draw up to three steps of the caller before the backward, and up to two after it.

    ``outputs`` are the returned tensors, and ``inputs`` are the names of the tensor arguments.

    ``unsaved`` says that a custom autograd function of the program keeps its argument on ``ctx`` and does not pass it
    to ``save_for_backward``. Then no step before the backward writes. After such a write, eager silently computes the
    gradient from the new value, and a compiled function raises.
    """
    if not outputs or not chance(choices, 380):
        return Script()
    before, after = one_of(
        choices, weighted((5, (1, 0)), (3, (2, 0)), (2, (0, 1)), (2, (1, 1)), (1, (3, 1)), (1, (2, 2)))
    )
    steps = [_step(choices, one_of(choices, _BEFORE), outputs, inputs) for _ in range(before)]
    return Script(
        before=tuple(step for step in steps if not (unsaved and _WRITE.search(step))),
        after=tuple(_step(choices, one_of(choices, _AFTER), outputs, inputs) for _ in range(after)),
    )


def _step(choices: Choices, kind: str, outputs: list[torch.Tensor], inputs: list[str]) -> str:
    differentiable = [index for index, output in enumerate(outputs) if output.requires_grad]
    at = choices.below(len(outputs))
    if (kind.startswith(("between", "to an", "backward", "hook", "retain"))) and not differentiable:
        kind = "write an output"
    if kind == "write an output":
        return one_of(choices, _WRITES).format(t=f"out[{at}]")
    if kind == "write an input":
        return one_of(choices, _WRITES).format(t=one_of(choices, inputs))
    at = one_of(choices, differentiable)
    target = f"out[{at}]"
    if kind == "hook an output":
        return f'hook({target}, "{target}")'
    if kind == "retain an output":
        return f"retain({target})"
    if kind == "backward one":
        return f"{target}.backward(weights({target}), retain_graph=True)"
    if kind == "backward again":
        return f"{target}.backward(weights({target}))"
    retained = "" if kind.endswith("again") else ", retain_graph=True"
    source = one_of(choices, inputs)
    if kind == "between outputs" and len(differentiable) > 1:
        source = f"out[{one_of(choices, [index for index in differentiable if index != at])}]"
    return f"torch.autograd.grad({target}, {source}, weights({target}), allow_unused=True{retained})"
