"""What is set up around the function while it is traced, and put back afterwards.

Prints and warnings are held back: eager does them where the trace is given up, a quirk in compiled calls.
"""

from __future__ import annotations

import functools
import marshal
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.errors import EscapeError, RandomOpError, RefusedError, brief
from aotlab.guards.call_state import CallState
from aotlab.guards.places import line_of_error, user_line
from aotlab.trace.recorder import Recorder
from aotlab.trace.records import TraceFailed
from aotlab.trace.tape import Untraceable


@contextmanager
def tracing(recorder: Recorder) -> Iterator[None]:
    """Let the recorder write down what is computed in a ``with`` block."""
    # a backend that decomposes random ops takes `native_dropout`, as upstream records it; it upsamples fixed sizes only
    inductors = torch.ops.aten.native_dropout.default in recorder.decompositions
    rewritten = ["dropout"] if inductors else []
    if recorder.sizes is not None:  # eager's take them for numbers; that of matmul does in torch 2.11
        rewritten += ["matmul", "pad_sequence", "unsafe_chunk", *(["vec"] if inductors else [])]
    with (
        torch.autograd.set_multithreading_enabled(False),
        internals.quiet_fake_tensors(),
        torch.autograd.set_detect_anomaly(False),  # it looks at values
        internals.saved_tensor_hooks_hidden(),
        internals.functionalization(),
        internals.enable_python_dispatcher(),
        internals.eager_kernels(but=rewritten),
        recorder,
    ):
        yield


@contextmanager
def world_unchanged(recorder: Recorder, settings: tuple[tuple[str, Any], ...]) -> Iterator[None]:
    """Put back what the function changes besides tensors: settings and random states, and refuse the function then."""
    nesting = internals.autocast_nesting()
    random_state = random.getstate()  # torch's generator is guarded by `EscapeGuard`
    numpy = sys.modules.get("numpy")  # the engine does not need numpy; the traced function may
    numpy_state = None if numpy is None else numpy.random.get_state(legacy=False)
    try:
        yield
    finally:
        # What autocast has kept of traced tensors goes when the region ends, like all that it keeps of the caller's.
        # But a checkpoint, which runs again when the backward is traced, would find it.
        if internals.any_autocast_enabled() and (recorder.has_checkpoints or not nesting):
            torch.clear_autocast_cache()
        internals.restore_autocast_nesting(nesting)
        drew = None
        numpy_now = None if numpy is None else numpy.random.get_state(legacy=False)
        if marshal.dumps(numpy_now, 2) != marshal.dumps(numpy_state, 2):  # arrays as bytes; no references in 2
            drew = "`numpy.random`"
            sys.modules["numpy"].random.set_state(numpy_state)
        if random.getstate() != random_state:
            drew = "Python's `random`"
            random.setstate(random_state)
        changed = [name for (name, was), (_, is_) in zip(settings, internals.global_state(), strict=True) if was != is_]
        if changed:
            internals.restore_settings(settings)
    if drew is not None:
        raise RandomOpError(
            f"the function draws from {drew}",
            pattern=r"(?<!torch\.)\brandom\.",
            why="the number would be the same at every call",
            suggestion="pass it as an argument, or use torch's random ops",
        )
    if changed:
        raise EscapeError(
            f"the function leaves a global setting changed: {', '.join(changed)}",
            why="a compiled call would not",
            suggestion="change it outside of the compiled function",
        )


@contextmanager
def outside_of_inference_mode(outside: CallState | None) -> Iterator[None]:
    """Let a function that enters inference mode itself begin, and end, in the state that it was called in."""
    if outside is None:
        yield
        return
    grad_mode = dict(outside.settings)["grad mode"]
    with torch.inference_mode(False), torch.set_grad_enabled(grad_mode):
        yield
        if torch.is_grad_enabled() != grad_mode:
            raise RunEagerly("it enters inference mode, and leaves grad mode changed")


