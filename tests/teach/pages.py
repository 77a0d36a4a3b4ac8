"""Checks of the promises in the prose of the course's pages, after the pages ran."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import aotlab
from aotlab.teach.families import FAMILIES
from tests.teach.answers import ANSWERS

PACKAGE = Path(aotlab.__file__).parent

#: Page → the exercises at its end, in order.
EXERCISES = {
    "01_storages.ipynb": ("second-column", "diagonal-stride", "room"),
    "02_writes.ipynb": ("zero-the-diagonal", "turned-in-place", "uncounted"),
    "03_views_and_autograd.ipynb": ("zeros-not-none", "replace-the-first-row", "which-none"),
    "04_functionalization.ipynb": ("make-it-pure", "epilogue", "what-is-copied-back"),
    "05_outputs_that_share.ipynb": ("three-kinds", "replay", "seen-by-the-caller"),
    "06_inputs_that_share.ipynb": ("prove-it-wrong", "do-they-overlap", "one-base"),
    "07_two_graphs.ipynb": ("backward-by-hand", "save-less", "what-is-saved"),
    "08_again_and_again.ipynb": ("another-graph", "how-many-graphs", "fewer-graphs"),
    "09_randomness_and_modes.ipynb": ("mask-again", "what-is-drawn", "autocast-by-hand"),
    "10_subclasses.ipynb": ("take-apart", "put-together", "how-many-inputs"),
    "11_be_the_compiler.ipynb": ("record", "write", "differentiate", "cut", "recipe", "finish", "guards"),
    "12_in_the_wild.ipynb": ("one-graph", "read-the-report", "find-the-bug"),
    "13_read_what_torch_compile_did.ipynb": ("written-arguments", "compiled-once", "lines-that-break"),
}


def printed(run: Any, identifier: str) -> str:
    """Return the text that a cell wrote to stdout."""
    outputs = run.cell(identifier).outputs
    return "".join(each["text"] for each in outputs if each.output_type == "stream" and each.name == "stdout")


def raised(run: Any, identifier: str) -> str:
    """Return the error that a cell raised."""
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
    asked = {"practice-ask": ("writes", "shares"), "practice-metadata-ask": ("writes", "metadata", "storage")}
    assert [key for cell, keys in asked.items() for key in keys if f"\n{key} " not in run.result(cell)] == []
    exercises(run, "02_writes.ipynb")


def views_and_autograd(run: Any) -> None:
    """Check 03_views_and_autograd.ipynb."""
    assert printed(run, "leaf-cell").splitlines()[1:] == [
        "y: leaf False grad_fn MulBackward0", "the node before it: torch::autograd::AccumulateGrad",
    ]  # fmt: skip
    assert printed(run, "view-cell").strip().endswith("its base is y: True")
    assert "MulBackward0 → torch::autograd::CopySlices" in printed(run, "write-cell")
    assert printed(run, "write-cell").endswith("v: AsStridedBackward0\n")
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
    assert printed(run, "none-results-cell").endswith("z.retains_grad: False\n")
    right(run, "mixed, *args", writes="", grad_none="c")
    right(run, "late, torch.ones(3, requires_grad=True)", raises="backward")
    exercises(run, "03_views_and_autograd.ipynb")


def ops(text: str) -> list[str]:
    """Return the names of the values of a graph's code, in order, and the returned values."""
    lines = [line.strip() for line in text.splitlines()[1:]]
    return [line.partition(" = ")[0] if " = " in line else line for line in lines]


