"""Arguments that the function gives other memory, with `set_` or by an assignment to `.data`."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aotlab
from aotlab.errors import RefusedError
from tests.engine_helpers import behind, compiled, keeping_functions, record, refusing, same

no_grad = torch.no_grad


def borrows(a, b, w):
    """Write `b` through `a`; afterwards `a` has its own memory again."""
    with no_grad():
        own = a.detach()
        a.set_(b)
        a.mul_(2)
        a.set_(own)
    return (a * w).sin() + b


def looks(a, b, w):
    """Read the other memory; only the version counter of `a` changes."""
    with no_grad():
        own = a.detach()
        a.set_(b)
        y = a * 2
        a.set_(own)
    return y + a * w


def borrows_two(a, b, w):
    """Write two tensors, one of which requires grad."""
    with no_grad():
        own = a.detach()
        for other in (b, w):
            a.set_(other)
            a.mul_(2)
        a.set_(own)
    return a + b


def stays(a, b, w):
    """Leave `a` in the memory of `b`, and write it there."""
    with no_grad():
        a.set_(b)
        a.add_(1)
    return (a * w).exp() * a


def returns_it(a, b, w):
    """Return the argument that got other memory."""
    with no_grad():
        a.set_(b)
    return a, a * w


def swaps(a, b, w):
    """Swap two arguments, and write both."""
    with no_grad():
        own = a.detach()
        a.set_(b)
        b.set_(own)
        a.mul_(3)
        b.add_(1)
    return a * w - b


def writes_first(a, b, w):
    """Write the own memory before and after."""
    with no_grad():
        own = a.detach()
        a.mul_(3)
        a.set_(b)
        own.add_(1)
    return a * w + own


def computes_memory(a, b, w):
    """Give `a` the memory of an intermediate."""
    with no_grad():
        a.set_(b * 2)
        a.add_(1)
    return a * w * a


def takes_a_part(a, b, w):
    """Give `a` a part of the memory of `b`."""
    a.data = b[1:3]
    with no_grad():
        a.mul_(2)
    return a.sum() * w


def takes_its_part(a, b, w):
    """Give `a` a part of the memory that it has."""
    with no_grad():
        a.set_(a[1:])
    return a.sum() * w


def assigns_data(a, b, w):
    """Assign to `.data`, as optimizers do; the version counter does not move."""
    a.data = a.data * 0.5
    return a * w * a


def assigns_other(a, b, w):
    """Assign to `.data`, as FSDP1 does."""
    a.data = b
    return (a * w).sin()


def saves_the_other(a, b, w):
    """Save `b` for the backward before the hidden write."""
    y = (b * w).sin() * b
    with no_grad():
        a.set_(b)
        a.mul_(2)
    return y


def arguments(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Make three tensors. `kind` names those that require grad; capital letters are parameters."""
    tensors = {"a": torch.arange(1.0, 5), "b": torch.arange(4.0) + 10, "w": torch.arange(4.0) / 3}
    for name in tensors:
        tensors[name].requires_grad_(name in kind)
        if name.upper() in kind:
            tensors[name] = nn.Parameter(tensors[name])
    return tensors["a"], tensors["b"], tensors["w"]


#: The programs, and for each program the arguments for which it is compiled.
PROGRAMS = {
    borrows: ("", "w", "ABw"),
    looks: ("", "w"),
    borrows_two: ("", "w"),
    stays: ("", "w", "Aw", "ABw"),
    returns_it: ("", "Aw"),
    swaps: ("", "w", "AB"),
    writes_first: ("", "w"),
    computes_memory: ("", "Aw"),
    takes_a_part: ("", "w"),
    takes_its_part: ("", "w"),
    assigns_data: ("", "Aw"),
    assigns_other: ("", "Aw", "ABw"),
    saves_the_other: ("", "bw"),
}
CASES = [(program, kind) for program, kinds in PROGRAMS.items() for kind in kinds]
NAMES = [f"{program.__name__} {kind}" for program, kind in CASES]


@pytest.mark.parametrize(("program", "kind"), CASES, ids=NAMES)
def test_called_directly(program, kind):
    """All observables are eager's, and one entry serves all calls."""
    same(program, *arguments(kind), make=lambda f: compiled(f, frontend="direct"))


