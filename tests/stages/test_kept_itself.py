"""What the caller does to a tensor itself, between call and backward, where autograd kept that very tensor.

Autograd keeps of what an op takes the tensor itself, and of what an op returns an alias. So a detached input is an
error, and one that was given other memory is computed with as it is by then, while a view of it stays where it was.
"""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import aotlab
from aotlab.errors import MetadataMutationError
from tests.engine_helpers import behind, compiled, record, refusing

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore::UserWarning")]


class Product(torch.autograd.Function):
    """A product that saves what it takes."""

    @staticmethod
    def forward(ctx, x, w):
        """Save both."""
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        """Use both."""
        x, w = ctx.saved_tensors
        return gradient * w, gradient * x


def product(x, w):
    """Keep both."""
    return x * w, x


def same_object(x, w):
    """Return one result several times, and what was kept for it."""
    y = x * w
    return y, y, x, y.relu_()


def result_kept(x, w):
    """Keep a result that is returned too."""
    y = x * w
    return y, y * w, y.sin()


def result_of_its_node(x, w):
    """Keep a result as the node's own."""
    y = (x * w).exp()
    return y, y * 2


def both_ways(x, w):
    """Keep a result as one node's own and for another."""
    y = (x * w).exp()
    return y, y.sin()


def linear(x, w):
    """Keep a view of the weight."""
    return torch.nn.functional.linear(x, w), x


def itself_and_view(x, w):
    """Keep an argument itself and a view of it."""
    return x * w, x @ w.t()


def windows(x, w):
    """Keep parts."""
    return (x[0] * w[1]).exp(), x.view(-1)[1:] * 2


def written(x, w):
    """Keep what was written."""
    x.mul_(w)
    return x * x, x


def written_and_given(x, w):
    """Give what was written to a checkpoint."""
    x.mul_(w)
    return checkpoint(lambda value, by: value.sin() * by, x, w, use_reentrant=False), x * w


def written_in_part(x, w):
    """Keep what was written in part."""
    x[0].mul_(w[0])
    return x * w, x


def written_in_part_and_given(x, w):
    """Give what was written in part to a checkpoint."""
    x[0].mul_(w[0])
    return checkpoint(lambda value: value * value, x, use_reentrant=False), x


def writing_a_view(x, w):
    """Keep what a view is multiplied by in place."""
    y, z = x * 1, w[0] * 2
    y[1].mul_(z)
    return z, y


def reshaped(x, w):
    """Keep what changes its strides."""
    x.t_()
    return x * w, x


def by_function(x, w):
    """Save by a custom Function, which does not ask for the history of what it saved."""
    return Product.apply(x, w), x * 2


def in_checkpoint(x, w):
    """Checkpoint keeps its arguments as autograd does."""
    return checkpoint(lambda value: value.sin() * 2, x * w, use_reentrant=False), x


def leaves_in_checkpoint(x, w):
    """Run again, it keeps less of an argument that was detached since."""
    return checkpoint(lambda a, b: a.sin() * b, x, w, use_reentrant=False), x * 2, x


def normed(x, w):
    """Keep what a kernel wants for its backward."""
    return torch.nn.functional.layer_norm(x, (3,), w[0], w[1]), x.softmax(0) * w


WRITING = [written, written_and_given, written_in_part, written_in_part_and_given]

PROGRAMS = [
    product,
    same_object,
    result_kept,
    result_of_its_node,
    both_ways,
    linear,
    itself_and_view,
    windows,
    written,
    written_and_given,
    written_in_part,
    written_in_part_and_given,
    writing_a_view,
    reshaped,
    by_function,
    in_checkpoint,
    leaves_in_checkpoint,
    normed,
]


def _other(tensor):
    tensor.data = torch.full(tensor.shape, 0.5)


def _transposed(tensor):
    tensor.data = tensor.data.t()


def _with_gaps(tensor):
    tensor.data = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), 0.5)[..., ::2]


ACTIONS = {
    "nothing": lambda tensor: None,
    "detach_": torch.Tensor.detach_,
    "other memory": _other,
    "transposed": _transposed,
    "with gaps": _with_gaps,
    "uncounted": lambda tensor: tensor.data.mul_(2),
    "other memory, written": lambda tensor: (_other(tensor), tensor.mul_(2)),
}


VIEWS = {
    "whole": lambda tensor: (tensor * 1)[:],
    "transposed": lambda tensor: (tensor * 1).t(),
    "rows": lambda tensor: torch.cat([tensor, tensor])[2:5],
}


