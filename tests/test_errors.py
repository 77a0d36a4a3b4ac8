"""The exceptions: their class tree, their attributes, and their texts."""

from __future__ import annotations

import pytest

from aotlab import errors
from aotlab.errors import AotlabError, PythonValueError, RefusedError, UsageError, UserLine

ALL = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
REFUSALS = [kind for kind in ALL if issubclass(kind, RefusedError) and kind is not RefusedError]


def test_tree():
    """Everything is an AotlabError."""
    assert all(issubclass(kind, AotlabError) for kind in ALL)
    assert issubclass(UsageError, TypeError)
    assert not issubclass(errors.GraphInvariantError, RefusedError)
    assert not issubclass(errors.RecompileLimitError, RefusedError)


@pytest.mark.parametrize("kind", REFUSALS, ids=lambda kind: kind.__name__)
def test_every_refusal_says_what_where_why_and_what_to_try(kind):
    """The text contains the fact, the line, the reason and the advice, in this order. The parts are attributes."""
    line = UserLine(file="model.py", line=7, function="f", code="x.t_()")
    error = kind("`x` is odd", why="it matters", suggestion="pass a clone", argument="x", line=line)
    case = f" [{error.case}]" if error.case else ""
    assert str(error) == f"`x` is odd, at model.py:7 (x.t_()): it matters; pass a clone{case}"
    assert (error.seen, error.why, error.suggestion) == ("`x` is odd", "it matters", "pass a clone")
    assert (error.argument, error.line) == ("x", line)
    assert kind.__doc__.rstrip().endswith(".")
    assert error.reason == kind.__name__.removesuffix("Error")


def test_parts_may_be_missing():
    """Without line, reason or advice nothing dangles."""
    assert str(RefusedError("seen")) == "seen"
    assert str(PythonValueError("seen")) == "seen [python-value]"
    assert str(PythonValueError("seen", suggestion="try")) == "seen; try [python-value]"
    assert str(PythonValueError("seen", line=UserLine(file="a.py", line=1))) == "seen, at a.py:1 [python-value]"
    assert PythonValueError("seen").argument is None


def test_reason_is_the_key_for_counting():
    """`reason` is the class name without Error."""
    assert PythonValueError("x").reason == "PythonValue"
