"""What autograd says of a tensor that was kept for a backward and written since, where a trace would say otherwise.

    one of the variables needed for gradient computation has been modified by an inplace operation:
    [torch.FloatTensor [2]], which is output 0 of MulBackward0, is at version 1; expected version 0 instead.

Torch 2.11 names the node so, later ones call it ``Mul``. In a trace an input hangs on a node of ours, and the history
of a view that was written is made again by the view ops that led to it, which eager does by one ``as_strided``.
"""

from __future__ import annotations

import re

_NODE = re.compile(r"(, which is output )(\d+)( of )([^,]+)(?=, is at version )")
_ENDING = re.compile(r"Backward\d*$")

#: The nodes of views whose history eager makes again by sizes, strides and offset.
_VIEWS = frozenset(
    (
        "Alias", "Diagonal", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Squeeze", "T", "Transpose",
        "Unfold", "Unsqueeze", "View",
    )
)  # fmt: skip


def stem(name: str) -> str:
    """Return the name of an autograd node without its ending.

    Examples
    --------
    >>> stem("MulBackward0"), stem("torch::autograd::CopySlices")
    ('Mul', 'torch::autograd::CopySlices')
    """
    return _ENDING.sub("", name)


def named_node(text: str) -> str:
    """Return the stem of the node that the text names; the empty string if it names none.

    Examples
    --------
    >>> named_node("[torch.FloatTensor [2]], which is output 0 of MulBackward0, is at version 1")
    'Mul'
    """
    found = _NODE.search(text)
    return "" if found is None else stem(found[4])


def with_node(text: str, name: str, number: int | None = None) -> str:
    """Name another node, and the number of its output if that is given, in the way in which this torch names nodes.

    Examples
    --------
    >>> with_node("[torch.FloatTensor [2]], which is output 0 of Mul, is at version 1", "MaxBackward0", 1)
    '[torch.FloatTensor [2]], which is output 1 of Max, is at version 1'
    """
    found = _NODE.search(text)
    if found is None:
        return text
    said = name if found[4] != stem(found[4]) else stem(name)
    place = found[2] if number is None else number
    return f"{text[: found.start()]}{found[1]}{place}{found[3]}{said}{text[found.end() :]}"


def as_of_a_view(text: str) -> str:
    """Say what eager says of a view.

    Examples
    --------
    >>> as_of_a_view("[torch.FloatTensor []], which is output 0 of SelectBackward0, is at version 1; expected ...")
    '[torch.FloatTensor []], which is output 0 of AsStridedBackward0, is at version 1; expected ...'
    """
    in_place = "Backward1," in text  # of `t_` and the like: such a tensor need be no view
    return with_node(text, "AsStridedBackward0") if named_node(text) in _VIEWS and not in_place else text
