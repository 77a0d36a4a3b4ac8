"""The command ``aotlab bench models``: train real models for ten steps with our engine, eager and ``torch.compile``.

The benchmark answers four questions.

- Are the results equal to eager's? On the eager backend, all losses and the final parameters must be bitwise equal. On
  Inductor, the errors of ten single steps against float64 are compared with the errors of ``torch.compile`` (see
  `courses`).
- How much memory does the forward hold for the backward? The bytes of the saved values and the loss are measured.
- How long does a step take? aotlab, ``torch.compile`` and eager run in turns in one run.
- What does it cost if the batch size varies? Twelve steps with batches of twelve sizes run with empty caches (see
  `sizes`).

If a loss differs on the eager backend, if errors are too large, or if aotlab holds more bytes than upstream's min-cut
or eager, the result reports a problem.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import pandas as pd
import torch

from aotlab.bench.timing import Case, compare
from aotlab.maintenance.bench.courses import (
    STEPS,
    Course,
    Errors,
    Training,
    Wrap,
    by_ours,
    by_stock,
    comparable,
    eagerly,
    errors_of_steps,
    train,
)
from aotlab.maintenance.bench.models import Trained, trained_models
from aotlab.maintenance.bench.sizes import varied
from aotlab.report.model import QUIET, Report

#: The limit for the bytes that the forward holds with our min-cut partitioner, as a multiple of upstream's bytes.
MOST = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFigure:
    """One row of the result; NaN if something was not measured.

    Attributes
    ----------
    model, description, parameters
        The model, and the number of its parameters.
    graphs, breaks, eager_calls
        The number of graphs compiled in ten steps, the number of graph breaks in Dynamo, and the number of graph calls
        that ran eagerly. ``why`` contains the reasons for the eager calls.
    first_loss, last_loss
        The losses of the first and the last step in eager.
    same
        Whether ten steps on the eager backend were bitwise equal to eager.
    our_loss_error, our_gradient_error, our_largest_gradient_error, our_buffer_error
        Relative errors of single steps on Inductor, in units of float32's epsilon, each with the one of our two
        partitioners that has the larger error. ``our_gradient_error`` is the median of ten steps, and the others are
        the largest of ten steps.
    stock_loss_error, stock_gradient_error, stock_largest_gradient_error, stock_buffer_error
        The same errors of ``torch.compile``.
    within
        Whether each error is at most twice the error of ``torch.compile`` (or of eager, if ``torch.compile`` cannot
        train the model), or within the tolerance of ``torch.testing.assert_close``. The largest gradient error is not
        compared.
    our_drift, stock_drift, eager_drift
        The drift of independent trainings (see `courses`), in the same units.
    eager_bytes, our_bytes, our_min_cut_bytes, stock_bytes
        The bytes held between forward and backward: in eager, with our default and min-cut partitions, and with
        ``torch.compile``, which uses upstream's min-cut.
    step, step_p10, step_p90
        The time of a step on Inductor with our min-cut, divided by the time of ``torch.compile``; median, and spread
        over the rounds.
    over_eager
        The time of the same step divided by eager's time.
    again
        The noise: our engine is timed twice, and this is the second time divided by the first.
    sizes, sizes_alike, sizes_wrong
        The number of batch sizes. The number of sizes at which aotlab's loss, gradients and buffers agreed with eager.
        The sizes at which they did not. On the eager backend, values agree if they are equal bit for bit. On Inductor,
        they agree if they are as close to eager as the values of ``torch.compile``.
    sizes_our_compilations, sizes_stock_compilations, sizes_eager_share
        How often aotlab and ``torch.compile`` compiled in steps of these sizes, and the share of aotlab's calls that
        ran eagerly.
    sizes_our_seconds, sizes_stock_seconds, sizes_ratio, sizes_again
        The times of these steps with empty caches, our time divided by the time of ``torch.compile`` within a round,
        and our time in the last round divided by our time in the first. If our backend is ``"eager"``,
        ``torch.compile`` uses ``"aot_eager"``.
    problem
        A description of the problem; empty if there is no problem.
    """

    model: str
    description: str
    parameters: int = 0
    graphs: int = 0
    breaks: int = 0
    eager_calls: int = 0
    why: tuple[str, ...] = ()
    first_loss: float = math.nan
    last_loss: float = math.nan
    same: bool | None = None
    our_loss_error: float = math.nan
    our_gradient_error: float = math.nan
    our_largest_gradient_error: float = math.nan
    our_buffer_error: float = math.nan
    stock_loss_error: float = math.nan
    stock_gradient_error: float = math.nan
    stock_largest_gradient_error: float = math.nan
    stock_buffer_error: float = math.nan
    within: bool | None = None
    our_drift: float = math.nan
    stock_drift: float = math.nan
    eager_drift: float = math.nan
    eager_bytes: float = math.nan
    our_bytes: float = math.nan
    our_min_cut_bytes: float = math.nan
    stock_bytes: float = math.nan
    step: float = math.nan
    step_p10: float = math.nan
    step_p90: float = math.nan
    over_eager: float = math.nan
    again: float = math.nan
    sizes: int = 0
    sizes_alike: int = 0
    sizes_wrong: tuple[tuple[int, ...], ...] = ()
    sizes_our_compilations: int = 0
    sizes_stock_compilations: int | None = None
    sizes_eager_share: float = math.nan
    sizes_our_seconds: float = math.nan
    sizes_stock_seconds: float = math.nan
    sizes_ratio: float = math.nan
    sizes_again: float = math.nan
    problem: str = ""

    @property
    def is_quiet(self) -> bool:
        """Whether the same program, timed twice, agreed within 5 %, so that ratios of times are meaningful."""
        return is_quiet(self.again)


def is_quiet(again: float) -> bool:
    """Tell whether the ratio of two timings of the same program is within 5 % of 1."""
    return abs(again - 1) <= QUIET


def figure(
    trained: Trained, device: torch.device, *, inductor: bool, rounds: int, say: Callable[[str], None]
) -> ModelFigure:
    """Measure one model and return its row. Without ``inductor``, only the eager backend is used.

    ``rounds`` is the number of timings of a step. ``say`` receives progress messages.
    """
    with comparable():
        say("eager")
        torch.compiler.reset()
        eager = Training(trained, eagerly, device)
        reference = eager.course()
        eager_bytes = eager.held()
        say("aotlab, eager backend")
        with Report.record() as recording:
            exact = Training(trained, partial(by_ours, backend="eager"), device)
            ours = exact.course()
        report = recording.report()
        row: dict[str, Any] = {
            "model": trained.name,
            "description": trained.description,
            "parameters": sum(p.numel() for p in eager.module.parameters()),
            "graphs": len(report.calls.groupby(["frame", "graph"])) if len(report.calls) else 0,
            "breaks": len(report.graph_breaks),
            "eager_calls": int((~report.calls["compiled"].astype(bool)).sum()) if len(report.calls) else 0,
            "why": tuple(sorted(set(report.refusals["message"].dropna().astype(str)))),
            "first_loss": reference.losses[0],
            "last_loss": reference.losses[-1],
            "same": ours.is_same(reference),
            "eager_bytes": eager_bytes,
        }
        problems = [] if row["same"] else [f"on the eager backend {ours.losses}, in eager {reference.losses}"]
        if inductor:
            row |= _on_inductor(trained, reference, eager, device, rounds, say)
        else:
            row["our_bytes"] = exact.held()
            torch.compiler.reset()
            cut = Training(trained, partial(by_ours, backend="eager", min_cut=True), device)
            cut.course(2)
            row["our_min_cut_bytes"] = cut.held()
        backend = "inductor" if inductor else "eager"
        row |= varied(trained, device, backend=backend, rounds=2 if inductor else 1, say=say) if trained.sizes else {}
    limits = {**row, "stock_bytes": math.inf} if trained.unrolled_by_stock else row
    return ModelFigure(**row, problem="; ".join([*problems, *_broken_promises(limits, held=trained.by_stock)]))


def _broken_promises(row: dict[str, Any], *, held: bool = True) -> list[str]:
    """Return a sentence for each limit that the errors and bytes in ``row`` exceed.

    ``row`` has fields of `ModelFigure`. If ``held`` is false, bytes are not compared with eager's. Pass false for a
    model with second derivatives, because the partitioner does not choose the values that are saved for second
    derivatives.
    """
    sentences = []
    if row.get("within") is False:
        pairs = [
            (kind, row[f"our_{kind}_error"], row.get(f"stock_{kind}_error", math.nan))
            for kind in ("loss", "gradient", "buffer")
        ]
        errors = "; ".join(f"{kind} {mine:.1f}, torch.compile's {its:.1f}" for kind, mine, its in pairs)
        sentences.append(f"errors on Inductor: {errors}")
    if row.get("sizes_wrong"):
        sentences.append(f"at the sizes {', '.join(map(str, row['sizes_wrong']))} the results differ from eager's")
    for name in ("our_bytes", "our_min_cut_bytes") if held else ():
        if row[name] > row["eager_bytes"]:
            sentences.append(f"{name} is {row[name]}, eager's is {row['eager_bytes']}")
    if row["our_min_cut_bytes"] > MOST * row.get("stock_bytes", math.inf):
        sentences.append(f"our_min_cut_bytes is {row['our_min_cut_bytes']}, torch.compile's is {row['stock_bytes']}")
    return sentences


def _on_inductor(
    trained: Trained,
    reference: Course,
    eager: Training,
    device: torch.device,
    rounds: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure the fields of `ModelFigure` that need Inductor.

    The model is trained with our default partitioner, with our min-cut partitioner and with ``torch.compile``. Then
    steps of three trainings are timed in turns: with our min-cut partitioner, with ``torch.compile``, and in eager.
    """
    say("eager in float64")
    exact = train(trained, eagerly, device, dtype=torch.float64)
    drifts, nbytes, errors, trainings = {}, {}, {}, {"eager": eager}
    wraps: dict[str, Wrap] = {"default": by_ours, "torch.compile": by_stock, "aotlab": partial(by_ours, min_cut=True)}
    if not trained.by_stock:
        del wraps["torch.compile"]
    for name, wrap in wraps.items():
        say({"default": "aotlab on Inductor", "aotlab": "aotlab on Inductor, min-cut"}.get(name, name))
        trainings[name] = Training(trained, wrap, device)
        drifts[name] = trainings[name].course().drift(exact)
        nbytes[name] = trainings[name].held()
        errors[name] = errors_of_steps(trained, trainings[name], device)
    ours = errors["default"] | errors["aotlab"]
    stock = errors["torch.compile"] if trained.by_stock else errors_of_steps(trained, eager, device)
    say("steps in turns")
    del trainings["default"]
    batch = eager.batch()
    cases = [Case(name=name, call=partial(training.step, batch)) for name, training in trainings.items()]
    result = compare(cases, rounds=rounds, warmup=3, sample_ns=50_000_000, device=device, again="aotlab")
    assert result.noise is not None
    row = {
        **_in_units("our", ours),
        "within": ours.is_within(stock),
        "our_drift": max(drifts["default"], drifts["aotlab"]),
        "eager_drift": reference.drift(exact),
        "our_bytes": nbytes["default"],
        "our_min_cut_bytes": nbytes["aotlab"],
        "over_eager": result.ratio("aotlab", "eager").median,
        "again": result.noise.median,
    }
    if trained.by_stock:
        ratio = result.ratio("aotlab", "torch.compile")
        row |= {"step": ratio.median, "step_p10": ratio.p10, "step_p90": ratio.p90, **_in_units("stock", stock)}
        row |= {"stock_drift": drifts["torch.compile"], "stock_bytes": nbytes["torch.compile"]}
    return row


