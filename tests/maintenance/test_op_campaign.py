"""``aotlab verify ops``: workers that crash or never end, the table, the JSON, Ctrl-C."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from aotlab import cli
from aotlab.maintenance.op_database import Outcome, Result, campaign


def result(name: str, outcome: Outcome, reason: str = "") -> Result:
    """Make a result with nothing remarkable but its outcome."""
    return Result(name=name, outcome=outcome, reason=reason, cases=3, compiled=2, seconds=0.5)


EQUAL = result("abs call float32", Outcome.EQUAL)
EAGERLY = result("nonzero call float32", Outcome.EAGERLY, "DataDependentError: …")


def test_a_crash_is_an_outcome(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A worker that dies is named in the table and replaced.

    The exit status reports it, and the JSON has both variants.
    """
    give = campaign._Worker.give

    def give_and_kill(worker: campaign._Worker, name: str) -> None:
        give(worker, name)
        if name == "abs call int64":
            worker.process.kill()

    monkeypatch.setattr(campaign._Worker, "give", give_and_kill)
    path = tmp_path / "ops.json"
    names = ["abs call int64", "abs out int64"]
    assert cli.main(["verify", "ops", "--only", *names, "--json", str(path)]) == cli.FAILED
    page = json.loads(path.read_text())
    assert [(row["name"], row["outcome"]) for row in page["variants"]] == [(names[0], "crashed"), (names[1], "equal")]
    assert page["complete"] is True
    assert "abs call int64: the process ended with -9" in capsys.readouterr().out


def test_a_variant_that_never_ends(monkeypatch: pytest.MonkeyPatch):
    """After its time a worker is ended and its variant counted as one that does not end."""
    monkeypatch.setattr(campaign, "HARD_SECONDS", 0.0)
    monkeypatch.setattr(campaign, "_START", 0.0)
    (only,) = campaign._results(["abs call int64"], campaign.Manner(), jobs=1)
    assert (only.name, only.outcome) == ("abs call int64", Outcome.OUT_OF_TIME)


def test_ctrl_c_keeps_what_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """An interrupted run prints its table and writes its JSON, which says that it is not complete."""

    def interrupted(*args: object):
        yield EQUAL
        raise KeyboardInterrupt

    monkeypatch.setattr(campaign, "_chosen", lambda *_: [EQUAL.name, EAGERLY.name])
    monkeypatch.setattr(campaign, "_results", interrupted)
    path, out = tmp_path / "ops.json", io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        campaign.run(sample=False, only=(), thorough=False, jobs=1, json_path=path, out=out)
    page = json.loads(path.read_text())
    assert (page["complete"], [row["name"] for row in page["variants"]]) == (False, [EQUAL.name])
    assert "1 of 2 variants" in out.getvalue()


def test_errors_sizes_and_dynamo(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The options reach the workers: errors are counted, and for all sizes or behind Dynamo it is compiled, too."""
    path = tmp_path / "ops.json"
    assert cli.main(["verify", "ops", "--errors", "--only", "addmv", "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["variants"]
    assert (row["name"], row["outcome"]) == ("addmv errors float32", "equal")
    assert f"{row['cases']} calls, of which eager refuses {row['cases'] - row['compiled']}" in capsys.readouterr().out
    assert row["cases"] > row["compiled"] > 0
    for option in ("--sizes", "--dynamo"):
        assert cli.main(["verify", "ops", option, "--only", "addmv call float32", "--json", str(path)]) == 0
        (row,) = json.loads(path.read_text())["variants"]
        assert (row["outcome"], row["compiled"] > 0) == ("equal", True)


def test_the_table_names_all_that_is_not_equal():
    """Counts by outcome first, then a line with its reason for each variant that is not equal."""
    assert campaign.table([EQUAL, EAGERLY]).splitlines() == [
        "     1  equal",
        "     1  ran eagerly",
        "",
        "ran eagerly:",
        "  nonzero call float32: DataDependentError: …",
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "no such op"], "has no operator, module or variant 'no such op'"),
        (["--jobs", "0"], "not a number of"),
        (["--errors", "--dynamo"], "exclude each other"),
        (["--sizes", "--dynamo"], "exclude each other"),
        (["--errors", "--only", "nn.Linear"], "has no operator, module or variant 'nn.Linear'"),
    ],
)
def test_wrong_usage(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    """An unknown name and a wrong number of processes give an error of one sentence."""
    try:
        status: object = cli.main(["verify", "ops", *arguments])
    except SystemExit as stop:
        status = stop.code
    assert status == cli.WRONG_USAGE
    assert says in capsys.readouterr().err


def test_status_is_that_of_the_worst(monkeypatch: pytest.MonkeyPatch):
    """An eager run is not a failure; a wrong value is."""
    wrong = result("add call float32", Outcome.DIFFERENT, "`out` is …")
    for found, status in (([EQUAL, EAGERLY], 0), ([EQUAL, wrong], 1)):
        monkeypatch.setattr(campaign, "_chosen", lambda *_, found=found: [each.name for each in found])
        monkeypatch.setattr(campaign, "_results", lambda *_, found=found: iter(found))
        out = io.StringIO()
        assert campaign.run(sample=False, only=(), thorough=False, jobs=1, json_path=None, out=out) == status
