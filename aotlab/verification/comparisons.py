"""The records of a comparison: one observable, one difference, and the whole verification of a function."""

from __future__ import annotations

import html
from dataclasses import dataclass

import pandas as pd

from aotlab.report.text import tolerance_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The comparison of one observable.

    ``kind`` is the kind of the observable (``"value"``, ``"stride"``, …). ``subject`` names the tensor or the call that
    has it (``"out[0]"``). ``expected`` and ``actual`` are the texts of the observable in eager and in the engine.
    ``call`` counts the calls from 1. ``sentence`` describes the difference and is empty if ``equal``.

    Three fields are set only for tensor values. ``tolerance`` names the rule by which the values were compared.
    ``absolute`` is the largest difference from eager. ``relative`` is that difference divided by the largest element of
    eager's value, or 0 if all its elements are zero.
    """

    call: int
    kind: str
    subject: str
    expected: str
    actual: str
    equal: bool
    sentence: str = ""
    tolerance: str = ""
    absolute: float | None = None
    relative: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One observable in which an engine differs from eager. `Comparison` explains the fields."""

    kind: str
    subject: str
    expected: str
    actual: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of a verification. Its truth value is True if nothing differs.

    Attributes
    ----------
    subject
        The name of the function that was verified, with engine and backend.
    comparisons
        One comparison for every observable of every call.
    refused
        A sentence that says why the engine refused the function. None if the engine did not refuse it.
    ran_eagerly
        How many calls the engine ran eagerly instead of compiling them. These calls agree with eager, but they do not
        test the engine.
    """

    subject: str
    comparisons: tuple[Comparison, ...]
    refused: str | None = None
    ran_eagerly: int = 0

    @property
    def ok(self) -> bool:
        """Whether all observables are equal."""
        return all(row.equal for row in self.comparisons)

    @property
    def differences(self) -> tuple[Difference, ...]:
        """All differences, in the order of the comparisons."""
        return tuple(
            Difference(
                kind=row.kind, subject=row.subject, expected=row.expected, actual=row.actual, sentence=row.sentence
            )
            for row in self.comparisons
            if not row.equal
        )

    @property
    def first(self) -> str | None:
        """The first difference as a sentence; None if nothing differs."""
        return next((row.sentence for row in self.comparisons if not row.equal), None)

    @property
    def table(self) -> pd.DataFrame:
        """One row per observable. The columns are the fields of `Comparison`, without ``sentence``."""
        columns = ("kind", "subject", "expected", "actual", "equal", "call", "tolerance", "absolute", "relative")
        table = pd.DataFrame({name: [getattr(row, name) for row in self.comparisons] for name in columns})
        return table.astype({"equal": bool, "call": "int64", "absolute": "float64", "relative": "float64"})

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        count = len(self.comparisons)
        text = f"all {count} observables equal to those of its Python, run eagerly"
        if not self.ok:
            text = f"{len(self.differences)} of {count} observables differ from its Python, run eagerly; {self.first}"
        tolerance = tolerance_words(self.comparisons)
        text += f"; {tolerance}" if tolerance else ""
        if self.ran_eagerly:
            text += f"; {self.ran_eagerly} calls were not compiled and ran eagerly"
        return f"Verification of {self.subject}: {text}"

    def _repr_html_(self) -> str:
        table = self.table
        different, same = (table[table["equal"] == equal].drop(columns="equal") for equal in (False, True))
        parts = [f"<p>{html.escape(repr(self))}</p>"]
        if len(different):
            parts.append(different.to_html(notebook=True, index=False))
        if len(same):
            parts.append(f"<details><summary>{len(same)} equal observables</summary>")
            parts.append(f"{same.to_html(notebook=True, index=False)}</details>")
        return "".join(parts)
