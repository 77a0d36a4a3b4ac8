"""``%%aotcompile``: a cell through the whole pipeline, with the results that it has without.

    %load_ext aotlab

    %%aotcompile -o report --backend eager
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()

What the cell does is what eager does: what it binds, mutates, prints, raises and displays. What can be captured is
compiled and checked against eager before it is used; the report above the cell's own output says what that was.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import keyword
import re
import time
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from IPython.core import magic_arguments
from IPython.core.error import UsageError as ShellUsageError

from aotlab import config
from aotlab._torch.compiling import never_lost
from aotlab.errors import DeviceError
from aotlab.notebook import live
from aotlab.notebook.cell import CellCode, linked, take_apart
from aotlab.notebook.compiled_cell import CompiledCell
from aotlab.notebook.functions import compiled_function
from aotlab.notebook.moving import move, used
from aotlab.notebook.options import Options
from aotlab.notebook.session import Session
from aotlab.notebook.shown import Shown
from aotlab.notebook.tracebacks import cleaned
from aotlab.rehearse.cards import CARDS

NAME = "aotcompile"


def _parser() -> Any:
    parser: Any = magic_arguments.MagicArgumentParser(  # type: ignore[no-untyped-call]  # IPython's, not annotated
        NAME,
        description="Compile a cell with aotlab. What it does stays what eager does; a report says what happened. "
        "A cell of statements is captured by Dynamo where it computes with tensors, compiled, compared with eager, and "
        "run. A cell that only imports things and defines functions compiles each of them for its later calls; its "
        "report grows with them.",
        formatter_class=argparse.HelpFormatter,
    )
    add = parser.add_argument
    add("-o", "--output", metavar="NAME", help="the variable that is to hold the report")
    add("--name", metavar="TEXT", help="the report's title")
    add(
        "--frontend",
        choices=["dynamo", "direct"],
        default="dynamo",
        help="what captures: Dynamo (default), or a trace of the call itself, for cells that define functions "
        "(what they print, they print while they are traced)",
    )
    add(
        "--backend",
        choices=["inductor", "eager"],
        default="inductor",
        help="what runs the graphs: Inductor (default; Triton on a GPU, C++ on the CPU), or torch's own kernels",
    )
    add(
        "--device",
        default="auto",
        help="where the graphs run: auto (default: where the tensors are), cpu, cuda, cuda:N; the tensors, modules "
        "and optimizers that the cell names are moved there, and whatever shares memory with them",
    )
    add(
        "--dynamic",
        action="store_true",
        help="let sizes and numbers vary from the first graph on (default: functions of the cell are compiled once "
        "more for one that changes, other lines for each value)",
    )
    add(
        "--rehearse",
        metavar="CARD",
        choices=sorted(CARDS),
        help=f"compile for a GPU that is not here ({', '.join(sorted(CARDS))}): the report has its Triton kernels, "
        "with registers, shared memory and bytes; the cell runs on the CPU. Needs the extra `rehearse`",
    )
    add("--no-verify", action="store_true", help="do not compare each graph with eager before it is used")
    add("--time", action="store_true", help="time the graphs beside eager when the cell has run")
    add("--quiet", action="store_true", help="do not display the report")
    add("-h", "--help", action="store_true", help="show this, and run nothing")
    return parser


_PARSER = _parser()

#: The options, for completion.
FLAGS = (
    "--output",
    "--name",
    "--frontend",
    "--backend",
    "--device",
    "--dynamic",
    "--rehearse",
    "--no-verify",
    "--time",
    "--quiet",
    "--help",
)
CHOICES: Mapping[str, tuple[str, ...]] = {
    "--frontend": ("dynamo", "direct"),
    "--backend": ("inductor", "eager"),
    "--device": ("auto", "cpu", "cuda"),
    "--rehearse": tuple(sorted(CARDS)),
}


def help_text() -> str:
    """Return the options, explained."""
    text = str(_PARSER.format_help())
    return f"usage: %%{text[text.index(NAME) :]}"


def parse(line: str) -> Options | None:
    """Read the options; None if help was asked for, and given.

    Raises
    ------
    UsageError
        IPython's, for options that cannot be understood.
    """
    found = _PARSER.parse_argstring(line)
    if found.help:
        print(help_text())
        return None
    if found.output is not None and (not found.output.isidentifier() or keyword.iskeyword(found.output)):
        raise ShellUsageError(f"-o {found.output}: that is no name of a variable")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", found.device):
        raise ShellUsageError(f"--device {found.device}: it is none of auto, cpu, cuda, cuda:N")
    return Options(
        output=found.output,
        name=None if found.name is None else found.name.strip("'\""),
        frontend=found.frontend,
        backend=found.backend,
        device=found.device,
        dynamic=found.dynamic,
        rehearse=found.rehearse,
        verify=not found.no_verify,
        time=found.time,
        quiet=found.quiet,
    )


class Magic:
    """The magic of one shell.

    Parameters
    ----------
    session
        What is kept for the shell.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._shell = session.shell

    def line(self, line: str) -> None:
        """``%aotcompile --help``: the options."""
        if parse(line) is not None:
            raise ShellUsageError(
                "%%aotcompile is a cell magic: write it with two percent signs, above the cell's code"
            )

    def cell(self, line: str, body: str) -> Any:
        """Run a cell; its help, which ``%%aotcompile?`` shows, is the parser's."""
        __tracebackhide__ = "__ipython_bottom__"
        options = parse(line)
        if options is None or not body.strip():
            return None
        running = self._run(line, body, options)
        if top_level_await(self._shell, body):
            return running
        try:
            running.send(None)
        except StopIteration as ended:
            return ended.value
        finally:
            running.close()
        raise AssertionError("a cell without await has waited")

    async def _run(self, line: str, body: str, options: Options) -> Any:
        __tracebackhide__ = "__ipython_bottom__"
        began = time.perf_counter_ns()
        shell = self._shell
        raw = _whole_cell(shell, line, body)
        number = _prompt_number(shell)
        source = "\n" * raw[: len(raw) - len(body)].count("\n") + shell.transform_cell(body)
        file = shell.compile.cache(source, number, raw_code=raw)
        try:
            tree = shell.transform_ast(shell.compile.ast_parse(source, filename=file))
        except SyntaxError as error:
            self._session.failed = (error, None)
            raise
        moved = self._move(tree, options)

        key = (line, raw, shell.ast_node_interactivity, _cell_id(shell) or "")
        shown = Shown(shell, quiet=options.quiet)
        cell = self._session.find(key)
        again = cell is not None
        if cell is None:
            code = take_apart(
                tree,
                namespace=shell.user_ns,
                file=file,
                compile_tree=shell.compile,
                interactivity=shell.ast_node_interactivity,
                exact=options.backend == "eager",
            )
            self._check_frontend(code, options)
            cell = CompiledCell(
                source=raw,
                code=code,
                file=file,
                options=options,
                options_text=line.strip(),
                playground=self._session.playground,
            )
            if not code.defines_only:
                self._session.keep(key, cell)
            self._session.hear_of(cell)
            live.register(cell)
        cell.say = shown.progress
        shown.progress("running")
        # Errors of a repeated cell show the lines as they stand in the file that its code was compiled for.
        shell.compile.cache(source, number, raw_code=raw)
        try:
            with (
                never_lost(),
                cell.run(execution_count=number, cell_id=_cell_id(shell), again=again, began_ns=began) as run,
            ):
                if moved:
                    cell.note(moved)
                result = await self._execute(cell, run, file)
                if cell.code.defines_only:
                    self._compile_functions(cell)
            if options.time and config.enabled:
                self._time(cell, shown)
        except BaseException as error:
            cleaned(error, cell.file)
            self._session.failed = (error, error.__traceback__)
            raise
        finally:
            cell.say = _nobody
            cell.recording.end_run()
            if options.output is not None:
                shell.user_ns[options.output] = cell if cell.code.defines_only else cell.report()
            cell.show_in(shown)
            live.changed(cell.identifier)
        return None if _ends_with_semicolon(shell, body) else result

    async def _execute(self, cell: CompiledCell, run: Any, file: str) -> Any:
        __tracebackhide__ = "__ipython_bottom__"
        shell = self._shell
        result: list[Any] = []
        for number, statement in enumerate(cell.code.statements):
            run.begins(statement.end_lineno or statement.lineno)
            code = linked(self._compiled(cell, number), cell.regions, show=_show, result=result.append)
            if code.co_flags & inspect.CO_COROUTINE:
                await eval(code, shell.user_global_ns, shell.user_ns)
            else:
                exec(code, shell.user_global_ns, shell.user_ns)
        return result[-1] if result else None

    def _compiled(self, cell: CompiledCell, number: int) -> types.CodeType:
        """Compile a statement as IPython would, once: Dynamo knows functions again by their code."""
        if number not in cell.python_code:
            compiler = self._shell.compile
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if self._shell.autoawait else 0
            with compiler.extra_flags(flags), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*object is not callable", category=SyntaxWarning)
                cell.python_code[number] = compiler(ast.Module([cell.code.statements[number]], []), cell.file, "exec")
        return cell.python_code[number]

    def _compile_functions(self, cell: CompiledCell) -> None:
        namespace = self._shell.user_ns
        for statement in cell.code.statements:
            if isinstance(statement, ast.FunctionDef) and statement.name in namespace:
                first = min([statement.lineno, *(each.lineno for each in statement.decorator_list)])
                lines = (first, statement.end_lineno or statement.lineno)
                name = statement.name
                namespace[name] = compiled_function(cell, name, namespace[name], lines)

    def _move(self, tree: ast.Module, options: Options) -> str:
        """Move what the cell uses to the device that was asked for, before anything has run; say what was moved."""
        try:
            device = options.wanted_device()
            names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
            read, bound = ({node.id for node in names if isinstance(node.ctx, kind)} for kind in (ast.Load, ast.Store))
            namespace = used(read, self._shell.user_ns)
            for name in bound & namespace.keys():  # the loss of an earlier run
                if getattr(namespace[name], "grad_fn", None) is not None:
                    del namespace[name]
            return "" if device is None else move(namespace, device)
        except DeviceError as error:
            raise ShellUsageError(str(error)) from None

    def _check_frontend(self, code: CellCode, options: Options) -> None:
        if options.frontend == "direct" and not code.defines_only:
            raise ShellUsageError(
                "--frontend direct traces calls of functions, and this cell holds other statements: "
                "define a function in a cell of its own, or leave the option out"
            )

    def _time(self, cell: CompiledCell, shown: Shown) -> None:
        try:
            cell.measure(shown.progress)
        except Exception as error:  # noqa: BLE001  # the cell has run; that it could not be timed belongs in the report
            cell.note(f"not timed: {error}")


