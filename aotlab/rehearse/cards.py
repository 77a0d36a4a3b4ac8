"""The properties of GPUs that Inductor and Triton read, from NVIDIA's data sheets and programming guide."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from aotlab.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A model of GPU, with the properties that Inductor and Triton read.

    Attributes
    ----------
    name
        The vendor's name for the GPU.
    major, minor
        The compute capability.
    multi_processor_count, max_threads_per_multi_processor, max_threads_per_block, warp_size, regs_per_multiprocessor
        The number of multiprocessors, and their limits: threads per multiprocessor, threads per block, threads per
        warp, registers per multiprocessor.
    shared_memory_per_block, shared_memory_per_block_optin
        The default and the largest amount of shared memory of a block, in bytes.
    L2_cache_size, total_memory
        The sizes of the L2 cache and of the GPU's memory, in bytes.
    """

    name: str
    major: int
    minor: int
    multi_processor_count: int
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = 32
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 48 << 10
    shared_memory_per_block_optin: int
    L2_cache_size: int
    total_memory: int

    @property
    def capability(self) -> int:
        """The compute capability as one number."""
        return 10 * self.major + self.minor

    def properties(self) -> dict[str, Any]:
        """Return all properties, with the names that torch's device properties use."""
        return {**asdict(self), "gcnArchName": ""}


#: The cards that a rehearsal can compile for.
CARDS = {
    "h100": Card(
        name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132,
        shared_memory_per_block_optin=227 << 10, L2_cache_size=50 << 20, total_memory=80 << 30,
    ),
    "h200": Card(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132,
        shared_memory_per_block_optin=227 << 10, L2_cache_size=50 << 20, total_memory=141 << 30,
    ),
    "a100": Card(
        name="NVIDIA A100-SXM4-80GB", major=8, minor=0, multi_processor_count=108,
        shared_memory_per_block_optin=163 << 10, L2_cache_size=40 << 20, total_memory=80 << 30,
    ),
    "l4": Card(
        name="NVIDIA L4", major=8, minor=9, multi_processor_count=58, max_threads_per_multi_processor=1536,
        shared_memory_per_block_optin=99 << 10, L2_cache_size=48 << 20, total_memory=24 << 30,
    ),
    "t4": Card(
        name="Tesla T4", major=7, minor=5, multi_processor_count=40, max_threads_per_multi_processor=1024,
        shared_memory_per_block_optin=64 << 10, L2_cache_size=4 << 20, total_memory=16 << 30,
    ),
}  # fmt: skip


def card_named(name: str | Card) -> Card:
    """Return the card that `CARDS` has under ``name``. If ``name`` is a `Card`, return it unchanged."""
    if isinstance(name, Card):
        return name
    if name not in CARDS:
        raise UsageError(f"there is no card {name!r}; there are {', '.join(CARDS)}")
    return CARDS[name]
