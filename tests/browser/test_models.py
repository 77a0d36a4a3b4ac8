"""The reports of models and of small cells in JupyterLab, in every way of showing them, compared with the truth."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from aotlab.report.text import amount, data_size
from tests.browser.drawn import DRAWN, TABS, beyond, compared, expected, expected_spans, panel, spans, tables, totals
from tests.browser.lab import THEMES, Lab, Shared, write_notebook
from tests.browser.looks import hard_to_read
from tests.browser.reference import Reference, reference

pytest.importorskip("transformers")
pytestmark = [pytest.mark.tier("full"), pytest.mark.timeout(900)]

GPT2 = """config = transformers.GPT2Config(n_layer=12, n_embd=48, n_head=4, vocab_size=100, n_positions=64,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
gpt = transformers.GPT2LMHeadModel(config)
tokens = torch.randint(0, 100, (2, 16))
sgd = torch.optim.SGD(gpt.parameters(), lr=0.1)"""
ENCODER = """layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
del layer
adam = torch.optim.Adam(encoder.parameters())
x, y = torch.randn(4, 8, 32), torch.randn(4, 8, 32)"""
SMALL = """board = torch.zeros(4, 4)
def helper(t):
    print("in helper")
    return t * 2"""
STEP = "loss.backward()\n{0}.step()"
#: The cells under the magic by the names of their reports, each with its preceding code.
CELLS = {
    "gpt2": (GPT2, "sgd.zero_grad()\nloss = gpt(tokens, labels=tokens).loss\n" + STEP.format("sgd")),
    "encoder_step": (
        ENCODER,
        "adam.zero_grad()\nloss = nn.functional.mse_loss(encoder(x), y)\n" + STEP.format("adam"),
    ),
    "slices": (SMALL, "board[1:3].add_(1)\nrow = board[1]\ntotal = board.sum()"),
    "broken": ("", "a = board.sin()\nif a.sum() > 0:\n    a = a + 1\nb = helper(a)"),
    "again": ("", "def scaled(t, number):\n    return t * number"),
    "failed": (
        "double, triple = scaled(board, 2), scaled(board, 3)",
        "c = board * 2\nd = c @ torch.ones(3)\ne = c + 1",
    ),
}
BEGIN = "import torch, transformers\nfrom torch import nn\ntorch.manual_seed(0)"
#: The cells of the notebook: two for each of `CELLS`, behind the first.
SOURCES = ["%load_ext aotlab\n" + BEGIN] + [
    text
    for name, (before, cell) in CELLS.items()
    for text in (before, f"%%aotcompile -o {name} --backend eager\n{cell}")
]
PLACES = {name: 2 * (index + 1) for index, name in enumerate(CELLS)}
MODELS = ("gpt2", "encoder_step")
#: How many lines ran eagerly, before an error.
EAGER_LINES = {"failed": 2}
#: The expected text of the column of reasons at each line of the cell.
REASONS = {
    "gpt2": {2: "calls .zero_grad()", 3: "traced directly", 4: "calls .backward()"},
    "encoder_step": {2: "calls .zero_grad()", 4: "calls .backward()", 5: "steps Adam, which runs eagerly by design"},
    "slices": {},
    "broken": {
        3: "break a branch depends on the value of a tensor",
        5: "break print() is called, at In [",
    },
    "again": {},
    "failed": {3: "error RuntimeError: size mismatch"},
}
TIME = re.compile(r"\d[\d.]* (?:ns|µs|ms|s)\b")
WIDTHS = (1000, 1600)


# The truth: the tables of another process, counted here, and the changes that a plain run without aotlab makes.


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the notebook."""
    path = tmp_path_factory.mktemp("models") / "models.ipynb"
    write_notebook(path, list(SOURCES))
    return path


@pytest.fixture(scope="module")
def truth(notebook: Path) -> dict[str, Any]:
    """Run the notebook in another process and return the tables of its reports by their names."""
    found: Reference = reference(notebook, notebook.with_name("tables.json"))
    return {name: found[place] for name, place in PLACES.items()}


class Plain:
    """The same cells, run by Python alone: the tensors that each changed, with bytes, and the gradients it made."""

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {}
        self.changed: dict[str, dict[str, int]] = {}
        self.sizes: dict[str, dict[str, int]] = {}
        self.new: dict[str, set[str]] = {}
        with torch.random.fork_rng():
            exec(BEGIN, self.namespace)
            for name, (before, cell) in CELLS.items():
                exec(before, self.namespace)
                self._run(name, cell)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name the tensors that the notebook holds."""
        found: dict[str, torch.Tensor] = {}
        for name, value in self.namespace.items():
            if isinstance(value, torch.nn.Module):
                found |= {f"{name}.{key}": each for key, each in value.named_parameters()}
            elif isinstance(value, torch.Tensor):
                found[name] = value
        return found

    def _run(self, name: str, cell: str) -> None:
        held = {key: (each, each._version, each.detach().clone(), each.grad) for key, each in self.tensors().items()}
        try:
            exec(cell, self.namespace)
        except RuntimeError:
            assert name == "failed"
        self.changed[name] = {
            key: int(each.ne(copy).sum()) * each.element_size()
            for key, (each, version, copy, _) in held.items()
            if each._version != version
        }
        self.sizes[name] = {key: held[key][0].nbytes for key in self.changed[name]}
        self.new[name] = {
            f"{key}.grad"
            for key, (each, _, _, grad) in held.items()
            if each.is_leaf and grad is None and each.grad is not None
        }


@pytest.fixture(scope="module")
def plain() -> Plain:
    """Run the cells without aotlab."""
    return Plain()


def counted(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the expected totals of a report row by row, independently of the report's own counts."""
    inputs = [row for row in found["inputs"] if row["graph"] is not None]
    outside = [row for row in found["inputs"] if row["graph"] is None]
    written = [row for row in inputs if row["mutated"] and not row["duplicate_of"]]
    new = [row["name"] for row in outside if row["kind"] == "new"]
    changed = {row["name"] for row in (*written, *outside) if row["mutated"]} - set(new)
    aliased = [row for row in found["outputs"] if row["base"] is not None]
    kept: dict[str, dict[int, int]] = {}
    for row in found["saved"]:
        by_graph = kept.setdefault(row["frame"], {})
        own = not (row["is_input"] or row["is_output"] or row["shares"])
        by_graph[row["graph"]] = by_graph.get(row["graph"], 0) + own * row["nbytes"]
    fresh = sum(max(each.values()) for each in kept.values())
    graphs = {(row["frame"], row["graph"]) for table in ("inputs", "outputs") for row in found[table]} - {
        (row["frame"], None) for row in outside
    }
    of_graphs = f" of {len(graphs)} graphs" if len(graphs) > 1 else ""
    again = {(row["frame"], row["graph"]) for row in found["recompiles"]}
    sizes = {
        "inputs": len(inputs) or len(outside),
        "outputs": len(found["outputs"]),
        "saved": len(found["saved"]),
        "breaks": sum(not row["library"] for row in found["graph_breaks"]),
        "verification": len(found["verification"]),
    }
    saved_chip = f"{data_size(fresh) if fresh else sizes['saved']} saved"
    chips = [
        ("overview", name == "failed", "the cell failed"),
        ("stages", len(graphs), amount(len(graphs), "graph")),
        ("inputs", len(changed), f"{len(changed)} mutated"),
        ("inputs", len(new), amount(len(new), "new gradient")),
        ("outputs", len(aliased), f"{len(aliased)} alias{'es' * (len(aliased) != 1)}"),
        ("saved", sizes["saved"], saved_chip),
        ("overview", EAGER_LINES.get(name, 0), f"{amount(EAGER_LINES.get(name, 0), 'line')} eager"),
        ("breaks", sizes["breaks"], amount(sizes["breaks"], "break")),
        ("calls", len(again), amount(len(again), "recompile")),
    ]
    headings = {}
    if inputs:
        headings["inputs"] = f"Inputs {amount(len(inputs), 'input')}{of_graphs}, {len(written)} mutated"
    if sizes["outputs"]:
        headings["outputs"] = f"Outputs {amount(sizes['outputs'], 'output')}{of_graphs}, {len(aliased)} aliased"
    if sizes["saved"]:
        memory = f"{data_size(fresh)} of new memory" if fresh else "no new memory"
        headings["saved"] = f"Saved for backward {amount(sizes['saved'], 'value')}{of_graphs}, {memory}"
    if sizes["breaks"]:
        place = amount(sizes["breaks"], "place")
        headings["breaks"] = f"Graph breaks {place} where Dynamo stopped and Python took over"
    if graphs:
        more = f", {len(again)} of them recompiles" if again else ""
        headings["calls"] = f"Graphs {len(graphs)}{more}"
    return {
        "chips": [[tab, text] for tab, count, text in chips if count],
        "tabs": {tab: f"{count:,}" for tab, count in sizes.items() if count},
        "headings": headings,
        "compared": [f"all {amount(sizes['verification'], 'observable')} equal"] * bool(sizes["verification"]),
        "verdict": TIME.sub("…", found["verdict"]),
    }


# The shown reports


class Shown:
    """The notebook, run once. The values of the live reports must appear in all other ways of showing them."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.clock: dict[str, float] = {}
        self.live: dict[str, Any] = {}

    def report(self, name: str, *, live: bool) -> Any:
        """Return the drawn report of a cell."""
        report = self.lab.cell(PLACES[name]).locator(f'{DRAWN}[data-live="{str(live).lower()}"]')
        report.wait_for()
        return report


@pytest.fixture(scope="module")
def shown(shared: Shared, extension: None, notebook: Path) -> Iterator[Shown]:
    """Run the notebook in JupyterLab, cell by cell, with a clock beside each."""
    (shared.server.root / "models.ipynb").write_bytes(notebook.read_bytes())
    with shared.page() as lab:
        lab.open("models.ipynb")
        shown = Shown(lab)
        names = {place: name for name, place in PLACES.items()}
        for index in range(len(SOURCES)):
            took = lab.run_cell(index, timeout=360)
            if index in names:
                shown.clock[names[index]] = took
        yield shown


@pytest.fixture(autouse=True)
def _no_complaints(shown: Shown) -> Iterator[None]:
    """Let no test pass while the page complains."""
    yield
    try:
        shown.lab.raise_complaints()
    finally:
        shown.lab.complaints.clear()


def assert_told(name: str, said: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Compare all totals that a drawn report shows with the counted totals."""
    wanted = counted(name, found)
    assert said["chips"] == wanted["chips"]
    assert said["tabs"] == wanted["tabs"]
    assert said["compared"] == wanted["compared"]
    assert TIME.sub("…", said["sentence"]) == wanted["verdict"].replace("`", "")
    for tab, text in wanted["headings"].items():
        assert said["headings"][tab][0].startswith(text), (tab, said["headings"][tab])
    reasons = {line: why for line, why in said["reasons"].items() if why}
    assert set(REASONS[name]) <= set(map(int, reasons)), reasons
    for line, why in REASONS[name].items():
        assert reasons.pop(str(line)).startswith(why)
    assert not [why for why in reasons.values() if "break" in why or "error" in why]


def assert_tables(report: Any, found: Mapping[str, Any]) -> None:
    """Compare the tables and the storage map of a small report, row by row."""
    for table in ("inputs", "outputs"):
        assert expected(found[table], table) == compared(tables(report, table), table)
    assert expected_spans(found["storages"]) == spans(report)


@pytest.mark.parametrize("name", list(CELLS))
def test_while_live(shown: Shown, truth: dict[str, Any], name: str) -> None:
    """Every total equals the tables of another process. The times add up, and are within the cell's clock."""
    report = shown.report(name, live=True)
    said = shown.live[name] = totals(report)
    assert_told(name, said, truth[name])
    if name not in MODELS:
        assert_tables(report, truth[name])
    assert sum(said["times"]) == pytest.approx(said["whole"], rel=0.02)
    if name != "again":  # whose clock goes on while its function is called
        assert said["whole"] < shown.clock[name]
    if name == "gpt2":
        assert said["whole"] > shown.clock[name] / 2


@pytest.mark.parametrize("name", list(CELLS))
def test_beside_a_plain_run(shown: Shown, plain: Plain, truth: dict[str, Any], name: str) -> None:
    """Tensors that Python alone changes or makes are reported as mutated or new. A slice is reported with its bytes."""
    rows = truth[name]["inputs"]
    assert {row["name"] for row in rows if row["mutated"]} == set(plain.changed[name])
    assert {row["name"] for row in rows if row["kind"] == "new"} == plain.new[name]
    assert {row["name"]: row["nbytes"] for row in rows if row["mutated"]} == plain.sizes[name]
    facts = totals(shown.report(name, live=True))["facts"]
    owners = {each.partition(".")[0] for each in plain.changed[name]}
    if name in MODELS:
        (model,) = owners
        count, size = len(plain.changed[name]), sum(plain.sizes[name].values())
        assert facts["mutated"][0].startswith(f"{count} tensors of {model} (data")
        assert facts["new"] == [f"{len(plain.new[name])} gradients of {model}"]
        content = panel(shown.report(name, live=True), "inputs")
        group = content.locator("tr.al-written[data-group]")
        assert f"{count} parameters of {model}" in group.inner_text()
        assert group.locator("[data-column=nbytes]").inner_text() == data_size(size)
    if name == "slices":
        written = {row["tensor"]: row["writes"] for row in truth[name]["storages"] if row["mutated"]}
        assert written == plain.changed[name]
        assert facts["aliases"][0].startswith("row: view of input board: ")


def test_values_are_those_of_a_plain_run(shown: Shown, plain: Plain) -> None:
    """All tensors of the notebook have, bit for bit, the values that Python alone gives them."""
    sums = "print([float(each.detach().double().sum()) for each in (*gpt.parameters(), *encoder.parameters(), board)])"
    kernel = json.loads(shown.lab.execute(sums))
    models = (plain.namespace["gpt"], plain.namespace["encoder"])
    mine = [each for model in models for each in model.parameters()] + [plain.namespace["board"]]
    assert kernel == [float(each.detach().double().sum()) for each in mine]


@pytest.mark.parametrize(("theme", "width"), zip(THEMES, WIDTHS, strict=True))
def test_all_can_be_seen(shown: Shown, width: int, theme: str) -> None:
    """In every tab, everything lies within the report, and the cell can be read. Tables of tensors do not scroll."""
    lab = shown.lab
    lab.page.set_viewport_size({"width": width, "height": 1000})
    lab.theme(theme)
    cut = []
    for name in CELLS:
        report = shown.report(name, live=True)
        for tab in TABS:
            panel(report, tab)
            may_scroll = width < max(WIDTHS) and tab not in ("inputs", "outputs", "saved")
            found = [each for each in beyond(report) if not (may_scroll and each.startswith("scrolls"))]
            found += hard_to_read(report) if tab == "overview" else []
            cut += [f"{name}, {tab}: {each}" for each in found]
            lab.shoot(f"models-{name}-{width}-{theme.split()[-1].lower()}-{tab}", report)
    lab.page.set_viewport_size({"width": 1400, "height": 1000})
    assert "\n".join(cut) == ""


def assert_as_live(shown: Shown, truth: dict[str, Any], lab: Lab, *, live: bool) -> None:
    """Check that every report still shows its values from when it was live, and compare small tables with the truth."""
    for name in CELLS:
        report = lab.cell(PLACES[name]).locator(f'{DRAWN}[data-live="{str(live).lower()}"]')
        report.wait_for()
        assert totals(report) == shown.live[name], name
        if name not in MODELS:
            assert_tables(report, truth[name])


def test_the_page(shown: Shown, shared: Shared, truth: dict[str, Any]) -> None:
    """The page of each report shows the same values."""
    for name in CELLS:
        shown.lab.execute(f"{name}.to_html('{name}.html')")
    for width, scheme in zip(WIDTHS, ("light", "dark"), strict=True):
        context = shared.browser.new_context(viewport={"width": width, "height": 1000}, color_scheme=scheme)
        page = context.new_page()
        for name in CELLS:
            page.goto((shared.server.root / f"{name}.html").as_uri())
            report = page.locator(DRAWN)
            assert totals(report) == shown.live[name], name
            for tab in TABS:
                panel(report, tab)
                assert beyond(report) == [], (name, tab, width)
                shown.lab.shoot(f"models-page-{name}-{width}-{scheme}-{tab}", report)
            if name not in MODELS:
                assert_tables(report, truth[name])
        context.close()


def test_after_a_reload(shown: Shown, truth: dict[str, Any]) -> None:
    """After a reload, the page shows the same values."""
    shown.lab.save()
    shown.lab.reload()
    assert_as_live(shown, truth, shown.lab, live=True)


def test_after_the_kernel(shown: Shown, shared: Shared, truth: dict[str, Any]) -> None:
    """When the kernel is shut down, and when the notebook, whose reports are cut, is opened again without one."""
    saved = shown.lab.save()
    shown.lab.shut_down_kernel()
    assert_as_live(shown, truth, shown.lab, live=False)
    (shared.server.root / "reopened.ipynb").write_text(json.dumps(saved), encoding="utf-8")
    with shared.page() as lab:
        lab.open("reopened.ipynb", kernel=False)
        assert_as_live(shown, truth, lab, live=False)
    lab.raise_complaints()
