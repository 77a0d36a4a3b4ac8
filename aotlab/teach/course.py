"""The exercises of the course's pages. Each check runs the answer; `tests/teach` has right and wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from aotlab import _torch as torch_internals
from aotlab.teach.exercises import new_exercise, require
from aotlab.teach.truth import Fact, Facts, compiled_facts, eager_truth, places, window
from aotlab.verification.clones import Cloner

Answer = Callable[..., Any]


def _facts(answer: Answer, *args: torch.Tensor) -> dict[str, Facts]:
    """Return what is true of a call of the answer."""
    truth = eager_truth(answer, args)
    require(truth.facts["raises"][""].value != "call", truth.facts["raises"][""].why)
    return dict(truth.facts)


def _same_storage(one: object, two: torch.Tensor) -> bool:
    require(isinstance(one, torch.Tensor), f"the result is of type {type(one).__name__}, and is to be a tensor")
    assert isinstance(one, torch.Tensor)
    return one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()


def _together(fact: Fact) -> frozenset[str]:
    return fact.value if isinstance(fact.value, frozenset) else frozenset()


def _names(answer: Any, facts: Facts) -> set[str]:
    """Read the names in an answer, of which there have to be facts."""
    said = set(answer.replace(",", " ").split() if isinstance(answer, str) else answer)
    require(said <= set(facts), f'the names are {", ".join(facts)}; two are written as in "{", ".join([*facts][:2])}"')
    return said


# --- 01_storages -----------------------------------------------------------------------------------------------------


@new_exercise("storages")
def second_column(answer: Answer) -> None:
    """Write `answer(x)`, which returns the second column of a matrix `x` without copying it.

    - Indexing with numbers and slices makes views; `clone`, arithmetic and lists of indices copy.
    - You want all rows, and of each the element number 1.
    - An index for both dimensions: a slice for the rows, a number for the columns.
    """
    for x in (torch.arange(6.0).view(2, 3), torch.arange(8.0).view(2, 4).t()):
        found = answer(x)
        shared = _same_storage(found, x)
        require(tuple(found.shape) == (len(x),), f"of a matrix {tuple(x.shape)} it returns shape {tuple(found.shape)}")
        require(found.tolist() == [row[1] for row in x.tolist()], f"of {x.tolist()} it returns {found.tolist()}")
        require(shared, "the result has a storage of its own, so it is a copy")


@new_exercise("storages")
def diagonal_stride(answer: Answer) -> None:
    """Write `answer(n)`, which returns the stride of the diagonal of a contiguous n × n matrix.

    - Draw the map of a 3 × 3 matrix: at which places does its diagonal lie?
    - They lie at 0, 4 and 8. How far is it from one to the next?
    - One row further is `n` places, and one column further is one more.
    """
    for n in (2, 3, 5):
        diagonal = torch.arange(float(n * n)).view(n, n).diagonal()
        found = answer(n)
        require(found == diagonal.stride(0), f"for n = {n} it returns {found}; the diagonal is {diagonal.tolist()}")


@new_exercise("storages")
def room(answer: Answer) -> None:
    """Write `answer(shape, strides, offset)`: how many elements must a storage have at least for such a window?

    - Which element lies furthest back in the storage?
    - The last one in each dimension, as long as strides are not negative, which torch does not have.
    - Its place is the offset, plus (size - 1) × stride of each dimension; places count from 0. And if there is none?
    """
    windows: list[tuple[tuple[int, ...], tuple[int, ...], int]] = [
        ((2, 3), (3, 1), 0), ((3, 2), (1, 3), 4), ((4, 3), (0, 1), 1), ((3, 3), (1, 1), 0),
        ((), (), 2), ((2, 0), (3, 1), 4),
    ]  # fmt: skip
    for shape, strides, offset in windows:
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        needed = 0 if 0 in shape else last + 1  # without elements it needs none
        found = answer(shape, strides, offset)
        case = f"shape {shape}, strides {strides}, offset {offset}"
        require(isinstance(found, int), f"it returns {found!r}, and is to return an int")
        require(found == needed, f"for {case} it returns {found}: too {'many' if found > needed else 'few'}")


# --- 02_writes -------------------------------------------------------------------------------------------------------


@new_exercise("writes")
def zero_the_diagonal(answer: Answer) -> None:
    """Write `answer(x)`, which sets the diagonal of the caller's matrix to zero, whatever it returns.

    - A write through a view changes what it is a view of.
    - There is a view of a matrix that is its diagonal.
    - Take that view, and call one of its methods that end in `_`.
    """
    x = torch.arange(1.0, 10.0).view(3, 3)
    answer(x)
    require(x.diagonal().eq(0).all(), f"afterwards the caller's matrix is {x.tolist()}")
    require(x.count_nonzero() == 6, f"elements beside the diagonal were changed, too: {x.tolist()}")


@new_exercise("writes")
def turned_in_place(answer: Answer) -> None:
    """Write `answer(x)`, which transposes the caller's matrix in place without writing to a single element.

    - The values can stay where they are.
    - What has to change are the shape and the strides of the caller's tensor.
    - `t()` returns a view; which spelling does the same in place?
    """
    facts = _facts(answer, torch.arange(9.0).view(3, 3))
    require(not facts["writes"]["x"].value, facts["writes"]["x"].why)
    require(facts["metadata"]["x"].value, f"the caller's tensor stays as it is: {facts['metadata']['x'].why}")
    require(not facts["storage"]["x"].value, f"the values moved: {facts['storage']['x'].why}")
    x = torch.arange(6.0).view(2, 3)
    answer(x)
    require(x.tolist() == torch.arange(6.0).view(2, 3).t().tolist(), f"the caller's tensor becomes {x.tolist()}")


@new_exercise("writes")
def uncounted(answer: Answer) -> None:
    """Write `answer(x)`, which adds 1 in the memory of the caller's tensor so that its version counter does not move.

    - `detach()` shares the version counter with the tensor that it is made of.
    - Some doors lead to the memory around the counter: an attribute, and other libraries.
    - `x.data` is a tensor on the same storage with a counter of its own.
    """
    x = torch.arange(3.0)
    view = x[:]
    answer(x)
    require(x.tolist() == [1.0, 2.0, 3.0], f"of [0, 1, 2] it makes {x.tolist()}")
    require(view.tolist() == x.tolist(), f"a view made before is {view.tolist()}: `x` has left its memory behind")
    version = torch_internals.version_of(x)
    require(version == 0, f"the version counter went from 0 to {version}")


# --- 03_views_and_autograd -------------------------------------------------------------------------------------------


@new_exercise("autograd")
def zeros_not_none(answer: Answer) -> None:
    """Write `answer(w)`, which returns a scalar after whose backward `w.grad` is zeros, and not None.

    - `.grad` is None where no path of autograd leads from the result to the leaf.
    - So the result has to be computed from `w`, and must not change when `w` does.
    - What is the derivative of 0 · w?
    """
    w = torch.arange(3.0, requires_grad=True)
    result = answer(w)
    _same_storage(result, w)
    require(result.requires_grad, "the result does not require grad, so that there is no backward")
    result.backward()
    require(w.grad is not None, "`w.grad` is None: the result was not computed from `w`")
    require(w.grad is not None and not w.grad.any(), f"`w.grad` is {w.grad}")


@new_exercise("autograd")
def replace_the_first_row(answer: Answer) -> None:
    """Write `answer(x, row)`, which returns a copy of `x` with `row` as first row; gradients reach both.

    - The caller's `x` may be a leaf that requires grad; a copy of it is none.
    - Autograd has to see both the copy and the write.
    - Clone, without `detach` or `.data`; then assign to the first row of the clone.
    """
    x, row = torch.ones(2, 3, requires_grad=True), torch.zeros(3, requires_grad=True)
    result = answer(x, row)
    require(not _same_storage(result, x), "the result lies in the storage of `x`")
    require(result.tolist() == [[0.0] * 3, [1.0] * 3], f"the result is {result.tolist()}")
    require(x.detach().eq(1).all(), "the caller's `x` was changed")
    require(result.requires_grad, "the result does not require grad")
    (result * 2).sum().backward()
    require(
        row.grad is not None and row.grad.eq(2).all(),
        f"the gradient 2 should reach `row`, but `row.grad` is {row.grad}",
    )
    require(x.grad is not None, "no gradient reaches `x`")
    require(x.grad is not None and x.grad.tolist() == [[0.0] * 3, [2.0] * 3], f"the gradient of `x` is {x.grad}")


def mixed(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    made = a * 2
    made[0] = b
    with torch.no_grad():
        factor = c * 3
    return made * factor + d.detach()


@new_exercise("autograd", program=mixed, takes="names")
def which_none(answer: Any) -> None:
    """All inputs of this program are leaves that require grad. Which of them get no gradient in a backward?

    - Go backwards from the result, and ask of each input whether autograd saw how it came in.
    - A write into a row of a result is seen, and so is what was written.
    - Nothing made under `no_grad`, and nothing that was detached, leads back to where it came from.
    """
    leaves = [torch.ones(2, 2), torch.ones(2), torch.ones(2, 2), torch.ones(2, 2)]
    facts = _facts(mixed, *(leaf.requires_grad_() for leaf in leaves))["grad_none"]
    said = _names(answer, facts)
    for name, fact in facts.items():
        wrong = f"`{name}` has {'no' if fact.value else 'a'} gradient: {fact.why}"
        require((name in said) == fact.value, wrong)


# --- 04_functionalization --------------------------------------------------------------------------------------------


def impure(x: torch.Tensor) -> torch.Tensor:
    x[0].mul_(2)
    return x.sum()


@new_exercise("functionalization", program=impure)
def make_it_pure(answer: Answer) -> None:
    """Make this program pure: `answer(x)` writes nothing, and returns the new value of `x` and the result.

    - Name the new value of `x`, and compute the result from that.
    - The new first row is a product; the other rows are those of `x`.
    - `torch.cat` or `torch.select_scatter` puts a new row in its place, in a new tensor.
    """
    x = torch.arange(6.0).view(2, 3)
    expected = x.clone()
    result = impure(expected)
    facts = _facts(answer, x)
    require(not facts["writes"]["x"].value, f"`x` is written: {facts['writes']['x'].why}")
    found = answer(x)
    require(isinstance(found, tuple) and len(found) == 2, "it returns something else than two tensors")
    require(
        torch.equal(found[0], expected), f"the new value of `x` is to be {expected.tolist()}, not {found[0].tolist()}"
    )
    require(torch.equal(found[1], result), f"the result is to be {result.item()}, and it is {found[1].tolist()}")


@new_exercise("functionalization")
def epilogue(answer: Answer) -> None:
    """Write `answer(x, new)`, which gives the caller's `x` the values of `new`, so that all views of `x` follow.

    - `x = new` binds a name of your function, and the caller has another one.
    - The memory must stay the same, and get other values.
    - There is a method in place that copies values from another tensor.
    """
    x, new = torch.zeros(2, 3), torch.ones(2, 3)
    view = x[0]
    answer(x, new)
    require(torch.equal(x, new), f"afterwards the caller's `x` is {x.tolist()}")
    require(view.eq(1).all(), f"a view made before the call is {view.tolist()}: `x` has left it behind")
    require(not _same_storage(x, new), "`x` now lies in the storage of `new`, and a write to one changes the other")


def three_inputs(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    a.add_(b)
    a.mul_(2)
    flat = b.view(-1)
    own = c.clone()
    own.zero_()
    flat[0] = 7
    return a + own


@new_exercise("functionalization", program=three_inputs, takes="names")
def what_is_copied_back(answer: Any) -> None:
    """Which inputs does this program write, so that new values have to be copied back to them?

    - Only what the caller can see has to be copied back.
    - A write to a view is a write to its base; a write to a clone is none to what was cloned.
    - Two of the three.
    """
    facts = _facts(three_inputs, torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2))["writes"]
    said = _names(answer, facts)
    for name, fact in facts.items():
        require((name in said) == fact.value, f"`{name}` is {'' if fact.value else 'not '}written: {fact.why}")


# --- 05_outputs_that_share -------------------------------------------------------------------------------------------


@new_exercise("outputs")
def three_kinds(answer: Answer) -> None:
    """Write `answer(x)`, which returns three tensors: `x` itself, a view of `x`, and one with memory of its own.

    - `return x` gives back the very tensor.
    - A view by any op: a row, a transpose, `view_as`.
    - `clone` or arithmetic makes a tensor with memory of its own.
    """
    facts = _facts(answer, torch.ones(2, 3))
    shares, same = list(facts["shares"].values()), list(facts["same"].values())
    require(len(shares) == 3, f"it returns {len(shares)} tensors")
    require("x" in _together(same[0]), f"the first result is not `x`: {same[0].why}")
    require(not same[1].value, f"the second result is no new tensor: {same[1].why}")
    require("x" in _together(shares[1]), f"the second result is no view of `x`: {shares[1].why}")
    require(not shares[2].value, f"the third result has no memory of its own: {shares[2].why}")


@new_exercise("outputs")
def replay(answer: Answer) -> None:
    """Write `answer(base, view)`: `view` is a view of another tensor like `base`; return the same view of `base`.

    - A view is known by its shape, its strides and its offset.
    - There is a method that makes a window of any shape, strides and offset over a storage.
    - `base.as_strided(shape, strides, offset)`, with the three of `view`.
    """
    old, base = torch.zeros(3, 4), torch.arange(12.0).view(3, 4)
    for view, expected in (
        (old[1], base[1]),
        (old.t(), base.t()),
        (old[:, ::2], base[:, ::2]),
        (old[1:, 1], base[1:, 1]),
    ):
        found = answer(base, view)
        require(_same_storage(found, base), "the result does not lie in the storage of `base`")
        wrong = f"shape {tuple(found.shape)} and values {found.tolist()} in place of {expected.tolist()}"
        require(torch.equal(found, expected), wrong)


@new_exercise("outputs")
def seen_by_the_caller(answer: Answer) -> None:
    """Write `answer(program, x)`: True if the two results of `program(x)` share memory; find out by a write.

    - What may the caller do with two results that share memory?
    - Write to one of them, and look at the other.
    - Add to the first result in place, and see whether the second one changed.
    """

    def together(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = x * 2
        return made[0], made

    for program, expected in (
        (together, True),
        (lambda x: (x * 2, x * 2), False),
        (lambda x: (x, x.t()), True),
        (lambda x: (x[0], x.clone()), False),
    ):
        found = answer(program, torch.ones(2, 2))
        require(
            bool(found) is expected,
            f"it returns {found} for results that {'share' if expected else 'do not share'} memory",
        )


# --- 06_inputs_that_share --------------------------------------------------------------------------------------------


def compiled_by_hand(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    new = x * 2
    result = new + y
    x.copy_(new)
    return result


@new_exercise("inputs", program=compiled_by_hand)
def prove_it_wrong(answer: Answer) -> None:
    """Write `answer()`: two tensors for which this program does not do what `x.mul_(2); return x + y` does.

    - It reads `y` before it writes `x`. When does that make a difference?
    - The two arguments have to share memory, and not only a storage.
    - The same tensor twice will do.
    """
    x, y = answer()
    call = Cloner(compiled_by_hand).call((x, y), {})
    found = compiled_by_hand(*call.args)
    right_x, right_y = Cloner(compiled_by_hand).call((x, y), {}).args
    expected = right_x.mul_(2) + right_y
    require(not torch.equal(found, expected), f"for these tensors both return {found.tolist()}")


@new_exercise("inputs")
def do_they_overlap(answer: Answer) -> None:
    """Write `answer(x, y)`: may a write to `x` be seen through `y`? Both have one dimension and are contiguous.

    - Compare addresses: `x.data_ptr()` is that of the first element.
    - `x` takes the bytes from there on, `x.numel() * x.element_size()` of them.
    - Two ranges overlap if each begins before the other one ends. One without elements overlaps none.
    """
    memory = torch.zeros(8)
    single = memory.view(torch.uint8)
    for x, y in (
        (memory[:4], memory[4:]),
        (memory[:5], memory[4:]),
        (memory[4:], memory[:5]),
        (memory, memory[2:3]),
        (torch.zeros(3), torch.zeros(3)),
        (memory[1:3], memory[1:3]),
        (memory, memory[2:2]),
        (memory[2:4], single[2:4]),
        (memory[:4], single[8:12]),
    ):
        one = _same_storage(x, y)
        expected = one and bool((places(x) & places(y)).any())
        found = answer(x, y)
        windows = [f"`{each.dtype}`, {len(each)} elements from place {each.storage_offset()} on" for each in (x, y)]
        require(bool(found) is expected, f"for {' and '.join(windows)} of {'one storage' if one else 'two'}: {found}")


@new_exercise("inputs")
def one_base(answer: Answer) -> None:
    """Write `answer(x, y)`, which returns one tensor onto their common storage that covers both, without copying.

    - The base has to be a view: a tensor onto the same storage.
    - It is to have one dimension, stride 1 and offset 0. How many elements has the storage?
    - `x.untyped_storage().nbytes()` bytes; and `as_strided` makes any window.
    """
    memory = torch.arange(12.0)
    for x, y in ((memory[:4], memory[2:]), (memory[8:], memory[:2]), (memory[::2], memory.view(3, 4).t())):
        base = answer(x, y)
        require(_same_storage(base, memory), "the result does not lie in their storage")
        wrong = f"the result, {window(base)}, does not cover both, {window(x)} and {window(y)}"
        require((places(base) >= places(x) | places(y)).all(), wrong)


# --- 07_two_graphs ---------------------------------------------------------------------------------------------------


@new_exercise("saved")
def backward_by_hand(answer: Answer) -> None:
    """Write `answer(x, w, tangent)`: the gradient of `w` for the result `(x * w).exp()`, at which `tangent` arrives.

    - The chain rule, from the result backwards: `exp`, then the product.
    - The derivative of `exp` is `exp` itself, and that of `x * w` by `w` is `x`.
    - Multiply the three, and begin with the tangent.
    """
    x, w, tangent = torch.tensor([1.0, 2.0]), torch.tensor([0.5, -1.0], requires_grad=True), torch.tensor([1.0, 3.0])
    (x * w).exp().backward(tangent)
    found = answer(x, w.detach(), tangent)
    _same_storage(found, x)
    assert w.grad is not None
    require(torch.allclose(found, w.grad), f"the gradient is {w.grad.tolist()}, and it returns {found.tolist()}")


@new_exercise("saved")
def save_less(answer: Answer) -> None:
    """Write `answer(x)`, a forward of `relu`: return the result, and a byte per element to multiply tangents by.

    - The backward passes the tangent on where `x` was positive, and 0 elsewhere.
    - So it need not know `x` itself.
    - A comparison makes a tensor of booleans, of one byte each.
    """
    x, tangent = torch.tensor([-1.0, 0.0, 2.0], requires_grad=True), torch.tensor([1.0, 2.0, 3.0])
    expected = x.relu()
    expected.backward(tangent)
    made = answer(x.detach())
    require(isinstance(made, tuple) and len(made) == 2, "it returns something else than two tensors")
    result, saved = made
    require(torch.equal(result, expected), f"the result is {result.tolist()} for {x.tolist()}")
    require(saved.element_size() == 1, f"`saved` takes {saved.element_size()} bytes per element")
    found = tangent * saved
    assert x.grad is not None
    require(torch.equal(found, x.grad), f"for {x.tolist()}, the gradient of {tangent.tolist()} is {found.tolist()}")


def needs_some(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    made = a * b
    return (made + c).sin() + c


@new_exercise("saved", program=needs_some, takes="names")
def what_is_saved(answer: Any) -> None:
    """Of this program, `b` and `c` require grad. Which inputs are saved? And "computed", if computed values are?

    - Go through the ops: what does the derivative of each need?
    - Of the product only the gradient of `b` is wanted, and that needs the other factor.
    - A sum needs nothing; `sin` needs what it was computed from.
    """
    b, c = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    facts = compiled_facts(needs_some, (torch.ones(2), b, c), None)["saved"]
    said = _names(answer, facts)
    for name, fact in facts.items():
        require((name in said) == fact.value, f"`{name}` is {'' if fact.value else 'not '}saved: {fact.why}")
