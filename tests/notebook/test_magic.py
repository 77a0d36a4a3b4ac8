"""``%%aotcompile`` from the user's side: the extension, the options, their help, completion and errors, the display."""

from __future__ import annotations

import gc

import pytest
import torch

pytest.importorskip("ipykernel")

from IPython.core.completer import provisionalcompleter
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from aotlab import config, events
from aotlab.notebook import graphs, live
from aotlab.notebook.magic import CHOICES, FLAGS, parse
from aotlab.notebook.options import Options
from aotlab.report import Report
from aotlab.report.mime import embedded_size
from tests.notebook.plain_shells import (
    cell,
    compiled,
    execute,
    failing,
    kernel_notebook,
    plain_shell,
    printed,
    run_in_kernel,
)
from tests.notebook.portrait import REPORT_MIME

# --- the extension -----------------------------------------------------------------------------------------------


def installed(shell: InteractiveShell) -> dict[str, object]:
    """Describe everything of a shell that the extension adds to."""
    completing = shell.strdispatchers.get("complete_command")
    return {
        "magics": {kind: set(magics) for kind, magics in shell.magics_manager.magics.items()},
        "transformers": [
            list(shell.input_transformers_post),
            list(shell.input_transformer_manager.cleanup_transforms),
            list(shell.ast_transformers),
        ],
        "completion": {} if completing is None else {key: list(chain) for key, chain in completing.strs.items()},
        "attributes": {key for key in vars(shell) if "traceback" in key or "aot" in key},
        "events": {name: [each.__qualname__ for each in found] for name, found in shell.events.callbacks.items()},
        "custom errors": shell.custom_exceptions,
        "names": set(shell.user_ns),
        "display": (shell.display_pub, shell.displayhook),
    }


def test_loading_twice_and_unloading_leaves_nothing() -> None:
    """Loading is idempotent, reloading too, and unloading takes everything away, the observer included."""
    assert not events.listening()
    shell = plain_shell(loaded=False)
    shell.run_cell("pass")
    before = installed(shell)
    shell.run_line_magic("load_ext", "aotlab")
    loaded = installed(shell)
    assert loaded != before
    assert {"aotcompile"} == loaded["magics"]["cell"] - before["magics"]["cell"]  # type: ignore[index]
    assert events.listening()

    import aotlab

    aotlab.load_ipython_extension(shell)
    shell.run_line_magic("load_ext", "aotlab")
    assert loaded == installed(shell)
    shell.run_line_magic("reload_ext", "aotlab")
    again = installed(shell)
    assert [len(each) for each in loaded["transformers"]] == [len(each) for each in again["transformers"]]  # type: ignore[attr-defined]
    assert {**loaded, "transformers": None, "completion": None} == {**again, "transformers": None, "completion": None}
    execute(shell, "import torch\nx = torch.ones(3)")
    execute(shell, cell("y = x + 1"))
    shell.run_line_magic("unload_ext", "aotlab")
    shell.user_ns_hidden.update(dict.fromkeys(["torch", "x", "y", "report"]))
    left = installed(shell)
    assert {"torch", "x", "y", "report"} == left["names"] - before["names"]  # type: ignore[operator]
    assert {**before, "names": None} == {**left, "names": None}
    assert not events.listening()
    # a second unloading has nothing to do
    aotlab.unload_ipython_extension(shell)
    assert {**before, "names": None} == {**installed(shell), "names": None}


def test_a_kernel_is_left_as_it_was() -> None:
    """In a kernel, unloading takes back the comm target and the hooks at the beginning and end of cells, too."""
    with kernel_notebook(loaded=False) as notebook:
        shell, manager = notebook.shell, notebook.kernel.comm_manager
        before, targets = installed(shell), dict(manager.targets)
        for _ in range(2):
            shell.run_line_magic("load_ext", "aotlab")
            assert live.TARGET in manager.targets
            assert [each.__module__ for each in shell.events.callbacks["post_run_cell"]].count(live.__name__) == 1
        shell.run_line_magic("unload_ext", "aotlab")
        assert before == installed(shell)
        assert targets == manager.targets
    assert not events.listening()


