"""The one door to torch's private APIs: each borrowed name exists, and behaves as we use it, on the installed torch."""

from __future__ import annotations

import contextlib
import inspect
import math
import threading

import pytest
import torch
from torch import fx, nn
from torch._C._dynamo.guards import GlobalStateGuard
from torch.utils.checkpoint import checkpoint

from aotlab import _torch as internals
from aotlab._torch import FakeTensor, FakeTensorMode
from tests.engine_helpers import keeping_graphs, leaf


def wrapped(tensor):
    """Wrap a tensor as the trace does."""
    return internals.to_functional(tensor)


# --- the door ----------------------------------------------------------------------------------------------------


def test_everything_is_documented():
    """Every function of `_torch` states its purpose in one sentence."""
    own = [v for v in vars(internals).values() if inspect.isfunction(v) and v.__module__.startswith(internals.__name__)]
    assert len(own) > 25
    assert [f.__name__ for f in own if not f.__doc__ and not f.__name__.startswith("_")] == []


# --- functionalization -------------------------------------------------------------------------------------------


def test_wrappers():
    """A wrapper has a value, shows writes after a sync, and its views see the writes."""
    value = torch.ones(2, 3)
    with internals.functionalization():
        x = wrapped(value)
        assert internals.is_functional(x)
        assert not internals.is_functional(value)
        row = x[0]
        x.mul_(3)
        internals.sync(row)
        assert internals.from_functional(row).tolist() == [3.0, 3.0, 3.0]
        assert internals.is_functional(torch.ones(2))
    assert not internals.is_functional(torch.ones(2))


def test_the_views_on_the_way_to_a_wrapper():
    """The views between a base and a wrapper are listed by op name, also for views of views.

    A tensor that is not a view has no such list.
    """
    value = torch.ones(4)
    with internals.functionalization():
        x = wrapped(value)
        x.mul_(2)
        ways = [x, x.detach(), x.unfold(0, 2, 1), x.view(2, 2).unfold(0, 2, 1)[0].detach()]
        assert [internals.is_seen_through(way, "unfold") for way in ways] == [False, False, True, True]


def test_functionalization_ends_after_an_error():
    """The block ends also by an exception."""
    with pytest.raises(ValueError, match="stop"), internals.functionalization():
        raise ValueError("stop")
    assert not internals.is_functional(torch.ones(2))


def test_mutation_flags():
    """The mutation flags of a traced tensor: data, metadata, storage, or no mutation."""
    cases = {
        "nothing": lambda x: x * 2,
        "data": lambda x: x.mul_(2),
        "view": lambda x: x[0].mul_(2),
        "detached": lambda x: x.detach().mul_(2),
        "metadata": lambda x: x.t_(),
        "resized": lambda x: x.resize_(7),
        "set": lambda x: x.set_(torch.ones(2)),
    }
    seen = {}
    for name, write in cases.items():
        value = torch.ones(2, 3)
        with internals.functionalization():
            x = wrapped(value)
            write(x)
            seen[name] = (
                internals.has_data_mutation(x),
                internals.has_metadata_mutation(x) or internals.was_storage_changed(x),
            )
    assert {name: data for name, (data, _) in seen.items() if name not in ("resized", "set")} == {
        "nothing": False, "data": True, "view": True, "detached": True, "metadata": False,
    }  # fmt: skip
    assert {name: changed for name, (_, changed) in seen.items()} == {
        "nothing": False, "data": False, "view": False, "detached": False,
        "metadata": True, "resized": True, "set": True,
    }  # fmt: skip


def test_who_has_its_memory_to_itself():
    """A tensor with a live view or alias shares its memory. So does a tensor whose view autograd saved."""
    x = internals.to_functional(internals.FakeTensorMode().from_tensor(torch.ones(3, 2)))
    with internals.functionalization(), internals.enable_python_dispatcher():
        x.requires_grad_()
        y = x * 1
        assert internals.has_its_memory_to_itself(y)
        row = y[1:]
        assert not internals.has_its_memory_to_itself(y)
        made = row.sin()
        del row
        assert not internals.has_its_memory_to_itself(y)
        del made
        assert internals.has_its_memory_to_itself(y)
        alias = y.detach()
        assert not internals.has_its_memory_to_itself(alias)