def outcome(call, act, which, roots, *, own_leaf, view=None):
    """Call, act on an argument or a result, go backward, write without a count, go again; return what can be seen."""
    source, scale = torch.arange(9.0).view(3, 3) / 9, torch.arange(9.0).view(3, 3) / 7 + 0.5
    source.requires_grad_()
    scale.requires_grad_()
    x, w = (source, scale) if own_leaf else (source * 1 if view is None else VIEWS[view](source), scale * 1)
    seen = []
    outputs = call(x, w)
    tensor = {"x": x, "w": w}[which] if isinstance(which, str) else outputs[which]
    try:
        with torch.no_grad():
            act(tensor)
    except RuntimeError as error:
        seen.append(str(error)[:40])
    for again in (True, False):
        wanted = [y.sum() for i, y in enumerate(outputs) if y.requires_grad and roots in (None, i)]
        try:
            if wanted:
                torch.autograd.backward(wanted, retain_graph=again)
        except (RuntimeError, MetadataMutationError) as error:
            seen.append((type(error), str(error)[:40]))
        if again:
            tensor.data.mul_(0.5)
        seen.append([None if each.grad is None else each.grad.tolist() for each in (source, scale)])
    return seen


def check(program, make, action, *, allowed=(), view=None):
    """Compare all that can be done with eager; errors of the types ``allowed`` may stand where eager has none."""
    found = make(program)
    differ = []
    for own_leaf in (False, True):
        if own_leaf and (program in (*WRITING, reshaped) or view is not None):
            continue
        for which in ("x", "w", 0, 1):
            for roots in (None, 0, 1):
                settings = (ACTIONS[action], which, roots)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    expected = outcome(program, *settings, own_leaf=own_leaf, view=view)
                    actual = outcome(found, *settings, own_leaf=own_leaf, view=view)
                refused = any(isinstance(each, tuple) and each[0] in allowed for each in actual)
                if expected != actual and not refused:
                    differ.append((which, roots, own_leaf, expected, actual))
    assert differ == []
    return found


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_direct(program, action):
    """Gradients and errors are eager's, and the program is compiled."""
    allowed = (MetadataMutationError,) if program is reshaped else ()
    function = check(program, compiled, action, allowed=allowed)
    assert behind(function).calls.eager == 0


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("program", [each for each in PROGRAMS if each is not windows])
def test_views(program, action, view):
    """Likewise where an argument is a view, so that what is saved may be what it is a view of."""
    allowed = (MetadataMutationError,) if program is reshaped else ()
    function = check(program, compiled, action, allowed=allowed, view=view)
    reads_a_neighbour = view == "rows" and program in (written_and_given, written_in_part_and_given)
    assert behind(function).calls.eager == 0 or reads_a_neighbour


@pytest.mark.parametrize("action", ["detach_", "other memory"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_behind_dynamo(program, action):
    """Likewise where Dynamo calls the compiled graph."""
    allowed = (MetadataMutationError,) if program is reshaped else ()
    check(program, functools.partial(compiled, frontend="dynamo"), action, allowed=allowed)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_computed_again(program, action):
    """A partitioner that computes again does not make a difference."""
    partitioner = aotlab.min_cut_rematerialization_partition
    allowed = (MetadataMutationError,) if program is reshaped else ()
    check(program, functools.partial(compiled, partitioner=partitioner), action, allowed=allowed)


def test_other_shapes_are_an_error_of_ours():
    """Where the compiled backward cannot take what eager would, it says so."""
    f = aotlab.compile(lambda x, w: x * w, backend="inductor")
    x, w = torch.ones(3, 3, requires_grad=True), torch.ones(3, 3, requires_grad=True)
    y = f(x, w)
    w.data = torch.ones(1)
    with refusing(MetadataMutationError, match="was given other sizes or other memory after the call"):
        y.sum().backward()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_elements_of_its_own_for_an_expanded_tensor_are_an_error_of_ours(backend):
    """The backward was compiled for one element that stands for several."""
    f = aotlab.compile(Product.apply, backend=backend)
    x, w = torch.ones(1, 3, requires_grad=True).expand(3, 3), torch.ones(3, 3, requires_grad=True)
    y = f(x, w)
    x.data = torch.ones(3, 3)
    with refusing(MetadataMutationError, match="was given other sizes or other memory after the call"):
        y.sum().backward()


@pytest.mark.parametrize("action", ["other memory", "transposed", "with gaps"])
def test_kernels_are_given_the_strides_that_they_were_compiled_for(action):
    """Inductor's backwards take no others."""
    close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    for program in (product, linear, result_kept, written):
        f = aotlab.compile(program, backend="inductor")
        for which in ("x", "w"):
            settings = {"act": ACTIONS[action], "which": which, "roots": None, "own_leaf": False}
            for expected, actual in zip(outcome(program, **settings), outcome(f, **settings), strict=True):
                close([torch.tensor(each) for each in actual], [torch.tensor(each) for each in expected])


@pytest.mark.parametrize("make", [lambda f: f, compiled], ids=["eager", "compiled"])
def test_given_back_what_it_had(make):
    """Each backward computes with the memory that the tensor has by then, which may be its first one again."""
    x, w = torch.ones(3, 3, requires_grad=True), torch.ones(3, 3, requires_grad=True)
    y, z, _ = make(result_kept)(x, w)
    first, found = y.data, []
    for memory in (first, torch.full((3, 3), 5.0), first, torch.full((3, 3), 7.0)):
        y.data = memory
        found.append(torch.autograd.grad(z.sum(), w, retain_graph=True)[0][0, 0].item())
    assert found == [2, 6, 2, 8]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: torch.nn.functional.linear(x.view(1, 3, 3), w),
        lambda x, w: x[:] * w,
        lambda x, w: x.detach().view_as(x) * w,
    ],
)
def test_views_that_a_compiler_drops(function):
    """Of a view that changes nothing Inductor leaves its input; what autograd kept stays in the memory that was."""

    def gradient(call):
        x, w = torch.arange(9.0).view(3, 3) * torch.ones((), requires_grad=True), torch.ones(3, 3, requires_grad=True)
        y = call(x, w)
        _other(x)
        return torch.autograd.grad(y.sum(), w)[0].tolist()

    assert gradient(function) == gradient(aotlab.compile(function, backend="inductor"))


