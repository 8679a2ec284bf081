"""Training with state in host memory: `auto`, with updates on the device, on the host and in both, against rules.

    python bench/tiers.py [--jobs 1b-full,…] [--gpus rtx4090,…] [--effort 0.2] [--json FILE]
    python bench/tiers.py --read bench/results/tiers.json
    python bench/tiers.py --measured    # what updates on the host cost here (tiers_measured.py)

All is simulated on the GPU named, in one simulator: the step as PyTorch captures it, with every block checkpointed. A
rule is what a system does with all of it, written as a schedule: what it keeps on the GPU, what it fetches how far
ahead, when gradients leave and when the host updates. Its row has the GPU memory that its schedule takes (live bytes),
if the GPU has as much. `auto` is planned for exactly these bytes, and once for all of the GPU. Every state is in host
memory if it is not on the GPU; host memory is taken to be large enough for all of them. A GPU as `rtx4090+56GiB` has so much
host memory for the store and one PCIe 4 drive below it, without rules. The optimizer is AdamW's fused kernel, on the host too.

The rules are favoured: nothing is fragmented, no Python takes time, their updates go at the same rate as ours, and they
have two blocks of gradients on the way at once. Where they clip gradients, they do not here.

`results/tiers.json` has in full 1B and 8B on three GPUs, 14B on an RTX 4090, 32B on an H100 and 70B on a GH200; with LoRA 1B,
8B and 70B on an RTX 4090 and 70B on an H100; with QLoRA 8B and 70B on an RTX 4090. `--read` prints the geometric mean over
these, and in how many rows `auto` is slower than each rule. All were planned by a tenth of the usual effort. On an RTX 4090 with
56 GiB of host memory and a drive it has 8B in full, with float32 weights and moments (`amp`), and 70B with LoRA, by a fifth.
These two, 70B in full and 70B with LoRA on an H100 are from before a call of the optimizer had a time of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path

import torch
from llm import llama, qwen
from paired import json_record
from tiers_measured import shown, updates_in_turn

from overspill.core import Device, Graph, Phase, Schedule, TensorKind, Verb
from overspill.core.errors import OverspillError
from overspill.core.units import format_bytes
from overspill.costs import op_seconds
from overspill.devices import load_device
from overspill.job import Job, NamedModel
from overspill.planning.assemble import Transfer, assemble
from overspill.planning.effort import at_effort
from overspill.planning.gaps import earliest_return, saved_gaps, swappable_gaps
from overspill.planning.on_host import HostUpdates, updates_of
from overspill.planning.step_program import Gap, StepProgram
from overspill.planning.timing import releases
from overspill.plans.plan import NO_LIMIT_BYTES, make_plan
from overspill.policies.auto import Auto
from overspill.policies.in_core import checkpointed, given_to_checkpoints
from overspill.runtime.hardware import with_disk
from overspill.runtime.options import Options
from overspill.runtime.preview import step_of
from overspill.simulate import check, simulate

GPUS = ("rtx4090", "h100", "gh200")
UPDATES = ("device", "host", "auto")
USABLE = 0.95
"""Share of a GPU's memory, without the context, that live bytes may take."""
ON_THE_WAY = 2
"""Blocks of gradients that a rule has memory for on their way to the host."""
SEQ_LEN = 4096
_BLOCK = re.compile(r"layers\.(\d+)\.")
SIZES = {
    "1b": "hf:" + llama(16, 2048, 8192, 32, "False"),
    "8b": "hf:" + llama(32, 4096, 14336, 32, "False"),
    "14b": "hf:" + qwen(40, 5120, 17408, 40, "False"),
    "32b": "hf:" + qwen(64, 5120, 25600, 64, "False"),
    "70b": "hf:" + llama(80, 8192, 28672, 64, "False"),
}
WAYS: dict[str, dict[str, object]] = {
    "full": {},
    "amp": {"dtype": "amp-bfloat16"},
    "lora": {"lora": 16},
    "qlora": {"lora": 16, "quantize": "4bit"},
}
JOBS = [f"{size}-{way}" for size in SIZES for way in WAYS]


