"""The cell suite as data: notebook cells of every kind that a user writes, for `tests.notebook.test_cells`.

Each record is one cell with the cells run before it and after it. The later cells use its results: they mutate,
differentiate, call and print, so that they reveal a difference that equal values hide.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell of the suite.

    Attributes
    ----------
    name
        The subject of the cell.
    cell
        Its text, without the magic's line.
    setup, after
        Cells run eagerly before it and after it.
    captures
        Whether there is a tensor operation in it that Dynamo can capture: then the report must show a compiled graph.
        Of code that raises while Dynamo looks at it, and of a few other things, it captures nothing (seen with plain
        ``torch.compile`` of the whole cell). Annotated assignments are left to Python by design.
    options
        More options for the magic's line.
    above
        Lines above the magic's line: another cell magic around it.
    eager
        The text that runs on the eager side instead, if the cell without the magic would do something else.
    again
        Whether the cell is run a second time, unchanged.
    refused
        Why nothing of it is compiled although Dynamo can capture it: one of the refusals that the README lists.
    known
        A known difference from eager under the magic; the test then has to fail.
    """

    name: str
    cell: str
    setup: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    captures: bool = True
    options: str = ""
    above: str = ""
    eager: str | None = None
    again: bool = False
    refused: str = ""
    known: str = ""


_CELLS: list[Cell] = []

