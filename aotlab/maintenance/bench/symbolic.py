"""The command ``aotlab bench symbolic``: the cost of compiling for all sizes instead of one.

Two ratios are measured for each small program of `programs`, both for our engine and for upstream's ``aot_function``.
The first is the time of the first step, forward and backward, with ``dynamic=True`` divided by the time with
``dynamic=False``. The second is the same ratio for a later call with the same arguments. The two engines, each with
both settings, run in turns in one run. The compiler returns the graphs unchanged.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import pandas as pd
import torch

from aotlab import default_partition
from aotlab.bench.timing import Case, compare, tensors_in
from aotlab.frontends import api
from aotlab.maintenance.bench.programs import SMALL_PROGRAMS, SmallProgram
from aotlab.maintenance.bench.suite import Function, machine

#: A function that compiles a function; the second argument is ``dynamic``: compile for all sizes, not only for one.
Wrap = Callable[[Function, bool], Function]

#: A function is compiled for the sizes of one call or for all sizes. These are the names of the two settings.
_KINDS = ("one", "all")

#: The limits for the time of a first step and of a later call with symbolic sizes, as multiples of the time without
#: symbolic sizes.
MOST_TRACE, MOST_CALL = 2.0, 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class SymbolicFigure:
    """One row of the result: ratios of times, each a median over the rounds.

    ``what`` names the call that was timed. ``ours`` and ``theirs`` are the time with symbolic sizes divided by the time
    without, of our and of upstream's engine. ``over_theirs`` is our time divided by upstream's, both with symbolic
    sizes. ``again`` is the noise: our engine without symbolic sizes is timed twice, and this is the second time divided
    by the first. ``problem`` describes a difference from eager.
    """

    program: str
    what: str
    ours: float = math.nan
    theirs: float = math.nan
    over_theirs: float = math.nan
    again: float = math.nan
    problem: str = ""


def shipped() -> dict[str, Wrap]:
    """Return the functions that compile with our engine and with upstream's, both through public functions."""
    from functorch import compile as upstream  # type: ignore[import-untyped]

    def wrap(module: Any, partitioner: Any, function: Function, dynamic: bool) -> Function:
        def compiler(graph: torch.fx.GraphModule, _: object) -> Function:
            boxed: Function = module.make_boxed_func(graph.forward)
            return boxed

        compiled: Function = module.aot_function(function, compiler, partition_fn=partitioner, dynamic=dynamic)
        return compiled

    ours, theirs = partial(wrap, api, default_partition), partial(wrap, upstream, upstream.default_partition)
    return {"ours": ours, "theirs": theirs}


def figures_of(program: SmallProgram, wraps: dict[str, Wrap], *, quick: bool) -> Iterator[SymbolicFigure]:
    """Measure one program: its first step, calls without gradients and, if it trains, calls with gradients."""
    device = torch.device("cpu")
    makers = {
        f"{name}, {kind}": partial(wraps[name], program.function, kind == "all") for name in wraps for kind in _KINDS
    }

    def step(function: Function, leaves: tuple[torch.Tensor, ...]) -> object:
        outputs = tensors_in(function(*program.arguments(leaves)))
        return torch.autograd.grad(outputs, leaves, [torch.ones_like(each) for each in outputs])

    def first_step(make: Callable[[], Function]) -> object:
        return step(make(), training)

    training = program.leaves(device, True)
    if problem := _difference(makers, program, step if program.trains else None):
        yield SymbolicFigure(program=program.name, what="-", problem=problem)
        return
    if program.trains:
        cases = [Case(name=name, call=partial(first_step, make)) for name, make in makers.items()]
        yield _row(program, "first step", cases, rounds=2 if quick else 15, inner=1)
    for what, leaves in (("call", program.leaves(device, False)), ("training step", training)):
        if program.trains or what == "call":
            # Upstream's function uses its first trace for all later calls, so calls with and without gradients need two
            # functions.
            functions = {name: make() for name, make in makers.items()}
            run = step if what == "training step" else (lambda function, leaves: function(*leaves))
            cases = [Case(name=name, call=partial(run, function, leaves)) for name, function in functions.items()]
            yield _row(program, what, cases, rounds=4 if quick else 30, inner=None)


