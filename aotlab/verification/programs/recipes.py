"""Draw recipes for the arguments of a call. A recipe is a new tensor, a view of another name, or a Python value.

Arguments may overlap in many ways, so arguments that share memory are drawn together. A *family* is a tensor or NumPy
array with windows of its memory. The tensor may be an argument itself, or only the windows are passed. Autograd records
some of the windows as views of the tensor, but not the windows that ``detach()`` returned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from aotlab.verification.programs.choices import Choices, chance, one_of, weighted
from aotlab.verification.programs.program import Setup

Grad = Literal["none", "leaf", "non-leaf"]
Layout = Literal["plain", "offset", "transposed", "strided", "expanded", "channels last"]

_SIZES = (2, 3, 1, 4)
_DTYPES = ("torch.float32", "torch.float64")
_WHOLE = ("torch.int64", "torch.bool")
_GRADS: tuple[Grad, ...] = weighted((3, "none"), (3, "leaf"), (4, "non-leaf"))
_LAYOUTS: tuple[Layout, ...] = weighted(
    (12, "plain"), (4, "offset"), (4, "transposed"), (2, "strided"), (1, "expanded")
)

#: Three sizes, from which the shapes of all arguments are built.
Sizes = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The binding of one name in a call's setup: to a new tensor, an expression of another name, or a Python value.

    Without ``of`` and ``value``, the name is bound to a new tensor with ``shape``, ``dtype``, ``grad`` and ``layout``.
    ``seed`` selects its elements. With ``of``, the name is bound to the expression ``view`` of the name ``of``: ``{}``
    is replaced by ``of``, and ``{o}`` and ``{e}`` by the start and the end of a window with ``length`` elements at
    ``offset``. ``room`` is the largest offset at which this window fits; it is 0 if the window cannot be moved.
    ``value`` is a Python value as text. If ``passed`` is False, the name is not an argument and is only observed.
    ``extra`` is a statement that runs after all names are bound.
    """

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = "torch.float32"
    grad: Grad = "none"
    layout: Layout = "plain"
    seed: int = 1
    of: str | None = None
    view: str = "{}"
    offset: int = 0
    length: int = 0
    room: int = 0
    value: str | None = None
    passed: bool = True
    extra: str = ""

    @property
    def is_tensor(self) -> bool:
        """Whether the name is bound to a tensor."""
        return self.value is None

    @property
    def is_own(self) -> bool:
        """Whether the name is bound to a tensor with separate memory."""
        return self.value is None and self.of is None

    def lines(self) -> tuple[list[str], list[str]]:
        """Return the statements that bind ``name``, and the other names that they bind: a base and a leaf."""
        if self.value is not None:
            return [f"{self.name} = {self.value}"], []
        if self.of is not None:
            return [f"{self.name} = {self.view.format(self.of, o=self.offset, e=self.offset + self.length)}"], []
        shape, view = self._layout()
        values = f"numbers({', '.join(map(str, (self.seed, *shape)))}, dtype={self.dtype})"
        base, leaf = f"{self.name}_base", f"{self.name}_leaf"
        if self.grad == "non-leaf":
            first = [f"{leaf} = {values}.requires_grad_()", f"{base} = {leaf} * 1"]
            if view:
                return [*first, f"{self.name} = {base}{view}"], [leaf, base]
            return [first[0], f"{self.name} = {leaf} * 1"], [leaf]
        if self.grad == "leaf":
            if view:
                return [f"{base} = {values}", f"{self.name} = {base}{view}.detach().requires_grad_()"], [base]
            return [f"{self.name} = {values}.requires_grad_()"], []
        if view:
            return [f"{base} = {values}", f"{self.name} = {base}{view}"], [base]
        return [f"{self.name} = {values}"], []

    def _layout(self) -> tuple[tuple[int, ...], str]:
        shape = self.shape
        if not shape or self.layout == "plain":
            return shape, ""
        if self.layout == "offset":
            return (shape[0] + 1, *shape[1:]), "[1:]"
        if self.layout == "strided":
            return (*shape[:-1], 2 * shape[-1]), "[..., ::2]"
        if self.layout == "expanded":
            return (1, *shape[1:]), f".expand({', '.join(map(str, shape))})"
        if self.layout == "channels last":
            return shape, ".to(memory_format=torch.channels_last)"
        return shape[::-1], f".permute({', '.join(map(str, reversed(range(len(shape)))))})"


