"""The prerequisites of the other tests: a kernel, both themes, a reload, and complaints that are noticed."""

from __future__ import annotations

import pytest

from tests.browser.lab import THEMES, Lab, write_notebook

pytestmark = pytest.mark.tier("full")


def test_plain_notebook(lab: Lab) -> None:
    """A notebook without aotlab runs, follows the theme, survives a reload and can be saved."""
    write_notebook(lab.server.root / "plain.ipynb", ["a = 6", "a * 7"])
    lab.open("plain.ipynb")
    lab.run_all()
    for theme in THEMES:
        lab.theme(theme)
        lab.shoot(f"plain-{theme.split()[-1].lower()}")
    assert lab.cell(1).locator(".jp-OutputArea-output").inner_text().strip() == "42"
    lab.save()
    lab.reload()
    assert lab.cell(1).locator(".jp-OutputArea-output").inner_text().strip() == "42"
    assert lab.execute("print(a)") == "6\n"
    lab.shut_down_kernel()
    lab.close()
    lab.open("plain.ipynb", kernel=False)
    assert not lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session")


def test_complaints_are_heard(lab: Lab) -> None:
    """An error on the console, an uncaught exception and a request to another machine are all noticed."""
    with lab.page.expect_event("pageerror"), lab.page.expect_console_message(lambda each: "net::" in each.text):
        lab.page.evaluate(
            """() => {
                console.error('said on the console');
                setTimeout(() => { throw new Error('thrown by nobody'); });
                fetch('http://aotlab.invalid/').catch(() => {});
            }"""
        )
    for wanted in ("said on the console", "thrown by nobody", "aotlab.invalid"):
        assert any(wanted in complaint for complaint in lab.complaints), wanted
    with pytest.raises(AssertionError, match="said on the console"):
        lab.raise_complaints()
    lab.complaints.clear()
