"""To each exercise of the course a right answer, and wrong ones that come to mind."""

from __future__ import annotations

from typing import Any

import torch

from aotlab.teach import steps


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


def _seen_through(x: torch.Tensor, y: torch.Tensor) -> bool:
    before = y.clone()
    x.add_(1)
    return not torch.equal(y, before)


def _ranges_meet(x: torch.Tensor, y: torch.Tensor) -> bool:
    ends = [each.data_ptr() + each.numel() * each.element_size() for each in (x, y)]
    return x.data_ptr() < ends[1] and y.data_ptr() < ends[0]


def _elements_meet(x: torch.Tensor, y: torch.Tensor) -> bool:
    ends = [each.storage_offset() + each.numel() for each in (x, y)]
    meet = x.storage_offset() < ends[1] and y.storage_offset() < ends[0]
    return meet and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def _elements_meet_if_any(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.numel() * y.numel() > 0 and _elements_meet(x, y)


def _room(shape: Any, strides: Any, offset: int) -> int:
    return offset + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def _renew(x: torch.Tensor) -> None:
    x.data = x.data + 1


def _turn_a_copy(x: torch.Tensor) -> None:
    x.data = x.data.t().clone()


def _rebinds(x: torch.Tensor, new: torch.Tensor) -> None:
    x = new  # noqa: F841  # the mistake that is shown


def _new_data(x: torch.Tensor, new: torch.Tensor) -> None:
    x.data = new.clone()


def _looped(x: torch.Tensor, n: int) -> torch.Tensor:
    for _ in range(n):
        x = x + x
    return x


def _mask(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        return _mask_and_moved(x, state)


def _mask_and_moved(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    torch.set_rng_state(state)
    return torch.nn.functional.dropout(torch.ones_like(x), 0.5) != 0


def _mask_of_now(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        return torch.nn.functional.dropout(torch.ones_like(x), 0.5) != 0


def _zeros_are_masked(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.set_rng_state(state)
        return torch.nn.functional.dropout(x, 0.5) != 0


def _with_autocast(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ w


def _branching(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else -x


def _prints(x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    print(end="")
    return torch.where(x.sum() > 0, x * 2, -x)


def _compares(f: Any, *, apart: bool = True, shared: bool = True, written: bool = True, other: bool = True) -> bool:
    ones = torch.ones(2)
    for x, y in ((ones.clone(), ones * 5),) * apart + ((twice := ones.clone(), twice),) * shared:
        expected = (x * 2) + (x * 2 if x is y else y)
        found = f(x, y)
        wrong = not torch.equal(x, ones * 2) or (other and x is not y and not torch.equal(y, ones * 5))
        if not torch.equal(found, expected) or (written and wrong):
            return False
    return True


def _all_parts(t: Any) -> list[Any]:
    if not hasattr(t, "__tensor_flatten__"):
        return [t]
    return [part for name in t.__tensor_flatten__()[0] for part in _all_parts(getattr(t, name))]


def _first_level(t: Any) -> list[Any]:
    return [getattr(t, name) for name in t.__tensor_flatten__()[0]] if hasattr(t, "__tensor_flatten__") else [t]


def _put_together(old: Any, parts: Any) -> Any:
    names, context = old.__tensor_flatten__()
    return old.__tensor_unflatten__(dict(zip(names, parts, strict=True)), context, old.shape, old.stride())


def _without_context(old: Any, parts: Any) -> Any:
    parts = dict(zip(old.__tensor_flatten__()[0], parts, strict=True))
    return old.__tensor_unflatten__(parts, "", old.shape, old.stride())


def _own(name: str, *changes: tuple[str, str]) -> Any:
    """Return the course's own step of the compiler, with changes."""
    text = steps.parts()[name]
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    names = steps.layer()
    exec(text, names)
    return names[name]


#: Exercise → right answers, and wrong ones with a piece of what is said of them.
ANSWERS: dict[str, tuple[list[Any], list[tuple[Any, str]]]] = {
    "second-column": (
        [lambda x: x[:, 1], lambda x: x.t()[1], lambda x: x.select(1, 1)],
        [(lambda x: x[:, 1].clone(), "so it is a copy"), (lambda x: x[1], "shape (3,)"), (lambda x: 7, "type int")],
    ),
    "diagonal-stride": (
        [lambda n: n + 1, lambda n: torch.empty(n, n).diagonal().stride(0)],
        [(lambda n: n, "returns 2"), (lambda n: 1, "returns 1")],
    ),
    "room": (
        [lambda shape, strides, offset: 0 if 0 in shape else _room(shape, strides, offset)],
        [
            (_room, "for shape (2, 0), strides (3, 1), offset 4 it returns 7: too many"),
            (lambda shape, strides, offset: shape[0] * shape[1], "too few"),
            (lambda shape, strides, offset: offset + shape[0] * shape[1], "too many"),
            (lambda shape, strides, offset: "6", "'6'"),
        ],
    ),
    "zero-the-diagonal": (
        [lambda x: x.diagonal().zero_(), lambda x: x.fill_diagonal_(0), lambda x: x.mul_(1 - torch.eye(3))],
        [(lambda x: x * (1 - torch.eye(3)), "[[1.0,"), (lambda x: x.zero_(), "outside of the diagonal")],
    ),
    "turned-in-place": (
        [lambda x: x.t_(), lambda x: x.transpose_(0, 1)],
        [
            (lambda x: x.copy_(x.t().clone()), "writes"),
            (lambda x: x.t(), "stays as it is"),
            (_turn_a_copy, "the values moved"),
        ],
    ),
    "uncounted": (
        [lambda x: x.data.add_(1), lambda x: x.numpy().__iadd__(1)],
        [
            (lambda x: x.add_(1), "from 0 to 1"),
            (lambda x: x.detach().add_(1), "from 0 to 1"),
            (lambda x: x + 1, "0.0"),
            (_renew, "`x` got other memory"),
        ],
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
            (_through_data, "`row.grad` is None"),
            (_detached, "no gradient reaches `x`"),
            (lambda x, row: x, "storage"),
        ],
    ),
    "which-none": (["c, d", ["d", "c"]], [("c", "`d`"), ("b, c, d", "`b`"), ("c, d, e", "the names are")]),
    "make-it-pure": (
        [_cat, lambda x: (new := torch.select_scatter(x, x[0] * 2, 0, 0), new.sum())],
        [(_written, "is written"), (lambda x: (x, (x.sum() + x[0].sum())), "new value"), (lambda x: x, "two tensors")],
    ),
    "epilogue": (
        [lambda x, new: x.copy_(new), lambda x, new: x.zero_().add_(new)],
        [(_rebinds, "0.0"), (_new_data, "`x` got other memory"), (lambda x, new: x.set_(new), "`x` got other memory")],
    ),
    "what-is-copied-back": (
        ["a b", {"a", "b"}],
        [
            ("a", "`b` is written: `flat[0] = 7`"),
            ("a, b, c", "`c` is not written: `a.add_(b)`"),
            ("", "`a` is written: `a.add_(b)`"),
            ("x", 'the names are a, b, c; two are written as in "a, b"'),
        ],
    ),
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
    "prove-it-wrong": (
        [
            lambda: (torch.ones(3),) * 2,
            lambda: ((m := torch.ones(4))[:3], m[1:]),
            lambda: ((t := torch.ones(2)), t[...]),
        ],
        [
            (lambda: (torch.ones(3), torch.ones(3)), "both return [3.0, 3.0, 3.0]"),
            (lambda: ((m := torch.ones(6))[:3], m[3:]), "both return"),
            (lambda: torch.ones(3), "ValueError"),
        ],
    ),
    "do-they-overlap": (
        [_ranges_meet, _seen_through],
        [
            (lambda x, y: x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr(), "one storage: True"),
            (lambda x, y: x.data_ptr() == y.data_ptr(), "one storage: False"),
            (_elements_meet, "0 elements from place 2 on of one storage: True"),
            (_elements_meet_if_any, "`torch.uint8`, 2 elements from place 2 on of one storage: True"),
            (
                lambda x, y: x.data_ptr() < y.data_ptr() + 4 * len(y) and y.data_ptr() < x.data_ptr() + 4 * len(x),
                "`torch.uint8`, 2 elements from place 2 on of one storage: True",
            ),
        ],
    ),
    "one-base": (
        [
            lambda x, y: x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0),
            lambda x, y: torch.empty(0).set_(x.untyped_storage()),
        ],
        [(lambda x, y: x, "does not cover both"), (lambda x, y: torch.cat([x.flatten(), y.flatten()]), "storage")],
    ),
    "backward-by-hand": (
        [lambda x, w, tangent: tangent * (x * w).exp() * x],
        [
            (lambda x, w, tangent: (x * w).exp() * x, "the gradient is"),
            (lambda x, w, tangent: tangent * x, "it returns"),
        ],
    ),
    "save-less": (
        [lambda x: (x.relu(), x > 0), lambda x: (x.clamp(min=0), (x > 0).to(torch.int8))],
        [
            (lambda x: (x.relu(), x), "4 bytes"),
            (lambda x: (x.relu(), x >= 0), "[0.0, 2.0, 3.0]"),
            (lambda x: x.relu(), "two tensors"),
        ],
    ),
    "what-is-saved": (
        ["a, computed"],
        [("a", "`computed` is saved"), ("a, b, computed", "`b` is not"), ("d", "names")],
    ),
    "another-graph": (
        [lambda x: x.clone().requires_grad_(), lambda x: x.t().contiguous().t()],
        [
            (lambda x: x.clone(), "strides (3, 1), offset 0 and requires_grad=False, like `x`"),
            (lambda x: x.double(), "dtype torch.float64"),
            (lambda x: x[:1], "[[0.0, 1.0, 2.0]]"),
        ],
    ),
    "how-many-graphs": ([4, 4.0], [(3, "not 3: 3, 4 and 2 elements alone need 2"), (7, "not 7"), ("4", "a number")]),
    "fewer-graphs": (
        [lambda x, n: x * 2**n, lambda x, n: torch.ldexp(x, torch.full((), n))],
        [
            (_looped, "needs 8 graphs"),
            (lambda x, n: x * 2 * n, "for n = 3"),
            (lambda x, n: x.mul(float(2**n)).tolist(), "AttributeError"),
        ],
    ),
    "mask-again": (
        [_mask],
        [
            (_mask_and_moved, "has changed afterwards"),
            (_mask_of_now, "it was [1, 1, "),
            (_zeros_are_masked, "for x = [0.0, 1.0, "),
            (lambda x, state: x, "booleans"),
        ],
    ),
    "what-is-drawn": (
        ["a, c, d", {"d", "c", "a"}],
        [("c, d", "`a`, another state"), ("a, b, c, d", "`b`, the same state"), ("x", "the names are")],
    ),
    "autocast-by-hand": (
        [
            lambda x, w: x.bfloat16() @ w.bfloat16(),
            lambda x, w: torch.mm(x.to(torch.bfloat16), w.type(torch.bfloat16)),
        ],
        [
            (lambda x, w: x @ w, "dtype torch.float32"),
            (lambda x, w: (x @ w).bfloat16(), "the product itself is in bfloat16"),
            (lambda x, w: x.bfloat16() @ w.detach().bfloat16(), "no gradient"),
            (_with_autocast, "uses autocast"),
        ],
    ),
    "take-apart": (
        [_all_parts, lambda t: tuple(_all_parts(t))],
        [
            (_first_level, "returns 2 tensors, not 3"),
            (lambda t: [t], "returns 1 tensors, not 2"),
            (lambda t: _all_parts(t)[::-1], "another order"),
            (lambda t: t, "not a list"),
        ],
    ),
    "put-together": (
        [_put_together],
        [
            (_without_context, "'kept'"),
            (lambda old, parts: type(old)(*parts, old.word), "`other` is `parts[1]`, not `parts[0]`"),
            (lambda old, parts: _put_together(old, [each.clone() for each in parts]), "`other` is `another tensor`"),
            (lambda old, parts: parts, "is a list"),
        ],
    ),
    "how-many-inputs": ([3], [(4, "not 4; list"), (2, "not 2")]),
    "one-graph": (
        [
            lambda x: torch.where(x.sum() > 0, x * 2, -x),
            lambda x: x * (3 * (x.sum() > 0) - 1),
        ],
        [
            (_branching, "a branch depends on the value of a tensor"),
            (_prints, "graph break"),
            (lambda x: torch.where(x > 0, x * 2, -x), "of [2.0, -1.0] it makes [4.0, 1.0]"),
            (lambda x: torch.where(x.sum() >= 0, x * 2, -x), "of [1.0, -1.0] it makes [2.0, -2.0]"),
            (lambda x: torch.where(x[0] > 0, x * 2, -x), "of [1.0, -1.0] it makes [2.0, -2.0]"),
        ],
    ),
    "read-the-report": (
        [
            lambda report: report.saved.query("not is_input")["nbytes"].sum(),
            lambda report: sum(row.nbytes for row in report.saved.itertuples() if not row.is_input),
        ],
        [
            (lambda report: report.saved["nbytes"].sum(), "with the bytes [128"),
            (lambda report: len(report.saved), "it makes 2"),
        ],
    ),
    "find-the-bug": (
        [_compares],
        [
            (lambda f: _compares(f, apart=False), "takes `x` for `y` it says True"),
            (lambda f: _compares(f, other=False), "writes `y`, too it says True"),
            (lambda f: _compares(f, shared=False), "reads `y` before the write it says True"),
            (lambda f: _compares(f, shared=False, written=False), "does not write `x` it says True"),
            (lambda f: f.__name__ == "keeps_order", "with other ops it says False"),
        ],
    ),
    "written-arguments": (
        [lambda report: set(report.inputs.query("mutated")["name"])],
        [
            (lambda report: set(report.inputs["name"]), "of a function that writes nothing it makes {"),
            (lambda report: set(report.inputs["name"][:1]), "of a function that writes nothing it makes {"),
            (lambda report: set(), "of a function that writes y it makes set()"),
        ],
    ),
    "compiled-once": (
        [
            lambda function: torch.compile(function, backend="aot_eager", dynamic=True),
            lambda function: torch.compile(function, backend="eager", dynamic=True),
        ],
        [
            (
                lambda function: torch.compile(function, backend="aot_eager"),
                "there are 2 graphs: tensor 'x' size mismatch",
            ),
            (lambda function: function, "compiled nothing"),
            (lambda function: 3, "it returns 3, which cannot be called"),
            (
                lambda function: torch.compile(lambda x: x * 1, backend="eager", dynamic=True),
                "it computes [0.0, 1.0, 2.0]",
            ),
        ],
    ),
    "lines-that-break": (
        [lambda report: report.graph_breaks["code"].tolist()],
        [
            (lambda report: [], "of a function with 2 graph breaks it makes []"),
            (lambda report: report.graph_breaks["line"].tolist(), "of a function with 2 graph breaks it makes ["),
        ],
    ),
    "record": (
        [_own("record")],
        [
            (_own("record", ("map_aggregate(kwargs, recorder.read)", "{}")), "this is the smallest that differs"),
            (_own("record", ("item(node, number)", "item(node, 0)")), "this is the smallest that differs"),
            (_own("record", ("map_aggregate(args, recorder.read)", "args")), "name 'float32' is not defined"),
            (
                _own("record", ("recorder.keep(result, node)", "pass")),
                "KeyError for the storage of a fake tensor, where",
            ),
        ],
    ),
    "write": (
        [_own("write")],
        [
            (_own("write", ("*window(tensor)", "*window(tensor)[:2], 0")), "write to tensors that they computed"),
            (_own("write", ("recorder.nodes[storage] = new", "pass")), "write to tensors that they computed"),
            (_own("write", ('whole.meta["window"]', "window(tensor)")), "write to tensors that they computed"),
        ],
    ),
    "differentiate": (
        [_own("differentiate")],
        [
            (_own("differentiate", (", allow_unused=True", "")), "are differentiated"),
            (_own("differentiate", ("return nodes", "return nodes[::-1]")), "are differentiated"),
            (
                _own("differentiate", ("empty_like", "ones_like"), ('enter(tangent, "tangent")', "read(tangent)")),
                "`ones_like_default` computes it",
            ),
        ],
    ),
    "cut": (
        [_own("cut")],
        [
            (_own("cut", (" and late & set(node.users)", "")), "are enough"),
            (_own("cut", ("node not in late", "node.op == 'placeholder' and node not in late")), "needs `cos_default`"),
            (_own("cut", (" and late & set(node.users)", " and node.op != 'placeholder'")), "needs `input_1`"),
        ],
    ),
    "recipe": (
        [_own("recipe")],
        [
            (_own("recipe", ("any(result is x for x in inputs)", "False")), "in eager `a` itself"),
            (_own("recipe", ("result if result._base is None else result._base", "result")), "out[0].mul_(2)"),
            (_own("recipe", ("None if result is base else window(result)", "window(result)")), "a view of the base"),
        ],
    ),
    "finish": (
        [_own("finish")],
        [
            (_own("finish", ("args[number].copy_(value)", "pass")), "write to inputs"),
            (_own("finish", ("args[number].copy_(value)", "args = list(args); args[number] = value")), "to inputs"),
            (_own("finish", ("tensor.as_strided(*where)", "tensor")), "return inputs"),
        ],
    ),
    "guards": (
        [_own("guards")],
        [
            (_own("guards", (", tuple(shared), tuple(same)", "")), "call 2"),
            (_own("guards", ("window(x)", "x.shape")), "are called several times"),
            (_own("guards", ("torch.is_grad_enabled(), ", "")), "under `no_grad` and of one outside"),
            (_own("guards", ("x.dtype", "id(x)")), "differ in values only"),
            (_own("guards", ("x.is_leaf, ", "")), "`a` is written before"),
        ],
    ),
}