def functionalization(run: Any) -> None:
    """Check 04_functionalization.ipynb."""
    assert printed(run, "why-cell").split() == ["tensor(3.)", "tensor(21.)"]
    assert ops(printed(run, "see-cell")) == ["mul", "add", "sin", "return (sin,)"]
    assert ops(printed(run, "view-cell")) == ["mul", "select", "add", "select_scatter", "sin", "return (sin,)"]
    assert ops(printed(run, "other-cell"))[-4:] == ["select_scatter", "view", "sin", "return (sin,)"]
    assert ops(run.result("inputs-cell")) == ["mul", "mul_1", "return (mul, mul_1, mul)"]
    lines = [line.strip() for line in run.result("inputs-wrapper").splitlines()]
    assert lines[lines.index("# epilogue: what the caller can see") + 1] == "x.copy_(results[0])"
    assert ops(printed(run, "keep-cell")) == ["mul", "add", "copy__default", "return (add,)"]
    kinds = [line.split(maxsplit=2)[2].strip() for line in printed(run, "keep-table").splitlines() if line[:1] in "01"]
    assert kinds == ["mutated out of graph", "not mutated", "mutated in graph"]
    assert run.result("many-cell").count("copy_(") == 1
    assert "x.t_()" in run.result("metadata-cell")
    assert (
        run.answer("print(torch.equal(y := (z := torch.ones(2, 3)).t(), y) and turn(z).shape)")
        .strip()
        .endswith("[3, 2])")
    )
    assert run.result("same-cell") == "True"
    right(run, "program, torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2)", writes="a, c")
    assert re.findall(r"(?m)^(\w+): float32", run.result("predict-pose")) == ["a", "b", "c"]
    exercises(run, "04_functionalization.ipynb")


def outputs_that_share(run: Any) -> None:
    """Check 05_outputs_that_share.ipynb."""
    assert printed(run, "question-cell").strip() == "x: [[1.0, 1.0], [0.0, 0.0]]  same is x: True"
    rows = run.table("kinds-table")
    assert [row["output_type"].split(",")[0] for row in rows] == [
        "is input", "alias of input", "non-alias", "alias of intermediate", "alias of intermediate",
    ]  # fmt: skip
    assert [row["base"] for row in rows[3:]] == ["intermediate 0", "intermediate 0"]
    assert ops(run.result("graph-cell")) == ["mul", "add", "return (add, mul)"]
    wrapper = run.result("wrapper-cell")
    assert [wrapper.count(text) for text in ("x.t()", "select(0, 0)", "select(0, 1)", "return (x, ")] == [1, 1, 1, 1]
    assert printed(run, "wrapper-check").split()[-1] == "True"
    assert printed(run, "naive-cell").splitlines() == [
        "[[1.0, 1.0], [0.0, 0.0]] True",
        "[[0.0, 0.0], [0.0, 0.0]] False",
    ]
    assert printed(run, "naive-verify-cell").strip() == "True"
    assert (
        printed(run, "identity-cell").strip() == "w.grad: tensor([3., 3.])  other is w: False  other is a leaf: False"
    )
    assert run.result("autograd-cell").count("base_0.select(0") == 2
    lines = printed(run, "autograd-write").splitlines()
    assert lines[0].startswith("one base: True  its node: CompiledBackward")
    assert lines[1].endswith("CopySlices")
    assert lines[2] == "tensor([11., 11.])"
    written = run.result("written-cell")
    assert 0 < written.index("x.copy_(") < written.index("x.select(0, 0)")
    shares = {"out[0]": ["y", "out[4]"], "out[1]": "out[2]"}
    right(run, "program, torch.ones(2, 2), torch.ones(2, 2)", shares=shares, same={"out[0]": "y"})
    exercises(run, "05_outputs_that_share.ipynb")


