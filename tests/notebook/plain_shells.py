"""Plain IPython shells with the extension, for tests that need no kernel.

The module also describes the process state that a cell must not change.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from torch.optim import sgd

from aotlab.notebook import extension
from tests.notebook import shells
from tests.notebook.shells import Notebook


@contextmanager
def unloaded_afterwards() -> Iterator[None]:
    """Unload the extension after a block from all shells that the block has made, so that nobody listens any more."""
    before = set(extension._loaded)
    yield
    for shell in set(extension._loaded) - before:
        extension.unload_ipython_extension(shell)


def plain_shell(*, loaded: bool = True) -> InteractiveShell:
    """Make a shell with an empty namespace, and reset Dynamo, so that it forgets earlier compilations."""
    torch._dynamo.reset()
    made = InteractiveShell()
    made.history_manager.enabled = False
    module = types.ModuleType("__main__")
    made.user_module, made.user_ns = module, vars(module)
    made.init_user_ns()
    if loaded:
        made.run_line_magic("load_ext", "aotlab")
    return made


def execute(shell: InteractiveShell, text: str) -> Any:
    """Run a cell that must not fail; return its value."""
    result = shell.run_cell(text)
    result.raise_error()
    return result.result


def failing(shell: InteractiveShell, text: str) -> BaseException:
    """Run a cell that must fail, without its traceback on the screen; return the error."""
    with capture_output():
        result = shell.run_cell(text)
    error = result.error_before_exec or result.error_in_exec
    assert error is not None, f"the cell did not fail: {text}"
    assert isinstance(error, BaseException)
    return error


def printed(shell: InteractiveShell, text: str) -> tuple[str, list[dict[str, Any]]]:
    """Run a cell that must not fail. Return its printed text and the data of its displayed objects."""
    with capture_output() as captured:
        result = shell.run_cell(text)
    result.raise_error()
    return captured.stdout, [output.data for output in captured.outputs]


def cell(body: str, options: str = "--quiet") -> str:
    """Write the magic above a cell; the report is `report`."""
    return f"%%aotcompile -o report --backend eager {options}\n{body}"


def compiled(report: Any) -> list[str]:
    """Return the names of the frames of which something is compiled."""
    return [frame.name for frame in report.frames if any(graph.status == "compiled" for graph in frame.graphs)]


def process_state() -> dict[str, object]:
    """Describe the state of the process that a cell must leave unchanged."""
    loggers = [logging.getLogger(name) for name in sorted(logging.root.manager.loggerDict) if name.startswith("torch")]
    handlers = dict.fromkeys(handler for logger in loggers for handler in logger.handlers)
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "dynamo": torch._dynamo.config.get_config_copy(),
        "filters": [(handler, list(handler.filters)) for handler in handlers],
        "showwarning": warnings.showwarning,
        "warning filters": list(warnings.filters),
        "optimizers": sgd._to_scalar,
        "modes": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "main": sys.modules["__main__"],
        "displayhook": sys.displayhook,
        "trace": (sys.gettrace(), sys.getprofile()),
    }


@contextmanager
def interrupted(owner: Any, name: str, when: Callable[..., bool] = lambda *_args, **_named: True) -> Iterator[None]:
    """Let a function of the engine be interrupted by the user, once, at the first call that ``when`` holds for."""
    original = getattr(owner, name)
    done: list[bool] = []

    def interrupt(*args: Any, **named: Any) -> Any:
        if not done and when(*args, **named):
            done.append(True)
            raise KeyboardInterrupt
        return original(*args, **named)

    setattr(owner, name, interrupt)
    try:
        yield
    finally:
        setattr(owner, name, original)
    assert done, f"{name} was not called"


@contextmanager
def kernel_notebook(*, loaded: bool = True) -> Iterator[Notebook]:
    """Start a kernel without sockets, as `tests.notebook.shells` does for its runs; its loop is the current one."""
    with shells._process_kept():
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            notebook = shells._notebook_with_streams()
            if loaded:
                notebook.shell.run_line_magic("load_ext", "aotlab")
            yield notebook
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def run_in_kernel(notebook: Notebook, text: str, *, ok: bool = True) -> dict[str, Any]:
    """Run one cell in the kernel of `kernel_notebook`; return its reply."""
    reply: dict[str, Any] = asyncio.get_event_loop().run_until_complete(notebook.execute(text))
    assert not ok or reply["status"] == "ok", (text, reply)
    return reply
