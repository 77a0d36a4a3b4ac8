"""Measure the time and the memory of functions side by side."""

from __future__ import annotations

from aotlab.bench.memory import MemoryUse, measure_memory, memory_curve
from aotlab.bench.timing import Case, Comparison, Paired, Samples, compare, training_case

__all__ = [
    "Case",
    "Comparison",
    "MemoryUse",
    "Paired",
    "Samples",
    "compare",
    "measure_memory",
    "memory_curve",
    "training_case",
]
