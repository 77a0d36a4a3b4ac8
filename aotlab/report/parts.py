"""The small parts that pages are made of: titles, folds, tables, marks, bars, code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aotlab.errors import UserLine
from aotlab.ir.specs import SymExpr
from aotlab.report.markup import Child, Markup, element, escape, join
from aotlab.report.model import Code, TensorInfo
from aotlab.report.text import place, sizes

#: So many rows of one line a table shows at once.
MOST_SEEN = 15


def words(text: str) -> Markup:
    """Write a sentence in which names stand in backticks."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:
        return escape(text)
    return join(*[element("code", piece) if index % 2 else piece for index, piece in enumerate(pieces)])


def heading(title: str, about: str = "") -> Markup:
    """Write a section's title, with a few words about it."""
    return element("h3", f"{title} ", element("small", about) if about else None)


def fold(title: Child, about: str, content: Markup) -> Markup:
    """Write something that opens when its title is clicked."""
    return element("details", element("summary", title, " ", element("small", about) if about else None), content)


def grid(columns: Sequence[str], rows: Iterable[Sequence[Markup]]) -> Markup:
    """Write a table; a column whose title ends in ``#`` holds numbers."""
    head = [
        element("th", title.removesuffix("#"), kind="number" if title.endswith("#") else None, scope="col")
        for title in columns
    ]
    body = [element("tr", *row) for row in rows]
    table = element("table", element("thead", element("tr", *head)), element("tbody", *body))
    box = element("div", table, kind="scroll")
    if len(body) <= MOST_SEEN:
        return box
    return join(box, element("p", f"{len(body):,} rows: the table scrolls.", kind="soft hint"))


def cell(*children: Child, kind: str | None = None) -> Markup:
    """Write a cell of a table."""
    return element("td", *children, kind=kind)


def mark(text: str, tone: str = "") -> Markup:
    """Write a word on a coloured ground."""
    # The space is for readers without the style sheet: JupyterLab drops it where a notebook is not trusted.
    return join(element("span", text, kind=f"mark {tone}".strip()), " ")


def track(
    start: int,
    stop: int,
    scale: int,
    tone: str,
    whisker: tuple[int, int] | None = None,
    note: str | None = None,
) -> Markup:
    """Draw ``start`` to ``stop`` as a bar on a track that stands for 0 to ``scale``."""
    bars = [element("i", kind=tone, style=_extent(start, stop, scale))]
    if whisker is not None:
        bars.append(element("i", kind="whisker", style=_extent(*whisker, scale)))
    return element("span", *bars, kind="track", title=note)


def _extent(start: int, stop: int, scale: int) -> str:
    whole = max(scale, 1)
    left = min(100 * start / whole, 100)
    return f"left:{left:.2f}%;width:{max(min(100 * stop / whole, 100) - left, 0):.2f}%"


def tensor_cell(tensor: TensorInfo) -> Markup:
    """Write a tensor's type, and below it what is unusual about it."""
    return join(
        element("code", str(tensor), kind="nowrap"),
        element("span", f" {_layout(tensor)}", kind="line") if _layout(tensor) else None,
    )


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
    if tensor.type_name not in ("torch.Tensor", "torch.nn.parameter.Parameter"):
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


def line_cell(line: UserLine | None) -> Markup | None:
    """Write the user's code, and where it stands."""
    if line is None:
        return None
    code = join(element("code", line.code), " ") if line.code else None
    return element("span", " ", code, place(line), kind="line")


def preformatted(text: str) -> Markup:
    """Write text as it stands."""
    return element("pre", text)


def code_block(code: Code) -> Markup:
    """Write code with its comments subdued: in our graphs they say the shapes."""
    if code.language != "python":
        return preformatted(code.text)
    lines: list[Child] = []
    for line in code.text.splitlines():
        before, mark, comment = line.partition("  # ")
        lines += [before, element("span", mark + comment, kind="comment") if mark else None, "\n"]
    return element("pre", *lines)
