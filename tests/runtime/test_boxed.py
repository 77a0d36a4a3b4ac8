"""The boxed calling convention: the callee may empty its argument list, so that inputs can be freed early."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import aotlab
from aotlab import _torch as internals
from aotlab.errors import UsageError
from tests.engine_helpers import leaf

SIZE = 1237


def boxed_compiler(gm, inputs):
    """Return a boxed callable that was not made by us."""
    inner = internals.boxed_forward_of(gm)

    def call(arguments):
        assert type(arguments) is list
        return inner(arguments)

    call._boxed_call = True
    return call


def plain_compiler(gm, inputs):
    """Return a callable of single arguments."""
    return lambda *arguments: gm(*arguments)


def emptying_compiler(gm, inputs):
    """Return a boxed callable that empties its list before it computes."""

    def call(arguments):
        taken = tuple(arguments)
        arguments.clear()
        return gm(*taken)

    call._boxed_call = True
    return call


def listing_compiler(gm, inputs):
    """Return lists, not tuples."""
    return lambda *arguments: list(gm(*arguments))


def no_compiler(gm, inputs):
    """Return the graph."""
    return gm


COMPILERS = [
    boxed_compiler, plain_compiler, emptying_compiler, listing_compiler, no_compiler,
    aotlab.make_boxed_compiler(plain_compiler), aotlab.make_boxed_compiler(boxed_compiler),
]  # fmt: skip


@pytest.mark.parametrize("compiler", COMPILERS, ids=lambda f: f.__qualname__.split(".")[0])
@pytest.mark.parametrize("frontend", ["function", "module", "dynamo"])
def test_kinds_of_callables(compiler, frontend):
    """Boxed and plain callables that return tuples or lists give eager's writes, outputs and gradients."""

    def program(x, y):
        x.mul_(2)
        return x.sin() * y, x.view(-1), y.cos().sum()

    class Wrapper(torch.nn.Module):
        def forward(self, x, y):
            return program(x, y)

    torch._dynamo.reset()
    make = {
        "function": lambda: aotlab.aot_function(program, compiler),
        "module": lambda: aotlab.aot_module(Wrapper(), compiler),
        "dynamo": lambda: aotlab.compile(program, backend=compiler, frontend="dynamo"),
    }[frontend]
    results = []
    for function in (program, make()):
        for grad in (False, True):
            x, y = torch.linspace(0, 1, 6).reshape(2, 3), leaf(2, 3)
            if not grad:
                y = y.detach()
            outs = function(x, y)
            if grad:
                (outs[0].sum() + outs[2]).backward()
            results.append([x.tolist(), [o.tolist() for o in outs], None if y.grad is None else y.grad.tolist()])
            assert outs[1].data_ptr() == x.data_ptr()
    assert results[2:] == results[:2]


def alive():
    """Count the tensors of this file's size that are alive."""
    gc.collect()
    found = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape == (SIZE,)]
    return sum(not internals.is_functional(t) for t in found)  # the trace's own tensors have no memory


def test_the_eager_backend_frees_saved_values_as_it_goes():
    """A backward that runs op by op frees used values: at its end as many tensors are alive as in eager."""

    def chain(x):
        for _ in range(8):
            x = x.sin()
        return x.sum()

    class Counting(TorchDispatchMode):
        """Count the living after each op."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.cos.default:
                counts.append(alive())
            return result

    found = []
    for function in (chain, aotlab.compile(chain, backend="eager")):
        counts = []
        loss = function(torch.ones(SIZE, requires_grad=True))
        with Counting():
            loss.backward()
        found.append(counts)
        del loss
    # each of the eight steps frees one value
    assert [a - b for a, b in itertools.pairwise(found[0])] == [1] * 7
    assert [a - b for a, b in itertools.pairwise(found[1])] == [1] * 7


@pytest.mark.parametrize("retain", [False, True])
def test_saved_values_belong_to_the_backward(retain):
    """A boxed backward's list is the only owner of the saved values, unless the graph is retained."""
    dead = []

    def backward_compiler(gm, inputs):
        count = len(inputs)

        def call(arguments):
            assert len(arguments) == count
            saved = [weakref.ref(t) for t in arguments[:-1]]
            tangent = arguments[-1]
            taken = [t.clone() for t in arguments]
            arguments.clear()
            dead.append([ref() is None for ref in saved])
            del tangent
            return gm(*taken)

        call._boxed_call = True
        return call

    f = aotlab.aot_function(lambda x: (x * 2).sin().exp().sum(), no_compiler, backward_compiler)
    x = leaf(5)
    loss = f(x)
    loss.backward(retain_graph=retain)
    assert len(dead[0]) >= 1
    assert all(dead[0]) is not retain
    if retain:
        loss.backward()
        assert all(dead[1])
        assert torch.allclose(x.grad, 2 * torch.autograd.grad((x * 2).sin().exp().sum(), x)[0])


