"""Models of transformers and diffusers with dropout, on Inductor with eager's numbers: three steps are eager's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._inductor.config

import aotlab
from aotlab import observe
from tests.engine_helpers import events

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600),
    pytest.mark.tier("full"),
]  # fmt: skip


def bert():
    """Classify sequences."""
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    tokens = torch.randint(0, 50, (2, 8))
    return transformers.BertForSequenceClassification(config), {"input_ids": tokens, "labels": torch.tensor([0, 1])}


def gemma():
    """Predict tokens."""
    config = transformers.GemmaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, attention_dropout=0.1,
    )  # fmt: skip
    tokens = torch.randint(0, 50, (2, 8))
    return transformers.GemmaForCausalLM(config), {"input_ids": tokens, "labels": tokens, "use_cache": False}


def segformer():
    """Segment images: batch norm and dropout of tensors that lie channels last."""
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[3, 3],
        strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, classifier_dropout_prob=0.1, num_labels=4,
    )  # fmt: skip
    images, labels = torch.randn(2, 3, 32, 32), torch.randint(0, 4, (2, 32, 32))
    return transformers.SegformerForSemanticSegmentation(config), {"pixel_values": images, "labels": labels}


def detr():
    """Detect objects."""
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
    model = diffusers.UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4, dropout=0.1, attention_head_dim=8,
    )  # fmt: skip
    return model, {"sample": torch.randn(2, 3, 16, 16), "timestep": torch.tensor(3)}


def loss_of(result):
    """Return the model's loss, or one of its results."""
    if getattr(result, "loss", None) is not None:
        return result.loss
    results = [result.sample] if hasattr(result, "sample") else [result.logits, result.pred_boxes]
    return sum(each.square().mean() for each in results)


def train(model, call, batch):
    """Return the losses of three steps, the parameters after them, and where the random generator is then."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        loss = loss_of(call(**batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, [parameter.detach() for parameter in model.parameters()], torch.get_rng_state()


@pytest.mark.parametrize("make", [bert, gemma, segformer, detr, unet])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_three_steps_are_eagers(make, backend):
    """All of it compiled: bit for bit on the eager backend; on Inductor close, with the same random numbers."""
    torch.manual_seed(0)
    model, batch = make()
    model.train()
    other = copy.deepcopy(model)
    expected = train(model, model, batch)
    with torch._inductor.config.patch(fallback_random=True), events() as heard:
        found = train(other, aotlab.compile(other, backend=backend, frontend="dynamo"), batch)
    exact = {"rtol": 0, "atol": 0} if backend == "eager" else {}
    torch.testing.assert_close(found, expected, **exact)
    assert not [event for event in heard if isinstance(event, observe.CompileFailed)]
