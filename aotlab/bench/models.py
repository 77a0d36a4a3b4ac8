"""Models as people train them, small and with random weights: what `aotlab.bench.training` trains.

Most are built from a configuration of ``transformers``, the graph layers by ``torch_geometric`` (extra ``models``);
nothing is downloaded. The others are written here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from aotlab.errors import UsageError

#: What a model is called with.
Batch = dict[str, Tensor]
#: Makes a batch from a generator of the CPU's, and of one of the model's `Trained.sizes`, if that follows.
Batches = Callable[..., Batch]
#: Batch sizes and lengths of text: twelve sizes from 2 to 64, and from 2 to 128, small beside large.
_COUNTS = (8, 2, 64, 3, 16, 33, 5, 48, 7, 24, 4, 12)
_LENGTHS = (64, 128, 17, 2, 100, 31, 8, 77, 3, 127, 48, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A model and its data.

    Attributes
    ----------
    name, description
        A word for the tables, and what it is.
    model
        Makes the module, with the weights that torch's seed gives. Called with a batch it returns something with
        the ``loss``.
    batch
        Makes the next batch.
    sizes
        Twelve sizes of a batch, each the further arguments of ``batch``: how many examples and, of text, how long.
    exact
        Makes the module that is run in float64, if ``model``'s kernels cannot; its parameters have the same names.
    """

    name: str
    description: str
    model: Callable[[], nn.Module]
    batch: Batches
    sizes: tuple[tuple[int, ...], ...] = ()
    exact: Callable[[], nn.Module] | None = None

    def loss(self, result: Any) -> Tensor:
        """Return the loss in what the model returned."""
        loss: Tensor = result["loss"] if isinstance(result, Mapping) else result.loss
        return loss


class UNet(nn.Module):
    """A U-Net of two levels: what goes down is joined to what comes up."""

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


