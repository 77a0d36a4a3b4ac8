"""Random programs: that they are worth running, how outcomes are told apart, and what the engine makes of them."""

from __future__ import annotations

import collections
import re
import subprocess
import sys
import warnings

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings

from aotlab.errors import OverlappingInputsError, RandomOpError
from aotlab.verification.observables import observe
from aotlab.verification.programs import Program, Setup, programs, run_program

#: One fixed list of examples; Hypothesis mutates what it has drawn, so a good part of them occur twice.
FIXED = settings(
    max_examples=600,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
)


def drawn() -> list[Program]:
    """Draw the fixed list, each program once."""
    found: dict[str, Program] = {}

    @FIXED
    @given(programs())
    def collect(program: Program) -> None:
        found.setdefault(program.source, program)

    collect()
    return list(found.values())


@pytest.fixture(scope="module")
def all_programs() -> list[Program]:
    """Give out the fixed list, drawn once for this file."""
    return drawn()


def eager(function):
    """Leave the function as it is."""
    return function


def example(*body: str, result: str, calls: int = 1, grad: bool = True) -> Program:
    """Write a program of one non-leaf argument by hand."""
    setup = Setup(
        lines=(
            f"a_leaf = numbers(1, 2, 3).requires_grad_({grad})",
            "a = a_leaf * 1",
        ),
        arguments=("a",),
        watched=("a_leaf",),
    )
    return Program(parameters=("a",), body=body, result=result, setups=(setup,) * calls)


def test_programs_equal_themselves(all_programs):
    """Every program agrees with itself: nothing observed depends on chance or on an earlier run."""
    outcomes = collections.Counter(run_program(program, eager).status for program in all_programs)
    assert outcomes == {"ok": len(all_programs)}


def test_the_list_is_the_same_every_time(all_programs):
    """A second drawing gives the same programs, so that a failure in CI can be repeated."""
    assert [program.source for program in drawn()] == [program.source for program in all_programs]


def test_there_is_enough_variety(all_programs):
    """At least 200 different programs, which do what they are for."""
    assert len(all_programs) >= 200
    text = "\n".join(line for program in all_programs for line in (*program.body, program.result))
    ops = set(re.findall(r"\.(\w+)\(", text))
    wanted = {"mul_", "add_", "copy_", "zero_", "fill_", "sin_", "clamp_", "masked_fill_", "relu_", "view", "reshape"}
    wanted |= {"transpose", "t", "unsqueeze", "squeeze", "select", "narrow", "expand", "diagonal", "unbind", "chunk"}
    wanted |= {"split", "detach", "view_as", "flatten", "permute", "movedim", "unfold", "sum", "mean", "sin", "exp"}
    wanted |= {"where", "cat", "stack", "softmax", "gather", "cumsum", "no_grad", "enable_grad", "set_grad_enabled"}
    wanted |= {"unsqueeze_", "rand_like"}
    # Which few are missing is up to the installed Hypothesis.
    assert len(wanted - ops) <= 3, wanted - ops
    assert " @ " in text
    changes = {setup.change for program in all_programs for setup in program.setups}
    assert changes == {
        "the first call",
        "the same again",
        "other values",
        "other requires_grad",
        "other shapes",
        "another dtype",
        "another layout",
        "another number",
        "one input passed twice",
        "inputs that overlap",
        "no longer the same",
    }
    assert {program.backward for program in all_programs} == {"all", "first", "each", None}


def test_most_programs_show_something(all_programs):
    """Few raise, a good half can be differentiated, and as many mutate an input or return an alias."""
    counts: collections.Counter[str] = collections.Counter()
    for program in all_programs:
        function, makers = program.build()
        with torch.enable_grad():
            torch.manual_seed(0)
            seen = observe(function, makers[0]())
        states = seen.tensors
        counts["raises"] += seen.failure is not None
        counts["raises in the backward"] += seen.backward_failure is not None
        counts["differentiates"] += bool(seen.differentiated)
        counts["mutates"] += any(state.role == "input" and state.version_moved for state in states)
        counts["aliases"] += any(state.role == "output" and state.shares_with != state.name for state in states)
        counts["changes grad mode"] += not seen.grad_mode
        counts["several calls"] += len(program.setups) > 1
    share = {name: count / len(all_programs) for name, count in counts.items()}
    # Programs that raise are seldom, and how seldom in this list is up to Hypothesis; together they are not none.
    assert share["raises"] < 0.1
    assert share["raises in the backward"] < 0.15
    assert share["raises"] + share["raises in the backward"] > 0
    assert share["differentiates"] > 0.5
    assert share["mutates"] > 0.4
    assert share["aliases"] > 0.4
    assert share["changes grad mode"] < 0.2
    assert share["several calls"] > 0.5