def inputs_that_share(run: Any) -> None:
    """Check 06_inputs_that_share.ipynb."""
    assert printed(run, "question-cell").strip() == "apart: [2.0, 2.0, 2.0]  the same tensor twice: [4.0, 4.0, 4.0]"
    assert printed(run, "by-hand-cell").strip() == "apart: [2.0, 2.0, 2.0]  twice: [2.0, 2.0, 2.0]"
    assert run.result("twice-cell").startswith("def forward(self, arg0_1):")
    assert "`y` is the same tensor as `x`" in printed(run, "again-cell")
    assert [line.split()[1] for line in printed(run, "guards").splitlines()] == ["0", "0", "1"]
    rows = run.table("windows-table")
    assert [(row["overlaps"], row["synthetic_base"], row["mutates_data"]) for row in rows] == [
        ("y", 0, True), ("x", 0, True),
    ]  # fmt: skip
    graph = ops(run.result("windows-graph"))
    slices = [name for name in graph if name.startswith("slice")]
    assert slices == ["slice_1", "slice_scatter", "slice_2", "slice_3"]
    wrapper = run.result("windows-wrapper")
    assert [text in wrapper for text in ("= memory_of(x)", "x.copy_(", "y.copy_(")] == [True, True, True]
    assert run.result("read-only-cell").startswith("def forward(self, arg0_1, arg1_1):")
    assert {(row["overlaps"], row["synthetic_base"], row["storage"]) for row in run.table("apart-table")} == {
        (None, None, 0)
    }
    assert run.result("bytes-cell").startswith("All right")
    assert "no synthetic base can replace them" in printed(run, "dtypes-cell")
    right(run, "scale, memory[:4], memory[4:], again=(memory[:4], memory[2:6])", recompiles=True)
    right(run, "scale, torch.ones(4), torch.ones(4), again=(memory[:4], memory[4:])", recompiles=False)
    right(run, "product, memory[:4], memory[4:], again=(memory[:4], memory[2:6])", recompiles=False)
    for pose in ("predict-one-pose", "predict-two-pose", "predict-three-pose"):
        assert "And in the second call:\nx: float32, shape (4,)" in run.result(pose)
    exercises(run, "06_inputs_that_share.ipynb")


def two_graphs(run: Any) -> None:
    """Check 07_two_graphs.ipynb."""
    joint = ops(run.result("joint-cell"))
    assert joint == ["mul", "sin", "sum_1", "expand", "cos", "mul_1", "mul_2", "return (sum_1, None, mul_2)"]
    assert printed(run, "chain-cell").strip() == "True"
    assert ops(run.result("cut-forward")) == [*joint[:3], "return (sum_1, primals_1, mul)"]
    assert run.result("cut-backward").startswith("def backward(self, primals_1, mul, tangents_1)")
    assert [line.split(",")[0] for line in printed(run, "saved-cell").splitlines()] == ["primals_1", "mul"]
    right(run, "model, a, b, c", saved="a, computed")
    assert "modified by an inplace operation" in raised(run, "over-cell")
    assert run.result("own-cell").startswith("All right")
    assert printed(run, "clone-cell").startswith("computed by `clone`")
    assert sorted(row["is_input"] for row in run.table("again-table")) == [False] * 4 + [True] * 2
    assert [row["is_input"] for row in run.table("min-cut-table")] == [True, True]
    curve = run.answer("print(list(curve), list(curve.values()))")
    kept, products = (list(map(int, part.split(","))) for part in curve.strip().strip("[]").split("] ["))
    assert kept[0] == 0
    assert kept == sorted(set(kept))
    assert [products[0] - number for number in products] == [*range(5)]
    assert products[-1] == 7
    assert [run.answer(f"print(teach.predict(lambda a: a.{op}, b, saved='{saved}').right)") for op, saved in (
        ("sin()", "a"), ("square()", "a"), ("clamp(0)", "a"), ("softmax(0)", "computed"), ("view(2) * a", "a"),
    )] == ["True\n"] * 5  # fmt: skip
    assert len(set(printed(run, "curve-same").splitlines())) == 1
    exercises(run, "07_two_graphs.ipynb")


def graphs(run: Any, identifier: str) -> list[list[str]]:
    """Return which graph each call of a cell ran, report by report."""
    lines = printed(run, identifier).splitlines()
    return [re.findall(r"\d+|<NA>", line) for line in lines if line.startswith("graph of each call")]


