"""Helpers for two files of small programs.

Each program is called directly and behind Dynamo, and compared with eager.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import aotlab
from aotlab import config, events
from aotlab.maintenance.fuzz.compare import differences
from aotlab.verification import compare
from aotlab.verification.clones import argument_tensors
from tests.engine_helpers import heard_events, keeping_functions, leaf

#: The modes that each program is called in.
BOTH = ("inference", "training")

#: Of a leaf's copies makes the arguments: a tensor that may be written, or several.
Arguments = Callable[[Tensor], tuple[Any, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A program, its arguments, and what its caller does before the backward.

    ``eager`` says where a direct call is left to eager, or eager itself raises: in "inference", in "training", or
    both; ``breaks`` where it may be that Dynamo hands us nothing of it that we compile. ``exact`` is False where
    three gradients of one tensor are added up, which nobody promises an order for.
    """

    program: Callable[..., Any]
    arguments: Arguments = lambda x: (x + 0,)
    size: tuple[int, ...] = (2, 3)
    before: Callable[..., Sequence[Callable[[], Any]]] | None = None
    backward: Any = "all"
    exact: bool = True
    eager: tuple[str, ...] = ()
    breaks: tuple[str, ...] = ()

    def inputs(self, mode: str) -> Callable[[], tuple[tuple[Any, ...], dict[str, Tensor]]]:
        """Make a function that makes the arguments of a call, and the leaf behind them, whose gradient is compared."""

        def make() -> tuple[tuple[Any, ...], dict[str, Tensor]]:
            source = leaf(*self.size).detach().requires_grad_(mode == "training")
            return self.arguments(source), {"leaf": source}

        return make

    def differences(self, compiled: Callable[..., Any], mode: str) -> list[str]:
        """Return the differences between two calls and eager's calls."""
        calls = [self.inputs(mode)] * 2
        return differences(self.program, compiled, calls, backward=self.backward, before=self.before, exact=self.exact)


@contextmanager
def quietly() -> Iterator[None]:
    """Run eagerly what cannot be compiled, without a notice."""
    with config.patch(fallback="eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check_direct(case: Case, mode: str) -> None:
    """Assert that direct calls are eager's, and that they were compiled, once, where they should be."""
    with quietly():
        compiled = aotlab.compile(case.program, backend="eager")
        found = case.differences(compiled, mode)
    assert found == [], found
    expected = (0, 2) if mode in case.eager else (2, 0)
    assert (compiled.calls.compiled, compiled.calls.eager) == expected, compiled.recompiles


def check_behind_dynamo(case: Case, mode: str) -> None:
    """Assert that compiled calls behind Dynamo equal eager's.

    A call may also differ from eager exactly as Dynamo alone does.
    """
    made = []

    with quietly():
        torch.compiler.reset()
        found = case.differences(torch.compile(case.program, backend=keeping_functions(made)), mode)
        if found:
            torch.compiler.reset()
            found = sorted(set(found) - set(case.differences(torch.compile(case.program, backend="eager"), mode)))
    assert found == [], found
    assert mode in case.breaks or sum(each.calls.compiled for each in made) > 0


def check_with_inductor(case: Case, frontend: str, sizes: Sequence[tuple[int, ...]] = ()) -> None:
    """Assert that Inductor's code gives eager's results, within the tolerance of `aotlab.verify`, and is used.

    With ``sizes``, one function is called for all of these sizes of the leaf.
    """
    dynamic = True if sizes else None
    compiled = aotlab.compile(case.program, backend="inductor", frontend=frontend, dynamic=dynamic)
    with warnings.catch_warnings(), heard_events() as heard:
        warnings.filterwarnings("error", ".*eagerly")
        for size in sizes or [case.size]:
            args, _ = replace(case, size=size).inputs("training")()
            settings: dict[str, Any] = {"backward": case.backward, "tolerance": "close"}
            result = compare(case.program, args, candidate=lambda _: compiled, **settings)
            assert result.first is None, result.first
    assert any(isinstance(event, events.CompileFinished) for event in heard)


def check_gradients_of_arguments(case: Case) -> None:
    """Assert that a direct call has eager's gradients with respect to its arguments and their bases.

    Each output and each argument is differentiated on its own, with respect to the leaf and to the arguments and bases,
    with the histories that these have before and after the call.
    """
    edge = torch.autograd.graph.get_gradient_edge

    def gradients(function: Callable[..., Any]) -> list[Tensor | None]:
        args, watched = case.inputs("training")()
        tensors = [tensor for _, tensor in argument_tensors(case.program, args, {})]
        bases = [base for tensor in tensors if (base := tensor._base) is not None]

        def edges() -> list[Any]:
            return [edge(t) for t in {id(t): t for t in (*tensors, *bases)}.values() if t.requires_grad]

        before = edges()
        result = function(*args)
        outputs = result if isinstance(result, tuple) else (result,)
        ends = [*watched.values(), *before, *edges()]
        every: list[Tensor | None] = []
        for output in (t for t in (*outputs, *tensors) if t.requires_grad):
            tangent = torch.arange(1.0, output.numel() + 1).reshape(output.shape)
            for wanted in ([end] for end in ends):
                every += torch.autograd.grad(output, wanted, tangent, allow_unused=True, retain_graph=True)
            every += torch.autograd.grad(output, ends, tangent, allow_unused=True, retain_graph=True)
        return every

    with quietly():
        compiled = aotlab.compile(case.program, backend="eager")
        pairs = zip(gradients(case.program), gradients(compiled), strict=True)
    assert compiled.calls.compiled == 1
    for number, (expected, actual) in enumerate(pairs):
        assert (expected is None) == (actual is None), number
        if expected is not None and actual is not None:
            torch.testing.assert_close(actual, expected, rtol=0 if case.exact else 1e-6, atol=0)


def both_ways(cases: Mapping[str, Case]) -> tuple[Callable[[str, str], None], Callable[[str, str], None]]:
    """Make the two tests of a file of cases, one for direct calls and one for calls behind Dynamo."""

    @pytest.mark.parametrize("mode", BOTH)
    @pytest.mark.parametrize("name", cases)
    def test_called_directly(name: str, mode: str) -> None:
        """A direct call equals eager in all observables, and is compiled where the case says so."""
        check_direct(cases[name], mode)

    @pytest.mark.parametrize("mode", BOTH)
    @pytest.mark.parametrize("name", cases)
    def test_behind_dynamo(name: str, mode: str) -> None:
        """The same behind Dynamo, except for differences that Dynamo alone causes."""
        check_behind_dynamo(cases[name], mode)

    return test_called_directly, test_behind_dynamo
