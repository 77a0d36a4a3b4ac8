"""Train a model from its beginning, in eager or compiled, and measure how exactly each step computes.

Losses of trainings that run on their own say little about a compiler: a network with batch norm under AdamW takes the
rounding of its first gradients to other places within ten steps, eager's as far as anyone's. So *errors* are those of
single steps, each from where eager's training is by then, beside the same step in float64: of the loss, of the
gradients, of the buffers that the step wrote. Where rounding takes a number to the other side of a ReLU's corner, the
gradient of that step is off by far more than its rounding, eager's as well as a compiler's; so of gradients the median
step counts, and the largest error stands beside. How far whole trainings drift from float64's is measured besides.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from aotlab import _torch as internals
from aotlab import default_partition, min_cut_rematerialization_partition
from aotlab.bench.memory import measure_memory
from aotlab.bench.models import Batch, Trained
from aotlab.frontends import api

STEPS = 10

#: What ``torch.testing.assert_close`` lets float32 differ by, relatively.
NEAR = 1.3e-6

#: Of a module makes what is called in its place.
Wrap = Callable[[nn.Module], Callable[..., Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What a training left behind: the loss of each step, and the parameters and buffers after the last."""

    losses: tuple[float, ...]
    state: dict[str, Tensor] = field(repr=False)

    def is_same(self, other: Course) -> bool:
        """Tell whether two trainings are the same bit for bit."""
        return self.losses == other.losses and all(torch.equal(t, other.state[name]) for name, t in self.state.items())

    def drift(self, reference: Course) -> float:
        """Return the largest relative difference of a loss, in units of float32's precision."""
        pairs = zip(self.losses, reference.losses, strict=True)
        return max(abs(a - b) / max(abs(b), 1e-30) for a, b in pairs) / torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of several steps: norms of differences over norms.

    Attributes
    ----------
    loss, buffers
        The largest of a step's.
    gradients, largest_gradients
        The median step's, and the largest.
    """

    loss: float = 0.0
    gradients: float = 0.0
    largest_gradients: float = 0.0
    buffers: float = 0.0

    def __or__(self, other: Errors) -> Errors:
        """Return the larger one of each."""
        return Errors(*map(max, astuple(self), astuple(other)))

    def is_within(self, stock: Errors) -> bool:
        """Tell whether each is at most twice another compiler's, or as near as ``assert_close`` asks of float32.

        But for the largest error of a gradient, which is a matter of chance.
        """
        pairs = (self.loss, stock.loss), (self.gradients, stock.gradients), (self.buffers, stock.buffers)
        return all(mine <= max(NEAR, 2 * its) for mine, its in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """What one step computes: the loss, all gradients and all buffers."""

    loss: Tensor
    gradients: list[Tensor] = field(repr=False)
    buffers: list[Tensor] = field(repr=False)

    def errors(self, exact: Computed) -> tuple[float, float, float]:
        """Compare with the same step in float64: the relative errors of loss, gradients and buffers."""
        pairs = ([self.loss], [exact.loss]), (self.gradients, exact.gradients), (self.buffers, exact.buffers)
        loss, gradients, buffers = (_relative(found, true) for found, true in pairs)
        return loss, gradients, buffers


def _relative(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the norm of a difference over the norm, of all tensors as if they were one; NaN counts as infinite."""

    def norm(tensors: Iterable[Tensor]) -> float:
        return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))

    difference = norm(a.double() - b.double() for a, b in zip(found, exact, strict=True))
    ratio = difference and difference / max(norm(exact), 1e-30)
    return math.inf if math.isnan(ratio) else ratio


def eagerly(module: nn.Module) -> Callable[..., Any]:
    """Leave a module as it is."""
    return module


def by_ours(module: nn.Module, *, backend: str = "inductor", min_cut: bool = False) -> Callable[..., Any]:
    """Compile a module by our engine, behind Dynamo."""
    partition = min_cut_rematerialization_partition if min_cut else default_partition
    compiled: Callable[..., Any] = api.compile(module, backend=backend, frontend="dynamo", partitioner=partition)
    return compiled


def by_stock(module: nn.Module, *, backend: str = "inductor") -> Callable[..., Any]:
    """Compile a module by ``torch.compile`` as it comes."""
    return torch.compile(module, backend=backend)


