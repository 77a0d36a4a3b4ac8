"""The command ``aotlab bench partitioners``: compare our partitioners with upstream's on the same joint graphs.

Each partitioner splits copies of a joint graph that aotlab traced. Making the copies is not timed. Two quantities are
measured. *Time* is the time of a split. The partitioners run in turns. *Growth* is the time for a model, divided by the
time for the same model with half as many layers. It is about 2 if the time is nearly linear in the number of nodes.
*Kept memory* is the memory that the forward holds for the backward, without parameters, inputs and outputs. It is
compared with the memory that eager keeps for the same call.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import pandas as pd
import torch
from torch import fx, nn

from aotlab.bench.memory import kept_by_eager
from aotlab.bench.timing import Case, compare
from aotlab.frontends import api
from aotlab.ir.fx_graphs import output_args
from aotlab.maintenance.bench.programs import ModelProgram, mlp, seeded, transformer_encoder
from aotlab.maintenance.bench.suite import machine
from aotlab.partition.default import default_partition
from aotlab.partition.joint_analysis import held_bytes
from aotlab.partition.min_cut import min_cut_rematerialization_partition

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]

#: The partitioners that are timed, by their names in the tables.
OURS: dict[str, Partition] = {
    "default": default_partition,
    "min cut": min_cut_rematerialization_partition,
    "min cut, budget 0.5": partial(min_cut_rematerialization_partition, memory_budget=0.5),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row of the result.

    Attributes
    ----------
    program, nodes
        The model, and the number of nodes of its joint graph.
    partitioner
        Our partitioner. The default partitioner is compared with upstream's default partitioner, and the others with
        upstream's min-cut partitioner at the full budget.
    ours_ns, theirs_ns
        Median times of our and upstream's partitioner to split the graph, in ns.
    ratio, ratio_p10, ratio_p90
        Our time divided by theirs within a round: the median and two percentiles over the rounds. Below 1, ours is
        faster.
    again
        The noise: our default partitioner is timed twice, and this is the second time divided by the first.
    growth
        Our time divided by the time for the same model with half as many layers; NaN for the smallest model.
    ours_bytes, theirs_bytes, eager_bytes
        The bytes that are kept from the forward to the backward with our partitioner, with upstream's, and in eager.
    """

    program: str
    nodes: int
    partitioner: str
    ours_ns: float
    theirs_ns: float
    ratio: float
    ratio_p10: float
    ratio_p90: float
    again: float
    growth: float
    ours_bytes: int
    theirs_bytes: int
    eager_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JointGraph:
    """A joint graph to split.

    The first ``outputs`` of its outputs are the outputs of the forward. ``static`` are the indices of the inputs that
    are parameters and buffers.
    """

    module: fx.GraphModule
    outputs: int
    static: tuple[int, ...]

    @classmethod
    def of(cls, model: nn.Module, batch: Sequence[torch.Tensor]) -> JointGraph:
        """Trace a training call of a model."""
        compiled = api.compile(model, backend="eager")
        compiled(*batch)
        (entry,) = compiled.compiled.entries
        trace, parts = entry.records.trace, entry.records.partition
        return cls(
            module=trace.module,
            outputs=parts.num_forward_outputs,
            static=tuple(trace.metadata.static_input_indices),
        )

    def split(self, partition: Partition, module: fx.GraphModule | None = None) -> fx.GraphModule:
        """Split ``module``, by default a copy of the joint graph, and return the forward graph."""
        joint = copy.deepcopy(self.module) if module is None else module
        settings: dict[str, Any] = {"num_fwd_outputs": self.outputs, "static_lifetime_input_indices": [*self.static]}
        return partition(joint, None, **settings)[0]

    def case(self, name: str, partition: Partition) -> Case:
        """Return a case for `aotlab.bench.compare` that times ``partition`` on copies of the graph."""
        return Case(name=name, prepare=lambda: partial(self.split, partition, copy.deepcopy(self.module)))

    def saved_bytes(self, partition: Partition) -> int:
        """Return how many bytes the forward saves for the backward if ``partition`` splits the graph."""
        graph = self.split(partition).graph
        return held_bytes([n for n in output_args(graph)[self.outputs :] if n is not None], graph, self.outputs)


def programs(quick: bool = False) -> tuple[tuple[ModelProgram, ...], ...]:
    """Return the models in groups, one for each kind of model. Each model has twice the layers of the model before."""
    layers, blocks = ((5, 10), (1, 2)) if quick else ((25, 50, 100, 200), (3, 6, 12))
    return (
        tuple(
            ModelProgram(
                name=f"MLP, {n} layers",
                description=f"{n} x (Linear(32, 32), ReLU), batch 256",
                make=seeded(partial(mlp, n), (256, 32)),
            )
            for n in layers
        ),
        tuple(
            ModelProgram(
                name=f"encoder, {n} layers",
                description=f"TransformerEncoder of {n} layers, d_model 64, 4 heads, dropout 0, batch 4 x 64",
                make=seeded(partial(transformer_encoder, n), (4, 64, 64)),
            )
            for n in blocks
        ),
    )


