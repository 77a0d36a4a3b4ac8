"""Events: who hears them, and in which order the engine emits them."""

from __future__ import annotations

import dataclasses

import pytest

from aotlab import events
from aotlab.events import CompileStarted, Event, GraphBreak


def test_listeners_hear_in_order():
    """Events go to all listeners, in the order in which they came, for the length of their blocks."""
    heard = []
    assert events.listening() is False
    with events.listen(lambda e: heard.append(("first", e))):
        with events.listen(lambda e: heard.append(("second", e))):
            assert events.listening() is True
            event = GraphBreak(stack=(), reason="print")
            events.emit(event)
        events.emit(event)
    events.emit(event)
    assert heard == [("first", event), ("second", event), ("first", event)]
    assert events.listening() is False


def test_the_same_listener_twice():
    """A listener that listens twice hears twice, and once again when the inner block ends."""
    heard = []
    with events.listen(heard.append):
        with events.listen(heard.append):
            events.emit(Event())
        events.emit(Event())
    assert len(heard) == 3


def test_an_exception_ends_listening():
    """A block that is left by an exception takes its listener with it."""
    with pytest.raises(ValueError, match="stop"), events.listen(print):
        raise ValueError("stop")
    assert events.listening() is False


def test_events_are_frozen_records():
    """Every event is a frozen dataclass with a docstring and a time."""
    kinds = [v for v in vars(events).values() if isinstance(v, type) and issubclass(v, Event)]
    assert len(kinds) >= 8
    for kind in kinds:
        assert kind.__dataclass_params__.frozen
        assert kind.__doc__.strip().splitlines()[0].endswith(".")
    early, late = Event(), Event()
    assert early.at_ns <= late.at_ns
    started = CompileStarted(function="f", function_id=1, entry=2, frontend="direct", backend="eager")
    with pytest.raises(dataclasses.FrozenInstanceError):
        started.entry = 3


def test_entry_numbers_are_unique():
    """Numbers of entries grow."""
    first, second = events.next_entry(), events.next_entry()
    assert second > first