def top_level_await(shell: Any, body: str) -> bool:
    """Tell whether the code of a cell waits for something at its outermost level."""
    if "await" not in body and "async" not in body:
        return False
    try:
        code = compile(shell.transform_cell(body), "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except (SyntaxError, ValueError):
        return False
    return bool(code.co_flags & inspect.CO_COROUTINE)


def awaiting(shell: Any) -> Callable[[list[str]], list[str]]:
    """Return the input transformer that lets cells with ``await`` wait, and cells without a body show help."""

    def transform(lines: list[str]) -> list[str]:
        text = "".join(lines)
        if not text.startswith(f"get_ipython().run_cell_magic('{NAME}'"):
            return lines
        try:
            call = ast.parse(text.strip(), mode="eval").body
            assert isinstance(call, ast.Call)
            line, body = (ast.literal_eval(each) for each in call.args[1:])
        except (SyntaxError, ValueError, AssertionError):
            return lines
        if not body:
            return [f"get_ipython().run_cell_magic({NAME!r}, {line!r}, '\\n')\n"]
        return ["await " + text] if top_level_await(shell, body) else lines

    return transform


def complete(_shell: Any, event: Any) -> list[str]:
    """Complete the options, and what they choose from."""
    words = event.text_until_cursor.split()
    previous = words[-1] if event.text_until_cursor.endswith(" ") else words[-2] if len(words) > 1 else ""
    return list(CHOICES.get(previous, FLAGS))


def _nobody(_text: str) -> None:
    pass


def _show(value: Any) -> None:
    import sys

    sys.displayhook(value)


def _whole_cell(shell: Any, line: str, body: str) -> str:
    """Return the cell as the user sees it, the magic's line and what is above it included."""
    written = None
    if hasattr(shell, "get_parent"):
        parent = shell.get_parent()
        content = parent.get("content", {}) if isinstance(parent, dict) else {}
        written = content.get("code")
    if not isinstance(written, str) or not written.endswith(body):
        manager = getattr(shell, "history_manager", None)
        written = manager.input_hist_raw[-1] if manager is not None and manager.input_hist_raw else ""
    if written.endswith(body) and f"%%{NAME}" in written[: len(written) - len(body)]:
        return str(written)
    return f"%%{NAME} {line}\n{body}"


def _prompt_number(shell: Any) -> int:
    import sys

    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals is shell.user_global_ns:
            named = shell.compile.format_code_name(frame.f_code.co_filename)
            found = re.search(r"\[(\d+)\]", named[1]) if named else None
            if found:
                return int(found[1])
        frame = frame.f_back
    return max(1, int(shell.execution_count) - 1)


def _cell_id(shell: Any) -> str | None:
    parent = shell.get_parent() if hasattr(shell, "get_parent") else {}
    metadata = parent.get("metadata", {}) if isinstance(parent, dict) else {}
    identifier = metadata.get("cellId")
    return identifier if isinstance(identifier, str) else None


def _ends_with_semicolon(shell: Any, body: str) -> bool:
    try:
        return bool(shell.displayhook.semicolon_at_end_of_expression(body))
    except Exception:  # noqa: BLE001  # what cannot be taken apart into tokens ends with no semicolon
        return False
