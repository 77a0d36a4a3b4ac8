"""Draw whole programs: `programs` is a Hypothesis strategy, and `program_of` makes a program from a seed."""

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
    """Return a strategy for programs with one to four arguments, a few statements and one to ``max_calls`` calls.

    It needs Hypothesis; `program_of` does not.

    Parameters
    ----------
    grad
        True for programs that differentiate, False for programs whose inputs do not require grad, None for both.
    dynamo
        Leave out statements that Dynamo cannot trace without a graph break.
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
    """Make the program with the number ``seed``.

    The programs are drawn like the examples of the strategy `programs`, but several times as fast. Different seeds
    rarely give the same program. `programs` explains the arguments.

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
    raise RuntimeError(f"seed {seed} gives no program, because all attempts were rejected")


def draw_program(
    choices: Choices, max_statements: int, max_calls: int, *, grad: bool | None, dynamo: bool, sized: bool = False
) -> Program:
    """Draw a program; raise `RejectedError` if the result is useless.

    `programs` explains the arguments. With ``sized``, the inputs of later calls have other sizes than in the first
    call.
    """
    with warnings.catch_warnings(), torch.enable_grad(), random_state_restored():
        # Statements run while they are drawn. They may cause deprecation warnings, which do not concern an engine.
        warnings.simplefilter("ignore")
        program = _draw_flat(choices, max_statements, max_calls, grad=grad, dynamo=dynamo, sized=sized)
    if len(program.parameters) > 1 and chance(choices, 120):
        return _nested(program, one_of(choices, ("list", "tuple", "dict")))
    return program


def _nested(program: Program, container: str) -> Program:
    """Change the program so that it receives all arguments except the first in one list, tuple or dictionary."""
    names = ", ".join(program.parameters[1:])
    expression = {"list": f"[{names}]", "tuple": f"({names},)"}.get(
        container, "{" + ", ".join(f'"{name}": {name}' for name in program.parameters[1:]) + "}"
    )
    taken = "rest.values()" if container == "dict" else "rest"
    # The caller's steps use these names. They are no longer arguments, so each setup must list them as watched tensors.
    used = set(re.findall(r"\b[b-d]\b", " ".join((*program.before, *program.after))))
    comma = "," if len(program.parameters) == 2 else ""
    return replace(
        program,
        parameters=(program.parameters[0], "rest"),
        body=(f"{names}{comma} = {taken}", *program.body),
        setups=tuple(
            replace(setup, arguments=(setup.arguments[0], expression), watched=(*setup.watched, *sorted(used)))
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
    first = _restarted(first, 1)
    parameters = first.arguments
    try:
        arguments = dict(zip(parameters, made_by(first), strict=True))
    except IndexError:  # a tensor without rows has no first row
        raise RejectedError from None
    with OnlyDefined(), torch.set_grad_enabled(first.grad_mode):
        writer = Writer(choices, arguments, dynamo=dynamo, sized=sized)
        writer.body(max_statements)
        result = writer.result()
        outputs = [] if writer.raised else writer.outputs(result)
    if outputs is None:
        raise RejectedError
    function = _function(parameters, tuple(writer.lines), result)
    # Run the whole function again. The writer reads each tensor after each statement. Reading a view after a write to
    # its base makes autograd regenerate its history, which can change the outcome of later statements.
    error, differentiates = _trial(function, first)
    if QUIRKS.search(error) or (grad and (error or not differentiates)):
        raise RejectedError
    inputs = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
    unsaved = any("Kept.apply" in line for line in writer.lines)
    script = draw_script(choices, outputs, inputs, unsaved=unsaved) if not error else None
    setups = [first]
    for changed, change, grad_mode in changes:
        setup = _restarted(setup_of(changed, change, grad_mode=grad_mode), len(setups) + 1)
        try:
            made_by(setup)
        except (RuntimeError, IndexError):  # the changed tensor is too small for a window of it, so drop the call
            continue
        # Keep only a few of the later calls that raise.
        error_here, _ = _trial(function, setup)
        if not error_here or (chance(choices, 50) and not QUIRKS.search(error_here)):
            setups.append(setup)
    if sized and len(setups) == 1:
        raise RejectedError
    if not any("state." in line for line in writer.lines):
        setups = [replace(setup, lines=setup.lines[:-1]) for setup in setups]
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


def _restarted(setup: Setup, steps: int) -> Setup:
    """Add the line that gives the numbers in the program's object ``state`` their values for the call."""
    return replace(setup, lines=(*setup.lines, f"state.restart({steps})"))


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
    inputs: Callable[[], Any] = namespace["inputs"]
    return inputs


def made_by(setup: Setup) -> tuple[Any, ...]:
    """Run the text of ``setup`` and return the arguments of the call."""
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
    """Compile the text of a function and call it once, with the arguments of ``setup``.

    Return the message of its error, or an empty string, and whether one of its results or arguments is a non-leaf that
    requires grad, so that a backward can start.
    """
    return _trial(_function(parameters, body, result), setup)


def _trial(function: Callable[..., Any], setup: Setup) -> tuple[str, bool]:
    """Call ``function`` as `trial` does, with the same results."""
    try:
        arguments = made_by(setup)
        with OnlyDefined(whole=True), torch.set_grad_enabled(setup.grad_mode):
            result = function(*arguments)
        # This can raise, because an in-place write can make the autograd history of a view invalid.
        tensors = [leaf for _, leaf in flatten((result, arguments), "")[1] if isinstance(leaf, torch.Tensor)]
        flags = [tensor.requires_grad and not tensor.is_leaf for tensor in tensors]
        return "", any(flags)
    except Exception as error:  # noqa: BLE001  # what it raises is what is asked for
        return str(error) or type(error).__name__, False
    finally:
        torch.set_grad_enabled(True)