def test_lists_are_handed_over():
    """Forward, backward and inference graphs each receive their own list, which they may empty and keep."""
    given = []

    def compiler(gm, inputs):
        def call(arguments):
            given.append(arguments)
            taken = list(arguments)
            arguments.clear()
            arguments.append("mine now")
            return gm(*taken)

        call._boxed_call = True
        return call

    f = aotlab.aot_function(lambda x: x.sin() * 2, compiler)
    x = leaf(3)
    for _ in range(2):
        f(x).sum().backward()
    f(x.detach())
    assert given == [["mine now"]] * 5
    assert len({id(arguments) for arguments in given}) == 5


def test_temporaries_of_the_caller_die():
    """A compiled function keeps no argument alive after its call or its backward."""
    f = aotlab.aot_function(lambda x, w: (x * w).sum(), aotlab.nop)
    w = leaf(3)
    x = torch.ones(3)
    ref = weakref.ref(x)
    loss = f(x, w)
    del x
    gc.collect()
    assert ref() is not None  # it is saved, as in eager
    loss.backward()
    gc.collect()
    assert ref() is None
    y = torch.ones(3)
    ref = weakref.ref(y)
    f(y, w.detach())
    del y
    gc.collect()
    assert ref() is None


def test_make_boxed_func():
    """It marks its result, leaves a marked callable unchanged, and accepts graphs, which then empty their list."""
    plain = aotlab.make_boxed_func(lambda x, y: (x + y,))
    assert plain._boxed_call is True
    assert plain([1, 2]) == (3,)
    assert aotlab.make_boxed_func(plain) is plain
    graph = aotlab.make_boxed_func(torch.fx.symbolic_trace(lambda x, y: (x + y,)))
    arguments = [torch.ones(1), torch.ones(1)]
    assert graph(arguments)[0].item() == 2.0
    assert arguments == []
    compiled = aotlab.make_boxed_compiler(plain_compiler)(torch.fx.symbolic_trace(lambda x: (x * 2,)), [])
    assert compiled._boxed_call is True
    assert compiled([torch.ones(1)])[0].item() == 2.0


# --- compilers that return wrong things --------------------------------------------------------------------------

WRONG_CALLABLES = {
    "None": (lambda gm, inputs: None, "returned None for the"),
    "a number": (lambda gm, inputs: 3, "returned a `int` for the"),
    "the inputs": (lambda gm, inputs: inputs, "returned a `list` for the"),
    "code": (lambda gm, inputs: gm.code, "returned a `str` for the"),
}


@pytest.mark.parametrize("kind", WRONG_CALLABLES)
@pytest.mark.parametrize("which", ["inference", "forward", "backward"])
def test_compilers_that_return_no_function(which, kind):
    """If a compiler returns no function, the error names the compiler and the graph, before anything is written."""
    compiler, text = WRONG_CALLABLES[kind]
    compilers = {"fw_compiler": aotlab.nop, "bw_compiler": aotlab.nop, "inference_compiler": aotlab.nop}
    key = {"inference": "inference_compiler", "forward": "fw_compiler", "backward": "bw_compiler"}[which]
    f = aotlab.aot_function(lambda x, w: x.mul_(w).sum(), **{**compilers, key: compiler})
    x, w = torch.full((2,), 3.0), leaf(2) if which != "inference" else leaf(2).detach()
    with pytest.raises(UsageError) as caught:
        f(x, w)
    assert f"{text} {which} graph" in str(caught.value)
    assert "`<lambda>`" in str(caught.value)
    assert x.tolist() == [3.0, 3.0]


