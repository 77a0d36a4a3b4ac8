"""The command ``aotlab demo``: run two real programs through the whole pipeline and print the report.

The first program is a typical training job: a small transformer encoder that fills in masked bytes of a text, with
loss, backward and optimizer. The second program shows the difficult cases for AOTAutograd. It is a function that
receives one tensor twice, writes to it through a view under ``no_grad``, and returns an input, a view of an input and
two views of one intermediate. Our own engine traces and compiles both programs. Everything that a caller can observe
is verified against eager, and the times are measured beside eager and stock ``torch.compile`` in the same run.
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

from aotlab.bench.timing import FEWEST_ROUNDS, Comparison, compare, tensors_in, training_case
from aotlab.errors import UsageError
from aotlab.frontends import api
from aotlab.rehearse import RehearsalBackend
from aotlab.report import Report, TimingRow
from aotlab.report.text import duration
from aotlab.verification import verify

Tensors = tuple[torch.Tensor, ...]
Function = Callable[..., object]
Results = dict[str, torch.Tensor]

#: The text that the transformer learns to complete: 8 lines of 32 bytes.
TEXT = (
    "A tensor is a window onto bytes, and two windows may look onto the same bytes; whoever writes "
    "through one of them changes what the other shows. A compiler that wants to move work around "
    "has to know of every such pair, and give back to its caller exactly what eager would have."
)
_BATCH, _LENGTH, _WIDTH = 8, 32, 64

#: The number of training steps of the transformer.
STEPS = 3

_ROUNDS, _SAMPLE_NS = 20, 10_000_000

#: The time limit, in ns, for timing one program with all engines. A busy machine can be a hundred times slower. The
#: timing then stops after this time, or after `FEWEST_ROUNDS` rounds if these rounds take longer.
_LIMIT_NS = 6_000_000_000


class ByteModel(nn.Module):
    """A transformer encoder over bytes. Called with bytes and targets, it returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, _WIDTH)
        self.position = nn.Parameter(torch.randn(_LENGTH, _WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(_WIDTH, 4, 2 * _WIDTH, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, 256)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of ``targets`` given ``inputs``, both of shape (batch, length) and int64."""
        hidden = self.encoder(self.embedding(inputs) + self.position)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def mutate_and_alias(state: torch.Tensor, same_state: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Tensors:
    """Mutate ``state`` through a view; return an input, a view of an input, and two views of an intermediate."""
    hidden = torch.tanh(x @ weight)
    with torch.no_grad():
        state[0].mul_(0.9).add_(hidden.mean(0), alpha=0.1)
    scaled = hidden * same_state.sum()
    return x, weight.t(), scaled[:, :2], scaled.t()


def masked_bytes(device: torch.device) -> Tensors:
    """Return the transformer's batch from `TEXT`: inputs with every fifth byte masked by 0, and targets."""
    targets = torch.tensor(list(TEXT.encode()[: _BATCH * _LENGTH]), device=device).reshape(_BATCH, _LENGTH)
    inputs = targets.clone()
    inputs[:, ::5] = 0
    return inputs, targets


def train(loss_of: Function, model: nn.Module, batch: Tensors) -> Results:
    """Run `STEPS` training steps of ``model``; return the losses and the final parameters."""
    # SGD's steps are proportional to the gradients. Adam's are not: it would amplify the rounding errors of gradients
    # that are zero except for rounding (such as the gradients of the attention's key bias), and the results could not
    # be compared.
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
    """Call ``function`` once, differentiate its outputs, and return the final values and gradients of the arguments."""
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
        The program's title in the tables.
    function
        The function or module that is compiled.
    arguments
        The arguments of the call.
    leaves
        The tensors for which gradients are computed.
    job
        Runs the program as a user would: called with ``function`` or a compiled form of it, it returns the results to
        compare, by name.
    """

    title: str
    function: Function
    arguments: Tensors
    leaves: Tensors
    job: Callable[[Function], Results]


def programs(device: torch.device) -> tuple[Program, ...]:
    """Return the two programs. Each call makes the same programs."""
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
    """The result of one program.

    ``frame`` is the name of the program's frame in the report, or None if the report has no frame for the program.
    ``timings`` are the program's rows in the table of timings. ``failures`` are sentences about everything that failed
    or differed from eager.
    """

    program: Program
    frame: str | None
    timings: tuple[TimingRow, ...]
    failures: tuple[str, ...]


def run(device: str, backend: str, json_path: Path | None, html_path: Path | None, out: TextIO) -> int:
    """Run the demo.

    Parameters
    ----------
    device
        ``"cpu"``, ``"cuda"``, ``"cuda:N"``, or ``"auto"``, which is cuda if available and otherwise cpu.
    backend
        ``"inductor"`` or ``"eager"``.
    json_path, html_path
        The paths for the report in each format. If a path is None, the report is not written in that format.
    out
        The stream on which the tables are printed. Progress goes to stderr.

    Returns
    -------
    int
        0 if both programs were compiled and are equal to eager, 1 if not, 130 after an interrupt.

    Raises
    ------
    UsageError
        The device does not exist, or the folder of a path does not exist.
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
    """Compile both programs for a GPU that this machine does not have, and print the kernels.

    The programs run on the CPU. Returns 1 if their results differ from eager's. Raises `UsageError` if Triton is
    missing or the card is unknown.
    """
    cpu, wrong = torch.device("cpu"), []
    with Report.record(f"aotlab demo, rehearsed for {card}") as recording:
        for ours, theirs in zip(programs(cpu), programs(cpu), strict=True):
            results = ours.job(api.compile(ours.function, backend=RehearsalBackend(card, draws="eager")))
            rows = _job_rows(results, theirs.job(theirs.function), "inductor")
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
            # A program that was not compiled equals eager, but this does not test the engine. So it is a failure.
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
    """Return one sentence if the program was not compiled, or only partly; otherwise an empty list."""
    rows = [row for row in report.frames if row.name == frame]
    if not rows or not rows[0].calls.compiled or rows[0].calls.eager:
        eager = rows[0].calls.eager if rows else 0
        reasons = "".join(f"; {refusal.message}" for row in rows for refusal in row.refusals)
        return [f"{name} was not compiled, or not always: {eager} calls ran eagerly{reasons}"]
    kernels = report.kernels
    if backend == "inductor" and not (kernels["frame"] == frame).any():
        return [f"{name} was compiled, but Inductor made no kernel for it"]
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
    """Return a function that prints a progress line on stderr: the step number, the elapsed time, and the next step."""
    begin = time.monotonic()
    counter = itertools.count(1)

    def say(text: str) -> None:
        print(f"[{next(counter)}/{steps}, {time.monotonic() - begin:5.1f} s] {text}", file=sys.stderr, flush=True)

    return say


@contextmanager
def _noted(failures: list[str], what: str) -> Iterator[None]:
    """If the ``with`` block raises, print the traceback on stderr and add a sentence to ``failures``; do not raise.

    ``what`` is the beginning of the sentence in ``failures``.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001  # the demo also shows the other program
        traceback.print_exc()
        failures.append(f"{what}: {type(error).__name__}: {error}")


def _job_rows(results: Results, expected: Results, backend: str) -> Iterator[dict[str, object]]:
    """Compare the ``results`` of a program's job with the results ``expected``, which come from eager.

    With the eager backend, they must be equal. Otherwise they may differ by `assert_close`'s default tolerances.
    """
    tolerance = 0.0 if backend == "eager" else None  # for None, assert_close uses its default tolerances
    for name, value in expected.items():
        try:
            torch.testing.assert_close(results[name], value, rtol=tolerance, atol=tolerance, equal_nan=True)
            sentence = ""
        except AssertionError as error:
            sentence = f"{name} differs from eager: {' '.join(str(error).split())}"
        yield {
            "kind": "job",
            "subject": name,
            "equal": not sentence,
            "expected": _summary(value),
            "actual": _summary(results[name]),
            "sentence": sentence,
        }


def _summary(tensor: torch.Tensor) -> str:
    if tensor.numel() == 1:
        return f"{tensor.item():.6g}"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}, norm {tensor.double().norm().item():.6g}"


def _verify_rows(program: Program, backend: str) -> Iterator[dict[str, object]]:
    verification = verify(program.function, *program.arguments, backend=backend)
    for row in verification.comparisons:
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
    """Time forward, backward and both together with all three engines, in turns."""
    stock = torch.compile(program.function, backend="aot_eager" if backend == "eager" else backend)
    engines: dict[str, Function] = {"eager": program.function, "upstream": stock, "aotlab": compiled}
    cases = [
        training_case(name, partial(function, *program.arguments), program.leaves) for name, function in engines.items()
    ]
    return compare(
        cases,
        rounds=_ROUNDS,
        sample_ns=_SAMPLE_NS,
        limit_ns=_LIMIT_NS,
        fewest=FEWEST_ROUNDS,
        device=device,
        again="aotlab",
    )


# --- what is printed ---------------------------------------------------------------------------------------------


def _print(report: Report, outcomes: Sequence[Outcome], out: TextIO) -> None:
    environment = report.environment
    print(f"aotlab {environment.aotlab}, torch {environment.torch}, Python {environment.python}", file=out)
    print(f"on {environment.platform}; {', '.join(map(str, environment.devices))}", file=out)
    for number, outcome in enumerate(outcomes, start=1):
        print(f"\n{'=' * 100}\n{number}. {outcome.program.title}\n{'=' * 100}", file=out)
        for title, table in _tables(report, outcome):
            # Without `astype`, pandas would print missing values of its nullable dtypes as "<NA>".
            text = table.astype(object).where(table.notna(), "").to_string(index=False) if len(table) else "(none)"
            print(f"\n{title}\n\n{text}", file=out)
    print(f"\n{'=' * 100}\n\n{report.verdict}", file=out)
    for outcome in outcomes:
        for failure in outcome.failures:
            print(f"FAILED: {failure}", file=out)


def _tables(report: Report, outcome: Outcome) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the report's tables for one program, with their most important columns."""

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
    # A library function has one row for each of its calls, and a kernel of Inductor has one row. So count equal rows.
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
        by_engine = {row.engine: row for row in group}
        ours = by_engine["aotlab"]
        medians = {name: duration(row.median_ns) for name, row in by_engine.items()}
        ratios = {f"aotlab / {ratio.over}": str(ratio) for ratio in ours.ratios} | {"A/A": f"{ours.again:.2f}"}
        rows.append({"phase": phase, **medians, **({"ratios": ours.incomparable} if ours.incomparable else ratios)})
    return pd.DataFrame(rows)


def _verification_table(report: Report, frame: str | None) -> pd.DataFrame:
    rows = report.verification
    rows = rows[rows["frame"] == frame]
    counted = rows.groupby("kind", sort=False)["equal"].agg(compared="size", equal="sum").reset_index()
    return counted.rename(columns={"kind": "what"})
