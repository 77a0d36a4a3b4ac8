"""Small random programs of views, in-place ops, duplicates and grad modes, and what an engine makes of them.

A `Program` is text: a function, and for each of its calls a function that makes the inputs. It is drawn by
Hypothesis, so that a failing one shrinks to a few lines, and it is written by trying: every statement is run
eagerly while it is drawn, so that nearly all are valid without a model of torch's shape rules. A few
statements that raise are kept on purpose: there the engine has to raise the same type.

Values are multiples of 1/4 and cotangents multiples of 1/8, so that sums and products are exact in whatever order a
graph forms them and a comparison bit for bit means something. Programs with ``sin`` and its like, or with products of
many factors, are not `exact`: their results are still compared bit for bit, their gradients up to the order in which
autograd sums what several uses contribute. What eager leaves undefined is not drawn: writing to a tensor while
reading overlapping memory at other strides.

This file needs Hypothesis, the extra ``fuzz``.

Examples
--------
>>> from hypothesis import find
>>> program = find(programs(), lambda p: "mul_" in p.source)
>>> run_program(program, lambda function: function).status
'ok'
"""

from __future__ import annotations

import hashlib
import linecache
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from hypothesis import assume
from hypothesis import strategies as st

from aotlab.verification.clones import argument_tensors, random_state_restored
from aotlab.verification.differential import Candidate, Difference, judge
from aotlab.verification.observables import Backward, Call, observe

#: Ops whose results or derivatives need more bits than a float has.
_INEXACT = r"\.(sin_?|exp|softmax|mean|rand_like|amax)\("

#: Ops that double the bits which a result needs: inputs have 6, a float32 24 and a float64 53.
_PRODUCT = r"mul_|square| \*=? | @ "

