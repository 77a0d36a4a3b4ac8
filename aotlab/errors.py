"""The exceptions that aotlab raises.

A program that cannot be compiled faithfully runs eagerly, with a warning that says why; if `config.fallback` says so,
that is raised as a `RefusedError`. Reports count refusals by their classes.
"""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass
from itertools import takewhile
from typing import Any

#: What a function that `aotlab.compile` traces directly may not do, and a whole program may.
TAKE_DYNAMO = 'take frontend="dynamo"'
#: The same, where that is done without being asked (`config.fallback`): Dynamo is known to follow eager there.
BY_DYNAMO = f"{TAKE_DYNAMO}, which runs such a line as plain Python"
_ASSERTION = re.compile(
    r"(?P<what>.*?) ?INTERNAL ASSERT FAILED at .*?please report a bug to PyTorch\.?\s*(?P<text>.*)", re.S
)
#: Of what torch says to those who write it, or kernels for it.
_NOT_FOR_USERS = re.compile(
    r"report a bug|file an issue|please file|If you're using|erroneously|Caffe2|https?://|TORCH_LOGS|C\+\+ stack"
)
_LONGEST = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class UserLine:
    """A place in the user's program: ``file``, 1-based ``line``, enclosing ``function``, the ``code`` there."""

    file: str
    line: int
    function: str = ""
    code: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}"
        return f"{where} ({self.code})" if self.code else where


def brief(error: BaseException) -> str:
    """Name an error of torch's by its class and what a user can use of its text."""
    text = str(error).strip()
    found = _ASSERTION.match(text)
    if found is not None:
        said = _sentences(found["text"]) or found["what"].strip()
        text = "a check inside torch failed" + (f" ({said})" if said else "")
    else:
        text = _sentences(text)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _sentences(text: str) -> str:
    """Return the first line as far as it is said to users."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    sentences = re.split(r"(?<=[.!?])\s+", line)
    line = " ".join(takewhile(lambda sentence: not _NOT_FOR_USERS.search(sentence), sentences))
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"


class AotlabError(Exception):
    """Base class of everything that aotlab itself raises."""


class UsageError(AotlabError, TypeError):
    """A public function was called in a way that can never work."""


@dataclass(eq=False, repr=False)
class RefusedError(AotlabError):
    """A program that aotlab cannot compile faithfully, refused before any side effect.

    ``seen`` is what was found, ``why`` says why it matters, each as a clause; ``suggestion`` is what the caller can do,
    ``argument`` the argument concerned (``"args[0]['w']"``), ``line`` the user's, or ``pattern`` what its text is like.
    """

    seen: str
    _: KW_ONLY
    why: str = ""
    suggestion: str = ""
    argument: str | None = None
    line: UserLine | None = None
    pattern: str | None = None

    def __str__(self) -> str:
        text = self.seen
        if self.line is not None:
            text += f", at {self.line}"
        if self.why:
            text += f": {self.why}"
        if self.suggestion:
            text += f"; {self.suggestion}"
        return text

    def reword(self, **parts: Any) -> None:
        """Say it better: for whoever knows more of the program than the place that raised it."""
        for name, value in parts.items():
            if value is not None:
                setattr(self, name, value)

    @property
    def reason(self) -> str:
        """The class name without ``Error``: the key under which reports count refusals."""
        return type(self).__name__.removesuffix("Error")


class MetadataMutationError(RefusedError):
    """An input changes its sizes, strides or offset in place."""


class SubclassError(RefusedError):
    """A tensor subclass reaches the engine."""


class UnsupportedTensorError(RefusedError):
    """A tensor of a layout or kind that functionalization cannot represent."""


class PythonValueError(RefusedError):
    """An argument that is no tensor and cannot be guarded by type and value."""


class DataDependentError(RefusedError):
    """Python asked for a traced tensor's value or, ``of_size``, for a size by values, computed from ``inputs``."""

    of_size: bool = False
    inputs: tuple[str, ...] = ()


class RandomOpError(RefusedError):
    """A random op stands where its random numbers could differ from eager's."""


class CapturedTensorError(RefusedError):
    """A real tensor that is no argument reaches an op."""


class EscapeError(RefusedError):
    """The function asks for the memory of a traced tensor."""


class LeakedTensorError(RefusedError):
    """After the trace, a traced tensor can be reached from an object of the caller's."""


class HigherOrderOpError(RefusedError):
    """An op that needs a tracing rule of its own and has none."""


class UntraceableError(RefusedError):
    """Tracing the function raised an error that eager does not."""


class HooksError(RefusedError):
    """The function registers or relies on tensor hooks that a compiled call would not run."""


class OutputError(RefusedError):
    """An output cannot be given back as eager would give it."""


class PartialBackwardError(RefusedError):
    """A backward for some of the outputs needs a value that the forward did not save."""


class TransformError(RefusedError):
    """A compiled function, or its backward, was called under a transform or mode that its graph has no part in."""


class DoubleBackwardError(RefusedError):
    """The backward of a compiled function was asked to be differentiated."""


class DeviceError(RefusedError):
    """A device was asked for that is not there, or a tensor is on another one."""


class GraphInvariantError(AotlabError):
    """A graph between two stages breaks an invariant; this is a bug in aotlab."""


class RecompileLimitError(AotlabError):
    """A function was recompiled more often than ``config.recompile_limit`` allows."""