def setup_of(recipes: tuple[Recipe, ...], change: str, *, grad_mode: bool = True) -> Setup:
    """Return the setup of a call whose arguments follow ``recipes``.

    ``change`` says in words how this call differs from the program's first call (``"another layout"``). ``grad_mode``
    says whether grad mode is on during the call.
    """
    lines: list[str] = []
    watched: list[str] = []
    for recipe in recipes:
        bindings, looked_at = recipe.lines()
        lines += bindings
        watched += looked_at
        if not recipe.passed:
            watched.append(recipe.name)
    return Setup(
        # The names of NumPy arrays end in `_array`. An array is not a tensor, so only its windows are watched.
        lines=(*lines, *(recipe.extra for recipe in recipes if recipe.extra)),
        arguments=tuple(recipe.name for recipe in recipes if recipe.passed),
        watched=tuple(name for name in watched if not name.endswith("_array")),
        change=change,
        grad_mode=grad_mode,
    )


def draw_recipes(choices: Choices, grad: bool | None, sizes: Sizes | None = None) -> tuple[Recipe, ...]:
    """Draw the recipes of one to four arguments.

    ``grad`` is True if most tensors should require grad, False if none may, and None for both. ``sizes`` gives the
    sizes of the dimensions. If ``choices`` repeats the same decisions with other ``sizes``, the arguments differ only
    in their sizes.
    """
    names = list("abcd"[: one_of(choices, weighted((3, 1), (4, 2), (3, 3), (1, 4)))])
    n, m, k = sizes or (one_of(choices, _SIZES) for _ in range(3))
    if sizes is None and chance(choices, 30):
        m = 0
    dtype = one_of(choices, _DTYPES)
    recipes: list[Recipe] = []
    if len(names) > 1 and chance(choices, 220 if sizes is None else 100):
        count = 3 if len(names) > 2 and chance(choices, 300) else 2
        recipes += draw_family(choices, [names.pop(0) for _ in range(count)], (n, max(1, m)), dtype, grad)
    shapes = ((n, m), (n, m), (m, n), (n,), (m,), (), (n, m, k), (1, m), (n, 1), (m, k))
    for name in names:
        recipes.append(_draw_one(choices, name, recipes, shapes, dtype, grad))
        if sizes is not None and recipes[-1].is_own and chance(choices, 120):
            recipes[-1] = replace(recipes[-1], shape=(n, 3, m, k), layout="channels last")
    if not any(recipe.passed and recipe.is_tensor for recipe in recipes):
        recipes[0] = Recipe(name=recipes[0].name, shape=(2, 3))
    if grad is not False and chance(choices, 70):
        # The caller registers a hook, or retains the gradient, before the call.
        at = choices.below(len(recipes))
        if recipes[at].is_tensor and recipes[at].passed:
            name = recipes[at].name
            extra = one_of(choices, (f'hook({name}, "{name}")', f"retain({name})"))
            recipes[at] = replace(recipes[at], extra=extra)
    return tuple(recipes)


def draw_grad(choices: Choices, grad: bool | None) -> Grad:
    """Draw whether a tensor requires grad and is a leaf. `draw_recipes` explains ``grad``."""
    if grad is False:
        return "none"
    if grad is True and chance(choices, 700):
        return one_of(choices, ("leaf", "non-leaf"))
    return one_of(choices, _GRADS)


def _draw_one(
    choices: Choices,
    name: str,
    recipes: list[Recipe],
    shapes: tuple[tuple[int, ...], ...],
    dtype: str,
    grad: bool | None,
) -> Recipe:
    tensors = [recipe for recipe in recipes if recipe.is_tensor and recipe.passed]
    kind = choices.below(100)
    if tensors and kind >= 90:
        return Recipe(name=name, of=one_of(choices, tensors).name)
    if recipes and kind >= 82:
        return Recipe(name=name, value=one_of(choices, ("2", "0", "1", "3", "0.5", "True", "None", '"text"')))
    if kind >= 78:
        shape = one_of(choices, shapes)
        return Recipe(name=name, shape=shape, dtype=one_of(choices, _WHOLE), seed=1 + choices.below(5))
    return Recipe(
        name=name,
        shape=one_of(choices, shapes),
        dtype=dtype,
        grad=draw_grad(choices, grad),
        layout=one_of(choices, _LAYOUTS),
        seed=1 + choices.below(5),
    )


_FAMILIES = weighted(
    (5, "detached"),
    (5, "windows"),
    (3, "parameters"),
    (2, "strided"),
    (2, "array"),
    (4, "complex"),
    (2, "bytes"),
    (1, "transposed"),
    (1, "expanded"),
)


#: Pairs of dtypes: the base's dtype, and the dtype of a view of its bytes.
_BYTES = (
    ("torch.int32", "torch.int8"),
    ("torch.float32", "torch.int32"),
    ("torch.int64", "torch.int16"),
    ("torch.float64", "torch.float32"),
)