def test_saved_twice():
    """An argument that is kept itself, and of which a view is kept, is saved both ways; of a weight a view alone."""
    saved = {value.name: value for value in _record(itself_and_view).saved}
    assert [name for name, value in saved.items() if value.is_alias] == ["primals_2_memory"]
    assert saved["primals_2"].is_input
    assert saved["primals_2_memory"].is_input
    assert [(value.name, value.is_alias) for value in _record(linear).saved] == [
        ("primals_1", False),
        ("primals_2", True),
    ]


def _record(program):
    f = compiled(program)
    f(torch.ones(3, 3, requires_grad=True), torch.ones(3, 3, requires_grad=True))
    return record(f, "partition")


def test_nothing_is_kept_alive():
    """What looks at an output in the backward does not keep it."""
    import weakref

    f = compiled(result_kept)
    y, *others = f(torch.ones(3, 3, requires_grad=True), torch.ones(3, 3, requires_grad=True))
    gone = weakref.ref(y)
    del y
    assert gone() is None
    others[0].sum().backward()


def _result_copied(x, w):
    y = x * 2
    return y, y.clone() * w


@pytest.mark.parametrize(
    "program",
    [
        lambda x, w: (x, x.clone() * w),
        lambda x, w: (x, x.clone().view(9).view(3, 3) * w),
        lambda x, w: (x, x * 1 * w),
        lambda x, w: (x, x.pow(1) * w),
        lambda x, w: (x, x.to(torch.float32, copy=True) * w),
        lambda x, w: (x, x * w + torch.cat([x]) * w),
        _result_copied,
    ],
)
@pytest.mark.parametrize("action", ["uncounted", "other memory", "written"])
def test_copies_that_a_compiler_drops(program, action):
    """Of a copy Inductor leaves what was copied; the caller's writes to that do not change what autograd kept."""

    def gradient(call):
        x, w = torch.arange(9.0).view(3, 3), torch.ones(3, 3, requires_grad=True)
        kept, y = call(x, w)
        {**ACTIONS, "written": lambda tensor: tensor.add_(1)}[action](kept)
        try:
            return torch.autograd.grad(y.sum(), w)[0].tolist()
        except RuntimeError as error:
            return str(error)[:40]

    assert gradient(program) == gradient(aotlab.compile(program, backend="inductor"))


@pytest.mark.parametrize("apart", [True, False])
def test_other_memory_of_one_of_several_windows(apart):
    """Of windows in one buffer one is kept itself and given other memory, and of the other an alias is kept."""

    def program(a, b, w):
        a.detach().mul_(2)
        return torch.lerp(a[...], b, w)  # one node keeps both

    def gradient(call):
        buffer = torch.arange(8.0)
        a, b = (buffer[0:8:2], buffer[1:8:2]) if apart else (buffer[:4], buffer[4:])
        w = torch.ones(4, requires_grad=True)
        y = call(a, b, w)
        b.data = torch.full((4,), 5.0)
        return torch.autograd.grad(y.sum(), w)[0].tolist()

    assert gradient(compiled(program)) == gradient(program)


class Attribute(torch.autograd.Function):
    """A sine that keeps what it takes without autograd's knowledge."""

    @staticmethod
    def forward(ctx, x):
        """Keep it as an attribute."""
        ctx.x = x
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        """Use it as it is by then."""
        return gradient * ctx.x.cos()


def again(function, *tensors):
    """Run a function in a checkpoint."""
    return checkpoint(function, *tensors, use_reentrant=False)


def captured(x, view):
    """Use what the checkpoint was not given."""
    return again(lambda y: view * y, x.exp().view(view.shape))


