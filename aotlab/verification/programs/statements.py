"""The statements of the programs, as templates grouped by the least rank of their tensor.

``{x}`` is replaced by the name of a tensor. The methods of `Fields` draw the text for each other field.
"""

from __future__ import annotations

import functools
import math

import torch

from aotlab.verification.programs import rare
from aotlab.verification.programs.choices import Choices, chance, one_of, shuffled, weighted
from aotlab.verification.programs.defined import overlap
from aotlab.verification.programs.rare import Table

VIEWS: Table = {
    0: (
        "{x}.view(-1)",
        "{x}[...]",
        "{x}[None]",
        "{x}.detach()",
        "{x}.unsqueeze({slot})",
        "{x}.reshape(-1)",
        "{x}.flatten()",
        "{x}.squeeze()",
        "{x}.view_as({x})",
        "{x}.expand({twice})",
        "{x}.view({folded})",
        "{x}.reshape({folded})",
        "{x}.as_strided({strided})",
    ),
    1: (
        "{x}[{lead}{at}]",
        "{x}[{lead}{at}:]",
        "{x}[{lead}::2]",
        "{x}[..., -1]",
        "{x}.squeeze({dim})",
        "{x}.select({dim}, {at})",
        "{x}.narrow({dim}, {at}, {remaining})",
        "{x}.unfold({dim}, {window}, 1)",
        "{x}.unbind({dim})[{at}]",
        "{x}.chunk(2, {dim})[0]",
        "{x}.split(1, {dim})[{at}]",
    ),
    2: (
        "{x}.transpose({one}, {two})",
        "{x}.permute({order})",
        "{x}.movedim({one}, {two})",
        "{x}.flatten(0, 1)",
        "{x}.swapaxes({one}, {two})",
        "{x}.t()",
        "{x}.mT",
        "{x}.diagonal()",
        "{x}.t()[0]",
    ),
}

#: Views with another dtype, by the tensor's dtype.
OTHER_DTYPES = {
    torch.complex64: ("torch.view_as_real({x})", "{x}.real", "{x}.imag", "{x}.conj()"),
    torch.float32: ("torch.view_as_complex({x})", "{x}.view(torch.int32)"),
    torch.float64: ("{x}.view(torch.int64)", "torch.view_as_complex({x})"),
    torch.int32: ("{x}.view(torch.int8)", "{x}.view(torch.int16)"),
    torch.int64: ("{x}.view(torch.int32)",),
}

IN_PLACE: Table = {
    0: (
        "{target}.mul_({scalar})",
        "{target}.add_({scalar})",
        "{target}.add_({source})",
        "{target}.mul_({source})",
        "{target}.sub_({source}, alpha=2)",
        "{target}.copy_({source})",
        "{target}.zero_()",
        "{target}.fill_({scalar})",
        "{target}.sin_()",
        "{target}.neg_()",
        "{target}.relu_()",
        "{target}.clamp_(-1, 1)",
        "{target}.masked_fill_({target} > 0, {scalar})",
        "{target}.addcmul_({source}, {source})",
        "{target}.abs_()",
        "{x} += {scalar}",
        "{x} *= {source}",
    )
}

SET: Table = {
    0: ("{x}[...] = {scalar}",),
    1: (
        "{x}[{first}] = {scalar}",
        "{x}[{first}:] = {source}",
        "{x}[...] = {source}",
        "{x}[::2] += {scalar}",
        "{x}[{x} > 0] = {scalar}",
        "{x}[{x} > 0] *= 2",
        "{x}[..., 0] = {scalar}",
        "{x}.index_fill_(0, torch.tensor([{first}]), {scalar})",
    ),
}

