"""Each row of the catalogue of eager fallbacks: its program runs eagerly, for the reason of the row."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

import aotlab
from aotlab import errors, fallbacks
from aotlab.fallbacks import Fallback, refusal_rows

#: The rows whose programs torch 2.15 lets aotlab compile.
UP_TO_2_14 = ("takes-only-bfloat16-in-trace", "write-does-not-fit")
#: The ids of the classes of errors. The message of such an error says more than the sentence of its row.
CLASSES = {row.id for row in refusal_rows.ROWS}


def outcome(row: Fallback, *, compiled: bool) -> list[Any]:
    """Run the program of a row; return its results and arguments, or the error that it raises.

    The modes and quirks that a program switches are restored.
    """
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"torch": torch, "aotlab": aotlab}
    with (
        torch.autograd.set_detect_anomaly(False),
        torch.set_grad_enabled(True),
        aotlab.config.patch(quirks=aotlab.config.quirks),
    ):
        exec(compile(row.program, f"<{row.id}>", "exec"), namespace)
        function, args = namespace["f"], namespace["args"]
        if compiled:
            options = {"backend": "eager", **namespace.get("options", {})}
            function = aotlab.compile(function, frontend=row.frontend, **options)
        use = namespace.get("use", lambda function, *args: function(*args))
        try:
            return pytree.tree_leaves((use(function, *args), args))
        except Exception as error:  # noqa: BLE001  # eager's own error is an outcome, too
            return [type(error), str(error).splitlines()[:1]]


def equal(one: Any, other: Any) -> bool:
    """Compare two leaves of results."""
    if isinstance(one, FakeTensor):  # no values; the symbols of two runs have equal names
        return type(other) is type(one) and str(one) == str(other)
    if isinstance(one, torch.Tensor):
        if one.is_sparse:
            return other.is_sparse and torch.equal(one.to_dense(), other.to_dense())
        with torch._C.DisableTorchFunctionSubclass():
            return isinstance(other, torch.Tensor) and torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    return type(one) is type(other) and (one == other or not isinstance(one, int | float | str | list))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("id", sorted(fallbacks.ROWS.keys() - CLASSES))
def test_program(id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program runs eagerly with one notice, which has the row's sentence and id; results are eager's."""
    row = fallbacks.ROWS[id]
    if '"cuda"' in row.program and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    monkeypatch.setattr(aotlab.config, "fallback", "eager")
    expected = outcome(row, compiled=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        actual = outcome(row, compiled=True)
    notices = [str(each.message) for each in caught if "runs eagerly" in str(each.message)]
    assert len(expected) == len(actual)
    assert all(map(equal, expected, actual))
    if id in UP_TO_2_14 and torch.__version__ >= "2.15":
        assert notices == []
        return
    assert len(notices) == 1
    assert row.sentence.format(**row.example) in notices[0]
    assert row.suggestion.format(**row.example) in notices[0]
    assert notices[0].endswith(f"[{id}]")


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("id", sorted(CLASSES))
def test_refusal(id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program runs eagerly with one notice, or its backward raises; the message ends with the id of its class."""
    monkeypatch.setattr(aotlab.config, "fallback", "eager")
    row = fallbacks.ROWS[id]
    expected = outcome(row, compiled=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        actual = outcome(row, compiled=True)
    messages = [str(each.message) for each in caught if "runs eagerly" in str(each.message)]
    if messages:
        assert len(expected) == len(actual)
        assert all(map(equal, expected, actual))
    else:  # a backward that cannot run
        kind, messages = actual
        assert issubclass(kind, errors.RefusedError)
    assert len(messages) == 1
    assert messages[0].endswith(f"[{id}]")


def test_every_class_has_a_row() -> None:
    """A message of each class of errors has the id of a row, but for two classes that no program of this kind shows."""
    without = {kind for kind in errors.RefusedError.__subclasses__() if not kind("a fact").case}
    assert without == {errors.DeviceError, errors.PartialBackwardError}
    assert {kind("a fact").case for kind in errors.RefusedError.__subclasses__()} - {""} == CLASSES


def test_ids_are_unique() -> None:
    """No two rows have the same id."""
    counts = Counter(row.id for rows in fallbacks.PARTS.values() for row in rows)
    assert [id for id, count in counts.items() if count > 1] == []
