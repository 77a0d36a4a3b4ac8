"""The records that `observe` makes of a call."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from aotlab.errors import RandomOpError, UsageError
from aotlab.verification.observables import Call, CallerStep, cotangent, flatten, observe

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Box:
    content: Any
    label: str


def call(*args: Any, **named: torch.Tensor) -> Call:
    """Make a call whose tensor arguments are x0, x1, …; ``named`` are watched."""
    names = [(f"x{index}", value) for index, value in enumerate(args) if isinstance(value, torch.Tensor)]
    return Call(args=args, inputs=tuple(names), watched=tuple(named.items()))


def state(observation, name):
    """Return the observation of one tensor."""
    return next(state for state in observation.tensors if state.name == name)


def test_outputs_are_flattened_through_all_containers():
    """Every leaf gets the expression that reaches it, and the nesting is kept as text."""
    tensor = torch.ones(2)
    text, leaves = flatten((Pair(tensor, 1), {"k": [None, Box(2.0, "b")]}, ()), "out")
    assert text == (
        f"tuple({__name__}.Pair(left=Tensor, right=value), "
        f"dict(k=list(value, {__name__}.Box(content=value, label=value))), tuple())"
    )
    names = [name for name, _ in leaves]
    assert names == ["out[0].left", "out[0].right", "out[1]['k'][0]", "out[1]['k'][1].content", "out[1]['k'][1].label"]


def test_storage_partition_and_identity():
    """Tensors are grouped by storage under the first name in it, and objects under their first name."""
    x = torch.arange(6.0)
    seen = observe(lambda a: (a, a[2:], a.clone()), call(x))
    assert [state(seen, name).same_as for name in ("out[0]", "out[1]", "out[2]")] == ["x0", "out[1]", "out[2]"]
    assert [state(seen, name).shares_with for name in ("out[0]", "out[1]", "out[2]")] == ["x0", "x0", "out[2]"]
    assert (state(seen, "out[1]").spec.offset, state(seen, "out[1]").spec.storage_bytes) == (2, 24)


def test_mutation_shows_in_value_and_version():
    """A mutated input has its new value and a moved counter; one that is only read has neither."""
    x, y = torch.zeros(2), torch.ones(2)
    seen = observe(lambda a, b: a.add_(b), call(x, y))
    assert [state(seen, name).version_moved for name in ("x0", "x1")] == [True, False]
    assert state(seen, "x0").value.tolist() == [1.0, 1.0]
    assert state(seen, "out").version_moved is None


def test_values_are_from_before_the_backward():
    """An observation is a copy: later changes to the tensors do not affect it."""
    x = torch.zeros(2)
    seen = observe(lambda a: a, call(x))
    x.add_(1)
    assert state(seen, "out").value.tolist() == [0.0, 0.0]


def test_gradient_of_an_unreached_leaf_is_none():
    """None and zeros are different observations."""
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen = observe(lambda a, b: (a * 2).sum() + 0 * b.sum(), call(x, y))
    none = observe(lambda a, b: (a * 2).sum(), call(torch.ones(2, requires_grad=True), y.detach().requires_grad_()))
    assert [gradient.value is None for gradient in seen.gradients] == [False, False]
    assert [gradient.value is None for gradient in none.gradients] == [False, True]


def test_a_mutated_input_is_differentiated_like_an_output():
    """The gradient flows through the new value of a non-leaf input to the leaf behind it."""
    leaf = torch.ones(3, requires_grad=True)
    x = leaf * 1
    seen = observe(_triple, call(x, leaf=leaf))
    assert seen.differentiated == ("x0",)
    (gradient,) = [gradient for gradient in seen.gradients if gradient.leaf == "leaf"]
    assert torch.equal(gradient.value, 3 * cotangent(x, 0))


def _triple(a: torch.Tensor) -> None:
    a.mul_(3)


@pytest.mark.parametrize(
    ("backward", "differentiated", "steps"),
    [
        ("all", ("out[0]", "out[1]"), 1),
        ("first", ("out[0]",), 1),
        ("each", ("out[0]", "out[1]"), 2),
        ("reversed", ("out[0]", "out[1]"), 2),
        ("twice", ("out[0]", "out[1]"), 2),
        (None, (), 0),
    ],
)
def test_which_outputs_are_backwarded(backward, differentiated, steps):
    """All at once, the first, one by one in either order with the gradients after each, all twice, or none."""
    x = torch.ones(2, requires_grad=True)
    seen = observe(lambda a: (a * 2, a * 3), call(x), backward=backward)
    assert seen.differentiated == differentiated
    assert len(seen.gradients) == steps
    if backward == "each":
        first, second = (gradient.value for gradient in seen.gradients)
        assert torch.equal(first, 2 * cotangent(x, 0))
        assert torch.equal(second, 2 * cotangent(x, 0) + 3 * cotangent(x, 1))
    if backward == "reversed":
        assert torch.equal(seen.gradients[0].value, 3 * cotangent(x, 1))
    if backward == "twice":
        assert torch.equal(seen.gradients[1].value, 2 * seen.gradients[0].value)


@pytest.mark.parametrize("backward", [(0,), "last", 0, True, []])
def test_what_does_not_say_which_outputs(backward):
    """An unclear choice of outputs is an error before the function is called."""
    called = []
    with pytest.raises(UsageError, match="pass one of 'all', 'first', 'each', 'reversed', 'twice', None"):
        observe(lambda: called.append(1), call(), backward=backward)
    assert called == []


def test_grad_mode_is_observed_and_put_back():
    """A function that switches grad mode is seen to, and the observer is not infected."""
    seen = observe(lambda: torch.set_grad_enabled(False) and None, call())
    assert seen.grad_mode is False
    assert torch.is_grad_enabled()


def test_exceptions_are_observed():
    """The type and the first line of the message, in the call and in the backward; refusals by their reason."""

    def fail() -> None:
        raise ValueError("first\nsecond")

    def refuse() -> None:
        raise RandomOpError("rand")

    seen = observe(fail, call()).failure
    assert (seen.phase, seen.type, seen.message, seen.refused) == ("call", ValueError, "first", None)
    assert observe(refuse, call()).failure.refused == "RandomOp"

    def stale(a: torch.Tensor) -> torch.Tensor:
        b = a * 1
        c = b.square()
        b.add_(1)
        return c

    late = observe(stale, call(torch.ones(2, requires_grad=True)))
    assert late.failure is None
    assert (late.backward_failure.phase, late.backward_failure.type) == ("backward", RuntimeError)


def test_an_output_that_cannot_be_looked_at_is_a_failure():
    """A view whose history was made invalid raises at its first use; the call counts as raising."""

    def broken(a: torch.Tensor) -> torch.Tensor:
        b = a * 1
        first, _ = b.unbind(0)
        b.mul_(2)
        return first

    assert observe(broken, call(torch.ones(2, 2, requires_grad=True))).failure.type is RuntimeError


def test_random_state_is_observed():
    """Two calls that draw differently leave different states behind."""
    torch.manual_seed(0)
    one = observe(lambda: torch.rand(1), call())
    torch.manual_seed(0)
    two = observe(lambda: torch.rand(1), call())
    torch.manual_seed(0)
    other = observe(lambda: torch.rand(5, 5), call())
    assert one.random_state == two.random_state != other.random_state


def test_python_leaves_keep_type_and_text():
    """True and 1 differ. An object without its own ``__repr__`` is identified by its type."""
    seen = observe(lambda: (True, 1, 1.0, None, object()), call())
    assert [(leaf.type_name, leaf.text) for leaf in seen.leaves] == [
        ("bool", "True"),
        ("int", "1"),
        ("float", "1.0"),
        ("NoneType", "None"),
        ("object", "<object>"),
    ]


def test_inference_tensors_have_no_counter():
    """An inference tensor's version cannot be read, so the observation has no version."""
    with torch.inference_mode():
        x = torch.ones(2)
        seen = observe(lambda a: a.add_(1), call(x))
    assert state(seen, "x0").version_moved is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.complex64])