def test_outside_of_trace():
    """In the block ops are ordinary: neither wrapped, nor seen by modes that are on."""
    seen = []

    class Mode(internals.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with internals.functionalization(), internals.enable_python_dispatcher(), Mode():
        with internals.outside_of_trace():
            x = torch.ones(2, 3, device="meta")
            x.t_()
        assert (internals.is_functional(x), x.stride(), seen) == (False, (1, 3), [])
        assert internals.is_functional(torch.ones(2))
    assert seen


def test_no_grad_writes():
    """Writes only under no_grad are distinguished from others."""
    values = [torch.ones(2) for _ in range(3)]
    with internals.functionalization():
        plain, quiet, both = map(wrapped, values)
        plain.mul_(2)
        with torch.no_grad():
            quiet.mul_(2)
            both.mul_(2)
        both.mul_(2)
        assert [internals.mutations_under_no_grad(x) for x in (plain, quiet, both)] == [False, True, False]


def test_replace_value():
    """A wrapper can be given another value, which its views see."""
    value, other = torch.zeros(2, 2), torch.full((2, 2), 4.0)
    with internals.functionalization():
        x = wrapped(value)
        row = x[1]
        internals.replace_value(x, other)
        internals.sync(row)
        assert internals.from_functional(x).tolist() == [[4.0, 4.0], [4.0, 4.0]]
        assert internals.from_functional(row).tolist() == [4.0, 4.0]


# --- fake tensors ------------------------------------------------------------------------------------------------


def test_fake_mode():
    """A fake tensor has the sizes, strides, dtype and device of its real one and no data."""
    mode = FakeTensorMode(static_shapes=True)
    real = torch.randn(3, 4).t()
    fake = mode.from_tensor(real, static_shapes=True)
    assert isinstance(fake, FakeTensor)
    assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (real.shape, real.stride(), real.dtype, real.device)
    result = internals.call_by_fake_mode(mode, torch.ops.aten.mm.default, (fake, fake.t()), {})
    assert isinstance(result, FakeTensor)
    assert tuple(result.shape) == (4, 4)


def test_fake_mode_says_what_depends_on_data():
    """Ops whose result depends on values raise the two exceptions that the recorder catches."""
    mode = FakeTensorMode(static_shapes=True)
    fake = mode.from_tensor(torch.ones(3), static_shapes=True)
    for op, args in (
        (torch.ops.aten._local_scalar_dense.default, (fake,)),
        (torch.ops.aten.nonzero.default, (fake,)),
        (torch.ops.aten.equal.default, (fake, fake)),
    ):
        with pytest.raises((internals.DataDependentOutputException, internals.DynamicOutputShapeException)):
            internals.call_by_fake_mode(mode, op, args, {})


def test_new_fake_and_enter_fake():
    """Fakes that are made without a kernel equal the fakes that a kernel makes."""
    mode = FakeTensorMode(static_shapes=True)
    base = torch.randn(6, 4)
    for real in (
        torch.randn(3), torch.randn(2, 3).t(), base[1:3], base[:, 1], base[::2, ::2], torch.tensor(2),
        torch.empty(0, 3), torch.ones(1, 3).expand(2, 3), torch.arange(3), torch.ones(2, 1, 3).permute(2, 0, 1),
        nn.Parameter(torch.ones(2)),
        torch.randn(2, dtype=torch.complex64), torch.empty_strided((2, 2), (3, 1)), leaf(3),
    ):  # fmt: skip
        fake = internals.enter_fake(mode, real)
        expected = mode.from_tensor(real.detach(), static_shapes=True)
        for attribute in ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf"):
            assert getattr(fake, attribute) == getattr(expected, attribute)
        assert fake.stride() == expected.stride()
        assert fake.storage_offset() == expected.storage_offset()
        assert fake.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
        assert fake.fake_mode is mode
        assert isinstance(fake, FakeTensor)
    made = internals.new_fake(mode, (2, 3), (1, 2), torch.float64, torch.device("cpu"))
    assert (tuple(made.shape), made.stride(), made.dtype, made.device.type) == ((2, 3), (1, 2), torch.float64, "cpu")
    assert (made + 1).stride() == (1, 2)


def test_python_dispatcher():
    """Under it batch norm's statistics are seen to be written."""
    mode = FakeTensorMode(static_shapes=True)
    x, mean, variance = (
        mode.from_tensor(t, static_shapes=True) for t in (torch.ones(4, 3), torch.ones(3), torch.ones(3))
    )
    with internals.functionalization(), internals.enable_python_dispatcher():
        held = wrapped(mean)
        torch.nn.functional.batch_norm(wrapped(x), held, wrapped(variance), training=True)
        internals.sync(held)
        assert internals.has_data_mutation(held)


def test_composite_ops():
    """Ops that eager computes by calling other ops are known as such.

    The answer is right also for an op that has its own kernel besides.
    """
    assert internals.has_composite_kernel_only(torch.ops.aten.linear.default, "cpu") is True
    assert internals.has_composite_kernel_only(torch.ops.aten.mm.default, "cpu") is False
    assert internals.has_composite_kernel_only(torch.ops.aten.silu_backward.default, "cpu") is False
    assert internals.has_composite_kernel_only(torch.ops.aten.softshrink.default, "cpu") is False


def test_dispatch_mode_sees_ops_below_autograd():
    """A dispatch mode gets every op, also inside of composite functions, as OpOverloads."""
    seen = []

    class Sees(internals.TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    assert internals.dispatch_mode_count() == 0
    with Sees():
        assert internals.dispatch_mode_count() == 1
        torch.nn.functional.softmax(leaf(3), 0).sum()
    assert torch.ops.aten._softmax.default in seen
    assert all(isinstance(op, internals.OpOverload) for op in seen)
    assert internals.dispatch_mode_count() == 0


def test_function_mode_count():
    """Function modes are counted; a default device is one of them."""
    assert internals.function_mode_count() == 0
    with torch.device("meta"):
        assert internals.function_mode_count() == 1


# --- pytrees -----------------------------------------------------------------------------------------------------


def test_transformed():
    """A transform's wrapper is distinguished from a plain tensor."""
    seen = []
    torch.func.grad(lambda x: (seen.append(internals.is_transformed(x)), x.sum())[1])(torch.ones(2))
    torch.vmap(lambda x: (seen.append(internals.is_transformed(x)), x)[1])(torch.ones(2))
    assert [*seen, internals.is_transformed(torch.ones(2))] == [True, True, False]


def test_boxed_forward():
    """A graph's boxed form takes one list, empties it, computes the same, and leaves the graph's own form alone."""
    module = fx.symbolic_trace(lambda x, y: (x.sin() + y, None, y))
    before = module.code
    call = internals.boxed_forward_of(module)
    arguments = [torch.ones(2), torch.ones(2)]
    (a, none, y) = call(arguments)
    assert arguments == []
    assert none is None
    assert torch.equal(a, torch.ones(2).sin() + 1)
    assert torch.equal(y, torch.ones(2))
    assert call._boxed_call is True
    assert module.code == before
    module.recompile()
    assert module.code == before


def test_registered_containers():
    """Containers that users register with pytree are found, with their flatten and unflatten functions."""

    class Box:
        """A container."""

        def __init__(self, item):
            self.item = item

    assert internals.registered_container(Box) is None
    torch.utils._pytree.register_pytree_node(Box, lambda box: ([box.item], "context"), lambda items, _: Box(items[0]))
    node = internals.registered_container(Box)
    assert node.flatten_fn(Box(3)) == ([3], "context")
    assert node.unflatten_fn([4], "context").item == 4


# --- graphs ------------------------------------------------------------------------------------------------------


def test_graph_module():
    """A module whose Python is written when it is first needed is a GraphModule and runs."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.sin.default, (x,)),))
    module = internals.graph_module(nn.Module(), graph, "Example")
    assert isinstance(module, torch.fx.GraphModule)
    assert torch.equal(internals.forward_of(module)(torch.ones(2))[0], torch.ones(2).sin())
    assert torch.equal(module(torch.ones(2))[0], torch.ones(2).sin())
    node = next(iter(graph.nodes))
    meta = internals.extract_tensor_metadata(torch.ones(2, 3))
    assert (meta.shape, meta.stride, meta.dtype) == (torch.Size([2, 3]), (3, 1), torch.float32)
    assert node.op == "placeholder"


def test_reparametrize_module():
    """Other tensors in a module's places for the length of a block, ties included."""
    module = nn.Linear(2, 2)
    own = module.weight
    with internals.reparametrize_module(module, {"weight": torch.zeros(2, 2)}):
        assert module(torch.ones(1, 2)).tolist() == [module.bias.tolist()]
    assert module.weight is own


# --- modes and settings ------------------------------------------------------------------------------------------


def test_set_grad_mode():
    """Grad mode is set without a context manager."""
    internals.set_grad_mode(False)
    try:
        assert torch.is_grad_enabled() is False
    finally:
        internals.set_grad_mode(True)
    assert torch.is_grad_enabled() is True


def test_disable_autocast():
    """Inside the block autocast does not cast, and afterwards it is on again."""
    x = torch.ones(2, 2)
    assert internals.any_autocast_enabled() is False
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert internals.any_autocast_enabled() is True
        assert (x @ x).dtype == torch.bfloat16
        with internals.disable_autocast():
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16


def test_transforms_and_forward_ad():
    """torch.func transforms and forward-mode levels are seen."""
    seen = []

    def f(x):
        seen.append(internals.transforms_active())
        return x.sum()

    assert internals.transforms_active() is False
    torch.func.grad(f)(torch.ones(2))
    torch.func.vmap(f)(torch.ones(2, 2))
    assert seen == [True, True]
    assert internals.forward_ad_active() is False
    with torch.autograd.forward_ad.dual_level():
        assert internals.forward_ad_active() is True
        assert torch.autograd.forward_ad._current_level >= 0
    assert internals.forward_ad_active() is False


def test_global_state_guard():
    """The C++ guard notices each global setting that we leave to it."""
    guard = GlobalStateGuard()
    assert guard.check()
    with torch.no_grad():
        assert not guard.check()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not guard.check()
    for change, undo in (
        (lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)),
        (lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False)),
        (
            lambda: torch.set_num_threads(torch.get_num_threads() + 1),
            lambda: torch.set_num_threads(torch.get_num_threads() - 1),
        ),
    ):
        change()
        try:
            assert not guard.check()
        finally:
            undo()
        assert guard.check()


