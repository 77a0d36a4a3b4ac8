"""The notebook workbench: ``%%aotcompile``, the dashboard, and the modules that implement them."""

from __future__ import annotations

from aotlab.notebook.extension import load_ipython_extension, unload_ipython_extension

__all__ = ["load_ipython_extension", "unload_ipython_extension"]