def test_cotangents_are_exact_and_uneven(dtype):
    """No element is zero, neighbours differ, outputs get different ones, and no dtype rounds them."""
    x = torch.zeros(3, 5, dtype=dtype)
    values = cotangent(x, 0)
    assert values.dtype == dtype
    assert bool((values != 0).all())
    assert torch.equal(values.to(torch.complex128), cotangent(x.to(torch.complex128), 0))
    assert not torch.equal(values, cotangent(x, 1))
    assert not torch.equal(values.reshape(5, 3).t(), values)


def acting(x: torch.Tensor, *, before: Any = None, after: Any = None, seen: Any = None) -> Call:
    """Make a call of ``x0`` after which the caller does something: functions of the list of outputs."""

    def steps(functions: Any) -> Any:
        if functions is None:
            return None
        return lambda out: [
            CallerStep(text=name, run=lambda run=run: run(out), differentiates=name.startswith("backward"))
            for name, run in functions.items()
        ]

    return Call(args=(x,), inputs=(("x0", x),), before=steps(before), after=steps(after), seen=seen)


def nonleaf() -> torch.Tensor:
    """Make a tensor that requires grad and may be written."""
    return torch.ones(2, requires_grad=True) * 1


def test_what_the_caller_does_is_observed():
    """Results are copied, errors written down; a backward that raised is the last thing that is done."""
    steps = {
        "doubled": lambda out: out[0].mul_(2),
        "bad": lambda out: out[0].view(7),
        "backward": lambda out: out[0].backward(torch.ones(3)),
        "never": lambda out: out[0].zero_(),
    }
    seen = observe(lambda a: a * 3, acting(nonleaf(), before=steps))
    assert [step.name for step in seen.steps] == ["doubled", "bad", "backward"]
    assert seen.steps[0].values[0].tolist() == [6.0, 6.0]
    assert [step.failure and step.failure.type for step in seen.steps] == [None, RuntimeError, RuntimeError]
    assert seen.gradients == ()