#: Makes values for inputs, in the program's own text so that it runs anywhere: uneven, never zero, exact in binary.
_NUMBERS = """\
def numbers(seed, *shape, dtype=torch.float32):
    count = math.prod(shape)
    values = ((torch.arange(count, dtype=torch.float64) * 5 + seed * 3) % 11 - 5.5) / 2
    return values.reshape(shape).to(dtype).clone()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How the arguments of one call are made.

    ``lines`` bind names, ``arguments`` are the expressions that are passed, ``watched`` the names that are looked at
    afterwards; ``change`` says what is different from the first call.
    """

    lines: tuple[str, ...]
    arguments: tuple[str, ...]
    watched: tuple[str, ...] = ()
    change: str = "the first call"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Program:
    """A function of ``parameters`` with a ``body`` and a ``result``, its calls, and which outputs are backwarded."""

    parameters: tuple[str, ...]
    body: tuple[str, ...]
    result: str
    setups: tuple[Setup, ...]
    backward: Backward = "all"

    @property
    def source(self) -> str:
        """The program as a Python module: ``program``, and ``inputs_0()``, ``inputs_1()``, … for its calls."""
        lines = ["import math", "", "import torch", "", "", *_NUMBERS.splitlines(), "", ""]
        lines += [f"def program({', '.join(self.parameters)}):"]
        lines += [f"    {line}" for line in (*self.body, f"return {self.result}")]
        for index, setup in enumerate(self.setups):
            watched = ", ".join(f'"{name}": {name}' for name in setup.watched)
            arguments = "".join(f"{argument}, " for argument in setup.arguments)
            lines += ["", "", f"def inputs_{index}():  # {setup.change}"]
            lines += [f"    {line}" for line in (*setup.lines, f"return ({arguments.strip()}), {{{watched}}}")]
        return "\n".join(lines) + f"\n\n# backward: {self.backward}\n"

    @property
    def exact(self) -> bool:
        """Whether all arithmetic of the program is exact, so that no order of summation can show."""
        lines = (*self.body, self.result)
        factors = sum(bool(re.search(_PRODUCT, line)) for line in lines)
        short = any("float32" in line for setup in self.setups for line in setup.lines)
        return factors <= (2 if short else 5) and not any(re.search(_INEXACT, line) for line in lines)

    def build(self) -> tuple[Callable[..., Any], tuple[Callable[[], Call], ...]]:
        """Compile the text: the function, and for each call what makes fresh arguments for it."""
        source = self.source
        file = f"<program {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
        # Tracebacks, and an engine that quotes the user's line, read the text from here.
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        namespace: dict[str, Any] = {"__name__": "program"}
        exec(compile(source, file, "exec"), namespace)
        function = namespace["program"]

        def maker(index: int) -> Callable[[], Call]:
            def make() -> Call:
                args, watched = namespace[f"inputs_{index}"]()
                return Call(
                    args=args, inputs=tuple(argument_tensors(function, args, {})), watched=tuple(watched.items())
                )

            return make

        return function, tuple(maker(index) for index in range(len(self.setups)))

    def __repr__(self) -> str:
        return f"Program(\n{self.source})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # Hypothesis and IPython would spell out the fields of a dataclass.
        for index, line in enumerate(repr(self).splitlines()):
            if index:
                printer.break_()
            printer.text(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a program: ``refusals`` are the reasons, one per refused call; ``differences`` are what failed."""

    status: Literal["ok", "refused", "failed"]
    refusals: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()


def run_program(program: Program, candidate: Candidate) -> Outcome:
    """Run all calls of ``program`` eagerly and by ``candidate(function)``, and compare bit for bit.

    One callable serves all calls, so that entries, guards and recompilations are compared as well. A refusal is
    legitimate if it left no trace on the arguments and their gradients.
    """
    function, makers = program.build()
    compiled = candidate(function)
    refusals: list[str] = []
    differences: list[Difference] = []
    for index, make in enumerate(makers):
        observations = []
        for side in (function, compiled):
            with random_state_restored(), torch.enable_grad():
                torch.manual_seed(index)
                observations.append(observe(side, make(), backward=program.backward))
        expected, actual = observations
        for failure in (actual.failure, actual.backward_failure):
            if failure is not None and failure.refused is not None:
                refusals.append(failure.refused)
        differences += [
            Difference(
                kind=row.kind, subject=row.subject, expected=row.expected, actual=row.actual, sentence=row.sentence
            )
            for row in judge(expected, actual, call=index + 1, exact_gradients=program.exact)
            if not row.equal and row.kind != "refused"
        ]
    status: Literal["ok", "refused", "failed"] = "failed" if differences else "refused" if refusals else "ok"
    return Outcome(status=status, refusals=tuple(refusals), differences=tuple(differences))


# --- drawing -----------------------------------------------------------------------------------------------------

Grad = Literal["none", "leaf", "non-leaf"]
Layout = Literal["plain", "offset", "transposed", "strided", "expanded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """How one argument is made: from numbers, from an earlier argument (``of``, by ``view``), or a Python value."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = "torch.float32"
    grad: Grad = "none"
    layout: Layout = "plain"
    seed: int = 1
    of: str | None = None
    view: str = ""
    value: int | None = None

    def lines(self) -> tuple[list[str], list[str]]:
        """Return the statements that bind ``name``, and the names to watch besides it."""
        if self.value is not None:
            return [f"{self.name} = {self.value}"], []
        if self.of is not None:
            return [f"{self.name} = {self.of}{self.view}"], []
        shape, view = self._layout()
        made = f"numbers({', '.join(map(str, (self.seed, *shape)))}, dtype={self.dtype})"
        base, leaf = f"{self.name}_base", f"{self.name}_leaf"
        if self.grad == "non-leaf":
            first = [f"{leaf} = {made}.requires_grad_()", f"{base} = {leaf} * 1"]
            if view:
                return [*first, f"{self.name} = {base}{view}"], [leaf, base]
            return [first[0], f"{self.name} = {leaf} * 1"], [leaf]
        if self.grad == "leaf":
            if view:
                return [f"{base} = {made}", f"{self.name} = {base}{view}.detach().requires_grad_()"], [base]
            return [f"{self.name} = {made}.requires_grad_()"], []
        if view:
            return [f"{base} = {made}", f"{self.name} = {base}{view}"], [base]
        return [f"{self.name} = {made}"], []

    def _layout(self) -> tuple[tuple[int, ...], str]:
        shape = self.shape
        if not shape or self.layout == "plain":
            return shape, ""
        if self.layout == "offset":
            return (shape[0] + 1, *shape[1:]), "[1:]"
        if self.layout == "strided":
            return (*shape[:-1], 2 * shape[-1]), "[..., ::2]"
        if self.layout == "expanded":
            return (1, *shape[1:]), f".expand({', '.join(map(str, shape))})"
        return shape[::-1], f".permute({', '.join(map(str, reversed(range(len(shape)))))})"


def _setup(recipes: tuple[_Recipe, ...], change: str) -> Setup:
    lines: list[str] = []
    watched: list[str] = []
    for recipe in recipes:
        more, looked_at = recipe.lines()
        lines += more
        watched += looked_at
    return Setup(
        lines=tuple(lines),
        arguments=tuple(recipe.name for recipe in recipes),
        watched=tuple(watched),
        change=change,
    )


@st.composite
def programs(draw: st.DrawFn, *, max_statements: int = 8, max_calls: int = 3) -> Program:
    """Draw a program with one to four arguments, a few statements and one to ``max_calls`` calls."""
    return _draw_program(draw, max_statements, max_calls)


def _draw_program(draw: st.DrawFn, max_statements: int, max_calls: int) -> Program:
    with warnings.catch_warnings():
        # Trying statements brings out deprecations that are none of an engine's business.
        warnings.simplefilter("ignore")
        program = _draw_flat(draw, max_statements, max_calls)
    if len(program.parameters) > 1 and _chance(draw, 12):
        return _nested(program, draw(st.sampled_from(("list", "tuple", "dict"))))
    return program


def _nested(program: Program, container: str) -> Program:
    """Pass all arguments but the first in one container."""
    names = ", ".join(program.parameters[1:])
    made = {"list": f"[{names}]", "tuple": f"({names},)"}.get(
        container, "{" + ", ".join(f'"{name}": {name}' for name in program.parameters[1:]) + "}"
    )
    taken = "rest.values()" if container == "dict" else "rest"
    comma = "," if len(program.parameters) == 2 else ""
    return replace(
        program,
        parameters=(program.parameters[0], "rest"),
        body=(f"{names}{comma} = {taken}", *program.body),
        setups=tuple(replace(setup, arguments=(setup.arguments[0], made)) for setup in program.setups),
    )


def _draw_flat(draw: st.DrawFn, max_statements: int, max_calls: int) -> Program:
    recipes = _draw_recipes(draw)
    parameters = tuple(recipe.name for recipe in recipes)
    first = _setup(recipes, "the first call")
    skeleton = Program(parameters=parameters, body=(), result="None", setups=(first,))
    with torch.enable_grad(), random_state_restored():
        arguments = skeleton.build()[1][0]().args
        writer = _Writer(draw, dict(zip(parameters, arguments, strict=True)))
        writer.block(min(max_statements, _pick(draw, *((1, n) for n in (1, 2, 3, 3, 4, 4, 5, 5, 6, 7, 8)))), depth=0)
        result = writer.result()
    program = replace(
        skeleton,
        body=tuple(writer.lines),
        result=result,
        backward=_pick(draw, (6, "all"), (2, "first"), (1, "each"), (1, None)),
    )
    # While it was written each tensor was looked at after each statement, which eager's stale views can tell.
    assume(not re.search(_QUIRKS, _error(program)))
    setups = [first]
    for _ in range(min(max_calls, _pick(draw, (2, 1), (5, 2), (3, 3))) - 1):
        changed, change = _change(draw, recipes)
        setup = _setup(changed, change)
        # A changed call that raises is only worth having now and then.
        error = _error(replace(program, setups=(setup,)))
        if not error or (_chance(draw, 5) and not re.search(_QUIRKS, error)):
            setups.append(setup)
    return replace(program, setups=tuple(setups))


def _draw_recipes(draw: st.DrawFn) -> tuple[_Recipe, ...]:
    size = st.sampled_from((2, 3, 1, 4))
    n, m, k = draw(size), draw(size), draw(size)
    if _chance(draw, 3):
        m = 0
    shapes = ((n, m), (n, m), (m, n), (n,), (m,), (), (n, m, k), (1, m), (n, 1), (m, k))
    dtype = draw(st.sampled_from(("torch.float32", "torch.float64")))
    recipes: list[_Recipe] = []
    for name in "abcd"[: draw(st.integers(1, 4))]:
        tensors = [recipe for recipe in recipes if recipe.value is None]
        if tensors and _chance(draw, 12):
            recipes.append(_Recipe(name=name, of=draw(st.sampled_from(tensors)).name))
        elif tensors and _chance(draw, 4):
            of = draw(st.sampled_from(tensors))
            views = [".detach()", ".unsqueeze(0)", "[...]"] + ([".flatten()[1:]", "[:1]"] if of.shape else [])
            recipes.append(_Recipe(name=name, of=of.name, view=draw(st.sampled_from(views))))
        elif recipes and _chance(draw, 10):
            recipes.append(_Recipe(name=name, value=draw(st.integers(0, 3))))
        else:
            whole = _chance(draw, 4)
            recipes.append(
                _Recipe(
                    name=name,
                    shape=draw(st.sampled_from(shapes)),
                    dtype=draw(st.sampled_from(("torch.int64", "torch.bool"))) if whole else dtype,
                    grad="none" if whole else _pick(draw, (3, "none"), (3, "leaf"), (4, "non-leaf")),
                    layout=_pick(draw, (6, "plain"), (2, "offset"), (2, "transposed"), (1, "strided"))
                    if not _chance(draw, 2)
                    else "expanded",
                    seed=draw(st.integers(1, 5)),
                )
            )
    return tuple(recipes)


def _change(draw: st.DrawFn, recipes: tuple[_Recipe, ...]) -> tuple[tuple[_Recipe, ...], str]:
    """Change one thing about the inputs for a further call."""
    kinds: list[tuple[int, str]] = [(5, "the same again"), (2, "other values"), (2, "other requires_grad")]
    kinds += [(2, "other shapes"), (1, "another dtype"), (1, "another layout")]
    own = [index for index, recipe in enumerate(recipes) if recipe.of is None and recipe.value is None]
    borrowed = [index for index, recipe in enumerate(recipes) if recipe.of is not None]
    numbers = [index for index, recipe in enumerate(recipes) if recipe.value is not None]
    if len(own) > 1:
        kinds += [(3, "one input passed twice"), (2, "inputs that overlap")]
    if borrowed:
        kinds += [(3, "no longer the same")]
    if numbers:
        kinds += [(12, "another number")]
    kind = _pick(draw, *kinds)
    new = list(recipes)
    at = draw(st.sampled_from(own))
    if kind == "other values":
        new[at] = replace(new[at], seed=new[at].seed + 1)
    elif kind == "other requires_grad" and "float" in new[at].dtype:
        others: tuple[Grad, ...] = ("none", "leaf", "non-leaf")
        new[at] = replace(new[at], grad=draw(st.sampled_from([grad for grad in others if grad != new[at].grad])))
    elif kind == "other shapes":
        # All inputs change alike, or hardly a program would still run.
        sizes = sorted({size for index in own for size in recipes[index].shape})
        if sizes:
            old, extra = draw(st.sampled_from(sizes)), draw(st.integers(1, 2))
            for index in own:
                shape = tuple(size + extra if size == old else size for size in new[index].shape)
                new[index] = replace(new[index], shape=shape)
    elif kind == "another dtype":
        swap = {"torch.float32": "torch.float64", "torch.float64": "torch.float32"}
        for index in own:
            new[index] = replace(new[index], dtype=swap.get(new[index].dtype, new[index].dtype))
    elif kind == "another layout":
        layouts: tuple[Layout, ...] = ("plain", "offset", "transposed", "strided")
        new[at] = replace(new[at], layout=draw(st.sampled_from([way for way in layouts if way != new[at].layout])))
    elif kind in ("one input passed twice", "inputs that overlap"):
        to, of = own[-1], own[0]
        view = ".detach()" if kind == "inputs that overlap" else ""
        new[to] = _Recipe(name=new[to].name, of=new[of].name, view=view)
    elif kind == "no longer the same":
        to = draw(st.sampled_from(borrowed))
        source = next(recipe for recipe in recipes if recipe.name == _origin(recipes, new[to].name))
        new[to] = replace(source, name=new[to].name, seed=source.seed + 2)
    elif kind == "another number":
        to = draw(st.sampled_from(numbers))
        new[to] = replace(new[to], value=(new[to].value or 0) + 1)
    return tuple(new), kind


def _origin(recipes: tuple[_Recipe, ...], name: str) -> str:
    of = next(recipe for recipe in recipes if recipe.name == name).of
    return name if of is None else _origin(recipes, of)


def _error(program: Program) -> str:
    """Return the message with which the first call raises, empty if it does not."""
    function, makers = program.build()
    with random_state_restored(), torch.enable_grad():
        failure = observe(function, makers[0](), backward=None).failure
    return "" if failure is None else failure.message or str(failure)


#: Errors that no kept statement raises. Eager says the first of a leaf, rightly, and of a view whose base got a history
#: through another view in the meantime, which hangs on how the argument was made before the call. The others come from
#: kernels, late: an engine that leaves out a result which nothing uses has no occasion to raise them.
_QUIRKS = (
    r"^a leaf Variable that requires grad|not supported|not implemented for|non-zero size|not drawn|should be positive"
)


def _chance(draw: st.DrawFn, percent: int) -> bool:
    """Say yes in so many of a hundred cases; shrinks to no."""
    return draw(st.integers(0, 99)) >= 100 - percent


def _pick(draw: st.DrawFn, *weighted: tuple[int, Any]) -> Any:
    """Choose by weight; shrinks towards the first."""
    return draw(st.sampled_from([value for weight, value in weighted for _ in range(weight)]))


class _Writer:
    """Writes a body statement by statement, running each on live tensors as it goes."""

    def __init__(self, draw: st.DrawFn, arguments: dict[str, Any]) -> None:
        self.draw = draw
        self.lines: list[str] = []
        self._space: dict[str, Any] = {"torch": torch, **arguments}
        self._arguments = frozenset(arguments)
        self._names = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
        self._numbers = [name for name, value in arguments.items() if isinstance(value, int)]
        self._count = 0
        self._raised = False
        self._error = ""

    def block(self, count: int, depth: int) -> None:
        """Write up to ``count`` statements at this depth of indentation."""
        if depth == 0 and self._numbers:
            # A number that nothing uses would say nothing about guards.
            made = self._name()
            line = f"{made} = {self._names[0]} * {self._numbers[0]}"
            if self._try(line):
                self._keep([made], line, depth)
        for _ in range(count):
            if self._raised:
                return
            if depth == 0 and _chance(self.draw, 8):
                self._region()
            else:
                self._statement(depth)
        if depth and self.lines[-1].endswith(":"):
            self.lines.append("    " * depth + "pass")

    def result(self) -> str:
        """Write the expression that is returned."""
        leaves = [self._leaf() for _ in range(_pick(self.draw, (4, 1), (4, 2), (3, 3), (1, 4)))]
        if len(leaves) == 1 and _chance(self.draw, 50):
            return leaves[0]
        form = _pick(self.draw, (5, "tuple"), (2, "list"), (2, "dict"), (2, "nested"))
        if form == "list":
            return f"[{', '.join(leaves)}]"
        if form == "dict":
            return "{" + ", ".join(f'"{key}": {leaf}' for key, leaf in zip("klmn", leaves, strict=False)) + "}"
        if form == "nested":
            return f'({leaves[0]}, [{", ".join(leaves[1:])}], {{"last": ({leaves[-1]},)}})'
        return f"({', '.join(leaves)},)"

    def _leaf(self) -> str:
        if _chance(self.draw, 10):
            name = self.draw(st.sampled_from(self._names))
            return self.draw(st.sampled_from(("None", "3", "0.5", "True", '"text"', f"{name}.dim()", f"{name}.shape")))
        # What was made last is what the other statements led to.
        name = self.draw(st.sampled_from(self._names[::-1]))
        if _chance(self.draw, 25):
            for _ in range(3):
                expression = self._view(name)
                if self._try(f"_ = {expression}"):
                    return expression
        return name

    def _region(self) -> None:
        header, mode = _pick(
            self.draw,
            (3, ("with torch.no_grad():", False)),
            (1, ("with torch.enable_grad():", True)),
            (1, ("with torch.set_grad_enabled(False):", False)),
        )
        self.lines.append(header)
        with torch.set_grad_enabled(mode):
            self.block(self.draw(st.integers(1, 3)), depth=1)

    def _statement(self, depth: int) -> None:
        for _ in range(4):
            made, line = self._draw_statement()
            if self._try(line):
                self._keep(made, line, depth)
                return
            if _chance(self.draw, 3) and not re.search(_QUIRKS, self._error):
                self.lines.append("    " * depth + line)
                self._raised = True
                return

    def _keep(self, made: list[str], line: str, depth: int) -> None:
        """Write a statement down, and remember the tensors that it makes."""
        self.lines.append("    " * depth + line)
        self._names += [name for name in made if isinstance(self._space[name], torch.Tensor)]

    def _try(self, line: str) -> bool:
        try:
            exec(line, self._space)
            for name in ("_", *self._names):
                value = self._space.get(name)
                # In-place writes can leave other views with a history that raises at the first look, and a copy of
                # floats can leave integers that require grad, at which eager's own backward asserts.
                if isinstance(value, torch.Tensor) and not value.is_leaf and not value.is_floating_point():
                    raise ValueError("not drawn: integers that require grad")
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            self._error = str(error)
            return False
        return True

    def _draw_statement(self) -> tuple[list[str], str]:
        draw = self.draw
        kind = _pick(draw, (28, "in place"), (26, "view"), (30, "new"), (8, "several"), (4, "set"), (4, "rare"))
        # Later names more often than earlier ones, or programs become a heap of unrelated statements.
        name = draw(st.sampled_from(self._names + self._names[-3:]))
        if kind == "in place":
            return [], self._in_place(name)
        if kind == "set":
            return [], self._set(name)
        if kind == "several":
            return self._several(name)
        if kind == "rare":
            rare = self._rare(name)
            if rare is not None:
                return rare
        expression = self._view(name) if kind == "view" else self._new(name)
        made = self._name()
        return [made], f"{made} = {expression}"

    def _name(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = self._space[name]
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def _scalar(self) -> str:
        if self._numbers and _chance(self.draw, 60):
            return self.draw(st.sampled_from(self._numbers))
        return self.draw(st.sampled_from(("2", "0.5", "-1.0", "1.5", "3", "0")))

    def _other(self, name: str, *, written: bool, same_window: bool = False) -> str:
        """Choose a second operand; nothing of memory that is written, or only the very same window of it."""
        tensor = self._tensor(name)
        others = []
        for candidate in self._names:
            other = self._tensor(candidate)
            shares = other.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() and other.numel()
            same = (other.shape, other.stride(), other.storage_offset()) == (
                tensor.shape,
                tensor.stride(),
                tensor.storage_offset(),
            )
            if not (written and shares and not (same and same_window)):
                others.append(candidate)
        # Operands of the same shape first, so that most pairs fit.
        fitting = [other for other in others if self._tensor(other).shape == tensor.shape]
        pool = fitting if fitting and not _chance(self.draw, 30) else others
        return self.draw(st.sampled_from(pool)) if pool else self._scalar()

    def _view(self, name: str) -> str:
        draw, tensor = self.draw, self._tensor(name)
        rank, count = tensor.dim(), tensor.numel()
        options = [
            f"{name}.unsqueeze({draw(st.integers(0, rank))})",
            f"{name}.view(-1)",
            f"{name}.reshape(-1)",
            f"{name}.flatten()",
            f"{name}.detach()",
            f"{name}.squeeze()",
            f"{name}.view_as({name})",
            f"{name}.expand(2, {', '.join(map(str, tensor.shape))})" if rank else f"{name}.expand(2)",
            f"{name}[None]",
            f"{name}[...]",
        ]
        if count and count % 2 == 0:
            options += [f"{name}.reshape(2, {count // 2})", f"{name}.view({count // 2}, 2)"]
        if rank:
            dim = draw(st.integers(0, rank - 1))
            size = tensor.shape[dim]
            at = draw(st.integers(0, max(0, size - 1)))
            lead = ":, " * dim
            options += [
                f"{name}.squeeze({dim})",
                f"{name}.select({dim}, {at})",
                f"{name}[{lead}{at}]",
                f"{name}[{lead}{at}:]",
                f"{name}[{lead}::2]",
                f"{name}.narrow({dim}, {at}, {max(0, size - at)})",
                f"{name}[..., -1]",
                f"{name}.unfold({dim}, {min(2, max(1, size))}, 1)",
                f"{name}.unbind({dim})[{at}]",
                f"{name}.chunk(2, {dim})[0]",
            ]
        if rank == 2:
            options += [f"{name}.t()", f"{name}.mT", f"{name}.diagonal()"]
        if rank >= 2:
            order = draw(st.permutations(range(rank)))
            one, two = order[0], order[1]
            options += [
                f"{name}.transpose({one}, {two})",
                f"{name}.permute({', '.join(map(str, order))})",
                f"{name}.movedim({one}, {two})",
                f"{name}.flatten(0, 1)",
                f"{name}.swapaxes({one}, {two})",
            ]
        return draw(st.sampled_from(options))

    def _several(self, name: str) -> tuple[list[str], str]:
        draw, tensor = self.draw, self._tensor(name)
        if not tensor.dim():
            made = self._name()
            return [made], f"{made} = {name}.clone()"
        dim = draw(st.integers(0, tensor.dim() - 1))
        size = tensor.shape[dim]
        call, number = draw(
            st.sampled_from(
                (
                    (f"unbind({dim})", size),
                    (f"chunk(2, {dim})", min(2, size)),
                    (f"split(1, {dim})", size),
                    (f"tensor_split(2, {dim})", 2),
                )
            )
        )
        names = [self._name() for _ in range(max(1, number))]
        return names, f"{', '.join(names)}{',' if len(names) == 1 else ''} = {name}.{call}"

    def _in_place(self, name: str) -> str:
        scalar = self._scalar()
        through_view = _chance(self.draw, 25)
        target = self._view(name) if through_view else name
        other = self._other(name, written=True, same_window=not through_view)
        options = [
            f"{target}.mul_({scalar})",
            f"{target}.add_({scalar})",
            f"{target}.add_({other})",
            f"{target}.mul_({other})",
            f"{target}.sub_({other}, alpha=2)",
            f"{target}.copy_({other})",
            f"{target}.zero_()",
            f"{target}.fill_({scalar})",
            f"{target}.sin_()",
            f"{target}.neg_()",
            f"{target}.relu_()",
            f"{target}.clamp_(-1, 1)",
            f"{target}.masked_fill_({target} > 0, {scalar})",
            f"{target}.addcmul_({other}, {other})",
            f"{target}.abs_()",
        ]
        if target == name:
            options += [f"{name} += {scalar}", f"{name} *= {other}"]
        return self.draw(st.sampled_from(options))

    def _set(self, name: str) -> str:
        draw, tensor = self.draw, self._tensor(name)
        scalar = self._scalar()
        if not tensor.dim():
            return f"{name}[...] = {scalar}"
        other = self._other(name, written=True)
        at = draw(st.integers(0, max(0, tensor.shape[0] - 1)))
        return draw(
            st.sampled_from(
                (
                    f"{name}[{at}] = {scalar}",
                    f"{name}[{at}:] = {other}",
                    f"{name}[...] = {other}",
                    f"{name}[::2] += {scalar}",
                    f"{name}[{name} > 0] = {scalar}",
                    f"{name}[..., 0] = {scalar}",
                    f"{name}.index_fill_(0, torch.tensor([{at}]), {scalar})",
                )
            )
        )

    def _new(self, name: str) -> str:
        draw, tensor = self.draw, self._tensor(name)
        scalar = self._scalar()
        other = self._other(name, written=False)
        rank = tensor.dim()
        options = [
            f"{name} * {scalar}",
            f"{name} + {scalar}",
            f"{name} + {other}",
            f"{name} * {other}",
            f"{name} - {other}",
            f"{name} / 2",
            f"{name}.clone()",
            f"{name}.contiguous()",
            f"{name}.neg()",
            f"{name}.abs()",
            f"{name}.square()",
            f"{name}.relu()",
            f"{name}.sin()",
            f"{name}.clamp(-2, 2).exp()",
            f"{name}.sum()",
            f"{name}.mean()",
            f"{name}.to(torch.float64)",
            f"torch.where({name} > 0, {name}, {other})",
            f"torch.maximum({name}, {other})",
            f"torch.stack([{name}, {other}])",
            f"torch.ones_like({name})",
            f"{name}.new_zeros({', '.join(map(str, tensor.shape)) or '()'})",
            f"{name}.detach().clone()",
        ]
        if rank:
            dim = draw(st.integers(0, rank - 1))
            at = draw(st.integers(0, max(0, tensor.shape[dim] - 1)))
            options += [
                f"{name}.sum({dim})",
                f"{name}.mean({dim}, keepdim=True)",
                f"{name}.amax({dim})",
                f"{name}.cumsum({dim})",
                f"{name}.softmax({dim})",
                f"{name}.flip({dim})",
                f"torch.cat([{name}, {other}], {dim})",
                f"{name}.index_select({dim}, torch.tensor([{at}, 0]))",
                f"{name}.gather({dim}, torch.zeros_like({name}, dtype=torch.int64))",
                f"{name}.max({dim}).values",
            ]
        if rank == 2:
            options += [f"{name} @ {other}", f"{name} @ {name}.t()", f"{name}.tril()"]
        return draw(st.sampled_from(options))

    def _rare(self, name: str) -> tuple[list[str], str] | None:
        """Write what is refused, or leaves a mark on the caller's modes: seldom, but written."""
        made = self._name()
        options: list[tuple[int, tuple[list[str], str]]] = [
            (3, ([], "torch.set_grad_enabled(False)")),
            (1, ([], "torch.set_grad_enabled(True)")),
            (2, ([made], f"{made} = {name} + torch.rand_like({name})")),
            (1, ([], f"{name}.unsqueeze_(0)")),
            (1, ([], f"{name}.squeeze_()")),
        ]
        if self._tensor(name).dim() == 2:
            options.append((1, ([], f"{name}.t_()")))
        rare: tuple[list[str], str] = _pick(self.draw, *options)
        return rare
