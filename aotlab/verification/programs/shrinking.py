"""Make a failing program smaller: remove one part after another.

Hypothesis shrinks only programs that it has drawn. This module shrinks a program that was made from a seed or written
by hand. It removes calls, statements, arguments and the caller's steps, as long as the program still fails.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from aotlab.verification.programs.program import Program, Setup


def shrink(program: Program, fails: Callable[[Program], bool], *, attempts: int = 500) -> Program:
    """Return the smallest program found for which ``fails`` is true, after at most ``attempts`` calls of ``fails``.

    Examples
    --------
    >>> from aotlab.verification.programs import program_of
    >>> shrink(program_of(1), lambda program: True).body
    ()
    """
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(program):
            attempts -= 1
            if attempts < 0:
                return program
            if fails(candidate):
                program, smaller = candidate, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Yield copies of the program from which one part is removed or simplified; whole calls first, inputs last."""
    setups, body = program.setups, program.body
    for index in range(len(setups) - 1, -1, -1):
        if len(setups) > 1:
            yield replace(program, setups=setups[:index] + setups[index + 1 :])
    if program.after:
        yield replace(program, after=())
    if program.before:
        yield replace(program, before=())
    if program.backward not in ("all", None):
        yield replace(program, backward="all")
    if program.backward is not None:
        yield replace(program, backward=None)
    for index in range(len(body) - 1, -1, -1):
        yield from _without_line(program, index)
    for steps in ("before", "after"):
        caller_steps = getattr(program, steps)
        for index in range(len(caller_steps) if len(caller_steps) > 1 else 0):
            yield replace(program, **{steps: caller_steps[:index] + caller_steps[index + 1 :]})
    names = dict.fromkeys(re.findall(r"\b[a-d]\b|\bv\d+\b", program.result))
    for text in ("None", *names, *(f"({name}, {other})" for name in names for other in names if name != other)):
        if len(text) < len(program.result):
            yield replace(program, result=text)
    yield from _without_argument(program)
    yield from _simpler_inputs(program)


def _without_line(program: Program, index: int) -> Iterator[Program]:
    body = program.body
    line = body[index]
    end = index + 1
    if line.endswith(":"):
        while end < len(body) and body[end].startswith("    "):
            end += 1
        inner = tuple(text[4:] for text in body[index + 1 : end])
        yield replace(program, body=body[:index] + inner + body[end:])
    shorter = body[:index] + body[end:]
    if (
        line.startswith("    ")
        and body[index - 1].endswith(":")
        and not "".join(body[end : end + 1]).startswith("    ")
    ):
        # The line was the only one in its block, so remove the header too.
        shorter = body[: index - 1] + body[end:]
    yield replace(program, body=shorter)


def _without_argument(program: Program) -> Iterator[Program]:
    text = "\n".join((*program.body, program.result, *program.before, *program.after))
    for index, name in enumerate(program.parameters):
        if len(program.parameters) > 1 and not re.search(rf"\b{name}\b", text):
            yield replace(
                program,
                parameters=program.parameters[:index] + program.parameters[index + 1 :],
                setups=tuple(
                    replace(setup, arguments=setup.arguments[:index] + setup.arguments[index + 1 :])
                    for setup in program.setups
                ),
            )


def _simpler_inputs(program: Program) -> Iterator[Program]:
    """Yield programs without one line of a setup whose name is not used, or without one ``.requires_grad_()``."""

    def with_setup(index: int, setup: Setup) -> Program:
        return replace(program, setups=(*program.setups[:index], setup, *program.setups[index + 1 :]))

    for index, setup in enumerate(program.setups):
        for at in range(len(setup.lines) - 1, -1, -1):
            line, others = setup.lines[at], setup.lines[:at] + setup.lines[at + 1 :]
            if line.startswith("state."):  # without it, eager and the engine begin with different numbers
                continue
            name = line.partition(" = ")[0] if " = " in line else ""
            if not name or not re.search(rf"\b{name}\b", "\n".join((*others, *setup.arguments))):
                watched = tuple(other for other in setup.watched if other != name)
                yield with_setup(index, replace(setup, lines=others, watched=watched))
            elif line.endswith(".requires_grad_()"):
                simpler = line.removesuffix(".requires_grad_()")
                yield with_setup(index, replace(setup, lines=(*setup.lines[:at], simpler, *setup.lines[at + 1 :])))
