"""The line magic ``%aotlab config``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from aotlab import config
from aotlab.report import Report
from tests.notebook.plain_shells import cell, execute, failing, printed


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Leave the settings as they were."""
    with config.patch(open="report", recompile_limit=8, debug_assert=False, cache_bytes=config.cache_bytes):
        yield


def test_a_setting_is_changed_printed_and_in_the_next_report(shell: InteractiveShell) -> None:
    """The magic changes a setting; the report of the next run of a cell has it, also if the cell ran before."""

    def opened() -> object:
        execute(shell, cell("y = x + 1"))
        report: Report = shell.user_ns["report"].report()
        return {each.name: each.value for each in report.environment.config}["open"]

    assert opened() == "report"
    text, _ = printed(shell, "%aotlab config open=verdict recompile_limit=3 debug_assert=True cache_bytes=None")
    assert text == "open = 'verdict'\nrecompile_limit = 3\ndebug_assert = True\ncache_bytes = None\n"
    assert (config.open, config.recompile_limit, config.debug_assert) == ("verdict", 3, True)
    assert opened() == "verdict"
    text, _ = printed(shell, "%aotlab config")
    assert text.splitlines() == [f"{name} = {getattr(config, name)!r}" for name in config.__annotations__]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", "use %aotlab config"),
        ("verify", "use %aotlab config"),
        ("config open", "open: use %aotlab config"),
        ("config nonesuch=1", "there is no setting nonesuch"),
        ("config open=tab", "use report or verdict"),
        ("config recompile_limit=2 debug_assert=1", "a value of the type bool"),
        ("config recompile_limit=True", "a value of the type int"),
        ("config cache_bytes=large", "a value of the type int | None"),
    ],
)
def test_a_wrong_setting_changes_nothing(shell: InteractiveShell, line: str, reason: str) -> None:
    """The error says which values a setting may have."""
    error = failing(shell, f"%aotlab {line}")
    assert isinstance(error, UsageError)
    assert reason in str(error)
    assert (config.open, config.recompile_limit, config.debug_assert) == ("report", 8, False)
