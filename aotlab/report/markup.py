"""Write HTML in which every piece of text is escaped.

A page is built from `Markup` only. A string that is not `Markup` is text, and `escape` escapes the text when it is
added to a page. There is no other way to add text.
"""

from __future__ import annotations

import html
import re

#: Elements that have no end tag.
_VOID = frozenset({"br", "hr", "meta"})

# Characters that XML or JSON cannot contain, or that a terminal or browser would interpret: control characters, lone
# surrogates, and the marks that change the direction of the surrounding text.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Markup(str):
    """HTML that needs no escaping."""

    __slots__ = ()


Child = str | Markup | None


def clean(text: str) -> str:
    """Replace control characters, lone surrogates and direction marks by the replacement character, U+FFFD.

    Tabs and line feeds remain.
    """
    return _UNPRINTABLE.sub("\ufffd", text)


def escape(text: str) -> Markup:
    """Convert text to HTML that displays this text; return `Markup` unchanged."""
    return text if isinstance(text, Markup) else Markup(html.escape(clean(text), quote=True))


def element(tag: str, *children: Child, kind: str | None = None, **attributes: str | None) -> Markup:
    """Write one element.

    Parameters
    ----------
    tag
        The element's name.
    children
        The contents of the element. Text is escaped, markup is not, and None is left out.
    kind
        The ``class`` attribute. (``class`` is a keyword of Python, so it cannot be the name of a parameter.)
    attributes
        Other attributes. An attribute that is None is left out. If an attribute is ``""``, only its name is written.
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
    """Concatenate markup and text; the text is escaped."""
    return Markup("".join(escape(child) for child in children if child is not None))
