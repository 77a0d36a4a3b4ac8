"""Guards that run in C++, and the settings that they check."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards
from torch.utils import checkpoint

from aotlab._torch.modes import no_dispatch_modes
from aotlab._torch.symbolic_sizes import fixed

#: A check in C++ that grad mode, autocast, determinism, precision, the number of threads and the default dtype are the
#: same as when the check was made.
SettingsGuard = GlobalStateGuard


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A setting of torch that influences a trace, or that a function may read itself.

    ``name`` is the setting's name in messages. ``read`` and ``write`` are torch's internal functions, because these
    take about 20 ns and the public functions 100 ns. If ``chooses`` is true, the setting decides how some functions are
    traced, and each entry checks it at each call. Settings with ``chooses=False`` are read by kernels at run time. An
    entry checks such a setting only if the user's code mentions a name in ``read_as``. To guard another setting, add a
    row to `_switches`: the guard, `restore_settings` and the report go through all rows.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    chooses: bool
    read_as: frozenset[str]

    def counts(self, names: Container[str]) -> bool:
        """Tell whether an entry checks this setting; ``names`` are the names that the user's code mentions."""
        return self.chooses or any(name in names for name in self.read_as)


#: Variables that Inductor and Triton set themselves while they compile.
_SET_BY_INDUCTOR = [
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_LIBDEVICE_PATH",
    "TRITON_PTXAS_PATH",
]  # fmt: skip
_KEYS_OF_INDUCTOR = [*map(os.fsencode if os.name == "posix" else str, _SET_BY_INDUCTOR)]


class Environment(dict[Any, Any]):
    """A copy of the environment variables, as the bytes that `os.environ` stores.

    It does not contain the variables that Inductor sets while it compiles. Otherwise an entry that Inductor has just
    compiled would not serve its own call. So changes of these variables by the traced function are not noticed. The
    ``repr`` shows only the number of variables, because their values may be secrets.
    """

    def __init__(self) -> None:
        super().__init__(vars(os.environ)["_data"])
        for name in _KEYS_OF_INDUCTOR:
            self.pop(name, None)

    def restore(self) -> None:
        """Make these variables the environment again, and remove all others except those that Inductor sets."""
        kept = {name: os.environ[name] for name in _SET_BY_INDUCTOR if name in os.environ}
        os.environ.clear()
        os.environ.update({os.fsdecode(name): os.fsdecode(value) for name, value in self.items()} | kept)

    def __repr__(self) -> str:
        return f"<environment of {len(self)} variables>"


def _switches() -> Iterator[Switch]:
    """Yield the settings of torch that entries guard, for `SWITCHES`.

    Many of them allow a library, such as cuDNN or oneDNN, or one of several kernels. Attention, recurrent layers and
    norms call different ops depending on the library that may run them, so the trace depends on these settings.
    """
    c, einsum = torch._C, torch.backends.opt_einsum
    gpu = torch.backends.cuda.is_built()
    rows: list[tuple[str, Callable[[], Any], Callable[[Any], object], bool, tuple[str, ...]]] = [
        ("cuda.flash_sdp_enabled()", c._get_flash_sdp_enabled, c._set_sdp_use_flash, True, ()),
        ("cuda.math_sdp_enabled()", c._get_math_sdp_enabled, c._set_sdp_use_math, True, ()),
        ("cuda.mem_efficient_sdp_enabled()", c._get_mem_efficient_sdp_enabled, c._set_sdp_use_mem_efficient, gpu, ()),
        ("cuda.cudnn_sdp_enabled()", c._get_cudnn_sdp_enabled, c._set_sdp_use_cudnn, gpu, ()),
        ("cuda.fp16_bf16_reduction_math_sdp_allowed()", c._get_math_sdp_allow_fp16_bf16_reduction,
         c._set_math_sdp_allow_fp16_bf16_reduction, True, ()),
        ("cudnn.enabled", c._get_cudnn_enabled, c._set_cudnn_enabled, gpu, ()),
        ("cudnn.benchmark", c._get_cudnn_benchmark, c._set_cudnn_benchmark, False, ()),
        ("cudnn.deterministic", c._get_cudnn_deterministic, c._set_cudnn_deterministic, False, ()),
        ("mkldnn.enabled", c._get_mkldnn_enabled, c._set_mkldnn_enabled, True, ()),
        ("mkldnn.deterministic", c._get_mkldnn_deterministic, c._set_mkldnn_deterministic, False, ()),
        # `nn.MultiheadAttention` reads this flag, but takes no fast path under a function mode. Traces run under one.
        ("mha.get_fastpath_enabled()", torch.backends.mha.get_fastpath_enabled,
         torch.backends.mha.set_fastpath_enabled, False, ()),
        # if the package opt_einsum is installed, it chooses the order in which `einsum` contracts its operands
        *((f"opt_einsum.{name}", partial(getattr, einsum, name), partial(setattr, einsum, name), False, ("einsum",))
          for name in ("enabled", "strategy")),
    ]  # fmt: skip
    # The precision of float32. Reading one of the older flags, such as `allow_tf32`, raises an error if one of these
    # settings contradicts that flag.
    for place, backend, op in (
        ("", "generic", "all"),
        *(("cuda." if op == "matmul" else "cudnn.", "cuda", op) for op in ("all", "matmul", "conv", "rnn")),
        *(("mkldnn.", "mkldnn", op) for op in ("all", "matmul", "conv", "rnn")),
    ):
        name = f"{place}{'' if op == 'all' else op + '.'}fp32_precision"
        getter = partial(c._get_fp32_precision_getter, backend, op)
        setter = partial(c._set_fp32_precision_setter, backend, op)
        chooses = gpu and (backend, op) == ("cuda", "conv")  # Inductor generates its kernels for this precision
        rows.append((name, getter, setter, chooses, ("allow_tf32", "get_float32_matmul_precision")))
    rows = [(f"torch.backends.{row[0]}", *row[1:]) for row in rows]
    # if deterministic algorithms are requested, Inductor's kernels fill uninitialized memory depending on this setting
    rows.append(
        ("torch.utils.deterministic.fill_uninitialized_memory", c._get_deterministic_fill_uninitialized_memory,
         c._set_deterministic_fill_uninitialized_memory, True, ())
    )  # fmt: skip
    rows.append(  # in a tuple, because the prologue checks a bool only for truth, and would take None for False
        ("torch.utils.checkpoint.set_checkpoint_early_stop", lambda: (checkpoint._enable_checkpoint_early_stop,),
         lambda stop: setattr(checkpoint, "_enable_checkpoint_early_stop", *stop), False, ("checkpoint",))
    )  # fmt: skip
    rows.append(("torch.is_warn_always_enabled()", c._get_warnAlways, torch.set_warn_always, False, ()))
    rows.append(("os.environ", Environment, Environment.restore, False, ("getenv",)))
    if gpu:
        order = "the order of torch.nn.attention's kernels"
        rows.append((order, c._get_sdp_priority_order, c._set_sdp_priority_order, True, ()))
    for name, read, write, chooses, read_as in rows:
        last = name.rpartition(".")[2].removesuffix("()")
        yield Switch(name=name, read=read, write=write, chooses=chooses, read_as=frozenset((last, *read_as)))


