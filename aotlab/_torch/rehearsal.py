"""A simulated GPU, so that Inductor and Triton compile for a GPU on a machine without a GPU.

Functions of torch and Triton that query the device are replaced by functions that answer from a table of the GPU's
properties. This is not part of the engine. Only `aotlab.rehearse` uses it. All changes are undone afterwards.
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

#: The modules of torch whose cached functions remember properties of the machine. Their caches are cleared.
_REMEMBERING = (
    "torch.utils._triton", "torch._inductor.utils", "torch._inductor.runtime.hints", "torch._inductor.config",
    "torch._inductor.runtime.runtime_utils", "torch._inductor.codegen.triton", "torch._inductor.codegen.common",
)  # fmt: skip


@contextmanager
def card_simulated(properties: Mapping[str, Any], write_kernel: Callable[[str, str], Any]) -> Iterator[None]:
    """Let Inductor compile for a GPU with these ``properties``, for the length of a block.

    For each Triton kernel, Inductor calls ``write_kernel`` with the kernel's name and source. The compiled code then
    calls the result of ``write_kernel`` in place of the kernel. If the compiled code allocates GPU memory, it gets CPU
    memory.
    """
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import async_compile, config, inductor_prims
    from torch._inductor.runtime import triton_helpers
    from torch._subclasses import fake_tensor

    major, minor = properties["major"], properties["minor"]
    card = SimpleNamespace(**properties, type="cuda", index=0, cc=10 * major + minor)
    properties_of, zero = (lambda device=None: card), (lambda *_: 0)
    replacements: list[tuple[Any, str, Any]] = [
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
        (torch._C._dynamo.guards, "assert_size_stride", zero),  # some CPU ops return other layouts than the GPU's
        (async_compile.AsyncCompile, "triton", lambda _, name, source, *__, **___: write_kernel(name, source)),
        (triton_helpers, "set_driver_to_gpu", lambda: None),
        (inductor_prims.lookup_seed, "prim_meta_impl", _seed),  # the original indexes a fake tensor on the GPU
        (FakeTensorMode, "avoid_device_init", True),  # fake GPU tensors need no device
        (fake_tensor, "init_gpu_context", lambda device: None),
    ]
    settings = {"compile_threads": 1, "force_disable_caches": True, "triton.cudagraphs": False}
    with ExitStack() as stack:
        stack.callback(_forget)
        for owner, name, answer in replacements:
            stack.enter_context(mock.patch.object(owner, name, answer, create=True))
        stack.enter_context(config.patch(settings))
        stack.enter_context(mock.patch.dict(decomposition_table, _WITHOUT_A_DEVICE))
        stack.enter_context(_driver(card.cc))
        stack.enter_context(_CopiesTouchNoCard())
        _forget()
        yield


#: The replacement of a decomposition. The original negates a mask with ``~``, which would query the current device. The
#: replacement only gives the result the right shape, which is enough for fake tensors.
_WITHOUT_A_DEVICE = {
    torch.ops.aten._unsafe_masked_index_put_accumulate.default: lambda x, *_: torch.ops.aten.empty_like.default(x)
}


class _CopiesTouchNoCard(TorchFunctionMode):
    """Calls the op ``copy_`` in place of the method on fake GPU tensors: the method would query the current device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and args[0].device.type == "cuda":
            return torch.ops.aten.copy_.default(*args)
        return func(*args, **(kwargs or {}))


def _seed(seeds: Tensor, _: int) -> Tensor:
    return torch.empty((), dtype=seeds.dtype, device=seeds.device)