def again_and_again(run: Any) -> None:
    """Check 08_again_and_again.ipynb."""
    assert "dtype torch.float32 on cpu with shape (3,) and strides (1,)" in printed(run, "guards-cell")
    assert "grad mode" in printed(run, "guards-settings").splitlines()
    assert graphs(run, "miss-cell") == [["0", "0"], ["0", "1"], ["0", "1"], ["0", "1"]]
    reasons = [line.split("`")[2] for line in printed(run, "miss-cell").splitlines() if line.startswith("graph 1")]
    assert [reason.split()[1] for reason in reasons] == ["dtype", "requires_grad=True", "strides"]
    cold = run.answer("print(calls(scale, *[torch.ones(3)] * 4, torch.ones(3).double()).calls['cold'].tolist())")
    assert cold.strip() == "[True, False, False, False, True]"
    right(run, "total, square, again=(square.t(),)", recompiles=True)
    right(run, "total, square, again=(square[:, :] * 100,)", recompiles=False)
    assert graphs(run, "sizes-cell") == [["0", "1", "1", "1"]]
    assert run.result("sizes-cell").startswith("def forward(self, arg0_1, size_0):  # size_0: x.size(0)=5")
    assert graphs(run, "sizes-dynamic") == [["0", "0", "0"]]
    assert graphs(run, "one-cell") == [["0", "1", "2"]]
    assert graphs(run, "asks-cell") == [["0", "1", "1", "0"]]
    assert printed(run, "asks-cell").splitlines()[-2:] == ["`x.size(0)` is from 2 to 4", "`x.size(0)` is at least 5"]
    assert "`x.size(0)` is divisible by 2" in printed(run, "ops-cell")
    assert graphs(run, "numbers-cell") == [["0", "1", "1", "2", "2"]]
    assert graphs(run, "fixed-cell") == [[*map(str, range(8)), "<NA>", "<NA>"]]
    assert run.result("fixed-cell").endswith("compiled for this one alone, since the program fixes it'")
    assert graphs(run, "reads-show") == [["0", "1"]]
    assert graphs(run, "reads-tensor-cell") == [["0", "0"]]
    assert graphs(run, "modes-cell") == [["0", "1", "0", "1"]]
    assert printed(run, "cells-verdict").startswith("Compiled line 2: 1 graph")
    for options, said in ((" --dynamic", "Nothing new was compiled"), ("", "Compiled line 2: 1 graph")):
        run.cell("cells-run").source = run.cell("cells-run").source.replace(" --dynamic", options)
        for name in ("cells-run", "cells-verdict") * (1 if options else 2):
            run.run(run.cell(name))
        assert printed(run, "cells-verdict").startswith(said)
    assert "`batch.size(0)` is" in run.answer("print(*cell.recompiles['reason'])")
    assert printed(run, "what-cell").splitlines()[0] == "convert to one dtype before"
    assert printed(run, "fresh-cell").strip() == "calls that compiled: 3 of 3"
    exercises(run, "08_again_and_again.ipynb")


def randomness_and_modes(run: Any) -> None:
    """Check 09_randomness_and_modes.ipynb."""
    drawn = printed(run, "state-cell").splitlines()[1:]
    assert drawn[0] == drawn[1]
    assert printed(run, "same-cell").splitlines()[0] == printed(run, "same-cell").splitlines()[1]
    assert ops(run.result("same-code")) == ["rand_like", "add", "return (add,)"]
    assert printed(run, "unused-cell").splitlines()[0] == printed(run, "unused-cell").splitlines()[1]
    assert ops(run.result("unused-cell")) == ["rand_like", "rand_like_1", "add", "return (add,)"]
    forward, backward = run.result("dropout-cell"), run.result("dropout-backward")
    assert "aten.bernoulli" in forward
    assert forward.endswith("return (mul_1, primals_1, ne)")
    assert "bool[6]" in forward
    assert "bernoulli" not in backward
    result, gradient = (ast.literal_eval(line[10:]) for line in printed(run, "dropout-look").splitlines())
    assert result == gradient == [2.0, 4.0, 0.0, 8.0, 0.0, 0.0]
    plain = {row["name"]: row["nbytes"] for row in run.table("checkpoint-plain")}
    assert plain == {"tanh": 4 * 64 * 64, "ne": 64 * 64}
    assert len(run.table("checkpoint-saving")) == 1
    assert "drawn_aten_bernoulli_p.default(state_of_generator" in run.result("checkpoint-code")
    small, large = (run.answer(f"print(*kept(saving, {n})['nbytes'])") for n in (4, 128))
    assert small == large == f"{run.table('checkpoint-saving')[0]['nbytes']}\n"
    assert int(small) > int(run.answer("print(kept(plain, 8)['nbytes'].sum())"))
    assert len(set(printed(run, "checkpoint-same").splitlines())) == 1
    right(run, "mixture, a, b", saved="computed")
    assert printed(run, "autocast-cell").strip() == "torch.float32 torch.bfloat16"
    assert printed(run, "autocast-why").startswith("autocast on cpu is True where")
    joint = run.result("autocast-why").splitlines()
    assert "_to_copy" in joint[-2]
    assert joint[-2].endswith("# float32[8, 8]")
    assert run.result("cache-cell").count("aten._to_copy.") == 3
    joint_of_own = run.result("own-cell")
    assert joint_of_own.count("aten.mm.") == 3
    assert joint_of_own.index("aten.mean") < joint_of_own.index("aten.div")
    assert [line.split()[-1] for line in printed(run, "train-cell").splitlines()] == ["True", "False"]
    assert run.result("verify-cell") == "True"
    exercises(run, "09_randomness_and_modes.ipynb")


