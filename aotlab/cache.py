"""Compiled entries in memory: which one serves a call, and what happens when none does."""

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
from torch import nn
from torch.compiler import is_dynamo_compiling

from aotlab import config, errors, observe
from aotlab._torch import SettingsGuard, hooks_are_foreign
from aotlab._torch.compiling import compiling, never_lost
from aotlab.capture.call import Target
from aotlab.capture.varying import Varying, note
from aotlab.errors import BY_DYNAMO, RefusedError
from aotlab.guards.call_state import CallState, transform_around
from aotlab.guards.explain import difference, distance
from aotlab.guards.refusals import MOST_REFUSALS, Refusals, glance
from aotlab.runtime.draft import MISS
from aotlab.runtime.forward_call import ForwardFailed
from aotlab.runtime.stage import RuntimeRecord
from aotlab.trace.running import is_tracing
from aotlab.trace.surroundings import Printed

#: Serves a call or returns `MISS`; raises `ForwardFailed` if eager has to serve it.
Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]
#: A result and the number of the entry that made it (None: eager did); or what a compiled forward raised.
_Served = tuple[Any, int | None] | Exception


class _Refused(NamedTuple):
    """Of a call that is not compiled: what to warn with, what to remember once it went well, and who runs it."""

    notice: str | None
    state: tuple[CallState, str] | None
    by_dynamo: bool


@dataclass(eq=False, kw_only=True)
class Entry:
    """One compiled form of a function: the generated function ``run``, and the calls that it is for.

    ``state`` and ``settings`` (torch's own check of the global settings) are what it assumes of a call; ``records`` the
    stages', by name. ``reason`` says why it was compiled although there were others. ``printed`` is what the function
    printed while it was traced, until that is written.
    """

    number: int
    run: Run
    state: CallState
    settings: SettingsGuard
    records: dict[str, Any]
    reason: str | None
    printed: Printed
    calls: int = 0

    def miss(self, state: CallState) -> observe.Miss:
        """Say why the entry does not serve a call."""
        found = difference(self.state, state)
        if found is None and not self.settings.check():
            found = f"a global setting of torch changed: {self.settings.reason().strip()}"
        return observe.Miss(entry=self.number, sentence=found or "a guard did not hold")

    @property
    def source(self) -> str:
        """The generated run-time function."""
        record = self.records["runtime"]
        assert isinstance(record, RuntimeRecord)
        return record.source


@dataclass(eq=False, repr=False)
class Declined(Exception):  # noqa: N818  # a signal between pipeline and cache
    """Nothing was compiled, for the reason that ``refusal`` gives.

    ``state`` is the call's, if the like need not be tried again; where the function ``raised`` while it was traced,
    that holds once eager has run the call. ``known`` says that the reason was told before.
    """

    refusal: errors.AotlabError
    state: CallState | None = None
    raised: bool = False
    known: bool = False
    printed: Printed | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLog:
    """How a function was called: ``total`` calls, ``eager`` and ``by_dynamo`` without an entry, else ``per_entry``."""

    total: int
    eager: int
    per_entry: dict[int, int]
    by_dynamo: int = 0

    @property
    def compiled(self) -> int:
        """The calls that a compiled entry served, or graphs that Dynamo captured."""
        return self.total - self.eager


_ids = itertools.count()
#: What is said where `aotlab.config.saved_tensors_hooks` decides.
_APPLY = 'aotlab.config.saved_tensors_hooks to "apply" if unpack returns what was packed'
_NO_PART = "a compiled graph has no part in transforms of its caller's"


def next_number() -> int:
    """Give out the number of a new function, unique in the process."""
    return next(_ids)


