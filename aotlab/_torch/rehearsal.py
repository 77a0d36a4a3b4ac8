"""A GPU that is not there: what Inductor and Triton ask of a card is answered from a table, and undone afterwards.

Not part of the engine: `aotlab.rehearse` alone uses it. Nothing here is done on a machine with a GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from aotlab._torch import FakeTensorMode
from aotlab.errors import UsageError

#: Modules of torch's with functions that remember what a machine has.
_REMEMBERING = (
    "torch.utils._triton", "torch._inductor.utils", "torch._inductor.runtime.hints", "torch._inductor.config",
    "torch._inductor.runtime.runtime_utils", "torch._inductor.codegen.triton", "torch._inductor.codegen.common",
)  # fmt: skip


@contextmanager
def card_stands_in(properties: Mapping[str, Any], write_kernel: Callable[[str, str], Any]) -> Iterator[None]:
    """Let Inductor compile for a card of these ``properties``, and `write_kernel` make what it calls of its kernels.

    Memory that compiled code asks for on the card is the CPU's.
    """
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import async_compile, config, inductor_prims
    from torch._inductor.runtime import triton_helpers
    from torch._subclasses import fake_tensor

    major, minor = properties["major"], properties["minor"]
    card = SimpleNamespace(**properties, type="cuda", index=0, cc=10 * major + minor)
    properties_of, zero = (lambda device=None: card), (lambda *_: 0)
    asked: list[tuple[Any, str, Any]] = [
        (CudaInterface.Worker, "get_device_properties", staticmethod(properties_of)),
        (CudaInterface.Worker, "current_device", staticmethod(zero)),
        (CudaInterface, "get_device_properties", staticmethod(properties_of)),
        (CudaInterface, "get_compute_capability", staticmethod(lambda device=None: card.cc)),
        (CudaInterface, "is_available", staticmethod(lambda: True)),
        (CudaInterface, "current_device", staticmethod(zero)),
        (CudaInterface, "device_count", staticmethod(lambda: 1)),
        (CudaInterface, "is_triton_capable", staticmethod(lambda device=None: True)),
        (CudaInterface, "raise_if_triton_unavailable", staticmethod(lambda device=None: None)),
        (torch.cuda, "get_device_properties", properties_of),
        (torch.cuda, "get_device_capability", lambda device=None: (major, minor)),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "current_device", zero),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "_exchange_device", zero),
        (torch.cuda, "_maybe_exchange_device", zero),
        (torch.cuda, "get_rng_state", lambda *_: torch.zeros(16, dtype=torch.uint8)),
        (torch.cuda, "set_rng_state", lambda *_: None),
        (torch.cuda, "set_device", lambda *_: None),
        (torch.cuda, "_DeviceGuard", lambda *_: nullcontext()),
        (torch._C, "_cuda_getCurrentRawStream", zero),
        (torch._C._dynamo.guards, "_empty_strided_cuda", _empty),
        (torch._C._dynamo.guards, "assert_size_stride", zero),  # some ops of the CPU's give results of other sizes
        (async_compile.AsyncCompile, "triton", lambda _, name, source, *__, **___: write_kernel(name, source)),
        (triton_helpers, "set_driver_to_gpu", lambda: None),
        (inductor_prims.lookup_seed, "prim_meta_impl", _seed),  # whose own takes an item
        (FakeTensorMode, "avoid_device_init", True),  # fakes of the card touch none
        (fake_tensor, "init_gpu_context", lambda device: None),
    ]
    settings = {"compile_threads": 1, "force_disable_caches": True, "triton.cudagraphs": False}
    with ExitStack() as stack:
        stack.callback(_forget)
        for owner, name, answer in asked:
            stack.enter_context(mock.patch.object(owner, name, answer, create=True))
        stack.enter_context(config.patch(settings))
        stack.enter_context(mock.patch.dict(decomposition_table, _WITHOUT_A_DEVICE))
        stack.enter_context(_driver(card.cc))
        stack.enter_context(_CopiesTouchNoCard())
        _forget()
        yield


#: What fakes are asked of ops whose decomposition negates a mask, for which Python asks which card is current.
_WITHOUT_A_DEVICE = {
    torch.ops.aten._unsafe_masked_index_put_accumulate.default: lambda x, *_: torch.ops.aten.empty_like.default(x)
}


class _CopiesTouchNoCard(TorchFunctionMode):
    """Let fakes of the card be copied into each other by the op: the method asks which card is current."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and args[0].device.type == "cuda":
            return torch.ops.aten.copy_.default(*args)
        return func(*args, **(kwargs or {}))