def subclasses(run: Any) -> None:
    """Check 10_subclasses.ipynb."""
    assert printed(run, "dispatch-cell").startswith("Pair([3.0, 3.0, 3.0], [1.0, 3.0, 5.0])\n")
    assert re.findall(r"aten\.\w+", printed(run, "dispatch-cell")) == ["aten.mul", "aten.add"]
    gradient = "Pair([1.0, 1.0, 1.0], [0.0, 1.0, 2.0])"
    assert printed(run, "grad-cell").strip() == printed(run, "training-cell").strip() == gradient
    assert printed(run, "memory-cell").strip() == "address of the wrapper: 0"
    assert printed(run, "memory-write").startswith("Pair([[5.0, 5.0, 5.0], [0.0, 0.0, 0.0]], [[6.0,")
    assert printed(run, "eager-cell").splitlines()[1] == "Nothing was compiled: 1 call ran eagerly."
    assert printed(run, "eager-cell").splitlines()[0] == printed(run, "compiled-cell").splitlines()[0]
    assert ops(run.result("compiled-graph")) == ["mul", "mul_1", "sin", "sin_1", "return (sin, sin_1)"]
    rows = [line.split()[1:4] for line in run.result("compiled-inputs").splitlines()[1:]]
    assert rows == [["x", "<NA>", "<NA>"], ["x.a", "x", "arg0_1"], ["x.b", "x", "arg1_1"]]
    assert [line.split()[0] for line in printed(run, "gone-cell").splitlines()] == ["2", "0"]
    joint = run.result("training-cell")
    assert "tangents_1, tangents_2)" in joint
    assert joint.endswith("None, None, mul_2, mul_3)")
    written = [line.split()[1:] for line in run.result("written-cell").splitlines()[1:]]
    assert written == [["x", "True"], ["x.a", "True"], ["x.b", "True"]]
    right(run, "wave, x, again=(Pair(torch.zeros(3), torch.ones(3)),)", recompiles=False)
    right(run, "wave, x, again=(torch.ones(3),)", recompiles=True)
    right(run, "wave, x, again=(Pair(torch.ones(3), torch.ones(3).double()),)", recompiles=True)
    assert "x_a.data.copy_(" in run.result("written-wrapper")
    before, after = (
        run.answer("print((small * 1).sum().item())"),
        run.answer("small.mul_(2); print((small * 1).sum().item())"),
    )
    assert before == after
    error, largest = map(float, re.findall(r"[\d.]+", printed(run, "small-cell")))
    assert error < largest / 50
    assert ops(run.result("small-graph")) == ["mul", "t", "mm", "return (mm,)"]
    assert run.answer("print(*report.inputs['nbytes'])").split() == ["512", "4352", "4096", "256"]
    assert [row["is_input"] for row in run.table("saved-default")] == [False]
    assert run.table("saved-default")[0]["nbytes"] == 64 * 64 * 4
    least = "saved(partial(aotlab.min_cut_rematerialization_partition, memory_budget=0))"
    assert run.answer(f"print(*{least}['nbytes'])").split() == ["4096", "256"]
    assert run.result("verify-cell") == "True"
    exercises(run, "10_subclasses.ipynb")


