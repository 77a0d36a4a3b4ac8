"""Models of packages, and small ones of our own, that tests train: each is made with the batch it is called with."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence


def package(name):
    """Import a package, or skip the test."""
    return pytest.importorskip(name, reason=f"{name} is not installed")


def bert():
    """Classify sequences."""
    transformers = package("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    tokens = torch.randint(0, 50, (2, 8))
    return transformers.BertForSequenceClassification(config), {"input_ids": tokens, "labels": torch.tensor([0, 1])}


def gemma():
    """Predict tokens."""
    transformers = package("transformers")
    config = transformers.GemmaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, attention_dropout=0.1,
    )  # fmt: skip
    tokens = torch.randint(0, 50, (2, 8))
    return transformers.GemmaForCausalLM(config), {"input_ids": tokens, "labels": tokens, "use_cache": False}


def segformer():
    """Segment images: batch norm and dropout of tensors that lie channels last."""
    transformers = package("transformers")
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[3, 3],
        strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, classifier_dropout_prob=0.1, num_labels=4,
    )  # fmt: skip
    images, labels = torch.randn(2, 3, 32, 32), torch.randint(0, 4, (2, 32, 32))
    return transformers.SegformerForSemanticSegmentation(config), {"pixel_values": images, "labels": labels}


def detr():
    """Detect objects."""
    transformers = package("transformers")
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], out_features=["stage4"]
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, d_model=16,
        encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16, encoder_attention_heads=2,
        decoder_attention_heads=2, num_queries=5, dropout=0.1, attention_dropout=0.1, activation_dropout=0.1,
    )  # fmt: skip
    return transformers.DetrForObjectDetection(config), {"pixel_values": torch.randn(2, 3, 64, 64)}


def unet():
    """Denoise images: group norm and dropout of tensors that lie channels last."""
    model = package("diffusers").UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4, dropout=0.1, attention_head_dim=8,
    )  # fmt: skip
    return model, {"sample": torch.randn(2, 3, 16, 16), "timestep": torch.tensor(3)}


def clip():
    """Find the image that belongs to a text."""
    transformers = package("transformers")
    tower = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    text = {**tower, "vocab_size": 100, "max_position_embeddings": 20, "bos_token_id": 98, "eos_token_id": 99}
    images = {**tower, "image_size": 32, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=images, projection_dim=16)
    tokens, pixels = torch.randint(0, 98, (2, 8)), torch.randn(2, 3, 32, 32)
    return transformers.CLIPModel(config), {"input_ids": tokens, "pixel_values": pixels, "return_loss": True}


_TOWER = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 64,
}  # fmt: skip
_VISION = {"image_size": 32, "num_labels": 5}
#: Further models of transformers: their class without "Config", its settings, and the kind of input that they take.
CONFIGURED = {
    "BartForConditionalGeneration": (
        "Bart", "texts",
        {
            "vocab_size": 100, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
            "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        },
    ),
    "DebertaV2ForSequenceClassification": (
        "DebertaV2", "classes", {**_TOWER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "Dinov2ForImageClassification": (
        "Dinov2", "images",
        {**_VISION, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    ),
    "DistilBertForSequenceClassification": (
        "DistilBert", "classes", {"vocab_size": 100, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
    ),
    "MobileNetV2ForImageClassification": ("MobileNetV2", "images", {**_VISION, "depth_multiplier": 0.35}),
    "OPTForCausalLM": (
        "OPT", "texts",
        {
            "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 64,
            "word_embed_proj_dim": 32,
        },
    ),
    "PhiForCausalLM": ("Phi", "texts", _TOWER),
    "RobertaForTokenClassification": ("Roberta", "labels", _TOWER),
    "SwinForImageClassification": (
        "Swin", "images",
        {**_VISION, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    ),
    "Wav2Vec2ForSequenceClassification": (
        "Wav2Vec2", "sound",
        {
            **_TOWER, "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "mask_time_length": 2,
            "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 16,
        },
    ),
}  # fmt: skip


def configured(name):
    """Make one of them."""
    transformers = package("transformers")
    of, kind, settings = CONFIGURED[name]
    model = getattr(transformers, name)(getattr(transformers, f"{of}Config")(**settings))
    tokens, two = torch.randint(5, 100, (2, 12)), torch.tensor([0, 1])
    batches = {
        "texts": {"input_ids": tokens, "labels": tokens},
        "labels": {"input_ids": tokens, "labels": tokens % 2},
        "classes": {"input_ids": tokens, "labels": two},
        "images": {"pixel_values": torch.randn(2, 3, 32, 32), "labels": two},
        "sound": {"input_values": torch.randn(2, 800), "labels": two},
    }
    return model, batches[kind]


class Translator(nn.Module):
    """Torch's own transformer."""

    def __init__(self):
        super().__init__()
        self.net = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)

    def forward(self, source, target):
        """Return the loss, where no place sees a later one."""
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return {"loss": self.net(source, target, tgt_mask=mask).square().mean()}


