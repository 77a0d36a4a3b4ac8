"""The cell magic ``%%aotcompile``: run a cell through the whole pipeline, with the same results as without it.

    %load_ext aotlab

    %%aotcompile -o report --backend eager
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()

The cell does the same as in eager: it binds, mutates, prints, raises and displays the same things. The parts that can
be captured are compiled, and compared with eager before they are used. The report above the cell's own output lists
these parts.
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

import torch
from IPython.core import magic_arguments
from IPython.core.error import UsageError as ShellUsageError

from aotlab import config
from aotlab._torch import is_leaf
from aotlab._torch.compiling import never_lost
from aotlab.errors import DeviceError
from aotlab.notebook import live
from aotlab.notebook.cell import linked, take_apart
from aotlab.notebook.cell_state import RunState
from aotlab.notebook.compiled_cell import CompiledCell
from aotlab.notebook.functions import compiled_function
from aotlab.notebook.measure import STOCK_SECONDS
from aotlab.notebook.moving import move, used
from aotlab.notebook.options import Options
from aotlab.notebook.session import Session
from aotlab.notebook.shown import Shown
from aotlab.notebook.tracebacks import cleaned
from aotlab.rehearse.cards import CARDS
from aotlab.report.model import CellPart

NAME = "aotcompile"


def _parser() -> Any:
    parser: Any = magic_arguments.MagicArgumentParser(  # type: ignore[no-untyped-call]  # IPython's, not annotated
        NAME,
        description="Compile a cell with aotlab. Results stay as in eager, and a report shows what happened. "
        "A cell of statements is captured by Dynamo where it computes with tensors, compiled, compared with eager, and "
        "run. A cell that only imports things and defines functions compiles each of them for its later calls; its "
        "report grows with these calls.",
        formatter_class=argparse.HelpFormatter,
    )
    add = parser.add_argument
    add("-o", "--output", metavar="NAME", help="the variable that gets the report")
    add("--name", metavar="TEXT", help="the report's title")
    add(
        "--engine",
        choices=["aotlab", "upstream", "both"],
        default="aotlab",
        help="the engine that compiles: aotlab (default), upstream (stock torch.compile), or both, side by side in one "
        "report (aotlab's graphs serve the calls)",
    )
    add(
        "--frontend",
        choices=["dynamo", "auto", "direct"],
        help="the code that captures: auto (default; see aotlab.config.cell_frontend; it traces the lines and calls "
        "themselves, and Dynamo captures what cannot be traced); dynamo (also optimizer steps); or direct (only a "
        "trace, for cells that define functions; such a function prints only while it is traced)",
    )
    add(
        "--backend",
        choices=["inductor", "eager"],
        default="inductor",
        help="the compiler of the graphs: Inductor (default; Triton on a GPU, C++ on the CPU), or torch's own kernels",
    )
    add(
        "--device",
        default="auto",
        help="where the graphs run: auto (default: where the tensors are), cpu, cuda, cuda:N; the tensors, modules "
        "and optimizers that the cell names are moved there, with all tensors that share memory with them",
    )
    add(
        "--dynamic",
        action="store_true",
        help="let sizes and numbers vary from the first graph on (default: if a size or number changes, a function of "
        "the cell is compiled once more, for all values; other lines are compiled for each value)",
    )
    add(
        "--rehearse",
        metavar="CARD",
        choices=sorted(CARDS),
        help=f"compile for a GPU that is not here ({', '.join(sorted(CARDS))}): the report has its Triton kernels, "
        "with registers, shared memory and bytes; the cell runs on the CPU. Needs the extra `rehearse`",
    )
    add("--no-verify", action="store_true", help="do not compare each graph with eager before it is used")
    add(
        "--time",
        action="store_true",
        help="time the graphs beside eager, and measure their memory, when the cell has run",
    )
    _add_partitioner(add)
    add("--quiet", action="store_true", help="do not display the report")
    add("-h", "--help", action="store_true", help="show this help, and run nothing")
    return parser


def _add_partitioner(add: Callable[..., object]) -> None:
    """Add the options about the partitioner to a parser; ``add`` is its method ``add_argument``."""
    add(
        "--partitioner",
        choices=["default", "min-cut"],
        default="default",
        help="who chooses the values that the forward saves for the backward: default saves what eager saves; min-cut "
        "computes values again in the backward if that costs less than saving them",
    )
    add(
        "--memory-budget",
        type=float,
        metavar="NUMBER",
        help="the memory that min-cut may use: from 0 (least memory) to 1 (default: least time)",
    )
    add(
        "--save",
        metavar="NAMES",
        default="",
        help="values that the forward saves in any case: names of nodes, with commas",
    )
    add(
        "--recompute",
        metavar="NAMES",
        default="",
        help="values that the backward computes again in any case: names of nodes, with commas; the report's tab "
        "Memory writes this option",
    )


_PARSER = _parser()

#: The options that tab completion offers.
FLAGS = (
    "--output",
    "--name",
    "--engine",
    "--frontend",
    "--backend",
    "--device",
    "--dynamic",
    "--rehearse",
    "--no-verify",
    "--time",
    "--partitioner",
    "--memory-budget",
    "--save",
    "--recompute",
    "--quiet",
    "--help",
)
#: The values that tab completion offers for some options.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "--engine": ("aotlab", "upstream", "both"),
    "--frontend": ("dynamo", "auto", "direct"),
    "--backend": ("inductor", "eager"),
    "--device": ("auto", "cpu", "cuda"),
    "--rehearse": tuple(sorted(CARDS)),
    "--partitioner": ("default", "min-cut"),
}


def help_text() -> str:
    """Return the help text of the options."""
    text = str(_PARSER.format_help())
    return f"usage: %%{text[text.index(NAME) :]}"


def parse(line: str) -> Options | None:
    """Parse the options. If help was requested, print it and return None.

    Raises
    ------
    UsageError
        IPython's `UsageError`, if an option is invalid.
    """
    arguments = _PARSER.parse_argstring(line)
    if arguments.help:
        print(help_text())
        return None
    if arguments.output is not None and (not arguments.output.isidentifier() or keyword.iskeyword(arguments.output)):
        raise ShellUsageError(f"-o {arguments.output}: this is not a variable name")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", arguments.device):
        raise ShellUsageError(f"--device {arguments.device}: use auto, cpu, cuda or cuda:N")
    frontend, rehearses = arguments.frontend or "dynamo", arguments.rehearse is not None
    if arguments.engine != "aotlab" and (frontend != "dynamo" or rehearses):
        other = f"--frontend {frontend}" if frontend != "dynamo" else "--rehearse"
        raise ShellUsageError(f"--engine {arguments.engine}: stock torch.compile does not work with {other}")
    budget = arguments.memory_budget
    if budget is not None and not (0 <= budget <= 1 and arguments.partitioner == "min-cut"):
        raise ShellUsageError(
            f"--memory-budget {budget:g}: use a number from 0 to 1, together with --partitioner min-cut"
        )
    if not (arguments.frontend or rehearses or arguments.engine != "aotlab"):
        frontend = config.cell_frontend
    return Options(
        output=arguments.output,
        engine=arguments.engine,
        name=None if arguments.name is None else arguments.name.strip("'\""),
        frontend=frontend,
        backend=arguments.backend,
        device=arguments.device,
        dynamic=arguments.dynamic,
        rehearse=arguments.rehearse,
        verify=not arguments.no_verify,
        time=arguments.time,
        partitioner=arguments.partitioner,
        memory_budget=1.0 if budget is None else budget,
        save=_names_in(arguments.save),
        recompute=_names_in(arguments.recompute),
        quiet=arguments.quiet,
    )


def _names_in(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.strip("'\"").split(",")))


class Magic:
    """The magic of one IPython shell.

    Parameters
    ----------
    session
        The state that aotlab keeps for the shell.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._shell = session.shell

    def line(self, line: str) -> None:
        """Print the options, for ``%aotcompile --help``. Any other use of the line magic is an error."""
        if parse(line) is not None:
            raise ShellUsageError(
                "%%aotcompile is a cell magic: write it with two percent signs, above the cell's code"
            )

    def cell(self, line: str, body: str) -> Any:
        """Run a cell.

        ``%%aotcompile?`` shows the parser's help instead of this docstring.
        """
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
        # A repeated cell runs the code objects of its first run. Tracebacks look up the source lines and the cell's
        # number under the file name in these code objects. So the new number is stored under the old file name.
        file = shell.compile.cache(source, number, raw_code=raw)
        try:
            tree = shell.transform_ast(shell.compile.ast_parse(source, filename=file))
        except SyntaxError as error:
            self._session.failed = (error, None)
            raise
        result = await self.run_code(tree, raw, file=file, line=line, options=options, number=number, began=began)
        return None if _ends_with_semicolon(shell, body) else result

    async def run_code(
        self, tree: ast.Module, raw: str, *, file: str, line: str, options: Options, number: int | None, began: int
    ) -> Any:
        """Run code, and return the value that it displays.

        Parameters
        ----------
        tree
            The syntax tree of the code.
        raw
            The code as the user sees it.
        file
            The file name of the code.
        line, options
            The options as the user wrote them, and after they were read.
        number
            The number of the cell; None for a script.
        began
            When the run began, in ns.
        """
        __tracebackhide__ = "__ipython_bottom__"
        shell = self._shell
        moved = self._move(tree, options)

        # The optimizers' classes affect how a cell is split, so they belong to the key under which the compiled cell is
        # stored. If one of these classes changes, the cell is split and compiled again.
        key = (line, raw, shell.ast_node_interactivity, _cell_id(shell) or "", *_optimizers(tree, shell.user_ns))
        shown = Shown(shell, quiet=options.quiet or self._session.collected is not None)
        cell = self._session.find(key)
        again = cell is not None
        if cell is None:
            cell = self._new_cell(tree, raw, file, line, options, calls=number is None)
            if not cell.code.defines_only:
                self._session.keep(key, cell)
            self._session.hear_of(cell)
            live.register(cell)
        cell.keep = self._session.keep_run
        try:
            with (
                never_lost(),
                cell.run(execution_count=number, cell_id=_cell_id(shell), again=again, began_ns=began) as run,
                shown.following(cell),
            ):
                if moved:
                    cell.note(moved)
                result = await self._execute(cell, run, file)
                if cell.code.defines_only:
                    self._compile_functions(cell)
            if options.time and config.enabled:
                with shown.following(cell):
                    self._time(cell)
        except BaseException as error:
            cleaned(error, cell.file)
            self._session.failed = (error, error.__traceback__)
            raise
        finally:
            cell.recording.end_run()
            if options.output is not None:
                shell.user_ns[options.output] = cell if cell.code.defines_only else cell.report()
            cell.show_in(shown)
            live.changed(cell.identifier)
        return result

    def _new_cell(
        self, tree: ast.Module, raw: str, file: str, line: str, options: Options, *, calls: bool
    ) -> CompiledCell:
        shell = self._shell
        code = take_apart(
            tree,
            namespace=shell.user_ns,
            file=file,
            compile_tree=shell.compile,
            interactivity=shell.ast_node_interactivity,
            exact=options.backend == "eager",
            calls=calls,
            traced=options.frontend == "auto",
        )
        if options.frontend == "direct" and not code.defines_only:
            raise ShellUsageError(
                "--frontend direct traces calls of functions, and this cell has other statements: "
                "define a function in a separate cell, or leave the option out"
            )
        return CompiledCell(
            source=raw,
            code=code,
            file=file,
            options=options,
            options_text=line.strip(),
            playground=self._session.playground,
        )

    async def _execute(self, cell: CompiledCell, run: RunState, file: str) -> Any:
        __tracebackhide__ = "__ipython_bottom__"
        shell = self._shell
        result: list[Any] = []
        regions = cell.regions
        for number, statement in enumerate(cell.code.statements):
            lines = CellPart(first_line=statement.lineno, last_line=statement.end_lineno or statement.lineno, how="")
            run.begins(lines.last_line)
            cell.recording.progress.runs(lines.lines)
            code = linked(self._compiled(cell, number), regions, show=_show, result=result.append)
            if code.co_flags & inspect.CO_COROUTINE:
                await eval(code, shell.user_global_ns, shell.user_ns)
            else:
                exec(code, shell.user_global_ns, shell.user_ns)
        return result[-1] if result else None

    def _compiled(self, cell: CompiledCell, number: int) -> types.CodeType:
        """Return the code of a statement, compiled as IPython would compile it. ``number`` is the statement's index.

        Each statement is compiled once. If the cell runs again, the same code object runs. So the functions that the
        statement defines keep their code objects, by which Dynamo recognizes them.
        """
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
                namespace[name] = compiled_function(cell.compiler, name, namespace[name], lines)

    def _move(self, tree: ast.Module, options: Options) -> str:
        """Move the values that the cell uses to the requested device before anything runs.

        Return a sentence about the move for the report, or "" if nothing was moved.
        """
        try:
            device = options.wanted_device()
            read, bound = _names(tree)
            namespace = used(read, self._shell.user_ns)
            # A tensor with a `grad_fn` cannot be moved, which would be an error. If the cell binds the tensor's name
            # again (as for the loss of an earlier run), the old tensor is not needed, and is not moved.
            for name in bound & namespace.keys():
                if isinstance(namespace[name], torch.Tensor) and not is_leaf(namespace[name]):
                    del namespace[name]
            return "" if device is None else move(namespace, device)
        except DeviceError as error:
            raise ShellUsageError(str(error)) from None

    def _time(self, cell: CompiledCell) -> None:
        try:
            cell.measure(cell.recording.progress.measures, STOCK_SECONDS)
        except Exception as error:  # noqa: BLE001  # the cell itself has succeeded, so the report only notes this
            cell.note(f"not timed: {error}")


