"""The course's tools: predict what a program does and see, practice, exercises.

In order: `truth` (what is true of a call), `prediction` (questions, and an answer beside the truth), `programs`
(endless programs), `exercises`, `course`, `course_again` and `wild` (the pages' exercises), `families` and `steps` (a
reader's compiler), `kept` (what was done), `windows` (which element lies where in a storage), `code` (what a report
holds), `shown` (tables), `plots` (the style of figures).
"""

from __future__ import annotations

import aotlab.teach.course  # their exercises enter themselves
import aotlab.teach.course_again
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
