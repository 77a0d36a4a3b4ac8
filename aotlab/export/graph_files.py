"""Save and load an exported graph as JSON. A file contains only names of registered ops, so loading it runs no code.

Each node is a JSON object with its name, its op (``"aten::mul.Tensor"``), its arguments (``[{"node": "arg0_1"}, 2]``),
and dtype, shape, strides and device of its value (``["float32", [2, 3], [3, 1], "cpu"]``).
"""

from __future__ import annotations

import json
import keyword
import math
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from aotlab._torch import SET_GRAD_ENABLED, FakeTensorMode, OpOverload
from aotlab.errors import UsageError
from aotlab.export.signature import GraphSignature

_FORMAT, _VERSION = "aotlab export", 1
#: The functions besides ops that a graph may call, by name. They get an item of a result, compute sizes, set grad mode.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module, names in (
        (operator, "getitem add sub mul neg floordiv truediv mod pow eq ne lt le gt ge"),
        (math, "floor ceil trunc sqrt"),
        (torch, "sym_min sym_max sym_float sym_int sym_not"),
    )
    for name in names.split()
}
_FUNCTIONS["torch._C._set_grad_enabled"] = SET_GRAD_ENABLED
_NAMES = {function: name for name, function in _FUNCTIONS.items()}
#: The types of objects that a file stores by their name in torch, for example ``torch.float32``.
_NAMED = (torch.dtype, torch.layout, torch.memory_format)


def save(path: str | Path, graph: fx.GraphModule, signature: GraphSignature | None = None) -> Path:
    """Write an exported graph and its signature to a file; return the path.

    Raises `UsageError` if the graph contains something that a graph file cannot hold: a constant, an inner graph, a
    call of a function that is neither an op nor in `_FUNCTIONS`, or an argument of a type without a JSON form.
    """
    form = {
        "format": _FORMAT,
        "version": _VERSION,
        "signature": None if signature is None else json.loads(signature.to_json()),
        "assumes": list(graph.meta.get("assumes", ())),
        "nodes": [_node(node) for node in graph.graph.nodes],
    }
    path = Path(path)
    path.write_text(json.dumps(form), encoding="utf-8")
    return path


def load(path: str | Path) -> tuple[fx.GraphModule, GraphSignature | None]:
    """Read a graph and its signature from a file that `save` wrote.

    Raises `UsageError` if the file has another format, names ops that are not registered, or names an op that reads or
    writes a file (``aten::from_file``).
    """
    try:
        form = json.loads(Path(path).read_bytes())
        if form["format"] != _FORMAT or form["version"] != _VERSION:
            raise UsageError(
                f"{path} has format {form['format']!r:.40}, version {form['version']!r:.40}, which aotlab cannot read"
            )
        graph = _graph(form["nodes"])
        module = fx.GraphModule(torch.nn.Module(), graph, "Exported")
        module.meta["assumes"] = tuple([str(each) for each in form["assumes"]])
        signature = form["signature"]
        return module, None if signature is None else GraphSignature.from_json(json.dumps(signature))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path} is not an exported graph: {type(error).__name__}: {error}") from error


def _node(node: fx.Node) -> dict[str, Any]:
    form: dict[str, Any] = {"name": node.name, "op": node.op}
    if node.op == "call_function":
        target = node.target
        form["target"] = target.name() if isinstance(target, OpOverload) else _NAMES.get(target)  # type: ignore[arg-type]
        if form["target"] is None:
            raise UsageError(f"`{node.name}` calls {target}, which a graph file cannot hold; try `torch.export.save`")
    elif node.op not in ("placeholder", "output"):
        raise UsageError(
            f"`{node.name}` is a constant or an inner graph, which a graph file cannot hold; try `torch.export.save`"
        )
    if node.args:
        form["args"] = [_to_json_form(each, node) for each in node.args]
    if node.kwargs:
        form["kwargs"] = {name: _to_json_form(each, node) for name, each in node.kwargs.items()}
    value = node.meta.get("val")
    if isinstance(value, Tensor) and all(isinstance(n, int) for n in (*value.shape, *value.stride())):
        form["like"] = [str(value.dtype).removeprefix("torch."), [*value.shape], [*value.stride()], str(value.device)]
    if "partitioner_tag" in node.meta:
        form["tag"] = node.meta["partitioner_tag"]
    return form


def _to_json_form(value: Any, node: fx.Node) -> Any:
    """Return the JSON form of an argument of ``node``.

    A tuple or list becomes a list whose first item is "tuple" or "list". A value of a type that JSON does not have
    becomes a JSON object with the name of the type: ``{"device": "cpu"}``.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, (tuple, list)):
        return ["tuple" if isinstance(value, tuple) else "list", *[_to_json_form(each, node) for each in value]]
    if isinstance(value, _NAMED):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if type(value) is complex:
        return {"complex": [value.real, value.imag]}
    raise UsageError(f"`{node.name}` takes a `{type(value).__qualname__}`, which a graph file cannot hold")


def _graph(forms: Any) -> fx.Graph:
    graph, mode = fx.Graph(), FakeTensorMode()
    nodes: dict[str, fx.Node] = {}
    for form in forms:
        name, op = form["name"], form["op"]
        if not (isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)) or name in nodes:
            raise ValueError(f"{name!r:.40} is not a valid name of a node, or several nodes have it")
        args = tuple([_from_json_form(each, nodes) for each in form.get("args", ())] if op != "placeholder" else ())
        kwargs = {str(key): _from_json_form(each, nodes) for key, each in form.get("kwargs", {}).items()}
        if op == "output":
            graph.output(args[0])
            continue
        if op not in ("placeholder", "call_function") or not all(map(str.isidentifier, kwargs)):
            raise ValueError(f"`{name}` is a {op!r:.40} node, which no graph file has, or it has invalid keywords")
        target = name if op == "placeholder" else _target(form["target"])
        node = nodes[name] = graph.create_node(op, target, args, kwargs, name)
        if node.name != name:
            raise ValueError(f"a node cannot be called {name!r:.40}")
        if "like" in form:
            dtype, shape, stride, device = form["like"]
            with mode:
                node.meta["val"] = torch.empty_strided(shape, stride, dtype=_torch_attribute(dtype), device=device)
        if "tag" in form:
            node.meta["partitioner_tag"] = str(form["tag"])
    graph.lint()
    return graph


def _from_json_form(form: Any, nodes: Mapping[str, fx.Node]) -> Any:
    if isinstance(form, list):
        kind, *items = form
        items_read = [_from_json_form(each, nodes) for each in items]
        return {"tuple": tuple, "list": list}[kind](items_read)
    if not isinstance(form, dict):
        return form
    ((kind, value),) = form.items()
    if kind == "node":
        return nodes[value]
    if kind == "torch":
        return _torch_attribute(value)
    if kind == "complex":
        return complex(*value)
    return {"float": float, "device": torch.device}[kind](value)


def _torch_attribute(name: str) -> Any:
    value = getattr(torch, name)
    if not isinstance(value, _NAMED):
        raise TypeError(f"`{name}` is not a dtype, layout or memory format")
    return value


def _target(name: str) -> Any:
    """Return the registered op, or the function of `_FUNCTIONS`, with this name. Nothing is imported to find it."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    namespace, _, qualified = name.partition("::")
    packet, _, overload = qualified.partition(".")
    op = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    if not isinstance(op, OpOverload):
        raise TypeError(f"`{name}` is not an op")
    if any(argument.name == "filename" for argument in op._schema.arguments):
        raise TypeError(f"`{name}` reads or writes a file, which a loaded graph must not do")
    return op
