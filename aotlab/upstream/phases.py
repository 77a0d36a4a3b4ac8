"""The phases of stock `torch.compile`, from the events that torch writes at the begin and the end of each phase.

Phases are nested: the phase of Inductor's code generation contains the phase in which a kernel is compiled. The *own
time* of a phase is its time without the phases inside of it. The own times of all phases add up to the wall time of the
compilations, so each moment is counted once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from aotlab.upstream.trace_log import CompileId, Record

#: The stages of stock `torch.compile`: our name, and patterns of the names of phases and of records. A phase belongs to
#: the first stage with its name, or to the stage of the phase around it. The records contain the stage's results.
STAGES: tuple[tuple[str, str, str], ...] = (
    ("capture", r"bytecode_tracing|insert_deferred_runtime_asserts", r"dynamo_output_graph"),
    ("pre-grad passes", r"_recursive_pre_grad_passes", r"(before|after)_pre_grad_graph"),
    ("metadata", r"aot_collect_metadata", r"aot_forward_graph_fw_metadata"),
    ("trace", r"aot_trace_joint_graph", r"aot_(joint|inference)_graph"),
    ("joint passes", r"_recursive_joint_graph_passes", r"(before|after)_joint_graph"),
    ("partition", r"min_cut_rematerialization_partition", r"aot_(forward|backward)_graph"),
    ("post-grad passes", r"_recursive_post_grad_passes", r"(before|inductor)_post_grad_graph"),
    ("lowering", r"GraphLowering\.run", r""),
    ("autotuning", r".*(autotuning|_autotune|benchmark|do_bench|_template_|coordinate_descent).*", r""),
    (
        "compilation of kernels",
        r"compile_file|async_compile\..*|PyCodeCache\..*|AotCodeCompiler\..*|reload_kernel.*|cpp_wrapper_compile|aoti_.*"
        r"|CachingAutotuner\..*|StaticAutotunerFuture\..*",
        r"",
    ),
    ("code generation", r"GraphLowering\.codegen.*|generate_kernel_code.*", r"inductor_output_code"),
    ("caches", r".*(Cache|cache|TritonBundler|Pickler|CompiledArtifact|deserializ|pgo\.).*", r"\w+_cache_\w+"),
    (
        "wrappers",
        r"",
        r"runtime_wrapper_orchestration|aot_autograd_runtime_wrappers|output_alias_wrapper|compiled_fn_wrapper"
        r"|compiled_function_(forward|backward)|backward_(prologue|epilogue)",
    ),
    ("guards", r"build_guards|precompile_\w+_guards", r"dynamo_cpp_guards_str"),
    ("rest of Dynamo", r"dynamo|entire_frame_compile|compile_attempt_\d+|gc|bytecode_hooks.*|fullgraph_capture", r""),
    ("rest of the backend", r"backend_compile|OutputGraph\.call_user_compiler", r""),
    ("rest of AOTAutograd", r"create_aot_dispatcher_function|entire_backward_compile|invoke_subgraph.*", r""),
    ("rest of Inductor", r"inductor_.*|compile_fx.*|fx_codegen_and_compile|GraphLowering\..*|additional_fake_.*", r""),
)
#: The stage of the phases whose names are unknown.
REST = "rest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A phase of a compilation.

    ``own_ns`` is the phase's own time. It is 0 in other threads, because the thread that compiles waits for them.
    ``thread`` is 0 for the thread that compiles, and a higher number for work at the same time. ``depth`` is the number
    of phases around this phase in its thread. ``compile_id`` is None if the phase belongs to no compilation.
    """

    name: str
    stage: str
    compile_id: CompileId | None
    start_ns: int
    end_ns: int
    own_ns: int
    thread: int
    depth: int


class _Span(NamedTuple):
    """The time between two events. ``begun`` is the number of the first event in the log."""

    start_ns: int
    end_ns: int
    begun: int
    name: str
    compile_id: CompileId | None


