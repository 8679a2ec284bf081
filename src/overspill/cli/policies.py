"""`overspill policies`: the policies that keep a step in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import complete
from .common import AsJson, Outcome

if TYPE_CHECKING:
    from overspill.policies import Policy


def policies(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="One policy, with its parameters.",
            show_default=False,
            autocompletion=complete.policy,
        ),
    ] = None,
    json: AsJson = False,
) -> Outcome:
    """List the policies: what each does, and where it comes from."""
    del json  # `main` reads it from the arguments
    from rich.console import Group
    from rich.text import Text

    from overspill.policies import POLICIES, policy_named
    from overspill.report.listing import listing, yes

    if name is not None:
        return _one(type(policy_named(name)))
    known, broken = POLICIES.loaded()
    columns = ("name", "offloads", "recomputes", "plans for a budget", "what it does", "source")
    rows = [
        (p.name, yes(p.offloads), yes(p.recomputes), yes(p.plans_for_budget), p.summary, p.source)
        for p in known.values()
    ]
    answer = {"policies": [_figures(policy) for policy in known.values()], "broken": broken}
    return Outcome(answer, Group(listing(columns, rows), *map(Text, broken)))


def _figures(policy: type[Policy]) -> dict[str, Any]:
    """Return the JSON object of a policy."""
    return {
        "name": policy.name,
        "summary": policy.summary,
        "source": policy.source,
        "offloads": policy.offloads,
        "recomputes": policy.recomputes,
        "plans_for_budget": policy.plans_for_budget,
        "placement": policy.placement,
        "parameters": {parameter.name: parameter.help for parameter in policy.every_parameter()},
    }


def _one(policy: type[Policy]) -> Outcome:
    """Return a policy with its parameters, and how to give them."""
    from rich.console import Group
    from rich.text import Text

    from overspill.report.listing import listing

    found = _figures(policy)
    lines = [f"{policy.name}: {policy.summary} ({policy.source})"]
    if policy.placement is not None:
        lines.append(f"its paper's allocator, which --placement own takes: {policy.placement}")
    example = ",".join(p.name if p.flag else f"{p.name}=…" for p in policy.every_parameter())
    table = listing(("parameter", "what it says"), list(found["parameters"].items()))
    return Outcome(found, Group(*map(Text, lines), Text(f"given as {policy.name}:{example}"), "", table))
