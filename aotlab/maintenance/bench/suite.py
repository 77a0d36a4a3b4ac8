"""The command ``aotlab bench engine``: the cost of our engine and of upstream's AOTAutograd, measured in one run.

Two quantities are measured. *Trace time* is the time of the first call of a training program. The compiler returns the
graph unchanged and the partitioner is the default one, so that only the engine is measured. *Call overhead* is the time
of a compiled call minus the time of the same call in eager, for functions that do almost nothing. The overhead is
compared with two engines. Upstream's ``aot_function`` has no guards, so it gives wrong results for a call that would
need another compiled entry. Upstream behind ``torch.compile`` has guards that check the same conditions as ours. All
engines use the same boxed compiler. Every result is compared with eager's before it is timed. Every ratio is shown
together with an A/A ratio: our engine is timed twice, and the closer the ratio of the two times is to 1, the more
reliable the others are.
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

from aotlab.bench.timing import Case, Comparison, compare, tensors_in
from aotlab.frontends import api
from aotlab.maintenance.bench.programs import SMALL_PROGRAMS, ModelProgram, SmallProgram, Tensors, mlp, model_programs

Function = Callable[..., object]
Mode = Literal["inference", "training, forward", "training, forward + backward"]

_MODES: tuple[Mode, ...] = ("inference", "training, forward", "training, forward + backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine to measure: its ``name``, and the functions with which it compiles a ``function`` and a ``module``."""

    name: str
    function: Callable[[Function], Function]
    module: Callable[[nn.Module], Function]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row of the result. Times are in ns, and NaN if not measured.

    Attributes
    ----------
    figure, program, description, mode
        The measured quantity, the program, and how it is called.
    against
        The engine with which ours was compared.
    eager_ns, ours_ns, theirs_ns
        Median times of a call in eager, our engine and the other engine. Trace time is not measured for eager.
    ours_over_ns, theirs_over_ns
        For call overhead, the median of the time of a call minus eager's time. For trace time, the time itself.
    ratio, ratio_p10, ratio_p90
        Our overhead or trace time divided by the other engine's within a round: the median and two percentiles over the
        rounds. Below 1, ours is faster.
    again
        The noise: our engine is timed twice, and this is its second overhead or time divided by its first.
    rounds
        The number of rounds.
    problem
        The reason why there are no times, or the difference from eager; empty if there is no problem.
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
    """Return three engines: ours, upstream's without guards, and upstream's behind Dynamo with guards.

    All of them are called through public functions.
    """
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
        torch.compiler.reset()  # Dynamo compiles a code object at most eight times
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
    """Measure the trace time of ``program`` with both engines: the time of its first training call.

    With ``backward``, the time includes the first backward, because an engine may compile the backward only then.
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
    """Measure the call overhead of ``program`` with both engines.

    ``rounds`` and ``sample_ns`` are explained at `aotlab.bench.compare`.
    """
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
    # Upstream's function uses its first trace for all later calls. So a compiled function is called in one of the
    # `_MODES` only: with or without gradients.
    functions = {"eager": program.function} | {e.name: e.function(program.function) for e in engines}

    def outcome(function: Function) -> Tensors:
        inputs = program.leaves(device, training)
        arguments = program.arguments(inputs)
        outputs = tensors_in(function(*arguments))
        if not training:
            return (*outputs, *arguments)
        gradients = torch.autograd.grad(outputs, inputs, [torch.full_like(output, 3.0) for output in outputs])
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
    """Return a sentence if the compiled function differs from eager or raises; else return an empty string.

    ``outcome`` calls a function and returns the tensors to compare. ``compiled`` compiles the function and returns the
    result. ``name`` is the name of the engine.
    """
    expected = outcome(eager)
    try:
        torch.testing.assert_close(outcome(compiled()), expected, check_stride=True)
    except AssertionError as error:
        return f"{name} differs from eager: {' '.join(str(error).split())}"
    except Exception as error:  # noqa: BLE001  # an exception of an engine is a result
        return f"{name} raised {type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def measure(
    engines: Sequence[Engine], device: torch.device, *, quick: bool, say: Callable[[str], None]
) -> Iterator[Figure]:
    """Measure all programs and yield the rows of the result.

    ``engines`` has our engine first. Its call overhead is compared with the call overhead of each other engine. Its
    trace time is compared only with the trace time of the second engine. ``say`` receives progress messages. With
    ``quick``, few rounds and small models are measured, which takes seconds.
    """
    ours, theirs, *_ = engines
    # The first trace of a process imports many modules of torch. Make one trace before the measurements, so that they
    # do not include the time of these imports.
    for engine in (ours, theirs):
        model, batch = mlp(1).to(device), torch.randn(2, 32, device=device)
        try:
            tensors_in(engine.module(model)(batch))[0].sum().backward()
        except Exception as error:  # noqa: BLE001  # every later figure reports it too
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
    """Return a table of the trace times, in ms. ``ours`` and ``theirs`` are the names of the two engines."""
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
    """Return a table of the call overheads of our engine and of one other, in µs.

    ``ours`` and ``theirs`` are the names of the two engines.
    """
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
    """Return a description of the machine and the software that produced the figures."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    except OSError:
        pass
    facts = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": f"{cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "system": platform.platform(),
        "device": str(device),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts


def print_figures(figures: Sequence[Figure], engines: Sequence[Engine], where: dict[str, str], out: TextIO) -> None:
    """Print ``where`` (the description that `machine` returns), the tables, and then the problems of the figures."""
    ours, theirs, *_ = names = [engine.name for engine in engines]
    print("\n".join(f"{key:>7}: {value}" for key, value in where.items()), file=out)
    print(
        f"\n{ours} (as shipped, all guards) beside {' and '.join(names[1:])}, taking turns in this run.\n"
        "upstream: aot_function and aot_module of functorch.compile, which have no guards.\n"
        "torch.compile: the same behind Dynamo and its guards. The graphs run as traced, with the default\n"
        "partitioner, and all results equal eager's. A ratio is the median over the rounds, with its percentiles p10\n"
        f"and p90. Below 1, {ours} is faster. A/A compares {ours} with itself, so its difference from 1 is noise.",
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
    """Return the figures as JSON text. Times are in ns. A time or ratio that was not measured is null.

    ``engines`` begins with our engine. ``where`` is the description that `machine` returns.
    """
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
