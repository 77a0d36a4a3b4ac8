"""``aotlab bench engine``: what our engine costs beside upstream's AOTAutograd, measured in one run.

Two figures. *Trace time*: the first call of a training program, with a compiler that does nothing and the
default partitioner, so that nothing is measured but the engine. *Call overhead*: what a compiled call takes
more than the same call in eager, for functions that do next to nothing. It is compared twice: with upstream's
``aot_function``, which checks nothing of a call and so is wrong where another is needed, and with upstream behind
``torch.compile``, whose guards check what ours do. All get the same boxed compiler. Every result is
compared with eager's before it is timed, and beside every ratio stands the one that our engine reaches against
itself: a ratio means something only as far as that one is near 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, TextIO

import pandas as pd
import torch
from torch import nn

from aotlab.bench.programs import SMALL_PROGRAMS, ModelProgram, SmallProgram, Tensors, mlp, model_programs
from aotlab.bench.timing import Case, Comparison, compare, tensors_in
from aotlab.frontends import api

Function = Callable[..., object]
Mode = Literal["inference", "training, forward", "training, forward + backward"]

_MODES: tuple[Mode, ...] = ("inference", "training, forward", "training, forward + backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine under test: its ``name``, and how it wraps a ``function`` and a ``module``."""

    name: str
    function: Callable[[Function], Function]
    module: Callable[[nn.Module], Function]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row of the result; times in ns, NaN where there is none.

    Attributes
    ----------
    figure, program, description, mode
        What was measured, on which program.
    against
        The engine that ours was compared with.
    eager_ns, ours_ns, theirs_ns
        Median times of a call. A trace has no counterpart in eager.
    ours_over_ns, theirs_over_ns
        The median of what a call takes more than eager; for a trace the time itself.
    ratio, ratio_p10, ratio_p90
        Ours over theirs, computed in every round; below 1 we are faster.
    again
        The same ratio of our engine's second timing over its first.
    rounds
        How many rounds were run.
    problem
        Why there are no times, or what differed from eager; empty if all is well.
    """

    figure: Literal["trace time", "call overhead"]
    program: str
    description: str
    mode: str
    against: str
    eager_ns: float = math.nan
    ours_ns: float = math.nan
    theirs_ns: float = math.nan
    ours_over_ns: float = math.nan
    theirs_over_ns: float = math.nan
    ratio: float = math.nan
    ratio_p10: float = math.nan
    ratio_p90: float = math.nan
    again: float = math.nan
    rounds: int = 0
    problem: str = ""


def shipped_engines() -> tuple[Engine, Engine, Engine]:
    """Return our engine, upstream's and upstream's behind Dynamo, by their public functions; the last has guards."""
    from functorch import compile as upstream  # type: ignore[import-untyped]

    def our_compiler(graph: torch.fx.GraphModule, _: object) -> Function:
        return api.make_boxed_func(graph.forward)

    def their_compiler(graph: torch.fx.GraphModule, _: object) -> Function:
        boxed: Function = upstream.make_boxed_func(graph.forward)
        return boxed

    def their_function(function: Function) -> Function:
        wrapped: Function = upstream.aot_function(function, their_compiler, partition_fn=upstream.default_partition)
        return wrapped

    def their_module(module: nn.Module) -> Function:
        wrapped: Function = upstream.aot_module(module, their_compiler, partition_fn=upstream.default_partition)
        return wrapped

    def behind_dynamo(module: torch.fx.GraphModule, inputs: Sequence[object]) -> Function:
        graphs: Function = upstream.aot_module_simplified(
            module, inputs, their_compiler, partition_fn=upstream.default_partition
        )
        return graphs

    def guarded(function: Function) -> Function:
        torch.compiler.reset()  # Dynamo counts compilations by code, and gives up at the eighth
        compiled: Function = torch.compile(function, backend=behind_dynamo, dynamic=False)
        return compiled

    ours = Engine(
        name="aotlab",
        function=lambda function: api.aot_function(function, our_compiler),
        module=lambda module: api.aot_module(module, our_compiler),
    )
    theirs = Engine(name="upstream", function=their_function, module=their_module)
    return ours, theirs, Engine(name="torch.compile", function=guarded, module=guarded)


def trace_figure(
    program: ModelProgram, engines: tuple[Engine, Engine], device: torch.device, *, backward: bool, rounds: int
) -> Figure:
    """Measure the first training call of ``program`` through both engines.

    ``backward`` includes the first backward, where an engine may have put off a part of its work.
    """
    ours, theirs = engines
    blank = Figure(
        figure="trace time",
        program=program.name,
        description=program.description,
        mode="first forward + backward" if backward else "first forward",
        against=theirs.name,
        rounds=rounds,
    )
    model, batch = program.make(device)
    parameters = tuple(model.parameters())

    def first_call(engine: Engine) -> Callable[[], object]:
        def call() -> object:
            output = engine.module(model)(*batch)
            return torch.autograd.grad(tensors_in(output)[0].sum(), parameters) if backward else output

        return call

    def outcome(function: Function) -> Tensors:
        output = tensors_in(function(*batch))
        return (*output, *torch.autograd.grad(output[0].sum(), parameters))

    for engine in engines:
        problem = _problem(engine.name, outcome, model, partial(engine.module, model))
        if problem:
            return replace(blank, problem=problem)
    cases = [Case(name=engine.name, call=first_call(engine)) for engine in engines]
    result = compare(cases, rounds=rounds, warmup=0, inner=1, device=device, again=ours.name)
    ratio = result.ratio(ours.name, theirs.name)
    noise = result.noise
    assert noise is not None
    return replace(
        blank,
        ours_ns=result[ours.name].median_ns,
        theirs_ns=result[theirs.name].median_ns,
        ours_over_ns=result[ours.name].median_ns,
        theirs_over_ns=result[theirs.name].median_ns,
        ratio=ratio.median,
        ratio_p10=ratio.p10,
        ratio_p90=ratio.p90,
        again=noise.median,
    )


def overhead_figure(
    program: SmallProgram,
    mode: Mode,
    engines: tuple[Engine, Engine],
    device: torch.device,
    *,
    rounds: int,
    sample_ns: int,
) -> Figure:
    """Measure what a call of ``program`` through either engine takes more than the call in eager."""
    ours, theirs = engines
    blank = Figure(
        figure="call overhead",
        program=program.name,
        description=program.description,
        mode=mode,
        against=theirs.name,
        rounds=rounds,
    )
    training = mode != "inference"
    backward = mode == "training, forward + backward"
    leaves = program.leaves(device, training)
    # Upstream's function keeps its first trace whatever it is called with: a wrapper serves one mode.
    functions = {"eager": program.function} | {e.name: e.function(program.function) for e in engines}

    def outcome(function: Function) -> Tensors:
        own = program.leaves(device, training)
        arguments = program.arguments(own)
        outputs = tensors_in(function(*arguments))
        if not training:
            return (*outputs, *arguments)
        gradients = torch.autograd.grad(outputs, own, [torch.full_like(output, 3.0) for output in outputs])
        return (*outputs, *arguments, *gradients)

    for engine in engines:
        problem = _problem(engine.name, outcome, program.function, partial(functions.__getitem__, engine.name))
        if problem:
            return replace(blank, problem=problem)

    shapes = tensors_in(program.function(*program.arguments(leaves)))
    tangents = [torch.ones_like(output) for output in shapes]

    def case(name: str) -> Case:
        function = functions[name]

        def call(arguments: Tensors) -> object:
            outputs = function(*arguments)
            return torch.autograd.grad(tensors_in(outputs), leaves, tangents) if backward else outputs

        def prepare() -> Callable[[], object]:
            arguments = program.arguments(leaves)
            return lambda: call(arguments)

        if program.mutates and training:
            return Case(name=name, prepare=prepare)
        if backward:
            return Case(name=name, call=lambda: call(leaves))
        return Case(name=name, call=lambda: function(*leaves))

    cases = [case(name) for name in functions]
    result = compare(cases, rounds=rounds, sample_ns=sample_ns, device=device, again=ours.name)
    return _overhead(blank, result, ours.name, theirs.name)


def _overhead(blank: Figure, result: Comparison, ours: str, theirs: str) -> Figure:
    ratio = result.overhead_ratio(ours, theirs, "eager")
    assert result.again_name is not None
    return replace(
        blank,
        eager_ns=result["eager"].median_ns,
        ours_ns=result[ours].median_ns,
        theirs_ns=result[theirs].median_ns,
        ours_over_ns=result.difference(ours, "eager").median,
        theirs_over_ns=result.difference(theirs, "eager").median,
        ratio=ratio.median,
        ratio_p10=ratio.p10,
        ratio_p90=ratio.p90,
        again=result.overhead_ratio(result.again_name, ours, "eager").median,
    )


def _problem(
    name: str, outcome: Callable[[Function], Tensors], eager: Function, compiled: Callable[[], Function]
) -> str:
    """Say what is wrong with the outcome of what ``compiled`` makes; an empty text if it is eager's."""
    expected = outcome(eager)
    try:
        torch.testing.assert_close(outcome(compiled()), expected, check_stride=True)
    except AssertionError as error:
        return f"{name} differs from eager: {' '.join(str(error).split())}"
    except Exception as error:  # noqa: BLE001  # whatever an engine raises is a result, not the benchmark's end
        return f"{name} raised {type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def measure(
    engines: Sequence[Engine], device: torch.device, *, quick: bool, say: Callable[[str], None]
) -> Iterator[Figure]:
    """Measure all figures in turn: trace times of the first two engines, overheads of the first beside each other.

    ``say`` hears what comes next, ``quick`` measures little of it, in seconds.
    """
    ours, theirs, *_ = engines
    # The first trace of a process imports half of torch; it belongs to neither engine's figure.
    for engine in (ours, theirs):
        model, batch = mlp(1).to(device), torch.randn(2, 32, device=device)
        try:
            tensors_in(engine.module(model)(batch))[0].sum().backward()
        except Exception as error:  # noqa: BLE001  # reported with every figure that follows
            say(f"warming up {engine.name} failed: {error}")
    for small in SMALL_PROGRAMS:
        for mode in _MODES if small.trains else _MODES[:1]:
            for other in engines[1:]:
                say(f"call overhead: {small.name}, {mode}, beside {other.name}")
                rounds, sample_ns = (6, 500_000) if quick else (40, 5_000_000)
                yield overhead_figure(small, mode, (ours, other), device, rounds=rounds, sample_ns=sample_ns)
    for program in model_programs(quick):
        for backward in (False, True):
            say(f"trace time: {program.name}, {'first step' if backward else 'first forward'}")
            yield trace_figure(program, (ours, theirs), device, backward=backward, rounds=2 if quick else 5)


