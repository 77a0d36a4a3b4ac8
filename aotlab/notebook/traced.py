"""Functions of a cell that are captured by a trace of their calls (``--frontend direct``), each with its checks."""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aotlab import observe, pipeline
from aotlab.backends import Backend
from aotlab.cache import CompiledFunction, Declined, Entry
from aotlab.capture import nesting
from aotlab.frontends.direct import FunctionTarget
from aotlab.notebook.graphs import wrong_device
from aotlab.partition.default import default_partition
from aotlab.runtime.draft import MISS
from aotlab.runtime.forward_call import ForwardFailed
from aotlab.subclasses import compile_call as compile_apart
from aotlab.trace.running import is_tracing
from aotlab.verification import Comparison, compare


class _Comparing(threading.local):
    """Whether this thread compares a function with eager: functions that it calls run eagerly then."""

    on = False


_comparing = _Comparing()


class _NotebookFunction(FunctionTarget):
    """A function of a cell; it notes when its calls run eagerly, whose errors are the user's."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        super().__init__(function)
        self.name = name
        self.here = threading.local()

    def eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function."""
        self.here.eager = True
        return super().eager(args, kwargs)


class TracedFunction:
    """One function that a cell defines, compiled by the direct frontend; reports treat it as they do a captured graph.

    Parameters
    ----------
    function, name
        The function, and what reports call it.
    backend
        What compiles it.
    number
        The number under which events tell of it.
    device
        Where its inputs have to be, None if anywhere.
    dynamic
        Whether sizes and numbers vary at once; None: those that change.
    verify
        Whether an entry is compared with eager before it is used.
    progress
        Hears what is being done.
    refused
        Hears why a call is not compiled.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str,
        backend: Backend,
        number: int,
        device: torch.device | None,
        dynamic: bool | None,
        verify: bool,
        progress: Callable[[str], None],
        refused: Callable[[str], None],
    ) -> None:
        self.name = name
        self.function = function
        self.verified: dict[int, tuple[Comparison, ...]] = {}
        self.unverified: dict[int, str] = {}
        self.served = 0
        self.failure: str | None = None
        self.refused: str | None = None
        self.surprising = False
        self._backend = backend
        self._device = device
        self._verify = verify
        self._progress = progress
        self._target = _NotebookFunction(function, name)
        options = pipeline.Options(
            backend=backend, partitioner=default_partition, keep_inference_input_mutations=True, dynamic=dynamic
        )

        def compile_call(*given: Any) -> Entry:
            try:
                return compile_apart(options, *given)
            except Declined as declined:
                refused(str(declined.refusal))  # before anything is traced there is no event of the function
                raise

        self.compiled = CompiledFunction(
            self._target,
            compile_call,
            backend_name=backend.name,
            number=number,
            warn=False,
            accept=self._accept if verify or device is not None else None,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Serve a call of the user's."""
        if is_tracing() or _comparing.on:
            return self.function(*args, **kwargs)  # is part of what calls it
        here = self._target.here
        here.eager = False
        random = torch.get_rng_state()
        try:
            result = self.compiled(*args, **kwargs)
        except Exception as error:
            if here.eager:
                raise
            # What failed in a compiled form has changed nothing yet: eager tells what it would have been.
            failure = f"{type(error).__name__}: {error}"
        else:
            self.served += not here.eager
            return result
        torch.set_rng_state(random)
        result = self.function(*args, **kwargs)
        self.failure, self.surprising = failure, True  # eager did not raise
        return result

    def written(self) -> dict[str, Tensor | None]:
        """Return nothing: what calls write is not what the cell that defines the function writes."""
        return {}

    def settle(self) -> None:
        """Do nothing: no values of inputs are kept."""

    def result_names(self, known: Mapping[int, tuple[str, Tensor]]) -> dict[int, dict[str, str]]:
        """Return nothing: the results are the callers'."""
        return {}

    def _accept(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Compare a new entry with the function on copies of the arguments; say what speaks against it."""
        elsewhere = self._elsewhere(args, kwargs)
        if elsewhere is not None or not self._verify:
            return elsewhere
        self._progress(f"{self.name}: comparing with eager")
        missed: list[bool] = []
        exact = self._backend.name == "eager"

        def by_entry(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*inputs: Any, **named: Any) -> Any:
                with contextlib.suppress(ForwardFailed):  # then eager serves such calls
                    result = entry.run(inputs, named)
                    if result is not MISS:
                        return result
                    missed.append(True)
                return function(*inputs, **named)

            return call

        _comparing.on = True
        began = time.perf_counter_ns()
        try:
            # What the function prints was printed by the trace already.
            with contextlib.redirect_stdout(io.StringIO()):
                found = compare(
                    self.function,
                    args,
                    kwargs,
                    candidate=by_entry,
                    calls=1,
                    tolerance="exact" if exact else "close",
                    yardstick=None if exact else partial(torch.compile, dynamic=False),
                )
        except Exception as error:  # noqa: BLE001  # arguments that cannot be copied are no reason not to run
            self.unverified[entry.number] = f"its arguments cannot be copied: {error}"
            return None
        finally:
            _comparing.on = False
            observe.emit(observe.Spent(kind="verification", duration_ns=time.perf_counter_ns() - began))
        if missed:
            self.unverified[entry.number] = "copies of its arguments do not meet its guards"
            return None
        self.verified[entry.number] = found.comparisons
        return None if found.ok else f"its compiled form differs from eager: {found.first}"

    def _elsewhere(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        if self._device is None:
            return None
        names = self._target.argument_names(args, kwargs)
        leaves = nesting.flatten((args, kwargs))[0]
        for name, value in zip(names, leaves, strict=False):
            if isinstance(value, Tensor) and value.device != self._device and value.dim():
                return wrong_device(name, value, self._device)
        return None
