"""What is left behind by a call whose compiled forward raises: nothing, so that eager can run it from its beginning.

    def f(x, i):
        x.add_(1)
        return x[i]        # i is out of range: eager raises here, and has written x

The graph is pure, and the epilogue writes ``x`` after it. So a kernel that raises leaves ``x`` as it was, which eager
does not, and its error may be of another type and text than eager's. Both are cured by running the very call eagerly:
the generated function raises `ForwardFailed`, and whoever called it has the user's function and the arguments.
Random numbers that the graph has drawn by then are given back to their generator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aotlab.errors import AotlabError
from aotlab.ir.random_state import noted
from aotlab.runtime.draft import Draft
from aotlab.trace.live import Trace


class ForwardFailed(Exception):  # noqa: N818  # a signal to whoever called the generated function
    """A compiled forward raised ``error``; nothing that the caller can see has changed."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


def failed(error: Exception) -> Exception:
    """Return what to raise for an error of a compiled forward: itself, if it is one of ours and no kernel's."""
    return error if isinstance(error, AotlabError) else ForwardFailed(error)


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


@contextmanager
def watched(draft: Draft, lines: list[str], indent: str) -> Iterator[str]:
    """Write what surrounds the call of the compiled forward; give the indent of the lines in between.

    ``lines`` are the ones so far, and ``indent`` is theirs.
    """
    if not draft.parts.repeatable:
        yield indent
        return
    names, devices = draft.w.namespace, draft.trace.tape.draws("forward")
    names["failed"] = failed
    if devices:
        names["random_state"] = noted(devices)
        lines.append(f"{indent}put_back = random_state()")
    lines.append(f"{indent}try:")
    yield indent + "    "
    lines.append(f"{indent}except Exception as error:")
    if devices:
        lines.append(f"{indent}    put_back()")
    lines.append(f"{indent}    raise failed(error)  # eager runs the call: nothing has changed yet")
