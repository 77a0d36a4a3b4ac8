"""Writes that autograd sees, to memory that several arguments share: the base of these views becomes a graph input."""

from __future__ import annotations

import pytest
import torch

import aotlab
from aotlab.report import Report
from tests.both_ways import Case, both_ways, check_gradients_of_arguments, check_with_inductor

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _views(*views, plain=False, others=()):
    """Make arguments that are views of ``b = leaf.add(1)``, or of a tensor that does not require grad."""

    def arguments(leaf):
        b = torch.arange(1.0, 5.0).reshape(2, 2).clone() if plain else leaf.add(1)
        return (*(view(b) for view in views), *(other(leaf) for other in others))

    return arguments


def _flat(b):
    return b.view(4)


def _row(b):
    return b[0]


def _transposed(b):
    return b.t()


def _whole(b):
    return b


def _values(leaf):
    return leaf.sum(0) * 1


def _write(a, c):
    a.mul_(2)
    return a + 1, c * 3


def _write_both(a, c):
    a.mul_(2)
    c.add_(1)
    return (a.sum() * c).sin()


def _return(a, c):
    a.mul_(2)
    return a, c


def _return_views(a, c):
    c.mul_(2)
    return a[0], c.unsqueeze(0)[:, 1:], a.sum()


def _use_before(a, c):
    y = a * 2
    c.mul_(3)
    return y, a * c.sum()


def _hidden(a, c):
    a.detach().mul_(2)
    return a * 3, c.sin()


def _under_no_grad(a, c):
    with torch.no_grad():
        a.mul_(2)
    return a * 3, c + 1


def _views_of_all(a, c):
    c.mul_(2)
    return a.unsqueeze(0), c.unsqueeze(0), a.detach()


def _view_before(a, c):
    v = a[0]
    c.mul_(2)
    return v * 3


def _return_view_before(a, c):
    v = c[:1]
    a.mul_(2)
    return v, a * 1


def _return_what_it_writes(a, c):
    v = a[:1]
    v.mul_(2)
    return v, c + 1


def _gain_history(a, c, w):
    a.mul_(w)
    return c * 2


def _copy(a, c, w):
    a.copy_(w * 3)
    return c.sum() + a


PROGRAMS = (
    _write, _write_both, _return, _return_views, _use_before, _hidden, _under_no_grad, _views_of_all, _view_before,
    _return_view_before, _return_what_it_writes,
)  # fmt: skip
PAIRS = {
    "flat and row": (_flat, _row),
    "row and flat": (_row, _flat),
    "transposed and row": (_transposed, _row),
    "row and transposed": (_row, _transposed),
    "base and row": (_whole, _row),
    "row and base": (_row, _whole),
    "flat twice": (_flat, _flat),
}
CASES = {
    **{
        f"{program.__name__}, {name}": Case(program=program, arguments=_views(*pair), size=(2, 2))
        for n, program in enumerate(PROGRAMS)
        for name, pair in [*PAIRS.items(), *PAIRS.items()][n % 7 : n % 7 + 3]  # three of them, in turn
    },
    **{
        f"{program.__name__}, {name} of a plain base": Case(
            program=program,
            arguments=_views(*PAIRS[name], plain=True, others=(_values,)),
            size=(2, 2),
            breaks=("training",),  # Dynamo itself fails: its fake tensors do not learn that the base requires grad
        )
        for program in (_gain_history, _copy)
        for name in ("row and transposed", "base and row", "row and base")
    },
    "one view alone": Case(program=lambda a: (a.mul_(2), a * 1, a[:1])[1:], arguments=_views(_row), size=(2, 2)),
    "one tensor twice": Case(
        program=lambda a, b, c: (a.mul_(2), b + c.sum())[1],
        arguments=lambda leaf: (lambda b, row: (row, row, b))(b := leaf.add(1), b[0]),
        size=(2, 2),
    ),
    "in containers": Case(
        program=lambda d, pair, k: (d["a"].mul_(2), pair[0] * k.sum(), pair[1])[1:],
        arguments=lambda leaf: (lambda b: ({"a": b[0]}, [b.t(), torch.ones(2)], b[1]))(leaf.add(1)),
        size=(2, 2),
    ),
    "beside arguments that share nothing": Case(
        program=lambda a, n, c, w: (a.mul_(n), c.exp() * w)[1],
        arguments=lambda leaf: (lambda b: (b[0], torch.ones(2), b.t(), leaf * 1))(leaf.add(1)),
        size=(2, 2),
    ),
}