def test_functions_go_on_working_after_unloading(shell: InteractiveShell) -> None:
    """Functions that a definitions cell compiled still work after unloading, and the extension can be loaded again."""
    execute(shell, cell("def double(v):\n    return v * 2"))
    execute(shell, "y = double(x)")
    shell.run_line_magic("unload_ext", "aotlab")
    execute(shell, "z = double(torch.ones(5)) + double(x).sum()")
    assert shell.user_ns["z"].tolist() == [8.0] * 5
    shell.run_line_magic("load_ext", "aotlab")
    execute(shell, cell("w = double(x)"))
    assert compiled(shell.user_ns["report"]) == ["line 2"]


# --- options -----------------------------------------------------------------------------------------------------


def test_options_are_read() -> None:
    """Every option reaches its field; the defaults are Inductor, auto, verification, and no time."""
    options = parse("")
    assert options is not None
    expected = (None, None, "auto", "inductor", "auto", False, True, False, False)
    found = (
        options.output, options.name, options.frontend, options.backend, options.device, options.dynamic,
        options.verify, options.time, options.quiet,
    )  # fmt: skip
    assert expected == found
    line = "-o out --name 'two words' --frontend direct --backend eager --device cuda:1 --dynamic --no-verify"
    options = parse(f"{line} --time --quiet")
    assert options is not None
    expected = ("out", "two words", "direct", "eager", "cuda:1", True, False, True, True)
    found = (
        options.output, options.name, options.frontend, options.backend, options.device, options.dynamic,
        options.verify, options.time, options.quiet,
    )  # fmt: skip
    assert expected == found


@pytest.mark.parametrize(
    ("line", "frontend"),
    [
        ("", "auto"),
        ("--frontend dynamo", "dynamo"),
        ("--frontend direct", "direct"),
        ("--time", "auto"),
        ("--rehearse h100", "dynamo"),
        ("--engine both", "dynamo"),
        ("--time --frontend dynamo", "dynamo"),
    ],
)
def test_the_setting_is_the_default_of_the_frontend(line: str, frontend: str) -> None:
    """By default, cells are traced directly, unless an option needs Dynamo. A setting changes the default."""
    options = parse(line)
    assert options is not None
    assert options.frontend == frontend
    with config.patch(cell_frontend="dynamo"):
        options = parse(line)
    assert options is not None
    assert options.frontend == ("direct" if frontend == "direct" else "dynamo")


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("--wrong", "unrecognized arguments: --wrong"),
        ("-o", "argument -o/--output: expected one argument"),
        ("-o 1st", "-o 1st: this is not a variable name"),
        ("-o class", "-o class: this is not a variable name"),
        ("--backend jax", "argument --backend: invalid choice: 'jax'"),
        ("--frontend fx", "argument --frontend: invalid choice: 'fx'"),
        ("--device tpu", "--device tpu: use auto, cpu, cuda or cuda:N"),
        ("--device cuda:x", "--device cuda:x: use auto, cpu, cuda or cuda:N"),
        ("--memory-budget 0.5", "--memory-budget 0.5: use a number from 0 to 1, together with --partitioner min-cut"),
        ("--partitioner min-cut --memory-budget 2", "--memory-budget 2: use a number from 0 to 1"),
        ("stray", "unrecognized arguments: stray"),
    ],
)
def test_a_wrong_option_is_a_usage_error(shell: InteractiveShell, line: str, part: str) -> None:
    """It is IPython's own kind of error, one line, and nothing of the cell has run."""
    error = failing(shell, f"%%aotcompile {line}\nran = True")
    assert isinstance(error, UsageError)
    assert part in str(error)
    assert len(str(error).splitlines()) == 1
    assert "ran" not in shell.user_ns


