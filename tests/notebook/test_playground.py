"""Side effects: the state that a compiled cell leaves in the namespace and in the process.

The cells succeed, raise an error, or are interrupted.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import types
from typing import Any

import pytest

pytest.importorskip("IPython")

import torch
from IPython.core.interactiveshell import InteractiveShell
from torch._dynamo import guards

from aotlab import events
from aotlab.backends import compile_stage as compile
from aotlab.capture import call as capture
from aotlab.notebook import graphs, traced
from aotlab.notebook.cell_compiler import CellCompiler
from aotlab.notebook.extension import unload_ipython_extension
from aotlab.notebook.playground import TORCH, Playground
from aotlab.partition import partition_stage as partition
from aotlab.runtime import runtime_stage as runtime
from aotlab.trace import trace_stage as trace
from tests.notebook.plain_shells import (
    cell,
    compiled,
    execute,
    failing,
    interrupted,
    plain_shell,
    printed,
    process_state,
)

SETUP = """
import torch
x = torch.arange(6.0).reshape(2, 3)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""

#: What a cell does: one with several graphs and functions, one that trains, errors of several kinds.
CELLS: dict[str, str] = {
    "several regions": "a = x + 1\nprint('first')\nb = a * 2\nprint('second')\nc = [row.sum() for row in b]",
    "training": (
        "for step in range(3):\n    optimizer.zero_grad()\n    loss = model(x).square().mean()\n"
        "    loss.backward()\n    optimizer.step()"
    ),
    "functions and comprehensions": (
        "def f(v):\n    return v * 2\nys = [f(x) for _ in range(2)]\ng = lambda v: v + 1\nz = g(ys[0])"
    ),
    "graph breaks": "total = 0.0\nfor row in x:\n    y = row * 2\n    if y.sum() > 3:\n        total += y.sum().item()",
    "deletions": "t = x + 1\ndel t\nu = x + 2",
    "an error of Python": "a = x + 1\nb = a.nothing\nc = 1",
    "an error of shapes": "a = x + 1\nb = a @ a\nc = 1",
    "an error between graphs": "a = x + 1\nraise KeyError('k')",
    "an interrupt": "a = x + 1\nraise KeyboardInterrupt",
    "the end of the process": "a = x + 1\nraise SystemExit(3)",
}


def names(shell: InteractiveShell) -> list[str]:
    """Return every name of the namespace, hidden ones included, in order, but for the report's."""
    return [name for name in shell.user_ns if name != "report"]


@pytest.mark.parametrize("name", list(CELLS))
def test_names_and_settings_are_eagers(name: str) -> None:
    """The namespace holds the names that an eager run leaves, in their order, and no setting of the process moved."""
    found = []
    for above in ("", cell("")):
        shell = plain_shell()
        torch.manual_seed(0)
        execute(shell, SETUP)
        # Imports and one-time setup belong to neither run.
        execute(shell, cell("warm = x + 1", "--quiet --frontend dynamo"))
        before = process_state()
        body = CELLS[name]
        outcome: object = None
        if "error" in name or "interrupt" in name or "end" in name:
            outcome = type(failing(shell, above + body)).__name__
        else:
            printed(shell, above + body)
        after = process_state()
        assert [key for key, value in before.items() if value != after[key]] == []
        tensors = {key: value.tolist() for key, value in shell.user_ns.items() if isinstance(value, torch.Tensor)}
        weights = [parameter.tolist() for parameter in shell.user_ns["model"].parameters()]
        found.append((names(shell), tensors, weights, outcome))
        if above and name != "an error of shapes":  # which Dynamo meets before it has a graph
            assert compiled(shell.user_ns["report"]) != []
        shell.run_line_magic("unload_ext", "aotlab")
    assert found[0] == found[1]


def test_nothing_is_left_on_tensors_and_modules(shell: InteractiveShell) -> None:
    """Dynamo's marks are gone from parameters, buffers, gradients and the optimizer's state, and from the model."""
    execute(shell, "before = sorted(vars(model)), sorted(vars(type(model)))")
    execute(shell, cell(CELLS["training"]))
    model, optimizer = shell.user_ns["model"], shell.user_ns["optimizer"]
    tensors = [*model.parameters(), *(p.grad for p in model.parameters()), shell.user_ns["x"], shell.user_ns["loss"]]
    tensors += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    assert len(tensors) > 6
    assert [vars(each) for each in tensors if vars(each)] == []
    assert (sorted(vars(model)), sorted(vars(type(model)))) == shell.user_ns["before"]