_TORCH = "import torch"
_NN = "import torch\nfrom torch import nn"
_X = "import torch\nx = torch.arange(6.).reshape(2, 3)"
_TRAIN = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
data, target = torch.randn(16, 4), torch.randn(16, 1)
"""


def _cell(
    name: str, cell: str, *, setup: str | tuple[str, ...] = _TORCH, after: str | tuple[str, ...] = (), **flags: object
) -> None:
    """Add a record; texts may be indented as the code around them."""
    before = (setup,) if isinstance(setup, str) else setup
    later = (after,) if isinstance(after, str) else after
    _CELLS.append(
        Cell(
            name=name,
            cell=_dedent(cell),
            setup=tuple(map(_dedent, before)),
            after=tuple(map(_dedent, later)),
            **flags,  # type: ignore[arg-type]  # the flags are Cell's own
        )
    )


def _dedent(text: str) -> str:
    # Nothing but white space is a cell too.
    return textwrap.dedent(text.removeprefix("\n")).rstrip("\n ") if text.strip() else text


# --- arithmetic, in-place operations, views ---------------------------------------------------------------------------

_cell(
    "arithmetic",
    """
    a = x * 2 + 1
    b = (a / 3).sin()
    c = b.sum(0)
    c
    """,
    setup=_X,
    after="x.add_(1); print(a, b, c)",
)
_cell(
    "arithmetic with gradients",
    """
    y = (w * x).tanh()
    loss = y.pow(2).mean()
    """,
    setup=(_X, "w = torch.ones(3, requires_grad=True)"),
    after=("loss.backward()", "print(w.grad, y.requires_grad, loss.is_leaf)"),
)
_cell(
    "in-place operations",
    """
    x.mul_(3)
    x[0].add_(1)
    y = x.view(-1)
    y[2] = -1
    z = x.relu_()
    """,
    setup=(_X, "alias = x"),
    after=("y.zero_()", "print(alias, z is x, z is alias)"),
)
_cell(
    "in-place on a non-leaf",
    """
    h = w * 2
    h.add_(1).mul_(x)
    s = h.sum()
    """,
    setup=(_X, "w = torch.ones(2, 3, requires_grad=True)"),
    after=("s.backward()", "w.grad"),
)
_cell(
    "views",
    """
    row = x[1]
    col = x[:, ::2]
    t = x.t()
    flat = x.reshape(-1)
    wide = x.unsqueeze(0).expand(4, 2, 3)
    d = torch.diagonal(x)
    """,
    setup=_X,
    after=("row.fill_(9)", "flat[0] = 100\nt[2, 0] = 50", "print(x, row, col, t, wide[3], d)"),
)
_cell(
    "views of views mutated inside",
    """
    a = x[0]
    b = a[1:]
    b.mul_(10)
    x[1] += a
    total = x.sum()
    """,
    setup=_X,
    after=("a.zero_()", "print(x, b, total)"),
)
_cell(
    "view of a leaf under no_grad",
    """
    with torch.no_grad():
        v = w[0]
        v.mul_(2)
        w[1] = 0
    y = (w * 3).sum()
    """,
    setup="import torch\nw = torch.ones(2, 3, requires_grad=True)",
    after=("y.backward()", "print(w, v, v.requires_grad, w.grad)"),
    again=True,
)
_cell(
    "detach shares memory",
    """
    d = w.detach()
    e = (w * 2).detach()
    d.add_(1)
    f = w.data
    f[0] = 7
    """,
    setup="import torch\nw = torch.ones(3, requires_grad=True)",
    after=("d.mul_(2)\nf[1] = 0", "print(w, d, e, f, f.requires_grad)"),
)
_cell(
    "write through .data",
    """
    y = w * w
    w.data.mul_(3)
    z = (y + w).sum()
    """,
    setup="import torch\nw = torch.ones(3, requires_grad=True)",
    after=("z.backward()", "w.grad"),
)
_cell(
    "t_ changes the tensor's own shape",
    """
    x.t_()
    y = x + 1
    """,
    setup=(_X, "alias = x"),
    after="print(x.shape, alias.stride(), y)",
)
_cell(
    "resize_",
    """
    y = torch.zeros(2)
    y.resize_(4)
    y.fill_(1)
    z = y * 2
    """,
    setup=_X,
    after="print(y, z)",
)
_cell(
    "subscript assignment",
    """
    x[0, 1] = 10
    x[:, 2] = torch.tensor([7., 8.])
    x[x > 9] = -1
    x[[0, 1], [1, 0]] = 0.5
    """,
    setup=_X,
    after="x",
)
_cell(
    "two names of one tensor",
    """
    y = x
    y += 1
    z = [x, y, x.view(3, 2)]
    z[2].mul_(2)
    """,
    setup=_X,
    after=("z[0].zero_()", "print(x is y, z[0] is x, y, z)"),
)
_cell(
    "swap",
    "a, b = b, a\na.add_(1)",
    setup="import torch\na, b = torch.zeros(2), torch.ones(3)\na0, b0 = a, b",
    after="print(a is b0, b is a0, a, b)",
)
_cell(
    "star-unpacking",
    """
    first, *rest = x.unbind(1)
    head, *_middle, last = [first, *rest, first + 1]
    pair = (*rest, last * 2)
    """,
    setup=_X,
    after=("rest[0].fill_(5)", "print(x, pair, head is first)"),
)
_cell(
    "chained assignment",
    """
    a = b = c = x + 1
    d, e = f = (a * 2, b)
    p = q = []
    p.append(c.sum())
    """,
    setup=_X,
    after="a.zero_()\nprint(a is b, f[1] is e, q, d, c)",
)
_cell(
    "augmented assignment",
    """
    x += 1
    x *= y
    n += 2
    n **= 2
    text += "!"
    items += [x.sum()]
    v = x[0]
    v -= 100
    """,
    setup=(_X, "y = torch.full((3,), 2.)\nalias = x\nn, m = 3, 3\ntext = 'hi'\nitems = other = []"),
    after="print(alias is x, alias, n, m, text, items, other is items)",
)
_cell(
    "augmented assignment of a tensor that requires grad makes a new one only where eager does",
    """
    h = w + 1
    before = h
    h *= 2
    h = h * 3
    """,
    setup="import torch\nw = torch.ones(2, requires_grad=True)",
    after=("h.sum().backward()", "print(before, h, before is h, w.grad)"),
)
_cell(
    "annotations",
    """
    n: int = 1
    scale: float = 2.5
    late: int
    y: torch.Tensor = x * scale + n
    """,
    setup=_X,
    after=("print(__annotations__, 'late' in globals())", "y"),
    captures=False,
)
_cell(
    "bare annotation only", "later: torch.Tensor", after="print(__annotations__, 'later' in globals())", captures=False
)
_cell(
    "global statements",
    """
    global counter
    counter = 1
    y = x * counter
    def bump():
        global counter, shifted
        counter += 1
        shifted = x + counter
        return shifted
    bump()
    z = bump() * 2
    """,
    setup=_X,
    after="print(counter, shifted, y, z)\nbump()",
)
_cell(
    "walrus",
    """
    if (total := x.sum()) > 3:
        y = total * 2
    print((half := total / 2), half.item())
    parts = [last := row * 2 for row in x]
    """,
    setup=_X,
    after="print(last, parts, last is parts[-1], y)",
)
_cell(
    "del of names", "y = x * 2\nz = y + 1\ndel y\ndel x", setup=_X, after="print('y' in globals(), 'x' in globals(), z)"
)
_cell(
    "del of items and attributes",
    """
    y = x * 2
    del box["gone"], items[0], holder.tensor
    box["new"] = y
    holder.other = y.sum()
    """,
    setup=(
        _X,
        """
        from types import SimpleNamespace
        box, items = {'gone': x, 'stays': 1}, [x, x + 1]
        holder = SimpleNamespace(tensor=x)
        """,
    ),
    after="print(box, items, holder)",
)
_cell(
    "a deleted tensor is freed",
    """
    y = x * 2
    seen = weakref.ref(y)
    z = y + 1
    del y
    """,
    setup=(_X, "import weakref, gc"),
    after="print(seen() is None, z)",
)
_cell(
    "a rebound tensor is freed",
    """
    x = x + 1
    total = x.sum()
    """,
    setup=(_X, "import weakref\nseen = weakref.ref(x)"),
    after="print(seen() is None, total)",
)
_cell("del of a name that is not there", "y = x * 2\ndel nothing_here\nz = y + 1", setup=_X, after="y")

# --- control flow -----------------------------------------------------------------------------------------------------

_cell(
    "if and else on Python values",
    """
    if n > 2:
        y = x * n
    elif n == 2:
        y = x - 1
    else:
        y = x.sin()
    z = y.cos() if flag else y.exp()
    """,
    setup=(_X, "n, flag = 3, False"),
    after="y.add_(z)",
)
_cell(
    "if and else on tensor values",
    """
    if x.sum() > 10:
        y = x * 2
    else:
        y = x * 3
    if (x < 0).any():
        y = -y
    elif x.max() == 5:
        y = y + 100
    """,
    setup=_X,
    after="y",
)
_cell(
    "a for loop with break, continue and else",
    """
    total = torch.zeros(())
    for i in range(6):
        if i == 1:
            continue
        if i == 4:
            break
        total = total + x[i % 2].sum() * i
    else:
        total = total * 0
    for j in range(2):
        total += j
    else:
        total = total + 1000
    """,
    setup=_X,
    after="print(i, j, total)",
)
_cell(
    "a for loop over an empty range leaves its names alone",
    """
    for k in range(0):
        y = x * k
    z = x + 1
    """,
    setup=_X,
    after="print('k' in globals(), 'y' in globals(), z)",
)
_cell(
    "a while loop on a tensor value",
    """
    steps = 0
    while x.norm() > 1:
        x /= 2
        steps += 1
        if steps > 20:
            break
    else:
        x += 10
    """,
    setup=(_X, "alias = x"),
    after="print(steps, alias)",
)
_cell(
    "nested loops",
    """
    table = torch.zeros(2, 3)
    for i in range(2):
        for j in range(3):
            if i == j:
                continue
            table[i, j] = x[i, j] * 10
        row = table[i].sum()
    """,
    setup=_X,
    after="print(i, j, row, table)",
)
_cell(
    "comprehensions",
    """
    i = "kept"
    rows = [r * k for k, r in enumerate(x)]
    nested = [[v + 1 for v in r] for r in rows if r.numel()]
    named = {str(i): r.sum() for i, r in enumerate(x)}
    kinds = {r.dtype for r in x}
    lazy = (r * 2 for r in x)
    total = sum(r.sum() for r in x)
    longest = max((r.max() for r in x), key=lambda v: v.item())
    """,
    setup=_X,
    after=("x.add_(1)\nprint(i, next(lazy))", "print(rows, nested, named, kinds, total, longest)"),
)
_cell(
    "walrus inside a comprehension",
    """
    parts = [(s := r.sum(), s * 2) for r in x if (m := r.mean()) > 0]
    """,
    setup=_X,
    after="print(s, m, parts, parts[-1][0] is s)",
)
_cell(
    "match statement",
    """
    match command:
        case {"op": "scale", "by": by}:
            y = x * by
        case ["shift", *amounts]:
            y = x + amounts[0]
        case _:
            y = x
    """,
    setup=(_X, "command = {'op': 'scale', 'by': 3}"),
    after="print(by, y)",
)
_cell(
    "try, except, else and finally around tensor work",
    """
    log = []
    try:
        y = x * 2
        z = y @ torch.ones(5)
    except RuntimeError as error:
        log.append(type(error).__name__)
        y = x * 3
    else:
        log.append("else")
    finally:
        log.append("finally")
        y = y + 1
    try:
        ok = y.sum()
    except ValueError:
        pass
    else:
        log.append("fine")
    """,
    setup=_X,
    after="print(log, y, 'error' in globals(), ok)",
)
_cell(
    "try and except NameError",
    """
    try:
        cache
    except NameError:
        cache = {}
    cache["y"] = x * 2
    """,
    setup=_X,
    after="cache",
)
_cell(
    "raise and catch in a function",
    """
    class Stop(Exception):
        pass
    def check(v):
        if v.sum() > 3:
            raise Stop(v * 2)
        return v
    try:
        check(x)
    except Stop as stop:
        caught = stop.args[0]
    y = check(x * 0)
    """,
    setup=_X,
    after="print(caught, y)",
)

# --- with blocks and modes --------------------------------------------------------------------------------------------

_cell(
    "with no_grad",
    """
    with torch.no_grad():
        y = w * x
        w.add_(1)
    z = (w * x).sum()
    """,
    setup=(_X, "w = torch.ones(3, requires_grad=True)"),
    after=("z.backward()", "print(y.requires_grad, z.requires_grad, w, w.grad)"),
)
_cell(
    "with enable_grad inside no_grad",
    """
    with torch.no_grad():
        a = w * 2
        with torch.enable_grad():
            b = w * 3
        c = w * 4
    """,
    setup="import torch\nw = torch.ones(3, requires_grad=True)",
    after=("b.sum().backward()", "print(a.requires_grad, b.requires_grad, c.requires_grad, w.grad)"),
)
_cell(
    "with autocast",
    """
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.t()
        z = y.float() + 1
    after = x @ x.t()
    """,
    setup=_X,
    after="print(y.dtype, z, after)",
)
_cell(
    "inference mode",
    """
    with torch.inference_mode():
        y = x * 2
        z = y.t()
    w = x + 1
    """,
    setup=_X,
    after=("print(y.is_inference(), z.is_inference(), w.is_inference())", "y.add_(1)", "y + 1"),
)
_cell(
    "inference mode, with a function and a loop in it",
    """
    with torch.inference_mode():
        for k in range(3):
            y = predict(x)
            w.mul_(0.5)
    z = y.argmax()
    """,
    setup=(_X, "w = torch.ones(3, requires_grad=True)\n@torch.inference_mode()\ndef predict(v):\n    return v * w"),
    after="print(y.is_inference(), y, w, z, w.grad)",
)
_cell(
    "in-place work on an inference tensor",
    """
    with torch.inference_mode():
        y.add_(1)
    z = y + x
    """,
    setup=(_X, "with torch.inference_mode():\n    y = x * 2"),
    after="print(y, z)",
)
_cell(
    "in-place work on an inference tensor outside of inference mode",
    "z = x + 1\ny.add_(1)\nz.add_(1)",
    setup=(_X, "with torch.inference_mode():\n    y = x * 2"),
    after="print(y, z)",
)
_cell(
    "user's own context manager",
    """
    with recording("a") as log:
        y = x * 2
        log.append(y.sum())
    z = y + 1
    """,
    setup=(
        _X,
        """
        from contextlib import contextmanager
        events = []
        @contextmanager
        def recording(name):
            events.append(f"enter {name}")
            try:
                yield events
            finally:
                events.append(f"exit {name}")
        """,
    ),
    after="print(events, z)",
)
_cell(
    "a context manager that swallows an error",
    """
    with suppress(RuntimeError):
        y = x * 2
        z = y @ torch.ones(7)
        never = 1
    w = y + 1
    """,
    setup=(_X, "from contextlib import suppress"),
    after="print('never' in globals(), 'z' in globals(), w)",
)
_cell(
    "set_grad_enabled(False) as a statement",
    """
    torch.set_grad_enabled(False)
    y = w * 2
    z = y + 1
    """,
    setup="import torch\nw = torch.ones(3, requires_grad=True)",
    after="print(y.requires_grad, z, torch.is_grad_enabled(), (w * 2).requires_grad)",
)
_cell(
    "set_grad_enabled off and on again",
    """
    torch.set_grad_enabled(False)
    y = w * 2
    torch.set_grad_enabled(True)
    z = w * 3
    """,
    setup="import torch\nw = torch.ones(3, requires_grad=True)",
    after=("z.sum().backward()", "print(y.requires_grad, z.requires_grad, w.grad)"),
)
_cell(
    "set_default_dtype",
    """
    torch.set_default_dtype(torch.float64)
    y = torch.ones(3) * 2
    z = torch.tensor(1.5) + y
    """,
    after="print(y.dtype, z, torch.zeros(1).dtype)",
)
_cell(
    "set_default_device",
    """
    torch.set_default_device("cpu")
    y = torch.ones(3) * 2
    """,
    after="print(torch.get_default_device(), y)",
)
_cell(
    "dtype changes",
    """
    d = x.double()
    h = d.half() * 2
    i = (x * 1.5).to(torch.int64)
    b = x > 2
    m = d + i
    c = torch.complex(x, x) * 1j
    bf = x.to(torch.bfloat16) / 3
    """,
    setup=_X,
    after="print(d.dtype, h, i, b, m, c, bf)",
)

# --- training ---------------------------------------------------------------------------------------------------------

_cell(
    "backward",
    """
    loss = (model(data) - target).pow(2).mean()
    loss.backward()
    """,
    setup=_TRAIN,
    after=("print([p.grad.norm().item() for p in model.parameters()])", "loss.backward()"),
)
_cell(
    "backward twice is an error",
    """
    loss = (w * x).exp().sum()
    loss.backward()
    print("once")
    loss.backward()
    print("never")
    """,
    setup=(_X, "w = torch.ones(3, requires_grad=True)"),
    after="w.grad",
)
_cell(
    "retain_graph",
    """
    loss = (w * x).exp().sum()
    loss.backward(retain_graph=True)
    first = w.grad.clone()
    loss.backward()
    double = w.grad / first
    """,
    setup=(_X, "w = torch.ones(3, requires_grad=True)"),
    after="print(first, double)",
)
_cell(
    "backward with a gradient, from two outputs",
    """
    a = w * x
    b = a.sin()
    a.backward(torch.ones_like(a), retain_graph=True)
    b.sum().backward()
    """,
    setup=(_X, "w = torch.ones(3, requires_grad=True)"),
    after="w.grad",
)
_cell(
    "training step with SGD",
    """
    opt.zero_grad()
    loss = (model(data) - target).pow(2).mean()
    loss.backward()
    opt.step()
    """,
    setup=(_TRAIN, "opt = torch.optim.SGD(model.parameters(), lr=0.1)"),
    after=("print(loss.item(), (model(data) - target).pow(2).mean().item())", "opt.step()"),
)
_cell(
    "training steps with momentum",
    """
    for step in range(3):
        opt.zero_grad(set_to_none=False)
        loss = (model(data) - target).pow(2).mean()
        loss.backward()
        opt.step()
    """,
    setup=(_TRAIN, "opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)"),
    after=("opt.zero_grad()\n(model(data) - target).pow(2).mean().backward()\nopt.step()", "opt.state_dict()"),
)
_cell(
    "training steps with Adam",
    """
    losses = []
    for epoch in range(2):
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(data), target)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    """,
    setup=(_TRAIN, "opt = torch.optim.Adam(model.parameters(), lr=0.01)"),
    after=("print(losses)", "opt.zero_grad()\nmodel(data).sum().backward()\nopt.step()"),
)
_cell(
    "training step with AdamW, loss shown",
    """
    opt.zero_grad()
    loss = nn.functional.mse_loss(model(data), target)
    loss.backward()
    opt.step()
    loss
    """,
    setup=(_TRAIN, "opt = torch.optim.AdamW(model.parameters(), lr=0.01)"),
    after="_ * 2",
)
_cell(
    "frozen parameter",
    """
    opt.zero_grad()
    loss = (model(data) - target).pow(2).mean()
    loss.backward()
    opt.step()
    """,
    setup=(
        _TRAIN,
        """
        model[0].weight.requires_grad_(False)
        opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        """,
    ),
    after="print(model[0].weight.grad, model[0].bias.grad)",
)
_cell(
    "learning-rate scheduler",
    """
    for step in range(3):
        opt.zero_grad()
        loss = (model(data) - target).pow(2).mean()
        loss.backward()
        opt.step()
        scheduler.step()
        print(step, scheduler.get_last_lr())
    """,
    setup=(
        _TRAIN,
        "opt = torch.optim.SGD(model.parameters(), lr=0.1)\nscheduler = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)",
    ),
    after="scheduler.state_dict()",
)
_cell(
    "gradient accumulation",
    """
    opt.zero_grad()
    for chunk, wanted in zip(data.chunk(4), target.chunk(4)):
        loss = (model(chunk) - wanted).pow(2).mean() / 4
        loss.backward()
    opt.step()
    """,
    setup=(_TRAIN, "opt = torch.optim.SGD(model.parameters(), lr=0.1)"),
    after="print(chunk.data_ptr() == data[12:].data_ptr(), loss.item())",
)
_cell(
    "gradient clipping",
    """
    loss = (model(data) - target).pow(2).mean() * 100
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    opt.step()
    """,
    setup=(_TRAIN, "opt = torch.optim.SGD(model.parameters(), lr=0.1)"),
    after="print(norm, [p.grad.norm().item() for p in model.parameters()])",
)
_cell(
    "optimizer loop that prints the loss",
    """
    for step in range(5):
        opt.zero_grad()
        output = model(data)
        loss = (output - target).pow(2).mean()
        loss.backward()
        opt.step()
        print(f"step {step}: loss {loss.item():.6f}")
    print("done")
    """,
    setup=(_TRAIN, "opt = torch.optim.SGD(model.parameters(), lr=0.1)"),
    after="print(step, output.shape, loss.requires_grad)",
)
_cell(
    "hand-written gradient descent",
    """
    for _step in range(4):
        loss = ((data @ w).squeeze() - target.squeeze()).pow(2).mean()
        loss.backward()
        with torch.no_grad():
            w -= 0.1 * w.grad
            w.grad.zero_()
    """,
    setup=(_TRAIN, "w = torch.zeros(4, 1, requires_grad=True)\nalias = w"),
    after="print(alias is w, w, w.grad, loss)",
)
_cell(
    "hand-written gradient descent that sets grad to None",
    """
    loss = (w ** 2).sum()
    loss.backward()
    with torch.no_grad():
        w.sub_(w.grad, alpha=0.1)
    w.grad = None
    loss2 = (w ** 2).sum()
    """,
    setup="import torch\nw = torch.ones(3, requires_grad=True)",
    after=("loss2.backward()", "w.grad"),
)
_cell(
    "training loop in a function",
    """
    def train(model, steps, lr=0.05):
        opt = torch.optim.SGD(model.parameters(), lr=lr)
        history = []
        for _ in range(steps):
            opt.zero_grad()
            loss = (model(data) - target).pow(2).mean()
            loss.backward()
            opt.step()
            history.append(loss.item())
        return history
    history = train(model, 3)
    final = model(data).mean()
    """,
    setup=_TRAIN,
    after=("print(history, final)", "train(model, steps=1)"),
)
_cell(
    "data loader",
    """
    seen = 0
    for batch, wanted in loader:
        loss = (model(batch) - wanted).pow(2).sum()
        seen += len(batch)
        print(seen, f"{loss.item():.4f}")
    """,
    setup=(
        _TRAIN,
        """
        from torch.utils.data import DataLoader, TensorDataset
        loader = DataLoader(TensorDataset(data, target), batch_size=6, shuffle=True)
        """,
    ),
    after="print(torch.rand(2), batch.shape)",
)
_cell(
    "batch norm in training",
    """
    y = bn(data)
    z = bn(data * 2).sum()
    """,
    setup=(_TRAIN, "bn = nn.BatchNorm1d(4)"),
    after=("z.backward()", "print(bn.running_mean, bn.num_batches_tracked, bn.weight.grad, bn.bias.grad)"),
)
_cell(
    "batch norm switched to eval",
    """
    a = bn(data)
    bn.eval()
    b = bn(data)
    bn.train()
    c = bn(data)
    """,
    setup=(_TRAIN, "bn = nn.BatchNorm1d(4)"),
    after="print(a.mean(), b.mean(), c.mean(), bn.state_dict(), bn.training)",
)
_cell(
    "recurrent network",
    """
    out, (h, c) = lstm(sequence)
    score = out[:, -1].sum() + h.sum()
    """,
    setup=(_NN, "lstm = nn.LSTM(3, 4, batch_first=True)\nsequence = torch.randn(2, 5, 3)"),
    after=("score.backward()", "print(lstm.weight_hh_l0.grad.norm(), c.shape)"),
)

# --- random numbers ---------------------------------------------------------------------------------------------------

_cell(
    "random numbers",
    "a = torch.rand(3)\nb = torch.randn(2, 2) + a.sum()\nc = torch.randint(0, 10, (4,))",
    after="print(a, b, c, torch.rand(1))",
)
_cell(
    "manual_seed in the cell",
    """
    torch.manual_seed(7)
    a = torch.rand(3) * 2
    torch.manual_seed(7)
    b = torch.rand(3) * 2
    same = torch.equal(a, b)
    """,
    after="print(same, a, torch.rand(2))",
)
_cell(
    "dropout under a seed",
    """
    torch.manual_seed(3)
    y = drop(data).relu()
    drop.eval()
    z = drop(data)
    """,
    setup=(_TRAIN, "drop = nn.Dropout(0.5)"),
    after="print(y, z, torch.rand(2))",
)
_cell(
    "dropout in a training loop",
    """
    for step in range(3):
        opt.zero_grad()
        loss = net(data).pow(2).mean()
        loss.backward()
        opt.step()
        print(f"{loss.item():.6f}")
    """,
    setup=(
        _TRAIN,
        """
        net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        """,
    ),
    after="torch.rand(3)",
)
_cell(
    "random numbers of Python, numpy and torch",
    """
    n = random.random()
    a = np.random.rand(2)
    t = torch.rand(2) + n + torch.from_numpy(a)
    order = torch.randperm(5)
    """,
    setup="import random, torch\nimport numpy as np",
    after="print(n, a, t, order, random.random(), np.random.rand(), torch.rand(1))",
)
_cell(
    "a generator of one's own",
    """
    g = torch.Generator().manual_seed(5)
    a = torch.rand(3, generator=g)
    b = torch.rand(3) + a
    """,
    after="print(a, b, torch.rand(2, generator=g))",
)
_cell(
    "weights initialised in the cell",
    """
    layer = nn.Linear(3, 2)
    nn.init.xavier_uniform_(layer.weight)
    y = layer(torch.ones(1, 3)).sum()
    """,
    setup=_NN,
    after=("y.backward()", "print(layer.weight, layer.bias.grad)"),
)

# --- numpy and other libraries ----------------------------------------------------------------------------------------

_cell(
    "from_numpy shares memory",
    """
    t = torch.from_numpy(a)
    t.add_(1)
    u = t * 2
    a[0] = 100
    """,
    setup="import torch\nimport numpy as np\na = np.arange(4.)",
    after=("t[1] = -5\na[2] = 50", "print(a, t, u)"),
)
_cell(
    "numpy() shares memory",
    """
    y = x * 2
    n = y.numpy()
    y.add_(1)
    n[0, 0] = 77
    z = y.sum()
    """,
    setup=(_X, "view = x.numpy()"),
    after=("x.mul_(3)\nn[1] = 0", "print(view, n, y, z)"),
)
_cell(
    "numpy work between tensor work",
    """
    y = (x + 1).numpy()
    s = np.sqrt(y).sum()
    z = torch.as_tensor(np.sin(y)) * s
    """,
    setup=(_X, "import numpy as np"),
    after="print(type(s), s, z, y)",
)
_cell(
    "tensor to Python and back",
    """
    n = x.sum().item()
    rows = x.tolist()
    k = int(x.max())
    y = x * n + len(rows) + k
    shape = x.shape
    """,
    setup=_X,
    after="print(n, rows, k, y, shape)",
)

# --- hooks ------------------------------------------------------------------------------------------------------------

_cell(
    "tensor hooks",
    """
    h = w * 2
    seen = []
    handle = h.register_hook(lambda g: seen.append(g.clone()))
    w.register_hook(lambda g: g * 10)
    loss = (h * x).sum()
    loss.backward()
    """,
    setup=(_X, "w = torch.ones(3, requires_grad=True)"),
    after=("print(seen, w.grad)", "handle.remove()\n(w * 3).sum().backward()\nprint(seen, w.grad)"),
)
_cell(
    "forward hooks of a module",
    """
    def hook(module, args, output):
        activations.append(output.detach())
        return output * 2
    handle = model[0].register_forward_hook(hook)
    y = model(data)
    handle.remove()
    z = model(data)
    """,
    setup=(_TRAIN, "activations = []"),
    after="print(len(activations), activations[0].shape, y.sum(), z.sum())",
)
_cell(
    "forward hook registered before",
    """
    y = model(data).sum()
    y.backward()
    """,
    setup=(
        _TRAIN,
        """
        activations = []
        _ = model[1].register_forward_hook(lambda m, a, o: activations.append((o > 0).sum().item()))
        """,
    ),
    after=("print(activations)", "model(data * 2)", "activations"),
)
_cell(
    "full backward hooks",
    """
    y = model(data).sum()
    y.backward()
    """,
    setup=(
        _TRAIN,
        "norms = []\nhandle = model[2].register_full_backward_hook(lambda m, gi, go: norms.append(go[0].sum().item()))",
    ),
    after=("print(norms)", "model(data).sum().backward()\nprint(norms)"),
)
_cell(
    "retain_grad",
    """
    h = w * x
    h.retain_grad()
    loss = h.pow(2).sum()
    loss.backward()
    """,
    setup=(_X, "w = torch.ones(3, requires_grad=True)"),
    after="print(h.grad, w.grad)",
)
_cell(
    "hook on the gradient accumulated",
    """
    loss = (w * x).sum()
    loss.backward()
    loss2 = (w * w).sum()
    """,
    setup=(
        _X,
        """
        w = torch.ones(3, requires_grad=True)
        log = []
        _ = w.register_post_accumulate_grad_hook(lambda p: log.append(p.grad.clone()))
        """,
    ),
    after=("loss2.backward()", "log"),
)

# --- autograd and transforms ------------------------------------------------------------------------------------------

_cell(
    "autograd.grad",
    """
    y = (w ** 3).sum()
    g, = torch.autograd.grad(y, w)
    z = g * 2
    """,
    setup="import torch\nw = torch.tensor([1., 2.], requires_grad=True)",
    after="print(g, z, w.grad, y)",
)
_cell(
    "double backward",
    """
    y = (w ** 3).sum()
    g, = torch.autograd.grad(y, w, create_graph=True)
    h, = torch.autograd.grad(g.sum(), w)
    """,
    setup="import torch\nw = torch.tensor([1., 2.], requires_grad=True)",
    after="print(g, h)",
)
_cell(
    "a second derivative in a later cell",
    """
    y = (w ** 3).sin().sum()
    g, = torch.autograd.grad(y, w, create_graph=True)
    z = (g * g + w).sum()
    """,
    setup="import torch\nw = torch.tensor([1., 2.], requires_grad=True)",
    after=("z.backward()", "print(w.grad, g, y)"),
)
_cell(
    "gradient penalty",
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        x = data.clone().requires_grad_()
        score = model(x).tanh().sum()
        g, = torch.autograd.grad(score, x, create_graph=True)
        loss = score.square() + ((g.norm(2, 1) - 1) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    """,
    setup=_TRAIN,
    after="print(loss, [p.grad for p in model.parameters()], list(model.parameters()))",
)
_cell(
    "Hessians",
    """
    y = x.sin() * 2
    h = torch.autograd.functional.hessian(lambda v: (v.sin() * v).sum(), x)
    p = torch.autograd.functional.hvp(lambda v: (v.sin() * v).sum(), x, y)
    """,
    setup=_X,
    after="print(h, p)",
)
_cell(
    "Hessians, all rows at once",
    """
    y = x.sin() * 2
    h = torch.autograd.functional.hessian(lambda v: (v.sin() * v).sum(), x, vectorize=True)
    """,
    setup=_X,
    after="print(h, y)",
    refused="batched gradients of gradients",
)
_cell(
    "functions that only torch gets",
    """
    y = torch.cond(x.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (x,))
    z = torch.vmap(lambda row: row * row.sum() + y[0])(x)
    """,
    setup=_X,
    after="print(y, z)",
)
_cell(
    "torch.func.grad and vmap",
    """
    def f(v):
        return (v.sin() ** 2).sum()
    g = torch.func.grad(f)(x[0])
    rows = torch.func.vmap(f)(x)
    both = torch.vmap(torch.func.grad(f))(x)
    """,
    setup=_X,
    after="print(g, rows, both, f(x))",
)
_cell(
    "functional_call and jacobian",
    """
    params = {name: p.detach() * 2 for name, p in model.named_parameters()}
    y = torch.func.functional_call(model, params, (data,))
    j = torch.autograd.functional.jacobian(lambda v: v ** 2, torch.ones(2))
    """,
    setup=_TRAIN,
    after="print(y.sum(), j, model(data).sum())",
)
_cell(
    "custom autograd Function",
    """
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, v):
            ctx.save_for_backward(v)
            return v * 2
        @staticmethod
        def backward(ctx, grad):
            (v,) = ctx.saved_tensors
            return grad * 100 + v
    y = Double.apply(w * 3)
    loss = y.sum()
    """,
    setup="import torch\nw = torch.ones(3, requires_grad=True)",
    after=("loss.backward()", "print(y, w.grad, Double.apply(w))"),
)
_cell(
    "checkpoint",
    """
    from torch.utils.checkpoint import checkpoint
    y = checkpoint(lambda v: (v * w).sin().exp(), x, use_reentrant=False)
    loss = y.sum()
    loss.backward()
    """,
    setup=(_X, "w = torch.ones(3, requires_grad=True)"),
    after="print(y, w.grad)",
)
_cell(
    "einsum, matmul and friends",
    """
    a = torch.einsum("ij,kj->ik", x, x)
    b = x @ x.T
    c = torch.linalg.solve(a + torch.eye(2), x)
    d = torch.stack([a, b]).mean(0)
    e = torch.where(x > 2, x, -x)
    f = torch.cat([x, e], dim=1).softmax(-1)
    top, where = f.topk(2)
    """,
    setup=_X,
    after="print(a, b, c, d, e, top, where)",
)
_cell(
    "scaled dot-product attention",
    """
    q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    out.sum().backward()
    """,
    setup=_NN,
    after="print(out.shape, q.grad.norm(), k.grad.norm(), v.grad.norm())",
)
_cell(
    "training step with sparse gradients",
    """
    opt.zero_grad()
    loss = head(words(torch.tensor([[1, 2, 2], [0, 3, 9]]))).square().mean()
    loss.backward()
    opt.step()
    """,
    setup=(
        _NN,
        """
        torch.manual_seed(0)
        words, head = nn.EmbeddingBag(10, 4, sparse=True, padding_idx=3), nn.Linear(4, 2)
        opt = torch.optim.SGD([*words.parameters(), *head.parameters()], lr=0.1)
        words(torch.tensor([[1]])).sum().backward();
        """,
    ),
    after="print(loss, words.weight.grad, words.weight.grad.is_coalesced(), words.weight)",
)
_cell(
    "sparse tensor",
    """
    s = torch.sparse_coo_tensor([[0, 1], [1, 2]], [3., 4.], (2, 3))
    dense = s.to_dense() * 2
    y = torch.sparse.mm(s, x.t())
    """,
    # The first sparse tensor of a process warns.
    setup=(_X, "torch.sparse_coo_tensor([[0], [0]], [1.], (1, 1));"),
    after="print(s, dense, y)",
    captures=False,
)
_cell(
    "complex, integer and boolean tensors",
    """
    z = torch.view_as_complex(torch.ones(2, 2))
    conj = (z * 1j).conj()
    real = torch.view_as_real(z)
    i = torch.arange(5) // 2
    b = i.bool() & (i > 1)
    real.add_(1)
    """,
    after="print(z, conj, conj.is_conj(), real, i, b)",
)
_cell(
    "tensors without elements and without dimensions",
    """
    e = torch.empty(0, 3)
    s = torch.tensor(2.) * 3
    t = torch.cat([e, torch.ones(1, 3)]) + s
    n = e.sum()
    """,
    after="print(e, s, t, n)",
)

