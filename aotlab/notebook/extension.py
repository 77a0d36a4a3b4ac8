"""The extension ``%load_ext aotlab``: register the magics in an IPython shell, and remove them again."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from aotlab.notebook import live
from aotlab.notebook.magic import NAME, Magic, awaiting, complete, help_text
from aotlab.notebook.session import Session
from aotlab.notebook.settings import NAME as SETTINGS
from aotlab.notebook.settings import aotlab_magic
from aotlab.notebook.tracebacks import cleaned

_loaded: weakref.WeakKeyDictionary[Any, tuple[Session, Callable[[list[str]], list[str]]]] = weakref.WeakKeyDictionary()


def load_ipython_extension(shell: Any) -> Session:
    """Add ``%%aotcompile`` and ``%aotlab`` to a shell, and return its session. A second call adds nothing."""
    if shell in _loaded:
        return _loaded[shell][0]
    session = Session(shell)
    magic = Magic(session)
    transform = awaiting(shell)

    def cell_magic(line: str, cell: str) -> Any:
        __tracebackhide__ = "__ipython_bottom__"
        return magic.cell(line, cell)

    cell_magic.__doc__ = help_text()
    shell.register_magic_function(cell_magic, magic_kind="cell", magic_name=NAME)
    shell.register_magic_function(magic.line, magic_kind="line", magic_name=NAME)
    shell.register_magic_function(aotlab_magic, magic_kind="line", magic_name=SETTINGS)
    shell.input_transformers_post.append(transform)
    for key in (f"%%{NAME}", f"%{NAME}"):
        shell.set_hook("complete_command", complete, str_key=key)
    shell.showtraceback = _showing(session, shell.showtraceback)
    shell.events.register("post_run_cell", session.show_changes)
    live.connect(shell)
    _loaded[shell] = (session, transform)
    return session


def _showing(session: Session, show: Callable[..., None]) -> Callable[..., None]:
    """Return a form of ``show``, the shell's ``showtraceback``, that shows the errors of a cell as in eager.

    The frames between IPython and the cell's code are not shown.
    """

    def showtraceback(exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        failed, session.failed = session.failed, None
        error = sys.exc_info()[1] if exc_tuple is None else exc_tuple[1]
        if failed is not None and error is failed[0] and error is not None:
            error.__traceback__ = failed[1]
            exc_tuple = (type(error), error, failed[1])
            kwargs["tb_offset"] = 0
            if failed[1] is None:  # a syntax error, so no code of the cell has run
                kwargs["running_compiled_code"] = False
        elif error is not None:
            cleaned(error)  # a cell without the magic may have called a compiled function, or its backward
        show(exc_tuple, *args, **kwargs)

    return showtraceback


def unload_ipython_extension(shell: Any) -> None:
    """Remove everything that `load_ipython_extension` added. Compiled functions stay compiled."""
    if shell not in _loaded:
        return
    session, transform = _loaded.pop(shell)
    for kind, name in (("cell", NAME), ("line", NAME), ("line", SETTINGS)):
        shell.magics_manager.magics[kind].pop(name, None)
    if transform in shell.input_transformers_post:
        shell.input_transformers_post.remove(transform)
    for key in (f"%%{NAME}", f"%{NAME}"):
        shell.strdispatchers["complete_command"].strs.pop(key, None)
    vars(shell).pop("showtraceback", None)
    shell.events.unregister("post_run_cell", session.show_changes)
    live.disconnect(shell)
    session.close()
