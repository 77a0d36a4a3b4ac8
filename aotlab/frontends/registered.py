"""The entry point by which torch finds the backend of ``torch.compile(backend="aotlab")``.

It is a separate module because the import of Dynamo takes seconds. So ``import aotlab`` does not import this module.
"""

from __future__ import annotations

from aotlab.frontends.dynamo_frontend import backend, prepare_dynamo

__all__ = ["backend"]

prepare_dynamo()
