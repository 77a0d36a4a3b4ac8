"""Make the README's picture, ``extension/report.png``, from the real page: run the README's cells in JupyterLab.

python .ci/picture.py            # in a checkout with the extra `test` installed, and Chromium
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.browser.lab import FLAGS, Shared, write_notebook  # noqa: E402  # after the path is set
from tests.browser.server import running  # noqa: E402


def main() -> None:
    """Run the cells, and take a picture of the last one."""
    cells = re.findall(r"^```ipython\n(.*?)\n```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        with running(Path(name), Path(name) / "log") as server:
            write_notebook(server.root / "readme.ipynb", list(cells))
            with Shared(browser=browser, server=server, artefacts=Path(name)).page() as lab:
                lab.page.set_viewport_size({"width": 1400, "height": 1000})
                lab.open("readme.ipynb")
                lab.run_all()
                lab.page.wait_for_timeout(1000)
                lab.cell(len(cells) - 1).screenshot(path=ROOT / "extension" / "report.png")
        browser.close()


if __name__ == "__main__":
    main()
