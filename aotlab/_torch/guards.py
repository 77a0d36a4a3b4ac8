"""Guards that run in C, and the settings that they watch."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards


class SettingsGuard:
    """Torch's C++ check of grad mode, autocast, determinism, precision, threads and default dtype, as they are now."""

    def __init__(self) -> None:
        guard = GlobalStateGuard()
        self.holds: Callable[[], bool] = guard.check
        self._reason: Callable[[], str] = guard.reason

    def reason(self) -> str | None:
        """Name what has changed since, in torch's words; None if nothing has."""
        return None if self.holds() else self._reason().strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A flag of torch's backends that decides what a trace records, or that a function may read itself.

    ``read`` and ``write`` are torch's own functions, which take some 20 ns where the public ones take 100. Where
    ``chooses`` holds, the flag decides how some functions are traced, and entries check it at each call; others are
    read by kernels when they run, so that only entries check them whose code mentions one of the names ``read_as``.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    chooses: bool
    read_as: frozenset[str]

    def counts(self, names: Container[str]) -> bool:
        """Tell whether an entry checks it whose code mentions ``names``."""
        return self.chooses or any(name in names for name in self.read_as)


class Environment:
    """The environment variables as they were; shown by their number alone, since there may be secrets among them."""

    def __init__(self, variables: dict[str, str]) -> None:
        self._variables = variables

    @classmethod
    def now(cls) -> Environment:
        """Take them as they are."""
        return cls(dict(os.environ))

    def restore(self) -> None:
        """Make them what they were."""
        for name in set(os.environ) - set(self._variables):
            del os.environ[name]
        os.environ.update(self._variables)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Environment) and self._variables == other._variables

    def __hash__(self) -> int:
        return hash(frozenset(self._variables.items()))

    def __repr__(self) -> str:
        return f"<environment of {len(self._variables)} variables>"


def _switches() -> Iterator[Switch]:
    """List them. Attention, recurrences and norms are traced as other ops where another library may serve them."""
    c = torch._C
    gpu = torch.backends.cuda.is_built()
    plain: tuple[tuple[str, Callable[[], Any], Callable[[Any], object], bool], ...] = (
        ("cuda.flash_sdp_enabled()", c._get_flash_sdp_enabled, c._set_sdp_use_flash, True),
        ("cuda.math_sdp_enabled()", c._get_math_sdp_enabled, c._set_sdp_use_math, True),
        ("cuda.mem_efficient_sdp_enabled()", c._get_mem_efficient_sdp_enabled, c._set_sdp_use_mem_efficient, gpu),
        ("cuda.cudnn_sdp_enabled()", c._get_cudnn_sdp_enabled, c._set_sdp_use_cudnn, gpu),
        ("cuda.fp16_bf16_reduction_math_sdp_allowed()", c._get_math_sdp_allow_fp16_bf16_reduction,
         c._set_math_sdp_allow_fp16_bf16_reduction, True),
        ("cudnn.enabled", c._get_cudnn_enabled, c._set_cudnn_enabled, gpu),
        ("cudnn.benchmark", c._get_cudnn_benchmark, c._set_cudnn_benchmark, False),
        ("cudnn.deterministic", c._get_cudnn_deterministic, c._set_cudnn_deterministic, False),
        ("mkldnn.enabled", c._get_mkldnn_enabled, c._set_mkldnn_enabled, True),
        ("mkldnn.deterministic", c._get_mkldnn_deterministic, c._set_mkldnn_deterministic, False),
        # torch's own modules ask for it, but take the fast path under no function mode, and so under no trace
        ("mha.get_fastpath_enabled()", torch.backends.mha.get_fastpath_enabled,
         torch.backends.mha.set_fastpath_enabled, False),
    )  # fmt: skip
    for name, read, write, chooses in plain:
        last = name.rpartition(".")[2].removesuffix("()")
        yield Switch(name=f"torch.backends.{name}", read=read, write=write, chooses=chooses, read_as=frozenset((last,)))
    name = "fill_uninitialized_memory"
    read, write = c._get_deterministic_fill_uninitialized_memory, c._set_deterministic_fill_uninitialized_memory
    # Inductor writes it into its kernels, if deterministic algorithms are asked for
    yield Switch(
        name=f"torch.utils.deterministic.{name}", read=read, write=write, chooses=True, read_as=frozenset((name,))
    )
    if gpu:
        yield Switch(
            name="the order of torch.nn.attention's kernels",
            read=c._get_sdp_priority_order,
            write=c._set_sdp_priority_order,
            chooses=True,
            read_as=frozenset(),
        )
    # the older flags for the precision of float32 cannot be read where these contradict them
    readers = frozenset(("fp32_precision", "allow_tf32", "get_float32_matmul_precision"))
    for place, backend, op in (
        ("", "generic", "all"),
        *(("cuda." if op == "matmul" else "cudnn.", "cuda", op) for op in ("all", "matmul", "conv", "rnn")),
        *(("mkldnn.", "mkldnn", op) for op in ("all", "matmul", "conv", "rnn")),
    ):
        yield Switch(
            name=f"torch.backends.{place}{'' if op == 'all' else op + '.'}fp32_precision",
            read=functools.partial(c._get_fp32_precision_getter, backend, op),
            write=functools.partial(c._set_fp32_precision_setter, backend, op),
            chooses=gpu and (backend, op) == ("cuda", "conv"),  # Inductor writes it into its kernels
            read_as=readers,
        )


#: What a function reads by ``os.environ`` and `os.getenv` is guarded as the flags of torch's backends are.
ENVIRONMENT = Switch(
    name="os.environ",
    read=Environment.now,
    write=Environment.restore,
    chooses=False,
    read_as=frozenset(("environ", "getenv")),
)


SWITCHES: tuple[Switch, ...] = (*_switches(), ENVIRONMENT)
#: The names of functions and attributes by which code reads them.
SWITCH_NAMES = frozenset(name for switch in SWITCHES for name in switch.read_as)


def matmul_precision() -> str | None:
    """Read the precision of matrix products; None where torch refuses to, because newer settings contradict it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def tensor_guards(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Make a C++ check that as many tensors have the types, dtypes, devices, sizes, strides and so on of these.

    It also fails if two of them are the same object.
    """
    # one list of sizes and one of strides per tensor; the stubs say otherwise
    sizes: list[Any] = [list(t.shape) for t in tensors]
    strides: list[Any] = [list(t.stride()) for t in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
