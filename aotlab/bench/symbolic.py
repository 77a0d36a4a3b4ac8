"""``aotlab bench symbolic``: what it costs to compile for all sizes, over compiling for one.

Two figures of the small programs of `aotlab.bench.suite`, each for our engine and upstream's ``aot_function``: the time
of the first step, forward and backward, with ``dynamic=True`` over that with ``dynamic=False``; and the time of a later
call of the same arguments. All four take turns in one run, with a compiler that does nothing.
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
from aotlab.bench.programs import SMALL_PROGRAMS, SmallProgram
from aotlab.bench.suite import Function, machine
from aotlab.bench.timing import Case, compare, tensors_in
from aotlab.frontends import api

#: Makes a compiled function of a function, for all sizes or for one.
Wrap = Callable[[Function, bool], Function]

#: Sizes as they are in a call, and all sizes.
_KINDS = ("one", "all")

#: So many times a static trace, and a call of one, may cost with symbols.
MOST_TRACE, MOST_CALL = 2.0, 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class SymbolicFigure:
    """One row: times with symbols over times without, of ``ours`` and ``theirs``, medians over the rounds.

    ``what`` was timed; ``over_theirs`` is ours over theirs, both with symbols; ``again`` ours without symbols against
    itself; ``problem`` says what differed from eager.
    """

    program: str
    what: str
    ours: float = math.nan
    theirs: float = math.nan
    over_theirs: float = math.nan
    again: float = math.nan
    problem: str = ""


def shipped() -> dict[str, Wrap]:
    """Return our engine and upstream's, both through their public functions."""
    from functorch import compile as upstream  # type: ignore[import-untyped]

    def wrap(module: Any, partitioner: Any, function: Function, dynamic: bool) -> Function:
        def compiler(graph: torch.fx.GraphModule, _: object) -> Function:
            boxed: Function = module.make_boxed_func(graph.forward)
            return boxed

        made: Function = module.aot_function(function, compiler, partition_fn=partitioner, dynamic=dynamic)
        return made

    ours, theirs = partial(wrap, api, default_partition), partial(wrap, upstream, upstream.default_partition)
    return {"ours": ours, "theirs": theirs}


def figures_of(program: SmallProgram, wraps: dict[str, Wrap], *, quick: bool) -> Iterator[SymbolicFigure]:
    """Measure one program: its trace, and calls without gradients and, if it trains, with them."""
    device = torch.device("cpu")
    ways = {
        f"{name}, {kind}": partial(wraps[name], program.function, kind == "all") for name in wraps for kind in _KINDS
    }

    def step(function: Function, leaves: tuple[torch.Tensor, ...]) -> object:
        outputs = tensors_in(function(*program.arguments(leaves)))
        return torch.autograd.grad(outputs, leaves, [torch.ones_like(each) for each in outputs])

    def first_step(make: Callable[[], Function]) -> object:
        return step(make(), training)

    training = program.leaves(device, True)
    if problem := _difference(ways, program, step if program.trains else None):
        yield SymbolicFigure(program=program.name, what="-", problem=problem)
        return
    if program.trains:
        cases = [Case(name=name, call=partial(first_step, make)) for name, make in ways.items()]
        yield _row(program, "first step", cases, rounds=2 if quick else 15, inner=1)
    for what, leaves in (("call", program.leaves(device, False)), ("training step", training)):
        if program.trains or what == "call":
            # upstream's function keeps its first trace whatever it is called with: a wrapper serves one mode
            made = {name: make() for name, make in ways.items()}
            run = step if what == "training step" else (lambda function, leaves: function(*leaves))
            cases = [Case(name=name, call=partial(run, function, leaves)) for name, function in made.items()]
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
    ways: Mapping[str, Callable[[], Function]], program: SmallProgram, step: Callable[..., object] | None
) -> str:
    """Say what is wrong with a way's results or gradients; an empty text if they are eager's."""
    device = torch.device("cpu")

    def outcome(function: Function) -> object:
        leaves = program.leaves(device, False)
        return tensors_in(function(*leaves)), leaves

    for name, make in ways.items():
        try:
            torch.testing.assert_close(outcome(make()), outcome(program.function), rtol=0, atol=0, check_stride=True)
            if step is not None:
                expected = step(program.function, program.leaves(device, True))
                torch.testing.assert_close(step(make(), program.leaves(device, True)), expected, rtol=0, atol=0)
        except Exception as error:  # noqa: BLE001  # whatever is raised is a result, not the benchmark's end
            return f"{name}: {type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def table(figures: Sequence[SymbolicFigure]) -> pd.DataFrame:
    """Lay out the ratios."""
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
    parser = argparse.ArgumentParser(prog="aotlab bench symbolic", description="What sizes that vary cost.")
    parser.add_argument("--quick", action="store_true", help="few rounds: a smoke test, no figures")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there as well")
    options = parser.parse_args(argv)
    wraps = shipped()
    figures = [each for program in SMALL_PROGRAMS for each in figures_of(program, wraps, quick=options.quick)]
    where, out = machine(torch.device("cpu")), sys.stdout if out is None else out
    print("\n".join(f"{key:>7}: {value}" for key, value in where.items()), file=out)
    print(
        "\nTimes with symbols for all sizes (dynamic=True) over times for the sizes of one call, in turns: of the\n"
        f"first training step, which traces (at most {MOST_TRACE:g} is meant), and of later calls (at most\n"
        f"{MOST_CALL:g}); medians over the rounds. The third ratio is ours over upstream's, both with symbols. A/A is\n"
        "ours without symbols against itself: what differs from 1 there is noise.\n",
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
