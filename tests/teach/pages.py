"""What the prose of the course's pages promises, checked on the pages after they ran."""

from __future__ import annotations

from typing import Any

from tests.teach.answers import ANSWERS

#: Page → the exercises at its end, in order.
EXERCISES = {
    "01_storages.ipynb": ("second-column", "diagonal-stride", "room"),
    "02_writes.ipynb": ("zero-the-diagonal", "turned-in-place", "uncounted"),
    "03_views_and_autograd.ipynb": ("zeros-not-none", "replace-the-first-row", "which-none"),
    "04_functionalization.ipynb": ("make-it-pure", "epilogue", "what-is-copied-back"),
    "05_outputs_that_share.ipynb": ("three-kinds", "replay", "seen-by-the-caller"),
}


def printed(run: Any, identifier: str) -> str:
    """Return what a cell wrote to stdout."""
    outputs = run.cell(identifier).outputs
    return "".join(each["text"] for each in outputs if each.output_type == "stream" and each.name == "stdout")


def raised(run: Any, identifier: str) -> str:
    """Return what a cell raised."""
    (error,) = [each for each in run.cell(identifier).outputs if each.output_type == "error"]
    return f"{error.ename}: {error.evalue}"


def right(run: Any, call: str, **answers: object) -> None:
    """Check that a prediction of the page, answered so, is right."""
    said = ", ".join(f"{key}={value!r}" for key, value in answers.items())
    assert run.answer(f"print(teach.predict({call}, {said}).right)").strip() == "True"


def exercises(run: Any, page: str) -> None:
    """Check that the page ends with its exercises, unanswered, and that the names of its answer cells fit."""
    numbers = ("one", "two", "three")
    for number, name in zip(numbers, EXERCISES[page], strict=True):
        assert f'"{name}"' in run.cell(f"{number}-ask").source
        assert run.result(f"{number}-answer").startswith("Not yet: there is no answer.")
        assert name in ANSWERS
    assert run.cell("end").source.startswith("## What you can now explain")


def storages(run: Any) -> None:
    """Check 01_storages.ipynb."""
    assert printed(run, "window-of").splitlines() == [
        "bytes of the storage: 24", "shape: (2, 3)  strides: (3, 1)  offset: 0",
    ]  # fmt: skip
    assert printed(run, "place-of").strip() == "x[1, 2] is 5.0 and lies at place 5"
    column = run.result("view-map").splitlines()[-1].split()
    assert column == ["column", "·", "[0]", "·", "·", "[1]", "·"]
    assert printed(run, "view-write-cell").strip() == "[[0.0, 10.0, 2.0], [3.0, 4.0, 5.0]]"
    assert "strides (3, 2), offset 0" in printed(run, "strides-of")
    assert printed(run, "transpose-of").strip() == "shape (3, 2), strides (1, 3), offset 0"
    assert "strides (0, 1)" in printed(run, "expand-of")
    assert run.result("overlap-of").splitlines()[0].startswith("Storage 0: 4 elements")
    assert printed(run, "contiguous-of").splitlines()[0] == "x: True  x.t(): False  column: False"
    assert raised(run, "reshape-raises").startswith("RuntimeError: view size is not compatible")
    assert [line.split()[-1] for line in printed(run, "reshape-which").splitlines()] == ["True", "False"]
    lines = [line.split("  ")[0] for line in printed(run, "which-cell").splitlines() if line.endswith("its own")]
    assert lines == ["x[[0]]", "x[x > 2]", "x.flip(0)", "x.repeat(2, 1)", "x + 0", "x.clone()", "x.to(torch.float64)"]
    assert run.answer("print(x.to(torch.float32) is x, same_storage(x[None, ..., 1:], x))").split() == ["True", "True"]
    assert "3 elements; its storage: 4000000 bytes" in printed(run, "alive-cell")
    rows = {row["tensor"]: (row["storage"], row["start"], row["stop"]) for row in run.table("report-table")}
    assert rows == {"x": (0, 0, 24), "middle": (0, 4, 20), "doubled": (1, 0, 8)}
    right(run, "parts, x, torch.ones(3)", shares={"out[0]": "x", "out[1]": "out[2]", "out[3]": "y"})
    exercises(run, "01_storages.ipynb")