def in_the_wild(run: Any) -> None:
    """Check 12_in_the_wild.ipynb."""
    assert ": 2 graphs (training)" in printed(run, "compile-cell")
    assert [each.name for each in run.cell("compile-cell").outputs] == ["stdout"]
    assert re.search(r"calls logging +transformers/\S+ +logger.warning_once\(", run.result("breaks-table"))
    assert [line.split()[1:] for line in run.result("breaks-frames").splitlines()[1:]] == [
        ["forward", "0"],
        ["pad", "0"],
    ]
    assert printed(run, "mend-cell").startswith("Compiled forward: 1 graph (training)")
    assert printed(run, "inputs-table").endswith("of which are written: 0\n")
    assert "labels" not in run.answer("print(*report.inputs['name'])")
    assert "0.5 * input * (1.0 + torch.tanh(" in run.answer("print(*lines.index)")
    assert printed(run, "predict-same").strip() == "True"
    right(run, "by_hand, a", saved="a, computed")
    right(run, "built_in, a", saved="a")
    assert graphs(run, "again-cell") == [["0", "1", "1"]]
    assert "compiled for all sizes of it" in printed(run, "again-cell")
    assert "`kwargs['input_ids'].size(1)` is at least 2" in printed(run, "again-cell")
    assert graphs(run, "again-dynamic") == [["0", "0", "0"]]
    parts = set(run.answer("print(*parts.index)").split())
    assert {"dynamo", "trace"} <= parts <= set(re.findall(r"`(\w+)`", run.cell("time-read").source))
    eager, _, ours = (line.split()[1] for line in printed(run, "museum-cell").splitlines())
    assert eager == ours
    breaks = "print(len(record(model, batch(16))[1].graph_breaks))"
    assert [run.answer(breaks), run.answer(f"model.loss_type = None; {breaks}")] == ["0\n", "1\n"]
    exercises(run, "12_in_the_wild.ipynb")


def read_what_torch_compile_did(run: Any) -> None:
    """Check 13_read_what_torch_compile_did.ipynb."""
    assert ": 1 graph (training)" in printed(run, "step-cell")
    assert printed(run, "step-cell").endswith("; not verified.\n")
    inputs = run.result("inputs-table").splitlines()[1:]
    assert len(inputs) == 8
    written = [line.split()[1] for line in inputs if line.endswith("True")]
    assert written == ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var"]
    saved = run.result("saved-table").splitlines()[1:]
    lines = [line.partition("False")[2].strip() for line in saved if "False" in line]
    assert set(lines) == {"hidden = norm(linear(x))", "return torch.tanh(hidden).sum()"}
    assert all(line.endswith("<NA>") for line in saved if "True" in line)
    sizes = sum(int(line.split()[2]) for line in saved if "False" in line)
    assert printed(run, "saved-sum").split()[-1] == str(sizes)
    counts = dict(line.split() for line in run.result("nodes-counts").splitlines()[1:-1])
    assert sorted(counts) == ["backward", "forward", "joint"]
    assert "aten.tanh_backward.default" in printed(run, "nodes-tanh").split()
    assert re.fullmatch(r"tensor '?x'? size mismatch at index 0\. expected 16, actual 24\n", printed(run, "again-cell"))
    assert re.search(r"\bx +\[s\d+=24, 4\]$", run.result("again-shapes"))
    assert printed(run, "dynamic-cell").split() == ["graphs:", "1", "recompiles:", "0"]
    assert printed(run, "breaks-cell") == "half way\n"
    (broken,) = run.result("breaks-cell").splitlines()[1:]
    assert re.search(r"`print\(\)` is called +4 +print\(\"half way\"\)$", broken)
    assert ": 2 graphs (inference)" in printed(run, "breaks-verdict")
    assert "aotlab.observe(caches=False)" in printed(run, "caches-cell")
    assert run.answer("print(any('cache' in note for note in observed(caches=False).notes))") == "False\n"
    cached, compiled = (set(line.split(", ")) for line in printed(run, "caches-off").splitlines())
    assert {"lowering", "code generation"} <= compiled - cached
    assert printed(run, "cells-tables").startswith("Stock torch.compile compiled lines 2–4: 1 graph (inference)")
    assert "verified: equal to eager" in printed(run, "cells-tables")
    outputs = [line.split(maxsplit=2)[1:] for line in run.result("cells-tables").splitlines()[1:]]
    assert outputs == [["scaled", "memory of its own"], ["turned", "view of input batch"]]
    assert run.answer("print(state.tolist(), turned._base is batch)") == "[2.0, 2.0, 2.0] True\n"
    facts = {(row["fact"], row["subject"]): row for row in run.table("both-table")}
    state = facts["mutation", "state"]
    assert (state["upstream"], state["aotlab"], state["same"]) == (
        "data: mutated in graph", "data: mutated out of graph", False,
    )  # fmt: skip
    assert facts["time", "compile time, without Dynamo's"]["same"] is None
    assert run.result("recorded-read").split() == [
        "name", "shape", "mutated", "0", "weight", "[4]", "True", "1", "step", "[4]", "False",
    ]  # fmt: skip
    exercises(run, "13_read_what_torch_compile_did.ipynb")


