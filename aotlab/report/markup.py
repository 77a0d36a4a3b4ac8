"""Write HTML of which no part can be unescaped by oversight.

A page is put together from `Markup` only. Whatever is not `Markup` is text, and text is escaped where it enters; there
is no other way in.
"""

from __future__ import annotations

import html
import re

#: Elements that have no end tag.
_VOID = frozenset({"br", "hr", "meta"})

# What XML and JSON cannot carry or terminals would obey: control characters, lone surrogates, and the marks that turn
# the direction of the text around them.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Markup(str):
    """HTML that is safe as it stands."""

    __slots__ = ()


Child = str | Markup | None


def clean(text: str) -> str:
    """Replace what cannot be shown by the replacement character."""
    return _UNPRINTABLE.sub("\ufffd", text)


def escape(text: str) -> Markup:
    """Turn text into HTML that shows it."""
    return text if isinstance(text, Markup) else Markup(html.escape(clean(text), quote=True))


def element(tag: str, *children: Child, kind: str | None = None, **attributes: str | None) -> Markup:
    """Write one element.

    Parameters
    ----------
    tag
        Its name.
    children
        Text, which is escaped, and markup, which is not; None is left out.
    kind
        The ``class`` attribute, which Python's grammar does not admit as a name.
    attributes
        Further attributes; None leaves one out, ``""`` writes the bare name.
    """
    written = {"class": kind, **attributes}
    head = "".join(
        f" {name}" if value == "" else f' {name}="{escape(value)}"'
        for name, value in written.items()
        if value is not None
    )
    if tag in _VOID:
        return Markup(f"<{tag}{head}>")
    return Markup(f"<{tag}{head}>{join(*children)}</{tag}>")


def join(*children: Child) -> Markup:
    """Put markup and text side by side."""
    return Markup("".join(escape(child) for child in children if child is not None))
