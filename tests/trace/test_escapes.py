"""Ways around the trace: each is right, or refused before anything happened."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import warnings

import numpy as np
import pytest
import torch

import aotlab
from aotlab import _torch as internals
from aotlab import config
from aotlab.errors import (
    DataDependentError,
    EscapeError,
    LeakedTensorError,
    RefusedError,
)
from tests.engine_helpers import compiled, leaf, refusing, same

WEIGHT = torch.ones(3)
PARAMETER = torch.ones(3, requires_grad=True)


def inplace_then(look):
    """Write the input, then look around the trace: the write must not have happened when that is refused."""

    def f(x):
        x.mul_(2)
        return look(x)

    return f


def _swap(x):
    torch.utils.swap_tensors(x, torch.ones(3))


def _assign_data_of_intermediate(x):
    y = x * 2
    y.data = x
    return y


def _assign_grad(x):
    x.grad = torch.ones(3)


def _change_class(x):
    x.__class__ = torch.nn.Parameter


def _numpy_out(x):
    np.add(np.ones(3, dtype=np.float32), 1, out=x.numpy())
    return x


#: Looking at the values or the memory of an argument.
LOOKS = {
    "numpy": (lambda x: x.numpy(), EscapeError),
    "numpy(force)": (lambda x: x.numpy(force=True), EscapeError),
    "detach().numpy()": (lambda x: x.detach().numpy(), EscapeError),
    "asarray": (lambda x: np.asarray(x), EscapeError),
    "numpy function": (lambda x: np.sin(x.detach()), EscapeError),
    "numpy out": (_numpy_out, EscapeError),
    "data_ptr": (lambda x: x.data_ptr(), EscapeError),
    "data_ptr of a view": (lambda x: x[1:].data_ptr(), EscapeError),
    "storage pointer": (lambda x: x.untyped_storage().data_ptr(), EscapeError),
    "typed storage": (lambda x: x.storage(), EscapeError),
    "from_dlpack": (lambda x: torch.from_dlpack(x.detach()), EscapeError),
    "numpy from_dlpack": (lambda x: np.from_dlpack(x.detach()), EscapeError),
    "to_dlpack": (lambda x: torch.utils.dlpack.to_dlpack(x), EscapeError),
    "share_memory_": (lambda x: x.share_memory_(), EscapeError),
    "is_shared": (lambda x: x.is_shared(), EscapeError),
    "is_pinned": (lambda x: x.is_pinned(), EscapeError),
    "deepcopy": (lambda x: copy.deepcopy(x.detach()), EscapeError),
    "pickle": (lambda x: pickle.dumps(x.detach()), EscapeError),
    "_version": (lambda x: x._version, EscapeError),
    "grad": (lambda x: x.detach().grad, EscapeError),
    "tolist": (lambda x: x.tolist(), DataDependentError),
    "item": (lambda x: x[0].item(), DataDependentError),
    "bool": (lambda x: x if x[0] > 0 else -x, DataDependentError),
    "float": (lambda x: float(x[0]), DataDependentError),
    "int": (lambda x: int(x[0]), DataDependentError),
    "complex": (lambda x: complex(x[0]), DataDependentError),
    "index": (lambda x: [1, 2, 3][x[0].long()], DataDependentError),
    "range": (lambda x: list(range(x[0].long())), DataDependentError),
    "is_nonzero": (lambda x: torch.is_nonzero(x[0]), DataDependentError),
    "in": (lambda x: 2.0 in x, DataDependentError),
    "equal": (lambda x: torch.equal(x, x * 1), DataDependentError),
    "repr": (repr, DataDependentError),
    "format": (lambda x: f"{x[0]:.2f}", DataDependentError),
    "nonzero": (lambda x: x.nonzero(), DataDependentError),
    "mask": (lambda x: x[x > 0], DataDependentError),
    "grad =": (_assign_grad, EscapeError),
    "swap_tensors": (_swap, EscapeError),
    "class =": (_change_class, LeakedTensorError),
    "backward": (lambda x: (x * 1).sum().backward(), EscapeError),
}  # fmt: skip


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("kind", LOOKS)
def test_looking_behind_an_argument(kind, grad):
    """It is refused with the user's line, at each call anew, and the write before it did not happen."""
    look, error = LOOKS[kind]
    x = leaf(3) * 1 if grad else torch.ones(3)
    values, version = x.tolist(), x._version
    g = compiled(inplace_then(look))
    for _ in range(2):
        with refusing(error) as caught:
            g(x)
        if error is not LeakedTensorError:
            assert caught.value.line is not None
            assert caught.value.line.file == __file__
        assert (x.tolist(), x._version, type(x)) == (values, version, torch.Tensor)
    assert g.entries == ()


STEPS = {
    "backward": lambda model, x: (x * 1).sum().backward(),
    "grad": lambda model, x: model.weight.grad,
    "zero_grad": lambda model, x: model.zero_grad() or model(x),
}


