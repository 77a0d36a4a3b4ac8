"""The calls of the traced program: the bytes that each call reads and writes, and the tensors that it makes.

    x.add_(1)            # reads and writes all bytes of x
    y = x.t()            # makes a view of x, reads nothing
    y[0].mul_(2)         # two calls: one makes the view x.t()[0], the other reads and writes its bytes

In the graph of a trace, a write is an op that computes a new value. So the graph no longer has the memory that the
program uses. The traced tensors still have it: they have eager's storages, strides and offsets. `ProgramCalls` notes
them at each call, if somebody records a report.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import EllipsisType, NoneType
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.errors import UserLine
from aotlab.guards.user_code import Locator, user_code_position
from aotlab.trace import custom_ops
from aotlab.trace.boundary import user_name
from aotlab.trace.tape import Tape, tensors_in
from aotlab.trace.write_calls import WRITES_STATISTICS, writes_in_place

#: The longest text of a call, and the longest name of a tensor in it.
_LONGEST, _LONGEST_NAME = 90, 40
#: The dots in a name after which an attribute or a method follows.
_PART = re.compile(r"\.(?=[A-Za-z_])")
#: Functions that write all bytes of a tensor and do not read them before.
_OVERWRITES = frozenset((
    "__setitem__", "copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_",
    "geometric_", "log_normal_",
))  # fmt: skip
#: In-place functions that write only the elements which an index or a mask selects.
_SELECTS = frozenset((
    "index_put_", "index_copy_", "index_fill_", "index_add_", "index_reduce_", "put_", "scatter_", "scatter_add_",
    "scatter_reduce_", "masked_fill_", "masked_scatter_", "fill_diagonal_", "tril_", "triu_",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layout:
    """The elements of a tensor in its storage; symbolic sizes have their values in the traced call.

    ``start`` is the position in bytes of the first element. It counts from the first byte of the inputs in the storage,
    or from the first byte of the tensor with which the program made the storage.
    """

    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True, slots=True)
class Touched:
    """A traced tensor of a call.

    ``storage`` identifies the tensor's storage within the process, and ``nbytes`` is the size of this storage. ``name``
    is the input's name, or the call that made the tensor. ``layout`` is None if it depends on values. ``certain`` is
    false if a write reaches perhaps only some elements of the tensor.
    """

    storage: int | None
    nbytes: int
    name: str
    layout: Layout | None
    certain: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCall:
    """One call of a torch function by the traced program.

    ``text`` is the call as code. ``made`` are the tensors that the call returns, without its arguments. ``operations``
    are the ops that the recorder recorded for the call, as a range of indices on the tape.
    """

    text: str
    line: UserLine | None
    reads: tuple[Touched, ...]
    writes: tuple[Touched, ...]
    made: tuple[Touched, ...]
    operations: range


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The calls of a traced program, its kept inputs, and its outputs by their index."""

    calls: tuple[ProgramCall, ...]
    inputs: tuple[Touched, ...]
    outputs: tuple[tuple[int, Touched], ...]


