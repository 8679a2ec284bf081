"""`overspill policies`: the ways to keep a step in memory."""

from __future__ import annotations

from .common import AsJson, Outcome


def policies(json: AsJson = False) -> Outcome:
    """List the policies: what each does, and where it comes from."""
    del json  # `main` reads it from the arguments
    from rich.console import Group
    from rich.text import Text

    from overspill.policies import POLICIES
    from overspill.report.listing import listing, yes

    known, broken = POLICIES.loaded()
    # For the JSON, then for a reader.
    found = [
        {
            "name": name,
            "summary": policy.summary,
            "source": policy.source,
            "offloads": policy.offloads,
            "recomputes": policy.recomputes,
            "plans_for_budget": policy.plans_for_budget,
        }
        for name, policy in known.items()
    ]
    columns = ("name", "offloads", "recomputes", "plans for a budget", "what it does", "source")
    rows = [
        (p.name, yes(p.offloads), yes(p.recomputes), yes(p.plans_for_budget), p.summary, p.source)
        for p in known.values()
    ]
    return Outcome({"policies": found, "broken": broken}, Group(listing(columns, rows), *map(Text, broken)))
