"""The tensors that a trace has made are found without a look at all that the process holds."""

from __future__ import annotations

import gc

import torch

from aotlab.recorder.alive import MadeTensors


def test_only_what_was_made_since():
    """Older tensors are not gone through, but for those that were given; with a collection in between all are."""
    older, given = torch.ones(1), torch.ones(2)
    gc.disable()
    try:
        made = MadeTensors([given])
        newer = [torch.ones(3)]
        found = list(made.alive())
        assert any(each is newer[0] for each in found)
        assert any(each is given for each in found)
        assert not any(each is older for each in found)
        gc.collect(0)
        assert any(each is newer[0] for each in made.alive())
        assert any(each is older for each in made.alive())
    finally:
        gc.enable()


def test_the_dead_are_not_found():
    """A tensor that is gone is not alive."""
    gc.disable()
    try:
        made = MadeTensors()
        shape = (7, 11, 13)
        gone = torch.ones(shape)
        del gone
        assert not any(each.shape == shape for each in made.alive())
    finally:
        gc.enable()
