"""Regions of a cell that the direct frontend traces (``--frontend auto``).

    x = x * w                  # the region: it reads `w` and `x`, and binds `x` and `y`
    y = x.view(-1)

    def traced(x):             # the function that is traced
        x = x * w
        y = x.view(-1)
        return (locals(),)   # and the value that the cell displays, if there is one

The trace must not bind the notebook's variables, so the names that the region binds are variables of the traced
function. After the call, the region binds them in the notebook.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from aotlab.cache import Entry
from aotlab.capture import nesting
from aotlab.notebook.cell import RegionCode
from aotlab.notebook.graphs import RunInstead, written_inputs
from aotlab.notebook.traced import NotTraced, TracedFunction


class TracedRegion(TracedFunction):
    """A region of a cell, compiled by the direct frontend.

    Parameters
    ----------
    code
        The region. Its ``traced`` is not None.
    namespace
        The notebook's variables.
    **settings
        As for `TracedFunction`.
    """

    def __init__(self, code: RegionCode, namespace: dict[str, Any], **settings: Any) -> None:
        assert code.traced is not None
        function = types.FunctionType(code.traced, namespace)
        super().__init__(function, bound=code.bound, refused=None, **settings)
        self._bound = code.bound
        self._arguments = code.traced.co_varnames[: code.traced.co_argcount]
        self._namespace = namespace
        #: The notebook's names for the results, by the names in reports. IPython calls the displayed value `_`.
        self.names = {**{f"out[0][{name!r}]": name for name in code.bound}, "out[1]": "_"}
        self._written: dict[int, list[tuple[str, weakref.ref[Tensor]]]] = {}

    def run(self) -> Any:
        """Run the region and bind its names. Return the value of its last expression, if the cell displays it.

        Raises `NotTraced` if the direct frontend declines the region, and `RunInstead` if the compiled form fails.
        Then nothing is bound.
        """
        namespace = self._namespace
        missing = [name for name in self._arguments if name not in namespace]
        if missing:
            raise NotTraced(f"`{missing[0]}` has no value before these lines")
        arguments = tuple([namespace[name] for name in self._arguments])
        variables, *value = self(*arguments)
        entry = next(iter(self.compiled.entries), None)
        if entry is not None and entry.calls == 1:
            self._remember(entry, arguments)
        namespace.update({name: variables[name] for name in self._bound if name in variables})
        return value[0] if value else None

    def _python(self, args: tuple[Any, ...], kwargs: dict[str, Any], failure: str) -> Any:
        self.failure = failure
        raise RunInstead(refused=False)

    def _remember(self, entry: Entry, arguments: tuple[Any, ...]) -> None:
        """Record which inputs a new entry has written, without keeping them alive."""
        written, moved = written_inputs(entry, (*self._target.lifted(), *nesting.flatten((arguments, {}))[0]))
        self._written[entry.number] = [(name, weakref.ref(tensor)) for name, tensor in written]
        self.moved |= moved

    def written(self) -> dict[str, Tensor | None]:
        """Return the inputs that the entries write, by name. The value is None for an input that no longer exists."""
        return {name: tensor() for each in self._written.values() for name, tensor in each}

    def result_names(self, present: Mapping[int, tuple[str, Tensor]]) -> dict[int, dict[str, str]]:
        """Return the notebook's names for the results and the inputs of each entry, by the entry's number."""
        return {entry.number: {**self._names.get(entry.number, {}), **self.names} for entry in self.compiled.entries}
