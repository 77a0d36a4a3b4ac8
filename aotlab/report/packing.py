"""Compress the JSON of a report for a notebook or an HTML page, and decompress it.

A compressed report is a report of version 1 that has only its head: name, environment and summary. Two more fields
hold the rest. ``gzip`` is the JSON of the whole report, compressed with gzip and written in base64. ``gzip_nodes`` has
a list for each frame, with a text for each of its graphs: the nodes of the graph, compressed in the same way, or an
empty text if the nodes were left out. Nodes are stored by columns, because these become half as large as rows:
``{"lines": [{"file": …}, …], "columns": {"name": ["add", …], "line": [0, …], …}}``. The column ``line`` has positions
in ``lines``, or null.

A reader that does not know these fields shows the head, which is enough for the verdict.
"""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from aotlab.report.codec import ReportFormatError, encode
from aotlab.report.markup import clean

#: A report that is larger than this after decompression is not read. A page and Python have the same limit.
MOST_BYTES = 64 << 20

#: The fields of a report that its compressed form repeats as plain JSON.
_HEAD = ("version", "name", "identifier", "created", "duration_ns", "environment", "summary")
_HINT = "This report is compressed. A newer version of aotlab shows all of it."


def compressed(value: object) -> str:
    """Return the JSON of ``value``, compressed with gzip and written in base64. ``value`` may contain records."""
    # Level 4 takes half the time, and the result is 20 % larger.
    return base64.b64encode(gzip.compress(_json(value).encode(), compresslevel=6, mtime=0)).decode("ascii")


def _json(value: object) -> str:
    """Return the JSON of ``value``, with characters replaced that cannot be displayed or encoded."""
    write = partial(encode, sparse=True)
    return clean(json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False, default=write))


def node_columns(nodes: Sequence[Any]) -> dict[str, object]:
    """Return the nodes of a graph by columns."""
    # Two lines are equal even if other lines of cells called them, so the callers are a part of the key.
    keys = [None if node.line is None else (node.line, node.line.callers) for node in nodes]
    positions = {key: position for position, key in enumerate(dict.fromkeys(filter(None, keys)))}
    names = [field.name for field in fields(nodes[0]) if field.name != "line"] if nodes else []
    columns: dict[str, list[object]] = {name: [getattr(node, name) for node in nodes] for name in names}
    columns["line"] = [None if key is None else positions[key] for key in keys]
    return {"lines": [line for line, _ in positions], "columns": columns}


def node_rows(value: Mapping[str, Any]) -> list[dict[str, object]]:
    """Return the JSON of nodes that are stored by columns. Raises ValueError if a column is too short."""
    lines, columns = value["lines"], value["columns"]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return [{**row, "line": None if row["line"] is None else lines[row["line"]]} for row in rows]


def pack(whole: Mapping[str, Any], nodes: Sequence[Sequence[str]] = ()) -> dict[str, object]:
    """Return the compressed form of a report.

    Parameters
    ----------
    whole
        The report, as `Report.to_dict` returns it.
    nodes
        The field ``gzip_nodes``.
    """
    head: dict[str, object] = {name: whole[name] for name in _HEAD if name in whole}
    if cell := whole.get("cell"):
        head["cell"] = {
            "source": "",
            **{name: cell[name] for name in ("identifier", "execution_count") if name in cell},
        }
    return {**json.loads(_json(head)), "notes": [_HINT], "gzip": compressed(whole), "gzip_nodes": nodes}


def unpack(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the JSON of a report that `pack` compressed, with the nodes in its graphs.

    A report that is not compressed is returned unchanged.

    Raises
    ------
    ReportFormatError
        The compressed data cannot be read, or there are more than `MOST_BYTES` of them.
    """
    if "gzip" not in value:
        return value
    left = MOST_BYTES

    def read(text: object) -> Any:
        nonlocal left
        expander = zlib.decompressobj(wbits=31)  # 31: the format of gzip
        data = expander.decompress(base64.b64decode(text, validate=True), left + 1)  # type: ignore[arg-type]
        left -= len(data)
        if left < 0:
            raise ReportFormatError(f"the report has more than {MOST_BYTES >> 20} MB of data, and is not read")
        if not expander.eof:
            raise ValueError("the data end too early")
        return json.loads(data)

    try:
        whole = read(value["gzip"])
        for frame, texts in zip(whole.get("frames", ()), value.get("gzip_nodes", ()), strict=False):
            for graph, text in zip(frame.get("graphs", ()), texts, strict=False):
                if text:
                    graph["nodes"] = node_rows(read(text))
    except (ValueError, TypeError, AttributeError, LookupError, zlib.error, RecursionError) as error:
        if isinstance(error, ReportFormatError):
            raise
        raise ReportFormatError(f"the report is damaged: its compressed data cannot be read ({error})") from None
    return {**whole, "version": value["version"]}
