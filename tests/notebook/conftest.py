"""The shell that most notebook tests run their cells in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _unloaded() -> Iterator[None]:
    """Unload the extension after each test from the shells that the test has made. It listens to all compilations."""
    from tests.notebook.plain_shells import unloaded_afterwards

    with unloaded_afterwards():
        yield


@pytest.fixture
def shell(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Make a shell with the extension in which the module's ``SETUP`` has run: by default torch and a tensor ``x``."""
    from tests.notebook.plain_shells import execute, plain_shell

    made = plain_shell()
    execute(made, getattr(request.module, "SETUP", "import torch\nx = torch.ones(3)"))
    yield made
    made.run_line_magic("unload_ext", "aotlab")
