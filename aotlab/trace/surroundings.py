"""What is set up around the function while it is traced, and put back afterwards."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.errors import CapturedTensorError, EscapeError, HigherOrderOpError, RandomOpError, RefusedError, brief
from aotlab.guards.settings import global_state, restore_settings
from aotlab.trace.places import line_of_error
from aotlab.trace.recorder import Recorder
from aotlab.trace.records import TraceFailed
from aotlab.trace.tape import Untraceable


@contextmanager
def tracing(recorder: Recorder) -> Iterator[None]:
    """Let the recorder write down what is computed in a ``with`` block."""
    with ExitStack() as stack:
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(internals.quiet_fake_tensors())
        stack.enter_context(torch.autograd.set_detect_anomaly(False))  # it looks at values
        stack.enter_context(internals.saved_tensor_hooks_hidden())
        stack.enter_context(internals.functionalization())
        stack.enter_context(internals.enable_python_dispatcher())
        # a backend that decomposes random ops takes `native_dropout`, as upstream records it
        inductors = torch.ops.aten.native_dropout.default in recorder.decompositions
        stack.enter_context(internals.eager_kernels(but=(torch.ops.aten.dropout.default,) if inductors else ()))
        stack.enter_context(recorder)
        yield


class WorldUnchanged:
    """Put back what the function changes besides tensors: settings and random states.

    Raises
    ------
    RandomOpError
        The function drew from Python's or numpy's generator.
    EscapeError
        It leaves a setting changed.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        self._settings = global_state()
        self._random_state = _RandomState()
        self._autocast_nesting = internals.autocast_nesting()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        # What autocast has kept of traced tensors goes when the region ends, like all that it keeps of the caller's.
        # But a checkpoint, which runs again when the backward is traced, would find it.
        if internals.any_autocast_enabled() and (self._recorder.has_checkpoints or not self._autocast_nesting):
            torch.clear_autocast_cache()
        internals.restore_autocast_nesting(self._autocast_nesting)
        drew = self._random_state.restore()
        now = global_state()
        changed = [name for (name, was), (_, is_) in zip(self._settings, now, strict=True) if was != is_]
        if changed:
            restore_settings(self._settings)
        if kind is not None:
            return
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


class _RandomState:
    """Python's and numpy's random state before a trace; torch's own generator is guarded by `EscapeGuard`."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = self._numpy_state()

    @staticmethod
    def _numpy_state() -> Any:
        numpy = sys.modules.get("numpy")  # the engine does not need numpy; the traced function may
        if numpy is None:
            return None
        state = numpy.random.get_state(legacy=False)["state"].items()
        return [(name, part.tobytes() if hasattr(part, "tobytes") else part) for name, part in state]

    def restore(self) -> str | None:
        """Put Python's state back if it changed; return which generator was drawn from."""
        drew = "`numpy.random`" if self._numpy_state() != self._numpy else None
        if random.getstate() != self._python:
            drew = "Python's `random`"
            random.setstate(self._python)
        return drew


@contextmanager
def failures_told_apart() -> Iterator[None]:
    """Turn what a traced function raises into a refusal where the reason is known, else into `TraceFailed`."""
    try:
        yield
    except (RefusedError, RunEagerly):
        raise
    except RuntimeError as error:
        line = line_of_error(error)
        if "support functionalizing operators" in str(error):
            raise HigherOrderOpError(
                f"a custom op cannot be functionalized ({str(error).splitlines()[0][:200]})",
                line=line,
                why="its write could not be taken out of the graph",
                suggestion="move it out of the compiled function",
            ) from error
        if "functional tensor" in str(error):
            raise CapturedTensorError(
                "a tensor that is not an argument is written inside the function",
                line=line,
                why="the write would happen while tracing",
                suggestion="pass it as an argument",
            ) from error
        raise TraceFailed(_raised(error)) from error
    except KeyboardInterrupt:
        raise  # the user's, who wants this to end
    except Untraceable as error:
        raise TraceFailed(str(error)) from error
    except BaseException as error:  # SystemExit among them: eager raises it after it did what comes before
        raise TraceFailed(_raised(error)) from error


def _raised(error: BaseException) -> str:
    line = line_of_error(error)
    where = "" if line is None else f", at {line}"
    return f"tracing it raised {brief(error)}, which eager did not{where}; move that out, to have the rest compiled"
