"""Draw short programs about two inputs that share memory: few statements, each of many possible kinds.

`drawing` draws programs with many inputs and long bodies. It hardly ever combines several rare things. For example, two
views of one buffer share no byte, one of them is written under ``no_grad``, and the function reads ``requires_grad`` of
the other. In this module a program has one relation between two inputs, up to three statements about them or a view of
one, and one returned expression.

The text is drawn first, and then the whole function is run once. A few programs that raise in eager are kept.
"""

from __future__ import annotations

import warnings

import torch

from aotlab.verification.clones import random_state_restored
from aotlab.verification.observables import Backward
from aotlab.verification.programs.choices import Choices, RejectedError, chance, one_of, weighted
from aotlab.verification.programs.drawing import trial
from aotlab.verification.programs.program import Program, Setup
from aotlab.verification.programs.statements import NOT_FOR_DYNAMO
from aotlab.verification.programs.writer import QUIRKS

_PLAIN = "w = numbers(1, 7, dtype=torch.float32)"
_LEAF = _PLAIN + ".requires_grad_()"
_HISTORY = _LEAF + " * 1"
_WINDOWS = ("a = w[0:3]", "b = w[3:6]")
_COMPLEX = "w = torch.complex(numbers(1, 3, dtype=torch.float32), numbers(2, 3, dtype=torch.float32))"

#: The relations. Each is a sequence of statements that make the inputs ``a`` and ``b``, most of them as views of ``w``.
_RELATIONS: tuple[tuple[str, ...], ...] = (
    (_PLAIN, *_WINDOWS),
    (_HISTORY, *_WINDOWS),
    (_LEAF, *_WINDOWS),
    (_HISTORY, "a = w[0:3]", "b = w.detach()[3:6]"),
    (_HISTORY, "a = w.detach()[0:3]", "b = w[3:6]"),
    (_PLAIN, "a = w[0:3]", "b = w[2:5]"),
    (_HISTORY, "a = w[0:3]", "b = w[2:5]"),
    ("w = numbers(1, 3, dtype=torch.float32)", "a = w", "b = w[0:3]"),
    ("w = numbers(1, 3, dtype=torch.float32).requires_grad_() * 1", "a = w[0:3]", "b = w"),
    ("w = numbers(1, 2, 3, dtype=torch.float32).requires_grad_() * 1", "a, b = w.unbind(0)"),
    ("w = numbers(1, 2, 3, dtype=torch.float32)", "a, b = w.unbind(0)"),
    ("w = numbers(1, 6, dtype=torch.float32)", "a, b = w.split(3)"),
    (_PLAIN, "a = w[0:3]", "b = w.data[3:6]"),
    (_PLAIN, "a = w[0:3].detach().requires_grad_()", "b = w[3:6].detach()"),
    (_PLAIN, "a = w[0:3].detach()", "b = w[3:6].detach()"),
    (_PLAIN, "a = w[0:3].requires_grad_()", "b = w[3:6]"),
    (_PLAIN, "a = w[0:3]", "b = w[3:6].requires_grad_()"),
    ("w = numbers(1, 3, 3, dtype=torch.float32).requires_grad_() * 1", "a = w.t()", "b = w[0]"),
    ("w = numbers(1, 3, 3, dtype=torch.float32).requires_grad_() * 1", "a = w", "b = w.view(9)[3:6]"),
    (_COMPLEX, "a = w.real", "b = w.imag"),
    (_COMPLEX + ".requires_grad_() * 1", "a = w.real", "b = w.imag"),
    (_PLAIN, "a = w[:1]", "b = w[:1].expand(3)"),
    (_LEAF, "with torch.no_grad():", "    a = w[0:3]", "    b = w[3:6]"),
    (_PLAIN, "a = w[0:3]", "b = w.view(torch.int32)[3:6]"),
    ("w = numbers(1, 2, 3, dtype=torch.float32)", "a = w[0]", "b = w.t()[:, 1]"),
    ("a = numbers(1, 3, dtype=torch.float32)", "b = numbers(2, 3, dtype=torch.float32)"),
    ("a = numbers(1, 3, dtype=torch.float32).requires_grad_() * 1", "b = numbers(2, 3, dtype=torch.float32)"),
)

#: The grad mode in which a statement of the body runs; an empty string leaves the current mode.
_MODES = weighted((12, ""), (3, "with torch.no_grad():"), (1, "with torch.inference_mode():"))

