"""Sizes and numbers that vary: how a report shows them, their guards, and the reasons for recompiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import aotlab
from aotlab.report import Report
from aotlab.report.counts import summary
from aotlab.report.varying import apart, guard


def scaled(x, y, s):
    """Depend on a size and on a number."""
    return (x @ y).relu() * s


def branching(x, y, n):
    """Ask for sizes in several ways."""
    if x.shape[0] == 4:
        x = x * 2
    if y.shape[0] % 2 == 0:
        y = y + 1
    x = x.view(2, -1)
    for _ in range(n):
        x = x + 1
    return x, y


def hashing(x):
    """Use a size as a key, which a symbol cannot be."""
    return {3: 1}.get(x.shape[0], 5) * x


LINES = {text.strip(): n for n, text in enumerate(open(__file__, encoding="utf-8"), 1)}  # noqa: SIM115


def record(function: Callable[..., Any], *calls: tuple[Any, ...], **options: Any) -> Report:
    """Record calls of a newly compiled function."""
    compiled = aotlab.compile(function, backend="eager", **options)
    with Report.record() as recording:
        for call in calls:
            compiled(*call)
    return recording.report()


def x_y(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the tensors of `scaled`."""
    return torch.ones(n, 4, requires_grad=True), torch.ones(4, 6, requires_grad=True)


@pytest.fixture(scope="module")
def varied() -> Report:
    """Return the report of a function whose first argument changes its size, and then the number."""
    return record(scaled, (*x_y(3), 2), (*x_y(5), 2), (*x_y(7), 2), (*x_y(8), 3), (*x_y(9), 4))


def test_sizes_are_shown_with_their_values(varied: Report) -> None:
    """In tables and in the code of graphs, by the user's name for them."""
    shapes = {name: list(getattr(varied, name)["shape"].dropna()) for name in ("inputs", "outputs", "saved")}
    assert shapes["inputs"] == ["[3, 4]", "[4, 6]", "[x.size(0)=5, 4]", "[4, 6]", "[x.size(0)=8, 4]", "[4, 6]"]
    assert shapes["outputs"] == ["[3, 6]", "[x.size(0)=5, 6]", "[x.size(0)=8, 6]"]
    assert "[x.size(0)=8, 6]" in shapes["saved"]
    assert "[4, x.size(0)=8]" in set(varied.nodes["shape"])
    last = varied.frames[0].graphs[-1]
    code = next(stage for stage in last.stages if stage.name == "trace").codes[0].text
    assert "# size_0: s=3, size_1: x.size(0)=8\n" in code
    assert "# float32[x.size(0)=8, 6]\n" in code
    assert {stage.name for stage in last.stages if any("x.size(0)=8" in code.text for code in stage.codes)} == {
        "trace",
        "partition",
        "compile",
    }


def test_inputs_that_vary(varied: Report) -> None:
    """Sizes and numbers that the graph takes have the user's names and their values.

    The bytes belong to the recorded call.
    """
    last = varied.frames[0].graphs[-1]
    sizes = [(each.name, each.user_name, each.value) for each in last.placeholders if each.value]
    assert sizes == [("size_0", "s", "3"), ("size_1", "x.size(0)", "8")]
    assert [row.name for row in last.inputs if row.varies] == ["x", "s"]
    assert not any(row.varies for row in varied.frames[0].graphs[0].inputs)
    rows = varied.storages[varied.storages["graph"] == 2]
    assert list(zip(rows["tensor"], rows["nbytes"], rows["stop"], strict=True)) == [
        ("x", 128, 128),
        ("y", 96, 96),
        ("out", 192, 192),
    ]
    assert ("varies", "x.size(0) from 2 on and s") in [(fact.key, fact.sentence) for fact in summary(varied).facts]


