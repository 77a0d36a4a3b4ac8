"""The compiled entries of a function: find the entry that serves a call, or compile one, or run the call eagerly."""

from __future__ import annotations

import copy
import itertools
import operator
import sys
import threading
import time
import traceback
import types
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from aotlab import config, errors, events
from aotlab._torch import SettingsGuard, hooks_are_foreign, parts_of, pytree, storage_id
from aotlab._torch.compiling import compiling, never_lost
from aotlab.backends.compile_stage import CompileRecord
from aotlab.capture.call import CaptureRecord, Target
from aotlab.capture.dedupe import DedupeRecord
from aotlab.capture.dynamic_sizes import DynamicSizes, note_differences
from aotlab.capture.synthetic_bases import SyntheticBasesRecord
from aotlab.errors import BY_DYNAMO, RefusedError
from aotlab.guards.call_state import CallState, transform_around
from aotlab.guards.explain import difference, distance
from aotlab.guards.refusals import MOST_REFUSALS, Refusals, glance
from aotlab.ir.subclass_records import SubclassRecord
from aotlab.partition.partition_stage import PartitionRecord
from aotlab.runtime.draft import MISS
from aotlab.runtime.forward_call import ForwardFailed
from aotlab.runtime.runtime_stage import RuntimeRecord
from aotlab.trace.records import TraceRecord
from aotlab.trace.running_recorder import is_tracing
from aotlab.trace.surroundings import HeldOutput

#: The generated run-time function of an entry. It takes a call's positional and keyword arguments, and returns the
#: result of the call, or `MISS` if a guard fails. It raises `ForwardFailed` if the call must run eagerly.
Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]
#: The outcome of a call: a pair of its result and the number of the entry that computed the result (None if the call
#: ran eagerly); or the error that a compiled forward raised.
_Served = tuple[Any, int | None] | Exception


class _Refused(NamedTuple):
    """The outcome of a compilation that was refused.

    ``notice`` is the text of the warning, or None if there is nothing to warn of. ``state`` is None, or the state of
    the call with the text of the refusal. The function remembers this pair after the call has run without an error, so
    that an equal call is not compiled again. ``by_dynamo`` says that Dynamo captures the call; otherwise the call runs
    eagerly.
    """

    notice: str | None
    state: tuple[CallState, str] | None
    by_dynamo: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecords:
    """The record of each stage of a compilation. ``subclasses`` is None if the call has no wrapper subclasses."""

    capture: CaptureRecord
    dedupe: DedupeRecord
    synthetic_bases: SyntheticBasesRecord
    trace: TraceRecord
    partition: PartitionRecord
    compile: CompileRecord
    runtime: RuntimeRecord
    subclasses: SubclassRecord | None = None


@dataclass(eq=False, kw_only=True)
class Entry:
    """One compiled version of a function.

    ``run`` is the generated run-time function. ``state`` has the facts about the traced call that the entry guards, and
    ``settings`` is torch's C++ check of the global settings. ``reason`` is the reason why the older entries did not
    serve the call for which this entry was compiled; it is None for the first entry. ``printed`` holds back the text
    that the function printed while it was traced, until the compilation has succeeded. ``calls`` is the number of calls
    that the entry has served.
    """

    number: int
    run: Run
    state: CallState
    settings: SettingsGuard
    records: StageRecords
    reason: str | None
    printed: HeldOutput
    calls: int = 0

    def miss(self, state: CallState) -> events.Miss:
        """Return the reason why the entry does not serve a call with this state."""
        sentence = difference(self.state, state)
        if sentence is None and not self.settings.check():
            sentence = f"a global setting of torch changed: {self.settings.reason().strip()}"
        return events.Miss(entry=self.number, sentence=sentence or "a guard did not hold")

    @property
    def source(self) -> str:
        """The source of the generated run-time function."""
        return self.records.runtime.source