def _in_units(whose: str, errors: Errors) -> dict[str, float]:
    unit = torch.finfo(torch.float32).eps
    return {
        f"{whose}_loss_error": errors.loss / unit,
        f"{whose}_gradient_error": errors.gradients / unit,
        f"{whose}_largest_gradient_error": errors.largest_gradients / unit,
        f"{whose}_buffer_error": errors.buffers / unit,
    }


def measure(
    models: Sequence[Trained], device: torch.device, *, inductor: bool, rounds: int, say: Callable[[str], None]
) -> Iterator[ModelFigure]:
    """Measure the models one after another. ``say`` receives progress messages."""
    for number, trained in enumerate(models, 1):

        def say_of_it(text: str, where: str = f"{number}/{len(models)} {trained.name}") -> None:
            say(f"{where}: {text}")

        try:
            yield figure(trained, device, inductor=inductor, rounds=rounds, say=say_of_it)
        except Exception as error:  # noqa: BLE001  # an exception is a result and does not end the benchmark
            problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
            yield ModelFigure(model=trained.name, description=trained.description, problem=problem)


def table(figures: Sequence[ModelFigure]) -> pd.DataFrame:
    """Return a table of the figures: memory in MiB, errors in units of float32's epsilon."""
    words = {True: "yes", False: "NO", None: None}
    return pd.DataFrame(
        [
            {
                "model": f.model,
                "parameters": f.parameters,
                "graphs": f.graphs,
                "breaks": f.breaks,
                "ran eagerly": f.eager_calls,
                "loss": f"{f.first_loss:.3f} → {f.last_loss:.3f}",
                "as eager": words[f.same],
                "errors: loss": f.our_loss_error,
                "stock's loss": f.stock_loss_error,
                "gradients": f.our_gradient_error,
                "stock's gradients": f.stock_gradient_error,
                "largest": f.our_largest_gradient_error,
                "stock's largest": f.stock_largest_gradient_error,
                "buffers": f.our_buffer_error,
                "stock's buffers": f.stock_buffer_error,
                "within": words[f.within],
                "drift": f.our_drift,
                "stock's drift": f.stock_drift,
                "eager's drift": f.eager_drift,
                "held MiB: eager": f.eager_bytes / 2**20,
                "upstream's min-cut": f.stock_bytes / 2**20,
                "our default": f.our_bytes / 2**20,
                "our min-cut": f.our_min_cut_bytes / 2**20,
                "step / stock's": f.step,
                "p10": f.step_p10,
                "p90": f.step_p90,
                "step / eager's": f.over_eager,
                "A/A": f.again,
                "sizes alike": f"{f.sizes_alike} of {f.sizes}" if f.sizes else None,
                "compiled": f.sizes_our_compilations if f.sizes else None,
                "stock compiled": f.sizes_stock_compilations if f.sizes else None,
                "eager %": 100 * f.sizes_eager_share,
                "cold s": f.sizes_our_seconds,
                "stock's cold s": f.sizes_stock_seconds,
                "cold / stock's": f.sizes_ratio,
                "cold A/A": f.sizes_again,
            }
            for f in figures
        ]
    )