def test_the_report_is_bound_also_when_the_cell_raises(shell: InteractiveShell) -> None:
    """``-o`` binds a report that names the error that ended the cell and the parts that were compiled before it."""
    error = failing(shell, cell("y = x * 2\nprint(end='')\nz = y.nothing\nlater = 1"))
    assert type(error).__name__ == "AttributeError"
    report = shell.user_ns["report"]
    assert compiled(report) == ["line 2"]
    assert report.cell.error == "AttributeError: 'Tensor' object has no attribute 'nothing'"
    assert "The cell ended at line 4 with AttributeError" in report.verdict
    assert report.cell.parts[-1].how == "not run"
    assert "later" not in shell.user_ns


def test_the_title(shell: InteractiveShell) -> None:
    """``--name`` titles the report."""
    execute(shell, cell("y = x + 1", "--quiet --name 'a first step'"))
    assert shell.user_ns["report"].name == "a first step"


def test_no_verification(shell: InteractiveShell) -> None:
    """Without verification there are no comparisons, and the verdict says so. With it, there are comparisons."""
    execute(shell, cell("y = x + 1"))
    report = shell.user_ns["report"]
    assert len(report.verification) > 0
    assert "verified: equal to eager" in report.verdict
    execute(shell, cell("y = x + 1", "--quiet --no-verify"))
    report = shell.user_ns["report"]
    assert len(report.verification) == 0
    assert "not verified" in report.verdict


def test_time(shell: InteractiveShell) -> None:
    """``--time`` puts rows for eager, stock and aotlab into the report, and a sentence into the verdict."""
    execute(shell, "w = torch.ones(3, requires_grad=True)")
    execute(shell, cell("loss = (w * x).sum()"))
    assert len(shell.user_ns["report"].timings) == 0
    execute(shell, cell("loss = (w * x).sum()", "--quiet --time"))
    timings = shell.user_ns["report"].timings
    engines = ("eager", "upstream", "aotlab")
    assert {(engine, phase) for engine in engines for phase in ("forward", "backward", "total")} == set(
        zip(timings["engine"], timings["phase"], strict=True)
    )
    assert (timings["median_ns"] > 0).all()
    assert (timings["again"] > 0).all()
    assert "× eager's time (" in shell.user_ns["report"].verdict
    assert "× stock torch.compile's (" in shell.user_ns["report"].verdict
    assert shell.user_ns["w"].grad is None


def test_a_cell_that_cannot_be_timed_says_so(shell: InteractiveShell) -> None:
    """``--time`` on a cell without graphs is a note in the report, no error."""
    execute(shell, cell("answer = 42", "--quiet --time"))
    assert any(note.startswith("not timed: ") for note in shell.user_ns["report"].notes)


def test_the_backend_is_the_one_asked_for(shell: InteractiveShell) -> None:
    """``--backend eager`` runs torch's own kernels: no kernel was compiled."""
    execute(shell, cell("y = x + 1"))
    report = shell.user_ns["report"]
    assert [graph.backend for frame in report.frames for graph in frame.graphs] == ["eager"]
    assert len(report.kernels) == 0


# --- devices -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7"])
def test_cuda_without_a_gpu(shell: InteractiveShell, device: str) -> None:
    """The error names the missing device and a remedy, before any statement of the cell has run."""
    error = failing(shell, cell("ran = True\ny = x + 1", f"--device {device}"))
    assert isinstance(error, UsageError)
    assert (
        f"--device {device}: this machine has no CUDA device that torch can use; "
        "leave the option out, or use --device cpu"
    ) == str(error)
    assert "ran" not in shell.user_ns


