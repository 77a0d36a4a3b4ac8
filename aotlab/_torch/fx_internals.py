"""fx graphs, and the Python code that is written for them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import linecache
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

# Modules that generate the Python code of their ``forward`` at first use. Compilers read the graph, not this code.
from torch.fx._lazy_graph_module import _LazyGraphModule, _make_graph_module, _use_lazy_graph_module

# Generates a graph's Python code as a boxed callable, which takes its inputs in one list and empties the list.
from torch.fx.graph import CodeGen, _BoxedCodeGen

from aotlab._torch.replaced import replaced


def graph_module(root: torch.nn.Module, graph: fx.Graph, name: str) -> fx.GraphModule:
    """Make a module of a graph. The Python code of the module's ``forward`` is generated at first use.

    ``root`` has the attributes that the graph reads. ``name`` is the name of the module's class.
    """
    _write_quickly(graph._codegen)
    with _use_lazy_graph_module(True):
        return _make_graph_module(root, graph, name)


def _write_quickly(code: CodeGen) -> None:
    setattr(code, "_call_method_with_signature_check", operator.call)  # noqa: B010  # because inspect.signature is slow


def write_at_once(module: fx.GraphModule) -> None:
    """Generate the Python code of a module's ``forward`` now, and make its class an ordinary `fx.GraphModule`.

    Some compilers take ``forward`` from the module, and TorchScript reads the module's class.
    """
    kind: Any = type(module)  # each module has its own class
    kind.__bases__ = tuple(fx.GraphModule if base is _LazyGraphModule else base for base in kind.__bases__)
    module.recompile()


def forward_of(module: fx.GraphModule) -> Callable[..., Any]:
    """Return the generated ``forward`` of a graph module. Calling it skips the hooks of ``Module.__call__``."""
    _LazyGraphModule.force_recompile(module)
    return module.forward


def boxed_forward_of(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Return a graph as a boxed callable. It empties the list of its inputs, so that each input can be freed early."""
    graph = module.graph
    _write_quickly(boxed := _BoxedCodeGen())
    with replaced(graph, "_codegen", boxed):
        code = graph.python_code("self")
    name = f"<aotlab graph {next(_graphs)}>"
    linecache.cache[name] = (len(code.src), None, code.src.splitlines(keepends=True), name)
    namespace = dict(code.globals)
    exec(compile(code.src, name, "exec"), namespace)
    weakref.finalize(namespace["forward"], linecache.cache.pop, name, None).atexit = False
    call: Callable[[list[Any]], Any] = functools.partial(namespace.pop("forward"), module)
    call._boxed_call = True  # type: ignore[attr-defined]  # upstream recognizes a boxed callable by this attribute
    return call


_graphs = itertools.count()


def tracing_context(fake_mode: FakeTensorMode) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that sets torch's tracing context, in which Inductor looks for the fake mode."""
    return tracing(TracingContext(fake_mode))


def has_effects(op: object) -> bool:
    """Tell whether an op is registered as having side effects, as `torch.ops.aten._print` is."""
    from torch._higher_order_ops import effects as known

    return isinstance(op, HigherOrderOperator | OpOverload) and bool(known._get_effect(op)) and known.has_effects(op)
