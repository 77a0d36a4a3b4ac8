"""The exercises of the course's pages 08 to 10; see `course`."""

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
    """Compile a function, make some calls, and count the graphs that they needed."""
    compiled = aotlab.compile(function, backend="eager")
    with warnings.catch_warnings(), aotlab.Report.record() as recording:
        warnings.simplefilter("ignore")
        for call in calls:
            compiled(*call)
    return sum(graph.status == "compiled" for frame in recording.report().frames for graph in frame.graphs)


# --- 08_again_and_again ----------------------------------------------------------------------------------------------


@new_exercise("recompiles")
def another_graph(answer: Answer) -> None:
    """Write `answer(x)`: a tensor of the shape, dtype and values of `x`, which the same graph does not serve.

    - Go through the guards of a tensor: of what do they speak besides shape and dtype?
    - Strides are guarded, and whether gradients are wanted.
    - A copy in another order of memory, or one that requires grad.
    """
    x = torch.arange(6.0).view(2, 3)
    found = answer(x)
    require(isinstance(found, torch.Tensor), f"the result is of type {type(found).__name__}, and is to be a tensor")
    require(found.dtype == x.dtype, f"the result has dtype {found.dtype}")
    require(torch.equal(found, x), f"of {x.tolist()} it makes {found.tolist()}")
    served = f"it is served, too: {window(found)}, as `x`, and requires_grad={found.requires_grad}, as `x`"
    require(_graphs(lambda x: x * 2, (x,), (found,)) == 2, served)