def test_boxing_what_is_no_function():
    """`make_boxed_compiler` passes a wrong result on, and the engine's error reports it; `make_boxed_func` raises."""
    f = aotlab.aot_function(lambda x: x * 2, aotlab.make_boxed_compiler(lambda gm, inputs: None))
    with pytest.raises(UsageError, match="`<lambda>` returned None for the inference graph"):
        f(torch.ones(1))
    with pytest.raises(UsageError, match="takes a function, not None"):
        aotlab.make_boxed_func(None)


WRONG_RESULTS = {
    "too few": (lambda outs: outs[:-1], "returned {less} outputs; the graph has {count} outputs"),
    "too many": (lambda outs: (*outs, outs[0]), "returned {more} outputs; the graph has {count} outputs"),
    "a tensor": (lambda outs: outs[0], "returned a `Tensor`; the graph has {count} outputs"),
    "None": (lambda outs: None, "returned None; the graph has {count} outputs"),
    "a generator": (iter, "returned a `tuple_iterator`; the graph has {count} outputs"),
    "a number in it": (lambda outs: (*outs[:-1], 3), "returned a `int` as output {last}"),
    "None in it": (lambda outs: (*outs[:-1], None), "returned None as output {last}"),
}


@pytest.mark.parametrize("boxed", [False, True], ids=["plain", "boxed"])
@pytest.mark.parametrize("kind", WRONG_RESULTS)
@pytest.mark.parametrize("which", ["inference", "forward", "backward"])
def test_compiled_graphs_that_return_wrong_things(which, kind, boxed):
    """If a compiled graph returns wrong results, the error shows them and the expected outputs.

    Nothing was written, and no gradient was accumulated.
    """
    spoil, text = WRONG_RESULTS[kind]
    counts = []

    def compiler(gm, inputs):
        output = next(node for node in gm.graph.nodes if node.op == "output")
        counts.append(len(output.args[0]))

        def plain(*arguments):
            return spoil(tuple(gm(*arguments)))

        return aotlab.make_boxed_func(plain) if boxed else plain

    compilers = {"fw_compiler": aotlab.nop, "bw_compiler": aotlab.nop, "inference_compiler": aotlab.nop}
    key = {"inference": "inference_compiler", "forward": "fw_compiler", "backward": "bw_compiler"}[which]
    f = aotlab.aot_function(lambda x, w, v: x.mul_(w * v).sum(), **{**compilers, key: compiler})
    x = torch.full((2,), 3.0)
    w, v = (leaf(2), leaf(2)) if which != "inference" else (leaf(2).detach(), leaf(2).detach())
    loss = f(x, w, v) if which == "backward" else None
    with pytest.raises(UsageError) as caught:
        loss.backward() if loss is not None else f(x, w, v)
    count = counts[-1]
    expected = text.format(less=count - 1, more=count + 1, count=count, last=count - 1)
    assert expected in str(caught.value)
    assert f"the {which} that the compiler `compiler` returned" in str(caught.value)
    assert w.grad is None
    if which != "backward":
        assert x.tolist() == [3.0, 3.0]


def test_a_compiler_that_raises():
    """A compiler's exception reaches the caller, nothing is written, and the next call tries again."""
    tries = []

    def compiler(gm, inputs):
        tries.append(1)
        if len(tries) == 1:
            raise NotImplementedError("not today")
        return gm

    f = aotlab.aot_function(lambda x: x.mul_(2), compiler)
    x = torch.ones(2)
    with pytest.raises(NotImplementedError, match="not today"):
        f(x)
    assert x.tolist() == [1.0, 1.0]
    assert f(x).tolist() == [2.0, 2.0]