def test_what_a_recompile_is_for(varied: Report) -> None:
    """The reason names the size or the number, says that all values are compiled now, and suggests a remedy."""
    size, number, _ = varied.recompiles.itertuples()
    assert (size.subject, size.before, size.after) == ("x.size(0)", "3", "5")
    assert size.reason == "`x.size(0)` is 5 where the compiled entry expects 3; compiled for all sizes of it from 2 on"
    assert "torch._dynamo.mark_dynamic(x, 0)" in size.suggestion
    assert "dynamic=True" in size.suggestion
    assert number.reason == "`s` is 3 where the compiled entry expects 2; compiled for all numbers of it"
    assert number.suggestion == "pass it as a tensor"


def test_guards_of_sizes_have_words_and_lines() -> None:
    """The report gives the cause and the line of a specialized size: a branch, a view, a loop."""
    calls = [(torch.ones(n), torch.ones(m, 2), k) for n, m, k in ((6, 8, 3), (8, 6, 3), (4, 6, 3), (10, 5, 2))]
    report = record(branching, *calls)
    rows = report.guards[report.guards["kind"] == "size"]
    found = {(g, text): line for g, text, line in zip(rows["graph"], rows["sentence"], rows["line"], strict=True)}
    assert found[1, "`x.size(0)` is not 4"] == LINES["if x.shape[0] == 4:"]
    assert found[1, "`x.size(0)` is divisible by 2"] == LINES["x = x.view(2, -1)"]
    assert found[1, "`y.size(0)` is divisible by 2"] == LINES["if y.shape[0] % 2 == 0:"]
    assert found[2, "`x.size(0)` is 4: the program fixes it"] == LINES["if x.shape[0] == 4:"]
    assert found[3, "`n` is 2: the program fixes it"] == LINES["for _ in range(n):"]
    assert found[3, "`y.size(0)` is not divisible by 2"] == LINES["if y.shape[0] % 2 == 0:"]
    assert set(rows["file"].dropna()) == {__file__}
    reasons = {(r.graph, r.earlier): (r.reason, r.line) for r in report.recompiles.itertuples()}
    line = LINES["if x.shape[0] == 4:"]
    assert reasons[2, 1] == ("the compiled entry expects `x.size(0) != 4`, which does not hold for this call", line)
    assert reasons[2, 0][0].endswith("expects 6; compiled for this one alone, since the program fixes it")
    assert reasons[2, 0][1] == line
    assert list(report.inputs[report.inputs["graph"] == 2]["shape"].dropna()) == ["[4]", "[y.size(0)=6, 2]"]


def test_a_rule_that_is_broken() -> None:
    """The suggestion speaks of values where a number decides, and of sizes where a size does."""

    def by_number(x: torch.Tensor, n: int) -> torch.Tensor:
        return x * n if n > 3 else x + n

    def by_size(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 3 else x + 1

    x = torch.ones(3)
    for function, calls, what in (
        (by_number, [(x, 4), (x, 5), (x, 2)], "values"),
        (by_size, [(torch.ones(n),) for n in (4, 5, 2)], "sizes"),
    ):
        rows = record(function, *calls).recompiles.itertuples()
        broken = [row.suggestion for row in rows if "which does not hold" in row.reason]
        assert broken == [f"keep to {what} for which the program takes one branch, or have a graph for each branch"]


def test_what_nobody_assumed_has_no_line() -> None:
    """A guard that comes from a default, or from deriving a backward, has no line."""
    report = record(scaled, (*x_y(3), 2), dynamic=True)
    rows = report.guards[report.guards["kind"] == "size"].set_index("sentence")["line"].to_dict()
    lines = {text: line for text, line in rows.items() if line == line and line is not None and str(line) != "<NA>"}
    assert lines == {"`y.size(0) == x.size(1)`": LINES["return (x @ y).relu() * s"]}
    assert "`x.size(0)` is at least 2" in rows


def test_why_a_size_does_not_vary() -> None:
    """Of a function that cannot be traced with symbols, the stage, the head and the recompile say why."""
    report = record(hashing, (torch.ones(3),), (torch.ones(4),))
    first, second = report.frames[0].graphs
    reason = (
        "tracing the function raised an error that eager does not raise: TypeError: unhashable type: non-nested SymInt"
    )
    assert first.static_since == ""
    assert second.static_since.startswith(reason)
    assert next(stage for stage in second.stages if stage.name == "trace").summary.endswith(f"alone: {reason}")
    (fact,) = [fact for fact in summary(report).facts if fact.key == "static"]
    assert fact.sentence.startswith(reason)
    assert f"test_varying.py:{LINES['return {3: 1}.get(x.shape[0], 5) * x']}" in fact.sentence
    (miss,) = second.misses
    assert miss.sentence.endswith(f"expects 3; compiled for this one alone: {reason}")
    assert miss.line is not None
    assert miss.suggestion == "move this code out of the function"


def test_a_size_that_follows_another_one(fresh_dynamo: None) -> None:
    """Behind Dynamo, a size that must equal another input's size varies with it. Guards use the user's names."""

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.pad(labels, (0, 1))[:, 1:] * logits[:, :, 0]).sum()

    compiled = torch.compile(loss, backend="aotlab", options={"compiler": "eager"})
    with Report.record() as recording:
        for n in (16, 24, 32, 1):
            compiled(torch.ones(2, n, 3), torch.ones(2, n))
    assert list(recording.calls["graph"]) == [0, 1, 1, 2]
    reasons = list(recording.recompiles["reason"])
    assert any(reason.endswith("compiled for all sizes of it that its guards allow") for reason in reasons)
    assert not any("the program fixes it" in reason or "L[" in reason or "unknown" in reason for reason in reasons)


