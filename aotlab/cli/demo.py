"""``aotlab demo``: two real programs through the whole pipeline, and what the report says of them.

The first is what most people train: a small transformer encoder, here one that fills in masked bytes of a text, with
loss, backward and optimizer. The second is what makes AOTAutograd difficult: a function that gets one tensor twice,
writes to it through a view under ``no_grad``, and returns an input, a view of an input and two views of one
intermediate. Both are traced and compiled by our own engine, verified against eager in everything that a caller can
observe, and timed beside eager and stock ``torch.compile``, all in this run.
"""

from __future__ import annotations

import itertools
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

import pandas as pd
import torch
from torch import nn

from aotlab.bench.programs import transformer_encoder
from aotlab.bench.timing import Comparison, compare, tensors_in, training_case
from aotlab.errors import UsageError
from aotlab.frontends import api
from aotlab.rehearse import RehearsalBackend
from aotlab.report import Report, TimingRow
from aotlab.report.text import duration
from aotlab.verification import verify

Tensors = tuple[torch.Tensor, ...]
Function = Callable[..., object]
Results = dict[str, torch.Tensor]

#: What the transformer learns to complete: 8 lines of 32 bytes.
TEXT = (
    "A tensor is a window onto bytes, and two windows may look onto the same bytes; whoever writes "
    "through one of them changes what the other shows. A compiler that wants to move work around "
    "has to know of every such pair, and give back to its caller exactly what eager would have."
)
_BATCH, _LENGTH, _WIDTH = 8, 32, 64

#: How many training steps the transformer makes.
STEPS = 3

_ROUNDS, _SAMPLE_NS = 20, 10_000_000

#: A machine with other work to do can be a hundred times slower; each of the four comparisons then stops after this.
_LIMIT_NS = 6_000_000_000


