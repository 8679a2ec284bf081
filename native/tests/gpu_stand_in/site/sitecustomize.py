"""Lets the Python of the rehearsal import Overspill from a source tree, as that tree's own environment does.

Its compiled modules link to neither PyTorch nor CUDA: those that were built for one PyTorch serve another.
"""

import importlib.util
import os
from pathlib import Path

_finder = next(
    Path(os.environ["OVERSPILL_TREE"], ".venv").glob("lib/python3*/site-packages/_editable_skbc_overspill.py")
)
_spec = importlib.util.spec_from_file_location("_editable_skbc_overspill", _finder)
assert _spec is not None
assert _spec.loader is not None
_spec.loader.exec_module(importlib.util.module_from_spec(_spec))
