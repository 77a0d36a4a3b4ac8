"""Which tests run when.

``quick``, the default, has the fast tests and a sample of each family of cases. ``full`` has the other tests of CI, and
``long`` has the remaining tests. A test is in one tier: by ``pytest.mark.tier``, or by its recorded duration and its
place in its family. A family is the cases of one function. If a function has the mark ``full``, its cases are not
quick, and a sample of them is full. All other marks hold for every case.

``python -m tests.tiers REPORT.xml …`` records durations from reports that ``pytest --junitxml`` wrote.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

TIERS = ("quick", "full", "long")
RECORD = Path(__file__).with_name("durations.json")
#: A test function whose cases take longer, in seconds on average, is not quick, or not full.
SLOW = {"quick": 0.2, "full": 8.0}
#: So many cases of one function are quick, and full.
SAMPLE = {"quick": 24, "full": 60}
#: The sample of one function takes at most so many seconds.
SECONDS = {"quick": 4.0, "full": 4.0}
#: Shorter durations are not recorded.
_SHORTEST = 0.1


def choose(items: Sequence[pytest.Item], tier: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Split tests into the tests of ``tier`` and the others."""
    recorded: dict[str, float] = json.loads(RECORD.read_text())
    families: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        families[_function(item.nodeid)].append(item)
    found = {}
    for name, cases in families.items():
        seconds = recorded.get(name, _SHORTEST)
        most = {kind: max(1, min(SAMPLE[kind], int(SECONDS[kind] / seconds))) for kind in SAMPLE}
        sampled = {kind: _spread(len(cases), most[kind]) for kind in SAMPLE if seconds < SLOW[kind]}
        for number, item in enumerate(cases):
            marker, module = item.get_closest_marker("tier"), item.getparent(pytest.Module)
            of_all = module is not None and any(each.name == "tier" for each in module.own_markers)
            if marker is None or (marker.args[0] == "full" and not of_all):
                tiers = ("full",) if marker else ("quick", "full")
                found[item] = next((each for each in tiers if number in sampled.get(each, ())), "long")
            else:
                found[item] = marker.args[0]
    assert set(found.values()) <= set(TIERS)
    return [item for item in items if found[item] == tier], [item for item in items if found[item] != tier]


def _spread(count: int, most: int) -> set[int]:
    """Choose at most so many of ``count`` numbers, evenly, the first and the last among them."""
    return set(range(count)) if count <= most else {round(n * (count - 1) / max(most - 1, 1)) for n in range(most)}


def _function(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def record(reports: Sequence[str]) -> None:
    """Write the average duration of each test function that takes noticeable time."""
    cases: dict[str, list[float]] = defaultdict(list)
    for report in reports:
        for case in ET.parse(report).iter("testcase"):
            if case.find("skipped") is None:
                name = case.attrib["classname"].replace(".", "/") + ".py::" + case.attrib["name"]
                cases[_function(name)].append(float(case.attrib["time"]))
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    known |= {name: sum(times) / len(times) for name, times in cases.items()}
    kept = {name: round(seconds, 1) for name, seconds in sorted(known.items()) if seconds >= _SHORTEST}
    RECORD.write_text(json.dumps(kept, indent=0) + "\n")


if __name__ == "__main__":
    record(sys.argv[1:])
