"""Predictions: the truth of a call, and an answer laid beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import aotlab
from aotlab import teach
from aotlab.errors import UsageError
from aotlab.teach.course_again import Two
from aotlab.teach.questions import QUESTIONS
from aotlab.teach.truth import eager_truth, places
from aotlab.verification.programs import program_of


def ones(*shape: int, grad: bool = False) -> torch.Tensor:
    """Make ones, which may require grad."""
    return torch.ones(*shape, requires_grad=grad)


def numpy_write(x: torch.Tensor) -> None:
    """Write where torch does not see it."""
    x.detach().numpy()[0] = 5


def late(w: torch.Tensor) -> torch.Tensor:
    """Overwrite a value that the backward needs."""
    y = w.exp()
    y.add_(1)
    return y


WINDOWS = torch.zeros(6)
#: A program, its arguments, a question, the true answer for each subject, and a part of the reason for the first one.
TRUE: list[tuple[Callable[..., Any], tuple[Any, ...], str, dict[str, object], str]] = [
    (lambda x: x[0].zero_(), (torch.zeros(2, 2),), "writes", {"x": True}, "2 of its 4 elements"),
    (lambda x, y: x.add_(y), (ones(2), ones(2)), "writes", {"x": True, "y": False}, "x.add_(y)"),
    (lambda x, y: y.zero_(), (WINDOWS[:3], WINDOWS[3:]), "writes", {"x": False, "y": True}, "none of its elements"),
    (lambda x, y: y.zero_(), (WINDOWS[:3], WINDOWS[2:]), "writes", {"x": True, "y": True}, "1 of its 3"),
    (lambda x: (x + 1).add_(1), (ones(2),), "writes", {"x": False}, "another storage"),
    (lambda x: x.data.mul_(1), (ones(2),), "writes", {"x": True}, "2 of its 2"),
    (numpy_write, (ones(2),), "writes", {"x": True}, "no op of torch wrote"),
    (lambda x: torch.neg(x, out=x), (ones(2),), "writes", {"x": True}, "2 of its 2"),
    (lambda x: x.t_(), (ones(2, 3),), "metadata", {"x": True}, "became shape (3, 2)"),
    (lambda x: x.t_(), (ones(2, 3),), "writes", {"x": False}, "x.t_(), (ones(2, 3),)"),
    (lambda x: x.set_(ones(2)).add_(1), (ones(2),), "writes", {"x": False}, "changes its window"),
    (lambda x: x.t(), (ones(2, 3),), "writes", {"x": False}, "nothing is written"),
    (lambda x: x.detach_(), (ones(2),), "writes", {"x": False}, "nothing is written"),
    (lambda x: x.t(), (ones(2, 3),), "metadata", {"x": False}, "before and after"),
    (lambda x: x.set_(ones(2)), (ones(2),), "storage", {"x": True}, "another storage"),
    (lambda x: x.resize_(8), (ones(2),), "storage", {"x": True}, "32 bytes in place of 8"),
    (lambda x: x.resize_(1), (ones(2),), "storage", {"x": False}, "8 bytes"),
    (lambda x: (x, x[0], x + 1), (ones(2, 2),), "same",
     {"out[0]": frozenset({"x"}), "out[1]": frozenset(), "out[2]": frozenset()}, "`out[0]` and `x` are one tensor"),
    (lambda x: (x[0], y := x * 2, y), (ones(2, 2),), "same",
     {"out[0]": frozenset(), "out[1]": frozenset({"out[2]"}), "out[2]": frozenset({"out[1]"})}, "new tensor"),
    (lambda x: x.expand(2, 2), (ones(2),), "shares", {"out": frozenset({"x"})}, "strides (0, 1)"),
    (lambda a, b: a * 1 + b.detach(), (ones(2, grad=True), ones(2, grad=True)), "grad_none", {"a": False, "b": True},
     "AddBackward0 → MulBackward0 → AccumulateGrad"),
    (lambda a: a * 2, (ones(2, grad=True) * 1,), "grad_none", {"a": True}, "not a leaf"),
    (lambda a: a.detach(), (ones(2, grad=True),), "grad_none", {"a": True}, "no path"),
    (lambda a: a.add_(1), (ones(2, grad=True),), "raises", {"": "call"}, "leaf Variable"),
    (late, (ones(2, grad=True),), "raises", {"": "backward"}, "modified by an inplace operation"),
    (lambda a: a * 2, (ones(2),), "raises", {"": "no"}, "neither"),
    (lambda a, b: a * b, (ones(2, grad=True), ones(2)), "saved", {"a": False, "b": True, "computed": False}, "no op"),
    (lambda a: a.exp(), (ones(2, grad=True),), "saved", {"a": False, "computed": True}, "no op"),
    (lambda a: a.exp(), (ones(2),), "saved", {"a": False, "computed": False}, "nothing requires grad"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "args", "key", "true", "why"), TRUE)
def test_what_is_true(
    function: Callable[..., Any], args: tuple[Any, ...], key: str, true: dict[str, object], why: str
) -> None:
    """The facts come from eager and the report, each with a reason. The arguments stay unchanged."""
    before = [(each.clone(), each._version, each.shape, each.data_ptr()) for each in args]
    facts = teach.predict(function, *args, ask=key).facts(key)
    assert {subject: fact.value for subject, fact in facts.items()} == true
    assert why in next(iter(facts.values())).why
    after = [(each._version, each.shape, each.data_ptr()) for each in args]
    assert after == [row[1:] for row in before]
    assert all(torch.equal(each, row[0]) and each.grad is None for each, row in zip(args, before, strict=True))


def test_every_question_is_tried() -> None:
    """All questions are tested here, except the one about two calls, which has a separate test."""
    assert {row[2] for row in TRUE} == set(QUESTIONS) - {"recompiles"}


@pytest.mark.parametrize(
    ("again", "true", "why"),
    [(ones(3), True, "`x.size(0)` is 3"), (ones(2), False, "all guards of the first graph")],
)
def test_recompiles(again: torch.Tensor, true: bool, why: str) -> None:
    """Another size is compiled again, the same size is not."""
    predicted = teach.predict(lambda x: x * 2, ones(2), again=(again,), recompiles=not true)
    assert predicted.rows[0][2:5] == (str(not true), str(true), "miss")
    assert why in predicted.rows[0][-1]


def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Share in several ways."""
    x.add_(1)
    made = y * 2
    return x[0], made[0], made, y + 1