def _seed(seeds: Tensor, _: int) -> Tensor:
    return torch.empty((), dtype=seeds.dtype, device=seeds.device)


def _empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make memory that a kernel has to fill: what it leaves out is seen in the results."""
    made = torch.empty_strided(size, stride, dtype=dtype)
    return made.fill_(float("nan")) if dtype.is_floating_point else made.fill_(1)


class AnyValues(TorchDispatchMode):
    """Let ops run on memory that no kernel has filled: where they find no sense in it they give zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except (RuntimeError, IndexError):
            if not func._schema.returns:  # a check
                return None
            with FakeTensorMode() as mode:
                given = pytree.tree_map_only(Tensor, mode.from_tensor, (args, kwargs or {}))
                result = func(*given[0], **given[1])
            return pytree.tree_map_only(Tensor, _zeros_like, result)


def _zeros_like(fake: Tensor) -> Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).zero_()


def _forget() -> None:
    for name in _REMEMBERING:
        for value in vars(sys.modules[name]).values() if name in sys.modules else ():
            if type(value).__name__ == "_lru_cache_wrapper":
                value.cache_clear()


@contextmanager
def _driver(capability: int) -> Iterator[None]:
    """Tell Triton which card it compiles for."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    stands_in = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
    before = driver._active
    driver.set_active(stands_in)
    try:
        yield
    finally:
        driver._active = before


def lift_constants(module: fx.GraphModule) -> list[Tensor]:
    """Turn the tensors that a graph holds into its last inputs, in place; return them."""
    constants: list[Tensor] = []
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target), None)
        if isinstance(value, Tensor):
            with module.graph.inserting_before(next(n for n in module.graph.nodes if n.op != "placeholder")):
                given = module.graph.placeholder(f"held_{len(constants)}")
            given.meta = dict(node.meta)
            node.replace_all_uses_with(given)
            module.graph.erase_node(node)
            constants.append(value)
    module.recompile()
    return constants


def to_card(module: fx.GraphModule, fake_mode: FakeTensorMode) -> None:
    """Move a graph to the card, in place: what it makes there, and what its values look like."""
    from torch.fx.node import map_arg

    def moved(value: Any) -> Any:
        return torch.device("cuda", 0) if isinstance(value, torch.device) and value.type == "cpu" else value

    def stand_in(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        with fake_mode:
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
        return made.requires_grad_(value.requires_grad) if value.is_leaf and made.is_floating_point() else made

    for node in module.graph.nodes:
        node.args, node.kwargs = pytree.tree_map(moved, node.args), pytree.tree_map(moved, node.kwargs)
        if node.op == "placeholder":
            node.meta["val"] = stand_in(node.meta.get("val"))
        elif node.op == "call_function" and "val" in node.meta:
            args, kwargs = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
            with fake_mode:
                node.meta["val"] = node.target(*args, **kwargs)
        elif node.op == "get_attr":
            raise UsageError(f"`{node.target}` is not rehearsed: it is a graph inside of the graph, as of torch.cond")
    module.recompile()


@dataclass(slots=True, eq=False)
class LoadedKernel:
    """A kernel of Inductor's: Triton's function, the first way to launch it, and what Inductor knows of it."""

    name: str
    source: str
    function: Any
    config: Any
    meta: Mapping[str, Any]
    inductor: Mapping[str, Any]
    folder: tempfile.TemporaryDirectory[str] = field(repr=False)

    def arguments(self, given: Sequence[Any]) -> dict[str, Any]:
        """Name what a call gives to it."""
        fixed = {*self.config.kwargs, *self.meta["constants"]}
        return dict(zip([name for name in self.function.arg_names if name not in fixed], given, strict=False))

    def grid(self, given: Sequence[Any]) -> tuple[int, int, int]:
        """Say how many programs a call launches."""
        from torch._inductor.runtime.triton_heuristics import GridExpr

        expression = GridExpr.from_meta(dict(self.inductor), self.config)
        x, y, z = expression.eval_slow({**self.arguments(given), **self._constants()})
        return int(x), int(y), int(z)

    def _constants(self) -> dict[str, Any]:
        return {**self.meta["constants"], **self.config.kwargs}

    def interpret(self, given: Sequence[Any]) -> None:
        """Run it under Triton's interpreter, in CPU memory."""
        from torch._inductor.runtime import triton_helpers

        with mock.patch.object(triton_helpers, "libdevice", _LIBRARY):
            self.function[self.grid(given)](**self.arguments(given), **self._constants())

    def compile(self, capability: int) -> tuple[str, bytes, int, int]:
        """Compile it: PTX, cubin, the shared memory in bytes, and the number of warps."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = self.function.arg_names
        constants = {(names.index(name),): value for name, value in self._constants().items() if name in names}
        signature = {name: self.meta["signature"].get(name, "constexpr") for name in names}
        signature |= {names[place]: "constexpr" for (place,) in constants}
        attrs = self.meta["configs"][0]
        source = ASTSource(self.function, signature, constants, attrs)
        options = {"num_warps": self.config.num_warps, "num_stages": self.config.num_stages}
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        return made.asm["ptx"], made.asm["cubin"], made.metadata.shared, made.metadata.num_warps


_NAMES = {"fabs": "abs", "rint": "round", "nearbyint": "round", "isfinited": "isfinite", "finitef": "isfinite"}


class _Library:
    """CUDA's library of functions, which the interpreter does not have, by torch's."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        name = _NAMES.get(name, name)
        function: Any = getattr(torch, name, None) or getattr(torch.special, name)
        return functools.partial(self._call, function)

    @staticmethod
    def _call(function: Callable[..., Any], *given: Any, **_: Any) -> Any:
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        first = next(each for each in given if isinstance(each, tl.tensor))
        arrays = [torch.from_numpy(each.handle.data) if isinstance(each, tl.tensor) else each for each in given]
        made = function(*arrays)
        scalar = tl.int1 if made.dtype == torch.bool else first.dtype
        kind = tl.block_type(scalar, [*made.shape]) if first.type.is_block() else scalar
        return tl.tensor(TensorHandle(made.numpy(), scalar), kind)


