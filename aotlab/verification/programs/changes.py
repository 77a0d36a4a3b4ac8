"""Draw a change to the inputs for a later call of a program: other values, layouts, aliases, or another grad mode.

A later call with changed inputs tests the guards of the entry that the first call compiled.
"""

from __future__ import annotations

from dataclasses import replace

from aotlab.verification.programs.choices import Choices, one_of
from aotlab.verification.programs.recipes import Grad, Layout, Recipe, elements

_LAYOUTS: tuple[Layout, ...] = ("plain", "offset", "transposed", "strided")
_OTHER_FLOAT = {"torch.float32": "torch.float64", "torch.float64": "torch.float32"}
_OTHER_VALUE = {"None": "2", "True": "False", '"text"': "None", "0.5": "1.5"}


def draw_change(
    choices: Choices, recipes: tuple[Recipe, ...], grad: bool | None
) -> tuple[tuple[Recipe, ...], str, bool]:
    """Change one thing about the inputs of a call.

    Parameters
    ----------
    recipes
        The recipes for the inputs of the first call.
    grad
        False if no input may require grad.

    Returns
    -------
    tuple
        The changed recipes, the change in words, and whether grad mode is on in the later call.
    """
    unshared = [index for index, recipe in enumerate(recipes) if recipe.is_own]
    passed = [index for index in unshared if recipes[index].passed]
    borrowed = [index for index, recipe in enumerate(recipes) if recipe.of is not None and recipe.passed]
    windows = [index for index in borrowed if recipes[index].room]
    values = [index for index, recipe in enumerate(recipes) if recipe.value is not None]
    kinds = [(5, "the same again"), (1, "another grad mode")]
    if unshared:
        kinds += [(2, "other values"), (2, "other shapes"), (1, "another dtype"), (1, "another layout")]
        kinds += [(2, "other requires_grad")] * (grad is not False)
    if len(passed) > 1:
        kinds += [(3, "one input passed twice"), (2, "inputs that overlap")]
        if _alike(recipes, passed):
            kinds += [(2, "inputs that are windows")]
    if borrowed:
        kinds += [(3, "no longer the same")]
    if windows:
        kinds += [(5, "another offset")]
    if values:
        kinds += [(8, "another number")]
    kind = one_of(choices, [kind for weight, kind in kinds for _ in range(weight)])
    new = list(recipes)
    at = one_of(choices, unshared) if unshared else 0
    if kind == "other values":
        new[at] = replace(new[at], seed=new[at].seed + 1)
    elif kind == "other requires_grad" and "float" in new[at].dtype:
        others: tuple[Grad, ...] = ("none", "leaf", "non-leaf")
        new[at] = replace(new[at], grad=one_of(choices, [other for other in others if other != new[at].grad]))
    elif kind == "other shapes":
        # All inputs change in the same way, because otherwise most programs would raise.
        sizes = sorted({size for index in passed for size in recipes[index].shape})
        if sizes and not windows:
            old, extra = one_of(choices, sizes), 1 + choices.below(2)
            for index in passed:
                shape = tuple(size + extra if size == old else size for size in new[index].shape)
                new[index] = replace(new[index], shape=shape)
    elif kind == "another dtype":
        for index in unshared:
            new[index] = replace(new[index], dtype=_OTHER_FLOAT.get(new[index].dtype, new[index].dtype))
    elif kind == "another layout":
        new[at] = replace(new[at], layout=one_of(choices, [layout for layout in _LAYOUTS if layout != new[at].layout]))
        if any(recipe.of == new[at].name and "view(torch." in recipe.view for recipe in recipes):
            new[at] = recipes[at]  # an input views this tensor with another dtype, which not every layout allows
    elif kind in ("one input passed twice", "inputs that overlap"):
        view = "{}" if kind == "one input passed twice" else one_of(choices, ("{}.detach()", "{}[...]", "{}.data"))
        new[passed[-1]] = Recipe(name=new[passed[-1]].name, of=new[passed[0]].name, view=view)
    elif kind == "inputs that are windows":
        new = _windows(choices, recipes, _alike(recipes, passed))
    elif kind == "no longer the same":
        to = one_of(choices, borrowed)
        new[to] = _on_its_own(recipes, recipes[to])
    elif kind == "another offset":
        to = one_of(choices, windows)
        length, room = recipes[to].length, recipes[to].room
        others_at = [place for place in (0, 1, length // 2, length, room) if place != recipes[to].offset]
        new[to] = replace(new[to], offset=one_of(choices, others_at))
    elif kind == "another number":
        to = one_of(choices, values)
        value = recipes[to].value or "0"
        new[to] = replace(new[to], value=_OTHER_VALUE.get(value) or str(int(value) + 1 if value.isdigit() else 2))
    return tuple(new), kind, kind != "another grad mode"


def _alike(recipes: tuple[Recipe, ...], passed: list[int]) -> list[int]:
    """Find two passed inputs that could be windows of one buffer; return their indices, or an empty list.

    The two inputs are not empty and have the same shape and dtype.
    """
    for one in passed:
        for two in passed:
            first, second = recipes[one], recipes[two]
            if one < two and (first.shape, first.dtype) == (second.shape, second.dtype) and elements(first):
                return [one, two]
    return []


def _windows(choices: Choices, recipes: tuple[Recipe, ...], pair: list[int]) -> list[Recipe]:
    """Make the two inputs in ``pair`` windows of one new buffer. The windows overlap, touch, or nearly touch."""
    one, two = (recipes[index] for index in pair)
    count = elements(one)
    buffer = f"{one.name}_buffer"
    sizes = ", ".join(map(str, one.shape)) if one.shape else "()"
    grads = {recipe.name: ".detach().requires_grad_()" if recipe.grad == "leaf" else "" for recipe in (one, two)}
    base = Recipe(name=buffer, shape=(2 * count + 1,), dtype=one.dtype, grad="none", passed=False)
    if "non-leaf" in (one.grad, two.grad):
        base = replace(base, grad="non-leaf")
    offsets = (0, one_of(choices, (count // 2, count, 1, count + 1, 0)))
    windows = [
        Recipe(
            name=recipe.name,
            of=buffer,
            view=f"{{}}[{{o}}:{{e}}].view({sizes}){grads[recipe.name]}",
            offset=offset,
            length=count,
            room=count + 1,
        )
        for recipe, offset in zip((one, two), offsets, strict=True)
    ]
    new = [windows[pair.index(index)] if index in pair else recipe for index, recipe in enumerate(recipes)]
    return [base, *new]


def _on_its_own(recipes: tuple[Recipe, ...], recipe: Recipe) -> Recipe:
    """Return a recipe that binds the name of a view, a window or a duplicate to a clone, which has separate memory.

    The clone may have another shape than the original. `drawing` calls the program with the clone and drops most calls
    that raise.
    """
    if recipe.room or recipe.of is None:
        text = recipe.view.format(recipe.of, o=recipe.offset, e=recipe.offset + recipe.length)
        return replace(recipe, view=f"{recipe.view}.clone()" if ".detach()" not in text else "{}[{o}:{e}].clone()")
    return replace(recipe, view=f"{recipe.view}.clone()", extra="")