# --- functions and classes --------------------------------------------------------------------------------------------

_cell(
    "closures and lambdas",
    """
    def make(scale):
        count = 0
        def apply(v):
            nonlocal count
            count += 1
            return v * scale + count
        return apply
    triple = make(3)
    square = lambda v, p=2: v ** p
    y = triple(x)
    z = triple(square(x))
    """,
    setup=_X,
    after=("print(y, z, triple(x), square(x, p=3))", "print(square.__name__, triple.__qualname__)"),
)
_cell(
    "late binding of a loop variable in lambdas",
    """
    fs = [lambda v: v * i for i in range(3)]
    gs = []
    for k in range(3):
        gs.append(lambda v: v + k)
    y = fs[0](x) + gs[0](x)
    """,
    setup=_X,
    after="k = 10\nprint(y, fs[1](x), gs[1](x))",
)
_cell(
    "class with methods",
    """
    class Counter:
        \"\"\"Counts and scales.\"\"\"
        made = 0
        def __init__(self, scale):
            self.scale = scale
            self.total = torch.zeros(3)
            Counter.made += 1
        def add(self, v):
            self.total += v.sum(0) * self.scale
            return self
        @property
        def mean(self):
            return self.total.mean()
        @staticmethod
        def double(v):
            return v * 2
        @classmethod
        def two(cls):
            return cls(2)
    c = Counter.two()
    c.add(x).add(Counter.double(x))
    m = c.mean
    """,
    setup=_X,
    after=(
        "c.add(x)",
        "print(c.total, m, c.mean, Counter.made, Counter.__doc__, Counter.__module__, Counter.__qualname__)",
    ),
)
_cell(
    "module subclass",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 2)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        def forward(self, v):
            self.calls += 1
            return torch.relu(self.fc(v))
    net = Net()
    y = net(data)
    loss = y.sum()
    loss.backward()
    """,
    setup=_TRAIN,
    after=("net(data)", "print(net.calls, net.fc.weight.grad, net)"),
)
_cell(
    "dataclass of tensors",
    """
    @dataclass
    class Pair:
        left: torch.Tensor
        right: torch.Tensor = None
        def total(self) -> torch.Tensor:
            return self.left + self.right
    p = Pair(x, right=x * 2)
    t = p.total()
    p.left = t
    """,
    setup=(_X, "from dataclasses import dataclass"),
    after="t.zero_()\nprint(p, p.left is t)",
)
_cell(
    "functions only, called later with different shapes",
    """
    def scale(v, by=2.0, *, shift=0):
        \"\"\"Scale and shift.\"\"\"
        return v * by + shift

    def normalise(v: torch.Tensor) -> torch.Tensor:
        return (v - v.mean()) / v.std()
    """,
    setup=_X,
    after=(
        "a = scale(x)\nb = scale(x, 3.0, shift=1)\na",
        "c = normalise(torch.arange(10.))\nd = normalise(x)\nprint(c, d)",
        "print(scale.__name__, scale.__doc__, scale.__defaults__, scale.__kwdefaults__, normalise.__annotations__)",
        "import inspect\nprint(inspect.getsource(scale), inspect.signature(normalise), callable(scale), type(scale))",
    ),
)
_cell(
    "imports and functions only, trained later",
    """
    import torch.nn.functional as F
    from math import pi

    def loss_of(model, inputs, wanted):
        return F.mse_loss(model(inputs), wanted) * pi
    """,
    setup=_TRAIN,
    after=(
        "loss = loss_of(model, data, target)\nloss.backward()",
        "loss_of(model, data[:3], target[:3]).backward()",
        "model[0].weight.grad",
    ),
)
_cell(
    "function that mutates its argument, called later",
    """
    def bump(v):
        v.add_(1)
        return v.view(-1)
    """,
    setup=_X,
    after=("y = bump(x)\ny[0] = 50", "z = bump(x)\nprint(x, y, z, z.data_ptr() == x.data_ptr())", "bump('no tensor')"),
)
_cell(
    "function that uses a global which changes later",
    """
    def shift(v):
        return v + offset
    """,
    setup=(_X, "offset = 1"),
    after=(
        "print(shift(x))",
        "offset = 5\nprint(shift(x))",
        "offset = torch.ones(3)\nprint(shift(x))",
        "del offset\nshift(x)",
    ),
)
_cell(
    "function defined twice",
    """
    def f(v):
        return v * 2
    first = f
    def f(v):
        return v * 3
    """,
    setup=_X,
    after="print(first(x), f(x), first is f)",
    captures=False,
)
_cell(
    "recursive function",
    """
    def power(v, n):
        return v if n == 1 else v * power(v, n - 1)
    y = power(x, 4)
    """,
    setup=_X,
    after="print(y, power(x, 2))",
)
_cell(
    "recursive function, called later",
    """
    def fold(v):
        if v.numel() == 1:
            return v
        return fold(v[1:] + v[:-1])
    """,
    after="print(fold(torch.arange(4.)))",
)
_cell(
    "function with default values and star arguments",
    """
    def combine(a, /, b=x, *rest, scale=2, **named):
        total = a + b * scale
        for r in rest:
            total = total + r
        return total, sorted(named)
    y, names = combine(x, x, x, scale=3, z=1, y=2)
    z, _names = combine(x)
    """,
    setup=_X,
    after="x.add_(1)\nprint(y, names, combine(x)[0], combine.__defaults__[0] is x)",
)
_cell(
    "nested functions",
    """
    def outer(v):
        def inner(u):
            return u.sin() + v
        return inner(v) * inner(v * 2)
    y = outer(x)
    """,
    setup=_X,
    after="outer(x + 1)",
)
_cell(
    "decorated functions",
    """
    @torch.no_grad()
    def evaluate(v):
        \"\"\"Without gradients.\"\"\"
        return w * v
    def twice(function):
        @functools.wraps(function)
        def call(*args):
            return function(function(*args))
        return call
    @twice
    def double(v):
        return v * 2
    y = evaluate(x)
    z = double(w * x)
    """,
    setup=(_X, "import functools\nw = torch.ones(3, requires_grad=True)"),
    after="print(y.requires_grad, z.requires_grad, evaluate.__name__, evaluate.__doc__, double.__wrapped__(x))",
)
_cell(
    "decorated functions only, called later",
    """
    @torch.no_grad()
    def evaluate(v):
        return w * v

    @functools.lru_cache
    def table(n):
        return torch.arange(n) * 2.0
    """,
    setup=(_X, "import functools\nw = torch.ones(3, requires_grad=True)"),
    after=(
        "y = evaluate(x)\nprint(y, y.requires_grad, torch.is_grad_enabled())",
        "print(table(3), table(3) is table(3), table.cache_info())",
    ),
)
_cell(
    "generator functions",
    """
    def batches(v, size):
        for start in range(0, len(v), size):
            yield v[start:start + size] * 2
    g = batches(x, 1)
    first = next(g)
    rest = list(batches(x, 2))
    y = first + 1
    """,
    setup=_X,
    after="x.add_(100)\nprint(next(g), first, rest, y)",
)
_cell(
    "coroutine functions",
    """
    async def double(v):
        await asyncio.sleep(0)
        return v * 2
    y = x + 1
    """,
    setup=(_X, "import asyncio"),
    after=("z = await double(y)", "print(z, asyncio.iscoroutinefunction(double))"),
)
_cell(
    "sorting by a key",
    """
    rows = sorted(x.unbind(0), key=lambda r: -r.sum())
    names = sorted(["bb", "a"], key=len)
    best = max(rows, key=torch.sum)
    y = torch.stack(rows)
    """,
    setup=_X,
    after="rows[0].zero_()\nprint(x, y, names, best is rows[0])",
)
_cell(
    "type alias and typing",
    """
    from typing import Optional, TypeAlias
    Batch: TypeAlias = list[torch.Tensor]
    Maybe = Optional[torch.Tensor]
    def first(batch: Batch) -> Maybe:
        return batch[0] * 2 if batch else None
    y = first([x])
    """,
    setup=_X,
    after="print(Batch, Maybe, first([]), y)",
)
_cell(
    "class and function attributes set from outside",
    """
    def f(v):
        f.calls += 1
        return v * f.calls
    f.calls = 0
    y = f(x) + f(x)
    """,
    setup=_X,
    after="print(f.calls, y, f(x))",
)

# --- containers and objects -------------------------------------------------------------------------------------------

_cell(
    "dict and set of tensors",
    """
    d = {"a": x, "b": x * 2}
    d["a"].add_(1)
    s = {x, d["a"], d["b"]}
    by = {x: "x"}
    n = len(s)
    """,
    setup=_X,
    after="d['b'].zero_()\nprint(n, by[x], x in s, d)",
)
_cell(
    "list of tensors mutated in place",
    """
    for t in items:
        t.mul_(2)
    items[0] = items[0] + 1
    items.append(items[1].sum())
    items[1], items[2] = items[2], items[1]
    """,
    setup=(_X, "items = [torch.ones(2), x, x[0]]\nkeep = list(items)"),
    after="print(items, keep, items[2] is keep[1])",
)
_cell(
    "append in a loop",
    """
    history = []
    state = torch.zeros(3)
    for row in x:
        state = state * 0.5 + row
        history.append(state)
    out = torch.stack(history)
    """,
    setup=_X,
    after="history[0].fill_(9)\nprint(history, state is history[-1], out)",
)
_cell(
    "deepcopy of a model",
    """
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(1)
    gap = (twin(data) - model(data)).mean()
    """,
    setup=(_TRAIN, "import copy"),
    after="print(gap, twin[0].weight is model[0].weight)",
)
_cell(
    "state_dict saved and loaded in memory",
    """
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    before = model(data).sum()
    with torch.no_grad():
        model[0].weight.zero_()
    during = model(data).sum()
    buffer.seek(0)
    keys = model.load_state_dict(torch.load(buffer))
    after = model(data).sum()
    """,
    setup=(_TRAIN, "import io"),
    after="print(before == after, during, keys)",
)
_cell(
    "pickle of a tensor",
    """
    y = x * 2
    size = len(pickle.dumps(y))
    a, b = pickle.loads(pickle.dumps((y, y[0])))
    b.zero_()
    """,
    setup=(_X, "import pickle"),
    after="print(a, y, size)",
)
_cell(
    "attributes of tensors and modules",
    """
    y = x * 2
    y.tag = "mine"
    model.note = y.sum()
    model.extra = nn.Linear(1, 1)
    z = model.extra(y[:, :1])
    """,
    setup=(_TRAIN, _X),
    after="print(y.tag, model.note, z.sum(), len(model))",
)
_cell(
    "named tuples and nested containers",
    """
    Point = namedtuple("Point", "a b")
    p = Point(x * 2, {"k": [x, (x + 1,)]})
    q = p._replace(a=p.b["k"][1][0])
    top = x.max(dim=1)
    """,
    setup=(_X, "from collections import namedtuple"),
    after="q.a.zero_()\nprint(p, q, top, top.values)",
)

# --- output -----------------------------------------------------------------------------------------------------------

_cell("last expression a tensor", "y = x * 2\ny + 1", setup=_X, after=("_.add_(10)", "print(_, y)", "_"))
_cell(
    "last expression suppressed",
    "y = x * 2\ny + 1;",
    setup=_X,
    after="print('_2' in globals(), '_3' in globals(), repr(_))",
)
_cell("last expression suppressed, with a comment", "y = x * 2\ny + 1;  # quiet", setup=_X, after="print(repr(_))")
_cell("last expression None", "y = x * 2\nNone", setup=_X, after="print(repr(_), y)")
_cell("last expression a call that returns None", "y = x * 2\nprint(y)", setup=_X, after="print(repr(_))")
_cell("last expression an in-place call", "x.add_(1)", setup=_X, after=("_ is x", "x"))
_cell("last expression an existing name", "y = x + 1\nx", setup=_X, after=("print(_ is x)", "x.zero_()", "Out[3]"))
_cell("no last expression", "y = x * 2", setup=_X, after="print(len(Out), y)")
_cell(
    "last expression a table",
    """
    y = x * 2
    frame = pd.DataFrame(y.numpy(), columns=list("abc"))
    frame
    """,
    setup=(_X, "import pandas as pd"),
    after="y.zero_()\nprint(_ is frame, frame)",
)
_cell(
    "only a table",
    "frame.describe()",
    setup="import pandas as pd\nframe = pd.DataFrame({'a': [1, 2]})",
    after="_",
    captures=False,
)
_cell(
    "the last result used",
    "y = _ * 2\ny",
    setup=(_X, "x + 1"),
    after="print(_ is y, __, _2 if '_2' in globals() else None)",
)
_cell(
    "display",
    """
    y = x * 2
    display(y)
    display({"text/plain": "plain", "text/html": "<b>rich</b>"}, raw=True)
    handle = display("to be changed", display_id="mine")
    z = y + 1
    handle.update("changed")
    z.sum()
    """,
    setup=(_X, "from IPython.display import display"),
    after="z",
)
_cell(
    "prints before, between and after",
    """
    print("before", x)
    x.add_(1)
    print("after", x)
    y = x * 2
    print(f"{y.sum().item():.2f}", end="")
    print()
    z = y + x
    """,
    setup=_X,
    after="z",
)
_cell(
    "prints inside a function",
    """
    def noisy(v):
        print("shape", tuple(v.shape))
        w = v * 2
        print("sum", w.sum().item())
        return w + 1
    y = noisy(x)
    y = noisy(y[0])
    """,
    setup=_X,
    after="noisy(x)",
)
_cell(
    "output to standard error and warnings",
    """
    print("to stderr", file=sys.stderr)
    y = x * 2
    warnings.warn("mind the gap")
    for i in range(3):
        warnings.warn("again and again", RuntimeWarning)
        y = y + i
    z = w.sum()
    """,
    setup=(_X, "import sys, warnings\nw = torch.ones(2)"),
    after="warnings.warn('later')\nprint(y, z)",
)
_cell(
    "a warning of torch",
    """
    h = w * 2
    g = h.grad
    y = h + 1
    """,
    setup="import torch\nw = torch.ones(2, requires_grad=True)",
    after="print(g, y)",
)
_cell(
    "warnings recorded by the user",
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn("once")
        y = x * 2
        warnings.warn("twice", FutureWarning)
    texts = [str(w.message) for w in caught]
    del caught
    """,
    setup=(_X, "import warnings"),
    after="print(texts)",
)
_cell(
    "logging",
    """
    log.warning("about to multiply")
    y = x * 2
    log.info("not shown")
    """,
    setup=(
        _X,
        "import logging, sys\nlog = logging.getLogger('mine')\nlog.addHandler(logging.StreamHandler(sys.stdout))",
    ),
    after="log.error('%s', y)\nlog.handlers.clear()",
)

