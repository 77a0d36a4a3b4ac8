"""Tracebacks as eager would have them: the user's frames, without those of the compilers between them."""

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
    """Take the compilers' frames out of the tracebacks of ``error`` and of what led to it.

    An interrupt that met the compilers, or what they compiled, is shown as one line.

    Parameters
    ----------
    error
        What came out of a cell.
    cell_file
        The file name of the cell's code; frames before its first one are left out. None: no frame before the
        compilers' is.
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
    """Tell whether the innermost of the user's frames has called a compiler, or compiled code."""
    files = [each.tb_frame.f_code.co_filename for each in walk(error.__traceback__)]
    while files and files[-1] in (_HANDLER, signal.__file__):  # what the interrupt itself called
        files.pop()
    users = [not file.startswith((*_INSTALLED, _OURS, "<frozen", "<aotlab", "<eval_with_key>")) for file in files]
    after = files[len(users) - users[::-1].index(True) :] if any(users) else []
    return any(file.startswith((*_COMPILERS, "<aotlab")) for file in after)


def line_in(error: BaseException, cell_file: str | None) -> int | None:
    """Return the line of a cell, or of a part that was cut out of it, that an error came through."""
    frames = [(each.tb_frame.f_code, each.tb_lineno) for each in walk(error.__traceback__)]
    lines = [line for code, line in frames if code.co_filename == cell_file and code.co_name == "<module>"]
    return max(lines, default=None)  # a part that has not begun stands at the first line


def walk(traceback: types.TracebackType | None) -> Iterator[types.TracebackType]:
    """Go through a traceback, outermost frame first."""
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _frames(traceback: types.TracebackType | None, cell_file: str | None) -> list[types.TracebackType]:
    every = list(walk(traceback))
    first = next((i for i, each in enumerate(every) if each.tb_frame.f_code.co_filename == cell_file), 0)
    kept: list[types.TracebackType] = []
    in_backward = False
    for each in every[first:]:
        code = each.tb_frame.f_code
        if in_backward and code.co_filename.startswith((_TORCH, _OURS, "<aotlab")):
            continue
        if code.co_filename.startswith((_OURS, "<aotlab")) and kept and _is(kept[-1], "autograd/function.py"):
            # Our backward, called by autograd's engine: in eager the engine's own call is the last frame.
            del kept[-1]
            in_backward = True
            continue
        if code.co_filename.startswith((*_MACHINERY, "<aotlab")) or code.co_filename.startswith("<eval_with_key>"):
            continue
        above = kept[-1].tb_frame.f_code if kept else None
        if code.co_name.startswith(RESUME_PREFIX) and above is not None and above.co_filename == code.co_filename:
            # the second half of a frame: the line at which it was cut is no call of the user's
            kept[-1] = each
        elif above is not None and above.co_filename == code.co_filename == cell_file and _is_part(above, code):
            kept[-1] = each
        else:
            kept.append(each)
    return kept


def _is(traceback: types.TracebackType, name: str) -> bool:
    return traceback.tb_frame.f_code.co_filename == str(Path(_TORCH) / name)


def _is_part(outer: types.CodeType, inner: types.CodeType) -> bool:
    """Tell whether the cell's code calls a part of itself, which was taken out of it to be compiled."""
    return outer.co_name == inner.co_name == "<module>"


def _chain(frames: list[types.TracebackType]) -> types.TracebackType | None:
    result: types.TracebackType | None = None
    for each in reversed(frames):
        result = types.TracebackType(result, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return result