test_called_directly, test_behind_dynamo = both_ways(CASES)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_arguments(name):
    """The gradients of outputs and arguments equal eager's, with respect to the arguments before and after the call."""
    check_gradients_of_arguments(CASES[name])


@pytest.mark.tier("full")
@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize(
    "name",
    [
        "_write, flat and row",
        "_write_both, row and flat",
        "_use_before, row and base",
        "_under_no_grad, flat twice",
        "one view alone",
    ],
)
@pytest.mark.filterwarnings("ignore:.*script_method")
def test_by_inductor(name, frontend):
    """Inductor's code for a sample of the programs gives eager's results."""
    check_with_inductor(CASES[name], frontend)


@pytest.mark.tier("full")
@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.filterwarnings("ignore:.*script_method")
def test_varying_sizes_by_inductor(frontend):
    """The base and its views may have any size."""
    check_with_inductor(Case(program=_write, arguments=_views(_whole, _row)), frontend, sizes=[(2, 2), (3, 5), (4, 3)])


def test_the_wrapper_writes_the_base_once():
    """The generated function reads the base from the view, and copies one new value into it."""
    compiled = aotlab.compile(_write, backend="eager")
    b = torch.ones(2, 2, requires_grad=True).add(1)
    compiled(b[0], b.t())
    (entry,) = compiled.entries
    source = entry.records.runtime.source
    assert "base_of_a = a._base" in source
    assert source.count(".copy_(") == 1
    assert "base_of_a.copy_(new_a__base)" in source


def test_the_report_shows_the_base():
    """The report has a row for the base, and its stages are those of the trace that succeeded."""
    with Report.record("a call") as recording:
        b = torch.ones(2, 2, requires_grad=True).add(1)
        aotlab.compile(_write, backend="eager")(b[0], b.t())
    report = recording.report()
    rows = report.inputs
    assert list(zip(rows["name"], rows["kind"], strict=True)) == [("a", "input"), ("c", "input"), ("a._base", "base")]
    assert set(rows["placeholder"]) == {"primals_1"}
    assert set(rows["synthetic_base"]) == {0}
    assert list(report.stages["stage"]).count("capture") == 1


def test_the_report_of_a_base_that_is_only_read():
    """The views of a base that is not written stay inputs of the graph."""
    with Report.record("a call") as recording:
        b, other = (torch.ones(2, 2, requires_grad=True).add(1) for _ in range(2))
        aotlab.compile(lambda a, c, d: (a.mul_(2), c * d)[1], backend="eager")(b[0], b[1], other[0])
    rows = recording.report().inputs.set_index("name")
    assert len({rows["placeholder"][name] for name in ("a", "c", "a._base")}) == 1
    assert rows["placeholder"]["d"] not in ("", rows["placeholder"]["a"])
    assert rows["synthetic_base"].isna()["d"]


def test_another_base_is_another_entry():
    """A view of a base with other sizes is compiled again, and the reason names the view."""
    compiled = aotlab.compile(_write, backend="eager")
    for rows in (2, 3):
        b = torch.ones(rows, 2, requires_grad=True).add(1)
        compiled(b[0], b[1])
    assert compiled.recompiles == ("`a` is no view of a base like the one that the compiled entry expects",)
    assert (compiled.calls.compiled, compiled.calls.eager) == (2, 0)


def test_a_hook_on_the_view_runs_eagerly():
    """In eager, a hook stays on the history that the view had before the write."""
    compiled = aotlab.compile(_write, backend="eager")
    b = torch.ones(2, 2, requires_grad=True).add(1)
    a = b[0]
    a.register_hook(lambda gradient: gradient * 2)
    with pytest.warns(RuntimeWarning, match="writes-view-with-grad-base"):
        compiled(a, b.t())


def test_elements_that_share_memory_run_eagerly():
    """A write through an unfolded view would write some elements several times."""
    compiled = aotlab.compile(lambda a: (a.add_(1), a * 2)[1], backend="eager")
    b = torch.ones(6, requires_grad=True).add(1)
    with pytest.warns(RuntimeWarning, match="unfolded"):
        compiled(b.unfold(0, 2, 1))
