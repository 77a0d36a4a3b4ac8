"""The exercises of pages 01 to 07. Each check runs the answer. `tests/teach` contains right and wrong answers."""

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
    """Call the answer of an exercise eagerly, and return the facts about the call. The call must not raise."""
    truth = eager_truth(answer, args)
    require(truth.facts["raises"][""].value != "call", truth.facts["raises"][""].why)
    return dict(truth.facts)


def _same_storage(one: object, two: torch.Tensor) -> bool:
    require(isinstance(one, torch.Tensor), f"the result is of type {type(one).__name__}, and must be a tensor")
    assert isinstance(one, torch.Tensor)
    return one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()


def _together(fact: Fact) -> frozenset[str]:
    return fact.value if isinstance(fact.value, frozenset) else frozenset()


def _names(answer: Any, facts: Facts) -> set[str]:
    """Return the names in an answer. Each name must be a key of ``facts``."""
    said = set(answer.replace(",", " ").split() if isinstance(answer, str) else answer)
    require(said <= set(facts), f'the names are {", ".join(facts)}; two are written as in "{", ".join([*facts][:2])}"')
    return said


# --- 01_storages -----------------------------------------------------------------------------------------------------


@new_exercise("storages")
def second_column(answer: Answer) -> None:
    """Write `answer(x)`, which returns the second column of a matrix `x` without copying it.

    - Indexing with numbers and slices makes views; `clone`, arithmetic and lists of indices copy.
    - You want all rows, and from each row the element number 1.
    - Use an index for both dimensions: a slice for the rows, a number for the columns.
    """
    for x in (torch.arange(6.0).view(2, 3), torch.arange(8.0).view(2, 4).t()):
        column = answer(x)
        shared = _same_storage(column, x)
        require(
            tuple(column.shape) == (len(x),), f"for a matrix {tuple(x.shape)} it returns shape {tuple(column.shape)}"
        )
        require(column.tolist() == [row[1] for row in x.tolist()], f"for {x.tolist()} it returns {column.tolist()}")
        require(shared, "the result does not share the storage of the matrix, so it is a copy")


@new_exercise("storages")
def diagonal_stride(answer: Answer) -> None:
    """Write `answer(n)`, which returns the stride of the diagonal of a contiguous n × n matrix.

    - Draw the map of a 3 × 3 matrix: which places does its diagonal take?
    - It takes the places 0, 4 and 8. What is the distance between two of them?
    - One row down is `n` places further, and one column to the right is one place further.
    """
    for n in (2, 3, 5):
        diagonal = torch.arange(float(n * n)).view(n, n).diagonal()
        stride = answer(n)
        require(stride == diagonal.stride(0), f"for n = {n} it returns {stride}; the diagonal is {diagonal.tolist()}")


@new_exercise("storages")
def room(answer: Answer) -> None:
    """Write `answer(shape, strides, offset)`: how many elements must a storage have at least for such a window?

    - Which element of the window has the largest place?
    - The element with the last index in each dimension, because torch has no negative strides.
    - Its place is the offset plus (size - 1) × stride for each dimension. Places count from 0. And if the window has no
      elements?
    """
    windows: list[tuple[tuple[int, ...], tuple[int, ...], int]] = [
        ((2, 3), (3, 1), 0), ((3, 2), (1, 3), 4), ((4, 3), (0, 1), 1), ((3, 3), (1, 1), 0),
        ((), (), 2), ((2, 0), (3, 1), 4),
    ]  # fmt: skip
    for shape, strides, offset in windows:
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        needed = 0 if 0 in shape else last + 1  # a window without elements needs no storage
        elements = answer(shape, strides, offset)
        case = f"shape {shape}, strides {strides}, offset {offset}"
        require(isinstance(elements, int), f"it returns {elements!r}, and must return an int")
        require(elements == needed, f"for {case} it returns {elements}: too {'many' if elements > needed else 'few'}")


# --- 02_writes -------------------------------------------------------------------------------------------------------


@new_exercise("writes")
def zero_the_diagonal(answer: Answer) -> None:
    """Write `answer(x)`, which sets the diagonal of the caller's matrix to zero. It may return anything.

    - A write through a view changes the base of the view.
    - One method returns a view of the diagonal of a matrix.
    - Make that view, and call one of its methods that end in `_`.
    """
    x = torch.arange(1.0, 10.0).view(3, 3)
    answer(x)
    require(x.diagonal().eq(0).all(), f"afterwards the caller's matrix is {x.tolist()}")
    require(x.count_nonzero() == 6, f"elements outside of the diagonal were changed, too: {x.tolist()}")


