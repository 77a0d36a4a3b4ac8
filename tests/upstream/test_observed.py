"""Reports of `torch.compile` while it runs, beside facts about the programs that do not come from torch's trace."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func

import aotlab
from aotlab.upstream.frame_names import function_names, stack_of
from tests.upstream import observed

pytestmark = pytest.mark.tier("full")  # it compiles

HERE = Path(__file__).parent


def _observe(program):
    """Run a program. Return its report, and the graphs that the compilers of AOTAutograd got: kind and node names."""
    graphs = []

    def describe(kind):
        def compiler(module, example_inputs):
            nodes = [node for node in module.graph.nodes if node.op != "output"]
            graphs.append((kind, [(node.name, node.op, str(node.target)) for node in nodes]))
            return make_boxed_func(module.forward)

        return compiler

    backend = aot_autograd(
        fw_compiler=describe("forward"), bw_compiler=describe("backward"), inference_compiler=describe("inference")
    )
    torch.compiler.reset()
    counters.clear()
    with aotlab.observe(caches=False) as report:
        program(lambda function, **settings: torch.compile(function, backend=backend, **settings))
    return report.report(), graphs


@pytest.mark.parametrize("program", observed.PROGRAMS, ids=lambda each: each.__name__)
def test_graphs(program):
    """The report has each compiled graph once, with the nodes of the graph object, and each input has a name."""
    report, graphs = _observe(program)
    compiled = [graph for frame in report.frames for graph in frame.graphs]
    if program is not observed.again:  # a reset clears the counters
        assert len(compiled) == counters["stats"]["unique_graphs"]
    parts: dict[str, list[object]] = {}
    for graph in compiled:
        assert graph.duration_ns > 0
        for part in ("forward", "backward", "inference"):
            nodes = [(node.name, node.op, node.target) for node in graph.nodes if node.part == part]
            parts.setdefault(part, []).extend([nodes] if nodes else [])
    for kind, nodes in graphs:  # a backward that is not called does not get to the compiler
        # A pass replaces a number by its value before the compiler gets the graph.
        count = 4 if program is observed.names else None
        assert _plain(nodes)[:count] in [_plain(each)[:count] for each in parts[kind]]
    for part in ("forward", "inference"):
        assert len(parts.get(part, [])) == [kind for kind, _ in graphs].count(part)
    names = [row.name for graph in compiled for row in graph.inputs]
    assert not [each for each in names if each.startswith(("L_", "G_", "primals", "arg0", "s0"))]


def _plain(nodes):
    return [(name, op, "getitem" if "getitem" in target else target) for name, op, target in nodes]


def _rows(table, *columns):
    return [tuple(None if each is None or each != each else each for each in row) for row in table[[*columns]].values]


def test_overlapping_arguments():
    """Arguments that share memory have their offsets, overlaps and mutations, though a base replaces them."""
    report, _ = _observe(observed.aliases)
    assert [(row.name, row.overlaps, row.mutated) for row in report.frames[0].graphs[0].inputs] == [
        ("x", ("y",), True),
        ("y", ("x",), False),
        ("z", (), False),
    ]
    assert report.inputs.offset.tolist() == [4, 6, 12]
    columns = ("storage", "owner", "nbytes", "tensor", "start", "stop", "mutated")
    assert _rows(report.storages, *columns) == [
        (0, "input", 80, "x", 16, 32, True),
        (0, "input", 80, "y", 24, 40, False),
        (0, "input", 80, "z", 48, 80, False),
    ]
    (placeholder,) = report.frames[0].graphs[0].placeholders
    assert (placeholder.user_name, placeholder.kind) == ("base_of_x", "base")


def test_views_among_outputs():
    """A view of an argument has its place in the argument's storage. A new tensor has none."""
    report, _ = _observe(observed.views)
    x = torch.zeros(40)[4:20].view(4, 4)
    returned = [x[1:].t(), x.select(1, -1), x.view(-1)[::2]]
    spans = report.storages[report.storages.role == "output"]
    assert [int(start) for start in spans.start] == [4 * each.storage_offset() for each in returned]
    ends = [
        each.storage_offset() + sum((n - 1) * step for n, step in zip(each.shape, each.stride(), strict=True)) + 1
        for each in returned
    ]
    assert [int(stop) for stop in spans.stop] == [4 * each for each in ends]
    assert set(report.storages.storage) == {0}


