"""Families of programs: each does what its name says.

aotlab and the course's compiler pass all of them; wrong compilers fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import aotlab
from aotlab import teach
from aotlab.errors import UsageError
from aotlab.teach import families, steps


def in_order(family: str) -> set[str]:
    """Return the families up to this one."""
    return set(list(teach.FAMILIES)[: list(teach.FAMILIES).index(family) + 1])


@pytest.mark.parametrize("family", teach.FAMILIES)
def test_programs_do_what_the_family_says(family: str) -> None:
    """The fixed and the random programs of a family use its feature, and no feature of a later family."""
    examples = [families._example(*example) for example in families._EXAMPLES[family]]
    for program in (*examples, *families._programs(family, 10)):
        words = families._words(program)
        assert words is not None, program
        assert family in words <= in_order(family), program
    assert len(set(families._programs(family, 10))) > 5


@pytest.mark.parametrize("family", teach.FAMILIES)
def test_aotlab_passes(family: str) -> None:
    """So does eager, and the layer of the page."""
    assert teach.check_compiler(lambda function: aotlab.compile(function, backend="eager"), family, programs=5)
    assert teach.check_compiler(steps.layer()["compile"], family, programs=5)
    assert teach.check_compiler(lambda function: function, family, programs=5)


def detached(function: Callable[..., Any]) -> Callable[..., Any]:
    """Forget gradients."""
    return torch.no_grad()(function)


def on_copies(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lose writes, and identity."""
    return lambda *args: function(*(x.clone() for x in args))


def first_again(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the results of the first call for all calls."""
    kept: list[Any] = []

    def compiled(*args: Any) -> Any:
        kept.append(function(*args))
        return kept[0]

    return compiled


@pytest.mark.parametrize(
    ("compiler", "passes", "fails"),
    [
        (detached, "writes", "training"),
        (on_copies, "training", "written inputs"),
        (on_copies, "writes", "shared results"),
        (first_again, "shared inputs", "calls"),
    ],
)
def test_wrong_compilers(compiler: Callable[..., Any], passes: str, fails: str) -> None:
    """A family finds the errors that it tests, and the earlier families do not report them."""
    assert teach.check_compiler(compiler, passes, programs=5).ok
    found = teach.check_compiler(compiler, fails, programs=5)
    assert not found
    assert "this is the smallest that differs from eager: " in found.title
    assert "def program(" in found.code
    assert len(found.code.splitlines()) <= 16


def test_drawn_programs_find_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples make the check quick and its message small; it does not rest on them."""
    monkeypatch.setattr(families, "_EXAMPLES", dict.fromkeys(teach.FAMILIES, ()))
    assert not teach.check_compiler(on_copies, "written inputs", programs=5)
    assert not teach.check_compiler(detached, "training", programs=5)


def test_what_is_shown_is_a_program() -> None:
    """The shown text is a runnable program. The caller's later actions are a comment."""
    program = families._example("a = @2, 3; b = a | a = @3", "v1 = a * 2", "v1", "out[0].mul_(2)")
    text = families.text_of(program)
    assert text.splitlines()[:5] == ["# call 1", "a = torch.randn(2, 3)", "b = a", "# call 2", "a = torch.randn(3)"]
    assert text.endswith("# then the caller runs out[0].mul_(2), where out is the result")
    names: dict[str, Any] = {"torch": torch}
    exec(text, names)
    assert names["program"](torch.ones(2), None)[0].tolist() == [2.0, 2.0]


def test_no_such_family() -> None:
    """The message lists the existing families."""
    with pytest.raises(UsageError, match="there is no family 'reads'; there are pure, writes"):
        teach.check_compiler(lambda function: function, "reads")
