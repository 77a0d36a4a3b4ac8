"""Values that higher-order derivatives need from the forward, beyond the values that first derivatives need."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import Function, grad
from torch.autograd.function import once_differentiable

from aotlab.errors import DoubleBackwardError
from tests.engine_helpers import behind_dynamo, by_min_cut, compiled, record

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


WAYS = pytest.mark.parametrize("make", [compiled, behind_dynamo, by_min_cut])


def derivatives(function, args, order):
    """Return all derivatives up to ``order``. A gradient that does not exist is None."""
    out = function(*args)
    results = [out] if isinstance(out, torch.Tensor) else list(out)
    found = [result.detach() for result in results]
    scalar = sum(result.sin().sum() for result in results if result.requires_grad)
    for _ in range(order):
        gradients = grad(scalar, args, create_graph=True, allow_unused=True)
        found += [None if each is None else each.detach().clone() for each in gradients]
        terms = [each.square().sum() for each in gradients if each is not None and each.requires_grad]
        if not terms:
            break
        scalar = sum(terms)
    return found


def check(function, make, shapes, order, *, exact=True):
    """Compare derivatives with eager's."""
    torch.manual_seed(0)
    drawn = [torch.randn(shape) for shape in shapes]
    expected = derivatives(function, [each.clone().requires_grad_() for each in drawn], order)
    found = derivatives(make(function), [each.clone().requires_grad_() for each in drawn], order)
    assert len(expected) == len(found)
    for e, f in zip(expected, found, strict=True):
        assert (e is None) == (f is None)
        if e is not None and exact:
            assert torch.equal(e, f)
        elif e is not None:
            torch.testing.assert_close(f, e, rtol=1e-4, atol=1e-4)


def with_(make, use):
    """Return a value, and a value that is computed from it."""
    return make, use(make)


ORDERS = {
    "view of an input and an output": lambda x: with_(x.sin(), lambda v: v * x.view(-1) ** 2),
    "flat": lambda x: with_(x.sin(), lambda v: v * x.flatten().exp()),
    "transposed": lambda x: with_(x.tanh(), lambda v: v * x.t().sin()),
    "not from x": lambda x: with_(torch.ones(3) * 2 + x.detach(), lambda v: v * x.view(-1) ** 3),
    "only the second": lambda x: x.sin() * x.reshape(-1) ** 2,
}


@WAYS
@pytest.mark.parametrize("name", ORDERS)
def test_saved_values_in_any_order(name, make):
    """A derivative level that saves all values, in another order than the forward, reads the right ones."""
    check(ORDERS[name], make, [(3,)], 2, exact=name != "transposed")  # its derivative sums three or more terms


def detached_factor(x, y):
    """Multiply by a detached factor. At third order this program once read the wrong saved values."""
    return (x.detach() * y).exp() * x


def written_and_used(x, y):
    """Write a copy and use it twice."""
    v = x * 1
    v.exp_()
    return v, torch.outer(v, y).tanh().sum(1)


@WAYS
@pytest.mark.parametrize("function", [detached_factor, written_and_used])
def test_saved_values_of_two(function, make):
    """Saved values are also read in the right order with two arguments."""
    check(function, make, [(3,), (3,)], 3)


class NoneForY(Function):
    """Returns no gradient for the input on which its other gradient depends."""

    @staticmethod
    def forward(ctx, x, y):
        """Keep it."""
        ctx.save_for_backward(y)
        return x * y

    @staticmethod
    def backward(ctx, gradient):
        """Use it."""
        (y,) = ctx.saved_tensors
        return gradient * y, None


UNCONNECTED = {
    "an input": lambda x, y: NoneForY.apply(x, y),
    "an intermediate": lambda x, y: NoneForY.apply(x, y.exp()),
    "used elsewhere as well": lambda x, y: NoneForY.apply(x, y) + y.sin() * x,
    "times a factor": lambda x, y: NoneForY.apply(x, y * 2) * x,
    "two of them": lambda x, y: (NoneForY.apply(x, y), NoneForY.apply(y, x)),
}


@pytest.mark.parametrize("make", [compiled, by_min_cut])
@pytest.mark.parametrize("name", UNCONNECTED)
def test_a_gradient_that_depends_on_what_gets_none(name, make):
    """A second derivative exists with respect to an input whose first derivative is None.

    It once was None without an error.
    """
    check(UNCONNECTED[name], make, [(3,), (3,)], 3)


def test_a_gradient_that_is_none_stays_so():
    """`backward` does not change ``.grad`` of an input whose gradient is None, and its hooks get None, as in eager."""
    heard = []
    results = []
    for make in (lambda f: f, compiled):
        x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        y.register_hook(heard.append)
        make(lambda x, y: NoneForY.apply(x, y))(x, y).sum().backward()
        results.append((x.grad.tolist(), y.grad))
    assert results[0] == results[1] == ([1.0, 1.0], None)
    assert heard == [None, None]


L = torch.linalg
KEPT = {
    "solve": (lambda x: L.solve(x, x.new_ones(3)), 2),
    "det": (lambda x: L.det(x), 2),
    "slogdet": (lambda x: L.slogdet(x)[1], 2),
    "inv": (lambda x: L.inv(x), 3),
    "cholesky": (lambda x: L.cholesky(x @ x.t() + torch.eye(3)), 2),
    "svdvals": (lambda x: L.svdvals(x), 2),
    "eigvalsh": (lambda x: L.eigvalsh(x + x.t()), 2),
    "nuclear norm": (lambda x: L.matrix_norm(x, "nuc"), 2),
    "householder_product": (lambda x: L.householder_product(x.tril(-1) + torch.eye(3), x[0] * 0.1), 2),
    "of an intermediate": (lambda x: L.det(x.sin() + x.t()), 2),
}