#: Cells that check a compiler → whether it passes.
COMPILERS = {
    "goal-cell": False, "forward-cell": True, "functional-fails": False, "write-check": True, "training-cell": True,
    "epilogue-fails": False, "build-check": True, "build-check-results": True, "compile-shared": True,
    "compile-calls": True,
}  # fmt: skip


def be_the_compiler(run: Any) -> None:
    """Check 11_be_the_compiler.ipynb, as it is: without answers the course's own go on."""
    for name in EXERCISES["11_be_the_compiler.ipynb"]:
        assert f'"{name}"' in run.cell(f"{name}-ask").source
        assert printed(run, f"{name}-answer").startswith("Not yet: there is no answer.")
        assert name in ANSWERS
    for cell, passes in COMPILERS.items():
        assert run.result(cell).startswith("All right: " if passes else "Not yet: of "), run.result(cell)
    lines = printed(run, "write-program").splitlines()
    assert [line.split(" = ")[0] for line in lines] == [
        "input_1", "mul_tensor", "as_strided_default", "add_tensor", "as_strided_scatter_default", "sin_default",
    ]  # fmt: skip
    assert printed(run, "cut-cell").startswith("saved: [input_1, cos_default]\n")
    assert ";  input_2 = None" in printed(run, "cut-cell")
    assert printed(run, "cut-cell").count("def forward(") == 2
    assert printed(run, "compile-program").strip() == "[torch.Size([3]), torch.Size([4])]"
    shown = printed(run, "done-cell")
    assert [line[:10] for line in shown.splitlines()] == ["All right:"] * len(FAMILIES), shown
    assert re.search(r"all \d+ observables equal", run.result("own-cell"))
    assert printed(run, "train-cell").endswith("as in eager: True\n")
    assert printed(run, "limits-cell").split()[0] == "(tensor([2.,"
    assert len(set(re.findall(r"\[.*?\]", printed(run, "limits-cell")))) == 1
    named = re.findall(r"`(\w+(?:/\w+)?\.py)`", run.cell("friend").source)
    assert [name for name in named if not (PACKAGE / name).exists()] == []


#: Page → what to check after it ran.
PAGES = {
    "01_storages.ipynb": storages,
    "02_writes.ipynb": writes,
    "03_views_and_autograd.ipynb": views_and_autograd,
    "04_functionalization.ipynb": functionalization,
    "05_outputs_that_share.ipynb": outputs_that_share,
    "06_inputs_that_share.ipynb": inputs_that_share,
    "07_two_graphs.ipynb": two_graphs,
    "08_again_and_again.ipynb": again_and_again,
    "09_randomness_and_modes.ipynb": randomness_and_modes,
    "10_subclasses.ipynb": subclasses,
    "11_be_the_compiler.ipynb": be_the_compiler,
    "12_in_the_wild.ipynb": in_the_wild,
    "13_read_what_torch_compile_did.ipynb": read_what_torch_compile_did,
}
