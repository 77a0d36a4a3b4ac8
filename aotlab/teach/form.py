"""The questions of a prediction as a form of widgets: boxes to tick, and a button that compares."""

from __future__ import annotations

import html
from collections.abc import Callable

from ipywidgets import HTML, Button, Checkbox, HBox, Layout, RadioButtons, VBox, Widget

from aotlab.teach.prediction import QUESTIONS, Prediction

#: What gives the answer that a part of the form holds.
Read = Callable[[], object]


def form(prediction: Prediction) -> VBox:
    """Make the form; a click on its button lays what was ticked beside the truth, below it."""
    fields = {key: _field(prediction, key) for key in prediction.ask}
    button = Button(description="Compare", tooltip="Run the program, and compare")
    below = HTML()

    def compare(clicked: Button) -> None:
        below.value = prediction.answer(**{key: read() for key, (_, read) in fields.items()})._repr_html_()

    button.on_click(compare)
    program = HTML(f'<pre style="font-family:monospace">{html.escape(prediction.code)}</pre>')
    return VBox([program, *(part for part, _ in fields.values()), button, below])


def _field(prediction: Prediction, key: str) -> tuple[Widget, Read]:
    """Make the part of the form for one question, and what reads it."""
    question = QUESTIONS[key]
    title = HTML(f"<b>{html.escape(question.ask)}</b>")
    if question.choices:
        radio = RadioButtons(options=[(str(choice), choice) for choice in question.choices], value=None)
        return VBox([title, radio]), lambda: ... if radio.value is None else radio.value
    subjects, names = prediction.subjects(key)
    if not subjects:
        row, read = _boxes("", names)
        return VBox([title, row]), read
    verb = "is" if key == "same" else "with"
    rows = {each: _boxes(f"{each} {verb} ", [name for name in names if name != each]) for each in subjects}
    return VBox([title, *(row for row, _ in rows.values())]), lambda: {each: read() for each, (_, read) in rows.items()}


def _boxes(label: str, names: list[str]) -> tuple[Widget, Read]:
    layout = Layout(width="auto", margin="0 1em 0 0")
    boxes = {name: Checkbox(description=f"{label}{name}", indent=False, layout=layout) for name in names}
    row = HBox(list(boxes.values()), layout=Layout(flex_flow="row wrap"))
    return row, lambda: [name for name, box in boxes.items() if box.value]
