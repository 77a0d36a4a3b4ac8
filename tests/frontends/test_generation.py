"""Text from small language models whose ``forward`` is compiled: each token is eager's, with caches as arguments."""

from __future__ import annotations

import pytest
import torch
import transformers

import aotlab

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.tier("full")]
MODELS = {
    "GPT-2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=100, n_positions=64)
    ),
    "Llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=100
        )
    ),
}


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_generate(name, cache):
    """The cache is an object, which Dynamo takes apart; nothing runs eagerly."""
    model, prompt = MODELS[name]().eval(), torch.randint(100, (2, 5))

    def tokens():
        return model.generate(prompt, max_new_tokens=8, do_sample=False, cache_implementation=cache, pad_token_id=0)

    wanted = tokens()
    model.forward = compiled = aotlab.compile(model.forward, backend="eager")
    assert torch.equal(tokens(), wanted)
    assert (compiled.calls.total, compiled.calls.by_dynamo) == (8, 8)
