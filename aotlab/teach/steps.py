"""The steps of `11_be_the_compiler`, as exercises: each answer is tried in the course's own layer, on its families.

The layer is the text of ``layer.txt``: the page's cells, with the course's own answers in place of the reader's.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any

import torch

from aotlab._torch import base_of
from aotlab.teach.exercises import new_exercise, require
from aotlab.teach.families import check_compiler

Answer = Callable[..., Any]


def layer(**steps: Answer) -> dict[str, Any]:
    """Run the layer's text, with some of its functions replaced, and return its names."""
    text = layer_text()
    linecache.cache["<layer>"] = (len(text), None, text.splitlines(keepends=True), "<layer>")
    names: dict[str, Any] = {"__name__": "layer"}
    exec(compile(text, "<layer>", "exec", dont_inherit=True), names)
    names.update(steps)
    return names


@cache
def layer_text() -> str:
    """Return the text of the whole layer."""
    return resources.files("aotlab.teach").joinpath("layer.txt").read_text(encoding="utf-8")


@cache
def parts() -> dict[str, str]:
    """Return the layer's classes and functions by name, as text."""
    nodes = [node for node in ast.parse(layer_text()).body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return {node.name: ast.get_source_segment(layer_text(), node) or "" for node in nodes}


_OWN = layer()


def _own(name: str) -> tuple[Answer, str]:
    return _OWN[name], parts()[name]


def _try(family: str, **steps: Answer) -> None:
    """Require that the layer with these steps passes a family."""
    found = check_compiler(layer(**steps)["compile"], family)
    require(found, found.seen, found.code)


@new_exercise("compiler", own=_own("record"))
def record(answer: Answer) -> None:
    """Write `record(recorder, op, args, kwargs, result)`: put the call of `op` into its graph, and keep the result.

    - Three things: the arguments as nodes, a node for the call, and for each tensor of the result which node it is.
    - `map_aggregate(args, recorder.read)` replaces tensors by nodes, also within lists, and
      `recorder.graph.call_function(op, args, kwargs)` makes a node, for which `recorder.keep(result, node)`.
    - If `result` is no tensor, it is a tuple of them: each one is kept with a node of its own,
      `recorder.item(node, number)`.
    """
    _try("pure", record=answer)


@new_exercise("compiler", own=_own("write"))
def write(answer: Answer) -> None:
    """Write `write(recorder, tensor, value)`: from here on, the part of a storage that `tensor` looks at is `value`.

    - `recorder.nodes[tensor.untyped_storage()]` is the node of the whole storage so far; there has to be a new one.
    - `aten.as_strided_scatter.default` takes the whole, the new part, and where it lies: `*window(tensor)`.
    - The new node lies in memory as the old one does: copy its `meta["window"]`, and put it into `recorder.nodes`.
    """
    _try("writes", write=answer)


@new_exercise("compiler", own=_own("differentiate"))
def differentiate(answer: Answer) -> None:
    """Write `differentiate(recorder, roots)`: return nodes of the tangents (new inputs) and of the gradients.

    - For each root a tangent is needed: a fake tensor like it, `torch.empty_like(root)`.
    - `recorder.enter(tangent, "tangent")` makes it an input of the graph and returns its node;
      `torch.autograd.grad(roots, recorder.edges, tangents, allow_unused=True)` runs the backward, which is recorded.
    - Return the list of the tangents' nodes, and that of `recorder.read(gradient)`; a gradient that is None stays so.
    """
    computed: list[str] = []

    def noted(recorder: Any, roots: Any) -> Any:
        tangents, gradients = answer(recorder, roots)
        computed.extend(node.name for node in tangents if node.op != "placeholder")
        return tangents, gradients

    _try("training", differentiate=noted)
    require(not computed, f"a tangent is no input of the graph: `{computed[0] if computed else ''}` computes it")


@new_exercise("compiler", own=_own("cut"))
def cut(answer: Answer) -> None:
    """Write `cut(graph, tangents)`, which returns the list of nodes to save for the backward.

    - A node is *late* if it is a tangent, or if one of its inputs (`node.all_input_nodes`) is late.
    - `graph.nodes` is in order, so that one loop finds all late nodes. What is not late can run in the forward.
    - To save are the nodes that are not late, but used by a late one (`node.users`).
    """
    for function, text, least in (
        (lambda x, w: ((x * w).sin().sum(),), "(x * w).sin().sum()", 2),
        (lambda x, w: ((x + w).sum() * 2,), "(x + w).sum() * 2", 0),
    ):
        saved: list[Any] = []
        lacking: list[Any] = []

        def noted(graph: Any, tangents: Any, saved: list[Any] = saved, lacking: list[Any] = lacking) -> Any:
            found = answer(graph, tangents)
            saved.extend(found)
            lacking.extend(set(_OWN["cut"](graph, tangents)) - set(found))
            return found

        try:
            layer(cut=noted)["compile"](function)(torch.ones(3), torch.ones(3, requires_grad=True))
        except KeyError as error:
            needed = lacking[0] if lacking else error
            require(False, f"of `{text}` the backward needs `{needed}`, which is not saved")
        names = [node.name for node in saved]
        require(len(names) <= least, f"of `{text}` it saves {', '.join(names)}, and {least or 'none'} are enough")
    _try("training", cut=answer)


@new_exercise("compiler", own=_own("recipe"))
def recipe(answer: Answer) -> None:
    """Write `recipe(result, inputs, bases)`: how a result is made from an input or from a tensor of the graph's.

    - Three cases: the result is one of the inputs; it lies in the storage of one; it has memory that is new.
    - They are `("input", number, None)`, `("input", number, window(result))`, and `("base", number, …)`, where `number`
      counts in `bases`, to which you add what is not in it yet. `place(tensor, tensors)` finds a number.
    - The base of new memory is `result._base`, or the result itself if that is None; in the second case the window is
      None, too. Compare tensors by `is`.
    """
    _try("shared results", recipe=answer)
    (result,) = layer(recipe=answer)["compile"](lambda x: (x * 2,))(torch.ones(3))
    require(base_of(result) is None, "of `x * 2` the caller gets a view of the base, and not the base itself")


@new_exercise("compiler", own=_own("finish"))
def finish(answer: Answer) -> None:
    """Write `finish(args, written, values, bases, recipes)`, which runs after the graph and returns the results.

    - First the writes: the input number `written[0]` gets the value `values[0]`, and so on, where the caller sees it.
    - Then for each recipe `(kind, number, where)` a result: `args[number]` or `bases[number]`, depending on the kind.
    - If `where` is None, the result is that very tensor; else its `as_strided(*where)`. Return a tuple.
    """
    _try("written inputs", finish=answer)
    _try("shared results", finish=answer)


def _writes_the_second_first(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor]:
    b.mul_(2)
    a.mul_(2)
    return (a * 1,)


@new_exercise("compiler", own=_own("guards"))
def guards(answer: Answer) -> None:
    """Write `guards(args)`: a key, the same for all calls that one trace holds for, and for no others.

    - Of each argument: dtype, window, whether it requires grad and is a leaf. Its values do not matter.
    - Of all together: which ones lie in one storage, and which ones are the same tensor. And whether grad mode is on.
    - The address of a storage is another one in each call; for the key take the number of the first argument that lies
      at that address: `addresses.index(address)`. All in tuples, so that it can be the key of a dict.
    """
    one, two = (torch.ones(2, 3), torch.ones(3)), (torch.zeros(2, 3), torch.zeros(3))
    require(answer(one) == answer(two), "the keys of two calls that differ in values only are not equal")
    require(isinstance(hash(answer(one)), int), "the key cannot be hashed")
    with torch.no_grad():
        without = answer(one)
    require(answer(one) != without, "the keys of a call under `no_grad` and of one outside of it are equal")
    _try("shared inputs", guards=answer)
    _try("calls", guards=answer)
    compiled, first = layer(guards=answer)["compile"](_writes_the_second_first), torch.ones(3)
    compiled(torch.ones(3), torch.ones(3, requires_grad=True) * 1)
    with contextlib.suppress(RuntimeError):  # as in eager
        compiled(first, torch.ones(3, requires_grad=True))
    seen = "a trace for a `b` that is no leaf serves one that is: `a` is written before `b.mul_(2)` raises"
    require(first.eq(1).all(), seen)
