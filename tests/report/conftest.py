"""A recording made by hand: the engine's events for one function whose mutations and aliases are known.

    def step(weight, x, again, y, z, scale):     # again is x; z is y[1:]
        x.mul_(2)
        h = x @ weight
        a, b = (h + 1).unbind()[:2]              # two views of one intermediate
        return h, x.t(), y, a, b, 7, h[0]

``weight`` (5×3) requires grad; ``x`` (4×5), ``y`` (3×2) do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from traceback import FrameSummary

import pytest
import torch
from torch import fx

from aotlab import events
from aotlab.backends.base import KernelSource
from aotlab.backends.compile_stage import BackwardRecord, CompiledGraphRecord, CompileRecord
from aotlab.capture.call import ArgumentRecord, CaptureRecord
from aotlab.capture.dedupe import DedupeRecord
from aotlab.capture.synthetic_bases import Overlap, SyntheticBasesRecord
from aotlab.errors import RandomOpError, UserLine
from aotlab.ir.fx_graphs import node_records
from aotlab.ir.metadata import (
    InputAliasInfo,
    OutputAliasInfo,
    OutputType,
    TangentInfo,
    TangentSource,
    ViewAndMutationMeta,
    ViewStep,
)
from aotlab.ir.specs import StorageNumbers, spec_of
from aotlab.partition.partition_stage import PartitionRecord
from aotlab.partition.saved_descriptions import SavedValue
from aotlab.report import Recording, Report
from aotlab.runtime.runtime_stage import RuntimeRecord
from aotlab.trace.program_calls import Layout, Program, ProgramCall, Touched
from aotlab.trace.records import AutogradNode, TraceRecord

FILE = "/home/ada/work/model.py"
RUNTIME_SOURCE = "def call(weight, x):\n    out = forward(weight, x)\n    x.copy_(out[0])\n    return out[1:]\n"
REASON = "`x` has shape (8, 5), this entry was compiled for (4, 5)"


class Story:
    """Emits the events of an imagined engine, entry by entry. Names and code can be chosen."""

    def __init__(self, *, function: str = "step", code: str = "x.mul_(2)", kernel: str = "int main() {}") -> None:
        self.function = function
        self.line = UserLine(file=FILE, line=3, function=function, code=code)
        self.kernel = kernel
        self._entry = 100

    def started(self, *, function_id: int = 1, reason: str | None = None, function: str | None = None) -> int:
        """Begin an entry; return its number."""
        self._entry += 1
        events.emit(
            events.CompileStarted(
                function=function or self.function,
                function_id=function_id,
                entry=self._entry,
                frontend="direct",
                backend="inductor",
                misses=() if reason is None else (events.Miss(entry=101, sentence=reason),),
            )
        )
        return self._entry

    def stage(self, entry: int, name: str, record: object, duration_ns: int, nodes: int | None = None) -> None:
        """Finish one stage."""
        events.emit(events.StageFinished(entry=entry, stage=name, record=record, duration_ns=duration_ns, nodes=nodes))

    def compiled(self, *, reason: str | None = None, function_id: int = 1) -> int:
        """Go through all stages."""
        entry = self.started(reason=reason, function_id=function_id)
        forward, joint, backward = self.graphs()
        self.stage(entry, "capture", self.capture(), 1_000_000)
        self.stage(entry, "dedupe", self.dedupe(), 10_000)
        self.stage(entry, "synthetic_bases", self.overlaps(), 20_000)
        self.stage(entry, "trace", self.trace(joint), 40_000_000, 4)
        self.stage(entry, "partition", self.partition(forward, backward), 5_000_000, 4)
        # Later stages rewrite graphs in place. The recorded graphs must not change with them.
        joint.graph.erase_node(next(node for node in reversed(joint.graph.nodes) if node.op == "output"))
        self.stage(entry, "compile", self.compile(forward, backward), 900_000_000)
        self.stage(entry, "runtime", RuntimeRecord(name="<aotlab step 0>", source=RUNTIME_SOURCE), 300_000)
        guards = (("dtype", "x", "`x` is float32"), ("identity", "again", "`again` is the same tensor as `x`"))
        events.emit(events.CompileFinished(entry=entry, duration_ns=950_000_000, guards=guards))
        return entry

    def refused(self, *, outcome: str = "raised", function_id: int = 2, function: str | None = None) -> int:
        """Fail after the capture."""
        entry = self.started(function_id=function_id, function=function)
        self.stage(entry, "capture", self.capture(), 1_000_000)
        error = RandomOpError("`aten.bernoulli` draws random numbers", argument="x", line=self.line)
        assert outcome in ("raised", "ran eagerly")
        events.emit(events.CompileFailed(entry=entry, duration_ns=2_000_000, error=error, outcome=outcome))
        return entry

    def called(self, entry: int | None, *, function_id: int = 1, cold: bool = False, times: int = 1) -> None:
        """Serve calls; ``cold`` ones have compiled their entry first."""
        for _ in range(times):
            events.emit(
                events.Called(
                    function=self.function, function_id=function_id, entry=entry, duration_ns=5_000, compiled=cold
                )
            )

    def backward(self, entry: int) -> None:
        """Derive a backward for the second tangent alone."""
        graph = replace(self.compile(*self.graphs()[::2]).graphs[1], name="step__0_backward_2")
        record = BackwardRecord(pattern=(False, True), graph=graph)
        events.emit(events.BackwardCompiled(entry=entry, pattern=(False, True), record=record, duration_ns=7_000_000))

    # The records.

    def capture(self) -> CaptureRecord:
        """Describe the arguments; ``z`` lives in ``y``'s storage, six floats into it."""
        numbers = StorageNumbers()
        weight, x, y = torch.ones(5, 3, requires_grad=True), torch.ones(4, 5), torch.ones(3, 2)
        tensors = {"weight": weight, "x": x, "again": x, "y": y, "z": y[1:]}
        arguments = [
            ArgumentRecord(
                name=name, kind="parameter" if name == "weight" else "input", spec=spec_of(tensor, numbers), value=None
            )
            for name, tensor in tensors.items()
        ]
        arguments.append(ArgumentRecord(name="scale", kind="python", spec=None, value="2.0"))
        return CaptureRecord(
            function=self.function,
            line=UserLine(file=FILE, line=1, function="", code=f"def {self.function}(…):"),
            frontend="direct",
            arguments=tuple(arguments),
            grad_mode=True,
            training=True,
        )

    def dedupe(self) -> DedupeRecord:
        """Drop ``again``."""
        return DedupeRecord(
            strategy="drop",
            kept=(0, 1, 3, 4),
            source=(0, 1, 1, 2, 3),
            positions=(0, 1, 2, 3, 4),
            names=("weight", "x", "y", "z"),
        )

    def overlaps(self) -> SyntheticBasesRecord:
        """Say that ``z`` covers the last 16 bytes of ``y``."""
        return SyntheticBasesRecord(overlaps=(Overlap(first=2, second=3, bytes=16),))

    def trace(self, joint: fx.GraphModule) -> TraceRecord:
        """Report the facts that the trace recorded."""
        capture = self.capture()
        dedupe = self.dedupe()
        inputs = []
        for index, position in enumerate(dedupe.kept):
            argument = capture.arguments[position]
            assert argument.spec is not None
            inputs.append(
                InputAliasInfo(
                    index=index,
                    name=argument.name,
                    spec=argument.spec,
                    is_leaf=True,
                    requires_grad=argument.name == "weight",
                    mutates_data=argument.name == "x",
                    requires_grad_after=argument.name in ("weight", "x"),
                )
            )
        h, x, made = torch.ones(4, 3, requires_grad=True) * 1, torch.ones(4, 5), torch.ones(4, 3)
        metadata = ViewAndMutationMeta(
            input_info=tuple(inputs),
            output_info=(
                _output(0, OutputType.NON_ALIAS, h),
                _output(1, OutputType.ALIAS_OF_INPUT, x.t(), 1, _transposed()),
                _output(2, OutputType.IS_INPUT, torch.ones(3, 2), 2, ()),
                _output(3, OutputType.ALIAS_OF_INTERMEDIATE_SAVE_AS_OUTPUT, made[0], 0, _unbind(0)),
                _output(4, OutputType.ALIAS_OF_INTERMEDIATE, made[1], 0, _unbind(1)),
                OutputAliasInfo(index=5, name="out[5]", output_type=OutputType.NON_ALIAS, raw_type="int", spec=None),
                _output(6, OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT, h.t(), 0, _transposed()),
            ),
            intermediate_bases=(spec_of(made),),
            tangents=(
                TangentInfo(source=TangentSource.MUTATED_INPUT, index=1, spec=spec_of(x)),
                TangentInfo(source=TangentSource.OUTPUT, index=0, spec=spec_of(h)),
            ),
        )
        return TraceRecord(
            module=joint,
            metadata=metadata,
            training=True,
            inputs=("primals_1", "primals_2"),
            outputs=("mutated input x", "out[0]"),
            random_ops=(),
            operations=4,
            autograd_nodes=(AutogradNode(number=0, makes=("mutated input x", "out[0]"), goes_to=("x", "w")),),
            program=self.program(),
        )

    def program(self) -> Program:
        """Describe the one write of the program."""
        sizes = {"weight": (5, 3), "x": (4, 5), "y": (3, 2), "z": (2, 2)}
        inputs = {
            name: Touched(n, 0, name, Layout(0, shape, (shape[1], 1), 4))
            for n, (name, shape) in enumerate(sizes.items())
        }
        x = inputs["x"]
        call = ProgramCall(text="x.mul_(2)", line=self.line, reads=(x,), writes=(x,), made=(), operations=range(1))
        return Program(calls=(call,), inputs=tuple(inputs.values()), outputs=())

    def graphs(self) -> tuple[fx.GraphModule, fx.GraphModule, fx.GraphModule]:
        """Make a forward, a joint and a backward graph, as far as a report looks at them."""
        forward, joint, backward = fx.Graph(), fx.Graph(), fx.Graph()
        for graph in (forward, joint):
            weight, x = _placeholder(graph, "primals_1", (5, 3)), _placeholder(graph, "primals_2", (4, 5))
            doubled = self._call(graph, torch.ops.aten.mul.Tensor, (x, 2), (4, 5), "forward")
            h = self._call(graph, torch.ops.aten.mm.default, (doubled, weight), (4, 3), "forward")
            if graph is forward:
                graph.output((doubled, h, doubled))
                continue
            tangent = _placeholder(graph, "tangents_1", (4, 3))
            turned = self._call(graph, torch.ops.aten.t.default, (doubled,), (5, 4), "backward")
            gradient = self._call(graph, torch.ops.aten.mm.default, (turned, tangent), (5, 3), "backward")
            graph.output((doubled, h, gradient))
        saved, tangent = _placeholder(backward, "mul", (4, 5)), _placeholder(backward, "tangents_1", (4, 3))
        turned = self._call(backward, torch.ops.aten.t.default, (saved,), (5, 4), "backward")
        backward.output((self._call(backward, torch.ops.aten.mm.default, (turned, tangent), (5, 3), "backward"),))
        return tuple(fx.GraphModule({}, graph) for graph in (forward, joint, backward))  # type: ignore[return-value]

    def _call(
        self,
        graph: fx.Graph,
        target: Callable[..., object],
        args: tuple[object, ...],
        shape: tuple[int, ...],
        phase: str,
    ) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta.update(val=torch.empty(shape), phase=phase, user_line=self.line)
        return node

    def partition(self, forward: fx.GraphModule, backward: fx.GraphModule) -> PartitionRecord:
        """Save the doubled ``x`` and the weight."""
        return PartitionRecord(
            partitioner="default_partition",
            forward=forward,
            backward=backward,
            num_forward_outputs=2,
            saved=(
                SavedValue(
                    name="mul",
                    spec=spec_of(torch.empty(4, 5)),
                    nbytes=80,
                    reason="mm needs it",
                    line=self.line,
                    is_input=False,
                    is_output=True,
                    used_by=("t",),
                ),
                SavedValue(
                    name="primals_1",
                    spec=spec_of(torch.empty(5, 3)),
                    nbytes=60,
                    reason="mm needs it",
                    line=None,
                    is_input=True,
                    is_output=False,
                    used_by=("mm",),
                ),
            ),
        )

    def compile(self, forward: fx.GraphModule, backward: fx.GraphModule) -> CompileRecord:
        """Compile both, each into one kernel."""
        return CompileRecord(
            graphs=tuple(
                CompiledGraphRecord(
                    kind=kind,
                    name=f"step__0_{kind}_1",
                    backend="inductor",
                    code=f"def {kind}(): ...",
                    wrapper="# output code\n" if kind == "forward" else None,
                    kernels=(
                        KernelSource(
                            name=f"cpp_fused_{kind}", language="c++", source=self.kernel, graph=f"step__0_{kind}_1"
                        ),
                    ),
                    compile_ns=400_000_000,
                    nodes=node_records(module.graph),
                )
                for kind, module in (("forward", forward), ("backward", backward))
            )
        )


