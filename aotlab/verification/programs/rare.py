"""Statements of rarer kinds, as templates like those in `statements`."""

from __future__ import annotations

#: Templates by rank. A template under rank 1 is used for tensors that have at least one dimension.
Table = dict[int, tuple[str, ...]]

#: Draws in place, some of them into memory whose strides are not in order.
DRAWS: Table = {
    0: ("{target}.uniform_()", "{target}.normal_()", "{target}.bernoulli_(0.5)", "{target}.random_(-4, 4)"),
    2: ("{x}.t().uniform_()", "{x}.transpose({one}, {two}).random_(0, 4)"),
}

#: New tensors whose sizes depend on values.
SIZES_FROM_VALUES: Table = {
    0: ("{x}[{x} > 0]", "({x} > {scalar}).nonzero()", "{x}.masked_select({x} < 1) * 2", "{x}.detach().unique()"),
    1: ("leading({x})", "routed({x})", "{x}.repeat_interleave(torch.arange(len({x})), 0)"),
}

#: Reads and writes of numbers in the caller's object ``state``.
STATE: Table = {
    0: (
        "state.steps += 1",
        'state.counts["n"] += 2',
        "{x}.mul_(state.steps)",
        '{x}.add_(state.counts["n"])',
        "state.history.append({x}.sum().item())",
    )
}

STORAGES: Table = {0: ("gathered({x})",)}