def folded(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 5:
        return x[:5].sum()
    return x.sum()


@new_exercise("recompiles", takes="number", program=folded)
def how_many_graphs(answer: float) -> None:
    """How many graphs does this program need without `dynamic=True`, if `x` has 3, 4, 2, 8, 5, 1 and then 9 elements?

    - The first graph is for 3 elements alone. At the second call the size has become another one.
    - A graph with a symbol holds for the sizes that go the same way at the `if`.
    - And there is a size that is never a symbol.
    """
    calls = [(torch.ones(size),) for size in (3, 4, 2, 8, 5, 1, 9)]
    first = f"3, 4 and 2 elements alone need {_graphs(folded, *calls[:3])}"
    require(answer == _graphs(folded, *calls), f"it is not {answer}: {first}, and what do the other four need?")


def doubled(x: torch.Tensor, n: int) -> torch.Tensor:
    for _ in range(n):
        x = x * 2
    return x


@new_exercise("recompiles", program=doubled)
def fewer_graphs(answer: Answer) -> None:
    """Write `answer(x, n)`, which returns the same as this program, and needs two graphs for all `n` from 1 to 8.

    - The loop fixes `n`, since each `n` makes another list of ops. Calculate with `n` instead.
    - To multiply by 2 so often is to multiply once, by a power of 2.
    - Python's operator for powers works for numbers, and an op of a graph can take what comes out.
    """
    x = torch.tensor([1.0, -3.0])
    for n in range(1, 9):
        found, expected = answer(x, n), doubled(x, n)
        wrong = f"for n = {n} it makes {found.tolist()} of {x.tolist()}, and not {expected.tolist()}"
        require(torch.equal(found, expected), wrong)
    graphs = _graphs(answer, *((x, n) for n in range(1, 9)))
    require(graphs, "it cannot be compiled, and runs eagerly")
    require(graphs <= 2, f"it needs {graphs} graphs")


# --- 09_randomness_and_modes -----------------------------------------------------------------------------------------


@new_exercise("randomness")
def mask_again(answer: Answer) -> None:
    """Write `answer(x, state)`: the mask that `dropout(x, 0.5)` draws from `state`. Leave the generator as it was.

    - A mask is `True` where an element was kept. Dropout of ones shows it, whatever is in `x`.
    - Put `state` into the generator, draw, and put back what was there before.
    - `torch.get_rng_state()`, `torch.set_rng_state(…)`; or `with torch.random.fork_rng():`, which puts it back for you.
    """
    with torch.random.fork_rng(devices=[]):
        for seed in (1, 2):
            x = torch.arange(float(8 * seed))
            torch.manual_seed(seed)
            state = torch.get_rng_state()
            expected = functional.dropout(torch.ones_like(x), 0.5) != 0
            torch.manual_seed(0)
            before = torch.get_rng_state()
            found = answer(x, state)
            require(isinstance(found, torch.Tensor) and found.dtype == torch.bool, "the mask is not of booleans")
            wrong = f"for x = {x.tolist()} it was {expected.int().tolist()}, not {found.int().tolist()}"
            require(torch.equal(found, expected), wrong)
            require(torch.equal(torch.get_rng_state(), before), "the state of the generator is another one afterwards")


def draws_some(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    torch.rand_like(a)
    b = functional.dropout(b, 0.5, training=False)
    c = c + torch.zeros_like(c).normal_()
    with torch.no_grad():
        return b + c + functional.dropout(d, 0.1)


@new_exercise("randomness", program=draws_some, takes="names")
def what_is_drawn(answer: Any) -> None:
    """For which of its inputs does this program draw random numbers? Answer as in `"a, b"`.

    - It does not matter whether somebody uses what was drawn.
    - Nor does it matter whether gradients are wanted.
    - Outside of training, dropout returns what it was given.
    """
    names = ("a", "b", "c", "d")
    said = set(answer.replace(",", " ").split() if isinstance(answer, str) else answer)
    require(said <= {*names}, f"the names are {', '.join(names)}")

    def left(without: str) -> torch.Tensor:
        """Return the state after a call, for which one of the inputs has no elements, so that none is drawn for it."""
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
    """Write `answer(x, w)`, which returns what `x @ w` is under autocast to `bfloat16`, without autocast.

    - The inputs are `float32`. What does autocast do with them before the product?
    - It is not the result that is cast.
    - `x.bfloat16()` makes a copy in the other dtype; autograd casts the gradient back.
    """
    x, w = torch.linspace(0, 1, 12).view(3, 4), torch.linspace(1, 2, 8).view(4, 2).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = x @ w
    found = answer(x, w)
    require(isinstance(found, torch.Tensor), f"the result is of type {type(found).__name__}, and is to be a tensor")
    names = getattr(getattr(answer, "__code__", None), "co_names", ())
    require("autocast" not in names, "it uses autocast")
    require(found.dtype == torch.bfloat16, f"the result has dtype {found.dtype}")
    require(found.shape == expected.shape, f"the result has shape {tuple(found.shape)}")
    where = (found != expected).nonzero()[:1].flatten().tolist()
    if where:
        values = f"{found[tuple(where)].item()}, not {expected[tuple(where)].item()}"
        require(False, f"element {where} is {values}: the product itself is in bfloat16")
    require(found.requires_grad, "no gradient reaches `w`")
    (gradient,) = torch.autograd.grad(found.sum(), w)
    require(gradient.dtype == torch.float32, f"the gradient of `w` has dtype {gradient.dtype}")


# --- 10_subclasses ---------------------------------------------------------------------------------------------------


class Two(torch.Tensor):
    """A wrapper of two tensors with a word that is kept beside them; ops run on both."""

    def __new__(cls, one: Any, other: Any, word: str = "") -> Two:
        """Make the outside."""
        made: Two = wrapper_like(cls, one)
        return made

    def __init__(self, one: Any, other: Any, word: str = "") -> None:
        self.other, self.one, self.word = other, one, word

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        """Take it apart."""
        return ["other", "one"], self.word

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: str, size: Any, stride: Any) -> Two:
        """Put it together."""
        return Two(inner["one"], inner["other"], context)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without the op
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an op on both."""
        parts = (
            torch_internals.pytree.tree_map_only(cls, operator.attrgetter(name), args) for name in ("one", "other")
        )
        return cls(*(func(*each, **(kwargs or {})) for each in parts))


@new_exercise("subclasses")
def take_apart(answer: Answer) -> None:
    """Write `answer(t)`: the list of all plain tensors of which `t` is made. The parts of a wrapper may be wrappers.

    - A tensor is a wrapper if it has `__tensor_flatten__`. A plain one is made of itself.
    - `names, context = t.__tensor_flatten__()`, and the parts are the attributes of these names, in this order.
    - Let `answer` call itself for each part, and join the lists.
    """
    a, b, c = torch.ones(2), torch.zeros(2), torch.arange(2.0)
    for made, expected, what in (
        (Two(a, b), [b, a], "a wrapper of two tensors"),
        (Two(Two(a, b), c), [c, b, a], "a wrapper of a wrapper and a tensor"),
        (a, [a], "a plain tensor"),
    ):
        found = answer(made)
        require(isinstance(found, (list, tuple)), f"of {what} it returns a {type(found).__name__}, and not a list")
        require(len(found) == len(expected), f"of {what} it returns {len(found)} tensors, not {len(expected)}")
        plain = not any(isinstance(each, Two) for each in found)
        require(plain, f"of {what} it returns a list with a wrapper in it")
        require(all(map(operator.is_, found, expected)), f"of {what} it returns other tensors, or in another order")


@new_exercise("subclasses")
def put_together(answer: Answer) -> None:
    """Write `answer(old, parts)`: a wrapper of the class of `old`, made of these parts, in the order of its names.

    - What you need of `old` is its class, the names of its parts, and what else is known of it: the context.
    - `names, context = old.__tensor_flatten__()`; and `dict(zip(names, parts))` has the parts by name.
    - `type(old).__tensor_unflatten__(parts_by_name, context, size, stride)`, with size and stride of `old`.
    """
    parts = [torch.arange(3.0), torch.ones(3)]
    for word in ("", "kept"):
        found = answer(Two(torch.zeros(3), torch.zeros(3), word), parts)
        require(isinstance(found, Two), f"the result is a {type(found).__name__}, and not of the class of `old`")
        for name, part in zip(found.__tensor_flatten__()[0], parts, strict=True):
            place = {id(each): f"parts[{number}]" for number, each in enumerate(parts)}
            lies = place.get(id(getattr(found, name)), "another tensor")
            wrong = f"its part `{name}` is `{lies}`, not `{place[id(part)]}`: `old` names its parts in another order"
            require(getattr(found, name) is part, wrong + " than `__init__` takes them")
        require(found.word == word, f"what else is known of `old` is {word!r}, and of the result {found.word!r}")


def times(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y


@new_exercise("subclasses", takes="number", program=times)
def how_many_inputs(answer: float) -> None:
    """How many tensors go into the graph, if `x` is `Pair(Pair(s, t), u)`, and `y` is `t`? The three are plain.

    - Take `x` apart, until only plain tensors are left.
    - `y` is a plain tensor, and one that you have met already.
    - The same tensor twice goes into a graph once (`06_inputs_that_share`).
    """
    s, t, u = torch.ones(2), torch.ones(2), torch.ones(2)
    with aotlab.Report.record() as recording:
        aotlab.compile(times, backend="eager")(Two(Two(s, t), u), t)
    (graph,) = (graph for frame in recording.report().frames for graph in frame.graphs)
    inputs = sum(placeholder.user_name != "" for placeholder in graph.placeholders)
    require(answer == inputs, f"it is not {answer}; list the plain tensors of `x` and of `y`")