@dataclass(frozen=True)
class Rule:
    """What a system does, whatever the model and the GPU."""

    name: str
    source: str
    resident: Callable[[int | None], bool]
    """Whether the weights of a block (None: embedding, last norm and head) stay on the GPU."""
    ahead: int
    """How many blocks ahead of their use weights are fetched."""
    checkpoints_leave: bool
    """Whether inputs of checkpointed blocks go to the host."""
    waits: bool
    """Whether the next step begins only after the last update, and not with each weight."""


RULES = (
    Rule(
        "ZeRO-Offload",
        "Ren et al. 2021, §4: weights stay, gradients leave in backward, then the CPU updates and weights come back as they are "
        "done (§5.1); without the delayed update, which changes numbers (§5.2)",
        resident=lambda _: True, ahead=0, checkpoints_leave=False, waits=False,
    ),
    Rule(
        "ZeRO-Infinity, in host memory",
        "Rajbhandari et al. 2021, §5.1 and §6.2: weights and checkpoints in host memory, the next layer's weights fetched during the "
        "present one; the CPU updates after backward",
        resident=lambda _: False, ahead=1, checkpoints_leave=True, waits=True,
    ),
    Rule(
        "MegaTrain",
        "arXiv 2604.05091 and github DLYuanGod/MegaTrain, examples/train.py@057b3b7: layers in two buffers; embedding, norm and head "
        "stay; `optimizer.step()` on the CPU after backward",
        resident=lambda block: block is None, ahead=1, checkpoints_leave=False, waits=True,
    ),
    Rule(
        "FSDP2, CPUOffloadPolicy",
        "PyTorch, fully_shard of each block and the model: a block's weights come as the one before runs, the root's stay after "
        "forward; gradients leave, `optimizer.step()` on the CPU after backward",
        resident=lambda block: block is None, ahead=1, checkpoints_leave=False, waits=True,
    ),
)  # fmt: skip


def schedule_of(rule: Rule, graph: Graph, device: Device, seconds: Sequence[float]) -> Schedule:
    """The schedule of a rule for a whole step."""
    host = HostUpdates(graph, updates_of(graph), device, seconds)
    rest = host.rest
    program = StepProgram(rest, checkpointed(rest), kept=given_to_checkpoints(rest))
    visits = _visits(program)
    weights = {t.id for t in rest.tensors if t.persistent and t.movable and t.nbytes}
    transfers = [
        moved
        for gap in swappable_gaps(program)
        if gap.tensor in weights and (moved := _streamed(rule, program, visits, gap)) is not None
    ]
    if rule.checkpoints_leave:
        transfers += _checkpoints(program, host.seconds, device, visits)
    planned = assemble(program, transfers, rule.name, None)
    peak = simulate(rest, planned, device, host.seconds).peak_bytes
    made = host.schedule(planned, peak + ON_THE_WAY * _largest_gradients(graph))
    return replace(_updates_last(graph, made, waits=rule.waits), budget_bytes=None)


def _visits(program: StepProgram) -> list[tuple[int, int | None]]:
    """Where the program enters a block, and which: None for what is in no block."""
    blocks = [int(found[1]) if (found := _BLOCK.search(program.op(step).layer)) else None for step in program.steps]
    runs = [(block, [at for at, _ in places]) for block, places in groupby(enumerate(blocks), key=lambda one: one[1])]
    # Sums and casts between the ops of a block belong to it.
    entered: list[tuple[int, int | None]] = []
    for block, places in runs:
        if block is None and len(places) < len(program.steps) / 100 and entered:
            continue
        if not entered or entered[-1][1] != block:
            entered.append((places[0], block))
    return entered


def _streamed(rule: Rule, program: StepProgram, visits: Sequence[tuple[int, int | None]], gap: Gap) -> Transfer | None:
    """The way of a weight between two uses in different visits; None where it stays."""
    own = _BLOCK.search(program.op(program.steps[gap.end]).layer)
    if rule.resident(int(own[1]) if own else None):
        return None
    last, here = (max(i for i, (at, _) in enumerate(visits) if at <= place) for place in (gap.start, gap.end))
    if last == here and not gap.wraps:
        return None
    fetched = visits[max(0, here - rule.ahead)][0] if here else 0
    first = max(0 if gap.wraps else earliest_return(program, gap), fetched)
    return Transfer(gap, gap.start + 1, gap.start + 1, min(first, gap.end), gap.end)