def test_without_symbols() -> None:
    """If sizes must not vary, the reason names the size and suggests a remedy."""
    report = record(hashing, (torch.ones(3),), (torch.ones(5),), dynamic=False)
    (miss,) = report.frames[0].graphs[1].misses
    assert miss.sentence == "`x.size(0)` is 5 where the compiled entry expects 3"
    assert "dynamic=True" in miss.suggestion
    assert not report.guards["kind"].eq("size").any()


@pytest.mark.parametrize(
    ("text", "subject", "sentence"),
    [
        ("2 <= x.size(0)", "x.size(0)", "`x.size(0)` is at least 2"),
        ("2 <= x.size(0) <= 9", "x.size(0)", "`x.size(0)` is from 2 to 9"),
        ("args[0]['w'].size(1) <= 9", "args[0]['w'].size(1)", "`args[0]['w'].size(1)` is at most 9"),
        ("(x.size(0) % 2) == 0", "x.size(0)", "`x.size(0)` is divisible by 2"),
        ("((x.size(0) + y.size(0)) % 4) == 0", "x.size(0), y.size(0)", "`x.size(0) + y.size(0)` is divisible by 4"),
        ("((a + b)*(a - b) % 4) == 0", "a, b", "`(a + b)*(a - b)` is divisible by 4"),
        ("not math.isnan(s)", "s", "`s` is not nan"),
        ("x.size(0) == y.size(1)", "x.size(0), y.size(1)", "`x.size(0) == y.size(1)`"),
        ("x.size(0) == 3", "x.size(0)", "`x.size(0)` is 3: the program fixes it"),
        ("24*x.size(0) > 64", "x.size(0)", "`24*x.size(0) > 64`"),
    ],
)
def test_words(text: str, subject: str, sentence: str) -> None:
    """A guard without a special wording is shown unchanged."""
    row = guard("size", "inputs", f"`{text}`", {})
    assert (row.subject, row.sentence, row.line) == (subject, sentence, None)


def test_errors_are_taken_apart() -> None:
    """An error is split into the reason, the line and the remedy. An error of another form is shown unchanged."""
    reason, line, instead = apart("it does, at a.py:3 (f(x, y)); do not")
    assert line is not None
    assert (reason, line.file, line.line, line.code, instead) == ("it does", "a.py", 3, "f(x, y)", "do not")
    assert apart("the backend cannot") == ("the backend cannot", None, "")
