"""A sharded language model of 70B: `auto` against the best of what people choose by hand, at equal memory.

    python bench/sharded.py [--layers 80] [--gpus 8,64] [--seq-len 8192] [--dtype float32] [--json FILE]
    python bench/sharded.py --run [--rounds 6]

With --run two gloo ranks on this machine train a small decoder by FSDP2 and by planned steps, in turns
(`sharded_ranks.py`; in the same two processes, so that all have the same heap). Else all is simulated on h100s, in live
bytes, but planning seconds. By hand: parameters resharded after forward or not, no, selective or full checkpointing of
blocks, saved activations offloaded or not. Selective keeps attention's results and every second matrix product's, as
torchtitan does. Each way takes so much memory; `auto` plans with the same, against the fastest way that takes no more.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from math import exp, log
from pathlib import Path

import sharded_ranks
import torch
from llm import OffloadSaved
from paired import json_record

from overspill.core import Device, Graph, LayerType, Schedule
from overspill.core.units import format_bytes
from overspill.costs import op_seconds
from overspill.devices import load_device
from overspill.job import Job, NamedModel, Parallel
from overspill.planning.assemble import assemble
from overspill.planning.step_program import StepProgram
from overspill.plans.plan import make_plan
from overspill.policies.base import Policy
from overspill.policies.in_core import checkpointed, given_to_checkpoints
from overspill.runtime.options import Options
from overspill.runtime.preview import step_of
from overspill.simulate import check, simulate

CHECKPOINTING = ("no", "selective", "full")


@dataclass(frozen=True)
class Way:
    """What is chosen by hand."""

    reshard: bool
    checkpointing: str
    offload: bool

    def __str__(self) -> str:
        """The choice in words."""
        parts = ["reshard" if self.reshard else "keep", f"{self.checkpointing} checkpointing"]
        return ", ".join([*parts, *(["offload"] if self.offload else [])])

    def dropped(self, graph: Graph) -> list[int]:
        """Tensors that are made again in backward."""
        makers = {t: graph.ops[graph.producer[t]] for t in checkpointed(graph)}
        products = [op.id for op in graph.ops if op.layer_type is LayerType.LINEAR and op.flops]
        kept = {*products[1::2], *(op.id for op in graph.ops if op.layer_type is LayerType.ATTENTION)}
        return [
            tensor
            for tensor, op in makers.items()
            if (self.reshard if op.collective else self._again(selective=op.id not in kept))
        ]

    def _again(self, *, selective: bool) -> bool:
        return self.checkpointing == "full" or (self.checkpointing == "selective" and selective)


class ByHand(Policy):
    """A step as it is chosen by hand."""

    name = "by-hand"

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way = way

    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:
        dropped = self.way.dropped(graph)
        if self.way.offload:
            return OffloadSaved(dropped)._plan(graph, device, budget_bytes, seconds)
        return assemble(StepProgram(graph, dropped, kept=given_to_checkpoints(graph)), (), self.name, budget_bytes)


def job(layers: int, gpus: int, seq_len: int, dtype: str) -> Job:
    """A model of Llama's shape with 70B parameters at 80 layers, one sequence a GPU."""
    config = (
        f"hf:llama,vocab_size=128256,num_hidden_layers={layers},hidden_size=8192,intermediate_size=28672,num_attention_heads=64,"
        "num_key_value_heads=8,max_position_embeddings=131072,rms_norm_eps=1e-5,tie_word_embeddings=False"
    )
    parallel = Parallel("fsdp", gpus, param_dtype="bfloat16" if dtype == "float32" else None)
    return Job(NamedModel(config, seq_len=seq_len), 1, "adamw", dtype, parallel=parallel, checkpointing=True)


@dataclass(frozen=True)
class Row:
    """One way by hand, and `auto` with its memory."""

    gpus: int
    way: str
    nbytes: int
    seconds: float
    exposed_seconds: float
    best_seconds: float
    auto_seconds: float
    auto_exposed_seconds: float
    planning_seconds: float

    @property
    def gain(self) -> float:
        """How many times as fast `auto` is as the best by hand."""
        return self.best_seconds / self.auto_seconds

    def line(self) -> str:
        """The row of the table."""
        return (
            f"| {self.gpus} | {self.way} | {format_bytes(self.nbytes)} | {self.seconds:.3f} | {self.exposed_seconds:.3f} "
            f"| {self.best_seconds:.3f} | {self.auto_seconds:.3f} | {self.auto_exposed_seconds:.3f} | {self.gain:.3f} "
            f"| {self.planning_seconds:.0f} s |"
        )


def rows(layers: int, gpus: int, seq_len: int, dtype: str) -> Iterator[Row]:
    """A row for each way, the fastest first."""
    begun = time.perf_counter()
    step = step_of(job(layers, gpus, seq_len, dtype), Options(device=load_device("h100"), whole_step=True))
    graph, device = step.graph, step.account.device
    print(f"{gpus} GPUs: {len(graph.ops)} ops, captured in {time.perf_counter() - begun:.0f} s", file=sys.stderr)
    ways = [Way(*choice) for choice in product((True, False), CHECKPOINTING, (False, True))]
    made = [(way, by_hand(graph, device, way)) for way in ways]
    for way, (peak, seconds, exposed) in sorted(made, key=lambda one: one[1]):
        best = min(took for _, (nbytes, took, _) in made if nbytes <= peak)
        plan = make_plan(graph, device, "auto", peak)
        ours = plan.timeline.exposed_communication_seconds
        yield Row(gpus, str(way), peak, seconds, exposed, best, plan.step_seconds, ours, plan.plan_seconds)


def by_hand(graph: Graph, device: Device, way: Way) -> tuple[int, float, float]:
    """Peak bytes, step seconds and exposed communication seconds."""
    schedule = ByHand(way).plan(graph, device)
    timeline = simulate(graph, schedule, device, op_seconds(graph, device))
    return check(graph, schedule).peak_bytes, timeline.step_seconds, timeline.exposed_communication_seconds


def main() -> None:
    """Print the table, and how much faster `auto` is on average."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--gpus", default="8,64")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--dtype", default="float32", help="of shards and states; float32 gathers in bfloat16")
    parser.add_argument("--run", action="store_true", help="measure on two ranks of this machine instead")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path, help="the record to write")
    arguments = parser.parse_args()
    if arguments.run:
        sharded_ranks.run(arguments.rounds)
        return
    print("| GPUs | by hand | memory | step | exposed | best by hand | `auto` | exposed | times as fast | planning |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    done: list[Row] = []
    for gpus in map(int, arguments.gpus.split(",")):
        found: list[Row] = []
        for row in rows(arguments.layers, gpus, arguments.seq_len, arguments.dtype):
            print(row.line(), flush=True)
            found.append(row)
        gains = [row.gain for row in found]
        mean = exp(sum(map(log, gains)) / len(gains))
        print(f"{gpus} GPUs: {mean:.3f} times as fast in the geometric mean, {min(gains):.3f} at least", flush=True)
        done += found
        if arguments.json is not None:
            arguments.json.write_text(json_record(torch.device("cpu"), rows=[asdict(row) for row in done]))


if __name__ == "__main__":
    main()