NEW: Table = {
    0: (
        "{x} * {scalar}",
        "{x} + {scalar}",
        "{x} + {other}",
        "{x} * {other}",
        "{x} - {other}",
        "{x} / 2",
        "{x}.clone()",
        "{x}.contiguous()",
        "{x}.neg()",
        "{x}.abs()",
        "{x}.square()",
        "{x}.relu()",
        "{x}.sin()",
        "{x}.clamp(-2, 2).exp()",
        "{x}.sum()",
        "{x}.mean()",
        "{x}.to(torch.float64)",
        "torch.where({x} > 0, {x}, {other})",
        "torch.maximum({x}, {other})",
        "torch.stack([{x}, {other}])",
        "torch.ones_like({x})",
        "{x}.new_zeros({shape})",
        "{x}.detach().clone()",
        "{x} + {x}.storage_offset()",
    ),
    1: (
        "{x}.sum({dim})",
        "{x}.mean({dim}, keepdim=True)",
        "{x}.amax({dim})",
        "{x}.cumsum({dim})",
        "{x}.softmax({dim})",
        "{x}.flip({dim})",
        "torch.cat([{x}, {other}], {dim})",
        "{x}.index_select({dim}, torch.tensor([{at}, 0]))",
        "{x}.gather({dim}, torch.zeros_like({x}, dtype=torch.int64))",
        "{x}.max({dim}).values",
    ),
    2: ("{x} @ {other}", "{x} @ {x}.t()", "{x}.tril()"),
}

METADATA: Table = {
    0: (
        "{x}.unsqueeze_({slot})",
        "{x}.squeeze_()",
        "{x}.as_strided_({strided})",
        "{x}.resize_({fewer})",
        "{x}.resize_({larger}).fill_({scalar})",
        "{x}.set_({source})",
        "{x}.detach_()",
        "{x}.requires_grad_()",
    ),
    1: ("{x}.squeeze_({dim})", "{x}.unsqueeze_({slot})"),
    2: (
        "{x}.t_()",
        "{x}.transpose_({one}, {two})",
        "{x}.swapaxes_({one}, {two})",
        "{x}.t_()",
        "{x}.transpose_({one}, {two})",
    ),
}

#: Statements that Dynamo cannot trace without a graph break.
NOT_FOR_DYNAMO = ("resize_", "set_(", "as_strided_", "requires_grad_")

HIDDEN: Table = {
    0: (
        "{x}.detach().mul_({scalar})",
        "{x}.data.mul_({scalar})",
        "{x}.detach().add_({scalar})",
        "{x}.data.copy_({source})",
        "{x}.data[...] = {scalar}",
    ),
    1: ("{x}.detach()[{first}:].mul_({scalar})", "{x}.data[{first}].add_({scalar})"),
}

HOOKS: Table = {
    0: (
        "{x}.register_hook(lambda gradient: gradient * 2)",
        "{x}.register_hook(lambda gradient: -gradient)",
        "{x}.register_hook(lambda gradient: None)",
        "{x}.retain_grad()",
    )
}

OUT: Table = {
    0: (
        "torch.mul({x}, {scalar}, out={like})",
        "torch.neg({x}, out={like})",
        "torch.abs({x}.detach(), out={like})",
    ),
    1: ("torch.cumsum({x}, {dim}, out={like})",),
}

#: Writes that no trace can record; the engine must refuse them or run eagerly.
AROUND: Table = {
    0: (
        "{x}.data = {source}.detach().clone()",
        "{x}.detach().numpy()[...] = 2",
        "torch.from_numpy({x}.detach().numpy()).mul_(2)",
    )
}

#: Views whose sizes are computed from the tensor's sizes.
VIEWS_USING_SIZES: Table = {
    0: (
        "{x}.view({x}.shape)",
        "{x}.expand(2, *{x}.shape)",
        "{x}.view(1, *{x}.shape)",
        "{x}.as_strided({x}.shape, {x}.stride())",
        "{x}.view({x}.numel())",
        "{x}.reshape({x}.numel())[: {x}.numel() // 2]",
    ),
    1: (
        "{x}.view({x}.shape[0], -1)",
        "{x}.reshape(-1, {x}.shape[-1])",
        "{x}[: {x}.shape[0] // 2]",
        "{x}[{x}.shape[0] // 2 :]",
        "{x}[..., : {x}.shape[-1] - 1]",
        "{x}[: {other}.shape[0]]",
        "{x}.narrow({dim}, 0, {x}.shape[{dim}] - 1)",
        "{x}.select({dim}, {x}.shape[{dim}] - 1)",
        "{x}.chunk(2, {dim})[-1]",
        "{x}.split({x}.shape[{dim}] // 2 + 1, {dim})[0]",
        "{x}.tensor_split(2, {dim})[1]",
        "{x}.unfold({dim}, {x}.shape[{dim}] // 2, 1)",
        "{x}.unflatten({dim}, (-1, 1))",
        "{x}.unflatten({dim}, ({x}.shape[{dim}] // 2, 2))",
        "{x}.as_strided(({x}.shape[0],), (1,))",
        "{x}[torch.arange({x}.shape[0])[::2]]",
    ),
    2: (
        "{x}.reshape({x}.shape[1], {x}.shape[0], -1)",
        "{x}.flatten(0, 1)",
        "{x}.view(-1, {x}.shape[-1])",
        "{x}.t()[: {x}.shape[0]]",
    ),
}

