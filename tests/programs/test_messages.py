"""Every refusal and every eager run names the place, the object, the reason and a remedy."""

from __future__ import annotations

import random
import re
import time
import warnings
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import aotlab
from aotlab.errors import BY_DYNAMO, RefusedError, UsageError, brief
from aotlab.frontends.dynamo_frontend import backend
from aotlab.guards.code_names import definition, line_like, line_that_changes
from tests.engine_helpers import compiled, leaf, same

GLOBALS = (torch.zeros(3),)
FOUND: list[object] = []
CONFIG = {"k": 1}
COUNT = ()


@dataclass
class State:
    """The state that a training loop passes to its functions."""

    t: object
    n: int = 0


class Holder:
    n = 0


HOLDER = Holder()


class Own(torch.Tensor):
    pass


def _ones():
    return torch.ones(3)


def _of_inference():
    with torch.inference_mode():
        return torch.ones(3)


def _asks_if(x):
    if x[None] @ x[:, None] > 0:  # here
        return x
    return -x


def _asks_while(x, n):
    while n[None, None] @ n[None, None] > 0:  # here
        x, n = x * 2, n - 1
    return x


def _asks_item(x):
    return x * int(x.sum().item())  # here


def _asserts(x):
    assert x[None] @ x[:, None] > 0  # here
    return x * 2


def _contains(x):
    return 1.0 in x[None] @ x[:, None]  # here


def _one_hot(x):
    return functional.one_hot(x)  # here


def _masks(x, mask):
    return list(x[mask])  # here


def _nonzero(x):
    return list(x.nonzero())  # here


def _unique(x):
    return list(x.unique())  # here


def _repeats(x, n):
    return list(torch.repeat_interleave(x, n))  # here


def _slices(x, n):
    return x[:n]  # here


def _ranges(x, n):
    for _ in range(n):  # here
        x = x * 2
    return x


def _compares(x, y):
    return x if torch.equal(x[None] @ y[:, None], y) else y  # here


def _prints(x):
    print(x)  # here
    return x * 2


def _formats(x):
    return x * len(f"{x}")  # here


def _lists(x):
    return x.tolist()  # here


def _writes_a_global(x):
    GLOBALS[0].add_(x)  # here
    return x * 2


def _reads_a_global(x):
    return x + GLOBALS[0]  # here


def _fills_a_dict(x, d):
    d["b"] = x * 2  # here
    return x * 2


def _fills_a_list(x, found):
    found.append(x * 2)  # here
    return x * 2


def _sets_a_field(x, state):
    state.t = x * 2  # here
    return x * 2


def _counts_in_a_field(x, state):
    state.n += 1  # here
    return x * 2


def _fills_a_global(x):
    FOUND.append(x * 2)  # here
    return x * 2


def _sets_an_item(x):
    CONFIG["k"] = "2"  # here
    return x * 2


def _counts(x):
    global COUNT
    COUNT += (1,)  # here
    return x * 2


def _counts_in_an_object(x):
    HOLDER.n += 1  # here
    return x * 2


def _leaves_a_tensor(x):
    HOLDER.last = x * 2  # here
    return x * 2


def _hangs_something_on(x):
    x.flag = True  # here
    return x * 2


def _changes_the_class(x):
    x.__class__ = Own  # here
    return x


def _draws_by_python(x):
    return x * random.random()  # here


def _draws_by_numpy(x):
    return x * np.random.rand()  # here  # what users write


def _seeds(x):
    torch.manual_seed(0)  # here
    return x + torch.rand(3)


def _reads_the_clock(x):
    return x * time.time()  # here


def _reentrant(x):
    return checkpoint(torch.sin, x, use_reentrant=True)  # here


def _sets(x, y):
    x.set_(y, 0, (2,), (1,))  # here
    return x * 2


def _sets_data(x, y):
    x.data = y.double()  # here
    return x * 2


def _infers_inside(x):
    with torch.inference_mode():
        y = x + 1
    return y * 2  # here


def _asks_numpy(x):
    return x.numpy().sum()  # here


def _asks_array(x):
    return np.asarray(x)  # here


def _asks_address(x):
    return x.data_ptr()  # here


def _asks_gradient(x):
    return x.grad  # here


