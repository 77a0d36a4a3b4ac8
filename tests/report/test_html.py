"""The page and the summary: true, escaped, self-contained."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import pytest

from aotlab.report import Report, html
from aotlab.report.columns import COLUMNS
from aotlab.report.counts import counted
from aotlab.report.html import fragment, page
from aotlab.report.markup import Markup, clean, element, escape, join
from aotlab.report.model import Cell, CellPart, Summary, TimelineRow
from aotlab.report.parts import words
from aotlab.report.verdict import State
from aotlab.upstream.phases import STAGES
from tests.browser.looks import hard_to_read

WAYS = ("compiled", "eager", "python", "not run")
EVIL = "<script>alert(1)</script>\" onmouseover=\"alert(2)' x='</pre></style><img src=x onerror=alert(3)>&lt;"

SECTIONS = ("The cell", "Inputs", "Outputs", "Recompiles", "Graph breaks", "Timings", "Verification")


class Page(HTMLParser):
    """The elements, attributes and text of a page; complains about tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self.lines: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.update(name for name, _ in attrs)
        if tag not in ("meta", "br", "hr"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self._open):
            self.texts.append(data)

    @property
    def text(self) -> str:
        """All text that a reader sees or could open."""
        return "".join(self.texts)


def full(report: Report) -> Report:
    """Add timings, verification and a cell."""
    ratio = {"over": "eager", "p10": 0.4, "p90": 1.1, "noise": "which is faster changed"}
    timings = [
        {
            "engine": engine,
            "phase": phase,
            "median_ns": ns,
            "min_ns": ns - 10,
            "p10_ns": ns - 5,
            "p90_ns": ns + 50_000,
            "repeats": 30,
            "frame": "step",
            "again": 1.02,
            "ratios": [{**ratio, "median": ns / 300_000}] if engine != "eager" else [],
        }
        for engine, ns in (("aotlab", 150_000), ("eager", 300_000), ("upstream", 200_000))
        for phase in ("backward", "forward")
    ]
    rows = [{"kind": "value", "subject": f"out[{i}]", "equal": True, "call": 1} for i in range(3)]
    stages = [name for name, _, _ in STAGES]
    phases = [TimelineRow(phase=EVIL, stage=name, start_ns=0, duration_ns=9, depth=i) for i, name in enumerate(stages)]
    report = replace(report, timeline_rows=tuple(phases))
    return report.with_timings(timings).with_verification(rows).with_cell(Cell(source="step(w, x)"))


def without_script(report: Report) -> str:
    """Write the page as a package does that was installed without the script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(html, "_built", lambda name: None)
        return page(report)


def test_the_verdict_comes_first(report: Report) -> None:
    """The first text on the page is the verdict's sign and sentence."""
    texts = [text for text in Page(fragment(report)).texts if text.strip()]
    assert texts[0] == f"! {report.verdict}"


def test_nothing_compiled_is_said_in_the_first_line(story: Any) -> None:
    """Without a compiled graph the page begins with that, and the reason."""
    with Report.record() as recording:
        story.refused(outcome="ran eagerly")
    texts = [text for text in Page(fragment(recording.report())).texts if text.strip()]
    assert texts[0].startswith("! ")
    assert "".join(texts)[2:].startswith("Nothing was compiled: step ran eagerly, RandomOpError: aten.bernoulli draws")


def test_all_sections_are_there_in_order(report: Report) -> None:
    """One heading per section, in the order in which a reader needs them."""
    row = {"kind": "stride", "subject": "out[1]", "equal": False, "sentence": "strides differ"}
    text = Page(fragment(full(report).with_verification([row]))).text
    places = [text.index(section) for section in SECTIONS]
    assert places == sorted(places)


def test_mutations_aliases_and_reasons_are_visible(report: Report) -> None:
    """The page shows mutations, aliases and reasons."""
    text = Page(fragment(full(report))).text
    for expected in (
        "data mutated",
        "same tensor as x",
        "shares bytes with z",
        "requires_grad becomes True",
        "view of input x: x.t()",
        "is input y itself",
        "view of output out[0]: out[0].t()",
        "compiled by aotlab",
        "Compiled again: x has shape (8, 5), this entry was compiled for (4, 5)",
        "call to print()",
        "0.50× eager (0.40–1.10)",
    ):
        assert expected in text, expected


def test_differences_are_shown_openly(report: Report) -> None:
    """Differences from eager are not hidden in a fold."""
    row = {"kind": "stride", "subject": "out[1]", "equal": False, "sentence": "`out[1]` has strides (1, 5), not (4, 1)"}
    text = fragment(report.with_verification([row]))
    assert "NOT equal to eager: 1 of 1 observable" in text
    place = text.index("<code>out[1]</code> has strides (1, 5), not (4, 1)")
    before = text[text.index("<h3>Verification ") : place]
    assert before.count("<details") == 0


def test_everything_of_the_users_is_escaped(tell: Callable[..., Any]) -> None:
    """Functions, code, kernels, messages, names and rows full of markup stay text."""
    story = tell(function=EVIL, code=EVIL, kernel=EVIL)
    with Report.record(EVIL) as recording:
        story.called(story.compiled(reason=EVIL), times=2)
        story.refused()
    report = full(recording.report()).with_cell(Cell(source=EVIL))
    report = report.with_verification([{"kind": EVIL, "subject": EVIL, "equal": False, "sentence": EVIL}], engine=EVIL)
    for text in (fragment(report), without_script(report)):
        parsed = Page(text)
        assert {"script", "img"} & set(parsed.tags) == set()
        assert parsed.attributes <= {
            "class",
            "style",
            "title",
            "open",
            "scope",
            "lang",
            "charset",
            "name",
            "content",
            "border",
        }
        assert parsed.text.count(EVIL) > 10
    drawn = page(report)
    assert "<img" not in drawn.partition("<noscript>")[2]
    assert drawn.count("</script") == 2  # the data's and the script's
    (data,) = re.findall(r'<script type="application/json">(.*?)</script>', drawn)
    assert Report.from_json(data) == counted(report)
    assert f"<title>{escape(EVIL)} – aotlab report</title>" in drawn


