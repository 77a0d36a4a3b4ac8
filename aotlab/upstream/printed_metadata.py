"""Read the text that torch prints for the metadata of a traced function (``ViewAndMutationMeta``).

The text is the repr of nested dataclasses. It is parsed and not executed.
"""

from __future__ import annotations

import ast
import re
from typing import Any

#: Reprs that are not Python: ``<OutputType.non_alias: 1>``, ``<class 'torch.Tensor'>``, ``<function f at 0x7f00>``. The
#: first alternative matches a string, which may contain such a text.
_ANGLE = re.compile(
    r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|<(?:class '([^']*)'|([\w.]+): [^<>]*|([^<>]*))>""", re.DOTALL
)


def read_metadata(text: str) -> dict[str, Any] | None:
    """Return the fields of the printed metadata; nested dataclasses are dicts. Return None if the text is no metadata.

    A value that cannot be read is its text.
    """
    plain = _ANGLE.sub(lambda found: found[1] or repr(found[2] or found[3] or found[4]), text.strip())
    try:
        value = _value(ast.parse(plain, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and "input_info" in value else None


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and not node.args:
        return {keyword.arg: _value(keyword.value) for keyword in node.keywords}
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Constant):
        return node.value
    return ast.unparse(node)
