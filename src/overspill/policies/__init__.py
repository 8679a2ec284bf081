"""The policies, by name.

Each is one file here, or comes from another package, as those of papers do.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy

from overspill.core.errors import RequestError
from overspill.core.registry import Registry, classes_in

from .base import Policy as Policy
from .parameters import Parameter as Parameter
from .parameters import read_parameters

_PAPERS = (
    "dymem", "lms", "sequential", "superneurons", "superneurons-offload", "vdnn-all", "vdnn-conv", "vdnn-dynamic",
    "vdnn-fastest", "window",
)  # fmt: skip
POLICIES: Registry[type[Policy]] = Registry(
    "policy",
    "policies",
    classes_in(__name__, Policy),  # type: ignore[type-abstract]
    _PAPERS,
    by_name=True,
)


IDEAS = {
    "vdnn": "vDNN's policies are vdnn-all, vdnn-conv and vdnn-dynamic, which takes the first that fits; its pool is "
    "placement=cnmem",
    "virtual-addressing": "it says where blocks lie, and not what moves: placement=chunked simulates it; what moves in "
    "that paper is for the policy window",
    "profile-guided": "it says where blocks lie, and nothing moves: its heuristic is placement=skyline, its integer "
    "program placement=mip",
}
"""Names of ideas in papers that are not policies, and where these ideas are here."""


def policy_named(name: str | Policy) -> Policy:
    """Return the policy `NAME` or `NAME:P=V,Q`, with parameters; a policy is itself. Raises RequestError."""
    if isinstance(name, Policy):
        return name
    if not isinstance(name, str):
        raise RequestError(f"{name!r} is no policy; give its name, as 'auto', or an object of its class")
    kind, colon, text = (name, "", "") if name in POLICIES else name.partition(":")
    if kind.lower() in IDEAS and kind not in POLICIES:
        raise RequestError(f"no policy is called {kind!r}: {IDEAS[kind.lower()]}")
    found = POLICIES.named(kind)
    return found(**read_parameters(kind, found.every_parameter(), text)) if colon else found()


def with_update(policy: str | Policy, update: str) -> str | Policy:
    """Return `policy` with its parameter `update`: where the step's updates run. Raises RequestError if it has none."""
    if update == "device":
        return policy
    chosen = policy_named(policy)
    if not any(parameter.field == "update" for parameter in chosen.parameters):
        raise RequestError(f"update={update!r} is for the policy auto; leave out policy={chosen}")
    changed = copy(chosen)
    vars(changed).update(read_parameters(chosen.name, chosen.parameters, f"update={update}"))
    return changed


def with_updates(policies: Iterable[str | Policy], update: str) -> tuple[str | Policy, ...]:
    """Return `policies` with the parameter `update`, those that have it. Raises RequestError if none has."""
    found = tuple(policies)
    has = [any(parameter.field == "update" for parameter in policy_named(one).parameters) for one in found]
    if update != "device" and not any(has):
        raise RequestError(f"update={update!r} is for the policy auto; name it too")
    return tuple(with_update(one, update) if its else one for one, its in zip(found, has, strict=True))


def without_update(policy: str) -> tuple[str, str]:
    """Return the text of a policy without its parameter `update`, and that parameter's value, empty if not given."""
    name, _, text = policy.partition(":")
    parts = text.split(",") if text else []
    update = next((part.removeprefix("update=") for part in parts if part.startswith("update=")), "")
    rest = ",".join(part for part in parts if not part.startswith("update="))
    return (f"{name}:{rest}" if rest else name), update


def policies_in(text: str) -> tuple[str, ...]:
    """Return the policies in `A,B:P=V,Q,C`, each once.

    A part that is a parameter of the policy before it belongs to that policy.
    """
    found: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if found and _belongs(part, found[-1]):
            found[-1] += f",{part}"
        else:
            found.append(part)
    return tuple(dict.fromkeys(found))


def _belongs(part: str, policy: str) -> bool:
    """Return whether `part` is a parameter of `policy`, which has others."""
    name, colon, _ = policy.partition(":")
    if not colon or part in POLICIES:
        return False
    known = POLICIES[name].every_parameter() if name in POLICIES else ()
    return "=" in part.partition(":")[0] or part in {parameter.name for parameter in known}