@dataclass(eq=False, repr=False)
class Declined(Exception):  # noqa: N818  # a signal between pipeline and cache
    """Raised if a call cannot be compiled; ``refusal`` is the reason.

    ``state`` is the state of the call if the cache should remember it, or None otherwise. Later calls with an equal
    state then run eagerly, without another attempt to compile them. ``raised`` says that the function raised an error
    while it was traced. Then the state is remembered only after the call has run eagerly without an error. ``known``
    says that the user was warned of the reason before. ``printed`` holds the text that the traced function printed.
    """

    refusal: errors.AotlabError
    state: CallState | None = None
    raised: bool = False
    known: bool = False
    printed: HeldOutput | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLog:
    """How often a function was called, and how its calls were served.

    ``total`` counts all calls, ``eager`` the calls that ran eagerly, and ``by_dynamo`` the calls that Dynamo captured.
    ``per_entry`` maps the number of an entry to the number of calls that it served.
    """

    total: int
    eager: int
    per_entry: dict[int, int]
    by_dynamo: int = 0

    @property
    def compiled(self) -> int:
        """The number of calls that did not run eagerly: compiled entries served them, or Dynamo captured them."""
        return self.total - self.eager


_ids = itertools.count()
#: Parts of the messages about `aotlab.config.saved_tensors_hooks` and about transforms.
_APPLY = 'aotlab.config.saved_tensors_hooks to "apply" if unpack returns the packed tensor'
_NO_PART = "a compiled graph cannot take part in the transforms of its caller"


def next_number() -> int:
    """Return the number of a new function, unique in the process."""
    return next(_ids)


