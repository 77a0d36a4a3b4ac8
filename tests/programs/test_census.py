"""A census of ordinary programs: each compiles and agrees with eager, and no change of the engine may lose one.

Models and the notebooks' cells are tested elsewhere: `tests/training` and `tests/notebook/test_cells.py`.
"""

from __future__ import annotations

import pytest

from tests.engine_helpers import by_min_cut, compiled, same
from tests.programs import census_of_state
from tests.programs.census import PROGRAMS


@pytest.mark.parametrize("make", [compiled, by_min_cut])
@pytest.mark.parametrize("program", [*PROGRAMS, *census_of_state.PROGRAMS], ids=lambda program: program.__name__)
def test_compiled(program, make):
    """Each program is compiled as a whole, with one entry for two calls, and equals eager bit for bit."""
    function, args, *kwargs = program()
    same(function, *args, make=make, kwargs=kwargs[0] if kwargs else None)
