"""Reports as JSON: exact, validated, harmless."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotlab.errors import AotlabError, UsageError
from aotlab.ir.specs import SymExpr
from aotlab.report import MIME_TYPE, Cell, Report, ReportFormatError, TimingRow, VerificationRow, report_schema
from aotlab.report.codec import encode
from aotlab.report.model import Device, Environment, TensorInfo


@pytest.fixture(scope="module")
def validator() -> Any:
    """Return a validator for the schema file that is shipped."""
    text = resources.files("aotlab.report").joinpath("schema/report.v1.json").read_text(encoding="utf-8")
    schema = json.loads(text)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def filled(report: Report) -> Report:
    """Fill in what others measure."""
    timing = {"engine": "eager", "phase": "forward", "median_ns": 5, "min_ns": 4, "p10_ns": 4, "p90_ns": 7}
    report = report.with_timings([{**timing, "repeats": 30, "frame": "step", "graph": 0}])
    report = report.with_verification([{"kind": "value", "subject": "out[0]", "equal": True, "call": 1}])
    return report.with_cell(Cell(source="f(x)", execution_count=3))


def test_the_shipped_schema_is_that_of_the_model() -> None:
    """The file is ``json.dumps(report_schema(), indent=2, ensure_ascii=False)``.

    Write it again after adding a field.
    """
    text = resources.files("aotlab.report").joinpath("schema/report.v1.json").read_text(encoding="utf-8")
    assert json.loads(text) == report_schema()


def test_real_reports_fulfil_the_schema(report: Report, validator: Any) -> None:
    """A full report, one without anything, and one with fields from the future are all valid."""
    validator.validate(json.loads(filled(report).to_json()))
    validator.validate(json.loads(Report(environment=report.environment).to_json()))
    validator.validate({**filled(report).to_dict(), "memory": [1, 2]})


def test_the_schema_rejects_what_is_no_report(report: Report, validator: Any) -> None:
    """The schema is not so lenient as to be useless."""
    value = filled(report).to_dict()
    for broken in ({**value, "frames": {}}, {**value, "environment": None}, {**value, "version": "1"}, []):
        assert not validator.is_valid(broken)


def test_every_field_is_documented() -> None:
    """Each property of the schema has a description, except in the records of lower rooms."""
    definitions = report_schema()["$defs"]
    assert isinstance(definitions, dict)
    missing = [
        f"{kind}.{name}"
        for kind, definition in definitions.items()
        if kind not in ("UserLine", "SymExpr")
        for name, described in definition["properties"].items()
        if not described.get("description")
    ]
    assert missing == []


def test_round_trip(report: Report, tmp_path: Path) -> None:
    """A report that was written as text or as a file is equal after reading."""
    whole = filled(report)
    assert Report.from_json(whole.to_json()) == whole
    assert Report.from_json(whole.to_json(indent=2).encode()) == whole
    assert Report.load(whole.save(tmp_path / "r.json")) == whole


@given(text=st.text(st.characters(codec=None)), size=st.integers(), symbol=st.text())
def test_round_trip_of_any_text_and_any_number(text: str, size: int, symbol: str) -> None:
    """Names with lone surrogates, nul characters and huge sizes survive."""
    environment = Environment(aotlab=text, torch=text, python="", platform=text, devices=(Device(kind=text),))
    report = Report(environment=environment, name=text, cell=Cell(source=text), duration_ns=size)
    assert Report.from_json(report.to_json()) == report
    tensor = TensorInfo(dtype=text, device="", shape=(size, SymExpr(expression=symbol, hint=None)), stride=())
    assert json.loads(json.dumps(encode(tensor)))["shape"] == [size, {"expression": symbol, "hint": None}]


def test_unknown_fields_are_ignored_and_missing_ones_take_their_default(report: Report) -> None:
    """The schema is additive in both directions."""
    value = report.to_dict()
    newer = json.loads(json.dumps(value))
    newer["memory"] = {"peak": 1}
    newer["frames"][0]["graphs"][0]["colour"] = "red"
    assert Report.from_json(json.dumps(newer)) == report
    older = json.loads(json.dumps(value))
    del older["graph_break_rows"], older["frames"][0]["graphs"][0]["kernels"]
    read = Report.from_json(json.dumps(older))
    assert (read.graph_break_rows, read.frames[0].graphs[0].kernels) == ((), ())


def _broken(report: Report, *path: Any, value: Any = None) -> str:
    whole = json.loads(report.to_json())
    place = whole
    for step in path[:-1]:
        place = place[step]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(whole)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda r: "", "this is not an aotlab report: it is not JSON"),
        (lambda r: b"\x80\x04\x95", "this is not an aotlab report: it is not JSON"),
        (lambda r: "[" * 100_000, "this is not an aotlab report: it is not JSON"),
        (lambda r: "[1, 2]", "this is not an aotlab report: it has no fields 'version' and 'environment'"),
        (lambda r: '{"cells": [], "nbformat": 4}', "this is not an aotlab report"),
        (lambda r: _broken(r, "version", value=2), "the report has version 2; this aotlab reads version 1"),
        (lambda r: _broken(r, "version", value=True), "the report has version True"),
        (lambda r: _broken(r, "version", value="1"), "the report has version '1'"),
        (lambda r: _broken(r, "frames", value="x"), r"damaged: \$\.frames should be array, but is string"),
        (
            lambda r: _broken(r, "frames", 0, value=3),
            r"\$\.frames\[0\] should be an object \(Frame\), but is int",
        ),
        (lambda r: _broken(r, "frames", 0, "name"), r"damaged: \$\.frames\[0\] has no field 'name'"),
        (
            lambda r: _broken(r, "frames", 0, "graphs", 1, "index", value=1.5),
            r"damaged: \$\.frames\[0\]\.graphs\[1\]\.index should be integer, but is number",
        ),
        (
            lambda r: _broken(r, "frames", 0, "graphs", 0, "calls", value=True),
            r"graphs\[0\]\.calls should be integer, but is boolean",
        ),
        (
            lambda r: _broken(r, "frames", 0, "graphs", 0, "inputs", 0, "tensor", "shape", 0, value="5"),
            r"shape\[0\] should be integer or object, but is string",
        ),
        (lambda r: _broken(r, "duration_ns", value=float("nan")), "duration_ns should be integer, but is number"),
    ],
)
def test_what_is_no_report_is_refused_with_the_place(report: Report, make: Any, message: str) -> None:
    """A malformed file raises our error, which gives the reason and the place."""
    with pytest.raises(ReportFormatError, match=message) as caught:
        Report.from_json(make(report))
    assert isinstance(caught.value, AotlabError)


def test_load_names_the_file(tmp_path: Path) -> None:
    """The error says which file it was; a file that is not there is the system's error."""
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(ReportFormatError, match=r"notes\.txt: this is not an aotlab report"):
        Report.load(path)
    with pytest.raises(FileNotFoundError):
        Report.load(tmp_path / "nothing.json")


