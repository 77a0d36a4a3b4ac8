"""The tools of the course: predictions, practice and exercises.

The modules, in reading order:

- `truth` computes the facts about a call;
- `prediction` asks the questions of `questions` about a call, and compares the answers with these facts;
- `programs` draws programs for practice;
- `exercises` defines exercises; `course`, `course_again`, `wild` and `observed` contain the exercises of the pages;
- `families` and `steps` test the compiler that a reader writes;
- `progress_file` stores the reader's progress;
- `windows` draws a map of a storage: the position of each element of some tensors;
- `code` shows code from a report;
- `shown` formats tables, `plots` sets the style of figures, and `form` makes a form of widgets.
"""

from __future__ import annotations

import aotlab.teach.course  # importing these modules registers their exercises
import aotlab.teach.course_again
import aotlab.teach.observed
import aotlab.teach.steps
import aotlab.teach.wild  # noqa: F401
from aotlab.teach.code import code
from aotlab.teach.exercises import Exercise, exercise, new_exercise, progress, require
from aotlab.teach.families import FAMILIES, check_compiler
from aotlab.teach.plots import PLOT
from aotlab.teach.prediction import Prediction, predict
from aotlab.teach.programs import practice
from aotlab.teach.windows import storage_map

__all__ = [
    "FAMILIES",
    "PLOT",
    "Exercise",
    "Prediction",
    "check_compiler",
    "code",
    "exercise",
    "new_exercise",
    "practice",
    "predict",
    "progress",
    "require",
    "storage_map",
]
