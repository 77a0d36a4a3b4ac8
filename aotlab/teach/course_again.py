"""The exercises of pages 08 to 10. They are written as in `course`."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

import aotlab
from aotlab import _torch as torch_internals
from aotlab._torch.workbench import wrapper_like
from aotlab.teach.exercises import new_exercise, require
from aotlab.teach.truth import window

Answer = Callable[..., Any]


def _graphs(function: Answer, *calls: tuple[Any, ...]) -> int:
    """Compile a function, make some calls, and return the number of compiled graphs."""
    compiled = aotlab.compile(function, backend="eager")
    with warnings.catch_warnings(), aotlab.Report.record() as recording:
        warnings.simplefilter("ignore")
        for call in calls:
            compiled(*call)
    return sum(graph.status == "compiled" for frame in recording.report().frames for graph in frame.graphs)


# --- 08_again_and_again ----------------------------------------------------------------------------------------------


@new_exercise("recompiles")
def another_graph(answer: Answer) -> None:
    """Write `answer(x)`: a tensor with the shape, dtype and values of `x` that the graph for `x` does not serve.

    - Go through the guards of a tensor: which properties do they check besides shape and dtype?
    - Guards check the strides, and whether a tensor requires grad.
    - Return a copy with another order of the elements in memory, or a copy that requires grad.
    """
    x = torch.arange(6.0).view(2, 3)
    result = answer(x)
    require(isinstance(result, torch.Tensor), f"the result is of type {type(result).__name__}, and must be a tensor")
    require(result.dtype == x.dtype, f"the result has dtype {result.dtype}")
    require(torch.equal(result, x), f"for {x.tolist()} it returns {result.tolist()}")
    equal_facts = f"{window(result)} and requires_grad={result.requires_grad}, like `x`"
    require(_graphs(lambda x: x * 2, (x,), (result,)) == 2, f"the graph for `x` serves it, too: it has {equal_facts}")


def folded(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 5:
        return x[:5].sum()
    return x.sum()


@new_exercise("recompiles", takes="number", program=folded)
def how_many_graphs(answer: float) -> None:
    """How many graphs does this program need without `dynamic=True`, if `x` has 3, 4, 2, 8, 5, 1 and then 9 elements?

    - The first graph is for 3 elements only. The second call has another size.
    - A graph with a symbol is valid for the sizes that take the same branch of the `if`.
    - And there is a size that never becomes a symbol.
    """
    calls = [(torch.ones(size),) for size in (3, 4, 2, 8, 5, 1, 9)]
    first = f"3, 4 and 2 elements alone need {_graphs(folded, *calls[:3])}"
    require(answer == _graphs(folded, *calls), f"it is not {answer}: {first}. How many do the other four need?")


def doubled(x: torch.Tensor, n: int) -> torch.Tensor:
    for _ in range(n):
        x = x * 2
    return x


@new_exercise("recompiles", program=doubled)
def fewer_graphs(answer: Answer) -> None:
    """Write `answer(x, n)`, which returns the same as this program, and needs two graphs for all `n` from 1 to 8.

    - The loop fixes `n`, because each `n` makes another list of ops. Calculate with `n` instead.
    - Multiplying by 2 several times is the same as multiplying once by a power of 2.
    - Python's power operator works for numbers, and an op of the graph can take its result.
    """
    x = torch.tensor([1.0, -3.0])
    for n in range(1, 9):
        result, expected = answer(x, n), doubled(x, n)
        wrong = f"for n = {n} it makes {result.tolist()} of {x.tolist()}, and not {expected.tolist()}"
        require(torch.equal(result, expected), wrong)
    graphs = _graphs(answer, *((x, n) for n in range(1, 9)))
    require(graphs, "it cannot be compiled, and runs eagerly")
    require(graphs <= 2, f"it needs {graphs} graphs")


# --- 09_randomness_and_modes -----------------------------------------------------------------------------------------


@new_exercise("randomness")
def mask_again(answer: Answer) -> None:
    """Write `answer(x, state)`: the mask that `dropout(x, 0.5)` draws from `state`. Do not change the generator.

    - A mask is `True` where an element was kept. The dropout of ones shows the mask; the values of `x` do not matter.
    - Set the generator to `state`, draw, and restore the old state.
    - Use `torch.get_rng_state()` and `torch.set_rng_state(…)`. Or use `with torch.random.fork_rng():`, which restores
      the state for you.
    """
    with torch.random.fork_rng(devices=[]):
        for seed in (1, 2):
            x = torch.arange(float(8 * seed))
            torch.manual_seed(seed)
            state = torch.get_rng_state()
            expected = functional.dropout(torch.ones_like(x), 0.5) != 0
            torch.manual_seed(0)
            before = torch.get_rng_state()
            mask = answer(x, state)
            require(
                isinstance(mask, torch.Tensor) and mask.dtype == torch.bool, "the mask does not consist of booleans"
            )
            wrong = f"for x = {x.tolist()} it was {expected.int().tolist()}, not {mask.int().tolist()}"
            require(torch.equal(mask, expected), wrong)
            require(torch.equal(torch.get_rng_state(), before), "the state of the generator has changed afterwards")


def draws_some(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    torch.rand_like(a)
    b = functional.dropout(b, 0.5, training=False)
    c = c + torch.zeros_like(c).normal_()
    with torch.no_grad():
        return b + c + functional.dropout(d, 0.1)


@new_exercise("randomness", program=draws_some, takes="names")
def what_is_drawn(answer: Any) -> None:
    """For which of its inputs does this program draw random numbers? Answer as in `"a, b"`.

    - It does not matter whether somebody uses the random numbers.
    - It does not matter whether gradients are needed.
    - Outside of training, dropout returns its argument.
    """
    names = ("a", "b", "c", "d")
    said = set(answer.replace(",", " ").split() if isinstance(answer, str) else answer)
    require(said <= {*names}, f"the names are {', '.join(names)}")

    def left(without: str) -> torch.Tensor:
        """Return the state after a call. The input ``without`` has no elements, so nothing is drawn for it."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            draws_some(*(torch.ones(0 if name == without else 1) for name in names))
            return torch.get_rng_state()

    for name in names:
        drawn = not torch.equal(left(name), left(""))
        wrong = (
            f"with another number of elements in `{name}`, {'another' if drawn else 'the same'} state is left behind"
        )
        require((name in said) == drawn, wrong)