#: New tensors that use sizes as numbers. A template has at most one floating-point operation on sizes: sympy may
#: reorder several operations, and then the result is rounded differently.
NEW_USING_SIZES: Table = {
    0: (
        "{x} * {x}.numel()",
        "{x} + torch.ones({x}.shape)",
        "{x}.new_full({x}.shape, {x}.numel())",
        "{x}.repeat(2, *{x}.shape)",
        "{x}.sum() * {x}.numel()",
        "torch.arange({x}.numel()).view({x}.shape) + {x}",
        "{x}.flatten().flip(0)",
    ),
    1: (
        "{x} * {x}.shape[{dim}]",
        "{x} + {x}.shape[0] * {x}.shape[-1]",
        "{x} * ({x}.shape[0] * 0.5)",
        "{x} - {x}.shape[0] % 3",
        "{x} / {x}.shape[{dim}]",
        "{x} * {x}.shape[{dim}] ** -0.5",
        "{x} * (2 if {x}.shape[0] > 4 else 3)",
        "{x} * (2 if {x}.shape[0] == {other}.shape[-1] else 3)",
        "{x}.new_zeros({x}.shape[0], 2)",
        "{x}.new_ones({x}.shape[-1])",
        "torch.arange({x}.shape[{dim}])",
        "torch.eye({x}.shape[0])",
        "torch.zeros({x}.shape[{dim}], {x}.shape[0])",
        "torch.cat([{x}, {x}[:1]])",
        "torch.cat([{x}, {other}])",
        "torch.nn.functional.pad({x}, (0, {x}.shape[-1] % 2))",
        "{x}.roll({x}.shape[0] // 2, 0)",
        "{x}.repeat_interleave(2, {dim})",
        "{x}.sum({dim}) * {x}.shape[{dim}]",
        "{x}.mean({dim})",
        "{x}.tile(2)",
        "{x}.index_select(0, torch.arange({x}.shape[0] // 2))",
        "{x}.permute({order}).contiguous()",
        "torch.stack([{x}, {x}]).reshape(-1, {x}.shape[-1])",
        "torch.nn.functional.layer_norm({x}, {x}.shape[-1:])",
    ),
    2: (
        "{x} @ {x}.mT",
        "{x}.permute({order}).reshape({x}.shape)",
        "{x}.transpose({one}, {two}).reshape(-1)",
        "torch.ones({x}.shape[-1], {x}.shape[-1]).tril() @ {x}.mT",
    ),
}

#: Writes that use the sizes of the tensor, most of them for a view. The key is the number of the tensor's dimensions.
WRITES_USING_SIZES: Table = {
    0: ("{x}.mul_({x}.numel())", "{x}.copy_({x}.new_ones({x}.shape))"),
    1: (
        "{x}[: {x}.shape[0] // 2].mul_({scalar})",
        "{x}[{x}.shape[0] // 2 :] = {scalar}",
        "{x}[..., : {x}.shape[-1] // 2] += {x}.shape[0]",
        "{x}.view({x}.shape[0], -1).add_({scalar})",
        "{x}.narrow({dim}, 0, {x}.shape[{dim}] // 2).zero_()",
        "{x}.index_fill_({dim}, torch.arange({x}.shape[{dim}] // 2), {scalar})",
        "{x}.add_(torch.arange({x}.shape[-1]))",
        "{x}.view(-1)[: {x}.shape[0]].copy_({x}.new_zeros({x}.shape[0]))",
    ),
}

