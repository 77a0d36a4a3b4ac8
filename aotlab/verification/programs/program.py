"""What a program is: text, its calls, and what the caller does with what comes back."""

from __future__ import annotations

import hashlib
import linecache
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from aotlab.verification.calls import call_of
from aotlab.verification.observables import Backward, Call
from aotlab.verification.programs.prelude import prelude

#: Ops whose results or derivatives need more bits than a float has.
_INEXACT = r"\.(sin_?|exp|softmax|mean|rand_like|amax|layer_norm)\(|/ \w+\.shape|\*\* -0\.5"

#: Ops that double the bits which a result needs: inputs have 6, a float32 24 and a float64 53.
_PRODUCT = r"mul_?\(|square| \*=? | @ |Squared|Kept|Parted"

_VIEWS = (
    r"\.(view|reshape|flatten|expand|view_as|unsqueeze|squeeze|select|narrow|unfold|t|diagonal|transpose|permute|"
    r"movedim|swapaxes|as_strided|conj)\(|\.(mT|real|imag)\b|view_as_(real|complex)|\w\[|Viewed"
)

#: What a program is about, by what its body, result and calls have in them.
_IN_BODY = {
    "views": _VIEWS,
    "multi-output views": r"\.(unbind|chunk|split|tensor_split)\(",
    "in-place": r"\.(?!(requires_grad|t|transpose|squeeze|unsqueeze|swapaxes|resize|set|as_strided|detach)_)\w+_\("
    r"| [-+*/]= |\] = |Written",
    "in-place metadata": r"\.(t|transpose|squeeze|unsqueeze|swapaxes|as_strided|resize|set|detach)_\(|\.data = ",
    "grad modes": r"no_grad|enable_grad|set_grad_enabled|inference_mode",
    "hidden writes": r"\.data\.\w+_\(|\.data\[|detach\(\)(\.\w+_\(|\[)|no_grad|inference_mode",
    "custom functions": r"(Doubled|Squared|Kept|Viewed|Parted|Written)\.apply",
    "checkpoint": r"checkpoint\(",
    "out=": r", out=",
    "random": r"rand_like",
    "around the trace": r"\.numpy\(|\.data = ",
    "sizes": r"\.shape\[|\.numel\(|\.size\(",
    "dtypes": r"int8|int16|int32|int64|bool\b|complex|\.to\(torch\.|\.real|\.imag",
}
_HOOKS = r"\bhook\(|retain(_grad)?\(|register_hook"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How the arguments of one call are made.

    ``lines`` bind names, ``arguments`` are the expressions that are passed, ``watched`` the names that are looked at
    afterwards; ``change`` says what is different from the first call, and ``grad_mode`` whether it is made with grad
    mode on.
    """

    lines: tuple[str, ...]
    arguments: tuple[str, ...]
    watched: tuple[str, ...] = ()
    change: str = "the first call"
    grad_mode: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Program:
    """A function of ``parameters`` with a ``body`` and a ``result``, its calls, and what the caller does afterwards.

    The caller runs the expressions ``before``, then the ``backward``, then the expressions ``after``; in them ``out``
    is the list of the returned tensors, and the inputs have their names. Each of them may raise, as long as it does so
    on both sides. ``raises`` tells that the function does, on the first call.
    """

    parameters: tuple[str, ...]
    body: tuple[str, ...]
    result: str
    setups: tuple[Setup, ...]
    backward: Backward = "all"
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    raises: bool = False

    @property
    def source(self) -> str:
        """The program as a Python module.

        It has ``program``; ``inputs_0()``, ``inputs_1()``, … for the calls; ``before`` and ``after`` where the caller
        does something; and ``grad_modes`` where grad mode is off in one of the calls.
        """
        lines = ["", "", f"def program({', '.join(self.parameters)}):"]
        lines += [f"    {line}" for line in (*self.body, f"return {self.result}")]
        for index, setup in enumerate(self.setups):
            lines += ["", "", f"def inputs_{index}():  # {setup.change}"]
            lines += [f"    {line}" for line in inputs_body(setup)]
        for name, steps in (("before", self.before), ("after", self.after)):
            if steps:
                words = set(re.findall(r"\b[a-d]\b", " ".join(steps)))
                names = ", ".join(("out", *sorted(words)))
                lines += ["", "", f"def {name}({names}):  # what the caller does {name} the backward, one by one"]
                lines += ["    return [", *(f"        lambda: {step}," for step in steps), "    ]"]
        if not all(setup.grad_mode for setup in self.setups):
            lines += ["", "", f"grad_modes = ({', '.join(str(setup.grad_mode) for setup in self.setups)},)"]
        text = "\n".join(lines)
        return "\n".join(prelude(text)) + f"{text}\n\n# backward: {self.backward}\n"

    @property
    def exact(self) -> bool:
        """Whether all arithmetic of the program is exact, so that no order of summation can show."""
        lines = (*self.body, self.result, *self.before, *self.after)
        factors = sum(bool(re.search(_PRODUCT, line)) for line in lines)
        text = [line for setup in self.setups for line in setup.lines]
        short = any("float32" in line or "complex64" in line for line in text)
        return factors <= (2 if short else 5) and not any(re.search(_INEXACT, line) for line in lines)

    @property
    def categories(self) -> frozenset[str]:
        """What the program is about, read off its text."""
        body = "\n".join((*self.body, self.result))
        calls = "\n".join(line for setup in self.setups for line in setup.lines)
        caller = "\n".join((*self.before, *self.after))
        found = {name for name, pattern in _IN_BODY.items() if re.search(pattern, body)}
        if re.search(_IN_BODY["dtypes"], calls):
            found.add("dtypes")
        if re.search(_HOOKS, "\n".join((body, calls, caller))):
            found.add("hooks")
        if any(len(set(setup.arguments)) < len(setup.arguments) for setup in self.setups) or re.search(
            r"(?m)^([a-d]) = ([a-d])$", calls
        ):
            found.add("duplicates")
        if re.search(r"(?m)^[a-d] = (torch\.[\w.]+\()?([a-d]|w|w_array)\b(?!$)", calls):
            found.add("overlapping inputs")
        if not all(setup.grad_mode for setup in self.setups):
            found.add("grad modes")
        if self.backward in ("first", "each", "reversed") or ".backward(" in caller:
            found.add("partial backward")
        if self.backward == "twice" or "retain_graph" in caller:
            found.add("repeated backward")
        if "autograd.grad(" in caller:
            found.add("gradients between outputs")
        if re.search(r"_\(|\[", re.sub(r"out\[\d+\]", "out", caller).replace("requires_grad_", "")):
            found.add("caller writes outputs")
        if len(self.setups) > 1:
            found.add("repeated calls")
        if re.search(
            r"[\[{\"]|Pair|Box|None|True|\b\d", re.sub(r"(?<=[\w\])])(\[[^]]*\]|\.\w+(\([^)]*\))?)", "", self.result)
        ):
            found.add("containers")
        if self.raises:
            found.add("raises")
        return frozenset(found)

    def build(self) -> tuple[Callable[..., Any], tuple[Callable[[], Call], ...]]:
        """Compile the text: the function, and for each call what makes fresh arguments for it."""
        source = self.source
        file = f"<program {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
        # Tracebacks, and an engine that quotes the user's line, read the text from here.
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        namespace: dict[str, Any] = {"__name__": "program"}
        # This file's own `from __future__` would make other annotations of the text's dataclasses.
        exec(compile(source, file, "exec", dont_inherit=True), namespace)
        texts = {"before": self.before, "after": self.after}
        calls = tuple(partial(call_of, namespace, index, texts=texts) for index in range(len(self.setups)))
        return namespace["program"], calls

    def __repr__(self) -> str:
        return f"Program(\n{self.source})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # Hypothesis and IPython would spell out the fields of a dataclass.
        for index, line in enumerate(repr(self).splitlines()):
            if index:
                printer.break_()
            printer.text(line)


def inputs_body(setup: Setup) -> list[str]:
    """Return the lines of the function that makes a call's arguments."""
    watched = ", ".join(f'"{name}": {name}' for name in setup.watched)
    arguments = "".join(f"{argument}, " for argument in setup.arguments)
    return [*setup.lines, f"return ({arguments.strip()}), {{{watched}}}"]
