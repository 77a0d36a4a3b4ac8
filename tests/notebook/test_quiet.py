"""Dynamo's log messages when it gives up on a piece of code, as the report shows them."""

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
    ],
)
def test_the_gist_is_what_a_user_can_use(text: str, reason: str) -> None:
    """What an op raised rather than that one did, and nothing of it is printed."""
    reasons: dict[str, None] = {}
    with quiet_dynamo(reasons, lambda: False, lambda *_: None):
        logging.getLogger("torch._dynamo").warning(text)
    assert [found.startswith(reason) for found in reasons] == [True]


def test_what_is_compiled_no_more_is_told_apart() -> None:
    """The function, and the limit that it has reached."""
    reasons: dict[str, None] = {}
    heard: list[tuple[str, str, int]] = []
    with quiet_dynamo(reasons, lambda: False, lambda *limit: heard.append(limit)):
        logging.getLogger("torch._dynamo").warning(
            "torch._dynamo hit config.recompile_limit (8)\n   function: 'step' (/torch/optim/sgd.py:100)"
        )
    assert (set(heard), reasons) == ({("step", "recompile_limit", 8)}, {})
