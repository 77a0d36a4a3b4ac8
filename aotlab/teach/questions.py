"""The questions of a prediction, about the writes, the aliases, the saved tensors and the results of a call."""

from __future__ import annotations

from dataclasses import dataclass

from aotlab.teach.truth import COMPUTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question about a call.

    ``ask`` is its text, and ``example`` an example of an answer. ``choices`` are all possible answers, if there are
    only a few. ``yes`` and ``no`` are the words for the facts True and False in the table of the answers.
    """

    ask: str
    example: str
    yes: str = ""
    no: str = ""
    choices: tuple[object, ...] = ()


#: Keyword -> question, in the order of the table.
QUESTIONS = {
    "raises": Question(
        ask="Does it raise, and when?", example='"no", "call" or "backward"', choices=("no", "call", "backward")
    ),
    "writes": Question(
        ask="Into the memory of which inputs does it write?",
        example='"x"', yes="written", no="not written",
    ),
    "metadata": Question(
        ask="Which inputs have another shape, other strides or another offset afterwards?",
        example='"x"', yes="changed", no="not changed",
    ),
    "storage": Question(
        ask="Which inputs have another storage, or a storage of another size, afterwards?",
        example='"x"', yes="changed", no="not changed",
    ),
    "shares": Question(
        ask="Which result shares its storage with which input or other result?", example='{"out[0]": "x"}'
    ),
    "same": Question(
        ask="Which result is the same tensor as an input or another result?", example='{"out[0]": "x"}'
    ),
    "saved": Question(
        ask=f'Which inputs are saved for the backward? Add "{COMPUTED}" if a computed value is saved, too.',
        example=f'"x, {COMPUTED}"', yes="saved", no="not saved",
    ),
    "grad_none": Question(
        ask="Which inputs require grad and have `.grad` None after a backward of all results?",
        example='"x"', yes="None", no="a tensor",
    ),
    "recompiles": Question(ask="Is it compiled again for the second call?", example="True", choices=(True, False)),
}  # fmt: skip
