"""What torch's op database knows of refused calls: where eager raises, ours does, though nobody uses the result.

Fakes have no values and do not know which kernels there are; see `aotlab.recorder.raising`.
"""

from __future__ import annotations

import pytest
import torch

import aotlab
from aotlab import torch_internals as internals
from aotlab.errors import RefusedError
from tests.engine_helpers import compiled, leaf, same

#: Every so many of the ops are tried; all of them take a minute.
_STEP = 12
_flatten, _unflatten = torch.utils._pytree.tree_flatten, torch.utils._pytree.tree_unflatten


def _raised(function, arguments):
    try:
        function(*arguments)
    except Exception as error:  # noqa: BLE001  # whatever the op raises
        return error
    return None


def _compare(op, flat, spec, convert):
    """Return None if both sides do the same, else what they do."""
    where = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor)]

    def unused(*tensors):
        values = list(flat)
        for i, tensor in zip(where, tensors, strict=True):
            values[i] = tensor
        args, kwargs = _unflatten(values, spec)
        op(*args, **kwargs)
        return torch.ones(1)

    def fresh():
        return [convert(i, flat[i].detach().clone()) for i in where]

    expected = _raised(unused, fresh())
    if expected is None:
        return None
    actual = _raised(aotlab.compile(unused, backend="eager"), fresh())
    if isinstance(actual, RefusedError) or (type(actual) is type(expected) and str(actual) == str(expected)):
        return None
    return f"{op.name}: {actual!r}, eager {expected!r}"


@pytest.mark.filterwarnings("ignore")
def test_error_inputs():
    """The calls that the database gives as erroneous."""
    found, tried = [], 0
    for op in [op for op in internals.op_database() if op.error_inputs_func is not None][::_STEP]:
        for case in op.error_inputs("cpu"):
            sample = case.sample_input
            flat, spec = _flatten(([sample.input, *sample.args], dict(sample.kwargs)))
            tensors = [value for value in flat if isinstance(value, torch.Tensor)]
            if all(type(t) is torch.Tensor and t.device.type == "cpu" and t.layout is torch.strided for t in tensors):
                tried += 1
                found.append(_compare(op, flat, spec, lambda _, tensor: tensor))
    assert [text for text in found if text] == []
    assert tried > 50


@pytest.mark.filterwarnings("ignore")
def test_operands_of_other_dtypes():
    """One operand of each op gets another dtype."""
    found, tried = [], 0
    for op in list(internals.op_database())[::_STEP]:
        if torch.float32 not in op.supported_dtypes("cpu"):
            continue
        with internals.samples_do_not_seed():
            samples = [s for s in op.sample_inputs("cpu", torch.float32) if isinstance(s.input, torch.Tensor)][:1]
        for sample in samples:
            flat, spec = _flatten(([sample.input, *sample.args], dict(sample.kwargs)))
            where = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor)]
            for changed in where if len(where) > 1 else ():
                for dtype in (torch.int64, torch.bool, torch.complex64):
                    tried += 1
                    found.append(_compare(op, flat, spec, lambda i, t, c=changed, d=dtype: t.to(d) if i == c else t))
    assert [text for text in found if text] == []
    assert tried > 100


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_unused_results_that_raise(grad):
    """A product of two dtypes, and an index out of range: eager's error, in a training graph as well."""

    def product(a, mask):
        _ = a @ mask
        return a + 1

    def index(a, mask):
        v = a.detach() * 2
        v.index_fill_(0, torch.tensor([5]), 2)
        return a + 1

    a = leaf(2, 2) if grad else torch.ones(2, 2)
    for function, kind in ((product, RuntimeError), (index, IndexError)):
        messages = []
        for call in (function, compiled(function)):
            with pytest.raises(kind) as caught:
                call(a, torch.ones(2, 2, dtype=torch.bool))
            messages.append(str(caught.value))
        assert messages[0] == messages[1]
    same(lambda a, b: (a @ b, a + 1)[1], a, torch.ones(2, 2))
