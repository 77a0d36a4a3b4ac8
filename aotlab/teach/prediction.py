"""Predictions: questions about a program, and a comparison of the answers with a run of the program."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from aotlab import _torch as torch_internals
from aotlab.errors import AotlabError, UsageError
from aotlab.teach.questions import QUESTIONS, Question
from aotlab.teach.shown import Row, Shown
from aotlab.teach.truth import COMPUTED, Fact, Facts, Truth, compiled_facts, eager_truth, listed, tensors_of, window

if TYPE_CHECKING:
    from ipywidgets import Widget


_NOTHING = {"", "none", "nothing"}
#: The questions about results. The other ones are about inputs or about the whole call.
_OF_RESULTS = ("shares", "same")
_UNREAD = "not understood"


class Prediction(Shown):
    """A call, questions about the call, and the reader's answers, which are shown beside the truth.

    Parameters
    ----------
    function, args
        The call.
    ask
        The keywords of the questions.
    again
        The arguments of a second call, for the question ``recompiles``.
    answers
        The reader's answers, by keyword. ``...`` means "not answered yet".
    program
        The text that is shown for the call. If it is empty, this is the source of ``function``.
    done
        Called when all questions are answered. Returns a sentence to show.

    Attributes
    ----------
    right
        Whether all questions were answered, and all answers are right.
    answers
        The reader's answers, by question.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        ask: Iterable[str],
        again: tuple[Any, ...] | None = None,
        answers: Mapping[str, object] | None = None,
        program: str = "",
        done: Callable[[Prediction], str] | None = None,
    ) -> None:
        self.function, self.args, self.again = function, args, again
        self.ask = tuple(key for key in QUESTIONS if key in {*ask, *(answers or {})})
        self.answers = {key: value for key, value in (answers or {}).items() if value is not ...}
        self._program, self._done = program, done
        self.right = False
        if self.answers:
            self._compare()
        else:
            self._pose()
            if answers:  # all are `...`: a cell above has asked the questions and shown the program already
                self.title, self.code = f"Not answered yet: {listed(self.ask)}.", ""

    def answer(self, **answers: object) -> Prediction:
        """Answer more questions, in addition to the questions that were answered before; see `predict`."""
        _check(answers)
        return Prediction(
            self.function, self.args, ask=self.ask, again=self.again, answers={**self.answers, **answers},
            program=self._program, done=self._done,
        )  # fmt: skip

    def form(self) -> Widget:
        """Return the questions as widgets, to answer with mouse or keyboard. This needs ipywidgets."""
        from aotlab.teach.form import form

        return form(self.code, {key: self.subjects(key) for key in self.ask}, self.answer)

    def subjects(self, key: str) -> tuple[list[str], list[str]]:
        """Return the results that a question asks about, and the names that an answer may contain.

        If the question is about results, the call runs, because only a run shows how many results there are.
        """
        inputs = list(tensors_of(self.function, self.args))
        if key not in _OF_RESULTS:
            return [], [*inputs, *([COMPUTED] if key == "saved" else [])]
        return list(self.truth.outputs), [*inputs, *self.truth.outputs]

    @cached_property
    def truth(self) -> Truth:
        """The facts about the call, computed on the first access. They are the solution: predict first."""
        return eager_truth(self.function, self.args)

    def facts(self, key: str) -> Facts:
        """Return the facts that answer a question, by subject, with the reasons."""
        if key not in ("saved", "recompiles"):
            if key not in self.truth.facts:
                return {"": Fact(value="raises", why=f"there is no answer: {self.truth.facts['raises'][''].why}")}
            return self.truth.facts[key]
        try:
            return self._compiled[key]
        except AotlabError as error:
            return {"": Fact(value="eager", why=f"it runs eagerly: {error}")}
        except Exception as error:  # noqa: BLE001  # the program may raise anything
            return {"": Fact(value="raises", why=f"there is no answer: the call raises {type(error).__name__}")}

    @cached_property
    def _compiled(self) -> dict[str, Facts]:
        return compiled_facts(self.function, self.args, self.again)

    def _pose(self) -> None:
        calls = [self.args] if self.again is None else [self.args, self.again]
        self.code = "\n\n".join([self._program or _source(self.function), *_described(self.function, calls)])
        self.head = ("question", "", "answer as in")
        inputs = list(tensors_of(self.function, self.args))
        examples = {key: QUESTIONS[key].example.replace('"x"', f'"{(inputs or ["x"])[-1]}"') for key in self.ask}
        self.rows = [(key, QUESTIONS[key].ask, f"{key}={examples[key]}") for key in self.ask]
        self.note = '`""` stands for none.' if any(not QUESTIONS[key].choices for key in self.ask) else ""
        if len(inputs) > 1 and self.note:
            self.note = f'Two names are written as in `"{", ".join(inputs[:2])}"`; {self.note}'
        if any(key in _OF_RESULTS for key in self.ask):
            self.note += " Results are called `out[0]`, `out[1]`, …; a single one is `out`, too."

    def _compare(self) -> None:
        left = [key for key in self.ask if key not in self.answers]
        rows = [row for key, answer in self.answers.items() for row in self._judge(key, answer)]
        unread = [row[0] for row in rows if row[-2] == _UNREAD]
        hits, of = sum(row[-2] == "right" for row in rows), len(rows) - len(unread)
        self.right = not left and not unread and hits == of
        self.title = (
            f"All right ({hits} of {hits})." if hits == of and not unread else f"{hits} of {of} right." if of else ""
        )
        self.title += f" Not understood, so not counted: {listed(unread)}." if unread else ""
        self.head, self.rows = ("question", "of", "you say", "it is", "", "why"), rows
        self.note = f"Not answered yet: {listed(left)}." if left else ""
        if self._done is not None and not left and not unread:
            self.note = self._done(self)

    def _judge(self, key: str, answer: object) -> list[Row]:
        facts = self.facts(key)
        try:
            said = self._understood(key, answer, facts)
        except UsageError as error:
            return [(key, "", str(answer), "", _UNREAD, str(error))]
        question, rows = QUESTIONS[key], list[Row]()
        before = [*self.truth.inputs] if key in _OF_RESULTS else []
        for subject, fact in facts.items():
            value = said.get(subject)
            right = self._least(subject, value) == self._least(subject, fact.value)
            words = [_word(question, each, before) for each in (fact.value if right else value, fact.value)]
            before.append(subject)
            rows.append((key, subject, *words, "right" if right else "miss", "" if right else fact.why))
        return rows

    def _least(self, subject: str, value: object) -> object:
        """Reduce a group of related tensors to its inputs or, without inputs, to its first result.

        So if an answer wrongly relates two results, only the row of the second result is wrong.
        """
        if not isinstance(value, frozenset):
            return value
        return value & {*self.truth.inputs} or next(name for name in self.truth.outputs if name in {subject, *value})

    def _understood(self, key: str, answer: object, facts: Facts) -> dict[str, object]:
        """Convert an answer into the form of the facts: a value for each subject."""
        if QUESTIONS[key].choices:
            if answer not in QUESTIONS[key].choices or isinstance(answer, bool) != (key == "recompiles"):
                raise UsageError(f"the answer is {' or '.join(map(repr, QUESTIONS[key].choices))}")
            return {"": answer}
        if "" in facts:  # the call raises or is not compiled, so there are no facts to compare with
            return {}
        if key not in _OF_RESULTS:
            names = self._names(answer, facts)
            return {subject: subject in names for subject in facts}
        everything = dict.fromkeys([*self.truth.inputs, *self.truth.outputs])
        if not isinstance(answer, Mapping):
            names = self._names(answer, everything)
            if names and len(facts) > 1:
                raise UsageError(f"there are {len(facts)} results: say which, as in {{{next(iter(facts))!r}: …}}")
            answer = dict.fromkeys(facts, names)
        groups = [{*self._names([one], facts), *self._names(names, everything)} for one, names in answer.items()]
        input_facts = self.truth.input_facts[key].items()
        groups += [{one, *fact.value} for one, fact in input_facts if isinstance(fact.value, frozenset)]
        for group in groups:  # merge groups with a common name
            for other in groups:
                if group & other:
                    group |= other
                    other |= group
        together = {one: group for group in groups for one in group}
        return {subject: frozenset(together.get(subject, set())) - {subject} for subject in facts}

    def _names(self, answer: object, possible: Iterable[str]) -> list[str]:
        """Read names from text, from a list, or from the tensors themselves."""
        tensors = tensors_of(self.function, self.args)
        if answer is None:
            return []
        if isinstance(answer, str):
            parts: list[object] = [part for part in answer.replace(",", " ").split() if part.lower() not in _NOTHING]
        else:
            parts = [answer] if isinstance(answer, torch.Tensor) or not isinstance(answer, Iterable) else list(answer)
        names = []
        for part in parts:
            named = next((name for name, tensor in tensors.items() if tensor is part), part)
            if isinstance(named, str) and named in {"out", "out[0]"} - {*possible} and len(self.truth.outputs) == 1:
                (named,) = self.truth.outputs  # a single result, alone or in a tuple
            if not isinstance(named, str) or named not in possible:
                shown = f"`{named}`" if isinstance(named, str) else f"an answer of type {type(named).__name__}"
                raise UsageError(f"{shown} is not one of {listed(list(possible))}")
            names.append(named)
        return names


