"""The tables: columns and dtypes as promised, empty or not, and the story's truth in them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from aotlab.report import COLUMNS, Report
from aotlab.report.model import (
    AppliedChoice,
    Collective,
    EngineRow,
    GraphBreakRow,
    RankRow,
    RunRow,
    TimelineRow,
    WaitRow,
)
from aotlab.report.views import Views


def full(report: Report) -> Report:
    """Add rows to the tables that others fill."""
    timing = {"engine": "eager", "phase": "forward", "median_ns": 5, "min_ns": 4, "p10_ns": 4, "p90_ns": 7}
    report = report.with_timings([{**timing, "repeats": 30}])
    row = EngineRow(frame="step", graph=0, fact="output", subject="y", aotlab="a view", upstream="a copy", same=False)
    frame = report.frames[0]
    applied = AppliedChoice(frame=frame.name, graph=frame.graphs[0].index, partitioner="min-cut", budget=0.5)
    collective = Collective(part="forward graph", name="sum", op="all_reduce", input_bytes=4, output_bytes=4)
    graphs = (replace(frame.graphs[0], collectives=(collective,)), *frame.graphs[1:])
    report = replace(report, applied_rows=(applied,), frames=(replace(frame, graphs=graphs), *report.frames[1:]))
    report = replace(
        report,
        engine_rows=(row,),
        run_rows=(RunRow(fact="node", subject="add", before="", after="aten.add", same=False),),
        rank_rows=(RankRow(rank=1, reference=0, fact="node", subject="add", value="aten.add"),),
        wait_rows=(WaitRow(op="all_reduce", count=2, duration_ns=5),),
        timeline_rows=(TimelineRow(phase="dynamo", start_ns=0, duration_ns=5),),
    )
    return report.with_verification([{"kind": "value", "subject": "out[0]", "equal": True}])


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_and_dtypes(report: Report, name: str) -> None:
    """Each table has exactly the documented columns and dtypes, with rows and without."""
    expected = {column: dtype for column, (dtype, _) in COLUMNS[name].items()}
    rows = getattr(full(report), name)
    empty = getattr(Report(environment=report.environment), name)
    assert {column: str(dtype) for column, dtype in rows.dtypes.items()} == expected
    assert {column: str(dtype) for column, dtype in empty.dtypes.items()} == expected
    assert list(rows.columns) == list(empty.columns) == list(expected)
    assert (len(rows) > 0, len(empty)) == (True, 0)


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_are_documented_and_keyed(name: str) -> None:
    """Each column has a meaning; tables begin with their key; nanoseconds and bytes say so."""
    columns = COLUMNS[name]
    assert all(meaning for _, meaning in columns.values())
    keys = {"ranks": ["rank", "reference"], "graph_breaks": ["frame", "reason"], "time": ["kind", "count"]}
    keys["waits"] = ["op", "count"]
    assert list(columns)[:2] == keys.get(name, ["frame", "graph"])
    assert all("ns" in columns[column][1] for column in columns if column.endswith("_ns"))
    assert all("byte" in columns[column][1] for column in columns if "bytes" in column)


def test_describe_documents_every_column_of_every_table(report: Report) -> None:
    """`describe` lists exactly the columns of the tables, and each table carries the meanings of its columns."""
    tables = {name: getattr(report, name) for name, value in vars(Views).items() if isinstance(value, property)}
    tables = {name: table for name, table in tables.items() if isinstance(table, pd.DataFrame)}
    described = report.describe()
    held = [(name, column, str(dtype)) for name, table in tables.items() for column, dtype in table.dtypes.items()]
    rows = list(described[["table", "column", "dtype"]].itertuples(index=False, name=None))
    assert sorted(rows) == sorted(held)
    assert len(set(rows)) == len(rows)
    for name, table in tables.items():
        mine = described[described.table.eq(name)]
        assert table.attrs["columns"] == dict(zip(mine.column, mine.meaning, strict=True))
    assert described.meaning.str.len().min() > 3
    for row in described.itertuples():
        for word in ("in ns", "in bytes", "in elements"):
            assert word not in row.meaning or word == f"in {row.unit}", row
        assert "bytes" not in row.column or row.unit == "bytes", row
    assert set(described.unit) == {"", "ns", "bytes", "elements", "×"}


def test_a_recording_has_every_table(recording: Any) -> None:
    """`Recording` and `Report` give the same tables."""
    for name in COLUMNS:
        pd.testing.assert_frame_equal(getattr(recording, name), getattr(recording.report(), name))
    pd.testing.assert_frame_equal(recording.describe(), recording.report().describe())


def test_inputs(report: Report) -> None:
    """The story's arguments; a Python value has no tensor's columns."""
    table = report.inputs[report.inputs.graph.eq(0) & report.inputs.frame.eq("step")]
    assert table.name.tolist() == ["weight", "x", "again", "y", "z", "scale"]
    assert table.mutated.tolist() == [False, True, True, False, False, pd.NA]
    assert table["shape"].tolist() == ["[5, 3]", "[4, 5]", "[4, 5]", "[3, 2]", "[2, 2]", pd.NA]
    assert table.byte_offset.tolist() == [0, 0, 0, 0, 8, pd.NA]
    assert table.storage.tolist() == [0, 1, 1, 2, 2, pd.NA]
    assert table.value.tolist()[-1] == "2.0"
    assert table.duplicate_of.dropna().tolist() == ["x"]
    assert table[table.name.eq("y")].overlaps.item() == "z"


def test_tables_can_be_joined(report: Report) -> None:
    """Which outputs live in a mutated input's memory is one merge."""
    step = report.inputs.query("frame == 'step' and graph == 0 and mutated")
    merged = report.outputs.merge(
        step[["frame", "graph", "storage"]].drop_duplicates(), on=["frame", "graph", "storage"]
    )
    assert merged.name.tolist() == ["out[1]"]


