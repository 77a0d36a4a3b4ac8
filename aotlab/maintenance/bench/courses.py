"""Train a model from its initial state, in eager or compiled, and measure the errors of single steps.

The losses of independent trainings say little about a compiler. A network with batch norm under AdamW amplifies the
rounding of its first gradients within ten steps, in eager as much as in any compiler. So the *errors* are errors of
single steps: each step starts from the current state of eager's training, and is compared with the same step in
float64. A step has three errors: of the loss, of the gradients, and of the buffers that it wrote. If rounding changes
the sign of a ReLU's input, the gradient error of that step is much larger than rounding, in eager as well as in a
compiler. So the median of the gradient errors of several steps is compared, and the largest is reported separately. The
*drift* is the largest relative difference of a loss between two independent trainings, one of them in float64.
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
from aotlab.frontends import api
from aotlab.maintenance.bench.models import Batch, Trained

STEPS = 10

#: The relative difference that ``torch.testing.assert_close`` allows for float32.
NEAR = 1.3e-6

#: A function that turns a module into the callable that the training calls: `eagerly`, `by_ours` or `by_stock`.
Wrap = Callable[[nn.Module], Callable[..., Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The results of a training: the loss of each step, and the parameters and buffers after the last step."""

    losses: tuple[float, ...]
    state: dict[str, Tensor] = field(repr=False)

    def is_same(self, other: Course) -> bool:
        """Tell whether two trainings are bitwise equal."""
        return self.losses == other.losses and all(torch.equal(t, other.state[name]) for name, t in self.state.items())

    def drift(self, reference: Course) -> float:
        """Return the largest relative difference of a step's loss from the loss of the same step in ``reference``.

        The unit is the machine epsilon of float32.
        """
        pairs = zip(self.losses, reference.losses, strict=True)
        return max(abs(a - b) / max(abs(b), 1e-30) for a, b in pairs) / torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of several steps: the norm of the difference from the float64 result, divided by its norm.

    Attributes
    ----------
    loss, buffers
        The largest error of the loss and of the buffers in any step.
    gradients, largest_gradients
        The median and the largest of the steps' gradient errors.
    """

    loss: float = 0.0
    gradients: float = 0.0
    largest_gradients: float = 0.0
    buffers: float = 0.0

    def __or__(self, other: Errors) -> Errors:
        """Combine two records: return the larger error of each kind."""
        return Errors(*map(max, astuple(self), astuple(other)))

    def is_within(self, stock: Errors) -> bool:
        """Tell whether each error is at most twice the same error of ``stock``, or at most `NEAR`.

        ``stock`` has the errors of another compiler. The largest gradient error is not compared, because it depends on
        chance.
        """
        pairs = (self.loss, stock.loss), (self.gradients, stock.gradients), (self.buffers, stock.buffers)
        return all(mine <= max(NEAR, 2 * its) for mine, its in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """The results of one step: the loss, all gradients and all buffers."""

    loss: Tensor
    gradients: list[Tensor] = field(repr=False)
    buffers: list[Tensor] = field(repr=False)

    def errors(self, exact: Computed) -> tuple[float, float, float]:
        """Return the relative errors of loss, gradients and buffers against the same step in float64."""
        pairs = ([self.loss], [exact.loss]), (self.gradients, exact.gradients), (self.buffers, exact.buffers)
        loss, gradients, buffers = (_relative(ours, true) for ours, true in pairs)
        return loss, gradients, buffers


def _relative(actual: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the norm of the difference divided by the norm of ``exact``; return infinity instead of NaN.

    The norms are computed as if the tensors were concatenated.
    """

    def norm(tensors: Iterable[Tensor]) -> float:
        return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))

    difference = norm(a.double() - b.double() for a, b in zip(actual, exact, strict=True))
    ratio = difference and difference / max(norm(exact), 1e-30)
    return math.inf if math.isnan(ratio) else ratio


