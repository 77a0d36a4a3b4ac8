"""The page: true, escaped, self-contained, without scripts."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import pytest

from aotlab.report import Report
from aotlab.report.html import fragment, page
from aotlab.report.legend import WAYS
from aotlab.report.markup import Markup, clean, element, escape, join
from aotlab.report.model import Cell, CellPart, Kernel, Span, Storage, Summary
from aotlab.report.parts import cell, grid, words
from aotlab.report.sections import MOST_NODES
from aotlab.report.verdict import State
from tests.browser.looks import contrasts, hard_to_read

EVIL = "<script>alert(1)</script>\" onmouseover=\"alert(2)' x='</pre></style><img src=x onerror=alert(3)>&lt;"

SECTIONS = (
    *("The cell", "Stages", "Inputs", "Outputs", "Storages", "Saved for backward", "Kernels", "Guards", "Code"),
    *("Nodes of the joint graph", "Calls", "Recompiles", "Graph breaks", "Timings", "Verification"),
    "What the words mean",
)


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
        if "style" not in self._open:
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
    return report.with_timings(timings).with_verification(rows).with_cell(Cell(source="step(w, x)"))


def test_the_verdict_comes_first(report: Report) -> None:
    """The first text on the page is the verdict's sign and sentence."""
    texts = [text for text in Page(fragment(report)).texts if text.strip()]
    assert [text.strip() for text in texts[:2]] == ["!", report.verdict]


def test_nothing_compiled_is_said_in_the_first_line(story: Any) -> None:
    """Without a compiled graph the page begins with that, and the reason."""
    with Report.record() as recording:
        story.refused(outcome="ran eagerly")
    texts = [text for text in Page(fragment(recording.report())).texts if text.strip()]
    said = "".join(texts[1:4])
    assert said.startswith("Nothing was compiled: step ran eagerly, RandomOpError: aten.bernoulli draws")


def test_all_sections_are_there_in_order(report: Report) -> None:
    """One heading per section, in the order in which a reader needs them."""
    text = Page(fragment(full(report))).text
    places = [text.index(section) for section in SECTIONS]
    assert places == sorted(places)


def test_mutations_aliases_and_reasons_are_visible(report: Report) -> None:
    """What the workbench is for can be read off the page."""
    text = Page(fragment(full(report))).text
    for expected in (
        "data mutated",
        "same tensor as x",
        "shares bytes with z",
        "requires_grad becomes True",
        "view of input x: x.t()",
        "is input y itself",
        "view of output out[0]: out[0].t()",
        "bytes 8 – 24",
        "mm needs it",
        "tracer that ran: aotlab",
        "Compiled again: x has shape (8, 5), this entry was compiled for (4, 5)",
        "again is the same tensor as x",
        "call to print()",
        "Backward 30 repeats, the same code against itself 1.02×Noise: which is faster changed.",
        "noise: 0.50× eager (0.40–1.10)",
        "all 3 equal",
        "int main() {}",
        "x.copy_(out[0])",
    ):
        assert expected in text, expected


def test_engines_and_phases_are_in_their_order(report: Report) -> None:
    """Forward stands before backward, eager before upstream before aotlab, whatever the order of the rows."""
    text = Page(fragment(full(report))).text
    timings = text[text.index("Timings") : text.index("Verification")]
    words = re.findall(r"Forward|Backward|eager (?=3)|upstream (?=2)|aotlab (?=1)", timings)
    assert words == ["Forward", "eager ", "upstream ", "aotlab ", "Backward", "eager ", "upstream ", "aotlab "]


def test_bars_are_parts_of_their_scale(report: Report) -> None:
    """The bars of the storage map begin and end where the bytes do; no bar leaves its track."""
    text = fragment(report)
    assert 'class="input" style="left:33.33%;width:66.67%"' in text  # z: bytes 8 to 24 of 24
    for left, width in re.findall(r"left:([\d.]+)%;width:([\d.]+)%", text):
        assert 0 <= float(left) + float(width) <= 100.01


def test_library_calls_stand_together(report: Report) -> None:
    """Kernels that the compiler wrote have a fold each; what it calls from libraries shares one per graph."""
    graph = report.frames[0].graphs[0]
    calls = [
        Kernel(name=name, language="extern", graph_name="g", kind="forward", source=f"call {i}")
        for i, name in enumerate(("mm", "addmm", "mm"))
    ]
    frame = replace(report.frames[0], graphs=(replace(graph, kernels=(*graph.kernels, *calls)),))
    text = Page(fragment(replace(report, frames=(frame,)))).text
    assert "Kernels 2 written in c++, 3 called from libraries" in text
    assert "mm × 2 and addmm extern · forward · gcall 0\ncall 1\ncall 2" in text


