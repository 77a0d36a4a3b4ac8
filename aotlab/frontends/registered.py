"""What ``torch.compile(backend="aotlab")`` loads: `backend`, and with it what `prepare_dynamo` puts into Dynamo.

Here and not where `backend` is, as that has Dynamo loaded, which `import aotlab` has not.
"""

from __future__ import annotations

from aotlab.frontends.dynamo import backend, prepare_dynamo

__all__ = ["backend"]

prepare_dynamo()
