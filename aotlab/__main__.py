"""Run the command line: ``python -m aotlab`` equals ``aotlab``, and also works in a checkout without installation."""

from __future__ import annotations

import sys

from aotlab.cli import main

if __name__ == "__main__":
    sys.exit(main())