#: Python numbers that are computed from sizes.
NUMBERS: Table = {
    0: ("{x}.numel()", "{x}.numel() // 2", "{x}.dim()"),
    1: (
        "{x}.shape[{dim}]",
        "{x}.size(-1)",
        "{x}.shape[0] * 2 + 1",
        "{x}.shape[0] * {x}.shape[-1]",
        "{x}.shape[0] - {x}.shape[-1]",
        "{x}.shape[{dim}] * 0.5",
        "max({x}.shape)",
        "min({x}.shape[0], 4)",
        "len({x})",
        "{x}.stride(0)",
        "-{x}.shape[0] // 2",
        "{x}.shape[0] % 4",
        "int({x}.shape[{dim}])",
    ),
}

CUSTOM = weighted(
    (3, "Doubled"), (3, "Squared"), (2, "Kept"), (3, "Viewed"), (1, "Written"), (1, "Noisy"), (1, "Overwrites")
)

_SCALARS = ("2", "0.5", "-1.0", "1.5", "3", "0")


@functools.cache
def _pool(table_id: int, rank: int) -> tuple[str, ...]:
    table = _TABLES[table_id]
    return tuple(template for least, templates in table.items() if least <= rank for template in templates)


_TABLES: dict[int, Table] = {
    id(table): table
    for table in (
        *(VIEWS, IN_PLACE, SET, NEW, METADATA, HIDDEN, HOOKS, OUT, AROUND),
        *(rare.DRAWS, rare.SIZES_FROM_VALUES, rare.STATE, rare.STORAGES),
        *(VIEWS_USING_SIZES, NEW_USING_SIZES, WRITES_USING_SIZES, NUMBERS),
    )
}


def choose(choices: Choices, table: Table, rank: int) -> str:
    """Choose a template for a tensor of this rank."""
    return one_of(choices, _pool(id(table), min(rank, 2)))


