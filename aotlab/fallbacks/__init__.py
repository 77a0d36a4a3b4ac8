"""The catalogue of eager fallbacks: one row for each case in which a call runs the user's Python instead of a graph.

The code raises a row by its id::

    raise RunEagerly("changes-sizes-of-view", op="t_", at=user_line())

A row has the sentence that the notice to the user contains, a suggestion, and a small program in which the case occurs.
`explain` prints a row. The notebook ``what_runs_eagerly.ipynb`` is generated from the rows, and each program is a test.
"""

from __future__ import annotations

from collections.abc import Mapping

from aotlab.fallbacks import memory_rows, op_rows, python_rows, refusal_rows, subclass_rows, training_rows
from aotlab.fallbacks.row import Fallback

#: The title of each part of the catalogue, with its rows.
PARTS: Mapping[str, tuple[Fallback, ...]] = {
    "Mutation and shared memory": memory_rows.ROWS,
    "Training and hooks": training_rows.ROWS,
    "Python values and objects": python_rows.ROWS,
    "Ops and random numbers": op_rows.ROWS,
    "Tensor subclasses": subclass_rows.ROWS,
    "What a graph cannot express": refusal_rows.ROWS,
}
#: Every row by its id.
ROWS: Mapping[str, Fallback] = {row.id: row for rows in PARTS.values() for row in rows}


def explain(id: str) -> None:
    """Print one row of the catalogue of eager fallbacks.

    Parameters
    ----------
    id
        The id of a row. A notice ends with the id, and the table ``refusals`` of a report has the id in its column
        ``case``.

    Raises
    ------
    KeyError
        If no row has this id.

    Examples
    --------
    >>> import aotlab
    >>> aotlab.explain("changes-sizes-of-leaf")
    changes-sizes-of-leaf
    `t_` changes the sizes of a leaf that requires grad, or of a non-leaf under no_grad.
    To have it compiled: use the form that returns a new tensor, for example t() instead of t_().
    <BLANKLINE>
    def f(x):
        y = x * 2
        with torch.no_grad():
            y.t_()
        return y
    <BLANKLINE>
    args = (torch.ones(2, 3, requires_grad=True),)
    """
    print(ROWS[id])
