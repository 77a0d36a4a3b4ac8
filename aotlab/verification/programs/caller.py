"""What the caller of a program does with what comes back: writes, hooks, and backwards in its own order.

Nothing of this is tried while it is drawn. A step may raise, as long as it does so in eager too, and the errors of
in-place work on outputs are as much an observable as their success.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from aotlab.verification.programs.choices import Choices, chance, one_of, weighted

#: Not what autograd does not count, other memory (``x.data = y``) or ``detach_()``: a backward finds only what moves
#: versions. Three stand twice, so that a seed's program stays the same.
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

_WRITE = re.compile(r"_\(")  # an in-place method is called

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
    """The caller's statements ``before`` and ``after`` the backward."""

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def draw_script(choices: Choices, outputs: list[torch.Tensor], inputs: list[str], *, unsaved: bool) -> Script:
    """Draw up to three things that the caller does before the backward, and up to two that it does after it.

    Where a custom function keeps its argument ``unsaved``, nothing is written before the backward: eager's gradient is
    then of what was written, without a word, and a compiled one raises.
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
    kept = "" if kind.endswith("again") else ", retain_graph=True"
    source = one_of(choices, inputs)
    if kind == "between outputs" and len(differentiable) > 1:
        source = f"out[{one_of(choices, [index for index in differentiable if index != at])}]"
    return f"torch.autograd.grad({target}, {source}, weights({target}), allow_unused=True{kept})"