def _row(program: SmallProgram, what: str, cases: list[Case], *, rounds: int, inner: int | None) -> SymbolicFigure:
    result = compare(cases, rounds=rounds, inner=inner, warmup=1, sample_ns=2_000_000, again="ours, one")
    noise = result.noise
    assert noise is not None
    return SymbolicFigure(
        program=program.name,
        what=what,
        ours=result.ratio("ours, all", "ours, one").median,
        theirs=result.ratio("theirs, all", "theirs, one").median,
        over_theirs=result.ratio("ours, all", "theirs, all").median,
        again=noise.median,
    )


def _difference(
    makers: Mapping[str, Callable[[], Function]], program: SmallProgram, step: Callable[..., object] | None
) -> str:
    """Return a sentence about the first difference from eager's results or gradients, or else an empty string.

    ``makers`` maps an engine and its setting (``"ours, all"``) to a function that compiles the program. ``step`` runs
    forward and backward. If it is None, gradients are not compared.
    """
    device = torch.device("cpu")

    def outcome(function: Function) -> object:
        leaves = program.leaves(device, False)
        return tensors_in(function(*leaves)), leaves

    for name, make in makers.items():
        try:
            torch.testing.assert_close(outcome(make()), outcome(program.function), rtol=0, atol=0, check_stride=True)
            if step is not None:
                expected = step(program.function, program.leaves(device, True))
                torch.testing.assert_close(step(make(), program.leaves(device, True)), expected, rtol=0, atol=0)
        except Exception as error:  # noqa: BLE001  # an exception is a result and does not end the benchmark
            return f"{name}: {type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def table(figures: Sequence[SymbolicFigure]) -> pd.DataFrame:
    """Return a table of the ratios."""
    return pd.DataFrame(
        [
            {
                "program": f.program,
                "what": f.what,
                "ours: all sizes / one": f.ours,
                "upstream's": f.theirs,
                "ours / upstream's": f.over_theirs,
                "A/A": f.again,
            }
            for f in figures
        ]
    )


def main(argv: Sequence[str], out: TextIO | None = None) -> int:
    """Run ``aotlab bench symbolic ARGV``; return 0 if every result was eager's."""
    parser = argparse.ArgumentParser(
        prog="aotlab bench symbolic", description="Measure the cost of compiling for sizes that vary."
    )
    parser.add_argument("--quick", action="store_true", help="few rounds: a smoke test, no figures")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there as well")
    options = parser.parse_args(argv)
    wraps = shipped()
    figures = [each for program in SMALL_PROGRAMS for each in figures_of(program, wraps, quick=options.quick)]
    where, out = machine(torch.device("cpu")), sys.stdout if out is None else out
    print("\n".join(f"{key:>7}: {value}" for key, value in where.items()), file=out)
    print(
        "\nThe time with symbolic sizes (dynamic=True), divided by the time for the sizes of one call: for the\n"
        f"first training step, which traces (limit {MOST_TRACE:g}), and for later calls (limit {MOST_CALL:g}).\n"
        "The cases run in turns, and the ratios are medians over the rounds. The third ratio is our time divided by\n"
        "upstream's, both with symbolic sizes. A/A compares ours without symbolic sizes with itself, so its\n"
        "difference from 1 is noise.\n",
        file=out,
    )
    print(table(figures).to_string(index=False, float_format=lambda number: f"{number:.2f}", na_rep="-"), file=out)
    for f in figures:
        if f.problem:
            print(f"\nNot measured: {f.program}: {f.problem}", file=out)
    if options.json is not None:
        rows = [asdict(f) for f in figures]
        options.json.write_text(json.dumps({"machine": where, "figures": rows}, indent=2) + "\n")
    return 1 if any(f.problem for f in figures) else 0