def test_the_settings_of_the_user_stay(shell: InteractiveShell) -> None:
    """The user's earlier settings hold in the cell and after it."""
    default = torch.get_default_dtype()
    try:
        execute(shell, "torch.set_default_dtype(torch.float64)\ntorch.set_grad_enabled(False)")
        before = process_state()
        execute(shell, cell("y = torch.ones(2) + 1\nloss = model(x.float()).sum()"))
        assert torch.float64 == shell.user_ns["y"].dtype
        assert not shell.user_ns["loss"].requires_grad
        assert [key for key, value in before.items() if value != process_state()[key]] == []
        execute(shell, cell("torch.set_grad_enabled(True)\nloss = model(x.float()).sum()"))
        assert torch.is_grad_enabled()
        assert shell.user_ns["loss"].requires_grad
    finally:
        torch.set_default_dtype(default)
        torch.set_grad_enabled(True)


# --- interrupts --------------------------------------------------------------------------------------------------

#: Where the user's interrupt arrives while the second region is compiled.
STAGES: dict[str, tuple[Any, str]] = {
    "Dynamo's capture": (CellCompiler, "_capture"),
    "Dynamo's verification": (graphs, "compare"),
    "capture": (capture, "run"),
    "trace": (trace, "run"),
    "partition": (partition, "run"),
    "compile": (compile, "run"),
    "runtime": (runtime, "run"),
    "verification": (traced, "compare"),
}

INTERRUPTED = """\
x.add_(1)
a = x * 2
print('between')
b = model(a)
x.mul_(2)
loss = b.sum()
"""


@pytest.mark.parametrize("stage", list(STAGES))
def test_an_interrupt_while_compiling(shell: InteractiveShell, stage: str) -> None:
    """After an interrupt during compilation, only the earlier statements have run.

    The statements that were being compiled have not begun, and the cell can run again.
    """
    execute(shell, cell("warm = x + 1"))
    before, known, values = process_state(), names(shell), shell.user_ns["x"].clone()
    owner, function = STAGES[stage]
    with interrupted(owner, function, lambda *_args, **_named: type(shell.user_ns.get("a")) is torch.Tensor):
        error = failing(shell, cell(INTERRUPTED, "--quiet --frontend dynamo" if "Dynamo" in stage else "--quiet"))
    assert isinstance(error, KeyboardInterrupt)
    assert {"a"} == {name for name in set(names(shell)) - set(known) if not name.startswith("_i")}
    torch.testing.assert_close(shell.user_ns["x"], values + 1, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in shell.user_ns["model"].parameters())
    assert [key for key, value in before.items() if value != process_state()[key]] == []
    report = shell.user_ns["report"]
    assert report.cell.error == "KeyboardInterrupt"
    assert "lines 2–3" in compiled(report)

    printed(shell, cell(INTERRUPTED))
    again = values + 2
    torch.testing.assert_close(shell.user_ns["a"], again * 2, rtol=0, atol=0)
    torch.testing.assert_close(shell.user_ns["x"], again * 2, rtol=0, atol=0)
    with torch.no_grad():
        expected = shell.user_ns["model"](again * 2).sum()
    torch.testing.assert_close(shell.user_ns["loss"].detach(), expected)
    assert compiled(shell.user_ns["report"]) == ["lines 2–3", "lines 5–7"]


def test_an_interrupt_while_running(shell: InteractiveShell) -> None:
    """After an interrupt in the third round of a loop, the first two rounds' effects stay.

    Nothing of the third round is bound. If the loop is traced as a whole, the interrupt ends the trace, before the loop
    has had an effect.
    """
    execute(shell, "def wait(step):\n    if step == 2:\n        raise KeyboardInterrupt")
    before = process_state()
    loop = "for step in range(5):\n    wait(step)\n    x.add_(1)\n    y = x * 2"
    error = failing(shell, cell(loop))
    assert isinstance(error, KeyboardInterrupt)
    assert "step" not in shell.user_ns
    assert shell.user_ns["x"][0, 0].item() == 0.0
    error = failing(shell, cell(loop, "--quiet --frontend dynamo"))
    assert isinstance(error, KeyboardInterrupt)
    assert shell.user_ns["step"] == 2
    torch.testing.assert_close(shell.user_ns["x"], torch.arange(6.0).reshape(2, 3) + 2, rtol=0, atol=0)
    torch.testing.assert_close(shell.user_ns["y"], shell.user_ns["x"] * 2, rtol=0, atol=0)
    assert [key for key, value in before.items() if value != process_state()[key]] == []


