"""Inductor keeps compiled graphs in its cache on disk, and takes them from there in the next process."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import aotlab
from aotlab._torch import inductor_internals
from aotlab.backends import kernel_cache
from aotlab.report import Report


def test_a_second_compilation_takes_both_graphs_from_the_cache() -> None:
    """Also for fixed sizes, a second function with the same graphs compiles neither forward nor backward.

    The report has the same nodes and kernels, also the nodes after Inductor's passes.
    """
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    def step() -> tuple[list[torch.Tensor], Report]:
        counters.clear()
        x, w = torch.arange(12.0).view(3, 4).requires_grad_(), torch.ones(4, 5)
        with Report.record() as recording:
            out = aotlab.compile(lambda x: (x @ w + 1.5).view(-1).relu())(x)
            out.sum().backward()
        assert x.grad is not None
        return [out, x.grad], recording.report()

    with fresh_cache():
        first, report = step()
        assert (counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]) == (2, 0)
        second, report_of_hit = step()
        assert (counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]) == (0, 2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    passed = report.nodes.query("stage == 'passes'")
    assert "aten.reshape.default" in passed.target.tolist()
    assert (set(report.kernels.from_cache), set(report_of_hit.kernels.from_cache)) == ({False}, {True})
    for table in ("nodes", "kernels"):
        columns = (
            ["part", "stage", "name", "target", "shape"] if table == "nodes" else ["kind", "name", "language", "source"]
        )
        rows, rows_of_hit = (getattr(each, table)[columns].values.tolist() for each in (report, report_of_hit))
        assert rows == rows_of_hit


def test_kernels_for_other_outputs_are_not_used() -> None:
    """The key of the cache contains the outputs whose strides the caller sees, and stock torch.compile has another."""
    from torch.compiler import config

    keys = {config.cache_key_tag}
    for visible in ([0], [0, 1]):
        graph = fx.Graph()
        x = graph.placeholder("x")
        graph.output((x, x)).meta["user_visible_output_idxs"] = visible
        with inductor_internals._distinguished(fx.GraphModule({}, graph)):
            keys.add(config.cache_key_tag)
    assert len(keys) == 3


Function = Callable[..., tuple[torch.Tensor, ...]]


def _variants(number: float) -> dict[str, tuple[Function, tuple[torch.Tensor, ...]]]:
    """Return functions and arguments whose kernels differ, although their graphs are nearly the same."""
    x = torch.arange(12.0).view(3, 4)

    def with_constant(values: list[float]) -> Function:
        return lambda x: ((x * number) @ torch.tensor(values, dtype=torch.float32),)

    return {
        "the first": (lambda x: (x * number,), (x,)),
        "a constant": (lambda x: (x * (number + 1),), (x,)),
        "another dtype": (lambda x: (x * number,), (x.double(),)),
        "another shape": (lambda x: (x * number,), (x.view(2, 6),)),
        "other strides": (lambda x: (x * number,), (x.t().contiguous().t(),)),
        "an offset": (lambda x: (x * number,), (torch.arange(13.0)[1:].view(3, 4),)),
        "that requires grad": (lambda x: (x * number,), (x.clone().requires_grad_(),)),
        "more outputs": (lambda x: (x * number, x + number), (x,)),
        "outputs in another order": (lambda x: (x + number, x * number), (x,)),
        "a written input": (lambda x: (x.mul_(number), x + number)[:1], (x.clone(),)),
        "a tensor": (with_constant([1.0, 2.0, 3.0, 4.0]), (x,)),
        "another tensor": (with_constant([1.0, 2.0, 3.0, 5.0]), (x,)),
    }


@pytest.mark.tier("long")
@pytest.mark.parametrize("settings", ["none", "deterministic", "autocast", "no_grad", "default dtype"])
def test_other_graphs_are_not_taken_from_the_cache(settings: str) -> None:
    """After a change of a constant, an argument or a setting, the results are eager's, also in the second round."""
    number = 1.5
    for _ in range(2):
        for name, (function, arguments) in _variants(number).items():
            copies = [[each.detach().clone().requires_grad_(each.requires_grad) for each in arguments] for _ in "ab"]
            with _changed(settings):
                expected = function(*copies[0])
                actual = aotlab.compile(function, frontend="direct")(*copies[1])
            torch.testing.assert_close(
                actual, expected, check_stride=True, msg=lambda text, name=name: f"{name}: {text}"
            )
            assert [each.requires_grad for each in expected] == [each.requires_grad for each in actual], name
            torch.testing.assert_close(copies[1], copies[0], msg=lambda text, name=name: f"{name}: {text}")


