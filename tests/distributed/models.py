"""Two small models: a Llama and a ResNet, each with its batches and its loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, width, heads):
        super().__init__()
        self.size = width // heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend from each position to the earlier ones."""
        # Under tensor parallelism each process has some of the heads, so their number is not that of the whole layer.
        q, k, v = (layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))

        def rotate(heads):
            first, second = heads.chunk(2, -1)
            return heads * cos + torch.cat([-second, first], -1) * sin

        mixed = functional.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class LlamaBlock(nn.Module):
    """A block of the Llama: attention and a gated network."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add the results of attention and of the network."""
        x = x + self.attention(self.norm(x), cos, sin)
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A language model of two blocks."""

    def __init__(self, width=16, heads=2, words=20, length=8):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([LlamaBlock(width, heads) for _ in range(2)])
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)
        angles = torch.arange(length)[:, None] * 0.1 * torch.arange(width // heads // 2)[None].repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores of the next words."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))

    @staticmethod
    def batch(seed: int) -> tuple[Tensor, Tensor]:
        """Return words and the words that follow."""
        words = torch.randint(0, 20, (2, 9), generator=torch.Generator().manual_seed(seed))
        return words[:, :-1].contiguous(), words[:, 1:].contiguous()


class ResNetBlock(nn.Module):
    """Two convolutions and a shortcut, with writes in place."""

    def __init__(self, before, after):
        super().__init__()
        self.conv, self.conv2 = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        self.norm, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.shortcut = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Add the results of the convolutions."""
        y = functional.relu(self.norm(self.conv(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return functional.relu(y, inplace=True)


class ResNet(nn.Module):
    """A classifier of small pictures."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList([ResNetBlock(4, 4), ResNetBlock(4, 8)])
        self.head = nn.Linear(8, 5)

    def forward(self, pictures: Tensor) -> Tensor:
        """Return scores of the classes."""
        x = self.stem(pictures)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))

    @staticmethod
    def batch(seed: int) -> tuple[Tensor, Tensor]:
        """Return pictures and their classes."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(4, 3, 6, 6, generator=generator), torch.randint(0, 5, (4,), generator=generator)


class Checkpointed(nn.Module):
    """A block whose activations are computed again in the backward."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *args: Tensor) -> Tensor:
        """Call the block under a checkpoint."""
        return checkpoint(self.block, *args, use_reentrant=False)


class Unused(nn.Module):
    """A model with a parameter that no batch uses."""

    def __init__(self, model):
        super().__init__()
        self.model, self.unused = model, nn.Linear(2, 2)

    def forward(self, *args: Tensor) -> Tensor:
        """Call the model."""
        return self.model(*args)


MODELS = {"llama": Llama, "resnet": ResNet}


def loss_of(scores: Tensor, wanted: Tensor) -> Tensor:
    """Return the cross entropy of all scores."""
    return functional.cross_entropy(scores.float().flatten(0, -2), wanted.flatten())