class Training:
    """A model, its optimizer and its data, which start the same each time.

    Parameters
    ----------
    trained
        What to train.
    wrap
        What makes of the module what is called.
    device, dtype
        Where, and in which precision.
    """

    def __init__(self, trained: Trained, wrap: Wrap, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self._trained = trained
        self._device = device
        self._dtype = dtype
        model = trained.exact if dtype == torch.float64 and trained.exact is not None else trained.model
        self.module = model().to(device=device, dtype=dtype).train()
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3)
        self.call = wrap(self.module)
        self._generator = torch.Generator().manual_seed(1)
        torch.manual_seed(2)

    def batch(self, size: tuple[int, ...] = ()) -> Batch:
        """Make the next batch, of one of the model's other sizes if it is given."""
        return {name: t.to(self._device) for name, t in self._trained.batch(self._generator, *size).items()}

    def forward(self, batch: Batch) -> Any:
        """Return what the model returns, in whose loss the gradients hang."""
        cast = {name: t.to(self._dtype) if t.is_floating_point() else t for name, t in batch.items()}
        return self.call(**cast)

    def step(self, batch: Batch) -> Tensor:
        """Take one step and return the loss."""
        self.optimizer.zero_grad()
        loss = self._trained.loss(self.forward(batch))
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def course(self, steps: int = STEPS) -> Course:
        """Take some steps."""
        losses = tuple([self.step(self.batch()).item() for _ in range(steps)])
        return Course(losses=losses, state={name: t.clone() for name, t in self.module.state_dict().items()})

    def compute(self, state: Mapping[str, Tensor], batch: Batch, seed: int) -> Computed:
        """Compute a step from ``state`` without taking it; the parameters and buffers are then those of ``state``."""
        self.module.load_state_dict(state)
        self.optimizer.zero_grad()
        torch.manual_seed(seed)
        loss = self._trained.loss(self.forward(batch))
        loss.backward()
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        return Computed(loss=loss.detach(), gradients=gradients, buffers=list(self.module.buffers()))

    def held(self) -> int:
        """Return the bytes held between forward and backward; the batch, weights and optimizer are not counted.

        As in `step`, the loss alone is alive then: outputs that the step has no use for, as logits, count if they are
        saved. Some steps were taken before: they compiled, and made the optimizer's state and the gradients.
        """
        batch = self.batch()
        return measure_memory(lambda: self._trained.loss(self.forward(batch)), device=self._device).kept_bytes


def train(
    trained: Trained,
    wrap: Wrap,
    device: torch.device | str = "cpu",
    steps: int = STEPS,
    dtype: torch.dtype = torch.float32,
) -> Course:
    """Train a model from its beginning; the parameters are those of `Training`."""
    torch.compiler.reset()
    return Training(trained, wrap, torch.device(device), dtype).course(steps)


def errors_of_steps(
    trained: Trained, training: Training, device: torch.device | str = "cpu", steps: int = STEPS
) -> Errors:
    """Let a training compute steps from where eager's is by then, and compare each with float64's.

    The training's parameters and buffers are changed. Random ops draw the same numbers in both.
    """
    errors = [each for (each,) in errors_of_each(trained, [training], [()] * steps, torch.device(device))]
    losses, gradients, buffers = zip(*errors, strict=True)
    return Errors(loss=max(losses), gradients=median(gradients), largest_gradients=max(gradients), buffers=max(buffers))


def errors_of_each(
    trained: Trained,
    trainings: Sequence[Training],
    sizes: Sequence[tuple[int, ...]],
    device: torch.device,
    dtype: torch.dtype = torch.float64,
) -> Iterator[list[tuple[float, float, float]]]:
    """Yield for each step, with a batch of a given size, the errors of each training beside eager in ``dtype``.

    They are those of the loss, the gradients and the buffers. Each step begins where eager's training is by then.
    """
    leader = Training(trained, eagerly, device)
    exact = Training(trained, eagerly, device, dtype)
    for seed, size in enumerate(sizes):
        batch, state = leader.batch(size), leader.module.state_dict()
        true = exact.compute(state, batch, seed)
        yield [training.compute(state, batch, seed).errors(true) for training in trainings]
        leader.step(batch)


@contextmanager
def comparable() -> Iterator[None]:
    """Let Inductor draw eager's random numbers, that losses can be compared, and Dynamo take recurrent layers."""
    with internals.eager_draws_by_inductor(), internals.recurrent_layers_captured(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
