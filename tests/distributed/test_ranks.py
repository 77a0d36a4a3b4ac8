"""A report of all ranks, and faults of single ranks: a recompile, a refusal, a killed process; a shared history."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

import aotlab
from aotlab.report import Report
from aotlab.runs import saving, store
from tests.distributed.models import MODELS, loss_of
from tests.distributed.processes import SECONDS, assert_same, run
from tests.distributed.test_ddp import WAYS, Log

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package"),
    pytest.mark.tier("full"),
]
if dist.is_available():
    from torch.distributed._functional_collectives import all_reduce
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).parents[2]
#: The timeout of a process group one of whose processes is killed.
TIMEOUT = timedelta(seconds=20)


def _recompiles_alone(rank):
    torch.manual_seed(0)
    model = DistributedDataParallel(aotlab.compile(torch.nn.Linear(8, 4), backend="eager"))
    with Report.record("training", ranks="gather") as report:
        for step in range(5):
            size = 6 if (step, rank) == (3, 1) else 4
            model(torch.randn(size, 8)).square().mean().backward()
    assert report.guards["rank"].unique().tolist() == ([1] if rank else [0, 1])
    if rank == 0:
        (row,) = report.report().rank_rows
        assert (row.rank, row.fact, row.subject) == (1, "recompile", "input.size(0)")
        assert report.recompiles["rank"].tolist() == [1]
        assert report.calls.groupby("rank").size().tolist() == [5, 5]


def test_gathered_reports_name_the_rank_that_recompiled(tmp_path):
    """Rank 0 has the reports of both ranks. It names rank 1, which got another batch size in the fourth step."""
    run(_recompiles_alone, tmp_path / "meeting")


def _sleeps(rank):
    torch.manual_seed(0)
    model = DistributedDataParallel(aotlab.compile(torch.nn.Linear(8, 4), backend="eager"))
    sharded = fully_shard(torch.nn.Linear(4, 4))
    doubled = aotlab.compile(lambda x: all_reduce(x * 2, "sum", dist.group.WORLD) + 1, backend="eager")

    def step(x):
        (sharded(model(x)) + doubled(x[:, :4])).sum().backward()

    step(torch.ones(4, 8))
    dist.barrier()
    with Report.record("training", ranks="gather", waits=True) as report:
        for _ in range(3):
            time.sleep(0.5 * rank)
            step(torch.ones(4, 8))
    waits = report.waits[report.waits["rank"].eq(rank)].set_index("op")
    assert waits.loc["all_gather", "count"] >= 3
    assert waits.loc["all_reduce", "count"] >= 6  # the compiled function's, and DDP's
    if rank == 0:
        seconds = report.waits.groupby("rank")["duration_ns"].sum() / 1e9
        assert 1.4 < seconds[0] < report.report().duration_ns / 1e9
        (row,) = [row for row in report.report().rank_rows if row.fact == "waiting"]
        assert (row.rank, row.reference) == (1, 0)


def test_the_ranks_wait_for_one_that_sleeps(tmp_path):
    """Rank 0's time in collectives contains the sleep of rank 1, and a row of the table ranks names rank 1."""
    run(_sleeps, tmp_path / "meeting")


class _Asks(torch.nn.Module):
    """A model that aotlab refuses to compile on rank 1: the model asks there whether inference mode is on."""

    def __init__(self, model, rank):
        super().__init__()
        self.model, self.rank = model, rank

    def forward(self, tokens):
        """Call the model."""
        if self.rank == 1:
            tokens.is_inference()
        return self.model(tokens)


def _trained(rank, way):
    """Train for three steps. Return losses and parameters, the sizes of the exchanged buckets, and the call."""
    torch.manual_seed(0)
    model = _Asks(MODELS["llama"](), rank)
    settings = {"bucket_cap_mb": 8_000 / 2**20}
    call = DistributedDataParallel(model, **settings) if way is None else WAYS[way](model, "eager", **settings)
    log = Log()
    call.register_comm_hook(None, log.hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for step in range(3):
        optimizer.zero_grad()
        inputs, wanted = MODELS["llama"].batch(1000 * rank + step)
        loss = loss_of(call(inputs), wanted)
        loss.backward()
        optimizer.step()
        results.append(loss.detach())
    return [*results, *(each.detach() for each in model.parameters())], log.lines, call


def _refuses(rank):
    warnings.simplefilter("ignore", RuntimeWarning)  # the notice that the call runs eagerly
    wanted, buckets, _ = _trained(rank, None)
    for way in ("inside", "compiled"):
        with Report.record(way, ranks="gather") as report:
            results, exchanged, call = _trained(rank, way)
        assert_same(way, results, wanted)
        on_ranks = [None, None]
        dist.all_gather_object(on_ranks, exchanged)
        assert on_ranks[0] == on_ranks[1]
        assert len(exchanged) == len(buckets) > 6
        calls = (call.module if way == "inside" else call).compiled.calls
        assert (calls.eager, calls.by_dynamo) == ((3, 0) if rank == 1 else (0, 0))
        if rank == 0:
            first = report.report().rank_rows[0]
            assert (first.rank, first.fact, first.change) == (1, "refusal", "refused to compile alone")
    _collectives_in_a_graph(rank)


def _collectives_in_a_graph(rank):
    """Call a function with collectives that is compiled on rank 0 and runs eagerly on rank 1."""

    @aotlab.compile(backend="eager")
    def reduced(x):
        total = all_reduce(x * 2, "sum", dist.group.WORLD)
        if rank == 1:
            x.is_inference()
        return total - all_reduce(x.sin(), "max", dist.group.WORLD)

    with Report.record(ranks="gather") as report:
        result = reduced(torch.tensor([1.0 + rank]))
    assert torch.equal(result, torch.tensor([6.0]) - torch.tensor([2.0]).sin())
    if rank == 0:
        assert report.collectives[["rank", "op", "input_bytes"]].values.tolist() == [[0, "all_reduce", 4]] * 2


def test_a_rank_that_refuses_does_not_stop_the_others(tmp_path):
    """A rank that runs eagerly exchanges the same buckets, in the same order, as the compiled ranks.

    DDP makes its buckets in the order in which the gradients arrive on rank 0, and tells the other ranks this order.
    """
    run(_refuses, tmp_path / "meeting")


def _is_killed(rank, meeting):
    def compiler(graph, inputs):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return graph

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=TIMEOUT)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    error = ""
    try:
        with Report.record(ranks="gather") as report:
            aotlab.compile(model, backend=compiler)(torch.ones(2, 3)).sum().backward()
    except RuntimeError as raised:
        error = str(raised)
    values = {"error": error, "sentences": [row.sentence for row in report.report().rank_rows]}
    meeting.with_name("result.json").write_text(json.dumps(values))


