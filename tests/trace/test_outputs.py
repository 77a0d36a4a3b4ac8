"""Outputs of other kinds: Python values, containers, new tensors, their memory formats and metadata."""

from __future__ import annotations

from collections import namedtuple

import torch

from aotlab.errors import OutputError
from tests.engine_helpers import compiled, leaf, metadata, refusing, same, traced

Pair = namedtuple("Pair", ["left", "right"])


def test_python_values_and_containers():
    """Python values, None, nested containers and named tuples come back as they are."""

    def f(x):
        y = x * 2
        return {
            "a": [y, None, (1, "text", 2.5)],
            "b": Pair(left=y[0], right=torch.float32),
            "size": x.shape,
            "empty": [],
            "flag": True,
        }

    same(f, leaf(2, 3))
    out = compiled(f)(leaf(2, 3))
    assert isinstance(out["b"], Pair)
    assert isinstance(out["size"], torch.Size)


def test_nothing_is_returned():
    """A function that returns None, or no tensor."""
    same(lambda x: None, torch.randn(2))
    same(lambda x: 3, leaf(2))
    same(lambda: torch.ones(2))
    same(lambda: None)


def test_containers_are_new_at_every_call():
    """A list that the function returns is not the same list the next time."""
    f = compiled(lambda x: [x * 2, [1]])
    first, second = f(torch.ones(1)), f(torch.ones(1))
    first[1].append(2)
    assert second[1] == [1]
    assert f(torch.ones(1))[1] == [1]


def test_objects_are_refused_as_outputs():
    """An output that is neither a tensor, a plain value nor made of such is refused by name."""
    x = torch.ones(2)
    with refusing(OutputError, match=r"`out\[1\]` is a .*iterator"):
        compiled(lambda x: (x.add_(1), iter([x])))(x)
    assert torch.equal(x, torch.ones(2))


def test_outputs_requires_grad_metadata():
    """OutputAliasInfo knows requires_grad, spec and name of each output."""

    def f(x, y):
        return {"a": x * y, "b": (y * 2).detach()}

    info = metadata(traced(f, leaf(2), torch.randn(2))).output_info
    assert [o.name for o in info] == ["out['a']", "out['b']"]
    assert [o.requires_grad for o in info] == [True, False]
    assert [o.spec.shape for o in info] == [(2,), (2,)]


def test_memory_formats():
    """channels_last inputs and outputs keep their strides."""
    x = leaf(1, 2, 4, 4).detach().to(memory_format=torch.channels_last).requires_grad_()
    same(lambda x: torch.nn.functional.conv2d(x, torch.ones_like(x[:, :, :1, :1])), x)
    same(lambda x: x.contiguous(memory_format=torch.channels_last) * 2, leaf(2, 2, 4, 4))
    same(lambda x: (x * 2, x.clone(), torch.empty_like(x).zero_()), x)


def test_awkward_plain_results():
    """Plain values whose text does not give them back."""
    same(lambda x: (x, float("inf"), float("nan"), -0.0, 1e300, 1 + 2j), leaf(2))
    same(lambda x, key: {key: x * 2}, leaf(2), 'it\'s "q" \\ \n {0}')
    same(lambda x: (x.device, x.dtype, x.layout, x.ndim, range(3), slice(0, 2), b"x"), leaf(3))
