"""The exceptions that aotlab raises.

A program that cannot be compiled faithfully runs eagerly, with a warning that says why; under
``config.fallback = "error"`` that sentence is raised as a `RefusedError`, before anything that the caller owns has been
changed. Each kind of refusal has a class of its own, under which reports count it.

    AotlabError
    ├── UsageError              the call is malformed; change the call
    ├── RefusedError            the program is fine, but aotlab cannot compile it faithfully
    │   ├── OverlappingInputsError      mutated inputs that share bytes
    │   ├── MetadataMutationError       ``t_()`` and friends on an input
    │   ├── StorageMutationError        ``set_()``, ``resize_()`` on an input
    │   ├── SubclassError               tensor subclasses
    │   ├── UnsupportedTensorError      sparse, quantized, nested, conjugate-bit, … tensors
    │   ├── PythonValueError            an argument that can be neither traced nor guarded
    │   ├── SymbolicShapeError          symbolic sizes
    │   ├── DataDependentError          Python control flow on tensor values
    │   ├── RandomOpError               random ops in a training graph
    │   ├── CapturedTensorError         a tensor from outside that is not an argument
    │   ├── EscapeError                 ``numpy()``, ``data_ptr()``, ``.data = …`` on traced tensors
    │   ├── LeakedTensorError           a traced tensor stored in an object of the caller's
    │   ├── HigherOrderOpError          higher-order ops and effects without a rule
    │   ├── UntraceableError            tracing raised something that eager does not
    │   ├── HooksError                  tensor hooks that the compiled call could not run
    │   ├── OutputError                 an output that the epilogue cannot give back faithfully
    │   ├── PartialBackwardError        a backward that needs values which were not saved
    │   ├── TransformError              called under ``torch.func`` transforms or forward-mode AD
    │   ├── DeviceError                 a device that is not there, a tensor on another one than asked for
    │   └── DoubleBackwardError         a derivative of a compiled backward
    ├── GraphInvariantError     a graph between two stages is not what it must be: a bug of ours
    └── RecompileLimitError     raised in place of the warning under ``config.fallback = "error"``
"""

from __future__ import annotations

import re
from dataclasses import dataclass

#: What a function that `aotlab.compile` traces directly may not do, and a whole program may.
BY_DYNAMO = 'take frontend="dynamo", which runs such a line as plain Python'
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
    """Name an error of torch's by its class and what a user can use of its text.

    Examples
    --------
    >>> brief(RuntimeError('n > 0 INTERNAL ASSERT FAILED at "x.cpp":3, please report a bug to PyTorch. Too small'))
    'RuntimeError: a check inside torch failed (Too small)'
    """
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
    kept = []
    for sentence in re.split(r"(?<=[.!?])\s+", line):
        if _NOT_FOR_USERS.search(sentence):
            break
        kept.append(sentence)
    line = " ".join(kept)
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"


class AotlabError(Exception):
    """Base class of everything that aotlab itself raises."""


class UsageError(AotlabError, TypeError):
    """A public function was called in a way that can never work."""


class RefusedError(AotlabError):
    """A program that aotlab cannot compile faithfully, refused before any side effect.

    Parameters
    ----------
    seen
        What was found, as a clause without a final stop.
    why
        Why it matters, as a clause.
    suggestion
        What the caller can do about it.
    argument
        The name of the argument concerned, for example ``"x"`` or ``"args[0]['w']"``.
    line
        The line of the user's program concerned.
    pattern
        Where the line is not known: what its text looks like, for whoever has the code.
    """

    def __init__(
        self,
        seen: str,
        *,
        why: str = "",
        suggestion: str = "",
        argument: str | None = None,
        line: UserLine | None = None,
        pattern: str | None = None,
    ) -> None:
        self.pattern = pattern
        self.seen = seen
        self.why = why
        self.suggestion = suggestion
        self.argument = argument
        self.line = line
        super().__init__(self._text())

    def _text(self) -> str:
        text = self.seen
        if self.line is not None:
            text += f", at {self.line}"
        if self.why:
            text += f": {self.why}"
        if self.suggestion:
            text += f"; {self.suggestion}"
        return text

    def reword(
        self,
        *,
        seen: str | None = None,
        why: str | None = None,
        suggestion: str | None = None,
        argument: str | None = None,
        line: UserLine | None = None,
    ) -> None:
        """Say it better: for whoever knows more of the program than the place that raised it."""
        self.seen = self.seen if seen is None else seen
        self.why = self.why if why is None else why
        self.suggestion = self.suggestion if suggestion is None else suggestion
        self.argument = self.argument if argument is None else argument
        self.line = self.line if line is None else line
        self.args = (self._text(),)

    @property
    def reason(self) -> str:
        """The class name without ``Error``: the key under which reports count refusals."""
        return type(self).__name__.removesuffix("Error")


class OverlappingInputsError(RefusedError):
    """Two inputs share bytes and at least one of them is mutated."""


class MetadataMutationError(RefusedError):
    """An input changes its sizes, strides or offset in place."""


class StorageMutationError(RefusedError):
    """An input is given another storage, or its storage another size."""


class SubclassError(RefusedError):
    """A tensor subclass reaches the engine."""


class UnsupportedTensorError(RefusedError):
    """A tensor of a layout or kind that functionalization cannot represent."""


class PythonValueError(RefusedError):
    """An argument that is no tensor and cannot be guarded by type and value."""


class SymbolicShapeError(RefusedError):
    """A size is symbolic or depends on data."""


class DataDependentError(RefusedError):
    """Python asked for the value of a traced tensor.

    ``of_size`` says that it is a result's size that depends on values, ``inputs`` names what these are computed from.
    """

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
