"""Records of the environment: devices, versions, switches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that the process used.

    Attributes
    ----------
    kind
        ``"cpu"``, ``"cuda"`` and so on.
    index
        The number of the device among those of its kind; None for the CPU.
    name
        The vendor's name for it.
    """

    kind: str
    index: int | None = None
    name: str = ""

    def __str__(self) -> str:
        place = self.kind if self.index is None else f"{self.kind}:{self.index}"
        return f"{place} ({self.name})" if self.name else place


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """One of the engine's switches, with its value when the recording began.

    Attributes
    ----------
    name
        Its name in `aotlab.config`.
    value
        Its value. A value that is no bool, int, str or None is given as its repr.
    """

    name: str
    value: bool | int | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The machine, the versions and the settings with which the report was made.

    Attributes
    ----------
    aotlab, torch, python
        The versions of aotlab, torch and Python.
    platform
        Operating system and machine.
    threads
        The number of threads that torch uses for one CPU op.
    devices
        The CPU, and the accelerators that the process had used.
    config
        The engine's switches (the settings of `aotlab.config`) when the recording began.
    """

    aotlab: str
    torch: str
    python: str
    platform: str
    threads: int | None = None
    devices: tuple[Device, ...] = ()
    config: tuple[Switch, ...] = ()