def writes(run: Any) -> None:
    """Check 02_writes.ipynb."""
    assert [line.split(": ")[1].strip() for line in printed(run, "rebind-cell").splitlines()] == [
        "[0.0, 0.0, 0.0] the same tensor", "[1.0, 1.0, 1.0]",
    ]  # fmt: skip
    assert printed(run, "through-cell").endswith("row: [0.0, -1.0, -1.0]\n")
    assert printed(run, "metadata-cell").strip() == "x: (3, 2) (1, 3)  row: [0.0, 1.0, 2.0]"
    assert printed(run, "storage-cell").strip() == "x: [2.0, 2.0, 2.0]  view: [0.0, 0.0]"
    arguments = "torch.ones(2, 2), torch.ones(2, 3), torch.zeros(3)"
    right(run, f"three, {arguments}", writes="a", metadata="b", storage="c")
    assert printed(run, "version-cell").strip() == "x: 2  row: 2"
    assert "modified by an inplace operation" in raised(run, "version-raises")
    assert printed(run, "version-fine-cell").strip() == "tensor([1., 1., 1.])"
    versions = [printed(run, f"{door}-cell").split()[-1] for door in ("detach", "data", "numpy")]
    assert versions == ["1", "0", "0"]
    assert "autograd says [3.71" in printed(run, "data-wrong-cell")
    noticed = "y = w.exp(); y.detach().add_(1)\ntry: y.sum().backward()\nexcept RuntimeError: print('noticed')"
    assert run.answer(noticed).strip() == "noticed"
    assert printed(run, "modes-cell").strip().endswith("version: 1")
    assert raised(run, "inference-raises") == "RuntimeError: Inference tensors do not track version counter."
    assert [list(row.values()) for row in run.table("report-table")] == [
        ["a", True, False, False], ["b", True, True, False], ["c", True, False, True], ["d", False, False, False],
    ]  # fmt: skip
    exercises(run, "02_writes.ipynb")


def views_and_autograd(run: Any) -> None:
    """Check 03_views_and_autograd.ipynb."""
    assert printed(run, "leaf-cell").splitlines()[1] == "y: leaf False grad_fn MulBackward0"
    assert printed(run, "view-cell").strip().endswith("its base is y: True")
    assert "MulBackward0 → torch::autograd::CopySlices" in printed(run, "write-cell")
    assert printed(run, "write-backward").split() == ["tensor([[20.,", "20.,", "20.],", "[", "2.,", "2.,", "2.]])"]
    assert printed(run, "over-cell").splitlines() == [
        "tensor([[0., 0., 0.],", "        [2., 2., 2.]]) tensor([1., 1., 1.])",
    ]  # fmt: skip
    assert "a leaf Variable that requires grad" in raised(run, "leaf-write-raises")
    assert "a view of a leaf Variable" in raised(run, "leaf-view-raises")
    assert printed(run, "leaf-ways-cell").endswith("[[3.0, 3.0, 3.0], [1.0, 1.0, 1.0]]\n")
    assert printed(run, "detach-cell").strip() == "y: [20.0, 20.0, 20.0]  w.grad: [2.0, 2.0, 2.0]"
    assert "created in no_grad mode" in raised(run, "nograd-raises")
    assert "returns multiple views" in raised(run, "several-raises")
    assert printed(run, "several-cell").startswith("[[20.0, 20.0, 20.0], [2.0, 2.0, 2.0]]")
    assert printed(run, "stale-cell").strip() == "v: [20.0, 20.0]  w.grad: [20.0, 20.0, 0.0]"
    assert printed(run, "none-cell").strip() == "a: tensor([0., 0.])  b: None  c: None"
    assert printed(run, "none-results-cell").startswith("w: tensor([6., 6.])  y: tensor([3., 3.])")
    right(run, "mixed, *args", writes="", grad_none="c")
    right(run, "late, torch.ones(3, requires_grad=True)", raises="backward")
    exercises(run, "03_views_and_autograd.ipynb")


#: Page → what to check after it ran.
PAGES = {
    "01_storages.ipynb": storages,
    "02_writes.ipynb": writes,
    "03_views_and_autograd.ipynb": views_and_autograd,
}
