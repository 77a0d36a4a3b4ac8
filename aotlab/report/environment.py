"""Describe the environment of a recording: versions, devices, switches."""

from __future__ import annotations

import functools
import platform
import sys
from pathlib import Path

import torch

from aotlab import __version__, config
from aotlab.report.model import Device, Environment, Switch


def switch_value(name: str) -> bool | int | str | None:
    """Return the value of a setting of `aotlab.config`; if a report cannot hold it, return its repr."""
    value: object = getattr(config, name)
    return value if value is None or isinstance(value, (bool, int, str)) else repr(value)


def environment(switches: tuple[Switch, ...]) -> Environment:
    """Describe this process: versions, devices and ``switches``, the values of aotlab's settings."""
    devices = [Device(kind="cpu", name=_processor())]
    # Reading a GPU's name would initialize CUDA. A process that has not initialized CUDA has not used a GPU.
    if torch.cuda.is_initialized():
        devices += [
            Device(kind="cuda", index=index, name=torch.cuda.get_device_name(index))
            for index in range(torch.cuda.device_count())
        ]
    return Environment(
        aotlab=__version__,
        torch=str(torch.__version__),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        threads=torch.get_num_threads(),
        devices=tuple(devices),
        config=switches,
    )


@functools.cache
def _processor() -> str:
    """Return the vendor's name for the processor, if the system provides it."""
    if sys.platform == "linux":
        try:
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        except OSError:
            pass
    return platform.processor() or platform.machine()