# --- magics and cells of other kinds ----------------------------------------------------------------------------------

_cell(
    "line magics, shell and help",
    """
    y = x * 2
    %precision 3
    !echo from the shell
    lines = !printf 'a\\nb\\n'
    folder = %pwd
    z = y + len(lines)
    """,
    setup=_X,
    after="print(lines, folder == __import__('os').getcwd(), z)",
)
_cell(
    "a line magic as last line",
    """
    y = x * 2
    %who_ls Tensor
    """,
    setup=_X,
    after="_",
)
_cell(
    "a line magic with a Python expansion",
    """
    name = "there"
    y = x * 2
    !echo hello {name} $name
    %psearch -e nothing nothing*
    """,
    setup=_X,
    after="y",
)
_cell(
    "a line magic that runs tensor work",
    "%timeit -n 1 -r 1 -q y = x * 2\nz = x + 1",
    setup=_X,
    after="print('y' in globals(), z)",
)
_cell(
    "capture magic inside",
    """
    %%capture out
    print("hidden")
    y = x * 2
    y
    """,
    setup=_X,
    after="print(repr(out.stdout), y)",
    captures=False,
)
_cell(
    "capture magic above",
    "print('hidden')\ny = x * 2\ny",
    setup=_X,
    above="%%capture out\n",
    after="print(repr(out.stdout), len(out.outputs) >= 1, y)",
)
_cell(
    "a magic of the user's own",
    """
    y = x * 2
    got = %shout hello
    %shout world
    """,
    setup=(
        _X,
        """
        from IPython.core.magic import register_line_magic
        @register_line_magic
        def shout(line):
            print(line.upper())
            return line.upper() + "!"
        del shout
        """,
    ),
    after="print(got, y)",
)
_cell(
    "await",
    """
    y = x * 2
    await asyncio.sleep(0)
    z = y + 1
    z
    """,
    setup=(_X, "import asyncio"),
    after="print(y, z)",
)
_cell(
    "await of the user's own coroutine between tensor work",
    """
    a = x + 1
    b = await fetch(a)
    c = [await fetch(r) for r in b]
    async with gate:
        d = torch.stack(c).sum()
    async for n in counting():
        d = d + n
    print(d)
    """,
    setup=(
        _X,
        """
        import asyncio
        async def fetch(v):
            await asyncio.sleep(0)
            return v * 2
        async def counting():
            for n in range(3):
                await asyncio.sleep(0)
                yield n
        gate = asyncio.Lock()
        """,
    ),
    after="print(b, c, d, n, gate.locked())",
)
_cell(
    "the last expression comes after an async comprehension",
    """
    scale = x + 1
    y = [v * scale async for v in rows()]
    z = y[1] - scale
    [z + v async for v in rows()]
    y = [v * 5 async for v in rows()]
    y[0]
    """,
    setup=(_X, "y = ['an old value']\nasync def rows():\n    for row in x:\n        yield row"),
    after="print(y, z)",
)
_cell(
    "async comprehensions in a loop and in a block",
    """
    for k in range(2):
        y = torch.stack([v * k async for v in rows()])
        total = total + y.sum()
    with torch.no_grad():
        y = {i: v for i, v in enumerate([v async for v in rows()])}
        total = total * y[0]
    total
    """,
    setup=(_X, "total = torch.zeros(())\nasync def rows():\n    for row in x:\n        yield row"),
    after="print(k, y, total)",
)
_cell(
    "await that fails",
    """
    y = x * 2
    await boom()
    z = 1
    """,
    setup=(_X, "import asyncio\nasync def boom():\n    await asyncio.sleep(0)\n    raise ValueError('from afar')"),
    after="y",
)
_cell(
    "a task that goes on after the cell",
    """
    async def later():
        global late
        await asyncio.sleep(0)
        late = x * 10
    task = asyncio.create_task(later(), name="later")
    y = x * 2
    """,
    setup=(_X, "import asyncio"),
    after=("await task", "print(late, y)"),
)
_cell("docstring only", '"""Only a docstring."""', captures=False, after="_")
_cell("docstring, then work", '"""About this cell."""\ny = x * 2', setup=_X, after="print(__doc__, y)")
_cell("empty cell", "", eager="# an empty cell has no number", captures=False)
_cell("white space only", "   \n\n  ", eager="# an empty cell has no number", captures=False)
_cell("comments only", "# nothing\n# to see", captures=False)
_cell("pass", "pass", captures=False)
_cell(
    "no tensors at all",
    "n = sum(range(10))\nwords = {w: len(w) for w in 'a bb ccc'.split()}\nprint(n)\nwords",
    captures=False,
    after="_",
)
_cell("imports only", "import math\nfrom collections import Counter as C", captures=False, after="print(math.pi, C)")
_cell(
    "unicode and strings that look like magics",
    '''
    größe = x * 2
    текст = """
    %%timeit
      %matplotlib inline
    !echo no
    é ✓ 😀
    """
    long = \'\'\'"""triple" in 'triple\'\'\'
    y = größe.sum(); print("naïve %%", текст, long)
    ''',
    setup=_X,
    after="print(größe, len(текст), y)",
)
_cell(
    "strings over several lines keep their white space",
    '''
    sql = """
        select *
          from t
    \ttab
    """
    y = (x
         * 2
         + 1)
    z = y \\
        .sum()
    f"{z.item():>10.2f}" f"{sql!r}"
    ''',
    setup=_X,
    after="print(repr(sql), y, _)",
)
_cell("several statements on one line", "a = x + 1; b = a * 2; a += b; print(a.sum().item()); b", setup=_X, after="a")
_cell(
    "blank lines and comments between",
    "\n\n# first\n\ny = x * 2\n\n\n# then\nz = y + 1  # done\n\n",
    setup=_X,
    after="z",
)
_cell(
    "future import",
    """
    from __future__ import annotations
    def f(v: Undefined) -> Missing:
        return v * 2
    y = f(x)
    """,
    setup=_X,
    after="print(f.__annotations__, y)",
)
_cell(
    "names of the shell used",
    "y = get_ipython().user_ns['x'] * 2\nn = len(In) >= 0\nglobals()['made'] = y + 1\nz = made * 2",
    setup=_X,
    after="print(made, z, n)",
)
_cell(
    "names of the namespace listed",
    """
    y = x * 2
    names = sorted(k for k in globals() if not k.startswith('_') and k not in ('report', 'In', 'Out'))
    print(names, 'y' in vars(), __name__)
    """,
    setup=_X,
    after="dir()[-1]",
)
_cell(
    "locals and eval and exec",
    """
    y = eval("x * 2")
    exec("z = y + 1")
    same = locals() is globals()
    w = z * 3
    """,
    setup=_X,
    after="print(z, w, same)",
)
_cell("a builtin shadowed", "sum = x.sum()\nlen = 3\ny = sum * len", setup=_X, after="del len, sum\nprint(len([1]), y)")
_cell(
    "a name of torch shadowed",
    "old = torch.relu\ntorch_relu = lambda v: v + 1\ny = torch_relu(x) + old(x)",
    setup=_X,
    after="y",
)

