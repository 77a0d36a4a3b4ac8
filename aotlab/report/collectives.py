"""Find the collectives of `torch.distributed` in the nodes of a graph, and add up the time that a process waited."""

from __future__ import annotations

import re
from collections.abc import Iterable

from aotlab.report.compare import PARTS
from aotlab.report.model import Collective, Node, WaitRow
from aotlab.report.text import known_size

#: Match the op of a functional collective; Dynamo and DTensor write all collectives as such ops.
_COLLECTIVE = re.compile(r"(?:torch\.ops\.)?_c10d_functional(?:_autograd)?\.(\w+)(?:\.\w+)?")


def collectives(nodes: Iterable[Node]) -> tuple[Collective, ...]:
    """Return the collectives in the nodes of a compiled entry, in order."""
    parts = {place: part for part, place in PARTS.items()}
    bytes_of: dict[tuple[str, str, str], int] = {}
    rows = []
    for node in nodes:
        place = node.stage, node.part
        bytes_of[*place, node.name] = size = 0 if node.nbytes is None else known_size(node.nbytes)
        op = _COLLECTIVE.fullmatch(node.target)
        if place in parts and op is not None and op[1] != "wait_tensor":
            input_bytes = sum(bytes_of.get((*place, name), 0) for name in node.inputs)
            rows.append(
                Collective(
                    part=parts[place], name=node.name, op=op[1],
                    input_bytes=input_bytes, output_bytes=size, line=node.line,
                )
            )  # fmt: skip
    return tuple(rows)


def waited(spans: Iterable[tuple[str, int, int]]) -> tuple[WaitRow, ...]:
    """Return the time that a process spent in the collectives of each kind.

    ``spans`` has the name, the begin and the end of each call. If several calls run at the same time, this
    time is added to the call that began first.
    """
    rows: dict[str, WaitRow] = {}
    past = 0
    for op, begin, end in sorted(spans, key=lambda span: span[1]):
        row = rows.get(op, WaitRow(op=op, count=0, duration_ns=0))
        took = max(end - max(begin, past), 0)
        rows[op] = WaitRow(op=op, count=row.count + 1, duration_ns=row.duration_ns + took)
        past = max(past, end)
    return tuple(rows.values())
