"""The backend that compiles for a card that is not there."""

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
from aotlab.backends.inductor import InductorBackend
from aotlab.errors import UsageError
from aotlab.rehearse.cards import Card, card_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel as the card would run it.

    Attributes
    ----------
    name, graph, source
        Its name, which graph it is of (``"forward"``, ``"backward"``, ``"inference"``), and its Triton source.
    ptx, cubin
        What Triton compiled of it; empty under the interpreter.
    registers, shared, spill_stores, spill_loads, warps
        Registers of a thread, bytes of shared memory, bytes that are spilled, warps of a block.
    grid
        How many blocks are launched; of several calls the first's.
    calls, bytes_read, bytes_written
        How often the graph calls it, and the bytes of the tensors that a call is given to read and to write.
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
        """Return the numbers that a report shows."""
        return (
            ("registers", self.registers),
            ("shared_bytes", self.shared),
            ("spilled_bytes", self.spill_stores + self.spill_loads),
            ("blocks", math.prod(self.grid)),
            ("bytes_read", self.bytes_read),
            ("bytes_written", self.bytes_written),
        )


class _Called:
    """What compiled code calls in place of a kernel."""

    def __init__(self, loaded: rehearsal.LoadedKernel, *, interpret: bool) -> None:
        self.loaded, self._interpret = loaded, interpret
        self.grid = (1, 1, 1)
        self.calls = self.read = self.written = 0

    def run(self, *given: Any, stream: Any = None) -> None:
        """Take note of a call, and let the interpreter do it."""
        if not self.calls:
            self.grid = self.loaded.grid(given)
            for name, value in self.loaded.arguments(given).items():
                if isinstance(value, Tensor):
                    self.read += value.nbytes if name.startswith("in_") else 0
                    self.written += value.nbytes if name.startswith(("out_", "in_out_")) else 0
        self.calls += 1
        if self._interpret:
            self.loaded.interpret(given)


class RehearsalBackend(InductorBackend):
    """Compile by Inductor for a card; what is compiled runs in CPU memory, by Triton's interpreter or eagerly.

    ``kernels_made`` are the kernels of all graphs that were compiled.
    """

    name = "inductor"

    def __init__(
        self, card: str | Card = "h100", *, interpret: bool = False, draws: Literal["torch", "eager"] = "torch"
    ) -> None:
        check_available()
        if interpret != rehearsal.interprets():
            say = "Set TRITON_INTERPRET=1 before Python starts" if interpret else "Unset TRITON_INTERPRET"
            raise UsageError(f"Triton {'compiles' if interpret else 'interprets'} kernels in this process. {say}")
        super().__init__(draws=draws)
        self.card = card_named(card)
        self.kernels_made: list[Kernel] = []
        self._interpret = interpret

    def compile(self, request: CompileRequest) -> Callable[..., Any]:
        """Compile one graph for the card."""
        module = copy.deepcopy(request.module)
        eager = internals.boxed_forward_of(copy.deepcopy(request.module))
        constants = rehearsal.lift_constants(module)
        example = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
        made: dict[str, _Called] = {}

        def write_kernel(name: str, source: str) -> _Called:
            made[name] = _Called(rehearsal.load_kernel(name, source), interpret=self._interpret)
            return made[name]

        with self._moved(write_kernel):
            compiled = super().compile(replace(request, module=module))
        if not self._interpret:  # a run in which the kernels do nothing says how they are called
            any_values: Any = rehearsal.AnyValues
            with standing_in(self.card, write_kernel), torch.random.fork_rng(devices=()), any_values():
                compiled([*map(_zeros, example[: len(example) - len(constants)]), *constants])
                found = [_compiled(each, request.kind, self.card) for each in made.values()]
            self.kernels_made += found
            return self._told(eager, compiled, found)

        def run(args: list[Any]) -> Any:
            with standing_in(self.card, write_kernel):
                results = compiled([*args, *constants])
            self.kernels_made += [_described(each, request.kind) for each in made.values()]
            made.clear()  # they are told of once
            return results

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _told(self, eager: Any, compiled: Any, found: Sequence[Kernel]) -> Callable[..., Any]:
        """Let what runs in place of the kernels tell of them, as `kernels` and `source` ask."""
        measures = {kernel.name: kernel.measures() for kernel in found}
        written = super().kernels(compiled)
        eager.rehearsed = [replace(each, measures=measures.get(each.name, ())) for each in written]
        eager.source_code = super().source(compiled)
        return cast(Callable[..., Any], eager)

    def kernels(self, compiled: Any) -> tuple[KernelSource, ...]:
        """Return the kernels that were written for the card, with what became of them."""
        return tuple(getattr(compiled, "rehearsed", ()))

    @contextmanager
    def _moved(self, write_kernel: Callable[[str, str], Any]) -> Iterator[None]:
        """Move graphs to the card behind the passes that compute with constants, which would make these there."""
        compile_inner = internals.inductor_compile

        def on_card(module: Any, example_inputs: Any, *, fake_mode: Any, **settings: Any) -> Any:
            with standing_in(self.card, write_kernel):
                rehearsal.to_card(module, fake_mode)
                check_dtypes(module, self.card)
                given = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
                return compile_inner(module, given, fake_mode=fake_mode, **settings)

        with replaced(internals, "inductor_compile", on_card):
            yield


def check_available() -> None:
    """Refuse a rehearsal where it cannot be, or need not."""
    if importlib.util.find_spec("triton") is None:
        raise UsageError("a rehearsal needs Triton: pip install 'aotlab[rehearse]'")
    if torch.cuda.is_available():
        raise UsageError("there is a GPU here: run on it; a rehearsal is for machines without one")


def check_dtypes(module: fx.GraphModule, card: Card) -> None:
    """Refuse inputs and results that Inductor does not compile for older cards."""
    ends = [*module.graph.find_nodes(op="placeholder"), *module.graph.output_node().all_input_nodes]
    for node in ends if card.major < 8 else ():
        if getattr(node.meta["val"], "dtype", None) == torch.bfloat16:
            raise UsageError(
                f"{card.name} does not support bfloat16, which `{node.name}` is; take float16, or a newer card"
            )


@contextmanager
def standing_in(card: Card, write_kernel: Callable[[str, str], Any]) -> Iterator[None]:
    """Let a card stand in, for the length of a block."""
    with rehearsal.card_stands_in(card.properties(), write_kernel):
        yield


def _zeros(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return int(value) if isinstance(value, torch.SymInt) else value
    size = [int(n) for n in value.shape]
    return torch.empty_strided(size, [int(n) for n in value.stride()], dtype=value.dtype).zero_()


def _described(called: _Called, graph: str) -> Kernel:
    loaded = called.loaded
    return Kernel(
        name=loaded.name,
        graph=graph,
        source=loaded.source,
        grid=called.grid,
        calls=called.calls,
        bytes_read=called.read,
        bytes_written=called.written,
    )


def _compiled(called: _Called, graph: str, card: Card) -> Kernel:
    ptx, cubin, shared, warps = called.loaded.compile(card.capability)
    registers, stores, loads = rehearsal.resources(ptx)
    made = replace(_described(called, graph), ptx=ptx, cubin=cubin, shared=shared, warps=warps)
    return replace(made, registers=registers, spill_stores=stores, spill_loads=loads)