@contextmanager
def _changed(settings: str) -> Iterator[None]:
    """Change one of torch's settings."""
    dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        if settings == "autocast":
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        elif settings == "no_grad":
            stack.enter_context(torch.no_grad())
        elif settings == "deterministic":
            torch.use_deterministic_algorithms(mode=True)
            stack.callback(torch.use_deterministic_algorithms, mode=False)
        elif settings == "default dtype":
            torch.set_default_dtype(torch.float64)
            stack.callback(torch.set_default_dtype, dtype)
        yield


@pytest.mark.tier("full")
@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[: len(data) // 2], lambda _: b"not a graph"])
def test_a_damaged_cache_is_compiled_again(damage: Callable[[bytes], bytes]) -> None:
    """If the files of the cached graphs are empty, cut or foreign, the graphs are compiled again."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    x = torch.arange(6.0)
    with fresh_cache():
        expected = aotlab.compile(lambda x: x.sin() + 2)(x)
        files = [
            each for each in (Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "fxgraph").rglob("*") if each.is_file()
        ]
        assert files
        for file in files:
            file.write_bytes(damage(file.read_bytes()))
        counters.clear()
        assert torch.equal(expected, aotlab.compile(lambda x: x.sin() + 2)(x))
        assert counters["inductor"]["fxgraph_cache_hit"] == 0


def _misses(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> set[str]:
    """Compile a function, and return the column ``cache_miss`` of its kernels."""
    with Report.record() as recording:
        aotlab.compile(function)(*args)
    return set(recording.report().kernels.cache_miss)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let Inductor use an empty folder, and forget the graphs that it has loaded."""
    from torch._inductor.utils import clear_caches

    clear_caches()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_miss_says_that_the_graph_was_removed(cache: Path) -> None:
    """If a graph was cached before and its file is gone or damaged, the report says so."""
    for _ in range(2):
        reason = _misses(lambda x: x.sin() + 2, torch.ones(3))
        for file in (cache / "fxgraph").rglob("*"):
            if file.is_file():
                file.write_bytes(b"not a graph")
    assert reason == {"this graph was cached before, but its file is missing, damaged or for other sizes"}


@pytest.mark.usefixtures("cache")
def test_a_miss_names_the_parts_of_the_key_that_differ() -> None:
    """The report compares the key with the nearest stored key. A hit has no reason."""
    from torch._inductor import config as inductor_config

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 2

    assert _misses(function, torch.ones(3)) == {"there is no record of earlier graphs in this cache"}
    assert _misses(function, torch.ones(3)) == {""}
    sizes = "input 0 (its sizes, strides, dtype or device)"
    assert _misses(function, torch.ones(4, 5)) == {f"the nearest recorded graph differs in {sizes}"}
    with inductor_config.patch(max_fusion_size=7):
        assert _misses(function, torch.ones(3)) == {
            "the nearest recorded graph differs in Inductor's setting `max_fusion_size`"
        }
        # the nearest graph was compiled with this setting
        assert _misses(function, torch.ones(9, 9)) == {f"the nearest recorded graph differs in {sizes}"}
    assert _misses(lambda x: x.cos() + 2, torch.ones(3)) == {"no recorded graph has the same ops and constants"}


def test_foreign_files_beside_the_keys_are_ignored(cache: Path) -> None:
    """Files that are cut, hostile, too large or no records of keys change nothing, and a full folder is bounded."""
    _misses(lambda x: x.sin() + 2, torch.ones(3))
    folder = cache / "aotlab"
    (key,) = folder.iterdir()
    stored = json.loads(key.read_text())
    assert stored["gm"]
    (folder / "cut.json").write_text(key.read_text()[:100])
    (folder / "pickled.json").write_bytes(pickle.dumps({"gm": "x"}))
    (folder / "list.json").write_text("[1, 2]")
    (folder / "numbers.json").write_text('{"gm": 1}')
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "large.json").write_text(json.dumps({"gm": "x" * 300_000}))
    assert _misses(lambda x: x.sin() + 2, torch.ones(4)) == {
        "the nearest recorded graph differs in input 0 (its sizes, strides, dtype or device)"
    }
    for at in range(80):
        (folder / f"{at}.json").write_text('{"gm": "another"}')
    _misses(lambda x: x.sin() + 2, torch.ones(5))
    assert len(list(folder.iterdir())) == kernel_cache.MOST


