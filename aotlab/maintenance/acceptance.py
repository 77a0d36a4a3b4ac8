"""The command ``aotlab acceptance``: run all checks that need a GPU, in a few minutes, without Jupyter.

Each check compares results with eager on the device, or compares times or memory with eager's. A check that fails does
not stop the others. The results are written to ``acceptance.json`` and ``acceptance.html``. On a CPU the same checks
run, except the checks that need CUDA. The result lists these as left out.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from aotlab.bench.memory import measure_memory
from aotlab.bench.timing import Case, compare, tensors_in
from aotlab.errors import UsageError
from aotlab.frontends import api
from aotlab.maintenance.bench.courses import comparable
from aotlab.maintenance.bench.models import trained_models
from aotlab.maintenance.bench.programs import SMALL_PROGRAMS
from aotlab.maintenance.bench.suite import machine
from aotlab.maintenance.bench.training import measure
from aotlab.report.markup import Markup, element, join

#: The models that are trained with eager, aotlab and ``torch.compile``. If the packages for a model are missing, its
#: check is left out.
MODELS = ("LSTM", "GPT-2", "U-Net", "ResNet", "Llama", "PINN")
#: The relative difference from eager that a float32 result may have, because Inductor fuses ops. TF32 is off.
TOLERANCE = 1e-4

Figures = dict[str, "str | int | float | bool | None"]


class LeftOut(Exception):  # noqa: N818  # a signal
    """Raised by a check that cannot run on this device or with the installed packages. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check, which becomes one row of the page.

    ``what`` describes the check; it is the docstring of its function. ``state`` is "passed", "failed" or "left out",
    and ``note`` is the reason if the check did not pass. ``figures`` are the measured quantities by name. ``seconds``
    is the time that the check took.
    """

    name: str
    what: str
    state: str
    seconds: float
    figures: Figures = field(default_factory=dict)
    note: str = ""


def check_demo(device: torch.device) -> Figures:
    """Run ``aotlab demo``: training steps of a transformer and a function with mutation, verified and timed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "aotlab", "demo", "--device", str(device), "--html", f"{folder}/report.html"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"aotlab demo failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return {"lines printed": done.stdout.count("\n")}