def top_level_await(shell: Any, body: str) -> bool:
    """Tell whether the code of a cell uses ``await`` at its outermost level."""
    if "await" not in body and "async" not in body:
        return False
    try:
        code = compile(shell.transform_cell(body), "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except (SyntaxError, ValueError):
        return False
    return bool(code.co_flags & inspect.CO_COROUTINE)


def awaiting(shell: Any) -> Callable[[list[str]], list[str]]:
    """Return an input transformer for cells of this magic.

    If a cell contains ``await`` at the top level, the transformer puts ``await`` before the call of the magic. It adds
    an empty line to a cell without a body, because ``%%aotcompile --help`` needs no body, but IPython raises an error
    for an empty one.
    """

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
    """Return the options, or the values of the option before the cursor. IPython's hook for tab completion."""
    words = event.text_until_cursor.split()
    previous = words[-1] if event.text_until_cursor.endswith(" ") else words[-2] if len(words) > 1 else ""
    return list(CHOICES.get(previous, FLAGS))


def _names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Return the names that a cell reads and the names that it binds."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    read, bound = ({node.id for node in names if isinstance(node.ctx, kind)} for kind in (ast.Load, ast.Store))
    return read, bound


def _optimizers(tree: ast.Module, namespace: Mapping[str, Any]) -> list[str]:
    """Return the names and classes of the optimizers that a cell reads.

    A cell reads them from variables, or from attributes of variables. Each optimizer is described by a text, such as
    ``"trainer.opt: torch.optim.sgd.SGD"``.
    """
    read, bound = _names(tree)
    optimizers = []
    for name, value in used(read - bound, namespace).items():
        plain = isinstance(value, type | types.ModuleType | types.FunctionType)
        held = {} if plain else getattr(value, "__dict__", {})
        for path, each in ((name, value), *((f"{name}.{attribute}", each) for attribute, each in held.items())):
            if issubclass(type(each), torch.optim.Optimizer):
                optimizers.append(f"{path}: {type(each).__module__}.{type(each).__qualname__}")
    return optimizers


def _show(value: Any) -> None:
    import sys

    sys.displayhook(value)


def _whole_cell(shell: Any, line: str, body: str) -> str:
    """Return the cell as the user sees it, including the magic's line and the lines above it."""
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
            match = re.search(r"\[(\d+)\]", named[1]) if named else None
            if match:
                return int(match[1])
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
    except Exception:  # noqa: BLE001  # text that cannot be tokenized has no final semicolon
        return False
