"""What the words on the page mean: how lines run, how inputs are mutated, how outputs share memory."""

from __future__ import annotations

from aotlab.ir.metadata import MutationType, OutputType
from aotlab.report.markup import Markup, join
from aotlab.report.model import Report
from aotlab.report.parts import cell, fold, grid, heading, mark

#: How lines of a cell run, with the tone of the mark.
WAYS: dict[str, tuple[str, str]] = {
    "compiled": ("good", "Compiled graphs ran it, at least in part."),
    "eager": ("warn", "It was handed to the compiler, which compiled nothing of it: it ran as without aotlab."),
    "python": ("", "It was not handed to the compiler: Python runs such lines, and graphs between them."),
    "not run": ("", "The cell did not get there, or the function was not called."),
}

MUTATIONS: dict[str, str] = {
    "data mutated": "Its values were written.",
    "metadata mutated": "Its sizes, strides or offset changed.",
    "storage replaced": "It was given other memory.",
    "hidden from autograd": "Each write went through detach() or the like, so that autograd knows nothing of it.",
    "under no_grad": "Each write happened under no_grad or inference_mode.",
    MutationType.NOT_MUTATED.value: "It is as it was.",
    MutationType.MUTATED_IN_GRAPH.value: "The compiled graph writes the new values itself.",
    MutationType.MUTATED_OUT_GRAPH.value: "The graph returns the new values; the epilogue behind it writes them back.",
    "outside of the graphs": "Python, or autograd in a backward, wrote it: no compiled graph did.",
    "written through": "It shares bytes with a tensor of that name, which was written.",
}

OUTPUTS: dict[OutputType, str] = {
    OutputType.NON_ALIAS: "It has memory of its own.",
    OutputType.ALIAS_OF_INPUT: "It is a view of an input: what is written into one shows in the other.",
    OutputType.IS_INPUT: "It is the caller's own tensor.",
    OutputType.ALIAS_OF_INTERMEDIATE_SAVE_AS_OUTPUT: (
        "It is a view of a tensor made inside. The graph returns that tensor as well, and the epilogue takes the view."
    ),
    OutputType.ALIAS_OF_INTERMEDIATE: "It is one more view of such a tensor, which an earlier output brought along.",
    OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT: (
        "It is a view of a tensor made inside that is an output of the function's own."
    ),
    OutputType.UNSAFE_VIEW_ALIAS: "An op that looks like a view made it; nobody sees its base, so it counts as new.",
}


def legend(report: Report) -> Markup | None:
    """Explain the words that the page uses; None where there is nothing that they could be about."""
    graphs = any(frame.graphs for frame in report.frames)
    parts = report.cell is not None and bool(report.cell.parts)
    if not graphs and not parts:
        return None
    ways = [[cell(mark(way, tone)), cell(text, kind="words")] for way, (tone, text) in WAYS.items()]
    mutations = [[cell(word), cell(text, kind="words")] for word, text in MUTATIONS.items()]
    outputs = [[cell(kind.value), cell(text, kind="words")] for kind, text in OUTPUTS.items()]
    content = join(
        join(heading("How a line ran"), grid(("mark", "meaning"), ways)) if parts else None,
        heading("How a tensor was mutated"),
        grid(("word", "meaning"), mutations),
        heading("How an output relates to inputs and to other outputs", "the eight types"),
        grid(("type", "meaning"), outputs),
    )
    return fold("What the words mean", "lines, mutations, outputs", content)