class CompiledFunction:
    """A function with its compiled entries. A call for which no entry's guards hold compiles a new entry.

    ``target`` is the function as a frontend describes it. ``compile_call`` compiles a call: it takes ``(target, args,
    kwargs, explain, entry_number, function_id, varying)`` and returns an entry (see `aotlab.pipeline.compile_call`).
    With ``raises_refusals``, a refusal is raised whatever `config.fallback` is, because the caller catches the refusal
    and runs the call eagerly. ``number`` identifies the function in events; the graphs that Dynamo captured from one
    code object share one number. ``warn`` says whether a call that runs eagerly gives a warning. ``accept`` examines a
    new entry: it takes ``(entry, args, kwargs)`` and returns a reason for not using the entry, or None. ``varying``
    maps the position of a flat argument to its dynamic dimensions. ``by_dynamo`` compiles a function with Dynamo, for
    calls that only Dynamo can capture. With ``whole``, the refusal is raised if a call is not compiled as a whole; this
    is ``fullgraph`` of `aotlab.compile`.
    """

    def __init__(
        self,
        target: Target,
        compile_call: Callable[..., Entry],
        *,
        raises_refusals: bool = False,
        backend_name: str,
        number: int | None = None,
        warn: bool = True,
        accept: Callable[[Entry, tuple[Any, ...], dict[str, Any]], str | None] | None = None,
        varying: DynamicSizes | None = None,
        by_dynamo: Callable[[Any], Callable[..., Any]] | None = None,
        whole: bool = False,
    ) -> None:
        self._target = target
        self._id = next(_ids) if number is None else number
        self._settings = {
            "raises_refusals": raises_refusals,
            "backend_name": backend_name,
            "warn": warn,
            "accept": accept,
            "whole": whole,
        }
        self._settings["by_dynamo"] = by_dynamo
        self._compile_call = compile_call
        self._raises_refusals = raises_refusals
        self._backend_name = backend_name
        self._warns = warn
        self._accept = accept
        self._by_dynamo = by_dynamo
        self._whole = whole
        self._entries: tuple[Entry, ...] = ()
        # The states of the latest refused calls, each with the text of its refusal. The error object is not stored,
        # because it would keep the arguments alive. The number is limited, because each call that no entry serves is
        # compared with all of these states.
        self._refused: deque[tuple[CallState, str]] = deque(maxlen=MOST_REFUSALS)
        self._kinds = Refusals()
        self._module: nn.Module | None = getattr(target, "module", None)
        self._lock = threading.RLock()
        self._eager_calls = self._calls_by_dynamo = 0
        self._captured: Callable[..., Any] | None = None
        self._varying: DynamicSizes = varying or {}
        self._warned: set[str] = set()
        self.__qualname__ = target.name
        self.__name__ = target.name.rpartition(".")[2]
        self.__wrapped__ = getattr(target, "function", None)
        self.__doc__ = getattr(self.__wrapped__, "__doc__", None)
        self.__module__ = getattr(self.__wrapped__, "__module__", None) or type(self).__module__

    def __repr__(self) -> str:
        return f"<aotlab compiled `{self._target.name}`, {len(self._entries)} entries>"

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Return a bound method, as a plain function in a class does, so that a compiled method gets its ``self``."""
        if instance is None:
            return self
        return partial(self, instance) if is_dynamo_compiling() else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the call with an entry whose guards hold. If there is none, compile an entry or run eagerly."""
        if is_dynamo_compiling():
            return self._target.eager(args, kwargs)  # Dynamo traces the caller and inlines the function
        if not config.enabled:
            return self._run_eagerly(args, kwargs)
        if config.saved_tensors_hooks == "eager" and torch.is_grad_enabled() and hooks_are_foreign():
            return self._run_under_hooks(args, kwargs)
        started = time.perf_counter_ns() if events.listening() else None
        served, calls_by_dynamo = self._serve_by(self._entries, args, kwargs), self._calls_by_dynamo
        is_new = served is None
        if served is None:
            served = self._serve_new(args, kwargs)
        if isinstance(served, Exception):
            served = self._run_again(served, args, kwargs), None
        # For a call that Dynamo captured, the compiled functions of its graphs emit the events.
        if started is not None and calls_by_dynamo == self._calls_by_dynamo:
            self._announce(served[1], started, compiled=is_new and served[1] is not None, result=served[0])
        return served[0]

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle the object by name if it is found in its module under its name, as a decorated function is.

        Otherwise pickle the target and the settings. The unpickled function has no compiled entries.
        """
        module = sys.modules.get(str(self.__module__))
        with suppress(AttributeError):
            if operator.attrgetter(self.__qualname__)(module) is self:
                return str(self.__qualname__)
        return partial(CompiledFunction, **self._settings), (self._target, self._compile_call)  # type: ignore[arg-type]

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledFunction:
        """Return this object itself for a plain function.

        For a method or a module, copy the method's object or the module. The copy compiles again.
        """
        target = copy.deepcopy(self._target, memo)
        if target is self._target:
            return self
        return CompiledFunction(target, self._compile_call, **self._settings)  # type: ignore[arg-type]

    @property
    def _fallback(self) -> str:
        return "error" if self._whole else config.fallback

    @property
    def number(self) -> int:
        """The number that identifies the function in events, unique in the process."""
        return self._id

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The compiled entries, the most recent first."""
        return self._entries

    @property
    def recompiles(self) -> tuple[str, ...]:
        """The reasons why the entries after the first were compiled, oldest first."""
        return tuple(e.reason for e in reversed(self._entries) if e.reason is not None)

    @property
    def calls(self) -> CallLog:
        """The numbers of calls of the function so far."""
        per_entry = {entry.number: entry.calls for entry in self._entries}
        by_dynamo, total = self._calls_by_dynamo, sum(per_entry.values()) + self._eager_calls + self._calls_by_dynamo
        return CallLog(total=total, eager=self._eager_calls, per_entry=per_entry, by_dynamo=by_dynamo)

    # --- calls that no entry serves -------------------------------------------------------------------------------

    def _serve_by(self, entries: tuple[Entry, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Served | None:
        """Serve a call by the first entry whose guards hold. Return None if all entries miss."""
        for entry in entries:
            try:
                result = entry.run(args, kwargs)
            except ForwardFailed as failure:
                return failure.error
            if result is not MISS:
                entry.calls += 1
                return result, entry.number
        return None

    def _serve_new(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Served:
        """Serve a call that no entry serves: compile an entry, or run the call through Dynamo or eagerly."""
        if is_tracing():
            return self._target.eager(args, kwargs), None  # the trace of an outer function records the ops
        if (transform := transform_around()) is not None:
            return self._run_under_transform(transform, args, kwargs), None
        kind = glance(self._module, args, kwargs)
        refusal_record = self._kinds.known(kind) if self._fallback != "error" else None
        if refusal_record is not None:
            return self._run_refused(refusal_record.by_dynamo, args, kwargs), None
        with self._lock:
            if threading.active_count() > 1:
                with compiling():  # because a trace in another thread replaces the parameters of the module
                    served = self._serve_by(self._entries, args, kwargs)
                if served is not None:
                    return served
            outcome = self._compile(args, kwargs)
        if isinstance(outcome, Entry):
            self._kinds.compiled(kind)
            with compiling():
                served = self._serve_by((outcome,), args, kwargs)
            if served is not None:
                return served
            # Another thread has changed a setting or an argument since the compilation, or a guard is wrong. So the
            # entry must not serve the call, and the call runs eagerly.
            text = f"`{self._target.name}` ran eagerly: the guards of its new entry do not hold for its own call"
            if config.debug_assert:
                raise errors.GraphInvariantError(text)
            outcome = _Refused(text, None, by_dynamo=False)
        elif not events.listening():  # with listeners, each refused call is examined, and emits an event
            self._kinds.refused(kind, by_dynamo=outcome.by_dynamo)
        result = self._run_refused(outcome.by_dynamo, args, kwargs)
        if outcome.state is not None:
            self._refused.append(outcome.state)
        if outcome.notice is not None:
            self._warn(outcome.notice)
        return result, None

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry | _Refused:
        """Compile an entry and return it, or return the outcome of a refusal."""
        number, started = events.next_entry(), time.perf_counter_ns()
        try:
            with compiling(), never_lost():
                entry = self._compile_call(self._target, args, kwargs, self._misses, number, self._id, self._varying)
            objection = self._accept(entry, args, kwargs) if self._accept is not None else None
            if objection is not None:
                raise Declined(RefusedError(objection), state=entry.state, printed=entry.printed)
        except Declined as declined:
            return self._decline(declined, number, started)
        except BaseException as error:
            self._failed(number, started, error, "raised")
            raise
        entry.printed.release()
        self._entries = (entry, *self._entries)
        return entry

    def _misses(self, state: CallState) -> tuple[events.Miss, ...]:
        """Return the reasons why no entry serves a call with this state, the one of the most similar entry first.

        Raises `Declined` if an equal call was refused before, or if `config.recompile_limit` is reached.
        """
        for refused, text in self._refused if self._fallback != "error" else ():
            if difference(refused, state) is None:
                raise Declined(RefusedError(text), known=True)
        for entry in self._entries:
            note_differences(self._varying, entry.state, state)
        misses = tuple(entry.miss(state) for entry in sorted(self._entries, key=lambda e: distance(e.state, state)))
        if len(self._entries) >= config.recompile_limit:
            last_reason = misses[0].sentence if misses else "none"
            text = (
                f"`{self._target.name}` was compiled {len(self._entries)} times, which is "
                f"aotlab.config.recompile_limit; the last reason: {last_reason}; other calls now run eagerly"
            )
            raise Declined(errors.RecompileLimitError(text))
        return misses

    def _decline(self, declined: Declined, number: int, started: int) -> _Refused:
        """Remember a refusal and return its outcome.

        Raises the refusal if `config.fallback` is ``"error"``, or if ``raises_refusals`` is true.
        """
        raises, text = self._fallback == "error", str(declined.refusal)
        by_dynamo = self._by_dynamo is not None and self._fallback == "dynamo" and BY_DYNAMO in text
        instead: events.Instead = "captured by Dynamo" if by_dynamo else "raised" if raises else "ran eagerly"
        if not declined.known:
            self._failed(number, started, declined.refusal, instead)
        if raises and declined.printed is not None:
            declined.printed.release()
        refused = None if declined.state is None else (declined.state, text)
        if refused is not None and not (raises or declined.raised):
            self._refused.append(refused)
        if raises or self._raises_refusals:
            # `declined` becomes the `__context__` of the refusal. If it still referred to the refusal, this cycle would
            # keep the trace alive.
            raise vars(declined).pop("refusal") from declined.__cause__
        # At the recompile limit, warn once. The texts can differ, because each quotes the last reason. So search the
        # earlier warnings for a word instead of the whole text.
        is_limit = not isinstance(declined.refusal, RefusedError)
        outcome = "is captured by Dynamo" if by_dynamo else "runs eagerly"
        words = "recompile_limit" if is_limit else outcome if by_dynamo else None
        warned_before = declined.known or (words is not None and any(words in warning for warning in self._warned))
        notice = text if is_limit else f"`{self._target.name}` {outcome}: {text}"
        return _Refused(None if warned_before else notice, refused if declined.raised else None, by_dynamo)

    # --- calls that run eagerly ------------------------------------------------------------------------------------

    def _run_refused(self, by_dynamo: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that was refused: through Dynamo if ``by_dynamo`` is true, otherwise eagerly."""
        if not by_dynamo or self._by_dynamo is None:
            return self._run_eagerly(args, kwargs)
        self._captured = self._captured or self._by_dynamo(self.__wrapped__ if self._module is None else self._module)
        self._calls_by_dynamo += 1
        return self._captured(*args, **kwargs)

    def _run_eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._eager_calls += 1
        return self._target.eager(args, kwargs)

    def _run_again(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call eagerly after its compiled forward raised ``error``.

        If eager raises too, the user gets eager's error, and the arguments have the same writes as in an uncompiled
        program.
        """
        if self._raises_refusals and self._fallback != "error":
            raise error
        raised = f"its compiled form raised {type(error).__name__}: {error}"
        traceback.clear_frames(error.__traceback__)  # the frames would keep intermediate values of the graph alive
        result = self._run_eagerly(args, kwargs)
        if self._fallback == "error":
            error.add_note("aotlab: eager did not raise this; the arguments are as eager left them")
            raise error
        self._warn(f"`{self._target.name}` was compiled, but this call ran eagerly: {raised}")
        return result

    def _run_under_hooks(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run eagerly, because the caller's ``saved_tensors_hooks`` must get the tensors that eager saves."""
        text = f"`{self._target.name}` is called under saved_tensors_hooks"
        why = "a compiled forward saves other values than eager"
        if self._fallback == "error":
            raise errors.HooksError(text, why=why, suggestion=f"set {_APPLY}")
        started = time.perf_counter_ns()
        result = self._run_eagerly(args, kwargs)
        self._announce(None, started)
        self._warn(f"{text} and runs eagerly there: {why}; set {_APPLY} [hooks]")
        return result

    def _run_under_transform(self, transform: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run eagerly under a transform, because the transform must see the ops that a compiled graph would hide."""
        raises = self._fallback == "error"
        text = f"`{self._target.name}` is called under {transform}"
        suggestion = "call the original function, or compile the function that calls the transform" if raises else ""
        refusal = errors.TransformError(text, why=_NO_PART, suggestion=suggestion)
        if events.listening():
            number, target = events.next_entry(), self._target
            identity: dict[str, Any] = {"function": target.name, "function_id": self._id, "backend": self._backend_name}
            events.emit(events.CompileStarted(entry=number, frontend=target.frontend, **identity))
            self._failed(number, time.perf_counter_ns(), refusal, "raised" if raises else "ran eagerly")
        if self._raises_refusals or raises:
            raise refusal
        result = self._run_eagerly(args, kwargs)
        if not any(_NO_PART in warning for warning in self._warned):  # one warning for all transforms
            self._warn(f"{text} and runs eagerly there: {_NO_PART} [transform]")
        return result

    # --- events and warnings ---------------------------------------------------------------------------------------

    def _announce(self, entry: int | None, started: int, *, compiled: bool = False, result: Any = None) -> None:
        duration = time.perf_counter_ns() - started
        leaves = pytree.tree_leaves(result) if compiled else []
        parts = [parts_of(tensor) if isinstance(tensor, Tensor) else [] for tensor in leaves]
        events.emit(
            events.Called(
                function=self._target.name,
                function_id=self._id,
                entry=entry,
                duration_ns=duration,
                compiled=compiled,
                storage_ids=tuple([tuple(map(storage_id, tensor)) for tensor in parts]),
            )
        )

    def _failed(self, number: int, started: int, error: BaseException, outcome: events.Instead) -> None:
        duration = time.perf_counter_ns() - started
        events.emit(events.CompileFailed(entry=number, duration_ns=duration, error=error, outcome=outcome))

    def _warn(self, text: str) -> None:
        if self._warns and text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, RuntimeWarning, stacklevel=levels_to_caller())


def levels_to_caller() -> int:
    """Return the ``stacklevel`` with which `warnings.warn` names the user's line, outside of aotlab and torch.

    The function that calls this one must also call `warnings.warn`.
    """
    level = 1
    frame = sys._getframe(1)
    inside = ("aotlab", "torch", "contextlib")  # contextlib, because torch uses context managers as decorators
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in inside:
        frame = frame.f_back
        level += 1
    return level
