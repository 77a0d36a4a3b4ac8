"""Fresh notebook shells in this process, and everything that their user can observe of a cell.

`run` starts ipykernel's own kernel without its sockets, inside of a running event loop as in JupyterLab, and executes
the setup cells, the cell and the follow-up cells of one record of `tests.notebook.cells` in it. After the cell and
after each later one it writes down a `Moment`: the outputs as a saved notebook would hold them, the error, the
namespace (`tests.notebook.portrait`) and the state of the process. `differences` compares two runs, one eager, one
under the magic, whose first line only shifts the cell's lines by one.

Left out of the comparison: the magic's own report among the outputs and its name, the input history (which shows the
magic's line), and the names of ``grad_fn`` nodes.
"""

from __future__ import annotations

import asyncio
import atexit
import builtins
import functools
import gc
import hashlib
import io
import logging
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch._dynamo
from ipykernel.ipkernel import IPythonKernel
from ipykernel.zmqshell import ZMQInteractiveShell
from jupyter_client.session import Session
from traitlets.config import Config

import aotlab
from tests.notebook.cells import Cell
from tests.notebook.portrait import REPORT_MIME, digest, plain, portrait

MAGIC = "%%aotcompile"

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_CELL_FRAME = re.compile(r"\s*Cell In\[(\d+)\], line (\d+)(.*)")
_FILE_FRAME = re.compile(r"File (.+?):(\d+)(, in .*)?")
#: A cell's file, as warnings, tracebacks and syntax errors name it, and the line in it.
_CELL_FILE = re.compile(r"((?:[^\s\"'<]*ipykernel_\d+[/\\]+|(?<=\())\d+\.py)(?:(:|\", line |, line )(\d+))?")
#: IPython's own frame, which it shows for exception groups only.
_RUN_CODE = re.compile(r'  \|   File "[^"]*interactiveshell\.py", line \d+, in run_code\n.*\n')
_ARROW = re.compile(r"-+> (\d+) ?(.*)")
#: Frames that nobody wants to see in their traceback.
_OURS = re.compile(
    r"torch/_dynamo|torch/_inductor|torch/fx|torch/_functorch|run_cell_magic|"
    + re.escape(os.path.dirname(aotlab.__file__) + os.sep)
)
#: A thread that torch's interpreter of graphs starts, by making a progress bar that it does not show.
_TQDM = "tqdm_monitor"
#: What `%load_ext` may change, and what other tests of this process may have changed.
_RELATIVE = frozenset(
    {
        *("environment", "path", "folder", "warning filters", "showwarning", "builtins", "garbage collection"),
        *("loggers", "hooks", "signals", "ast transformers", "modules"),
        *("dynamo configuration", "functorch configuration"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The observables after one cell.

    Attributes
    ----------
    outputs
        As a saved notebook would hold them, in order, without the report; adjacent texts of one stream are one.
    reports
        At which places among all outputs a report stood.
    facts
        The namespace, the process and the reply, as texts by place.
    astray
        Whether IPython shows other lines than the traceback has: it looks at where a frame is now, which after an
        ``except`` or a ``finally`` is not where it was when it raised.
    """

    outputs: tuple[tuple[str, ...], ...]
    reports: tuple[int, ...]
    facts: dict[str, str]
    astray: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One side: the moments after the cell and after each follow-up, and the report that ``-o`` left, if any.

    ``compiled`` is how many graphs the report shows as compiled, ``again`` how many of them were not taken over when
    the cell ran a second time, ``unique`` how many graphs Dynamo handed to a backend in that second run.
    """

    moments: tuple[Moment, ...]
    report: Any = None
    unique: int | None = None


class _Session(Session):
    """Keeps the kernel's messages in place of sending them."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        super().__init__(key=b"cells")
        self.messages = messages

    def send(self, stream: Any, msg_or_type: Any, content: Any = None, *args: Any, **kwargs: Any) -> Any:
        message = msg_or_type if isinstance(msg_or_type, dict) else self.msg(msg_or_type, content or {})
        self.messages.append({"type": message["msg_type"], **message["content"]})
        return message


class _Stream(io.TextIOBase):
    """Standard output or error: writes stream messages in order with the others."""

    def __init__(self, name: str, messages: list[dict[str, Any]]) -> None:
        self.name = name
        self.messages = messages

    encoding = "utf-8"

    def write(self, text: str) -> int:
        if text:
            self.messages.append({"type": "stream", "name": self.name, "text": text})
        return len(text)

    def writable(self) -> bool:
        return True


class Notebook:
    """One fresh kernel and shell, with the cells that were run in it."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        config = Config()
        config.HistoryManager.hist_file = ":memory:"
        config.HistoryManager.enabled = False
        session = _Session(self.messages)
        self.kernel = IPythonKernel.instance(config=config, session=session, iopub_socket=None)
        self.kernel.log = logging.getLogger("aotlab.tests.kernel")
        # What the kernel asks in order to know that it runs in the main thread, where an interrupt arrives.
        self.kernel.shell_channel_thread = SimpleNamespace(parent_thread=threading.main_thread())
        self.shell: ZMQInteractiveShell = self.kernel.shell
        self.fresh = frozenset(self.shell.user_ns)
        self.files: dict[str, tuple[int, int]] = {}  # file of a cell -> its number, and the lines above its own first
        self.shifts: dict[int, int] = {}

    async def execute(self, text: str, *, shift: int = 0) -> dict[str, Any]:
        """Run one cell as the kernel does for JupyterLab; ``shift`` lines at its beginning are not the user's."""
        number = self.shell.execution_count
        name = self.shell.compile.get_code_name(text, text, number)
        self.files[name] = self.files[os.path.basename(name)] = (number, shift)
        self.shifts[number] = shift
        parent = self.kernel.session.msg("execute_request", {"code": text})
        cell_id = f"cell-{hashlib.sha1(text.encode()).hexdigest()}"  # the same text is the same cell, run again
        parent["metadata"]["cellId"] = cell_id
        self.kernel.set_parent([b"cells"], parent)
        return await self.kernel.do_execute(text, False, True, cell_id=cell_id, cell_meta={})

    def place(self, file: str) -> tuple[int, int] | None:
        """Tell to which cell a file belongs: its number, and how many of its lines are not the user's."""
        if file in self.files:
            return self.files[file]
        # A magic may have given its own file a cell's name, as tracebacks show it. Syntax errors leave the folder out.
        known = (each for each in self.shell.compile._filename_map if os.path.basename(each) == os.path.basename(file))
        name = self.shell.compile.format_code_name(next(known, file))
        match = re.fullmatch(r"In\[(\d+)\]", name[1]) if name is not None else None
        return (int(match[1]), self.shifts.get(int(match[1]), 0)) if match else None

    def text(self, text: str) -> str:
        """Replace a cell's file name and line by the user's words: cell 3, line 2."""

        def replaced(match: re.Match[str]) -> str:
            file, between, line = match.groups()
            place = self.place(file)
            if place is None:
                return f"<no cell>{between}{line}"
            number, shift = place
            return f"<cell {number}>{between}{int(line) - shift}" if line else f"<cell {number}>"

        return _CELL_FILE.sub(replaced, text)


def run(cell: Cell, install: Callable[[Notebook], None] | None = None, *, everywhere: bool = False) -> Run:
    """Run the record ``cell`` in a fresh shell: eagerly, or under the magic that ``install`` makes known.

    With ``everywhere`` the cells before and after it are run under the magic too.
    """
    with _process_kept():
        _seed()
        loop = asyncio.new_event_loop()
        try:
            asyncio.set_event_loop(loop)
            return loop.run_until_complete(_run(cell, install, everywhere))
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def magic_text(cell: Cell) -> str:
    """Return the cell with the magic's line before it."""
    options = f" --backend eager -o report {cell.options}".rstrip()
    return f"{cell.above}{MAGIC}{options}\n{cell.cell}"


async def _run(cell: Cell, install: Callable[[Notebook], None] | None, everywhere: bool) -> Run:
    magic = install is not None
    line, lines_above = (f"{MAGIC} --backend eager\n", 1) if magic and everywhere else ("", 0)
    notebook = _notebook_with_streams()
    shell = notebook.shell
    if install is not None:
        install(notebook)
        # The state that the extension itself leaves belongs to `%load_ext` and is tested elsewhere.
        notebook.messages.clear()
    for text in cell.setup:
        reply = await notebook.execute(line + text, shift=lines_above)
        assert reply["status"] == "ok", (text, reply, notebook.messages)
    leave_out = (notebook.fresh - {"_", "__", "___"}) | {"report"}
    _, versions = portrait(shell.user_ns, leave_out=leave_out)
    threads = set(threading.enumerate())
    before = _process(notebook, threads)
    moments: list[Moment] = []

    async def moment(text: str, shift: int) -> None:
        nonlocal versions
        notebook.messages.clear()
        reply = await notebook.execute(text, shift=shift)
        outputs, reports = _outputs(notebook)
        facts, versions = portrait(shell.user_ns, leave_out=leave_out, before=versions, text=notebook.text)
        for key in ("status", "ename", "evalue", "execution_count", "payload"):
            facts[f"reply: {key}"] = plain(notebook.text(str(reply.get(key))))
        for key, value in _process(notebook, threads).items():
            # If the two sides begin with different values, only a change is compared.
            facts[f"process: {key}"] = "as before" if key in _RELATIVE and value == before[key] else value
        error, lines = _error(notebook)
        shown = [
            line for output in outputs if output[0] == "error" for line in output[3:] if line.startswith("Cell In")
        ]
        places = [re.sub(r"Cell In\[(\d+)\], line (-?\d+).*", r"\1 \2", line) for line in shown]
        astray = bool(shown) and bool(lines) and lines != places
        moments.append(Moment(outputs=outputs, reports=reports, facts=facts | error, astray=astray))

    text = magic_text(cell) if magic else cell.above + (cell.cell if cell.eager is None else cell.eager)
    await moment(text, 1 if magic else 0)
    unique = None
    if cell.again:
        counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        await moment(text, 1 if magic else 0)
        unique = torch._dynamo.utils.counters["stats"]["unique_graphs"] - counted
    for follow_up in cell.after:
        await moment(line + follow_up, lines_above)
    report = shell.user_ns.get("report")
    return Run(moments=tuple(moments), report=None if report is None else report.report(), unique=unique)


def differences(eager: Run, magic: Run) -> list[str]:
    """Return the differences between two runs, one sentence each.

    The list is empty if no user could notice a difference.
    """
    found = []
    for index, (expected, actual) in enumerate(zip(eager.moments, magic.moments, strict=True)):
        when = "after the cell" if index == 0 else f"after follow-up {index}"
        before, after = (_without_nodes(_without_places(each.outputs, expected.astray)) for each in (expected, actual))
        if before != after:
            found += [f"{when}, outputs:\n    eager {expected.outputs}\n    magic {actual.outputs}"]
        for place in sorted(expected.facts.keys() | actual.facts.keys()):
            one, other = expected.facts.get(place, "(not there)"), actual.facts.get(place, "(not there)")
            if _NODE.sub("", str(one)) != _NODE.sub("", str(other)):
                found.append(f"{when}, {place}:\n    eager {one}\n    magic {other}")
    return found


#: Of which autograd node a saved tensor was a result: eager's errors say so, and a compiled call's node saved it.
_NODE = re.compile(r", which is output \d+ of \w+,")


def _without_nodes(outputs: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
    """Remove from errors the names of autograd nodes, and the frames below the engine of nodes made in Python."""
    found = []
    for output in outputs:
        ends = (n + 1 for n, part in enumerate(output) if "_execution_engine.run_backward(" in part)
        found.append(tuple(_NODE.sub("", part) for part in output[: next(ends, None)]))
    return tuple(found)


def _without_places(outputs: tuple[tuple[str, ...], ...], astray: bool) -> tuple[tuple[str, ...], ...]:
    """Leave out which lines of cells an error shows, if IPython is astray in eager already."""
    if not astray:
        return outputs
    return tuple(
        tuple(part for part in output if not part.startswith(("Cell In", "--> "))) if output[0] == "error" else output
        for output in outputs
    )


def _outputs(notebook: Notebook) -> tuple[tuple[tuple[str, ...], ...], tuple[int, ...]]:
    """Apply the messages of one execution as a front end does, and take the reports out."""
    shown: list[dict[str, Any]] = []
    clear = False
    for message in notebook.messages:
        kind = message["type"]
        if kind == "clear_output":
            clear = message["wait"]
            if not clear:
                shown.clear()
        elif kind == "update_display_data":
            for output in shown:
                if output.get("transient", {}).get("display_id") == message["transient"]["display_id"]:
                    output.update(data=message["data"], metadata=message["metadata"])
        elif kind in ("stream", "display_data", "execute_result", "error"):
            if clear:
                shown.clear()
                clear = False
            shown.append(dict(message))
        else:
            assert kind.startswith("comm_"), message
    outputs: list[tuple[str, ...]] = []
    reports = []
    for output in shown:
        kind = output["type"]
        if kind == "stream":
            text = _RUN_CODE.sub("", notebook.text(plain(output["text"])))
            if outputs and outputs[-1][:2] == ("stream", output["name"]):
                outputs[-1] = (*outputs[-1][:2], outputs[-1][2] + text)
            else:
                outputs.append(("stream", output["name"], text))
        elif kind == "error":
            outputs.append(
                ("error", output["ename"], plain(notebook.text(output["evalue"])), *_frames(notebook, output))
            )
        elif REPORT_MIME in output["data"]:
            reports.append(len(outputs))
        else:
            data = (f"{mime}: {plain(str(value))}" for mime, value in sorted(output["data"].items()))
            outputs.append((kind, str(output.get("execution_count")), *data))
    return tuple(outputs), tuple(reports)


def _frames(notebook: Notebook, error: dict[str, Any]) -> Iterator[str]:
    """Read the frames of a displayed traceback: where, which line in the user's count, and the line itself."""
    shift = 0
    for line in _ANSI.sub("", "\n".join(error["traceback"])).splitlines():
        if match := _CELL_FRAME.fullmatch(line):
            number, at, rest = int(match[1]), int(match[2]), match[3]
            shift = notebook.shifts.get(number, 0)
            yield f"Cell In[{number}], line {at - shift}{rest}"
        elif match := _FILE_FRAME.fullmatch(line):
            shift = 0
            yield line
        elif match := _ARROW.fullmatch(line):
            yield f"--> {int(match[1]) - shift} {match[2]}"
        elif "exception" in line or "skipping" in line:
            yield line


def ours(moment: Moment) -> list[str]:
    """Return the lines of displayed tracebacks that show a frame of Dynamo or of aotlab."""
    return [line for output in moment.outputs if output[0] == "error" for line in output[3:] if _OURS.search(line)]


def _error(notebook: Notebook) -> tuple[dict[str, str], list[str]]:
    """Describe the exception of the last cell: the objects, and the lines of cells in the order that they are shown."""
    result = notebook.shell.last_execution_result
    error = result.error_before_exec or result.error_in_exec
    if error is None:
        return {}, []
    facts = {"error: last": str(getattr(sys, "last_type", None))}
    every: list[str] = []
    name = "error"
    while error is not None:
        lines, traceback = [], error.__traceback__
        while traceback is not None:
            code = traceback.tb_frame.f_code
            if (place := notebook.place(code.co_filename)) is not None:
                lines.append((f"{place[0]} {traceback.tb_lineno - place[1]}", code.co_name))
            traceback = traceback.tb_next
        facts[name] = f"{type(error).__module__}.{type(error).__qualname__}: {notebook.text(plain(str(error)))}"
        facts[f"{name}: lines"] = str([f"{where} in {function}" for where, function in lines])
        facts[f"{name}: notes"] = str(getattr(error, "__notes__", None))
        facts[f"{name}: suppressed context"] = str(error.__suppress_context__)
        every = [*(where for where, _ in lines), *every]
        name, error = (f"{name}.cause", error.__cause__) if error.__cause__ else (f"{name}.context", error.__context__)
    return facts, every


def _process(notebook: Notebook, threads: Set[threading.Thread]) -> dict[str, str]:
    """Write down the state of the process and of the shell that a cell could leave changed.

    Of the threads only those that were started since: one of an earlier test may end at any time.
    """
    for each in set(threading.enumerate()) - threads:
        if isinstance(each, threading.Timer):  # it shows the report of a run that compiled nothing
            each.join(30)
    shell = notebook.shell
    numpy_state = np.random.get_state(legacy=False)
    default_device = torch.get_default_device()
    return {
        "torch random state": digest(torch.get_rng_state().numpy().tobytes()),
        "numpy random state": digest(repr(numpy_state["state"]["key"].tolist()).encode())
        + str(numpy_state["state"]["pos"]),
        "python random state": digest(repr(random.getstate()).encode()),
        "grad mode": str(torch.is_grad_enabled()),
        "inference mode": str(torch.is_inference_mode_enabled()),
        "autocast": str(
            [torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()]
        ),
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(default_device),
        "deterministic": str(
            [
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
                torch.backends.cudnn.deterministic,
                torch.backends.cudnn.benchmark,
            ]
        ),
        "torch threads": str([torch.get_num_threads(), torch.get_num_interop_threads()]),
        "precision": torch.get_float32_matmul_precision(),
        "anomaly": str(torch.is_anomaly_enabled()),
        "print options": str(vars(torch._tensor_str.PRINT_OPTS)),
        "modes": str([torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()]),
        "saved tensor hooks": str(torch._C._autograd._top_saved_tensors_default_hooks(True)),
        "dynamo configuration": digest(repr(sorted(_plain_items(torch._dynamo.config.get_config_copy()))).encode()),
        "functorch configuration": digest(
            repr(sorted(_plain_items(torch._functorch.config.get_config_copy()))).encode()
        ),
        "warning filters": str(warnings.filters),
        "showwarning": f"{warnings.showwarning.__module__}.{warnings.showwarning.__qualname__}",
        "hooks": plain(str([sys.excepthook, type(sys.displayhook), sys.gettrace(), sys.getprofile()])),
        "streams": str([sys.stdout.name, sys.stderr.name, type(sys.stdout).__name__]),
        "recursion limit": str(sys.getrecursionlimit()),
        "builtins": " ".join(sorted(set(dir(builtins)) - {"_"})),
        "path": str(sys.path),
        "folder": os.getcwd(),
        "environment": str(sorted(os.environ.items())),
        "main module": str(sys.modules["__main__"] is shell.user_module),
        "signals": plain(str(signal.getsignal(signal.SIGINT))),
        "garbage collection": str([gc.isenabled(), gc.get_threshold(), len(gc.callbacks)]),
        "threads": str(sorted(each.name for each in set(threading.enumerate()) - threads if each.name != _TQDM)),
        "loggers": str([logging.getLogger().level, len(logging.getLogger().handlers), logging.root.manager.disable]),
        "tasks": str(len(asyncio.all_tasks())),
        "execution count": str(shell.execution_count),
        "ast transformers": str(len(shell.ast_transformers)),
        "trait": str(
            [shell.ast_node_interactivity, shell.autoawait, shell.custom_exceptions, shell.display_pub is not None]
        ),
        "display hook": plain(str([type(shell.displayhook).__name__, shell.displayhook.prompt_count])),
        "modules": str(sorted(name for name in sys.modules if name.startswith("__torch") or name == "__compiled_fn")),
    }


def _plain_items(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    return ((key, plain(repr(value))) for key, value in values.items())


@contextmanager
def heap_frozen() -> Iterator[None]:
    """Exclude all existing objects from garbage collection.

    Dynamo makes the collector run after each compilation.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@functools.cache
def _ipython_folder() -> str:
    """Make one folder for the process, so that no profile of the user's plays in; it is left to the system to clear."""
    return tempfile.mkdtemp(prefix="aotlab-ipython-")


def _show_warning(*what: Any) -> None:
    sys.stderr.write(warnings.formatwarning(*what[:4], what[5] if len(what) > 5 else None))


def _seed() -> None:
    torch.manual_seed(1234)
    np.random.seed(1234)
    random.seed(1234)


def _notebook_with_streams() -> Notebook:
    notebook = Notebook()
    sys.stdout = _Stream("stdout", notebook.messages)
    sys.stderr = _Stream("stderr", notebook.messages)
    return notebook


@contextmanager
def _process_kept() -> Iterator[None]:
    """Restore the process state that a cell may change permanently, and end the kernel."""
    environment, path, folder = dict(os.environ), list(sys.path), os.getcwd()
    streams, main, hooks = (sys.stdout, sys.stderr), sys.modules["__main__"], (sys.excepthook, sys.displayhook)
    random_state = (torch.get_rng_state(), np.random.get_state(), random.getstate())
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    root_level = logging.getLogger().level
    os.environ["IPYTHONDIR"] = _ipython_folder()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        # As in a kernel: a warning is shown once for each place, ours are no errors.
        warnings.resetwarnings()
        warnings.simplefilter("default")
        warnings.showwarning = _show_warning  # pytest has put itself in the place of the usual one
        try:
            yield
        finally:
            sys.stdout, sys.stderr = streams
            _end_kernel()
            sys.excepthook, sys.displayhook = hooks
            sys.modules["__main__"] = main
            os.environ.clear()
            os.environ.update(environment)
            sys.path[:] = path
            os.chdir(folder)
            torch.set_grad_enabled(True)
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
            torch.use_deterministic_algorithms(False)
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precision)
            torch.set_anomaly_enabled(False)
            torch.set_printoptions(profile="default")
            torch.set_rng_state(random_state[0])
            np.random.set_state(random_state[1])
            random.setstate(random_state[2])
            logging.getLogger().setLevel(root_level)
            for name in ("last_type", "last_value", "last_traceback", "last_exc"):
                sys.__dict__.pop(name, None)


def _end_kernel() -> None:
    if IPythonKernel.initialized():
        kernel = IPythonKernel.instance()
        shell = kernel.shell
        # The shell's work at the end of a process, without its full garbage collection.
        atexit.unregister(shell.atexit_operations)
        if "aotlab" in shell.extension_manager.loaded:
            shell.extension_manager.unload_extension("aotlab")
        shell.history_manager.end_session()
        shell.history_manager.close()
        for folder in shell.tempdirs:
            shutil.rmtree(folder, ignore_errors=True)
        IPythonKernel.clear_instance()
        ZMQInteractiveShell.clear_instance()
        shell.restore_sys_module_state()
