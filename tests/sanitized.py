"""A plugin of pytest (`-p tests.sanitized`): the native modules are those built in the folder OVERSPILL_NATIVE.

`native/tests/sanitize` builds them with sanitizers and runs tests with them.
"""

import importlib.util
import os
import sys
from pathlib import Path

built = Path(os.environ["OVERSPILL_NATIVE"])
modules = sorted(built.glob("overspill/**/_*.so"))
assert modules, f"no native modules in {built}"
for path in modules:
    name = ".".join((*path.relative_to(built).parts[:-1], path.name.split(".")[0]))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