class _Placed(NamedTuple):
    """The place of a span: the number of the span around it, and whether it is work of a thread that only helps."""

    parent: int | None
    others: bool
    lane: int
    depth: int


def phases_of(records: Iterable[Record]) -> list[Phase]:
    """Return the phases in a log of one process, in the order of their begins."""
    spans = sorted(_spans(records), key=lambda each: (each.start_ns, -each.end_ns, each.begun))
    places = _places(spans)
    first_other = 1 + max((place.lane for place in places if not place.others), default=0)
    own = [0 if place.others else span.end_ns - span.start_ns for span, place in zip(spans, places, strict=True)]
    stages: list[str] = []
    ids: list[CompileId | None] = []
    for span, (parent, others, _, _) in zip(spans, places, strict=True):
        stages.append(stage_of(span.name) or (REST if parent is None else stages[parent]))
        ids.append(span.compile_id or (None if parent is None else ids[parent]))
        if parent is not None and not others:
            own[parent] -= span.end_ns - span.start_ns
    return [
        Phase(
            name=span.name,
            stage=stages[n],
            compile_id=ids[n],
            start_ns=span.start_ns,
            end_ns=span.end_ns,
            own_ns=own[n],
            thread=place.lane + (first_other if place.others else 0),
            depth=place.depth,
        )
        for n, (span, place) in enumerate(zip(spans, places, strict=True))
    ]


@cache
def stage_of(name: str) -> str:
    """Return the stage of the phases with this name; empty if no stage names it."""
    return next((stage for stage, phases, _ in STAGES if re.fullmatch(phases, name)), "")


def _spans(records: Iterable[Record]) -> Iterable[_Span]:
    """Pair the events of begins and ends.

    A phase whose end is missing, because its process died or is still compiling, ends with the phase around it or with
    the last event. Events without a compilation come from several threads, so they are not nested.
    """
    begun: dict[CompileId | None, list[tuple[str, int, int]]] = {}
    latest: dict[str, CompileId] = {}
    at = 0
    for n, record in enumerate(records):
        key = record.compile_id
        if key is not None:
            latest[f"{key.frame}/{key.number}"] = key
        if record.kind != "chromium_event":
            continue
        try:
            event = json.loads(record.payload)
            name, kind, at = str(event["name"]), event["ph"], round(float(event["ts"]) * 1000)
            key = key or latest.get(str((event.get("args") or {}).get("compile_id")))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        stack = begun.setdefault(key, [])
        found = [position for position, each in enumerate(stack) if each[0] == name]
        if kind == "B":
            stack.append((name, at, n))
        elif kind == "E" and found:
            ended = slice(found[0], found[0] + 1) if key is None else slice(found[-1], None)
            yield from (_Span(start, max(at, start), number, each, key) for each, start, number in stack[ended])
            del stack[ended]
    for key, stack in begun.items():
        yield from (_Span(start, max(at, start), number, each, key) for each, start, number in stack)


def _places(spans: Sequence[_Span]) -> list[_Placed]:
    """Find the span around each span.

    torch's events do not name their threads. A span that no compilation owns is work of another thread if a compilation
    runs at the same time. Of spans that overlap, one is in another lane.
    """
    lanes: tuple[list[list[int]], list[list[int]]] = [], []
    places: list[_Placed] = []
    for n, span in enumerate(spans):
        for lane in (*lanes[0], *lanes[1]):
            while lane and spans[lane[-1]].end_ns <= span.start_ns:
                lane.pop()
        around = next((lane[-1] for lane in lanes[0] if lane), None)
        others = span.compile_id is None and around is not None
        free = [
            (not lane, number)
            for number, lane in enumerate(lanes[others])
            if not lane or spans[lane[-1]].end_ns >= span.end_ns
        ]
        number = min(free, default=(True, len(lanes[others])))[1]
        if number == len(lanes[others]):
            lanes[others].append([])
        lane = lanes[others][number]
        parent = around if others else lane[-1] if lane else None
        places.append(_Placed(parent, others, number, len(lane)))
        lane.append(n)
    return places
