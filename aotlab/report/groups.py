"""Group rows that the page shows as one row: similar tensors of one variable, and storages that hold a single tensor.

Groups are formed and counted before a report is cut to fit a notebook. So a page that received only some of the rows
still shows how many rows there were.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import replace

from aotlab.report.model import Group, Input, Saved, Storage
from aotlab.report.text import amount, known_size

#: The least number of inputs in a group: for inputs that were not mutated, and for inputs that were mutated in the same
#: way.
LEAST_UNCHANGED, LEAST_CHANGED = 3, 8
#: The page draws each storage that several tensors share, that the function writes, or that the graph allocates. If
#: there are more than this many such storages, it draws only those that are shared or partly written.
_MOST_DRAWN = 8

_STORAGES = {
    "whole": "{} with one tensor each, written as a whole",
    "made": "{} with one tensor each, made by the graph",
    "unwritten": "{} with one tensor each, unwritten",
    "unknown": "{} with one tensor each, of a graph that was not traced",
}


def input_groups(rows: Sequence[Input]) -> tuple[tuple[Input, ...], tuple[Group, ...]]:
    """Assign inputs to groups, and describe the groups.

    The result has the rows with the field ``group`` set (None for a row without a group), and the groups. The parts of
    a wrapper belong to the wrapper's group.
    """
    keys: list[Hashable] = [None if row.part_of else _fate(row) for row in rows]
    members: dict[Hashable, list[Input]] = {}
    for row, key in zip(rows, keys, strict=True):
        members.setdefault(key, []).append(row)
    groups = {
        key: Group(
            title=f"{len(some)} {_noun(some[0])}s of {_owner(some[0])}",
            count=len(some),
            nbytes=sum(known_size(row.tensor.nbytes) for row in some if row.tensor is not None),
        )
        for key, some in members.items()
        if key is not None and len(some) >= (LEAST_CHANGED if some[0].mutated else LEAST_UNCHANGED)
    }
    numbers = {key: number for number, key in enumerate(groups)}
    groups_of: dict[str, int | None] = {}
    numbered = []
    for row, key in zip(rows, keys, strict=True):  # each wrapper comes before its parts
        groups_of[row.name] = number = groups_of.get(row.part_of) if row.part_of else numbers.get(key)
        numbered.append(replace(row, group=number))
    return tuple(numbered), tuple(groups.values())


def _owner(row: Input) -> str:
    """Return the variable that holds a tensor: ``model`` for ``model.0.weight``; ``""`` if the tensor is a variable."""
    owner = re.match(r"[^.\[]+(?=[.\[])", row.name)
    return "" if owner is None else owner[0]


def _noun(row: Input) -> str:
    is_parameter = row.tensor is not None and row.tensor.type_name == "torch.nn.parameter.Parameter"
    if row.kind == "parameter" or is_parameter:
        return "parameter"
    return "buffer" if row.kind == "buffer" else "gradient" if row.name.endswith(".grad") else "tensor"


def _fate(row: Input) -> Hashable:
    """Return the key of an input's group: its variable, its kind, its ``requires_grad`` and its mutations.

    Inputs with equal keys form a group if there are enough of them. The key is None for an input that shares memory
    with another input or that is itself a variable. Such an input always has a separate row.
    """
    shares = row.duplicate_of is not None or row.overlaps or row.synthetic_base is not None
    if shares or row.tensor is None or not _owner(row):
        return None
    treatment = replace(row, name="", tensor=None, storage=None, placeholder="", gradient="", group=None)
    return _owner(row), _noun(row), row.tensor.requires_grad, treatment


def storage_groups(rows: Sequence[Storage]) -> tuple[tuple[Storage, ...], tuple[Group, ...]]:
    """Assign storages to groups, and describe the groups.

    The result has the rows with the field ``group`` set, and the groups. A storage that the page draws separately has
    the group None.
    """
    kinds = [_kind(row) for row in rows]
    told = sum(kind not in ("unwritten", "unknown") for kind in kinds)
    folded = [kind for kind in _STORAGES if kind in kinds and (told > _MOST_DRAWN or kind in ("unwritten", "unknown"))]
    groups = []
    for kind in folded:
        some = [row for row, kind_of_row in zip(rows, kinds, strict=True) if kind_of_row == kind]
        title = _STORAGES[kind].format(amount(len(some), "storage"))
        nbytes = sum(known_size(row.nbytes) for row in some if row.nbytes is not None)
        title = title if len(some) > 1 else title.replace(" each", "")
        groups.append(Group(title=title, count=len(some), nbytes=nbytes))
    numbers = {kind: number for number, kind in enumerate(folded)}
    return tuple([replace(row, group=numbers.get(kind)) for row, kind in zip(rows, kinds, strict=True)]), tuple(groups)


def _kind(storage: Storage) -> str:
    """Return the kind of a storage: a key of `_STORAGES`, or ``"drawn"`` if the page always draws it separately."""
    if len(storage.spans) != 1:
        return "drawn"
    (span,) = storage.spans
    if span.mutated is None:
        return "unknown"
    if span.mutated:
        return "whole" if span.writes is not None and span.writes == storage.nbytes else "drawn"
    return "unwritten" if storage.owner == "input" else "made"


def most_telling(rows: Sequence[Input | Storage | Saved], most: int) -> tuple[Input | Storage | Saved, ...]:
    """Return the ``most`` rows that are most informative, in their order.

    Among saved values these are the largest. Among inputs and storages these are the rows without a group and the first
    row of each group.
    """
    seen: set[int | None] = set()
    ranks = []
    for row in rows:
        if isinstance(row, Saved):
            ranks.append(-known_size(row.nbytes))
        else:
            ranks.append(int(row.group is not None and row.group in seen))
            seen.add(row.group)
    positions = sorted(range(len(rows)), key=ranks.__getitem__)[:most]
    return tuple([rows[i] for i in sorted(positions)])
