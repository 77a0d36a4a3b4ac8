"""The options of ``%%aotcompile``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from aotlab.errors import DeviceError
from aotlab.partition.default import default_partition
from aotlab.partition.min_cut import min_cut_rematerialization_partition
from aotlab.partition.partition_stage import Partitioner


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one cell.

    Attributes
    ----------
    output
        The variable that receives the report.
    name
        The report's title.
    engine
        ``"aotlab"``, ``"upstream"`` (stock `torch.compile`), or ``"both"``: aotlab's graphs serve the calls, and stock
        `torch.compile` compiles the same graphs for comparison.
    frontend
        ``"dynamo"``, ``"direct"`` or ``"auto"``: Dynamo captures only what the direct frontend declines.
    backend
        ``"inductor"`` or ``"eager"``.
    device
        ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
    dynamic
        Whether sizes and numbers are dynamic from the first graph on. If not, and one of them changes, a function of
        the cell is compiled a second time, for all values of this size or number. The cell's other lines are compiled
        for each value.
    rehearse
        The name of a GPU that this machine does not have. Inductor and Triton compile for this GPU, but the cell runs
        on the CPU.
    verify
        Whether each graph is compared with eager before it is used.
    time
        Whether the graphs are timed beside eager after the cell has run.
    partitioner
        ``"default"`` or ``"min-cut"``: which partitioner chooses the values that the forward saves for the backward.
    memory_budget
        The memory budget of the min-cut partitioner: from 0 (least memory) to 1 (least time).
    save, recompute
        The names of values that the forward saves, and of values that the backward computes again, whatever the
        partitioner chose.
    quiet
        Whether to hide the report.
    """

    output: str | None = None
    name: str | None = None
    engine: str = "aotlab"
    frontend: str = "dynamo"
    backend: str = "inductor"
    device: str = "auto"
    dynamic: bool = False
    rehearse: str | None = None
    verify: bool = True
    time: bool = False
    partitioner: str = "default"
    memory_budget: float = 1.0
    save: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    quiet: bool = False

    def partition(self) -> Partitioner:
        """Return the partitioner."""
        budget = None if self.partitioner == "default" else self.memory_budget
        if self.save or self.recompute:
            return partial(
                min_cut_rematerialization_partition, memory_budget=budget, save=self.save, recompute=self.recompute
            )
        return (
            default_partition if budget is None else partial(min_cut_rematerialization_partition, memory_budget=budget)
        )

    def wanted_device(self) -> torch.device | None:
        """Return the device on which graphs must run, or None if any device is allowed.

        Raises
        ------
        DeviceError
            The machine has no such device.
        """
        if self.device == "auto" or self.rehearse is not None:  # a rehearsed cell runs on the CPU
            return None
        device = torch.device(self.device)
        if device.type == "cuda":
            if not torch.cuda.is_available():
                raise DeviceError(
                    f"--device {self.device}: this machine has no CUDA device that torch can use",
                    suggestion="leave the option out, or use --device cpu",
                )
            count = torch.cuda.device_count()
            index = device.index if ":" in self.device else torch.cuda.current_device()
            if index >= count:
                raise DeviceError(f"--device {self.device}: there are {count} CUDA devices, and the first is cuda:0")
            return torch.device("cuda", index)
        return device
