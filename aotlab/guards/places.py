"""Where in the user's program an op comes from, and what a tensor is called there."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from aotlab.errors import UserLine
from aotlab.guards.code import ByCode, line_of
from aotlab.guards.leaks import items_of

_TORCH = str(Path(torch.__file__).parent)
_HERE = Path(__file__).parents[1]
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
#: Everything but the programs that aotlab brings with it: models of benchmarks, the demo, verification.
_ENGINE = (
    "_torch", "backends", "cache.py", "capture", "derivatives", "export", "frontends", "guards", "notebook",
    "partition", "pipeline.py", "quirks", "subclasses", "runtime", "trace",
)  # fmt: skip
_NOT_THE_USERS = (_TORCH, *(str(_HERE / name) for name in _ENGINE), "<frozen", "<aotlab", "<eval_with_key>")
#: The files that call what is traced: the frames around them are the compiled call's.
_CALLERS = tuple(str(_HERE / name) for name in ("trace/function.py", "trace/deriver.py", "derivatives", "runtime"))


@dataclass(slots=True, eq=False)
class Place:
    """A place in running code, kept as code object and instruction, symbolised only when asked for."""

    code: CodeType
    instruction: int

    def __call__(self) -> UserLine:
        """Look the line up."""
        lines = (line for start, end, line in self.code.co_lines() if start <= self.instruction < end)
        return line_of(self.code, next(lines, None) or self.code.co_firstlineno)


#: Looks the line of a place up.
Locator = Callable[[], UserLine | None]


class _Located(threading.local):
    place: Locator | None = None


_located = _Located()
_traces: ByCode[dict[int, str]] = ByCode()


def stack_trace(place: Place) -> str:
    """Write a place as one frame of a traceback, as fx graphs carry it; each place is looked up once."""
    known = _traces.get(place.code)
    if known is None:
        known = _traces.put(place.code, {})
    if place.instruction not in known:
        line = place()
        known[place.instruction] = f'  File "{line.file}", line {line.line}, in {line.function}\n    {line.code}'
    return known[place.instruction]


_is_user_code: ByCode[bool] = ByCode()


def user_place() -> Locator | None:
    """Find the innermost running frame that belongs to neither torch, the engine nor the standard library."""
    if _located.place is not None:
        return _located.place
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code):
            return Place(frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return None


def is_users(code: CodeType) -> bool:
    """Tell whether code belongs to neither torch, the engine nor the standard library."""
    known = _is_user_code.get(code)
    if known is not None:
        return known
    file = code.co_filename
    in_library = file.startswith(_STANDARD_LIBRARY) and "-packages" not in file
    return _is_user_code.put(code, not (in_library or file.startswith(_NOT_THE_USERS)))


def line_of_error(error: BaseException) -> UserLine | None:
    """Return the innermost line of the user's that an error came through."""
    place, trace = _located.place, error.__traceback__
    if place is not None:
        return place()
    while trace is not None:
        if is_users(trace.tb_frame.f_code):
            place = Place(trace.tb_frame.f_code, trace.tb_lasti)
        trace = trace.tb_next
    return None if place is None else place()


def user_line() -> UserLine | None:
    """Return the user's line that is running, for an error."""
    place = user_place()
    return None if place is None else place()


def located(place: Locator | None) -> None:
    """Say where the running op comes from, for frontends that know better than the stack; None: ask the stack."""
    _located.place = place


def name_of(tensor: Tensor) -> str | None:
    """Return by which name the innermost traced function of the user's knows ``tensor``, if any, for errors."""
    # the caller is not asked: up to Python 3.12 a frame that is asked for its variables keeps their values
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_CALLERS):
        if is_users(frame.f_code):
            names = {name: frame.f_globals[name] for name in frame.f_code.co_names if name in frame.f_globals}
            own = {name: value for name, value in frame.f_locals.items() if name.isidentifier()}
            for name, value in (*own.items(), *names.items()):
                found = next((path for path, each in _tensors(value) if each is tensor), None)
                if found is not None:
                    return f"{name}{found}"
        frame = frame.f_back
    return None


def called(tensor: Tensor, otherwise: str = "a tensor") -> str:
    """Name a tensor for a message."""
    name = name_of(tensor)
    return otherwise if name is None else f"`{name}`"


def _tensors(value: Any) -> Iterator[tuple[str, Any]]:
    """List a value, if it is a tensor, or the tensors that it holds, with what stands behind its name."""
    if isinstance(value, Tensor):
        yield "", value
    elif isinstance(value, nn.Module):
        for each in (value.named_parameters, value.named_buffers):
            yield from ((f".{path}", tensor) for path, tensor in each())
    else:
        yield from islice(items_of(value), 100)
