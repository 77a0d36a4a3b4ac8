"""Metadata as JSON."""

import pytest
import torch

import aotlab
from aotlab.ir.metadata import InputAliasInfo, OutputAliasInfo, OutputType, ViewAndMutationMeta, ViewStep
from aotlab.ir.plain import MetadataFormatError, metadata_from_json, metadata_to_json
from aotlab.ir.specs import SymExpr, TensorSpec
from aotlab.verification.programs import program_of, run_program

_SPEC = TensorSpec(
    shape=(2, SymExpr(expression="s0", hint=3)),
    stride=(1, 2),
    offset=0,
    byte_offset=0,
    dtype=torch.complex64,
    device=torch.device("cuda", 1),
    layout=torch.strided,
)
_METADATA = ViewAndMutationMeta(
    input_info=(InputAliasInfo(index=0, name="x", spec=_SPEC, is_leaf=True, requires_grad=False),),
    output_info=(
        OutputAliasInfo(
            index=0,
            name="out",
            output_type=OutputType.ALIAS_OF_INPUT,
            raw_type="torch.Tensor",
            spec=_SPEC,
            base_idx=0,
            dynamic_dims=frozenset((0, 1)),
            views=(
                ViewStep(target="aten.view.dtype", args=(torch.float16,)),
                ViewStep(
                    target="made.up", args=(float("-inf"), [1j, -0.0], None, (True, 2), torch.channels_last), item=1
                ),
            ),
        ),
    ),
)


def _traced(seed: int) -> list[ViewAndMutationMeta]:
    found: list[ViewAndMutationMeta] = []

    def candidate(function):
        made = aotlab.compile(function, backend="eager")

        def call(*args):
            try:
                return made(*args)
            finally:
                found.extend(entry.records["trace"].metadata for entry in made.entries)

        return call

    run_program(program_of(seed), candidate)
    return found


def test_what_is_written_comes_back_equal():
    """Of each kind of value that a record can hold."""
    assert metadata_from_json(metadata_to_json(_METADATA)) == _METADATA


def test_the_metadata_of_random_programs_comes_back_equal():
    """Whatever views, steps and aliases they have."""
    found = [metadata for seed in range(40) for metadata in _traced(seed)]
    assert len(found) > 20
    assert [metadata_from_json(metadata_to_json(metadata)) for metadata in found] == found


def test_other_metadata_is_unequal():
    """Equality looks at all of it."""
    text = metadata_to_json(_METADATA)
    assert metadata_from_json(text.replace('"s0"', '"s1"')) != _METADATA
    assert metadata_from_json(text.replace("complex64", "complex128")) != _METADATA


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[:-2], "JSONDecodeError"),
        (lambda text: "[]", "not what"),
        (lambda text: text.replace("1, {", "9, {", 1), "metadata', 9]"),
        (lambda text: text.replace("complex64", "Tensor"), "Tensor"),
        (lambda text: text.replace("ALIAS_OF_INPUT", "NOTHING"), "NOTHING"),
        (lambda text: text.replace('{"torch": "strided"}', '{"exec": "1"}'), "exec"),
        (lambda text: text.replace('["x"', '["x", 1', 1).replace('[0, "x"', '[0, 1, "x"', 1), "zip"),
        (lambda text: text.replace('"ViewAndMutationMeta"', '"tuple"'), "tuple"),
    ],
)
def test_other_text_is_refused(change, said):
    """Damaged files, foreign ones and later ones, each with a word on where."""
    text = metadata_to_json(_METADATA)
    assert change(text) != text
    with pytest.raises(MetadataFormatError, match=said):
        metadata_from_json(change(text))


def test_nothing_that_is_read_is_run():
    """A tag is looked up in a fixed list; of torch only dtypes, layouts and memory formats."""
    with pytest.raises(MetadataFormatError):
        metadata_from_json('["aotlab metadata", 1, {"torch": "load"}]')