def eagerly(module: nn.Module) -> Callable[..., Any]:
    """Return the module unchanged, so that it runs in eager."""
    return module


def by_ours(module: nn.Module, *, backend: str = "inductor", min_cut: bool = False) -> Callable[..., Any]:
    """Compile a module with aotlab behind Dynamo."""
    partition = min_cut_rematerialization_partition if min_cut else default_partition
    compiled: Callable[..., Any] = api.compile(module, backend=backend, frontend="dynamo", partitioner=partition)
    return compiled


def by_stock(module: nn.Module, *, backend: str = "inductor") -> Callable[..., Any]:
    """Compile a module with stock ``torch.compile``."""
    return torch.compile(module, backend=backend)


class Training:
    """A model, its optimizer and its data. Every new training starts with the same weights, seeds and batches.

    Parameters
    ----------
    trained
        The model to train.
    wrap
        A function that turns the module into the callable that the training calls.
    device, dtype
        The device, and the dtype of the parameters and of floating inputs.
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
        """Return the next batch; ``size`` is one of `Trained.sizes`, or empty for the default size."""
        return {name: t.to(self._device) for name, t in self._trained.batch(self._generator, *size).items()}

    def forward(self, batch: Batch) -> Any:
        """Return the output of the model for a batch. It contains the loss, from which a backward can start."""
        cast = {name: t.to(self._dtype) if t.is_floating_point() else t for name, t in batch.items()}
        return self.call(**cast)

    def step(self, batch: Batch) -> Tensor:
        """Run one step and return the loss."""
        self.optimizer.zero_grad()
        loss = self._trained.loss(self.forward(batch))
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def course(self, steps: int = STEPS) -> Course:
        """Run ``steps`` steps and return their losses and the final state."""
        losses = tuple([self.step(self.batch()).item() for _ in range(steps)])
        return Course(losses=losses, state={name: t.clone() for name, t in self.module.state_dict().items()})

    def compute(self, state: Mapping[str, Tensor], batch: Batch, seed: int) -> Computed:
        """Compute the loss and gradients of a step that starts from ``state``, without an optimizer step.

        ``state`` is loaded into the module. ``seed`` is set before the forward, so that two trainings draw the same
        random numbers.
        """
        self.module.load_state_dict(state)
        self.optimizer.zero_grad()
        torch.manual_seed(seed)
        loss = self._trained.loss(self.forward(batch))
        loss.backward()
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        return Computed(loss=loss.detach(), gradients=gradients, buffers=list(self.module.buffers()))

    def held(self) -> int:
        """Return the bytes that the forward holds for the backward, without the batch, weights and optimizer.

        As in `step`, only the loss is alive after the forward. Other outputs of the model, for example logits, count
        only if they are saved for backward. Run some steps before this method, so that the model is compiled, and the
        optimizer's state and the gradients exist.
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
    """Train a model from its initial state. See `Training` for the arguments."""
    torch.compiler.reset()
    return Training(trained, wrap, torch.device(device), dtype).course(steps)


def errors_of_steps(
    trained: Trained, training: Training, device: torch.device | str = "cpu", steps: int = STEPS
) -> Errors:
    """Compute the errors of ``steps`` steps of ``training`` against the same steps of eager in float64.

    Each step starts from the current state of a training in eager. That state is loaded into ``training``, so its
    parameters and buffers change. Random ops draw the same numbers in both runs of a step.
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
    """Compute one step for each batch size in ``sizes``, and yield the errors of each of ``trainings`` in this step.

    `Computed.errors` describes the three errors. They are measured against the same step of eager in ``dtype``. Each
    step starts from the current state of a training in eager.
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
    """Set up torch so that the losses of eager and compiled code can be compared, and suppress warnings.

    Inductor draws the random numbers that eager draws. Dynamo captures recurrent layers instead of breaking the graph.
    """
    with internals.eager_draws_by_inductor(), internals.recurrent_layers_captured(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
