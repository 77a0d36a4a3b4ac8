"""The helpers of the tests of transforms.

They compare eager and compiled results, and torch's state afterwards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten

from tests.engine_helpers import behind_dynamo, compiled, global_torch_state


def by_us_behind_dynamo(function: Callable[..., Any]) -> Any:
    """Compile behind Dynamo, from our side."""
    return compiled(function, frontend="dynamo")


#: The ways to compile, by name.
MAKES = {"direct": compiled, "dynamo": behind_dynamo}
#: Those, and the one that differs from Dynamo's own only where a transform is around.
MAKES_AROUND = {**MAKES, "by us": by_us_behind_dynamo}


def numbers(*shape: int) -> Tensor:
    """Make a tensor of different numbers."""
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape) / 7


def transform_state() -> dict[str, Any]:
    """Return the state that transforms change while they run, and all other global state that a trace touches."""
    functorch = torch._C._functorch
    with torch._C._DisableFuncTorch():
        state = global_torch_state()
    return state | {
        "transforms": functorch.get_dynamic_layer_stack_depth(),
        "forward gradients": torch._C._is_fwd_grad_enabled(),
        "dual level": forward_ad._current_level,
        "may require grad in place": functorch.get_inplace_requires_grad_allowed(),
        "hooks disabled": torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
    }


def _described(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    assert not torch._C._functorch.is_functorch_wrapped_tensor(value)
    return tuple(value.shape), value.dtype, value.stride(), value.requires_grad, value.is_leaf, value.detach().clone()


def outcome(
    use: Callable[[Callable[..., Any]], Any], make: Callable[..., Any]
) -> tuple[Any, list[str], dict[str, Any]]:
    """Run a program; return its results or its error, the notices, and the state after it."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found: Any = [_described(value) for value in tree_flatten(use(make))[0]]
        except Exception as error:  # noqa: BLE001  # whatever eager raises
            found = error
    return found, [str(w.message) for w in caught if w.category is RuntimeWarning], transform_state()


def assert_same(expected: Any, found: Any, *, exact: bool = True, texts: bool = True) -> None:
    """Assert that two outcomes are the same bit for bit, or but for rounding; of errors the class, and the text."""
    if isinstance(expected, Exception):
        assert isinstance(found, Exception), found
        assert not texts or (type(found), str(found)) == (type(expected), str(expected))
        return
    if isinstance(found, Exception):
        raise found
    assert len(found) == len(expected)
    for one, other in zip(expected, found, strict=True):
        if not isinstance(one, tuple):
            assert one == other
            continue
        assert one[:5] == other[:5]
        if exact:
            assert torch.equal(one[5].nan_to_num(7), other[5].nan_to_num(7)), (one[5], other[5])
        else:
            torch.testing.assert_close(other[5], one[5], rtol=1e-5, atol=1e-5)


def body(x):
    """Compute something of the same shape."""
    return x.sin() * x + 1


def scalar(x):
    """Compute a number."""
    return (x.sin() * x).sum()