def trace_table(figures: Sequence[Figure], ours: str, theirs: str) -> pd.DataFrame:
    """Lay out the trace times, in ms."""
    return pd.DataFrame(
        [
            {
                "program": f.program,
                "call": f.mode,
                f"{ours} ms": f.ours_ns / 1e6,
                f"{theirs} ms": f.theirs_ns / 1e6,
                f"{ours} / {theirs}": f.ratio,
                "p10": f.ratio_p10,
                "p90": f.ratio_p90,
                "A/A": f.again,
            }
            for f in figures
            if f.figure == "trace time"
        ]
    )


def overhead_table(figures: Sequence[Figure], ours: str, theirs: str) -> pd.DataFrame:
    """Lay out the call overheads beside one other engine's, in µs."""
    return pd.DataFrame(
        [
            {
                "program": f.program,
                "call": f.mode,
                "eager µs": f.eager_ns / 1e3,
                f"{ours} +µs": f.ours_over_ns / 1e3,
                f"{theirs} +µs": f.theirs_over_ns / 1e3,
                f"{ours} / {theirs}": f.ratio,
                "p10": f.ratio_p10,
                "p90": f.ratio_p90,
                "A/A": f.again,
            }
            for f in figures
            if f.figure == "call overhead" and f.against == theirs
        ]
    )


