"""To each exercise of the course a right answer, and wrong ones that come to mind."""

from __future__ import annotations

from typing import Any

import torch


def _cat(x: torch.Tensor) -> Any:
    new = torch.cat([x[:1] * 2, x[1:]])
    return new, new.sum()


def _written(x: torch.Tensor) -> Any:
    x[0].mul_(2)
    return x, x.sum()


def _cloned_row(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    made = x.clone()
    made[0] = row
    return made


def _through_data(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    made = x.clone()
    made.data[0] = row.detach()
    return made


def _detached(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    made = x.detach().clone()
    made[0] = row
    return made


def _seen(program: Any, x: torch.Tensor) -> bool:
    one, two = program(x)
    before = two.clone()
    one.add_(1)
    return not torch.equal(before, two)


def _rebinds(x: torch.Tensor, new: torch.Tensor) -> None:
    x = new  # noqa: F841  # the mistake that is shown


def _new_data(x: torch.Tensor, new: torch.Tensor) -> None:
    x.data = new.clone()


#: Exercise → right answers, and wrong ones with a piece of what is said of them.
ANSWERS: dict[str, tuple[list[Any], list[tuple[Any, str]]]] = {
    "second-column": (
        [lambda x: x[:, 1], lambda x: x.t()[1], lambda x: x.select(1, 1)],
        [(lambda x: x[:, 1].clone(), "storage of its own"), (lambda x: x[1], "shape (3,)"), (lambda x: 7, "type int")],
    ),
    "diagonal-stride": (
        [lambda n: n + 1, lambda n: torch.empty(n, n).diagonal().stride(0)],
        [(lambda n: n, "returns 2"), (lambda n: 1, "returns 1")],
    ),
    "room": (
        [lambda shape, strides, offset: offset + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))],
        [
            (lambda shape, strides, offset: shape[0] * shape[1], "too few"),
            (lambda shape, strides, offset: offset + shape[0] * shape[1], "too many"),
            (lambda shape, strides, offset: "6", "'6'"),
        ],
    ),
    "zero-the-diagonal": (
        [lambda x: x.diagonal().zero_(), lambda x: x.fill_diagonal_(0), lambda x: x.mul_(1 - torch.eye(3))],
        [(lambda x: x * (1 - torch.eye(3)), "[[1.0,"), (lambda x: x.zero_(), "beside the diagonal")],
    ),
    "turned-in-place": (
        [lambda x: x.t_(), lambda x: x.transpose_(0, 1)],
        [(lambda x: x.copy_(x.t().clone()), "writes"), (lambda x: x.t(), "stays as it is")],
    ),
    "uncounted": (
        [lambda x: x.data.add_(1), lambda x: x.numpy().__iadd__(1)],
        [(lambda x: x.add_(1), "from 0 to 1"), (lambda x: x.detach().add_(1), "from 0 to 1"), (lambda x: x + 1, "0.0")],
    ),
    "zeros-not-none": (
        [lambda w: (w * 0).sum(), lambda w: (w - w).sum()],
        [
            (lambda w: torch.zeros((), requires_grad=True), "is None"),
            (lambda w: w.sum(), "is tensor([1., 1., 1.])"),
            (lambda w: w.detach().sum() * 0, "does not require grad"),
        ],
    ),
    "replace-the-first-row": (
        [_cloned_row, lambda x, row: torch.cat([row[None], x[1:]])],
        [
            (_through_data, "its gradient is None"),
            (_detached, "no gradient reaches `x`"),
            (lambda x, row: x, "storage"),
        ],
    ),
    "which-none": (["c, d", ["d", "c"]], [("c", "`d`"), ("b, c, d", "`b`"), ("c, d, e", "the inputs are")]),
    "make-it-pure": (
        [_cat, lambda x: (new := torch.select_scatter(x, x[0] * 2, 0, 0), new.sum())],
        [(_written, "is written"), (lambda x: (x, (x.sum() + x[0].sum())), "new value"), (lambda x: x, "two tensors")],
    ),
    "epilogue": (
        [lambda x, new: x.copy_(new), lambda x, new: x.zero_().add_(new)],
        [(_rebinds, "0.0"), (_new_data, "left it behind"), (lambda x, new: x.set_(new), "left it behind")],
    ),
    "what-is-copied-back": (["a b", {"a", "b"}], [("a", "`b` is written"), ("a, b, c", "`c` is not"), ("x", "inputs")]),
    "three-kinds": (
        [lambda x: (x, x.t(), x.clone()), lambda x: [x, x[0], x + 1]],
        [
            (lambda x: (x.view_as(x), x[0], x + 1), "first"),
            (lambda x: (x, x, x + 1), "second"),
            (lambda x: (x, x.t(), x.view(-1)), "third"),
        ],
    ),
    "replay": (
        [lambda base, view: base.as_strided(view.shape, view.stride(), view.storage_offset())],
        [
            (lambda base, view: base.as_strided(view.shape, view.stride()), "in place of"),
            (lambda base, view: base[1], "in place of"),
            (lambda base, view: view.clone(), "storage"),
        ],
    ),
    "seen-by-the-caller": (
        [_seen],
        [(lambda program, x: True, "returns True"), (lambda program, x: program(x)[0] is program(x)[1], "False")],
    ),
}
