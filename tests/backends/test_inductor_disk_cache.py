"""Inductor keeps compiled graphs in its cache on disk, and takes them from there in the next process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from torch import fx

import aotlab
from aotlab._torch import inductor_internals
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
