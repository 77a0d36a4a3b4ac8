"""Reports that are read from ``TORCH_TRACE``, beside facts that the recorded program took from objects."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import aotlab
from aotlab.cli import main
from aotlab.errors import UsageError
from aotlab.ir.metadata import OutputType
from aotlab.upstream.arguments import user_name
from aotlab.upstream.printed_graphs import read_graph, tensor_of
from aotlab.upstream.printed_metadata import read_metadata
from aotlab.upstream.trace_log import read_log

pytestmark = pytest.mark.tier("full")  # it runs a program that compiles

PROGRAM = Path(__file__).with_name("recorded.py")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Run the program once with ``TORCH_TRACE``. Return the folder and the program's own facts."""
    folder = tmp_path_factory.mktemp("trace")
    environment = os.environ | {"TORCH_TRACE": str(folder)}
    ran = subprocess.run(
        [sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return folder, json.loads(ran.stdout)


@pytest.fixture(scope="module")
def report(recorded):
    """Read the trace."""
    return aotlab.read_trace(recorded[0])


def _facts(recorded, function, kind):
    """Return the program's facts about the graphs of a kind, in the order of their compilation."""
    frames = {"step": 0, "broken": 1}
    graphs = [each for each in recorded[1]["graphs"] if each["kind"] == kind]
    last = max(each["id"][0] for each in graphs)
    return [each for each in graphs if each["id"][0] == frames.get(function, last)]


@pytest.mark.parametrize("function", ["step", "Model"])
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_nodes(recorded, report, function, kind):
    """All nodes have the names, ops, dtypes, sizes, inputs and lines of the nodes in the graph objects."""
    rows = report.nodes[(report.nodes.frame == function) & (report.nodes.part == kind)]
    facts = _facts(recorded, function, kind)
    assert len(facts) == (2 if function == "step" else 1)
    for graph, fact in enumerate(facts):
        of_graph = rows[rows.graph == graph]
        assert of_graph.name.tolist() == [each["name"] for each in fact["nodes"]]
        for row, node in zip(of_graph.itertuples(), fact["nodes"], strict=True):
            assert row.op == node["op"]
            assert row.target == node["target"]
            if node["dtype"] is not None:
                assert row.dtype == node["dtype"]
                assert str(row.shape) == f"[{', '.join(node['shape'])}]"
            assert [each for each in row.inputs.split(", ") if each] == node["inputs"]
            if node["line"] and (row.op == "call_function" or isinstance(row.file, str)):
                assert f'File "{row.file}", line {row.line}, in {row.function}' in node["line"][0]


def test_inputs_and_outputs(recorded, report):
    """The mutations of arguments and the kinds of outputs equal the fields of upstream's metadata object."""
    for graph, fact in enumerate(_facts(recorded, "step", "forward")):
        inputs = report.inputs[(report.inputs.frame == "step") & (report.inputs.graph == graph)]
        assert inputs.name.tolist() == ["x", "w"]
        nodes = [node for node in fact["nodes"] if node["op"] == "placeholder"]
        facts = [each for each, node in zip(fact["inputs"], nodes, strict=True) if node["dtype"] is not None]
        columns = ["mutates_data", "mutates_metadata", "requires_grad"]
        assert inputs[columns].values.tolist() == [each[:3] for each in facts]
        words = {
            "NOT_MUTATED": "not mutated",
            "MUTATED_IN_GRAPH": "mutated in graph",
            "MUTATED_OUT_GRAPH": "mutated out of graph",
        }
        assert inputs.mutation_type.tolist() == [words[each[3]] for each in facts]
        outputs = report.outputs[(report.outputs.frame == "step") & (report.outputs.graph == graph)]
        assert [OutputType(each).name.lower() for each in outputs.output_type] == [
            kind for kind, _, _ in fact["outputs"]
        ]
        assert outputs.requires_grad.tolist() == [requires_grad for _, _, requires_grad in fact["outputs"]]
        assert outputs.base.tolist()[1] == "x"


def test_arguments_of_a_module(report):
    """Parameters and buffers have the user's names."""
    inputs = report.inputs[report.inputs.frame == "Model"]
    assert sorted(inputs.name) == ["self.calls", "self.inner.bias", "self.inner.weight", "x"]
    assert inputs[inputs.mutated].name.tolist() == ["self.calls"]


def test_saved_values(recorded, report):
    """The saved values are the inputs of the backward that are no tangents."""
    for graph, fact in enumerate(_facts(recorded, "step", "backward")):
        saved = report.saved[(report.saved.frame == "step") & (report.saved.graph == graph)]
        nodes = [node for node in fact["nodes"] if node["op"] == "placeholder" and node["dtype"] is not None]
        assert sorted(saved.name) == sorted(node["name"] for node in nodes if "tangents" not in node["name"])
    first = report.saved[(report.saved.frame == "step") & (report.saved.graph == 0)]
    sizes = {"bool": 1, "float32": 4}
    assert first.nbytes.tolist() == [16 * sizes[dtype] for dtype in first.dtype]


def test_recompiles_and_graph_breaks(recorded, report):
    """The second size recompiles, with Dynamo's reason. The graph break has its line."""
    (row,) = report.recompiles.itertuples()
    assert (row.frame, row.graph, row.earlier, row.subject) == ("step", 1, 0, "x")
    assert "size mismatch at index 0. expected 4, actual 5" in row.reason
    # Dynamo does not count a break for which it skips the whole function.
    assert report.graph_breaks.function.tolist() == ["broken", "skipped"]
    assert recorded[1]["breaks"] == 1
    row = next(report.graph_breaks.itertuples())
    code = PROGRAM.read_text().splitlines()
    assert (row.file, code[row.line - 1].strip(), row.function) == (str(PROGRAM), 'print(end="")', "broken")


def test_failed_compilations(report):
    """Code that Dynamo does not compile has a refusal with Dynamo's reason and the user's line."""
    frame = next(each for each in report.frames if each.function == "skipped")
    (refusal,) = frame.refusals
    assert (refusal.error, refusal.outcome, frame.graphs[0].status) == ("Unsupported", "ran eagerly", "refused")
    assert "branching" in refusal.message
    assert PROGRAM.read_text().splitlines()[refusal.line.line - 1].strip() == "if x.sum() > 0:"


def test_guards_and_times(report):
    """The guard on an argument names it and the user's line. Each stage took time, and all are less than the whole."""
    guards = report.guards[report.guards.frame == "step"]
    match = guards[(guards.kind == "tensor match") & (guards.subject == "x")]
    assert len(match) == 2
    assert match.file.tolist() == [str(PROGRAM)] * 2
    stages = report.stages[(report.stages.frame == "step") & (report.stages.graph == 0)].set_index("stage")
    assert {"capture", "metadata", "trace", "partition", "guards"} <= set(stages.index)
    graph = report.frames[0].graphs[0]
    assert 0 < sum(each.duration_ns for each in graph.stages) <= graph.duration_ns
    assert report.time.duration_ns.sum() == report.duration_ns


def test_kernels_and_cache_hits(recorded, report):
    """The report has the kernels of Inductor's code. A note counts the results that came from a cache."""
    entries = [graph.entry for frame in report.frames for graph in frame.graphs]
    assert len(set(entries)) == len(entries)
    assert [frame.name for frame in report.frames][-2:] == ["fused", "fused #2"]  # behind a reset each
    kernels = report.kernels[report.kernels.frame == "fused"]
    code = recorded[1]["codes"][0]
    generated = kernels[kernels.language == "c++"]
    assert set(generated.name) == set(re.findall(r"^(cpp_fused\w+) = ", code, re.MULTILINE))
    assert len(generated) > 0
    assert all(source.strip() in code for source in generated.source)
    called = kernels[kernels.language == "extern"].name.tolist()
    assert called == re.findall(r"^ +(?:\w+ = )?(extern_kernels\.\w+)\(", code, re.MULTILINE) != []
    autograd_hits, inductor_hits = recorded[1]["hits"]
    assert autograd_hits + inductor_hits > 0
    (note,) = [each for each in report.notes if "came from a cache" in each]
    assert int(note.split()[0]) >= max(autograd_hits, inductor_hits)


def test_several_processes(recorded, tmp_path):
    """No two functions have the same name. The names contain the rank of the process, or the name of the log."""
    text = next(recorded[0].iterdir()).read_text()
    for name, rank in (("a.log", 0), ("b.log", 1), ("c.log", 1)):
        ranked = re.sub(r"(?m)^(V[^\]]*\] \{)", rf'\1"rank": {rank}, ', text)
        (tmp_path / name).write_text(ranked)
        names = [frame.name for frame in aotlab.read_trace(tmp_path).frames]
        assert len(set(names)) == len(names)
        assert {"a.log": "step", "b.log": "step (rank 1)", "c.log": "step (c.log)"}[name] in names


def test_report_is_a_report(report, tmp_path):
    """It is saved and loaded, and drawn as a page. Code and notes are shown as text."""
    assert aotlab.Report.load(report.save(tmp_path / "report.json")) == report
    page = report.to_html(tmp_path / "page.html").read_text()
    assert "recorded.py" in page


def test_command(recorded, tmp_path, capsys):
    """``aotlab report DIR`` prints a summary and writes the page."""
    page, data = tmp_path / "out.html", tmp_path / "out.json"
    assert main(["report", str(recorded[0]), "--html", str(page), "--json", str(data)]) == 0
    assert "step" in capsys.readouterr().out
    assert page.exists()
    assert aotlab.Report.load(data).frames
    assert main(["report", str(tmp_path / "missing")]) == 2


def test_what_is_no_log(recorded, tmp_path):
    """A folder without a log is an error. A log that was cut off is read up to its end."""
    (tmp_path / "other.txt").write_text("hello\n")
    with pytest.raises(UsageError, match="no log that torch wrote"):
        aotlab.read_trace(tmp_path)
    whole = next(recorded[0].iterdir())
    cut = tmp_path / "cut.log"
    text = whole.read_text()
    for length in (len(text) // 3, len(text) // 2, len(text) - 20):
        cut.write_text(text[:length])
        assert aotlab.read_trace(cut).frames
    cut.write_text(text.replace("class GraphModule(torch.nn.Module):", "class (((:"))
    assert aotlab.read_trace(cut).frames
    cut.write_text(text.replace('"dynamo_start": {', '"dynamo_start": 3, "x": {').replace('"str": [', '"str": [0, '))
    assert aotlab.read_trace(cut).frames
    cut.write_text(text + "V1129 17:49:57.620000 1 x.py:1] {not json\n")
    assert read_log(cut).damaged == 1
    assert any("could not be read" in note for note in aotlab.read_trace(cut).notes)


def test_nothing_is_executed(tmp_path):
    """Code in a log is parsed only."""
    body = "\n        b = open('/tmp/x')\n        return (b,)"
    graph = read_graph(f"class G(torch.nn.Module):\n    def forward(self, a: 'f32[2][1]cpu'):{body}")
    assert [(node.name, node.target) for node in graph.nodes] == [("a", "a"), ("b", "open")]
    assert read_metadata("open('/tmp/x')") is None
    assert read_metadata("ViewAndMutationMeta(input_info=[open('x')])") == {"input_info": ["open('x')"]}
    assert read_graph("no graph") is None
    assert read_graph("class G(torch.nn.Module):\n    def other(self): pass") is None


def test_lines_of_a_printed_graph():
    """Each op has the line in the comment above it, in the forms of torch 2.11 to 2.15."""
    graph = read_graph(
        "class G(torch.nn.Module):\n    def forward(self, a: 'f32[2][1]cpu'):\n"
        "        # File: /tmp/p.py:4 in f, code: b = a.sin()\n"
        "        b: 'f32[2][1]cpu' = torch.ops.aten.sin.default(a)\n"
        "        # Backward of forward node: File: /tmp/p.py:5 in f, code: return b * 2\n"
        "        c: 'f32[2][1]cpu' = torch.ops.aten.mul.Tensor(b, 2)\n"
        "        # No stacktrace found for following nodes\n"
        "        d: 'f32[2][1]cpu' = torch.ops.aten.clone.default(c)\n"
        "        return (d,)"
    )
    lines = [(node.name, node.line and (node.line.line, node.line.code)) for node in graph.nodes]
    assert lines == [("a", None), ("b", (4, "b = a.sin()")), ("c", (5, "return b * 2")), ("d", None)]


def test_names_and_tensors():
    """Dynamo's sources become the user's expressions, and annotations become tensors."""
    assert user_name("L['self']._modules['fc']._parameters['weight']") == "self.fc.weight"
    assert user_name("G['state']['n']") == "state['n']"
    tensor = tensor_of("bf16[2, s0][s0, 1]cuda:1")
    assert (tensor.dtype, tensor.device, str(tensor.shape[1])) == ("bfloat16", "cuda:1", "s0")
    assert tensor_of("Sym(s0)") is None
