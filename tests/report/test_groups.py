"""Groups of rows: their members, their counts, and the rows that a cut keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from aotlab.report.groups import input_groups, most_telling, storage_groups
from aotlab.report.model import Group, Input, Saved, Span, Storage, TensorInfo

TENSOR = TensorInfo(dtype="float32", device="cpu", shape=(6,), stride=(1,), nbytes=24)


def layers(count: int, **fields: Any) -> list[Input]:
    """Make inputs that belong to one variable."""
    kind = fields.pop("kind", "parameter")
    return [Input(name=f"net.{i}.weight", kind=kind, tensor=TENSOR, mutates_data=False, **fields) for i in range(count)]


GRADIENT = replace(TENSOR, requires_grad=True)
#: Inputs, and the groups that they make, with the number of the group for each input.
INPUTS: dict[str, tuple[list[Input], list[str], list[int | None]]] = {
    "three": (layers(3), ["3 parameters of net"], [0, 0, 0]),
    "two are few": (layers(2), [], [None, None]),
    "buffers": (layers(3, kind="buffer"), ["3 buffers of net"], [0, 0, 0]),
    "tensors": (layers(3, kind="input"), ["3 tensors of net"], [0, 0, 0]),
    "gradients": (
        [replace(row, name=f"{row.name}.grad", kind="new", mutates_data=True) for row in layers(8)],
        ["8 gradients of net"],
        [0] * 8,
    ),
    "seven changed ones are few": ([replace(row, mutates_data=True) for row in layers(7)], [], [None] * 7),
    "those with a gradient of their own": (
        [*layers(3), *[replace(row, tensor=GRADIENT) for row in layers(3)]],
        ["3 parameters of net", "3 parameters of net"],
        [0, 0, 0, 1, 1, 1],
    ),
    "what shares memory has its own row": ([*layers(3), *layers(3, overlaps=("x",))], ["3 parameters of net"], None),
    "another fate": ([*layers(3), *layers(1, requires_grad_after=True)], ["3 parameters of net"], None),
    "variables and numbers": (
        [*[Input(name=name, kind="input", tensor=TENSOR) for name in "xyz"], Input(name="n", kind="python", value="2")],
        [],
        [None] * 4,
    ),
}  # type: ignore[assignment]


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_one_variable_and_one_fate_are_a_group(name: str) -> None:
    """A group has a title, a count and its bytes; each of its rows has its number."""
    rows, titles, numbers = INPUTS[name]
    numbered, groups = input_groups(rows)
    assert [group.title for group in groups] == titles
    assert [row.group for row in numbered] == (numbers or [0] * 3 + [None] * (len(rows) - 3))
    assert [replace(row, group=None) for row in numbered] == rows
    for number, group in enumerate(groups):
        assert (group.count, group.nbytes) == (count := sum(r.group == number for r in numbered), count * 24)


def test_parts_of_wrappers_belong_to_the_group_of_the_wrapper() -> None:
    """They are not counted."""
    rows = [each for row in layers(3) for each in (row, replace(row, name=f"{row.name}.a", part_of=row.name))]
    numbered, groups = input_groups(rows)
    assert groups == (Group(title="3 parameters of net", count=3, nbytes=72),)
    assert {row.group for row in numbered} == {0}


def of_one_tensor(number: int, owner: str, *, mutated: bool | None = False, writes: int | None = None) -> Storage:
    """Make a storage with one tensor."""
    span = Span(name=f"t{number}", role="input", start=0, stop=24, mutated=mutated, writes=writes)
    return Storage(number=number, owner=owner, nbytes=24, device="cpu", spans=(span,))


def test_storages_of_one_tensor_that_tell_little_are_groups() -> None:
    """Unwritten and untraced storages form groups; among many storages, fully written and new ones do, too."""
    written = [of_one_tensor(i, "input", mutated=True, writes=24) for i in range(8)]
    rest = [of_one_tensor(8, "input"), of_one_tensor(9, "input", mutated=None)]
    rows, groups = storage_groups([*written, *rest])
    unwritten = [
        "1 storage with one tensor, unwritten",
        "1 storage with one tensor, of a graph that was not traced",
    ]
    assert [group.title for group in groups] == unwritten
    assert [row.group for row in rows] == [None] * 8 + [0, 1]
    shared = replace(rest[0], spans=(*rest[0].spans, *rest[1].spans))
    rows, groups = storage_groups([*written, shared, *rest])
    assert [group.title for group in groups] == ["8 storages with one tensor each, written as a whole", *unwritten]
    assert [row.group for row in rows] == [0] * 8 + [None, 1, 2]
    assert [(group.count, group.nbytes) for group in groups] == [(8, 192), (1, 24), (1, 24)]


def test_which_rows_a_cut_keeps() -> None:
    """It keeps the first row of each group, rows of no group, and the largest saved values, in their order."""
    rows, _ = input_groups([*layers(5), Input(name="x", kind="input", tensor=TENSOR)])
    assert [row.name for row in most_telling(rows, 3)] == ["net.0.weight", "net.1.weight", "x"]
    saved = [Saved(name=str(size), tensor=TENSOR, nbytes=size, reason="") for size in (4, 64, 8, 32)]
    assert [row.name for row in most_telling(saved, 2)] == ["64", "32"]
