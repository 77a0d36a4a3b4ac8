"""Mutants of the backward: tangents, gradients, saved values and how long they are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from aotlab.derivatives.backwards import Backward
from aotlab.runtime.saved_values import SavedValues
from aotlab.trace.deriver import Deriver
from tests.mutants.mutant import Mutant, skip


def _drop_tangent(original: Callable[..., Any]) -> Callable[..., Any]:
    def derive(self: Any, segment: int, pattern: Sequence[bool]) -> list[torch.Tensor | None]:
        defined = [index for index, wanted in enumerate(pattern) if wanted]
        if len(defined) > 1:
            pattern = [wanted and index != defined[-1] for index, wanted in enumerate(pattern)]
        result: list[torch.Tensor | None] = original(self, segment, pattern)
        return result

    return derive


def _swap_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, saved: Any, tangents: Any) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = original(self, saved, tangents)
        return found[::-1]

    return call


def _release_always(original: Callable[..., Any]) -> Callable[..., Any]:
    def release(self: Any, mask: int, all_masks: Sequence[int]) -> None:
        self.released |= mask

    return release


def _release_all(original: Callable[..., Any]) -> Callable[..., Any]:
    def release(self: Any, mask: int, all_masks: Sequence[int]) -> None:
        everything = 0
        for each in all_masks:
            everything |= each
        original(self, mask and everything, all_masks)

    return release


def _any_version(original: Callable[..., Any]) -> Callable[..., Any]:
    def use(self: Any, *rest: Any) -> list[torch.Tensor]:
        self.remember_versions()
        found: list[torch.Tensor] = original(self, *rest)
        return found

    return use


def _saved_in_reverse(original: Callable[..., Any]) -> Callable[..., Any]:
    def use(self: Any, *rest: Any) -> list[torch.Tensor]:
        found: list[torch.Tensor] = original(self, *rest)
        return found[::-1]

    return use


BACKWARD: tuple[Mutant, ...] = (
    Mutant(
        name="dropped tangent",
        breaks="The last of several outputs contributes nothing to the gradients.",
        changes=((Deriver, "derive", _drop_tangent),),
    ),
    Mutant(
        name="swapped gradients",
        breaks="The gradients of the inputs are given to one another.",
        changes=((Backward, "__call__", _swap_gradients),),
    ),
    Mutant(
        name="retain_graph ignored",
        breaks="What was saved is let go although the graph is retained.",
        changes=((SavedValues, "release", _release_always),),
    ),
    Mutant(
        name="never released",
        breaks="A second backward goes through where eager raises.",
        changes=((SavedValues, "release", skip),),
    ),
    Mutant(
        name="released for all outputs",
        breaks="A backward from one output lets go what the backwards from others need.",
        changes=((SavedValues, "release", _release_all),),
    ),
    Mutant(
        name="versions unchecked",
        breaks="A backward uses what the caller has written since.",
        changes=((SavedValues, "use", _any_version),),
    ),
    Mutant(
        name="saved values in reverse",
        breaks="A backward takes the saved values in the wrong order.",
        changes=((SavedValues, "use", _saved_in_reverse),),
    ),
)