def test_tensor_guards():
    """The C++ guard notices each property of a tensor that we leave to it, and duplicates."""
    x, y = torch.ones(2, 3), leaf(3)
    check = internals.tensor_guards([x, y], [x, y])
    assert check(torch.zeros(2, 3), leaf(3))
    for other in (
        torch.ones(3, 3), torch.ones(2, 3).double(), torch.ones(3, 2).t(), torch.ones(2, 3).requires_grad_(),
        torch.ones(2, 3, device="meta"), torch.ones(6), torch.ones(2, 3).to_sparse(), nn.Parameter(torch.ones(2, 3)),
        torch.ones(2, 3).as_subclass(type("Sub", (torch.Tensor,), {})), 3.0, None,
    ):  # fmt: skip
        assert not check(other, y), other
    assert not check(x, torch.ones(3))
    one = torch.ones(2)
    pair = [torch.ones(2), torch.zeros(2)]
    twin = internals.tensor_guards(pair, pair)
    assert not twin(one, one)


def test_tensor_guards_and_conjugates():
    """A conjugate or an inference tensor does not pass for a plain one."""
    given = [torch.ones(2, dtype=torch.complex64)]
    check = internals.tensor_guards(given, given)
    assert not check(torch.ones(2, dtype=torch.complex64).conj())
    with torch.inference_mode():
        quiet = torch.ones(2)
    given = [torch.ones(2)]
    assert not internals.tensor_guards(given, given)(quiet)


