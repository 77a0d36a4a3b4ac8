"""What the functional wrappers say after the run: mutations, aliases, views."""

from aotlab.analysis.containers import Places
from aotlab.analysis.inputs import Entered, enter, input_info, value_of
from aotlab.analysis.outputs import Outputs, read_outputs

__all__ = ["Entered", "Outputs", "Places", "enter", "input_info", "read_outputs", "value_of"]
