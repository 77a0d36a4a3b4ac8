"""What ``torch.compile(backend="aotlab")`` loads: `backend`, and with it what says which frames Dynamo refuses.

Here and not where `backend` is, as that has Dynamo loaded, which `import aotlab` has not.
"""

from __future__ import annotations

from aotlab.frontends.dynamo import backend
from aotlab.frontends.under_transforms import tell_of_refusals

__all__ = ["backend"]

tell_of_refusals(backend)
