"""Apply: a graph of a cell is compiled again with another choice of saved values, compared with eager, and measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aotlab.errors import UsageError
from aotlab.notebook import live
from aotlab.notebook.magic import parse
from aotlab.report.model import Report
from tests.notebook.plain_shells import execute, plain_shell

SETUP = """import torch
from torch import nn
_ = torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 8))
x = torch.randn(4, 8)"""
CELL = """%%aotcompile --backend eager -o report{options}
loss = net(x).square().mean()
loss.backward()"""


def shell_with(options: str = "") -> tuple[Any, live.LiveReport, Report]:
    """Run the cell in a new shell; return the shell, the live report and the report."""
    shell = plain_shell()
    execute(shell, SETUP)
    execute(shell, CELL.format(options=options))
    report = shell.user_ns["report"].report()
    cell = live.find(report.identifier)
    assert cell is not None
    return shell, cell, report


def asked(report: Report, **fields: object) -> dict[str, object]:
    """Make a page's request about the first graph."""
    return {
        "kind": "apply",
        "frame": report.frames[0].name,
        "index": 0,
        "partitioner": "min-cut",
        "budget": 0,
        **fields,
    }


def state_of(shell: Any) -> list[Any]:
    """Return everything that Apply must not change."""
    net = shell.user_ns["net"]
    grads = [each.grad.clone() for each in net.parameters()]
    return [*grads, torch.get_rng_state(), shell.user_ns["loss"].detach().clone(), *map(torch.clone, net.parameters())]


def test_apply_measures_beside_the_cells_choice() -> None:
    """The table has the measured peak and times of the choice, and the namespace stays as it was."""
    shell, cell, report = shell_with()
    before = state_of(shell)
    viewed: list[live.Message] = []
    live.watch(report.identifier, viewed.append)
    live.request_measurement(report.identifier, viewed.append, asked(report))
    assert all(map(torch.equal, before, state_of(shell)))
    assert [each["kind"] for each in viewed][-1] == "report", viewed[-1]
    assert any("comparing it with eager" in str(each.get("text")) for each in viewed)
    budgets = cell.report().budgets
    row = budgets[budgets["memory_budget"] == 0].iloc[0]
    assert row["equal"]
    assert row["forward_ns"] > 0
    assert row["backward_ns"] > 0
    # the model follows the ops that the eager backend runs
    assert abs(row["measured_peak_bytes"] - row["peak_bytes"]) <= 0.05 * row["peak_bytes"]
    (applied,) = cell.report().applied_rows
    assert applied.before is not None
    assert applied.before_backward_ns is not None
    assert applied.curve is not None
    # the cell's own choice and its graphs stay
    assert [len(frame.graphs) for frame in cell.report().frames] == [len(frame.graphs) for frame in report.frames]


def test_a_value_is_computed_again() -> None:
    """A choice of single values has a separate row."""
    _, cell, report = shell_with(" --no-verify")
    choices = report.frames[0].graphs[0].choices
    assert choices is not None
    name = next(choices.names[n] for n in choices.rows[-1].saved if choices.nbytes[n] > 0 and choices.again[n] > 1)
    after = cell.apply(asked(report, partitioner="default", budget=None, recompute=[name]), lambda _: None)
    row = after.budgets.iloc[-1]
    assert (row["partitioner"], row["recompute"], row["equal"]) == ("default", name, True)


WRONG: tuple[tuple[str, object], ...] = (
    ("budget", 2),
    ("budget", None),
    ("partitioner", "other"),
    ("save", "x"),
    ("recompute", [3]),
    ("frame", None),
    ("index", 9),
)


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_wrong_request_is_refused(field: str, value: object) -> None:
    """A request with wrong fields is an error with a sentence."""
    _, cell, report = shell_with()
    with pytest.raises(UsageError):
        cell.apply(asked(report, **{field: value}), lambda _: None)


def test_an_interrupt_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """If Apply is interrupted, no row is added, and the namespace does not change."""
    shell, cell, report = shell_with()
    before = state_of(shell)

    def interrupt(text: str) -> None:
        if text.startswith("timing"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cell.apply(asked(report), interrupt)
    assert all(map(torch.equal, before, state_of(shell)))
    assert cell.report().applied_rows == ()


def test_the_magics_options_make_the_same_choice() -> None:
    """The options `--save` and `--recompute` reach the partitioner, and a random op is refused with the reason."""
    options = parse("--partitioner min-cut --memory-budget 0.5 --save a,b --recompute c")
    assert options is not None
    assert (options.save, options.recompute) == (("a", "b"), ("c",))
    shell, _, report = shell_with()
    choices = report.frames[0].graphs[0].choices
    assert choices is not None
    bans = {choices.names[n]: choices.ban_table[ban] for n, ban in enumerate(choices.bans) if ban >= 0}
    random = next(name for name, ban in bans.items() if "random" in ban)
    execute(shell, CELL.format(options=f" --recompute {random}"))
    assert "other random numbers" in str(shell.user_ns["report"])
