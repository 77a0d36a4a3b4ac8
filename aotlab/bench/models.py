"""Models as people train them, small and with random weights: what `aotlab.bench.training` trains.

Most are built from a configuration of ``transformers``, others from parts of ``torch_geometric`` and ``diffusers``
(extra ``models``); nothing is downloaded. What no package has is written in `aotlab.bench.networks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aotlab.bench.networks import Burgers, Denoiser, GraphAttention, GraphNet, Learner, Tagger, UNet
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
    by_stock
        Whether ``torch.compile`` can train it, too; if not, its columns have dashes, errors are limited by eager's, and
        bytes by nothing.
    """

    name: str
    description: str
    model: Callable[[], nn.Module]
    batch: Batches
    sizes: tuple[tuple[int, ...], ...] = ()
    exact: Callable[[], nn.Module] | None = None
    by_stock: bool = True

    def loss(self, result: Any) -> Tensor:
        """Return the loss in what the model returned."""
        loss: Tensor = result["loss"] if isinstance(result, Mapping) else result.loss
        return loss


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


def _noisy(count: int, size: int) -> Batches:
    def batch(generator: torch.Generator, count: int = count) -> Batch:
        images, noise = torch.randn(2, count, 3, size, size, generator=generator)
        return {"images": images, "noise": noise, "steps": torch.randint(100, (count,), generator=generator)}

    return batch


def _padded_text(count: int, length: int, tokens: int) -> Batches:
    def batch(generator: torch.Generator, count: int = count, length: int = length) -> Batch:
        text = torch.randint(tokens, (count, length), generator=generator)
        mask = torch.arange(length) < torch.randint(1, length + 1, (count, 1), generator=generator)
        return {"input_ids": text, "attention_mask": mask.long(), "labels": text.where(mask, -100)}

    return batch


def _speech(count: int, frames: int, length: int, tokens: int) -> Batches:
    def batch(generator: torch.Generator, count: int = count, length: int = length) -> Batch:
        sound = torch.randn(count, 16, frames, generator=generator)
        return {"input_features": sound, "labels": torch.randint(tokens, (count, length), generator=generator)}

    return batch


def _points(count: int) -> Batches:
    def batch(generator: torch.Generator, count: int = count) -> Batch:
        points, edge = torch.rand(2, count, 2, generator=generator)
        edge[:, 1] = 0
        values = -(2 * torch.pi * edge[:, :1]).sin()
        return {"points": points.requires_grad_(), "edge": edge, "values": values}

    return batch


def _tasks(count: int, examples: int) -> Batches:
    def batch(generator: torch.Generator, count: int = count) -> Batch:
        height, phase = torch.rand(2, count, 1, 1, generator=generator)
        seen, asked = 10 * torch.rand(2, count, examples, 1, generator=generator) - 5
        values = [(1 + height) * (x + 3 * phase).sin() for x in (seen, asked)]
        return {"seen": seen, "seen_values": values[0], "asked": asked, "asked_values": values[1]}

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
    return (
        *_of_images(width, depth, images, small=small),
        *_of_text(width, depth, length, 128 if small else 1024),
        *_of_other_things(width, small=small),
    )