#: The statements of the body. ``{t}`` is ``a``, ``b``, or the view ``v`` of one of them; ``c`` is a separate leaf.
_STEPS = (
    "{t}.mul_(2)",
    "{t}.add_(c[:{t}.shape[0]])",
    "{t}.copy_(c[:{t}.shape[0]])",
    "{t}[:1].mul_(3)",
    "{t}.zero_()",
    "{t}.data.mul_(2)",
    "{t}.detach().mul_(2)",
    "{t}.data = {t}.detach() * 2",
    "{t}.unsqueeze_(0)",
    "{t}.squeeze_()",
    "{t}.transpose_(0, -1)",
    "{t}.uniform_()",
    "{t}[{t} > 0] *= 2",
    "gathered({t})",
    "{t}.detach_()",
    "{t}.requires_grad_()",
    'hook({t}, "{t}")',
    "retain({t})",
    "{t} = {t}.detach()",
    "{t} = {t}[:1]",
    "{t} = {t} * 2",
    "v = {t}.view(-1)",
    "v = {t}[:1]",
    "v = {t} * c[:{t}.shape[0]]",
    "v = {t}.expand(2, *{t}.shape)",
    "v = Squared.apply({t})",
    "v = Logged.apply(c, {t})",
    "v = Overwrites.apply({t})",
    "v = Noisy.apply({t})",
    "v = {t}[{t} > 0]",
    "v = leading({t})",
    "v = checkpoint(torch.sin, {t}, use_reentrant=False)",
    "{t}.set_({t}.detach().clone())",
)

#: The expressions that the function returns.
_USES = (
    "{t} * 2",
    "{t}[:1]",
    "{t} * c[:{t}.shape[0]]",
    "{t}",
    "{t}.detach()",
    "v",
    "v, {t}",
    "c * (2 if {t}.requires_grad else 3)",
    "c * (2 if {t}.is_leaf else 3)",
    "a * c[:1], b * 2",
    "a, b",
    "{t}.view(-1), v * 2",
)

#: The step that the caller takes before the backward; an empty string is no step.
_LATER = weighted(
    (10, ""),
    (1, "out[0].mul_(2)"),
    (1, "out[-1].mul_(2)"),
    (1, "out[0].detach_()"),
    (1, "out[0].data.mul_(2)"),
    (1, 'setattr(out[0], "data", out[0].detach() * 2)'),
    (1, "out[0].unsqueeze_(0)"),
    (1, 'hook(out[0], "out[0]")'),
    (1, "b.detach().mul_(2)"),
    (1, "c.data.mul_(2)"),
    (1, "a.requires_grad_()"),
    (1, "b.requires_grad_()"),
)

_BACKWARDS: tuple[Backward, ...] = weighted((6, "all"), (2, "each"), (1, "reversed"), (1, "twice"))

_THEMSELVES = ("a", "b")
_WITH_VIEWS = ("a", "b", "b", "v", "v")


def draw_related(choices: Choices, *, dynamo: bool) -> Program:
    """Draw a program; raise `RejectedError` if the result is useless.

    Parameters
    ----------
    dynamo
        Leave out programs that Dynamo cannot trace without a graph break.
    """
    third = "c = numbers(3, 3, dtype=torch.float32).requires_grad_()"
    lines = (*one_of(choices, _RELATIONS), third)
    body = [f"v = {one_of(choices, _THEMSELVES)}" + one_of(choices, ("", ".view(-1)", "[:1]", ".detach()", "[None]"))]
    for _ in range(one_of(choices, (1, 2, 2, 3))):
        step = one_of(choices, _STEPS).format(t=one_of(choices, _WITH_VIEWS))
        mode = one_of(choices, _MODES)
        body += [mode, f"    {step}"] if mode else [step]
    result = one_of(choices, _USES).format(t=one_of(choices, _WITH_VIEWS))
    if dynamo and any(name in line for line in body for name in NOT_FOR_DYNAMO):
        raise RejectedError
    setup = Setup(lines=lines, arguments=("a", "b", "c"))
    later = one_of(choices, _LATER)
    with warnings.catch_warnings(), torch.enable_grad(), random_state_restored():
        warnings.simplefilter("ignore")
        error, _ = trial(setup.arguments, tuple(body), f"({result},)", setup)
    if QUIRKS.search(error) or (error and not chance(choices, 100)):
        raise RejectedError
    return Program(
        parameters=setup.arguments,
        body=tuple(body),
        result=f"({result},)",
        setups=(setup,) * one_of(choices, (1, 1, 2)),
        backward=one_of(choices, _BACKWARDS),
        before=(later,) if later and not error else (),
        raises=bool(error),
    )