SWITCHES: tuple[Switch, ...] = tuple(_switches())
#: The names of the functions and attributes by which Python code reads the settings in `SWITCHES`.
SWITCH_NAMES = frozenset(name for switch in SWITCHES for name in switch.read_as)


def matmul_precision() -> str | None:
    """Return the precision of float32 matrix products. The result is None if torch raises an error instead.

    torch raises if the newer settings (``torch.backends.….fp32_precision``) contradict the older one.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def autocast_state() -> tuple[tuple[str, Any], ...]:
    """Return the settings of autocast as (name, value) pairs."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return (
        *((f"autocast on {d}", torch.is_autocast_enabled(d)) for d in devices),
        *((f"autocast dtype on {d}", torch.get_autocast_dtype(d)) for d in devices),
        ("autocast cache", torch.is_autocast_cache_enabled()),
    )


@cache
def _order_attention() -> None:
    """Call attention once, so that torch chooses the order of its attention kernels before any trace.

    Otherwise the first attention in the process would choose the order, perhaps within a trace. But the order must not
    change after an entry was traced, because entries guard it.
    """
    with no_dispatch_modes():
        query = torch.empty(1, 1, 1, 8, device="cuda")
        torch._fused_sdp_choice(query, query, query)


def global_state() -> tuple[tuple[str, Any], ...]:
    """Return the global settings that a trace depends on, as (name, value) pairs."""
    if torch.cuda.is_initialized():
        _order_attention()
    return (
        ("grad mode", torch.is_grad_enabled()),
        ("inference mode", torch.is_inference_mode_enabled()),
        ("anomaly mode", torch.is_anomaly_enabled()),
        *autocast_state(),
        ("deterministic algorithms", torch.are_deterministic_algorithms_enabled()),
        ("warnings in place of deterministic algorithms", torch.is_deterministic_algorithms_warn_only_enabled()),
        ("default dtype", torch.get_default_dtype()),
        ("default device", torch.get_default_device()),
        ("number of threads", torch.get_num_threads()),
        ("matmul precision", matmul_precision()),
        *((switch.name, switch.read()) for switch in SWITCHES),
    )


def restore_settings(settings: tuple[tuple[str, Any], ...]) -> None:
    """Restore the global settings that a traced function changed.

    ``settings`` is the result that `global_state` had before the trace. Inference mode is not restored, because only
    ``with`` blocks change it.
    """
    values = dict(settings)
    for name, value in values.items():
        if name.startswith("autocast on "):
            torch.set_autocast_enabled(name.removeprefix("autocast on "), value)
        elif name.startswith("autocast dtype on "):
            torch.set_autocast_dtype(name.removeprefix("autocast dtype on "), value)
    torch.set_autocast_cache_enabled(values["autocast cache"])
    torch.set_grad_enabled(values["grad mode"])
    only_warn = values["warnings in place of deterministic algorithms"]
    torch.use_deterministic_algorithms(values["deterministic algorithms"], warn_only=only_warn)
    torch.set_default_dtype(values["default dtype"])
    torch.set_num_threads(values["number of threads"])
    precision = values["matmul precision"]
    if precision is not None and matmul_precision() != precision:
        torch.set_float32_matmul_precision(precision)
    for switch in SWITCHES:
        if switch.read() != values[switch.name]:
            switch.write(values[switch.name])
    if torch.get_default_device() != values["default device"]:
        before = values["default device"]
        torch.set_default_device(None if before == torch.device("cpu") else before)


def tensor_guards(tensors: Sequence[Tensor], fakes: Sequence[Tensor]) -> Callable[..., bool]:
    """Make the C++ check of an entry's tensor inputs; ``tensors`` are the inputs of the traced call.

    The check takes the inputs of another call, and compares the types, dtypes, devices, sizes, strides and so on of
    both calls. ``fakes`` are the fake tensors of the inputs: the check accepts any value of a size or stride that is
    symbolic there. The check also fails if two of the inputs are the same object.
    """
    # `TensorGuards` takes one list per tensor; its type stubs are wrong
    sizes: list[Any] = [list(fixed(fake.shape)) for fake in fakes]
    strides: list[Any] = [list(fixed(fake.stride())) for fake in fakes]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
