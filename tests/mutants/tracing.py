"""Mutants of the trace's records: writes, histories, memory that inputs share, kinds of tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from aotlab.capture import synthetic_bases
from aotlab.runtime.prologue import Prologue
from aotlab.trace import forward_outputs, function_run
from tests.mutants.mutant import Change, Mutant, skip


def _infos(**changes: Callable[[Any], Any]) -> Change:
    """Change fields of the record of each input; each change takes the record and returns the new value."""

    def change(original: Callable[..., Any]) -> Callable[..., Any]:
        def input_info(*args: Any) -> Any:
            info = original(*args)
            return replace(info, **{name: decide(info) for name, decide in changes.items()})

        return input_info

    return change


def _all_visible(original: Callable[..., Any]) -> Callable[..., Any]:
    def writes(inputs: Any, infos: Any) -> Any:
        return [replace(write, visible=True) for write in original(inputs, infos)]

    return writes


def _first_write_only(original: Callable[..., Any]) -> Callable[..., Any]:
    def writes(inputs: Any, infos: Any) -> Any:
        found = original(inputs, infos)
        bases: set[int] = set()
        kept = []
        for write in found:
            base = inputs[write.index].base
            if base is None or id(base) not in bases:
                kept.append(write)
            if base is not None:
                bases.add(id(base))
        return kept

    return writes


def _without_bases(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(call: Any, deduped: Any) -> Any:
        record, _ = original(call, deduped)
        return replace(record, bases=()), []

    return run


def key_without(part: int) -> Change:
    """Leave out one part of a tensor's metadata from the keys of the recorder's memo."""

    def change(original: Callable[..., Any]) -> Callable[..., Any]:
        def memo_key(value: Any) -> Any:
            key = original(value)
            return (*key[:part], None, *key[part + 1 :]) if isinstance(value, torch.Tensor) else key

        return memo_key

    return change


TRACING: tuple[Mutant, ...] = (
    Mutant(
        name="written inputs unmoved",
        breaks="An input that was written under its own counter counts as one whose counter does not move.",
        changes=((function_run, "input_info", _infos(moves_version=lambda info: False)),),
    ),
    Mutant(
        name="every write visible",
        breaks="What was written under no_grad counts as written with grad mode on.",
        changes=((forward_outputs, "writes_of", _all_visible),),
    ),
    Mutant(
        name="one window written",
        breaks="Of several windows of one base that were written only the first gets its new value and history.",
        changes=((forward_outputs, "writes_of", _first_write_only),),
    ),
    Mutant(
        name="no synthetic base",
        breaks="Inputs that share memory are inputs of the graph by themselves.",
        changes=((synthetic_bases, "run", _without_bases), (Prologue, "_overlaps", skip)),
    ),
)
