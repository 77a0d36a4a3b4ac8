"""Records of the environment: devices, versions, switches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device of the process: the CPU, or a CUDA device.

    Attributes
    ----------
    kind
        ``"cpu"``, ``"cuda"`` and so on.
    index
        The index of the device, for example 1 for ``cuda:1``; None for the CPU.
    name
        The vendor's name for the device.
    """

    kind: str
    index: int | None = None
    name: str = ""

    def __str__(self) -> str:
        place = self.kind if self.index is None else f"{self.kind}:{self.index}"
        return f"{place} ({self.name})" if self.name else place


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """One of aotlab's settings, with its value when the recording began.

    Attributes
    ----------
    name
        The name of the setting in `aotlab.config`.
    value
        The value of the setting, or the repr of a value that is not a bool, an int, a str or None.
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
        The CPU and, if the process had initialized CUDA, all its CUDA devices.
    config
        The settings of `aotlab.config` when the recording began.
    """

    aotlab: str
    torch: str
    python: str
    platform: str
    threads: int | None = None
    devices: tuple[Device, ...] = ()
    config: tuple[Switch, ...] = ()
