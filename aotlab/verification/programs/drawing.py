"""The strategy that draws programs, and the same by a seed without Hypothesis."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from aotlab.verification.clones import random_state_restored
from aotlab.verification.observables import Backward, flatten
from aotlab.verification.programs.caller import draw_script
from aotlab.verification.programs.changes import draw_change
from aotlab.verification.programs.choices import (
    Choices,
    DrawnChoices,
    RandomChoices,
    RejectedError,
    chance,
    one_of,
    weighted,
)
from aotlab.verification.programs.defined import OnlyDefined
from aotlab.verification.programs.prelude import helpers
from aotlab.verification.programs.program import Program, Setup, inputs_body
from aotlab.verification.programs.recipes import Recipe, draw_recipes, setup_of
from aotlab.verification.programs.sizes import draw_sized
from aotlab.verification.programs.writer import QUIRKS, Writer

if TYPE_CHECKING:
    from hypothesis import strategies as st

_BACKWARDS: tuple[Backward, ...] = weighted(
    (12, "all"), (4, "first"), (2, "each"), (1, "reversed"), (1, "twice"), (2, None)
)
_DIFFERENTIATING: tuple[Backward, ...] = weighted((12, "all"), (4, "first"), (2, "each"), (1, "reversed"), (1, "twice"))

_CALLS = weighted((2, 1), (5, 2), (3, 3))


def programs(
    *,
    max_statements: int = 8,
    max_calls: int = 3,
    grad: bool | None = None,
    dynamo: bool = False,
) -> st.SearchStrategy[Program]:
    """Draw a program with one to four arguments, a few statements and one to ``max_calls`` calls.

    Needs Hypothesis, which `program_of` does not.

    Parameters
    ----------
    grad
        True for programs that differentiate, False for such in which nothing requires grad; None for both.
    dynamo
        Leave out what Dynamo cannot trace whole.
    """
    from hypothesis import reject
    from hypothesis import strategies as st

    @st.composite
    def drawn(draw: st.DrawFn) -> Program:
        try:
            return draw_program(DrawnChoices(draw), max_statements, max_calls, grad=grad, dynamo=dynamo)
        except RejectedError:
            reject()

    return drawn()


def program_of(
    seed: int, *, max_statements: int = 8, max_calls: int = 3, grad: bool | None = None, dynamo: bool = False
) -> Program:
    """Make the program number ``seed``: what `programs` draws, several times as fast, and nearly never twice.

    Examples
    --------
    >>> program_of(1) == program_of(1)
    True
    """
    for attempt in range(1000):
        try:
            choices = RandomChoices(f"{seed}.{attempt}")
            return draw_program(choices, max_statements, max_calls, grad=grad, dynamo=dynamo)
        except RejectedError:
            continue
    raise RuntimeError(f"no program was made of seed {seed}")


def draw_program(
    choices: Choices, max_statements: int, max_calls: int, *, grad: bool | None, dynamo: bool, sized: bool = False
) -> Program:
    """Draw a program; `RejectedError` if it came out as one that is not worth having.

    With ``sized``, all calls after the first one have other sizes.
    """
    with warnings.catch_warnings(), torch.enable_grad(), random_state_restored():
        # Trying statements brings out deprecations that are none of an engine's business.
        warnings.simplefilter("ignore")
        program = _draw_flat(choices, max_statements, max_calls, grad=grad, dynamo=dynamo, sized=sized)
    if len(program.parameters) > 1 and chance(choices, 120):
        return _nested(program, one_of(choices, ("list", "tuple", "dict")))
    return program


def _nested(program: Program, container: str) -> Program:
    """Pass all arguments but the first in one container."""
    names = ", ".join(program.parameters[1:])
    made = {"list": f"[{names}]", "tuple": f"({names},)"}.get(
        container, "{" + ", ".join(f'"{name}": {name}' for name in program.parameters[1:]) + "}"
    )
    taken = "rest.values()" if container == "dict" else "rest"
    # By these names the caller uses them afterwards.
    used = set(re.findall(r"\b[b-d]\b", " ".join((*program.before, *program.after))))
    comma = "," if len(program.parameters) == 2 else ""
    return replace(
        program,
        parameters=(program.parameters[0], "rest"),
        body=(f"{names}{comma} = {taken}", *program.body),
        setups=tuple(
            replace(setup, arguments=(setup.arguments[0], made), watched=(*setup.watched, *sorted(used)))
            for setup in program.setups
        ),
    )


def _draw_flat(
    choices: Choices, max_statements: int, max_calls: int, *, grad: bool | None, dynamo: bool, sized: bool
) -> Program:
    if sized:
        recipes, changes = draw_sized(choices, grad, max_calls - 1)
    else:
        recipes = draw_recipes(choices, grad)
        changes = _changes(choices, recipes, grad, max_calls)
    first = setup_of(recipes, "the first call", grad_mode=grad is True or not chance(choices, 30))
    parameters = first.arguments
    try:
        arguments = dict(zip(parameters, made_by(first), strict=True))
    except IndexError:  # there is no first row of a tensor without rows
        raise RejectedError from None
    with OnlyDefined(), torch.set_grad_enabled(first.grad_mode):
        writer = Writer(choices, arguments, dynamo=dynamo, sized=sized)
        writer.body(max_statements)
        result = writer.result()
        outputs = [] if writer.raised else writer.outputs(result)
    if outputs is None:
        raise RejectedError
    function = _function(parameters, tuple(writer.lines), result)
    # While it was written each tensor was looked at after each statement, which eager's stale views can tell.
    error, differentiates = _trial(function, first)
    if QUIRKS.search(error) or (grad and (error or not differentiates)):
        raise RejectedError
    inputs = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
    unsaved = any("Kept.apply" in line for line in writer.lines)
    script = draw_script(choices, outputs, inputs, unsaved=unsaved) if not error else None
    setups = [first]
    for changed, change, grad_mode in changes:
        setup = setup_of(changed, change, grad_mode=grad_mode)
        try:
            made_by(setup)
        except (RuntimeError, IndexError):  # such a window does not fit into the changed tensor: there is no such call
            continue
        # A changed call that raises is only worth having now and then.
        error_here, _ = _trial(function, setup)
        if not error_here or (chance(choices, 50) and not QUIRKS.search(error_here)):
            setups.append(setup)
    if sized and len(setups) == 1:
        raise RejectedError
    return Program(
        parameters=parameters,
        body=tuple(writer.lines),
        result=result,
        setups=tuple(setups),
        backward=one_of(choices, _DIFFERENTIATING if grad else _BACKWARDS),
        before=script.before if script else (),
        after=script.after if script else (),
        raises=bool(error),
    )


def _changes(
    choices: Choices, recipes: tuple[Recipe, ...], grad: bool | None, max_calls: int
) -> Iterator[tuple[tuple[Recipe, ...], str, bool]]:
    for _ in range(min(max_calls, one_of(choices, _CALLS)) - 1):
        yield draw_change(choices, recipes, grad)


@functools.lru_cache(maxsize=256)
def _maker(setup: Setup) -> Callable[[], Any]:
    lines = "\n    ".join(inputs_body(replace(setup, watched=())))
    namespace: dict[str, Any] = dict(helpers())
    namespace |= {"torch": torch, "seen": []}
    exec(f"def inputs():\n    {lines}", namespace)
    made: Callable[[], Any] = namespace["inputs"]
    return made


def made_by(setup: Setup) -> tuple[Any, ...]:
    """Make the arguments of a call."""
    args: tuple[Any, ...] = _maker(setup)()[0]
    return args


def _function(parameters: tuple[str, ...], body: tuple[str, ...], result: str) -> Callable[..., Any]:
    lines = "\n    ".join((*body, f"return {result}"))
    namespace: dict[str, Any] = dict(helpers())
    if re.search("checkpoint", lines):
        from torch.utils.checkpoint import checkpoint

        namespace["checkpoint"] = checkpoint
    namespace["torch"] = torch
    exec(f"def program({', '.join(parameters)}):\n    {lines}", namespace)
    function: Callable[..., Any] = namespace["program"]
    return function


def trial(parameters: tuple[str, ...], body: tuple[str, ...], result: str, setup: Setup) -> tuple[str, bool]:
    """Run a function of this text; return the message with which it raises, and whether it can be differentiated."""
    return _trial(_function(parameters, body, result), setup)


def _trial(function: Callable[..., Any], setup: Setup) -> tuple[str, bool]:
    """Make a call and return the message with which it raises, and whether there is something to differentiate."""
    try:
        arguments = made_by(setup)
        with OnlyDefined(whole=True), torch.set_grad_enabled(setup.grad_mode):
            result = function(*arguments)
        # A view whose history an in-place write made invalid raises at the first look.
        tensors = [leaf for _, leaf in flatten((result, arguments), "")[1] if isinstance(leaf, torch.Tensor)]
        flags = [tensor.requires_grad and not tensor.is_leaf for tensor in tensors]
        return "", any(flags)
    except Exception as error:  # noqa: BLE001  # what it raises is what is asked for
        return str(error) or type(error).__name__, False
    finally:
        torch.set_grad_enabled(True)