class ByteModel(nn.Module):
    """A transformer encoder over bytes; called with bytes and targets it returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, _WIDTH)
        self.position = nn.Parameter(torch.randn(_LENGTH, _WIDTH) * 0.02)
        self.encoder = transformer_encoder(2, _WIDTH)
        self.head = nn.Linear(_WIDTH, 256)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of ``targets`` given ``inputs``, both of shape (batch, length) and int64."""
        hidden = self.encoder(self.embedding(inputs) + self.position)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def mutate_and_alias(state: torch.Tensor, same_state: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Tensors:
    """Mutate ``state`` through a view, and return an input, a view of one, and two views of an intermediate."""
    hidden = torch.tanh(x @ weight)
    with torch.no_grad():
        state[0].mul_(0.9).add_(hidden.mean(0), alpha=0.1)
    scaled = hidden * same_state.sum()
    return x, weight.t(), scaled[:, :2], scaled.t()


def masked_bytes(device: torch.device) -> Tensors:
    """Make the transformer's batch from `TEXT`: bytes of which every fifth is masked by 0, and all of them."""
    targets = torch.tensor(list(TEXT.encode()[: _BATCH * _LENGTH]), device=device).reshape(_BATCH, _LENGTH)
    inputs = targets.clone()
    inputs[:, ::5] = 0
    return inputs, targets


def train(loss_of: Function, model: nn.Module, batch: Tensors) -> Results:
    """Run `STEPS` training steps of ``model``; return their losses and the parameters that they lead to."""
    # SGD, whose steps are proportional to the gradients. Adam's are not: it would blow up the rounding of gradients
    # that are zero but for rounding (those of the attention's key bias), and nothing could be compared.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    results: Results = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(*batch)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        optimizer.step()
        results[f"loss of step {step + 1}"] = loss.detach()
    for name, parameter in model.named_parameters():
        results[f"{name} after step {STEPS}"] = parameter.detach().clone()
    return results


def call_and_backward(function: Function, arguments: Tensors, names: Sequence[str]) -> Results:
    """Call ``function`` once, differentiate what can be, and return what became of the named arguments."""
    outputs = tensors_in(function(*arguments))
    torch.autograd.backward([output.sum() for output in outputs if output.requires_grad])
    results: Results = {}
    for name, argument in zip(names, arguments, strict=True):
        results[f"{name} afterwards"] = argument.detach().clone()
        if argument.grad is not None:
            results[f"gradient of {name}"] = argument.grad.clone()
    return results


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """One of the demo's programs.

    Attributes
    ----------
    title
        A line for the tables.
    function
        The function or module that is compiled.
    arguments
        What it is called with.
    leaves
        The tensors with respect to which it is differentiated.
    job
        The program as a user runs it, given the function or a compiled form of it; returns what to compare.
    """

    title: str
    function: Function
    arguments: Tensors
    leaves: Tensors
    job: Callable[[Function], Results]


def programs(device: torch.device) -> tuple[Program, ...]:
    """Make the programs, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ByteModel().to(device)
        state, x, weight = torch.randn(2, 4).to(device), torch.randn(6, 3).to(device), torch.randn(3, 4).to(device)
    weight.requires_grad_()
    batch = masked_bytes(device)
    arguments = (state, state, x, weight)
    return (
        Program(
            title=f"A training step of a transformer encoder: {STEPS} x forward, loss, backward, SGD",
            function=model,
            arguments=batch,
            leaves=tuple(model.parameters()),
            job=lambda loss_of: train(loss_of, model, batch),
        ),
        Program(
            title="A function full of mutation and aliasing: mutate_and_alias(state, state, x, weight)",
            function=mutate_and_alias,
            arguments=arguments,
            leaves=(weight,),
            job=lambda function: call_and_backward(function, arguments, ("state", "same_state", "x", "weight")),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What became of one program: its ``frame`` in the report, its ``timings``, and what went wrong as sentences."""

    program: Program
    frame: str | None
    timings: tuple[TimingRow, ...]
    failures: tuple[str, ...]


def run(device: str, backend: str, json_path: Path | None, html_path: Path | None, out: TextIO) -> int:
    """Run the demo.

    Parameters
    ----------
    device
        ``"cpu"``, ``"cuda"``, ``"cuda:N"``, or ``"auto"`` for cuda if there is one and cpu if not.
    backend
        ``"inductor"`` or ``"eager"``.
    json_path, html_path
        Where to write the report; not written where None.
    out
        Where the tables are printed. Progress goes to stderr.

    Returns
    -------
    int
        0 if both programs were compiled and equal to eager, 1 if not, 130 after an interrupt.

    Raises
    ------
    UsageError
        There is no such device, or a path is in no existing folder.
    """
    where = _device(device)
    for path in (json_path, html_path):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"{path} cannot be written: there is no folder {path.absolute().parent}")
    try:
        report, outcomes = _collect(where, backend)
    except KeyboardInterrupt:
        print("aotlab: interrupted, nothing was written", file=sys.stderr)
        return 130
    _print(report, outcomes, out)
    if html_path is not None:
        print(f"HTML report: {report.to_html(html_path)}", file=out)
    if json_path is not None:
        json_path.write_text(report.to_json(), encoding="utf-8")
        print(f"JSON report: {json_path}", file=out)
    return 1 if any(outcome.failures for outcome in outcomes) else 0


def rehearse(card: str, *, json_path: Path | None, html_path: Path | None, out: TextIO) -> int:
    """Compile both programs for a card that is not here, run them on the CPU, and print the card's kernels.

    Returns 1 if what they computed is not eager's. Raises `UsageError` without Triton, and for an unknown card.
    """
    cpu, wrong = torch.device("cpu"), []
    with Report.record(f"aotlab demo, rehearsed for {card}") as recording:
        for ours, theirs in zip(programs(cpu), programs(cpu), strict=True):
            found = ours.job(api.compile(ours.function, backend=RehearsalBackend(card, draws="eager")))
            rows = _job_rows(found, theirs.job(theirs.function), "inductor")
            wrong += [f"{_name(ours)}: {row['sentence']}" for row in rows if not row["equal"]]
    report = recording.report()
    kernels = report.kernels[report.kernels["language"] == "triton"]
    print(f"Triton kernels for {card}, compiled here; the programs ran on the CPU.\n", file=out)
    with pd.option_context("display.max_colwidth", 48):
        print(kernels.drop(columns=["graph", "graph_name", "language", "source"]).to_string(index=False), file=out)
    for text in wrong:
        print(f"DIFFERENT: {text}", file=out)
    if html_path is not None:
        print(f"HTML report: {report.to_html(html_path)}", file=out)
    if json_path is not None:
        json_path.write_text(report.to_json(), encoding="utf-8")
    return 1 if wrong else 0


