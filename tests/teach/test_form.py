"""The form: boxes and a button that give the answers which keywords give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aotlab import teach

widgets = pytest.importorskip("ipywidgets")


def found(part: Any, kind: type) -> list[Any]:
    """Return the widgets of a kind below one, in order."""
    below = [each for child in getattr(part, "children", ()) for each in found(child, kind)]
    return [part, *below] if isinstance(part, kind) else below


def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Share an input, and write another."""
    y.add_(1)
    return x[0], y


def test_a_form() -> None:
    """At each click of the button, the ticked boxes are compared with the truth."""
    ask = "raises writes shares same"
    form = teach.predict(program, torch.ones(2, 2), torch.ones(2), ask=ask).form()
    boxes = {box.description: box for box in found(form, widgets.Checkbox)}
    assert list(boxes) == [
        *("no", "call", "backward", "x", "y", "out[0] with x", "out[0] with y"),
        *("out[1] with x", "out[1] with y", "out[1] with out[0]"),
        *("out[0] is x", "out[0] is y", "out[1] is x", "out[1] is y", "out[1] is out[0]"),
    ]
    (button,) = found(form, widgets.Button)
    below = found(form, widgets.HTML)[-1]
    for name in ("y", "out[0] with x", "out[1] with y", "out[1] is x"):
        boxes[name].value = True
    button.click()
    assert "6 of 7 right" not in below.value
    assert "5 of 6 right" in below.value
    assert "Not answered yet: <code>raises</code>" in below.value
    boxes["out[1] is x"].value, boxes["out[1] is y"].value = False, True
    boxes["call"].value = boxes["no"].value = True  # of choices one at a time
    button.click()
    assert "All right (7 of 7)." in below.value


def test_computed_values_can_be_ticked() -> None:
    """They are named beside the inputs; the form of a question about inputs runs nothing."""
    ran = []

    def exp(x: torch.Tensor) -> torch.Tensor:
        ran.append(1)
        return x.exp()

    form = teach.predict(exp, torch.ones(2, requires_grad=True), ask="saved").form()
    assert [box.description for box in found(form, widgets.Checkbox)] == ["x", "computed"]
    assert ran == []