def transformer():
    """Translate."""
    return Translator(), {"source": torch.randn(2, 6, 16), "target": torch.randn(2, 5, 16)}


class Both(nn.Module):
    """A GRU there and back."""

    def __init__(self):
        super().__init__()
        # a whole number of vectors, so that torch's kernels round equally in dense memory; see `differences.ipynb`
        self.net = nn.GRU(8, 32, 2, dropout=0.1, bidirectional=True)

    def forward(self, x):
        """Return the loss."""
        return {"loss": self.net(x)[0].square().mean()}


def gru():
    """Read there and back."""
    return Both(), {"x": torch.randn(5, 2, 8)}


class Convolutions(nn.Module):
    """Two graph convolutions."""

    def __init__(self):
        super().__init__()
        layer = package("torch_geometric.nn").GCNConv
        self.first, self.second = layer(8, 8), layer(8, 4)

    def forward(self, nodes, edges):
        """Return a score."""
        return {"loss": self.second(self.first(nodes, edges).relu(), edges).square().mean()}


def gcn(nodes=10, edges=30):
    """Describe the nodes of a graph."""
    return Convolutions(), {"nodes": torch.randn(nodes, 8), "edges": torch.randint(0, nodes, (2, edges))}


class Adapted(nn.Module):
    """The loss after a step of gradient descent, by derivatives of derivatives."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, seen, seen_values, asked, asked_values):
        """Return the loss."""
        weights = dict(self.named_parameters())

        def loss(weights, x, y):
            hidden = functional.linear(x, weights["first.weight"], weights["first.bias"]).relu()
            return functional.mse_loss(functional.linear(hidden, weights["second.weight"], weights["second.bias"]), y)

        gradients = torch.autograd.grad(loss(weights, seen, seen_values), list(weights.values()), create_graph=True)
        moved = {name: w - 0.1 * gradient for (name, w), gradient in zip(weights.items(), gradients, strict=True)}
        return {"loss": loss(moved, asked, asked_values)}


def maml():
    """Learn to learn."""
    batch = {name: torch.randn(5, 4) for name in ("seen", "asked")}
    return Adapted(), batch | {f"{name}_values": torch.randn(5, 1) for name in batch}


class Reader(nn.Module):
    """An LSTM over sequences of several lengths."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, sequences, lengths):
        """Return the loss of the last state."""
        packed = pack_padded_sequence(sequences, lengths, batch_first=True, enforce_sorted=False)
        return {"loss": self.head(self.lstm(packed)[1][0][-1]).square().mean()}


def packed():
    """Read sequences of several lengths."""
    return Reader(), {"sequences": torch.randn(3, 5, 8), "lengths": torch.tensor([5, 3, 2])}


class Bag(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, words):
        """Return the loss of the mean word."""
        return {"loss": self.head(self.words(words).mean(1)).square().mean()}


def sparse():
    """Embed words."""
    return Bag(), {"words": torch.randint(0, 10, (3, 4))}


class Experts(nn.Module):
    """Four experts, of which each row is sent to two."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, rows):
        """Return the loss of what they say together."""
        weights, chosen = self.gate(rows).softmax(-1).topk(2, -1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            out.index_add_(0, row, expert(rows[row]) * weights[row, place, None])
        return {"loss": (out - rows).square().mean()}


def experts():
    """Send rows to experts."""
    return Experts(), {"rows": torch.randn(6, 8)}


class Autoencoder(nn.Module):
    """A variational autoencoder: its code is drawn at random."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 4), nn.Linear(2, 8)

    def forward(self, x):
        """Return the loss of what comes back, and of how far the codes are from normal."""
        mean, log = self.encode(x).chunk(2, -1)
        code = mean + torch.randn_like(mean) * (log / 2).exp()
        distance = -0.5 * (1 + log - mean**2 - log.exp()).sum(1).mean()
        return {"loss": functional.mse_loss(self.decode(code), x) + distance}


def vae():
    """Encode and decode."""
    return Autoencoder(), {"x": torch.randn(4, 8)}


def loss_of(result):
    """Return the model's loss, or one of its results."""
    if (loss := result.get("loss")) is not None:
        return loss
    results = [result.sample] if hasattr(result, "sample") else [result.logits, result.pred_boxes]
    return sum(each.square().mean() for each in results)