def _placeholder(graph: fx.Graph, name: str, shape: tuple[int, ...]) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = torch.empty(shape)
    return node


def _output(
    index: int,
    kind: OutputType,
    tensor: torch.Tensor,
    base: int | None = None,
    views: tuple[ViewStep, ...] = (),
) -> OutputAliasInfo:
    return OutputAliasInfo(
        index=index,
        name=f"out[{index}]",
        output_type=kind,
        raw_type="torch.Tensor",
        spec=spec_of(tensor),
        base_idx=base,
        requires_grad=tensor.requires_grad,
        views=views,
    )


def _transposed() -> tuple[ViewStep, ...]:
    return (ViewStep(target="aten.t.default"),)


def _unbind(item: int) -> tuple[ViewStep, ...]:
    return (ViewStep(target="aten.unbind.int", item=item),)


@pytest.fixture
def story() -> Story:
    """Return an imagined engine."""
    return Story()


@pytest.fixture
def tell() -> Callable[..., Story]:
    """Return the maker of imagined engines, for names of one's own."""
    return Story


@pytest.fixture
def recording(story: Story) -> Iterator[Recording]:
    """Record two entries of one function, a refusal of another, calls and a graph break."""
    with Report.record("a test") as recording:
        first = story.compiled()
        story.called(first, cold=True)
        story.called(first, times=2)
        second = story.compiled(reason=REASON)
        story.called(second)
        story.called(None)
        story.refused(function="dropout_net")
        stack = (FrameSummary("/home/me/train.py", 7, "forward"),)
        events.emit(events.GraphBreak(stack=stack, reason="call to print()"))
    return recording


@pytest.fixture
def report(recording: Recording) -> Report:
    """Return the report of `recording`."""
    return recording.report()
