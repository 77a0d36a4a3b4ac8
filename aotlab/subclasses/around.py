"""Write what stands around a compiled body: wrappers are taken apart before it, and put together behind it.

So a call runs straight through, as here for a `TwoTensor`::

    def run(args, kwargs):
        x = args[0]
        if type(x) is not TwoTensor or x.__tensor_flatten__() != (["a", "b"], None) or …:
            return MISS
        x_a, x_b = Unwrap.apply(x, gradient)
        out = body(((x_a, x_b, "TwoTensor(a, b)"), args[1]), kwargs)
        if out is MISS:
            return MISS
        return Wrap.apply(…, out[0], out[1])
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from aotlab import _torch as internals
from aotlab.capture import nesting
from aotlab.ir.subclasses import (
    AnchoredGradient,
    Layout,
    Opaque,
    SizeOfInputs,
    SizeOfPart,
    SubclassInput,
    SubclassOutput,
    SubclassRecord,
    SubclassSpec,
)
from aotlab.runtime.draft import MISS, Writer
from aotlab.runtime.outputs import write_result
from aotlab.subclasses.edges import Anchor, Gradient, Unwrap, Wrap, watch
from aotlab.subclasses.passing import taken
from aotlab.subclasses.target import Unwrapped

Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def write_around(target: Unwrapped, body: Run, name: str) -> tuple[SubclassRecord, Run]:
    """Return the function that serves an entry's calls, and the record of it."""
    around = _Around(target, body)
    source = "\n".join(["def run(args, kwargs):", *around.lines()]) + "\n"
    exec(compile(source, f"<aotlab {name} around>", "exec"), around.w.namespace)
    results = target.results
    assert results is not None
    record = SubclassRecord(
        inputs=tuple(target.inputs),
        outputs=tuple(results.outputs),
        results=tuple(results.shown),
        besides=tuple(results.besides),
        writes=tuple(results.writes),
        source=source,
    )
    return record, around.w.namespace.pop("run")