def test_an_interrupt_in_a_compiled_graph(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no error of the compiled form: the cell ends with it, and eager does not run the region instead."""
    original = runtime.run

    def interrupting(*args: Any) -> Any:
        record, run = original(*args)
        served: list[bool] = []

        def interrupted_once(*given: Any) -> Any:
            if len(served) == 1:  # the first call is the verification's
                served.append(True)
                raise KeyboardInterrupt
            served.append(True)
            return run(*given)

        return record, interrupted_once

    monkeypatch.setattr(runtime, "run", interrupting)
    error = failing(shell, cell("x.add_(1)\ny = x * 2"))
    assert isinstance(error, KeyboardInterrupt)
    assert "y" not in shell.user_ns
    assert shell.user_ns["x"][0, 0].item() == 0.0
    execute(shell, cell("x.add_(1)\ny = x * 2"))
    assert shell.user_ns["y"][0, 0].item() == 2.0


def test_an_interrupt_in_a_guard(shell: InteractiveShell) -> None:
    """An interrupt that arrives in a guard is raised again after the guard check.

    Dynamo drops an exception that a guard raises, and would continue.
    """
    arrived: list[int] = []

    def profile(frame: types.FrameType, event: str, _argument: object) -> None:
        outside = frame.f_back is not None and frame.f_back.f_code.co_filename != guards.__file__
        if event == "call" and frame.f_code.co_filename == guards.__file__ and outside and shell.user_ns["step"] == 3:
            sys.setprofile(None)
            arrived.append(shell.user_ns["step"])
            signal.raise_signal(signal.SIGINT)

    shell.user_ns["watch"] = lambda: sys.setprofile(profile)
    execute(shell, cell("warm = x + 1"))  # one-time setup is not an effect of an interrupt
    before = process_state(), signal.getsignal(signal.SIGINT)
    loop = "for step in range(200_000):\n    if step == 2: watch()\n    y = x * 2"
    try:
        error = failing(shell, cell(loop, "--quiet --frontend dynamo"))
    finally:
        sys.setprofile(None)
    assert arrived == [3]
    assert isinstance(error, KeyboardInterrupt)
    assert 3 <= shell.user_ns["step"] < 199_999
    assert before == (process_state(), signal.getsignal(signal.SIGINT))


@pytest.mark.parametrize("tried_by", ["check", "__init__"])
def test_an_interrupt_in_a_guard_that_was_just_made(shell: InteractiveShell, tried_by: str) -> None:
    """Dynamo tries new guards, where an interrupt would become an error, and measures them, where it would be lost."""
    arrived: list[str] = []

    def profile(frame: types.FrameType, event: str, _argument: object) -> None:
        caller = frame.f_back
        if event == "call" and frame.f_code.co_name == "fn" and frame.f_code.co_filename == guards.__file__:
            assert caller is not None
            if (caller.f_code.co_filename, caller.f_code.co_name) == (guards.__file__, tried_by):
                sys.setprofile(None)
                arrived.append(frame.f_code.co_name)
                signal.raise_signal(signal.SIGINT)

    shell.user_ns["watch"] = lambda: sys.setprofile(profile)
    execute(shell, cell("warm = x + 1"))  # one-time setup is not an effect of an interrupt
    before = process_state(), signal.getsignal(signal.SIGINT)
    try:
        text = "watch()\ny = x.sin()\nfor step in range(200_000):\n    z = y * 2"
        error = failing(shell, cell(text, "--quiet --frontend dynamo"))
    finally:
        sys.setprofile(None)
    assert arrived == ["fn"]
    assert isinstance(error, KeyboardInterrupt)
    assert shell.user_ns.get("step", 0) < 199_999
    assert before == (process_state(), signal.getsignal(signal.SIGINT))


CROSSINGS = {
    "closing one of ours": (contextlib.__file__, "__exit__", "/aotlab/"),
    "opening one of ours": (contextlib.__file__, "__enter__", "/aotlab/"),
    "closing one of torch's": ("_config_module.py", "__exit__", ""),
    "opening one of torch's": ("_config_module.py", "__enter__", ""),
    "closing no_grad": ("grad_mode.py", "__exit__", ""),
}


@pytest.mark.parametrize("crossing", CROSSINGS)
def test_an_interrupt_in_a_context_manager(shell: InteractiveShell, crossing: str) -> None:
    """One that is interrupted while it opens or closes would leave torch's settings behind as they are in its block."""
    file, name, caller = CROSSINGS[crossing]
    arrived: list[str] = []

    def profile(frame: types.FrameType, event: str, _argument: object) -> None:
        code, back = frame.f_code, frame.f_back
        if event != "call" or code.co_name != name or not code.co_filename.endswith(file) or back is None:
            return
        if caller in back.f_code.co_filename and shell.user_ns["step"] == 3:
            sys.setprofile(None)
            arrived.append(name)
            signal.raise_signal(signal.SIGINT)

    shell.user_ns["watch"] = lambda: sys.setprofile(profile)
    execute(shell, cell("warm = x + 1"))  # one-time setup is not an effect of an interrupt
    before = process_state(), signal.getsignal(signal.SIGINT)
    execute(shell, "@torch.compiler.disable\ndef quietly():\n    with torch.no_grad():\n        return x * 3")
    loop = "for step in range(200_000):\n    if step == 2: watch()\n    y = x * 2\n    z = quietly()"
    try:
        error = failing(shell, cell(loop, "--quiet --frontend dynamo"))
    finally:
        sys.setprofile(None)
    after = process_state(), signal.getsignal(signal.SIGINT)
    torch.set_grad_enabled(True)  # for the tests that come, should this one fail
    assert arrived == [name]
    assert isinstance(error, KeyboardInterrupt)
    assert 3 <= shell.user_ns["step"] < 199_999
    assert before == after


def test_a_handler_that_a_cell_sets_stays(shell: InteractiveShell) -> None:
    """As it does in Python: the cell is not only about tensors."""
    before = signal.getsignal(signal.SIGINT)
    try:
        execute(shell, cell("import signal\nmine = lambda *_: None\n_ = signal.signal(signal.SIGINT, mine)\ny = x * 2"))
        assert signal.getsignal(signal.SIGINT) is shell.user_ns["mine"]
    finally:
        signal.signal(signal.SIGINT, before)


# --- two shells --------------------------------------------------------------------------------------------------


def test_two_shells_do_not_hear_each_other() -> None:
    """The same cell in two shells of one process: two reports, neither with the other's graphs, calls or names."""
    heard = events._listeners
    one, two = plain_shell(), plain_shell()
    try:
        for each in (one, two):
            execute(each, SETUP)
        execute(one, cell("def f(v):\n    return v * 2"))
        execute(two, cell("def f(v):\n    return v * 3"))
        execute(one, "y = f(x)")
        first, second = one.user_ns["report"], two.user_ns["report"]
        assert compiled(first) == ["f"]
        assert compiled(second) == []
        execute(two, "y = f(x)\ny = f(x)")
        assert [frame.calls.total for frame in first.frames] == [1]
        assert [frame.calls.total for frame in second.frames] == [2]
        execute(one, cell("z = x + 1", "--quiet"))
        execute(two, cell("w = x + 1", "--quiet"))
        assert "w" not in one.user_ns
        assert "z" not in two.user_ns
        assert one.user_ns["report"].identifier != two.user_ns["report"].identifier
        assert [len(each.user_ns["report"].frames) for each in (one, two)] == [1, 1]
        one.run_line_magic("unload_ext", "aotlab")
        assert events.listening()
        execute(two, cell("v = x + 1"))
        assert compiled(two.user_ns["report"]) == ["line 2"]
    finally:
        for each in (one, two):
            unload_ipython_extension(each)
    assert heard == events._listeners


def test_a_cell_does_not_hear_other_compilations(shell: InteractiveShell) -> None:
    """`aotlab.compile` used between the cells, or within one, is not the cell's."""
    execute(shell, "import aotlab\n@aotlab.compile(backend='eager')\ndef f(v):\n    return v * 2")
    execute(shell, cell("def g(v):\n    return v + 1"))
    execute(shell, "y = f(x)\nz = g(x)")
    assert [frame.name for frame in shell.user_ns["report"].frames] == ["g"]


# --- the playground itself ---------------------------------------------------------------------------------------


def test_names_are_lent_for_a_block() -> None:
    """The names that Dynamo needs are in the namespace only inside `opened`, also if the block fails or is nested."""
    namespace: dict[str, Any] = {"x": torch.ones(2)}
    playground = Playground(namespace)
    with playground.opened(("y",)):
        assert namespace[TORCH] is torch
        with playground.opened(("z",)):
            assert TORCH in namespace
        assert TORCH in namespace
    assert list(namespace) == ["x"]
    with pytest.raises(ZeroDivisionError), playground.opened():
        raise ZeroDivisionError
    assert list(namespace) == ["x"]


def test_a_name_that_the_user_has_stays_the_users() -> None:
    """A variable that is there already is not replaced while the code that binds it is compiled."""
    namespace: dict[str, Any] = {"x": torch.ones(2), "y": 5}
    playground = Playground(namespace)
    playground._owner = None
    with playground.opened(("y", "z")):
        playground._compile_starts(None)
        assert namespace["y"] == 5
        assert "z" in namespace
        namespace["__compiled_fn_0"] = 1
        playground._compile_ends(None)
        assert "z" not in namespace
    assert {"x", "y"} == set(namespace)
    with playground.opened():
        assert namespace["__compiled_fn_0"] == 1
    assert {"x", "y"} == set(namespace)