def test_a_program_is_text_that_runs_anywhere(tmp_path):
    """The printed program is a module of its own, which needs torch and nothing of ours."""
    program = example("v1 = a * 2", "v1.add_(1)", result="(v1, a)")
    assert repr(program) == f"Program(\n{program.source})"
    file = tmp_path / "program_text.py"
    file.write_text(program.source + "\nargs, watched = inputs_0()\nprint(program(*args)[0].tolist())\n")
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.strip() == "[[-1.5, 3.5, -2.5], [2.5, -3.5, 1.5]]"


def test_programs_shrink():
    """The smallest program that writes to an input has one statement and one call."""

    def writes(program: Program) -> bool:
        function, makers = program.build()
        return any(state.version_moved for state in observe(function, makers[0](), backward=None).tensors)

    small = find(programs(), writes, settings=settings(FIXED, phases=[Phase.generate, Phase.shrink]))
    assert (len(small.body), len(small.setups)) == (1, 1)


def test_a_wrong_candidate_fails():
    """A candidate that returns something else is a failure, with the differences."""
    program = example(result="a * 2")
    outcome = run_program(program, lambda function: lambda a: function(a) + 1)
    assert outcome.status == "failed"
    assert [difference.kind for difference in outcome.differences] == ["value"]


def test_only_the_second_call_is_wrong():
    """One candidate serves all calls, so that what it remembers of the first can be wrong for the second."""

    def remembers(function):
        results = []

        def call(a):
            results.append(function(a))
            return results[0].clone()

        return call

    program = example(result="(a * 2).sum()", calls=2)
    (difference, *_) = run_program(program, remembers).differences
    assert difference.sentence.startswith("call 2: ")


def test_refusals_are_counted_by_reason():
    """A refusal without a trace is an outcome of its own, one per call."""

    def refuse(function):
        def call(a):
            raise OverlappingInputsError("a overlaps b")

        return call

    outcome = run_program(example(result="a", calls=2), refuse)
    assert (outcome.status, outcome.refusals) == ("refused", ("OverlappingInputs", "OverlappingInputs"))


def test_a_refusal_after_a_mutation_fails():
    """Refusing is too late once an input was written."""

    def late(function):
        def call(a):
            function(a)
            raise RandomOpError("rand")

        return call

    outcome = run_program(example("a.mul_(2)", result="a"), late)
    assert outcome.status == "failed"
    assert {difference.kind for difference in outcome.differences} == {"mutated before refusal"}


def test_programs_that_raise_must_raise_the_same():
    """Where eager raises, the candidate has to, with the same type."""
    program = example("v1 = a.view(7)", result="v1")
    assert run_program(program, eager).status == "ok"
    assert run_program(program, lambda function: lambda a: a).status == "failed"

    def other(function):
        def call(a):
            raise IndexError("7")

        return call

    assert run_program(program, other).status == "failed"


def compiled(function):
    """Compile with aotlab; the graph is run by torch's own kernels, so that values are equal bit for bit."""
    from aotlab import api

    return api.compile(function, backend="eager")


def test_the_engine_does_what_eager_does():
    """Of at least 200 programs none differs in anything observable, and at least nine in ten are compiled."""
    refusals: dict[str, tuple[str, ...]] = {}

    @FIXED
    @given(programs())
    def run(program: Program) -> None:
        if program.source in refusals:
            return
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outcome = run_program(program, compiled)
        assert outcome.status != "failed", [difference.sentence for difference in outcome.differences]
        fallbacks = ("ran eagerly",) if any("ran eagerly" in str(warning.message) for warning in caught) else ()
        refusals[program.source] = outcome.refusals + fallbacks

    run()
    reasons = collections.Counter(reason for kept in refusals.values() for reason in set(kept))
    assert len(refusals) >= 200
    assert sum(bool(kept) for kept in refusals.values()) <= 0.1 * len(refusals), reasons
    assert set(reasons) <= {"OverlappingInputs", "MetadataMutation", "Output", "ran eagerly"}, reasons
    assert {"OverlappingInputs", "MetadataMutation"} <= set(reasons), reasons
