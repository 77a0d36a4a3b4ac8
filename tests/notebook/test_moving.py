"""``--device`` moves values. Aliases and identity are preserved. Gradients and the state of optimizers move along."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from aotlab.errors import DeviceError
from aotlab.notebook.moving import move, move_storages

CPU, META = torch.device("cpu"), torch.device("meta")
#: For torch, this is another device than `cpu`, although it is the same hardware. So moved tensors are copied.
OTHER = torch.device("cpu", 0)
CUDA = pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)


def storage(tensor: Tensor) -> int:
    """Identify the memory of a tensor."""
    return tensor.untyped_storage()._cdata


def clone(memory: torch.UntypedStorage, _device: torch.device) -> torch.UntypedStorage:
    """Copy a storage where it is."""
    return memory.clone()


def test_values_and_aliases() -> None:
    """New memory has the same values, below the same objects, with the same offsets and strides."""
    x = torch.arange(12.0)
    tensors = [
        x,
        x[2:8].view(2, 3).t(),
        x.view(3, 4)[:, 1],
        nn.Parameter(x[:3]),
        torch.randn(2, dtype=torch.cfloat).conj(),
    ]
    before = [(storage(each), each.clone(), each.stride(), each.storage_offset(), each._version) for each in tensors]
    assert move_storages(tensors, CPU, clone) == 12 * 4 + 2 * 8
    for each, (memory, value, *looks) in zip(tensors, before, strict=True):
        assert memory != storage(each)
        assert torch.equal(value, each)
        assert looks == [each.stride(), each.storage_offset(), each._version]
    assert len({storage(each) for each in tensors[:4]}) == 1
    tensors[1][0, 0] = 70.0
    assert (x[2].item(), x._version, tensors[2]._version) == (70.0, 1, 1)
    tensors[3].sum().backward()
    assert tensors[3].grad.tolist() == [1.0] * 3


def test_interrupted() -> None:
    """If a move is interrupted, everything stays unchanged."""

    class Stubborn(Tensor):
        data = property(lambda self: Tensor.data.__get__(self), lambda self, value: interrupt())

    def interrupt() -> None:
        raise KeyboardInterrupt

    x, y = torch.ones(3), torch.ones(3).as_subclass(Stubborn)
    memory = storage(x)
    with pytest.raises(KeyboardInterrupt):
        move_storages([x, y], CPU, clone)
    assert storage(x) == memory
    assert x.tolist() == [1.0] * 3


@pytest.mark.parametrize("device", [OTHER, CUDA], ids=str)
def test_training(device: torch.device) -> None:
    """A model, its optimizer that the cell does not name, gradients, other names of the same memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    tied = model[0].weight
    model[0].extra = tied
    x, unused = torch.randn(5, 3), torch.ones(3)
    optimizer = torch.optim.Adam(model.parameters())
    wanted = copy.deepcopy((model, optimizer))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(x.to(next(model.parameters()).device)).square().sum().backward()
        optimizer.step()

    for each in ((model, optimizer), wanted):
        step(*each)
    flat, gradient, state = tied.detach().view(-1), tied.grad, optimizer.state[tied]
    moving = [tied, flat, gradient, state["exp_avg"], model[1].running_mean, model[1].num_batches_tracked]
    staying = [state["step"], unused, x]
    before = [storage(each) for each in (*moving, *staying)]
    text = move({"model": model, "first": model[0], "__": unused}, device)
    assert text.startswith(f"moved to {device}: `model` (")
    after = [storage(each) for each in (*moving, *staying)]
    assert [old != new for old, new in zip(before, after, strict=True)] == [True] * 6 + [False] * 3
    assert {each.device.type for each in moving} == {device.type}
    assert model[0].weight is tied is model[0].extra
    assert tied.grad is gradient
    assert storage(flat) == storage(tied)
    for each in ((model, optimizer), wanted):
        step(*each)
    for mine, theirs in zip(model.parameters(), wanted[0].parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs)  # another device rounds in another way
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)


def test_what_an_optimizer_keeps_in_lists() -> None:
    """The directions of LBFGS."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.LBFGS([weight])

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = weight.sin().sum()
        value.backward()
        return value

    optimizer.step(loss)
    (direction, *_) = optimizer.state[weight]["old_dirs"]
    before = storage(direction)
    move({"weight": weight}, OTHER)
    assert storage(direction) != before


def test_long_lists() -> None:
    """Batches in a list move, however many there are."""
    batches = [torch.ones(2) for _ in range(300)]
    before = storage(batches[-1])
    move({"batches": batches}, OTHER)
    assert storage(batches[-1]) != before


def test_the_optimizer_alone() -> None:
    """A cell that names an optimizer uses its parameters; its counters stay."""
    weight = nn.Parameter(torch.ones(3))
    sgd, adam = torch.optim.SGD([weight], momentum=0.9), torch.optim.Adam([weight])
    weight.sum().backward()
    sgd.step()
    adam.step()
    momentum, step = sgd.state[weight]["momentum_buffer"], adam.state[weight]["step"]
    before = [storage(each) for each in (weight, momentum, step)]
    move({"sgd": sgd, "adam": adam, "items": [weight, {"w": weight}]}, OTHER)
    assert [storage(each) != old for each, old in zip((weight, momentum, step), before, strict=True)] == [
        True,
        True,
        False,
    ]


REFUSED = {
    "a history": (lambda: torch.ones(3, requires_grad=True) * 2, "computed on cpu, with an autograd history there"),
    "sparse": (lambda: torch.eye(2).to_sparse(), "a sparse_coo tensor"),
    "in inference mode": (lambda: torch.inference_mode()(torch.ones)(3), "made in inference mode"),
    "another class": (lambda: torch.ones(3).as_subclass(type("Mine", (Tensor,), {})), "a `Mine`"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """Nothing is moved."""
    make, why = REFUSED[name]
    first = torch.ones(3)
    memory = storage(first)
    with pytest.raises(DeviceError, match=f"`both\\[1\\]` cannot be moved as it is: {why}"):
        move({"both": [first, make()]}, OTHER)
    assert storage(first) == memory


def test_without_data() -> None:
    """A tensor without data cannot be moved."""
    with pytest.raises(DeviceError, match="`m` cannot be moved as it is: on the meta device, without data"):
        move({"m": torch.ones(3, device=META)}, CPU)
