"""Run a script or a notebook with the cell magic, and collect the reports: ``aotlab run --all`` and notebooks."""

from __future__ import annotations

import ast
import json
import sys
import time
import tokenize
import types
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from aotlab.errors import UsageError
from aotlab.notebook.extension import load_ipython_extension
from aotlab.notebook.magic import NAME, Magic, parse
from aotlab.report import Report
from aotlab.report.verdict import verdict

_CONFIG = Config(HistoryManager={"enabled": False}, InteractiveShell={"colors": "nocolor"})


class Program:
    """A script or a notebook that nobody watches.

    Parameters
    ----------
    path
        The file.
    options
        The options of ``%%aotcompile``, as a user would write them. Raises UsageError, IPython's, if they are wrong.
    """

    def __init__(self, path: Path, options: str) -> None:
        self._path = path
        self._line = options
        parsed = parse(options)
        if parsed is None:
            raise UsageError("run `%%aotcompile --help` in a notebook to see the options")
        self._options = replace(parsed, name=parsed.name or path.name)
        self._main = types.ModuleType("__main__")
        vars(self._main).update(__file__=str(path), __builtins__=__builtins__)
        own = set(vars(self._main))
        self._shell: Any = _Shell(user_module=self._main, config=_CONFIG)  # type: ignore[no-untyped-call]  # IPython's
        self._session = load_ipython_extension(self._shell)
        self._session.notebook = str(path.resolve())
        self._session.collected = {}
        self._names_of_shell = set(vars(self._main)) - own

    @property
    def reports(self) -> list[Report]:
        """The reports so far, in the order of the cells, without cells in which there is nothing to compile."""
        reports = list((self._session.collected or {}).values())
        return [each for each in reports if verdict(each).state != "idle"] or reports[:1]

    def run_script(self) -> None:
        """Run the file as one cell. Everything that the script raises is raised."""
        for name in self._names_of_shell:
            vars(self._main).pop(name, None)
        with tokenize.open(self._path) as file:
            source = file.read()
        tree = ast.parse(source, str(self._path))
        self._shell.ast_node_interactivity = "none"
        sys.modules["__main__"] = self._main
        running = Magic(self._session).run_code(
            tree, source, file=str(self._path), line=self._line, options=self._options, number=None,
            began=time.perf_counter_ns(),
        )  # fmt: skip
        try:
            running.send(None)
        except StopIteration:
            return
        finally:
            running.close()

    def run_notebook(self, only: int | None) -> int:
        """Run the code cells with the magic, or only the one with the number ``only``, counted from 1.

        Return the exit status: 1 if a cell raised an error, which ends the run. An error is printed.
        """
        cells = _code_cells(self._path)
        if only is not None and only > len(cells):
            raise UsageError(f"--cell {only}: {self._path} has {len(cells)} cells with code")
        warnings.filterwarnings("ignore", message="To exit: use")  # IPython writes it when a cell calls sys.exit
        for number, cell in enumerate(cells, 1):
            source = cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
            if not source.strip():
                continue
            if only in (None, number) and not source.lstrip().startswith("%%"):
                source = f"%%{NAME} {self._line}\n{source}"
            self._shell.message = {"content": {"code": source}, "metadata": {"cellId": str(cell.get("id", ""))}}
            result = self._shell.run_cell(source, store_history=True)
            error = result.error_in_exec or result.error_before_exec
            if isinstance(error, SystemExit):
                return error.code if isinstance(error.code, int) else int(error.code is not None)
            if error is not None:
                return 130 if isinstance(error, KeyboardInterrupt) else 1
        return 0


class _Shell(InteractiveShell):
    """A shell without a history that prints errors to stderr."""

    message: Any = None

    def get_parent(self) -> Any:
        """Return the message that sent the present cell, as in a notebook's kernel."""
        return self.message

    def showtraceback(self, *arguments: Any, **options: Any) -> None:
        """Show an error, unless it is the end of the program."""
        if not isinstance(sys.exc_info()[1], SystemExit):
            super().showtraceback(*arguments, **options)

    def _showtraceback(self, etype: Any, evalue: Any, stb: Any) -> None:
        print(self.InteractiveTB.stb2text(stb), file=sys.stderr)


def _code_cells(path: Path) -> list[dict[str, Any]]:
    """Return the cells of a notebook that have code. Raises UsageError if the file is no notebook."""
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        return [{"source": each["source"], **each} for each in cells if each["cell_type"] == "code"]
    except (ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{path} is not a notebook of version 4: {error!r}") from None