def _collect(device: torch.device, backend: str) -> tuple[Report, list[Outcome]]:
    """Compile, run, verify and time both programs."""
    ours, theirs = programs(device), programs(device)
    say = _progress(3 * len(ours))
    compiled = [api.compile(program.function, backend=backend) for program in ours]
    failures: list[list[str]] = [[] for _ in ours]
    results: dict[str, Results] = {}
    with Report.record("aotlab demo") as recording:
        for program, function, failed in zip(ours, compiled, failures, strict=True):
            slow = " (with a fresh cache the first takes up to a minute)" if backend == "inductor" else ""
            say(f"compiling and running {_name(program)}{slow}")
            with _noted(failed, f"{_name(program)} could not be run"):
                results[_name(program)] = program.job(function)
    report = recording.report()
    outcomes = []
    for index, program in enumerate(ours):
        name, failed = _name(program), failures[index]
        frame = next((frame.name for frame in report.frames if name in frame.function.split(".")), None)
        timings: tuple[TimingRow, ...] = ()
        if not failed:
            # Eager is equal to eager: what was not compiled would verify.
            failed += _not_compiled(report, frame, name, backend)
            say(f"verifying {name} against eager")
            with _noted(failed, f"{name} could not be verified"):
                rows = [*_job_rows(results[name], theirs[index].job(theirs[index].function), backend)]
                rows += _verify_rows(program, backend)
                report = report.with_verification([{**row, "engine": "aotlab", "frame": frame} for row in rows])
                failed += [f"{name}: {row['sentence']}" for row in rows if not row["equal"]]
            say(f"timing {name} beside eager and upstream")
            with _noted(failed, f"{name} could not be timed"):
                timings = tuple(_timings(program, compiled[index], backend, device).rows(frame=frame))
                report = report.with_timings(timings)
        outcomes.append(Outcome(program=program, frame=frame, timings=timings, failures=tuple(failed)))
    return report, outcomes


def _not_compiled(report: Report, frame: str | None, name: str, backend: str) -> list[str]:
    """Say what did not go through the engine although nothing was raised."""
    rows = [row for row in report.frames if row.name == frame]
    if not rows or not rows[0].calls.compiled or rows[0].calls.eager:
        eager = rows[0].calls.eager if rows else 0
        reasons = "".join(f"; {refusal.message}" for row in rows for refusal in row.refusals)
        return [f"{name} was not compiled, or not always: {eager} calls ran eagerly{reasons}"]
    kernels = report.kernels
    if backend == "inductor" and not (kernels["frame"] == frame).any():
        return [f"{name} was compiled by Inductor to no kernel at all"]
    return []


def _name(program: Program) -> str:
    return getattr(program.function, "__name__", type(program.function).__name__)


def _device(text: str) -> torch.device:
    available = torch.cuda.is_available()
    device = torch.device(("cuda" if available else "cpu") if text == "auto" else text)
    if device.type == "cuda" and not available:
        raise UsageError("there is no cuda device here (torch.cuda.is_available() is False); use --device cpu")
    return device


def _progress(steps: int) -> Callable[[str], None]:
    """Make a function that prints a line on stderr: how far the demo is, after how long, and what comes."""
    begin = time.monotonic()
    counter = itertools.count(1)

    def say(text: str) -> None:
        print(f"[{next(counter)}/{steps}, {time.monotonic() - begin:5.1f} s] {text}", file=sys.stderr, flush=True)

    return say


