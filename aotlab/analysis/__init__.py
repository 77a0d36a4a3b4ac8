"""What the functional wrappers say after the run: mutations, aliases, views."""

from aotlab.analysis.inputs import Entered, enter, input_info, value_of
from aotlab.analysis.outputs import Outputs, read_outputs

__all__ = ["Entered", "Outputs", "enter", "input_info", "read_outputs", "value_of"]
