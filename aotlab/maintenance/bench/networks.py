"""Networks for `models` that no package provides. Each returns a dictionary with its ``loss`` for a batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class UNet(nn.Module):
    """A convolutional U-Net of two levels with skip connections, which classifies each pixel of an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = _double(3, width), _double(width, 2 * width)
        self.bottom = _double(2 * width, 4 * width)
        self.up_second = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.up_first = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join_second, self.join_first = _double(4 * width, 2 * width), _double(2 * width, width)
        self.head = nn.Conv2d(width, 4, 1)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the logits of each pixel's class, and the loss."""
        first = self.first(images)
        second = self.second(functional.max_pool2d(first, 2))
        bottom = self.bottom(functional.max_pool2d(second, 2))
        up = self.join_second(torch.cat([self.up_second(bottom), second], 1))
        up = self.join_first(torch.cat([self.up_first(up), first], 1))
        logits = self.head(up)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class Denoiser(nn.Module):
    """The U-Net of a diffusion model from ``diffusers``. It predicts the noise that was added to an image."""

    signal_shares: Tensor

    def __init__(self, width: int, size: int, steps: int = 100) -> None:
        super().__init__()
        from diffusers import UNet2DModel

        self.network = UNet2DModel(
            sample_size=size,
            in_channels=3,
            out_channels=3,
            layers_per_block=1,
            block_out_channels=(width, 2 * width),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=width // 2,
            norm_num_groups=4,
            dropout=0.1,
        )
        self.register_buffer("signal_shares", torch.linspace(0.9999, 0.98, steps).cumprod(0))

    def forward(self, images: Tensor, noise: Tensor, steps: Tensor) -> dict[str, Tensor]:
        """Add noise to images according to each image's step; return the loss of the predicted noise."""
        share = self.signal_shares[steps, None, None, None]
        predicted = self.network(images * share.sqrt() + noise * (1 - share).sqrt(), steps).sample
        return {"loss": functional.mse_loss(predicted, noise)}


class Tagger(nn.Module):
    """An LSTM over embedded tokens, with dropout between its layers, which classifies each token of a text."""

    def __init__(self, tokens: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the logits of each token's label, and the loss."""
        states, _ = self.lstm(self.embed(tokens))
        logits = self.head(states)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class GraphNet(nn.Module):
    """A graph convolution and a graph attention layer, with dropout between them, which classify nodes."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        from torch_geometric.nn import GATConv, GCNConv

        self.convolve, self.attend = GCNConv(features, width), GATConv(width, classes)

    def forward(self, nodes: Tensor, edges: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the logits of each node's class, and the loss."""
        hidden = functional.dropout(self.convolve(nodes, edges).relu(), training=self.training)
        logits = self.attend(hidden, edges)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class GraphAttention(nn.Module):
    """Two graph attention layers with several heads and with dropout of features and of attention."""

    def __init__(self, features: int, width: int, heads: int, classes: int) -> None:
        super().__init__()
        from torch_geometric.nn import GATConv

        self.first = GATConv(features, width, heads, dropout=0.6)
        self.second = GATConv(width * heads, classes, concat=False, dropout=0.6)

    def forward(self, nodes: Tensor, edges: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the logits of each node's class, and the loss."""
        hidden = functional.elu(self.first(functional.dropout(nodes, 0.6, self.training), edges))
        logits = self.second(functional.dropout(hidden, 0.6, self.training), edges)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class Burgers(nn.Module):
    """A physics-informed network: it learns a function that satisfies Burgers' equation and given initial values."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        hidden = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())]
        self.flow = nn.Sequential(nn.Linear(2, width), nn.Tanh(), *hidden, nn.Linear(width, 1))

    def forward(self, points: Tensor, edge: Tensor, values: Tensor) -> dict[str, Tensor]:
        """Return the loss: the residual of the equation at ``points``, and the error at the points ``edge``.

        Each point is a position and a time. ``points`` require grad, because the equation contains derivatives with
        respect to them. The points ``edge`` have the time 0, and ``values`` are the given values there.
        """
        flow = self.flow(points)
        (slopes,) = torch.autograd.grad(flow.sum(), points, create_graph=True)
        (bends,) = torch.autograd.grad(slopes[:, 0].sum(), points, create_graph=True)
        residual = slopes[:, 1] + flow[:, 0] * slopes[:, 0] - 0.01 * bends[:, 0]
        return {"loss": residual.square().mean() + functional.mse_loss(self.flow(edge), values)}


class Learner(nn.Module):
    """Model-agnostic meta-learning: the loss of each task after one step of gradient descent on its examples."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.curve = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, 1)

    def forward(self, seen: Tensor, seen_values: Tensor, asked: Tensor, asked_values: Tensor) -> dict[str, Tensor]:
        """Return the mean loss of all tasks. The first dimension of each argument is the task.

        A task is a curve. The network adapts to the curve's values ``seen_values`` at the points ``seen``. The loss is
        the network's error against ``asked_values`` at the points ``asked``.
        """
        weights: dict[str, Tensor] = dict(self.named_parameters())

        def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            hidden = x
            for layer in ("curve.0", "curve.2"):
                hidden = functional.linear(hidden, weights[f"{layer}.weight"], weights[f"{layer}.bias"]).tanh()
            return functional.mse_loss(functional.linear(hidden, weights["head.weight"], weights["head.bias"]), y)

        def adapted(x: Tensor, y: Tensor, asked: Tensor, values: Tensor) -> Tensor:
            gradients = torch.func.grad(loss)(weights, x, y)
            return loss({name: w - 0.1 * gradients[name] for name, w in weights.items()}, asked, values)

        return {"loss": torch.func.vmap(adapted)(seen, seen_values, asked, asked_values).mean()}


def _double(inner: int, outer: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (inner, outer):
        layers += [nn.Conv2d(width, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)