def test_markup_escapes_what_is_not_markup() -> None:
    """Text is escaped once, markup never, whatever it passes through."""
    inner = element("b", "<&>")
    assert inner == "<b>&lt;&amp;&gt;</b>"
    assert element("p", inner, " ", "'\"", title='"<') == '<p title="&quot;&lt;"><b>&lt;&amp;&gt;</b> &#x27;&quot;</p>'
    assert join(None, "a", Markup("<i>")) == "a<i>"
    assert escape(escape("<")) == "&lt;"
    assert escape(inner.upper()) == "&lt;B&gt;&amp;LT;&amp;AMP;&amp;GT;&lt;/B&gt;"  # no longer markup
    assert clean("é\n\t€😀") == "é\n\t€😀"


def test_names_in_sentences_are_code() -> None:
    """Names in backticks become code. A lone backtick, and text that looks like markup, stay text."""
    assert words("needs `mul_52` <b>") == "needs <code>mul_52</code> &lt;b&gt;"
    assert words("a ` alone") == "a ` alone"


def test_the_page_needs_nothing_else(report: Report) -> None:
    """No handler, and no address to load from, besides the names of XML's namespaces."""
    for text in (page(full(report)), without_script(full(report))):
        found = set(re.findall(r"https?:[^\"'`;&]*|@import|<link|<iframe|javascript:|\bimport\(|fetch\(", text))
        assert [each for each in found if not re.fullmatch(r"http://www\.w3\.org/(\d{4}|XML)/[\w/]+", each)] == []
        assert text.startswith("<!DOCTYPE html>")
        assert 'charset="utf-8"' in text


@pytest.mark.parametrize(
    ("name", "title"), [("my run", "my run – aotlab report"), (None, "step and dropout_net – aotlab report")]
)
def test_the_page_has_a_title_and_a_description(report: Report, name: str | None, title: str) -> None:
    """The title is the report's name, or the names of its functions; the description is the verdict."""
    named = replace(report, name=name)
    for text in (page(named), without_script(named)):
        head = text.partition("</head>")[0]
        assert f"<title>{title}</title>" in head
        assert f'<meta name="description" content="{escape(named.verdict)}">' in head


def test_without_the_script_all_tables_are_there(report: Report) -> None:
    """Each table with rows is below its name, with its columns."""
    made = full(report)
    text = Page(without_script(made)).text
    for name, columns in COLUMNS.items():
        count = len(made._table(name))
        assert (f"{name} {count} row" in text) == (count > 0), name
        assert not count or all(column in text for column in columns)


def test_to_html_writes_one_file(report: Report, recording: Any, tmp_path: Path) -> None:
    """Report and recording write the same page, as UTF-8, and return where."""
    path = report.to_html(tmp_path / "r.html")
    assert path.read_text(encoding="utf-8") == page(report)
    assert recording.to_html(tmp_path / "s.html").read_bytes() == path.read_bytes()


def test_unprintable_text_is_shown_as_such(report: Report) -> None:
    """Control characters, lone surrogates and direction marks become the replacement character."""
    odd = report.with_cell(Cell(source="a\x00b\ud800c\u202ed\r\n\te"))
    assert "a\ufffdb\ufffdc\ufffdd\ufffd\n\te" in fragment(odd)


@pytest.mark.tier("full")
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium, and `chromium` is not on the PATH")
def test_a_browser_draws_the_page(report: Report, tmp_path: Path) -> None:
    """Each tab is drawn, light and dark, with contrasts of 4.5 or more; nothing of the users' runs or is markup.

    The states of a report differ only above the tabs. So the test opens all tabs in the first state alone.
    """
    api = pytest.importorskip("playwright.sync_api")
    row = {"kind": "value", "subject": EVIL, "equal": False, "sentence": EVIL}
    parts = [CellPart(first_line=i, last_line=i, how=how) for i, how in enumerate(WAYS, 1)]
    cell = Cell(source=f"a\nb\nc\n{EVIL}", error="ValueError: no", parts=tuple(parts))
    made = [
        replace(full(report).with_verification([row]), summary=Summary(sentence="It is.", state=state), cell=cell)
        for state in get_args(State)
    ]
    with api.sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        for each, scheme in ((each, scheme) for each in made for scheme in ("light", "dark")):
            shown = browser.new_page(color_scheme=scheme)
            said: list[str] = []
            shown.on("pageerror", lambda error, said=said: said.append(str(error)))
            shown.on("dialog", lambda dialog, said=said: (said.append(dialog.message), dialog.dismiss()))
            shown.goto(each.to_html(tmp_path / "r.html").as_uri())
            tabs = shown.query_selector_all("[role=tab]")
            assert len(tabs) >= 8
            for tab in tabs if each is made[0] else tabs[:1]:
                tab.click()
                for closed in shown.query_selector_all("details:not([open]) > summary"):
                    if closed.is_visible():
                        closed.click()
                panel = shown.query_selector("[role=tabpanel]:not([hidden])")
                assert len(panel.inner_text()) > 10
                assert (tab.inner_text(), hard_to_read(shown.query_selector("body"))) == (tab.inner_text(), [])
                assert shown.query_selector("img") is None
            assert said == []
            shown.close()
        browser.close()
