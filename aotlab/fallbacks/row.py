"""A row of the catalogue of eager fallbacks."""

from __future__ import annotations

from dataclasses import dataclass, field

#: The suggestion of most rows about memory.
RETURN_A_NEW_TENSOR = "return a new tensor, or change a clone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """One case in which a call runs eagerly.

    Attributes
    ----------
    id
        A short name in kebab case.
    sentence
        The fact that the engine saw: a clause without a full stop. It may contain fields such as ``{name}``. The code
        that raises the row fills in the fields.
    suggestion
        An imperative clause: the change that lets aotlab compile the program.
    program
        Python source that defines a function ``f`` and its arguments ``args``. A direct call of
        ``aotlab.compile(f, backend="eager")(*args)`` runs eagerly for the reason of this row. The source may also
        define ``options`` (more keyword arguments of `aotlab.compile`), set torch's modes, and switch quirks off. If it
        defines a function ``use``, the case does not occur in this call but in ``use(compiled_f, *args)``, for example
        in a backward.
    example
        The values that the fields of ``sentence`` have for ``program``.
    frontend
        The frontend with which the case occurs in the program: ``"direct"`` or ``"dynamo"``.
    """

    id: str
    sentence: str
    suggestion: str = RETURN_A_NEW_TENSOR
    program: str
    example: dict[str, str] = field(default_factory=dict)
    frontend: str = "direct"

    def __str__(self) -> str:
        sentence, remedy = self.sentence.format(**self.example), self.suggestion.format(**self.example)
        return f"{self.id}\n{sentence}.\nTo have it compiled: {remedy}.\n\n{self.program.strip()}"
