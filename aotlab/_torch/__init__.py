"""Import torch's private APIs, one file per topic.

aotlab uses an undocumented name of torch only through this package. Each such name has a line that says why it is
needed. ``tests/test_torch.py`` asserts that each name exists on the installed torch and behaves as aotlab uses it.
"""

from __future__ import annotations

# fmt: off
# isort: off
# These return how many dispatch modes, and how many function modes, are active.
from torch._C import _len_torch_dispatch_stack as dispatch_mode_count
from torch._C import _len_torch_function_stack as function_mode_count
# The dispatcher that runs Python kernels on fake tensors, for example the statistics of batch norm.
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext
# Higher-order ops are not OpOverloads, so the recorder needs both types. Fake tensors have metadata and no data. The
# two exceptions say which op could not run on fake tensors.
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode,
)
# Sizes, strides and dtype, in the form that fx passes read from ``meta["tensor_meta"]``.
from torch.fx.passes.shape_prop import _extract_tensor_metadata as extract_tensor_metadata
# Replaces a module's parameters and buffers for a block. A parameter with several names is replaced under all of them.
from torch.nn.utils.stateless import _reparametrize_module as reparametrize_module
# The registry of user-defined containers. Every supported torch has this registry under a private name only.
from torch.utils import _pytree as pytree
# A mode that sees each op below autograd and functionalization.
from torch.utils._python_dispatch import TorchDispatchMode
from aotlab._torch.functional import (
    from_functional, functionalization, has_data_mutation, has_metadata_mutation, is_functional, is_seen_through,
    alias_of, become, mutations_under_no_grad, outside_of_trace, replace_value, sync, take_memory, to_functional,
    was_storage_changed,
)
from torch._subclasses.fake_tensor import unset_fake_temporarily as fake_mode_set_aside

