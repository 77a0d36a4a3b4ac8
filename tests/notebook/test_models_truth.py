"""The totals that a report gives for a training step of a model, checked against independent counts."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("IPython")
pytest.importorskip("transformers")

from IPython.core.interactiveshell import InteractiveShell

from aotlab.notebook import unload_ipython_extension
from aotlab.report import Report
from aotlab.report.counts import summary
from aotlab.report.text import data_size

pytestmark = [pytest.mark.tier("full"), pytest.mark.timeout(900)]
STEP = "loss.backward(retain_graph=True)\noptimizer.step()\n"
MODELS = {
    "GPT-2": (
        "import torch, transformers\ntorch.manual_seed(0)\n"
        "config = transformers.GPT2Config(n_layer=12, n_embd=48, n_head=4, vocab_size=100, n_positions=32,\n"
        "    bos_token_id=0, eos_token_id=0)\n"
        "model = transformers.GPT2LMHeadModel(config)\nx = torch.randint(0, 100, (2, 16))\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n",
        "loss = model(x, labels=x).loss\n" + STEP,
        12 * 12 + 4,  # twelve in each layer, two embeddings, the last norm's two; the head's are the embedding's
        {"transformers/modeling_utils.py"},
    ),
    "a transformer": (
        "import torch\nfrom torch import nn\ntorch.manual_seed(0)\n"
        "layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)\n"
        "model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 10))\n"
        "x, y = torch.randn(4, 8, 32), torch.randint(0, 10, (32,))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
        "loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y)\n" + STEP,
        2 * 12 + 2,
        set(),
    ),
}


class Told:
    """A step of a model under the magic, and the same in eager."""

    def __init__(self, name: str, frontend: str, shell: InteractiveShell) -> None:
        setup, self.cell, self.parameters, self.broken = MODELS[name]
        self.eager: dict[str, Any] = {}
        exec(setup, self.eager)
        before = {key: value.detach().clone() for key, value in self.eager["model"].named_parameters()}
        exec(self.cell, self.eager)
        changed = self.eager["model"].named_parameters()
        self.changed = {f"model.{key}" for key, value in changed if not torch.equal(value, before[key])}
        for text in ("%load_ext aotlab", setup):
            shell.run_cell(text).raise_error()
        options = f"-o report --backend eager --frontend {frontend} --quiet"
        shell.run_cell(f"%%aotcompile {options}\n{self.cell}").raise_error()
        self.namespace = shell.user_ns
        self.captured = torch._dynamo.utils.counters["stats"]["unique_graphs"] if frontend == "dynamo" else 1
        self.broken = self.broken if frontend == "dynamo" else set()
        self.report: Report = shell.user_ns["report"].report()
        self.head = summary(self.report)
        self.facts = {fact.key: fact.sentence for fact in self.head.facts}


@pytest.fixture(
    scope="module", params=[(name, frontend) for frontend in ("auto", "dynamo") for name in MODELS], ids="-".join
)
def told(request: pytest.FixtureRequest) -> Iterator[Told]:
    """Run a step in a new shell, and return the report's totals."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    shell = InteractiveShell()
    shell.history_manager.enabled = False
    module = types.ModuleType("__main__")
    shell.user_module, shell.user_ns = module, vars(module)
    shell.init_user_ns()
    yield Told(*request.param, shell)
    unload_ipython_extension(shell)


def test_what_is_computed(told: Told) -> None:
    """The loss and all parameters after the step are eager's, bit for bit."""
    assert torch.equal(told.namespace["loss"], told.eager["loss"])
    pairs = zip(told.namespace["model"].parameters(), told.eager["model"].parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_graphs_and_breaks(told: Told) -> None:
    """As many graphs as Dynamo captured, none again; a break wherever the library stops Dynamo, once."""
    graphs = [graph for frame in told.report.frames for graph in frame.graphs]
    assert len(graphs) == told.captured
    assert f": {len(graphs)} graph" in told.report.verdict
    assert told.report.recompiles.empty
    assert {row.where.partition(":")[0] for row in told.report.graph_break_rows} == told.broken
    assert len(told.report.graph_break_rows) == len(told.broken)
    assert all(row.cell_line == 2 for row in told.report.graph_break_rows)


def test_inputs_and_changes(told: Told) -> None:
    """Every parameter goes into a graph; those that eager changes are changed, and each has a new gradient."""
    assert told.parameters == len(list(told.eager["model"].parameters())) == len(told.changed)
    inputs = told.report.inputs
    in_graphs, outside = inputs[inputs["graph"].notna()], inputs[inputs["graph"].isna()]
    in_graphs = in_graphs[in_graphs["duplicate_of"].isna()]  # a tied weight has two names
    assert {name for name in in_graphs["name"] if name.startswith("model.") and ".grad" not in name} == told.changed
    mutated = set(inputs[inputs["mutates_data"].fillna(False).astype(bool)]["name"])
    assert mutated == told.changed
    assert set(outside[outside["kind"] == "new"]["name"]) == {f"{name}.grad" for name in told.changed}
    assert re.findall(r"(\d+) tensors of model", told.facts["mutated"]) == [str(told.parameters)]
    assert told.facts["new"] == f"{told.parameters} gradients of model"
    assert (told.head.mutated, told.head.new) == (told.parameters, told.parameters)


def test_what_is_saved(told: Told) -> None:
    """The values that the backward graphs take from the forward graphs, and the bytes of those computed for it."""
    values, size = 0, 0
    for graph in (graph for frame in told.report.frames for graph in frame.graphs):
        nodes = [node for node in graph.nodes if node.stage == "partition"]
        made = {node.name: node for node in nodes if node.part == "forward"}
        taken = [node for node in nodes if node.part == "backward" and node.op == "placeholder" and node.name in made]
        assert {node.name: node.nbytes for node in taken} == {row.name: row.nbytes for row in graph.saved}
        returned = next(node for node in nodes if node.part == "forward" and node.op == "output")
        outputs = returned.inputs[: len(graph.outputs)]
        values += len(taken)
        computed = [node for node in taken if made[node.name].op == "call_function" and node.name not in outputs]
        size += sum(node.nbytes for node in computed)
    assert told.facts["saved"] == f"{values} values, {data_size(size)} of new memory"


def test_observables_and_time(told: Told) -> None:
    """The observables are rows about every graph, none twice; the times add up."""
    rows = told.report.verification_rows
    assert told.report.cell is not None
    with_python = {part.compared for part in told.report.cell.parts} & {"python"}
    against = "eager" if with_python else "the captured graph"  # the code of transformers logs
    assert f"equal to {against} on {len(rows):,} observables" in told.report.verdict
    assert {row.frame for row in rows} == {frame.name for frame in told.report.frames}
    assert len({(row.frame, row.graph, row.call, row.kind, row.subject) for row in rows}) == len(rows)
    assert sum(row.duration_ns for row in told.report.time_rows) == told.report.duration_ns
