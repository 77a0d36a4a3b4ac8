"""Run the regions of a cell: each one compiled as a whole, compiled statement by statement, or eagerly."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from aotlab import config
from aotlab.notebook.cell import RegionCode
from aotlab.notebook.cell_compiler import CellCompiler
from aotlab.notebook.cell_state import PartState, Trial
from aotlab.notebook.graphs import RunInstead
from aotlab.notebook.tracebacks import cleaned, walk
from aotlab.notebook.traced import NotTraced
from aotlab.notebook.traced_region import TracedRegion

#: How often a region that raises is compiled again. With this limit, a region that raises in every round of a loop runs
#: eagerly in the end.
MOST_ERRORS = 8


class Region:
    """A callable that runs one region of a cell. The cell's code that Python runs calls it.

    Parameters
    ----------
    compiler
        The compiler of the cell.
    code
        The region's code.
    key
        The key of the region's state in `CellState.parts`. If None, the key is the region's number.
    """

    def __init__(self, compiler: CellCompiler, code: RegionCode, key: object = None) -> None:
        self._compiler = compiler
        self._code = code
        self._function = types.FunctionType(code.code, compiler.namespace)
        statements = tuple([(each.first_line, each.last_line) for each in code.pieces])
        self._part = PartState(first_line=code.first_line, last_line=code.last_line, statements=statements)
        compiler.state.parts[code.number if key is None else key] = self._part
        self._pieces: list[Region] = []
        self._traced: TracedRegion | None = None
        self._compiled: Callable[[], Any] | None = None
        self._prepare()

    def _prepare(self) -> None:
        """Make the compiled form: the traced form, or Dynamo's form if the region cannot be traced directly."""
        self._traced = None if self._code.traced is None else self._compiler.trace_region(self._code, self._part)
        self._compiled = self._compiler.compile(self._function, self._part) if self._traced is None else None

    def __call__(self) -> Any:
        """Run the region. Return the value of its last expression, if the cell displays this value, or None."""
        compiler, part, namespace = self._compiler, self._part, self._compiler.namespace
        part.calls += 1
        if part.mended:
            part.mended = False
            part.reasons.clear()
        if not config.enabled or part.differs:
            part.off, part.in_eager = not config.enabled, True
            return self._function()
        if self._pieces:
            return self._piece_by_piece()
        compiler.forget_names()
        if self._traced is not None:
            try:
                with compiler.compiling(part, traced=True):
                    return self._traced.run()
            except RunInstead:
                return self._in_python()
            except NotTraced as declined:
                compiler.decline(part, self._traced, str(declined))
                self._traced = None
        self._compiled = self._compiled or compiler.compile(self._function, part)
        before = {name: namespace[name] for name in self._code.bound if name in namespace}
        trial = Trial(
            function=self._function, bound=self._code.bound, values=before, calls_before=part.calls_by_graph()
        )
        refused = False
        try:
            with compiler.compiling(part, self._code.bound), compiler.trying(part, trial):
                result = self._compiled()
        except RunInstead as instead:
            refused = instead.refused
        except Exception as error:
            self._compile_again()
            undone = self._undone(error, trial)
            part.settle()
            if not undone:
                cleaned(error, compiler.state.file)
                raise
            torch.set_rng_state(trial.random)
        else:
            if compiler.differs(part, trial, result):
                return self._function()
            part.settle()
            _in_order(namespace, [name for name in self._code.bound if name not in before and name in namespace])
            return result
        if refused and self._code.pieces:
            return self._piece_by_piece()
        return self._in_python()

    def _in_python(self) -> Any:
        """Run the whole region eagerly, because a graph failed before the region had any effect."""
        result = self._function()
        for each in self._part.graphs:
            each.surprising = each.surprising or each.failure is not None
        return result

    def _piece_by_piece(self) -> Any:
        if not self._pieces:
            self._part.replaced = True
            state, replaced = self._compiler.state, {graph.name for graph in self._part.graphs}
            state.families = {code: each for code, each in state.families.items() if each[1] not in replaced}
            for index, each in enumerate(self._code.pieces):
                self._pieces.append(Region(self._compiler, each, (self._code.number, index)))
        result = None
        for piece in self._pieces:
            result = piece()
        return result

    def _compile_again(self) -> None:
        """Give the region a new code object, unless it has raised too often.

        Dynamo does not capture a code object again after the code has raised. With a new code object, Dynamo can
        capture the next run, before which the user may have removed the cause of the error.
        """
        part = self._part
        if part.errors < MOST_ERRORS:
            self._function = types.FunctionType(self._code.code.replace(), self._compiler.namespace)
            self._prepare()
            part.mended, part.errors = True, part.errors + 1

    def _undone(self, error: Exception, trial: Trial) -> bool:
        """Undo the effects of the region, which raised ``error``, so that the region can run again, eagerly.

        Return False if that is impossible. Dynamo's code binds names at the end of a frame, not at the statements that
        bind them. So if the region's own frame raised, the only effects are the writes of its graphs, and the graphs
        may be able to undo these writes.
        """
        file = self._compiler.state.file
        frames = [each.tb_frame.f_code for each in walk(error.__traceback__)]
        inside = [code for code in frames if code.co_filename == file]
        if not frames or frames[-1].co_filename != file or len(inside) != 1 or inside[0].co_name != "<module>":
            return False
        if self._part.reasons:  # there was a graph break, before which Dynamo's code bound names and changed objects
            return False
        if inside[0] is trial.function.__code__:  # Python ran it, so the statements before the error had effects
            return False
        return self._part.take_back(trial.calls_before)


def _in_order(namespace: dict[str, Any], names: Sequence[str]) -> None:
    """Put new names into the namespace in the order of ``names``, because Dynamo's code binds them in another order.

    ``names`` are in the order of the statements that bind them, which is eager's order.
    """
    if len(names) > 1:
        values = [(name, namespace.pop(name)) for name in names]
        namespace.update(values)
