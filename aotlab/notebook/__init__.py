"""The notebook: ``%%aotcompile``, the dashboard, and what they stand on."""

from __future__ import annotations

from aotlab.notebook.extension import load_ipython_extension, unload_ipython_extension

__all__ = ["load_ipython_extension", "unload_ipython_extension"]
