"""Make tracebacks look as in eager: remove the frames of the compilers, which are between the user's frames."""

from __future__ import annotations

import signal
import types
from collections.abc import Iterator
from pathlib import Path

import torch

from aotlab._torch import RESUME_PREFIX, compiling

_OURS = str(Path(__file__).resolve().parent.parent)
_TORCH = str(Path(torch.__file__).resolve().parent)
_INSTALLED = (str(Path(_TORCH).parent), str(Path(types.__file__).parent))
_MACHINERY = (
    _OURS,
    str(Path(_TORCH) / "_dynamo"),
    str(Path(_TORCH) / "_functorch"),
    str(Path(_TORCH) / "fx"),
    str(Path(_TORCH) / "_compile.py"),
)
_HANDLER = compiling.__file__
_COMPILERS = (*_MACHINERY, str(Path(_TORCH) / "_inductor"))


def cleaned(error: BaseException, cell_file: str | None = None) -> None:
    """Remove the compilers' frames from the tracebacks of ``error`` and of its causes and contexts.

    If the error is an interrupt during compilation, or in compiled code, IPython shows one line instead of a traceback.

    Parameters
    ----------
    error
        The exception that a cell raised.
    cell_file
        The file name of the cell's code. Frames above the first frame of this file are removed. If it is None, only the
        compilers' frames are removed.
    """
    if isinstance(error, KeyboardInterrupt) and _in_machinery(error):
        line = line_in(error, cell_file)
        at = f", at line {line}" if line is not None else ""
        told = f"KeyboardInterrupt: while aotlab compiled, or compiled code ran{at}"
        error._render_traceback_ = lambda: [told]  # type: ignore[attr-defined]  # IPython's convention
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = _chain(_frames(each.__traceback__, cell_file))
        pending += [each.__cause__, each.__context__]


def _in_machinery(error: BaseException) -> bool:
    """Tell whether the innermost of the user's frames had called a compiler, or compiled code, when ``error`` came."""
    files = [each.tb_frame.f_code.co_filename for each in walk(error.__traceback__)]
    while files and files[-1] in (_HANDLER, signal.__file__):  # frames of the interrupt's handler
        files.pop()
    users = [not file.startswith((*_INSTALLED, _OURS, "<frozen", "<aotlab", "<eval_with_key>")) for file in files]
    after = files[len(users) - users[::-1].index(True) :] if any(users) else []
    return any(file.startswith((*_COMPILERS, "<aotlab")) for file in after)


def line_in(error: BaseException, cell_file: str | None) -> int | None:
    """Return the line of a cell that an error passed through, or None if it passed through no line of the cell."""
    frames = [(each.tb_frame.f_code, each.tb_lineno) for each in walk(error.__traceback__)]
    lines = [line for code, line in frames if code.co_filename == cell_file and code.co_name == "<module>"]
    return max(lines, default=None)  # the frame of a region that has not begun is at line 1, which is not its own line


def walk(traceback: types.TracebackType | None) -> Iterator[types.TracebackType]:
    """Yield the entries of a traceback, outermost frame first."""
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _frames(traceback: types.TracebackType | None, cell_file: str | None) -> list[types.TracebackType]:
    every = list(walk(traceback))
    first = next((i for i, each in enumerate(every) if each.tb_frame.f_code.co_filename == cell_file), 0)
    entries: list[types.TracebackType] = []
    in_backward = False
    for each in every[first:]:
        code = each.tb_frame.f_code
        if in_backward and code.co_filename.startswith((_TORCH, _OURS, "<aotlab")):
            continue
        if code.co_filename.startswith((_OURS, "<aotlab")) and entries and _is(entries[-1], "autograd/function.py"):
            # This frame and the last entry are our backward, which autograd's engine calls. In eager, the call of the
            # engine is the last frame of the traceback. So both frames, and the frames that they call, are removed.
            del entries[-1]
            in_backward = True
            continue
        if code.co_filename.startswith((*_MACHINERY, "<aotlab")) or code.co_filename.startswith("<eval_with_key>"):
            continue
        above = entries[-1].tb_frame.f_code if entries else None
        if code.co_name.startswith(RESUME_PREFIX) and above is not None and above.co_filename == code.co_filename:
            # This frame resumes the user's function after a graph break. In eager there is one frame for the function,
            # with the line of this frame.
            entries[-1] = each
        elif above is not None and above.co_filename == code.co_filename == cell_file and _is_part(above, code):
            entries[-1] = each
        else:
            entries.append(each)
    return entries


def _is(traceback: types.TracebackType, name: str) -> bool:
    return traceback.tb_frame.f_code.co_filename == str(Path(_TORCH) / name)


def _is_part(outer: types.CodeType, inner: types.CodeType) -> bool:
    """Tell whether ``outer`` is the code of a cell and ``inner`` a region of it. In eager, they are one frame."""
    return outer.co_name == inner.co_name == "<module>"


def _chain(frames: list[types.TracebackType]) -> types.TracebackType | None:
    result: types.TracebackType | None = None
    for each in reversed(frames):
        result = types.TracebackType(result, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return result
