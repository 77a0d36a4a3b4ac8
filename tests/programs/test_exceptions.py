"""Errors: the function's own are eager's in every visible respect.

Ours name the place and a remedy, and are raised before anything has run.
"""

from __future__ import annotations

import traceback
import types
import warnings
from types import SimpleNamespace

import pytest
import torch

import aotlab
from aotlab import _torch as internals
from aotlab._torch import TorchDispatchMode
from aotlab.errors import (
    EscapeError,
    GraphInvariantError,
    OutputError,
    PythonValueError,
    SubclassError,
    UnsupportedTensorError,
    UsageError,
)
from tests.engine_helpers import compiled, global_torch_state, leaf, refusing


class CustomError(Exception):
    """An error with an additional attribute."""

    def __init__(self, text, *, code):
        super().__init__(text)
        self.code = code


def chained(x, log):
    """Mutate, then raise an error with a cause, a note and attributes."""
    x.add_(1)
    try:
        {}["missing"]
    except KeyError as cause:
        error = CustomError("bad", code=7)
        error.add_note("a note")
        raise error from cause


def in_context(x, log):
    """Raise while another error is handled."""
    x.mul_(3)
    try:
        raise ValueError("first")
    finally:
        raise LookupError("second", 2)


def in_torch(x, log):
    """Let torch raise."""
    x.mul_(2)
    return x @ torch.ones(7)


def exits(x, log):
    """Leave the interpreter."""
    x.add_(5)
    raise SystemExit(3)


def stops(x, log):
    """Raise StopIteration."""
    x.add_(5)
    raise StopIteration(x.shape)


def closes(x, log):
    """Raise GeneratorExit."""
    x.add_(5)
    raise GeneratorExit


def asserts(x, log):
    """Fail an assertion."""
    x.add_(5)
    if x.dim() != 3:  # pytest would rewrite an assertion
        raise AssertionError(f"{x.dim()} dimensions")


def group(x, log):
    """Raise several at once."""
    x.sub_(1)
    raise ExceptionGroup("many", [ValueError(1), CustomError("two", code=2)])


def recursion(x, log):
    """Call itself for ever."""
    return recursion(x * 1, log)


def deep_line(x, log):
    """Raise in a helper, two frames down."""

    def helper(y):
        return torch.cat([y, y.reshape(1, -1)])

    x.add_(1)
    return helper(x)


RAISES = [chained, in_context, in_torch, exits, stops, closes, asserts, group, deep_line]


def outcome(function, *args):
    """Call a function and describe the exception that it raised."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011  # what it is, is compared
        function(*args)
    error = caught.value
    frames = [(f.name, f.line) for f in traceback.extract_tb(error.__traceback__) if f.filename == __file__]
    return {
        "type": type(error),
        "text": str(error),
        "args": [str(argument) for argument in error.args],
        "code": getattr(error, "code", None),
        "notes": getattr(error, "__notes__", None),
        "cause": repr(error.__cause__),
        "context": repr(error.__context__),
        "frames": frames[1:],
    }


@pytest.mark.parametrize("frontend", ["direct", "module"])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("program", RAISES, ids=lambda f: f.__name__)
def test_the_function_s_own_errors(program, grad, frontend):
    """An exception's type, text, args, notes, cause, context and user frames, and earlier writes, are eager's."""

    class Wrapper(torch.nn.Module):
        def forward(self, *args):
            return program(*args)

    original = program if frontend == "direct" else Wrapper()
    make = leaf(3) * 1 if grad else leaf(3).detach()
    results = []
    before = global_torch_state()
    for function in (original, compiled(original)):
        for _ in range(2):
            x = make.clone()
            results.append((outcome(function, x, []), x.tolist()))
    assert global_torch_state() == before
    assert results[1:] == results[:1] * 3


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("program", [p for p in RAISES if p not in (in_context, group)], ids=lambda f: f.__name__)
def test_errors_behind_dynamo(program, grad):
    """An exception that the function raises behind Dynamo, and the writes before it, are eager's or Dynamo's own."""

    def outcomes(function):
        torch._dynamo.reset()
        found = []
        for _ in range(2):
            x = leaf(3) * 1 if grad else leaf(3).detach()
            error = outcome(function, x, [])
            found.append(([error[k] for k in ("type", "text", "code", "notes")], x.tolist()))
        return found

    found = outcomes(compiled(program, frontend="dynamo"))
    if found != outcomes(program):
        assert program in (in_torch, deep_line)  # Dynamo's fake tensors raise before anything is written
        assert found == outcomes(torch.compile(program, backend="eager"))


def test_endless_recursion():
    """Endless recursion raises Python's RecursionError, and the next call works."""
    g = compiled(recursion)
    with pytest.raises(RecursionError):
        g(torch.ones(1), [])
    assert compiled(lambda x: x * 2)(torch.ones(1)).item() == 2.0


