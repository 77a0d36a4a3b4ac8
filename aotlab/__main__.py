"""Run the command line: ``python -m aotlab`` is ``aotlab``, also from a checkout that nobody installed."""

from __future__ import annotations

import sys

from aotlab.cli import main

if __name__ == "__main__":
    sys.exit(main())