def test_a_rank_that_is_killed_while_it_compiles(tmp_path):
    """The other rank ends with an error within the timeout of the process group, and its report names the rank."""
    begin = time.monotonic()
    settings = {"nprocs": 2, "join": False, "start_method": "forkserver"}
    group = processes.start_processes(_is_killed, args=(tmp_path / "meeting",), **settings)
    for process in group.processes:
        process.join(3 * TIMEOUT.total_seconds())
    codes = [process.exitcode for process in group.processes]
    assert (codes, time.monotonic() - begin < 3 * TIMEOUT.total_seconds()) == ([0, -signal.SIGKILL], True)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["error"]
    first, second = result["sentences"]
    assert first == "Rank 1 sent no report within 5 s."
    assert second.startswith("Rank 0 ended with RuntimeError: ")


def _stores(rank, path):
    os.environ["AOTLAB_RUNS"] = str(path)
    aotlab.config.save_runs = True
    with Report.record() as recording:
        aotlab.compile(torch.sin, backend="eager")(torch.ones(3))
    dist.barrier()
    for n in range(20):
        saving.keep(replace(recording.report(), name=f"rank {rank}, run {n}", identifier=f"{rank}-{n}"))
    saving.finish()


def test_ranks_share_a_history(tmp_path, monkeypatch):
    """All runs of both ranks are in the history, and each can be read."""
    run(_stores, tmp_path / "meeting", tmp_path / "runs.sqlite")
    monkeypatch.setenv("AOTLAB_RUNS", str(tmp_path / "runs.sqlite"))
    stored = store.runs()
    assert {each.title for each in stored} == {f"rank {rank}, run {n}" for rank in range(2) for n in range(20)}
    assert len(stored) == 40
    assert all(saving.load(each.number)[1].frames for each in stored)


SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
import aotlab

rank = int(os.environ["RANK"])
print("rank", rank, sys.argv[1:])
aotlab.compile(torch.sin, backend="eager")(torch.ones(3))
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
time.sleep(2 * rank)
sys.exit(3 * rank)
"""


def test_the_command_starts_the_processes(tmp_path):
    """``aotlab run --nproc 2`` has the output and the exit status of the script, and names the rank that failed."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "AOTLAB_RUNS": str(tmp_path / "runs.sqlite"), "PYTHONPATH": str(ROOT)}
    words = ["run", "--nproc", "2", "--waits", "--json", "r.json", "script.py", "--deep", "3"]
    command = [sys.executable, "-m", "aotlab", *words]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 3, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} ['--deep', '3']" for rank in (0, 1)]
    assert "aotlab: rank 1 ended with exit status 3" in done.stderr
    report = Report.load(tmp_path / "r.json")
    assert (report.rank, [each.rank for each in report.rank_reports]) == (0, [1])
    assert report.calls["rank"].tolist() == [0, 1]
    assert [row.sentence for row in report.rank_rows if row.sentence] == ["Rank 1 ended with exit status 3."]
    assert report.waits[["rank", "op", "count"]].values.tolist() == [[0, "barrier", 1], [1, "barrier", 1]]
    assert 'type="application/json"' in (tmp_path / "aotlab-report.html").read_text()


def test_readme(tmp_path):
    """The script in the README's section on several processes works with torchrun and with ``aotlab run --nproc``."""
    (source,) = re.findall(r"^```py\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "aotlab", "run", "--nproc", "2", "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "2 ranks: no differences between the ranks" in done.stderr
    assert {path.name for path in tmp_path.glob("*.html")} == {"aotlab-report.html", "rank-0.html", "rank-1.html"}