# --- errors -----------------------------------------------------------------------------------------------------------

_cell(
    "shape error midway",
    """
    a = x * 2
    b = a + 1
    c = a @ b
    d = c * 2
    e = d + 1
    """,
    setup=_X,
    after=("print(a, b, 'c' in globals(), 'd' in globals())", "a.add_(1)"),
    captures=False,
)
_cell(
    "in-place work before an error stays",
    """
    x.add_(1)
    y = x * 2
    x.mul_(3)
    z = torch.cat([x, torch.ones(5)])
    x.zero_()
    """,
    setup=(_X, "alias = x"),
    after="print(alias, y, 'z' in globals())",
    captures=False,
)
_cell(
    "name error",
    "a = x * 2\nb = a + undefined_name\nc = b * 2",
    setup=_X,
    after="print(a, 'b' in globals())",
    captures=False,
)
_cell(
    "division by zero",
    "a = x * 2\nn = 1 / 0\nb = a + 1",
    setup=_X,
    after="print(a, 'b' in globals())",
    captures=False,
)
_cell(
    "user's own exception",
    """
    class TooLarge(ValueError):
        pass
    a = x * 2
    if a.max() > 3:
        raise TooLarge(f"largest is {a.max().item()}")
    b = a + 1
    """,
    setup=_X,
    after="print(a, 'b' in globals())",
)
_cell(
    "exception raised from another",
    "a = x * 2\ntry:\n    {}['k']\nexcept KeyError as e:\n    raise RuntimeError('wrapped') from e\nb = 1",
    setup=_X,
    after="print(a, 'e' in globals())",
)
_cell(
    "error while handling an error",
    "a = x * 2\ntry:\n    a @ a\nexcept RuntimeError:\n    {}['k']\nb = 1",
    setup=_X,
    after="a",
)
_cell(
    "assertion", "a = x * 2\nassert (a < 3).all(), 'too large'\nb = a + 1", setup=_X, after="print(a, 'b' in globals())"
)
_cell("assertion without a message", "a = x * 2\nassert a.sum() == 0\nb = a + 1", setup=_X, after="a")
_cell(
    "error inside a called function",
    """
    def inner(v):
        w = v + 1
        return w @ torch.ones(7)
    def outer(v):
        u = v * 2
        return inner(u)
    y = x + 1
    z = outer(y)
    """,
    setup=_X,
    after="print(y, 'z' in globals())",
    captures=False,
)
_cell(
    "error inside a function of an earlier cell",
    """
    y = x + 1
    z = inner(y)
    w = z + 1
    """,
    setup=(_X, "def inner(v):\n    u = v * 2\n    return u.reshape(7)"),
    after="print(y, 'z' in globals())",
    captures=False,
)
_cell(
    "error in the third iteration",
    """
    total = torch.zeros(3)
    for i in range(5):
        total += x[0] * i
        if i == 2:
            total = total + torch.ones(4)
        print("iteration", i)
    done = True
    """,
    setup=_X,
    after="print(i, total, 'done' in globals())",
)
_cell(
    "error in a training loop",
    """
    for step in range(4):
        opt.zero_grad()
        loss = (model(batches[step]) - 1).pow(2).mean()
        loss.backward()
        opt.step()
        print(f"{loss.item():.5f}")
    """,
    setup=(
        _TRAIN,
        "opt = torch.optim.SGD(model.parameters(), lr=0.1)\nbatches = [data, data[:8], torch.ones(3, 5), data]",
    ),
    after="print(step, loss)",
)
_cell(
    "error inside a module's forward",
    """
    y = data * 2
    out = model(y[:, :3])
    """,
    setup=_TRAIN,
    after="y",
    captures=False,
)
_cell(
    "error in the backward",
    """
    y = Bad.apply(w * 2)
    y.sum().backward()
    z = 1
    """,
    setup=(
        _TORCH,
        """
        w = torch.ones(3, requires_grad=True)
        class Bad(torch.autograd.Function):
            @staticmethod
            def forward(ctx, v):
                return v * 1
            @staticmethod
            def backward(ctx, grad):
                raise ArithmeticError("no gradient today")
        """,
    ),
    after="print(y, w.grad)",
)
_cell(
    "in-place on a leaf that requires grad",
    "y = w * 2\nw.add_(1)\nz = y + 1",
    setup="import torch\nw = torch.ones(3, requires_grad=True)",
    after="print(y, w)",
    captures=False,
)
_cell(
    "saved value modified before the backward",
    """
    y = w.exp()
    y.add_(1)
    y.sum().backward()
    """,
    setup="import torch\nw = torch.ones(3, requires_grad=True)",
    after="print(y, w.grad)",
)
_cell("error with an item that is not one", "y = x * 2\nn = y.item()\nz = 1", setup=_X, after="y")
_cell(
    "error of an index",
    "y = x * 2\nv = y[5]\nz = 1",
    setup=_X,
    after="y",
    captures=False,
)
_cell("error of an attribute", "y = x * 2\nv = y.no_such_thing\nz = 1", setup=_X, after="y")
_cell(
    "error of a dtype",
    "y = x * 2\nv = y.long() @ y\nz = 1",
    setup=_X,
    after="y",
    captures=False,
)
_cell(
    "error of Python types",
    "y = x * 2\nv = y + 'text'\nz = 1",
    setup=_X,
    after="y",
    captures=False,
)
_cell(
    "an error in the last expression",
    "y = x * 2\ny @ y",
    setup=_X,
    after="print(y, len(Out))",
    captures=False,
)
_cell(
    "an error in the repr of the last expression",
    "y = x * 2\nbad",
    setup=(_X, "class Bad:\n    def __repr__(self):\n        raise ValueError('no repr')\nbad = Bad()"),
    after="y",
)
_cell(
    "finally runs before an error is shown",
    "try:\n    y = x * 2\n    y @ y\nfinally:\n    print('cleaned')\n    x.zero_()\nz = 1",
    setup=_X,
    after="print(x, y)",
)
_cell(
    "a line that cannot be compiled, before the last expression",
    "y = x * 2\n__debug__ = y\ny.sum()",
    setup=(_X, "y = x"),
    after="print(y)",
)
_cell("syntax error", "y = x * 2\nz = = 3\n", setup=_X, after="print('y' in globals())", captures=False)
_cell("indentation error", "y = x * 2\n  z = 3\n", setup=_X, after="print('y' in globals())", captures=False)
_cell(
    "syntax error that only the compiler sees",
    "y = x * 2\nreturn y\n",
    setup=_X,
    after="print('y' in globals())",
    captures=False,
)
_cell("system exit", "y = x * 2\nraise SystemExit(3)\nz = 1", setup=_X, after="print(y, 'z' in globals())")
_cell("keyboard interrupt", "y = x * 2\nraise KeyboardInterrupt\nz = 1", setup=_X, after="print(y, 'z' in globals())")
_cell(
    "an interrupt",
    "x.add_(1)\ny = x * 2\nsignal.raise_signal(signal.SIGINT)\nx.zero_()",
    setup=(_X, "import signal"),
    after="print(x, y)",
)
_cell(
    "an interrupt inside a function",
    """
    def busy(v):
        w = v * 2
        signal.raise_signal(signal.SIGINT)
        return w + 1
    y = x + 1
    z = busy(y)
    """,
    setup=(_X, "import signal"),
    after="print(y, 'z' in globals())",
)
_cell(
    "exception group",
    "y = x * 2\nraise ExceptionGroup('several', [ValueError('a'), TypeError('b')])",
    setup=_X,
    after="y",
)
_cell(
    "an error with notes",
    "y = x * 2\nerror = ValueError('noted')\nerror.add_note('look here')\nraise error",
    setup=_X,
    after="y",
)
_cell(
    "traceback printed by the user",
    "import traceback\ny = x * 2\ntry:\n    y @ y\nexcept RuntimeError:\n    traceback.print_exc()\nz = y + 1",
    setup=_X,
    after="z",
)
_cell("an unknown magic", "y = x * 2\n%no_such_magic_here\nz = 1", setup=_X, after="print(y, 'z' in globals())")

