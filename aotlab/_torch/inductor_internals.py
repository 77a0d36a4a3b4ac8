"""Inductor, imported at first use, because the import takes seconds."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from aotlab._torch.higher_order_ops import with_shape_environment
from aotlab._torch.replaced import replaced
from aotlab._torch.undocumented_ops import KEEPING_RNN_LAYER, WITH_EFFECTS


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions that Inductor traces with under its present configuration."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def inductor_draws_as_eager() -> bool:
    """Tell whether Inductor's option ``fallback_random`` is set: random ops then draw from torch's generators."""
    from torch._inductor import config

    return bool(config.fallback_random)


def inductor_keeps_draws_in_order() -> bool:
    """Tell whether Inductor runs random ops in the order of the graph. In torch 2.11 it sometimes reorders them."""
    from torch._inductor.fx_passes import post_grad

    return hasattr(post_grad, "_chain_random_ops_for_ordering")


def is_inductors_draw(target: Any) -> bool:
    """Tell whether an op is Inductor's own random op, which computes random numbers from a seed."""
    from torch._inductor import inductor_prims

    return target in (inductor_prims.random, inductor_prims.randint)


def inductor_joint_passes(module: fx.GraphModule, fake_mode: FakeTensorMode, *, exact_random: bool) -> None:
    """Run Inductor's passes for joint graphs, mostly pattern matching, over a joint or inference graph, in place.

    With ``exact_random``, random ops keep drawing from torch's generators, as in eager. If a pass replaces an output by
    a value with other strides, the output gets its own strides again. (Symbolic strides are not compared.)
    """
    from torch._inductor import config, inductor_prims
    from torch._inductor.compile_fx import _recursive_joint_graph_passes
    from torch._inductor.virtualized import V

    patched, constants = config.patch(fallback_random=exact_random), replaced(fake_mode, "allow_non_fake_inputs", True)
    output = next(node for node in reversed(module.graph.nodes) if node.op == "output")
    expected = [_fixed_strides(node) for node in output.args[0]]
    with patched, V.set_fake_mode(fake_mode), constants, fake_mode:
        _recursive_joint_graph_passes(module)
        results = list(output.args[0])
        for n, (node, strides) in enumerate(zip(results, expected, strict=True)):
            found = _fixed_strides(node)
            if strides is not None and found is not None and strides != found:
                with module.graph.inserting_after(node):
                    results[n] = module.graph.call_function(inductor_prims.force_stride_order, (node, strides))
                value = node.meta["val"]
                restrided = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
                results[n].meta = {**node.meta, "val": restrided}
        output.args = (tuple(results),)
        module.recompile()


def _fixed_strides(node: object) -> tuple[int, ...] | None:
    """Return the strides of a node's value; None if the value is no strided tensor or a stride is symbolic."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return None
    strides = value.stride()
    return strides if all(isinstance(each, int) for each in strides) else None


def inductor_replace_random(module: fx.GraphModule, fake_mode: FakeTensorMode) -> None:
    """Replace random ops in a graph, in place, by Inductor's own random ops, which compute numbers from a seed.

    This is one of the passes that `inductor_joint_passes` runs without ``exact_random``.
    """
    from torch._inductor import config
    from torch._inductor.fx_passes.replace_random import replace_random_passes
    from torch._inductor.virtualized import V

    with config.patch(fallback_random=False), V.set_fake_mode(fake_mode), fake_mode:
        for each in module.modules():
            replace_random_passes(each)  # type: ignore[arg-type]  # these modules are graphs


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
    shows_passes: bool,
    cached: bool,
) -> Any:
    """Compile one graph with Inductor's ``compile_fx_inner`` and return its boxed callable.

    ``static_inputs`` are the positions of the inputs whose addresses are the same in each call, and ``graph_id`` is
    Inductor's number for the graph. ``shared`` holds the settings that the forward and the backward of one entry have
    in common. If ``shared`` is empty, this function fills it. With ``exact_random``, random ops draw from torch's
    generators, as in eager. Otherwise Inductor computes random numbers from seeds. With ``shows_passes``, the graph is
    changed by Inductor's passes even if Inductor takes the kernels from its cache on disk. ``cached`` says whether
    Inductor may use that cache.

    The result has two attributes. ``from_cache`` says whether Inductor took the kernels from there. ``cache_key`` is
    the graph's key in the cache and a text about each part of the key; it is None if the graph is not stored.
    """
    from torch._inductor import config, debug, list_mode_options
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V

    inputs = list(example_inputs)
    if not shared:
        shared["cudagraphs"] = BoxedBool(config.triton.cudagraphs)
        shared["boxed_forward_device_index"] = BoxedDeviceIndex(None)
    with (
        config.patch({"fallback_random": exact_random, "trace.provenance_tracking_level": 2}),
        config.patch(size_asserts=config.size_asserts and not _has_workspace(module)),
        config.patch(list_mode_options("max-autotune-no-cudagraphs") if max_autotune else {}),
        debug.reset_provenance_globals(),  # in these globals, Inductor notes from which nodes it made each kernel
        V.set_fake_mode(fake_mode),
        replaced(fake_mode, "allow_non_fake_inputs", value=True),  # a graph may have real tensors as constants
        fake_mode,
        with_shape_environment(module, fake_mode),
        _lowered(module),
        _falling_back(),
        _writes_before_reads(),
        _distinguished(module, cached=cached),
    ):
        hits = _cache_hits()
        compiled: Any = compile_fx_inner(
            module,
            inputs,
            is_inference=is_inference,
            is_backward=is_backward,
            static_input_idxs=list(static_inputs),
            graph_id=graph_id,
            **shared,
        )
        compiled.from_cache = _cache_hits() > hits
        key = getattr(compiled, "_fx_graph_cache_key", None)
        compiled.cache_key = key and (key, tuple(compiled._fx_graph_cache_debug_lines or ()))
        if compiled.from_cache and shows_passes:
            _apply_passes(module, inputs, is_inference=is_inference)
        return compiled


def _has_workspace(module: fx.GraphModule) -> bool:
    """Tell whether an op of a graph returns oneDNN's workspace. Its size is only known after the op has run."""
    ops = (node.target for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload))
    return any(op.name() == KEEPING_RNN_LAYER for op in ops)


