"""What is left behind by a call whose compiled forward raises: nothing, so that eager can run it from its beginning.

    def f(x, i):
        x.add_(1)
        return x[i]        # i is out of range: eager raises here, and has written x

The graph is pure, and the epilogue writes ``x`` after it. So a kernel that raises leaves ``x`` as it was, which eager
does not, and its error may be of another type and text than eager's. Both are cured by running the very call eagerly:
the forward raises `ForwardFailed`, and whoever called the generated function has the user's function and the arguments.
Random numbers that the graph has drawn by then are given back to their generator.
"""

from __future__ import annotations

from typing import Any

from aotlab import _torch as internals
from aotlab.backends.base import Boxed
from aotlab.errors import AotlabError
from aotlab.ir.random_state import noted
from aotlab.trace.live import Trace


class ForwardFailed(Exception):  # noqa: N818  # a signal to whoever called the generated function
    """A compiled forward raised ``error``; nothing that the caller can see has changed."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


def can_be_repeated(trace: Trace, *, writes_last: bool) -> bool:
    """Tell whether a call whose compiled forward raises can be run again from its beginning.

    ``writes_last`` says that a graph which writes inputs itself does so when nothing can raise any more.
    """
    if trace.effects.write_back and not writes_last:
        return False
    kinds = {device.type for device in trace.tape.draws("forward")}
    if not kinds:
        return True
    # to note the state of a generator takes time; where nothing is known to raise that is not spent
    operations = [o for o in trace.tape.operations if o.phase == "forward"]
    raises = any(o.may_raise_late or (o.may_raise and not o.is_random) for o in operations)
    return raises and kinds <= {"cpu", "cuda"}


def repeatable(forward: Boxed, trace: Trace) -> Boxed:
    """Make a compiled forward raise `ForwardFailed` if a kernel raises, with the generators as they were."""
    devices = trace.tape.draws("forward")
    random_state = noted(devices) if devices else None

    def call(inputs: list[Any]) -> Any:
        put_back = None if random_state is None else random_state()
        try:
            return forward(inputs)
        except AotlabError:  # ours, and no kernel's
            raise
        except Exception as error:
            if put_back is not None:
                put_back()
            raise ForwardFailed(error) from error

    return call


def without_grad(forward: Boxed) -> Boxed:
    """Make a forward run without grad mode, where that is on."""

    def call(inputs: list[Any]) -> Any:
        try:
            internals.set_grad_mode(False)  # in here, since an interrupt may come behind it
            return forward(inputs)
        finally:
            internals.set_grad_mode(True)

    return call


def without_autocast(forward: Boxed) -> Boxed:
    """Make a forward run without autocast: the graph has its casts."""

    def call(inputs: list[Any]) -> Any:
        with internals.disable_autocast():
            return forward(inputs)

    return call