def _empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate CPU memory in place of GPU memory that a kernel must fill.

    The memory is filled with NaN (integers: with ones), so that results show elements that the kernel did not write.
    """
    memory = torch.empty_strided(size, stride, dtype=dtype)
    return memory.fill_(float("nan")) if dtype.is_floating_point else memory.fill_(1)


class AnyValues(TorchDispatchMode):
    """A mode for a run in which the kernels do nothing, so that ops get memory with arbitrary values.

    If an op raises because it cannot use such values, for example as indices, its results are zeros.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except (RuntimeError, IndexError):
            if not func._schema.returns:  # the op is a check
                return None
            with FakeTensorMode() as mode:
                fake_arguments = pytree.tree_map_only(Tensor, mode.from_tensor, (args, kwargs or {}))
                result = func(*fake_arguments[0], **fake_arguments[1])
            return pytree.tree_map_only(Tensor, _zeros_like, result)


def _zeros_like(fake: Tensor) -> Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).zero_()


def _forget() -> None:
    """Clear the caches of torch's functions that remember properties of the machine."""
    for name in _REMEMBERING:
        for value in vars(sys.modules[name]).values() if name in sys.modules else ():
            if type(value).__name__ == "_lru_cache_wrapper":
                value.cache_clear()


@contextmanager
def _driver(capability: int) -> Iterator[None]:
    """For the length of a block, let Triton's driver report a GPU of this compute capability (90 for 9.0)."""
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
    """Turn the real tensors that are attributes of a graph into its last inputs, in place, and return them."""
    constants: list[Tensor] = []
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target), None)
        if isinstance(value, Tensor):
            with module.graph.inserting_before(next(n for n in module.graph.nodes if n.op != "placeholder")):
                placeholder = module.graph.placeholder(f"held_{len(constants)}")
            placeholder.meta = dict(node.meta)
            node.replace_all_uses_with(placeholder)
            module.graph.erase_node(node)
            constants.append(value)
    module.recompile()
    return constants


