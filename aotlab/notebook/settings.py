"""The line magic ``%aotlab``: the settings of `aotlab.config`, and the stored runs."""

from __future__ import annotations

import ast
import shlex
import types
import typing
from pathlib import Path

from IPython.core.error import UsageError as ShellUsageError

from aotlab import config
from aotlab.errors import AotlabError
from aotlab.runs import listing, saving, store

NAME = "aotlab"
_USAGE = (
    "use %aotlab config, %aotlab config NAME=VALUE, %aotlab runs [WORDS], %aotlab show [N], %aotlab diff [A B], "
    "%aotlab export FOLDER or %aotlab clear"
)


def aotlab_magic(line: str) -> object:
    """Print or change aotlab's settings, or list, show and compare the stored runs.

        %aotlab config                 print all settings
        %aotlab config open=verdict    show new reports as the verdict alone
        %aotlab config open=report     show new reports in full (the default)
        %aotlab config save_runs=False do not store the reports of cells
        %aotlab config cell_frontend=dynamo  let Dynamo capture cells, also the steps of optimizers

        %aotlab runs                   list the stored runs of all notebooks, the newest first
        %aotlab runs WORDS             list the runs whose notebook, code, result or versions contain these words
        %aotlab show N                 show the report of run N; without N, of the newest run
        %aotlab diff A B               compare run A with run B; without numbers, the two newest runs
        %aotlab export FOLDER          write all runs as Parquet files
        %aotlab clear                  delete all stored runs

    `aotlab.config` documents the settings. ``runs``, ``show`` and ``diff`` return a table or a report, so
    ``report = %aotlab show N`` works.
    """
    command, *words = shlex.split(line) or [""]
    if command == "config":
        _settings(words)
        return None
    try:
        match command, words:
            case "runs", _:
                return listing.listing(words)
            case "show", [] | [_]:
                return saving.load(*map(_number, words))[1]
            case "diff", [] | [_, _]:
                return saving.difference(*map(_number, words))
            case "export", [folder]:
                return listing.export(Path(folder))
            case "clear", []:
                saving.finish()
                print(f"{store.clear()} stored runs are deleted")
                return None
    except AotlabError as error:
        raise ShellUsageError(str(error)) from None
    raise ShellUsageError(_USAGE)


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ShellUsageError(f"{text} is not the number of a run; %aotlab runs lists them")
    return int(text)


def _settings(changes: list[str]) -> None:
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
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value not in choices if choices else type(value) not in kinds:
        allowed = " or ".join(map(str, choices)) or f"a value of the type {getattr(hint, '__name__', hint)}"
        raise ShellUsageError(f"{name}={written}: use {allowed}")
    return name, value
