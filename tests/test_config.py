"""The switches: documented, patched temporarily, and restored."""

from __future__ import annotations

import ast
import inspect

import pytest

from aotlab import config

DEFAULTS = {
    "fallback": "dynamo",
    "recompile_limit": 8,
    "debug_assert": False,
    "functionalize_rng_ops": False,
    "lazy_backward": False,
}


def test_defaults():
    """The shipped configuration."""
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS
    assert set(DEFAULTS) <= set(config.__annotations__)


def test_every_switch_is_documented():
    """A separate comment precedes each switch."""
    source = inspect.getsource(config)
    lines = source.splitlines()
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.AnnAssign):
            assert lines[statement.lineno - 2].startswith("#: "), statement.target.id


def test_patch():
    """Patches nest, and end when their block does, also by an exception."""
    with config.patch(recompile_limit=2, fallback="error"):
        assert (config.recompile_limit, config.fallback) == (2, "error")
        with config.patch(recompile_limit=3):
            assert config.recompile_limit == 3
        assert config.recompile_limit == 2
    assert (config.recompile_limit, config.fallback) == (8, "dynamo")
    with pytest.raises(ValueError, match="stop"), config.patch(debug_assert=True):
        raise ValueError("stop")
    assert config.debug_assert is False


def test_unknown_switches():
    """A name that is no switch is an error, and nothing is set."""
    with pytest.raises(AttributeError, match="nonesuch"), config.patch(recompile_limit=1, nonesuch=2):
        pass
    assert config.recompile_limit == 8
    assert not hasattr(config, "nonesuch")