def markdown(figures: Sequence[ModelFigure]) -> str:
    """Return the tables of RESULTS.md: the most important columns, and times only if the noise was small."""

    def number(value: float, digits: int = 2) -> str:
        return "–" if math.isnan(value) else f"{value:,.{digits}f}"

    rows = {
        "model": [f.model for f in figures],
        "parameters": [f"{f.parameters:,}" for f in figures],
        "graphs": [str(f.graphs) for f in figures],
        "loss, first → tenth step": [f"{f.first_loss:.3f} → {f.last_loss:.3f}" for f in figures],
        "error: `torch.compile`": [number(f.stock_gradient_error, 1) for f in figures],
        "ours": [number(f.our_gradient_error, 1) for f in figures],
        "held, MiB: eager": [number(f.eager_bytes / 2**20) for f in figures],
        "`torch.compile`": [number(f.stock_bytes / 2**20) for f in figures],
        "ours, min-cut": [number(f.our_min_cut_bytes / 2**20) for f in figures],
        "ours / `torch.compile`'s": [number(f.our_min_cut_bytes / f.stock_bytes) for f in figures],
        "step / `torch.compile`'s": [number(f.step) if f.is_quiet else "–" for f in figures],
        "step / eager's": [number(f.over_eager) if f.is_quiet else "–" for f in figures],
    }
    with_sizes = [f for f in figures if f.sizes]
    of_sizes = {
        "model": [f.model for f in with_sizes],
        "sizes as eager": [f"{f.sizes_alike} of {f.sizes}" for f in with_sizes],
        "compiled: ours": [str(f.sizes_our_compilations) for f in with_sizes],
        "`torch.compile`": [str(f.sizes_stock_compilations or "–") for f in with_sizes],
        "calls run eagerly": [f"{f.sizes_eager_share:.0%}" for f in with_sizes],
        "s from cold: ours": [number(f.sizes_our_seconds, 1) if is_quiet(f.sizes_again) else "–" for f in with_sizes],
        "theirs": [number(f.sizes_stock_seconds, 1) if is_quiet(f.sizes_again) else "–" for f in with_sizes],
    }
    return "\n\n".join(map(_markdown_table, [rows, of_sizes] if with_sizes else [rows]))


