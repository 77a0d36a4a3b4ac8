"""Copies of arguments alias each other as the originals do."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import aotlab
from aotlab.errors import UsageError
from aotlab.verification.clones import Cloner, argument_tensors, captured_tensors, random_state_restored, restored


def copies(*args, **kwargs):
    """Copy the arguments of a function that takes anything."""
    return Cloner(lambda *args, **kwargs: None).call(args, kwargs)


def place(tensor):
    """Say where a tensor lies: address and size of its storage, offset, strides."""
    return (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tensor.stride(),
        tensor.untyped_storage().nbytes(),
    )


def test_values_and_layout_are_kept_and_memory_is_not():
    """A copy has the original's sizes, strides, offset and storage size, in separate memory."""
    original = torch.arange(12.0).reshape(3, 4)[1:, ::2]
    (copy,) = copies(original).args
    assert torch.equal(copy, original)
    assert place(copy)[1:] == place(original)[1:]
    assert place(copy)[0] != place(original)[0]


def test_the_same_object_stays_the_same_object():
    """Passed twice, nested, or as a keyword: one object in the copy too."""
    x = torch.ones(2)
    call = copies(x, [x, {"k": x}], w=x)
    assert call.args[0] is call.args[1][0] is call.args[1][1]["k"] is call.kwargs["w"]
    assert [name for name, _ in call.inputs] == ["args[0]", "args[1][0]", "args[1][1]['k']", "kwargs['w']"]


def test_views_stay_views_of_their_base():
    """A write to the copy of one view shows in the copy of the base and of the other view."""
    base = torch.zeros(6)
    call = copies(base[2:], base[:4], base)
    left, right, whole = call.args
    left.add_(1)
    assert right.tolist() == [0, 0, 1, 1]
    assert whole.tolist() == [0, 0, 1, 1, 1, 1]
    assert base.tolist() == [0] * 6


def test_a_base_that_is_not_passed_is_watched():
    """The base of a view is copied along, so that writes to it are noticed."""
    call = copies(torch.zeros(6)[2:])
    call.args[0].add_(1)
    assert [(name, tensor.tolist()) for name, tensor in call.watched] == [("base of args[0]", [0, 0, 1, 1, 1, 1])]


def test_gradients_flow_through_a_view_to_its_base():
    """The autograd relation between a differentiable view and its base is kept."""
    leaf = torch.ones(4, requires_grad=True)
    call = copies(leaf, leaf[1:3])
    copy, view = call.args
    (view * 2).sum().backward()
    assert copy.grad.tolist() == [0, 2, 2, 0]
    assert leaf.grad is None


def test_a_non_leaf_has_a_leaf_behind_it_and_can_be_mutated():
    """In-place writes are legal on the copy of a non-leaf, and its gradient arrives at a watched leaf."""
    leaf = torch.ones(2, 3, requires_grad=True)
    original = (leaf * 2).t()
    call = copies(original)
    (copy,) = call.args
    assert (copy.is_leaf, copy.requires_grad, copy.stride()) == (False, True, (1, 3))
    copy.mul_(3)
    copy.sum().backward()
    behind = dict(call.watched)["leaf behind base of args[0]"]
    assert behind.grad.tolist() == [[3.0] * 3] * 2
    assert original.tolist() == [[2.0] * 2] * 3


def test_a_detached_alias_shares_memory_and_version_but_no_gradient():
    """``x`` and ``x.detach()``: a write to one moves the other's counter, in the copy as in the original."""
    x = torch.ones(3, requires_grad=True) * 1
    call = copies(x, x.detach())
    copy, detached = call.args
    before = copy._version
    detached.add_(1)
    assert copy.tolist() == [2, 2, 2]
    assert copy._version > before
    assert (copy.requires_grad, detached.requires_grad, detached._base) == (True, False, None)


def test_windows_of_different_dtypes_share_bytes():
    """A storage seen as two dtypes is one storage in the copy."""
    x = torch.zeros(4)
    call = copies(x, x.view(torch.int32))
    call.args[1].fill_(0x3F800000)
    assert call.args[0].tolist() == [1.0] * 4


def test_views_made_under_no_grad_have_no_history():
    """A view of a differentiable tensor that was made under no_grad stays one."""
    leaf = torch.ones(4, requires_grad=True)
    with torch.no_grad():
        view = leaf[1:]
    call = copies(leaf, view)
    assert (call.args[1].is_leaf, call.args[1].grad_fn, call.args[1]._base is call.args[0]) == (True, None, True)