def test_the_caller_acts_before_and_after_the_backward():
    """An action before the backward affects it, an action after it does not, and the final state shows both."""
    x = torch.ones(2, requires_grad=True)
    call = acting(x, before={"double": lambda out: out[0].mul_(2)}, after={"zero": lambda out: out[0].detach().zero_()})
    seen = observe(lambda a: a * 3, call)
    assert torch.equal(seen.gradients[0].value, 6 * cotangent(x, 0))
    assert [step.when for step in seen.steps] == ["before", "after"]
    (end,) = [end for end in seen.finally_ if end.name == "out"]
    assert end.value.tolist() == [0.0, 0.0]


def test_hooks_of_the_caller_are_observed():
    """Each call of a hook with its gradient, in order; and which order the gradient dictates."""
    gradients: list[Any] = []
    hook = {
        str(n): lambda out, n=n: out[n].register_hook(lambda gradient: gradients.append((f"out[{n}]", gradient)))
        for n in range(3)
    }

    def chain(a):
        first = a * 2
        return first, first * 3, a * 5

    seen = observe(chain, acting(nonleaf(), before=hook, seen=gradients))
    assert sorted(call.name for call in seen.hooks) == ["out[0]", "out[1]", "out[2]"]
    by_name = {call.name: call.value for call in seen.hooks}
    x = torch.ones(2)
    assert torch.equal(by_name["out[0]"], cotangent(x, 0) + 3 * cotangent(x, 1))
    assert seen.hook_order == (("out[1]", "out[0]"),)


def test_retained_gradients_are_observed():
    """That a tensor retains its gradient, be it the function or the caller who said so, and the gradient."""

    def retaining(a):
        b = a * 2
        b.retain_grad()
        return b

    seen = observe(retaining, acting(nonleaf()))
    assert state(seen, "out").retains_grad
    assert [gradient.leaf for gradient in seen.gradients] == ["out"]
    seen = observe(lambda a: a * 2, acting(nonleaf(), before={"retain": lambda out: out[0].retain_grad()}))
    assert not state(seen, "out").retains_grad
    assert torch.equal(seen.gradients[0].value, cotangent(torch.ones(2), 0))


def test_a_call_can_be_made_without_grad_mode():
    """The function runs in the call's own grad mode; the observer's is as before."""
    x = torch.ones(2, requires_grad=True)
    seen = observe(lambda a: a * 2, Call(args=(x,), inputs=(("x0", x),), grad_mode=False))
    assert not state(seen, "out").spec.requires_grad
    assert (seen.grad_mode, torch.is_grad_enabled()) == (False, True)


def test_a_tensor_that_cannot_be_looked_at_in_the_end():
    """A write by the caller can make another output invalid. The final state then records this error."""
    parts = acting(nonleaf(), before={"write": lambda out: out[0].mul_(2)})

    def several(a):
        b = a * 1
        return b, b.unbind(0)[0]

    seen = observe(several, parts)
    assert [end.text for end in seen.finally_ if end.name == "out[1]"] == ["RuntimeError"]


def test_parts_of_one_unbind_are_in_no_order():
    """They have one node, but no gradient passes the one on its way to the other."""
    gradients: list[Any] = []
    hook = {
        str(n): lambda out, n=n: out[n].register_hook(lambda gradient: gradients.append((f"out[{n}]", gradient)))
        for n in range(2)
    }

    def parts(a):
        first, second = a.unbind(0)
        return first, second * 3

    seen = observe(parts, acting(torch.ones(2, 2, requires_grad=True), before=hook, seen=gradients))
    assert len(seen.hooks) == 2
    assert seen.hook_order == ()


def test_a_final_state_says_that_torch_failed_an_assertion():
    """An assertion that fails in torch itself is distinguished from a correct error about the tensor."""
    before = {"retain": lambda out: out[0].retain_grad(), "unsqueeze": lambda out: out[0].unsqueeze_(0)}
    after = {"write": lambda out: out[0].mul_(2), "write unseen": lambda out: out[0].detach().add_(1)}
    parts = acting(torch.ones(2, 1, requires_grad=True), before=before, after=after)
    seen = observe(lambda a: (a / 2).view(-1), parts)
    assert [end.text for end in seen.finally_ if end.name == "out"] == ["RuntimeError: INTERNAL ASSERT FAILED"]
