"""What Overspill says of jobs whose memory is published: guides, READMEs and docs of other projects.

    python bench/public_figures.py [--only TEXT] [--json FILE]

The rows are `ground_truth/public.csv`: each with its source, the figure as it stands there, and what had to be assumed,
since few documents give all of a job. `measured` are figures that somebody's GPU gave, `stated` what a document reckons.
Needs transformers (`overspill[bert]`). No weight is loaded, nothing is downloaded.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from overspill.capture.recording.recording import Recording
from overspill.core import TensorKind
from overspill.core.units import format_bytes
from overspill.costs.scratch import Software
from overspill.devices import load_device
from overspill.estimation import Estimate
from overspill.estimation.api import Setting, of_job
from overspill.job import Job, NamedModel, Parallel

DATA = Path(__file__).parent / "ground_truth" / "public.csv"
_UNITS = {"B": 1, "MiB": 1 << 20, "GB": 10**9, "GiB": 1 << 30}
# What some documents use and no name of ours says.
_OPTIMIZERS = {
    "adamw-loop": partial(torch.optim.AdamW, lr=1e-3, foreach=False),
    "adamw-fused": partial(torch.optim.AdamW, lr=1e-3, fused=True),
}
_STATES = (TensorKind.PARAMETER, TensorKind.GRADIENT, TensorKind.OPTIMIZER_STATE)


@dataclass(frozen=True)
class Figure:
    """A published figure and ours; `error` is ours over theirs, less 1.

    `inside` says of what a device has in use whether it lies in our interval.
    """

    document: str
    url: str
    date: str
    kind: str
    of: str
    job: str
    published_bytes: int
    overspill_bytes: int
    error: float
    inside: bool | None = None


def _figure(row: dict[str, str]) -> Figure:
    made = _estimate(row)
    # A figure of the whole device is less what the document itself measured of the context.
    published = round((float(row["figure"]) - float(row["context"])) * _UNITS[row["unit"]])
    ours = _cache_bytes(row, made) if row["of"] == "cache" else _bytes(made, row["of"])
    return Figure(
        row["document"], row["url"], row["date"], row["kind"], row["of"], row["job"], published, ours,
        ours / published - 1, made.total.low <= published <= made.total.high if row["of"] == "device" else None,
    )  # fmt: skip


def _estimate(row: dict[str, str]) -> Estimate:
    seq_len = int(row["seq_len"]) if row["seq_len"] else None
    job = _job(NamedModel(row["model"], seq_len=seq_len), int(row["batch"]), json.loads(row["recipe"]))
    return of_job(job, Setting(load_device(row["gpu"]), software=Software(row["torch"], row["cuda"], {})))


def _job(model: NamedModel, batch: int, fields: dict[str, Any]) -> Job:
    name = fields.pop("optimizer", None)
    parallel = Parallel(**fields.pop("parallel")) if "parallel" in fields else None
    return Job(model, batch, _OPTIMIZERS.get(name, name), parallel=parallel, **fields)


def _bytes(made: Estimate, of: str) -> int:
    """What a document's figure is of."""
    if of == "device":
        return made.total_bytes
    if of == "reserved":
        return made.peak_reserved_bytes
    if of == "allocated":
        return made.peak_allocated_bytes
    if of == "weights":
        return _most(made.recording, TensorKind.PARAMETER)
    if of == "states":
        return _most(made.recording, *_STATES)
    raise ValueError(f"no figure is of {of!r}")


def _cache_bytes(row: dict[str, str], made: Estimate) -> int:
    """What all but the first of the tokens add."""
    one = json.dumps(json.loads(row["recipe"]) | {"generate": 1})
    return made.peak_allocated_bytes - _estimate(row | {"recipe": one}).peak_allocated_bytes


def _most(recording: Recording, *kinds: TensorKind) -> int:
    """The most bytes of these kinds that are alive at once."""
    changes = [0] * (recording.events + 1)
    for allocation in recording.allocations:
        if allocation.kind in kinds:
            changes[allocation.start] += allocation.nbytes
            changes[allocation.end] -= allocation.nbytes
    live = most = 0
    for change in changes:
        live += change
        most = max(most, live)
    return most


def _group(name: str, figures: list[Figure]) -> str:
    """How far apart figures are, as a row of the docs' table."""
    worst = max(figures, key=lambda figure: abs(figure.error))
    median = statistics.median(abs(figure.error) for figure in figures)
    inside = [figure.inside for figure in figures if figure.inside is not None]
    covered = f"{sum(inside)} of {len(inside)}" if inside else ""
    return f"| {name} | {len(figures)} | {median:.1%} | {worst.error:+.1%} | {worst.job} | {covered} |"


def main(
    only: Annotated[str, typer.Option(help="Only documents with this in their name.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Save results there.")] = None,
) -> None:
    """Print each published figure with what Overspill says beside it."""
    sys.path.insert(0, str(DATA.parents[1]))
    with DATA.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if only in row["document"]]
    if not rows:
        sys.exit("no document has such a name")
    figures = []
    for row in rows:
        figure = _figure(row)
        figures.append(figure)
        print(
            f"{figure.document:40} {figure.job:38} {figure.kind:8} {figure.of:9} "
            f"{format_bytes(figure.published_bytes):>9} Overspill {format_bytes(figure.overspill_bytes):>9} {figure.error:+7.1%}",
            flush=True,
        )
    groups: dict[str, list[Figure]] = {}
    for figure in figures:
        for name in (f"all {figure.kind} |", f"{figure.document} | {figure.of}"):
            groups.setdefault(name, []).append(figure)
    for name, group in groups.items():
        print(_group(name, group))
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