@pytest.mark.parametrize(
    ("made", "body", "name"),
    [
        ("m = torch.ones(3, device='meta')", "y = m * 2", "m"),
        ("net = torch.nn.Linear(3, 2, device='meta')", "y = net(x)", "net.weight"),
        ("both = [x, torch.ones(3, device='meta')]", "y = both[1] + 1", "both[1]"),
    ],
)
@pytest.mark.parametrize("reverse", [False, True])
def test_what_cannot_be_moved(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, made: str, body: str, name: str, reverse: bool
) -> None:
    """One line names the first such tensor and says why it cannot be moved. The cell has not begun.

    The order in which the garbage collector lists the tensors does not matter; Python 3.13 changes it.
    """
    objects = gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda: objects()[:: -1 if reverse else 1])
    execute(shell, made + "\nseen = []")
    before = dict(shell.user_ns)
    error = failing(shell, cell(f"seen.append(1)\nfresh = x + 1\n{body}", "--device cpu"))
    assert isinstance(error, UsageError)
    assert str(error).startswith(f"`{name}` cannot be moved as it is: on the meta device, without data")
    assert shell.user_ns["seen"] == []
    assert {"report"} >= {key for key in shell.user_ns if key not in before and not key.startswith("_")}


def test_what_a_cell_uses_is_moved(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that the cell uses are moved before it runs, and the report says so.

    Tensors that it does not name stay.
    """
    monkeypatch.setattr(Options, "wanted_device", lambda _options: torch.device("cpu", 0))  # another one, to torch
    monkeypatch.setattr(graphs, "wrong_device", lambda *_: None)
    execute(shell, "net, other = torch.nn.Linear(3, 2), torch.ones(3)\ny = net(x[:3])")  # replaced by the cell
    names = shell.user_ns
    before = [names[name].untyped_storage()._cdata for name in ("x", "other")]
    execute(shell, cell("y = net(x[:3])\ny.sum()", "--device cpu"))
    after = [names[name].untyped_storage()._cdata for name in ("x", "other")]
    assert (before[0] != after[0], before[1] != after[1]) == (True, False)
    assert any(note.startswith("moved to cpu:0: `x`, `net` (") for note in names["report"].notes), names["report"].notes


def test_what_functions_use_is_moved(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell calls functions of earlier cells, compiled ones too: the variables that they read are used."""
    monkeypatch.setattr(Options, "wanted_device", lambda _options: torch.device("cpu", 0))  # another one, to torch
    monkeypatch.setattr(graphs, "wrong_device", lambda *_: None)
    execute(shell, "net, data, other = torch.nn.Linear(3, 2), torch.ones(3), torch.ones(3)")
    execute(shell, cell("def loss():\n    return net(x[:3]).sum()", "--quiet"))
    execute(shell, "def step():\n    return [loss().data for _ in range(1)][0]")
    names = ("x", "data", "other")
    before = [shell.user_ns[name].untyped_storage()._cdata for name in names]
    execute(shell, cell("y = step()", "--device cpu"))
    after = [shell.user_ns[name].untyped_storage()._cdata for name in names]
    assert [old != new for old, new in zip(before, after, strict=True)] == [True, False, False]
    assert any("`net`" in note and "`x`" in note for note in shell.user_ns["report"].notes)


def test_the_device_that_is_there(shell: InteractiveShell) -> None:
    """``--device cpu`` compiles tensors on the CPU.

    Tensors on other devices do not matter if the cell does not name them.
    """
    execute(shell, "m = torch.ones(3, device='meta')")
    execute(shell, cell("y = x * 2", "--quiet --device cpu"))
    assert compiled(shell.user_ns["report"]) == ["line 2"]


# --- help and completion -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("frontend", ["dynamo", "direct"])
def test_partitioner(shell: InteractiveShell, frontend: str) -> None:
    """The options choose the partitioner and its budget: with less memory, more values are computed again."""
    execute(shell, "w = torch.ones(64, requires_grad=True)")
    body = "def f(w):\n    return ((w * 2).sin().exp() + 1).cos().sum()"
    saved = []
    for options in ("", "--partitioner min-cut", "--partitioner min-cut --memory-budget 0"):
        execute(shell, cell(body, f"-o report --frontend {frontend} {options}"))
        execute(shell, "f(w).backward()")
        saved.append(int(shell.user_ns["report"].saved.query("~is_input")["nbytes"].sum()))
    assert saved[0] > saved[1] >= saved[2] == 0


@pytest.mark.parametrize("text", ["%%aotcompile --help", "%%aotcompile -h\nran = True", "%aotcompile --help"])
def test_help_shows_every_option_and_runs_nothing(shell: InteractiveShell, text: str) -> None:
    """With and without a body, as cell and as line magic."""
    shown, _ = printed(shell, text)
    assert shown.startswith("usage: %%aotcompile [-o NAME]")
    assert [flag for flag in FLAGS if flag not in shown] == []
    assert [choice for choices in CHOICES.values() for choice in choices if choice not in shown] == []
    assert "ran" not in shell.user_ns


def test_question_mark_shows_the_options(shell: InteractiveShell) -> None:
    """``%%aotcompile?`` shows the same text."""
    shown, _ = printed(shell, "%%aotcompile?")
    assert [flag for flag in FLAGS if flag not in shown] == []


def test_an_empty_cell_does_nothing(shell: InteractiveShell) -> None:
    """The magic alone is no error, and neither is a comment below it."""
    before = set(shell.user_ns)
    shown, displayed = printed(shell, "%%aotcompile -o report")
    assert (shown, displayed) == ("", [])
    printed(shell, "%%aotcompile -o report --backend eager\n# nothing yet\n")
    assert {name for name in set(shell.user_ns) - before if not name.startswith("_")} <= {"report"}


def test_the_line_magic_says_that_it_is_a_cell_magic(shell: InteractiveShell) -> None:
    """``%aotcompile`` with one percent sign gives an error with the correct spelling."""
    error = failing(shell, "%aotcompile -o report")
    assert isinstance(error, UsageError)
    assert "write it with two percent signs" in str(error)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%%aotcompile --", set(FLAGS)),
        ("%%aotcompile --b", {"--backend"}),
        ("%%aotcompile -o report --no", {"--no-verify"}),
        ("%%aotcompile --backend ", {"inductor", "eager"}),
        ("%%aotcompile --backend e", {"eager"}),
        ("%%aotcompile --frontend d", {"dynamo", "direct"}),
        ("%%aotcompile --device c", {"cpu", "cuda"}),
    ],
)
@pytest.mark.parametrize("body", ["", "\ny = x + 1\n"])
def test_completion(shell: InteractiveShell, line: str, expected: set[str], body: str) -> None:
    """Completion in the magic's line gives the options, or the choices of the option before the cursor."""
    known = {*FLAGS, *(choice for choices in CHOICES.values() for choice in choices)}
    with provisionalcompleter():
        found = {each.text for each in shell.Completer.completions(line + body, len(line))}
    assert expected == found & known


