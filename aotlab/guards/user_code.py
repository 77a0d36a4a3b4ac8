"""Find the position in the user's code that called an op, and the user's name for a tensor."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from aotlab.errors import CELL_FILE, UserLine
from aotlab.guards.code_names import ByCode, line_of
from aotlab.guards.leaks import items_of

_TORCH = str(Path(torch.__file__).parent)
_HERE = Path(__file__).parents[1]
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
#: The modules of aotlab whose frames are not the user's. Models for benchmarks and the demo, for example, count as the
#: user's code.
_ENGINE = (
    "_torch", "backends", "cache.py", "capture", "derivatives", "export", "frontends", "guards", "notebook",
    "partition", "pipeline.py", "quirks", "subclasses", "runtime", "trace",
)  # fmt: skip
_NOT_THE_USERS = (_TORCH, *(str(_HERE / name) for name in _ENGINE), "<frozen", "<aotlab", "<eval_with_key>")
#: The files whose functions call the user's function in a trace. Frames further out belong to the caller.
_CALLERS = tuple(str(_HERE / name) for name in ("trace/function_run.py", "trace/deriver.py", "derivatives", "runtime"))


@dataclass(slots=True, eq=False)
class CodePosition:
    """A position in running code: a code object and the offset of an instruction in it.

    The line is looked up only when it is needed, by calling the position. ``callers`` are the positions in notebook
    cells that called the code, innermost first.
    """

    code: CodeType
    instruction: int
    callers: tuple[CodePosition, ...] = ()

    def __call__(self) -> UserLine:
        """Return the line of this position."""
        lines = (line for start, end, line in self.code.co_lines() if start <= self.instruction < end)
        line = line_of(self.code, next(lines, None) or self.code.co_firstlineno)
        return replace(line, callers=tuple([each() for each in self.callers])) if self.callers else line


#: A function that returns the line of a position, for example a `CodePosition`. It returns None if the line is unknown.
Locator = Callable[[], UserLine | None]


class _Located(threading.local):
    position: Locator | None = None


_located = _Located()
_traces: ByCode[dict[int, str]] = ByCode()


def stack_trace(position: CodePosition) -> str:
    """Return a position as one frame of a traceback, in the form that fx graphs store.

    The text of each position is cached.
    """
    texts = _traces.get(position.code)
    if texts is None:
        texts = _traces.put(position.code, {})
    if position.instruction not in texts:
        line = position()
        texts[position.instruction] = f'  File "{line.file}", line {line.line}, in {line.function}\n    {line.code}'
    return texts[position.instruction]


_is_user_code: ByCode[bool] = ByCode()


def user_code_position() -> Locator | None:
    """Return the innermost running position that belongs to neither torch, the engine nor the standard library."""
    if _located.position is not None:
        return _located.position
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code):
            is_top_level = frame.f_code.co_name == "<module>"
            return CodePosition(frame.f_code, frame.f_lasti, running_cells(None if is_top_level else frame.f_back))
        frame = frame.f_back
    return None


_is_cell: ByCode[bool] = ByCode()


def running_cells(frame: FrameType | None) -> tuple[CodePosition, ...]:
    """Return the positions in notebook cells that are running in ``frame`` and its callers, innermost first.

    The search ends at a cell's top-level code (``<module>``). Frames further out belong to IPython, or to another cell
    whose magic runs this cell.
    """
    positions: list[CodePosition] = []
    if "IPython" not in sys.modules:
        return ()
    while frame is not None and not (positions and positions[-1].code.co_name == "<module>"):
        code = frame.f_code
        is_cell = _is_cell.get(code)
        if is_cell is None:
            is_cell = _is_cell.put(code, CELL_FILE.search(code.co_filename) is not None)
        if is_cell:
            positions.append(CodePosition(code, frame.f_lasti))
        frame = frame.f_back
    return tuple(positions)


def is_users(code: CodeType) -> bool:
    """Tell whether code belongs to neither torch, the engine nor the standard library."""
    is_user_code = _is_user_code.get(code)
    if is_user_code is not None:
        return is_user_code
    file = code.co_filename
    in_library = file.startswith(_STANDARD_LIBRARY) and "-packages" not in file
    return _is_user_code.put(code, not (in_library or file.startswith(_NOT_THE_USERS)))


def line_of_error(error: BaseException) -> UserLine | None:
    """Return the user's innermost line in the traceback of an error."""
    position, trace = _located.position, error.__traceback__
    if position is not None:
        return position()
    while trace is not None:
        if is_users(trace.tb_frame.f_code):
            position = CodePosition(trace.tb_frame.f_code, trace.tb_lasti)
        trace = trace.tb_next
    return None if position is None else position()


def user_line() -> UserLine | None:
    """Return the user's line that is running, for an error."""
    position = user_code_position()
    return None if position is None else position()


def set_code_position(position: Locator | None) -> None:
    """Set the position of the running op. With None, the position is searched on the stack again.

    The Dynamo frontend calls this before each node of a graph, because the node has the user's line and the stack does
    not show it.
    """
    _located.position = position


def name_of(tensor: Tensor) -> str | None:
    """Return the name of ``tensor`` in the user's innermost traced function, or None. Error messages use it."""
    # The search does not enter the caller's frames, because up to Python 3.12, reading the variables of a frame keeps
    # their values alive.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_CALLERS):
        if is_users(frame.f_code):
            names = {name: frame.f_globals[name] for name in frame.f_code.co_names if name in frame.f_globals}
            local_names = {name: value for name, value in frame.f_locals.items() if name.isidentifier()}
            for name, value in (*local_names.items(), *names.items()):
                path = next((path for path, each in _tensors(value) if each is tensor), None)
                if path is not None:
                    return f"{name}{path}"
        frame = frame.f_back
    return None


def called(tensor: Tensor, otherwise: str = "a tensor") -> str:
    """Return the user's name of a tensor in backquotes, for a message, or ``otherwise`` if it has no name."""
    name = name_of(tensor)
    return otherwise if name is None else f"`{name}`"


def _tensors(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors in a value, each with its path in the value, such as ``.weight`` or ``[0]``.

    If the value is a tensor, its path is empty.
    """
    if isinstance(value, Tensor):
        yield "", value
    elif isinstance(value, nn.Module):
        for named_tensors in (value.named_parameters, value.named_buffers):
            yield from ((f".{path}", tensor) for path, tensor in named_tensors())
    else:
        yield from islice(items_of(value), 100)
