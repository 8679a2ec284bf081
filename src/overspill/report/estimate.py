"""An estimate in a terminal: the words of `Estimate.explain`, the verdict in colour."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from overspill.core.units import format_bytes
from overspill.estimation import Estimate
from overspill.estimation.text import bars, figures, lines, moment

_BAR = "█▏▎▍▌▋▊▉"


def estimate_report(estimate: Estimate, *, asked: bool) -> RenderableType:
    """The answer; `asked` says whether the user named a GPU, so that there is a verdict to give."""
    if not asked:
        return Group(*(_line(line) for line in _without_verdict(estimate)))
    verdict, *rest = lines(estimate, estimate.changes)
    return Group(Text(verdict, style="bold green" if estimate.fits() else "bold red"), *(_line(line) for line in rest))


def _without_verdict(estimate: Estimate) -> list[str]:
    batch = "" if estimate.batch is None else f", batch {estimate.batch},"
    on = f" (context as on {estimate.device.name}; --gpu NAME asks for another)"
    fitting = ", ".join(estimate.gpus) or "none that `overspill devices` lists"
    return [
        f"{estimate.name}{batch} takes {format_bytes(estimate.total_bytes)}{on}",
        "",
        *bars(estimate),
        "",
        *moment(estimate),
        *figures(estimate),
        f"  fits on {fitting}",
    ]


def _line(line: str) -> Text:
    text = Text(line)
    text.highlight_regex(f"[{_BAR}]+", "cyan")
    return text