@new_exercise("writes")
def turned_in_place(answer: Answer) -> None:
    """Write `answer(x)`, which transposes the caller's matrix in place without writing to a single element.

    - The values can stay at their places.
    - Only the shape and the strides of the caller's tensor have to change.
    - `t()` returns a view. Which method does the same in place?
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
    """Write `answer(x)`, which adds 1 in the memory of the caller's tensor. Its version counter must not change.

    - `x.detach()` shares the version counter with `x`.
    - An attribute of the tensor, and other libraries, give access to the memory without the counter.
    - `x.data` is a tensor on the same storage with its own counter.
    """
    x = torch.arange(3.0)
    view = x[:]
    answer(x)
    require(x.tolist() == [1.0, 2.0, 3.0], f"it changes [0, 1, 2] to {x.tolist()}")
    require(view.tolist() == x.tolist(), f"a view that was made before is {view.tolist()}: `x` got other memory")
    version = torch_internals.version_of(x)
    require(version == 0, f"the version counter went from 0 to {version}")


# --- 03_views_and_autograd -------------------------------------------------------------------------------------------


@new_exercise("autograd")
def zeros_not_none(answer: Answer) -> None:
    """Write `answer(w)`, which returns a scalar. After its backward, `w.grad` is zeros and not None.

    - `.grad` is None if no path in the autograd graph leads from the result to the leaf.
    - So the result has to be computed from `w`, but it must not change when `w` changes.
    - What is the derivative of 0 · w?
    """
    w = torch.arange(3.0, requires_grad=True)
    result = answer(w)
    _same_storage(result, w)
    require(result.requires_grad, "the result does not require grad, so there is no backward")
    result.backward()
    require(w.grad is not None, "`w.grad` is None: the result was not computed from `w`")
    require(w.grad is not None and not w.grad.any(), f"`w.grad` is {w.grad}")


@new_exercise("autograd")
def replace_the_first_row(answer: Answer) -> None:
    """Write `answer(x, row)`, which returns a copy of `x` with `row` as its first row. Gradients flow to both.

    - The caller's `x` may be a leaf that requires grad. A copy of it is not a leaf.
    - Autograd has to record both the copy and the write.
    - Clone without `detach` or `.data`. Then assign to the first row of the clone.
    """
    x, row = torch.ones(2, 3, requires_grad=True), torch.zeros(3, requires_grad=True)
    result = answer(x, row)
    require(not _same_storage(result, x), "the result shares the storage of `x`")
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
    doubled = a * 2
    doubled[0] = b
    with torch.no_grad():
        factor = c * 3
    return doubled * factor + d.detach()


@new_exercise("autograd", program=mixed, takes="names")
def which_none(answer: Any) -> None:
    """All inputs of this program are leaves that require grad. Which of them get no gradient in a backward?

    - Go backwards from the result. For each input, check whether autograd recorded how the result uses it.
    - If a row of a result is overwritten, autograd records the write, and the tensor that supplied the new values.
    - No gradient flows through a tensor that was made under `no_grad`, or through `detach`.
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

    - Give the new value of `x` a name, and compute the result from it.
    - The new first row is a product. The other rows do not change.
    - `torch.cat` or `torch.select_scatter` makes a new tensor with a new row in its place.
    """
    x = torch.arange(6.0).view(2, 3)
    expected = x.clone()
    result = impure(expected)
    facts = _facts(answer, x)
    require(not facts["writes"]["x"].value, f"`x` is written: {facts['writes']['x'].why}")
    results = answer(x)
    require(isinstance(results, tuple) and len(results) == 2, "it does not return two tensors")
    require(
        torch.equal(results[0], expected),
        f"the new value of `x` must be {expected.tolist()}, not {results[0].tolist()}",
    )
    require(torch.equal(results[1], result), f"the result must be {result.item()}, not {results[1].tolist()}")


@new_exercise("functionalization")
def epilogue(answer: Answer) -> None:
    """Write `answer(x, new)`, which gives the caller's `x` the values of `new`. All views of `x` must change, too.

    - `x = new` only binds a name in your function. The caller's name does not change.
    - The memory must stay the same, and get new values.
    - There is an in-place method that copies values from another tensor.
    """
    x, new = torch.zeros(2, 3), torch.ones(2, 3)
    view = x[0]
    answer(x, new)
    require(torch.equal(x, new), f"afterwards the caller's `x` is {x.tolist()}")
    require(view.eq(1).all(), f"a view that was made before the call is {view.tolist()}: `x` got other memory")
    require(not _same_storage(x, new), "`x` now shares the storage of `new`, so a write to one changes the other")


def three_inputs(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    a.add_(b)
    a.mul_(2)
    flat = b.view(-1)
    copied = c.clone()
    copied.zero_()
    flat[0] = 7
    return a + copied


@new_exercise("functionalization", program=three_inputs, takes="names")
def what_is_copied_back(answer: Any) -> None:
    """Which inputs does this program write, so that new values have to be copied back into them?

    - Only changes that the caller can see have to be copied back.
    - A write to a view is a write to its base. A write to a clone does not change the original.
    - Two of the three inputs.
    """
    facts = _facts(three_inputs, torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2))["writes"]
    said = _names(answer, facts)
    for name, fact in facts.items():
        require((name in said) == fact.value, f"`{name}` is {'' if fact.value else 'not '}written: {fact.why}")


# --- 05_outputs_that_share -------------------------------------------------------------------------------------------


@new_exercise("outputs")
def three_kinds(answer: Answer) -> None:
    """Write `answer(x)`, which returns three tensors: `x` itself, a view of `x`, and a tensor with its own memory.

    - `return x` returns the same tensor object.
    - Use any view op: a row, a transpose, `view_as`.
    - `clone` or arithmetic makes a tensor with its own memory.
    """
    facts = _facts(answer, torch.ones(2, 3))
    shares, same = list(facts["shares"].values()), list(facts["same"].values())
    require(len(shares) == 3, f"it returns {len(shares)} tensors")
    require("x" in _together(same[0]), f"the first result is not `x`: {same[0].why}")
    require(not same[1].value, f"the second result is not a new tensor: {same[1].why}")
    require("x" in _together(shares[1]), f"the second result is not a view of `x`: {shares[1].why}")
    require(not shares[2].value, f"the third result shares memory: {shares[2].why}")


@new_exercise("outputs")
def replay(answer: Answer) -> None:
    """Write `answer(base, view)`: `view` is a view of another tensor like `base`. Return the same view of `base`.

    - Shape, strides and offset define a view.
    - There is a method that makes a window of any shape, strides and offset onto a storage.
    - Use `base.as_strided(shape, strides, offset)`, with the shape, strides and offset of `view`.
    """
    old, base = torch.zeros(3, 4), torch.arange(12.0).view(3, 4)
    for view, expected in (
        (old[1], base[1]),
        (old.t(), base.t()),
        (old[:, ::2], base[:, ::2]),
        (old[1:, 1], base[1:, 1]),
    ):
        replayed = answer(base, view)
        require(_same_storage(replayed, base), "the result does not share the storage of `base`")
        wrong = f"shape {tuple(replayed.shape)} and values {replayed.tolist()} in place of {expected.tolist()}"
        require(torch.equal(replayed, expected), wrong)


@new_exercise("outputs")
def seen_by_the_caller(answer: Answer) -> None:
    """Write `answer(program, x)`: True if the two results of `program(x)` share memory. Use a write to find out.

    - How can a caller notice that two results share memory?
    - Write to one of them, and look at the other one.
    - Add to the first result in place, and check whether the second one changed.
    """

    def together(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        doubled = x * 2
        return doubled[0], doubled

    for program, expected in (
        (together, True),
        (lambda x: (x * 2, x * 2), False),
        (lambda x: (x, x.t()), True),
        (lambda x: (x[0], x.clone()), False),
    ):
        said = answer(program, torch.ones(2, 2))
        require(
            bool(said) is expected,
            f"it returns {said} for results that {'share' if expected else 'do not share'} memory",
        )


# --- 06_inputs_that_share --------------------------------------------------------------------------------------------


def compiled_by_hand(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    new = x * 2
    result = new + y
    x.copy_(new)
    return result


@new_exercise("inputs", program=compiled_by_hand)
def prove_it_wrong(answer: Answer) -> None:
    """Write `answer()`: two tensors for which this program differs from `x.mul_(2); return x + y`.

    - This program reads `y` before it writes `x`. When does that make a difference?
    - The two arguments have to share memory, and not only a storage.
    - You can use the same tensor twice.
    """
    x, y = answer()
    call = Cloner(compiled_by_hand).call((x, y), {})
    result = compiled_by_hand(*call.args)
    right_x, right_y = Cloner(compiled_by_hand).call((x, y), {}).args
    expected = right_x.mul_(2) + right_y
    require(not torch.equal(result, expected), f"for these tensors both return {result.tolist()}")


@new_exercise("inputs")
def do_they_overlap(answer: Answer) -> None:
    """Write `answer(x, y)`: can a write to `x` change `y`? Both have one dimension and are contiguous.

    - Compare addresses: `x.data_ptr()` is the address of the first element.
    - From this address on, `x` takes `x.numel() * x.element_size()` bytes.
    - Two ranges overlap if each begins before the other one ends. A tensor without elements overlaps nothing.
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
        said = answer(x, y)
        windows = [f"`{each.dtype}`, {len(each)} elements from place {each.storage_offset()} on" for each in (x, y)]
        require(bool(said) is expected, f"for {' and '.join(windows)} of {'one storage' if one else 'two'}: {said}")