@new_exercise("randomness")
def autocast_by_hand(answer: Answer) -> None:
    """Write `answer(x, w)`: without autocast, return the value of `x @ w` under autocast to `bfloat16`.

    - The inputs are `float32`. What does autocast do with them before the product?
    - Autocast does not cast the result.
    - `x.bfloat16()` makes a copy in the other dtype; autograd casts the gradient back.
    """
    x, w = torch.linspace(0, 1, 12).view(3, 4), torch.linspace(1, 2, 8).view(4, 2).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = x @ w
    result = answer(x, w)
    require(isinstance(result, torch.Tensor), f"the result is of type {type(result).__name__}, and must be a tensor")
    names = getattr(getattr(answer, "__code__", None), "co_names", ())
    require("autocast" not in names, "it uses autocast")
    require(result.dtype == torch.bfloat16, f"the result has dtype {result.dtype}")
    require(result.shape == expected.shape, f"the result has shape {tuple(result.shape)}")
    where = (result != expected).nonzero()[:1].flatten().tolist()
    if where:
        values = f"{result[tuple(where)].item()}, not {expected[tuple(where)].item()}"
        require(False, f"element {where} is {values}: the product itself is in bfloat16")
    require(result.requires_grad, "no gradient reaches `w`")
    (gradient,) = torch.autograd.grad(result.sum(), w)
    require(gradient.dtype == torch.float32, f"the gradient of `w` has dtype {gradient.dtype}")


# --- 10_subclasses ---------------------------------------------------------------------------------------------------


