"""The rows about the story's arguments, outputs and memory.

The docstring of the story states the true facts.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from aotlab.ir.metadata import ViewStep
from aotlab.ir.specs import SymExpr, spec_of
from aotlab.report import Report
from aotlab.report.model import Graph
from aotlab.report.rows import chain, reach, tensor_info


@pytest.fixture
def graph(report: Report) -> Graph:
    """Return the story's first graph."""
    return report.frames[0].graphs[0]


def test_inputs_are_joined_with_what_happened_to_them(graph: Graph) -> None:
    """``x`` is mutated, its duplicate shares its fate, nothing else changes."""
    found = {row.name: (row.kind, row.mutates_data, row.mutation_type, row.duplicate_of) for row in graph.inputs}
    assert found == {
        "weight": ("parameter", False, "not mutated", None),
        "x": ("input", True, "mutated out of graph", None),
        "again": ("input", True, "mutated out of graph", "x"),
        "y": ("input", False, "not mutated", None),
        "z": ("input", False, "not mutated", None),
        "scale": ("python", None, None, None),
    }
    assert graph.inputs[5].value == "2.0"


def test_overlaps_are_named_on_both_sides(graph: Graph) -> None:
    """``z`` is a window of ``y``: positions among the kept inputs become names."""
    assert {row.name: row.overlaps for row in graph.inputs if row.overlaps} == {"y": ("z",), "z": ("y",)}


def test_requires_grad_after_the_call(graph: Graph) -> None:
    """A mutation with something that requires grad makes ``x`` require grad."""
    found = {row.name: (row.tensor.requires_grad, row.requires_grad_after) for row in graph.inputs if row.tensor}
    assert found["x"] == (False, True)
    assert found["y"] == (False, False)


def test_outputs_say_what_they_alias(graph: Graph) -> None:
    """Each output type has its base, its chain of views and its sentence."""
    found = [(row.base_kind, row.base, row.views, row.relation) for row in graph.outputs]
    assert found == [
        (None, None, None, "memory of its own"),
        ("input", "x", "x.t()", "view of input x: x.t()"),
        ("input", "y", None, "is input y itself"),
        (
            "intermediate",
            "intermediate 0",
            "intermediate_0.unbind()[0]",
            "view of intermediate 0, which the graph returns too: intermediate_0.unbind()[0]",
        ),
        (
            "intermediate",
            "intermediate 0",
            "intermediate_0.unbind()[1]",
            "one more view of intermediate 0: intermediate_0.unbind()[1]",
        ),
        (None, None, None, "no tensor"),
        ("output", "out[0]", "out[0].t()", "view of output out[0]: out[0].t()"),
    ]


def test_storages_gather_who_shares_memory(graph: Graph) -> None:
    """Inputs and outputs that alias are listed under one storage, with their ranges of bytes."""
    found = {
        storage.number: (storage.owner, storage.nbytes, [(s.name, s.start, s.stop, s.mutated) for s in storage.spans])
        for storage in graph.storages
    }
    assert found == {
        0: ("input", 60, [("weight", 0, 60, False)]),
        1: ("input", 80, [("x", 0, 80, True), ("again", 0, 80, True), ("out[1]", 0, 80, False)]),
        2: ("input", 24, [("y", 0, 24, False), ("z", 8, 24, False), ("out[2]", 0, 24, False)]),
        3: ("output", 48, [("out[0]", 0, 48, False), ("out[6]", 0, 48, False)]),
        4: ("intermediate", 48, [("out[3]", 0, 12, False), ("out[4]", 12, 24, False)]),
    }
    assert [row.storage for row in graph.outputs] == [3, 1, 2, 4, 4, None, 3]


def test_saved_values_keep_reason_line_and_users(graph: Graph) -> None:
    """A saved value has a reason, a line and its users.

    A saved value that the caller holds anyway costs no new bytes.
    """
    assert [(s.name, s.nbytes, s.reason, s.is_input, s.is_output, s.new_bytes, s.used_by) for s in graph.saved] == [
        ("mul", 80, "mm needs it", False, True, 0, ("t",)),
        ("primals_1", 60, "mm needs it", True, False, 0, ("mm",)),
    ]
    assert graph.saved[0].line is not None
    assert graph.saved[0].line.line == 3


def test_nodes_of_every_stage_know_their_line_and_phase(graph: Graph) -> None:
    """Graphs of trace, partition and compile are listed node by node, with the user's line."""
    parts = list(dict.fromkeys((node.stage, node.part) for node in graph.nodes))
    assert parts == [
        ("trace", "joint"),
        ("partition", "forward"),
        ("partition", "backward"),
        ("compile", "forward"),
        ("compile", "backward"),
    ]
    joint = [node for node in graph.nodes if node.stage == "trace" and node.op == "call_function"]
    assert [(node.target, node.phase) for node in joint] == [
        ("aten.mul.Tensor", "forward"),
        ("aten.mm.default", "forward"),
        ("aten.t.default", "backward"),
        ("aten.mm.default", "backward"),
    ]
    assert {node.line.line for node in joint if node.line} == {3}


