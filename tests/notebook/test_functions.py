"""Cells that define functions: each is compiled for its later calls, and the cell's report grows with them."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest

pytest.importorskip("IPython")

import torch
from IPython.core.interactiveshell import InteractiveShell

import aotlab
from aotlab.notebook.options import Options
from aotlab.report.verdict import verdict
from aotlab.runtime import runtime_stage as runtime
from tests.notebook.plain_shells import cell, compiled, execute, failing, printed

FRONTENDS = ["dynamo", "direct"]

#: Where aotlab lies; a checkout or an environment may be called so, too.
PACKAGE = os.path.dirname(aotlab.__file__) + os.sep


def define(shell: InteractiveShell, body: str, options: str = "--quiet") -> Any:
    """Run a cell of definitions; return its report, which lives on."""
    execute(shell, cell(body, options))
    return shell.user_ns["report"]


def parts(report: Any) -> dict[int, tuple[str, str]]:
    """Return by first line how a part of the cell ran, and why not otherwise."""
    return {part.first_line: (part.how, part.reason) for part in report.cell.parts}


def calls(report: Any) -> dict[str, tuple[int, int, int]]:
    """Return for each frame the number of all calls, of compiled calls and of eager calls."""
    return {frame.name: (frame.calls.total, frame.calls.compiled, frame.calls.eager) for frame in report.frames}


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_the_report_grows_with_the_calls(shell: InteractiveShell, frontend: str) -> None:
    """Before the first call nothing is compiled, and the verdict says so; every call is counted in the same report."""
    report = define(shell, "def double(v):\n    return v * 2", f"--quiet --frontend {frontend}")
    assert report.verdict.startswith("Nothing to compile yet: ")
    assert parts(report) == {2: ("not run", "a function that was not called yet")}
    execute(shell, "y = double(x)")
    assert parts(report) == {2: ("compiled", "")}
    assert calls(report) == {"double": (1, 1, 0)}
    assert report.verdict.startswith("Compiled double")
    execute(shell, "y = double(x)\ny = double(y)")
    assert calls(report) == {"double": (3, 3, 0)}
    assert shell.user_ns["y"].tolist() == [4.0] * 3
    assert sum(len(frame.graphs) for frame in report.frames) == 1


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_recompile_is_explained_by_the_nearest_graph(shell: InteractiveShell, frontend: str) -> None:
    """A call that differs from one graph in a number alone, and from the other in a dtype too, names the number."""
    body = "def norm(t, scale=1.0):\n    return t / t.norm() * scale"
    report = define(shell, body, f"--quiet --frontend {frontend}")
    execute(shell, "y = norm(x), norm(x.double()), norm(x, 2.0)")
    nearest = report.recompiles.iloc[1]
    assert nearest[["graph", "earlier", "subject", "before", "after"]].tolist() == [2, 0, "scale", "1.0", "2.0"]


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_the_frontend_is_the_one_asked_for(shell: InteractiveShell, frontend: str) -> None:
    """The report's graphs tell which frontend captured them, and only Dynamo's runs hand Dynamo a frame."""
    frames = torch._dynamo.utils.counters["frames"]["total"]
    report = define(shell, "def double(v):\n    return v * 2", f"--quiet --frontend {frontend}")
    execute(shell, "y = double(x)")
    assert [frontend] == [graph.frontend for frame in report.frames for graph in frame.graphs]
    captured = torch._dynamo.utils.counters["frames"]["total"] - frames
    assert (captured > 0) == (frontend == "dynamo")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("def double(v):\n    return v * 2\ny = double(x)", ["double"]),
        ("def double(v):\n    return v * 2\ny = double(x) + 1", ["line 4"]),  # the line computes, too
        ("def double(v):\n    return v * 2\ny = double(x)\nz = y + 1", ["lines 4–5"]),
        # Dynamo captures the code before and after a graph break apart
        ("def broken(v):\n    v = v * 2\n    print('.')\n    return v + 1\ny = broken(x)", ["broken", "broken (2)"]),
        ("y = x * 2", ["line 2"]),
    ],
)
def test_a_function_called_in_its_own_cell_has_its_name(
    shell: InteractiveShell, body: str, expected: list[str]
) -> None:
    """A graph that Dynamo captured of a function of the cell, or of a part of its call, has the function's name."""
    report = define(shell, body, "--quiet --frontend dynamo")
    assert [frame.name for frame in report.frames] == expected


