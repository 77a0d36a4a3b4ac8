"""Write the generated files; with ``--check``, fail if one is out of date.

- ``aotlab/report/schema/report.v1.json``: the JSON schema of a report;
- ``extension/src/model/meanings.json``: the meaning of each table's columns, for the page;
- ``extension/src/model/records.ts``: the TypeScript types and readers of the schema's records;
- ``notebooks/what_runs_eagerly.ipynb``: the catalogue of eager fallbacks.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from aotlab import fallbacks  # noqa: E402  # after the path is set
from aotlab.report import report_schema  # noqa: E402  # after the path is set
from aotlab.report.columns import meanings  # noqa: E402

INTRODUCTION = """# What runs eagerly

aotlab compiles a call only if the compiled code has exactly the effects of your Python code. In the cases below it does
not compile the call. Where Dynamo can help, Dynamo captures the parts that can be compiled. Otherwise your Python code
runs, and one warning gives the reason, the line and the id of the case. `aotlab.explain(id)` prints the case.

To get an error instead of a warning, set `aotlab.config.fallback = "error"`, or pass `fullgraph=True` to
`aotlab.compile`."""
SETUP = """import aotlab

aotlab.explain("changes-sizes-of-leaf")"""


def notebook() -> str:
    """Return the text of the notebook that lists the catalogue."""
    cells: list[dict[str, object]] = [cell("title", INTRODUCTION), cell("setup", SETUP, "code")]
    for title, rows in fallbacks.PARTS.items():
        cells.append(cell(title, f"## {title}"))
        for row in rows:
            sentence, remedy = row.sentence.format(**row.example), row.suggestion.format(**row.example)
            program = f"```python\n{row.program.strip()}\n```"
            text = f"**{row.id}**: {sentence}.\n\nTo have it compiled: {remedy}.\n\n{program}"
            cells.append(cell(f"case-{row.id}", text))
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    book = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1, ensure_ascii=False)


def cell(id: str, source: str, kind: str = "markdown") -> dict[str, object]:
    """Return a cell of a notebook; its id has the letters of ``id``."""
    name = re.sub("[^a-z]+", "-", id.lower())[:64].strip("-")
    made: dict[str, object] = {
        "cell_type": kind,
        "id": name,
        "metadata": {},
        "source": source.splitlines(keepends=True),
    }
    return made if kind == "markdown" else {**made, "execution_count": None, "outputs": []}


#: For each primitive type of the schema: the type in TypeScript, its reader, and the reader's default.
PRIMITIVES = {
    "string": ("string", "text", ""),
    "integer": ("number", "number", 0),
    "number": ("number", "number", 0),
    "boolean": ("boolean", "flag", False),
}
RECORDS = """/* eslint-disable */
/** The records of a report and their readers. `.ci/generate.py` writes this file from the JSON schema. */

import { flag, list, maybe, number, orNumber, plain, record, text } from './reading';
import type { Reader } from './reading';
"""


def records(schema: dict[str, Any]) -> str:
    """Return the text of the TypeScript module with the types and readers of the schema's records."""
    parts = [RECORDS]
    for name, definition in schema["$defs"].items():
        fields = {field: typescript(described) for field, described in definition["properties"].items()}
        types = "".join(f"  readonly {field}: {type_};\n" for field, (type_, _) in fields.items())
        readers = ",\n".join(f"  {field}: {reader}" for field, (_, reader) in fields.items())
        parts.append(f"export type {name} = {{\n{types}}};\n")
        parts.append(f"export const read{name}: Reader<{name}> = record(() => ({{\n{readers}\n}}));\n")
    return "\n".join(parts).rstrip("\n")


def typescript(described: dict[str, Any]) -> tuple[str, str]:
    """Return the TypeScript type of a described value, and the expression that makes its reader."""
    if "$ref" in described:
        name = described["$ref"].rpartition("/")[2]
        return name, f"read{name}"
    kind = described.get("type")
    if kind == "array":
        item, reader = typescript(described["items"])
        return f"ReadonlyArray<{item}>", f"list({reader})"
    if isinstance(kind, str):
        type_, reader, usual = PRIMITIVES[kind]
        default = described.get("default", usual)
        return type_, f"{reader}({'' if default == usual else json.dumps(default)})"
    choices = described["anyOf"] if kind is None else [{"type": each} for each in kind]
    present = [typescript(choice) for choice in choices if choice != {"type": "null"}]
    if len(present) > 2:
        return "boolean | number | string | null", "plain"
    type_, reader = present[-1]
    if len(present) == 2:  # a size: a number or an expression
        type_, reader = f"number | {type_}", f"orNumber({reader})"
    if len(present) == len(choices):
        return type_, reader
    default = described.get("default")
    return f"{type_} | null", f"maybe({reader}{'' if default is None else f', {json.dumps(default)}'})"


def main() -> int:
    """Write or check the files; return the exit status."""
    files = {
        ROOT / "aotlab/report/schema/report.v1.json": json.dumps(report_schema(), indent=2, ensure_ascii=False),
        ROOT / "extension/src/model/meanings.json": json.dumps(meanings(), indent=1, ensure_ascii=False),
        ROOT / "extension/src/model/records.ts": records(report_schema()),
        ROOT / "notebooks/what_runs_eagerly.ipynb": notebook(),
    }
    present = {path: path.read_text(encoding="utf-8").rstrip("\n") for path in files if path.exists()}
    stale = [path for path, text in files.items() if present.get(path) != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} is out of date")
        if "--check" not in sys.argv:
            path.write_text(files[path] + "\n", encoding="utf-8")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
