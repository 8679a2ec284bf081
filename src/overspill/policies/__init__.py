"""The policies, by name.

Each is one file here, or comes from another package, as those of papers do.
"""

from __future__ import annotations

from overspill.core.registry import Registry, classes_in

from .base import MEMORY_OPTIMAL
from .base import Policy as Policy

_PAPERS = (
    "dymem", "lms", "sequential", "superneurons", "superneurons-offload", "vdnn-all", "vdnn-conv", "vdnn-dynamic", "vdnn-fastest",
    "window",
)  # fmt: skip
POLICIES: Registry[type[Policy]] = Registry(
    "policy",
    "policies",
    classes_in(__name__, Policy),  # type: ignore[type-abstract]
    _PAPERS,
    by_name=True,
)


def policy_named(name: str) -> Policy:
    """The policy called `name`; `:m` at its end selects memory-optimal algorithms. Raises RequestError."""
    if name.endswith(MEMORY_OPTIMAL) and name not in POLICIES:
        return POLICIES.named(name.removesuffix(MEMORY_OPTIMAL))(memory_optimal=True)
    return POLICIES.named(name)()