def test_names_of_an_optimizer_that_a_function_of_the_cell_makes(shell: InteractiveShell) -> None:
    """State that exists only while the function runs is named by the function's variables, in every round of a loop."""
    body = """
def train(steps):
    net = torch.nn.Linear(3, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        net(x).sum().backward()
        opt.step()
train(3)
"""
    names = set(define(shell, body).inputs["name"])
    assert {"net.weight", "net.weight.grad", "opt.state[net.weight]['momentum_buffer']"} <= names
    assert not [name for name in names if "___" in name or "param_groups" in name]


def test_names_of_state_that_is_made_while_the_cell_runs(shell: InteractiveShell) -> None:
    """The notebook's optimizer gets its state in the first round of a function's loop: the second round names it."""
    execute(shell, "net = torch.nn.Linear(3, 1)\nopt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)")
    body = (
        "def train(steps):\n    for _ in range(steps):\n        net(x).sum().backward()\n        opt.step()\ntrain(3)"
    )
    names = set(define(shell, body).inputs["name"])
    assert "opt.state[net.weight]['momentum_buffer']" in names
    assert not [name for name in names if "___" in name or "param_groups" in name]


def test_direct_wants_a_cell_of_definitions(shell: InteractiveShell) -> None:
    """For other statements, the error suggests a remedy, and nothing has run."""
    error = failing(shell, cell("ran = True\ny = x + 1", "--frontend direct"))
    assert str(error) == (
        "--frontend direct traces calls of functions, and this cell has other statements: "
        "define a function in a separate cell, or leave the option out"
    )
    assert "ran" not in shell.user_ns


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_why_it_was_compiled_again(shell: InteractiveShell, frontend: str) -> None:
    """Another shape and another dtype are compiled for once each, with the assumption that did not hold."""
    report = define(shell, "def double(v):\n    return v * 2", f"--quiet --frontend {frontend}")
    execute(shell, "double(x)\ndouble(torch.ones(4))\ndouble(torch.ones(3, dtype=torch.float64))")
    execute(shell, "double(x)\ndouble(torch.ones(4))")
    rows = report.recompiles
    assert list(zip(rows["graph"], rows["earlier"], strict=True)) in (
        [(1, 0), (2, 0), (2, 1)],
        [(1, 0), (2, 1), (2, 0)],
    )
    assert "`v.size(0)` is 4" in rows["reason"][0]
    assert {"dynamo": "`v.dtype` is float64", "direct": "`v` has dtype"}[frontend] in rows["reason"][1]
    assert calls(report) == {"double": (5, 5, 0)}


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_sizes_and_numbers_that_change(shell: InteractiveShell, frontend: str) -> None:
    """Varying sizes and numbers are compiled for all values. The graph is verified, and can be timed."""
    source = "def scaled(v, s):\n    v.add_(1)\n    return v * s, v[1:], v.shape[0]"
    report = define(shell, source, f"--quiet --backend eager --frontend {frontend}")
    execute(shell, "found = [scaled(torch.arange(float(n)), n / 2) for n in (3, 5, 7, 9)]")
    for n, (product, rest, size) in zip((3, 5, 7, 9), shell.user_ns["found"], strict=True):
        v = torch.arange(float(n)) + 1
        assert product.equal(v * (n / 2))
        assert rest.equal(v[1:])
        assert size == n
    assert calls(report) == {"scaled": (4, 4, 0)}
    assert list(report.calls["graph"]) == [0, 1, 1, 1]
    assert list(report.inputs["shape"].dropna()) == ["[3]", "[v.size(0)=5]"]
    assert "compiled for all" in report.recompiles["reason"].item()
    assert report.verification["equal"].all()
    assert set(report.verification["graph"].dropna()) == {0, 1}
    assert not report.notes