def machine(device: torch.device) -> dict[str, str]:
    """Describe where the figures come from."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    except OSError:
        pass
    found = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": f"{cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "system": platform.platform(),
        "device": str(device),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def print_figures(figures: Sequence[Figure], engines: Sequence[Engine], where: dict[str, str], out: TextIO) -> None:
    """Print the tables, under what was compared and where, and above what went wrong."""
    ours, theirs, *_ = names = [engine.name for engine in engines]
    print("\n".join(f"{key:>7}: {value}" for key, value in where.items()), file=out)
    print(
        f"\n{ours} (as shipped, all guards) beside {' and '.join(names[1:])}, taking turns in this run.\n"
        "upstream: aot_function and aot_module of functorch.compile, which check nothing of a call;\n"
        "torch.compile: the same behind Dynamo and its guards. Graphs run as traced, default partitioner; results\n"
        "equal to eager's. Ratios are medians over the rounds of the ratio within a round, p10 and p90 their spread;\n"
        f"below 1 {ours} is faster. A/A is {ours} against itself: what differs from 1 there is noise.",
        file=out,
    )
    tables = [("Trace time", trace_table(figures, ours, theirs))]
    tables += [
        (f"Call overhead over eager, beside {other}", overhead_table(figures, ours, other)) for other in names[1:]
    ]
    for title, table in tables:
        text = table.to_string(index=False, float_format=lambda number: f"{number:.2f}", na_rep="-")
        print(f"\n{title}\n\n{text}", file=out)
    problems = [f"{f.figure}, {f.program}, {f.mode}, beside {f.against}: {f.problem}" for f in figures if f.problem]
    if problems:
        print("\nNot measured:\n  " + "\n  ".join(problems), file=out)


def to_json(figures: Sequence[Figure], engines: Sequence[Engine], where: dict[str, str]) -> str:
    """Write the figures as JSON, times in ns and null where there is none."""
    rows = [
        {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in asdict(f).items()}
        for f in figures
    ]
    ours, *theirs = [engine.name for engine in engines]
    return json.dumps({"machine": where, "ours": ours, "theirs": theirs, "figures": rows}, indent=2) + "\n"


def main(argv: Sequence[str], engines: Sequence[Engine] | None = None, out: TextIO | None = None) -> int:
    """Run ``aotlab bench ARGV``; return 0 if every program was measured and equal to eager."""
    parser = argparse.ArgumentParser(prog="aotlab bench", description="Time aotlab's engine beside upstream's.")
    parser.add_argument("what", choices=["engine"], help="engine: trace time and call overhead")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there as well")
    parser.add_argument("--quick", action="store_true", help="small models and few rounds: a smoke test, no figures")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    engines = shipped_engines() if engines is None else engines
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:6.1f} s] {text}", file=sys.stderr, flush=True)

    figures = list(measure(engines, device, quick=options.quick, say=say))
    where = machine(device)
    print_figures(figures, engines, where, sys.stdout if out is None else out)
    if options.json is not None:
        options.json.write_text(to_json(figures, engines, where))
    return 1 if any(figure.problem for figure in figures) else 0
