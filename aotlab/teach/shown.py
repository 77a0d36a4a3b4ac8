"""Tables as text for a terminal and as HTML for a notebook, in the colours of whatever shows them."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

#: One row of cells.
Row = Sequence[str]


class Shown:
    """What is shown: a ``title``, ``code`` as it is, a table of a ``head`` and ``rows``, and a ``note``.

    In a terminal, and wherever a notebook is shown without its front end, it is text.
    """

    title: str = ""
    code: str = ""
    head: Row = ()
    rows: Sequence[Row] = ()
    note: str = ""

    def style(self, cell: str) -> str:
        """Return the CSS of a cell, besides what all have."""
        return ""

    def __repr__(self) -> str:
        table = [self.head, *self.rows] if self.rows else []
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        return "\n".join(part for part in (self.title, self.code, *lines, self.note) if part)

    def _repr_html_(self) -> str:
        left = "text-align:left;padding-right:1em"
        head = "".join(f'<th scope="col" style="{left}">{_marked(cell)}</th>' for cell in self.head)
        rows = "".join(
            f'<tr><th scope="row" style="{left}">{_marked(row[0])}</th>'
            + "".join(f'<td style="{left};{self.style(cell)}">{_marked(cell)}</td>' for cell in row[1:])
            for row in self.rows
        )
        return (
            (f"<p>{_marked(self.title)}</p>" if self.title else "")
            + (f'<pre style="font-family:monospace">{html.escape(self.code)}</pre>' if self.code else "")
            + (f"<table><thead><tr>{head}</thead><tbody>{rows}</tbody></table>" if rows else "")
            + (f"<p>{_marked(self.note)}</p>" if self.note else "")
        )


def _marked(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
