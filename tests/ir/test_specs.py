"""Specs: the metadata of a tensor without the tensor."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from aotlab.ir.specs import StorageNumbers, SymExpr, TensorSpec, size_of, sizes_of, spec_of


def test_spec_of_a_window():
    """Shape, strides, offsets in elements and bytes, sizes, flags."""
    base = torch.arange(12, dtype=torch.float64).reshape(3, 4)
    spec = spec_of(base[1:, 1:3].t(), StorageNumbers())
    assert (spec.shape, spec.stride) == ((2, 2), (1, 4))
    assert (spec.offset, spec.byte_offset) == (5, 40)
    assert (spec.nbytes, spec.storage_bytes, spec.storage) == (32, 96, 0)
    assert (spec.dtype, spec.device, spec.layout) == (torch.float64, torch.device("cpu"), torch.strided)
    assert (spec.requires_grad, spec.is_leaf, spec.type_name) == (False, True, "torch.Tensor")
    assert str(spec) == "float64[2, 2]"


def test_requires_grad_and_type():
    """Autograd's flags, and the Python type's name."""
    parameter = torch.nn.Parameter(torch.ones(2))
    spec = spec_of(parameter)
    assert (spec.requires_grad, spec.is_leaf, spec.type_name) == (True, True, "torch.nn.parameter.Parameter")
    assert spec_of(parameter * 2).is_leaf is False
    assert (spec.storage, spec.storage_bytes) == (None, None)


def test_storages_are_numbered_in_order():
    """Tensors of one storage have one number; numbers are not given twice, even if a storage dies."""
    numbers = StorageNumbers()
    a = torch.ones(4)
    assert numbers.number(a) == 0
    assert numbers.number(torch.ones(4)) == 1
    assert numbers.number(torch.ones(4)) == 2
    assert numbers.number(a[1:].view(torch.int32)) == 0
    assert numbers.number(torch.ones(2).to_sparse()) is None


def test_scalars_and_empty_tensors():
    """Zero dimensions and zero elements."""
    assert spec_of(torch.tensor(3.0)).shape == ()
    assert spec_of(torch.tensor(3.0)).nbytes == 4
    assert spec_of(torch.empty(0, 3)).nbytes == 0
    assert str(spec_of(torch.tensor(1))) == "int64[]"


def test_expanded_bytes():
    """Nbytes counts elements, however they overlap."""
    assert spec_of(torch.ones(1).expand(5)).nbytes == 20


def test_sparse_layout():
    """The spec of a tensor without strides has no strides."""
    spec = spec_of(torch.eye(2).to_sparse())
    assert (spec.layout, spec.stride, spec.offset) == (torch.sparse_coo, (), 0)


def test_symbolic_sizes():
    """A symbolic size is kept as its expression with the value of the traced call."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    fake = mode.from_tensor(torch.ones(5), symbolic_context=context)
    size = size_of(fake.shape[0])
    assert isinstance(size, SymExpr)
    assert size.hint == 5
    assert str(size) == f"{size.expression}=5"
    assert sizes_of((3, fake.shape[0])) == (3, size)
    spec = spec_of(fake)
    assert spec.shape == (size,)
    assert str(spec) == f"float32[{size}]"


def test_specs_are_frozen():
    """Records cannot be changed, and compare by value."""
    spec = spec_of(torch.ones(2))
    assert spec == spec_of(torch.zeros(2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.shape = ()
    assert not hasattr(spec, "__dict__")
    assert {field.name for field in dataclasses.fields(TensorSpec)} >= {"byte_offset", "storage"}
