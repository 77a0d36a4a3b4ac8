"""How the joint graph is split into a forward and a backward."""

from aotlab.partitioners.default import default_partition
from aotlab.partitioners.min_cut import min_cut_rematerialization_partition

__all__ = ["default_partition", "min_cut_rematerialization_partition"]