def test_the_least_recently_used_files_are_removed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit, old files of Inductor go first. Recent and foreign files stay, and results are as before."""
    from torch._inductor.utils import clear_caches

    def of_inductor() -> dict[Path, int]:
        paths = [*cache.glob("??/c*"), *cache.glob("fxgraph/*/*/*")]
        return {each: each.stat().st_size for each in paths}

    def age(files: Iterable[Path], hours: int) -> None:
        for file in files:
            os.utime(file, (time.time() - hours * 3600,) * 2)

    x = torch.ones(3)
    _misses(lambda x: x.sin() + 2, x)
    first = of_inductor()
    assert {each.suffix for each in first} >= {".py", ".cpp", ".so", ""}
    _misses(lambda x: x.cos() + 3, x)
    second = of_inductor().keys() - first.keys()
    foreign = [cache / "thesis.tex", cache / "ab" / "cab.py", cache / "fxgraph" / "ab" / "notes" / "list"]
    for each in foreign:
        each.parent.mkdir(parents=True, exist_ok=True)
        each.write_text("x" * 10_000_000)
    age([*first, *foreign], hours=100)
    age(second, hours=50)
    together = sum(of_inductor()[each] for each in {*first, *second})
    kernel_cache.bound(cache, together)
    assert of_inductor().keys() >= {*first, *second}
    kernel_cache.bound(cache, together - 1)
    assert len(of_inductor().keys() & {*first, *second}) == len(first) + len(second) - 1
    age(second, hours=0)
    monkeypatch.setattr(kernel_cache, "_last_bound", -kernel_cache._INTERVAL)
    with aotlab.config.patch(cache_bytes=0):
        _misses(lambda x: x.tan() + 4, x)
    assert not of_inductor().keys() & first.keys()
    assert of_inductor().keys() >= second
    assert all(each.exists() for each in foreign)

    # Graphs whose kernels are gone are compiled again.
    age([each for each in second if each.name.endswith((".so", ".cpp", ".py"))], hours=50)
    kernel_cache.bound(cache, 0)
    clear_caches()
    kernels = [each for each in {*first, *second} if each.suffix == ".so"]
    assert kernels
    assert not any(each.exists() for each in kernels)
    for function in (lambda x: x.sin() + 2, lambda x: x.cos() + 3):
        again = aotlab.compile(function)
        assert torch.equal(again(x), function(x))
        assert again.calls.eager == 0
    assert any(each.exists() for each in kernels)

    # Of Triton, a kernel's folder is removed as a whole.
    kernel = cache / "triton" / "0" / ("A" * 52)
    kernel.mkdir(parents=True)
    for name in ("kernel.cubin", "__grp__kernel.json"):
        (kernel / name).write_text(name)
    age(kernel.iterdir(), hours=100)
    (kernel / "kernel.cubin").touch()
    kernel_cache.bound(cache, 0)
    assert len(list(kernel.iterdir())) == 2
    age(kernel.iterdir(), hours=100)
    kernel_cache.bound(cache, 0)
    assert not kernel.exists()


def test_the_cache_can_be_switched_off(cache: Path) -> None:
    """With ``config.cache = False`` no graph is stored, and none is taken."""
    with aotlab.config.patch(cache=False):
        for _ in range(2):
            assert _misses(lambda x: x.sin() + 2, torch.ones(3)) == {""}
    assert not (cache / "fxgraph").exists()
    assert not (cache / "aotlab").exists()


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_nothing_is_loaded_from_a_folder_that_others_can_write_to(cache: Path, tmp_path: Path) -> None:
    """A stored graph is a pickle. aotlab loads none that another user may have written, and warns once."""
    kernel_cache._warn.cache_clear()
    x, function = torch.ones(3), lambda x: x.sin() + 2
    expected = aotlab.compile(function)(x)
    files = [each for each in (cache / "fxgraph").rglob("*") if each.is_file()]
    for file in files:
        file.write_bytes(pickle.dumps(Hostile(tmp_path / "touched")))
    cache.chmod(0o777)
    with pytest.warns(
        RuntimeWarning, match=r"does not load compiled graphs from .*, because every user can write to it"
    ):
        assert torch.equal(aotlab.compile(function)(x), expected)
    assert files
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    "count", [pytest.param(3, marks=pytest.mark.tier("full")), pytest.param(8, marks=pytest.mark.tier("long"))]
)
def test_several_processes_share_the_cache(cache: Path, count: int) -> None:
    """Several processes compile the same function at once, one is killed; all others return eager's result."""
    code = (
        "import torch, aotlab, sys\n"
        "x = torch.arange(6.0, requires_grad=True)\n"
        "aotlab.compile(lambda x: (x.sin() * int(sys.argv[1])).sum())(x).backward()\n"
        "torch.testing.assert_close(x.grad, x.detach().cos() * int(sys.argv[1]))\n"
    )
    started = [subprocess.Popen([sys.executable, "-c", code, str(at % 2 + 2)]) for at in range(count)]
    time.sleep(4)
    started[0].kill()
    assert [each.wait(timeout=300) for each in started[1:]] == [0] * (count - 1)
    assert subprocess.run([sys.executable, "-c", code, "2"], check=False, timeout=300).returncode == 0
    assert len(list((cache / "aotlab").glob("*.tmp"))) <= 1  # that of the killed process


