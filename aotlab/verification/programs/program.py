"""The record of a program: the text of its function, its calls, and the caller's steps after each call."""

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

#: Ops whose results or derivatives are rounded, because they need more bits than a float has.
_INEXACT = r"\.(sin_?|exp|softmax|mean|rand_like|amax|layer_norm|uniform_|normal_)\(|Noisy|/ \w+\.shape|\*\* -0\.5"

#: Ops whose result needs as many bits as both operands together. Inputs need 6 bits, and a float32 has 24 bits, a
#: float64 has 53. So `Program.exact` limits the number of lines with these ops: 2 if an input is float32 or complex64,
#: else 5.
_PRODUCT = r"mul_?\(|square| \*=? | @ |Squared|Kept|Parted"

_VIEWS = (
    r"\.(view|reshape|flatten|expand|view_as|unsqueeze|squeeze|select|narrow|unfold|t|diagonal|transpose|permute|"
    r"movedim|swapaxes|as_strided|conj)\(|\.(mT|real|imag)\b|view_as_(real|complex)|\w\[|Viewed"
)

#: Most of the categories of `Program.categories`, each with the pattern that finds it in the body and the result.
_IN_BODY = {
    "views": _VIEWS,
    "multi-output views": r"\.(unbind|chunk|split|tensor_split)\(",
    "in-place": r"\.(?!(requires_grad|t|transpose|squeeze|unsqueeze|swapaxes|resize|set|as_strided|detach)_)\w+_\("
    r"| [-+*/]= |\] = |Written",
    "in-place metadata": r"\.(t|transpose|squeeze|unsqueeze|swapaxes|as_strided|resize|set|detach)_\(|\.data = ",
    "grad modes": r"no_grad|enable_grad|set_grad_enabled|inference_mode",
    "hidden writes": r"\.data\.\w+_\(|\.data\[|detach\(\)(\.\w+_\(|\[)|no_grad|inference_mode",
    "custom functions": r"(Doubled|Squared|Kept|Viewed|Parted|Written|Noisy|Logged|Overwrites)\.apply",
    "checkpoint": r"checkpoint\(",
    "out=": r", out=",
    "random": r"rand_like|(uniform|normal|bernoulli|random)_\(|Noisy",
    "sizes from values": r"\[\w+ > 0\]|nonzero|masked_select|unique|repeat_interleave\(torch|leading|routed",
    "numbers in state": r"\bstate\.",
    "storage sizes": r"gathered\(",
    "backwards that write": r"(Logged|Overwrites)\.apply",
    "around the trace": r"\.numpy\(|\.data = ",
    "sizes": r"\.shape\[|\.numel\(|\.size\(",
    "dtypes": r"int8|int16|int32|int64|bool\b|complex|\.to\(torch\.|\.real|\.imag",
}
_HOOKS = r"\bhook\(|retain(_grad)?\(|register_hook"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The text that makes the arguments of one call.

    ``lines`` are statements that bind names, for example ``a = numbers(1, 2, 3)``. ``arguments`` are the expressions
    that are passed. ``watched`` are the names of other tensors that are observed after the call, for example the base
    of an argument that is a view. ``change`` says in words how the call differs from the program's first call.
    ``grad_mode`` says whether grad mode is on during the call.
    """

    lines: tuple[str, ...]
    arguments: tuple[str, ...]
    watched: tuple[str, ...] = ()
    change: str = "the first call"
    grad_mode: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Program:
    """The text of a function, of the inputs of its calls, and of the caller's steps after each call.

    The function has ``parameters``, the lines of its ``body``, and a returned expression ``result``. ``setups`` has one
    item per call. After each call, the caller runs the expressions ``before``, then the ``backward``, then the
    expressions ``after``. In these expressions, ``out`` is the list of the returned tensors, and the inputs have their
    names. A step may raise, if it raises both in eager and in the engine. ``raises`` says that the function raises on
    the first call.
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
        """The program as the text of a Python module, which `aotlab.verification.calls` explains."""
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
        """Whether all arithmetic of the program is exact, so that the order of a sum does not matter."""
        lines = (*self.body, self.result, *self.before, *self.after)
        factors = sum(bool(re.search(_PRODUCT, line)) for line in lines)
        text = [line for setup in self.setups for line in setup.lines]
        short = any("float32" in line or "complex64" in line for line in text)
        return factors <= (2 if short else 5) and not any(re.search(_INEXACT, line) for line in lines)

    @property
    def categories(self) -> frozenset[str]:
        """The features that the program uses, found by searching its text."""
        body = "\n".join((*self.body, self.result))
        calls = "\n".join(line for setup in self.setups for line in setup.lines)
        caller = "\n".join((*self.before, *self.after))
        features = {name for name, pattern in _IN_BODY.items() if re.search(pattern, body)}
        if re.search(_IN_BODY["dtypes"], calls):
            features.add("dtypes")
        if re.search(_HOOKS, "\n".join((body, calls, caller))):
            features.add("hooks")
        if any(len(set(setup.arguments)) < len(setup.arguments) for setup in self.setups) or re.search(
            r"(?m)^([a-d]) = ([a-d])$", calls
        ):
            features.add("duplicates")
        if re.search(r"(?m)^[a-d] = (torch\.[\w.]+\()?([a-d]|w|w_array)\b(?!$)", calls):
            features.add("overlapping inputs")
        if not all(setup.grad_mode for setup in self.setups):
            features.add("grad modes")
        if self.backward in ("first", "each", "reversed") or ".backward(" in caller:
            features.add("partial backward")
        if self.backward == "twice" or "retain_graph" in caller:
            features.add("repeated backward")
        if "autograd.grad(" in caller:
            features.add("gradients between outputs")
        if re.search(r"_\(|\[", re.sub(r"out\[\d+\]", "out", caller).replace("requires_grad_", "")):
            features.add("caller writes outputs")
        if len(self.setups) > 1:
            features.add("repeated calls")
        if re.search(
            r"[\[{\"]|Pair|Box|None|True|\b\d", re.sub(r"(?<=[\w\])])(\[[^]]*\]|\.\w+(\([^)]*\))?)", "", self.result)
        ):
            features.add("containers")
        if self.raises:
            features.add("raises")
        return frozenset(features)

    def build(self) -> tuple[Callable[..., Any], tuple[Callable[[], Call], ...]]:
        """Compile the text; return the function, and for each call a function that makes new arguments for it."""
        source = self.source
        file = f"<program {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
        # Store the text in `linecache`, where tracebacks read it, and the engine reads it to quote the user line.
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        namespace: dict[str, Any] = {"__name__": "program"}
        # Without `dont_inherit`, this file's `from __future__` would turn the annotations of the text's dataclasses
        # into strings.
        exec(compile(source, file, "exec", dont_inherit=True), namespace)
        texts = {"before": self.before, "after": self.after}
        calls = tuple(partial(call_of, namespace, index, texts=texts) for index in range(len(self.setups)))
        return namespace["program"], calls

    def __repr__(self) -> str:
        return f"Program(\n{self.source})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # Without this method, Hypothesis and IPython would print all fields of the dataclass.
        for index, line in enumerate(repr(self).splitlines()):
            if index:
                printer.break_()
            printer.text(line)


def inputs_body(setup: Setup) -> list[str]:
    """Return the lines of the function ``inputs_*()``, which makes the arguments of one call."""
    watched = ", ".join(f'"{name}": {name}' for name in setup.watched)
    arguments = "".join(f"{argument}, " for argument in setup.arguments)
    return [*setup.lines, f"return ({arguments.strip()}), {{{watched}}}"]
