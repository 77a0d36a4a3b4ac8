"""The function as far as it is written: what all the writers of its parts share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aotlab.backends.base import Boxed
from aotlab.capture.call import Call
from aotlab.capture.dedupe import DedupeRecord
from aotlab.capture.synthetic_bases import Base
from aotlab.ir.metadata import InputAliasInfo, OutputAliasInfo, OutputType
from aotlab.partition.stage import PartitionRecord, Split
from aotlab.runtime.backward import Backward
from aotlab.runtime.writer import Writer
from aotlab.trace.live import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the generator puts together.

    ``settings_hold`` and ``tensors_hold`` are torch's C++ guards, of the settings and of the arguments, made while the
    call's own settings were in force.
    ``repeatable`` says that a call whose compiled forward raises can be run again from its beginning; ``exact``, that
    the backend computes bit for bit what eager does.
    """

    call: Call
    dedupe: DedupeRecord
    trace: Trace
    partition: PartitionRecord
    split: Split
    forward: Boxed
    backward: Sequence[Backward]
    settings_hold: Callable[[], bool]
    tensors_hold: Callable[..., bool]
    entry: int
    debug: bool
    repeatable: bool = False
    exact: bool = False


class Draft:
    """The lines so far, and the expressions of what is there at this point of the function.

    Attributes
    ----------
    parts
        What the function is made of; ``trace``, ``meta`` and ``state`` are parts of it.
    w
        The lines of ``run``.
    grad_on
        Whether grad mode is on when the function is called.
    expressions
        Flat position → the expression of that argument.
    results
        Position among the forward outputs → its expression.
    written, changed, moved
        Which of the trace's writes are done, which of the inputs are changed as the function did, and which of those
        have another history than before by something else than a write.
    carriers
        The names of the carriers that are there.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.trace = parts.trace
        self.meta = parts.trace.metadata
        self.state = parts.call.state
        self.w = Writer()
        self.grad_on = bool(dict(self.state.settings)["grad mode"])
        self.expressions: dict[int, str] = {}
        self.results: dict[int, str] = {}
        self.written: set[int] = set()
        self.changed: set[int] = set()
        self.moved: set[int] = set()
        self.carriers: set[str] = set()

    # --- what is there

    @property
    def casts(self) -> bool:
        """Whether autocast is on when the function is called."""
        return any(value for name, value in self.state.settings if name in ("autocast on cpu", "autocast on cuda"))

    def kept(self, k: int) -> str:
        """Return the expression of the kept input ``k``."""
        return self.expressions[self.parts.dedupe.kept[k]]

    def all_kept(self) -> list[str]:
        """Return the expressions of all kept inputs."""
        return [self.expressions[i] for i in self.parts.dedupe.kept]

    def star(self, expressions: Sequence[str]) -> str:
        """Write an argument list, with ``*parameters`` for all the lifted ones where they stand in order."""
        count = self.parts.call.lifted_count
        if count and list(expressions[:count]) == [f"parameters[{i}]" for i in range(count)]:
            return ", ".join(["*parameters", *expressions[count:]])
        return ", ".join(expressions)

    def base_with(self, k: int) -> Base | None:
        """Return the synthetic base of which the kept input ``k`` is a window."""
        for source in self.trace.inputs.sources:
            if isinstance(source, Base) and k in source.members:
                return source
        return None

    def together(self, k: int) -> tuple[int, ...]:
        """Return the kept inputs of which one that is moved gives the others another history."""
        base = self.base_with(k)
        return (k,) if base is None else base.members

    def counts_first(self, k: int) -> bool:
        """Tell whether the version of an input moves, and with it the histories of views, though nothing is written."""
        base = self.base_with(k)
        written = {write.index for write in self.trace.writes}
        return base is not None and self.meta.input_info[k].moves_version and written.isdisjoint(base.members)

    def moved_first(self) -> set[int]:
        """Return the inputs that are moved before any of them is written in a way that autograd sees."""
        later = {
            self.trace.writes[position].index for position in self.trace.roots if position < len(self.trace.writes)
        }
        steps = {i.index for i in self.meta.input_info if i.metadata_steps and i.index not in later}
        return steps | {i.index for i in self.meta.input_info if self.counts_first(i.index)}

    # --- the forward outputs: new values of inputs, then what is returned, then intermediate bases

    def mutated_out(self) -> list[InputAliasInfo]:
        """Return the inputs whose new values are the first forward outputs."""
        return [self.meta.input_info[write.index] for write in self.trace.writes]

    def returned_outputs(self) -> list[OutputAliasInfo]:
        """Return the user's outputs that the graph returns as they are."""
        kinds = (OutputType.NON_ALIAS, OutputType.UNSAFE_VIEW_ALIAS, OutputType.CUSTOM_FUNCTION_VIEW)
        found = [o for o in self.meta.output_info if o.output_type in kinds and o.spec is not None]
        order = {i: n for n, i in enumerate(self.trace.returned_outputs)}
        return sorted(found, key=lambda o: order[o.index])

    def function_view(self, i: int) -> OutputAliasInfo | None:
        """Return the output that the forward output ``i`` is, if a custom Function made it as a view of an input."""
        n = i - len(self.trace.writes)
        if not 0 <= n < len(self.trace.returned_outputs):
            return None
        output = self.meta.output_info[self.trace.returned_outputs[n]]
        return output if output.is_function_view_of_input else None

    def label(self, i: int) -> str:
        """Name the forward output ``i``."""
        kinds = [("new", info.name) for info in self.mutated_out()]
        kinds += [("", o.name) for o in self.returned_outputs()]
        kinds += [("base", str(n)) for n in range(len(self.meta.intermediate_bases))]
        return " ".join(part for part in kinds[i] if part)

    def needs_detach(self, i: int) -> bool:
        """Tell whether forward output ``i`` reaches the caller as a view of something that only the graph knows.

        Made inside the Function, or without grad mode, such a view could not be written in place; an alias of it can.
        """
        return i >= len(self.mutated_out()) and self.trace.is_view(i)

    # --- lines

    def miss(self, conditions: Sequence[str]) -> None:
        """Write that under any of these conditions the entry does not serve the call."""
        self.w.add(f"if {' or '.join(conditions)}:")
        self.w.add("    return MISS")

    def in_context(self, line: str, *, grad_mode: bool | None) -> None:
        """Write a line that runs in this grad mode (None: the one that is on)."""
        w = self.w
        if grad_mode is None:
            w.add(line)
        else:
            w.add("try:")
            w.add(f"    set_grad_mode({grad_mode})")  # in here, since an interrupt may come behind it
            w.add("    " + line)
            w.add("finally:")
            w.add(f"    set_grad_mode({not grad_mode})")

    def with_grad(self, line: str) -> None:
        """Write a line that runs with grad mode on."""
        self.in_context(line, grad_mode=None if self.grad_on else True)
