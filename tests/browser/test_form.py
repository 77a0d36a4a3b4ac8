"""A prediction answered in the browser: with the mouse, and with the keyboard alone."""

from __future__ import annotations

import pytest

from tests.browser.lab import THEMES, Lab, write_notebook
from tests.browser.looks import hard_to_read

PROGRAM = """\
import torch
from aotlab import teach

def program(x, y):
    x[0].zero_()
    return x.t()
"""
FORM = 'teach.predict(program, torch.ones(2, 2), torch.ones(2), ask="raises writes").form()'

MAP = "x = torch.arange(4.0).view(2, 2)\nteach.storage_map(x=x, column=x[:, 1])"


def tab_to(lab: Lab, kind: str) -> None:
    """Press Tab until the focus is on an element of a kind."""
    for _ in range(12):
        lab.page.keyboard.press("Tab")
        if lab.page.evaluate("kind => document.activeElement.matches(kind)", kind):
            return
    raise AssertionError(f"Tab leads to no {kind}")


@pytest.mark.tier("full")
@pytest.mark.parametrize("theme", THEMES)
def test_a_form_is_answered(lab: Lab, theme: str) -> None:
    """Both ways lead to the same table; the form can be read in either theme, and a map too."""
    write_notebook(lab.server.root / "form.ipynb", [PROGRAM, FORM, FORM, MAP])
    lab.open("form.ipynb")
    lab.theme(theme)
    lab.run_all()
    mouse, keys = lab.cell(1), lab.cell(2)
    mouse.locator(".widget-checkbox label", has_text="x").click()
    mouse.locator(".widget-radio-box label", has_text="no").first.click()
    mouse.locator("button", has_text="Compare").click()
    mouse.get_by_text("All right (3 of 3).").wait_for()
    keys.locator(".widget-radio-box input").first.focus()
    lab.page.keyboard.press("Space")
    for kind, key in (("input[type=checkbox]", "Space"), ("button", "Enter")):
        tab_to(lab, kind)
        lab.page.keyboard.press(key)
    keys.get_by_text("All right (3 of 3).").wait_for()
    assert hard_to_read(keys.locator(".jupyter-widgets").first) == []
    assert hard_to_read(lab.cell(3).locator(".jp-OutputArea")) == []
    lab.shoot(f"form-{theme.split()[-1].lower()}", keys)
