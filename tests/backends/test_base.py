"""Backends: which values resolve to a backend, and the boxed convention."""

from __future__ import annotations

import pytest
import torch

from aotlab.backends import CallableBackend, EagerBackend, InductorBackend, boxed, resolve
from aotlab.errors import UsageError
from tests.engine_helpers import leaf, record, traced


def test_resolve():
    """Names, backends, compilers; anything else is a usage error that names the choices."""
    assert isinstance(resolve("eager"), EagerBackend)
    assert isinstance(resolve("inductor"), InductorBackend)
    mine = EagerBackend()
    assert resolve(mine) is mine
    assert isinstance(resolve(lambda gm, i: gm), CallableBackend)
    for wrong in ("aot_eager", None, 3):
        with pytest.raises(UsageError, match="inductor"):
            resolve(wrong)


def test_callable_backend_is_named_after_its_compiler():
    """The report's word for it."""

    def my_compiler(gm, inputs):
        return gm

    assert resolve(my_compiler).name == "my_compiler"


def test_boxed():
    """A function is boxed once; a GraphModule by its forward; the mark is kept."""
    f = boxed(lambda a, b: (a + b,))
    assert f([1, 2]) == (3,)
    assert f._boxed_call is True
    assert boxed(f) is f
    module = record(traced(lambda x: x.sin(), torch.ones(2)), "trace").module
    assert torch.equal(boxed(module)([torch.ones(2)])[0], torch.ones(2).sin())


def test_eager_backend_runs_the_graph():
    """Op by op, with eager's numbers."""
    f = traced(lambda x: (x @ x).softmax(0), leaf(3, 3))
    x = leaf(3, 3, seed=4)
    assert torch.equal(f(x), (x @ x).softmax(0))