# --- the display -------------------------------------------------------------------------------------------------


def test_the_display_is_opened_with_the_cell_and_replaced_in_place() -> None:
    """One display: the running cell first, updates under one identifier, the report last, above the cell's result."""
    with kernel_notebook() as notebook:
        run_in_kernel(notebook, "import torch\nx = torch.ones(3)")
        notebook.messages.clear()
        run_in_kernel(notebook, "%%aotcompile --backend eager\nprint('printed')\nx + 1")
        kinds = [message["type"] for message in notebook.messages]
        assert kinds.count("display_data") == 1
        assert kinds.index("display_data") < kinds.index("stream") < kinds.index("execute_result")
        shown = [message for message in notebook.messages if message.get("transient")]
        assert len({message["transient"]["display_id"] for message in shown}) == 1
        assert shown[0]["type"] == "display_data"
        assert all(message["data"]["text/plain"].startswith("aotlab · ") for message in shown[:-1])
        # JupyterLab draws all of these messages with one renderer, because each of them has the report's type.
        states = [message["data"][REPORT_MIME]["summary"]["state"] for message in shown]
        assert states == ["running"] * (len(shown) - 1) + ["verified"]
        # The last message that a front end keeps contains no progress.
        assert shown[-1]["type"] == "update_display_data"


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_line_adds_little_to_a_notebook(backend: str) -> None:
    """For a line with a backward, the notebook's file stores at most 25 KB, including the code of its graphs."""
    with kernel_notebook() as notebook:
        run_in_kernel(notebook, "import torch\nx = torch.ones(3, 4, requires_grad=True)")
        notebook.messages.clear()
        run_in_kernel(notebook, f"%%aotcompile --backend {backend}\n(x.sin() * 2).sum().backward()")
        data = notebook.messages[-1]["data"]
        graph = Report.from_dict(data[REPORT_MIME]).frames[0].graphs[0]
        assert any("aten.sin" in code.text for stage in graph.stages for code in stage.codes)
        assert any(node.target == "aten.sin.default" for node in graph.nodes)
        assert embedded_size(data) <= 26_000


