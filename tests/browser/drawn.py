"""The contents of a drawn report: its tabs, tables and storage map as plain values, and the expected values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
import pytest

#: The report drawn by our renderer; the static page has the same class, and no identifier.
DRAWN = ".aotlab-report[data-live]"
TABS = (
    *("overview", "inputs", "outputs", "graph", "storages", "stages", "saved", "memory", "kernels"),
    *("breaks", "calls", "timing", "verification"),
)

#: The columns that the tests compare between a drawn table and the report's table.
COMPARED = {
    "inputs": ("name", "kind", "tensor", "device", "storage", "autograd", "marks"),
    "outputs": ("name", "tensor", "device", "storage", "autograd", "relation", "marks"),
}

Row = dict[str, Any]
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
    """Open all folds in an element, including inner ones. They are filled when they are first opened."""
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
    """Read the table ``name`` of a drawn report, by graph, ``frame/graph``. ``tab`` is the tab's name, if it differs.

    Rows that group several are opened. The inputs include the cell's changes outside of its graphs.
    """
    content = panel(report, tab or name)
    closed = content.locator("button[data-group][aria-expanded=false]")
    while closed.count():
        closed.first.click()
    rows: list[Row] = content.evaluate(
        """(panel, name) => [
            ...panel.querySelectorAll(`:is(table[data-table="${name}"], table[data-table=outside]) tr[data-name]`),
        ].filter(row => !('group' in row.dataset)).map(row => ({
            of: row.closest('table').dataset.table === 'outside'
                ? 'outside' : `${row.dataset.frame}/${row.dataset.graph}`,
            ...Object.fromEntries([...row.querySelectorAll('td[data-column]')].map(
                cell => [cell.dataset.column, (cell.querySelector('[data-said]') ?? cell).textContent]
            )),
            device: row.querySelector('[data-device]')?.dataset.device ?? '',
            marks: [...row.querySelectorAll('td:is([data-column=happened], [data-column=relation]) .al-mark')]
                .map(mark => mark.textContent),
        })).map(row => ({...row, marks: row.marks.length ? row.marks : [row.happened ?? '']}))""",
        name,
    )
    found: Tables = {}
    for row in rows:
        found.setdefault(row.pop("of"), []).append(row)
    return found


def compared(found: Tables, name: str) -> Tables:
    """Reduce drawn tables to the compared columns. A column without any value was not drawn."""
    return {key: [{each: row.get(each, "") for each in COMPARED[name]} for row in rows] for key, rows in found.items()}


def expected(rows: Iterable[Mapping[str, Any]], name: str) -> Tables:
    """Write rows of the report's own table as they should be drawn."""
    made: Tables = {}
    for row in rows:
        key = "outside" if row["graph"] is None else f"{row['frame']}/{row['graph']}"
        tensor = row["dtype"] is not None
        said = {
            "name": row["name"],
            "tensor": f"{row['dtype']}{row['shape']}" if tensor else row.get("value") or row.get("raw_type") or "",
            "device": row["device"] if tensor else "",
            "storage": "" if row["storage"] is None else f"#{row['storage']:.0f}",
            "autograd": "requires grad" if row["requires_grad"] else "",
        }
        if name == "inputs":
            said |= {"kind": row["kind"], "marks": happened(row)}
            said["autograd"] += " non-leaf" if row["requires_grad"] and not row["is_leaf"] else ""
        else:
            said |= {"relation": row["relation"], "marks": [row["output_type"]]} if tensor else {"marks": [""]}
            said.setdefault("relation", "")
        made.setdefault(key, []).append(said)
    return made


def happened(row: Mapping[str, Any]) -> list[str]:
    """List in order the changes to an input that must be marked."""
    wrote = {
        "data mutated": row["mutates_data"],
        "metadata mutated": row["mutates_metadata"],
        "storage replaced": row["mutates_storage"],
    }
    marks = [mark for mark, said in wrote.items() if said]
    if row["kind"] == "new":
        marks = ["new"]
    elif marks:
        marks += ["hidden from autograd"] if row["mutation_hidden_from_autograd"] and row["requires_grad"] else []
        marks += ["under no_grad"] if row["mutation_under_no_grad"] else []
        marks += [row["mutation_type"].removeprefix("mutated ")] if row["mutation_type"] else []
        marks += row["steps"].split("; ") if row["steps"] else []
    if row["synthetic_base"] is not None:
        windows = "" if row["kind"] == "base" else "window of "
        marks.append(f"{windows}synthetic base {row['synthetic_base']:.0f}")
    marks += [f"same tensor as {row['duplicate_of']}"] if row["duplicate_of"] else []
    marks += [f"shares bytes with {row['overlaps']}"] if row["overlaps"] else []
    after = row["requires_grad_after"]
    marks += [] if after in (None, row["requires_grad"]) else [f"requires_grad becomes {after}"]
    marks += ["any number"] if row["dtype"] is None and row["varies"] else []
    return marks or ["" if row["dtype"] is None else "not traced" if row["mutates_data"] is None else "–"]


