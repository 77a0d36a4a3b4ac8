"""The steps of page 11, `11_be_the_compiler`, as exercises.

On this page, readers write a small compiler, the *layer*. Each exercise is one function of it. A check puts the answer
into the course's own layer, and compares this layer with eager on families of programs. ``layer.txt`` is the source of
the course's layer: the cells of the page, with the course's own answers.
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
    """Run the source of the course's layer, replace its functions ``steps`` by name, and return its namespace."""
    text = layer_text()
    linecache.cache["<layer>"] = (len(text), None, text.splitlines(keepends=True), "<layer>")
    names: dict[str, Any] = {"__name__": "layer"}
    exec(compile(text, "<layer>", "exec", dont_inherit=True), names)
    names.update(steps)
    return names


@cache
def layer_text() -> str:
    """Return the source of the whole layer."""
    return resources.files("aotlab.teach").joinpath("layer.txt").read_text(encoding="utf-8")


@cache
def parts() -> dict[str, str]:
    """Return the source of each class and function of the layer, by name."""
    nodes = [node for node in ast.parse(layer_text()).body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return {node.name: ast.get_source_segment(layer_text(), node) or "" for node in nodes}


_LAYER = layer()


def _solution(name: str) -> tuple[Answer, str]:
    return _LAYER[name], parts()[name]


def _try(family: str, **steps: Answer) -> None:
    """Require that the layer, with these functions replaced, agrees with eager on all programs of a family."""
    verdict = check_compiler(layer(**steps)["compile"], family)
    require(verdict, verdict.seen, verdict.code)


@new_exercise("compiler", reference=_solution("record"))
def record(answer: Answer) -> None:
    """Write `record(recorder, op, args, kwargs, result)`: add the call of `op` to the graph, and keep the result.

    - There are three steps: turn the arguments into nodes, make a node for the call, and store the node of each
      tensor of the result.
    - `map_aggregate(args, recorder.read)` replaces tensors by nodes, also inside lists.
      `recorder.graph.call_function(op, args, kwargs)` makes a node; then call `recorder.keep(result, node)`.
    - If `result` is not a tensor, it is a tuple of tensors. Keep each with its own node, `recorder.item(node, number)`.
    """
    _try("pure", record=answer)


@new_exercise("compiler", reference=_solution("write"))
def write(answer: Answer) -> None:
    """Write `write(recorder, tensor, value)`: from here on, `value` is the part of the storage that `tensor` covers.

    - `recorder.nodes[tensor.untyped_storage()]` is the node of the whole storage so far. Make a new node for it.
    - `aten.as_strided_scatter.default` takes the whole, the new part, and the window of the part: `*window(tensor)`.
    - The new node has the window of the old node: copy `meta["window"]`. Put the new node into `recorder.nodes`.
    """
    _try("writes", write=answer)


@new_exercise("compiler", reference=_solution("differentiate"))
def differentiate(answer: Answer) -> None:
    """Write `differentiate(recorder, roots)`: return the nodes of the tangents (new inputs) and of the gradients.

    - Make a tangent for each root: a fake tensor like the root, `torch.empty_like(root)`.
    - `recorder.enter(tangent, "tangent")` makes the tangent an input of the graph and returns its node.
      `torch.autograd.grad(roots, recorder.edges, tangents, allow_unused=True)` runs the backward, and the recorder
      records it.
    - Return the list of the nodes of the tangents, and the list of `recorder.read(gradient)` for all gradients. For a
      gradient that is None, the list has None.
    """
    computed: list[str] = []

    def noted(recorder: Any, roots: Any) -> Any:
        tangents, gradients = answer(recorder, roots)
        computed.extend(node.name for node in tangents if node.op != "placeholder")
        return tangents, gradients

    _try("training", differentiate=noted)
    require(not computed, f"a tangent is no input of the graph: `{computed[0] if computed else ''}` computes it")


@new_exercise("compiler", reference=_solution("cut"))
def cut(answer: Answer) -> None:
    """Write `cut(graph, tangents)`, which returns the list of nodes to save for the backward.

    - A node is *late* if it is a tangent, or if one of its inputs (`node.all_input_nodes`) is late.
    - `graph.nodes` is in order, so one loop finds all late nodes. All other nodes can run in the forward.
    - Save each node that is not late if a late node uses it (`node.users`).
    """
    for function, text, least in (
        (lambda x, w: ((x * w).sin().sum(),), "(x * w).sin().sum()", 2),
        (lambda x, w: ((x + w).sum() * 2,), "(x + w).sum() * 2", 0),
    ):
        saved: list[Any] = []
        lacking: list[Any] = []

        def noted(graph: Any, tangents: Any, saved: list[Any] = saved, lacking: list[Any] = lacking) -> Any:
            values = answer(graph, tangents)
            saved.extend(values)
            lacking.extend(set(_LAYER["cut"](graph, tangents)) - set(values))
            return values

        try:
            layer(cut=noted)["compile"](function)(torch.ones(3), torch.ones(3, requires_grad=True))
        except KeyError as error:
            needed = lacking[0] if lacking else error
            require(False, f"of `{text}` the backward needs `{needed}`, which is not saved")
        names = [node.name for node in saved]
        require(len(names) <= least, f"of `{text}` it saves {', '.join(names)}, and {least or 'none'} are enough")
    _try("training", cut=answer)


@new_exercise("compiler", reference=_solution("recipe"))
def recipe(answer: Answer) -> None:
    """Write `recipe(result, inputs, bases)`: how to make a result from an input or from a tensor of the graph.

    - There are three cases: the result is an input; it shares the storage of an input; it has new memory.
    - The recipes are `("input", number, None)`, `("input", number, window(result))`, and `("base", number, …)`. In the
      last one, `number` is the position in `bases`. Add the base to `bases` if it is not there yet.
      `place(tensor, tensors)` finds a position.
    - The base of new memory is `result._base`, or the result itself if `result._base` is None. In the second case the
      window is None, too. Compare tensors with `is`.
    """
    _try("shared results", recipe=answer)
    (result,) = layer(recipe=answer)["compile"](lambda x: (x * 2,))(torch.ones(3))
    require(base_of(result) is None, "of `x * 2` the caller gets a view of the base, and not the base itself")


@new_exercise("compiler", reference=_solution("finish"))
def finish(answer: Answer) -> None:
    """Write `finish(args, written, values, bases, recipes)`, which runs after the graph and returns the results.

    - First the writes: copy the value `values[0]` into the memory of the input number `written[0]`, and so on.
    - Then make a result for each recipe `(kind, number, where)`, from `args[number]` or `bases[number]`, depending on
      the kind.
    - If `where` is None, the result is this tensor itself; otherwise it is `as_strided(*where)` of it. Return a tuple.
    """
    _try("written inputs", finish=answer)
    _try("shared results", finish=answer)


def _writes_the_second_first(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor]:
    b.mul_(2)
    a.mul_(2)
    return (a * 1,)


@new_exercise("compiler", reference=_solution("guards"))
def guards(answer: Answer) -> None:
    """Write `guards(args)`: a key that is equal for two calls exactly if one trace is valid for both.

    - For each argument: its dtype, its window, whether it requires grad, and whether it is a leaf. The values do not
      matter.
    - For all arguments together: which of them share a storage, and which are the same tensor. Also whether grad mode
      is on.
    - The address of a storage differs from call to call. In its place, use the number of the first argument with this
      address: `addresses.index(address)`. Put everything into tuples, so that the key can be the key of a dict.
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
    seen = "a trace for a non-leaf `b` serves a call with a leaf `b`: `a` is written before `b.mul_(2)` raises"
    require(first.eq(1).all(), seen)
