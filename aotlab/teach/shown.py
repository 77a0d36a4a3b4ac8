"""Tables as text for a terminal and as HTML for a notebook, in the colours of the terminal or the notebook."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

#: The CSS of code. Without it, JupyterLab breaks a line that is too wide inside of words.
_CODE = "font-family:monospace;word-break:normal;overflow-wrap:anywhere"
#: One row of cells.
Row = Sequence[str]


class Shown:
    """An object that displays itself: a ``title``, ``code``, a table of a ``head`` and ``rows``, and a ``note``.

    A notebook displays it as HTML. A terminal displays it as text.
    """

    title: str = ""
    code: str = ""
    head: Row = ()
    rows: Sequence[Row] = ()
    note: str = ""

    def style(self, cell: str) -> str:
        """Return the CSS of a cell, in addition to the CSS that all cells have."""
        return ""

    def __repr__(self) -> str:
        table = [self.head, *self.rows] if self.rows else []
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        return "\n".join(part for part in (self.title, self.code, *lines, self.note) if part)

    def _repr_html_(self) -> str:
        left = "text-align:left;padding-right:1em"
        head = "".join(f'<th scope="col" style="{left}">{marked(cell)}</th>' for cell in self.head)
        rows = "".join(
            f'<tr><th scope="row" style="{left}">{marked(row[0])}</th>'
            + "".join(f'<td style="{left};{self.style(cell)}">{marked(cell)}</td>' for cell in row[1:])
            for row in self.rows
        )
        return (
            (f"<p>{marked(self.title)}</p>" if self.title else "")
            + (f'<pre style="{_CODE}">{html.escape(self.code)}</pre>' if self.code else "")
            + (f"<table><thead><tr>{head}</thead><tbody>{rows}</tbody></table>" if rows else "")
            + (f"<p>{marked(self.note)}</p>" if self.note else "")
        )


def marked(text: str) -> str:
    """Return text as HTML, with the words in backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