def test_a_leaf_view_and_its_own_view():
    """A leaf that is itself a view stays a leaf. A view of it gets a separate leaf."""
    leaf = torch.arange(6.0).reshape(2, 3).requires_grad_()
    call = copies(leaf, leaf[0])
    assert [tensor.is_leaf for tensor in call.args] == [True, False]
    assert place(call.args[0])[0] == place(call.args[1])[0]


def test_gradients_that_are_there_come_along():
    """``.grad`` is copied, so that accumulation is observable."""
    x = torch.ones(2, requires_grad=True)
    x.grad = torch.full((2,), 5.0)
    (copy,) = copies(x).args
    assert copy.grad.tolist() == [5.0, 5.0]
    assert copy.grad is not x.grad


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return self.second(self.first(x))


def test_modules_are_copied_whole():
    """Tied weights stay tied, the original is untouched, and the module's state lives on from call to call."""
    model = Tied()
    cloner = Cloner(model)
    copy = cloner.function
    assert copy.first.weight is copy.second.weight
    assert copy.first.weight is not model.first.weight
    assert isinstance(copy.first.weight, nn.Parameter)
    for _ in range(2):
        call = cloner.call((torch.ones(2, 3),), {})
        cloner.function(*call.args)
    assert (copy.seen.item(), model.seen.item()) == (2.0, 0.0)
    assert [name for name, _ in cloner.captured] == ["first.weight", "first.bias", "second.bias", "seen"]


def test_arguments_that_alias_a_parameter():
    """A parameter passed to the module that owns it, and a view of it, follow the module's copy."""
    model = nn.Linear(2, 2)
    cloner = Cloner(model)
    weight, row = cloner.call((model.weight, model.weight[0]), {}).args
    assert weight is cloner.function.weight
    assert place(row)[0] == place(weight)[0]


def test_parts_of_wrappers_are_copied_as_tensors():
    """Their windows stay, and which of them are one tensor or share memory, also with plain arguments."""
    memory = torch.arange(6.0)
    even, odd = memory[::2], memory[1::2]
    first, second, third = copies(TwoTensor(even, even), TwoTensor(odd, torch.zeros(6)[1::2]), memory).args
    assert first.a is first.b
    assert (first.a.stride(), second.a.stride(), second.a.storage_offset()) == ((2,), (2,), 1)
    third.add_(1)
    assert (first.a.tolist(), second.a.tolist(), memory[0].item()) == ([1.0, 3.0, 5.0], [2.0, 4.0, 6.0], 0.0)


IN_A_COMPREHENSION = torch.ones(2)


def test_globals_of_comprehensions_and_lambdas_are_found():
    """Their code is another's."""
    for function in (lambda xs: [IN_A_COMPREHENSION * x for x in xs], lambda: lambda: IN_A_COMPREHENSION):
        assert [name for name, _ in captured_tensors(function)] == ["IN_A_COMPREHENSION"]


def test_captured_tensors_are_found():
    """In closures, defaults, partials, bound objects and named globals, each once."""
    x, model = torch.ones(2), nn.Linear(2, 2)

    def inner(a, scale=x):
        return model(a) * scale

    def outer(a):
        return inner(a)

    names = [name for name, _ in captured_tensors(outer)]
    assert names == ["model.weight", "model.bias", "defaults[0]"]
    assert next(name for name, _ in captured_tensors(functools.partial(outer, w=x))) == "keywords['w']"
    assert [name for name, _ in captured_tensors(model.forward)] == ["self.weight", "self.bias"]
    assert [name for name, _ in captured_tensors(model)] == ["weight", "bias"]


#: Two globals; one has the same name as a method.
mul, sub = torch.ones(2), torch.ones(2)


def test_a_method_is_no_global():
    """Of the names in a function's code, only the names that it reads as globals count."""
    assert [name for name, _ in captured_tensors(lambda x: x.mul(2) + sub)] == ["sub"]


def test_captured_tensors_are_put_back():
    """Values, gradients and flags are restored, and the restoration does not change a version counter."""
    w, grad = torch.ones(2, requires_grad=True), torch.full((2,), 7.0)
    w.grad = grad
    version = w._version
    with restored((("w", w),)):
        with torch.no_grad():
            w.mul_(5)
        moved = w._version
        (w * 2).sum().backward()
        w.requires_grad_(False)
    assert (w.tolist(), w.grad.tolist(), w.requires_grad) == ([1.0, 1.0], [7.0, 7.0], True)
    assert w.grad is grad
    assert w._version == moved > version


