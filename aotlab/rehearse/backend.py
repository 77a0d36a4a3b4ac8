"""The backend that compiles for a GPU (a *card*) that this machine does not have."""

from __future__ import annotations

import copy
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx

from aotlab import _torch as internals
from aotlab._torch import rehearsal
from aotlab._torch.replaced import replaced
from aotlab.backends.base import CompileRequest, KernelSource
from aotlab.backends.inductor_backend import InductorBackend
from aotlab.errors import UsageError
from aotlab.rehearse.cards import Card, card_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One Triton kernel, compiled for a model of GPU (a card).

    Attributes
    ----------
    name, graph, source
        The kernel's name, the graph that it belongs to (``"forward"``, ``"backward"``, ``"inference"``), and its
        Triton source.
    ptx, cubin
        The code into which Triton compiled the kernel. It is empty if Triton interprets the kernel.
    registers, shared, spill_stores, spill_loads, warps
        Registers per thread, bytes of shared memory per block, bytes that register spills store and load, and warps per
        block. All are 0 if Triton interprets the kernel.
    grid
        The number of blocks, in each of three dimensions, that the first call of the kernel launches.
    calls, bytes_read, bytes_written
        The number of times that one run of the graph calls the kernel, and the sizes in bytes of the tensors that the
        first of these calls may read and write.
    """

    name: str
    graph: str
    source: str
    ptx: str = field(default="", repr=False)
    cubin: bytes = field(default=b"", repr=False)
    registers: int = 0
    shared: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    warps: int = 0
    grid: tuple[int, int, int] = (1, 1, 1)
    calls: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    def measures(self) -> tuple[tuple[str, int], ...]:
        """Return the numbers about the kernel that a report shows, each with its name in the report."""
        return (
            ("registers", self.registers),
            ("shared_bytes", self.shared),
            ("spilled_bytes", self.spill_stores + self.spill_loads),
            ("blocks", math.prod(self.grid)),
            ("bytes_read", self.bytes_read),
            ("bytes_written", self.bytes_written),
        )


class _LaunchRecorder:
    """The object that Inductor's output code calls in place of a kernel. It records the calls of the kernel.

    If ``interpret`` is true, it also runs the kernel in Triton's interpreter. ``loaded`` is the kernel.
    """

    def __init__(self, loaded: rehearsal.LoadedKernel, *, interpret: bool) -> None:
        self.loaded, self._interpret = loaded, interpret
        self.grid = (1, 1, 1)
        self.calls = self.bytes_read = self.bytes_written = 0

    def run(self, *arguments: Any, stream: Any = None) -> None:
        """Record a call of the kernel with these arguments, and run the kernel if the interpreter is used."""
        if not self.calls:
            self.grid = self.loaded.grid(arguments)
            for name, value in self.loaded.arguments(arguments).items():
                if isinstance(value, Tensor):
                    self.bytes_read += value.nbytes if name.startswith("in_") else 0
                    self.bytes_written += value.nbytes if name.startswith(("out_", "in_out_")) else 0
        self.calls += 1
        if self._interpret:
            self.loaded.interpret(arguments)


class RehearsalBackend(InductorBackend):
    """Compiles for a GPU with Inductor, and runs on the CPU: the kernels in Triton's interpreter, or the graph eagerly.

    If ``interpret`` is true, compiled graphs run the kernels in Triton's interpreter. Otherwise the kernels are
    compiled but cannot run, so a compiled graph runs op by op. ``draws`` says whose random numbers Inductor's graphs
    use: eager's, or those of `torch.compile`. ``kernels_made`` contains the kernels of all compiled graphs.
    """

    name = "inductor"

    def __init__(
        self, card: str | Card = "h100", *, interpret: bool = False, draws: Literal["torch", "eager"] = "torch"
    ) -> None:
        check_available()
        if interpret != rehearsal.interprets():
            instruction = "Set TRITON_INTERPRET=1 before Python starts" if interpret else "Unset TRITON_INTERPRET"
            raise UsageError(
                f"Triton {'compiles' if interpret else 'interprets'} kernels in this process. {instruction}"
            )
        super().__init__(draws=draws)
        self.card = card_named(card)
        self.kernels_made: list[Kernel] = []
        self._interpret = interpret

    def compile(self, request: CompileRequest) -> Callable[..., Any]:
        """Compile one graph for the card; return a callable that runs on the CPU."""
        module = copy.deepcopy(request.module)
        eager = internals.boxed_forward_of(copy.deepcopy(request.module))
        constants = rehearsal.lift_constants(module)
        example = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
        launches: dict[str, _LaunchRecorder] = {}

        def write_kernel(name: str, source: str) -> _LaunchRecorder:
            launches[name] = _LaunchRecorder(rehearsal.load_kernel(name, source), interpret=self._interpret)
            return launches[name]

        with self._moved_to_card(write_kernel):
            compiled = super().compile(replace(request, module=module))
        # Inductor's output code runs once with kernels that do nothing, to record their arguments and grids.
        if not self._interpret:
            any_values: Any = rehearsal.AnyValues
            with using_card(self.card, write_kernel), torch.random.fork_rng(devices=()), any_values():
                compiled([*map(_zeros, example[: len(example) - len(constants)]), *constants])
                kernels = [_compiled_kernel(each, request.kind, self.card) for each in launches.values()]
            self.kernels_made += kernels
            return self._eager_with_kernels(eager, compiled, kernels)

        def run(args: list[Any]) -> Any:
            with using_card(self.card, write_kernel):
                results = compiled([*args, *constants])
            self.kernels_made += [_recorded_kernel(each, request.kind) for each in launches.values()]
            launches.clear()  # each kernel is recorded once
            return results

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _eager_with_kernels(self, eager: Any, compiled: Any, kernels: Sequence[Kernel]) -> Callable[..., Any]:
        """Store the kernels and the output code as attributes of ``eager``, and return ``eager``.

        ``eager`` is the callable that runs the graph op by op. ``compiled`` is the callable of Inductor's output code,
        which cannot run here. The methods `kernels` and `source` read the two attributes.
        """
        measures = {kernel.name: kernel.measures() for kernel in kernels}
        sources = super().kernels(compiled)
        eager.rehearsed = [replace(each, measures=measures.get(each.name, ())) for each in sources]
        eager.source_code = super().source(compiled)
        return cast(Callable[..., Any], eager)

    def kernels(self, compiled: Any) -> tuple[KernelSource, ...]:
        """Return the kernels of a compiled graph, each with the numbers that a report shows (see `Kernel.measures`)."""
        return tuple(getattr(compiled, "rehearsed", ()))

    @contextmanager
    def _moved_to_card(self, write_kernel: Callable[[str, str], Any]) -> Iterator[None]:
        """Make Inductor compile for the card while the context is open.

        The device of the graph's tensors is changed to the GPU just before Inductor generates code, and not earlier.
        The passes before code generation create constants to compute with, and cannot create them on a GPU that does
        not exist. ``write_kernel`` receives the name and the source of each kernel (see `using_card`).
        """
        compile_inner = internals.inductor_compile

        def on_card(module: Any, example_inputs: Any, *, fake_mode: Any, **settings: Any) -> Any:
            with using_card(self.card, write_kernel):
                rehearsal.to_card(module, fake_mode)
                check_dtypes(module, self.card)
                card_inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
                return compile_inner(module, card_inputs, fake_mode=fake_mode, **settings)

        with replaced(internals, "inductor_compile", on_card):
            yield


def check_available() -> None:
    """Raise UsageError if Triton is missing, or if the machine has a GPU."""
    if importlib.util.find_spec("triton") is None:
        raise UsageError("a rehearsal needs Triton: pip install 'aotlab[rehearse]'")
    if torch.cuda.is_available():
        raise UsageError("there is a GPU here: run on this GPU, because a rehearsal is for machines without one")


def check_dtypes(module: fx.GraphModule, card: Card) -> None:
    """Raise UsageError if an input or a result of a graph is bfloat16 and the card does not support this dtype."""
    ends = [*module.graph.find_nodes(op="placeholder"), *module.graph.output_node().all_input_nodes]
    for node in ends if card.major < 8 else ():
        if getattr(node.meta["val"], "dtype", None) == torch.bfloat16:
            raise UsageError(
                f"{card.name} does not support bfloat16, the dtype of `{node.name}`; use float16, or a newer card"
            )


@contextmanager
def using_card(card: Card, write_kernel: Callable[[str, str], Any]) -> Iterator[None]:
    """Make Inductor and Triton see a GPU with the properties of ``card`` while the context is open.

    ``write_kernel`` receives the name and the source of each kernel, and returns the object that is called in place of
    the kernel.
    """
    with rehearsal.card_simulated(card.properties(), write_kernel):
        yield


def _zeros(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return int(value) if isinstance(value, torch.SymInt) else value
    size = [int(n) for n in value.shape]
    return torch.empty_strided(size, [int(n) for n in value.stride()], dtype=value.dtype).zero_()


def _recorded_kernel(recorder: _LaunchRecorder, graph: str) -> Kernel:
    loaded = recorder.loaded
    return Kernel(
        name=loaded.name,
        graph=graph,
        source=loaded.source,
        grid=recorder.grid,
        calls=recorder.calls,
        bytes_read=recorder.bytes_read,
        bytes_written=recorder.bytes_written,
    )


def _compiled_kernel(recorder: _LaunchRecorder, graph: str, card: Card) -> Kernel:
    ptx, cubin, shared, warps = recorder.loaded.compile(card.capability)
    registers, stores, loads = rehearsal.resources(ptx)
    kernel = replace(_recorded_kernel(recorder, graph), ptx=ptx, cubin=cubin, shared=shared, warps=warps)
    return replace(kernel, registers=registers, spill_stores=stores, spill_loads=loads)