class Tagger(nn.Module):
    """An LSTM over embedded tokens, with dropout between its layers."""

    def __init__(self, tokens: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the logits of each next token, and the loss."""
        states, _ = self.lstm(self.embed(tokens))
        logits = self.head(states)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class GraphNet(nn.Module):
    """A graph convolution and graph attention, with dropout between them."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        from torch_geometric.nn import GATConv, GCNConv

        self.convolve, self.attend = GCNConv(features, width), GATConv(width, classes)

    def forward(self, nodes: Tensor, edges: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the logits of each node's class, and the loss."""
        hidden = functional.dropout(self.convolve(nodes, edges).relu(), training=self.training)
        logits = self.attend(hidden, edges)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def _double(inner: int, outer: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (inner, outer):
        layers += [nn.Conv2d(width, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def _images(count: int, size: int, classes: int) -> Batches:
    def batch(generator: torch.Generator, count: int = count) -> Batch:
        images = torch.randn(count, 3, size, size, generator=generator)
        return {"pixel_values": images, "labels": torch.randint(classes, (count,), generator=generator)}

    return batch


def _text(count: int, length: int, tokens: int, name: str = "input_ids") -> Batches:
    def batch(generator: torch.Generator, count: int = count, length: int = length) -> Batch:
        text = torch.randint(tokens, (count, length), generator=generator)
        return {name: text, "labels": text}

    return batch


def _pixels(count: int, size: int) -> Batches:
    def batch(generator: torch.Generator, count: int = count) -> Batch:
        images = torch.randn(count, 3, size, size, generator=generator)
        return {"images": images, "labels": torch.randint(4, (count, size, size), generator=generator)}

    return batch


def _graph(nodes: int, edges: int, features: int, classes: int) -> Batches:
    def batch(generator: torch.Generator, nodes: int = nodes, edges: int = edges) -> Batch:
        return {
            "nodes": torch.randn(nodes, features, generator=generator),
            "edges": torch.randint(nodes, (2, edges), generator=generator),
            "labels": torch.randint(classes, (nodes,), generator=generator),
        }

    return batch


def _configured(kind: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """Make what builds a model of ``transformers`` from a configuration."""

    def build() -> nn.Module:
        try:
            import transformers
        except ImportError as error:
            raise UsageError("these models need transformers: pip install 'aotlab[models]'") from error
        model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**settings))
        return model

    return build


def trained_models(*, small: bool = False) -> tuple[Trained, ...]:
    """List the models; ``small`` ones take a few ms a step, for tests."""
    width, depth, length, images = (32, 2, 16, 32) if small else (128, 4, 128, 64)
    tokens = 128 if small else 1024
    positions = max(2 * length, *_LENGTHS)
    counts = tuple([(count,) for count in _COUNTS])
    texts = tuple(zip(_COUNTS, _LENGTHS, strict=True))
    text = {"vocab_size": tokens, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    decoder = {
        **text,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": depth,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": positions,
    }
    experts = {**decoder, "num_local_experts": 4}
    return (
        Trained(
            name="ResNet",
            description="ResNetForImageClassification, basic blocks",
            model=_configured(
                "ResNetForImageClassification",
                "ResNetConfig",
                embedding_size=width // 2,
                hidden_sizes=[width // 2 * 2**n for n in range(depth)],
                depths=[1 if small else 2] * depth,
                layer_type="basic",
                num_labels=10,
            ),
            batch=_images(2 if small else 8, images, 10),
            sizes=counts,
        ),
        Trained(
            name="ViT",
            description="ViTForImageClassification",
            model=_configured(
                "ViTForImageClassification",
                "ViTConfig",
                hidden_size=width,
                num_hidden_layers=depth,
                num_attention_heads=4,
                intermediate_size=2 * width,
                image_size=images,
                patch_size=8,
                num_labels=10,
            ),
            batch=_images(2 if small else 8, images, 10),
            sizes=counts,
        ),
        Trained(
            name="GPT-2",
            description="GPT2LMHeadModel with its dropout, weights tied",
            model=_configured(
                "GPT2LMHeadModel",
                "GPT2Config",
                **text,
                n_positions=positions,
                n_embd=width,
                n_layer=depth,
                n_head=4,
                loss_type="ForCausalLM",
            ),
            batch=_text(2, length, tokens),
            sizes=texts,
        ),
        Trained(
            name="Llama",
            description="LlamaForCausalLM, grouped queries, its cache returned",
            model=_configured("LlamaForCausalLM", "LlamaConfig", **decoder),
            batch=_text(2, length, tokens),
            sizes=texts,
        ),
        Trained(
            name="Mixtral",
            description="MixtralForCausalLM, four experts, two of them for each token",
            model=_configured("MixtralForCausalLM", "MixtralConfig", **experts),
            batch=_text(2, length, tokens),
            sizes=texts,
            # torch has no grouped products of matrices in float64; one expert after the other has none to ask for
            exact=_configured("MixtralForCausalLM", "MixtralConfig", **experts, experts_implementation="eager"),
        ),
        Trained(
            name="LSTM",
            description="an LSTM of two layers with dropout, over embedded tokens",
            model=lambda: Tagger(tokens, width, 2),
            # Inductor gets every step of a text as ops of its own
            batch=_text(4, min(length, 32), tokens, "tokens"),
            sizes=tuple([(count, min(length, 32)) for count, length in texts]),
        ),
        Trained(
            name="U-Net",
            description="a U-Net of two levels with batch norm",
            model=lambda: UNet(width // 4),
            batch=_pixels(2, images),
            sizes=counts,
        ),
        Trained(
            name="graph",
            description="torch_geometric's GCNConv and GATConv, with dropout",
            model=lambda: GraphNet(16, width, 7),
            batch=_graph(20 if small else 500, 60 if small else 4000, 16, 7),
            sizes=tuple([(10 * count, 20 * length) for count, length in texts]),
        ),
    )