class _Around:
    def __init__(self, target: Unwrapped, body: Run) -> None:
        assert target.results is not None
        self.target, self.results = target, target.results
        self.w = Writer(("out", "body", "Unwrap", "Wrap", "Anchor", "enable_grad", "together"))
        self.w.namespace.update(
            body=body, MISS=MISS, Unwrap=Unwrap.apply, Wrap=Wrap.apply, Anchor=Anchor.apply, no_grad=torch.no_grad,
            enable_grad=torch.enable_grad, view_again=internals.view_again,
            increment_version=torch.autograd.graph.increment_version, taken=taken,
        )  # fmt: skip
        self._wrappers: list[str] = []  # the local name of each input
        self._texts: dict[int, str] = {}  # how what is read of a call is read, by its position

    def lines(self) -> list[str]:
        self._prologue()
        self._epilogue()
        return self.w.lines

    # --- before

    def _prologue(self) -> None:
        w, target = self.w, self.target
        self._read()
        groups: list[str] = []
        for k, (item, wrapper) in enumerate(zip(target.inputs, self._wrappers, strict=True)):
            if item.same_as != k:
                w.add(f"if {wrapper} is not {self._wrappers[item.same_as]}:")
                w.add("    return MISS")
                groups.append(groups[item.same_as])
                continue
            parts = self._check(item, wrapper)
            tensors = self._given(k, item, wrapper, parts)
            groups.append(f"({', '.join(tensors)}, {w.constant('fact', item.fact)})")
        distinct = [name for k, name in enumerate(self._wrappers) if target.inputs[k].same_as == k]
        if len(distinct) > 1:
            w.add(f"if len({{{', '.join(f'id({name})' for name in distinct)}}}) != {len(distinct)}:")
            w.add("    return MISS")
        args, kwargs = self._arguments(groups)
        w.add(f"out = body({args}, {kwargs})")
        w.add("if out is MISS:")
        w.add("    return MISS")

    def _read(self) -> None:
        """Write how the wrappers of a call are found, and the arguments whose sizes count."""
        w, target = self.w, self.target
        tree, count = target.tree, target.lifted_count
        sized = [(place, dim) for item in target.inputs for n in _sizes_of_inputs(item) for _, place, dim in n.names]
        read = [*(item.position for item in target.inputs), *(place for place, _ in sized)]
        if any(place < count for place in read):
            w.add(f"lifted = {w.call('read_lifted', target.target.lifter())}")
        direct = dict(self._direct_places())
        self._is_flat = all(place < count or place - count in direct for place in read)
        if not self._is_flat:
            w.namespace["flatten"] = nesting.flatten
            w.namespace["unflatten"] = nesting.unflatten
            w.add("leaves, tree = flatten((args, kwargs))")
            w.add(f"if tree != {w.constant('nesting', tree)}:")
            w.add("    return MISS")
        else:
            self._check_arguments([direct[place - count] for place in read if place >= count])
        for n in read:
            k = n - count
            self._texts[n] = f"lifted[{n}]" if k < 0 else direct[k] if self._is_flat else f"leaves[{k}]"
        for item in target.inputs:
            self._wrappers.append(w.local(item.name))
            w.add(f"{self._wrappers[-1]} = {self._texts[item.position]}")
        for place, dim in dict.fromkeys(sized):
            text = self._texts[place]
            w.add(f"if not isinstance({text}, torch.Tensor) or {text}.dim() <= {dim}:")
            w.add("    return MISS")

    def _direct_places(self) -> list[tuple[int, str]]:
        """Return which flat arguments are arguments themselves, and how they are read."""
        args, kwargs = self.target.tree.children
        named = zip(kwargs.keys, kwargs.children, strict=True)
        found, place = [], 0
        for text, tree in [(f"args[{n}]", tree) for n, tree in enumerate(args.children)] + [
            (f"kwargs[{key!r}]", tree) for key, tree in named
        ]:
            if isinstance(tree, nesting.Leaf):
                found.append((place, text))
            place += _leaves_of(tree)
        return found

    def _check_arguments(self, wanted: Sequence[str]) -> None:
        args, kwargs = self.target.tree.children
        conditions = [f"len(args) != {len(args.children)}"] if any(t.startswith("args") for t in wanted) else []
        conditions += [f"{key!r} not in kwargs" for key in kwargs.keys if f"kwargs[{key!r}]" in wanted]
        if conditions:
            self.w.add(f"if {' or '.join(conditions)}:")
            self.w.add("    return MISS")

    def _check(self, item: SubclassInput, wrapper: str) -> list[str]:
        """Write the guards of a wrapper and how it is taken apart; return the local names of its parts."""
        w = self.w
        grad = f"{wrapper}.requires_grad is not {item.requires_grad} or {wrapper}.is_leaf is not {item.is_leaf}"
        if item.spec is None:
            w.add(f"if not isinstance({wrapper}, torch.Tensor) or {grad}:")
            w.add("    return MISS")
            return [wrapper]
        parts = [w.local(path) for path in item.spec.paths(wrapper)]
        todo = [(item.spec, wrapper)]
        while todo:
            spec, text = todo.pop()
            w.add(f"if type({text}) is not {w.constant(spec.type.__name__, spec.type)}:")
            w.add("    return MISS")
            names = w.local("names")
            context = w.local("context")
            w.add(f"{names}, {context} = {text}.__tensor_flatten__()")
            expected = w.constant("context", spec.context) if spec.context is not None else "None"
            w.add(
                f"if [*{names}] != {[name for name, _ in spec.parts]!r} or {context} "
                f"{'is not' if spec.context is None else '!='} {expected}:"
            )
            w.add("    return MISS")
            for name, part in spec.parts:
                if isinstance(part, int):
                    w.add(f"{parts[part]} = {text}.{name}")
                elif isinstance(part, SubclassSpec):
                    inner = w.local(f"{text}_{name}")
                    w.add(f"{inner} = {text}.{name}")
                    todo.append((part, inner))
                else:
                    w.add(f"if {text}.{name} is not {w.constant(name, part.value)}:")
                    w.add("    return MISS")
        conditions = [grad, *self._of_layout(item.spec, wrapper, parts)]
        w.add(f"if {' or '.join(conditions)}:")
        w.add("    return MISS")
        return parts

    def _of_layout(self, spec: SubclassSpec, text: str, parts: list[str]) -> list[str]:
        size, stride = self._layout(spec.layout, parts)
        asked = {(n.part, n.dim) for n in (*spec.layout.size, *spec.layout.stride) if isinstance(n, SizeOfPart)}
        found = [f"{parts[part]}.dim() <= {dim}" for part, dim in dict(sorted(asked)).items()]
        found += [f"{text}.shape != {size}", f"{text}.stride() != {stride}"]
        for name, part in spec.parts:
            if isinstance(part, SubclassSpec):
                found += self._of_layout(part, f"{text}.{name}", parts)
        return found

    def _sizes(
        self, values: Sequence[int | SizeOfPart | SizeOfInputs], parts: list[str], one: str = "shape[{}]"
    ) -> str:
        """Write sizes, or what ``one`` asks a part."""
        items = [f"{parts[v.part]}.{one.format(v.dim)}" if isinstance(v, SizeOfPart) else str(v) for v in values]
        for n, value in enumerate(values):
            for name, place, dim in value.names if isinstance(value, SizeOfInputs) else ():
                items[n] = re.sub(rf"\b{name}\b", f"{self._texts[place]}.shape[{dim}]", items[n])
        return f"({', '.join(items)}{',' * (len(items) == 1)})"

    def _layout(self, layout: Layout, parts: list[str]) -> tuple[str, str]:
        """Write the sizes and strides of a wrapper."""
        return self._sizes(layout.size, parts), self._sizes(layout.stride, parts, "stride({})")

    def _given(self, k: int, item: SubclassInput, wrapper: str, parts: list[str]) -> list[str]:
        """Write what the body is given for a wrapper."""
        w = self.w
        if item.gradient == "parts":
            gradient = w.constant("gradient", self.target.gradients[k])
            w.add("with enable_grad():")
            w.add(f"    {', '.join(parts)}, = Unwrap({wrapper}, {gradient})")
            return parts
        given = [w.local(f"{part}_given") for part in parts]
        for name, part in zip(given, parts, strict=True):
            w.add(f"{name} = {part}.detach() if {part}.requires_grad else {part}")
        if item.gradient is None:
            return given
        sizes = [(w.constant("dtype", dtype), self._sizes(size, parts)) for dtype, size in item.gradient.anchors]
        anchors = [w.local(f"{wrapper}_anchor") for _ in sizes]
        arguments = [wrapper, w.constant("gradient", self.target.gradients[k]), *(f"({d}, {n})" for d, n in sizes)]
        w.add("with enable_grad():")
        w.add(f"    {', '.join(anchors)}, = Anchor({', '.join(arguments)})")
        return [*given, *anchors]

    def _arguments(self, groups: list[str]) -> tuple[str, str]:
        """Write the arguments of the body."""
        w, target, count = self.w, self.target, self.target.lifted_count
        of_place = {item.position: group for item, group in zip(target.inputs, groups, strict=True)}
        lifted = [of_place[n] for n in sorted(of_place) if n < count]
        args, kwargs = target.tree.children
        if not self._is_flat:
            for position, group in of_place.items():
                if position >= count:
                    w.add(f"leaves[{position - count}] = {group}")
            w.add("args, kwargs = unflatten(leaves, tree)")
            return f"({', '.join(lifted)}{',' * (len(lifted) == 1)}) + args" if lifted else "args", "kwargs"
        direct = {text: place for place, text in self._direct_places()}
        texts = [f"args[{n}]" for n in range(len(args.children))]
        changed = [of_place.get(direct.get(text, -1) + count) for text in texts]
        if any(changed) or lifted:
            items = [*lifted, *(group or text for group, text in zip(changed, texts, strict=True))]
            if not any(changed):
                items = [*lifted, "*args"]
            args_text = f"({', '.join(items)},)"
        else:
            args_text = "args"
        named = {key: of_place.get(direct.get(f"kwargs[{key!r}]", -1) + count) for key in kwargs.keys}
        swapped = ", ".join(f"{key!r}: {group}" for key, group in named.items() if group)
        return args_text, f"{{**kwargs, {swapped}}}" if swapped else "kwargs"

    # --- behind

    def _epilogue(self) -> None:
        w, results = self.w, self.results
        for write in results.writes:
            wrapper = self._wrappers[write.input]
            if write.value is not None:
                made = self._made(write.value, "value")
                w.add("with enable_grad():" if write.history else "with no_grad():")
                w.add(f"    {wrapper}.copy_({made})")
            for _ in range(write.versions - (write.value is not None)):
                w.add(f"increment_version({wrapper})")
        count = len(results.outputs)
        outputs: list[str | None] = [None] * (count + len(results.besides))
        all_made = [*results.outputs, *results.besides]
        for n, each in enumerate(all_made):
            if each.kind == "plain":
                outputs[n] = f"out[{each.first}]"
            elif each.kind == "input":
                outputs[n] = self._wrappers[each.of]
            elif each.kind == "new":
                outputs[n] = w.local("made")
                w.add("with enable_grad():" if each.requires_grad else "if True:")
                w.add(f"    {outputs[n]} = {self._made(each, f'output {n}')}")
            elif each.kind == "detached input":
                outputs[n] = w.local("detached")
                w.add(f"{outputs[n]} = {self._wrappers[each.of]}.detach()")
        for n, each in enumerate(results.outputs):
            if each.kind in ("view of input", "view of output"):
                base = self._wrappers[each.of] if each.kind == "view of input" else outputs[each.of]
                view = w.constant("view", results.views[n])
                outputs[n] = w.local("viewed")
                w.add(f"with {'enable_grad' if each.requires_grad else 'no_grad'}():")
                w.add(f"    {outputs[n]} = view_again({view}, {base})")
        for n, each in enumerate(results.outputs):
            if each.kind == "same":
                outputs[n] = outputs[each.of]
        new = {str(outputs[n]): each for n, each in enumerate(all_made) if each.kind == "new" and each.spec}
        self._watch(list(new), [name for name, each in new.items() if each.passes])
        w.add(f"return {write_result(w, results.tree, [str(text) for text in outputs[:count]])}")

    def _watch(self, made: list[str], passing: list[str]) -> None:
        """Write that the backward looks at the versions of wrappers, given ones and those that were made."""
        values = {write.input: write.value for write in self.results.writes if write.value is not None}
        watched = [f"({name}, ())" for name in made]
        for k, (item, wrapper) in enumerate(zip(self.target.inputs, self._wrappers, strict=True)):
            if item.spec is not None and item.same_as == k:
                value = values.get(k)
                parts = range(value.first, value.first + item.spec.count) if value is not None else ()
                watched.append(f"({wrapper}, [{', '.join(f'out[{n}].detach()' for n in parts)}])")
        self.w.namespace["watch"] = watch
        results = f"(*out, {', '.join(passing)})" if passing else "out"
        self.w.add(f"watch({results}, [{', '.join(watched)}])")

    def _made(self, each: SubclassOutput, name: str) -> str:
        """Write how a new wrapper is made."""
        w, spec = self.w, each.spec
        if spec is None:
            return f"out[{each.first}]"
        parts = [f"out[{each.first + n}]" for n in range(spec.count)]
        if each.passes:
            return f"taken({parts[0]})"
        if not each.requires_grad:
            return self._together(spec, parts)
        given = w.constant("spec", spec), w.constant("gradient", Gradient(name, each.tangent))
        return f"Wrap({', '.join([*given, '0', 'False', *parts])})"

    def _part(self, name: str, part: int | SubclassSpec | Opaque, parts: list[str]) -> str:
        if isinstance(part, Opaque):
            return self.w.constant(name, part.value)
        return parts[part] if isinstance(part, int) else self._together(part, parts)

    def _together(self, spec: SubclassSpec, parts: list[str]) -> str:
        inner = ", ".join(f"{name!r}: {self._part(name, part, parts)}" for name, part in spec.parts)
        context = "None" if spec.context is None else self.w.constant("context", spec.context)
        kind = self.w.constant(spec.type.__name__, spec.type)
        size, stride = self._layout(spec.layout, parts)
        return f"{kind}.__tensor_unflatten__({{{inner}}}, {context}, {size}, {stride})"


def _sizes_of_inputs(item: SubclassInput) -> Iterator[SizeOfInputs]:
    for _, size in item.gradient.anchors if isinstance(item.gradient, AnchoredGradient) else ():
        yield from (n for n in size if isinstance(n, SizeOfInputs))


def _leaves_of(tree: nesting.Tree) -> int:
    return sum(_leaves_of(child) for child in tree.children) if isinstance(tree, nesting.Node) else 1
