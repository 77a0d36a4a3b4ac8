"""The tensors that a trace has made and that are alive."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from itertools import chain

from torch import Tensor


class MadeTensors:
    """Finds the tensors made since it was made, and those that it was given.

    While a trace runs, Python's cyclic collector is off, so that all objects made since stay in its youngest
    generation, and the others, millions perhaps, need not be looked at. Should a collection have run all the same, all
    objects are gone through.
    """

    def __init__(self, older: Iterable[Tensor] = ()) -> None:
        self._older = list(older)
        gc.collect(0)  # what is young now is not of the trace
        self._collections = _collections()

    def alive(self) -> Iterator[Tensor]:
        """Go through them, and perhaps through others."""
        young = 0 if _collections() == self._collections else None
        made = (each for each in gc.get_objects(generation=young) if issubclass(type(each), Tensor))
        return chain(self._older, made)


def _collections() -> list[int]:
    return [generation["collections"] for generation in gc.get_stats()]