from aotlab._torch.fake import (
    address_of, call_by_fake_mode, enter_fake, fake_mode, forget_tensors, has_its_memory_to_itself, is_dense, is_fake,
    is_inference, make_contiguous_strides_for, memory_window, new_fake, new_fake_view, only_fake_modes,
    quiet_fake_tensors, storage_id, storage_key, suggest_memory_format,
)
from aotlab._torch.module_internals import (
    FORWARD_HOOKS, MODULE_DICTIONARIES, backward_hooks_held, bucket_capacities, buffers_held, children_held,
    global_backward_hooks_held, global_hooks_held, has_backward_hooks, hooks_held, module_call, own_hooks_only,
    parameters_held, parametrization_cache, registered_container, set_module_call, talks_to_processes,
)
from aotlab._torch.sharded_modules import is_gathered, is_sharded, share_sharding
from aotlab._torch.fx_internals import (
    boxed_forward_of, forward_of, graph_module, has_effects, tracing_context, write_at_once,
)
from aotlab._torch.higher_order_ops import (
    COND, FLEX_ATTENTION, FLEX_ATTENTION_BACKWARD, HIGHER_ORDER, LOOP_BACKWARD, MAP, SCAN, WHILE_LOOP, IndexesByTensors,
    ShapeEnv, under_autocast_as_now,
)  # fmt: skip
from aotlab._torch.undocumented_ops import (
    APPLY_OF_C, ASSERTIONS, ASSERT_SCALAR, CAST, CASTS_INSIDE, CONJUGATE, DATA_OF, FUNCTION_APPLY, ITEM,
    KEEPING_RNN_LAYER, MAKE_TOKEN, ONEDNN_RNN_LAYER, ONE_HOT, PROFILER_MARKS, PUTS, PUT_BY_KERNEL, SETS_DATA,
    SINK_TOKENS, SOFTMAX, TORCHS_OWN, UNSAFE_VIEW, VECTORS_FLAG, WITH_EFFECTS, default_generator,
    eager_kernels, has_composite_kernel_only, lowers_version, no_python_dispatcher, replace_unguarded,
    unseen_by_dynamo, without_onednn,
)
from aotlab._torch.kernel_differences import LAID_OUT, as_in_eager, assume_copy, may_raise, may_raise_late
from aotlab._torch.replaced import replaced
from aotlab._torch.known_sizes import SymbolicMemo, is_zero, surely_contiguous
from aotlab._torch.modes import (
    MODE_EXITS, SET_GRAD_ENABLED, Surroundings, TransformState, any_autocast_enabled, autocast_knows, autocast_nesting,
    disable_autocast, disable_torch_function, forward_ad_active, is_beyond_kernels, is_transformed, no_dispatch_modes,
    only_default_devices, opens_dual_level, opens_transform, restore_autocast_nesting, set_grad_mode,
    settle_without_gpus, transforms_active, under_transform,
)
from aotlab._torch.cpp_guards import (
    Environment, SWITCHES, SWITCH_NAMES, SettingsGuard, autocast_state, global_state, matmul_precision,
    restore_settings, tensor_guards,
)
from aotlab._torch.version_counters import (
    BASE_GETTER, HOOKS_SETTER, VERSION_GETTER, base_of, first_view_copies, gradient_of, is_call_of_several_views,
    is_hooked, is_leaf, is_leaf_by_its_base, is_one_of_several_views, is_over_another, is_strided_view,
    keeps_through_writes, may_be_written, set_version, share_version, version_of, versions_of, was_made_in_function,
    was_made_under_no_grad,
)
from aotlab._torch.saved_tensors import (
    CHECKPOINT, CHECKPOINT_CONTEXTS, SPENT_CACHE, cache_is_written, caches_kept, checkpoint_settings, hooks_are_foreign,
    is_cached_in, is_checkpointed, is_in_checkpoint, keeps_unsaved, kept_by_checkpoint, kept_is_written,
    outputs_saved_by, saved_tensor_hooks, saved_tensor_hooks_disabled, saved_tensor_hooks_hidden, saved_tensors_of,
    saves_tensors,
)
from aotlab._torch.nodes import (
    always_raises, arrivals, current_graph_task, current_node, current_node_sequence, edge_metadata, fills_by_mask,
    is_copy_slices, is_custom_function_node, is_to_be_run, keeps_graph, leaf_of, pass_on, run_node, sequence_number,
    sequence_of, turns, view_in_function, with_common_node, with_own_node,
)
from aotlab._torch.inductor_internals import (
    _lowered, inductor_compile, inductor_decompositions, inductor_draws_as_eager, inductor_joint_passes,
    inductor_keeps_draws_in_order, inductor_replace_random, is_inductors_draw,
)
from aotlab._torch.inductor_kernels import KernelEvent, kernels_reported
from aotlab._torch.dynamo_internals import (
    EXACT_OPTIMIZERS, as_made_by_dynamo, behind_dynamo, dynamo_breaks, dynamo_compile_id, dynamo_disable,
    dynamo_failed_guards, hear_dynamo, keep_argument_checks, leave_frame_to_python, let_dynamo_follow_eager,
    eager_only_behaviour,
)
from aotlab._torch.workbench import (
    DTYPES_BY_ABBREVIATION, RESUME_PREFIX, cold_caches, dynamo_cleanups, dynamo_compiles, dynamo_graphs, dynamo_reasons,
    dynamo_errors_suppressed, dynamo_restart, dynamo_settings, eager_draws_by_inductor, log_handlers,
    recurrent_layers_captured, stock_backend, stock_compiled, unmark_static,
)
from aotlab._torch.process_groups import store_of_job
from aotlab._torch.structured_trace import compiling_without_caches, interned_files, structured_trace
from aotlab._torch.samples import module_database, op_database, samples_do_not_seed
from aotlab._torch.callers_symbols import ADMITTED, error_for_symbols, guards_of_program, marked, symbols_among
from aotlab._torch.sharded_tensors import is_mesh, shapes_computed_apart
from aotlab._torch.wrapper_subclasses import (
    BACKWARD_OF_BAGS, MAKES_SPARSE, SPARSE, functionalization_again, functionalization_left_out, is_opaque, is_wrapper,
    make_wrapper, padding_of_lookup, parts_of, same_size, view_again,
)
from aotlab._torch.symbolic_sizes import (
    GuardOnDataDependentSymNode, Sizes, equate_symbols, expression_of, fixed, is_symbolic, known_of, marked_dims,
    shown_size, size_text, sizes_function, sizes_of_others, symbolic_dims, symbols_as_numbers, traced, unbacked_in,
    write_size,
)