def _swaps(x):
    y = x * 2
    torch.utils.swap_tensors(x, y)  # here
    return x


def _makes_a_tensor_of_tensors(x):
    return torch.tensor([x.sum(), 1.0])  # here


def _makes_sparse(x):
    return x.to_sparse()  # here


def _makes_a_module(x):
    return nn.Linear(3, 3)(x)  # here


def _makes_opaque(x):
    return x.to_mkldnn().to_dense()  # here


def _chooses(x):
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))  # here


def _writes_one_twice(x):
    torch._foreach_add_([x, x], 1.0)  # here
    return x


def _doubles(x):  # here
    return x * 2


CASES = [
    (_asks_if, [_ones], "x", "torch.where"),
    (_asks_while, [_ones, partial(torch.tensor, 2)], "n", "torch.where"),
    (_asks_item, [_ones], "x", "keep it a tensor"),
    (_asserts, [_ones], "x", "torch.where"),
    (_contains, [_ones], "x", "(x == value).any()"),
    (_one_hot, [partial(torch.tensor, [0, 1])], "x", "num_classes=, or compare with torch.arange"),
    (_masks, [_ones, partial(torch.tensor, [True, False, True])], "mask", "torch.where or masked_fill"),
    (_nonzero, [_ones], "x", "compute with the mask"),
    (_unique, [_ones], "x", "move it out"),
    (_repeats, [_ones, partial(torch.tensor, [1, 2, 3])], "n", "output_size="),
    (_slices, [_ones, partial(torch.tensor, 2)], "n", "pass the number"),
    (_ranges, [_ones, partial(torch.tensor, 2)], "n", "pass the number"),
    (_compares, [_ones, _ones], "x", "keep `(a == b).all()`"),
    (_prints, [_ones], "x", "print it outside"),
    (_formats, [_ones], "x", "print it outside"),
    (_lists, [_ones], "x", "return the tensor"),
    (_writes_a_global, [_ones], "GLOBALS[0]", "pass it as an argument"),
    (_reads_a_global, [_ones], "GLOBALS[0]", "pass it as an argument"),
    (_fills_a_dict, [_ones, lambda: {"a": _ones()}], "d", "return the new value"),
    (_fills_a_list, [_ones, lambda: [_ones()]], "found", "return the new value"),
    (_sets_a_field, [_ones, lambda: State(_ones())], "state.t", "return the new value"),
    (_counts_in_a_field, [_ones, lambda: State(_ones())], "state.n", "return the new value"),
    (_fills_a_global, [_ones], "FOUND[0]", "return it"),
    (_sets_an_item, [_ones], "CONFIG", "return the new value"),
    (_counts, [_ones], "COUNT", "return the new value"),
    (_counts_in_an_object, [_ones], "HOLDER.n", "return the new value"),
    (_leaves_a_tensor, [_ones], "HOLDER.last", "return it"),
    (_hangs_something_on, [_ones], "x", "return the value"),
    (_changes_the_class, [_ones], "x", "set it outside"),
    (_draws_by_python, [_ones], "random", "torch's random ops"),
    (_draws_by_numpy, [_ones], "numpy.random", "torch's random ops"),
    (_seeds, [_ones], "torch.manual_seed", "move it out"),
    (_reads_the_clock, [_ones], "time.time", "pass the time as an argument"),
    (_reentrant, [partial(leaf, 3)], None, "use_reentrant=False"),
    (_sets, [_ones, _ones], "x", "copy_"),
    (_sets_data, [_ones, _ones], "x", "copy_"),
    (_infers_inside, [_ones], None, "inference_mode around the whole function"),
    (_asks_numpy, [_ones], "x", "move it out"),
    (_asks_array, [_ones], "x", "move it out"),
    (_asks_address, [_ones], "x", "move it out"),
    (_asks_gradient, [partial(leaf, 3)], "x", BY_DYNAMO),
    (_swaps, [_ones], "x", "move it out"),
    (_makes_a_tensor_of_tensors, [_ones], "tensor", "torch.stack"),
    (_makes_sparse, [_ones], None, "outside of the compiled function"),
    (_makes_a_module, [_ones], None, "outside of the function"),
    (_makes_opaque, [_ones], None, "out"),  # torch 2.15 raises another error here
    (_chooses, [_ones], "cond", "move it out"),
    (_writes_one_twice, [_ones], "_foreach_add_", "write one tensor after the other"),
    (_doubles, [lambda: torch.eye(3).to_sparse()], "x", "to_dense()"),
    (_doubles, [lambda: torch._neg_view(torch.ones(3))], "x", "resolve_neg()"),
    (_doubles, [partial(torch.ones, 3, device="meta")], "x", "with memory"),
    (_doubles, [lambda: _ones().as_subclass(Own)], "x", "the plain tensors"),
]
#: Text that no message may contain: torch's messages for its developers, its internal names, and addresses.
FOREIGN = re.compile(
    r"INTERNAL ASSERT|report a bug|file an issue|Caffe2|_local_scalar_dense|Assertion|https?://|0x[0-9a-f]{6}"
)