def measure(
    groups: Sequence[Sequence[ModelProgram]], device: torch.device, *, rounds: int, say: Callable[[str], None]
) -> Iterator[Figure]:
    """Measure all models one after another. ``say`` receives progress messages."""
    from functorch import compile as upstream  # type: ignore[import-untyped]

    theirs: dict[str, Partition] = {
        "default": upstream.default_partition,
        "min cut": upstream.min_cut_rematerialization_partition,
    }
    for group in groups:
        say(", ".join(program.name for program in group))
        models = [(program, *program.make(device)) for program in group]
        joints = [JointGraph.of(model, batch) for _, model, batch in models]
        cases = []
        for n, joint in enumerate(joints):
            cases += [joint.case(f"ours, {name}, {n}", partition) for name, partition in OURS.items()]
            cases += [joint.case(f"theirs, {name}, {n}", partition) for name, partition in theirs.items()]
        result = compare(cases, rounds=rounds, warmup=1, inner=1, device=device, again="ours, default, 0")
        noise = result.noise
        assert noise is not None
        for n, (joint, (program, model, batch)) in enumerate(zip(joints, models, strict=True)):
            eager_bytes = kept_by_eager(model, *batch)
            for name, partition in OURS.items():
                ours, base = f"ours, {name}", name if name in theirs else "min cut"
                ratio = result.ratio(f"{ours}, {n}", f"theirs, {base}, {n}")
                yield Figure(
                    program=program.name,
                    nodes=len(joint.module.graph.nodes),
                    partitioner=name,
                    ours_ns=result[f"{ours}, {n}"].median_ns,
                    theirs_ns=result[f"theirs, {base}, {n}"].median_ns,
                    ratio=ratio.median,
                    ratio_p10=ratio.p10,
                    ratio_p90=ratio.p90,
                    again=noise.median,
                    growth=result.ratio(f"{ours}, {n}", f"{ours}, {n - 1}").median if n else math.nan,
                    ours_bytes=joint.saved_bytes(partition),
                    theirs_bytes=joint.saved_bytes(theirs[base]),
                    eager_bytes=eager_bytes,
                )


def time_table(figures: Sequence[Figure]) -> pd.DataFrame:
    """Return a table of the times, in ms."""
    return pd.DataFrame(
        [
            {
                "joint graph": f.program,
                "nodes": f.nodes,
                "partitioner": f.partitioner,
                "aotlab ms": f.ours_ns / 1e6,
                "upstream ms": f.theirs_ns / 1e6,
                "aotlab / upstream": f.ratio,
                "p10": f.ratio_p10,
                "p90": f.ratio_p90,
                "A/A": f.again,
                "growth": f.growth,
            }
            for f in figures
        ]
    )


def memory_table(figures: Sequence[Figure]) -> pd.DataFrame:
    """Return a table of the kept memory, in KiB."""
    return pd.DataFrame(
        [
            {
                "joint graph": f.program,
                "partitioner": f.partitioner,
                "aotlab KiB": f.ours_bytes / 1024,
                "upstream KiB": f.theirs_bytes / 1024,
                "eager KiB": f.eager_bytes / 1024,
            }
            for f in figures
        ]
    )


def main(argv: Sequence[str], out: TextIO | None = None) -> int:
    """Run ``aotlab bench partitioners ARGV``."""
    parser = argparse.ArgumentParser(
        prog="aotlab bench partitioners", description="Time aotlab's partitioners beside upstream's."
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there as well")
    parser.add_argument("--quick", action="store_true", help="small models and few rounds: a smoke test, no figures")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    options = parser.parse_args(argv)
    device, stream, begin = torch.device(options.device), sys.stdout if out is None else out, time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:6.1f} s] {text}", file=sys.stderr, flush=True)

    rounds = 2 if options.quick else 7
    figures = list(measure(programs(options.quick), device, rounds=rounds, say=say))
    where = machine(device)
    print("\n".join(f"{key:>7}: {value}" for key, value in where.items()), file=stream)
    print(
        "\nThe partitioners split copies of one joint graph in turns. At a ratio below 1, aotlab is faster. aotlab's\n"
        "min-cut partitioner with a budget of 0.5 is compared with upstream's at its full budget, too. Growth is\n"
        "aotlab's time divided by its time for half the layers. A/A compares aotlab's default partitioner with\n"
        "itself, so its difference from 1 is noise. Kept memory is without parameters, inputs and outputs.",
        file=stream,
    )
    for title, table in (("Time", time_table(figures)), ("Kept memory", memory_table(figures))):
        text = table.to_string(index=False, float_format=lambda number: f"{number:.2f}", na_rep="-")
        print(f"\n{title}\n\n{text}", file=stream)
    if options.json is not None:
        rows = [{k: None if v != v else v for k, v in asdict(figure).items()} for figure in figures]
        options.json.write_text(json.dumps({"machine": where, "figures": rows}, indent=2) + "\n")
    return 0
