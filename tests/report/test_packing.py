"""The compressed form of a report: it is read back without loss, and hostile data end in one error."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import pytest

from aotlab.report import MIME_TYPE, Report, ReportFormatError
from aotlab.report.mime import bundle
from aotlab.report.packing import MOST_BYTES, compressed, pack


def test_the_head_is_a_report(report: Report) -> None:
    """A reader that does not know the compression reads the verdict, and a note that there is more."""
    found: Any = bundle(report)[MIME_TYPE]
    head = Report.from_dict({name: value for name, value in found.items() if not name.startswith("gzip")})
    assert head.summary is not None
    assert (head.summary.sentence, head.identifier) == (report.verdict, report.identifier)
    assert head.frames == ()
    assert "compressed" in head.notes[0]


def test_a_report_that_is_not_compressed_is_read(report: Report) -> None:
    """A notebook of an older aotlab has the report as plain JSON."""
    for sparse in (True, False):
        assert Report.from_dict(json.loads(json.dumps(report.to_dict(sparse=sparse)))) == report
    assert Report.from_dict(pack(report.to_dict(sparse=True))) == report


def of(text: bytes) -> str:
    """Compress any text."""
    return base64.b64encode(gzip.compress(text)).decode()


BOMB = of(b" " * (MOST_BYTES + 1))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gzip": "no base64 !"}, "cannot be read"),
        ({"gzip": 5}, "cannot be read"),
        ({"gzip": base64.b64encode(b"no gzip").decode()}, "cannot be read"),
        ({"gzip": compressed({"version": 1})[:-12]}, "cannot be read"),
        ({"gzip": of(b"{")}, "cannot be read"),
        ({"gzip": of(b"[" * 100_000)}, "cannot be read"),
        ({"gzip": compressed([])}, "cannot be read"),
        ({"gzip_nodes": 7}, "cannot be read"),
        ({"gzip_nodes": [["no base64 !"]]}, "cannot be read"),
        ({"gzip_nodes": [[compressed({"name": 3})]]}, "cannot be read"),
        ({"gzip_nodes": [[compressed({"lines": [], "columns": {"line": [0]}})]]}, "cannot be read"),
        ({"gzip_nodes": [[compressed({"lines": [], "columns": {"line": [], "name": [""]}})]]}, "cannot be read"),
        (
            {"gzip_nodes": [[compressed({"lines": [], "columns": {"line": [None]}})]]},
            r"nodes\[0\] has no field 'stage'",
        ),
        ({"gzip": BOMB}, "more than 64 MB"),
        ({"gzip_nodes": [[BOMB]]}, "more than 64 MB"),
    ],
)
def test_hostile_data_are_an_error(report: Report, changes: dict[str, object], reason: str) -> None:
    """Data that are damaged, too large or of a wrong type give an error that says so, and nothing else."""
    with pytest.raises(ReportFormatError, match=reason):
        Report.from_dict({**bundle(report)[MIME_TYPE], **changes})  # type: ignore[dict-item]
