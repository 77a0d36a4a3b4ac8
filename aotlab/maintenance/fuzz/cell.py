"""Write a failure as a notebook cell that reproduces it: the program, its inputs, and a comparison with eager.

The cell needs only torch and aotlab.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import warnings
from typing import Any

import torch

from aotlab import __version__
from aotlab.maintenance.fuzz.plan import Plan, engine_revision
from aotlab.verification.programs import Program

#: Tensors with at most this many elements are written as ``torch.tensor([...])``. Larger tensors are written as a call
#: of ``numbers``, a helper function in the program's text.
_MOST_ELEMENTS = 24

_ENGINES = {
    ("aotlab", False): ("import aotlab", 'compiled = aotlab.compile(program, backend="eager")'),
    ("aotlab", True): (
        "import aotlab",
        'compiled = aotlab.compile(program, frontend="dynamo", backend="eager")',
    ),
    ("upstream", False): (
        "from functorch.compile import aot_function",
        "def compiled(*args):  # compile for each call, because the result of aot_function has no guards\n"
        "    return aot_function(program, fw_compiler=lambda graph, inputs: graph)(*args)",
    ),
    ("upstream", True): ("", 'compiled = torch.compile(program, backend="aot_eager")'),
}


def write(plan: Plan, program: Program, heading: str) -> tuple[str, bool]:
    """Return the text of a cell for ``program``, and whether the cell alone shows the difference.

    A difference may depend on programs that the run executed before. ``heading`` becomes the first comment.
    """
    source, _, _ = program.source.partition("\n# backward:")
    for text in (_with_plain_numbers(source), source):
        cell = _write(plan, program, text.rstrip(), heading)
        if shows(cell):
            return cell, True
    return f"# Without the rest of the run, this cell shows no difference.\n{cell}", False


def shows(cell: str) -> bool:
    """Run a cell and tell whether its comparison finds a difference."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(cell, "<cell of the fuzzer>", "exec"), {"__name__": "__main__"})
    except Exception:  # noqa: BLE001  # a cell that raises does not show the failure
        return False
    return True


def _write(plan: Plan, program: Program, source: str, heading: str) -> str:
    engine_import, compiled = _ENGINES[plan.engine, plan.dynamo]
    if plan.min_cut:
        compiled = compiled.replace('"eager")', '"eager", partitioner=aotlab.min_cut_rematerialization_partition)')
    if plan.sizes:
        compiled = compiled[:-1] + ", dynamic=True)"
    engine = f"aotlab {__version__} ({engine_revision('aotlab')}), " if plan.engine == "aotlab" else ""
    imports: list[str] = []
    body: list[str] = []
    for line in source.splitlines():
        (imports if re.match(r"(import|from) ", line) else body).append(line)
    imports += [*([engine_import] if engine_import else []), "from aotlab.maintenance.fuzz.compare import differences"]
    settings = {"backward": repr(program.backward)}
    settings |= {name: name for name in ("before", "after") if f"\ndef {name}(" in source}
    settings |= {name: name for name in ("grad_modes", "seen") if f"\n{name} = " in source}
    settings |= {} if program.exact else {"exact": "False"}
    keywords = ", ".join(f"{key}={value}" for key, value in settings.items())
    switched = f"with aotlab.config.patch(quirks={plan.quirks}):\n    " if plan.without else ""
    calls = ", ".join(re.findall(r"^def (inputs_\d+)\(", source, re.MULTILINE))
    return "\n".join(
        [
            f"# aotlab fuzz --engine {plan.engine}, seed {plan.key}: {engine}torch {torch.__version__}",
            *(f"# {line}" for line in heading.splitlines()),
            *imports,
            "",
            "",
            re.sub(r"\n{2,}(?=def |class |@)", "\n\n\n", "\n".join(body).strip()),
            "",
            "",
            compiled,
            *(["", ""] if compiled.startswith("def ") else []),
            "# eagerly, then compiled",
            f"{switched}found = differences(program, compiled, [{calls}], {keywords})",
            'print("\\n".join(found))',
            'assert found, "no difference: it is mended"',
            "",
        ]
    )


def _with_plain_numbers(source: str) -> str:
    """Replace each call of the helper ``numbers`` by the tensor that it makes, and remove the helper.

    If a tensor is too large to write, the source is returned unchanged.
    """
    definition = re.search(r"def numbers\(.*?\n\n+(?=\w|@)", source, re.DOTALL)
    if definition is None:
        return source
    space: dict[str, Any] = {"math": math, "torch": torch}
    exec(definition[0], space)

    def plain(call: re.Match[str]) -> str:
        numbers = [int(number) for number in call[1].split(",")]
        dtype = getattr(torch, call[2])
        values = space["numbers"](*numbers, dtype=dtype)
        if not values.numel():
            return f"torch.zeros({', '.join(map(str, values.shape))}, dtype=torch.{call[2]})"
        if values.numel() > _MOST_ELEMENTS:
            return call[0]
        short = dtype in (torch.float32, torch.int64, torch.bool)
        return f"torch.tensor({values.tolist()}{'' if short else f', dtype=torch.{call[2]}'})"

    shortened = source.replace(definition[0], "")
    shortened = re.sub(r"\bnumbers\(((?:\d+, )*\d+), dtype=torch\.(\w+)\)", plain, shortened)
    return source if "numbers(" in shortened else shortened.replace("import math\n", "")
