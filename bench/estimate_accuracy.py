"""How far estimates are from measured peaks: jobs measured on real GPUs, and the tables of the DNNMem paper.

    python bench/estimate_accuracy.py [--only xmem|dnnmem] [--models TEXT] [--memtracker] [--json FILE] [--file CSV]
    python bench/estimate_accuracy.py --read bench/results/estimate_accuracy.json

Needs torchvision's and transformers' definitions in the releases that were measured; `bench/ground_truth/README.md`
says how to put them beside this environment. Every row is traced anew and replayed on its GPU's memory.

What was measured differs: xMem's rows are NVML's use above a first sample that has the bare CUDA context in it, so the
prediction is the peak of reserved memory and the kernels loaded while running; DNNMem's rows are all of NVML's use.

What is fitted to xMem's rows (`--fitted` prints it) is fitted anew for each family of networks without its rows, so
that no constant is judged by a row that it was set on; DNNMem's rows, and chosen models, are judged with the code's constants.
`in the interval` is the share of rows in their interval of nine in ten, beside the median width of these intervals.
`--memtracker` asks torch's own MemTracker of xMem's rows too, which follows fake tensors on the CPU, counts live tensors and
knows no allocator.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from estimate_calibration import Case, left_out, of_code, print_constants
from ground_truth import dnnmem, jobs
from torch import device as torch_device
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from overspill.capture.recording.recorder import Recorder
from overspill.capture.virtual_gpu.record import record
from overspill.core.units import format_bytes
from overspill.costs import capability_of
from overspill.costs.scratch import Software
from overspill.devices import load_device
from overspill.estimation import Estimate
from overspill_papers.papers.dnnmem_tables import SOFTWARE as _DNNMEM_SOFTWARE


@dataclass(frozen=True)
class Result:
    """One row: what was measured, what is predicted, and by how much it is off (a share of the measured bytes).

    `error` is None where the job died and its peak is not known; `verdict_right` is whether death was foreseen. Where a row
    can be read in two ways, `readings` says what each comes to; the likelier is predicted.
    """

    source: str
    family: str
    job: str
    measured_bytes: int
    predicted_bytes: int
    low_bytes: int
    high_bytes: int
    error: float | None
    others: dict[str, float]
    verdict_right: bool
    seconds: float
    readings: str = ""

    @property
    def inside(self) -> bool:
        """Whether what was measured lies in the interval of nine in ten."""
        return self.low_bytes <= self.measured_bytes <= self.high_bytes


def _predict(
    job: Callable[[Recorder], None], gpu: str, software: Software, memory_bytes: int | None
) -> tuple[Estimate, float]:
    """The estimate, and the seconds that it took."""
    device = load_device(gpu)
    if memory_bytes is not None:
        device = replace(device, memory_bytes=memory_bytes)
    started = time.perf_counter()
    recording = record(job, capability=capability_of(device.compute_capability))
    estimate = Estimate("", recording, device, software=software)
    estimate.fits()
    return estimate, time.perf_counter() - started


def _run_dnnmem(row: dnnmem.TableRow, recorder: Recorder) -> None:
    dnnmem.run(row, "cuda", started=recorder.start_iteration)


def _memtracker(row: jobs.Row) -> int:
    """The peak of live bytes that MemTracker sees."""
    with FakeTensorMode(), jobs.surroundings(row):
        model = jobs.build(row)
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            jobs.train(row, model, "cpu", jobs.ITERATIONS, tracker.reset_mod_stats)
        return int(tracker.get_tracker_snapshot("peak")[torch_device("cpu")]["Total"])


def _xmem(path: Path, models: str, *, memtracker: bool) -> Iterable[Result]:
    """The rows, with constants that no network of their family had a part in; those of the code where not all are there."""
    cases = [Case(row) for row in jobs.load(path) if models in row.model]
    pairs = left_out(cases) if path == jobs.DATA and not models else ((case, of_code()) for case in cases)
    for case, constants in pairs:
        row, found = case.row, case.interval(constants)
        outside = case.outside(constants).central
        readings = [format_bytes(peak + outside) for peak in case.predicted]
        others = {}
        if not row.real_oom and not row.xmem_oom and row.xmem_bytes is not None:
            others["xMem"] = row.xmem_bytes / row.ground_bytes - 1
        if memtracker and not row.real_oom:
            others["MemTracker"] = _memtracker(row) / row.ground_bytes - 1
        yield Result(
            "xMem", row.family, f"{row.model} {row.optimizer} {row.batch_size}", row.ground_bytes, found.central,
            found.low, found.high, None if row.real_oom else found.central / row.ground_bytes - 1,
            others, case.readings[0].fits != row.real_oom, case.readings[0].seconds,
            f"gradients freed before forward {readings[0]}, after it {readings[1]}" if len(readings) > 1 else "",
        )  # fmt: skip


def _dnnmem(models: str) -> Iterable[Result]:
    for row in dnnmem.load("PyTorch"):
        if models not in row.model:
            continue
        estimate, seconds = _predict(partial(_run_dnnmem, row), "p40", _DNNMEM_SOFTWARE, None)
        measured, others = row.real_bytes, {}
        if measured is not None and row.estimated_gb is not None and row.real_gb is not None:
            others["DNNMem"] = row.estimated_gb / row.real_gb - 1
        sizes = " ".join(f"{name}{size}" for name, size in (("x", row.image_side), ("seq ", row.seq_len)) if size)
        yield Result(
            "DNNMem", "tables", f"{row.model} {row.batch_size} {sizes}", measured or 0, estimate.total_bytes,
            estimate.total.low, estimate.total.high, estimate.total_bytes / measured - 1 if measured else None, others, estimate.fits() != row.real_oom, seconds,
        )  # fmt: skip


def _summary(name: str, errors: list[float], rows: Sequence[Result] = ()) -> dict[str, Any]:
    sizes = sorted(abs(error) for error in errors)
    return {
        "rows": name,
        "count": len(sizes),
        "median": statistics.median(sizes),
        "mean": statistics.mean(sizes),
        "percentile_90": sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))],
        "largest": sizes[-1],
        "bias": statistics.mean(errors),
        "inside": statistics.mean(row.inside for row in rows) if rows else None,
        "width": statistics.median((r.high_bytes - r.low_bytes) / r.measured_bytes for r in rows) if rows else None,
    }


def _summaries(results: list[Result]) -> list[dict[str, Any]]:
    found = []
    for source in dict.fromkeys(result.source for result in results):
        rows = [result for result in results if result.source == source and result.error is not None]
        families = list(dict.fromkeys(result.family for result in rows))
        groups = {f"{source}, all": rows} | {f"{source}, {f}": [r for r in rows if r.family == f] for f in families}
        found += [
            _summary(name, [r.error for r in group if r.error is not None], group)
            for name, group in groups.items()
            if group
        ]
        for other in dict.fromkeys(tool for result in rows for tool in result.others):
            found.append(_summary(f"{source}, as {other} said", [r.others[other] for r in rows if other in r.others]))
    return found


def table(summaries: Iterable[dict[str, Any]]) -> str:
    """The groups in Markdown, as they stand in docs/estimates.md."""
    lines = [
        "| estimates of | jobs | median error | mean | 90 % below | largest | bias | in the interval | its width |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    names = ("median", "mean", "percentile_90", "largest", "bias", "inside", "width")
    for row in summaries:
        shares = ("" if row[name] is None else f"{row[name]:.1%}" for name in names)
        lines.append(f"| {row['rows']} | {row['count']} | {' | '.join(shares)} |")
    return "\n".join(lines)


def _place(result: Result) -> str:
    """The interval in GiB, and whether the measured bytes are in it."""
    bounds = f"[{result.low_bytes / 2**30:5.2f}, {result.high_bytes / 2**30:5.2f}]"
    return f"{bounds} {'' if result.error is None else 'in ' if result.inside else 'OUT'}"


def main(
    only: Annotated[str, typer.Option(help="xmem or dnnmem; both by default.")] = "",
    models: Annotated[str, typer.Option(help="Only models with this in their name.")] = "",
    file: Annotated[Path, typer.Option(help="Rows in the columns of ground_truth/xmem.csv.")] = jobs.DATA,
    json_file: Annotated[Path | None, typer.Option("--json", help="Save results there.")] = None,
    memtracker: Annotated[bool, typer.Option("--memtracker", help="Ask MemTracker too.")] = False,
    read: Annotated[Path | None, typer.Option(help="Print the table of a record, and trace nothing.")] = None,
    fitted: Annotated[bool, typer.Option("--fitted", help="Print the constants that fit the rows instead.")] = False,
) -> None:
    """Print the error of every row, and of all."""
    if fitted:
        print_constants()
        return
    if read is not None:
        print(table(json.loads(read.read_text())["summaries"]))
        return
    sources: list[Iterable[Result]] = []
    if only in {"", "xmem"}:
        sources.append(_xmem(file, models, memtracker=memtracker))
    if only in {"", "dnnmem"}:
        sources.append(_dnnmem(models))
    results = []
    for source in sources:
        for result in source:
            results.append(result)
            error = "   died" if result.error is None else f"{result.error:+7.1%}"
            others = " ".join(f"{tool} {off:+.1%}" for tool, off in result.others.items())
            verdict = "" if result.verdict_right else "  WRONG VERDICT"
            print(
                f"{result.source:6} {result.job:44} measured {format_bytes(result.measured_bytes):>9} "
                f"predicted {format_bytes(result.predicted_bytes):>9} {error}  {_place(result)}  {result.seconds:4.1f} s  "
                f"{others}{verdict}{f'  ({result.readings})' if result.readings else ''}",
                flush=True,
            )
    if not results:
        sys.exit("no row has such a model")
    summaries = _summaries(results)
    print(table(summaries))
    wrong = sum(not result.verdict_right for result in results)
    seconds = [result.seconds for result in results]
    print(
        f"verdicts wrong: {wrong} of {len(results)}; seconds an estimate: median {statistics.median(seconds):.2f}, most {max(seconds):.2f}"
    )
    if json_file is not None:
        json_file.write_text(
            json.dumps({"summaries": summaries, "rows": [asdict(r) for r in results]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    typer.run(main)