def draw_family(
    choices: Choices, names: list[str], shape: tuple[int, int], dtype: str, grad: bool | None
) -> list[Recipe]:
    """Draw a family of arguments that share memory: a tensor and views of it, or windows of one base."""
    kind = one_of(choices, _FAMILIES)
    if kind in ("windows", "parameters", "array"):
        return _windows(choices, kind, names, shape, dtype, grad)
    rows, columns = shape
    sizes = f"{rows}, {columns}"
    grad_kind = draw_grad(choices, grad)
    first = Recipe(name=names[0], shape=shape, dtype=dtype, grad=grad_kind)
    views: tuple[str, ...] = ()
    if kind == "strided":
        count = rows * columns
        base = Recipe(name="w", shape=(2 * count + 1,), dtype=dtype, grad=grad_kind, passed=False)
        starts = one_of(choices, ((0, 1, 0), (0, 0, 1), (1, 0, 1)))
        view = f"{{}}[{{o}}:{{e}}:2].view({sizes})"
        return [
            base,
            *(
                Recipe(name=name, of="w", view=view, offset=start, length=2 * count, dtype=dtype)
                for name, start in zip(names, starts, strict=False)
            ),
        ]
    if kind == "detached":
        first = replace(first, layout=one_of(choices, _LAYOUTS[:-1]))
        views = (
            "{}.detach()",
            "{}.data",
            "{}[...]",
            "{}[1:]",
            "{}.unsqueeze(0)",
            "{}.flatten()[1:]",
            "{}.detach()[:1]",
        )
        if grad is not False:
            views += ("{}.detach().requires_grad_()",)
    elif kind == "transposed":
        first = replace(first, shape=(rows, rows))
        views = ("{}.t()", "{}.t().detach()", "{}.diagonal()", "{}[:, :1]")
    elif kind == "expanded":
        views = ("{0}[:1].expand_as({0})", "{0}[0, 0].expand_as({0})", "{0}.detach()[:1].expand_as({0})")
    elif kind == "complex":
        first = replace(first, dtype="torch.complex64")
        views = ("torch.view_as_real({})", "{}.real", "torch.view_as_real({}.detach())", "{}.detach()", "{}.imag")
        if chance(choices, 500):
            first = replace(first, shape=(*shape, 2), dtype="torch.float32")
            views = ("torch.view_as_complex({})", "torch.view_as_complex({}.detach())", "torch.view_as_complex({})[:1]")
    else:
        wide, narrow = one_of(choices, _BYTES)
        first = replace(first, dtype=wide, grad="none")
        views = (f"{{}}.view({narrow})", f"{{}}.view({narrow})[..., 1:]", f"{{}}[:1].view({narrow})")
    return [first, *(Recipe(name=name, of=names[0], view=one_of(choices, views)) for name in names[1:])]


def _windows(
    choices: Choices, kind: str, names: list[str], shape: tuple[int, int], dtype: str, grad: bool | None
) -> list[Recipe]:
    """Draw windows of one shape: views of one base, leaves in one flat buffer, or tensors over one NumPy array."""
    count = shape[0] * shape[1]
    room = count + 2
    base = Recipe(name="w", shape=(count + room,), dtype=dtype, grad=draw_grad(choices, grad), passed=False)
    view = f"{{}}[{{o}}:{{e}}].view({shape[0]}, {shape[1]})"
    if kind == "parameters":
        base = replace(base, grad="none")
        if grad is not False:
            view = one_of(choices, (f"{view}.detach().requires_grad_()", f"torch.nn.Parameter({view})"))
    elif kind == "array":
        values = f"numbers(1, {count + room}, dtype={dtype})"
        base = Recipe(name="w_array", of=values, view="{}.numpy()", passed=False)
        view = f"torch.from_numpy({{}}[{{o}}:{{e}}]).view({shape[0]}, {shape[1]})"
        if grad is not False and chance(choices, 300):
            view += ".requires_grad_()"
    offsets = [one_of(choices, (0, 1))]
    offsets += [one_of(choices, (0, 1, count, count // 2, count + 1, room)) for _ in names[1:]]
    windows = [
        Recipe(name=name, of=base.name, view=view, offset=offset, length=count, room=room, dtype=dtype)
        for name, offset in zip(names, offsets, strict=True)
    ]
    if kind == "windows" and chance(choices, 300):
        # The base is passed instead of the last window.
        windows[-1] = Recipe(name=names[-1], of="w")
    return [base, *windows]


def elements(recipe: Recipe) -> int:
    """Return the number of elements of a recipe for a new tensor."""
    return math.prod(recipe.shape)
