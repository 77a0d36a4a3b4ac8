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
from tests.engine_helpers import behind, compiled, leaf, refusing, same

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
    "storage": (lambda x: x.untyped_storage(), EscapeError),
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
    "bool": (lambda x: x if x[None] @ x[:, None] > 0 else -x, DataDependentError),
    "float": (lambda x: float(x[0]), DataDependentError),
    "int": (lambda x: int(x[0]), DataDependentError),
    "complex": (lambda x: complex(x[0]), DataDependentError),
    "index": (lambda x: [1, 2, 3][x[0].long()], DataDependentError),
    "range": (lambda x: list(range(x[0].long())), DataDependentError),
    "is_nonzero": (lambda x: torch.is_nonzero(x[0]), DataDependentError),
    "in": (lambda x: 2.0 in x[None] @ x[:, None], DataDependentError),
    "equal": (lambda x: torch.equal(x[None] @ x[:, None], x.sum()), DataDependentError),
    "allclose": (lambda x: torch.allclose(x, x * 1), DataDependentError),
    "repr": (repr, DataDependentError),
    "str": (str, DataDependentError),
    "format": (lambda x: f"{x[0]:.2f}", DataDependentError),
    "rows": (lambda x: list(x[x > 0]), DataDependentError),
    "grad =": (_assign_grad, EscapeError),
    "swap_tensors": (_swap, EscapeError),
    "class =": (_change_class, LeakedTensorError),
    "backward": (lambda x: (x * 1).sum().backward(), EscapeError),
}  # fmt: skip


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    ("kind", "of"),
    [*((kind, "argument") for kind in LOOKS), *((kind, "intermediate") for kind in LOOKS if kind != "class =")],
)
def test_looking_behind_a_tensor(kind, of, grad):
    """Reading a traced tensor's memory or values is refused with the user's line at every call.

    The write that precedes it in the program does not happen.
    """
    look, error = LOOKS[kind]
    x = leaf(3) * 1 if grad else torch.ones(3)
    values, version = x.tolist(), x._version
    g = compiled(inplace_then(look if of == "argument" else lambda x: look(x * 2)))
    for _ in range(2):
        with refusing(error) as caught:
            g(x)
        if error is not LeakedTensorError:
            assert caught.value.line is not None
            assert caught.value.line.file == __file__
        assert (x.tolist(), x._version, type(x)) == (values, version, torch.Tensor)
    assert g.entries == ()


def test_a_training_step_is_told_what_runs_it():
    """A backward names what runs a whole training step; `data_ptr`, which nothing compiles, does not."""

    def step(x):
        return (x * 1).sum().backward()

    with refusing(EscapeError, match=r'to run a whole training step, use frontend="dynamo" or torch\.compile'):
        compiled(step)(leaf(3))
    compiled(step, frontend="dynamo")(leaf(3))
    with refusing(EscapeError) as caught:
        compiled(lambda x: x.data_ptr())(torch.ones(3))
    assert "whole training step" not in str(caught.value)


def _read_gradient(layer, q):
    def f(x):
        return x + q.grad + layer.weight.grad[0]

    def later(n):
        q.grad = torch.full((3,), float(n))

    return f, later


def _gradient_or_none(layer, q):
    def f(x):
        return x if q.grad is None else x + q.grad

    def later(n):
        q.grad = None if n else torch.ones(3)

    return f, later


def _assign_gradient(layer, q):
    def f(x):
        q.grad = x * 2
        return x + 1

    return f, lambda n: q.grad.add_(1)


def _zero_gradients(layer, q):
    def f(x):
        layer.zero_grad()
        return layer(x)

    return f, lambda n: layer(torch.ones(3)).sum().backward()


def _update(layer, q):
    def f(x):
        with torch.no_grad():
            for p in layer.parameters():
                p -= 0.1 * p.grad
                p.grad.zero_()
        return layer(x)

    return f, lambda n: layer(torch.ones(3)).sum().backward()


def _state_of_a_parameter(layer, q):
    state = {q: torch.ones(3), ("a pair", layer.weight): 2.0}

    def f(x):
        return x * state[q] * state["a pair", layer.weight]

    return f, lambda n: state.update({q: torch.full((3,), float(n))})


def _state_of_an_optimizer(layer, q):
    optimizer = torch.optim.SGD([q], lr=0.1, momentum=0.9)
    optimizer.step()

    def f(x):
        return x * optimizer.state[q]["momentum_buffer"] * optimizer.state.get(layer.weight, 2)

    return f, lambda n: optimizer.step()


def _state_of_a_module(layer, q):
    layer.scales = {layer.weight: 2.0}
    layer.forward = lambda x: layer.weight[0] * x * layer.scales[layer.weight] * layer.scales.get(layer.bias, 1)
    return layer, lambda n: layer.scales.update({layer.bias: float(n)})


def _set_of_parameters(layer, q):
    frozen = {q}

    def f(x):
        return x * 2 if q in frozen else x * q

    return f, lambda n: frozen.add(layer.weight) if n else frozen.symmetric_difference_update({q, layer.bias})