def test_side_effects_happen_once():
    """A list that the function appended to before it raised has one entry a call, as in eager; none is traced."""
    log = []

    def f(x):
        log.append("called")
        log.append(x * 2)
        raise ValueError("no")

    g = compiled(f)
    for call in range(2):
        with pytest.raises(ValueError, match="no"):
            g(torch.ones(1))
        assert len(log) == 2 * (call + 1)
    assert log[1].item() == log[3].item() == 2.0


def test_side_effects_on_a_module_happen_once():
    """A side effect on a module's attribute happens once."""

    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = []
            self.weight = torch.nn.Parameter(torch.ones(2))

        def forward(self, x):
            self.calls.append(x * self.weight)
            raise ValueError("no")

    module = Counts()
    with pytest.raises(ValueError, match="no"):
        compiled(module)(torch.ones(2))
    assert len(module.calls) == 1
    assert module.calls[0].tolist() == [1.0, 1.0]


def test_interrupt_leaves_everything():
    """Ctrl-C during tracing restores the arguments, the modes and the functions of torch that the trace patches."""
    compiled(lambda x: x * 2)(torch.ones(2))  # the imports of the first call set filters and functions
    functions = [torch.manual_seed, torch.get_rng_state, torch.utils.dlpack.to_dlpack, torch._C._swap_tensor_impl]
    kernels = dict(torch.ops.aten.upsample_nearest2d.vec.py_kernels)
    kept = []

    def f(x):
        x.add_(1)
        kept.append(x)
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)
        torch.set_default_dtype(torch.float64)
        torch.autocast("cpu").__enter__()
        torch.set_autocast_cache_enabled(False)
        warnings.simplefilter("ignore")
        raise KeyboardInterrupt

    filters, nesting = list(warnings.filters), internals.autocast_nesting()
    for x in (torch.ones(2), leaf(2) * 1):
        before, values = global_torch_state(), x.tolist()
        with pytest.raises(KeyboardInterrupt):
            compiled(f)(x)
        assert global_torch_state() == before
        assert x.tolist() == values
    assert kept == []
    assert list(warnings.filters) == filters
    assert internals.autocast_nesting() == nesting
    assert functions == [
        torch.manual_seed, torch.get_rng_state, torch.utils.dlpack.to_dlpack, torch._C._swap_tensor_impl,
    ]  # fmt: skip
    assert dict(torch.ops.aten.upsample_nearest2d.vec.py_kernels) == kernels


def test_an_autocast_block_that_is_left_open_is_closed():
    """An autocast block that the function leaves open is closed, because its cached casts would become stale."""
    model = torch.nn.Linear(2, 2)

    def f(x):
        torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
        return x * 2

    with refusing(EscapeError, match="autocast"):
        aotlab.compile(f)(torch.ones(2))
    assert internals.autocast_nesting() == 0
    results = []
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            results.append(model(torch.ones(1, 2)).tolist())
            model.weight.mul_(2)
            model.bias.zero_()
    assert results[0] != results[1]


def test_interrupt_in_the_compiler():
    """An interrupt while a compiler runs leaves nothing compiled, and the next call compiles."""
    interrupted = []

    def compiler(gm, inputs):
        if not interrupted:
            interrupted.append(1)
            raise KeyboardInterrupt
        return gm

    g = aotlab.aot_function(lambda x: x.mul_(2), compiler)
    x, before = torch.ones(2), global_torch_state()
    with pytest.raises(KeyboardInterrupt):
        g(x)
    assert global_torch_state() == before
    assert x.tolist() == [1.0, 1.0]
    assert g(x).tolist() == [2.0, 2.0]


# --- the backward ------------------------------------------------------------------------------------------------


class RaisesInBackward(torch.autograd.Function):
    """Raises when differentiated."""

    @staticmethod
    def forward(ctx, x):
        """Double."""
        return x * 2

    @staticmethod
    def backward(ctx, g):
        """Raise."""
        error = CustomError("in the backward", code=3)
        error.add_note("noted")
        raise error


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
def test_errors_in_the_backward(frontend):
    """The forward runs; each backward raises the function's error with its state and line, and no gradient is added."""
    torch._dynamo.reset()
    results = []
    for function in (
        lambda x: RaisesInBackward.apply(x),
        compiled(lambda x: RaisesInBackward.apply(x), frontend=frontend),
    ):
        x = leaf(2)
        y = function(x)
        for _ in range(2):
            found = outcome(y.sum().backward, None, True)
            results.append((found, x.grad, y.tolist()))
    assert results[1:] == results[:1] * 3
    assert results[0][0]["notes"] == ["noted"]
    assert results[0][0]["frames"][-1][0] == "backward"