def test_wrapper_subclasses():
    """A wrapper has a row above the rows of its parts, and each part has a storage and its placeholder."""
    report, _ = _observe(observed.subclass)
    rows = report.frames[0].graphs[0].inputs
    assert [(row.name, row.part_of, row.placeholder) for row in rows] == [
        ("t", "", ""),
        ("t.a", "t", "primals_1"),
        ("t.b", "t", "primals_2"),
        ("u", "", "primals_3"),
    ]
    assert [row.mutation_type for row in rows] == ["not mutated"] * 4
    assert [row.tensor.requires_grad for row in rows] == [False, False, False, True]
    assert rows[0].tensor.type_name.endswith("TwoTensor")
    assert [span.part_of for storage in report.frames[0].graphs[0].storages for span in storage.spans] == ["t", "t", ""]


def test_names_of_arguments():
    """Similar names are told apart. Sizes are no arguments, numbers have their values, closures their names."""
    report, _ = _observe(observed.names)
    rows = {row.name: row for row in report.frames[0].graphs[0].inputs}
    assert set(rows) == {"x_1", "x1", "a", "rest[0]", "weight", "state['n']"}
    assert (rows["a"].kind, rows["a"].value, rows["a"].tensor) == ("python", "0.5", None)
    assert [name for name, row in rows.items() if row.mutated] == ["state['n']"]
    assert [name for name, row in rows.items() if row.tensor is not None and row.tensor.requires_grad] == ["weight"]
    sizes = [each for each in report.frames[0].graphs[0].placeholders if each.kind == "size"]
    assert [each.value for each in sizes] == ["3"]
    assert all(each.user_name.endswith(".size(0)") for each in sizes)


def test_modules_and_optimizers():
    """Frames have the names in the calling line. Parameters, buffers and gradients have names and storages."""
    report, _ = _observe(observed.modules)
    assert [frame.name for frame in report.frames] == ["model", "net", "linear"]
    kinds = {row.name: row.kind for row in report.frames[0].graphs[0].inputs}
    assert kinds == {"self.calls": "buffer", "self.embedding.weight": "parameter", "index": "input"}
    numbers = [storage.number for frame in report.frames for graph in frame.graphs for storage in graph.storages]
    assert numbers == list(range(len(numbers)))  # no record says that two graphs have a storage in common
    report, _ = _observe(observed.optimizer)
    rows = {row.name: row for frame in report.frames for graph in frame.graphs for row in graph.inputs}
    weight = "self.param_groups[0]['params'][0]"
    assert {weight, f"{weight}.grad"} < set(rows)
    assert len(rows) == 5  # two averages and the number of steps
    assert [name for name, row in rows.items() if not row.mutated] == [f"{weight}.grad"]
    assert None not in [row.storage for row in rows.values()]


def test_breaks_and_resets():
    """The code after a graph break is named after its line. After a reset, the same code is another frame."""
    report, _ = _observe(observed.breaks)
    lines = (HERE / "observed.py").read_text().splitlines()
    after = [1 + n for n, line in enumerate(lines) if "graph_break()" in line or 'print(end="")' in line]
    assert [frame.name for frame in report.frames] == ["broken", *(f"broken after line {line}" for line in after)]
    assert len(report.graph_breaks) == counters["graph_break"].total() == 2
    report, _ = _observe(observed.again)
    assert [frame.name for frame in report.frames] == ["twice", "twice #2"]


