"""Memory that is viewed as bool and as another dtype: its bytes may differ from 0 and 1.

A copy of bools would change such bytes.
"""

from __future__ import annotations

import pytest
import torch

from tests.engine_helpers import same


def bools():
    """Make a bool tensor that can be seen as two numbers of 32 bits."""
    return torch.tensor([True, False, True, True, False, False, True, True])


def through_another_dtype(flags):
    """Write other bytes into a bool tensor."""
    numbers = flags.view(torch.int32)
    numbers.neg_()
    return numbers * 1


def through_a_part(flags):
    """Write other bytes into a part of a bool tensor."""
    numbers = flags[4:].view(torch.uint8)
    numbers.add_(6)
    return flags.view(torch.int32) * 1


def of_an_intermediate(flags):
    """Write other bytes into a bool tensor that the function makes."""
    made = ~flags
    made.view(torch.uint8).mul_(5)
    return made, made.view(torch.int32) * 1


def as_bool(numbers):
    """Write a part of a number tensor through a bool view."""
    seen = numbers.view(torch.bool)
    seen[:2].logical_not_()
    return seen, numbers * 1


@pytest.mark.parametrize("write", [through_another_dtype, through_a_part, of_an_intermediate])
def test_a_write_that_leaves_other_bytes_in_bools_is_eagers(write):
    """A program that writes bytes other than 0 and 1 into bools runs eagerly. Reads afterwards return those bytes."""
    same(write, bools(), eagerly=True)


def test_a_write_of_bools_among_other_bytes_is_eagers():
    """A write of bools to a part of a byte buffer leaves the other bytes unchanged."""
    same(as_bool, torch.tensor([0, 1, 2, 3, 254, 255], dtype=torch.uint8), eagerly=True)


def test_inputs_of_which_one_sees_the_other_as_bool():
    """A write to one of two arguments that share memory, one of them bool, leaves eager's bytes in the other."""

    def program(numbers, flags):
        flags[:2].logical_not_()
        return numbers * 1, flags

    numbers = torch.tensor([0, 1, 2, 3, 254, 255], dtype=torch.uint8)
    same(program, numbers, numbers.view(torch.bool), eagerly=True)


def test_looking_at_bools_as_numbers_is_compiled():
    """A program that views bools as numbers, and does not write them, is compiled."""

    def program(flags, numbers):
        return flags.view(torch.uint8) * 2, numbers.view(torch.bool).sum(), ~flags

    same(program, bools(), torch.tensor([0, 1, 2, 3, 254, 255], dtype=torch.uint8))
