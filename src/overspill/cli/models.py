"""`overspill models`: what can be trained by name."""

from __future__ import annotations

from dataclasses import asdict

from overspill.models import FORMS, describe

from .common import AsJson, Outcome


def models(json: AsJson = False) -> Outcome:
    """List the built-in models, and the names of those in any size. Any other is named as package.module:callable."""
    del json  # `main` reads it from the arguments
    from rich.console import Group

    from overspill.report.listing import listing

    entries = describe()
    rows = [(e.name, e.family, e.batch_input, e.summary) for e in entries]
    answer = {"models": [{k: v for k, v in asdict(e).items() if k != "builder"} for e in entries]}
    table = listing(("name", "family", "reads", "what it is"), rows)
    return Outcome(answer, Group(table, "", listing(("in any size", "what it is"), FORMS.items())))
