"""Records of aliasing and mutation: the one rule, the derived lists, and equality."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from aotlab.ir.metadata import (
    InputAliasInfo,
    MutationType,
    OutputAliasInfo,
    OutputType,
    ViewAndMutationMeta,
    ViewStep,
)
from aotlab.ir.specs import spec_of
from tests.engine_helpers import leaf, metadata, nonleaf, traced

SPEC = spec_of(torch.ones(2))


def an_input(index=0, **changes):
    """Make an input's record."""
    return InputAliasInfo(index=index, name="x", spec=SPEC, is_leaf=True, requires_grad=False, **changes)


def an_output(index, kind, base=None, spec=SPEC):
    """Make an output's record."""
    return OutputAliasInfo(
        index=index, name=f"out[{index}]", output_type=kind, raw_type="torch.Tensor", spec=spec, base_idx=base
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, MutationType.NOT_MUTATED),
        ({"keep_input_mutations": True}, MutationType.NOT_MUTATED),
        ({"mutates_data": True}, MutationType.MUTATED_OUT_GRAPH),
        ({"mutates_data": True, "keep_input_mutations": True}, MutationType.MUTATED_IN_GRAPH),
    ],
)
def test_the_one_rule(changes, expected):
    """The place that a new value is written to depends on the changes, and on whether the graph may write."""
    assert an_input(**changes).mutation_type is expected


def test_all_seven_output_types():
    """There are seven, and three of them alias an intermediate."""
    assert len(OutputType) == 7
    aliasing = {kind for kind in OutputType if an_output(0, kind).aliases_intermediate}
    assert aliasing == {
        OutputType.ALIAS_OF_INTERMEDIATE_SAVE_AS_OUTPUT,
        OutputType.ALIAS_OF_INTERMEDIATE,
        OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT,
    }


def test_derived_lists():
    """Index lists follow from the records."""
    meta = ViewAndMutationMeta(
        input_info=(
            an_input(0, mutates_data=True),
            an_input(1, mutates_data=True, keep_input_mutations=True),
            an_input(2),
        ),
        output_info=(
            an_output(0, OutputType.NON_ALIAS),
            an_output(1, OutputType.ALIAS_OF_INPUT, 2),
            an_output(2, OutputType.IS_INPUT, 0),
            an_output(3, OutputType.ALIAS_OF_INTERMEDIATE_SAVE_AS_OUTPUT, 0),
            an_output(4, OutputType.ALIAS_OF_INTERMEDIATE, 0),
            an_output(5, OutputType.UNSAFE_VIEW_ALIAS),
        ),
        intermediate_bases=(SPEC,),
    )
    kinds = [MutationType.MUTATED_OUT_GRAPH, MutationType.MUTATED_IN_GRAPH, MutationType.NOT_MUTATED]
    assert [info.mutation_type for info in meta.input_info] == kinds


def test_metadata_is_equal_for_equal_programs():
    """Two traces of one program give equal records; another program's differ."""

    def f(x, y):
        x.mul_(2)
        return x.t(), (x * y)[0]

    one, two = (metadata(traced(f, nonleaf(2, 3), leaf(2, 3))) for _ in range(2))
    assert one == two
    assert one != metadata(traced(f, nonleaf(3, 3), leaf(3, 3)))
    assert one != metadata(traced(lambda x, y: (x.t(), (x * y)[0]), nonleaf(2, 3), leaf(2, 3)))


def test_view_steps():
    """The way from a base to an output, op by op."""
    meta = metadata(traced(lambda x: x.t()[1].unsqueeze(0), torch.randn(2, 3)))
    assert [step.target for step in meta.output_info[0].views] == [
        "aten.t.default", "aten.select.int", "aten.unsqueeze.default",
    ]  # fmt: skip
    assert meta.output_info[0].views[1] == ViewStep(target="aten.select.int", args=(0, 1))
    item = metadata(traced(lambda x: x.split(1)[1], torch.randn(2, 3))).output_info[0].views[0]
    assert (item.target, item.item) == ("aten.split.Tensor", 1)


def test_records_are_frozen():
    """No record can be patched after it was made."""
    for record, name in ((an_input(), "mutates_data"), (an_output(0, OutputType.NON_ALIAS), "base_idx")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, name, 1)
