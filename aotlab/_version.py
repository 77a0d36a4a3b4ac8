"""The version of aotlab, written down once; the build reads it here too."""

from __future__ import annotations

__version__ = "0.1.0"
