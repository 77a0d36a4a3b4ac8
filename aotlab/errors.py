"""The exceptions that aotlab raises.

A program that cannot be compiled faithfully runs eagerly, with a warning that says why. If `config.fallback` is
``"error"``, a `RefusedError` is raised instead. Reports count refusals by class.
"""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass, field
from itertools import takewhile
from typing import Any, ClassVar

#: A suggestion for code that the direct frontend refuses and that the Dynamo frontend may compile.
TAKE_DYNAMO = 'use frontend="dynamo"'
#: The same suggestion for code that Dynamo is known to capture faithfully. With ``config.fallback = "dynamo"``, Dynamo
#: then captures the call automatically.
BY_DYNAMO = f"{TAKE_DYNAMO}, which runs such a line as plain Python"
_ASSERTION = re.compile(
    r"(?P<what>.*?) ?INTERNAL ASSERT FAILED at .*?please report a bug to PyTorch\.?\s*(?P<text>.*)", re.S
)
#: Words in sentences of torch's messages that are for developers of torch or of kernels. `brief` drops these sentences.
_NOT_FOR_USERS = re.compile(
    r"report a bug|file an issue|please file|If you're using|erroneously|Caffe2|https?://|TORCH_LOGS|C\+\+ stack"
)
_LONGEST = 300


#: The file name of a notebook cell's code, as IPython or its kernel chooses it. The group that matches is the number in
#: this name.
CELL_FILE = re.compile(r"^<ipython-input-(\d+)-\w+>$|[\\/]ipykernel_\d+[\\/](\d+)\.py$")


@dataclass(frozen=True, slots=True, kw_only=True)
class UserLine:
    """A place in the user's program.

    Attributes
    ----------
    file, line
        The file, and the line in it, counted from 1.
    function
        The enclosing function.
    code
        The text of the line.
    callers
        The lines of notebook cells that called the function, directly or through others, innermost first.
    """

    file: str
    line: int
    function: str = ""
    code: str = ""
    callers: tuple[UserLine, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}"
        return f"{where} ({self.code})" if self.code else where


def brief(error: BaseException) -> str:
    """Return the class name of a torch error, and the part of its text that helps a user."""
    text = str(error).strip()
    found = _ASSERTION.match(text)
    if found is not None:
        said = _sentences(found["text"]) or found["what"].strip()
        text = "a check inside torch failed" + (f" ({said})" if said else "")
    else:
        text = _sentences(text)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _sentences(text: str) -> str:
    """Return the first line of a text, without its first sentence for developers and all later sentences."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    sentences = re.split(r"(?<=[.!?])\s+", line)
    line = " ".join(takewhile(lambda sentence: not _NOT_FOR_USERS.search(sentence), sentences))
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"


class AotlabError(Exception):
    """Base class of all exceptions that aotlab itself raises."""


class UsageError(AotlabError, TypeError):
    """A public function was called in a way that can never work."""


@dataclass(eq=False, repr=False)
class RefusedError(AotlabError):
    """aotlab cannot compile a program faithfully, and refused it before any side effect.

    ``seen`` is the fact that was found, and ``why`` says why it matters; both are clauses. ``suggestion`` tells the
    caller a remedy. ``argument`` is the name of the argument that caused the refusal (``"args[0]['w']"``), if one did.
    ``line`` is the user line. If ``line`` is None, ``pattern`` can be a regular expression: the engine then searches
    the user's code for a line that matches. ``case`` is the id of the row of `aotlab.fallbacks` that explains the
    refusal; the message ends with this id in brackets. If ``case`` is not passed, it is the id that the class
    definition gives (``class HooksError(RefusedError, case="hooks")``). If that definition gives no id either, ``case``
    is empty.
    """

    _default_case: ClassVar[str] = ""

    seen: str
    _: KW_ONLY
    why: str = ""
    suggestion: str = ""
    argument: str | None = None
    line: UserLine | str | None = None
    pattern: str | None = None
    case: str = ""

    def __init_subclass__(cls, *, case: str = "") -> None:
        cls._default_case = case or cls._default_case

    def __post_init__(self) -> None:
        self.case = self.case or self._default_case

    def __str__(self) -> str:
        text = self.seen
        if self.line is not None:
            text += f", at {self.line}"
        if self.why:
            text += f": {self.why}"
        if self.suggestion:
            text += f"; {self.suggestion}"
        if self.case:
            text += f" [{self.case}]"
        return text

    def reword(self, **parts: Any) -> None:
        """Replace fields of the error by those ``parts`` that are not None.

        Code that catches the error uses this to add facts that the code that raised it did not know.
        """
        for name, value in parts.items():
            if value is not None:
                setattr(self, name, value)

    @property
    def reason(self) -> str:
        """The class name without ``Error``: the key under which reports count refusals."""
        return type(self).__name__.removesuffix("Error")


class MetadataMutationError(RefusedError, case="metadata-mutation"):
    """The function changes an input's sizes, strides or storage offset in place."""


class SubclassError(RefusedError, case="subclass"):
    """A tensor is of a subclass that the engine does not support."""


class UnsupportedTensorError(RefusedError, case="unsupported-tensor"):
    """A tensor has a layout or kind that functionalization cannot represent."""


class PythonValueError(RefusedError, case="python-value"):
    """An argument is not a tensor and cannot be guarded by type and value."""


class DataDependentError(RefusedError, case="data-dependent"):
    """Python code read the value of a traced tensor.

    If ``of_size`` is true, the code read a size that depends on the values of a tensor. ``inputs`` are the names of the
    inputs from which the value was computed.
    """

    of_size: bool = False
    inputs: tuple[str, ...] = ()


class RandomOpError(RefusedError, case="random-op"):
    """A compiled call could not draw the same random numbers as eager.

    Examples: the function draws from Python's ``random`` or from a `torch.Generator` passed to it; a backward draws.
    """


class CapturedTensorError(RefusedError, case="captured-tensor"):
    """The traced function uses or returns a real tensor that is neither an argument nor a lifted input."""


class EscapeError(RefusedError, case="escape"):
    """The function reads or changes something that a trace does not have, or that a graph cannot change.

    Examples: it accesses the memory of a traced tensor, as ``numpy()`` does; it calls ``backward()``, which accumulates
    gradients into an input; it changes a global setting.
    """


class LeakedTensorError(RefusedError, case="leaked-tensor"):
    """The function changes an object that outlives the call, for example stores a traced tensor in it."""


class HigherOrderOpError(RefusedError, case="higher-order-op"):
    """A higher-order op has no tracing rule."""


class UntraceableError(RefusedError, case="untraceable"):
    """Tracing the function raised an error of Python or torch. Eager may raise the same error, or none."""


class HooksError(RefusedError, case="hooks"):
    """The function registers or needs hooks that a compiled call would not run."""


class OutputError(RefusedError, case="output"):
    """A compiled call cannot return an output as eager would return it."""


class PartialBackwardError(RefusedError):
    """A backward for some of the outputs needs a value that the forward did not save."""


class TransformError(RefusedError, case="transform"):
    """A compiled function, or its backward, was called under a transform or mode that must see the function's ops."""


class DoubleBackwardError(RefusedError, case="double-backward"):
    """The backward of a compiled function cannot be differentiated."""


class DeviceError(RefusedError):
    """A requested device does not exist, or a tensor is on another device than expected."""


class GraphInvariantError(AotlabError):
    """An internal check failed, for example of a graph between two stages. This is a bug in aotlab or in a compiler."""


class RecompileLimitError(AotlabError):
    """A function needs more compiled entries than ``config.recompile_limit`` allows."""
