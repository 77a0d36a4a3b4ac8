"""The programs that `suite` measures, and the models that it shares with `partitioners`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallProgram:
    """A function so small that the time of a call is mostly call overhead.

    Attributes
    ----------
    name, description
        A name for the tables, and a description of the function.
    function
        The function. It takes the tensors that ``leaves`` makes.
    leaves
        Makes the inputs on a device; the second argument says whether they require grad.
    mutates
        Whether the function writes to its inputs. If so, each call in training gets new non-leaf copies of the inputs,
        because autograd forbids writes to leaves that require grad, and each write to the same copy would make its
        autograd graph longer.
    trains
        Whether calls with inputs that require grad are measured as well.
    """

    name: str
    description: str
    function: Callable[..., object]
    leaves: Callable[[torch.device, bool], Tensors]
    mutates: bool = False
    trains: bool = True

    def arguments(self, leaves: Tensors) -> Tensors:
        """Return the arguments of one call, made from ``leaves``."""
        if self.mutates and any(leaf.requires_grad for leaf in leaves):
            return tuple([leaf.clone() for leaf in leaves])
        return leaves


def _one_matrix(device: torch.device, requires_grad: bool) -> Tensors:
    return (torch.linspace(-1.0, 1.0, 12, device=device).reshape(3, 4).requires_grad_(requires_grad),)


def _hundred_vectors(device: torch.device, requires_grad: bool) -> Tensors:
    return tuple([torch.full((4,), i / 100, device=device).requires_grad_(requires_grad) for i in range(100)])


def trivial(x: torch.Tensor) -> torch.Tensor:
    """Add one."""
    return x + 1


def mutating(x: torch.Tensor) -> torch.Tensor:
    """Write to the input and return another tensor."""
    x.add_(1)
    return x * 2


def aliasing(x: torch.Tensor) -> torch.Tensor:
    """Return a view of the input."""
    return x.view(-1)


def intermediate_base(x: torch.Tensor) -> Tensors:
    """Return an intermediate tensor and a view of it."""
    y = x * 2
    return y, y.view(-1)


def hundred_inputs(*xs: torch.Tensor) -> torch.Tensor:
    """Concatenate all inputs. This is a single op, so the call overhead dominates."""
    return torch.cat(xs)


SMALL_PROGRAMS: tuple[SmallProgram, ...] = (
    SmallProgram(name="trivial", description="x + 1", function=trivial, leaves=_one_matrix),
    SmallProgram(
        name="mutating", description="x.add_(1); return x * 2", function=mutating, leaves=_one_matrix, mutates=True
    ),
    SmallProgram(name="aliasing", description="return x.view(-1)", function=aliasing, leaves=_one_matrix),
    SmallProgram(
        name="intermediate base",
        description="y = x * 2; return y, y.view(-1)",
        function=intermediate_base,
        leaves=_one_matrix,
    ),
    SmallProgram(
        name="100 inputs",
        description="torch.cat of 100 tensors",
        function=hundred_inputs,
        leaves=_hundred_vectors,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProgram:
    """A model that is so big that a trace of it takes seconds. ``make`` builds the model and one batch on a device."""

    name: str
    description: str
    make: Callable[[torch.device], tuple[nn.Module, Tensors]]


def mlp(layers: int, width: int = 32) -> nn.Sequential:
    """Build ``layers`` linear layers of one width, each followed by a ReLU."""
    return nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())])


def transformer_encoder(layers: int, d_model: int = 64, heads: int = 4) -> nn.TransformerEncoder:
    """Build a transformer encoder without dropout, batch first."""
    layer = nn.TransformerEncoderLayer(
        d_model, heads, dim_feedforward=2 * d_model, dropout=0.0, activation="gelu", batch_first=True
    )
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def seeded(
    make: Callable[[], nn.Module], batch: tuple[int, ...]
) -> Callable[[torch.device], tuple[nn.Module, Tensors]]:
    """Return a function that builds the model that ``make`` makes, and a batch of shape ``batch``.

    Weights and batch are the same each time.
    """

    def build(device: torch.device) -> tuple[nn.Module, Tensors]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return make().to(device), (torch.randn(batch).to(device),)

    return build


def model_programs(quick: bool = False) -> tuple[ModelProgram, ...]:
    """Return the models whose trace is timed. With ``quick``, they have a tenth of the layers."""
    layers, blocks = (20, 2) if quick else (200, 12)
    return (
        ModelProgram(
            name=f"MLP, {layers} layers",
            description=f"{layers} x (Linear(32, 32), ReLU), batch 8",
            make=seeded(lambda: mlp(layers), (8, 32)),
        ),
        ModelProgram(
            name=f"encoder, {blocks} layers",
            description=f"TransformerEncoder of {blocks} layers, d_model 64, 4 heads, dropout 0, batch 2 x 16",
            make=seeded(lambda: transformer_encoder(blocks), (2, 16, 64)),
        ),
    )
