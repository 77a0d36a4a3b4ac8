"""The command ``aotlab bench disk``: the first result of a second process, which finds Inductor's cache on disk.

A process compiles a model and runs its first forward and backward. The import of torch and aotlab is not measured. The
first process of an engine starts with an empty cache, and the second one starts with the files that the first process
wrote. The engines are aotlab with the direct frontend, aotlab behind Dynamo, and stock `torch.compile` with all of its
caches. They run in turns, each with its own cache.

The time is CPU time, because other programs on the machine change it less than the time of a clock. It includes the C++
compiler, which runs in the process's only compile thread.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

import torch

from aotlab.frontends import api
from aotlab.frontends.compiled_module import AotModule
from aotlab.maintenance.bench.models import trained_models
from aotlab.maintenance.bench.suite import machine

#: The engines by name: the arguments ``engine`` and ``frontend`` of `aotlab.compile`.
ENGINES: dict[str, dict[str, str]] = {
    "direct": {"frontend": "direct"},
    "Dynamo": {"frontend": "dynamo"},
    "torch.compile": {"engine": "upstream"},
}
_CHILD = "import sys; from aotlab.maintenance.bench import disk; disk.print_first_result(*sys.argv[1:])"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFigure:
    """One row of the result: the CPU times of two processes, in seconds.

    ``problem`` describes a difference between the losses of the two processes, or is empty.
    """

    model: str
    engine: str
    first: float
    second: float
    problem: str = ""


def print_first_result(model: str, engine: str, backend: str, size: str) -> None:
    """Print the CPU seconds until a model's first loss has been differentiated, and the loss, as JSON.

    ``engine`` is a key of `ENGINES`, and ``size`` is ``"small"`` or ``"full"``. Raises RuntimeError if the direct
    frontend ran the model eagerly.
    """
    trained = next(each for each in trained_models(small=size == "small") if each.name == model)
    torch.manual_seed(0)
    module, batch = trained.model(), trained.batch(torch.Generator().manual_seed(1))
    started = sum(os.times()[:4])
    compiled = api.compile(module, backend=backend, **ENGINES[engine])  # type: ignore[arg-type]
    loss = trained.loss(compiled(**batch))
    loss.backward()
    if engine == "direct" and isinstance(compiled, AotModule) and compiled.compiled.calls.eager:
        raise RuntimeError(f"{model} ran eagerly")
    print(json.dumps([sum(os.times()[:4]) - started, loss.item()]))


def measure(models: Sequence[str], backend: str, size: str) -> Iterator[DiskFigure]:
    """Run two processes for each model and each engine. See `print_first_result` for the arguments."""
    for model in models:
        for engine in ENGINES:
            with tempfile.TemporaryDirectory() as folder:
                results = [_run(model, engine, backend, size, folder) for _ in range(2)]
            (first, loss), (second, same_loss) = results
            problem = "" if loss == same_loss else f"the losses are {loss} and {same_loss}"
            yield DiskFigure(model=model, engine=engine, first=first, second=second, problem=problem)


def _run(model: str, engine: str, backend: str, size: str, folder: str) -> tuple[float, float]:
    """Return the CPU seconds and the loss of a new process, whose cache is in ``folder``."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-c", _CHILD, model, engine, backend, size]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    seconds, loss = json.loads(done.stdout.splitlines()[-1])
    return seconds, loss


def markdown(figures: Sequence[DiskFigure]) -> str:
    """Return the table of RESULTS.md: per engine, first / second process, and second process / `torch.compile`'s."""
    names = list(ENGINES)
    heads = ["model", *[f"first / second: {name}" for name in names], *[f"second: {n} / stock" for n in names[:-1]]]
    lines = [f"| {' | '.join(heads)} |", f"| --- |{' ---: |' * (len(heads) - 1)}"]
    for model in dict.fromkeys(each.model for each in figures):
        of = {each.engine: each for each in figures if each.model == model}
        stock = of["torch.compile"].second if "torch.compile" in of else math.nan
        ratios = [of[n].first / of[n].second if n in of else math.nan for n in names]
        ratios += [of[n].second / stock if n in of else math.nan for n in names[:-1]]
        lines.append(f"| {model} | {' | '.join('–' if math.isnan(each) else f'{each:.1f}' for each in ratios)} |")
    return "\n".join(lines)


def main(argv: Sequence[str], out: TextIO | None = None) -> int:
    """Run ``aotlab bench disk ARGV``; return 1 if the two processes of an engine have different losses."""
    names, out = [each.name for each in trained_models()], sys.stdout if out is None else out
    parser = argparse.ArgumentParser(
        prog="aotlab bench disk", description="Measure the first result of a second process."
    )
    parser.add_argument("--only", metavar="NAME", nargs="+", choices=names, default=names, help=", ".join(names))
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor", help="default: inductor")
    parser.add_argument("--small", action="store_true", help="the sizes of the tests")
    options = parser.parse_args(argv)
    print("\n".join(f"{key:>7}: {value}" for key, value in machine(torch.device("cpu")).items()), file=out)
    figures = []
    for each in measure(options.only, options.backend, "small" if options.small else "full"):
        print(f"{each.model}, {each.engine}: {each.first:.1f} s, then {each.second:.1f} s  {each.problem}", file=out)
        figures.append(each)
    print(f"\n{markdown(figures)}", file=out)
    return 1 if any(each.problem for each in figures) else 0