def to_card(module: fx.GraphModule, fake_mode: FakeTensorMode) -> None:
    """Move a graph to the GPU, in place: the device arguments of its ops, and the fake values of its nodes."""
    from torch.fx.node import map_arg

    def moved(value: Any) -> Any:
        return torch.device("cuda", 0) if isinstance(value, torch.device) and value.type == "cpu" else value

    def stand_in(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        with fake_mode:
            tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
        return tensor.requires_grad_(value.requires_grad) if value.is_leaf and tensor.is_floating_point() else tensor

    for node in module.graph.nodes:
        node.args, node.kwargs = pytree.tree_map(moved, node.args), pytree.tree_map(moved, node.kwargs)
        if node.op == "placeholder":
            node.meta["val"] = stand_in(node.meta.get("val"))
        elif node.op == "call_function" and "val" in node.meta:
            args, kwargs = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
            with fake_mode:
                node.meta["val"] = node.target(*args, **kwargs)
        elif node.op == "get_attr":
            raise UsageError(f"`{node.target}` cannot be rehearsed: it is an inner graph, for example of torch.cond")
    module.recompile()


@dataclass(slots=True, eq=False)
class LoadedKernel:
    """A Triton kernel that Inductor wrote, loaded from its source.

    ``function`` is Triton's function, and ``config`` its first launch configuration. ``meta`` is Inductor's metadata
    for Triton (signature and constants), and ``inductor`` its other metadata. ``folder`` is a temporary folder with the
    source.
    """

    name: str
    source: str
    function: Any
    config: Any
    meta: Mapping[str, Any]
    inductor: Mapping[str, Any]
    folder: tempfile.TemporaryDirectory[str] = field(repr=False)

    def arguments(self, values: Sequence[Any]) -> dict[str, Any]:
        """Return the run-time arguments of a launch by name; ``values`` are the arguments in order."""
        fixed = {*self.config.kwargs, *self.meta["constants"]}
        return dict(zip([name for name in self.function.arg_names if name not in fixed], values, strict=False))

    def grid(self, values: Sequence[Any]) -> tuple[int, int, int]:
        """Return the grid of a launch with the arguments ``values``: the number of programs per dimension."""
        from torch._inductor.runtime.triton_heuristics import GridExpr

        expression = GridExpr.from_meta(dict(self.inductor), self.config)
        x, y, z = expression.eval_slow({**self.arguments(values), **self._constants()})
        return int(x), int(y), int(z)

    def _constants(self) -> dict[str, Any]:
        return {**self.meta["constants"], **self.config.kwargs}

    def interpret(self, values: Sequence[Any]) -> None:
        """Run the kernel in Triton's interpreter, on CPU memory."""
        from torch._inductor.runtime import triton_helpers

        with mock.patch.object(triton_helpers, "libdevice", _LIBRARY):
            self.function[self.grid(values)](**self.arguments(values), **self._constants())

    def compile(self, capability: int) -> tuple[str, bytes, int, int]:
        """Compile the kernel for a compute capability (90 for 9.0).

        Return the PTX, the cubin, the bytes of shared memory, and the number of warps.
        """
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
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        return compiled.asm["ptx"], compiled.asm["cubin"], compiled.metadata.shared, compiled.metadata.num_warps


_NAMES = {"fabs": "abs", "rint": "round", "nearbyint": "round", "isfinited": "isfinite", "finitef": "isfinite"}


class _Library:
    """The functions of CUDA's libdevice, implemented with torch's functions, for Triton's interpreter.

    The interpreter runs kernels on the CPU and has no libdevice.
    """

    def __getattr__(self, name: str) -> Callable[..., Any]:
        name = _NAMES.get(name, name)
        function: Any = getattr(torch, name, None) or getattr(torch.special, name)
        return functools.partial(self._call, function)

    @staticmethod
    def _call(function: Callable[..., Any], *operands: Any, **_: Any) -> Any:
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        first = next(each for each in operands if isinstance(each, tl.tensor))
        arrays = [torch.from_numpy(each.handle.data) if isinstance(each, tl.tensor) else each for each in operands]
        result = function(*arrays)
        scalar = tl.int1 if result.dtype == torch.bool else first.dtype
        kind = tl.block_type(scalar, [*result.shape]) if first.type.is_block() else scalar
        return tl.tensor(TensorHandle(result.numpy(), scalar), kind)


_LIBRARY = _Library()


def load_kernel(name: str, source: str) -> LoadedKernel:
    """Load a kernel from the source that Inductor wrote, without Inductor's code that would tune and launch it."""
    from torch._inductor.runtime import triton_heuristics

    kernels: list[tuple[Any, ...]] = []

    def cached_autotune(
        size_hints: Any, configs: Any, triton_meta: Any, heuristic_type: Any, filename: Any = None,
        inductor_meta: Any = None, **_: Any,
    ) -> Callable[[Any], Any]:  # fmt: skip
        return lambda function: kernels.append((function, configs[0], triton_meta, inductor_meta))

    folder = tempfile.TemporaryDirectory(prefix="aotlab_rehearse_")
    path = Path(folder.name, f"{name}.py")
    path.write_text(source, encoding="utf-8")  # Triton reads the source of a function from its file
    spec = importlib.util.spec_from_file_location(f"_aotlab_rehearsed_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(triton_heuristics, "cached_autotune", cached_autotune):
        spec.loader.exec_module(module)
    if interprets():
        module.libdevice = _LIBRARY  # type: ignore[attr-defined]
    ((function, config, meta, inductor),) = kernels
    return LoadedKernel(name, source, function, config, meta, inductor or {}, folder)


@functools.cache
def interprets() -> bool:
    """Tell whether Triton interprets kernels in this process (``TRITON_INTERPRET=1``) and does not compile them."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def resources(ptx: str) -> tuple[int, int, int]:
    """Return the number of registers of a kernel, and the bytes of its spill stores and of its spill loads.

    These numbers are read from the output of NVIDIA's assembler ptxas, which Triton includes. ``ptx`` is the text of
    the kernel.
    """
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
        output = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    patterns = (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads")
    matches = (re.search(pattern, output) for pattern in patterns)
    registers, stores, loads = (0 if match is None else int(match[1]) for match in matches)
    return registers, stores, loads