@new_exercise("inputs")
def one_base(answer: Answer) -> None:
    """Write `answer(x, y)`: without copying, return one tensor on their common storage that covers both.

    - The base has to be a view: a tensor on the same storage.
    - Give it one dimension, stride 1 and offset 0. How many elements does the storage have?
    - The storage has `x.untyped_storage().nbytes()` bytes, and `as_strided` makes any window.
    """
    memory = torch.arange(12.0)
    for x, y in ((memory[:4], memory[2:]), (memory[8:], memory[:2]), (memory[::2], memory.view(3, 4).t())):
        base = answer(x, y)
        require(_same_storage(base, memory), "the result does not share their storage")
        wrong = f"the result, {window(base)}, does not cover both, {window(x)} and {window(y)}"
        require((places(base) >= places(x) | places(y)).all(), wrong)


# --- 07_two_graphs ---------------------------------------------------------------------------------------------------


@new_exercise("saved")
def backward_by_hand(answer: Answer) -> None:
    """Write `answer(x, w, tangent)`: the gradient of `w` if `tangent` is the gradient of the result `(x * w).exp()`.

    - Apply the chain rule from the result backwards: first `exp`, then the product.
    - The derivative of `exp` is `exp` itself. The derivative of `x * w` with respect to `w` is `x`.
    - Multiply the tangent by both derivatives.
    """
    x, w, tangent = torch.tensor([1.0, 2.0]), torch.tensor([0.5, -1.0], requires_grad=True), torch.tensor([1.0, 3.0])
    (x * w).exp().backward(tangent)
    gradient = answer(x, w.detach(), tangent)
    _same_storage(gradient, x)
    assert w.grad is not None
    require(torch.allclose(gradient, w.grad), f"the gradient is {w.grad.tolist()}, and it returns {gradient.tolist()}")