@dataclass(slots=True, eq=False)
class Begun:
    """A call that has begun: the traced tensors among its arguments, and the state of each."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Tensor]
    states: list[Any]
    position: Locator | None
    count: int
    text: str


class ProgramCalls:
    """Notes the calls of a program while it is traced. ``inputs`` are the traced inputs with their names."""

    def __init__(self, tape: Tape, inputs: Sequence[tuple[str, Tensor]]) -> None:
        self._tape = tape
        self._names: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._failed = False
        self._calls: list[tuple[ProgramCall, Locator | None]] = []
        # The memory of the fake tensors of the inputs, with the byte offset of the first input in each.
        self._begins: dict[int | None, int] = {}
        for name, tensor in inputs:
            self._name(tensor, name)
            memory, begin = _memory_of_value(tensor), _byte_offset(tensor)
            self._begins[memory] = min(begin, self._begins.get(memory, begin))
        self._inputs = tuple([self._touched(tensor) for _, tensor in inputs])

    def begin(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Begun | None:
        """Note the state of the arguments before a call. After an error in this class, nothing more is noted."""
        try:
            return None if self._failed else self._begin(func, args, kwargs)
        except Exception:  # noqa: BLE001  # an error in the notes must not change whether a function is compiled
            self._failed = True
            return None

    def end(self, begun: Begun, result: Any) -> None:
        """Note a call that has returned ``result``, if it made or wrote a tensor.

        A call with wrapper subclasses is noted without tensors, because the wrappers have no memory, and their code may
        do anything with their parts.
        """
        try:
            self._end(begun, result)
        except Exception:  # noqa: BLE001  # as above
            self._failed = True

    def _begin(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Begun:
        distinct = {id(each): each for each in tensors_in((args, kwargs)) if internals.is_functional(each)}
        tensors, text = list(distinct.values()), self._text(func, args, kwargs)
        states = [_state(func, each) for each in tensors]
        return Begun(func, args, kwargs, tensors, states, user_code_position(), len(self._tape.operations), text)

    def _end(self, begun: Begun, result: Any) -> None:
        returned = [each for each in tensors_in(result) if internals.is_functional(each)]
        made = [each for each in returned if not any(each is tensor for tensor in begun.tensors)]
        written = self._written(begun)
        opaque = any(map(_is_wrapper, tensors_in((begun.args, begun.kwargs, result))))
        if not written and not made and not (opaque and (tensors_in(result) or writes_in_place(begun.func))):
            return
        memory = {internals.storage_id(each) for each in begun.tensors}
        is_view = not written and all(internals.storage_id(each) in memory for each in made)
        name = user_name(begun.func)
        read = begun.args[1:] if name in _OVERWRITES else begun.args
        inputs = tensors_in((read, {key: value for key, value in begun.kwargs.items() if key != "out"}))
        reads = [] if is_view or name.endswith("_like") or name.startswith("new_") else begun.tensors
        for index, each in enumerate(made):
            called = begun.text if is_view else f"{name}(…)"
            self._name(each, called if each is result else f"{called}[{index}]")
        call = ProgramCall(
            text=begun.text,
            line=None,
            reads=tuple([self._touched(each) for each in reads if any(each is other for other in inputs)]),
            writes=written,
            made=tuple([self._touched(each) for each in made]),
            operations=range(begun.count, len(self._tape.operations)),
        )
        self._calls.append((call, begun.position))

    def program(self, outputs: dict[int, Tensor]) -> Program | None:
        """Return the record of all calls. ``outputs`` are the traced tensors that the function returned.

        The result is None if a call could not be noted.
        """
        if self._failed:
            return None
        calls = [replace(call, line=None if position is None else position()) for call, position in self._calls]
        touched = tuple([(index, self._touched(each)) for index, each in outputs.items()])
        return Program(calls=tuple(calls), inputs=self._inputs, outputs=touched)

    def _written(self, begun: Begun) -> tuple[Touched, ...]:
        """Return the arguments that a call has written."""
        func, args, kwargs = begun.func, begun.args, begun.kwargs
        if _changes_metadata_only(user_name(func)):
            return ()
        pairs = zip(begun.tensors, begun.states, strict=True)
        changed = [each for each, state in pairs if _state(func, each) != state]
        by_contract: list[Tensor] = []
        if args and writes_in_place(func):
            by_contract = tensors_in(args[0])
        elif kwargs.get("out") is not None:
            by_contract = tensors_in(kwargs["out"])
        elif positions := custom_ops.written_arguments(func):
            by_contract = tensors_in([args[n] for n in positions if n < len(args)])
        elif args and (args[-1] is True or kwargs.get("inplace")):
            by_contract = tensors_in(args[:1])
        # All tensors of a storage share a version, so a changed version alone does not say which of them was written.
        written = [each for each in changed if any(each is other for other in by_contract)] or changed
        memory = [internals.storage_id(each) for each in written]
        touched = []
        for each, key in zip(written, memory, strict=True):
            is_known = bool(by_contract) or memory.count(key) == 1
            part = _assigned(each, args[1]) if user_name(func) == "__setitem__" else each
            certain = is_known and part is not None and user_name(func) not in _SELECTS
            touched.append(self._touched(each, part, certain=certain))
        return tuple(touched)

    def _touched(self, tensor: Tensor, part: Tensor | None = None, *, certain: bool = True) -> Touched:
        """Describe a traced tensor, or a ``part`` of it, which is a meta tensor."""
        shown = tensor if part is None else part
        layout, (nbytes,) = None, internals.traced((tensor.untyped_storage().nbytes(),))
        if not any(map(internals.unbacked_in, (*shown.shape, *shown.stride(), shown.storage_offset()))):
            # A write gives a traced tensor a new value, with memory that begins at the first byte of the base.
            start = _byte_offset(shown) - self._begins.get(_memory_of_value(tensor), 0)
            shape, stride = internals.traced(shown.shape), internals.traced(shown.stride())
            layout = Layout(start, shape, stride, shown.element_size())
        return Touched(internals.storage_id(tensor), nbytes, self._name_of(tensor), layout, certain)

    def _name(self, tensor: Tensor, name: str) -> None:
        self._names[id(tensor)] = weakref.ref(tensor), name

    def _name_of(self, tensor: Tensor) -> str:
        reference, name = self._names.get(id(tensor), (None, ""))
        return name if reference is not None and reference() is tensor else ""

    def _text(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Write a call as code: ``x.t()``, ``x.t()[0]``, ``linear(x, weight)``."""
        name, words = user_name(func), [self._word(each) for each in args]
        words += [f"{key}={self._word(value)}" for key, value in kwargs.items() if value is not None]
        if name == "__getitem__":
            text = f"{words[0]}[{_index(args[1])}]"
        elif name == "__setitem__":
            text = f"{words[0]}[{_index(args[1])}] = {words[2]}"
        elif getattr(func, "__name__", "") == "__get__":
            text = f"{words[0]}.{name}"
        elif args and isinstance(args[0], Tensor) and getattr(Tensor, name, None) is func:
            text = f"{words[0]}.{name}({', '.join(words[1:])})"
        else:
            text = f"{name}({', '.join(words)})"
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"

    def _word(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return _end_of(self._name_of(value)) or "…"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join([self._word(each) for each in value[:8]])}{', …' if len(value) > 8 else ''}]"
        return repr(value) if type(value) in (int, float, bool, str, NoneType, torch.dtype) else "…"