def test_a_training_flag_is_an_assumption(shell: InteractiveShell) -> None:
    """``eval()`` compiles again, and the report says that the flag changed. Dropout is then off, and on again later."""
    execute(shell, "net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5))")
    report = define(shell, "def apply(v):\n    return net(v)")
    execute(shell, "y = apply(x)\nnet.eval()\nz = apply(x)\nsame = torch.equal(z, net(x))\nnet.train()\nw = apply(x)")
    reasons = list(report.recompiles["reason"])
    assert len(reasons) == 1
    assert "training" in reasons[0]
    assert shell.user_ns["same"]
    assert calls(report) == {"apply": (3, 3, 0)}


def test_a_function_of_several_graphs(shell: InteractiveShell) -> None:
    """A graph break splits a function into frames of the report. The report gives the reason and the line."""
    report = define(shell, "def split(v):\n    a = v + 1\n    print('between')\n    return a * 2")
    shown, _ = printed(shell, "y = split(x)")
    assert shown == "between\n"
    assert [frame.name for frame in report.frames] == ["split", "split (2)"]
    how, reason = parts(report)[2]
    assert how == "compiled"
    assert "print" in reason
    assert shell.user_ns["y"].tolist() == [4.0] * 3


def test_kinds_of_functions(shell: InteractiveShell) -> None:
    """Decorated and recursive functions are compiled; generators and async functions stay as they are, and work."""
    report = define(
        shell,
        "import functools\n"
        "def more(f):\n    @functools.wraps(f)\n    def inner(*args):\n        return f(*args) + 1\n    return inner\n"
        "@more\ndef tripled(v):\n    return v * 3\n"
        "def power(v, n):\n    return v if n == 0 else power(v * 2, n - 1)\n"
        "def each(v):\n    for row in v:\n        yield row + 1\n"
        "async def later(v):\n    return v + 5\n",
    )
    execute(shell, "import inspect\na, b, c = tripled(x), power(x, 3), list(each(x))\nd = await later(x)")
    assert [
        shell.user_ns["a"].tolist(), shell.user_ns["b"].tolist(), [float(v) for v in shell.user_ns["c"]],
        shell.user_ns["d"].tolist(),
    ] == [[4.0] * 3, [8.0] * 3, [2.0] * 3, [6.0] * 3]  # fmt: skip
    assert {"tripled", "power"} == set(compiled(report))
    execute(shell, "kinds = inspect.isgeneratorfunction(each), inspect.iscoroutinefunction(later)")
    assert shell.user_ns["kinds"] == (True, True)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_compiled_function_looks_as_it_did(shell: InteractiveShell, frontend: str) -> None:
    """Name, docstring, signature, defaults, annotations, module and source are the function's."""
    text = "def scale(v: torch.Tensor, by=2.0, *, shift=0):\n    '''Scale it.'''\n    return v * by + shift"
    define(shell, text, f"--quiet --frontend {frontend}")
    execute(shell, "import inspect\nsource, signature = inspect.getsource(scale), str(inspect.signature(scale))")
    scale = shell.user_ns["scale"]
    assert (
        scale.__name__, scale.__qualname__, scale.__doc__, scale.__module__
    ) == ("scale", "scale", "Scale it.", "__main__")  # fmt: skip
    assert (scale.__defaults__, scale.__kwdefaults__) == ((2.0,), {"shift": 0})
    assert shell.user_ns["signature"] == "(v: torch.Tensor, by=2.0, *, shift=0)"
    assert text == shell.user_ns["source"].rstrip("\n")
    execute(shell, "y = scale(x, shift=1), scale(x, 3.0), scale(by=4.0, v=x)")
    assert [each[0].item() for each in shell.user_ns["y"]] == [3.0, 3.0, 4.0]