class CompiledFunction:
    """A function with its compiled entries; calling it compiles where no entry's guards hold.

    ``compile_call`` makes an entry of ``(target, args, kwargs, explain, entry_number, function_id)``. With ``tells``, a
    refusal is raised whatever `config.fallback`: the caller runs the call eagerly for himself. ``number`` is what
    events call it, shared by Dynamo's graphs for one piece of code. ``warn`` says whether calls that run
    eagerly are warned of. ``accept`` may say of a new entry, ``(entry, args, kwargs)``, why it shall not be used;
    ``by_dynamo`` compiles a function by Dynamo, for calls that only that can capture. What is to be compiled as a
    ``whole`` is refused wherever it would not be.
    """

    def __init__(
        self,
        target: Target,
        compile_call: Callable[..., Entry],
        *,
        tells: bool = False,
        backend_name: str,
        number: int | None = None,
        warn: bool = True,
        accept: Callable[[Entry, tuple[Any, ...], dict[str, Any]], str | None] | None = None,
        varying: Varying | None = None,
        by_dynamo: Callable[[Any], Callable[..., Any]] | None = None,
        whole: bool = False,
    ) -> None:
        self._target = target
        self._id = next(_ids) if number is None else number
        self._settings = {"tells": tells, "backend_name": backend_name, "warn": warn, "accept": accept, "whole": whole}
        self._settings["by_dynamo"] = by_dynamo
        self._compile_call = compile_call
        self._tells = tells
        self._backend_name = backend_name
        self._warns = warn
        self._accept = accept
        self._by_dynamo = by_dynamo
        self._whole = whole
        self._entries: tuple[Entry, ...] = ()
        # texts, because an error would keep the arguments alive; the latest ones, because each is compared at each miss
        self._refused: deque[tuple[CallState, str]] = deque(maxlen=MOST_REFUSALS)
        self._kinds = Refusals()
        self._module: nn.Module | None = getattr(target, "module", None)
        self._lock = threading.RLock()
        self._eager_calls = self._calls_by_dynamo = 0
        self._captured: Callable[..., Any] | None = None
        self._varying: Varying = varying or {}
        self._warned: set[str] = set()
        self.__qualname__ = target.name
        self.__name__ = target.name.rpartition(".")[2]
        self.__wrapped__ = getattr(target, "function", None)
        self.__doc__ = getattr(self.__wrapped__, "__doc__", None)
        self.__module__ = getattr(self.__wrapped__, "__module__", None) or type(self).__module__

    def __repr__(self) -> str:
        return f"<aotlab compiled `{self._target.name}`, {len(self._entries)} entries>"

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Bind to an object as a function does that is an attribute of a class, so that methods get their ``self``."""
        if instance is None:
            return self
        return partial(self, instance) if is_dynamo_compiling() else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function: by an entry whose guards hold, or by compiling one."""
        if is_dynamo_compiling():
            return self._target.eager(args, kwargs)  # Dynamo reads on there, and guards what it finds
        if not config.enabled:
            return self._run_eagerly(args, kwargs)
        if config.saved_tensors_hooks == "eager" and torch.is_grad_enabled() and hooks_are_foreign():
            return self._run_under_hooks(args, kwargs)
        started = time.perf_counter_ns() if observe.listening() else None
        served, others = self._serve_by(self._entries, args, kwargs), self._calls_by_dynamo
        is_new = served is None
        if served is None:
            served = self._serve_new(args, kwargs)
        if isinstance(served, Exception):
            served = self._run_again(served, args, kwargs), None
        if started is not None and others == self._calls_by_dynamo:  # else the graphs that Dynamo captured are called
            self._announce(served[1], started, compiled=is_new and served[1] is not None)
        return served[0]

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle by name what is found by its name, as a decorated function is; else what is compiled, and how."""
        module = sys.modules.get(str(self.__module__))
        with suppress(AttributeError):
            if operator.attrgetter(self.__qualname__)(module) is self:
                return str(self.__qualname__)
        return partial(CompiledFunction, **self._settings), (self._target, self._compile_call)  # type: ignore[arg-type]

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledFunction:
        """Return itself, as functions do; a method's object, or a module, is copied, and the copy compiles anew."""
        target = copy.deepcopy(self._target, memo)
        if target is self._target:
            return self
        return CompiledFunction(target, self._compile_call, **self._settings)  # type: ignore[arg-type]

    @property
    def _fallback(self) -> str:
        return "error" if self._whole else config.fallback

    @property
    def number(self) -> int:
        """What events call it, unique in the process."""
        return self._id

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The compiled entries, most recently made first."""
        return self._entries

    @property
    def recompiles(self) -> tuple[str, ...]:
        """Why each entry after the first was compiled, oldest first."""
        return tuple(e.reason for e in reversed(self._entries) if e.reason is not None)

    @property
    def calls(self) -> CallLog:
        """How the function was called so far."""
        per_entry = {entry.number: entry.calls for entry in self._entries}
        others, total = self._calls_by_dynamo, sum(per_entry.values()) + self._eager_calls + self._calls_by_dynamo
        return CallLog(total=total, eager=self._eager_calls, per_entry=per_entry, by_dynamo=others)

    # --- calls for which no entry holds ---------------------------------------------------------------------------

    def _serve_by(self, entries: tuple[Entry, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Served | None:
        """Serve a call by one of some entries; None if no guards hold."""
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
        """Serve a call for which no entry holds."""
        if is_tracing():
            return self._target.eager(args, kwargs), None  # a trace of an outer function: become part of it
        if (transform := transform_around()) is not None:
            return self._run_under_transform(transform, args, kwargs), None
        kind = glance(self._module, args, kwargs)
        known = self._kinds.known(kind) if self._fallback != "error" else None
        if known is not None:
            return self._run_refused(known.by_dynamo, args, kwargs), None
        with self._lock:
            if threading.active_count() > 1:
                with compiling():  # while another thread traces a module, its parameters are not in their places
                    served = self._serve_by(self._entries, args, kwargs)
                if served is not None:
                    return served
            made = self._compile(args, kwargs)
        if isinstance(made, Entry):
            self._kinds.compiled(kind)
            with compiling():
                served = self._serve_by((made,), args, kwargs)
            if served is not None:
                return served
            # another thread changed a setting or an argument in between, or a guard is wrong: eager is right
            text = f"`{self._target.name}` ran eagerly: the guards of its new entry do not hold for the very call"
            if config.debug_assert:
                raise errors.GraphInvariantError(text)
            made = _Refused(text, None, by_dynamo=False)
        elif not observe.listening():  # who listens hears of each
            self._kinds.refused(kind, by_dynamo=made.by_dynamo)
        result = self._run_refused(made.by_dynamo, args, kwargs)
        if made.state is not None:
            self._refused.append(made.state)
        if made.notice is not None:
            self._warn(made.notice)
        return result, None

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry | _Refused:
        """Make an entry; or say that the call is not compiled."""
        number, started = observe.next_entry(), time.perf_counter_ns()
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

    def _misses(self, state: CallState) -> tuple[observe.Miss, ...]:
        """Say why no entry holds for ``state``; raise `Declined` if nothing shall be compiled for it."""
        for refused, text in self._refused if self._fallback != "error" else ():
            if difference(refused, state) is None:
                raise Declined(RefusedError(text), known=True)
        for entry in self._entries:
            note(self._varying, entry.state, state)
        misses = tuple(entry.miss(state) for entry in sorted(self._entries, key=lambda e: distance(e.state, state)))
        if len(self._entries) >= config.recompile_limit:
            last = misses[0].sentence if misses else "none"
            text = (
                f"`{self._target.name}` was compiled {len(self._entries)} times, which is "
                f"aotlab.config.recompile_limit; the last reason: {last}; it runs eagerly from now on"
            )
            raise Declined(errors.RecompileLimitError(text))
        return misses

    def _decline(self, declined: Declined, number: int, started: int) -> _Refused:
        """Remember why nothing was compiled, and who runs the call; or raise, if it is not to run, or not here."""
        raises, text = self._fallback == "error", str(declined.refusal)
        by_dynamo = self._by_dynamo is not None and self._fallback == "dynamo" and BY_DYNAMO in text
        instead: observe.Instead = "captured by Dynamo" if by_dynamo else "raised" if raises else "ran eagerly"
        if not declined.known:
            self._failed(number, started, declined.refusal, instead)
        if raises and declined.printed is not None:
            declined.printed.release()
        refused = None if declined.state is None else (declined.state, text)
        if refused is not None and not (raises or declined.raised):
            self._refused.append(refused)
        if raises or self._tells:
            raise vars(declined).pop("refusal") from declined.__cause__  # its context would keep it, and the trace
        is_limit = not isinstance(declined.refusal, RefusedError)  # told once, whatever the last reason
        how = "is captured by Dynamo" if by_dynamo else "runs eagerly"
        once = "recompile_limit" if is_limit else how if by_dynamo else None
        known = declined.known or (once is not None and any(once in said for said in self._warned))
        notice = text if is_limit else f"`{self._target.name}` {how}: {text}"
        return _Refused(None if known else notice, refused if declined.raised else None, by_dynamo)

    # --- calls that run eagerly ------------------------------------------------------------------------------------

    def _run_refused(self, by_dynamo: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call for which nothing was compiled."""
        if not by_dynamo or self._by_dynamo is None:
            return self._run_eagerly(args, kwargs)
        self._captured = self._captured or self._by_dynamo(self.__wrapped__ if self._module is None else self._module)
        self._calls_by_dynamo += 1
        return self._captured(*args, **kwargs)

    def _run_eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._eager_calls += 1
        return self._target.eager(args, kwargs)

    def _run_again(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call eagerly whose compiled forward raised ``error``: eager writes what it writes before it raises."""
        if self._tells and self._fallback != "error":
            raise error
        raised = f"its compiled form raised {type(error).__name__}: {error}"
        traceback.clear_frames(error.__traceback__)  # they hold what the graph had computed by then
        result = self._run_eagerly(args, kwargs)
        if self._fallback == "error":
            error.add_note("aotlab: eager did not raise this; the arguments are as eager left them")
            raise error
        self._warn(f"`{self._target.name}` was compiled, but this call ran eagerly: {raised}")
        return result

    def _run_under_hooks(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run eagerly, because the caller's ``saved_tensors_hooks`` are to see what eager saves."""
        text = f"`{self._target.name}` is called under saved_tensors_hooks"
        if self._fallback == "error":
            why = "what a compiled forward saves is not what eager saves"
            raise errors.HooksError(text, why=why, suggestion=f"set {_APPLY}")
        started = time.perf_counter_ns()
        result = self._run_eagerly(args, kwargs)
        self._announce(None, started)
        self._warn(f"{text} and runs eagerly there: a compiled forward saves other values than eager; set {_APPLY}")
        return result

    def _run_under_transform(self, transform: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run eagerly, because a transform is to see what the function does: a graph would hide it."""
        raises = self._fallback == "error"
        text = f"`{self._target.name}` is called under {transform}"
        suggestion = "call the original function there, or compile what calls the transform" if raises else ""
        refusal = errors.TransformError(text, why=_NO_PART, suggestion=suggestion)
        if observe.listening():
            number, target = observe.next_entry(), self._target
            ours: dict[str, Any] = {"function": target.name, "function_id": self._id, "backend": self._backend_name}
            observe.emit(observe.CompileStarted(entry=number, frontend=target.frontend, **ours))
            self._failed(number, time.perf_counter_ns(), refusal, "raised" if raises else "ran eagerly")
        if self._tells or raises:
            raise refusal
        result = self._run_eagerly(args, kwargs)
        if not any(_NO_PART in said for said in self._warned):  # once, whichever transform
            self._warn(f"{text} and runs eagerly there: {_NO_PART}")
        return result

    # --- what is said ----------------------------------------------------------------------------------------------

    def _announce(self, entry: int | None, started: int, *, compiled: bool = False) -> None:
        name, number, duration = self._target.name, self._id, time.perf_counter_ns() - started
        observe.emit(
            observe.Called(function=name, function_id=number, entry=entry, duration_ns=duration, compiled=compiled)
        )

    def _failed(self, number: int, started: int, error: BaseException, outcome: observe.Instead) -> None:
        duration = time.perf_counter_ns() - started
        observe.emit(observe.CompileFailed(entry=number, duration_ns=duration, error=error, outcome=outcome))

    def _warn(self, text: str) -> None:
        if self._warns and text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, RuntimeWarning, stacklevel=levels_to_caller())


def levels_to_caller() -> int:
    """Return the stack level of the first frame outside of aotlab and torch, for `warnings.warn` one frame below."""
    level = 1
    frame = sys._getframe(1)
    inside = ("aotlab", "torch", "contextlib")  # the last because torch decorates with context managers
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in inside:
        frame = frame.f_back
        level += 1
    return level
