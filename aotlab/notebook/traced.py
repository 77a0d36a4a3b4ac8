"""Functions and regions of a cell that are captured by tracing their calls, with their verification.

``--frontend direct`` traces only functions. A call that cannot be traced runs eagerly. ``--frontend auto`` traces
regions, too. If a call cannot be traced, it has had no effect yet, and Dynamo captures it.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aotlab import events, pipeline
from aotlab.backends import Backend
from aotlab.cache import CompiledFunction, Declined, Entry, next_number
from aotlab.capture import nesting
from aotlab.capture.call import ArgumentKind
from aotlab.errors import AotlabError, RefusedError, UserLine
from aotlab.frontends.direct import FunctionTarget, tensors_replaced
from aotlab.frontends.tensor_names import Named
from aotlab.guards.code_names import names_in
from aotlab.guards.guarded_values import is_plain
from aotlab.guards.objects import compiled_from, is_installed, root_of
from aotlab.guards.reached import Reached, Slot
from aotlab.guards.user_code import is_users, running_cells
from aotlab.ir.extents import within_its_storage
from aotlab.notebook.classify import EFFECTS, PLAIN_BUILTINS
from aotlab.notebook.eager_run import UNSAFE, UNSAFE_BEGINNINGS
from aotlab.notebook.graphs import renamed, wrong_device
from aotlab.partition.partition_stage import Partitioner
from aotlab.runtime.draft import MISS
from aotlab.runtime.forward_call import ForwardFailed
from aotlab.subclasses import compile_call as compile_apart
from aotlab.trace.running_recorder import is_tracing
from aotlab.verification import Comparison, compare


class NotTraced(Exception):  # noqa: N818  # a signal to the code that then lets Dynamo capture the call
    """Raised if the direct frontend declines a call, which then has had no effect. The message is the reason."""


class _Comparing(threading.local):
    """Whether this thread is comparing a function with eager. Then the traced functions that it calls run eagerly."""

    on = False


_comparing = _Comparing()


def is_inside_a_trace() -> bool:
    """Tell whether a trace or a comparison of a calling function or region is running in this thread."""
    return is_tracing() or _comparing.on


class _NotebookFunction(FunctionTarget):
    """A function of a cell, for the direct frontend. ``here.eager`` is set if a call on this thread runs eagerly.

    If a call that ran eagerly raises an error, the error comes from the user's code, and not from the compiled form.
    """

    #: The comparison with eager runs the compiled form, too, which would set the values of the user's objects.
    repeats_changes = False

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        super().__init__(function)
        self.name = name
        self.here = threading.local()
        self._traced_modules: list[tuple[str, nn.Module]] = []

    def _run(self, lifted: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._traced_modules = self._modules()
        return super()._run(lifted, args, kwargs)

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        """Return the arguments of the call that was traced last."""
        leaves, tree = nesting.flatten((args, kwargs))
        lifted = self.lifted()
        inputs = tuple([weakref.ref(each) if isinstance(each, Tensor) else each for each in (*lifted, *leaves)])
        return _Arguments(inputs=inputs, lifted=len(lifted), tree=tree, slots=self._slots, modules=self._traced_modules)

    def eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function eagerly."""
        self.here.eager = True
        return super().eager(args, kwargs)