def test_time_between_the_stages_is_not_hidden(report: Report) -> None:
    """The stages of the story take 946 ms of 950; were it 2 s, the page would say where the rest is not."""
    assert "946 ms in 7 stages" in Page(fragment(report)).text
    assert "between them" not in Page(fragment(report)).text
    graph = replace(report.frames[0].graphs[0], duration_ns=2_000_000_000)
    slow = replace(report, frames=(replace(report.frames[0], graphs=(graph,)),))
    assert "946 ms in 7 stages; 1.05 s more between them" in Page(fragment(slow)).text


def test_differences_are_shown_openly(report: Report) -> None:
    """What differs from eager is not behind a fold."""
    row = {"kind": "stride", "subject": "out[1]", "equal": False, "sentence": "`out[1]` has strides (1, 5), not (4, 1)"}
    text = fragment(report.with_verification([row]))
    assert "NOT equal to eager: 1 of 1 observable" in text
    place = text.index("`out[1]` has strides (1, 5), not (4, 1)")
    before = text[text.index(">Verification ") : place]
    assert before.count("<details") == 0


def test_everything_of_the_users_is_escaped(tell: Callable[..., Any]) -> None:
    """Functions, code, kernels, messages, names and rows full of markup stay text."""
    story = tell(function=EVIL, code=EVIL, kernel=EVIL)
    with Report.record(EVIL) as recording:
        story.called(story.compiled(reason=EVIL), times=2)
        story.refused()
    report = full(recording.report()).with_cell(Cell(source=EVIL))
    report = report.with_verification([{"kind": EVIL, "subject": EVIL, "equal": False, "sentence": EVIL}], engine=EVIL)
    for parsed in (Page(page(report)), Page(fragment(report, short=True))):
        assert {"script", "img"} & set(parsed.tags) == set()
        assert parsed.attributes <= {"class", "style", "title", "open", "scope", "lang", "charset", "name", "content"}
        assert parsed.text.count(EVIL) > 10
    assert f"{EVIL} – aotlab report" in Page(page(report)).text  # the title


def test_the_page_needs_nothing_else(report: Report) -> None:
    """No script, no handler, no address to load from."""
    text = page(full(report))
    assert re.findall(r"https?:|//[a-z]|url\(|@import|<script|<link|<iframe|javascript:|\son\w+=", text) == []
    assert text.startswith("<!DOCTYPE html>")
    assert 'charset="utf-8"' in text


def test_the_short_form_says_the_same_and_where_the_rest_is(report: Report) -> None:
    """Verdict, inputs, outputs, recompiles, breaks and differences stand in it as on the page; nothing else does."""
    row = {"kind": "stride", "subject": "out[1]", "equal": False, "sentence": "strides differ"}
    text = Page(fragment(full(report).with_verification([row]), short=True)).text
    for told in ("data mutated", "view of input x: x.t()", "call to print()", "strides differ", "0.50× eager"):
        assert told in text
    assert {section for section in SECTIONS if section not in text} == {
        *("Stages", "Storages", "Saved for backward", "Kernels", "Guards", "Code", "Nodes of the joint graph", "Calls"),
        "What the words mean",
    }
    assert text.endswith("`report.to_html(path)` writes it.".replace("`", ""))


def test_to_html_writes_one_file(report: Report, recording: Any, tmp_path: Path) -> None:
    """Report and recording write the same page, as UTF-8, and return where."""
    path = report.to_html(tmp_path / "r.html")
    assert path.read_text(encoding="utf-8") == page(report)
    assert recording.to_html(tmp_path / "s.html").read_bytes() == path.read_bytes()


def test_unprintable_text_is_shown_as_such(report: Report, tmp_path: Path) -> None:
    """Control characters, lone surrogates and direction marks become the replacement character."""
    odd = report.with_cell(Cell(source="a\x00b\ud800c\u202ed\r\n\te"))
    text = odd.to_html(tmp_path / "r.html").read_text(encoding="utf-8")
    assert "a\ufffdb\ufffdc\ufffdd\ufffd\n\te" in text


