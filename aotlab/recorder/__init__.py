"""The recorder: a dispatch mode that writes down every op while the program runs on fake tensors.

It stands below autograd and functionalization, so what it sees is already pure: no mutation, no
wrappers. There are no proxies. An op that arrives is run on fake tensors and appended to a `Tape`;
which op made a value is looked up by the identity of the fake tensor, all of which the tape keeps
alive. Only when the trace is over are fx graphs written from the tape, each with just the ops that
its outputs need. One tape serves the joint graph and every later backward::

    tape = Tape()
    x = tape.enter(fake_mode.from_tensor(real))
    with Recorder(tape, fake_mode, {}):
        y = x * 2
    module = tape.graph("double", inputs=[("primals_1", x)], outputs=[y])
"""

from aotlab.recorder.boundary import clocks_watched
from aotlab.recorder.chronicle import Chronicle
from aotlab.recorder.escapes import EscapeGuard
from aotlab.recorder.hooks import Hook, HookKind
from aotlab.recorder.mode import Recorder
from aotlab.recorder.module_paths import modules_named
from aotlab.recorder.places import Place, line_of_error, user_line, user_place
from aotlab.recorder.printed import Printed
from aotlab.recorder.reshapes import Reshapes
from aotlab.recorder.running import is_tracing, locate
from aotlab.recorder.signals import NeedsInputsApart, RunEagerly
from aotlab.recorder.storage_looks import Ground
from aotlab.recorder.tape import Operation, Tape, Untraceable, tensors_in
from aotlab.recorder.warned import Warned, WarningTape, warn_again, would_raise
from aotlab.recorder.write_calls import may_overlap_itself, overlaps_itself

__all__ = [
    "Chronicle",
    "EscapeGuard",
    "Ground",
    "Hook",
    "HookKind",
    "NeedsInputsApart",
    "Operation",
    "Place",
    "Printed",
    "Recorder",
    "Reshapes",
    "RunEagerly",
    "Tape",
    "Untraceable",
    "Warned",
    "WarningTape",
    "clocks_watched",
    "is_tracing",
    "line_of_error",
    "locate",
    "may_overlap_itself",
    "modules_named",
    "overlaps_itself",
    "tensors_in",
    "user_line",
    "user_place",
    "warn_again",
    "would_raise",
]  # fmt: skip
