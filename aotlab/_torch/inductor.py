"""Inductor, loaded when it is first asked for: importing it takes seconds."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from aotlab._torch.higher_order import symbols_for_loops
from aotlab._torch.ops import WITH_EFFECTS
from aotlab._torch.replaced import replaced


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions that Inductor traces with under its present configuration."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def inductor_draws_as_eager() -> bool:
    """Tell whether Inductor is set to take random numbers from torch's generators, op by op."""
    from torch._inductor import config

    return bool(config.fallback_random)


def inductor_keeps_draws_in_order() -> bool:
    """Tell whether Inductor lets what draws from a generator draw in the order of the graph; torch 2.11's does not."""
    from torch._inductor.fx_passes import post_grad

    return hasattr(post_grad, "_chain_random_ops_for_ordering")


def is_inductors_draw(target: Any) -> bool:
    """Tell whether an op is one of Inductor's own, which makes random numbers of a seed."""
    from torch._inductor import inductor_prims

    return target in (inductor_prims.random, inductor_prims.randint)


def inductor_joint_passes(module: fx.GraphModule, fake_mode: FakeTensorMode, *, exact_random: bool) -> None:
    """Run Inductor's pattern matching over a joint or inference graph, in place."""
    from torch._inductor import config
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    patched, constants = config.patch(fallback_random=exact_random), replaced(fake_mode, "allow_non_fake_inputs", True)
    with patched, V.set_fake_mode(fake_mode), constants, fake_mode:
        joint_graph_passes(module)


def inductor_replace_random(module: fx.GraphModule, fake_mode: FakeTensorMode) -> None:
    """Let random ops take their numbers from seeds, in place; this is one of the joint-graph passes."""
    from torch._inductor import config
    from torch._inductor.fx_passes.replace_random import replace_random_passes
    from torch._inductor.virtualized import V

    with config.patch(fallback_random=False), V.set_fake_mode(fake_mode), fake_mode:
        replace_random_passes(module)


def inductor_compile(
    module: fx.GraphModule,
    example_inputs: Sequence[Tensor],
    *,
    fake_mode: FakeTensorMode,
    is_inference: bool,
    is_backward: bool,
    static_inputs: Sequence[int],
    graph_id: int,
    shared: dict[str, Any],
    exact_random: bool,
    max_autotune: bool,
) -> Any:
    """Compile one graph by Inductor's inner entry and return its boxed callable.

    ``shared`` is what the forward and the backward of one entry have in common; it is filled here at first use.
    With ``exact_random`` random ops take their numbers from torch's generators, as eager does; else from a seed each.
    """
    from torch._inductor import config, debug, list_mode_options
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V

    if not shared:
        shared["cudagraphs"] = BoxedBool(config.triton.cudagraphs)
        shared["boxed_forward_device_index"] = BoxedDeviceIndex(None)
    with (
        config.patch({"fallback_random": exact_random, "trace.provenance_tracking_level": 2}),
        config.patch(list_mode_options("max-autotune-no-cudagraphs") if max_autotune else {}),
        debug.reset_provenance_globals(),  # where it collects of which nodes it makes each kernel
        V.set_fake_mode(fake_mode),
        replaced(fake_mode, "allow_non_fake_inputs", value=True),  # a graph's constants
        fake_mode,
        symbols_for_loops(module, fake_mode),
        _lowered(module),
        _falling_back(),
        _writes_before_reads(),
    ):
        return compile_fx_inner(
            module,
            list(example_inputs),
            is_inference=is_inference,
            is_backward=is_backward,
            static_input_idxs=list(static_inputs),
            graph_id=graph_id,
            **shared,
        )


class _Ordering(threading.local):
    active = False


_ordering = _Ordering()


@functools.cache
def _remember_writes() -> None:
    """Let nodes of Inductor's scheduler, in the block of `_writes_before_reads`, keep what they know of writes."""
    from torch._inductor.scheduler import SchedulerNode

    recompute = SchedulerNode.recompute_size_and_body

    @functools.wraps(recompute)
    def recompute_and_rename(self: Any, *args: Any, **kwargs: Any) -> None:
        recompute(self, *args, **kwargs)
        if _ordering.active:
            self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    SchedulerNode.recompute_size_and_body = recompute_and_rename  # type: ignore[method-assign]


@contextlib.contextmanager
def _writes_before_reads() -> Iterator[None]:
    """Let Inductor's C++ kernels read a buffer after the op in place that fills it.

    When it fuses loops it forgets that one reads what ``bernoulli`` or ``index_put`` wrote in place (torch 2.11 to
    2.14): a dropout's mask is read before it is drawn. Kernels that were cached without this are not used.
    """
    from torch.compiler import config

    _remember_writes()
    tag = f"{config.cache_key_tag}aotlab: writes before reads, origins, effects"
    with replaced(_ordering, "active", value=True), config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
        yield


@contextlib.contextmanager
def _lowered(module: fx.GraphModule) -> Iterator[None]:
    """Let Inductor call kernels of ops that it expects to be decomposed, and keep the order of ops with effects."""
    from torch._inductor import lowering
    from torch._inductor.decomposition import decompositions
    from torch._inductor.virtualized import V

    def with_effects(*args: Any, before: Any = lowering.lowerings[WITH_EFFECTS], **kwargs: Any) -> Any:
        result, waits = before(*args, **kwargs), getattr(V.graph, "additional_star_deps", {})
        # torch before 2.15 looks for what one waits for under another of its names
        for each in list[Any](V.graph.operations if waits else ()):
            waits[each.get_operation_name()] |= waits[each.get_name()]
        return result

    found = {node.target for node in module.graph.nodes if isinstance(node.target, OpOverload)}
    missing = [op for op in found if op in decompositions and op not in lowering.lowerings]
    own = {op: lowering.fallback_handler(op, add_to_fallback_set=False) for op in missing}
    with mock.patch.dict(lowering.lowerings, {**own, WITH_EFFECTS: with_effects}):
        yield


def _falling_back() -> contextlib.AbstractContextManager[None]:
    """Let Inductor call kernels of ops that it could decompose, also where ``CI`` makes it take that for a mistake."""
    from torch._inductor import graph

    return replaced(graph, "make_fallback", functools.partial(vars(graph)["make_fallback"], warn=False))