def _checkpoints(
    program: StepProgram, seconds: Sequence[float], device: Device, visits: Sequence[tuple[int, int | None]]
) -> list[Transfer]:
    """The ways of what checkpointed blocks keep to the host and back, one block ahead."""
    kept = given_to_checkpoints(program.graph)
    gaps = [
        gap
        for tensor, gap in saved_gaps(program).items()
        if tensor in kept and gap.end - gap.start > program.length / 50
    ]
    released = releases(program, gaps, program.live_bytes().copy(), program.clock(seconds), device, NO_LIMIT_BYTES)
    found = []
    for gap in gaps:
        here = max(i for i, (at, _) in enumerate(visits) if at <= gap.end)
        first = max(visits[max(0, here - 1)][0], earliest_return(program, gap), released[gap])
        found.append(Transfer(gap, gap.start + 1, released[gap], min(first, gap.end), gap.end))
    return found


def _largest_gradients(graph: Graph) -> int:
    """The most bytes of gradients of one block, or of one parameter outside blocks."""
    found: dict[str, int] = {}
    for op in (graph.ops[op] for op in updates_of(graph)):
        block = _BLOCK.search(op.layer)
        of = block[1] if block else op.layer
        sizes = (graph.tensors[t].nbytes for t in op.reads if graph.tensors[t].kind is TensorKind.GRADIENT)
        found[of] = found.get(of, 0) + sum(sizes)
    return max(found.values(), default=0)


def _updates_last(graph: Graph, made: Schedule, *, waits: bool) -> Schedule:
    """The schedule with its updates after backward, in the order of forward; against it if the next step `waits` for all."""
    first = {t: i for i, op in reversed(list(enumerate(graph.ops))) if op.phase is Phase.FORWARD for t in op.reads}
    updates = [i for i in made.instructions if i.verb is Verb.RUN_ON_HOST]
    updates.sort(key=lambda i: min(first[t] for t in graph.ops[i.target].writes if t in first), reverse=waits)
    others = [i for i in made.instructions if i.verb is not Verb.RUN_ON_HOST]
    return replace(made, instructions=(*others, *updates))


# -- rows


@dataclass(frozen=True)
class Row:
    """A rule, or all of the GPU, and `auto` in the same memory; seconds of a step, None without a plan."""

    job: str
    gpu: str
    what: str
    memory_bytes: int
    theirs: float | None
    device: float | None
    host: float | None
    auto: float | None
    compute: float
    """Seconds of the ops, without recomputation and updates."""
    plan_seconds: float

    def line(self) -> str:
        """The row of the table."""
        seconds = (self.theirs, self.device, self.host, self.auto)
        gain = "" if self.theirs is None or self.auto is None else f"{self.theirs / self.auto:.2f}"
        cells = ("" if s is None else f"{s:.2f}" for s in seconds)
        return f"| {self.job} | {self.gpu} | {self.what} | {format_bytes(self.memory_bytes)} | {' | '.join(cells)} | {gain} |"


