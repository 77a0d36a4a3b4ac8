"""The static page in a report's output, as JupyterLab shows it without our renderer."""

from __future__ import annotations

import pytest

from aotlab.report.model import Report
from tests.browser.lab import THEMES, Lab, write_notebook
from tests.browser.looks import hard_to_read
from tests.browser.samples import hostile, training_step

pytestmark = pytest.mark.tier("full")


def html_only(report: Report) -> dict[str, object]:
    """Return the report's bundle without its JSON."""
    return {kind: data for kind, data in report._repr_mimebundle_().items() if kind.startswith("text/")}


def test_page_in_a_trusted_notebook(lab: Lab) -> None:
    """Without a kernel, the page is shown in its cell with its styles, and can be read in both themes."""
    write_notebook(lab.server.root / "page.ipynb", [{"source": "1", "outputs": [html_only(training_step())]}])
    lab.server.trust("page.ipynb")
    lab.open("page.ipynb", kernel=False)
    report = lab.cell(0).locator(".aotlab-report")
    assert report.locator(".verdict").inner_text().split(maxsplit=1)[1] == training_step().verdict
    for theme in THEMES:
        lab.theme(theme)
        lab.shoot(f"fallback-{theme.split()[-1].lower()}")
        assert "\n".join(hard_to_read(report)) == ""


@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "untrusted"])
@pytest.mark.parametrize("also_chosen", [True, False], ids=["all", "free"])
def test_hostile_words_stay_words(lab: Lab, trusted: bool, also_chosen: bool) -> None:
    """Whatever a report's strings hold, nothing of it becomes markup or runs."""
    report = hostile(also_chosen=also_chosen)
    write_notebook(lab.server.root / "hostile.ipynb", [{"source": "1", "outputs": [html_only(report)]}])
    if trusted:
        lab.server.trust("hostile.ipynb")
    lab.open("hostile.ipynb", kernel=False)
    output = lab.cell(0).locator(".jp-OutputArea-output")
    assert "window.hacked='img'" in output.inner_text()
    assert output.locator("img, script, a, svg").count() == 0
    assert lab.page.evaluate("() => window.hacked ?? null") is None
