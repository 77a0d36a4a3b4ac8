"""Name the functions that Dynamo captured, as the user's program calls them.

The code of a module is its ``forward``, and the code of a library's module is ``inner``, a function of Dynamo. So the
name is taken from the line that calls the module: ``model`` for ``loss = model(x).sum()``. The line is parsed and not
executed.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch

from aotlab.errors import UserLine
from aotlab.report.dynamo_breaks import RESUMED, function_of

#: Files of torch that call a module for the user.
_TORCH = re.compile(r"[/\\]torch[/\\](?:_\w+|nn|utils|distributed|optim|autograd|fx)[/\\]")
#: A call of a method or function with the same name as one of these is no call of a module.
_LIBRARY = (torch.Tensor, torch.nn.Module, torch.nn.functional)
_LOSS = re.compile(r"loss|criterion", re.IGNORECASE)


def stack_of(stack: Any, files: Mapping[int, str]) -> list[UserLine]:
    """Read a stack, the innermost line last. In a record, numbers replace the names of files."""
    lines = [each for each in stack if isinstance(each, dict)] if isinstance(stack, list) else []
    return [
        UserLine(
            file=files.get(each.get("filename", -1), ""),
            line=int(each.get("line", 0)),
            function=str(each.get("name", "")),
            code=str(each.get("loc") or ""),
        )
        for each in lines
    ]


def is_wrapper(line: UserLine) -> bool:
    """Tell whether a line belongs to Dynamo's wrapper of library code."""
    return line.function == "inner" and line.file.endswith("external_utils.py")


def function_names(stack: Sequence[UserLine]) -> tuple[str, str]:
    """Return the name of a captured function, and its name with the line behind which Dynamo captured it again."""
    code = stack[-1].function
    function = function_of(code)
    callers = list(reversed(stack[:-1]))
    libraries = list(takewhile(lambda each: _TORCH.search(each.file), callers))
    caller = next((each.function for each in callers if "_dynamo" not in each.file), "")
    if function == "forward" or is_wrapper(stack[-1]) or caller == "_call_impl":
        calls = [each.code for each in callers[len(libraries) :]]
        function = _called(calls[0]) if calls else ""
        function = function or ("module" if is_wrapper(stack[-1]) else function_of(code))
    resumed = RESUMED.fullmatch(code)
    return function, f"{function} after line {resumed[2]}" if resumed is not None else function


def _called(code: str) -> str:
    """Return the expression that a line calls: a module. Return an empty text if there is no or more than one."""
    tree = next((tree for end in ("", ")", "))", " pass") if (tree := _parsed(code + end)) is not None), None)
    names = list(dict.fromkeys(_callees(tree))) if tree is not None else []
    names = [each for each in names if not _LOSS.search(each)] or names
    return names[0] if len(names) == 1 and len(names[0]) <= 40 else ""  # a name, no long expression


def _parsed(code: str) -> ast.AST | None:
    try:
        return ast.parse(code.strip())
    except (SyntaxError, ValueError, RecursionError):
        return None


def _callees(tree: ast.AST) -> Iterator[str]:
    """Yield the called expressions that may be modules: no methods of tensors, no functions of torch and of Python."""
    for node in ast.walk(tree):
        function = node.func if isinstance(node, ast.Call) else None
        if isinstance(function, ast.Call) and ast.unparse(function.func) == "torch.compile" and function.args:
            compiled = function.args[0]
            yield ast.unparse(compiled.func if isinstance(compiled, ast.Call) else compiled)
        elif isinstance(function, ast.Attribute):
            of_library = any(hasattr(each, function.attr) for each in _LIBRARY) and function.attr != "forward"
            text = ast.unparse(function).removesuffix(".forward")
            if not of_library and not text.startswith("torch.") and "(" not in text:
                yield text
        elif isinstance(function, ast.Name | ast.Subscript):
            text = ast.unparse(function)
            if not hasattr(builtins, text):
                yield text
