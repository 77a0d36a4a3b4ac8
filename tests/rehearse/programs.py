"""Programs whose kernels run under Triton's interpreter, and their comparison with eager.

``TRITON_INTERPRET=1 python -m tests.rehearse.programs`` prints the differences of each program, as JSON. Triton decides
at import whether it interprets, so a test runs this in a separate process.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Made = tuple[Callable[..., Any], tuple[Any, ...]]
PROGRAMS: dict[str, Callable[[], Made]] = {}


def program(make: Callable[[], Made]) -> Callable[[], Made]:
    """Enter a program: a function, and its arguments."""
    PROGRAMS[make.__name__] = make
    return make


def grad(*shape: int) -> Tensor:
    """Make a leaf that requires grad."""
    return torch.randn(shape, requires_grad=True)


@program
def pointwise() -> Made:
    """Sizes that fill no block."""
    return lambda x, y: (x * y + x.abs().sqrt()).clamp(-1, 1), (torch.randn(37, 11), torch.randn(11))


@program
def reductions() -> Made:
    """Over rows, columns and all."""
    return lambda x: (x.sum(0), x.amax(1), x.mean(), x.argmin(1)), (torch.randn(33, 70),)


@program
def long_reduction() -> Made:
    """In a loop over blocks."""
    return lambda x: x.var(-1), (torch.randn(3, 5000),)


@program
def softmax() -> Made:
    """With its gradient."""
    return lambda x: (x.softmax(-1) * x).sum(), (grad(9, 50),)


@program
def layer_norm() -> Made:
    """With the gradients of its parameters."""
    return lambda x, w, b: functional.layer_norm(x, (48,), w, b), (grad(10, 48), grad(48), grad(48))


@program
def training_step() -> Made:
    """Train a small network: matrix products are the library's, the rest are kernels."""
    model = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 5))
    labels = torch.randint(5, (16,))
    return lambda x, *_: functional.cross_entropy(model(x), labels), (torch.randn(16, 12), *model.parameters())


@program
def mutation() -> Made:
    """Arguments are written, one through a view."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        y[:, 1:3].add_(x)
        return y.sum(1)

    return step, (torch.randn(6, 2), torch.randn(6, 5))


@program
def views() -> Made:
    """Return views, with strides."""
    base = torch.randn(8, 10)
    return lambda x: (x.t().exp(), x[1:] + x[:-1], x.t()), (base[:, 1::2],)


@program
def gather() -> Made:
    """Read at indices, under a mask."""
    return lambda x, i: torch.where(i > 2, x[i], 0.0), (torch.randn(7), torch.randint(7, (40,)))


@program
def concatenation() -> Made:
    """Read several inputs in one kernel, of several dtypes."""
    return lambda x, y: torch.cat([x, y.float()]).cumsum(0), (torch.randn(5, 3), torch.arange(6).view(2, 3))


@program
def dropout() -> Made:
    """With eager's random numbers."""
    return lambda x: functional.dropout(x, 0.4) * 2, (grad(64, 4),)


@program
def constants() -> Made:
    """Read tensors that the graph holds, in the forward and the backward."""

    def step(x: Tensor) -> Tensor:
        return (x * torch.tensor([1.0, 2.0, 3.0]) + torch.tensor(0.5)).exp()

    return step, (grad(4, 3),)


def outcome(function: Callable[..., Any], args: tuple[Any, ...]) -> list[Tensor]:
    """Run a function and its backward. Return the results, the changed arguments, and the gradients."""
    torch.manual_seed(7)
    result = function(*args)
    results = [result] if isinstance(result, Tensor) else [*result]
    wanted = [each for each in results if each.requires_grad]
    if wanted:
        torch.autograd.backward([(each * each).sum() for each in wanted])
    gradients = [each.grad for each in args if each.grad is not None]
    return [each.detach().clone() for each in (*results, *args, *gradients)]


def seeded() -> tuple[list[str], list[str]]:
    """Apply a dropout with the seed of the kernels.

    The remaining values are scaled, and the backward drops the same ones.
    """
    import aotlab
    from aotlab.rehearse import RehearsalBackend

    backend, x = RehearsalBackend("h100", interpret=True), torch.rand(4000).add_(1).requires_grad_()
    compiled = aotlab.compile(lambda x: functional.dropout(x, 0.4), backend=backend)
    torch.manual_seed(3)
    out = compiled(x)
    out.backward(torch.ones_like(out))
    assert x.grad is not None
    kept = out != 0
    found = []
    if not torch.allclose(out, torch.where(kept, x / 0.6, 0.0)) or abs(kept.float().mean() - 0.6) > 0.05:
        found.append("what is kept is not scaled, or too much or too little is")
    if not torch.allclose(x.grad, kept / 0.6):
        found.append("the backward drops something else than the forward")
    torch.manual_seed(3)
    if not torch.equal(compiled(x), out) or torch.equal(compiled(x), out):
        found.append("the same seed drops something else, or another one the same")
    return found, [kernel.name for kernel in backend.kernels_made]


def differences(name: str) -> tuple[list[str], list[str]]:
    """Return the differences between eager and the interpreted kernels of a program, and the kernels' names."""
    import aotlab
    from aotlab.rehearse import RehearsalBackend

    torch.manual_seed(0)
    function, args = PROGRAMS[name]()
    expected = outcome(function, args)
    torch.manual_seed(0)
    function, args = PROGRAMS[name]()
    backend = RehearsalBackend("h100", interpret=True, draws="eager")
    actual = outcome(aotlab.compile(function, backend=backend), args)
    found = [] if len(expected) == len(actual) else [f"{len(actual)} values in place of {len(expected)}"]
    for n, (one, other) in enumerate(zip(expected, actual, strict=False)):
        try:
            torch.testing.assert_close(other, one)
        except AssertionError as error:
            found.append(f"value {n}: {' '.join(str(error).split())}")
    return found, [kernel.name for kernel in backend.kernels_made]


def main() -> None:
    """Run all programs, or the named ones."""
    from aotlab import config

    config.fallback = "error"
    told: dict[str, Any] = {}
    for name in sys.argv[1:] or [*PROGRAMS, "seeded_dropout"]:
        try:
            found, kernels = seeded() if name == "seeded_dropout" else differences(name)
        except Exception:  # noqa: BLE001  # is told of its program, and the others are run
            found, kernels = [traceback.format_exc()], []
        told[name] = {"differences": found, "kernels": kernels}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