def test_two_runs_have_two_displays() -> None:
    """The second run of a cell does not write into the output of the first."""
    with kernel_notebook() as notebook:
        run_in_kernel(notebook, "import torch\nx = torch.ones(3)")
        seen = []
        for _ in range(2):
            notebook.messages.clear()
            run_in_kernel(notebook, "%%aotcompile --backend eager\ny = x + 1")
            seen.append({m["transient"]["display_id"] for m in notebook.messages if m.get("transient")})
        assert [len(each) for each in seen] == [1, 1]
        assert not seen[0] & seen[1]


def test_an_error_leaves_the_report_and_no_progress() -> None:
    """Also of a cell that raises, one display remains, and it holds the report."""
    with kernel_notebook() as notebook:
        run_in_kernel(notebook, "import torch\nx = torch.ones(3)")
        notebook.messages.clear()
        reply = run_in_kernel(notebook, "%%aotcompile --backend eager\ny = x + 1\nraise ValueError('no')", ok=False)
        assert reply["ename"] == "ValueError"
        shown = [message for message in notebook.messages if message.get("transient")]
        assert len({message["transient"]["display_id"] for message in shown}) == 1
        assert REPORT_MIME in shown[-1]["data"]


def test_quiet_displays_nothing() -> None:
    """With ``--quiet`` only the cell's own output is there; the report is bound all the same."""
    with kernel_notebook() as notebook:
        run_in_kernel(notebook, "import torch\nx = torch.ones(3)")
        notebook.messages.clear()
        run_in_kernel(notebook, "%%aotcompile -o report --backend eager --quiet\nprint('printed')\nx + 1")
        assert [m["type"] for m in notebook.messages if m["type"] != "stream"] == ["execute_result"]
        assert "".join(m["text"] for m in notebook.messages if m["type"] == "stream") == "printed\n"
        assert compiled(notebook.shell.user_ns["report"]) == ["line 3"]


def test_capture_above_the_magic() -> None:
    """``%%capture`` keeps the cell's text and one display with the report, and nothing reaches the notebook."""
    with kernel_notebook() as notebook:
        run_in_kernel(notebook, "import torch\nx = torch.ones(3)")
        notebook.messages.clear()
        run_in_kernel(notebook, "%%capture kept\n%%aotcompile --backend eager\nprint('printed')\ny = x + 1")
        assert notebook.messages == []
        kept = notebook.shell.user_ns["kept"]
        assert kept.stdout == "printed\n"
        assert kept.stderr == ""
        assert [REPORT_MIME in output.data for output in kept.outputs] == [True]
        assert notebook.shell.user_ns["y"].tolist() == [2.0] * 3