def test_long_lists_are_cut_with_a_note(report: Report) -> None:
    """A page lists at most so many nodes, and says how many more there are."""
    graph = report.frames[0].graphs[0]
    nodes = tuple(replace(graph.nodes[0], name=f"node_{i}") for i in range(MOST_NODES + 7))
    frame = replace(report.frames[0], graphs=(replace(graph, nodes=nodes),))
    text = Page(fragment(replace(report, frames=(frame,)))).text
    assert "7 more nodes: see report.nodes." in text
    assert f"node_{MOST_NODES - 1}" in text
    assert f"node_{MOST_NODES}" not in text


def test_storages_of_no_interest_are_counted(report: Report) -> None:
    """A model's many parameters, each alone in its storage, do not bury what is shared."""
    quiet = tuple(
        Storage(
            number=10 + i,
            owner="input",
            nbytes=1024,
            device="cpu",
            spans=(Span(name=f"w{i}", role="input", start=0, stop=1024),),
        )
        for i in range(200)
    )
    graph = replace(report.frames[0].graphs[0], storages=(*report.frames[0].graphs[0].storages, *quiet))
    frame = replace(report.frames[0], graphs=(graph,))
    text = Page(fragment(replace(report, frames=(frame,)))).text
    assert "201 more storages (200 KiB), not drawn." in text
    assert "bytes 8 – 24" in text


def test_markup_escapes_what_is_not_markup() -> None:
    """Text is escaped once, markup never, whatever it passes through."""
    inner = element("b", "<&>")
    assert inner == "<b>&lt;&amp;&gt;</b>"
    assert element("p", inner, " ", "'\"", title='"<') == '<p title="&quot;&lt;"><b>&lt;&amp;&gt;</b> &#x27;&quot;</p>'
    assert join(None, "a", Markup("<i>")) == "a<i>"
    assert escape(escape("<")) == "&lt;"
    assert escape(inner.upper()) == "&lt;B&gt;&amp;LT;&amp;AMP;&amp;GT;&lt;/B&gt;"  # no longer markup
    assert clean("é\n\t€😀") == "é\n\t€😀"


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium, and `chromium` is not on the PATH")
def test_a_browser_shows_the_page(report: Report, tmp_path: Path) -> None:
    """Chromium builds the page as written: the evil title stays a title, the sections are there."""
    path = full(report).to_html(tmp_path / "r.html")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run(
        [shutil.which("chromium") or "", *flags, profile, "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert Page(done.stdout).text.count("data mutated") == Page(path.read_text(encoding="utf-8")).text.count(
        "data mutated"
    )


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium, and `chromium` is not on the PATH")
def test_all_text_can_be_read(report: Report, tmp_path: Path) -> None:
    """On the page, light and dark, every text has WCAG's contrast of 4.5 with what is behind it."""
    api = pytest.importorskip("playwright.sync_api")
    row = {"kind": "value", "subject": "out[0]", "equal": False, "sentence": "it differs"}
    parts = [CellPart(first_line=i, last_line=i, how=how) for i, how in enumerate(WAYS, 1)]
    cell = Cell(source="a\nb\nc\nd", error="ValueError: no", parts=tuple(parts))
    pages = []
    for index, state in enumerate(get_args(State)):
        summary = Summary(sentence=f"It is {state}.", state=state)
        made = replace(full(report).with_verification([row]), summary=summary, cell=cell)
        text = page(made).replace("<details", "<details open")
        assert f'class="verdict {state}"' in text
        alone = tmp_path / f"{index}.html"
        alone.write_text(text, encoding="utf-8")
        pages += [(alone, "light"), (alone, "dark")]
    with api.sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        for path, scheme in pages:
            shown = browser.new_page(color_scheme=scheme)
            shown.goto(path.as_uri())
            body = shown.query_selector("body")
            assert len(contrasts(body)) > 100
            assert (path.name, hard_to_read(body)) == (path.name, [])
            shown.close()
        browser.close()


def test_names_in_sentences_are_code() -> None:
    """Names in backticks become code; a lone backtick, and what would be markup, stay text."""
    assert words("needs `mul_52` <b>") == "needs <code>mul_52</code> &lt;b&gt;"
    assert words("a ` alone") == "a ` alone"


def test_a_long_table_says_that_it_scrolls() -> None:
    """A table of which not all rows can be seen says how many there are; a short one does not."""
    assert "16 rows: the table scrolls." in grid(["a"], [[cell("1")]] * 16)
    assert "scrolls" not in grid(["a"], [[cell("1")]] * 15)