def _markdown_table(columns: dict[str, list[str]]) -> str:
    rules = ["---" if name in ("model", "loss, first → tenth step") else "---:" for name in columns]
    rows = [list(columns), rules, *zip(*columns.values(), strict=True)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def print_figures(figures: Sequence[ModelFigure], where: dict[str, str], out: TextIO, *, as_markdown: bool) -> None:
    """Print the environment, the table, and then the problems and the reasons for eager calls."""
    print("\n".join(f"{key:>7}: {value}" for key, value in where.items()), file=out)
    print(
        f"\n{STEPS} steps of AdamW each.\n"
        "'as eager': on the eager backend, losses and final state equal eager's bit for bit.\n"
        "'errors': of ten single steps on Inductor, relative to float64, in units of float32's epsilon. Each step\n"
        "starts from the current state of eager's training. For the loss and the buffers, the largest error of\n"
        "the ten steps; for the gradients, the median, and the largest in a column of its own. If rounding\n"
        "changes the sign of a ReLU's input, gradients jump, in eager too.\n"
        "'within': the errors are at most twice torch.compile's (the largest gradient error is not compared), or\n"
        "within the default of assert_close.\n"
        "'drift': the difference of losses from float64's if each trains independently. Batch norm amplifies it,\n"
        "in eager too. Inductor draws eager's random numbers.\n"
        "'held': MiB between forward and backward, while only the loss is alive, on Inductor if it was measured.\n"
        "torch.compile's partitioner is upstream's min-cut.\n"
        "Steps (ours: min-cut) took turns in one run. p10 and p90 belong to the first ratio. A/A compares ours\n"
        "with itself.\n"
        "'sizes alike': how many batches of twelve sizes gave eager's loss, gradients and buffers: on the eager\n"
        "backend bit for bit, on Inductor with at most twice the largest error of torch.compile and eager.\n"
        "'compiled': the compilations in twelve steps of these sizes. 'eager %': the share of our calls that ran\n"
        "eagerly.\n"
        "'cold s': the seconds of these steps with empty caches, ours (min-cut) and torch.compile (aot_eager if\n"
        "our backend is eager) in turns.\n",
        file=out,
    )
    shown = table(figures).dropna(axis=1, how="all")
    text = shown.to_string(index=False, float_format=lambda number: f"{number:.2f}", na_rep="-")
    print(markdown(figures) if as_markdown else text, file=out)
    for f in figures:
        for reason in f.why:
            print(f"\n{f.model} ran eagerly: {reason}", file=out)
        if f.problem:
            print(f"\n{f.model}: {f.problem}", file=out)


def to_json(figures: Sequence[ModelFigure], where: dict[str, str]) -> str:
    """Return the figures as JSON. NaN becomes null."""
    rows = [
        {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in asdict(f).items()}
        for f in figures
    ]
    return json.dumps({"machine": where, "models": rows}, indent=2) + "\n"


def from_json(texts: Sequence[str]) -> list[ModelFigure]:
    """Read figures that `to_json` wrote in several runs. If a model appears in several texts, the last text counts."""
    rows = {row["model"]: row for text in texts for row in json.loads(text)["models"]}
    floats = {each.name for each in fields(ModelFigure) if each.type == "float"}
    figures = []
    for row in rows.values():
        values = {key: math.nan if value is None and key in floats else value for key, value in row.items()}
        wrong = tuple([tuple(size) for size in row.get("sizes_wrong", ())])
        figures.append(ModelFigure(**values | {"why": tuple(row["why"]), "sizes_wrong": wrong}))
    return figures


def main(argv: Sequence[str], out: TextIO | None = None) -> int:
    """Run ``aotlab bench models ARGV``; return 1 if a model has a problem, 130 after Ctrl-C, and else 0."""
    names = [trained.name for trained in trained_models()]
    parser = argparse.ArgumentParser(prog="aotlab bench models", description="Train real models beside eager.")
    parser.add_argument("--only", metavar="NAME", nargs="+", choices=names, help=", ".join(names))
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor", help="default: inductor")
    parser.add_argument("--small", action="store_true", help="the sizes of the tests")
    parser.add_argument("--no-sizes", action="store_true", help="leave out the batches of twelve sizes")
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="of timing (default: 20)")
    parser.add_argument("--markdown", action="store_true", help="print the tables of RESULTS.md")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there as well, after each model")
    parser.add_argument(
        "--with", type=Path, metavar="PATH", nargs="+", default=[], dest="others",
        help="show the figures of other runs' JSON as well; models that are there are not measured again",
    )  # fmt: skip
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    options = parser.parse_args(argv)
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:6.1f} s] {text}", file=sys.stderr, flush=True)

    from aotlab.maintenance.bench.suite import machine

    device, inductor = torch.device(options.device), options.backend == "inductor"
    figures = from_json([path.read_text() for path in options.others])
    there = {each.model for each in figures}
    models = [
        replace(trained, sizes=()) if options.no_sizes else trained
        for trained in trained_models(small=options.small)
        if trained.name not in there and (options.only is None or trained.name in options.only)
    ]
    where = machine(device)
    is_whole = True
    try:
        for each in measure(models, device, inductor=inductor, rounds=options.rounds, say=say):
            figures.append(each)
            if options.json is not None:
                options.json.write_text(to_json(figures, where))
    except KeyboardInterrupt:
        is_whole = False
        say("interrupted; what was measured so far:")
    figures.sort(key=lambda each: names.index(each.model))
    print_figures(figures, where, sys.stdout if out is None else out, as_markdown=options.markdown)
    if not is_whole:
        return 130
    return 1 if any(each.problem for each in figures) else 0
