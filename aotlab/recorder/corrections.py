"""Functions that would be traced into something else than eager runs, put right one by one.

Some write their result where functionalization does not see it, or have no out-of-place twin that it could put in their
stead; here they are written with one. Some linear algebra computes less where nothing is to be differentiated, but
cannot tell so in a trace. And some backwards look at values to see whether the loss is well defined at all: a trace has
no values, so the question goes into the graph, where it raises eager's error when the answer is no.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aotlab import torch_internals as internals
from aotlab.recorder.mode import values_only
from aotlab.recorder.tape import tensors_in

#: What `corrected` returns: takes the positional and the keyword arguments.
Correction = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def corrected(func: Any) -> Correction | None:
    """Return what is to be called in the place of ``func``; None if that is ``func`` itself."""
    return _CORRECTIONS.get(func)


def _polygamma_(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, n = args
    # a copy, for the backward: autograd's `polygamma_` keeps the values from before as well
    return tensor.copy_(torch.polygamma(n, tensor.clone()))


def _lift_fresh(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # eager's kernel returns what it is given, the very object; a trace would take it for a view
    given = args[0] if args else kwargs["self"]
    return given if internals.is_functional(given) else torch.ops.aten.lift_fresh.default(given)


def _matrix_rank(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = kwargs.get("out")
    if out is None:
        return _without_vectors(torch.linalg.matrix_rank)(args, kwargs)
    rank = _without_vectors(torch.linalg.matrix_rank)(args, {k: v for k, v in kwargs.items() if k != "out"})
    return torch.add(rank, 0, out=out)  # other than `copy_`, it resizes and checks as every ``out=`` does


def _row_by_row(func: Any) -> Correction:
    """Lay out the result of a function row by row, as eager's kernel does and the ops that stand for it do not."""

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        return result.contiguous() if isinstance(result, Tensor) else result

    return call


def _max_pool1d(func: Any) -> Correction:
    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = args[0] if args else kwargs.get("input")
        differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(given))
        by_own_kernel = isinstance(given, Tensor) and given.device.type == "cpu" and not differentiable
        return _row_by_row(func)(args, kwargs) if by_own_kernel else func(*args, **kwargs)

    return call


def _without_vectors(func: Any) -> Correction:
    """Let a function of singular values or eigenvalues compute no vectors where no gradient needs them.

    Under a transform of ``torch.func`` it computes them in eager, too.
    """

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if internals.transforms_active():
            return func(*args, **kwargs)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in((args, kwargs))):
            return func(*args, **kwargs)
        with values_only():
            return func(*args, **kwargs)

    return call


def _eigen(func: Any, name: str) -> Correction:
    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        values, vectors = result
        node = values.grad_fn
        if node is not None and vectors.is_complex():
            held = vectors.detach()
            message = (
                f"{name}: The eigenvectors in the complex case are specified up to multiplication by e^{{i phi}}. "
                "The specified loss function depends on this quantity, so it is ill-defined."
            )

            def check(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
                gradient = gradients[1]
                if gradient is None:
                    return None
                phase = _phase(held, gradient)
                return gradients[0], _assert_close(phase, torch.zeros_like(phase), message, gradient)

            internals.check_gradients(node, check)
        return result

    return call


def _singular(func: Any) -> Correction:
    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        left, values, _ = result
        node = values.grad_fn
        if node is not None and left.is_complex() and internals.is_svd_node(node):
            # Of the vectors that the node made, some may have been cut off from the result.
            held = internals.singular_vectors(node)
            count = values.shape[-1]  # full matrices have more vectors than there are values
            message = (
                "svd_backward: The singular vectors in the complex case are specified up to multiplication by "
                "e^{i phi}. The specified loss function depends on this phase term, making it ill-defined."
            )

            def check(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
                of_left, of_values, of_right = gradients
                if of_left is None and of_right is None:
                    return None
                zero = torch.zeros(values.shape, dtype=values.dtype, device=values.device)
                first = zero if of_left is None else _phase(held[0], of_left)[..., :count]
                second = zero if of_right is None else -_phase(held[1].mH, of_right.mH)[..., :count]
                if of_left is not None:
                    return _assert_close(first, second, message, of_left), of_values, of_right
                assert of_right is not None
                return None, of_values, _assert_close(first, second, message, of_right)

            internals.check_gradients(node, check)
        return result

    return call


def _phase(vectors: Tensor, gradient: Tensor) -> Tensor:
    """Return how a loss changes with the phase of each vector; zero if it does not depend on it."""
    return (vectors.mH @ gradient).diagonal(0, -2, -1).imag


def _assert_close(first: Tensor, second: Tensor, message: str, gradient: Tensor) -> Tensor:
    """Return ``gradient``, which from now on depends on the two being close."""
    close = torch.isclose(first, second, rtol=1e-2, atol=1e-2).all()
    result: Tensor = _require()(close, message, gradient)
    return result


@functools.cache
def _require() -> Callable[..., Any]:
    """Make the op, when it is first needed, that returns a value and raises unless a condition holds.

    Torch's own assertions return nothing, so that a backward, of which only the gradients are kept, would lose them;
    and the one that returns its argument is not known to Inductor.
    """

    @torch.library.custom_op("aotlab::require", mutates_args=())
    def require(condition: Tensor, message: str, value: Tensor) -> Tensor:
        if not condition:
            raise RuntimeError(message)
        return value.clone()

    @require.register_fake
    def _(condition: Tensor, message: str, value: Tensor) -> Tensor:
        return value.clone()

    require.register_autograd(lambda _, gradient: (None, None, gradient))
    return require


_CORRECTIONS: dict[Any, Correction] = {
    Tensor.polygamma_: _polygamma_,
    internals.ONE_HOT: _row_by_row(internals.ONE_HOT),
    torch.max_pool1d: _max_pool1d(torch.max_pool1d),
    torch.nn.functional.max_pool1d: _max_pool1d(torch.nn.functional.max_pool1d),
    torch.ops.aten.lift_fresh: _lift_fresh,
    torch.ops.aten.lift_fresh.default: _lift_fresh,
    torch.linalg.matrix_rank: _matrix_rank,
    torch.linalg.eig: _eigen(torch.linalg.eig, "linalg_eig_backward"),
    torch.linalg.eigh: _eigen(torch.linalg.eigh, "linalg_eigh_backward"),
    torch.linalg.svd: _singular(torch.linalg.svd),
    torch.svd: _singular(torch.svd),
    Tensor.svd: _singular(Tensor.svd),
    **{
        func: _without_vectors(func)
        for func in (
            torch.linalg.svdvals, torch.linalg.eigvalsh, torch.linalg.cond, torch.linalg.matrix_norm, torch.linalg.norm,
            torch.norm, Tensor.norm, torch.nuclear_norm,
        )
    },
}  # fmt: skip
