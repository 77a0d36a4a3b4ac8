"""Families of small programs, on which the reader's compiler is compared with eager. Each needs one more feature.

The generator that also tests aotlab draws the programs. Each program runs eagerly, and its effects determine its
family.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from aotlab import _torch as torch_internals
from aotlab.errors import UsageError
from aotlab.teach.shown import Shown
from aotlab.verification.clones import random_state_restored
from aotlab.verification.comparisons import Difference
from aotlab.verification.programs import Program, Setup, program_of, run_program, shrink

#: Family -> the feature that each of its programs uses. The programs may also use the features of the families above.
FAMILIES = {
    "pure": "compute new tensors",
    "writes": "write to tensors that they computed",
    "training": "are differentiated",
    "written inputs": "write to inputs",
    "shared results": "return inputs, views of them, or several views of one tensor",
    "shared inputs": "get one tensor twice, or tensors that share memory",
    "calls": "are called several times with different arguments",
}
#: Programs in one of these categories (see `Program.categories`) are left out, because the small compiler that a reader
#: of the course writes need not support them.
_LEFT_OUT = frozenset({
    "around the trace", "checkpoint", "custom functions", "dtypes", "grad modes", "hidden writes", "in-place metadata",
    "out=", "random", "raises",
    "numbers in state", "sizes from values", "storage sizes",
})  # fmt: skip
#: Programs with one of these texts are left out: constants, reads of metadata, results whose elements share memory, and
#: cases that autograd leaves undefined.
_ODD = re.compile(
    r"(?m)hook|retain|storage_offset|requires_grad|\.shape|is_leaf|as_strided|text|detach|torch\.tensor|None"
    r"|> 0\]|\] = [-\d.]+$|\.expand\("
)
#: Lines that are removed from the preparation of a program's arguments.
_EXTRAS = re.compile(r"hook\(|retain\(|numpy")
_NUMBERS = re.compile(r"numbers\(\d+(?:, )?([\d, ]*), dtype=([\w.]+)\)")
#: The fixed programs of each family. Each has arguments (of one or several calls), lines, results, and a statement that
#: the caller runs after the call. `@2, 3` is a tensor of random numbers with that shape.
_EXAMPLES: dict[str, tuple[tuple[str, ...], ...]] = {
    "pure": (
        ("a = @2, 3; b = @2, 3", "v1 = a.sub(b, alpha=2)", "v1"),
        ("a = @2, 3", "v1, v2 = a.max(1)", "v1, v2"),
        ("a = @2, 3", "v1 = a.t(); v2 = torch.cat([v1, v1])", "v2"),
    ),
    "writes": (
        ("a = @2, 3", "v1 = a * 2; v1[1].mul_(2)", "v1"),
        ("a = @2, 3", "v1 = a * 2; v2 = v1[1]; v1.mul_(2)", "v2 * 2"),
        ("a = @2, 3", "v1 = a * 2; v2 = v1.t(); v2[2].add_(1)", "v1 * 2"),
        ("a = @2, 3", "v1 = a * 2; v2 = v1[0]; v2.add_(1)", "v2 * 3"),
    ),
    "training": (
        ("a = @2, 3; b = @2, 3.requires_grad_()", "v1 = a * b; v2 = v1.sin()", "v2"),
        ("a = @2, 3.requires_grad_(); b = @2, 3", "v1 = a * b; v2 = a + b", "v1, v2"),
        ("a = @2, 3.requires_grad_(); b = @2, 3.requires_grad_()", "v1 = b * 2", "v1"),
        ("a = @2, 3.requires_grad_(); b = @3.requires_grad_()", "v1 = a.clone(); v1[1].mul_(b)", "v1"),
    ),
    "written inputs": (
        ("a = @2, 3", "a.mul_(2)", "a * 1"),
        ("a = @2, 3; b = @3", "a[1].add_(b)", "b * 2"),
        ("a_leaf = @3.requires_grad_(); a = a_leaf * 1; b = @3.requires_grad_()", "a.mul_(b)", "a * 2"),
    ),
    "shared results": (
        ("a = @2, 3", "v1 = a.t()", "a, v1"),
        ("a = @2, 3.requires_grad_()", "v1 = a * 2; v2 = v1.t()", "v1, v2", "out[0].mul_(2)"),
        ("a = @2, 3.requires_grad_()", "v1 = a * 2; v2 = v1[0]; v3 = v1[:, 1]", "v2, v3", "out[0].mul_(2)"),
        ("a = @2, 3", "a.mul_(2); v1 = a[1]", "v1, a"),
    ),
    "shared inputs": (
        ("a = @3; b = a", "a.mul_(2)", "a * b"),
        ("w = @6; a = w[:4]; b = w[2:]", "a.mul_(2)", "b * 1"),
        ("w = @6; a = w[:4]; b = w[2:]", "v1 = a * 2; b.copy_(v1)", "a"),
    ),
    "calls": (
        ("a = @2, 3 | a = @3, 3", "v1 = a.clone(); v1[1].mul_(2)", "v1"),
        ("a = @3, 3 | a_base = @3, 3; a = a_base.t()", "v1 = a[1] * 2", "v1"),
        ("a = @3 | a = @3.requires_grad_()", "v1 = a * 2", "v1"),
        ("a = @3 | a_base = @3; a = a_base.to(torch.float64)", "v1 = a * 2", "v1"),
        ("a = @4; b = @4 | w = @6; a = w[:4]; b = w[2:]", "a.mul_(2)", "b * 1"),
        ("a = @4; b = @4 | a = @4; b = a", "a.mul_(2)", "a * b"),
    ),
}
#: The programs that were drawn so far, by family.
_DRAWN: dict[str, list[Program]] = {name: [] for name in FAMILIES}
_SEEDS = itertools.count()


class Checked(Shown):
    """The result of `check_compiler`.

    ``ok`` tells whether all programs passed. If not, ``code`` is the smallest program that fails, and ``seen`` is a
    clause that names the difference from eager.
    """

    def __init__(self, family: str, count: int, failing: Program | None, why: str) -> None:
        self.family, self.ok = family, failing is None
        self.title = f"All right: {count} programs that {FAMILIES[family]} do the same as in eager."
        self.seen = f"of {count} programs that {FAMILIES[family]}, this is the smallest that differs from eager: {why}"
        if failing is not None:
            self.title, self.code = f"Not yet: {self.seen}.", text_of(failing)

    def __bool__(self) -> bool:
        return self.ok


def check_compiler(compiler: Callable[[Any], Any], family: str, programs: int = 15) -> Checked:
    """Compare ``compiler(function)`` with eager on the programs of a family, a key of `FAMILIES`.

    The family has some fixed programs. In addition, ``programs`` random programs of the family are drawn. The programs
    take tensors and return a tuple of tensors. The check compares everything that a caller can observe: values, writes,
    identity, gradients, and which tensors share memory.

    Raises
    ------
    UsageError
        There is no such family.
    """
    if family not in FAMILIES:
        raise UsageError(f"there is no family {family!r}; there are {', '.join(FAMILIES)}")
    why: dict[Program, str] = {}

    def fails(program: Program) -> bool:
        words = _words(program)
        if words is None or not words <= set(list(FAMILIES)[: list(FAMILIES).index(family) + 1]):
            return False
        with contextlib.redirect_stderr(io.StringIO()):  # fx prints a traceback if a graph raises
            differences = run_program(_tupled(program), compiler).differences
        if differences:
            why[program] = _sentence(differences[0])
        return bool(differences)

    drawn = sorted(_programs(family, programs), key=lambda program: len(program.source))
    tried = [*(_example(*example) for example in _EXAMPLES[family]), *drawn]
    failing = next((program for program in tried if fails(program)), None)
    if failing is not None:
        failing = shrink(failing, fails, attempts=150)
    return Checked(family, len(tried), failing, why[failing] if failing is not None else "")


def _sentence(difference: Difference) -> str:
    """Describe a difference in a sentence for the author of the compiler."""
    if difference.kind == "identity":
        new = {difference.subject: "a new tensor"}
        expected, actual = (new.get(each, f"`{each}` itself") for each in (difference.expected, difference.actual))
        return f"`{difference.subject}` is {actual}, in eager {expected}"
    sentence = difference.sentence.partition("\n")[0].rstrip(".").replace("the engine", "yours")
    return sentence.replace("KeyError: ... ", "KeyError for the storage of a fake tensor, ")  # printed as `...`


def text_of(program: Program) -> str:
    """Return the text of a program: the arguments for each call, and the function."""
    lines: list[str] = []
    for number, setup in enumerate(program.setups):
        lines += [f"# call {number + 1}"] if len(program.setups) > 1 else []
        lines += [_NUMBERS.sub(_random, each) for each in setup.lines]
    shown = _tupled(program)
    lines += ["", f"def program({', '.join(program.parameters)}):"]
    lines += [f"    {line}" for line in (*shown.body, f"return {shown.result}")]
    return "\n".join(
        [*lines, *(f"\n# then the caller runs {step}, where out is the result" for step in program.before)]
    )


def _example(calls: str, lines: str, result: str, before: str = "") -> Program:
    setups = []
    for call in calls.split(" | "):
        statements = re.sub(r"@([\d, ]*\d)", r"numbers(1, \1, dtype=torch.float32)", call).split("; ")
        names = [line.partition(" = ")[0] for line in statements]
        arguments = tuple(name for name in names if name in "ab")
        others = tuple(name for name in names if name not in "ab")
        setups.append(Setup(lines=tuple(statements), arguments=arguments, watched=others))
    return Program(
        parameters=setups[0].arguments,
        body=tuple(lines.split("; ")),
        result=result,
        setups=tuple(setups),
        before=(before,) if before else (),
    )


def _random(match: re.Match[str]) -> str:
    dtype = "" if match[2] == "torch.float32" else f", dtype={match[2]}"
    return f"torch.randn({match[1] or '()'}{dtype})"


def _programs(family: str, count: int) -> list[Program]:
    """Return the first programs of a family. Draw more programs if there are not enough."""
    while len(_DRAWN[family]) < count:
        programs: dict[str, Program] = {}
        for program in _variants(next(_SEEDS)):
            words = _words(program)
            if words is not None:
                programs.setdefault(next(name for name in reversed(FAMILIES) if name in words), program)
        for name, program in programs.items():
            _DRAWN[name].append(program)
    return _DRAWN[family][:count]


def _variants(seed: int) -> Iterator[Program]:
    """Draw a program that a small compiler like the reader's can support.

    Before the program, yield simpler variants of it: without gradients, with one call, with other results, or with a
    body that first clones the arguments.
    """
    program = program_of(seed, max_statements=4, max_calls=3)
    names = list(dict.fromkeys(re.findall(r"\b[a-d]\b|\bv\d+\b", program.result)))[:3]
    values = re.findall(r"(?m)^v\d+", "\n".join(program.body))[-2:]
    if not names or program.categories & _LEFT_OUT or _ODD.search("\n".join((*program.body, program.result))):
        return
    setups = tuple(
        replace(setup, lines=tuple(line for line in setup.lines if not _EXTRAS.search(line)))
        for setup in program.setups
    )
    program = replace(program, setups=setups, before=(), after=(), backward="all", result=", ".join(names))
    first = replace(program, setups=setups[:1])
    lines = tuple(line.replace(".requires_grad_()", "") for line in setups[0].lines)
    plain = replace(first, setups=(replace(setups[0], lines=lines),))
    cloned = tuple(f"{name} = {name}.clone()" for name in program.parameters)
    for each in (plain, first):
        for result in (", ".join(values or names), f"{[*names, *values][-1]} * 2"):
            yield replace(each, result=result)
            yield replace(each, result=result, body=(*cloned, *program.body))
    yield from (plain, first, program)


def _tupled(program: Program) -> Program:
    """Return the program with a tuple of tensors as its result."""
    result = program.result.strip("()").rstrip(",").replace("None", "")
    return replace(program, result=f"({result},)" if result else "()")


def _words(program: Program) -> set[str] | None:
    """Return the names of the families whose features a program uses; None if the program is left out."""
    words = {"pure"} | ({"calls"} if len(program.setups) > 1 else set())
    words |= {"writes"} if "in-place" in program.categories else set()
    function, makers = _tupled(program).build()
    for make, setup in zip(makers, program.setups, strict=True):
        with random_state_restored(), torch.enable_grad():
            try:
                program_words = _words_of(function, make().args)
            except Exception:  # noqa: BLE001  # a program that raises in eager is left out
                return None
        if program_words is None or not setup.grad_mode:
            return None
        words |= program_words
    return words


def _words_of(function: Callable[..., Any], args: tuple[Any, ...]) -> set[str] | None:
    """Run a call eagerly, and return the names of the families whose features it uses.

    Return None if the call needs more than a small compiler like the reader's supports: for example, if an input is an
    expanded tensor, or a view that requires grad and is written.
    """
    inputs = list({id(x): x for x in args}.values())
    if not all(isinstance(x, torch.Tensor) and x.numel() for x in inputs):
        return None
    apart = len({torch_internals.storage_key(x) for x in inputs}) == len(inputs)
    grad = any(x.requires_grad for x in inputs)
    bases = [torch_internals.base_of(x) if x.requires_grad else None for x in inputs]
    versions = [torch_internals.version_of(x) for x in inputs]
    results = function(*args)
    written = [torch_internals.version_of(x) != version for x, version in zip(inputs, versions, strict=True)]
    sizes = {(torch_internals.storage_key(x), x.dtype) for x in inputs}
    too_much = (
        any(base is not None and was for base, was in zip(bases, written, strict=True))
        or any(0 in x.stride() for x in inputs)
        or len(sizes) > len({key for key, _ in sizes})
        or (grad and not apart)
        or len({id(each) for each in results}) < len(results)
    )
    if too_much:
        return None
    differentiated = {id(each): each for each in (*results, *inputs)}.values()
    roots = [each for each in differentiated if each.grad_fn is not None]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    memory = [torch_internals.storage_key(each) for each in (*inputs, *results)]
    apart_from_inputs = len({*memory[len(inputs) :]} - {*memory[: len(inputs)]}) == len(results)
    told = {
        "training": grad,
        "written inputs": any(written),
        "shared results": not apart_from_inputs,
        "shared inputs": not apart or len(inputs) < len(args),
    }
    return {word for word, is_so in told.items() if is_so}