def predict(
    function: Callable[..., Any],
    *args: Any,
    ask: str | Iterable[str] | None = None,
    again: tuple[Any, ...] | None = None,
    **answers: object,
) -> Prediction:
    """Ask questions about a call, or compare answers with the truth.

    Without answers, nothing runs: the program and the questions are shown, with an example answer to each. With
    answers, the call runs on copies, eagerly and, if a question needs it, compiled by aotlab. Your tensors do not
    change.

    Parameters
    ----------
    function, *args
        A function of tensors, or a module, and its arguments.
    ask
        The questions, as ``"writes shares"`` or as a list. None chooses the questions that make sense for the call.
    again
        The arguments of a second call, for the question ``recompiles``.
    **answers
        By question: names of inputs (``writes="x, y"``, or ``""`` for no input), the tensors that each result shares
        with (``shares={"out": "x"}``), or a choice (``raises="no"``). The answer ``...`` means "not answered yet".

    Raises
    ------
    UsageError
        There is no such question. An answer that cannot be understood is not an error: the table says so.

    Examples
    --------
    >>> def step(x):
    ...     row = x[0]
    ...     return row.add_(1)
    >>> predict(step, torch.zeros(2, 3), writes="", shares="x")
    1 of 2 right.
    question  of   you say      it is           why
    writes    x    not written  written  miss   `return row.add_(1)` writes to the memory of 3 of its 6 elements
    shares    out  `x`          `x`      right
    """
    asked = ask.replace(",", " ").split() if isinstance(ask, str) else list(ask or ())
    _check({**dict.fromkeys(asked), **answers})
    if not callable(function):
        raise UsageError(f"predict takes a function and its arguments, not a {type(function).__name__}")
    if ask is None and not answers:
        asked = ["writes", "metadata", "storage", "shares", *(["recompiles"] if again is not None else [])]
        grad = any(tensor.requires_grad for tensor in tensors_of(function, args).values())
        asked += ["saved", "grad_none"] if grad else []
    return Prediction(function, args, ask=asked, again=again, answers=answers)


