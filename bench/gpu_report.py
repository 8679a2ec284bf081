"""The lines of a GPU campaign as tables for the docs, and what each figure decides.

    python bench/gpu_report.py FILE… [--decisions]

Markdown on standard output. Every rule says its threshold, whether it holds, by which figures, and what to do where it
does not. A record of the CPU or of a stand-in is called one. The exit code is 1 where a rule is crossed or an experiment failed.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from gpu import decisions, lines, tables
from gpu.catalogue import FIRST
from gpu.lines import Line

STAND_IN = "stand-in"


def machine(known: Sequence[Line]) -> str:
    """What the lines were recorded on, and whether their figures are those of a GPU. Raises ValueError for several."""
    devices = {(str(line.device.get("kind")), str(line.device.get("name"))) for line in known}
    if len(devices) > 1:
        raise ValueError(f"the lines are of several devices: {', '.join(' '.join(d) for d in sorted(devices))}")
    last = known[-1]
    versions = ", ".join(f"{name} {value}" for name, value in last.versions.items() if value)
    name = last.device.get("name") or last.device.get("kind")
    told = f"Recorded on {name}, {known[0].date[:10]}; {versions}."
    if last.device.get("kind") == "cpu":
        return (
            told
            + "\n\n**A rehearsal on the CPU, in small: it shows that the experiments run. No figure is one of a GPU.**"
        )
    if STAND_IN in str(name).lower():
        return told + "\n\n**A rehearsal on a stand-in whose kernels do nothing. No figure is one of a GPU.**"
    return told


def decided(found: tables.Found) -> tuple[str, bool]:
    """The rules as a table, and whether any is crossed."""
    told = decisions.verdicts(found)
    rows: list[tuple[object, ...]] = [
        (v.state, v.rule, v.evidence or None, v.action or None)
        for state in (decisions.CROSSED, decisions.UNKNOWN)
        for v in told
        if v.state == state
    ]
    held = Counter(v.rule for v in told if v.state == decisions.HELD)
    asked = Counter(v.rule for v in told)
    rows += [(decisions.HELD, rule, f"{count} of {asked[rule]}", None) for rule, count in held.items()]
    return tables.table(("", "rule", "by", "do"), rows), any(v.state == decisions.CROSSED for v in told)


def report(known: Sequence[Line]) -> tuple[str, bool]:
    """All tables, and whether something is to be done. Raises ValueError."""
    found = tables.figures_of(known)
    rules, crossed = decided(found)
    counts = Counter(line.status for line in lines.latest(known).values())
    parts = [machine(known), ", ".join(f"{n} {status}" for status, n in counts.items())]
    sections = {
        "What it decides": rules,
        "Costs": tables.costs(found),
        "Bits": tables.bits(found),
        "Peaks": tables.peaks(found),
        "Is a card of that size enough?": tables.survival(found),
        **{f"Step times: {job}": tables.step_times(found, job) for job in FIRST},
        "Profile of one step": tables.profiles(found),
        "Recordings of a step": tables.recordings(found),
        "Plans by measured op times": tables.again(found),
        "Estimates": tables.estimates(found),
        "Larger than memory": tables.larger(found),
        "A shared GPU": tables.shared(found),
        "Allocators": tables.allocators(found),
        "Not finished": tables.unfinished(known),
    }
    parts += [f"## {title}\n\n{text}" for title, text in sections.items() if text]
    failed = any(line.status in (lines.FAILED, lines.TIMEOUT) for line in lines.latest(known).values())
    return "\n\n".join(parts), crossed or failed


def main() -> None:
    """Print the report, or only the decisions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="what gpu_campaign.py wrote")
    parser.add_argument("--decisions", action="store_true", help="no tables of figures")
    asked = parser.parse_args()
    try:
        known = lines.read(asked.files)
        if not known:
            parser.error("there is no line in it")
        text, acts = report(known)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(decided(tables.figures_of(known))[0] if asked.decisions else text)
    sys.exit(acts)


if __name__ == "__main__":
    main()