def spans(report: Any) -> list[Span]:
    """Read the storage map of a drawn report: the text about each tensor, and the positions of its boxes."""
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
    """Return the expected storage map for a report's table of storages.

    Of a graph with many storages, only those that several tensors share or that are written in part are drawn.
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
            "mutated": bool(row["mutated"]),  # not known of a graph that was not traced: nothing is hatched
            "hatched": bool(row["mutated"]) and (row["writes"], row["may_write"]) != (0, 0) and stop > start,
            "left": pytest.approx(start * percent, abs=0.01),
            "right": pytest.approx(stop * percent, abs=0.01),
        })  # fmt: skip
    return made


#: Units of time, in seconds.
_UNITS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def seconds(text: str) -> float:
    """Read a time as the page writes it."""
    number, unit = text.split()
    return float(number) * _UNITS[unit]


def totals(report: Any) -> dict[str, Any]:
    """Read every number in the texts of a drawn report: chips, tabs, facts, headings, reasons and times."""
    overview = panel(report, "overview")
    said: dict[str, Any] = report.evaluate(
        """report => {
            const all = (where, selector) => [...where.querySelectorAll(selector)];
            const facts = {};
            for (const fact of all(report, '[data-fact]')) (facts[fact.dataset.fact] ??= []).push(fact.textContent);
            const reason = line => [...line.querySelectorAll('[data-column=reason] > *')].map(each => each.textContent);
            return {
                chips: all(report, '[data-chip]:not(.al-status)').map(chip => [chip.dataset.chip, chip.textContent]),
                state: report.querySelector('.al-status').textContent,
                tabs: Object.fromEntries(all(report, '[role=tab]:has(small)')
                    .map(tab => [tab.dataset.tab, tab.querySelector('small').textContent.trim()])),
                sentence: report.querySelector('.al-sentence').textContent,
                facts,
                reasons: Object.fromEntries(all(report, 'table[data-table=cell] tr[data-line]')
                    .map(line => [line.dataset.line, reason(line).join(' ')])),
            };
        }"""
    )
    said["headings"] = {"overview": overview.locator(".al-heading").all_text_contents()}
    for tab in ("inputs", "outputs", "stages", "saved", "kernels", "breaks", "calls"):
        said["headings"][tab] = panel(report, tab).locator(".al-heading").all_text_contents()
    said["compared"] = panel(report, "verification").locator(".al-counts .al-mark").all_text_contents()
    timing = panel(report, "timing")
    took = timing.locator("table[data-table=time] td[data-column=duration_ns]").all_text_contents()
    said["times"] = [seconds(each) for each in took]
    headings = timing.locator(".al-heading").all_text_contents()
    (whole,) = [each for each in headings if each.startswith("Where the time went")]
    said["whole"] = seconds(whole.removeprefix("Where the time went ").partition(",")[0])
    return said


def beyond(report: Any) -> list[str]:
    """Return the elements that are drawn beyond the right edge of a report, and tables that need sideways scrolling."""
    found: list[str] = report.evaluate(
        """report => {
            const right = report.getBoundingClientRect().right + 1;
            const name = each => `${each.tagName} ${each.getAttribute('class')} ${each.textContent.slice(0, 40)}`;
            const shown = [...report.querySelectorAll('*')].filter(each => each.getClientRects().length);
            const hidden = each => each.matches('.al-scroll') ? each.scrollWidth - each.clientWidth : 0;
            const scrolled = shown.filter(each => hidden(each) > 1);
            const clipped = '.al-scroll, .al-scroller, .al-graph-view, .al-phase, pre, .al-aside';
            const out = shown.filter(each => !each.closest(clipped)
                && each.getBoundingClientRect().right > right);
            return [...scrolled.map(each => `scrolls by ${hidden(each)}: ${name(each)}`), ...out.map(name)];
        }"""
    )
    return found


def records(frame: Any) -> list[dict[str, object]]:
    """Turn a pandas table of a report into rows of plain values, missing ones as None."""
    return [
        {column: None if pd.isna(value) else value for column, value in row.items()}
        for row in frame.astype(object).to_dict("records")
    ]