@pytest.mark.parametrize("make", [compiled, behind_dynamo])
@pytest.mark.parametrize("name", KEPT)
def test_what_only_higher_derivatives_use(name, make):
    """A value that nodes save but the first derivative does not use is available to the next derivative.

    This raised an error before.
    """
    function, order = KEPT[name]
    check(function, make, [(3, 3)], order, exact=False)


@pytest.mark.parametrize("name", KEPT)
def test_what_min_cut_does_not_save(name):
    """If the memory-saving partitioner does not save a value, the error names the value."""
    function, order = KEPT[name]
    try:
        check(function, by_min_cut, [(3, 3)], order, exact=False)
    except DoubleBackwardError as error:
        assert "use aotlab.default_partition" in str(error)  # noqa: PT017  # there may be none


def test_the_reason_says_so():
    """The matrix of a determinant is saved for derivatives of higher order, and the record says that."""
    function = compiled(lambda x: torch.linalg.det(x))
    function(torch.eye(3).requires_grad_()).backward()
    (of_input,) = [saved for saved in record(function, "partition").saved if saved.is_input]
    assert "for derivatives of higher order" in of_input.reason
    assert of_input.used_by == ()


def test_nothing_is_saved_besides_where_nothing_is_missing():
    """An ordinary model saves no additional values for higher-order derivatives."""
    model = nn.Sequential(
        nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 3), nn.LogSoftmax(1)
    )
    function = compiled(model)
    function(torch.randn(5, 4)).sum().backward()
    reasons = [saved.reason for saved in record(function, "partition").saved]
    assert reasons
    assert not [reason for reason in reasons if "higher order" in reason]


def masked(x):
    """Draw a mask as a masked autoencoder does, and return the loss and the order of the elements."""
    order = torch.rand(x.shape).argsort(1)
    kept = x.sin().gather(1, order[:, :2])
    restored = torch.cat([kept, kept.new_zeros(len(x), 2)], 1).gather(1, order.argsort(1))
    return (restored.exp() - x).square().mean(), restored * 2, order


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("make", [compiled, by_min_cut, behind_dynamo])
def test_a_backward_from_one_output_with_drawn_indices(make, which):
    """A backward from one output works with the copies that min_cut saves.

    This raised an error before.
    """
    found = []
    for function in (masked, make(masked)):
        torch.manual_seed(0)
        x = torch.arange(12.0).view(3, 4).div(12).requires_grad_()
        function(x)[which].sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


class Once(Function):
    """Can be differentiated once."""

    @staticmethod
    def forward(ctx, x, y):
        """Keep both."""
        ctx.save_for_backward(x, y)
        return x * y * y

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        """Use both."""
        x, y = ctx.saved_tensors
        return gradient * y * y, gradient * 2 * x * y


@pytest.mark.parametrize("make", [compiled, by_min_cut])
@pytest.mark.parametrize("tangent", [False, True])
def test_once_differentiable(tangent, make):
    """If a tangent has a history, the gradients of a once_differentiable function have a history that raises.

    The tensors that the function keeps do not matter.
    """
    found = []
    for function in (lambda x, y: Once.apply(x, y), make(lambda x, y: Once.apply(x, y))):
        x, y = torch.full((1,), 0.5, requires_grad=True), torch.full((1,), 0.7, requires_grad=True)
        given = torch.ones(1, requires_grad=tangent)
        gradients = grad(function(x, y), (x, y), given, create_graph=True)
        try:
            second = str(grad(gradients[1], (x, y, given)[: 2 + tangent], allow_unused=True))
        except RuntimeError as error:
            second = str(error)
        found.append(([(each.requires_grad, each.is_leaf) for each in gradients], second))
    assert found[0] == found[1]


@pytest.mark.parametrize("make", [compiled, behind_dynamo])
@pytest.mark.parametrize("of", [lambda x: torch.linalg.eig(x)[0].abs(), lambda x: torch.linalg.eigvals(x).real])
def test_third_derivatives_of_eigenvalues(of, make):
    """The check that the loss does not depend on the eigenvectors' phase is differentiated too."""
    torch.manual_seed(3)
    drawn = torch.randn(3, 3)
    expected = derivatives(of, [drawn.clone().requires_grad_()], 3)
    found = derivatives(make(of), [drawn.clone().requires_grad_()], 3)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("make", [compiled, behind_dynamo])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "of", [torch.linalg.svdvals, torch.linalg.matrix_norm, lambda m: torch.linalg.eigvalsh(m @ m.mT)]
)
def test_singular_values_under_vmap(of, requires_grad, make):
    """Under a transform, eager computes singular vectors too; so does the trace, and its backward works."""
    found = []
    for function in (torch.func.vmap(of), make(lambda x: torch.func.vmap(of)(x))):
        torch.manual_seed(0)
        x = torch.randn(2, 3, 3, requires_grad=requires_grad)
        out = function(x)
        if requires_grad:
            out.sum().backward()
        found.append((out.tolist(), None if x.grad is None else x.grad.tolist()))
    assert found[0] == found[1]