@pytest.mark.parametrize(("program", "kind"), CASES, ids=NAMES)
def test_behind_dynamo(program, kind):
    """The same behind Dynamo, which may cut the function into several graphs."""
    made: list[Any] = []
    torch.compiler.reset()
    result = aotlab.verification.compare(
        program,
        arguments(kind),
        {},
        candidate=lambda f: torch.compile(f, backend=keeping_functions(made)),
        backward="all",
    )
    assert result.first is None
    assert [each.calls.eager for each in made] == [0] * len(made)


@pytest.mark.parametrize("program", [borrows, stays, swaps, computes_memory, takes_a_part, assigns_data])
def test_inductor(program):
    """Inductor's kernels read and write the memory that the arguments have in the graph."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".* runs eagerly", RuntimeWarning)
        for kind in PROGRAMS[program]:
            assert aotlab.verify(program, *arguments(kind)).first is None


def test_varying_sizes():
    """One entry serves all sizes."""
    candidate = compiled(swaps, frontend="direct", dynamic=True)
    for n in (3, 5, 8):
        found = []
        for call in (swaps, candidate):
            a, b, w = torch.ones(n), torch.arange(float(n)), torch.ones(n, requires_grad=True)
            out = call(a, b, w)
            out.sum().backward()
            found.append([out, a, b, w.grad])
        assert all(map(torch.equal, *found))
    assert (behind(candidate).calls.compiled, len(behind(candidate).entries)) == (3, 1)


def test_a_write_between_forward_and_backward():
    """Eager saved `a`, so the backward raises if the caller writes `a` after the call."""
    for call in (assigns_other, compiled(assigns_other, frontend="direct")):
        a, b, w = arguments("w")
        out = call(a, b, w)
        a.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_the_epilogue():
    """The wrapper stays straight-line: the aliases come first, so that two arguments can be swapped."""
    candidate = compiled(swaps, frontend="direct")
    candidate(*arguments(""))
    lines = [line.strip() for line in record(candidate, "runtime").source.splitlines()]
    assert [line for line in lines if "memory_of" in line] == [
        "memory_of_b = b.detach()",
        "memory_of_a = a.detach()",
        "a.set_(memory_of_b)",
        "b.set_(memory_of_a)",
    ]


def test_the_report(tmp_path):
    """The report says which argument got another storage."""
    with aotlab.Report.record() as report:
        compiled(stays, frontend="direct")(*arguments("w"))
    report.to_html(tmp_path / "report.html")
    changed = report.inputs.set_index("name")["mutates_storage"]
    assert (bool(changed["a"]), bool(changed["b"])) == (True, False)
    assert "storage replaced" in (tmp_path / "report.html").read_text()


def returns_a_view(a, b, w):
    """Return a view of the other memory."""
    with no_grad():
        a.set_(b)
    return a[1:]


def an_intermediate(a, b, w):
    """Give an intermediate other memory."""
    y = w * 2
    y.set_(b)
    return y + a


def the_same_intermediate(a, b, w):
    """Give two arguments the memory of one intermediate."""
    y = w * 2
    with no_grad():
        a.set_(y)
        b.set_(y)
    return a + b


def gains_history(a, b, w):
    """Give the argument an autograd history while it has other memory."""
    a.set_(b)
    a.mul_(w)
    return a * 2


def other_sizes(a, b, w):
    """Change the sizes of a parameter."""
    a.data = b[:2]
    return a * 2


def a_storage(a, b, w):
    """Use another form of `set_`."""
    a.set_(b, 0, (2,), (1,))
    return a * 2


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        (returns_a_view, ""),
        (an_intermediate, ""),
        (the_same_intermediate, ""),
        (gains_history, "w"),
        (other_sizes, "Aw"),
        (a_storage, ""),
    ],
)
def test_other_cases_run_eagerly(program, kind):
    """With eager's results, and with a notice."""
    same(program, *arguments(kind), eagerly=True)
    with refusing(match="other memory"):
        compiled(program, frontend="direct")(*arguments(kind))


def test_an_export_is_refused():
    """An exported graph has nothing that could give the argument other memory."""
    with pytest.raises(RefusedError):
        aotlab.aot_export_joint_simple(lambda a, b, w: (stays(a, b, w),), arguments(""), trace_joint=False)