@pytest.fixture(autouse=True)
def _as_before():
    yield
    GLOBALS[0].zero_()
    FOUND.clear()
    CONFIG["k"] = 1
    vars(HOLDER).clear()


def told(function, *args):
    """Return the one message, of an error of ours or of a warning, that a call gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        try:
            function(*args)
        except RefusedError as error:
            return str(error)
    texts = [str(each.message) for each in caught if each.category is RuntimeWarning]
    assert len(texts) == 1
    return texts[0]


def place_of(function):
    """Return the place of the line that is marked, as messages write it."""
    line = line_like([function.__code__], "# here") or definition(function.__code__)
    return f", at {line.file}:{line.line} ("


@pytest.mark.parametrize("entry", ["compile", "aot_function"])
@pytest.mark.parametrize(
    ("function", "makers", "name", "advice"), CASES, ids=[f"{n} {case[0].__name__}" for n, case in enumerate(CASES)]
)
def test_messages_name_the_line_the_argument_and_a_way_out(function, makers, name, advice, entry):
    """Each message has the user's line, the name of the object and a remedy, in the user's words, on one line."""
    make = compiled if entry == "compile" else partial(aotlab.aot_function, fw_compiler=aotlab.nop)
    text = told(make(function), *(maker() for maker in makers))
    assert place_of(function) in text
    assert name is None or re.search(rf"`{re.escape(name)}`|\b{re.escape(name)}\b", text.partition(", at ")[0])
    assert advice in text.partition(", at ")[2]
    assert FOREIGN.search(text) is None
    assert "\n" not in text


BEHIND_DYNAMO = [
    (_reentrant, [partial(leaf, 3)], "use_reentrant=False"),
    (_infers_inside, [_ones], "inference_mode around the whole function"),
    (_writes_one_twice, [_ones], "write one tensor after the other"),
    (_doubles, [lambda: torch._neg_view(torch.ones(3))], "resolve_neg()"),
]


@pytest.mark.parametrize(
    ("function", "makers", "advice"), BEHIND_DYNAMO, ids=[case[0].__name__ for case in BEHIND_DYNAMO]
)
def test_messages_behind_dynamo(function, makers, advice):
    """Behind `torch.compile` there is one warning with the same text, and it does not advise `torch.compile`."""
    torch._dynamo.reset()
    f = torch.compile(function, backend=backend, options={"compiler": "eager"})
    text = told(f, *(maker() for maker in makers))
    assert text.startswith(f"`{function.__name__}` runs eagerly: ")
    assert __file__ in text
    assert advice in text
    assert BY_DYNAMO not in text
    assert FOREIGN.search(text) is None


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(3))
        self.n = ()
        self.found = []


class CountsCalls(Counting):
    def forward(self, x):
        self.n += (1,)  # here
        return self.layer(x)


class KeepsInputs(Counting):
    def forward(self, x):
        self.found.append(x)  # here
        return self.layer(x)


class AssignsABuffer(Counting):
    def forward(self, x):
        self.seen = self.seen + 1  # here
        return self.layer(x)


class MakesAParameter(Counting):
    def forward(self, x):
        self.late = nn.Parameter(torch.ones(3))  # here
        return self.layer(x)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (CountsCalls, "self.n"),
        (KeepsInputs, "self.found[0]"),
        (AssignsABuffer, "seen"),
        (MakesAParameter, "self._parameters['late']"),
    ],
)
def test_modules_that_change_themselves(kind, name):
    """The message names the attribute and the line of the assignment."""
    text = told(compiled(kind()), torch.ones(3))
    assert f"`{name}`{place_of(kind.forward)}" in text
    assert "return " in text


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.view(-1), lambda x: x[1:]])
def test_writes_to_inference_tensors_outside_of_the_mode_raise_what_eager_raises(view):
    """A write to an inference tensor outside inference mode raises eager's error.

    The trace uses an ordinary tensor for the argument, and this is not visible.
    """

    def f(x):
        view(x).add_(1)
        return x * 2

    with pytest.raises(RuntimeError, match="Inplace update to inference tensor") as caught:
        compiled(f)(_of_inference())
    assert not isinstance(caught.value, RefusedError)


def test_writes_through_detach_to_inference_tensors_are_eagers():
    """Eager lets these pass, so they run eagerly."""
    x = _of_inference()
    with pytest.warns(RuntimeWarning, match="was made under inference_mode and is written"):
        compiled(lambda x: x.detach().add_(1))(x)
    assert x.tolist() == [2.0, 2.0, 2.0]


def test_a_clone_of_an_inference_tensor_is_an_ordinary_tensor():
    """A clone of an inference tensor has new memory, so a write to it does not run eagerly."""
    same(lambda x: x.clone().add_(1) * x, _of_inference())


def test_brief_leaves_out_what_torch_says_to_its_developers():
    """The class, and the sentences that are meant for users, of the first line."""
    assertion = 'new_fn INTERNAL ASSERT FAILED at "/a/b.cpp":95, please report a bug to PyTorch. '
    assert brief(RuntimeError(assertion)) == "RuntimeError: a check inside torch failed (new_fn)"
    assert (
        brief(RuntimeError(assertion + "Too small.\nmore")) == "RuntimeError: a check inside torch failed (Too small.)"
    )
    assert brief(ValueError("It is odd. If you're using Caffe2, weep.")) == "ValueError: It is odd."
    assert brief(ValueError("Please file an issue")) == "ValueError"
    assert brief(ValueError("x" * 400)) == f"ValueError: {'x' * 300}…"
    assert brief(KeyError()) == "KeyError"


def test_lines_are_found_in_code():
    """The line of a store is preferred to a line that mentions the name in a mutating call; a read is no such line."""

    def f(x):
        print(FOUND[0])
        FOUND[1] = x
        HOLDER.n = 2
        CONFIG.update(k=3)
        return lambda: FOUND.append(x)

    codes, first = [f.__code__], f.__code__.co_firstlineno
    lines = {name: line_that_changes(codes, name) for name in ("FOUND[1]", "HOLDER.n", "CONFIG", "x", "GLOBALS")}
    found = {name: line.line - first for name, line in lines.items() if line is not None}
    assert {name: found[name] for name in ("FOUND[1]", "HOLDER.n", "CONFIG")} == {
        "FOUND[1]": 2, "HOLDER.n": 3, "CONFIG": 4,
    }  # fmt: skip
    assert lines["GLOBALS"] is None
    assert line_like(codes, r"append\(").line - first == 5


def test_a_compiled_module_shows_the_module_within():
    """The repr and the docstring of a compiled module are those of the user's module."""
    layer = nn.Linear(2, 3)
    assert str(compiled(layer)) == f"AotModule(\n  (orig_module): {layer}\n)"
    assert compiled(layer).__doc__ == nn.Linear.__doc__
    nested = nn.Sequential(layer, nn.ReLU())
    assert str(compiled(nested)).splitlines()[2:4] == ["    " + str(nested[0]).join(["(0): ", ""]), "    (1): ReLU()"]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: compiled(nn.Linear), r"`Linear` is a module class: compile an instance"),
        (lambda: aotlab.compile(torch.sin, partitioner=3), r"partitioner 3: pass a function"),
        (lambda: aotlab.compile(3), r"takes a function or a module, not 3"),
        (lambda: aotlab.aot_function(3, aotlab.nop), r"takes a function, not 3"),
    ],
)
def test_wrong_uses_say_what_was_given(call, text):
    """At once, not at the first call, and with the value."""
    with pytest.raises(UsageError, match=text):
        call()