_LIBRARY = _Library()


def load_kernel(name: str, source: str) -> LoadedKernel:
    """Load the source of a kernel, without what would tune and launch it."""
    from torch._inductor.runtime import triton_heuristics

    found: list[tuple[Any, ...]] = []

    def cached_autotune(
        size_hints: Any, configs: Any, triton_meta: Any, heuristic_type: Any, filename: Any = None,
        inductor_meta: Any = None, **_: Any,
    ) -> Callable[[Any], Any]:  # fmt: skip
        return lambda function: found.append((function, configs[0], triton_meta, inductor_meta))

    folder = tempfile.TemporaryDirectory(prefix="aotlab_rehearse_")
    path = Path(folder.name, f"{name}.py")
    path.write_text(source, encoding="utf-8")  # triton reads functions from their file
    spec = importlib.util.spec_from_file_location(f"_aotlab_rehearsed_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(triton_heuristics, "cached_autotune", cached_autotune):
        spec.loader.exec_module(module)
    if interprets():
        module.libdevice = _LIBRARY  # type: ignore[attr-defined]
    ((function, config, meta, inductor),) = found
    return LoadedKernel(name, source, function, config, meta, inductor or {}, folder)


@functools.cache
def interprets() -> bool:
    """Tell whether Triton runs kernels under its interpreter in this process."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def resources(ptx: str) -> tuple[int, int, int]:
    """Ask NVIDIA's assembler, which comes with Triton, for a kernel's registers, and the bytes that it spills."""
    from triton.backends.nvidia.compiler import get_ptxas

    target = re.search(r"^\.target (sm_(\d+)\w*)", ptx, re.MULTILINE)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx, encoding="utf-8")
        command = [
            get_ptxas(int(target[2])).path,
            "-v",
            f"--gpu-name={target[1]}",
            str(path),
            "-o",
            str(path.with_suffix(".o")),
        ]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    patterns = (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads")
    found = (re.search(pattern, told) for pattern in patterns)
    registers, stores, loads = (0 if match is None else int(match[1]) for match in found)
    return registers, stores, loads