#: Ways to answer, and how many of the answered subjects are right.
ANSWERED: list[tuple[dict[str, object], int, int]] = [
    ({"writes": "x"}, 2, 2),
    ({"writes": ""}, 1, 2),
    ({"writes": "x, y"}, 1, 2),
    ({"writes": ["x"], "metadata": None, "storage": "none"}, 6, 6),
    ({"shares": {"out[0]": "x", "out[1]": "out[2]"}}, 4, 4),
    ({"shares": {"out[2]": ["out[1]"], "out[0]": "x"}}, 4, 4),
    ({"shares": {"out[0]": "x"}}, 3, 4),
    ({"shares": {"out[0]": "x", "out[1]": "out[2]", "out[3]": "x"}}, 3, 4),
    ({"shares": {"out[0]": "x, y", "out[1]": "out[2]"}}, 3, 4),
    ({"shares": {"out[1]": "y", "out[2]": "y", "out[0]": "x"}}, 2, 4),
    ({"shares": ""}, 2, 4),
    ({"same": ""}, 4, 4),
    ({"same": {"out[0]": "x"}}, 3, 4),
    ({"raises": "no"}, 1, 1),
]


@pytest.mark.parametrize(("answers", "right", "of"), ANSWERED)
def test_answers(answers: dict[str, object], right: int, of: int) -> None:
    """Each subject is compared; a miss has its reason and a hit none."""
    predicted = teach.predict(program, ones(2, 2), ones(2, 2), **answers)
    verdicts = [row[-2] for row in predicted.rows]
    assert (verdicts.count("right"), len(verdicts)) == (right, of)
    assert predicted.right is (right == of)
    assert all(bool(row[-1]) == (row[-2] == "miss") for row in predicted.rows)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"writes": 3}, "an answer of type int is not one of `x` and `y`"),
        ({"writes": "z"}, "`z` is not one of `x` and `y`"),
        ({"shares": "x"}, "there are 4 results: say which"),
        ({"shares": {"first": "x"}}, "`first` is not one of `out[0]`"),
        ({"shares": {"out": "x"}}, "`out` is not one of `out[0]`"),
        ({"raises": "yes"}, "the answer is 'no' or 'call' or 'backward'"),
    ],
)
def test_answers_that_are_not_understood(answers: dict[str, object], said: str) -> None:
    """The table says so, kindly; nothing is raised, and nothing is right."""
    predicted = teach.predict(program, ones(2, 2), ones(2, 2), **answers)
    (row,) = predicted.rows
    assert (row[-2], predicted.right) == ("not understood", False)
    assert predicted.title.endswith(f"Not understood, so not counted: `{row[0]}`.")
    assert said in row[-1]


