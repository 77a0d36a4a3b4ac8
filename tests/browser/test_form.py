"""A prediction answered in the browser: with the mouse, and with the keyboard alone."""

from __future__ import annotations

import pytest

from tests.browser.lab import THEMES, Lab, write_notebook
from tests.browser.looks import hard_to_read

pytestmark = pytest.mark.tier("full")

PROGRAM = """\
import torch
from aotlab import teach

def program(x, y):
    x[0].zero_()
    return x.t()
"""
FORM = 'teach.predict(program, torch.ones(2, 2), torch.ones(2), ask="raises writes").form()'

MAP = "x = torch.arange(4.0).view(2, 2)\nteach.storage_map(x=x, column=x[:, 1])"


def tab_to(lab: Lab, text: str) -> None:
    """Press Tab until the focus is on the box or button with a text."""
    for _ in range(12):
        lab.page.keyboard.press("Tab")
        focused = lab.page.evaluate("(document.activeElement.closest('label') ?? document.activeElement).textContent")
        if focused.strip() == text:
            return
    raise AssertionError(f"Tab leads to no {text}")


@pytest.mark.tier("full")
@pytest.mark.parametrize("theme", THEMES)
def test_a_form_is_answered(lab: Lab, theme: str) -> None:
    """Both ways lead to the same table; the form can be read in either theme, and a map too."""
    write_notebook(lab.server.root / "form.ipynb", [PROGRAM, FORM, FORM, MAP])
    lab.open("form.ipynb")
    lab.theme(theme)
    lab.run_all()
    mouse, keys = lab.cell(1), lab.cell(2)
    for text in ("x", "call", "no"):  # of "call" and "no" one holds
        mouse.locator(".widget-checkbox label").get_by_text(text, exact=True).click()
    mouse.locator("button", has_text="Compare").click()
    mouse.get_by_text("All right (3 of 3).").wait_for()
    keys.locator(".widget-checkbox input").first.focus()
    lab.page.keyboard.press("Shift+Tab")
    for text, key in (("no", "Space"), ("x", "Space"), ("Compare", "Enter")):
        tab_to(lab, text)
        lab.page.keyboard.press(key)
    keys.get_by_text("All right (3 of 3).").wait_for()
    assert hard_to_read(keys.locator(".jupyter-widgets").first) == []
    assert hard_to_read(lab.cell(3).locator(".jp-OutputArea")) == []
    lab.shoot(f"form-{theme.split()[-1].lower()}", keys)
