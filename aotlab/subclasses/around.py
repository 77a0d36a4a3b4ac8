"""Write the code around the *body*, the compiled function of plain tensors.

The code unwraps the arguments before the body runs, and wraps the results afterwards. It is one straight-line function.
For a `TwoTensor`::

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
from aotlab.ir.subclass_records import (
    Layout,
    Opaque,
    SizeOfPart,
    SubclassInput,
    SubclassOutput,
    SubclassRecord,
    SubclassSpec,
)
from aotlab.runtime.draft import Writer
from aotlab.runtime.output_expressions import write_result
from aotlab.subclasses.edges import Anchor, GradientLayout, Unwrap, Wrap, detect_writes
from aotlab.subclasses.rewrap import take_wrapper
from aotlab.subclasses.target import UnwrappedTarget

Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def write_around(target: UnwrappedTarget, body: Run, name: str) -> tuple[SubclassRecord, Run]:
    """Return the record and the function that serves an entry's calls, wrappers included.

    ``body`` is the run-time function of the body (see the module). ``name`` is the name of the user's function, for
    tracebacks.
    """
    around = _Around(target, body)
    source = "\n".join(["def run(args, kwargs):", *around.lines()]) + "\n"
    exec(compile(source, f"<aotlab {name} around>", "exec"), around.w.namespace)
    results = target.results
    assert results is not None
    record = SubclassRecord(
        inputs=tuple(target.inputs),
        outputs=tuple(results.outputs),
        results=tuple(results.shown),
        extra_bases=tuple(results.extra_bases),
        writes=tuple(results.writes),
        source=source,
    )
    return record, around.w.namespace.pop("run")


class _Around:
    def __init__(self, target: UnwrappedTarget, body: Run) -> None:
        assert target.results is not None
        self.target, self.results = target, target.results
        namespace = {
            "body": body, "Unwrap": Unwrap.apply, "Wrap": Wrap.apply, "Anchor": Anchor.apply, "no_grad": torch.no_grad,
            "enable_grad": torch.enable_grad, "view_again": internals.view_again, "flatten": nesting.flatten,
            "unflatten": nesting.unflatten, "take_wrapper": take_wrapper, "detect_writes": detect_writes,
            "increment_version": torch.autograd.graph.increment_version,
        }  # fmt: skip
        # reserved names: a variable that is named after an argument of the user must not replace one of them
        self.w = Writer(("out", "tree", "id", "isinstance", *namespace))
        self.w.namespace.update(namespace)
        self._wrappers: list[str] = []  # the local variable of each input
        self._texts = [f"lifted[{n}]" for n in range(target.lifted_count)]  # the expression for each value of a call

    def lines(self) -> list[str]:
        self._prologue()
        self._epilogue()
        return self.w.lines

    def _miss(self, condition: str) -> None:
        self.w.add(f"if {condition}:")
        self.w.add("    return MISS")

    # --- before the body

    def _prologue(self) -> None:
        w, target = self.w, self.target
        groups = self._read()
        for k, (item, wrapper) in enumerate(zip(target.inputs, self._wrappers, strict=True)):
            if item.same_as != k:
                self._miss(f"{wrapper} is not {self._wrappers[item.same_as]}")
                groups.append(groups[item.same_as])
                continue
            parts = self._check(item, wrapper)
            tensors = self._body_tensors(k, item, wrapper, parts)
            groups.append(f"({', '.join(tensors)}, {w.constant('fact', item.fact)})")
        distinct = [name for k, name in enumerate(self._wrappers) if target.inputs[k].same_as == k]
        if len(distinct) > 1:
            self._miss(f"len({{{', '.join(f'id({name})' for name in distinct)}}}) != {len(distinct)}")
        w.add(f"out = body({', '.join(self._arguments(groups))})")
        self._miss("out is MISS")

    def _read(self) -> list[str]:
        """Write the lines that store the wrappers among the arguments of a call in local variables.

        Returns an empty list. The caller adds to it, for each wrapper, the expression that replaces the wrapper among
        the body's arguments.
        """
        w, target = self.w, self.target
        counted = [n for item in target.inputs for n in item.counted]
        read = {*(item.position for item in target.inputs), *counted}
        if any(n < target.lifted_count for n in read):
            w.add(f"lifted = {w.call('read_lifted', target.target.lifter())}")
        direct = {place: text for text, place in self._children() if place is not None}
        self._is_flat = all(n < target.lifted_count or n in direct for n in read)
        if not self._is_flat:
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
        """Yield the expression for each argument and its flat position, which is None for a container."""
        args, kwargs = self.target.tree.children
        texts = [*(f"args[{n}]" for n in range(len(args.children))), *(f"kwargs[{key!r}]" for key in kwargs.keys)]
        place = self.target.lifted_count
        for text, tree in zip(texts, (*args.children, *kwargs.children), strict=True):
            yield text, place if isinstance(tree, nesting.Leaf) else None
            place += _leaves_of(tree)

    def _check(self, item: SubclassInput, wrapper: str) -> list[str]:
        """Write the guards of a wrapper and the lines that unwrap it; return the local variables of its parts."""
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
        dims_read = {(n.part, n.dim) for n in (*spec.layout.size, *spec.layout.stride) if isinstance(n, SizeOfPart)}
        conditions = [f"{parts[part]}.dim() <= {dim}" for part, dim in dict(sorted(dims_read)).items()]
        conditions += [f"{text}.shape != {size}", f"{text}.stride() != {stride}"]
        for name, part in spec.parts:
            if isinstance(part, SubclassSpec):
                conditions += self._of_layout(part, f"{text}.{name}", parts)
        return conditions

    @staticmethod
    def _sizes(values: Sequence[int | SizeOfPart], parts: list[str], one: str = "shape[{}]") -> str:
        """Return the text of a tuple of sizes or strides.

        ``parts`` are the variables of the parts. ``one`` is the format string of the code that reads a size (or a
        stride) of a part in a dimension.
        """
        sources = ((v, 0) if isinstance(v, int) else (parts[v.part], v.dim) for v in values)
        items = [
            str(v) if isinstance(v, int) else f"{v}.{one.format(dim) if dim >= 0 else 'numel()'}" for v, dim in sources
        ]
        return f"({', '.join(items)}{',' * (len(items) == 1)})"

    def _layout(self, layout: Layout, parts: list[str]) -> tuple[str, str]:
        """Return the expressions for the sizes and strides of a wrapper."""
        return self._sizes(layout.size, parts), self._sizes(layout.stride, parts, "stride({})")

    def _body_tensors(self, k: int, item: SubclassInput, wrapper: str, parts: list[str]) -> list[str]:
        """Write the lines that compute the body's arguments for input ``k``; return their local variables.

        These arguments begin with the parts of the input. If the gradient of the input has the same parts, `Unwrap`
        computes the parts, so that their gradients flow to the input. Otherwise the parts are detached. If the gradient
        has other parts, one anchor for each part of the gradient follows, and the gradient flows through the anchors.
        """
        w = self.w
        if item.gradient == "parts":
            layout = w.constant("gradient", self.target.gradient_layouts[k])
            w.add("with enable_grad():")
            w.add(f"    {', '.join(parts)}, = Unwrap({wrapper}, {layout})")
            return parts
        detached = [w.local(f"{part}_detached") for part in parts]
        for name, part in zip(detached, parts, strict=True):
            w.add(f"{name} = {part}.detach() if {part}.requires_grad else {part}")
        if item.gradient is None:
            return detached
        all_parts = [*parts, *self._texts]
        sizes = [(w.constant("dtype", dtype), self._sizes(size, all_parts)) for dtype, size in item.gradient.anchors]
        anchors = [w.local(f"{wrapper}_anchor") for _ in sizes]
        arguments = [
            wrapper,
            w.constant("gradient", self.target.gradient_layouts[k]),
            *(f"({d}, {n})" for d, n in sizes),
        ]
        w.add("with enable_grad():")
        w.add(f"    {', '.join(anchors)}, = Anchor({', '.join(arguments)})")
        return [*detached, *anchors]

    def _arguments(self, groups: list[str]) -> tuple[str, str]:
        """Return the expressions for ``args`` and ``kwargs`` of the body.

        ``groups`` has for each wrapper the expression of the tuple that replaces it.
        """
        w, target, count = self.w, self.target, self.target.lifted_count
        of_place = {item.position: group for item, group in zip(target.inputs, groups, strict=True)}
        lifted = [of_place[n] for n in sorted(of_place) if n < count]
        if not self._is_flat:
            for position, group in of_place.items():
                if position >= count:
                    w.add(f"leaves[{position - count}] = {group}")
            w.add("args, kwargs = unflatten(leaves, tree)")
            return f"({', '.join(lifted)}{',' * (len(lifted) == 1)}) + args" if lifted else "args", "kwargs"
        arguments = [(text, text if place is None else of_place.get(place, text)) for text, place in self._children()]
        count = len(target.tree.children[0].children)
        items = [*lifted, *(new for _, new in arguments[:count])]
        named = "".join(f", {text[7:-1]}: {new}" for text, new in arguments[count:] if new != text)
        return f"({', '.join(items)}{',' * (len(items) == 1)})", f"{{**kwargs{named}}}" if named else "kwargs"

    # --- after the body

    def _epilogue(self) -> None:
        w, results = self.w, self.results
        for write in results.writes:
            wrapper = self._wrappers[write.input]
            if write.value is not None:
                value = self._wrapper_of(write.value, "value")
                w.add("with enable_grad():" if write.history else "with no_grad():")
                w.add(f"    {wrapper}.copy_({value})")
            for _ in range(write.versions - (write.value is not None)):
                w.add(f"increment_version({wrapper})")
        count = len(results.outputs)
        outputs: list[str | None] = [None] * (count + len(results.extra_bases))
        results_built = [*results.outputs, *results.extra_bases]
        for n, each in enumerate(results_built):
            if each.kind == "plain":
                outputs[n] = f"out[{each.first}]"
            elif each.kind == "input":
                outputs[n] = self._wrappers[each.of]
            elif each.kind == "new":
                outputs[n] = w.local("made")
                w.add("with enable_grad():" if each.requires_grad else "if True:")
                w.add(f"    {outputs[n]} = {self._wrapper_of(each, f'output {n}')}")
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
        new = {str(outputs[n]): each for n, each in enumerate(results_built) if each.kind == "new" and each.spec}
        self._detect_writes(list(new), [name for name, each in new.items() if each.is_rewrapped])
        w.add(f"return {write_result(w, results.tree, [str(text) for text in outputs[:count]])}")

    def _detect_writes(self, new_wrappers: list[str], rewrapped: list[str]) -> None:
        """Write the call of `detect_writes` for the wrappers among the inputs and the outputs.

        Each wrapper is passed with the tensors, besides its parts, that have the same values: the outputs of the body
        that were copied into it.
        """
        values = {write.input: write.value for write in self.results.writes if write.value is not None}
        watched = [f"({name}, ())" for name in new_wrappers]
        for k, (item, wrapper) in enumerate(zip(self.target.inputs, self._wrappers, strict=True)):
            if item.spec is not None and item.same_as == k:
                value = values.get(k)
                parts = range(value.first, value.first + item.spec.count) if value is not None else ()
                watched.append(f"({wrapper}, [{', '.join(f'out[{n}].detach()' for n in parts)}])")
        results = f"(*out, {', '.join(rewrapped)})" if rewrapped else "out"
        self.w.add(f"detect_writes({results}, [{', '.join(watched)}])")

    def _wrapper_of(self, each: SubclassOutput, name: str) -> str:
        """Return the expression of a new wrapper, or of the plain tensor from the body for a result without a spec.

        ``name`` is the name of the result in errors about its gradient.
        """
        w, spec = self.w, each.spec
        if spec is None:
            return f"out[{each.first}]"
        parts = [f"out[{each.first + n}]" for n in range(spec.count)]
        if each.is_rewrapped:
            return f"take_wrapper({parts[0]})"
        if not each.requires_grad:
            return self._wrap_parts(spec, parts)
        constants = w.constant("spec", spec), w.constant("gradient", GradientLayout(name, each.tangent))
        return f"Wrap({', '.join([*constants, '0', 'False', *parts])})"

    def _part(self, name: str, part: int | SubclassSpec | Opaque, parts: list[str]) -> str:
        if isinstance(part, Opaque):
            return self.w.constant(name, part.value)
        return parts[part] if isinstance(part, int) else self._wrap_parts(part, parts)

    def _wrap_parts(self, spec: SubclassSpec, parts: list[str]) -> str:
        inner = ", ".join(f"{name!r}: {self._part(name, part, parts)}" for name, part in spec.parts)
        context = "None" if spec.context is None else self.w.constant("context", spec.context)
        kind = self.w.constant(spec.type.__name__, spec.type)
        size, stride = self._layout(spec.layout, parts)
        return f"{kind}.__tensor_unflatten__({{{inner}}}, {context}, {size}, {stride})"


def _leaves_of(tree: nesting.Tree) -> int:
    return sum(_leaves_of(child) for child in tree.children) if isinstance(tree, nesting.Node) else 1