def test_classes_and_methods_are_left_alone(shell: InteractiveShell) -> None:
    """In a cell with a class, the cell's statements are compiled.

    The class is defined unchanged, its methods are plain functions.
    """
    execute(shell, cell("class Net:\n    def double(self, v):\n        return v * 2\ny = Net().double(x)"))
    net = shell.user_ns["Net"]
    assert net.double.__qualname__ == "Net.double"
    assert not hasattr(net.double, "__wrapped__")
    assert shell.user_ns["report"].cell.kind == "statements"
    assert shell.user_ns["y"].tolist() == [2.0] * 3


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_function_within_another_cell(shell: InteractiveShell, frontend: str) -> None:
    """A compiled cell that calls it captures through it: one graph there, and the function's report is unmoved."""
    functions = define(shell, "def double(v):\n    return v * 2", f"--quiet --frontend {frontend}")
    execute(shell, cell("y = double(x) + 1"))
    report = shell.user_ns["report"]
    assert compiled(report) == ["line 2"]
    assert calls(functions) == {}
    assert shell.user_ns["y"].tolist() == [3.0] * 3


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_functions_of_one_cell_that_call_each_other(shell: InteractiveShell, frontend: str) -> None:
    """The inner function becomes part of the outer one's graph. A direct call compiles it separately."""
    report = define(
        shell,
        "def inner(v):\n    return v * 2\ndef outer(v):\n    return inner(v) + 1",
        f"--quiet --frontend {frontend}",
    )
    execute(shell, "y = outer(x)")
    assert compiled(report) == ["outer"]
    execute(shell, "z = inner(x)")
    assert {"outer", "inner"} == set(compiled(report))
    assert shell.user_ns["y"].tolist() == [3.0] * 3
    assert shell.user_ns["z"].tolist() == [2.0] * 3


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_mutation_and_gradients(shell: InteractiveShell, frontend: str) -> None:
    """Mutated arguments, aliases and gradients are eager's, and the table names the argument."""
    text = "def step(v, weight):\n    v.add_(1)\n    return (v * weight).sum(), v[1:]"
    report = define(shell, text, f"--quiet --frontend {frontend}")
    execute(shell, "w = torch.arange(3.0, requires_grad=True)\nloss, view = step(x, w)\nloss.backward()")
    names = shell.user_ns
    assert names["x"].tolist() == [2.0] * 3
    assert names["w"].grad.tolist() == [2.0] * 3
    assert names["view"].data_ptr() == names["x"][1:].data_ptr()
    assert names["loss"].item() == 6.0
    mutated = report.inputs[report.inputs["mutates_data"].fillna(False).astype(bool)]["name"]
    assert len(mutated) == 1
    assert {"v" if frontend == "direct" else "x"} >= {each for each in mutated if each != "v"}


