"""Arguments that the function gives other memory, with ``set_`` or by an assignment to ``.data``.

    with torch.no_grad():
        saved = a.detach()
        a.set_(b)                  # `a` now has the memory of `b`
        a.mul_(2)                  # writes `b`, but counts the write in the version counter of `a`
        a.set_(saved)              # `a` has its own memory again

In the trace, the traced argument gets the other memory as well, and keeps its autograd history and version counter.
After the run it gets its own memory back, so that writes to each memory are found as usual. If the function leaves an
argument in other memory, the epilogue gives the caller's tensor this memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.guards.user_code import called, user_line
from aotlab.runtime.draft import Draft
from aotlab.runtime.emitting_quirk import EmittingQuirk, Point
from aotlab.trace.boundary import ASSIGNS_DATA, SETS_MEMORY, user_name
from aotlab.trace.escapes import EscapeGuard, Handler
from aotlab.trace.findings import Findings
from aotlab.trace.inputs import TracedInput, value_of
from aotlab.trace.running_recorder import strides_are_certain
from aotlab.trace.view_ops import covers_storage


class OtherMemory(EmittingQuirk):
    """Gives traced arguments other memory, and repeats this for the caller's tensors in the epilogue.

    The keys of the dictionaries are the indices of kept inputs. ``_own`` has an alias of each argument's own memory,
    and ``_last`` an alias of the other memory in which the function left it. ``_owners`` has the owner of this other
    memory, and the window that the argument gets, or None for all of it. The owner is a kept input, or ``-1 - n`` for
    intermediate base ``n``. ``_set`` are the arguments on which the function called ``set_``. ``_memory`` are the
    storage keys of all memory that an argument got or had before.
    """

    name = "other_memory"

    def __init__(self) -> None:
        self._own: dict[int, Tensor] = {}
        self._last: dict[int, Tensor] = {}
        self._owners: dict[int, tuple[int, Any]] = {}
        self._set: set[int] = set()
        self._memory: set[int] = set()

    def claims(self) -> Mapping[Any, Handler]:
        return dict.fromkeys((SETS_MEMORY, ASSIGNS_DATA), self._give)

    def _give(self, guard: EscapeGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor: Tensor = args[0]
        source: Any = args[1] if len(args) == 2 and not kwargs else None
        with internals.disable_torch_function():
            inputs = list(guard.inputs.values())
            k = next((k for k, item in enumerate(inputs) if item.traced is tensor), None)
            if k is None or not _may_be_given(tensor, source, inputs, hidden=func == ASSIGNS_DATA):
                name = called(tensor) if k is None else f"`{inputs[k].name}`"
                raise RunEagerly("sets-other-memory", op=user_name(func), name=name, at=user_line())
            self._memory |= {internals.storage_key(tensor), internals.storage_key(source)}
            guard.storage_notes.aliased |= self._memory
            self._own.setdefault(k, internals.alias_of(tensor, inputs[k].fake))
            inputs[k].takes_memory = True
            internals.take_memory(tensor, source)
            if func == SETS_MEMORY:
                self._set.add(k)
                torch.autograd.graph.increment_version(tensor)
        return tensor

    def after_run(self, inputs: Sequence[TracedInput]) -> None:
        """Give the traced arguments their own memory back, and note the memory in which the function left them."""
        for k, own in self._own.items():
            item, tensor = inputs[k], inputs[k].traced
            if item.steps or tensor.requires_grad != item.real.requires_grad:
                raise RunEagerly("sets-other-memory", op="set_", name=f"`{item.name}`")
            if internals.storage_key(tensor) != item.storage or _window(tensor) != _window(own):
                item.keeps_other_memory = True
                self._last[k] = internals.alias_of(tensor, item.fake)
            internals.take_memory(tensor, own)

    def check(self, findings: Findings) -> None:
        """Find the owner of the memory of each argument that the function left in other memory.

        If it is an intermediate, the forward returns it. Run eagerly if an output is a view of memory that an argument
        got or had before.
        """
        inputs, outputs = findings.inputs, findings.outputs
        arguments = {id(item.traced) for item in inputs}
        views = [tensor for tensor in outputs.tensors.values() if id(tensor) not in arguments]
        refused = any(internals.storage_key(tensor) in self._memory for tensor in views)
        for k, last in self._last.items():
            internals.take_memory(inputs[k].traced, last)  # the backward sees the argument as the function left it
            key, value = internals.storage_key(last), value_of(last, "an argument")
            owner = next((n for n, item in enumerate(inputs) if item.storage == key), None)
            if owner is None:
                taken = any(internals.storage_key(base) == internals.storage_key(value) for base, _ in outputs.bases)
                refused = refused or taken or not covers_storage(value)
                self._owners[k] = -1 - len(outputs.bases), None
                outputs.bases.append((value, None))
            else:
                whole = _window(value) == _window(inputs[owner].fake)
                refused = refused or (internals.is_symbolic(value) and not whole)
                self._owners[k] = owner, None if whole else _window(value, inputs[owner].fake.storage_offset())
        if refused:
            raise RunEagerly("sets-other-memory", op="set_", name="an argument")

    def emit(self, draft: Draft, at: Point) -> None:
        memory = {}
        for k, (owner, window) in self._owners.items() if at == "epilogue" else ():
            if owner < 0:
                memory[k] = draft.results[len(draft.trace.writes) + len(draft.trace.returned_outputs) - 1 - owner]
                continue
            name = draft.kept(owner)
            memory[k] = draft.w.local(f"memory_of_{name}")
            part = f".as_strided({window[0]}, {window[1]}, {name}.storage_offset() + {window[2]})" if window else ""
            draft.w.add(f"{memory[k]} = {name}.detach(){part}")
        for k in self._own if at == "epilogue" else ():
            info, target, is_set = draft.meta.input_info[k], draft.kept(k), k in memory and k in self._set
            if is_set:
                draft.in_context(f"{target}.set_({memory[k]})", grad_mode=False if draft.grad_on else None)
            elif k in memory:
                draft.w.add(f"{target}.data = {memory[k]}")
            if info.moves_version and not (info.mutates_data or is_set):
                draft.w.add(draft.w.call("increment_version", torch.autograd.graph.increment_version, target))


def _may_be_given(tensor: Tensor, source: Any, inputs: Sequence[TracedInput], *, hidden: bool) -> bool:
    """Tell whether a traced argument may be given the memory of ``source``.

    ``hidden`` says that the function assigns to ``.data``, which autograd does not see.
    """
    if not (isinstance(source, Tensor) and internals.is_functional(source)) or torch.is_inference_mode_enabled():
        return False
    keys = {internals.storage_key(tensor), internals.storage_key(source)}
    affected = [item for item in inputs if item.storage in keys or item.traced is tensor]
    any_requires_grad = tensor.requires_grad or source.requires_grad
    return (
        not any(item.base or item.is_family or item.real.is_inference() for item in affected)
        and not any(internals.base_of(item.real) is not None for item in affected if item.traced is tensor)
        and (tensor.dtype, tensor.device, tensor.layout) == (source.dtype, source.device, source.layout)
        and (hidden or not (any_requires_grad and torch.is_grad_enabled()))
        and (not tensor.requires_grad or (tensor.is_leaf and _window(tensor)[:2] == _window(source)[:2]))
        and not internals.is_seen_through(source, "expand")
        and strides_are_certain(source)
    )


def _window(tensor: Tensor, start: Any = 0) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
    """Return the sizes, the strides, and the storage offset relative to ``start``."""
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset() - start