def check_tests(device: torch.device) -> Figures:
    """Run the tests that are marked ``gpu``, if this is a checkout that contains them."""
    root = Path(__file__).parents[2]
    if device.type != "cuda":
        raise LeftOut("the tests need CUDA")
    # Collect only the files that contain tests marked ``gpu``. Other test files may need packages that are not
    # installed.
    files = [str(path) for path in sorted(root.glob("tests/**/test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    if not files:
        raise LeftOut("aotlab is installed without its tests")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--tier", "all", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=240, check=False)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode == 5 or "No module named" in done.stderr:
        raise LeftOut(last or done.stderr.strip()[-200:])
    if done.returncode:
        raise AssertionError(f"{last}\n{done.stdout[-2000:]}")
    return {"result": last}


def _dropout(x: Tensor, w: Tensor) -> Tensor:
    return functional.dropout((x @ w).relu(), 0.4).sum(0)


def _checkpointed(x: Tensor, w: Tensor) -> Tensor:
    result = checkpoint(_dropout, x, w, use_reentrant=False)
    assert isinstance(result, Tensor)
    return result * 2


def check_draws(device: torch.device) -> Figures:
    """Check that dropout draws eager's random numbers, also when a checkpoint recomputes its forward."""
    with comparable():
        for function in (_dropout, _checkpointed):
            results = [_step(each, device, seed=3) for each in (function, api.compile(function, backend="eager"))]
            _equal(results[0], results[1], f"{function.__name__} on the eager backend")
    # If Inductor draws its own random numbers, the backward must use the mask of the forward, and a seed must give the
    # same numbers twice.
    compiled = api.compile(_dropout, backend="inductor")
    first, again = _step(compiled, device, seed=3), _step(compiled, device, seed=3)
    _equal(first, again, "Inductor's numbers from one seed")
    x = torch.ones(512, device=device, requires_grad=True)
    dropped = api.compile(lambda x: functional.dropout(x, 0.5), backend="inductor")(x)
    (gradient,) = torch.autograd.grad(dropped.sum(), x)
    _equal([dropped.detach()], [gradient], "the masks of a dropout's forward and backward")
    share = float((dropped != 0).float().mean())
    assert 0.3 < share < 0.7, f"a dropout of half kept {share:.2f}"
    return {"kept by a dropout of 0.5": round(share, 3)}


def check_small_programs(device: torch.device) -> Figures:
    """Compile programs with mutation and aliases with Inductor; compare values, writes and shared memory with eager."""
    for program in SMALL_PROGRAMS:
        leaves = program.leaves(device, True)
        results = []
        for function in (program.function, api.compile(program.function, backend="inductor")):
            arguments = program.arguments(tuple(leaf.detach().clone().requires_grad_() for leaf in leaves))
            outputs = tensors_in(function(*arguments))
            shared = [
                [a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for b in (*arguments, *outputs)]
                for a in outputs
            ]
            results.append((outputs, arguments, shared))
        _near([*results[1][0], *results[1][1]], [*results[0][0], *results[0][1]], program.name)
        assert results[0][2] == results[1][2], f"{program.name}: other outputs share memory in aotlab than in eager"
    return {"programs": len(SMALL_PROGRAMS)}


def check_model(name: str, device: torch.device) -> Figures:
    """Train a model in eager, with aotlab and with torch.compile, and compare the results, memory and times.

    Fail if the losses or the final state differ from eager in one bit when aotlab uses its eager backend. Fail also if
    aotlab's errors on Inductor are too large, or if aotlab holds too many bytes for the backward.
    """
    (model,) = (replace(each, sizes=()) for each in trained_models(small=True) if each.name == name)
    (row,) = measure([model], device, inductor=True, rounds=4, say=_said)
    if "extra" in row.problem or "pip install" in row.problem or "No module" in row.problem:
        raise LeftOut(row.problem)
    if row.problem:
        raise AssertionError(row.problem)
    return {
        "graphs": row.graphs,
        "calls that ran eagerly": row.eager_calls,
        "step over eager": _rounded(row.over_eager),
        "step over torch.compile": _rounded(row.step),
        "saved bytes over eager's": _rounded(row.our_min_cut_bytes / row.eager_bytes),
    }


def _mlp(device: torch.device) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())]
    return nn.Sequential(*layers).to(device), torch.randn(64, 256, device=device)


def check_memory(device: torch.device) -> Figures:
    """Measure the peak memory of a training step of eager, torch.compile and aotlab."""
    model, x = _mlp(device)
    figures: Figures = {}

    def step(function: Callable[[Tensor], Tensor]) -> None:
        function(x).square().sum().backward()
        model.zero_grad(set_to_none=True)

    engines = {"eager": model, "torch.compile": torch.compile(model), "aotlab": api.compile(model, backend="inductor")}
    for name, function in engines.items():
        figures[f"{name}, peak bytes"] = measure_memory(partial(step, function), device=device, warmup=2).peak_bytes
    torch.compiler.reset()
    ours, eager = figures["aotlab, peak bytes"], figures["eager, peak bytes"]
    assert isinstance(ours, int) and isinstance(eager, int)  # noqa: PT018
    assert ours <= 1.1 * eager, f"a step takes {ours} bytes at its peak, eager's {eager}"
    return figures


def check_times(device: torch.device) -> Figures:
    """Time training steps of aotlab and eager in turns. On CUDA, measure the device's time with CUDA events too."""
    model, x = _mlp(device)
    compiled = api.compile(model, backend="inductor")

    def step(function: Callable[[Tensor], Tensor]) -> None:
        function(x).square().sum().backward()
        model.zero_grad(set_to_none=True)

    cases = [Case(name=name, call=partial(step, each)) for name, each in (("eager", model), ("aotlab", compiled))]
    result = compare(cases, rounds=10, device=device, again="aotlab")
    assert result.noise is not None
    figures: Figures = {
        "step over eager": _rounded(result.ratio("aotlab", "eager").median),
        "against itself": _rounded(result.noise.median),
    }
    if device.type == "cuda":
        for name, function in (("eager", model), ("aotlab", compiled)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(20):
                step(function)
            end.record()
            torch.cuda.synchronize(device)
            figures[f"{name}, ms by events"] = round(begin.elapsed_time(end) / 20, 4)
    return figures


#: The profiler's names of ops that copy values to the host. On a GPU, the host waits for such an op.
_READS = {f"aten::{name}" for name in ("item", "_local_scalar_dense", "is_nonzero", "nonzero", "equal")}


def check_synchronisation(device: torch.device) -> Figures:
    """Call compiled functions, forward and backward, in a mode in which a wait for the device raises an error."""
    model, x = _mlp(device)
    w = torch.randn(256, 256, device=device, requires_grad=True)
    for function, arguments in ((api.compile(model, backend="inductor"), (x,)), (_compiled(_dropout), (x, w))):
        for _ in range(2):
            function(*arguments).sum().backward()
        with waiting_is_an_error(device):
            function(*arguments).sum().backward()
    return {"compiled calls": 2}


@contextmanager
def waiting_is_an_error(device: torch.device) -> Iterator[None]:
    """Raise an error if the host waits for the device in the ``with`` block.

    On a CPU, raise an error if the block calls an op that would make the host wait on a GPU.
    """
    if device.type != "cuda":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            yield  # use the profiler, because a compiled call runs eagerly under a dispatch mode
        if read := sorted({event.name for event in profile.events()} & _READS):
            raise AssertionError(f"a compiled call runs ops that would make the host wait for a GPU: {', '.join(read)}")
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def check_streams(device: torch.device) -> Figures:
    """Call compiled functions on other CUDA streams, forward and backward."""
    if device.type != "cuda":
        raise LeftOut("it needs CUDA")
    model, x = _mlp(device)
    compiled = api.compile(model, backend="inductor")
    expected = [model(x).detach(), *torch.autograd.grad(model(x).sum(), list(model.parameters()))]
    for _ in range(3):
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            out = compiled(x)
            results = [out.detach(), *torch.autograd.grad(out.sum(), list(model.parameters()))]
        torch.cuda.current_stream(device).wait_stream(stream)
        _near(results, expected, "a call on another stream")
    return {"streams": 3}


def check_cuda_graph(device: torch.device) -> Figures:
    """Capture a compiled call in a CUDA graph and replay it with other values."""
    if device.type != "cuda":
        raise LeftOut("it needs CUDA")
    model, x = _mlp(device)
    compiled = api.compile(model, backend="inductor")
    with torch.no_grad():
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(3):
                compiled(x)
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = compiled(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        _near([out], [model(x)], "a replayed graph")
    return {}


def check_devices(device: torch.device) -> Figures:
    """Mix devices and precisions: a scalar on the CPU, pinned memory, autocast."""

    def mixed(x: Tensor, scale: Tensor) -> Tensor:
        return (x * scale).sin().sum(0)

    x, scale = torch.randn(16, 8, device=device, requires_grad=True), torch.tensor(1.5)
    _near([_compiled(mixed)(x, scale)], [mixed(x, scale)], "a scalar on the CPU among the inputs")
    dtype = torch.bfloat16
    model, batch = _mlp(device)
    outputs = []
    for function in (model, api.compile(model, backend="eager")):
        with torch.autocast(device.type, dtype):
            outputs.append(function(batch))
    _equal([outputs[0]], [outputs[1]], "a call under autocast")
    if device.type == "cuda":
        pinned = torch.randn(64, 256).pin_memory()
        moved = _compiled(lambda x: x.to(device, non_blocking=True) * 2)(pinned)
        torch.cuda.synchronize(device)
        _near([moved], [pinned.to(device) * 2], "pinned memory that is moved inside of the function")
    return {"autocast": str(dtype)}


CHECKS: tuple[tuple[str, Callable[[torch.device], Figures]], ...] = (
    ("demo", check_demo),
    ("tests", check_tests),
    ("random numbers", check_draws),
    ("mutation and aliases", check_small_programs),
    ("memory", check_memory),
    ("times", check_times),
    ("synchronisation", check_synchronisation),
    ("streams", check_streams),
    ("CUDA graph", check_cuda_graph),
    ("devices and precisions", check_devices),
    *((f"training {name}", partial(check_model, name)) for name in MODELS),
)


def run(device: str, folder: Path, only: Sequence[str], out: TextIO) -> int:
    """Run the checks, print one line for each, and write ``acceptance.json`` and ``acceptance.html`` into ``folder``.

    ``only`` has the names of the checks to run; if it is empty, all checks run. Returns 1 if a check failed. Raises
    `UsageError` if there is no such device, or if it is not a CPU or CUDA device.
    """
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("there is no CUDA device here: torch.cuda.is_available() is False; try --device cpu")
    if where.type not in ("cpu", "cuda"):
        raise UsageError(f"acceptance runs on cpu and cuda, not on {where.type}")
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    facts = {**machine(where), "when": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    results: list[Check] = []
    chosen = [each for each in CHECKS if not only or each[0] in only]
    for number, (name, check) in enumerate(chosen, 1):
        results.append(_result(name, check, where))
        line = f"{number}/{len(chosen)} {name}: {results[-1].state}, {results[-1].seconds:.1f} s  {results[-1].note}"
        print(line.rstrip(), file=out, flush=True)
        write(facts, results, folder)
    print(f"written: {folder / 'acceptance.json'}, {folder / 'acceptance.html'}", file=out)
    return 1 if any(each.state == "failed" for each in results) else 0


def _result(name: str, check: Callable[[torch.device], Figures], device: torch.device) -> Check:
    begin = time.monotonic()
    figures: Figures = {}
    note, state = "", "passed"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            figures = check(device)
    except LeftOut as left_out:
        state, note = "left out", str(left_out)
    except Exception as error:  # noqa: BLE001  # any exception is a result of the check
        state, note = "failed", f"{type(error).__name__}: {error}"
    finally:
        torch.compiler.reset()
    what = (getattr(check, "func", check).__doc__ or "").strip().replace("``", "")
    seconds = round(time.monotonic() - begin, 1)
    return Check(name=name, what=what, state=state, seconds=seconds, figures=figures, note=note)


def write(facts: Mapping[str, str], results: Sequence[Check], folder: Path) -> None:
    """Write the results so far as JSON and as a page."""
    data = {"machine": dict(facts), "checks": [asdict(each) for each in results]}
    (folder / "acceptance.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    (folder / "acceptance.html").write_text(page(facts, results), encoding="utf-8")


_STYLE = Markup(
    ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;"
    "padding:0 1rem}table{border-collapse:collapse;width:100%}:is(td,th){text-align:left;vertical-align:top;"
    "padding:6px 14px 6px 0;border-top:1px solid #8884}.failed{font-weight:700}dl{display:grid;"
    "grid-template-columns:max-content 1fr;gap:2px 16px;margin:0}dt{opacity:.75}dd{margin:0}"
    "pre{white-space:pre-wrap;font:inherit;margin:0}td:nth-child(2),td:nth-child(3){white-space:nowrap}"
)


def page(facts: Mapping[str, str], results: Sequence[Check]) -> str:
    """Return the page as HTML: the facts about the machine, then one row per check with its figures."""
    counts = {state: sum(each.state == state for each in results) for state in ("passed", "failed", "left out")}
    title = f"aotlab acceptance on {facts.get('device', 'a device')}"
    rows = [
        element(
            "tr",
            element("td", each.name, element("br"), element("small", each.what)),
            element("td", each.state, kind=each.state.replace(" ", "-")),
            element("td", f"{each.seconds:.1f} s"),
            element("td", _list(each.figures), element("pre", each.note) if each.note else ""),
        )
        for each in results
    ]
    head = element("tr", *[element("th", text) for text in ("check", "state", "time", "figures")])
    body = join(
        element("h1", title),
        element("p", ", ".join(f"{count} {state}" for state, count in counts.items() if count)),
        _list(facts),
        element("h2", "Checks"),
        element("table", head, *rows),
    )
    document = element(
        "html",
        element("head", element("meta", charset="utf-8"), element("title", title), element("style", _STYLE)),
        element("body", body),
        lang="en",
    )
    return f"<!doctype html>\n{document}\n"


def _list(figures: Mapping[str, object]) -> Markup:
    return element(
        "dl", *[each for key, value in figures.items() for each in (element("dt", key), element("dd", str(value)))]
    )


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = api.compile(function, backend="inductor")
    return compiled


def _step(function: Callable[[Tensor, Tensor], Tensor], device: torch.device, *, seed: int) -> list[Tensor]:
    """Run forward and backward with a seed; return the result and the gradients."""
    torch.manual_seed(0)
    x, w = (torch.randn(32, 32, device=device, requires_grad=True) for _ in range(2))
    torch.manual_seed(seed)
    out = function(x, w)
    return [out.detach(), *torch.autograd.grad(out.sum(), (x, w))]


def _equal(actual: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other), f"{what}: not equal, largest difference {float((one - other).abs().max()):.3g}"


def _near(actual: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    for one, other in zip(actual, expected, strict=True):
        difference = float((one - other).abs().max())
        scale = max(float(other.abs().max()), 1.0)
        assert difference <= TOLERANCE * scale, f"{what}: differs from eager by {difference:.3g} of {scale:.3g}"


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 3)


def _said(text: str) -> None:
    print(f"    {text}", file=sys.stderr, flush=True)