@pytest.mark.tier("full")
def test_on_a_full_disk_a_call_runs_eagerly(cache: Path) -> None:
    """If no file can be written, one warning says so, whether the cache is empty or has the graphs.

    A limit on the size of files simulates the full disk. Later calls compile again in a process with a free disk.
    """
    code = (
        "import resource, sys, tempfile, warnings, torch, aotlab\n"
        "tempfile.gettempdir()  # it looks for a folder in which it can write\n"
        "x = torch.arange(6.0, requires_grad=True)\n"
        "if sys.argv[1] == 'full':\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))\n"
        "function = aotlab.compile(lambda x: (x.sin() * 2).sum())\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    for _ in range(2):\n"
        "        function(x).backward()\n"
        "torch.testing.assert_close(x.grad, x.detach().cos() * 4)\n"
        "said = [str(each.message) for each in caught if 'runs eagerly' in str(each.message)]\n"
        "print(function.calls.eager, *said, sep='|')\n"
    )

    def run(disk: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", code, disk], check=True, capture_output=True, text=True, timeout=300
        )
        return done.stdout.strip().split("|")

    def remarks() -> None:
        eager, warning = run("full")
        assert eager == "2"
        assert f"Inductor cannot write to {cache}" in warning
        assert "'File too large'; free some space" in warning
        assert list((cache / "aotlab").glob("*")) == files

    files: list[Path] = []
    remarks()
    assert run("free") == ["0"]
    files = list((cache / "aotlab").glob("*"))
    for wrapper in cache.glob("??/*.h"):  # a precompiled header is written before the graphs are loaded
        wrapper.unlink()
    remarks()
    assert run("free") == ["0"]


#: Forks one process for each delay, which compiles a function and is killed after the delay. The last one may finish.
_KILLED = """
import os, signal, sys, time
import torch, aotlab
from aotlab.backends import kernel_cache

def compute(factor):
    x = torch.arange(6.0, requires_grad=True)
    aotlab.compile(lambda x: (x.sin() * factor).sum())(x).backward()
    torch.testing.assert_close(x.grad, x.detach().cos() * factor)

for number, delay in enumerate(map(float, sys.argv[1:])):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            compute(2 + number % 3)
            status = 0
        finally:
            os._exit(status)
    if delay:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert status == 0 or delay and os.WIFSIGNALED(status), (number, delay, status)
"""


@pytest.mark.parametrize(
    "count", [pytest.param(6, marks=pytest.mark.tier("full")), pytest.param(100, marks=pytest.mark.tier("long"))]
)
def test_a_process_that_is_killed_leaves_a_cache_that_works(cache: Path, count: int) -> None:
    """However far a process came before it was killed, the next one compiles or loads, and returns eager's result."""
    generator = random.Random(0)
    delays = [generator.uniform(0.05, 6.0) for _ in range(count)]
    for at in range(0, count, 5):  # a new cache after five processes, because a full one leaves nothing to write
        folder = cache / str(at)
        some = [str(delay) for delay in delays[at : at + 5]]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        last_ones = ["0", "0", "0"]
        subprocess.run([sys.executable, "-c", _KILLED, *some, *last_ones], check=True, env=environment, timeout=900)
        assert len(list((folder / "fxgraph").rglob("*"))) > 0