HEADER = (
    "| job | GPU | memory of | live | its step (s) | `device` | `host` | `auto` | `auto` is faster by |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def rows_of(name: str, gpus: Sequence[str], effort: float) -> Iterator[Row]:
    """The rows of one job, as they come."""
    size, way = name.split("-")
    fields = {"checkpointing": True, "dtype": "bfloat16", **WAYS[way]}
    job = Job(NamedModel(SIZES[size], seq_len=SEQ_LEN), 1, "adamw-fused", **fields)  # type: ignore[arg-type]
    for gpu in gpus:
        card_name, _, host = gpu.partition("+")
        device = load_device(card_name)
        if host:
            device = with_disk(device, Options(store="pinned+disk", host_budget=host))
        begun = time.process_time()
        graph = step_of(job, Options(device=device, whole_step=True), moves=True).graph
        print(f"{name} on {gpu}: {len(graph.ops)} ops, {time.process_time() - begun:.0f} s", file=sys.stderr)
        seconds = op_seconds(graph, device)
        compute = sum(s for s, op in zip(seconds, graph.ops, strict=True) if op.phase is not Phase.UPDATE)
        card = int(USABLE * device.usable_bytes)
        planned: dict[int, dict[str, float | None]] = {}
        for rule in (*(() if host else RULES), None):
            theirs, memory = None, card
            if rule is not None:
                made = schedule_of(rule, graph, device, seconds)
                memory = check(graph, made).peak_bytes
                theirs = simulate(graph, made, device, seconds).step_seconds
                if memory > card:
                    yield Row(name, gpu, f"{rule.name} (too little)", memory, theirs, None, None, None, compute, 0.0)
                    continue
            begun = time.process_time()
            if memory not in planned:
                planned[memory] = _ours(graph, device, memory, effort)
            yield Row(
                name, gpu, "all of the GPU" if rule is None else rule.name, memory, theirs, **planned[memory],
                compute=compute, plan_seconds=time.process_time() - begun,
            )  # fmt: skip


def _ours(graph: Graph, device: Device, memory: int, effort: float) -> dict[str, float | None]:
    """The seconds of the plans of `auto`, by where updates run."""
    found: dict[str, float | None] = {}
    for update in UPDATES:
        try:
            with at_effort(effort):
                found[update] = make_plan(graph, device, Auto(update=update), memory).step_seconds
        except OverspillError:
            found[update] = None
    return found


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """How much faster `auto` is than each rule in the same memory, and than its own updates on the device alone."""
    met = [row for row in rows if row.theirs is not None and row.auto is not None]
    for rule in RULES:
        ratios = [row.theirs / row.auto for row in met if row.what == rule.name and row.theirs and row.auto]
        if ratios:
            slower = sum(ratio < 1 - 1e-9 for ratio in ratios)
            yield f"- {rule.name}: {_mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} rows, slower in {slower})"
    if met:
        yield f"- all of them: {_mean([row.theirs / row.auto for row in met if row.theirs and row.auto]):.2f}"
    if pairs := [row.device / row.auto for row in rows if row.device and row.auto]:
        yield f"- `device`: {_mean(pairs):.2f} ({min(pairs):.2f} to {max(pairs):.2f}, {len(pairs)} rows)"
    if pairs := [row.host / row.auto for row in rows if row.host and row.auto]:
        yield f"- `host`: {_mean(pairs):.2f} ({min(pairs):.2f} to {max(pairs):.2f}, {len(pairs)} rows)"


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def main() -> None:
    """Run the jobs, print the rows as they come, and record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--gpus", default=",".join(GPUS))
    parser.add_argument("--effort", type=float, default=0.2, help="share of the planner's usual effort")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the record to write; rows of others stay in it")
    parser.add_argument("--read", type=Path, metavar="FILE", help="print the table of a record, and run nothing")
    parser.add_argument("--measured", action="store_true", help="measure updates on the host here instead, in turns")
    arguments = parser.parse_args()
    if arguments.measured:
        print(shown(updates_in_turn()))
        return
    names, gpus = arguments.jobs.split(","), arguments.gpus.split(",")
    if unknown := [name for name in names if name not in JOBS]:
        parser.error(f"no job is called {unknown[0]}; there are {', '.join(JOBS)}")
    print(HEADER)
    rows: list[Row] = []
    if arguments.read:
        rows = [Row(**row) for row in json.loads(arguments.read.read_text())["rows"]]
        print(*(row.line() for row in rows), sep="\n")
    else:
        for name in names:
            for row in rows_of(name, gpus, arguments.effort):
                rows.append(row)
                print(row.line(), flush=True)
                if arguments.json:
                    _record(arguments.json, rows)
    print("", "`auto` in the same memory is faster than these by, in the geometric mean:", *summary(rows), sep="\n")


def _record(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows so far, beside others that the record has."""
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    ours = {(row.job, row.gpu) for row in rows}
    kept = [row for row in old if (row["job"], row["gpu"]) not in ours]
    path.write_text(json_record(torch.device("cpu"), rows=[*kept, *(asdict(row) for row in rows)]))


if __name__ == "__main__":
    main()