class _TracedOrCaptured(_NotebookFunction):
    """A function or region of a cell that Dynamo captures if the direct frontend declines it.

    It is declined more often than by `FunctionTarget`, because a trace does not see effects outside of Python's objects
    and torch, for example the writes to a file.

    Parameters
    ----------
    bound
        For a region, the names that its statements bind; None for a function. The traced function of a region binds
        variables instead. So the region is declined if a function that it calls may read one of the names in the
        notebook.
    names
        As for `aotlab.notebook.graphs.NotebookTarget`.
    """

    def __init__(
        self,
        function: types.FunctionType,
        name: str,
        bound: Sequence[str] | None,
        names: Callable[[Sequence[Any]], Named],
    ) -> None:
        super().__init__(function, name)
        self._present = names
        self._bound = frozenset(bound or ())

    def lifted_names(self) -> Sequence[tuple[str, ArgumentKind]]:
        """Return the name and kind of each lifted input. A name is the name of a variable of the notebook."""
        names, kinds = zip(*super().lifted_names(), strict=True) if self._slots else ((), ())
        return [*zip(self._named(self.lifted(), names), kinds, strict=True)]

    def argument_names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """Return the names of the flat arguments; tensors are named after the notebook's variables."""
        return self._named(nesting.flatten((args, kwargs))[0], super().argument_names(args, kwargs))

    def _named(self, values: Sequence[Any], names: Sequence[str]) -> list[str]:
        present, taken = self._present(()), set[int]()
        named: list[str] = []
        for value, name in zip(values, names, strict=True):
            # a tensor in two places, for example a tied weight, has the notebook's name only once
            named.append(present[id(value)][0] if id(value) in present and id(value) not in taken else name)
            taken.add(id(value))
        return named

    def reached(self) -> tuple[Reached, ...]:
        """Return the values that the function may read.

        Raises `RefusedError` if the code of the user may have effects that the trace does not see.
        """
        state = super().reached()
        values = [self.function, *(compiled_from(each.value) or each.value for each in state)]
        if (writer := _writer([value for value in values if isinstance(value, types.FunctionType)])) is not None:
            raise RefusedError(f"it may call `{writer}`, which may write or send data")
        for value in values:
            package = _package_of(value)
            if root_of(package) in _LOGGERS or package.startswith("torch.utils.tensorboard"):
                raise RefusedError(f"it uses `{package}`, which may write or send data")
            if isinstance(value, types.FunctionType) and (objection := _objection(value)) is not None:
                raise RefusedError(objection)
            if isinstance(value, BaseException):
                raise RefusedError("it uses an exception, whose notes and traceback no guard can check")
        for place in (*(each.place for each in state), *(slot.place for slot in self._slots)):
            names = place.key if place.kind == "absent" else {place.key} if place.kind == "item" else ()
            if place.owner is self.function.__globals__ and not self._bound.isdisjoint(names):
                raise RefusedError("a function that it calls may read a variable that the same lines bind")
        return state

    def _run(self, lifted: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super()._run(lifted, args, kwargs)
        for leaf in nesting.flatten_result(result, {})[0]:
            if not (isinstance(leaf, Tensor | torch.SymInt | torch.SymFloat | torch.SymBool) or is_plain(leaf)):
                raise RefusedError(f"it makes a `{type(leaf).__qualname__}`, and each call has to make a new one")
        return result

    def eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Raise `RefusedError`, because the caller runs the call in another way."""
        raise RefusedError("its ops must be visible to code that runs around it")


#: The packages that record experiments. Their objects and functions write files, or send data to a server.
_LOGGERS = frozenset((
    "tensorboard", "tensorboardX", "wandb", "mlflow", "neptune", "clearml", "comet_ml", "aim", "trackio", "swanlab",
    "dvclive",
))  # fmt: skip
#: The names of methods that write files or send data.
_WRITES = frozenset((
    "write", "writelines", "writerow", "writerows", "flush", "send", "sendall", "sendto", "put", "put_nowait",
    "commit", "publish", "post",
))  # fmt: skip


def _package_of(value: object) -> str:
    """Return the name of the Python module that defines a function, a class, or the class of an object."""
    return str(getattr(value if isinstance(value, types.FunctionType | type) else type(value), "__module__", ""))


def _is_of_package(function: types.FunctionType) -> bool:
    """Tell whether a function belongs to an installed package. The code that `dataclasses` generates has no file."""
    file = function.__code__.co_filename
    return is_installed(str(function.__globals__.get("__file__") if file == "<string>" else file))


def _writer(functions: Sequence[types.FunctionType]) -> str | None:
    """Name a function of a package that may write files or send data, and that the user's code may call, or None.

    ``functions`` are all functions that the traced function may call. Of installed packages, only those are examined of
    which the user's code mentions a function.
    """
    packages: dict[str, list[types.FunctionType]] = {}
    mentioned: set[str] = set()
    for each in functions:
        if _is_of_package(each):
            packages.setdefault(root_of(each.__module__), []).append(each)
        elif is_users(each.__code__):
            names = names_in(each.__code__)
            mentioned |= {*names.attributes, *names.globals}
    for package in packages.values():
        for each in package if any(each.__name__ in mentioned for each in package) else ():
            names = names_in(each.__code__)
            if names.attributes & _WRITES or "open" in names.globals:
                return each.__qualname__
    return None


def _objection(function: types.FunctionType) -> str | None:
    """Say which effect a function of the user may have that a trace does not see; None if there is no such effect."""
    code = function.__code__
    if not is_users(code) or _is_of_package(function):
        return None
    names = names_in(code)
    for name in sorted(names.attributes - {"set_grad_enabled"}):
        if name in UNSAFE or name.startswith(UNSAFE_BEGINNINGS):
            return f"it uses `.{name}`, which a trace cannot repeat"
    for name in (*names.globals, *names.imports):
        value = function.__globals__.get(name, vars(builtins).get(name))
        module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        if (
            name in PLAIN_BUILTINS - {"locals"}
            or root_of(name if name in names.imports else module).lstrip("_") in EFFECTS
        ):
            return f"it uses `{name}`, which may have an effect that a trace does not see"
    return None


def _call(inputs: list[Any]) -> None:
    """Give `compare` the name of the argument; see `TracedFunction._compare`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Arguments:
    """The arguments of one call of a traced function, and the places of the tensors that it reads.

    Attributes
    ----------
    inputs
        The lifted inputs and the flat arguments, with a weak reference for each tensor.
    lifted
        The number of lifted inputs.
    tree
        The structure of the arguments.
    slots, modules
        The places of the lifted inputs, and the modules that the function reaches, with their names.
    """

    inputs: tuple[Any, ...]
    lifted: int
    tree: nesting.Tree
    slots: Sequence[Slot]
    modules: Sequence[tuple[str, nn.Module]]

    def now(self) -> list[Any]:
        """Return the inputs, with None for each tensor that no longer exists."""
        return [each() if isinstance(each, weakref.ref) else each for each in self.inputs]

    def placed(self, inputs: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which the first of ``inputs`` are in the places of the lifted inputs."""
        return tensors_replaced(self.modules, self.slots, inputs[: self.lifted])

    def split(self, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and the keyword arguments among ``inputs``."""
        args, kwargs = nesting.unflatten(inputs[self.lifted :], self.tree)
        return args, kwargs


class TracedFunction:
    """A function of the cell, compiled by the direct frontend. Reports treat it like a captured graph.

    Parameters
    ----------
    function, name
        The function, and its name in reports.
    backend
        The backend that compiles the function's graphs.
    partitioner
        The partitioner that chooses the values that the forward saves.
    number
        The number by which events identify the function.
    device
        The device on which the function's inputs must be; None if any device is allowed.
    dynamic
        Whether sizes and numbers are dynamic from the first call on. If None, a size or number that changes becomes
        dynamic.
    verify
        Whether each entry is compared with eager before it is used.
    refused
        Called with the reason if aotlab refuses a call, which then runs eagerly. If None, the call raises `NotTraced`
        instead, because Dynamo captures it.
    names
        As for `aotlab.notebook.graphs.NotebookTarget`.
    bound
        For a region, the names that it binds; None for a function.
    """

    def __init__(
        self,
        function: types.FunctionType,
        *,
        name: str,
        backend: Backend,
        partitioner: Partitioner,
        number: int,
        device: torch.device | None,
        dynamic: bool | None,
        verify: bool,
        refused: Callable[[str], None] | None,
        names: Callable[[Sequence[Any]], Named],
        bound: Sequence[str] | None = None,
    ) -> None:
        self.name = name
        self.function = function
        self.verified: dict[int, tuple[Comparison, ...]] = {}
        self.unverified: dict[int, str] = {}
        self.served_calls = 0
        self.failure: str | None = None
        self.refused: str | None = None
        self.surprising = False
        self.moved: set[str] = set()  # the names of inputs whose metadata the entries change
        #: The lines of notebook cells that called the function when it was compiled.
        self.callers: set[UserLine] = set()
        self._names: dict[int, dict[str, str]] = {}
        self._backend = backend
        self._device = device
        self._verify = verify
        self._declines = refused is None
        self._refused_call = refused
        self._target = (
            _NotebookFunction(function, name)
            if refused is not None
            else _TracedOrCaptured(function, name, bound, names)
        )
        self._options = pipeline.Options(
            backend=backend, partitioner=partitioner, keep_inference_input_mutations=True, dynamic=dynamic
        )
        self._latest: _Arguments | None = None
        self.compiled = CompiledFunction(
            self._target,
            self._compile_call,
            raises_refusals=self._declines,
            backend_name=backend.name,
            number=number,
            warn=False,
            accept=self._accept if verify or device is not None or self._declines else None,
        )

    def _compile_call(self, *arguments: Any) -> Entry:
        try:
            return compile_apart(self._options, *arguments)
        except Declined as declined:
            if self._refused_call is not None:
                self._refused_call(str(declined.refusal))  # no event reports a call that is refused before the trace
            raise

    def compiled_with(self, partitioner: Partitioner) -> CompiledFunction:
        """Return another compiled form of the function, with another partitioner.

        It compiles at its first call. Each entry is compared with eager before it is used, and refused if it differs.
        """
        options = replace(self._options, partitioner=partitioner)
        return CompiledFunction(
            self._target,
            partial(compile_apart, options),
            raises_refusals=True,
            backend_name=self._backend.name,
            number=next_number(),
            warn=False,
            accept=partial(self._accept, always=True),
        )

    def inputs(self) -> tuple[Any, ...] | None:
        """Return the inputs of the call that compiled the latest entry, the lifted inputs first, or None without calls.

        The tuple has None for each tensor that no longer exists or whose storage was freed.
        """
        if self._latest is None:
            return None
        inputs = self._latest.now()
        freed = [isinstance(each, Tensor) and not within_its_storage(each) for each in inputs]
        return tuple([None if gone else each for each, gone in zip(inputs, freed, strict=True)])

    @contextlib.contextmanager
    def calling(self) -> Iterator[Callable[[Callable[..., Any], tuple[Any, ...]], Any]]:
        """Yield a function that calls another function with the inputs that `inputs` returns, or with copies of them.

        The lifted inputs stay in their places after a call, because a backward may read them. They are replaced at the
        next call with other inputs. When the context ends, the original tensors are in their places again.
        """
        arguments = self._latest
        assert arguments is not None
        with contextlib.ExitStack() as places:
            placed: tuple[Any, ...] | None = None
            args: tuple[Any, ...] = ()
            kwargs: dict[str, Any] = {}

            def call(function: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
                nonlocal placed, args, kwargs
                if placed is not inputs:
                    places.close()
                    places.enter_context(arguments.placed(inputs))
                    args, kwargs = arguments.split(inputs)
                    placed = inputs
                return function(*args, **kwargs)

            yield call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Serve one call from the user's code.

        Raises `NotTraced` if Dynamo captures the calls that cannot be traced, and this call cannot.
        """
        if is_inside_a_trace():
            return self.function(*args, **kwargs)  # the trace or the comparison of the caller includes this call
        here = self._target.here
        here.eager = False
        random, before = torch.get_rng_state(), len(self.compiled.entries)
        try:
            result = self.compiled(*args, **kwargs)
        except Exception as error:
            if here.eager:
                raise
            if self._declines and isinstance(error, AotlabError):
                # Eager may raise an error that the trace raised, too.
                seen = error.seen if isinstance(error, RefusedError) else str(error)
                seen = seen.replace("tracing the function raised an error that eager does not raise:", "it raised")
                raise NotTraced(seen.removesuffix("; move this code out of the function")) from None
            # A compiled form that fails has changed nothing yet. Run eagerly: eager gives the right result or error.
            failure = f"{type(error).__name__}: {error}"
        else:
            self.served_calls += not here.eager
            if len(self.compiled.entries) != before:
                self._latest = self._target.arguments(args, kwargs)
                self.callers |= {each() for each in running_cells(sys._getframe(1))}
            return result
        torch.set_rng_state(random)
        result = self._python(args, kwargs, failure)
        self.failure, self.surprising = failure, True  # eager did not raise
        return result

    def _python(self, args: tuple[Any, ...], kwargs: dict[str, Any], _failure: str) -> Any:
        """Run a call eagerly, because the compiled form failed."""
        return self.function(*args, **kwargs)

    def written(self) -> dict[str, Tensor | None]:
        """Return no names: calls of the function may write inputs, but the cell that defines the function does not."""
        return {}

    def settle(self) -> None:
        """Do nothing, because this object saves no values of inputs."""

    def result_names(self, present: Mapping[int, tuple[str, Tensor]]) -> dict[int, dict[str, str]]:
        """Return the names of the inputs in the comparisons with eager, by the entry's number.

        The results have no names, because they belong to the callers, and not to the cell that defines the function.
        """
        return self._names

    def _accept(
        self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], *, always: bool = False
    ) -> str | None:
        """Compare a new entry with the function on copies of the arguments; return a reason to reject it, or None.

        ``always`` compares the entry although the user switched the comparison off.
        """
        elsewhere = self._elsewhere(args, kwargs)
        if elsewhere is None and self._declines and entry.printed:
            elsewhere = "it prints, and each call has to print"
        if elsewhere is not None or not (self._verify or always):
            return elsewhere
        events.emit(events.Begun(kind="verification", subject=self.name))
        missed: list[bool] = []
        _comparing.on = True
        began = time.perf_counter_ns()
        try:
            # The trace has already printed the function's output, so the comparison does not print it again.
            with contextlib.redirect_stdout(io.StringIO()):
                rows = self._compare(entry, args, kwargs, missed)
        except Exception as error:  # noqa: BLE001  # an entry whose arguments cannot be copied is used unverified
            self.unverified[entry.number] = f"its arguments cannot be copied: {error}"
        finally:
            _comparing.on = False
            events.emit(events.Spent(kind="verification", duration_ns=time.perf_counter_ns() - began))
        if missed:
            self.unverified[entry.number] = "copies of its arguments do not meet its guards"
        if entry.number in self.unverified:
            return self.unverified.pop(entry.number) if self._declines else None
        self.verified[entry.number] = rows
        first = next((row.sentence for row in rows if not row.equal), None)
        names = list(self._names[entry.number].values())
        return None if first is None else f"its compiled form differs from eager: {renamed(first, names)}"

    def _compare(
        self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], missed: list[bool]
    ) -> tuple[Comparison, ...]:
        """Compare an entry with the function. Append to ``missed`` if the entry does not accept copies of the inputs.

        The copies of the lifted inputs stay in their places until the gradients of the call have been compared.
        """
        exact = self._backend.name == "eager"
        arguments = self._target.arguments(args, kwargs)
        names = [*(name for name, _ in self._target.lifted_names()), *self._target.argument_names(args, kwargs)]
        self._names[entry.number] = {f"inputs[{i}]": name for i, name in enumerate(names)}

        def serve(*inputs: Any, **named: Any) -> Any:
            # If the compiled forward raises in a call of the user, the call runs eagerly. Do the same here.
            with contextlib.suppress(ForwardFailed):
                result = entry.run(inputs, named)
                if result is not MISS:
                    return result
                missed.append(True)
            return self.function(*inputs, **named)

        with contextlib.ExitStack() as places:

            def on_copies(function: Callable[..., Any]) -> Callable[..., Any]:
                def call(inputs: list[Any]) -> Any:
                    places.close()
                    places.enter_context(arguments.placed(inputs))
                    copied_args, copied_kwargs = arguments.split(inputs)
                    return function(*copied_args, **copied_kwargs)

                return call

            verification = compare(
                _call,
                (arguments.now(),),
                candidate=lambda _: on_copies(serve),
                reference=lambda _: on_copies(self.function),
                calls=1,
                tolerance="rounded" if exact else "close",
                yardstick=None if exact else lambda _: on_copies(torch.compile(self.function, dynamic=False)),
            )
        return verification.comparisons

    def _elsewhere(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        if self._device is None:
            return None
        names = self._target.argument_names(args, kwargs)
        leaves = nesting.flatten((args, kwargs))[0]
        for name, value in zip(names, leaves, strict=False):
            if isinstance(value, Tensor) and value.device != self._device and value.dim():
                return wrong_device(name, value, self._device)
        return None
