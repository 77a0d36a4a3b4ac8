"""What the traced function does to the sizes, strides and storage of its inputs, in place, step by step.

    x.t_()
    x.mul_(2)
    x.unsqueeze_(0)

Functionalization forgets such steps: after the run it says that something happened, and what the result looks like.
For autograd, and for the views of ``x`` that the caller holds, it matters how it came about. So the steps are written
down when they happen, and the epilogue takes them again on the caller's tensor.

There are three kinds. A step that *moves* gives the same elements other indices. One that *narrows* (``as_strided_``,
``resize_`` to fewer elements) may lose sight of elements that were written, and that the caller still sees through
other tensors: from there on the whole is kept in view, to be written back before that step. One that *replaces*
(``resize_`` to more elements, ``out=`` of another shape) starts with new memory. Mixtures that would need more than one
write are left to eager.

Once the version has moved, autograd makes a view's history again: in eager by its sizes, strides and offset, on a
wrapper by the view ops that made it, which mean something else when its sizes, or those of what it is a view of, have
changed. So the wrapper of a view that is moved becomes another view, one op longer; and the wrappers of the views of a
tensor that is moved become views of what it is now, by way of what it was. Where that cannot be, such a program is left
to eager too, unless it is seen to be without gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from aotlab import torch_internals as internals
from aotlab.ir.metadata import SET_TO_ITSELF, MetadataStep
from aotlab.recorder.alive import MadeTensors
from aotlab.recorder.memory import WholeStorages
from aotlab.recorder.places import user_line
from aotlab.recorder.signals import RunEagerly
from aotlab.recorder.tape import tensors_in

_MOVES = frozenset(
    (Tensor.t_, Tensor.transpose_, Tensor.swapaxes_, Tensor.swapdims_, Tensor.squeeze_, Tensor.unsqueeze_)
)
#: The names of the steps that give the same elements other indices.
MOVES = frozenset(step.__name__ for step in _MOVES)
_RESIZES = frozenset((Tensor.resize_, Tensor.resize_as_, torch.resize_as_))
_DETACHES = frozenset((Tensor.detach_, torch.detach_))


class Reshaped(Protocol):
    """An input of a trace, as far as steps change it; see `aotlab.analysis.Entered`."""

    name: str
    real: Tensor
    wrapper: Tensor
    history: Any
    base: Any
    steps: list[MetadataStep]
    whole: Tensor | None
    write_after: int | None
    sees_behind: bool
    given: str
    left: Any

    @property
    def written_visibly(self) -> bool:
        """Whether autograd has seen a write."""

    def note_history(self) -> None:
        """Take the present history for the one without writes."""


class Reshapes:
    """Runs the steps on the wrappers of a trace's inputs, and writes them down."""

    def __init__(self, inputs: Iterable[Reshaped] = ()) -> None:
        self._items = {id(item.wrapper): item for item in inputs}
        items = self._items.values()
        self._inference = {internals.storage_key(item.wrapper) for item in items if item.real.is_inference()}
        #: Intermediates moved under no_grad, each with where its gradient goes, and the number of the next node then.
        self.unseen: list[tuple[Tensor, tuple[Any, int], int]] = []
        #: Whether a tensor that requires grad was given other sizes or strides.
        self.moved = False
        self._changed: dict[int, Tensor] = {}  # tensors that were changed, or of which a view was
        self._made = MadeTensors(item.wrapper for item in self._items.values())

    def is_input(self, tensor: Tensor) -> bool:
        """Tell whether ``tensor`` is an input itself, other than a view of one."""
        return id(tensor) in self._items

    def is_inference(self, tensor: Tensor) -> bool:
        """Tell whether ``tensor`` has the memory of an input that is an inference tensor."""
        return internals.storage_key(tensor) in self._inference if self._inference else False

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of an input, None for other tensors."""
        item = self._items.get(id(tensor))
        return None if item is None else item.name

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take one step, and write it down if it is on an input.

        Raises
        ------
        RunEagerly
            The epilogue could not do the same.
        """
        tensor = args[0]
        self.moved |= tensor.requires_grad and func not in _DETACHES
        if func not in _DETACHES and id(tensor) not in self._changed:
            self.written(tensor)  # a step counts as a write does, for what it is a view or an alias of, too
        if (func in _MOVES or self._stays_inside(func, args, kwargs)) and self._keeps_histories(tensor):
            if self.is_input(tensor):
                return self._run_on_input(func, args, kwargs)
            return self._move(func, args, kwargs)
        if func in _MOVES and self._moves_unseen(tensor):
            self.unseen.append((tensor, _edge_of(tensor), internals.sequence_number()))
            result = func(*args, **kwargs)
            internals.refresh_count(tensor)
            return result
        if func not in _DETACHES:
            base = internals.base_of(tensor)
            if tensor.requires_grad and self._has_views(tensor):
                raise RunEagerly(f"`{func.__name__}` on a tensor that was viewed, at {user_line()}")
            changed = tensor if base is None else base
            if changed is not tensor and changed.requires_grad:
                raise RunEagerly(f"`{func.__name__}` on a view with a history, at {user_line()}")
            own = base is None and self.is_input(tensor)
            if changed.requires_grad and not own and not torch.is_grad_enabled():
                # a view's history is made again at the next look, from what it is then; another keeps its old sizes
                raise RunEagerly(f"`{func.__name__}` under no_grad on a tensor with a history, at {user_line()}")
            self._changed[id(changed)] = changed
        if self.is_input(tensor):
            return self._run_on_input(func, args, kwargs)
        if func in _RESIZES:
            size = _sizes(_step(func, args[1:], kwargs))
            if tensor.requires_grad or not self.narrows(func, args, kwargs):
                return _resize(tensor, size, self._made)
            if size == tuple(tensor.shape):
                torch.autograd.graph.increment_version(tensor)
                return tensor
            func, args, kwargs = Tensor.as_strided_, (tensor, size, _contiguous(size)), {}
        result = func(*args, **kwargs)
        internals.refresh_count(tensor)
        return result

    def run_in(self, memory: WholeStorages, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take a step of a tensor in a base that is a whole storage, and write it down if it is on an input."""
        tensor = args[0]
        self.moved |= tensor.requires_grad and func not in _DETACHES
        item = self._items.get(id(tensor))
        step = _step(func, args[1:], kwargs)
        if func in _RESIZES:
            memory.resize(tensor, _sizes(step))
        elif step.method == "as_strided_":
            memory.restride(tensor, step.args, dict(step.kwargs))
        else:
            func(*args, **kwargs)
            internals.refresh_count(tensor)
        if item is not None:
            item.steps.append(step)
        return tensor

    def _stays_inside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether ``as_strided_`` leaves a view of an input or an intermediate with elements that it had.

        Where it gets others, their gradients are lost or not, according to how autograd makes its history again.
        """
        tensor = args[0]
        if func.__name__ != "as_strided_" or self.is_input(tensor) or not _is_dense(tensor):
            return False
        begin = int(tensor.storage_offset())
        size, stride, first = _place(_step(func, args[1:], kwargs), begin)
        return math.prod(size) > 0 and begin <= first and _last(size, stride, first) < begin + tensor.numel()

    def _keeps_histories(self, tensor: Tensor) -> bool:
        """Tell whether the histories of ``tensor`` and its views can be made again as in eager after a move."""
        base = internals.base_of(tensor)
        if not tensor.requires_grad or tensor.is_inference() or torch.is_inference_mode_enabled():
            return False
        if not torch.is_grad_enabled():  # the history of a view is made again all the same
            return base is not None and not self.is_input(tensor) and internals.keeps_through_writes(tensor)
        if base is not None:
            return internals.may_be_written(tensor)
        item = self._items.get(id(tensor))
        # in eager the views of a view hang on what it is a view of
        alone = item is None or internals.base_of(item.real) is None or not self._has_views(tensor)
        return alone and not tensor.is_leaf

    def _moves_unseen(self, tensor: Tensor) -> bool:
        """Tell whether a move under ``no_grad`` leaves an intermediate with a history that does not fit it.

        What comes of that is the same on a wrapper, unless gradients go there afterwards.
        """
        plain = (
            internals.base_of(tensor) is None and not self.is_input(tensor) and not torch.is_inference_mode_enabled()
        )
        if not plain or not tensor.requires_grad or tensor.is_leaf or torch.is_grad_enabled():
            return False
        return not self._has_views(tensor)

    def _move(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take a step that moves elements of a tensor with a history."""
        tensor, shape = args[0], args[0].shape
        base = internals.base_of(tensor)
        if base is not None:
            if tensor.dtype != base.dtype:
                # after a later write eager makes such a view again by its view ops, of which the step is none
                raise RunEagerly(f"`{func.__name__}` on a view of another dtype with a history, at {user_line()}")
            with torch.enable_grad():
                moved = getattr(tensor, func.__name__.removesuffix("_"))(*args[1:], **kwargs)
            if torch.is_grad_enabled():
                moved.transpose_(0, -1 if moved.dim() == 0 else 0)  # changes the version, and keeps the history
            else:
                torch.autograd.graph.increment_version(moved)
            internals.exchange(tensor, moved)
            return tensor
        views = [other for other in self._made.alive() if internals.base_of(other) is tensor]
        if any(view.dtype != tensor.dtype or view.is_conj() or view.is_neg() for view in views):
            # no strides lead to these: eager makes them again by their ops, of what was moved
            raise RunEagerly(f"`{func.__name__}` on a tensor that was viewed as another dtype, at {user_line()}")
        func(*args, **kwargs)
        for view in filter(internals.keeps_through_writes, views):  # a look at the others raises, here as in eager
            place = view.shape, view.stride(), view.storage_offset()
            again = internals.same_view(view, _moved_back(tensor, shape, func, args[1:], kwargs))
            if place != (again.shape, again.stride(), again.storage_offset()):
                raise RunEagerly(f"`{func.__name__}` on a tensor that was viewed, at {user_line()}")
            internals.exchange(view, again)
        return tensor

    def narrows(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether ``resize_`` leaves a tensor with the first of its own elements, or with all of them."""
        tensor, size = args[0], _sizes(_step(func, args[1:], kwargs))
        return size == tuple(tensor.shape) or (tensor.is_contiguous() and math.prod(size) <= tensor.numel())

    def set_to_itself(self, tensor: Tensor, run: Callable[[], Tensor]) -> Tensor:
        """Let ``run`` give a tensor the memory that it has, which changes its version and its history only."""
        item = self._items.get(id(tensor))
        written = item is not None and item.written_visibly
        with internals.outside_of_trace():  # functionalization would take the memory for another one
            run()
        if item is not None and item.given:
            raise RunEagerly(f"`{item.name}` is given other memory and changed in place, at {user_line()}")
        if item is not None:
            if not written:
                item.history = tensor.grad_fn
            item.steps.append(MetadataStep(method=SET_TO_ITSELF, grad_mode=torch.is_grad_enabled()))
        return tensor

    def give(self, tensor: Tensor, source: Tensor, how: str) -> None:
        """Give a tensor the memory of an intermediate, and write it down if it is an input.

        Raises
        ------
        RunEagerly
            The epilogue could not do the same.
        """
        self._check_inference(tensor, source)
        item = self._items.get(id(tensor))
        kinds = [(t.dtype, t.device, t.layout, t.is_conj(), t.is_neg()) for t in (tensor, source)]
        if internals.base_of(tensor) is not None or internals.base_of(source) is not None or kinds[0] != kinds[1]:
            raise RunEagerly(f"a view, or a tensor of another kind, is given or gives its memory, at {user_line()}")
        if item is None and self._has_views(tensor):
            raise RunEagerly(f"a tensor that was viewed is given other memory, at {user_line()}")
        if tensor.requires_grad and tensor.shape != source.shape:
            raise RunEagerly(f"a tensor that requires grad is given memory of another shape, at {user_line()}")
        if item is not None:
            changed = item.base is not None or item.steps or item.whole is not None
            if changed or (not item.given and internals.has_data_mutation(tensor)):
                raise RunEagerly(f"`{item.name}` is given other memory after other changes in place, at {user_line()}")
            item.given = how
            item.left = item.left or tensor.untyped_storage()  # by whose address others are told apart from it
        version = internals.version_of(tensor)
        internals.give_memory(tensor, source)
        internals.set_version(tensor, version)
        if how == "set_":
            torch.autograd.graph.increment_version(tensor)

    def _check_inference(self, tensor: Tensor, source: Tensor) -> None:
        one, other = (each.is_inference() or self.is_inference(each) for each in (tensor, source))
        if one != other:  # it stays what it is, and a trace knows by the memory
            raise RunEagerly(f"an inference tensor is given ordinary memory, or the reverse, at {user_line()}")

    def leaves_its_memory(self, tensor: Tensor, source: Tensor) -> None:
        """Look at an intermediate before ``set_`` gives it the memory of another tensor.

        Raises
        ------
        RunEagerly
            Autograd has no derivative for it, or views stay behind in the old memory.
        """
        self._check_inference(tensor, source)
        if self.is_input(tensor):
            return
        if tensor.requires_grad or source.requires_grad:
            raise RunEagerly(f"`set_` of a tensor that requires grad, at {user_line()}")
        if internals.base_of(tensor) is not None or self._has_views(tensor):
            raise RunEagerly(f"`set_` parts a tensor from its views, at {user_line()}")

    def written(self, tensor: Tensor) -> None:
        """Look at a tensor that is written, or takes a step.

        Raises
        ------
        RunEagerly
            There are views whose history cannot be told any more.
        """
        base = internals.base_of(tensor)
        base = tensor if base is None else base
        for changed in self._changed.values():
            # ``detach`` counts its writes with those of what it is an alias of, and those of ``.data`` do not count
            if not changed.requires_grad or not (changed is base or internals.share_version(changed, base)):
                continue
            if self._has_views(changed):
                raise RunEagerly(f"a tensor is written that changed its sizes, or a view of it, at {user_line()}")

    def _run_on_input(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        item = self._items[id(args[0])]
        if item.given:
            raise RunEagerly(f"`{item.name}` is given other memory and changed in place, at {user_line()}")
        step = _step(func, args[1:], kwargs)
        if func not in _MOVES and func not in _DETACHES and not self._keeps_all(item, step):
            if func in _RESIZES and math.prod(_sizes(step)) > item.wrapper.numel():
                if item.whole is not None or item.steps:
                    raise RunEagerly(f"`{item.name}` is resized after other changes in place, at {user_line()}")
                if not ends_its_storage(item.real):
                    raise RunEagerly(f"`{item.name}` is resized over memory that the trace cannot see")
                item.write_after, item.sees_behind = 0, True
            else:
                self._narrow(item)
        unwritten = [other for other in self._items.values() if not other.written_visibly]
        if step.method == "resize_":
            result = _resize(item.wrapper, _sizes(step), self._made)
        elif func in _MOVES and self._keeps_histories(item.wrapper):
            result = self._move(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
            internals.refresh_count(item.wrapper)
        for other in unwritten:  # a later look at the history is for writes only
            other.note_history()
        item.steps.append(step)
        return result

    def _has_views(self, tensor: Tensor) -> bool:
        """Tell whether views of ``tensor`` are alive."""
        return any(internals.base_of(other) is tensor for other in self._made.alive())

    def _keeps_all(self, item: Reshaped, step: MetadataStep) -> bool:
        """Tell whether ``as_strided_`` leaves all elements in sight, as the steps do that only move them."""
        if step.method != "as_strided_":
            return False
        if internals.has_data_mutation(item.wrapper) and item.real.storage_offset():
            raise RunEagerly(f"`{item.name}` is written and restrided, and begins elsewhere in its storage")
        after = replayed(item.real, [*item.steps, step])
        same_place = after.storage_offset() == item.real.storage_offset()
        return same_place and after.numel() == item.real.numel() and _is_dense(after) and _is_dense(item.real)

    def _narrow(self, item: Reshaped) -> None:
        if item.write_after is not None and item.whole is None:
            raise RunEagerly(f"`{item.name}` is resized and narrowed, at {user_line()}")
        if item.whole is not None:
            return
        if not _is_dense(item.real):
            raise RunEagerly(f"`{item.name}` has gaps and is narrowed, at {user_line()}")
        with torch.no_grad():
            item.whole = item.wrapper.detach()
        item.write_after = len(item.steps)


def _place(step: MetadataStep, offset: int) -> tuple[Sequence[int], Sequence[int], int]:
    """Return the sizes, strides and offset that ``as_strided_`` gives a tensor that begins at ``offset``."""
    given: dict[str, Any] = dict(zip(("size", "stride", "storage_offset"), step.args, strict=False))
    given |= dict(step.kwargs)
    first = given.get("storage_offset")
    return given["size"], given["stride"], offset if first is None else first


def _last(size: Sequence[int], stride: Sequence[int], first: int) -> int:
    """Return where in its storage the last element is of a tensor that begins at ``first``."""
    return first + sum((size - 1) * step for size, step in zip(size, stride, strict=True))


def _edge_of(tensor: Tensor) -> tuple[Any, int]:
    """Return where the gradient of a tensor that is no leaf goes."""
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _step(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MetadataStep:
    name = func.__name__
    if name == "resize_as_":
        if len(args) != 1 or kwargs:
            raise RunEagerly(f"`resize_as_` with a memory format, at {user_line()}")
        name, args = "resize_", (tuple(args[0].shape),)
    if tensors_in((args, kwargs)) or "memory_format" in kwargs:
        raise RunEagerly(f"`{name}` with such arguments, at {user_line()}")
    return MetadataStep(
        method=name,
        args=tuple(_plain(a) for a in args),
        kwargs=tuple((k, _plain(v)) for k, v in kwargs.items()),
        grad_mode=torch.is_grad_enabled(),
    )


def _resize(wrapper: Tensor, size: tuple[int, ...], made: MadeTensors) -> Tensor:
    """Resize a wrapper; functionalization can do so only within its memory."""
    base = internals.base_of(wrapper)
    if not (wrapper.is_contiguous() and (base is None or base.is_contiguous())):
        raise RunEagerly(f"a tensor that is not contiguous is resized, at {user_line()}")
    end = int(wrapper.storage_offset()) + math.prod(size)
    if wrapper.requires_grad or end * wrapper.element_size() <= wrapper.untyped_storage().nbytes():
        wrapper.resize_(size)
        internals.refresh_count(wrapper)
        return wrapper
    _check_alone(wrapper, made)
    with torch.no_grad():
        grown = torch.empty(size, dtype=wrapper.dtype, device=wrapper.device)
        grown.view(-1)[: wrapper.numel()].copy_(wrapper.view(-1))
        internals.sync(grown)
        internals.replace_value(wrapper, internals.from_functional(grown))
    if tuple(wrapper.shape) != tuple(size):  # steps that it went before were taken again, over its new sizes
        raise RunEagerly(f"a tensor gets new memory after other changes in place, at {user_line()}")
    torch.autograd.graph.increment_version(wrapper)
    return wrapper


def _check_alone(wrapper: Tensor, made: MadeTensors) -> None:
    """Leave it to eager to move memory that others have in view."""
    key = internals.storage_key(wrapper)
    others = (other for other in made.alive() if other is not wrapper and internals.is_functional(other))
    if any(internals.storage_key(other) == key for other in others):
        raise RunEagerly(f"a tensor that was viewed gets new memory, at {user_line()}")


def replayed(real: Tensor, steps: Sequence[MetadataStep]) -> Tensor:
    """Take the steps on a tensor without memory that has the place of ``real`` in its storage."""
    offset = real.storage_offset()
    room = offset + 1 + sum((size - 1) * step for size, step in zip(real.shape, real.stride(), strict=True))
    room = max(room, real.untyped_storage().nbytes() // real.element_size())
    with internals.outside_of_trace(), torch.no_grad():
        below = torch.empty(max(room, 0), dtype=real.dtype, device="meta")
        tensor = below.as_strided(real.shape, real.stride(), offset)
        for step in steps:
            if step.method not in ("detach_", SET_TO_ITSELF):
                getattr(tensor, step.method)(*step.args, **dict(step.kwargs))
    return tensor


def _moved_back(tensor: Tensor, shape: torch.Size, func: Any, given: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the view of ``tensor`` that is as it was, with ``shape``, before it was moved by ``func``."""
    if func is Tensor.unsqueeze_:
        return tensor.squeeze(*given, **kwargs)
    if func is not Tensor.squeeze_:
        back: Tensor = getattr(tensor, func.__name__.removesuffix("_"))(*given, **kwargs)
        return back
    chosen: Any = dict(kwargs).get("dim", given[0] if given else tuple(range(len(shape))))
    dims = {d % len(shape) for d in (chosen if isinstance(chosen, tuple | list) else (chosen,))} if shape else ()
    for dim in sorted(dims):
        if shape[dim] == 1:
            tensor = tensor.unsqueeze(dim)
    return tensor


def _contiguous(size: tuple[int, ...]) -> tuple[int, ...]:
    with internals.outside_of_trace():
        return torch.empty(size, device="meta").stride()


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value


def _sizes(step: MetadataStep) -> tuple[int, ...]:
    """Return the sizes that ``resize_`` was asked for, as one argument or as many."""
    given: Any = dict(step.kwargs).get("size", step.args)
    return tuple(given[0]) if given and isinstance(given[0], tuple) else tuple(given)


def _is_dense(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` has each element from its first to its last once."""
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step != expected:
            return False
        expected *= size
    return True


def ends_its_storage(real: Tensor) -> bool:
    """Tell whether there is no memory behind ``real`` in its storage."""
    if not real.numel():
        return real.untyped_storage().nbytes() == 0
    return real.untyped_storage().nbytes() == (real.storage_offset() + real.numel()) * real.element_size()
