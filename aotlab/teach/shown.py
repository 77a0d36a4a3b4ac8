"""Tables as text for a terminal and as HTML for a notebook, in the colours of whatever shows them."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

#: One row of cells.
Row = Sequence[str]


class Shown:
    """What is shown as a table: under a ``title`` a ``head`` and ``rows``, with a ``note`` below.

    In a terminal, and wherever a notebook is shown without its front end, it is text.
    """

    title: str = ""
    note: str = ""
    head: Row = ()
    rows: Sequence[Row] = ()

    def style(self, cell: str) -> str:
        """Return the CSS of a cell, besides what all have."""
        return ""

    def __repr__(self) -> str:
        table = [self.head, *self.rows] if self.rows else []
        widths = [max(len(row[column]) for row in table) for column in range(len(self.head))] if table else []
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        return "\n".join([*filter(None, [self.title]), *lines, *filter(None, [self.note])])

    def _repr_html_(self) -> str:
        head = "".join(f'<th scope="col" style="text-align:left">{_marked(cell)}</th>' for cell in self.head)
        rows = "".join(
            f'<tr><th scope="row" style="text-align:left">{_marked(row[0])}</th>'
            + "".join(f'<td style="text-align:left;{self.style(cell)}">{_marked(cell)}</td>' for cell in row[1:])
            + "</tr>"
            for row in self.rows
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>" if rows else ""
        return f"{_paragraphs(self.title)}{table}{_paragraphs(self.note)}"


def _paragraphs(text: str) -> str:
    """Program text is what has lines of its own behind an empty line and is indented; the rest is prose."""
    parts = [part for part in text.split("\n\n") if part]
    return "".join(f"<pre>{html.escape(part)}</pre>" if "\n" in part else f"<p>{_marked(part)}</p>" for part in parts)


def _marked(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text)).replace("\n", "<br>")
