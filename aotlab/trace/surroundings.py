"""Context managers around the traced function: they set up global state for the trace, and restore it afterwards.

Prints and warnings of the function are held back during the trace. If the call then runs eagerly, the eager run prints
and warns. In a compiled call, a quirk does so.
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
from aotlab.capture.signals import RunEagerly, TraceEnds
from aotlab.errors import EscapeError, RandomOpError, RefusedError, brief
from aotlab.guards.call_state import CallState
from aotlab.guards.user_code import line_of_error, user_line
from aotlab.trace.recorder import Recorder
from aotlab.trace.records import TraceFailed
from aotlab.trace.tape import Untraceable


@contextmanager
def tracing(recorder: Recorder) -> Iterator[None]:
    """Return a context manager in which the recorder records all ops."""
    # The names of ops that torch's Python dispatcher may rewrite. If the backend decomposes random ops (Inductor does),
    # upstream rewrites dropout to `native_dropout`, and rewrites an upsampling op if a size is symbolic.
    inductors = torch.ops.aten.native_dropout.default in recorder.decompositions
    rewritten = ["dropout"] if inductors else []
    if recorder.sizes is not None:  # the C++ code of these ops converts sizes to ints (of matmul in torch 2.11)
        rewritten += ["matmul", "pad_sequence", "unsafe_chunk", *(["vec"] if inductors else [])]
    with (
        torch.autograd.set_multithreading_enabled(False),
        internals.quiet_fake_tensors(),
        torch.autograd.set_detect_anomaly(False),  # anomaly detection reads values
        internals.saved_tensor_hooks_hidden(),
        internals.functionalization(),
        internals.enable_python_dispatcher(),
        internals.eager_kernels(but=rewritten),
        recorder,
    ):
        yield


@contextmanager
def global_state_checked(recorder: Recorder, settings: tuple[tuple[str, Any], ...]) -> Iterator[None]:
    """Return a context manager that restores global settings and the states of Python's and numpy's random generators.

    If the traced function changed a setting or drew random numbers, it raises. ``settings`` are the names and values of
    the settings at the start of the call.
    """
    nesting = internals.autocast_nesting()
    random_state = random.getstate()  # `EscapeGuard` guards torch's generators
    numpy = sys.modules.get("numpy")  # the engine does not need numpy; the traced function may
    numpy_state = None if numpy is None else numpy.random.get_state(legacy=False)
    try:
        yield
    finally:
        # Autocast caches casts of traced tensors until its outermost region ends. If the caller has an autocast region,
        # the cache is cleared when that region ends. But a checkpoint runs its function again while the backward is
        # traced, and must not get the casts from the forward.
        if internals.any_autocast_enabled() and (recorder.has_checkpoints or not nesting):
            torch.clear_autocast_cache()
        internals.restore_autocast_nesting(nesting)
        drew = None
        numpy_now = None if numpy is None else numpy.random.get_state(legacy=False)
        # The states contain arrays, so they are compared as bytes. In version 2 of marshal, equal states give equal
        # bytes.
        if marshal.dumps(numpy_now, 2) != marshal.dumps(numpy_state, 2):
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
            why="a compiled call would not repeat the change",
            suggestion="change it outside of the compiled function",
        )


@contextmanager
def outside_of_inference_mode(outside: CallState | None) -> Iterator[None]:
    """Return a context manager outside of inference mode, with the caller's grad mode.

    It is for a function that itself enters inference mode. The trace of such a function runs under inference mode, but
    the function must start in the caller's state, ``outside``. Run eagerly if the function leaves grad mode changed. If
    ``outside`` is None, the context manager does nothing.
    """
    if outside is None:
        yield
        return
    grad_mode = dict(outside.settings)["grad mode"]
    with torch.inference_mode(False), torch.set_grad_enabled(grad_mode):
        yield
        if torch.is_grad_enabled() != grad_mode:
            raise RunEagerly("inference-mode-then-grad-mode-changed")


@contextmanager
def trace_failures() -> Iterator[None]:
    """Return a context manager that replaces exceptions of the traced function, except refusals, by `TraceFailed`."""
    try:
        yield
    except (RefusedError, TraceEnds, KeyboardInterrupt):
        raise
    except Untraceable as error:
        raise TraceFailed(str(error)) from error
    except BaseException as error:  # also SystemExit: the call then runs eagerly, and raises it again
        line = line_of_error(error)
        at_line = "" if line is None else f", at {line}"
        raise TraceFailed(
            f"tracing the function raised an error that eager does not raise: {brief(error)}{at_line}; "
            "move this code out of the function"
        ) from error


# --- clocks, prints and warnings -----------------------------------------------------------------------------------

_CLOCKS = (
    "time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time",
    "process_time_ns", "thread_time", "thread_time_ns",
)  # fmt: skip
_LIBRARIES = (sys.stdlib_module_names - {"__main__"}) | {"torch", "numpy", "aotlab"}


@functools.lru_cache(maxsize=256)
def _watched_clock(name: str, clock: Callable[[], Any], thread: int) -> Callable[[], Any]:
    """Return a replacement for a clock function. If code of the user calls it in ``thread``, it raises `RunEagerly`."""

    @functools.wraps(clock)
    def read() -> Any:
        module = str(sys._getframe(1).f_globals.get("__name__", ""))
        if threading.get_ident() == thread and module.split(".", 1)[0] not in _LIBRARIES:
            raise RunEagerly("reads-the-clock", clock=f"time.{name}", at=user_line())
        return clock()

    return read


@contextmanager
def clocks_watched() -> Iterator[None]:
    """Return a context manager in which the call runs eagerly if user code reads a clock in this thread.

    Libraries may read clocks. Only calls through the module `time` are noticed: ``from time import time`` and
    `datetime` are not.
    """
    thread, module = threading.get_ident(), vars(time)
    clocks = {name: module[name] for name in _CLOCKS if name in module}
    module.update({name: _watched_clock(name, clock, thread) for name, clock in clocks.items()})
    try:
        yield
    finally:
        module.update(clocks)


class HeldOutput:
    """A context manager that holds back this thread's output to standard output and standard error.

    `release` writes the output of the last ``with`` block.
    """

    def __init__(self) -> None:
        self._held: list[tuple[str, str]] = []

    def __enter__(self) -> None:
        self._held.clear()
        self._streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (_Stream(name, getattr(sys, name), self._held) for name in ("stdout", "stderr"))

    def __exit__(self, *error: object) -> None:
        sys.stdout, sys.stderr = self._streams

    def __bool__(self) -> bool:
        """Tell whether there is output that was held back."""
        return bool(self._held)

    def release(self) -> None:
        """Write the output that was held back."""
        held, self._held = self._held, []
        for name, text in held:
            getattr(sys, name).write(text)


@dataclass
class _Stream:
    """A replacement for `sys.stdout` or `sys.stderr` that holds back the output of the thread that created it.

    Text from other threads is written at once. ``_name`` is "stdout" or "stderr", ``_stream`` is the replaced object,
    and ``_held`` collects the text that is held back, with the name.
    """

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
    """One warning: its text or object, its category, its file and line, and the globals of the module there."""

    message: Warning | str
    category: type[Warning]
    file: str
    line: int
    scope: dict[str, Any]


@contextmanager
def warnings_noted() -> Iterator[list[Warned]]:
    """Return a context manager that collects this thread's warnings in a list instead of showing them."""
    noted: list[Warned] = []
    thread = threading.get_ident()

    def note(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        if threading.get_ident() != thread:
            original_show(message, category, filename, lineno, file, line)
        elif "Triggered internally at" not in str(message):  # not from a kernel, which warns again when the graph runs
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and (frame.f_code.co_filename, frame.f_lineno) != (filename, lineno):
                frame = frame.f_back
            noted.append(Warned(message, category, filename, lineno, {} if frame is None else frame.f_globals))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        original_show, warnings.showwarning = warnings.showwarning, note
        yield noted
