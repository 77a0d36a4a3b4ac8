"""What a drawn report says: its tabs, its tables and its storage map as plain values, and what they ought to be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
import pytest

#: The report drawn by our renderer; the static page has the same class, and no identifier.
DRAWN = ".aotlab-report[data-live]"
TABS = ("overview", "inputs", "outputs", "storages", "stages", "calls", "timing", "verification")

#: The columns that the tests compare, where a drawn table has to hold what the report's table holds.
COMPARED = {
    "inputs": (
        *("name", "kind", "shape", "dtype", "device", "requires_grad"),
        *("mutates_data", "mutates_metadata", "mutates_storage", "mutation_type", "duplicate_of", "overlaps"),
    ),
    "outputs": ("name", "shape", "dtype", "device", "output_type", "base", "views", "relation", "requires_grad"),
}

Row = dict[str, str]
#: Tables by frame and graph.
Tables = dict[str, list[Row]]
Span = dict[str, Any]


def panel(report: Any, tab: str) -> Any:
    """Click a tab of a report and return its panel."""
    report.locator(f'[role=tab][data-tab="{tab}"]').click()
    found = report.locator(f'[role=tabpanel][data-panel="{tab}"]')
    found.wait_for(state="visible")
    return found


def unfold(content: Any) -> None:
    """Open all folds in an element, those within them too; they are filled when they are first opened."""
    content.evaluate(
        """async content => {
            for (let closed; (closed = content.querySelector('details:not([open])')); ) {
                closed.open = true;
                while (closed.children.length < 2 || !closed.lastElementChild.childNodes.length) {
                    await new Promise(resolve => setTimeout(resolve));
                }
            }
        }"""
    )


def tables(report: Any, name: str, tab: str | None = None) -> Tables:
    """Read the tables ``name`` of a drawn report, keyed ``frame/graph``; the tab has the table's name or its own.

    With the inputs comes what the cell changed outside of its graphs.
    """
    found: Tables = panel(report, tab or name).evaluate(
        """(panel, name) => Object.fromEntries(
            [...panel.querySelectorAll(`table[data-table="${name}"], table[data-table=outside]`)].map(table => [
                table.dataset.table === 'outside' ? 'outside' : `${table.dataset.frame}/${table.dataset.graph}`,
                [...table.querySelectorAll('tr[data-name]')].map(row => Object.fromEntries(
                    [...row.querySelectorAll('td[data-column]')].map(cell => [cell.dataset.column, cell.textContent])
                )),
            ])
        )""",
        name,
    )
    return found


def compared(found: Tables, name: str) -> Tables:
    """Reduce drawn tables to the columns that are compared."""
    return {key: [{column: row[column] for column in COMPARED[name]} for row in rows] for key, rows in found.items()}


def expected(rows: Iterable[Mapping[str, object]], name: str) -> Tables:
    """Write rows of the report's own table as they should be drawn."""
    made: Tables = {}
    for row in rows:
        key = "outside" if row["graph"] is None else f"{row['frame']}/{row['graph']}"
        made.setdefault(key, []).append({column: in_words(row, column) for column in COMPARED[name]})
    return made


def spans(report: Any) -> list[Span]:
    """Read the storage map of a drawn report: what is written about each tensor, and where its boxes lie."""
    content = panel(report, "storages")
    unfold(content)
    found: list[Span] = content.evaluate(
        """panel => [...panel.querySelectorAll('svg[data-storage] g[data-span]')].map(group => {
            const map = group.closest('[data-graph]');
            const boxes = [...group.querySelectorAll('rect[class^="al-span-"]')];
            const percent = (box, name) => parseFloat(box.getAttribute(name));
            const places = / bytes ([\\d,]+) to ([\\d,]+)/.exec(group.querySelector('title').textContent);
            return {
                frame: map.dataset.frame,
                graph: Number(map.dataset.graph),
                storage: Number(group.closest('svg').dataset.storage),
                tensor: group.dataset.span,
                role: group.dataset.role,
                start: places && Number(places[1].replaceAll(',', '')),
                stop: places && Number(places[2].replaceAll(',', '')),
                mutated: group.dataset.mutated === 'true',
                hatched: group.querySelector('.al-hatch') !== null,
                left: Math.min(...boxes.map(box => percent(box, 'x'))),
                right: Math.max(...boxes.map(box => percent(box, 'x') + percent(box, 'width'))),
            };
        })""",
    )
    return sorted(found, key=lambda span: (span["frame"], span["graph"], span["storage"]))


def expected_spans(rows: Iterable[Mapping[str, object]]) -> list[Span]:
    """Say what the storage map has to show for a report's table of storages.

    Of a graph with many only those are drawn that several tensors share or that are written in part.
    """
    graphs: dict[object, dict[object, list[Mapping[str, object]]]] = {}
    for row in sorted(rows, key=lambda row: (row["frame"], row["graph"], row["storage"])):
        graphs.setdefault((row["frame"], row["graph"]), {}).setdefault(row["storage"], []).append(row)
    drawn: list[Mapping[str, object]] = []
    for storages in graphs.values():
        telling = [
            each for each in storages.values() if len(each) > 1 or each[0]["mutated"] or each[0]["owner"] != "input"
        ]
        if len(telling) > 8:
            telling = [
                each
                for each in telling
                if len(each) > 1 or (each[0]["mutated"] and each[0]["writes"] != each[0]["nbytes"])
            ]
        drawn += [row for each in telling for row in each]
    made: list[Span] = []
    for row in drawn:
        start, stop, nbytes = row["start"], row["stop"], row["nbytes"]
        assert isinstance(start, int)
        assert isinstance(stop, int)
        assert isinstance(nbytes, int)
        span = {name: row[name] for name in ("frame", "graph", "storage", "tensor", "role", "start", "stop", "mutated")}
        percent = 100 / max(nbytes, 1)
        made.append({
            **span,
            "hatched": row["mutated"] and (row["writes"], row["may_write"]) != (0, 0) and stop > start,
            "left": pytest.approx(start * percent, abs=0.01),
            "right": pytest.approx(stop * percent, abs=0.01),
        })  # fmt: skip
    return made


def in_words(row: Mapping[str, object], column: str) -> str:
    """Write a value of a report's table as the drawn table's cell does."""
    value = row[column]
    if value is None:
        # Of a tensor that no trace saw; an argument that is no tensor has nothing to be mutated.
        return "not known" if column.startswith("mutates_") and row["dtype"] is not None else ""
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def records(frame: Any) -> list[dict[str, object]]:
    """Turn a pandas table of a report into rows of plain values, missing ones as None."""
    return [
        {column: None if pd.isna(value) else value for column, value in row.items()}
        for row in frame.astype(object).to_dict("records")
    ]