def test_loading_runs_no_code(report: Report, tmp_path: Path) -> None:
    """A pickle, and names that look like calls, are data or an error, never executed."""
    path = tmp_path / "evil.json"
    mark = tmp_path / "executed"
    path.write_bytes(b"cos\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR.")
    with pytest.raises(ReportFormatError):
        Report.load(path)
    text = f"__import__('os').system('touch {mark}')"
    loaded = Report.from_json(_broken(report, "name", value=text))
    assert (loaded.name, mark.exists()) == (text, False)


def test_records_are_frozen_and_hold_no_tensors(report: Report) -> None:
    """Nothing can be assigned, and everything in a report can be encoded as plain values."""
    with pytest.raises(FrozenInstanceError):
        report.name = "other"  # type: ignore[misc]  # that is the point
    assert hash(report) == hash(Report.from_json(report.to_json()))
    with pytest.raises(TypeError, match="a report cannot hold a complex"):
        encode((1j,))


def test_rows_come_in_three_forms(report: Report) -> None:
    """Our records, mappings, and foreign objects with the same attributes; floats of time are rounded."""

    @dataclass
    class Foreign:
        engine: str = "aotlab"
        phase: str = "forward"
        median_ns: float = 10.6
        min_ns: float = 9.0
        p10_ns: float = 9.5
        p90_ns: float = 12.0
        repeats: int = 30
        extra: str = "ignored"

    row = TimingRow(engine="aotlab", phase="forward", median_ns=11, min_ns=9, p10_ns=10, p90_ns=12, repeats=30)
    mapping = {**encode(row)}  # type: ignore[dict-item]  # a record encodes as a dict
    assert report.with_timings([row, mapping, Foreign()]).timing_rows == (row, row, row)


def test_rows_without_an_engine_take_that_of_the_call(report: Report) -> None:
    """What `aotlab.verify` compares does not name the engine; the caller does."""
    row = {"call": 1, "kind": "value", "subject": "out[0]", "expected": "1", "actual": "2", "equal": False}
    found = report.with_verification([row], engine="upstream", frame="step").verification_rows
    assert found == (
        VerificationRow(
            engine="upstream",
            frame="step",
            call=1,
            kind="value",
            subject="out[0]",
            expected="1",
            actual="2",
            equal=False,
        ),
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"engine": "eager"}, "this row cannot be added to a report: TimingRow has no field 'phase'"),
        (object(), "has no field 'engine'"),
        (
            {
                "engine": 3,
                "phase": "forward",
                "median_ns": 1,
                "min_ns": 1,
                "p10_ns": 1,
                "p90_ns": 1,
                "repeats": 1,
            },
            r"TimingRow\.engine should be string, but is integer",
        ),
    ],
)
def test_rows_that_do_not_fit_are_refused(report: Report, row: object, message: str) -> None:
    """A row without its fields is the caller's mistake, and the error says which one."""
    with pytest.raises(UsageError, match=message):
        report.with_timings([row])


def test_adding_rows_leaves_the_report_alone(report: Report) -> None:
    """Reports do not change; copies do."""
    assert filled(report) != report
    assert report.timing_rows == ()


def test_the_mime_type_names_the_version() -> None:
    """Renderers are chosen by it."""
    assert MIME_TYPE == "application/vnd.aotlab.report.v1+json"
