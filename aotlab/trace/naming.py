"""What the user calls a tensor, read off the running frames: for messages only.

    def f(x):
        return torch.where(x > 0, x, MODEL.bias)

Here `MODEL.bias` is the name of a tensor that is no argument, and `x > 0` has none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import Tensor, nn

from aotlab.trace.places import is_users, starts_traces


def name_of(tensor: Tensor) -> str | None:
    """Return by which name the innermost traced function of the user's knows ``tensor``, None if none does.

    Only for errors: up to Python 3.12 a frame that is asked for its variables keeps their values. So the caller of the
    compiled function is not asked.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not starts_traces(frame.f_code):
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
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in list(value.items())[:100])
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{i}]", item) for i, item in enumerate(value[:100]))
    elif isinstance(getattr(value, "__dict__", None), dict):
        yield from ((f".{key}", item) for key, item in list(vars(value).items())[:100])