def _of_images(width: int, depth: int, size: int, *, small: bool) -> Iterator[Trained]:
    sizes = tuple([(count,) for count in _COUNTS])
    batch = _images(2 if small else 8, size, 10)
    stages = {"hidden_sizes": [width // 2 * 2**n for n in range(depth)], "depths": [1 if small else 2] * depth}
    yield Trained(
        name="ResNet",
        description="ResNetForImageClassification, basic blocks",
        model=_configured(
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=width // 2,
            layer_type="basic",
            num_labels=10,
            **stages,
        ),
        batch=batch,
        sizes=sizes,
    )
    yield Trained(
        name="ViT",
        description="ViTForImageClassification",
        model=_configured(
            "ViTForImageClassification",
            "ViTConfig",
            hidden_size=width,
            num_hidden_layers=depth,
            num_attention_heads=4,
            intermediate_size=2 * width,
            image_size=size,
            patch_size=8,
            num_labels=10,
        ),
        batch=batch,
        sizes=sizes,
    )
    yield Trained(
        name="ConvNeXt",
        description="ConvNextForImageClassification",
        model=_configured(
            "ConvNextForImageClassification",
            "ConvNextConfig",
            num_stages=depth,
            num_labels=10,
            **stages,
        ),
        batch=batch,
        sizes=sizes,
    )
    yield Trained(
        name="U-Net",
        description="a U-Net of two levels with batch norm",
        model=lambda: UNet(width // 4),
        batch=_pixels(2, size),
        sizes=sizes,
    )
    yield Trained(
        name="diffusion",
        description="diffusers' UNet2DModel with dropout, that tells noise from images",
        model=lambda: Denoiser(width // 4, size // 2),
        batch=_noisy(2, size // 2),
        sizes=sizes,
    )


def _of_text(width: int, depth: int, length: int, tokens: int) -> Iterator[Trained]:
    positions = max(2 * length, *_LENGTHS)
    sizes = tuple(zip(_COUNTS, _LENGTHS, strict=True))
    # what runs step by step has every step of a text as ops of its own
    steps = min(length, 32)
    batch = _text(2, length, tokens)
    text = {"vocab_size": tokens, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    encoder = {**text, "hidden_size": width, "num_hidden_layers": depth, "intermediate_size": 2 * width}
    decoder = {
        **encoder,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": positions,
    }
    experts = {**decoder, "num_local_experts": 4}
    yield Trained(
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
        batch=batch,
        sizes=sizes,
    )
    yield Trained(
        name="Llama",
        description="LlamaForCausalLM, grouped queries, its cache returned",
        model=_configured("LlamaForCausalLM", "LlamaConfig", **decoder),
        batch=batch,
        sizes=sizes,
    )
    yield Trained(
        name="Qwen",
        description="Qwen2ForCausalLM, its cache returned",
        model=_configured("Qwen2ForCausalLM", "Qwen2Config", **decoder),
        batch=batch,
        sizes=sizes,
    )
    yield Trained(
        name="Mixtral",
        description="MixtralForCausalLM, four experts, two of them for each token",
        model=_configured("MixtralForCausalLM", "MixtralConfig", **experts),
        batch=batch,
        sizes=sizes,
        # torch has no grouped products of matrices in float64; one expert after the other has none to ask for
        exact=_configured("MixtralForCausalLM", "MixtralConfig", **experts, experts_implementation="eager"),
    )
    yield Trained(
        name="BERT",
        description="BertForMaskedLM with its dropout, texts padded",
        model=_configured(
            "BertForMaskedLM", "BertConfig", **encoder, num_attention_heads=4, max_position_embeddings=positions
        ),
        batch=_padded_text(2, length, tokens),
        sizes=sizes,
    )
    yield Trained(
        name="T5",
        description="T5ForConditionalGeneration with its dropout",
        model=_configured(
            "T5ForConditionalGeneration",
            "T5Config",
            **text,
            decoder_start_token_id=2,
            d_model=width,
            d_kv=width // 4,
            d_ff=2 * width,
            num_layers=depth,
            num_heads=4,
        ),
        batch=batch,
        sizes=sizes,
    )
    yield Trained(
        name="Whisper",
        description="WhisperForConditionalGeneration with dropout",
        model=_configured(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            **text,
            decoder_start_token_id=2,
            num_mel_bins=16,
            d_model=width,
            encoder_layers=depth,
            decoder_layers=depth,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=2 * width,
            decoder_ffn_dim=2 * width,
            max_source_positions=length,
            max_target_positions=positions,
            dropout=0.1,
        ),
        batch=_speech(2, 2 * length, length // 2, tokens),
        sizes=sizes,
    )
    yield Trained(
        name="Mamba",
        description="MambaForCausalLM, two layers by their reference, step by step",
        model=_configured(
            "MambaForCausalLM",
            "MambaConfig",
            **text,
            hidden_size=width,
            num_hidden_layers=2,
            use_associative_scan=False,  # it would be another algorithm than eager's, behind Dynamo alone
        ),
        batch=_text(2, steps // 2, tokens),
        sizes=tuple([(count, steps // 2) for count in _COUNTS]),
    )
    yield Trained(
        name="LSTM",
        description="an LSTM of two layers with dropout, over embedded tokens",
        model=lambda: Tagger(tokens, width, 2),
        batch=_text(4, steps, tokens, "tokens"),
        sizes=tuple([(count, min(length, 32)) for count, length in sizes]),
    )


def _of_other_things(width: int, *, small: bool) -> Iterator[Trained]:
    nodes, edges = (20, 60) if small else (500, 4000)
    sizes = tuple([(10 * count, 20 * length) for count, length in zip(_COUNTS, _LENGTHS, strict=True)])
    yield Trained(
        name="graph",
        description="torch_geometric's GCNConv and GATConv, with dropout",
        model=lambda: GraphNet(16, width, 7),
        batch=_graph(nodes, edges, 16, 7),
        sizes=sizes,
    )
    yield Trained(
        name="GAT",
        description="torch_geometric's GATConv, twice, with several heads and dropout",
        model=lambda: GraphAttention(16, width // 4, 4, 7),
        batch=_graph(nodes, edges, 16, 7),
        sizes=sizes,
    )
    yield Trained(
        name="PINN",
        description="a network that learns to fulfil Burgers' equation",
        model=lambda: Burgers(width, 2),
        batch=_points(20 if small else 1000),
        sizes=tuple([(10 * count,) for count in _COUNTS]),
        # it trains derivatives, and what torch.compile makes has no derivatives of derivatives
        by_stock=False,
    )
    yield Trained(
        name="MAML",
        description="meta-learning through one step of gradient descent on each task, by torch.func",
        model=lambda: Learner(width),
        batch=_tasks(4 if small else 25, 10),
        sizes=tuple([(count,) for count in _COUNTS]),
    )
