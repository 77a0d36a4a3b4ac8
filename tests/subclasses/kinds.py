"""Tensor subclasses for the tests, and helpers that compare compiled calls with eager ones."""

from __future__ import annotations

from typing import Any

import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

import aotlab

aten = torch.ops.aten


class Quantized(torch.Tensor):
    """An int8 matrix with one scale per row and with metadata. Most ops compute with the dequantized values."""

    @staticmethod
    def __new__(cls, data, scale, bits):
        """Make the wrapper."""
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)

    def __init__(self, data, scale, bits):
        self.data_, self.scale, self.bits = data, scale, bits

    def __tensor_flatten__(self):
        """Return the names of the parts, and the metadata."""
        return ["data_", "scale"], {"bits": self.bits}

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        """Put it together."""
        return cls(inner["data_"], inner["scale"], context["bits"])

    @classmethod
    def of(cls, values, bits=8):
        """Quantize."""
        scale = values.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        return cls((values / scale).round().to(torch.int8), scale, bits)

    def values(self):
        """Return the dequantized values."""
        return self.data_.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        """Compute."""
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            it = args[0]
            return return_and_correct_aliasing(
                func, args, kwargs, cls(func(it.data_, **kwargs), func(it.scale, **kwargs), it.bits)
            )
        if func in (aten.add_.Tensor, aten.sub_.Tensor):
            it = args[0]
            plain = aten.add.Tensor if func is aten.add_.Tensor else aten.sub.Tensor
            new = cls.of(plain(it.values(), args[1], **kwargs), it.bits)
            it.data_.copy_(new.data_)
            it.scale.copy_(new.scale)
            return it
        args, kwargs = pytree.tree_map_only(cls, cls.values, (args, kwargs))
        return func(*args, **kwargs)


class Tagged(torch.Tensor):
    """A float tensor with a text; results are plain."""

    @staticmethod
    def __new__(cls, elem, tag):
        """Make the wrapper."""
        return torch.Tensor._make_wrapper_subclass(
            cls, elem.shape, strides=elem.stride(), dtype=elem.dtype, device=elem.device
        )

    def __init__(self, elem, tag):
        self.elem, self.tag = elem, tag

    def __tensor_flatten__(self):
        """Return the names of the parts, and the metadata."""
        return ["elem"], self.tag

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        """Put it together."""
        return Tagged(inner["elem"], context)

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        """Compute."""
        kwargs = kwargs or {}
        if func is aten.detach.default:
            return return_and_correct_aliasing(func, args, kwargs, cls(func(args[0].elem), args[0].tag))
        args, kwargs = pytree.tree_map_only(cls, lambda it: it.elem, (args, kwargs))
        return func(*args, **kwargs)


def two(i=0, shape=(3, 4)):
    """Make a `TwoTensor` with values that depend on ``i``."""
    return TwoTensor(plain(2 * i, shape), plain(2 * i + 1, shape))


def plain(i=0, shape=(3, 4)):
    """Make a tensor with values that depend on ``i``."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(i))


def leaf(tensor):
    """Let it require grad."""
    return tensor.requires_grad_()


def parts(tensor):
    """Describe a tensor: types and contexts, and the plain tensors."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return (type(tensor), None), [tensor]
    names, context = tensor.__tensor_flatten__()
    inner = [parts(each) for name in names if isinstance(each := getattr(tensor, name), torch.Tensor)]
    return (type(tensor), context, [kind for kind, _ in inner]), [each for _, found in inner for each in found]


def same(one: Any, other: Any, *, versions: bool = True) -> bool:
    """Tell whether two values are the same bit for bit, in wrappers and histories too."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        (kind, mine), (wanted, theirs) = parts(one), parts(other)
        layout = [
            (t.shape, t.stride(), t.dtype, t.requires_grad, t.is_leaf, versions and not t.is_inference() and t._version)
            for t in (one, other)
        ]
        return kind == wanted and layout[0] == layout[1] and all(map(torch.equal, mine, theirs))
    if isinstance(one, list | tuple):
        alike = type(one) is type(other) and len(one) == len(other)
        return alike and all(same(*pair, versions=versions) for pair in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key], versions=versions) for key in one)
    return type(one) is type(other) and one == other


def tensors(value):
    """List the tensors in a nest."""
    return [each for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]


def aliases(results, arguments):
    """Say which tensors share memory, and which are views by autograd's account."""
    memory = [{part.untyped_storage()._cdata for part in parts(t)[1]} for t in (*results, *arguments)]
    shares = [[not a.isdisjoint(b) for b in memory] for a in memory]
    found = [(*results, *arguments)]
    return shares, [[t._base is other for other in found[0]] for t in results]


def beside_eager(function, make, *, steps=2, entries=1, backend="eager", close=False, **settings):
    """Call a function compiled and as it is, with arguments that ``make`` makes for each of some steps.

    Compare results, arguments, memory and the gradients of the arguments that are leaves, and count compiled entries.
    """
    compiled = aotlab.compile(function, backend=backend, **settings)
    for step in range(steps) if isinstance(steps, int) else steps:
        ours, theirs = (make(step) if make.__code__.co_argcount else make() for _ in range(2))
        result, expected = compiled(*ours), function(*theirs)
        assert close or same((result, list(ours)), (expected, list(theirs)))
        assert aliases(tensors(result), tensors(ours)) == aliases(tensors(expected), tensors(theirs))
        for found in (result, expected):
            loss = sum((n + 1) * each.sin().sum() for n, each in enumerate(tensors(found)) if each.requires_grad)
            if isinstance(loss, torch.Tensor):
                loss.backward()
        for mine, wanted in zip(tensors(ours), tensors(theirs), strict=True):
            assert close or not wanted.is_leaf or same(mine.grad, wanted.grad, versions=False)
    log = compiled.calls
    assert (log.eager, log.by_dynamo, len(log.per_entry)) == (0, 0, entries), log
    return compiled