def test_first_record():
    """The first record arrives, although torch's handler removes itself when it gets this record."""
    logger = logging.getLogger("torch.__trace")

    class Once(logging.Handler):
        def emit(self, record):
            logger.removeHandler(self)

    logger.addHandler(Once())
    report, _ = _observe(observed.breaks)
    assert report.frames[0].graphs[0].duration_ns > 0


def test_failures():
    """An error of a compiler leaves the report with all that came before, the user's line and the error."""
    torch.compiler.reset()
    with aotlab.observe(caches=False) as report:
        for run in observed.failures():
            with contextlib.suppress(Exception):
                run()
    good, *others = report.frames
    assert good.graphs[0].status == "compiled"
    assert good.graphs[0].storages
    refusals = [each for frame in others for each in frame.refusals]
    assert [each.outcome for each in refusals] == ["raised"] * 3
    assert [each.error for each in refusals][::2] == ["BackendCompilerFailed", "Unsupported"]
    assert "this compiler fails" in refusals[0].message
    assert refusals[1].message.startswith("the backward was not compiled: ")
    assert {each.line.file for each in refusals} == {observed.__file__}
    assert not good.refusals


def test_live_and_recorded(tmp_path):
    """A report of ``TORCH_TRACE`` equals the report that was made while the program ran."""
    program, live, folder = HERE / "observed.py", tmp_path / "live.json", tmp_path / "trace"
    environment = os.environ | {"TORCH_TRACE": str(folder)}
    subprocess.run(
        [sys.executable, str(program), str(live)], env=environment, check=True, capture_output=True, timeout=300
    )
    recorded = aotlab.read_trace(folder).save(tmp_path / "recorded.json")
    one, other = (json.loads(Path(path).read_text())["frames"] for path in (live, recorded))
    assert one == other
    kernels = aotlab.Report.load(live).kernels
    assert {"extern_kernels.mm"} <= set(kernels.name)
    assert {"forward", "backward"} <= set(kernels.kind)


def test_two_processes(tmp_path):
    """Each rank of a distributed program has its frames, storages and sizes in one report."""
    (tmp_path / "trace").mkdir()
    settings = {"TORCH_TRACE": str(tmp_path / "trace"), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(HERE / "recorded_ranks.py")]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], env=os.environ | settings, stderr=subprocess.PIPE)
        for rank in (0, 1)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], errors
    report = aotlab.read_trace(tmp_path / "trace")
    names = [f"{name} (rank {rank})" for rank in (0, 1) for name in ("total", "compiled")]
    assert [frame.name for frame in report.frames] == names
    x = report.inputs[(report.inputs.name == "x") & report.inputs.frame.str.startswith("compiled")]
    assert [str(shape) for shape in x["shape"]] == ["[2, 4]", "[3, 4]"]
    assert report.storages.storage.tolist() == list(range(8))


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("loss = loss_fn(model(x), y)", "model"),
        ("out = self.net(", "self.net"),
        ("for y in model(x):", "model"),
        ("return self.layers[i](x, mask=m)", "self.layers[i]"),
        ("F.mse_loss(model(x), y).backward()", "model"),
        ("torch.compile(Model())(x)", "Model"),
        ("y = net.forward(x)", "net"),
        ("first(second(x))", "forward"),
        ("os.system('false')", "os.system"),
        ("def f(:", "forward"),
        ("", "forward"),
    ],
)
def test_names_of_modules(code, name):
    """A module is named after the call. If the line has no call or several, it is called forward."""
    torch_file = f"{torch.__path__[0]}/nn/modules/module.py"
    stack = [
        {"filename": 0, "line": 1, "name": "<module>", "loc": code},
        {"filename": 1, "line": 2, "name": "_call_impl", "loc": "return forward_call(*args, **kwargs)"},
        {"filename": 0, "line": 3, "name": "forward"},
    ]
    assert function_names(stack_of(stack, {0: "program.py", 1: torch_file})) == (name, name)