class Two(torch.Tensor):
    """A wrapper subclass with two parts and a word. Ops run on both parts. The word is the context for flattening."""

    def __new__(cls, one: Any, other: Any, word: str = "") -> Two:
        """Make the wrapper. ``__init__`` stores the parts in it."""
        wrapper: Two = wrapper_like(cls, one)
        return wrapper

    def __init__(self, one: Any, other: Any, word: str = "") -> None:
        self.other, self.one, self.word = other, one, word

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        """Return the names of the parts, and the context."""
        return ["other", "one"], self.word

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: str, size: Any, stride: Any) -> Two:
        """Build a wrapper from parts."""
        return Two(inner["one"], inner["other"], context)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without the op
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an op on both parts."""
        parts = (
            torch_internals.pytree.tree_map_only(cls, operator.attrgetter(name), args) for name in ("one", "other")
        )
        return cls(*(func(*each, **(kwargs or {})) for each in parts))


@new_exercise("subclasses")
def take_apart(answer: Answer) -> None:
    """Write `answer(t)`: the list of all plain tensors that `t` consists of. The parts of a wrapper may be wrappers.

    - A tensor is a wrapper if it has `__tensor_flatten__`. A plain tensor consists only of itself.
    - `names, context = t.__tensor_flatten__()`. The parts are the attributes with these names, in this order.
    - Let `answer` call itself for each part, and join the lists.
    """
    a, b, c = torch.ones(2), torch.zeros(2), torch.arange(2.0)
    for wrapper, expected, what in (
        (Two(a, b), [b, a], "a wrapper of two tensors"),
        (Two(Two(a, b), c), [c, b, a], "a wrapper of a wrapper and a tensor"),
        (a, [a], "a plain tensor"),
    ):
        tensors = answer(wrapper)
        require(isinstance(tensors, (list, tuple)), f"for {what} it returns a {type(tensors).__name__}, not a list")
        require(len(tensors) == len(expected), f"for {what} it returns {len(tensors)} tensors, not {len(expected)}")
        plain = not any(isinstance(each, Two) for each in tensors)
        require(plain, f"for {what} it returns a list that contains a wrapper")
        require(all(map(operator.is_, tensors, expected)), f"for {what} it returns other tensors, or another order")


@new_exercise("subclasses")
def put_together(answer: Answer) -> None:
    """Write `answer(old, parts)`: a wrapper of the class of `old` with these parts, in the order of the names of `old`.

    - From `old` you need its class, the names of its parts, and its context.
    - `names, context = old.__tensor_flatten__()`, and `dict(zip(names, parts))` has the parts by name.
    - Call `type(old).__tensor_unflatten__(parts_by_name, context, size, stride)` with the size and strides of `old`.
    """
    parts = [torch.arange(3.0), torch.ones(3)]
    for word in ("", "kept"):
        wrapper = answer(Two(torch.zeros(3), torch.zeros(3), word), parts)
        require(isinstance(wrapper, Two), f"the result is a {type(wrapper).__name__}; it must have the class of `old`")
        for name, part in zip(wrapper.__tensor_flatten__()[0], parts, strict=True):
            place = {id(each): f"parts[{number}]" for number, each in enumerate(parts)}
            lies = place.get(id(getattr(wrapper, name)), "another tensor")
            wrong = f"its part `{name}` is `{lies}`, not `{place[id(part)]}`: `old` names its parts in another order"
            require(getattr(wrapper, name) is part, wrong + " than `__init__` takes them")
        require(wrapper.word == word, f"the attribute `word` of `old` is {word!r}, and of the result {wrapper.word!r}")


def times(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y


@new_exercise("subclasses", takes="number", program=times)
def how_many_inputs(answer: float) -> None:
    """How many tensors are inputs of the graph if `x` is `Pair(Pair(s, t), u)` and `y` is `t`? All three are plain.

    - Take `x` apart until only plain tensors are left.
    - `y` is a plain tensor, and you have seen it already.
    - If the same tensor is passed twice, it is one input of the graph (`06_inputs_that_share`).
    """
    s, t, u = torch.ones(2), torch.ones(2), torch.ones(2)
    with aotlab.Report.record() as recording:
        aotlab.compile(times, backend="eager")(Two(Two(s, t), u), t)
    (graph,) = (graph for frame in recording.report().frames for graph in frame.graphs)
    inputs = sum(placeholder.user_name != "" for placeholder in graph.placeholders)
    require(answer == inputs, f"it is not {answer}; list the plain tensors of `x` and of `y`")