@new_exercise("saved")
def save_less(answer: Answer) -> None:
    """Write `answer(x)`, a forward of `relu`: return the result, and a factor for the tangents, one byte per element.

    - The gradient equals the tangent where `x` was positive, and is 0 elsewhere.
    - So the backward does not need `x` itself.
    - A comparison makes a tensor of booleans with one byte each.
    """
    x, tangent = torch.tensor([-1.0, 0.0, 2.0], requires_grad=True), torch.tensor([1.0, 2.0, 3.0])
    expected = x.relu()
    expected.backward(tangent)
    results = answer(x.detach())
    require(isinstance(results, tuple) and len(results) == 2, "it does not return two tensors")
    result, saved = results
    require(torch.equal(result, expected), f"the result is {result.tolist()} for {x.tolist()}")
    require(saved.element_size() == 1, f"`saved` takes {saved.element_size()} bytes per element")
    gradient = tangent * saved
    assert x.grad is not None
    require(
        torch.equal(gradient, x.grad), f"for {x.tolist()}, the gradient of {tangent.tolist()} is {gradient.tolist()}"
    )


def needs_some(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    product = a * b
    return (product + c).sin() + c


@new_exercise("saved", program=needs_some, takes="names")
def what_is_saved(answer: Any) -> None:
    """In this program, `b` and `c` require grad. Which inputs are saved? Add "computed" if a computed value is, too.

    - Go through the ops: which values does the derivative of each op need?
    - For the product, only the gradient of `b` is needed. It needs the other factor.
    - A sum needs nothing. `sin` needs its input.
    """
    b, c = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    facts = compiled_facts(needs_some, (torch.ones(2), b, c), None)["saved"]
    said = _names(answer, facts)
    for name, fact in facts.items():
        require((name in said) == fact.value, f"`{name}` is {'' if fact.value else 'not '}saved: {fact.why}")
