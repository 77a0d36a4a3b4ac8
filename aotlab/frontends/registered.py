"""What ``torch.compile(backend="aotlab")`` loads, with Dynamo, which `import aotlab` does not."""

from __future__ import annotations

from aotlab.frontends.dynamo import backend, prepare_dynamo

__all__ = ["backend"]

prepare_dynamo()
