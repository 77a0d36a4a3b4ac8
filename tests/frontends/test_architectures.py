"""Common architectures with the direct frontend: which are compiled, and that two steps equal eager's."""

from __future__ import annotations

import collections
import copy
import re
import warnings

import numpy
import pytest
import torch

import aotlab
from aotlab import events
from aotlab.maintenance.bench.models import trained_models
from tests.engine_helpers import heard_events
from tests.training import models

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
BENCHED = {trained.name: trained for trained in trained_models(small=True)}

#: How each is compiled: whole, behind Dynamo or eagerly, and of the others the reason that the notice gives.
WHOLE = "whole", ""
#: The first call chooses the loss by its labels and sets `config.problem_type`; the later calls are another entry.
CHOOSES = "whole, twice", ""
#: Warns of padding by looking at the tokens.
LOOKS = "by Dynamo", "`in` needs the values of a tensor computed from `input_ids`"
#: Layers of graphs take out the edges from a node to itself.
HOW = {
    "ResNet": CHOOSES,
    "ViT": CHOOSES,
    "ConvNeXt": CHOOSES,
    "U-Net": WHOLE,
    "diffusion": WHOLE,
    "GPT-2": LOOKS,
    "Llama": WHOLE,
    "Qwen": WHOLE,
    "Mixtral": WHOLE if VERSION >= (2, 15) else ("by Dynamo", "`_grouped_mm` takes only bfloat16 in a trace"),
    "BERT": ("by Dynamo", "needs the value of a tensor computed from `attention_mask`"),
    "T5": WHOLE,
    "Whisper": WHOLE,
    "Mamba": WHOLE,
    "LSTM": WHOLE,
    "graph": WHOLE,
    "GAT": WHOLE,
    "PINN": WHOLE,
    "MAML": WHOLE,
    "gemma": WHOLE,
    "segformer": ("first by Dynamo", "changes `the number of forward hooks of"),
    "detr": ("by Dynamo", "needs the value of a tensor"),
    "clip": WHOLE,
    "gcn": WHOLE,
    "maml": WHOLE,
    "packed": ("by Dynamo", "size of the result of `_pack_padded_sequence` depends on the values"),
    "sparse": WHOLE,
    "experts": WHOLE,
    "vae": WHOLE,
    "transformer": WHOLE,
    "gru": WHOLE,
    "BartForConditionalGeneration": WHOLE,
    "DebertaV2ForSequenceClassification": LOOKS,
    "Dinov2ForImageClassification": CHOOSES,
    "DistilBertForSequenceClassification": CHOOSES,
    "MobileNetV2ForImageClassification": CHOOSES,
    "OPTForCausalLM": WHOLE,
    "PhiForCausalLM": WHOLE,
    "RobertaForTokenClassification": WHOLE,
    "SwinForImageClassification": CHOOSES,
    "Wav2Vec2ForSequenceClassification": ("eagerly", "is made to require grad"),
}

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore")]

full = pytest.mark.tier("full")
#: What takes no more than a moment.
QUICK = ("maml", "packed", "sparse", "experts", "vae")
TIERED = [pytest.param(name, marks=pytest.mark.tier("quick") if name in QUICK else full) for name in HOW]


def made(name):
    """Make a model and its batch."""
    if name in BENCHED:
        return BENCHED[name].model(), BENCHED[name].batch(torch.Generator().manual_seed(0))
    return models.configured(name) if name in models.CONFIGURED else getattr(models, name)()


def dense(gradient):
    """Return the numbers of a gradient, and whether it is sparse."""
    return None if gradient is None else (gradient.to_dense(), gradient.is_sparse)


def steps(call, model, batches):
    """Make a training step for each batch. Return the losses, gradients, parameters and buffers, step by step."""
    numpy.random.seed(0)  # of which Wav2Vec2 draws its masks
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for seed, batch in enumerate(batches):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        loss = models.loss_of(call(**batch))
        loss.backward()
        gradients = {key: dense(p.grad) for key, p in model.named_parameters()}
        optimizer.step()
        after = {key: t.detach().clone() for key, t in (*model.named_parameters(), *model.named_buffers())}
        seen.append((loss.detach(), gradients, after))
    return seen


def compare(name, batches):
    """Assert that the steps equal an eager copy's.

    Return the compiled function, the warnings and the events.
    """
    torch.manual_seed(0)
    model, batch = made(name)
    batches = batches or [batch, batch]
    alone = copy.deepcopy(model.train())
    with warnings.catch_warnings(record=True) as said, heard_events() as heard:
        warnings.simplefilter("always")
        compiled = aotlab.compile(model, backend="eager")
        found = steps(compiled, model, batches)
    # what Dynamo captures of Mixtral in torch 2.11 rounds otherwise than the model, whoever runs it
    captured = torch.compile(alone, backend="eager") if (name, VERSION) == ("Mixtral", (2, 11)) else alone
    torch.testing.assert_close(found, steps(captured, alone, batches), rtol=0, atol=0)
    return compiled.compiled, [str(each.message) for each in said], heard


def way(function, heard):
    """Say how two calls were compiled; each call of a graph that Dynamo captured has to be compiled."""
    calls = function.calls
    served = [event.entry is not None for event in heard if isinstance(event, events.Called)]
    if calls.eager or not any(served):
        return "eagerly"
    assert all(served)
    whole = {1: "whole", 2: "whole, twice"}[max(len(function.entries), 1)]
    return {0: whole, 1: "first by Dynamo", 2: "by Dynamo"}[calls.by_dynamo]


@pytest.mark.parametrize("name", TIERED)
def test_two_steps(name):
    """Loss, gradients, parameters and buffers are eager's bit for bit, compiled in the way that the table says."""
    how, why = HOW[name]
    function, said, heard = compare(name, None)
    assert way(function, heard) == how, said
    assert any(re.search(f"^`.*{why}", line) for line in said) == bool(why), said


def test_nine_in_ten():
    """Nearly all are compiled, by the direct frontend or by Dynamo; the table has each that is trained elsewhere."""
    eager = [name for name, (how, _) in HOW.items() if how == "eagerly"]
    assert len(eager) <= 0.1 * len(HOW)
    assert set(BENCHED) | set(models.CONFIGURED) < set(HOW)


@full
@pytest.mark.parametrize("name", ["BERT", "GPT-2", "Llama", "ResNet", "gcn"])
def test_sizes(name):
    """Batches of three sizes need at most two compilations of each graph, and equal eager's."""
    sizes, generator = ((4, 10), (6, 13), (3, 16)), torch.Generator().manual_seed(0)
    if name == "gcn":
        batches = [models.gcn(10 * count, 5 * length)[1] for count, length in sizes]
    else:
        trained = BENCHED[name]
        batches = [trained.batch(generator, *size[: len(trained.sizes[0])]) for size in sizes]
    function, said, heard = compare(name, batches)
    of = {event.entry: event.function_id for event in heard if isinstance(event, events.CompileStarted)}
    made = collections.Counter(of[event.entry] for event in heard if isinstance(event, events.CompileFinished))
    assert function.calls.eager == 0, said
    # both of its layers run by the same code, of which Dynamo makes a graph for each
    assert max(made.values()) <= (4 if name == "gcn" else 2)