def test_memory_of_captured_tensors_is_put_back():
    """After an assignment to `.data` or a `t_()`, the tensor gets back the memory, sizes and strides that it had."""
    w, v = torch.arange(6.0).view(2, 3).requires_grad_(), torch.arange(6.0).view(2, 3)
    memory = w.data_ptr()
    with restored((("w", w), ("v", v))):
        w.data = torch.zeros(5)
        v.t_().mul_(2)
        version = v._version
    assert (w.data_ptr(), w.tolist(), w.requires_grad) == (memory, [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], True)
    assert (v.stride(), v.tolist(), v._version) == ((3, 1), w.tolist(), version)


def test_higher_precision_keeps_the_alias_pattern():
    """With a dtype, floating storages are converted whole; integers stay."""
    base = torch.arange(6.0)
    cloner = Cloner(lambda *args: None, dtype=torch.float64)
    call = cloner.call((base[1:3], base[2:], torch.arange(3), torch.ones(2, dtype=torch.complex64)), {})
    left, right, whole, complex_ = call.args
    assert [tensor.dtype for tensor in call.args] == [torch.float64, torch.float64, torch.int64, torch.complex128]
    left.zero_()
    assert right.tolist() == [0, 3, 4, 5]
    assert (right.storage_offset(), right.untyped_storage().nbytes(), whole.tolist()) == (2, 48, [0, 1, 2])
    assert complex_.tolist() == [1, 1]


def test_higher_precision_of_a_mixed_storage_is_an_error():
    """Bytes that are seen as two dtypes have no counterpart in float64."""
    x = torch.zeros(4)
    with pytest.raises(UsageError, match="several dtypes"):
        Cloner(lambda *args: None, dtype=torch.float64).call((x, x.view(torch.int32)), {})


def test_what_cannot_be_copied_is_an_error():
    """A generator cannot be copied; the error says so."""
    with pytest.raises(UsageError, match="cannot be copied"):
        copies(value for value in range(3))
    complex_ = torch.ones(2, dtype=torch.complex64, requires_grad=True) * 1
    with pytest.raises(UsageError, match="cannot be rebuilt"):
        copies(torch.view_as_real(complex_))
    with FakeTensorMode(), pytest.raises(UsageError, match="no values to compare"):
        copies(torch.empty(2))


def test_conjugate_views_stay_conjugate():
    """The conjugate bit survives the copy."""
    (copy,) = copies(torch.tensor([1 + 2j]).conj()).args
    assert (copy.is_conj(), copy.tolist()) == (True, [1 - 2j])


def test_arguments_are_named_as_the_function_names_them():
    """Parameter names, positions in ``*args`` and keys in ``**kwargs``; without a match, plain positions."""
    x = torch.ones(1)

    def function(a, *rest, **named):
        return None

    assert [name for name, _ in argument_tensors(function, (x, x, [x]), {"k": x})] == [
        "a",
        "rest[0]",
        "rest[1][0]",
        "named['k']",
    ]
    assert [name for name, _ in argument_tensors(lambda: None, (x,), {})] == ["args[0]"]
    assert [name for name, _ in argument_tensors(nn.Linear(1, 1), (x,), {})] == ["input"]


def test_random_state_is_put_back():
    """Random draws inside the block do not advance the generator outside."""
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with random_state_restored():
        torch.rand(7)
    assert torch.equal(torch.rand(2), expected)


def test_a_freed_storage_is_copied_as_freed():
    """A parameter without memory has a copy without memory. The two runs of a comparison may allocate and free it."""
    w = nn.Parameter(torch.zeros(4))
    w.untyped_storage().resize_(0)
    (copy,) = copies(w).args
    assert isinstance(copy, nn.Parameter)
    assert place(copy)[1:] == place(w)[1:] == (0, (1,), 0)

    def f(w, values):
        w.untyped_storage().resize_(16)
        with torch.no_grad():
            w.copy_(values)
        y = w.sin()
        w.untyped_storage().resize_(0)
        return y

    result = aotlab.verify(f, w, torch.arange(4.0), frontend="dynamo")
    assert result.first is None
    assert w.untyped_storage().nbytes() == 0

    def g(values):
        return f(captured, values)

    captured = w.detach()
    assert aotlab.verify(g, torch.arange(4.0), frontend="dynamo").first is None
    captured.untyped_storage().resize_(16)
    captured.copy_(torch.ones(4))
    with restored((("captured", captured),)):
        captured.untyped_storage().resize_(0)
    assert captured.tolist() == [1.0] * 4