@contextmanager
def _noted(failures: list[str], what: str) -> Iterator[None]:
    """Add an error to ``failures``, with its traceback on stderr, in place of ending the demo."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # the demo shows what became of the other program as well
        traceback.print_exc()
        failures.append(f"{what}: {type(error).__name__}: {error}")


def _job_rows(found: Results, expected: Results, backend: str) -> Iterator[dict[str, object]]:
    """Compare what the job left behind with what it leaves in eager, by the tolerance rule of the backend."""
    tolerance = 0.0 if backend == "eager" else None  # None: assert_close's defaults
    for name, value in expected.items():
        try:
            torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, equal_nan=True)
            sentence = ""
        except AssertionError as error:
            sentence = f"{name} differs from eager: {' '.join(str(error).split())}"
        yield {
            "kind": "job",
            "subject": name,
            "equal": not sentence,
            "expected": _summary(value),
            "actual": _summary(found[name]),
            "sentence": sentence,
        }


def _summary(tensor: torch.Tensor) -> str:
    if tensor.numel() == 1:
        return f"{tensor.item():.6g}"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}, norm {tensor.double().norm().item():.6g}"


def _verify_rows(program: Program, backend: str) -> Iterator[dict[str, object]]:
    found = verify(program.function, *program.arguments, backend=backend)
    for row in found.comparisons:
        yield {
            "kind": row.kind,
            "subject": row.subject,
            "equal": row.equal,
            "expected": row.expected,
            "actual": row.actual,
            "sentence": row.sentence,
            "call": row.call,
        }


def _timings(program: Program, compiled: Function, backend: str, device: torch.device) -> Comparison:
    """Time forward, backward and both together under all three engines, in turns."""
    stock = torch.compile(program.function, backend="aot_eager" if backend == "eager" else backend)
    engines: dict[str, Function] = {"eager": program.function, "upstream": stock, "aotlab": compiled}
    cases = [
        training_case(name, partial(function, *program.arguments), program.leaves) for name, function in engines.items()
    ]
    return compare(cases, rounds=_ROUNDS, sample_ns=_SAMPLE_NS, limit_ns=_LIMIT_NS, device=device, again="aotlab")


# --- what is printed ---------------------------------------------------------------------------------------------


def _print(report: Report, outcomes: Sequence[Outcome], out: TextIO) -> None:
    environment = report.environment
    print(f"aotlab {environment.aotlab}, torch {environment.torch}, Python {environment.python}", file=out)
    print(f"on {environment.platform}; {', '.join(map(str, environment.devices))}", file=out)
    for number, outcome in enumerate(outcomes, start=1):
        print(f"\n{'=' * 100}\n{number}. {outcome.program.title}\n{'=' * 100}", file=out)
        for title, table in _tables(report, outcome):
            # As objects: pandas' own types for missing values print "<NA>", whatever they are told.
            text = table.astype(object).where(table.notna(), "").to_string(index=False) if len(table) else "(none)"
            print(f"\n{title}\n\n{text}", file=out)
    print(f"\n{'=' * 100}\n\n{report.verdict}", file=out)
    for outcome in outcomes:
        for failure in outcome.failures:
            print(f"FAILED: {failure}", file=out)


def _tables(report: Report, outcome: Outcome) -> Iterator[tuple[str, pd.DataFrame]]:
    """Choose the columns of the report's tables that say most, for one program."""

    def of(table: pd.DataFrame, *columns: str) -> pd.DataFrame:
        return table.loc[table["frame"] == outcome.frame, list(columns)]

    inputs = of(
        report.inputs, "name", "kind", "dtype", "shape", "requires_grad", "storage", "duplicate_of", "mutation_type"
    )
    yield "Inputs: what they are, which are the same tensor, how they were mutated", inputs
    outputs = of(report.outputs, "name", "dtype", "shape", "requires_grad", "storage", "output_type", "relation")
    yield "Outputs: which alias what", outputs
    stages = of(report.stages, "stage", "duration_ns", "nodes", "summary")
    yield (
        "Stages of the pipeline",
        stages.assign(duration_ns=stages["duration_ns"].map(duration)).rename(columns={"duration_ns": "time"}),
    )
    kernels = of(report.kernels, "graph_name", "kind", "language", "name")
    # A library function is called many times, a kernel of Inductor's own stands there once.
    counted = kernels.groupby(list(kernels.columns), sort=False).size().reset_index(name="count")
    yield f"Kernels ({len(kernels)})", counted
    yield (
        "Timings: medians measured in turns, and their ratios; A/A is aotlab measured twice, which shows the noise",
        _timing_table(outcome.timings),
    )
    yield "Verification against eager, by what was compared", _verification_table(report, outcome.frame)


def _timing_table(timings: Sequence[TimingRow]) -> pd.DataFrame:
    rows = []
    for phase, group in itertools.groupby(timings, key=lambda row: row.phase):
        found = {row.engine: row for row in group}
        ratios = {ratio.over: str(ratio) for ratio in found["aotlab"].ratios}
        medians = {name: duration(row.median_ns) for name, row in found.items()}
        beside = {f"aotlab / {other}": ratio for other, ratio in ratios.items()}
        rows.append({"phase": phase, **medians, **beside, "A/A": f"{found['aotlab'].again:.2f}"})
    return pd.DataFrame(rows)


def _verification_table(report: Report, frame: str | None) -> pd.DataFrame:
    rows = report.verification
    rows = rows[rows["frame"] == frame]
    counted = rows.groupby("kind", sort=False)["equal"].agg(compared="size", equal="sum").reset_index()
    return counted.rename(columns={"kind": "what"})