def _check(keys: Mapping[str, object]) -> None:
    unknown = [key for key in keys if key not in QUESTIONS]
    if unknown:
        raise UsageError(f"there is no question {listed(unknown)}; there are {listed(list(QUESTIONS))}")


def _word(question: Question, value: object, before: list[str]) -> str:
    if value is None or isinstance(value, frozenset):  # show each pair of results once
        return listed([name for name in before if name in (value or ())])
    if isinstance(value, bool) and question.yes:
        return question.yes if value else question.no
    return str(value)


def _source(function: Callable[..., Any]) -> str:
    try:
        return textwrap.dedent(
            inspect.getsource(type(function) if isinstance(function, nn.Module) else function)
        ).strip()
    except (OSError, TypeError):
        return getattr(function, "__name__", repr(function))


def _described(function: Callable[..., Any], calls: list[tuple[Any, ...]]) -> list[str]:
    """Describe the arguments of each call: the window and the storage of each tensor, and its role in autograd."""
    described = list[str]()
    storages: dict[int, int] = {}
    for args in calls:
        lines = ["And in the second call:"] if described else []
        for name, tensor in tensors_of(function, args).items():
            number = storages.setdefault(torch_internals.storage_key(tensor), len(storages))
            grad = ", requires grad" if tensor.requires_grad else ""
            grad += (", a leaf" if tensor.is_leaf else ", no leaf") if grad else ""
            dtype = str(tensor.dtype).removeprefix("torch.")
            lines.append(f"{name}: {dtype}, {window(tensor)}, in storage {number}{grad}")
        described.append("\n".join(lines))
    return described
