"""What Dynamo logs while it gives up on a piece of code, as the report tells it."""

from __future__ import annotations

import logging

import pytest

from aotlab.notebook.quiet import quiet_dynamo

FAKE = """WON'T CONVERT f in.py line 1
torch._dynamo.exc.TorchRuntimeError: RuntimeError when making fake tensor call
  Explanation: Dynamo failed to run FX node with fake tensors: call_function matmul(*(…), **{}): got RuntimeError('2x3')
  Hint: Your code may result in an error when running in eager.
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (FAKE, "RuntimeError: 2x3"),
        ("torch._dynamo.exc.Unsupported: no rule", "Unsupported: no rule"),
        ("torch._dynamo.exc.InternalTorchDynamoError: NameError: x", "an error inside Dynamo: NameError: x"),
        ("torch._dynamo hit config.recompile_limit (8)", "Dynamo compiled it again too often"),
    ],
)
def test_the_gist_is_what_a_user_can_use(text: str, reason: str) -> None:
    """What an op raised rather than that one did, and nothing of it is printed."""
    reasons: dict[str, None] = {}
    with quiet_dynamo(reasons, lambda: False):
        logging.getLogger("torch._dynamo").warning(text)
    assert [found.startswith(reason) for found in reasons] == [True]