READ_LATE = {
    "given": lambda x: again(torch.square, x),
    "used": lambda x: captured(x, x),
    "viewed inside": lambda x: again(lambda y: x.view(-1)[1:] * y, x.exp().view(-1)[1:]),
    "attribute": Attribute.apply,
    "view given": lambda x: again(torch.square, x[...]),
    "view used": lambda x: captured(x, x.view(-1)),
    "detached used": lambda x: captured(x, x.detach()),
    "view given, detached inside": lambda x: again(lambda y: y.detach() * y, x.view(-1)),
    "both": lambda x: again(lambda y: y * x[0], x[0]),
    "both, in turn": lambda x: again(torch.square, x[0]) * Attribute.apply(x)[0],
}

GIVEN_LATE = {
    "nothing": lambda x: None,
    "other memory": lambda x: setattr(x, "data", x.detach() * 2),
    "written": lambda x: x.data.mul_(2),
    "written, then other memory": lambda x: (x.data.mul_(2), setattr(x, "data", x.detach() + 1)),
}


@pytest.mark.parametrize("partitioner", [aotlab.default_partition, aotlab.min_cut_rematerialization_partition])
@pytest.mark.parametrize("is_written", [False, True])
@pytest.mark.parametrize("action", GIVEN_LATE)
@pytest.mark.parametrize("kind", READ_LATE)
def test_read_late(kind, action, is_written, partitioner):
    """Other memory is computed with where an input itself is read late, not where a view of it is.

    One saved value cannot tell both, if it is the written one: eager runs the call.
    """

    def program(x):
        y = READ_LATE[kind](x)
        if is_written:
            x.data.mul_(3)
        return y

    def gradient(call):
        x = torch.tensor([[-1.25, 1.25], [-1.75, 0.75]], requires_grad=True)
        y = call(x)
        GIVEN_LATE[action](x)
        return torch.autograd.grad(y.sum(), x)[0]

    call = compiled(program, partitioner=partitioner)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = gradient(call)
    torch.testing.assert_close(found, gradient(program))
    assert (behind(call).calls.eager == 1) == (is_written and kind.startswith("both"))


def _detached(tensor):
    tensor.detach_()


CHANGES = {
    "turned": torch.Tensor.t_,
    "detached": _detached,
    "made to require grad": lambda tensor: tensor.requires_grad_(),
}


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_beside_an_input_that_changes_its_sizes(change, is_last):
    """What is done to one input is nothing to what is kept of another (`aotlab fuzz --seed 1180000`)."""

    def program(x, w):
        if not is_last:
            CHANGES[change](w)
        y = x * x
        if is_last:
            CHANGES[change](w)
        return y

    def gradients(call):
        x = torch.tensor([[-1.25, 1.25], [-1.75, 0.75]], requires_grad=True)
        y = call(x, torch.ones(2, 2))
        x.data = x.detach() * 2
        return [torch.autograd.grad(y.sum(), x, retain_graph=True)[0].tolist() for _ in range(2)]

    call = compiled(program)
    assert gradients(call) == gradients(program)
    assert behind(call).calls.eager == 0


@pytest.mark.parametrize("given", ["x", "alias"])
def test_read_late_beside_an_alias_that_changes_its_sizes(given):
    """Of two inputs on the same memory it is the one that is read which may be given other memory."""

    def program(x, w, alias):
        y = captured(w, x)
        alias.unsqueeze_(0)
        return y

    def gradient(call):
        source = torch.tensor([[-1.25, 1.25], [-1.75, 0.75]], requires_grad=True)
        x, w = source * 1, torch.ones(2, 2, requires_grad=True)
        tensors = {"x": x, "alias": x.detach()}
        y = call(x, w, tensors["alias"])
        tensors[given].data = tensors[given].detach() * 2
        return torch.autograd.grad(y.sum(), w)[0].tolist()

    call = compiled(program)
    assert gradient(call) == gradient(program)
    assert behind(call).calls.eager == 0


def test_kept_beside_one_that_is_written():
    """It shows the write, and is not found among what is kept: other memory is an error of ours, no old value."""

    def program(x, w, alias):
        alias.unsqueeze_(0)
        w.data.mul_(2)
        return x * alias

    def gradient(call, is_given):
        x, source = (torch.arange(4.0).view(2, 2).requires_grad_() for _ in range(2))
        w = source * 1
        alias = w.detach()
        y = call(x, w, alias)
        if is_given:
            alias.data = alias.detach() * 3
        return torch.autograd.grad(y.sum(), x)[0].tolist()

    call = compiled(program)
    assert gradient(call, is_given=False) == gradient(program, is_given=False)
    with refusing(MetadataMutationError, match="was given other sizes or other memory after the call"):
        gradient(call, is_given=True)
    assert behind(call).calls.eager == 0