def _state(func: Any, tensor: Tensor) -> Any:
    """Return a value that changes if ``func`` writes to a traced tensor."""
    # A write to running statistics does not change the version of the traced tensor. It replaces its value.
    return id(internals.from_functional(tensor)) if func in WRITES_STATISTICS else internals.version_of(tensor)


def _is_wrapper(tensor: Tensor) -> bool:
    return not internals.is_functional(tensor) and type(tensor) not in (Tensor, torch.nn.Parameter)


def _memory_of_value(tensor: Tensor) -> int | None:
    return internals.storage_id(internals.from_functional(tensor))


def _byte_offset(tensor: Tensor) -> int:
    return internals.traced((tensor.storage_offset(),))[0] * tensor.element_size()


@functools.cache
def _changes_metadata_only(name: str) -> bool:
    """Tell whether a function with this name changes a tensor's sizes, strides or history, but no bytes."""
    packet = None if name.startswith("__") else getattr(torch.ops.aten, name, None)
    tags = [getattr(packet, overload).tags for overload in (packet.overloads() if packet is not None else ())]
    return name == "requires_grad_" or any(torch.Tag.inplace_view in each for each in tags)


def _end_of(name: str) -> str:
    """Return the last parts of a long name: ``….attn.c_attn.weight``."""
    parts = _PART.split(name)
    while len(name) > _LONGEST_NAME and len(parts) > 1:
        del parts[0]
        name = f"….{'.'.join(parts)}"
    return name


def _index(key: Any) -> str:
    """Write the index of a tensor as code."""
    if isinstance(key, tuple):
        return ", ".join(map(_index, key))
    if isinstance(key, slice):
        ends = ["" if each is None else _index(each) for each in (key.start, key.stop)]
        return ":".join([*ends, *([] if key.step is None else [_index(key.step)])])
    return "..." if key is Ellipsis else repr(key) if type(key) in (int, bool, NoneType) else "…"


def _assigned(tensor: Tensor, key: Any) -> Tensor | None:
    """Return a meta tensor with the layout of ``tensor[key]``, or None if values select the elements."""
    keys = key if isinstance(key, tuple) else (key,)
    plain = (int, slice, NoneType, EllipsisType)
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    if not all(type(each) in plain for each in keys) or any(map(internals.is_symbolic, sizes)):
        return None
    shape, stride, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    with internals.outside_of_trace(), torch.no_grad():
        extent = offset + 1 + sum(max(n - 1, 0) * step for n, step in zip(shape, stride, strict=True))
        like = torch.empty(extent, dtype=tensor.dtype, device="meta").as_strided(shape, stride, offset)
        part: Tensor = like[key]
        return part