# --- autograd ----------------------------------------------------------------------------------------------------


def test_sequence_numbers():
    """A forward op's number is found again while its node runs in the backward."""
    before = internals.sequence_number()
    x = leaf(2)
    y = x.sin()
    assert y.grad_fn._sequence_nr() == before
    assert internals.sequence_number() == before + 1
    seen = []
    y.grad_fn.register_prehook(lambda g: seen.append(internals.current_node_sequence()))
    assert internals.current_node_sequence() is None

    class Sees(internals.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.cos.default:
                seen.append(internals.current_node_sequence())
            return func(*args, **(kwargs or {}))

    with torch.autograd.set_multithreading_enabled(False), Sees():
        y.sum().backward()
    assert before in seen


def test_saved_tensor_hooks():
    """The innermost hooks are returned, and hidden for a block."""
    assert internals.saved_tensor_hooks() is None
    pack, unpack = (lambda t: (t,)), (lambda p: p[0])
    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks(lambda t: t, lambda t: t), hooks(pack, unpack):
        assert internals.saved_tensor_hooks() == (pack, unpack)
        with internals.saved_tensor_hooks_hidden():
            assert internals.saved_tensor_hooks() != (pack, unpack)
        assert internals.saved_tensor_hooks() == (pack, unpack)
    assert internals.saved_tensor_hooks() is None
    with internals.saved_tensor_hooks_hidden():
        assert internals.saved_tensor_hooks() is None


def test_hooks_are_foreign():
    """The user's hooks are distinguished from torch's own."""
    graph = torch.autograd.graph
    assert not internals.hooks_are_foreign()
    with graph.save_on_cpu():
        assert not internals.hooks_are_foreign()
        with graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            assert internals.hooks_are_foreign()
            with internals.saved_tensor_hooks_hidden():
                assert not internals.hooks_are_foreign()
    assert not internals.saved_tensor_hooks_disabled()
    with graph.disable_saved_tensors_hooks("no"):
        assert internals.saved_tensor_hooks_disabled()


def test_views_with_hooks():
    """A hook of the caller on a view is detected, and forbids the epilogue to write to the view."""
    view = leaf(3).clone()[1:]
    assert internals.may_be_written(view)
    handle = view.register_hook(lambda g: g)
    assert not internals.may_be_written(view)
    handle.remove()
    assert internals.may_be_written(view)
    alone = leaf(3).clone()
    alone.register_hook(lambda g: g)
    assert internals.may_be_written(alone)


def test_views_of_what_requires_no_grad():
    """Views that require grad, of a base that does not, are distinguished from other views and from other tensors."""
    x = torch.arange(4.0).view(2, 2).requires_grad_()
    assert internals.is_over_another(x)
    assert internals.is_over_another(x.view(-1))
    assert not internals.is_over_another(leaf(2))
    assert not internals.is_over_another(leaf(2).view(2))
    assert not internals.is_over_another(torch.ones(2).view(2))
    assert internals.BASE_GETTER(x) is internals.base_of(x)


def test_keeps_graph():
    """A running Function can read whether retain_graph was requested."""
    seen = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            seen.append(internals.keeps_graph())
            return gradient

    y = Asks.apply(leaf(2)).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert seen == [True, False]


def test_the_id_of_a_storage_is_never_given_again():
    """Tensors of one storage share its id; a storage that comes later, also where a dead one lay, has its own."""
    base = torch.ones(4, 4)
    known = internals.storage_id(base)
    assert internals.storage_id(base.t()[1:]) == internals.storage_id(base.detach()) == known
    ids, addresses = [], []
    for _ in range(3000):
        tensor = torch.ones(2, 2)
        ids.append(internals.storage_id(tensor))
        addresses.append(tensor.data_ptr())
    assert len(set(addresses)) < len(addresses)
    assert len(set(ids)) == len(ids)
    assert internals.storage_id(base) == known
    assert internals.storage_id(torch.ones(2).to_sparse()) is None


def test_version_base_and_storage():
    """Version counters, bases of views, and keys of storages."""
    x = torch.ones(2, 3)
    assert internals.version_of(x) == 0
    x[0].mul_(2)
    assert internals.version_of(x) == 1
    with torch.inference_mode():
        assert internals.version_of(torch.ones(1)) == 0
    assert internals.base_of(x) is None
    y = leaf(2, 3) * 1
    assert internals.base_of(y.t()) is y
    assert internals.storage_key(x) == internals.storage_key(x[1])
    assert internals.storage_key(x) != internals.storage_key(torch.ones(2, 3))


def test_kept_by_checkpoint():
    """The arguments that checkpoint keeps are found from the nodes that would recompute it."""
    x, y = leaf(2) * 1, leaf(2)
    made = checkpoint(lambda a, n, b: (a * n).sin() * b, x, 2, y, use_reentrant=False)
    kept = internals.kept_by_checkpoint(made.grad_fn)
    assert len(kept) == 2
    assert internals.share_version(kept[0], x)
    assert internals.share_version(kept[1], y)
    assert internals.kept_by_checkpoint((x * y).grad_fn) == []
    assert internals.kept_is_written(made.grad_fn) is False
    x.mul_(2)
    assert internals.kept_by_checkpoint(made.grad_fn) == []
    assert internals.kept_is_written(made.grad_fn) is True


def test_what_is_hooked_and_what_is_a_view_of_no_grad():
    """Hooks and retained gradients; a view made under `no_grad` of a leaf is a leaf that requires grad."""
    owner = torch.ones(4, requires_grad=True)
    with torch.no_grad():
        unseen = owner.view(2, 2)
    plain, history, view = torch.ones(2, requires_grad=True), owner * 1, (owner * 1)[1:]
    assert [internals.is_leaf_by_its_base(t) for t in (unseen, plain, history, view)] == [True, False, False, False]
    assert not any(map(internals.is_hooked, (unseen, plain, history, view)))
    history.retain_grad()
    for tensor in (plain, view):
        tensor.register_hook(lambda gradient: gradient)
    assert all(map(internals.is_hooked, (plain, history, view)))


def test_always_raises():
    """`set_` has no derivative: autograd puts a node there that only raises."""
    y = torch.ones(2, requires_grad=True) * 2
    assert not internals.always_raises(y.grad_fn)
    y.set_(y)
    assert internals.always_raises(y.grad_fn)
    with pytest.raises(RuntimeError, match="not implemented"):
        y.sum().backward()


def test_is_checkpointed():
    """The tensors that a node saved can be inspected without running a checkpointed function again."""
    x, runs = leaf(2), []

    def body(value):
        runs.append(value)
        return value.sin()

    node = checkpoint(body, x, use_reentrant=False).grad_fn
    assert internals.is_checkpointed(node) is True
    assert internals.saves_tensors(node) is True
    assert internals.saved_tensors_of(node) == []
    assert internals.kept_is_written(node) is False
    assert len(runs) == 1
    plain = x.sin()
    assert internals.is_checkpointed(plain.grad_fn) is False
    plain.sum().backward()
    assert internals.is_checkpointed(plain.grad_fn) is False  # autograd has let go of what it kept


def test_saves_tensors():
    """Nodes with saved tensors are distinguished from others, and the check does not fail after a write."""
    x = leaf(3)
    assert internals.saves_tensors(x.sin().grad_fn) is True
    assert internals.saves_tensors((-x).grad_fn) is False
    assert internals.saves_tensors((x + x).grad_fn) is False
    assert internals.saves_tensors(x.sum().grad_fn) is False
    y = x * 1
    z = y.sin()
    with torch.no_grad():
        y.mul_(2)
    assert internals.saves_tensors(z.grad_fn) is True
    assert internals.kept_is_written(z.grad_fn) is True
    assert internals.kept_is_written(x.sin().grad_fn) is False
    w = x * 1
    w[0].mul_(2)
    assert internals.kept_is_written(w.grad_fn) is True  # nobody can tell

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, save):
            if save:
                ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient, None

    node = Saves.apply(x, True).grad_fn
    assert internals.saves_tensors(node) is True
    assert internals.is_custom_function_node(node)
    assert internals.saves_tensors(Saves.apply(x, False).grad_fn) is False
    assert not internals.is_custom_function_node(x.sin().grad_fn)


