"""Stage 3, synthetic bases: inputs that share memory, of which one is mutated.

    buffer = torch.zeros(4)
    f(buffer[:3], buffer[1:])        # and f writes to its first argument

The graph must see the write through the second argument too. The cure is to pass the shared memory as
one input, a synthetic base, and to make both arguments from it inside the graph. That is not built
yet; what this stage does is to find the overlaps, on byte intervals, so that windows of different
dtypes and storages over one buffer count too. After the trace, when it is known which inputs are
written, `check` refuses an overlap that matters. Overlapping inputs that are only read need no base.
"""

from __future__ import annotations

from dataclasses import dataclass

from aotlab.errors import OverlappingInputsError
from aotlab.guards import TensorFacts, byte_interval
from aotlab.ir.metadata import InputAliasInfo
from aotlab.stages.capture import Call
from aotlab.stages.dedupe import DedupeRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Two kept inputs (positions in `DedupeRecord.kept`) whose byte intervals share ``bytes`` bytes."""

    first: int
    second: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticBasesRecord:
    """The overlaps among the inputs, and the groups that were merged into a base (none so far)."""

    overlaps: tuple[Overlap, ...]
    bases: tuple[tuple[int, ...], ...] = ()


def run(call: Call, dedupe: DedupeRecord) -> SyntheticBasesRecord:
    """Find the inputs whose bytes overlap."""
    index = {position: k for k, position in enumerate(dedupe.kept)}
    overlaps = []
    for a, b in call.state.overlapping:
        (start, end), (other_start, other_end) = byte_interval(call.values[a]), byte_interval(call.values[b])
        shared = min(end, other_end) - max(start, other_start)
        overlaps.append(Overlap(first=index[a], second=index[b], bytes=shared))
    return SyntheticBasesRecord(overlaps=tuple(overlaps))


def check(record: SyntheticBasesRecord, inputs: tuple[InputAliasInfo, ...], call: Call, dedupe: DedupeRecord) -> None:
    """Refuse the trace if an input that was written overlaps another.

    Raises
    ------
    OverlappingInputsError
        With both names.
    """
    for overlap in record.overlaps:
        pair = (overlap.first, overlap.second)
        mutated = next((k for k in pair if inputs[k].must_not_overlap), None)
        if mutated is None:
            continue
        other = pair[0] if mutated == pair[1] else pair[1]
        facts = [call.state.leaves[dedupe.kept[k]] for k in (mutated, other)]
        described = [
            f"`{dedupe.names[k]}` (shape {f.shape}, {f.dtype}, offset {call.values[dedupe.kept[k]].storage_offset()})"
            for k, f in zip((mutated, other), facts, strict=True)
            if isinstance(f, TensorFacts)
        ]
        raise OverlappingInputsError(
            f"input {described[0]} is mutated and shares {overlap.bytes} bytes with input {described[1]}",
            why="the graph would not see the write through the other input",
            suggestion="pass a clone of one of them",
            argument=dedupe.names[mutated],
        )