def _cache_hits() -> int:
    """Return the number of graphs that Inductor has taken from its cache on disk in this process."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["fxgraph_cache_hit"])


def _apply_passes(module: fx.GraphModule, example_inputs: list[Tensor], *, is_inference: bool) -> None:
    """Apply the passes to a graph that Inductor applies, in place, before it generates kernels."""
    from torch._inductor.compile_fx import _recursive_post_grad_passes, fake_tensor_prop
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    view_to_reshape(module)
    fake_tensor_prop(module, example_inputs)
    _recursive_post_grad_passes(module, is_inference=is_inference)


class _Ordering(threading.local):
    active = False


_ordering = _Ordering()


@functools.cache
def _remember_writes() -> None:
    """Patch Inductor's scheduler for `_writes_before_reads`. The patch acts only in the blocks of that function.

    When the scheduler computes the reads and writes of a node again, it forgets that an in-place op gave the written
    buffer a new name. The patch renames the buffer again.
    """
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
    """Make Inductor's C++ kernels read a buffer only after the in-place op that fills it, for the length of a block.

    When Inductor fuses loops, it forgets that one of the loops reads a buffer that ``bernoulli`` or ``index_put`` wrote
    in place (torch 2.11 to 2.14). Then, for example, the mask of a dropout is read before it is drawn.
    """
    _remember_writes()
    with replaced(_ordering, "active", value=True):
        yield


def _distinguished(module: fx.GraphModule, *, cached: bool = True) -> contextlib.AbstractContextManager[Any]:
    """Change the key of Inductor's cache on disk, so that kernels are used only if they were compiled in the same way.

    Inductor's own key contains neither our corrections, which are in this file, nor the positions of the outputs whose
    strides must be kept. A graph that holds an object, such as the packed weights of a quantized layer, is not cached,
    because Inductor cannot compute a key from the object. Without ``cached``, no graph is cached.
    """
    from torch._inductor import config as inductor_config
    from torch.compiler import config

    constants = (getattr(module, str(node.target)) for node in module.graph.find_nodes(op="get_attr"))
    if not cached or any(isinstance(each, torch.ScriptObject) for each in constants):
        return inductor_config.patch(fx_graph_cache=False)  # type: ignore[no-any-return]
    visible = module.graph.output_node().meta.get("user_visible_output_idxs")
    tag = f"{config.cache_key_tag}aotlab: {_corrections()}, {visible}"
    return config.patch(cache_key_tag=tag)  # type: ignore[attr-defined,no-any-return]


@functools.cache
def _corrections() -> str:
    """Return a hash of this file."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


@contextlib.contextmanager
def _lowered(module: fx.GraphModule) -> Iterator[None]:
    """Let Inductor call eager's kernels for the ops in ``module`` for which it has a decomposition but no lowering.

    Inductor expects that the trace has decomposed such ops, but our traces record some of them. The block also makes
    Inductor run ops with side effects in their order in the graph.
    """
    from torch._inductor import lowering
    from torch._inductor.decomposition import decompositions
    from torch._inductor.virtualized import V

    def with_effects(*args: Any, before: Any = lowering.lowerings[WITH_EFFECTS], **kwargs: Any) -> Any:
        result, waits = before(*args, **kwargs), getattr(V.graph, "additional_star_deps", {})
        # torch before 2.15 stores the dependencies of an operation under the name of its buffer, and looks them up
        # under the name of the operation
        for each in list[Any](V.graph.operations if waits else ()):
            waits[each.get_operation_name()] |= waits[each.get_name()]
        return result

    targets = {node.target for node in module.graph.nodes if isinstance(node.target, OpOverload)}
    missing = [op for op in targets if op in decompositions and op not in lowering.lowerings]
    fallbacks = {op: lowering.fallback_handler(op, add_to_fallback_set=False) for op in missing}
    with mock.patch.dict(lowering.lowerings, {**fallbacks, WITH_EFFECTS: with_effects}):
        yield


def _falling_back() -> contextlib.AbstractContextManager[None]:
    """Let Inductor call eager's kernels for ops that it could decompose.

    By default, Inductor raises an error for such an op if the environment variable ``CI`` is set.
    """
    from torch._inductor import graph

    return replaced(graph, "make_fallback", functools.partial(vars(graph)["make_fallback"], warn=False))
