"""Numbers in words."""

from __future__ import annotations

import pytest

from aotlab.ir.specs import SymExpr
from aotlab.report.text import amount, data_size, duration, known_size, listed, places_in, sizes, why_dynamo_stopped


@pytest.mark.parametrize(
    ("ns", "expected"),
    [
        (None, "–"),
        (0, "0 ns"),
        (999, "999 ns"),
        (1_000, "1.00 µs"),
        (12_345, "12.3 µs"),
        (999_600, "1.00 ms"),
        (123_456_789, "123 ms"),
        (1_240_000_000, "1.24 s"),
        (5_000_000_000_000, "5000 s"),
    ],
)
def test_durations_have_three_digits(ns: int | None, expected: str) -> None:
    """The unit is chosen so that three digits say it."""
    assert duration(ns) == expected


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (None, "–"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (5 * 2**20, "5.00 MiB"),
        (3 * 2**30, "3.00 GiB"),
        (SymExpr(expression="4*s0"), "4*s0 B"),
        (SymExpr(expression="1024*s0", hint=2048), "2.00 KiB"),
    ],
)
def test_data_sizes(nbytes: int | SymExpr | None, expected: str) -> None:
    """Bytes in powers of 1024; symbolic sizes as they were in the traced call."""
    assert data_size(nbytes) == expected


def test_amounts_and_lists() -> None:
    """One and many, and lists that end in a count."""
    assert [amount(n, "graph") for n in (0, 1, 2000)] == ["0 graphs", "1 graph", "2,000 graphs"]
    assert [listed(list("abcd"[:n])) for n in range(5)] == ["", "a", "a and b", "a, b and c", "a, b, c and d"]
    assert listed(list("abcd"), 2) == "a, b and 2 more"
    assert (sizes((2, SymExpr(expression="s0"))), sizes(()), sizes(None)) == ("[2, s0]", "[]", "")
    assert [known_size(s) for s in (3, SymExpr(expression="s0", hint=5), SymExpr(expression="u0"))] == [3, 5, 0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "using torch.f with a=False\n  Explanation: Attempted to call torch.f with a config set: a=False.\n",
            "Attempted to call torch.f with a config set: a=False",
        ),
        ("a thing\n  Explanation: it is not known how\n", "a thing: it is not known how"),
        (
            "Unsupported function call (delayed)\n  Explanation: Dynamo determined that a graph break should occur "
            "when calling `L['t'].unsqueeze_`. Reason: An inplace view is not supported.\n",
            "`t.unsqueeze_` is called: An inplace view is not supported",
        ),
    ],
)
def test_a_break_says_nothing_twice(text: str, expected: str) -> None:
    """If a headline and an explanation say the same, only the longer explanation is shown."""
    assert why_dynamo_stopped(text) == expected


def test_lines_of_cells_are_named_within_a_text() -> None:
    """A file that IPython made up is a cell; another is left."""
    text = "it stops, at <ipython-input-3-8d36eaed0f38>:2 (x.t()); and at /tmp/ipykernel_12/345.py:7, not at model.py:3"
    assert places_in(text) == "it stops, at In [3], line 2 (x.t()); and at notebook cell, line 7, not at model.py:3"
