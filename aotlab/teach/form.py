"""A form of widgets for the questions of a prediction: boxes to tick, and a button that compares the answers."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping

from ipywidgets import HTML, Button, Checkbox, HBox, Layout, VBox, Widget

from aotlab.teach.questions import QUESTIONS
from aotlab.teach.shown import Shown, marked

#: A function that reads the answer from a part of the form.
Read = Callable[[], object]
#: For one question: the results that it asks about (none if it is about inputs), and the names that an answer may
#: contain.
Subjects = tuple[list[str], list[str]]


def form(program: str, asked: Mapping[str, Subjects], answer: Callable[..., Shown]) -> VBox:
    """Make the form for some questions about a program.

    ``asked`` has the questions' keywords, such as ``"writes"``, and their subjects. A click on the button of the form
    passes the ticked boxes to ``answer`` and shows the reply of ``answer`` below the form.
    """
    fields = {key: _field(key, *subjects_and_names) for key, subjects_and_names in asked.items()}
    button = Button(description="Compare", tooltip="Run the program, and compare")
    below = HTML()

    def compare(clicked: Button) -> None:
        below.value = answer(**{key: read() for key, (_, read) in fields.items()})._repr_html_()

    button.on_click(compare)
    code = HTML(f'<pre style="font-family:monospace">{html.escape(program)}</pre>')
    return VBox([code, *(part for part, _ in fields.values()), button, below])


def _field(key: str, subjects: list[str], names: list[str]) -> tuple[Widget, Read]:
    """Make the part of the form for one question, and a function that reads the answer from it."""
    question = QUESTIONS[key]
    title = HTML(f"<b>{marked(question.ask)}</b>")
    if question.choices:
        row, read = _boxes("", list(map(str, question.choices)))
        for box in row.children:  # not radio buttons, because the notebook handles the arrow keys
            box.observe(lambda change: _only(change.owner, row), "value")
        return VBox([title, row]), lambda: next((each for each in question.choices if str(each) in read()), ...)
    if not subjects:
        row, read = _boxes("", names)
        return VBox([title, row]), read
    verb = "is" if key == "same" else "with"
    # Offer only names before the result, so that the form asks about each pair of results once.
    rows = {each: _boxes(f"{each} {verb} ", names[: names.index(each)]) for each in subjects}
    return VBox([title, *(row for row, _ in rows.values())]), lambda: {each: read() for each, (_, read) in rows.items()}


def _only(box: Checkbox, row: HBox) -> None:
    """If this box was ticked, untick the other boxes of its row."""
    for each in row.children if box.value else ():
        each.value = each is box


def _boxes(label: str, names: list[str]) -> tuple[HBox, Callable[[], list[str]]]:
    layout = Layout(width="auto", margin="0 1em 0 0")
    boxes = {name: Checkbox(description=f"{label}{name}", indent=False, layout=layout) for name in names}
    row = HBox(list(boxes.values()), layout=Layout(flex_flow="row wrap"))
    return row, lambda: [name for name, box in boxes.items() if box.value]
