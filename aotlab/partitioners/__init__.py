"""How the joint graph is split into a forward and a backward."""

from aotlab.partitioners.default import default_partition

__all__ = ["default_partition"]
