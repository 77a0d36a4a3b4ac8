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

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from aotlab import _torch as internals
from aotlab.capture import nesting
from aotlab.ir.subclasses import Layout, Opaque, SizeOfPart, SubclassInput, SubclassOutput, SubclassRecord, SubclassSpec
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
        self._texts = [f"lifted[{n}]" for n in range(target.lifted_count)]  # how each value of a call is read

    def lines(self) -> list[str]:
        self._prologue()
        self._epilogue()
        return self.w.lines

    def _miss(self, condition: str) -> None:
        self.w.add(f"if {condition}:")
        self.w.add("    return MISS")

    # --- before

    def _prologue(self) -> None:
        w, target = self.w, self.target
        groups = self._read()
        for k, (item, wrapper) in enumerate(zip(target.inputs, self._wrappers, strict=True)):
            if item.same_as != k:
                self._miss(f"{wrapper} is not {self._wrappers[item.same_as]}")
                groups.append(groups[item.same_as])
                continue
            parts = self._check(item, wrapper)
            tensors = self._given(k, item, wrapper, parts)
            groups.append(f"({', '.join(tensors)}, {w.constant('fact', item.fact)})")
        distinct = [name for k, name in enumerate(self._wrappers) if target.inputs[k].same_as == k]
        if len(distinct) > 1:
            self._miss(f"len({{{', '.join(f'id({name})' for name in distinct)}}}) != {len(distinct)}")
        w.add(f"out = body({', '.join(self._arguments(groups))})")
        self._miss("out is MISS")

    def _read(self) -> list[str]:
        """Write how the wrappers of a call are found."""
        w, target = self.w, self.target
        counted = [n for item in target.inputs for n in item.counted]
        read = {*(item.position for item in target.inputs), *counted}
        if any(n < target.lifted_count for n in read):
            w.add(f"lifted = {w.call('read_lifted', target.target.lifter())}")
        direct = {place: text for text, place in self._children() if place is not None}
        self._is_flat = all(n < target.lifted_count or n in direct for n in read)
        if not self._is_flat:
            w.namespace["flatten"] = nesting.flatten
            w.namespace["unflatten"] = nesting.unflatten
            w.add("leaves, tree = flatten((args, kwargs))")
            self._miss(f"tree != {w.constant('nesting', target.tree)}")
        else:
            args, kwargs = target.tree.children
            missing = (f" or {key!r} not in kwargs" for key in kwargs.keys)
            self._miss(f"len(args) != {len(args.children)}{''.join(missing)}")
        for n in range(_leaves_of(target.tree)):
            self._texts.append(direct.get(target.lifted_count + n, "") if self._is_flat else f"leaves[{n}]")
        for item in target.inputs:
            self._wrappers.append(w.local(item.name))
            w.add(f"{self._wrappers[-1]} = {self._texts[item.position]}")
        for n in dict.fromkeys(counted):
            self._miss(f"not isinstance({self._texts[n]}, torch.Tensor)")
        return []

    def _children(self) -> Iterator[tuple[str, int | None]]:
        """Yield how each argument is read, and its position if it is no container."""
        args, kwargs = self.target.tree.children
        texts = [*(f"args[{n}]" for n in range(len(args.children))), *(f"kwargs[{key!r}]" for key in kwargs.keys)]
        place = self.target.lifted_count
        for text, tree in zip(texts, (*args.children, *kwargs.children), strict=True):
            yield text, place if isinstance(tree, nesting.Leaf) else None
            place += _leaves_of(tree)

    def _check(self, item: SubclassInput, wrapper: str) -> list[str]:
        """Write the guards of a wrapper and how it is taken apart; return the local names of its parts."""
        w = self.w
        grad = f"{wrapper}.requires_grad is not {item.requires_grad} or {wrapper}.is_leaf is not {item.is_leaf}"
        if item.spec is None:
            self._miss(f"not isinstance({wrapper}, torch.Tensor) or {grad}")
            return [wrapper]
        parts = [w.local(path) for path in item.spec.paths(wrapper)]
        todo = [(item.spec, wrapper)]
        while todo:
            spec, text = todo.pop()
            self._miss(f"type({text}) is not {w.constant(spec.type.__name__, spec.type)}")
            names, context = w.local("names"), w.local("context")
            w.add(f"{names}, {context} = {text}.__tensor_flatten__()")
            expected = w.constant("context", spec.context) if spec.context is not None else "None"
            differs = f"{context} {'is not' if spec.context is None else '!='} {expected}"
            self._miss(f"[*{names}] != {[name for name, _ in spec.parts]!r} or {differs}")
            for name, part in spec.parts:
                if isinstance(part, int):
                    w.add(f"{parts[part]} = {text}.{name}")
                elif isinstance(part, SubclassSpec):
                    inner = w.local(f"{text}_{name}")
                    w.add(f"{inner} = {text}.{name}")
                    todo.append((part, inner))
                else:
                    self._miss(f"{text}.{name} is not {w.constant(name, part.value)}")
        conditions = [grad, *self._of_layout(item.spec, wrapper, parts)]
        self._miss(f"{' or '.join(conditions)}")
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

    @staticmethod
    def _sizes(values: Sequence[int | SizeOfPart], parts: list[str], one: str = "shape[{}]") -> str:
        """Write sizes, or what ``one`` asks a part."""
        found = ((v, 0) if isinstance(v, int) else (parts[v.part], v.dim) for v in values)
        items = [
            str(v) if isinstance(v, int) else f"{v}.{one.format(dim) if dim >= 0 else 'numel()'}" for v, dim in found
        ]
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
        all_parts = [*parts, *self._texts]
        sizes = [(w.constant("dtype", dtype), self._sizes(size, all_parts)) for dtype, size in item.gradient.anchors]
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
        if not self._is_flat:
            for position, group in of_place.items():
                if position >= count:
                    w.add(f"leaves[{position - count}] = {group}")
            w.add("args, kwargs = unflatten(leaves, tree)")
            return f"({', '.join(lifted)}{',' * (len(lifted) == 1)}) + args" if lifted else "args", "kwargs"
        given = [(text, text if place is None else of_place.get(place, text)) for text, place in self._children()]
        count = len(target.tree.children[0].children)
        items = [*lifted, *(new for _, new in given[:count])]
        named = "".join(f", {text[7:-1]}: {new}" for text, new in given[count:] if new != text)
        return f"({', '.join(items)}{',' * (len(items) == 1)})", f"{{**kwargs{named}}}" if named else "kwargs"

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


def _leaves_of(tree: nesting.Tree) -> int:
    return sum(_leaves_of(child) for child in tree.children) if isinstance(tree, nesting.Node) else 1
