"""The line magic ``%aotlab config``, which prints and changes the settings of `aotlab.config`."""

from __future__ import annotations

import ast
import typing

from IPython.core.error import UsageError as ShellUsageError

from aotlab import config

NAME = "aotlab"
_USAGE = "use %aotlab config to print the settings, or %aotlab config NAME=VALUE to change one"


def settings_magic(line: str) -> None:
    """Print or change aotlab's settings.

        %aotlab config                 print all settings
        %aotlab config open=verdict    show new reports as the verdict alone
        %aotlab config open=report     show new reports in full (the default)

    `aotlab.config` documents the settings.
    """
    command, *changes = line.split() or [""]
    if command != "config":
        raise ShellUsageError(_USAGE)
    values = dict([_change(each) for each in changes])
    for name, value in values.items():
        setattr(config, name, value)
    for name in values or config.__annotations__:
        print(f"{name} = {getattr(config, name)!r}")


def _change(text: str) -> tuple[str, object]:
    """Read ``NAME=VALUE``, and check that the setting exists and may have this value."""
    name, equals, written = text.partition("=")
    if not equals:
        raise ShellUsageError(f"{text}: {_USAGE}")
    if name not in config.__annotations__:
        raise ShellUsageError(f"there is no setting {name}, only {', '.join(config.__annotations__)}")
    hint = typing.get_type_hints(config)[name]
    try:
        value = ast.literal_eval(written)
    except (SyntaxError, ValueError):
        value = written
    choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
    if value not in choices if choices else type(value) is not hint:
        allowed = " or ".join(map(str, choices)) or f"a value of the type {getattr(hint, '__name__', hint)}"
        raise ShellUsageError(f"{name}={written}: use {allowed}")
    return name, value
