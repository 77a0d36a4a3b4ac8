"""An exported graph as JSON: `save` and `load`. A file names ops of torch's registry; no code comes from it.

Each node is an object: its name, what it calls (``"aten::mul.Tensor"``), with what (``[{"node": "arg0_1"}, 2]``), and
what its value looks like (``["float32", [2, 3], [3, 1], "cpu"]``).
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
#: What a graph calls besides ops: it takes results apart, and computes sizes.
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
#: Attributes of torch that stand in graphs by their names.
_NAMED = (torch.dtype, torch.layout, torch.memory_format)


def save(path: str | Path, graph: fx.GraphModule, signature: GraphSignature | None = None) -> Path:
    """Write an exported graph, and its signature, to a file; raises `UsageError` for what JSON cannot hold."""
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
    """Read what `save` wrote; raises `UsageError` if that is no such file, or names ops that are not registered."""
    try:
        form = json.loads(Path(path).read_bytes())
        if form["format"] != _FORMAT or form["version"] != _VERSION:
            raise UsageError(f"{path} is of format {form['format']!r:.40}, version {form['version']!r:.40}")
        graph = _graph(form["nodes"])
        module = fx.GraphModule(torch.nn.Module(), graph, "Exported")
        module.meta["assumes"] = tuple([str(each) for each in form["assumes"]])
        signature = form["signature"]
        return module, None if signature is None else GraphSignature.from_json(json.dumps(signature))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path} is no exported graph: {type(error).__name__}: {error}") from error


def _node(node: fx.Node) -> dict[str, Any]:
    form: dict[str, Any] = {"name": node.name, "op": node.op}
    if node.op == "call_function":
        target = node.target
        form["target"] = target.name() if isinstance(target, OpOverload) else _NAMES.get(target)  # type: ignore[arg-type]
        if form["target"] is None:
            raise UsageError(f"`{node.name}` calls {target}, which cannot be saved; `torch.export.save` may do so")
    elif node.op not in ("placeholder", "output"):
        raise UsageError(f"`{node.name}` is a constant or a graph inside; `torch.export.save` may save it")
    if node.args:
        form["args"] = [_written(each, node) for each in node.args]
    if node.kwargs:
        form["kwargs"] = {name: _written(each, node) for name, each in node.kwargs.items()}
    value = node.meta.get("val")
    if isinstance(value, Tensor) and all(isinstance(n, int) for n in (*value.shape, *value.stride())):
        form["like"] = [str(value.dtype).removeprefix("torch."), [*value.shape], [*value.stride()], str(value.device)]
    if "partitioner_tag" in node.meta:
        form["tag"] = node.meta["partitioner_tag"]
    return form


def _written(value: Any, node: fx.Node) -> Any:
    """Write an argument: lists and what JSON lacks as an object, or as a list that begins with its kind."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, (tuple, list)):
        return ["tuple" if isinstance(value, tuple) else "list", *[_written(each, node) for each in value]]
    if isinstance(value, _NAMED):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if type(value) is complex:
        return {"complex": [value.real, value.imag]}
    raise UsageError(f"`{node.name}` is given a `{type(value).__qualname__}`, which cannot be saved")


def _graph(forms: Any) -> fx.Graph:
    graph, mode = fx.Graph(), FakeTensorMode()
    nodes: dict[str, fx.Node] = {}
    for form in forms:
        name, op = form["name"], form["op"]
        if not (isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)) or name in nodes:
            raise ValueError(f"a node is called {name!r:.40}")
        args = tuple([_read(each, nodes) for each in form.get("args", ())] if op != "placeholder" else ())
        kwargs = {str(key): _read(each, nodes) for key, each in form.get("kwargs", {}).items()}
        if op == "output":
            graph.output(args[0])
            continue
        if op not in ("placeholder", "call_function") or not all(map(str.isidentifier, kwargs)):
            raise ValueError(f"`{name}` is {op!r:.40}")
        target = name if op == "placeholder" else _target(form["target"])
        node = nodes[name] = graph.create_node(op, target, args, kwargs, name)
        if node.name != name:
            raise ValueError(f"a node cannot be called {name!r:.40}")
        if "like" in form:
            dtype, shape, stride, device = form["like"]
            with mode:
                node.meta["val"] = torch.empty_strided(shape, stride, dtype=_of_torch(dtype), device=device)
        if "tag" in form:
            node.meta["partitioner_tag"] = str(form["tag"])
    graph.lint()
    return graph


def _read(form: Any, nodes: Mapping[str, fx.Node]) -> Any:
    if isinstance(form, list):
        kind, *items = form
        made = [_read(each, nodes) for each in items]
        return {"tuple": tuple, "list": list}[kind](made)
    if not isinstance(form, dict):
        return form
    ((kind, value),) = form.items()
    if kind == "node":
        return nodes[value]
    if kind == "torch":
        return _of_torch(value)
    if kind == "complex":
        return complex(*value)
    return {"float": float, "device": torch.device}[kind](value)


def _of_torch(name: str) -> Any:
    value = getattr(torch, name)
    if not isinstance(value, _NAMED):
        raise TypeError(f"`{name}` is no dtype, layout or memory format")
    return value


def _target(name: str) -> Any:
    """Find an op that is registered, by its name; nothing is imported for it."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    if not isinstance(found, OpOverload):
        raise TypeError(f"`{name}` is no op")
    return found