# --- warnings ----------------------------------------------------------------------------------------------------


class SlowWarning(UserWarning):
    """A user-defined warning category."""


def warns(x):
    """Warn from here, from the caller's line, and by an object."""
    warnings.warn("here", stacklevel=1)
    warnings.warn("there", SlowWarning, stacklevel=2)
    warnings.warn(SlowWarning("object"))  # noqa: B028  # the default level is meant
    return x * 2


def heard(function, x, action="always"):
    """Call twice from one line; list the warnings."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter(action)
        for _ in range(2):
            function(x)
    return [(str(w.message), w.category, w.filename, w.lineno) for w in found]


@pytest.mark.parametrize("action", ["always", "default", "once", "ignore", "module"])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_warnings(grad, action):
    """Each call warns from the same lines as in eager, and the caller's filters apply."""
    x = leaf(2) if grad else torch.ones(2)
    expected = heard(warns, x, action)
    g = compiled(warns)
    assert heard(g, x, action) == expected
    assert heard(g, x, action) == expected
    assert (g.calls.eager, len(g.entries)) == (0, 1)
    assert len(expected) == {"always": 6, "ignore": 0}.get(action, 3)


def test_warnings_as_errors():
    """A filter that turns a warning into an error raises at eager's point, after eager's writes."""

    def f(x):
        x.add_(1)
        warnings.warn("stop", stacklevel=1)
        return x.add_(1)

    g, x = compiled(f), torch.zeros(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        g(x)
    assert x.item() == 2.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in (1, 2):
            with pytest.raises(UserWarning, match="stop"):
                g(x)
            assert x.item() == 2.0 + call
        with pytest.raises(UserWarning, match="stop"):
            compiled(f)(x)
    assert x.item() == 5.0


def test_warnings_that_the_function_keeps():
    """A warning that the function records itself is not visible outside."""

    def f(x):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            warnings.warn("inside", stacklevel=1)
        return x * len(found)

    g = compiled(f)
    assert heard(g, torch.ones(1)) == []
    assert g(torch.ones(1)).item() == 1.0


# --- our errors --------------------------------------------------------------------------------------------------


class Scripted(torch.nn.Module):
    """A module to be scripted."""

    def forward(self, x):
        """Double."""
        return x * 2


def _script():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(Scripted())


STRANGE = {
    "sparse": (lambda: torch.ones(3).to_sparse(), UnsupportedTensorError),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), UnsupportedTensorError),
    "meta": (lambda: torch.ones(3, device="meta"), UnsupportedTensorError),
    "uninitialised": (torch.nn.UninitializedParameter, SubclassError),
    "generator": (lambda: (i for i in [1]), PythonValueError),
    "set of tensors": (lambda: {torch.ones(1)}, PythonValueError),
    "iterator": (lambda: iter([1]), PythonValueError),
    "storage": (lambda: torch.ones(3).untyped_storage(), PythonValueError),
    "random generator": (torch.Generator, PythonValueError),
    "script module": (_script, PythonValueError),
    "lock": (lambda: __import__("threading").Lock(), PythonValueError),
    "exception": (lambda: ValueError(torch.ones(1)), PythonValueError),
    "module": (lambda: torch.nn.Linear(2, 2), PythonValueError),
    "proxy": (lambda: torch.fx.Proxy(torch.fx.Graph().placeholder("x")), PythonValueError),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_strange_arguments(kind):
    """A strange argument, also deep in a container, is refused by name before anything runs."""
    make, error = STRANGE[kind]
    ran = SimpleNamespace(count=0)

    def f(x, held):
        ran.count += 1
        return x

    for held, name in ((make(), "`held`"), ({"k": [make()]}, "`held['k'][0]`")):
        with refusing(error) as caught:
            compiled(f)(torch.ones(2), held)
        assert name in str(caught.value)
    assert ran.count == 0