@contextmanager
def failures_told_apart() -> Iterator[None]:
    """Turn what a traced function raises into a refusal where the reason is known, else into `TraceFailed`."""
    try:
        yield
    except (RefusedError, RunEagerly, KeyboardInterrupt):  # the last is the user's, who wants this to end
        raise
    except Untraceable as error:
        raise TraceFailed(str(error)) from error
    except BaseException as error:  # SystemExit among them: eager raises it after it did what comes before
        line = line_of_error(error)
        where = "" if line is None else f", at {line}"
        raise TraceFailed(
            f"tracing it raised {brief(error)}, which eager did not{where}; move that out, to have the rest compiled"
        ) from error


# --- clocks, prints and warnings -----------------------------------------------------------------------------------

_CLOCKS = (
    "time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time",
    "process_time_ns", "thread_time", "thread_time_ns",
)  # fmt: skip
_LIBRARIES = (sys.stdlib_module_names - {"__main__"}) | {"torch", "numpy", "aotlab"}


@functools.lru_cache(maxsize=256)
def _watched(name: str, clock: Callable[[], Any], thread: int) -> Callable[[], Any]:
    """Return what stands for a clock while a thread traces."""

    @functools.wraps(clock)
    def read() -> Any:
        module = str(sys._getframe(1).f_globals.get("__name__", ""))
        if threading.get_ident() == thread and module.split(".", 1)[0] not in _LIBRARIES:
            raise RunEagerly(
                f"it reads the clock by `time.{name}`, which is another time at each call, at {user_line()}",
                suggestion="pass the time as an argument",
            )
        return clock()

    return read


@contextmanager
def clocks_watched() -> Iterator[None]:
    """Leave it to eager, in a ``with`` block of this thread, when something else than a library reads a clock.

    Only what is called through the module `time` is noticed, not ``from time import time`` and not `datetime`.
    """
    thread, module = threading.get_ident(), vars(time)
    clocks = {name: module[name] for name in _CLOCKS if name in module}
    module.update({name: _watched(name, clock, thread) for name, clock in clocks.items()})
    try:
        yield
    finally:
        module.update(clocks)


class Printed:
    """Holds back, in ``with`` blocks, what this thread writes to standard output and error; of the last block alone."""

    def __init__(self) -> None:
        self._held: list[tuple[str, str]] = []

    def __enter__(self) -> None:
        self._held.clear()
        self._before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (_Stream(name, getattr(sys, name), self._held) for name in ("stdout", "stderr"))

    def __exit__(self, *error: object) -> None:
        sys.stdout, sys.stderr = self._before

    def release(self) -> None:
        """Write what was held back."""
        held, self._held = self._held, []
        for name, text in held:
            getattr(sys, name).write(text)


@dataclass
class _Stream:
    """Stands for one stream; other threads write through it."""

    _name: str
    _stream: Any
    _held: list[tuple[str, str]]
    _thread: int = field(default_factory=threading.get_ident)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if threading.get_ident() != self._thread:
            return int(self._stream.write(text))
        self._held.append((self._name, text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))


class Warned(NamedTuple):
    """One warning: its text or object, its place, and the module's globals."""

    message: Warning | str
    category: type[Warning]
    file: str
    line: int
    scope: dict[str, Any]


@contextmanager
def warnings_noted() -> Iterator[list[Warned]]:
    """Note, for the length of a block and in this thread, what is warned instead of letting it out."""
    noted: list[Warned] = []
    thread = threading.get_ident()

    def note(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        if threading.get_ident() != thread:
            others(message, category, filename, lineno, file, line)
        elif "Triggered internally at" not in str(message):  # a kernel's own, which warns again when it runs
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and (frame.f_code.co_filename, frame.f_lineno) != (filename, lineno):
                frame = frame.f_back
            noted.append(Warned(message, category, filename, lineno, {} if frame is None else frame.f_globals))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        others, warnings.showwarning = warnings.showwarning, note
        yield noted