class Scope:
    """The names that the statements of a program have bound so far, with their values in the first call.

    ``names`` lists the names of tensors and ``numbers`` those of numbers. ``sized`` says that later calls have other
    sizes, so that templates must not contain the sizes of the first call.
    """

    def __init__(self, values: dict[str, object], *, sized: bool = False) -> None:
        self.values = values
        self.sized = sized
        self.names = [name for name, value in values.items() if isinstance(value, torch.Tensor)]
        self.numbers = [
            name for name, value in values.items() if isinstance(value, int | float) and not isinstance(value, bool)
        ]

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor to which ``name`` is bound."""
        value = self.values[name]
        assert isinstance(value, torch.Tensor)
        return value


class Fields(dict[str, str]):
    """The texts for the fields of a template about the tensor ``name``.

    The method ``_dim()`` draws the text of the field ``{dim}`` when the template first uses this field. The other
    methods do the same for their fields.
    """

    def __init__(self, choices: Choices, scope: Scope, name: str) -> None:
        super().__init__(x=name)
        self.choices = choices
        self.scope = scope
        self.tensor = scope.tensor(name)
        self.shape = tuple(self.tensor.shape)
        #: Indices are drawn below this bound. With ``sized`` it is small, so that indices are valid in later calls too.
        self.most = 2 if scope.sized else 1000

    def __missing__(self, key: str) -> str:
        value = str(getattr(self, f"_{key}")())
        self[key] = value
        return value

    def _slot(self) -> int:
        return self.choices.below(len(self.shape) + 1)

    def _dim(self) -> int:
        return self.choices.below(len(self.shape))

    def _size(self) -> int:
        return self.shape[int(self["dim"])]

    def _at(self) -> int:
        return self.choices.below(max(1, min(self.most, self._size())))

    def _remaining(self) -> str:
        if self.scope.sized:
            return f"{self['x']}.shape[{self['dim']}] - {self['at']}"
        return str(max(0, self._size() - int(self["at"])))

    def _window(self) -> int:
        return min(2, max(1, self._size()))

    def _lead(self) -> str:
        return ":, " * int(self["dim"])

    def _first(self) -> int:
        return self.choices.below(max(1, min(self.most, self.shape[0])))

    def _twice(self) -> str:
        if self.scope.sized:
            return f"2, *{self['x']}.shape"
        return ", ".join(map(str, (2, *self.shape)))

    def _shape(self) -> str:
        if self.scope.sized:
            return f"{self['x']}.shape"
        return ", ".join(map(str, self.shape)) or "()"

    def _folded(self) -> str:
        if self.scope.sized:
            return one_of(self.choices, ("-1, 2", "2, -1", "-1, 1"))
        half = math.prod(self.shape) // 2
        return one_of(self.choices, (f"{half}, 2", f"2, {half}"))

    def _strided(self) -> str:
        # If the tensor is contiguous, the window is inside of its storage, whatever its storage offset is.
        count = math.prod(self.shape)
        length = 1 + self.choices.below(max(1, min(self.most, count)))
        if count >= 4 and chance(self.choices, 500):
            return "(2, 2), (1, 2)"
        return f"({self['x']}.numel() + 1 - {length},), (1,)" if self.scope.sized else f"({length},), (1,)"

    def _fewer(self) -> str:
        if self.scope.sized:
            return f"max(1, {self['x']}.numel() - {self.choices.below(3)})"
        return str(max(1, math.prod(self.shape) - self.choices.below(3)))

    def _larger(self) -> str:
        if self.scope.sized:
            return f"{self['x']}.numel() + {2 + self.choices.below(6)}"
        return str(math.prod(self.shape) + 2 + self.choices.below(6))

    def _order(self) -> str:
        order = shuffled(self.choices, range(len(self.shape)))
        return ", ".join(map(str, order[::-1] if order == sorted(order) else order))

    def _one(self) -> int:
        return self.choices.below(len(self.shape))

    def _two(self) -> int:
        return (int(self["one"]) + 1 + self.choices.below(len(self.shape) - 1)) % len(self.shape)

    def _scalar(self) -> str:
        if self.scope.numbers and chance(self.choices, 600):
            return one_of(self.choices, self.scope.numbers)
        return one_of(self.choices, _SCALARS)

    def _target(self) -> str:
        """Return the tensor or an expression of a view of it, as the target of a write."""
        if not chance(self.choices, 250):
            return self["x"]
        return choose(self.choices, VIEWS, len(self.shape)).format_map(self)

    def _other(self) -> str:
        return self._operand(self.scope.names)

    def _source(self) -> str:
        """Return the name of a tensor from which a statement that writes to a target reads.

        The tensor shares no memory with the target, or consists of exactly the same elements in the same order.
        Otherwise the result could depend on the order in which a kernel visits the elements (see `defined`). If no
        tensor fits, return a number.
        """
        tensor, key = self.tensor, self.tensor.untyped_storage().data_ptr()
        fitting = []
        whole = self.get("target", self["x"]) == self["x"]
        for name in self.scope.names:
            other = self.scope.tensor(name)
            shares = bool(other.numel()) and (other.untyped_storage().data_ptr() == key or overlap(tensor, other))
            same = whole and (other.shape, other.stride(), other.data_ptr(), other.dtype) == (
                tensor.shape,
                tensor.stride(),
                tensor.data_ptr(),
                tensor.dtype,
            )
            if not shares or same:
                fitting.append(name)
        return self._operand(fitting)

    def _like(self) -> str:
        # Torch resizes an ``out=`` tensor of another shape, and this is deprecated.
        shape = self.tensor.shape
        return one_of(self.choices, [name for name in self.scope.names if self.scope.tensor(name).shape == shape])

    def _operand(self, names: list[str]) -> str:
        # Prefer operands of the same shape, so that most pairs are valid.
        shape = self.tensor.shape
        fitting = [name for name in names if self.scope.tensor(name).shape == shape]
        pool = fitting if fitting and not chance(self.choices, 300) else names
        return one_of(self.choices, pool) if pool else self._scalar()
