"""Training loops of the libraries that people use, plainly and with the one line that sets a budget: are the bits the same?

    python bench/loops.py [--loops NAME,…] [--budget 70%] [--json FILE]
    python bench/loops.py --owned 0.8 [--loops NAME,…]
    python bench/loops.py --list
    python bench/loops.py --read bench/results/loops.json

The loops are in `loops_by_library/`, with tiny models; the line is all that Overspill adds. Each runs in a process of its
own, on one thread, with eager kernels; with `--backend inductor` by Inductor's, and plainly by stock torch.compile.
Compared are losses, norms, weights, buffers, optimizer state and the files of checkpoints. The peak is of PyTorch's allocator: placeholders and the store do not count, what the model's maker needs
before the line neither. A budget by `--owned` is a share of the bytes of weights, gradients and optimizer state, as
measured plainly. Where a budget is refused, those that refusals name are tried.
Libraries that some need: `make loops-libraries`. Some minutes for all.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="")

import torch
from job_processes import each
from loop_trials import IDENTICAL, KINDS, NOT_INSTALLED, Outcome, Ran, judged, row, run
from loops_by_library import LOOPS
from paired import json_record

from overspill.core.units import format_bytes
from overspill.planning.effort import VARIABLE
from overspill.runtime.options import BACKENDS

LIBRARIES = (
    "transformers", "accelerate", "peft", "trl", "datasets", "lightning", "bitsandbytes", "schedulefree", "diffusers",
    "sentence-transformers", "pytorch_optimizer",
)  # fmt: skip
TRIES = 4
"""So many budgets that refusals name are tried."""


def main() -> None:
    """Run loops, or print a record."""
    options = _options()
    if options.read is not None:
        print(table([Outcome(**found) for found in json.loads(options.read.read_text())["loops"]]))
        return
    if options.list:
        print(*(f"{loop.name:24s} {loop.library:14s} {loop.about}" for loop in LOOPS.values()), sep="\n")
        return
    warnings.simplefilter("ignore")
    os.environ.setdefault(VARIABLE, "0.1")  # the bits are asked for, not the best of plans
    torch.set_num_threads(1)
    for loop in (LOOPS[name] for name in options.loops):
        if not loop.missing:
            loop.load()
    found: list[Outcome] = []
    for name in options.loops:
        found.append(outcome(name, options))
        told = found[-1]
        print(f"{len(found):2d}/{len(options.loops)} {told.seconds:5.1f} s  {name:22s} {_said(told)}", flush=True)
        if told.traceback and options.verbose:
            print(told.traceback, flush=True)
        if options.json:
            record(options.json, found)
    print(table(found))


def outcome(name: str, options: argparse.Namespace) -> Outcome:
    """The outcome of a loop within the budget of `options`, or within the smallest that a refusal names."""
    loop = LOOPS[name]
    if loop.missing:
        return Outcome(name, loop.library, loop.about, NOT_INSTALLED, ", ".join(loop.missing))
    plain = _ran(name, None, options)
    if isinstance(plain, str) or plain.error:
        return judged(name, options.budget, plain, plain)
    budget: str | int = options.budget
    if options.owned is not None:
        budget = int(options.owned * plain.owned_bytes)
    within = _ran(name, budget, options)
    for _ in range(TRIES):
        if not isinstance(within, Ran) or within.floor_bytes <= (budget if isinstance(budget, int) else 0):
            break
        budget = within.floor_bytes
        within = _ran(name, budget, options)
    return judged(name, str(budget), plain, within)


def _ran(name: str, budget: str | int | None, options: argparse.Namespace) -> Ran | str:
    call = name, budget, not options.no_peaks, options.backend
    _, found = next(each([call], run, 1, options.seconds, loud=options.verbose))
    return found


def record(path: Path, found: Sequence[Outcome]) -> None:
    """Write what was found; other loops that are there stay."""
    there = json.loads(path.read_text()).get("loops", []) if path.exists() else []
    rows = {known["loop"]: known for known in there} | {one.loop: row(one) for one in found}
    ordered = [rows[name] for name in LOOPS if name in rows]
    path.write_text(json_record(torch.device("cpu"), libraries=_versions(), loops=ordered))


def _versions() -> dict[str, str]:
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return {name: found[name] for name in LIBRARIES if name in found}


def _said(found: Outcome) -> str:
    if not found.budget_bytes:
        return f"{found.kind}: {found.said}"
    sizes = [found.plain_peak_bytes, found.first_peak_bytes, found.peak_bytes, found.budget_bytes, found.owned_bytes]
    plain, first, peak, budget, owned = map(format_bytes, sizes)
    said = f": {found.said}" if found.said else ""
    return f"{found.kind}{said} (plain {plain}; first step {first}, then {peak}, budget {budget}, owned {owned})"


def table(found: Sequence[Outcome]) -> str:
    """The outcomes in Markdown: a row a loop, and below what is wrong."""
    kinds = Counter(one.kind for one in found)
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in KINDS if kinds[kind])
    rows = [
        "| loop | | outcome | weights, gradients, state | budget | peak, plain | peak, first step | peak, then |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        sizes = one.owned_bytes, one.budget_bytes, one.plain_peak_bytes, one.first_peak_bytes, one.peak_bytes
        owned, budget, *peaks = (format_bytes(size) if size else "" for size in sizes)
        below = " (below)" if one.below else ""
        rows.append(f"| `{one.loop}` | {one.about} | {one.kind} | {owned} | {budget}{below} | {' | '.join(peaks)} |")
    others = [f"- `{one.loop}`: {one.kind}: {one.said}" for one in found if one.kind != IDENTICAL]
    return "\n\n".join([counts, "\n".join(rows), *(["\n".join(others)] if others else [])])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", default=",".join(LOOPS), metavar="NAME,…")
    parser.add_argument("--budget", default="70%", help="of the line, as overspill.compile takes it")
    parser.add_argument("--owned", type=float, metavar="SHARE", help="instead: of weights, gradients and state")
    parser.add_argument("--backend", default="eager", choices=BACKENDS, help="whose kernels run")
    parser.add_argument("--no-peaks", action="store_true", help="do not record allocations")
    parser.add_argument("--seconds", type=float, default=300.0, help="a run that takes longer is a crash")
    parser.add_argument("--verbose", action="store_true", help="with all that the loops print, and tracebacks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the record to write, or to add to")
    parser.add_argument("--read", type=Path, metavar="FILE", help="print the table of a record, and run nothing")
    parser.add_argument("--list", action="store_true", help="print the names of all loops, and run nothing")
    options = parser.parse_args()
    options.loops = options.loops.split(",")
    if unknown := [name for name in options.loops if name not in LOOPS]:
        parser.error(f"--loops: no {unknown[0]}; there are {', '.join(LOOPS)}")
    return options


if __name__ == "__main__":
    main()