@pytest.mark.parametrize("kind", STEPS)
def test_a_training_step_is_told_what_runs_it(kind):
    """What belongs to a training step names what runs it whole; `data_ptr`, which nothing compiles, does not."""
    model = torch.nn.Linear(3, 1)
    model.weight.grad = torch.zeros(1, 3)

    def step(x):
        return STEPS[kind](model, x)

    with refusing(EscapeError, match=r'frontend="dynamo", or torch\.compile.* whole training step'):
        compiled(step)(leaf(3))
    compiled(step, frontend="dynamo")(leaf(3))
    with refusing(EscapeError) as caught:
        compiled(lambda x: x.data_ptr())(torch.ones(3))
    assert "whole training step" not in str(caught.value)


def _shown(value):
    """Describe what came back, but for addresses."""
    if isinstance(value, list):
        return [_shown(each) for each in value]
    if isinstance(value, torch.Tensor):
        return "tensor", value.tolist(), value.requires_grad
    if isinstance(value, np.ndarray):
        return "array", value.tolist()
    plain = value is None or isinstance(value, (bool, float, complex)) or value in (0, 1, 2, 3)
    return value if plain else type(value).__name__


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("kind", LOOKS)
def test_looking_behind_dynamo(kind, grad):
    """Dynamo breaks the graph, or our backend runs it eagerly: what comes back, what is written and raised is eager's.

    Where it is not, Dynamo alone does the same.
    """

    def outcomes(function):
        torch._dynamo.reset()
        found = []
        for _ in range(2):
            x = leaf(3) * 1 if grad else torch.full((3,), 2.0)
            try:
                out = _shown(function(x))
            except Exception as error:  # noqa: BLE001  # eager's, or Dynamo's
                out = type(error).__name__
            found.append((out, x.tolist(), type(x), x.requires_grad, x.is_leaf and x.grad is not None))
        return found

    program = inplace_then(LOOKS[kind][0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = outcomes(compiled(program, frontend="dynamo"))
        if found != outcomes(program):
            assert found == outcomes(torch.compile(program, backend="eager"))


def _write(x):
    WEIGHT.add_(1)
    return x * 2


def _write_view(x):
    WEIGHT[1:].mul_(2)
    return x * 2


def _write_into(x):
    torch.mul(x.detach(), 2, out=WEIGHT)


def _write_data(x):
    WEIGHT.data.add_(1)


def _write_numpy(x):
    WEIGHT.numpy()[0] = 5
    return x * 2


def _set_data(x):
    WEIGHT.data = x * 2


def _set_grad(x):
    PARAMETER.grad = x.detach() * 2


def _flag(x):
    WEIGHT.requires_grad_()
    return x * 2


def _flag_by_assignment(x):
    WEIGHT.requires_grad = True
    return x * 2


def _hook(x):
    PARAMETER.register_hook(lambda g: g * x)
    return x * 2


def _swap_captured(x):
    torch.utils.swap_tensors(WEIGHT, torch.zeros(3))
    return x * 2


def _backward_captured(x):
    PARAMETER.sum().backward()
    return x * 2


#: What a function does with a tensor that is no argument, and the refusal if that cannot be compiled.
CAPTURED = {
    "read": (lambda x: x * WEIGHT, None),
    "read view": (lambda x: x * WEIGHT[0], None),
    "write": (_write, None),
    "write view": (_write_view, None),
    "out=": (_write_into, None),
    ".data write": (_write_data, None),
    "numpy write": (_write_numpy, EscapeError),
    "item": (lambda x: x * WEIGHT.sum().item(), DataDependentError),
    "tolist": (lambda x: x * WEIGHT.tolist()[0], DataDependentError),
    "numpy": (lambda x: x * float(WEIGHT.numpy()[0]), EscapeError),
    "data_ptr": (lambda x: (x * 2, WEIGHT.data_ptr()), EscapeError),
    "repr": (lambda x: (x * 2, repr(WEIGHT)), DataDependentError),
    "_version": (lambda x: (x * 2, WEIGHT._version), EscapeError),
    "grad": (lambda x: x * 2 if PARAMETER.grad is None else x, EscapeError),
    "data =": (_set_data, EscapeError),
    "grad =": (_set_grad, EscapeError),
    "requires_grad_": (_flag, RefusedError),
    "requires_grad =": (_flag_by_assignment, RefusedError),
    "hook": (_hook, RefusedError),
    "swap": (_swap_captured, EscapeError),
    "backward": (_backward_captured, EscapeError),
}  # fmt: skip


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("kind", CAPTURED)
def test_captured_tensors(kind, grad, monkeypatch):
    """It does what eager does, by an entry or by eager; or is refused, and no tensor is touched."""
    program, error = CAPTURED[kind]

    def outcomes(function):
        monkeypatch.setitem(globals(), "WEIGHT", torch.ones(3))
        monkeypatch.setitem(globals(), "PARAMETER", torch.ones(3, requires_grad=True))
        found = []
        for seed in range(3):
            x = leaf(3, seed=seed) * 1 if grad else torch.ones(3)
            out = function(x)
            first = out[0] if isinstance(out, tuple) else out
            if first is not None and first.requires_grad and grad:
                first.sum().backward()
            hooks = bool(PARAMETER._backward_hooks)
            tensors = [t.tolist() for t in (x, WEIGHT, PARAMETER, first, PARAMETER.grad) if t is not None]
            found.append((tensors, WEIGHT._version, WEIGHT.requires_grad, hooks))
        return found

    for each in (program, inplace_then(program)):
        function = compiled(each)
        with config.patch(fallback="eager"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert outcomes(function) == outcomes(each)
        assert (function.calls.eager == 0) is (error is None)
        if error is not None:
            monkeypatch.setitem(globals(), "WEIGHT", torch.ones(3))
            before = (WEIGHT._version, WEIGHT.requires_grad, WEIGHT.tolist(), PARAMETER.tolist())
            with refusing(error) as caught:
                compiled(each)(torch.ones(3))
            assert caught.value.suggestion
            assert (WEIGHT._version, WEIGHT.requires_grad, WEIGHT.tolist(), PARAMETER.tolist()) == before


@pytest.mark.parametrize("kind", ["read", "write", "out=", "item", "numpy", "tolist"])
def test_captured_tensors_behind_dynamo(kind):
    """Dynamo makes inputs of them: values and writes are eager's, call after call."""
    torch._dynamo.reset()
    program = CAPTURED[kind][0]
    results = []
    for function in (program, compiled(program, frontend="dynamo")):
        WEIGHT.data.fill_(1.0)
        outs = []
        for _ in range(2):
            out = function(torch.full((3,), 2.0))
            outs.append((None if out is None else out.tolist(), WEIGHT.tolist()))
        results.append(outs)
    WEIGHT.data.fill_(1.0)
    assert results[1] == results[0]


class Holder:
    """An object that outlives the call."""

    kept = None


KEPT: list = []
HOLDER = Holder()


def _keeps(x):
    y = x * 2
    KEPT.append(y)
    HOLDER.kept = y + 1
    return y.sin()


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_what_a_function_keeps_behind_dynamo(grad):
    """Dynamo hands the caller's objects what our graph returns: real tensors, with values and gradients of eager."""
    results = []
    for function in (_keeps, compiled(_keeps, frontend="dynamo")):
        for seed in range(2):
            KEPT.clear()
            x = leaf(3, seed=seed) if grad else leaf(3, seed=seed).detach()
            kept = [function(x), *KEPT, HOLDER.kept]
            assert {type(each) for each in kept} == {torch.Tensor}
            if grad:
                torch.autograd.backward(kept, [torch.arange(1.0, 4.0)] * 3)
            results.append(([each.tolist() for each in kept], None if x.grad is None else x.grad.tolist()))
    KEPT.clear()
    HOLDER.kept = None
    assert results[2:] == results[:2]


def test_what_may_be_asked():
    """What a trace can answer is answered: shapes, strides, flags, identities, `.data` as a value."""
    same(lambda x: (x.shape, x.stride(), x.is_contiguous(), x.dtype, x.requires_grad, x.is_leaf, x * 1), leaf(3))
    same(lambda x: x.data * 2, leaf(3))
    same(lambda x: (x is x.view_as(x), len(x), x.element_size(), x.nelement(), x * 1), torch.ones(3))
    same(lambda x: (x * 2).data.add_(1), torch.ones(3))
    same(lambda x: x.data.mul_(2), torch.ones(3))
    same(lambda x: x.storage_offset() + x, torch.ones(4)[1:])
    same(lambda x: hash(x) == hash(x) and x * 2, torch.ones(3))


def traced_tensors():
    """List the traced tensors that are alive."""
    gc.collect()
    return [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and internals.is_functional(t)]


def test_refused_traces_keep_nothing_alive():
    """After a refusal, nothing of the trace can be reached from anywhere."""
    before = len(traced_tensors())
    for look, error in (LOOKS["numpy"], LOOKS["bool"], LOOKS["swap_tensors"], CAPTURED["data ="]):
        with refusing(error):
            compiled(inplace_then(look))(torch.ones(3))
    assert len(traced_tensors()) == before


def caught_branch(x):
    """Branch on a value in a block that catches what goes wrong."""
    try:
        return x * 2 if x.isfinite().all() else x
    except Exception:  # noqa: BLE001  # as users write it
        return x * 3


def caught_size(x):
    """Take out by a mask."""
    with contextlib.suppress(Exception):
        return x[x > 0].sum() * x
    return x * 3


def caught_number(x):
    """Ask for a number."""
    try:
        k = int(x.max())
    except:  # noqa: E722  # as users write it
        k = 0
    return x * k


@pytest.mark.parametrize("function", [caught_branch, caught_size, caught_number])
def test_a_refusal_that_the_program_catches(function):
    """It does not go on as if eager had raised that."""
    f = aotlab.compile(function, backend="eager")
    with pytest.warns(RuntimeWarning, match="values? of"):
        assert f(torch.ones(2)).tolist() == function(torch.ones(2)).tolist()
    with pytest.raises(RefusedError):
        aotlab.compile(function, backend="eager", fullgraph=True)(torch.ones(2))
