"""Calls and backwards from several threads at once, and from forked processes."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

import aotlab
from aotlab import config
from aotlab._torch.compiling import compiling
from tests.engine_helpers import behind, compiled, leaf

THREADS = 5


@pytest.fixture(autouse=True)
def _switch_often():
    """Let threads take turns often, so that what can go wrong does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(work):
    """Call ``work`` with a number in several threads at the same time, and return the results."""
    barrier = threading.Barrier(THREADS)
    found = {}

    def run(n):
        barrier.wait()
        try:
            found[n] = work(n)
        except BaseException as error:  # noqa: BLE001  # shown by the test
            found[n] = error

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    return [found[n] for n in range(THREADS)]


def arguments(n):
    """Make the arguments of a thread."""
    return leaf(4, 3, seed=n), leaf(4, 3, seed=n + 100)


def both_parts(x, w):
    """Make two results that can be differentiated apart."""
    return (x * w).sin(), (x + w).cos() * w


def trained(function, n):
    """Call a function, and go back from one of its results."""
    x, w = arguments(n)
    out = function(x, w)
    out[n % 2].sum().backward()
    return [each.tolist() for each in (*out, x.grad, w.grad) if each is not None]


def derived(function, n):
    """Take derivatives of derivatives."""
    x, w = arguments(n)
    (g,) = torch.autograd.grad(function(x, w)[0].sum(), x, create_graph=True)
    return [each.tolist() for each in torch.autograd.grad(g.square().sum(), (x, w))]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("work", [trained, derived])
def test_first_calls_at_once(work, lazy):
    """One of the threads compiles, the others wait for it; so with backwards that are compiled when asked for."""
    with config.patch(lazy_backward=lazy):
        function = compiled(both_parts)
        found = together(lambda n: work(function, n))
    assert found == [work(both_parts, n) for n in range(THREADS)]
    assert (len(function.entries), function.calls.total, function.calls.eager) == (1, THREADS, 0)


def test_several_functions_at_once():
    """Other functions are compiled one after the other, and a call while another thread traces is not part of that."""
    functions = [compiled(lambda x, w, k=k: ((x * w).sin() * k, x + w)) for k in range(THREADS)]
    found = together(lambda n: trained(functions[n], n))
    assert found == [trained(functions[n].__wrapped__, n) for n in range(THREADS)]
    assert [(len(f.entries), f.calls.eager) for f in functions] == [(1, 0)] * THREADS


def test_one_module_at_once():
    """While a thread traces a module for one size, others call it for another: its parameters are not there then."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    made = compiled(module)

    def work(n):
        inputs = [torch.full((2 + (n + k) % 4, 3), 0.1 * n) for k in range(6)]
        return [made(x).tolist() for x in inputs], inputs

    for outputs, inputs in together(work):
        assert outputs == [module(x).tolist() for x in inputs]
    assert (len(behind(made).entries), behind(made).calls.eager) == (2, 0)


def test_backwards_of_one_graph_at_once():
    """A graph that is kept can be gone through by several threads."""
    x, w = arguments(0)
    one, two = compiled(both_parts)(x, w)
    found = together(lambda n: [g.tolist() for g in torch.autograd.grad((one + two).sum(), (x, w), retain_graph=True)])
    expected = torch.autograd.grad(sum(both_parts(x, w)).sum(), (x, w))
    assert found == [[g.tolist() for g in expected]] * THREADS


def test_a_backward_that_is_compiled_in_another_thread():
    """It does what a backward there does in eager, whatever grad mode and autocast are where the call was made."""

    def outcome(function):
        x, w = arguments(0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = function(x, w)
        loss = out.sum()
        thread = threading.Thread(target=loss.backward)
        with torch.no_grad():
            thread.start()
            thread.join()
        return out.tolist(), x.grad.tolist(), w.grad.tolist(), x.grad.dtype

    with config.patch(lazy_backward=True):
        assert outcome(compiled(lambda x, w: (x @ w.t()).sin())) == outcome(lambda x, w: (x @ w.t()).sin())


def test_an_error_in_a_backward_that_is_compiled_late():
    """The compiler's error reaches whoever called backward; the next one tries again."""
    errors = [ValueError("no code today")]

    def compiler(graph, inputs):
        if errors:
            raise errors.pop()
        return graph

    with config.patch(lazy_backward=True):
        function = aotlab.aot_function(torch.sin, aotlab.nop, compiler)
        x = leaf(3)
        out = function(x)
        with pytest.raises(ValueError, match="no code today"):
            out.sum().backward(retain_graph=True)
        out.sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


def _in_child(pipe, function, n):
    torch.set_num_threads(1)
    pipe.send(trained(function, n))
    pipe.close()


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="there is no fork on this system")
@pytest.mark.parametrize("when", ["compiled before", "compiled there", "while another thread compiles"])
def test_forked_processes(when):
    """A child calls what its parent compiled, and compiles for itself, also if a thread of the parent was at it."""
    function = compiled(both_parts)
    if when == "compiled before":
        trained(function, 0)
    held, done = threading.Event(), threading.Event()

    def compile_meanwhile():
        with compiling():
            held.set()
            done.wait(60)

    thread = threading.Thread(target=compile_meanwhile, daemon=True)
    if when == "while another thread compiles":
        thread.start()
        held.wait(60)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_in_child, args=(sender, function, 1))
    child.start()
    sender.close()
    try:
        assert receiver.poll(100)
        assert receiver.recv() == trained(both_parts, 1)
    finally:
        done.set()
        child.join(20)
        child.kill()


FORKED_AT_ONCE = """
import functools, multiprocessing
import torch
import aotlab
from aotlab.frontends.dynamo_frontend import backend

def f(x):
    return (x * x).sin().sum()

def gradient(of):
    x = torch.arange(3.0, requires_grad=True)
    of(x).backward()
    return x.grad

def in_child(pipe, compiled):
    torch.set_num_threads(1)
    pipe.send(gradient(compiled).tolist())

compiled = {how}
gradient(compiled)  # no backward came before it: autograd starts its threads here
receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
child = multiprocessing.get_context("fork").Process(target=in_child, args=(sender, compiled))
child.start()
sender.close()
torch.testing.assert_close(torch.tensor(receiver.recv()), gradient(f))
child.join()
"""


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="there is no fork on this system")
@pytest.mark.parametrize(
    "how",
    [
        'aotlab.compile(f, backend="eager")',
        'aotlab.compile(f, backend="inductor")',
        'aotlab.compile(f, backend="eager", frontend="dynamo")',
        'torch.compile(f, backend="aotlab", options={"compiler": "eager"})',
        'torch.compile(f, backend=functools.partial(backend, options={"compiler": "eager"}))',
    ],
)
def test_forked_after_the_first_backward(how):
    """Torch built for CUDA and no GPU: fake modes would make autograd start threads for eight that are not there."""
    ended = subprocess.run(
        [sys.executable, "-c", FORKED_AT_ONCE.replace("{how}", how)], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr


def test_first_call_on_a_thread_that_ends():
    """What torch's fake modes register for GPUs that are not there is not left to a thread that ends (torch 2.11)."""
    code = """
import threading
import torch
import aotlab

def call():
    aotlab.compile(lambda x: x.sin(), backend="eager")(torch.ones(2))

aotlab.compile
thread = threading.Thread(target=call)
thread.start()
thread.join()
fill = [bytes(8) for _ in range(100000)], [torch.ones(1) for _ in range(10000)]
call()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