def test_stages_say_what_they_did(graph: Graph) -> None:
    """Each stage has a clause and the code that it handed on."""
    assert [(stage.name, stage.summary) for stage in graph.stages] == [
        ("capture", "1 parameter, 4 inputs and 1 python value; frontend direct"),
        ("dedupe", "1 duplicate dropped"),
        ("synthetic_bases", "1 overlap (16 B); 0 synthetic bases"),
        ("trace", "forward and backward; 1 mutated input"),
        ("partition", "partitioner default_partition; 2 values saved, no new memory"),
        ("compile", "forward and backward by inductor, 2 kernels"),
        ("runtime", "4 lines generated"),
    ]
    titles = {stage.name: [code.title for code in stage.codes] for stage in graph.stages}
    assert titles["trace"] == ["joint graph"]
    assert titles["partition"] == ["forward graph", "backward graph"]
    assert titles["compile"] == [
        "forward graph step__0_forward_1",
        "inductor's output code for step__0_forward_1",
        "backward graph step__0_backward_1",
    ]
    assert graph.stages[-1].codes[0].text.startswith("def call(weight, x):")


def test_a_refused_graph_shows_what_was_captured(report: Report) -> None:
    """Without a trace the arguments are known and their mutations are not."""
    graph = report.frames[1].graphs[0]
    assert {row.mutates_data for row in graph.inputs} == {None}
    assert graph.outputs == ()
    assert [len(storage.spans) for storage in graph.storages] == [1, 2, 2]


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.empty(4, 5), (0, 80)),
        (torch.empty(4, 5)[1:, 2:], (28, 80)),
        (torch.empty(4, 5).t(), (0, 80)),
        (torch.empty(4, 5)[:, 0], (0, 64)),
        (torch.empty(5).expand(3, 5), (0, 20)),
        (torch.empty(0, 5), (0, 0)),
        (torch.empty((), dtype=torch.int64), (0, 8)),
    ],
)
def test_the_bytes_that_a_tensor_reaches(tensor: torch.Tensor, expected: tuple[int, int]) -> None:
    """From the first element's first byte to the last one's last, whatever the strides."""
    assert reach(tensor_info(spec_of(tensor))) == expected


def test_the_bytes_that_a_symbolic_tensor_reaches() -> None:
    """The bytes are computed from the traced call's sizes. If a size is unknown even there, the range has no end."""
    row = tensor_info(spec_of(torch.empty(2, 3)))
    for hint, expected in ((2, (0, 24)), (None, None)):
        size, nbytes = SymExpr(expression="s0", hint=hint), SymExpr(expression="12*s0", hint=hint and 24)
        assert reach(replace(row, shape=(size, 3), nbytes=nbytes)) == expected


def test_view_chains_as_code() -> None:
    """Steps become calls; several results are indexed."""
    steps = (
        ViewStep(target="aten.transpose.int", args=(0, 1)),
        ViewStep(target="aten.split.Tensor", args=(2,), kwargs=(("dim", 1),), item=1),
        ViewStep(target="aten.view.default", args=((4, -1),)),
    )
    assert chain("x", steps) == "x.transpose(0, 1).split(2, dim=1)[1].view([4, -1])"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((0, 1, 2**63 - 1), "x[1:]"),
        ((1, 1, 2**63 - 1), "x[:, 1:]"),
        ((2, 0, 3), "x[:, :, :3]"),
        ((0, -2, 2**63 - 1, 2), "x[-2::2]"),
        ((0, 0, -1), "x[:-1]"),
        ((-1, 1, 2), "x[..., 1:2]"),
        ((-2, 1, 2), "x[..., 1:2, :]"),
        ((), "x[:]"),
        ((0, None, None), "x[:]"),
        ((0, 1, SymExpr(expression="s0", hint=2)), "x[1:s0]"),
    ],
)
def test_slices_are_written_as_indices(args: tuple[object, ...], expected: str) -> None:
    """A slice is written in Python's notation, and an open end stays open."""
    assert expected == chain("x", (ViewStep(target="aten.slice.Tensor", args=args),))


def test_slices_say_what_the_op_does() -> None:
    """The index notation of a slice gives the same view as the op."""
    x = torch.arange(24).view(2, 3, 4)
    for args in ((0, 1, 2**63 - 1), (1, 1, 2**63 - 1), (2, 0, 3, 2), (-1, 1, 2), (-2, 1, 2), (0, -2, 2**63 - 1), ()):
        expected = torch.ops.aten.slice.Tensor(x, *args)
        actual = eval(chain("x", (ViewStep(target="aten.slice.Tensor", args=args),)))
        assert torch.equal(expected, actual)
        assert (expected.stride(), expected.storage_offset()) == (actual.stride(), actual.storage_offset())


def test_keywords_of_a_slice_count() -> None:
    """Keywords are read like positions."""
    step = ViewStep(target="aten.slice.Tensor", args=(1,), kwargs=(("start", 2), ("step", 3)))
    assert chain("x", (step, ViewStep(target="aten.t.default"))) == "x[:, 2::3].t()"


def test_fake_tensors_are_shown_as_what_they_stand_for() -> None:
    """Values of the trace are fakes; a reader should not meet their type."""
    with FakeTensorMode():
        row = tensor_info(spec_of(torch.empty(2, 3)))
    assert (row.type_name, row.shape) == ("torch.Tensor", (2, 3))
