"""Random programs, as text, that combine dropouts with reductions, norms, views and writes."""

from __future__ import annotations

import random

#: Steps from one tensor of shape ``(6, 8)``, or two, to another of that shape.
STEPS = (
    "F.dropout({a}, 0.5)",
    "F.dropout({a}.sum(1, keepdim=True) * {b}, 0.3)",
    "F.dropout(F.layer_norm({a}, (8,)), 0.2)",
    "F.dropout({a}.softmax(1), 0.4) * {b}",
    "F.dropout({a}.t(), 0.3).t() + {b}",
    "F.dropout({a} @ w, 0.5, inplace=True)",
    "F.alpha_dropout({a}, 0.2)",
    "F.dropout1d({a}.view(1, 6, 8), 0.3).view(6, 8)",
    "F.dropout(F.gelu({a} @ w), 0.1) + {b}",
    "F.dropout(({a} @ {b}.t()).softmax(-1), 0.1) @ {b}",
    "F.dropout({a}.view(2, 3, 8), 0.3, training=True).mean(0).repeat(2, 1)",
    "{a}.cumsum(0).tanh() * {b}.mean(0)",
    "torch.zeros_like({a}).index_put((index,), F.dropout({a}, 0.5)) + {b}",
)


def source(seed: int, steps: int = 6) -> str:
    """Write the function ``program(x, w, index)`` of a seed."""
    choose = random.Random(seed)
    names = ["x", "h"]
    lines = ["def program(x, w, index):", "    h = x @ w"]
    for number in range(steps):
        step = choose.choice(STEPS).format(a=names[-1], b=choose.choice(names))
        lines.append(f"    v{number} = {step}")
        names.append(f"v{number}")
    if choose.random() < 0.5:
        lines.append(f"    {names[-1]}.mul_(0.5)")
    lines.append(f"    return {names[-1]}, {names[-1]}.sum(1)")
    return "\n".join(lines) + "\n"