def test_what_direct_refuses_runs_eagerly(shell: InteractiveShell) -> None:
    """A call that cannot be traced faithfully has eager's results, no warning, and its reason in the report."""
    execute(shell, "net = torch.nn.Linear(3, 2)")
    text = "def apply(v):\n    return net(v).sum() if v[None] @ v[:, None] >= 0 else v"
    report = define(shell, text, "--quiet --frontend direct")
    shown, _ = printed(shell, "loss = apply(x)\nloss.backward()")
    assert shown == ""
    assert shell.user_ns["net"].weight.grad is not None
    assert calls(report) == {"apply": (1, 0, 1)}
    how, reason = parts(report)[2]
    assert how == "eager"
    assert 'torch.where, or use frontend="dynamo"' in reason
    assert report.verdict.startswith("Nothing was compiled: ")


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_an_error_in_the_compiled_form_is_eagers(shell: InteractiveShell, frontend: str) -> None:
    """An error in a compiled form, here an index out of range, is eager's.

    The statements before it have run once.
    """
    text = "def look(v, i, table):\n    v.add_(1)\n    return v + torch.nn.functional.embedding(i, table).sum()"
    report = define(shell, text, f"--quiet --frontend {frontend}")
    execute(shell, "table = torch.ones(4, 2)\ny = look(x, torch.tensor([1]), table)")
    assert calls(report) == {"look": (1, 1, 0)}
    error = failing(shell, "look(x, torch.tensor([9]), table)")
    assert str(error) == "index out of range in self"
    assert shell.user_ns["x"].tolist() == [3.0] * 3
    files = []
    traceback = error.__traceback__
    while traceback is not None:
        files.append(traceback.tb_frame.f_code.co_filename)
        traceback = traceback.tb_next
    assert [file for file in files if file.startswith(PACKAGE) or "_dynamo" in file] == []
    execute(shell, "y = look(x, torch.tensor([1]), table)")
    assert shell.user_ns["y"].tolist() == [6.0] * 3


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_user_error_while_tracing_happens_once(shell: InteractiveShell, frontend: str) -> None:
    """A first call that fails midway leaves the same state as eager: the write before the error has happened once."""
    text = "def wrong(v):\n    v.add_(1)\n    return v @ torch.ones(7)"
    define(shell, text, f"--quiet --frontend {frontend}")
    error = failing(shell, "wrong(x)")
    assert isinstance(error, RuntimeError)
    assert shell.user_ns["x"].tolist() == [2.0] * 3


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_wrong_compiled_form_is_not_used(
    shell: InteractiveShell, frontend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the compiled result differs from eager's, the calls run eagerly and the report says NOT equal."""
    original = runtime.run

    def sabotaged(*args: Any) -> Any:
        record, run = original(*args)
        return record, lambda *given: run(*given) + 1

    monkeypatch.setattr(runtime, "run", sabotaged)
    report = define(shell, "def double(v):\n    return v * 2", f"--quiet --frontend {frontend}")
    execute(shell, "y = double(x)\nz = double(x)")
    assert [2.0] * 3 == shell.user_ns["y"].tolist() == shell.user_ns["z"].tolist()
    assert "its compiled form differs from eager" in parts(report)[2][1]
    assert verdict(report.report()).state == "different"
    assert report.verdict.startswith("Nothing was compiled: ")


def test_without_verification_a_wrong_form_is_used(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sabotage of the test above is one: with ``--no-verify`` nobody notices."""
    original = runtime.run

    def sabotaged(*args: Any) -> Any:
        record, run = original(*args)
        return record, lambda *given: run(*given) + 1

    monkeypatch.setattr(runtime, "run", sabotaged)
    report = define(shell, "def double(v):\n    return v * 2", "--quiet --frontend direct --no-verify")
    execute(shell, "y = double(x)")
    assert shell.user_ns["y"].tolist() == [3.0] * 3
    assert "not verified" in report.verdict


def test_what_a_function_prints_under_direct(shell: InteractiveShell) -> None:
    """It is printed when the call is traced; the verification and later calls of the same kind print nothing."""
    define(shell, "def loud(v):\n    print('traced')\n    return v + 1", "--quiet --frontend direct")
    shown, _ = printed(shell, "y = loud(x)\nz = loud(x)")
    assert shown == "traced\n"


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_defining_again_starts_anew(shell: InteractiveShell, frontend: str) -> None:
    """Another text under the same name is another function with another report; the first one's stays as it was."""
    first = define(shell, "def f(v):\n    return v * 2", f"--quiet --frontend {frontend}")
    execute(shell, "y = f(x)")
    second = define(shell, "def f(v):\n    return v * 5", f"--quiet --frontend {frontend}")
    execute(shell, "y = f(x)")
    assert shell.user_ns["y"].tolist() == [5.0] * 3
    assert (calls(first), calls(second)) == ({"f": (1, 1, 0)}, {"f": (1, 1, 0)})
    assert first.identifier != second.identifier


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_the_device_of_arguments(shell: InteractiveShell, frontend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with an argument on another device than the requested one runs eagerly. The report says how to move it."""
    monkeypatch.setattr(Options, "wanted_device", lambda _options: torch.device("cuda", 0))
    report = define(shell, "def double(v):\n    return v * 2", f"--quiet --frontend {frontend} --device cuda")
    execute(shell, "y = double(x)")
    assert shell.user_ns["y"].tolist() == [2.0] * 3
    (message,) = (each.message for frame in report.frames for each in frame.refusals)
    name = "v" if frontend == "direct" else "x"
    assert f"`{name}` is on cpu, not on cuda:0; move it: `{name} = {name}.to('cuda:0')`" == message
    assert parts(report)[2][0] == "eager"


def test_what_is_refused_before_it_is_traced(shell: InteractiveShell) -> None:
    """The reason is in the report, though the engine did not come as far as to announce a compilation."""
    report = define(shell, "def double(v):\n    return v * 2", "--quiet --frontend direct")
    execute(shell, "y = double(torch.ones(3, device='meta'))")
    how, reason = parts(report)[2]
    assert how == "eager"
    assert "`v` is on the meta device" in reason
    assert reason.endswith("a trace cannot represent it; pass a tensor with memory [unsupported-tensor]")


def test_a_function_keeps_no_argument_alive() -> None:
    """The copies that could undo a first call's writes are freed when the call has ended."""
    import weakref

    from IPython.core.interactiveshell import InteractiveShell

    from aotlab.notebook import load_ipython_extension, unload_ipython_extension

    shell = InteractiveShell()
    shell.history_manager.enabled = False
    load_ipython_extension(shell)
    try:
        shell.run_cell("import torch").raise_error()
        shell.run_cell(
            "%%aotcompile --backend eager --quiet\ndef f(v):\n    v.mul_(2)\n    return v.sum()\n"
        ).raise_error()
        shell.run_cell("w = torch.ones(3)\ns = f(w)").raise_error()
        alive = weakref.ref(shell.user_ns["w"])
        shell.run_cell("del w").raise_error()
        gc.collect()
        assert alive() is None
    finally:
        unload_ipython_extension(shell)


def test_what_python_writes_after_a_break_is_told(shell: InteractiveShell) -> None:
    """Behind a graph break, the rest of the function changes its argument in Python: the report names the argument."""
    body = "def f(v):\n    if (v @ v.t() @ v).sum() > 0:\n        return v * 2\n    return v.t_()\n"
    report = define(shell, body, "--quiet --backend eager")
    execute(shell, "f(torch.ones(2, 3))")
    assert not report.inputs["mutated"].any()
    execute(shell, "m = -torch.ones(2, 3)\ny = f(m)\nz = f(v=-torch.ones(2, 3))")
    told = report.inputs[["name", "frame", "mutated", "mutates_metadata"]].values.tolist()
    assert [row for row in told if row[2]] == [
        ["m", "outside of the graphs", True, True],
        ["v", "outside of the graphs", True, True],
    ]


def test_what_a_graph_writes_in_a_broken_function_is_told_once(shell: InteractiveShell) -> None:
    """The graph before the break writes the argument, of every call: nothing was written outside."""
    report = define(shell, "def f(v):\n    v.add_(1)\n    print('!')\n    return v * 2\n", "--quiet --backend eager")
    execute(shell, "f(x)\nf(torch.ones(3))")
    assert "outside of the graphs" not in report.inputs["frame"].tolist()
    assert report.inputs["mutated"].any()


def test_what_an_uncaptured_function_writes_is_told(shell: InteractiveShell) -> None:
    """If nothing of a function is captured, the report still lists the changes to its argument."""
    report = define(shell, "def g(v):\n    return v.t_()\n", "--quiet --backend eager")
    execute(shell, "m = torch.ones(2, 3)\ny = g(m)")
    assert report.inputs[["name", "mutates_metadata"]].values.tolist() == [["m", True]]
