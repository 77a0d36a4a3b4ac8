"""Build the small elements of the HTML summary: titles, folds, tables, marks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aotlab.ir.specs import SymExpr
from aotlab.report.markup import Child, Markup, element, escape, join
from aotlab.report.model import PLAIN_TYPES, TensorInfo
from aotlab.report.text import sizes


def words(text: str) -> Markup:
    """Convert a sentence to HTML; text in backticks becomes code."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:
        return escape(text)
    return join(*[element("code", piece) if index % 2 else piece for index, piece in enumerate(pieces)])


def heading(title: str, about: str = "") -> Markup:
    """Write a section's title, with a few words about it."""
    return element("h3", f"{title} ", element("small", about) if about else None)


def fold(title: Child, about: str, content: Markup, *, opened: bool = False) -> Markup:
    """Write an element that shows ``content`` when the reader clicks its title.

    ``about`` is a remark after the title. If ``opened`` is true, the content is visible at first.
    """
    summary = element("summary", title, " ", element("small", about) if about else None)
    return element("details", summary, content, open="" if opened else None)


def grid(columns: Sequence[str], rows: Iterable[Sequence[Markup]]) -> Markup:
    """Write a table with the titles ``columns``; each row is a sequence of cells that `cell` wrote."""
    head = [element("th", title) for title in columns]
    body = [element("tr", *row) for row in rows]
    return element("table", element("thead", element("tr", *head)), element("tbody", *body))


def cell(*children: Child) -> Markup:
    """Write a cell of a table."""
    return element("td", *children)


def mark(text: str) -> Markup:
    """Write words in bold, so that the reader sees them first."""
    # The space separates marks that follow each other.
    return join(element("b", text), " ")


def tensor_cell(tensor: TensorInfo) -> Markup:
    """Write a tensor's dtype and shape, and everything about it that is unusual."""
    layout = _layout(tensor)
    return join(element("code", str(tensor)), f" {layout}" if layout else None)


def _layout(tensor: TensorInfo) -> str:
    """Return the unusual properties of a tensor: non-contiguous strides, an offset, another layout, device or type."""
    parts = []
    if tensor.layout != "strided":
        parts.append(tensor.layout)
    elif not _contiguous(tensor):
        parts.append(f"stride {sizes(tensor.stride)}")
    if tensor.offset != 0:
        parts.append(f"offset {tensor.offset}")
    if not tensor.device.startswith("cpu"):
        parts.append(tensor.device)
    if tensor.type_name not in PLAIN_TYPES:
        parts.append(tensor.type_name)
    return ", ".join(parts)


def _contiguous(tensor: TensorInfo) -> bool:
    expected: int = 1
    for size, step in zip(reversed(tensor.shape), reversed(tensor.stride), strict=False):
        if isinstance(size, SymExpr) or isinstance(step, SymExpr):
            return False
        if size != 1 and step != expected:
            return False
        expected *= max(size, 1)
    return True