def _numbers_of_parameters(layer, q):
    frozen = {id(q)}

    def f(x):
        return x * 2 if id(q) in frozen else x * q

    return f, lambda n: frozen.clear()


OF_CALLERS_TENSORS = [
    _read_gradient, _gradient_or_none, _assign_gradient, _zero_gradients, _update, _state_of_a_parameter,
    _state_of_an_optimizer, _state_of_a_module, _set_of_parameters, _numbers_of_parameters,
]  # fmt: skip


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("make", OF_CALLERS_TENSORS)
def test_callers_tensors(make, frontend):
    """Dynamo captures what reads gradients of the caller's tensors, or looks tensors up by their identity."""
    found = []
    for compiles in (True, False):
        torch.manual_seed(0)
        layer, q = torch.nn.Linear(3, 1), torch.nn.Parameter(torch.arange(3.0))
        q.grad, layer.weight.grad, layer.bias.grad = torch.ones(3), torch.ones(1, 3), torch.ones(1)
        f, later = make(layer, q)
        call = compiled(f, frontend=frontend) if compiles else f
        with warnings.catch_warnings(record=True) as notices:
            warnings.simplefilter("always", RuntimeWarning)
            for n in range(3):
                out = call(torch.full((3,), n + 1.0))
                found.append([t.tolist() for t in (out, q, layer.weight, q.grad, layer.weight.grad) if t is not None])
                later(n)
        if compiles and frontend == "direct":
            assert behind(call).calls.by_dynamo == 3
            assert len([n for n in notices if "is captured by Dynamo" in str(n.message)]) == 1
    assert found[:3] == found[3:]


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
    """Behind Dynamo, results, writes and errors are eager's: Dynamo breaks the graph, or our backend runs it eagerly.

    Where they differ from eager's, Dynamo alone differs in the same way.
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
    "item": (lambda x: x * WEIGHT.sum().item(), None),
    "tolist": (lambda x: x * WEIGHT.tolist()[0], DataDependentError),
    "numpy": (lambda x: x * float(WEIGHT.numpy()[0]), EscapeError),
    "data_ptr": (lambda x: (x * 2, WEIGHT.data_ptr()), EscapeError),
    "repr": (lambda x: (x * 2, repr(WEIGHT)), DataDependentError),
    "_version": (lambda x: (x * 2, WEIGHT._version), EscapeError),
    "grad": (lambda x: x * 2 if PARAMETER.grad is None else x, EscapeError),
    "data =": (_set_data, None),
    "grad =": (_set_grad, EscapeError),
    "requires_grad_": (_flag, None),
    "requires_grad =": (_flag_by_assignment, None),
    "hook": (_hook, RefusedError),
    "swap": (_swap_captured, EscapeError),
    "backward": (_backward_captured, EscapeError),
}  # fmt: skip


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("kind", CAPTURED)
def test_captured_tensors(kind, grad, monkeypatch):
    """Captured tensors give eager's results, compiled or eagerly, or the call is refused and changes no tensor."""
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
    """A trace answers reads of shapes, strides, flags, identities, and `.data` as a value."""
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
    for look, error in (LOOKS["numpy"], LOOKS["bool"], LOOKS["swap_tensors"]):
        with refusing(error):
            compiled(inplace_then(look))(torch.ones(3))
    assert len(traced_tensors()) == before


def caught_branch(x):
    """Branch on a value inside a block that catches all exceptions."""
    try:
        return x * 2 if (x[None] @ x[:, None]).isfinite() else x
    except Exception:  # noqa: BLE001  # as users write it
        return x * 3


def caught_size(x):
    """Take out by a mask, and loop over the rows."""
    with contextlib.suppress(Exception):
        return sum(x[x > 0]) * x
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


def _apply(x):
    return x.apply_(lambda value: value + 1)


def _apply_between(x):
    return (x * 2).apply_(lambda value: value + 1) * x


def _map(x):
    return x.map_(x * 2, lambda value, other: value + other)


def _map2(x):
    return x.map2_(x * 2, x * 3, lambda value, second, third: value + second * third)


@pytest.mark.parametrize("function", [_apply, _apply_between, _map, _map2], ids=lambda f: f.__name__)
def test_elementwise_python_functions_run_eagerly(function):
    """`apply_`, `map_` and `map2_` run eagerly, because a traced tensor has no memory for them to read."""
    with pytest.warns(
        RuntimeWarning, match=r"runs eagerly: `\w+_` calls a Python function for each element .*test_escapes"
    ):
        same(function, torch.arange(3.0), eagerly=True)


def test_elementwise_python_functions_of_a_gradient_run_eagerly():
    """`apply_` in the backward of a custom Function, which no function mode sees, runs eagerly too."""

    class Tripled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient.clone().apply_(lambda value: value * 3)

    with pytest.warns(RuntimeWarning, match="`apply_` calls a Python function"):
        same(Tripled.apply, leaf(3), eagerly=True)