SHARED = torch.ones(8)
#: What need not be said twice: a program, its arguments, and answers that are as true as others.
COMPLETED: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, object]]] = [
    (lambda x: (x[0], x[1]), (ones(2, 2),), {"shares": {"out[0]": "x", "out[1]": "x"}}),
    (lambda a, b: a, (SHARED[:3], SHARED[3:]), {"shares": {"out": "a"}, "same": {"out": "a"}}),
    (lambda a, b: (b, b), (SHARED[:3], SHARED[3:]), {"shares": {"out[0]": "b", "out[1]": "b"}}),
    (lambda a, b: a, (SHARED, SHARED), {"same": {"out": "b"}}),
    (lambda a: (a[0:], a, a), (ones(2),), {"same": {"out[1]": "a", "out[2]": "out[1]"}}),
    (lambda a: (y := a * 2, y), (ones(2),), {"same": {"out[0]": "out[1]"}}),
    (lambda a: (a.squeeze(1),), (ones(2, 2),), {"shares": {"out": "a"}}),
    (lambda a: a.t(), (ones(2, 2),), {"shares": {"out[0]": "a"}}),
]


@pytest.mark.parametrize(("function", "args", "answers"), COMPLETED, ids=range(len(COMPLETED)))
def test_what_follows_need_not_be_said(
    function: Callable[..., Any], args: tuple[Any, ...], answers: dict[str, object]
) -> None:
    """Who belongs together with the same one belongs together; a single result is `out`, in a tuple or not."""
    assert teach.predict(function, *args, **answers).right


def test_a_wrong_link_is_one_miss() -> None:
    """The other links stay as they were answered: each result with inputs, and with earlier results."""
    predicted = teach.predict(
        program, ones(2, 2), ones(2, 2), shares={"out[0]": "x", "out[1]": "out[2]", "out[3]": "x"}
    )
    assert [row[2:5] for row in predicted.rows] == [
        ("`x`", "`x`", "right"), ("none", "none", "right"), ("`out[1]`", "`out[1]`", "right"),
        ("`x` and `out[0]`", "none", "miss"),
    ]  # fmt: skip


def test_an_input_that_moves_away_shares_no_more() -> None:
    """Two inputs share memory if they do so after the call."""
    answers = [{"out[0]": "a", "out[1]": "b"}, {"out[0]": "a", "out[1]": "a"}]
    right = [
        teach.predict(lambda a, b: (a, b.set_(ones(2))), SHARED[:3], SHARED[3:], shares=answer).right
        for answer in answers
    ]
    assert right == [True, False]


def test_tensors_as_answers() -> None:
    """The tensors themselves serve as names."""
    x, y = ones(2, 2), ones(2, 2)
    assert teach.predict(program, x, y, writes=x).right
    assert teach.predict(program, x, y, writes=[x, y]).rows[1][-2] == "miss"


def test_questions_run_nothing() -> None:
    """Before an answer nothing runs; the questions, the program and its arguments are shown as text and as HTML."""
    ran = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        ran.append(1)
        return x

    asked = teach.predict(noted, ones(2))
    shown = repr(asked)
    assert ran == []
    assert "def noted(x: torch.Tensor)" in shown
    assert "x: float32, shape (2,), strides (1,), offset 0, in storage 0" in shown
    assert [row[0] for row in asked.rows] == ["writes", "metadata", "storage", "shares"]
    assert "<code>" in asked._repr_html_()
    left_open = repr(teach.predict(noted, ones(2), writes=...)).splitlines()
    assert left_open[0] == "Not answered yet: `writes`."
    assert left_open[2].endswith('writes="x"')
    assert ran == []
    with_gradients = teach.predict(noted, ones(2, grad=True), again=(ones(3),))
    assert with_gradients.code.endswith(
        "offset 0, in storage 0, requires grad, a leaf\n\n"
        "And in the second call:\nx: float32, shape (3,), strides (1,), offset 0, in storage 1"
    )
    assert {row[0] for row in with_gradients.rows} >= {"saved", "grad_none", "recompiles"}


def test_a_wrapper_is_shown_with_its_parts() -> None:
    """A wrapper has no memory itself; its parts are shown.

    The example of an answer is not a possible right answer.
    """
    shown = teach.predict(lambda x: x * 2, Two(ones(2), ones(3).double()), ask="saved")
    assert shown.code.splitlines()[-1].startswith(
        "x: float32, a Two of other (float64, shape (3,), strides (1,), offset 0) and one (float32, shape (2,), "
    )
    assert teach.predict(lambda a: a * 2, ones(2, grad=True), ask="saved").rows[0][2] == 'saved="x, computed"'


def stale(x: torch.Tensor) -> torch.Tensor:
    """Return a view that autograd knows nothing of any more."""
    made = x * 2
    with torch.no_grad():
        view = made[0]
    made.mul_(2)
    return view


def test_a_result_that_raises_when_it_is_looked_at() -> None:
    """It counts as a call that raises."""
    assert teach.predict(stale, ones(2, grad=True), raises="call").right