def test_recompiles_calls_and_refusals(report: Report) -> None:
    """The second entry has its reason; calls know their graph or that they ran eagerly; refusals their line."""
    assert report.recompiles[["frame", "graph", "status"]].values.tolist() == [["step", 1, "compiled"]]
    assert report.recompiles.reason.item() == "`x` has shape (8, 5), this entry was compiled for (4, 5)"
    assert report.calls.graph.tolist() == [0, 0, 0, 1, pd.NA]
    assert report.calls.compiled.tolist() == [True] * 4 + [False]
    assert report.calls.cold.tolist() == [True] + [False] * 4
    assert report.calls.duration_ns.tolist() == [5000] * 5
    assert report.refusals[["frame", "reason", "outcome", "line"]].values.tolist() == [
        ["dropout_net", "RandomOp", "raised", 3]
    ]


def test_kernels_guards_and_breaks(report: Report) -> None:
    """The tables of kernels, of guards and of graph breaks."""
    kernels = report.kernels[report.kernels.graph.eq(0)]
    assert kernels[["kind", "name", "language", "source"]].values.tolist() == [
        ["forward", "cpp_fused_forward", "c++", "int main() {}"],
        ["backward", "cpp_fused_backward", "c++", "int main() {}"],
    ]
    assert report.guards.sentence.tolist()[:2] == ["`x` is float32", "`again` is the same tensor as `x`"]
    assert report.graph_breaks[["frame", "reason"]].values.tolist() == [["/home/me/train.py:7", "call to print()"]]


def test_stages_are_in_order(report: Report) -> None:
    """The stages table is the pipeline, with ns and ops."""
    table = report.stages[report.stages.graph.eq(0) & report.stages.frame.eq("step")]
    assert table.stage.tolist() == [
        "capture",
        "dedupe",
        "synthetic_bases",
        "trace",
        "partition",
        "compile",
        "runtime",
    ]
    assert table.duration_ns.tolist() == [1_000_000, 10_000, 20_000, 40_000_000, 5_000_000, 900_000_000, 300_000]
    assert table.nodes.tolist() == [pd.NA, pd.NA, pd.NA, 4, 4, pd.NA, pd.NA]


def test_large_numbers_stay_exact(report: Report) -> None:
    """An integer column with gaps does not pass through floats: 2**60 + 1 stays exact."""
    rows = [GraphBreakRow(frame="f", reason="r", at_ns=2**60 + 1)]
    table = Report(environment=report.environment, graph_break_rows=tuple(rows)).graph_breaks
    assert table.at_ns.tolist() == [2**60 + 1]


def test_importing_aotlab_loads_no_pandas() -> None:
    """`aotlab.report` and pandas are imported at the first use of a report, not before."""
    code = (
        "import sys, aotlab; a = 'pandas' in sys.modules, 'aotlab.report' in sys.modules;"
        "aotlab.Report; print(a, 'pandas' in sys.modules, 'aotlab.report' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(False, False) False True"