@pytest.mark.parametrize("make", [aotlab.aot_module, aotlab.compile], ids=["aot_module", "compile"])
def test_script_modules(make):
    """A ScriptModule is refused at once. A module that contains one runs eagerly with a notice."""
    arguments = (aotlab.nop,) if make is aotlab.aot_module else ()
    with pytest.raises(UsageError, match="is a ScriptModule"):
        make(_script(), *arguments)

    class Holds(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = _script()

        def forward(self, x):
            return self.inner(x) + 1

    g = make(Holds(), *(arguments or ()), **({} if arguments else {"backend": "eager"}))
    with pytest.warns(RuntimeWarning, match="`self.inner` is a ScriptModule"):
        assert g(torch.ones(1)).item() == 3.0


MADE_INSIDE = {
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize(),
    "sparse": lambda x: x.to_sparse().to_dense() * 2,
    "meta": lambda x: x.to("meta").shape[0] * x,
    "parameter": lambda x: torch.nn.Parameter(torch.full((3,), 2.0)) * x,
    "module": lambda x: torch.nn.LayerNorm(3)(x),
    "subclass": lambda x: (
        x.as_subclass(types.new_class("Sub", (torch.Tensor,))).sum().item() if x.dim() == 9 else x * 1
    ),
}


@pytest.mark.parametrize("kind", MADE_INSIDE)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:torch.jit")
def test_strange_tensors_made_inside(kind):
    """A graph cannot hold them: eager runs the call, and a warning says why in words that a user can use."""
    program = MADE_INSIDE[kind]
    for x in (torch.ones(3), leaf(3)):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            g = compiled(program)
            actual = g(x)
        expected = program(x)
        assert type(actual) is type(expected)
        assert torch.equal(actual, expected)
        if g.calls.eager:
            (text,) = [str(w.message) for w in found if w.category is RuntimeWarning]
            # torch 2.11 says of quantized ones itself that it cannot
            reasons = (
                "makes a quantized tensor",
                "makes a tensor of the layout torch.sparse_coo",
                "makes a meta tensor",
            )
            reasons += ("the trace did not record", "quantized nyi in meta tensors")
            assert any(reason in text for reason in reasons)
            assert __file__ in text or "quantized nyi" in text


@pytest.mark.parametrize("rank", [0, 1, 20, 64])
def test_ranks_and_empty_tensors(rank):
    """No dimensions, many, and tensors without elements."""
    x = torch.ones([1] * rank).requires_grad_()
    out = compiled(lambda x: (x * 2).sum())(x)
    out.backward()
    assert out.item() == x.grad.sum().item() == 2.0
    empty = torch.ones([0, *[1] * min(rank, 20)])
    assert compiled(lambda x: x.add_(1))(empty) is empty


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.reshape(-2),
        lambda x: x[7],
        lambda x: torch.empty(2**62),
        lambda x: x.to("cuda:99"),
        lambda x: x.sum(dim=4),
        lambda x: torch.cat([]),
        lambda x: x.view(torch.int64),
        lambda x: x.no_such_attribute,
        lambda x: torch.nn.functional.cross_entropy(x, x[:2]),
        lambda x, y: x,
        lambda: 1,
    ],
)
def test_wrong_programs(function):
    """A program that eager refuses is refused in eager's words, whatever torch says of it inside of a trace."""
    assert outcome(function, torch.ones(3)) == outcome(compiled(function), torch.ones(3))


def test_functions_that_return_later():
    """Coroutines and generators have not run when they are returned."""

    async def later(x):
        return x * 2

    def items(x):
        yield x * 2

    for function in (later, items):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with refusing(OutputError) as caught:
                compiled(function)(torch.ones(1))
        assert not isinstance(caught.value, GraphInvariantError)


def test_called_where_it_cannot_take_part():
    """A compiled function is refused under a dispatch mode and under symbolic tracing.

    If it must not run eagerly, it is also refused under vmap and other transforms.
    """
    g = compiled(lambda x: x * 2)
    x = torch.ones(2, 3)
    with refusing(match=r"torch\.func"):
        torch.vmap(g)(x)
    with refusing(match=r"torch\.func"):
        torch.func.grad(lambda y: g(y).sum())(x)
    with refusing(match="dispatch mode"), TorchDispatchMode():
        g(x)
    with refusing():
        torch.fx.symbolic_trace(lambda y: g(y))


def test_exceptions_leave_the_state_alone():
    """An error in the function leaves grad mode, autocast, modes and random state as eager would."""

    def f(x):
        torch.rand(3)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            raise ValueError("inside")

    torch.manual_seed(0)
    with pytest.raises(ValueError, match="inside"):
        f(torch.ones(2))
    expected = global_torch_state()
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="inside"):
        compiled(f)(torch.ones(2))
    assert global_torch_state() == expected