def test_the_grad_mode_is_put_back() -> None:
    """A program may change it."""
    teach.predict(lambda x: torch.set_grad_enabled(False), ones(2), writes="", saved="")
    assert torch.is_grad_enabled()


def test_one_after_the_other() -> None:
    """Questions can be answered one after the other. The remaining ones are named."""
    first = teach.predict(program, ones(2, 2), ones(2, 2), ask="writes metadata", writes="x")
    assert (first.note, first.right) == ("Not answered yet: `metadata`.", False)
    assert first.answer(metadata="").right


def test_what_a_function_reaches_is_put_back() -> None:
    """Captured tensors and modules are inputs by their names; they stay as they were."""
    weight = ones(2)
    assert teach.predict(lambda x: weight.add_(x), ones(2), writes="weight").right
    assert weight.tolist() == [1.0, 1.0]
    norm = torch.nn.BatchNorm1d(2)
    assert teach.predict(norm, torch.randn(4, 2), writes="running_mean, running_var, num_batches_tracked").right
    assert norm.running_mean is not None
    assert not norm.running_mean.any()


def test_of_a_call_that_raises() -> None:
    """Other questions have no answer then, and the reason is its error."""
    predicted = teach.predict(lambda x: x.view(7), ones(2), writes="", raises="call")
    assert [row[-2] for row in predicted.rows] == ["miss", "right"]
    assert "there is no answer: the call raises RuntimeError: shape" in predicted.rows[0][-1]


def test_what_cannot_be_copied() -> None:
    """A view of a leaf that is a view is refused, since eager forbids writes to it and not to its copy."""
    leaf = torch.ones(6).view(2, 3).requires_grad_()
    with pytest.raises(UsageError, match="`x` is a view of a leaf that is itself a view"):
        teach.predict(lambda x: x.zero_(), leaf[0], raises="call")
    leaf = torch.ones(6).view(2, 3).clone().requires_grad_()
    assert teach.predict(lambda x: x.zero_(), leaf[0], raises="call").right


def test_what_is_not_compiled() -> None:
    """For a function that runs eagerly, the saved values are unknown, and the answer says so."""
    (row,) = teach.predict(lambda x: x * int(x.sum()), ones(2, grad=True), saved="x").rows
    assert (row[3], row[-2]) == ("eager", "miss")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: teach.predict(program, ones(2), wirtes="x"), "there is no question `wirtes`; there are `raises`"),
        (lambda: teach.predict(program, ones(2), ask="all"), "there is no question `all`"),
        (lambda: teach.predict(ones(2), ones(2)), "a function and its arguments, not a Tensor"),
    ],
)
def test_mistakes(call: Callable[[], object], said: str) -> None:
    """Questions that there are not, and no function."""
    with pytest.raises(UsageError, match=said):
        call()


@pytest.mark.tier("full")
def test_truth_agrees_with_the_engine() -> None:
    """For compiled functions, the engine finds the same writes and reshapes as eager shows."""
    compared = 0
    for seed in range(40):
        drawn = program_of(seed, max_calls=1)
        function, (make,) = drawn.build()
        if drawn.raises or not drawn.setups[0].grad_mode:
            continue
        call = make()
        facts = eager_truth(function, call.args).facts
        grad_mode = torch.set_grad_enabled(True)  # which the program may change
        with aotlab.Report.record() as report, aotlab.config.patch(fallback="eager"), grad_mode:
            aotlab.compile(function, backend="eager")(*call.args)
        graphs = [graph for frame in report.report().frames for graph in frame.graphs]
        if graphs and graphs[0].status == "compiled":
            compared += 1
            present = [each for each in graphs[0].inputs if each.tensor is not None and each.kind != "base"]
            found = {each.name: each for each in present}
            for key, name in (("writes", "mutates_data"), ("metadata", "mutates_metadata")):
                # For the engine, a write to an empty view of a tensor writes the tensor: its history changes.
                said = {
                    subject: fact.value
                    for subject, fact in facts[key].items()
                    if subject in found and not fact.why.endswith("but to none of its elements")
                }
                assert said == {subject: getattr(found[subject], name) for subject in said}, drawn
    assert compared > 20


def test_places() -> None:
    """The bytes of a window: all that its elements take, and no others."""
    x = torch.zeros(4, 4)
    assert places(x[1, ::2]).nonzero()[0].tolist() == [*range(16, 20), *range(24, 28)]
    assert places(x[:0]).sum() == 0
    assert places(x[0].expand(3, 4)).nonzero()[0].tolist() == [*range(16)]
    assert places(x.view(torch.uint8)[0, 1:3]).nonzero()[0].tolist() == [1, 2]
