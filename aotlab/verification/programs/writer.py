"""Write the body of a program statement by statement, and run each statement eagerly on the inputs of the first call.

A statement that raises is replaced by another one, except for a few that are kept on purpose. So nearly every statement
is valid, and this module needs no model of torch's shape rules.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from aotlab.ir.extents import within_its_storage
from aotlab.verification.observables import flatten
from aotlab.verification.programs import rare, statements
from aotlab.verification.programs.choices import Choices, RejectedError, chance, one_of, weighted
from aotlab.verification.programs.defined import NotDefinedError
from aotlab.verification.programs.prelude import helpers
from aotlab.verification.programs.rare import Table
from aotlab.verification.programs.statements import Fields, Scope

#: The messages of errors in eager that an engine does not have to reproduce. A statement or program that raises one of
#: them is dropped. Eager raises the first error ("a leaf Variable …") correctly for a leaf. Eager also raises this
#: error for a view whose base got an autograd history through a write to another view, and that depends on how the
#: argument was made before the call. "not drawn" is the message of `NotDefinedError`. Kernels raise the other errors,
#: so an engine that does not compute an unused result does not raise them. "not resizable" is raised after the tensor
#: has its new shape, which is larger than its memory.
QUIRKS = re.compile(
    r"^a leaf Variable that requires grad|not supported|not implemented for|non-zero size|not drawn|should be positive"
    r"|not resizable"
)

_COUNTS = weighted((2, 1), (3, 2), (5, 3), (5, 4), (4, 5), (2, 6), (2, 7), (2, 8))

_KINDS = weighted(
    (26, "in place"),
    (23, "view"),
    (24, "new"),
    (7, "several"),
    (5, "set"),
    (5, "metadata"),
    (4, "hidden"),
    (3, "custom"),
    (1, "hook"),
    (2, "out"),
    (2, "dtype"),
    (2, "mode"),
    (1, "random"),
    (1, "seldom"),
    (2, "draw"),
    (3, "values"),
    (2, "state"),
    (1, "storage"),
    (1, "logged"),
)

#: Further kinds of statements for a program whose later calls have other sizes.
_SIZED_KINDS = weighted((26, "sized view"), (28, "sized new"), (12, "sized write"), (14, "number"))

_REGIONS = weighted(
    (8, ("with torch.no_grad():", torch.no_grad)),
    (4, ("with torch.enable_grad():", torch.enable_grad)),
    (4, ("with torch.set_grad_enabled(False):", torch.no_grad)),
    (1, ("with torch.inference_mode():", torch.inference_mode)),
)

_LEAVES = (
    "None",
    "3",
    "{x}.shape",
    "True",
    "{x}.storage_offset()",
    '"text"',
    "{x}.is_leaf",
    "{x}.storage_offset()",
    "{x}.requires_grad",
)

_SIZED_LEAVES = (
    "{x}.shape[0]",
    "{x}.shape",
    "{x}.numel() + 1",
    "{x}.stride()",
    "{x}.shape[-1] * 0.5",
    "[*{x}.shape]",
    "{x}.shape[0] > 3",
    "{x}.is_contiguous()",
    "{x}.size(0) // 2",
    "{x}.storage_offset()",
)

_FORMS = weighted((8, "tuple"), (4, "list"), (4, "dict"), (4, "nested"), (3, "Pair"), (1, "Box"))

_SEVERAL = ("unbind({dim})", "chunk(2, {dim})", "split(1, {dim})", "tensor_split(2, {dim})", "max({dim})")
_SEVERAL_SIZED = ("chunk(2, {dim})", "tensor_split(2, {dim})", "max({dim})")


class Writer:
    """Writes the body of a program statement by statement, into ``lines``.

    Parameters
    ----------
    choices
        Makes the random decisions.
    arguments
        The arguments of the first call by name. The statements run on them and change them.
    dynamo
        Leave out statements that Dynamo cannot trace without a graph break.
    sized
        Write statements that are valid for other sizes of the arguments too.

    ``raised`` is True after a statement that raises was kept. Then the body ends.
    """

    def __init__(self, choices: Choices, arguments: dict[str, Any], *, dynamo: bool, sized: bool = False) -> None:
        self.choices = choices
        self.dynamo = dynamo
        self.lines: list[str] = []
        self.raised = False
        self.scope = Scope({"torch": torch, "checkpoint": checkpoint, **helpers(), **arguments}, sized=sized)
        self._arguments = arguments
        self._count = 0
        self._last_target = ""
        self._error: Exception | None = None

    def body(self, most: int) -> None:
        """Write one statement for each argument that is a Python value, and then up to ``most`` statements."""
        for name, value in self._arguments.items():
            # Use each argument that is a Python value, because an unused value would test no guard.
            if not isinstance(value, torch.Tensor):
                use = f"{name}" if isinstance(value, int | float) else f"(2 if {name} is None else 3)"
                target = self._name()
                self._write([target], f"{target} = {self.scope.names[0]} * {use}", 0)
        self.block(min(most, one_of(self.choices, _COUNTS)), depth=0)

    def block(self, count: int, depth: int) -> None:
        """Write up to ``count`` statements at indentation ``depth``."""
        for _ in range(count):
            if self.raised:
                return
            if depth == 0 and chance(self.choices, 80):
                self._region()
            else:
                self._statement(depth)
        if depth and self.lines[-1].endswith(":"):
            self.lines.append("    " * depth + "pass")

    def result(self) -> str:
        """Write the expression that is returned. It includes the numbers in ``state`` if the program uses these."""
        result = self._result()
        if any("state." in line for line in self.lines):
            return f'({result}, state.steps, state.counts["n"], *state.history)'
        return result

    def _result(self) -> str:
        choices = self.choices
        leaves = [self._leaf() for _ in range(one_of(choices, weighted((4, 1), (4, 2), (3, 3), (1, 4))))]
        if len(leaves) == 1 and chance(choices, 500):
            return leaves[0]
        form = one_of(choices, _FORMS)
        if form == "list":
            return f"[{', '.join(leaves)}]"
        if form == "dict":
            return "{" + ", ".join(f'"{key}": {leaf}' for key, leaf in zip("klmn", leaves, strict=False)) + "}"
        if form == "nested":
            return f'({leaves[0]}, [{", ".join(leaves[1:])}], {{"last": ({leaves[-1]},)}})'
        if form in ("Pair", "Box") and len(leaves) == 2:
            return f"{form}({', '.join(leaves)})"
        return f"({', '.join(leaves)},)"

    def outputs(self, result: str) -> list[torch.Tensor] | None:
        """Evaluate the returned expression and return the tensors in its value; return None if it raises."""
        try:
            value = eval(result, self.scope.values)  # the writer wrote this text
            return [leaf for _, leaf in flatten(value, "out")[1] if isinstance(leaf, torch.Tensor)]
        except (RuntimeError, IndexError, ValueError, TypeError):
            return None

    def _leaf(self) -> str:
        if self.scope.sized and chance(self.choices, 150):
            name = one_of(self.choices, [name for name in self.scope.names if self.scope.tensor(name).dim()] or ["3"])
            leaves = (*_SIZED_LEAVES, *self.scope.numbers)
            return name if name == "3" else one_of(self.choices, leaves).format(x=name)
        if chance(self.choices, 100):
            return one_of(self.choices, _LEAVES).format(x=one_of(self.choices, self.scope.names))
        # Shrinking prefers the first choice. Put the last name first, because it depends on the most statements.
        name = one_of(self.choices, self.scope.names[::-1])
        if chance(self.choices, 250):
            for _ in range(3):
                expression = self._expression(statements.VIEWS, name)
                if self._try(f"_ = {expression}"):
                    return expression
        return name

    def _region(self) -> None:
        header, mode = one_of(self.choices, _REGIONS)
        self.lines.append(header)
        with mode():
            self.block(1 + self.choices.below(3), depth=1)

    def _statement(self, depth: int) -> None:
        for _ in range(4):
            targets, line = self._draw_statement()
            line = line.replace("{made}", ", ".join(targets))
            if self._write(targets, line, depth):
                return
            if chance(self.choices, 25) and not self._is_quirk():
                self.lines.append("    " * depth + line)
                self.raised = True
                return

    def _is_quirk(self) -> bool:
        return isinstance(self._error, NotDefinedError | NameError) or bool(QUIRKS.search(str(self._error)))

    def _write(self, targets: list[str], line: str, depth: int) -> bool:
        """Run a statement; if it is valid, append it and add the tensors and numbers that it makes to the scope."""
        if not self._try(line):
            return False
        self.lines.append("    " * depth + line)
        self._last_target = targets[0] if targets else ""
        self.scope.names += [name for name in targets if isinstance(self.scope.values[name], torch.Tensor)]
        self.scope.numbers += [name for name in targets if type(self.scope.values[name]) in (int, float)]
        return True

    def _try(self, line: str) -> bool:
        try:
            exec(line, self.scope.values)
            for name in ("_", *self.scope.names):
                value = self.scope.values.get(name)
                # Reading a view can raise after an in-place write to another view. A copy of floats into integers can
                # make the integers require grad, and eager's backward fails an assertion for such integers.
                if (
                    isinstance(value, torch.Tensor)
                    and not value.is_leaf
                    and not (value.is_floating_point() or value.is_complex())
                ):
                    raise NotDefinedError("not drawn: integers that require grad")
        except (RuntimeError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
            self._error = error
            if not all(within_its_storage(v) for v in self.scope.values.values() if isinstance(v, torch.Tensor)):
                # A failed `resize_` left a tensor that is larger than its storage. A write to it would overwrite other
                # memory and could crash this process.
                raise RejectedError from error
            return False
        return True

    def _expression(self, table: Table, name: str) -> str:
        fields = Fields(self.choices, self.scope, name)
        return statements.choose(self.choices, table, len(fields.shape)).format_map(fields)

    def _name(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def _draw_statement(self) -> tuple[list[str], str]:
        choices, scope = self.choices, self.scope
        kind = one_of(choices, _KINDS + _SIZED_KINDS if scope.sized else _KINDS)
        # Prefer the last three names, so that statements use the results of earlier statements.
        name = one_of(choices, scope.names + scope.names[-3:])
        table = _TABLES.get(kind)
        if table is not None:
            text = self._expression(table, name)
            if not (self.dynamo and any(word in text for word in statements.NOT_FOR_DYNAMO)):
                return [], text
        if kind == "hook":
            # Register a hook on the tensor of the last statement, or on an argument if there is no statement yet. Up to
            # version 2.14, torch crashes if a hook is registered on a view whose base was written in the meantime.
            last = self._last_target if self.lines else one_of(choices, list(self._arguments))
            if isinstance(scope.values.get(last), torch.Tensor):
                return [], self._expression(statements.HOOKS, last)
        if kind == "mode":
            return [], f"torch.set_grad_enabled({one_of(choices, ('False', 'True', 'False'))})"
        if kind == "several":
            return self._several(name)
        targets = [self._name()]
        if kind == "seldom":
            return self._seldom(targets, name)
        if kind in _NEW_TABLES:
            expression = self._expression(_NEW_TABLES[kind], name)
        elif kind == "logged":
            expression = f"Logged.apply({name}, {one_of(choices, scope.names)})"
        elif kind == "dtype":
            views = statements.OTHER_DTYPES.get(scope.tensor(name).dtype, ("{x}.to(torch.float64)",))
            expression = one_of(choices, views).format(x=name)
        elif kind == "custom":
            if chance(choices, 150):
                targets.append(self._name())
                return targets, f"{{made}} = Parted.apply({name})"
            expression = f"{one_of(choices, statements.CUSTOM)}.apply({name})"
        elif kind == "random":
            expression = f"{name} + torch.rand_like({name})"
        else:
            expression = self._expression(statements.NEW, name)
        return targets, f"{{made}} = {expression}"

    def _seldom(self, targets: list[str], name: str) -> tuple[list[str], str]:
        if not self.dynamo and chance(self.choices, 350):
            return [], self._expression(statements.AROUND, name)
        ends = one_of(self.choices, ("value * value", "(value * 2).square().sum()", "value.sin()"))
        return targets, f"{{made}} = checkpoint(lambda value: {ends}, {name}, use_reentrant=False)"

    def _several(self, name: str) -> tuple[list[str], str]:
        fields = Fields(self.choices, self.scope, name)
        if not fields.shape:
            return [self._name()], f"{{made}} = {name}.clone()"
        call = one_of(self.choices, _SEVERAL_SIZED if self.scope.sized else _SEVERAL).format_map(fields)
        size = fields.shape[int(fields["dim"])]
        number = size if call.startswith(("unbind", "split")) else 2
        if call.startswith("chunk"):
            number = min(2, size)
        names = [self._name() for _ in range(max(1, number))]
        return names, f"{{made}}{',' if len(names) == 1 else ''} = {name}.{call}"


_TABLES = {
    "in place": statements.IN_PLACE,
    "set": statements.SET,
    "metadata": statements.METADATA,
    "hidden": statements.HIDDEN,
    "out": statements.OUT,
    "draw": rare.DRAWS,
    "state": rare.STATE,
    "storage": rare.STORAGES,
    "sized write": statements.WRITES_USING_SIZES,
}

#: Kinds of statements that make a new value.
_NEW_TABLES = {
    "view": statements.VIEWS,
    "values": rare.SIZES_FROM_VALUES,
    "sized view": statements.VIEWS_USING_SIZES,
    "sized new": statements.NEW_USING_SIZES,
    "number": statements.NUMBERS,
}
