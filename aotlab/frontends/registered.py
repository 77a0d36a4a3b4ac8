"""The entry point by which torch finds the backend of ``torch.compile(backend="aotlab")``.

It is a separate module because it imports Dynamo, which takes seconds; ``import aotlab`` does not import it.
"""

from __future__ import annotations

from aotlab.frontends.dynamo_frontend import backend, prepare_dynamo

__all__ = ["backend"]

prepare_dynamo()
