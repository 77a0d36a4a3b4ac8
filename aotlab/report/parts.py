"""The small parts that the summary is made of: titles, folds, tables, marks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aotlab.ir.specs import SymExpr
from aotlab.report.markup import Child, Markup, element, escape, join
from aotlab.report.model import PLAIN_TYPES, TensorInfo
from aotlab.report.text import sizes


def words(text: str) -> Markup:
    """Write a sentence in which names stand in backticks."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:
        return escape(text)
    return join(*[element("code", piece) if index % 2 else piece for index, piece in enumerate(pieces)])


def heading(title: str, about: str = "") -> Markup:
    """Write a section's title, with a few words about it."""
    return element("h3", f"{title} ", element("small", about) if about else None)


def fold(title: Child, about: str, content: Markup, *, opened: bool = False) -> Markup:
    """Write something that opens when its title is clicked."""
    summary = element("summary", title, " ", element("small", about) if about else None)
    return element("details", summary, content, open="" if opened else None)


def grid(columns: Sequence[str], rows: Iterable[Sequence[Markup]]) -> Markup:
    """Write a table."""
    head = [element("th", title) for title in columns]
    body = [element("tr", *row) for row in rows]
    return element("table", element("thead", element("tr", *head)), element("tbody", *body))


def cell(*children: Child) -> Markup:
    """Write a cell of a table."""
    return element("td", *children)


def mark(text: str) -> Markup:
    """Write words that one of the reader's first looks should meet."""
    # The space separates marks that stand side by side.
    return join(element("b", text), " ")


def tensor_cell(tensor: TensorInfo) -> Markup:
    """Write a tensor's type, and what is unusual about it."""
    layout = _layout(tensor)
    return join(element("code", str(tensor)), f" {layout}" if layout else None)


def _layout(tensor: TensorInfo) -> str:
    """Say what is unusual about a tensor: strides of its own, an offset, another layout or type."""
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