# --- run again --------------------------------------------------------------------------------------------------------

_cell(
    "run twice: training step",
    """
    opt.zero_grad()
    loss = (model(data) - target).pow(2).mean()
    loss.backward()
    opt.step()
    print(f"{loss.item():.6f}")
    """,
    setup=(_TRAIN, "opt = torch.optim.Adam(model.parameters(), lr=0.01)"),
    after="opt.state_dict()",
    again=True,
)
_cell(
    "run twice: in-place work and random numbers",
    "x.add_(torch.rand(2, 3))\ny = x * 2\ny.sum()",
    setup=(_X, "alias = x"),
    after="print(alias, y, torch.rand(1))",
    again=True,
)
_cell("run twice: a rebound name", "x = x * 2\nn = n + 1", setup=(_X, "n = 0"), after="print(x, n)", again=True)
_cell("run twice: functions", "def f(v):\n    return v * 2 + 1\ny = f(x)", setup=_X, after="print(y, f(y))", again=True)
_cell(
    "run twice: a class",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 2)
        def forward(self, v):
            return self.fc(v).relu()
    net = Net()
    y = net(data).sum()
    """,
    setup=_TRAIN,
    after=("y.backward()", "print(isinstance(net, Net), net.fc.weight.grad)"),
)

# --- code that Dynamo skips -------------------------------------------------------------------------------------------

_cell(
    "numpy work on a tensor's memory",
    "a = x.numpy()\na += 1\ns = x.sum()",
    setup=_X,
    after="print(x, a, s)",
    captures=False,
)
_cell(
    "numpy work and effects of Python",
    "log.append(1)\na += 1\nview[0] += 1\ny = torch.nn.functional.dropout(x.t() + 1)",
    setup=(_X, "import numpy as np\nlog, a = [], np.zeros(3)\nview = memoryview(bytearray(2))"),
    after="print(log, a, bytes(view), y)",
    captures=False,
)
_cell(
    "a custom Function that gets None",
    "y = F.apply(x)[0].sum()\ny.backward()",
    setup=(
        "import torch\nx = torch.ones(3, requires_grad=True)",
        """
        class F(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.set_materialize_grads(False)
                return x * 2, x * 3
            @staticmethod
            def backward(ctx, first, second):
                return first if second is None else first + 100
        """,
    ),
    after="print(y, x.grad)",
    captures=False,
)
_cell(
    "a hook between two calls",
    """
    def f(v):
        return model(v) * 2
    y = f(data)
    handle = model[0].register_forward_hook(lambda module, args, out: out * 0)
    z = f(data)
    """,
    setup=_TRAIN,
    after="print(y, z)",
)
_cell(
    "a transformer that leaves padding out",
    "with torch.no_grad():\n    y = encoder(z, src_key_padding_mask=mask)\n    s = y.sum() * 2",
    setup="""
    import torch
    from torch import nn
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1).eval()
    z, mask = torch.randn(2, 4, 8), torch.tensor([[False, False, False, True], [False, True, True, True]])
    with torch.no_grad():
        encoder(z, src_key_padding_mask=mask)  # which warns once in a process
    """,
    after="print(y, s)",
)

_cell(
    "blocks of a profiler",
    """
    def f(v):
        with torch.profiler.record_function("inside"):
            return v.sin() * 2
    with torch.profiler.record_function("around"):
        y = f(x) + 1
    z = y * 2
    z
    """,
    setup=_X,
    after="print(y, z)",
)

_cell(
    "a function mode",
    """
    def f(v):
        return torch.relu(v) * 2
    with mode:
        y = f(x)
        w = torch.relu(y)
    z = y.sin()
    """,
    setup=(
        _X,
        """
        from torch.overrides import TorchFunctionMode
        class Adds(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                result = func(*args, **(kwargs or {}))
                return result + 100 if func is torch.relu else result
        mode = Adds()
        """,
    ),
    after="print(y, w, z)",
)
_cell(
    "hooks of all modules",
    """
    y = net(x)
    z = y.sum()
    """,
    setup=(
        _X,
        """
        from torch import nn
        net = nn.Sequential(nn.Tanh(), nn.Sigmoid())
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 2)
        """,
    ),
    after="handle.remove()\nprint(y, z)",
    again=True,
)
_cell(
    "a state by parameter",
    """
    y = x * state[weight]
    z = y + weight.grad
    """,
    setup=(
        _X,
        """
        weight = torch.nn.Parameter(torch.ones(2, 3))
        weight.grad = torch.ones(2, 3)
        state = {weight: torch.full((3,), 2.0)}
        """,
    ),
    after="print(y, z)",
)
_BASE = """
import torch
leaf = torch.ones(2, 3, requires_grad=True)
b = leaf.add(1)
a, c = b[0], b.t()
"""
_cell(
    "a written view whose base is no input",
    "a.mul_(2)\ny = c * 3\nz = a.unsqueeze(0)",
    setup=_BASE,
    after="print(a, b, c, y, z, torch.autograd.grad(y.sum() + z.sum() + b.sum(), leaf))",
)
_cell(
    "a written view whose base is no input, with its backward",
    "a.mul_(2)\ny = (c * 3).sum()\ny.backward()",
    setup=_BASE,
    after="print(a, b, y, leaf.grad)",
)
_FREED = """
import torch
w, values = torch.zeros(4), torch.arange(4.0)
w.untyped_storage().resize_(0)
"""
for _options in ("", "--time"):
    _cell(
        f"a parameter whose storage is freed{_options and ', with timing'}",
        """
        w.untyped_storage().resize_(16)
        w.copy_(values)
        y = w.sin()
        w.untyped_storage().resize_(0)
        """,
        setup=_FREED,
        after="print(y, w.untyped_storage().nbytes())",
        options=_options,
    )
_cell("a batch of one", "c = b.sin()\nc[:, 0] += 1\nc", setup=_X + "\nb = x[:1].clone()", after="print(c)")

# --- ways to run it ---------------------------------------------------------------------------------------------------

_cell("without verification", "x.add_(1)\ny = x * 2\ny", setup=_X, after="print(x, y)", options="--no-verify")
_cell("quietly", "x.add_(1)\ny = x * 2\ny", setup=_X, after="print(x, y)", options="--quiet")
_cell("with timing", "x.add_(1)\ny = (x * 2).sum()\ny", setup=_X, after="print(x, y, torch.rand(1))", options="--time")

CELLS: tuple[Cell, ...] = tuple(_CELLS)
