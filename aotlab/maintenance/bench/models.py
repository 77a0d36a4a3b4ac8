"""Common models in small sizes and with random weights, which `training` trains.

Most are built from a configuration of ``transformers``, others from parts of ``torch_geometric`` and ``diffusers``
(install ``aotlab[models]``). No weights and no data are downloaded. Models that no package provides are defined in
`networks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aotlab.errors import UsageError
from aotlab.maintenance.bench.networks import Burgers, Denoiser, GraphAttention, GraphNet, Learner, Tagger, UNet

#: The keyword arguments of a call of a model.
Batch = dict[str, Tensor]
#: A function that makes a random batch. Its first argument is a CPU generator. The other arguments are an element of
#: `Trained.sizes`, or are left out for the default size.
Batches = Callable[..., Batch]
#: Twelve batch sizes from 2 to 64, and twelve text lengths from 2 to 128, with small and large values mixed.
_COUNTS = (8, 2, 64, 3, 16, 33, 5, 48, 7, 24, 4, 12)
_LENGTHS = (64, 128, 17, 2, 100, 31, 8, 77, 3, 127, 48, 10)
_TEXT_SIZES = tuple(zip(_COUNTS, _LENGTHS, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A model and its data.

    Attributes
    ----------
    name, description
        A name for the tables, and a description.
    model
        Makes the module, with weights from torch's seed. Called with a batch, the module returns its output, which
        contains the ``loss``.
    batch
        Makes the next batch.
    sizes
        Twelve sizes of a batch. Each size is a tuple with the arguments of ``batch`` after the generator: the number of
        examples and, for text, the length.
    exact
        Makes another module for float64, if torch has no float64 kernels for an op of ``model``. The parameters have
        the same names.
    by_stock
        Whether ``torch.compile`` can train the model too. If not, the columns of ``torch.compile`` contain dashes,
        the limit for our errors is computed from eager's errors, and there is no limit for bytes.
    unrolled_by_stock
        Whether ``torch.compile`` unrolls a loop for which aotlab calls a library's kernel, which keeps more memory. If
        so, our bytes are limited by eager's alone.
    """

    name: str
    description: str
    model: Callable[[], nn.Module]
    batch: Batches
    sizes: tuple[tuple[int, ...], ...] = ()
    exact: Callable[[], nn.Module] | None = None
    by_stock: bool = True
    unrolled_by_stock: bool = False

    def loss(self, result: Any) -> Tensor:
        """Return the loss from the model's output."""
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
    """Return a function that builds the ``transformers`` model of the class ``kind``.

    ``config`` is the name of its configuration class, and ``settings`` are the arguments of that class.
    """

    def build() -> nn.Module:
        try:
            import transformers
        except ImportError as error:
            raise UsageError("these models need transformers: pip install 'aotlab[models]'") from error
        model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**settings))
        return model

    return build


def trained_models(*, small: bool = False) -> tuple[Trained, ...]:
    """Return the models. With ``small``, a step of each takes a few ms, for the test suite."""
    width, depth, length, images, tokens = (32, 2, 16, 32, 128) if small else (128, 4, 128, 64, 1024)
    return (
        *_of_images(width, depth, images, small=small),
        *_decoders(width, depth, length, tokens),
        *_with_encoder(width, depth, length, tokens),
        *_recurrent(width, length, tokens),
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
        description="diffusers' UNet2DModel with dropout, which predicts the noise in images",
        model=lambda: Denoiser(width // 4, size // 2),
        batch=_noisy(2, size // 2),
        sizes=sizes,
    )


def _vocabulary(tokens: int) -> dict[str, int]:
    return {"vocab_size": tokens, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def _positions(length: int) -> int:
    """Return the number of positions that a text model supports: enough for every length in `_LENGTHS`."""
    return max(2 * length, *_LENGTHS)


def _layers(width: int, depth: int) -> dict[str, int]:
    return {"hidden_size": width, "num_hidden_layers": depth, "intermediate_size": 2 * width, "num_attention_heads": 4}


def _decoders(width: int, depth: int, length: int, tokens: int) -> Iterator[Trained]:
    positions, sizes, batch = _positions(length), _TEXT_SIZES, _text(2, length, tokens)
    text = _vocabulary(tokens)
    decoder = {**text, **_layers(width, depth), "num_key_value_heads": 2, "max_position_embeddings": positions}
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
        # torch has no grouped matrix product in float64, so this variant runs the experts one after another.
        exact=_configured("MixtralForCausalLM", "MixtralConfig", **experts, experts_implementation="eager"),
    )


def _with_encoder(width: int, depth: int, length: int, tokens: int) -> Iterator[Trained]:
    positions, sizes, text = _positions(length), _TEXT_SIZES, _vocabulary(tokens)
    yield Trained(
        name="BERT",
        description="BertForMaskedLM with its dropout, texts padded",
        model=_configured(
            "BertForMaskedLM", "BertConfig", **text, **_layers(width, depth), max_position_embeddings=positions
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
        batch=_text(2, length, tokens),
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


def _recurrent(width: int, length: int, tokens: int) -> Iterator[Trained]:
    # Shorten the texts, because the graph of a recurrent model has separate ops for every token of a text.
    steps = min(length, 32)
    yield Trained(
        name="Mamba",
        description="MambaForCausalLM, two layers by their reference, step by step",
        model=_configured(
            "MambaForCausalLM",
            "MambaConfig",
            **_vocabulary(tokens),
            hidden_size=width,
            num_hidden_layers=2,
            use_associative_scan=False,  # if True, transformers chooses another algorithm behind Dynamo than in eager
        ),
        batch=_text(2, steps // 2, tokens),
        sizes=tuple([(count, steps // 2) for count in _COUNTS]),
    )
    yield Trained(
        name="LSTM",
        description="an LSTM of two layers with dropout, over embedded tokens",
        model=lambda: Tagger(tokens, width, 2),
        batch=_text(4, steps, tokens, "tokens"),
        sizes=tuple([(count, min(length, 32)) for count, length in _TEXT_SIZES]),
        unrolled_by_stock=True,
    )


def _of_other_things(width: int, *, small: bool) -> Iterator[Trained]:
    nodes, edges = (20, 60) if small else (500, 4000)
    sizes = tuple([(10 * count, 20 * length) for count, length in _TEXT_SIZES])
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
        # The loss contains derivatives, and torch.compile does not support second derivatives.
        by_stock=False,
    )
    yield Trained(
        name="MAML",
        description="meta-learning through one step of gradient descent on each task, by torch.func",
        model=lambda: Learner(width),
        batch=_tasks(4 if small else 25, 10),
        sizes=tuple([(count,) for count in _COUNTS]),
    )