def test_keeps_unsaved():
    """Custom functions that keep tensors as attributes or in a closure are distinguished from others."""

    def made(keep):
        class Keeps(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                if keep == "attribute":
                    ctx.x = x
                return x * 2

            @staticmethod
            def backward(ctx, gradient):
                return gradient * 2

        if keep == "closure":
            Keeps.backward = staticmethod(lambda ctx, gradient: gradient * len(keep))
        return Keeps.apply(leaf(3)).grad_fn

    assert [internals.keeps_unsaved(made(keep)) for keep in ("attribute", "closure", "")] == [True, True, False]
    assert internals.keeps_unsaved(leaf(3).sin().grad_fn) is False


def test_how_views_were_made():
    """Autograd says of a view whether it is one of several; so do views of it."""
    x = torch.ones(2, 2, requires_grad=True) * 1
    several = x.unbind(0)[0]
    kinds = [x, x.view(-1), several, several[0], x.detach()]
    assert [internals.is_one_of_several_views(t) for t in kinds] == [False, False, True, True, False]


def test_surroundings_are_restored():
    """Modes of both kinds, functionalization and grad mode, as an interrupt may leave them."""

    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Dispatch(internals.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def state():
        functional = internals.is_functional(torch.ones(1) * 1)
        return internals.function_mode_count(), internals.dispatch_mode_count(), torch.is_grad_enabled(), functional

    before = state()
    surroundings = internals.Surroundings()
    Functions().__enter__()
    Dispatch().__enter__()
    torch._enable_functionalization(reapply_views=False)
    torch.set_grad_enabled(False)
    surroundings.restore()
    assert state() == before == (0, 0, True, False)


def test_replace_unguarded():
    """swap_tensors and to_dlpack can be replaced for a block, and are themselves afterwards."""
    calls, states = [], []
    autograd = torch._C._autograd
    originals = (torch._C._swap_tensor_impl, torch._C._to_dlpack, torch.utils.dlpack.to_dlpack)
    originals = (*originals, autograd._push_saved_tensors_default_hooks)

    def push(pack, unpack):
        calls.append("push")
        originals[-1](pack, unpack)

    with internals.replace_unguarded(
        refuse=lambda name, *_: calls.append(name),
        checkpoint_state=lambda name, state: states.append((name, state)),
        checkpoint_starts=lambda: calls.append("checkpoint"),
        push_hooks=push,
        leave=lambda *a, otherwise: calls.append(f"leave {otherwise.__name__}"),
        higher_order=calls.append,
    ):
        torch.manual_seed(0)
        threading.Thread(target=torch.get_rng_state).start()  # other threads are left alone
        torch.utils.swap_tensors(torch.ones(1), torch.zeros(1))
        torch.utils.dlpack.to_dlpack(torch.ones(1))
        torch.to_dlpack(torch.ones(1))
        torch.ones(1).set_(torch.ones(1))
        torch.ones(1).apply_(abs)
        with torch.autograd.graph.saved_tensors_hooks(str, repr):
            assert internals.saved_tensor_hooks() == (str, repr)
        # a checkpoint may take and set the state: of each that it sets it is known which it was when it was taken
        checkpoint(torch.sin, leaf(2), use_reentrant=False).sum().backward()
    (took, own), (kept, around), (put, first), (back, last) = states
    assert (took, kept, put, back) == ("get_rng_state", "get_rng_state", "set_rng_state", "set_rng_state")
    assert (first is own, last is around) == (True, True)
    assert calls == [
        "manual_seed", "swap_tensors", "to_dlpack", "to_dlpack", "leave set_", "leave apply_",
        "push", "checkpoint", "checkpoint",
    ]  # fmt: skip
    now = (torch._C._swap_tensor_impl, torch._C._to_dlpack, torch.utils.dlpack.to_dlpack)
    assert (*now, autograd._push_saved_tensors_default_hooks) == originals


# --- Dynamo and Inductor -----------------------------------------------------------------------------------------


def test_dynamo_disable():
    """A disabled function is called, not looked into, and leaves a graph break."""
    graphs = []
    inner = internals.dynamo_disable(lambda x: x * 3)

    torch.compiler.reset()
    assert torch.compile(lambda x: inner(x + 1) * 2, backend=keeping_graphs(graphs))(torch.ones(1)).item() == 12.0
    assert len(graphs) == 2
    torch.compiler.reset()


def test_what_dynamo_does_not_see():
    """Dynamo does not trace functions that autograd calls, nor the functions that those call, also after a reset."""

    def twice(tensor):
        return tensor.cos() + 1

    counts = []
    for mark in (lambda function: function, internals.unseen_by_dynamo):

        class Sine(torch.autograd.Function):
            @staticmethod
            def forward(ctx, tensor):
                return tensor.sin()

            @staticmethod
            @mark
            def backward(ctx, gradient):
                return twice(gradient * 2)

        apply = internals.dynamo_disable(Sine.apply)

        def f(tensor, apply=apply):
            apply(tensor).sum().backward()
            return tensor

        for _ in range(2):
            torch.compiler.reset()
            graphs = []
            x = leaf(2)
            torch.compile(f, backend=keeping_graphs(graphs))(x)
            assert x.grad.tolist() == pytest.approx([math.cos(2) + 1] * 2)
            counts.append(len(graphs))
            torch.compiler.reset()
    assert counts == [2, 2, 1, 1]


def test_inductor_parts_exist():
    """The decompositions, joint passes and the inner entry have the signatures with which they are called."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    table = internals.inductor_decompositions()
    assert len(table) > 100
    assert all(callable(function) for function in table.values())
    assert internals.inductor_decompositions() is not table
    assert callable(joint_graph_passes)
    assert callable(compile_fx_inner)
    mode = FakeTensorMode(static_shapes=True)
    with internals.tracing_context(mode):
        assert internals.TracingContext.get().fake_mode is mode
    assert internals.TracingContext.try_get() is None


@pytest.mark.usefixtures("fresh_dynamo")
def test_steps_are_left_to_python_for_a_block_only():
    """Within the block, no graph contains Adam's step, also after an inner block; SGD's step is captured.

    After the block, both are captured.
    """

    def graphs_of(kind):
        graphs = []
        weight = torch.ones(2, requires_grad=True)
        weight.grad = torch.ones(2)
        optimizer = kind([weight])
        torch.compile(lambda: optimizer.step(), backend=lambda graph, _: graphs.append(graph) or graph.forward)()
        return len(graphs)

    with internals.dynamo_settings(exact=True, varying=False):
        with internals.dynamo_settings(exact=True, varying=False):
            assert graphs_of(torch.optim.Adam) == 0
        assert graphs_of(torch.optim.Adam) == 0
        assert graphs_of(torch.optim.SGD) == 1
    assert graphs_of(torch.optim.Adam) == graphs_of(torch.optim.SGD) == 1


@pytest.mark.usefixtures("fresh_dynamo")
def test_torchs_backends_can_be_called_without_dynamo():
    """Torch's own backends can be called without Dynamo, and receive the data that Dynamo would pass.

    In both cases, the inputs with fixed addresses are the parameters and buffers.
    """
    from torch._inductor.compile_fx import compile_fx

    class Seen(BaseException):
        pass

    def kernels(module, inputs, **more):
        static.append(sorted(more["static_input_idxs"]))
        raise Seen

    def inductor(module, inputs):
        return compile_fx(module, inputs, inner_compile=kernels)

    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False))
    static, graphs = [], []
    x = torch.randn(2, 3)
    with pytest.raises(Seen):
        torch.compile(model, backend=inductor)(x)
    torch.compiler.reset()
    torch.compile(model, backend=keeping_graphs(graphs))(x)
    inputs = dict([*model.named_parameters(), *model.named_buffers()])
    placeholders = graphs[0].graph.find_nodes(op="placeholder")
    given = [next((v for n, v in inputs.items() if n.split(".")[1] in node.name), x) for node in placeholders]
    assert len({id(each) for each in given}) == 6
    whole = fx.GraphModule(graphs[0], graphs[0].graph)
    with pytest.raises(Seen):
        internals.stock_compiled(whole, given, inductor)
    assert len(static[0]) == 5
    assert static[0] == static[1]
    for backend in ("aot_eager", "inductor"):
        graph = fx.symbolic_trace(lambda x: (x * 2,))
        x = leaf(2)
        internals.stock_compiled(graph, (x,), backend)(x)[0].sum().backward()
        assert x.grad.tolist() == [2.0, 2.0]


def test_ops_that_inductor_decomposes_are_lowered():
    """During the compilation of a graph with such an op, the op has a lowering. Afterwards it is removed."""
    from torch._inductor.lowering import lowerings

    graph = fx.Graph()
    op = torch.ops.aten.bernoulli.default
    graph.output((graph.call_function(op, (graph.placeholder("x"),)),))
    with internals._lowered(fx.GraphModule(torch.nn.Module(), graph)):
        assert callable(lowerings[op])
    assert op not in lowerings


# --- torch's databases of samples --------------------------------------------------------------------------------


def test_databases():
    """The entries of the databases have names and supported dtypes, and give samples."""
    add = next(info for info in internals.op_database() if info.full_name == "add")
    assert torch.float32 in add.supported_dtypes("cpu")
    assert torch.float32 in add.supported_backward_dtypes("cpu")
    assert add.supports_autograd
    assert add.supports_inplace_autograd
    assert add.supports_out
    assert add.inplace_variant is torch.Tensor.add_
    sample = next(add.sample_inputs("cpu", torch.float32, requires_grad=True, set_seed=False))
    assert isinstance(add.op(sample.input, *sample.args, **sample.kwargs), torch.Tensor)
    assert not sample.broadcasts_input
    assert sample.transform(lambda value: value).input is sample.input
    linear = next(info for info in internals.module_database() if info.name == "nn.Linear")
    inputs = linear.module_inputs_func(linear, device="cpu", dtype=torch.float32, requires_grad=True, training=True)
    made, given = inputs[0].constructor_input, inputs[0].forward_input
    module = linear.module_cls(*made.args, **made.kwargs)
    assert isinstance(module(*given.args, **given.kwargs), torch.Tensor)
    assert isinstance(inputs[0].desc, str)
    assert torch.float32 in linear.dtypes


def test_samples_do_not_seed():
    """Random operators of the database draw from the current generator, and seed it again after the block."""
    info = next(info for info in internals.op_database() if info.full_name == "nn.functional.dropout")
    sample = next(info.sample_inputs("cpu", torch.float32, set_seed=False))

    def draws_twice_the_same() -> bool:
        first, second = (info.op(torch.ones(1000), p=0.5, training=True) for _ in range(2))
        return torch.equal(first, second)

    assert isinstance(sample.input, torch.Tensor)
    assert draws_twice_the_same()
    with internals.samples_do_not_seed():
        assert not draws_twice_the_same()
    assert draws_twice_the_same()


# --- linear algebra ----------------------------------------------------------------------------------------------


def test_functionalization_casts():
    """A result of another dtype is cast by the op `CAST` before functionalization replaces a tensor with it."""
    assert internals.CAST(torch.ones(2), dtype=torch.int64).dtype == torch.int64
    assert torch.equal(internals.SOFTMAX(torch.ones(2), 0, False), torch.full((2,), 0.5))
    seen = []

    class See(internals.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x, other = torch.ones(2), torch.ones(2, dtype=torch.float64)
    with See(), internals.functionalization():
        internals.to_functional(x).add_(internals.to_functional(other))
    assert internals.CAST in seen


def test_vectors_flag():
    """The third argument of each decomposition says whether vectors are computed."""
    for op, name in internals.VECTORS_FLAG.items():
        assert [argument.name for argument in op._schema.arguments].index(name) == 2
        assert op(torch.eye(2), **{name: False})[1 if name == "compute_v" else 0].numel() == 0


def test_contiguous_strides():
    """The strides are a new tensor's. A dimension of size zero counts as one."""
    assert internals.make_contiguous_strides_for((2, 0, 3)) == (3, 3, 1) == torch.empty(2, 0, 3).stride()


def test_suggest_memory_format():
    """Kernels keep channels-last."""
    x = torch.ones(2, 3, 4, 5)
    assert internals.suggest_memory_format(x) is torch.contiguous_format
    assert internals.suggest_memory_format(x.to(memory_format=torch.channels_last)) is torch.channels_last


def test_what_enters_modes_in_dynamos_graphs():
    """Each function that enters a mode gives an object that its partner leaves it with; grad mode is set by one."""
    modes = {torch.autograd.grad_mode._enter_inference_mode: (True,)}
    modes[torch.amp.autocast_mode._enter_autocast] = ("cpu", torch.bfloat16, True, True)
    assert modes.keys() == internals.MODE_EXITS.keys()
    before = torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    for enter, args in modes.items():
        mode = enter(*args)
        assert (torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")) != before
        internals.MODE_EXITS[enter](mode)
        assert (torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")) == before
    with torch.no_grad():
        internals.SET_GRAD_ENABLED(True)
        assert torch.is_grad_enabled()


def test_checkpoint_settings():
    """Dynamo's op for a checkpoint is given the checkpoint's settings and its function's arguments together."""
    graphs = []

    def f(x):
        return torch.utils.checkpoint.checkpoint(torch.mul, x, 2, use_reentrant=False)

    torch.compiler.reset()
    torch.compile(f, backend=keeping_graphs(graphs))(torch.ones(2, requires_grad=True))
    assert internals.CHECKPOINT in [node.target for node in graphs[0].graph.nodes]
    assert internals.checkpoint_settings({"use_reentrant": False, "z": 1}) == {"use_reentrant": False}


def test_checkpoint_contexts():
    """Dynamo keeps a checkpoint's `context_fn` beside the graph that the checkpoint runs."""
    graphs = []

    def contexts():
        return contextlib.nullcontext(), contextlib.nullcontext()

    def f(x):
        return torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False, context_fn=contexts)

    torch.compiler.reset()
    torch.compile(f, backend=keeping_graphs(graphs))(torch.ones(2, requires_grad=True))
    bodies = [module for module in graphs[0].children() if isinstance(module, torch.fx.GraphModule)]
    assert [contexts] == [body.meta.get(internals.CHECKPOINT_CONTEXTS) for body in bodies]


def test_what_dynamo_puts_for_data():
    """Dynamo's replacement for ``.data`` gives an alias with a separate version counter, as ``.data`` does."""
    graphs = []

    torch.compiler.reset()
    torch.compile(lambda x: x.data.add_(1), backend=keeping_graphs(graphs))(torch.ones(2))
    assert internals.DATA_OF in [node.target for node in graphs[0].graph.nodes]
    tensor = torch.ones(2)
    assert internals.DATA_OF(tensor).mul_(2).tolist() == tensor.tolist() == [2.0, 2.0]
    assert tensor._version == 0


def test_no_dispatch_modes():
    """A kernel runs on real tensors in the middle of a block under a mode."""
    with FakeTensorMode(), internals.no_dispatch_modes():
        assert not isinstance(torch.ones(1), FakeTensor)


def test_call_of_several_views():
    """Autograd nodes of calls that make several views are distinguished from others."""
    x = leaf(3, 4)
    several = [views[0].grad_fn for views in (x.split(2, -1), x.unbind(1), x.split([1, 2]))]
    assert all(map(internals.is_call_of_several_views, several))
    assert not internals.is_call_of_several_views(x[0].grad_fn)


def test_what_dynamo_writes_for_an_assignment_to_data():
    """Torch 2.15 has an op for an assignment to ``.data``. In other versions, no op is taken for it."""
    op = internals.SETS_DATA
    if op is None:
        assert not hasattr(torch.ops.aten, "shallow_copy_data_")
        return
    x, y = torch.ones(2), torch.zeros(2)
    op(x, y)
    assert x.data_ptr() == y.data_ptr()


def test_what_dynamo_puts_for_a_function():
    """Its op says which of the kept values the user's function saved."""
    graphs = []

    torch.compiler.reset()
    torch.compile(_Idle.apply, backend=keeping_graphs(graphs))(leaf(3), torch.ones(3))
    (node,) = [node for node in graphs[0].graph.nodes if node.target is internals.FUNCTION_APPLY]
    assert node.kwargs["saved_for_backward_idx"] == []
    assert node.kwargs["non_differentiable_idx"] == []


class _Idle(torch.autograd.Function):
    """Saves one of its arguments and keeps the other, which alone it uses."""

    @staticmethod
    def forward(ctx, x, w):
        """Multiply."""
        ctx.save_for_backward(x)
        ctx.w = w
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        """Use the attribute."""
        return gradient * ctx.w, None


def test_transforms_are_left_one_by_one():
    """After an error in nested transforms, exactly the transforms that were entered since are left."""
    functorch = torch._C._functorch
    outer = internals.TransformState()
    functorch._vmap_increment_nesting(2, "error")
    inner = internals.TransformState()
    functorch._grad_increment_nesting()
    functorch._jvp_increment_nesting()
    functorch._vmap_increment_nesting(2, "error")
    inner.restore()
    assert functorch.get_dynamic_layer_stack_depth() == 1
    assert functorch.peek_interpreter_stack().key() == functorch.TransformType.Vmap
    outer.restore()
    assert functorch.get_dynamic_layer_stack_depth() == 0
    assert torch.vmap(torch.sin)(torch.ones(3)).shape == (3,)
