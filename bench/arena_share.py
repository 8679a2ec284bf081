"""How much of what a compiled step allocates lies at planned addresses, with `placement="planned"`, by model.

    python bench/arena_share.py [--models gpt2,unet,…] [--batch 4] [--budget 60%] [--out FILE]
    python bench/arena_share.py --read bench/results/arena_share.json

Inductor's programs of each model (small configurations, momentum) are written, and neither compiled nor run; a plan is made, with
its arena. Each time that the plan brings a tensor of the program to the device is an allocation: in the arena; an output
or a gradient, which leaves the step; or the result of a library call that allocates it. What library calls have
beside their results, and what the optimizer has, is not counted. 5 to 60 CPU seconds a model.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from by_model import run_by_model
from torch._subclasses.fake_tensor import FakeTensorMode

from overspill.capture.compiled.graph import Captured
from overspill.capture.programs.functions import allocated_as
from overspill.core import Schedule, Verb
from overspill.core.units import format_bytes
from overspill.models import load, names, optimizer_named
from overspill.models.step import TrainingStep
from overspill.placement.packing import solver_named
from overspill.placement.place import SEARCH
from overspill.runtime.arena import Places, places_of
from overspill.runtime.compiled.partitions import Partitioned
from overspill.runtime.compiled.unrun import CPU, of_unrun
from overspill.runtime.options import Options, budget_for, device_for, plan_graph

RESULTS = Path(__file__).parent / "results" / "arena_share.json"
ARENA, LEAVES, LIBRARY, OTHER = "arena", "leaves", "library", "other"


def allocated(captured: Captured, schedule: Schedule, places: Places) -> list[tuple[str, str, int]]:
    """Each allocation of a step: where it is, the op that makes it, and its bytes."""
    graph, leaving = captured.graph, captured.handed_out()
    here = {t.id for t in graph.tensors if t.persistent}
    roots = {t: captured.joint.roots.get(key, ()) for key, t in captured.tensor_of.items()}
    found = []
    for position, instruction in enumerate(schedule.instructions):
        target, op = instruction.target, instruction.verb.value
        made: tuple[int, ...] = ()
        if instruction.verb is Verb.FREE:
            here.discard(target)
        elif instruction.verb is Verb.PREFETCH:
            made = (target,)
        elif instruction.verb in (Verb.RUN, Verb.RECOMPUTE) and target in captured.nodes:
            made, op = graph.ops[target].writes, str(captured.nodes[target].target)
        for tensor in made:
            if tensor in here or not graph.tensors[tensor].nbytes:
                continue
            here.add(tensor)
            if (tensor, position) in places.offsets:
                where = ARENA
            elif tensor in leaving:
                where = LEAVES
            elif not any(allocated_as(root) for root in roots.get(tensor, ())):
                where = LIBRARY
            else:
                where = OTHER
            found.append((where, op, graph.tensors[tensor].nbytes))
    return found


def share(model: str, batch: int, budget: str | None) -> dict[str, Any]:
    """One model's bytes and numbers of allocations, by where they are."""
    options = Options(budget, backend="inductor", device="a100-40gb", partition=1.0)
    device = device_for(options, CPU)

    def use(partitioned: Partitioned[Captured]) -> list[tuple[str, str, int]]:
        (captured,) = partitioned
        nbytes = budget_for(options, captured.graph, device, CPU)
        schedule = plan_graph(options, captured.graph, device, nbytes).schedule
        return allocated(captured, schedule, places_of(captured, schedule, solver_named(), SEARCH))

    torch._dynamo.reset()
    torch.manual_seed(0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        job = load(model, small=True)
        step = TrainingStep(job)
        optimizer = optimizer_named("momentum")(step.parameters())
        found = of_unrun(step, job.make_batch(batch), optimizer, options, use)
    nbytes, count, by_call = Counter[str](), Counter[str](), Counter[str]()
    for where, op, size in found:
        nbytes[where] += size
        count[where] += 1
        if where not in (ARENA, LEAVES):
            by_call[op] += size
    return {"model": model, "bytes": nbytes, "allocations": count, "library_bytes": dict(by_call.most_common())}


def table(record: dict[str, Any]) -> str:
    """Markdown: a line a model, or several that are alike."""
    alike: dict[str, list[str]] = {}
    for row in record["models"]:
        nbytes, count = Counter(row["bytes"]), Counter(row["allocations"])
        whole, stays = nbytes.total(), nbytes.total() - nbytes[LEAVES]
        cells = (
            f"{format_bytes(whole)} | {nbytes[ARENA] / whole:.0%} | {nbytes[LEAVES] / whole:.0%} | "
            f"{nbytes[LIBRARY] / whole:.0%} | {nbytes[ARENA] / stays:.0%} | {count[ARENA]} of {count.total()}"
        )
        alike.setdefault(cells, []).append(row["model"])
    return "\n".join(
        [
            f"Small configurations at batch {record['batch']}, momentum, budget {record['budget'] or 'the whole device'}:",
            "",
            "| model | allocated a step | in the arena | leaves the step | library calls | in the arena, of what stays | allocations in the arena |",
            "|---|---|---|---|---|---|---|",
            *(f"| {', '.join(models)} | {cells} |" for cells, models in alike.items()),
        ]
    )


def main() -> None:
    """Count, record, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--budget")
    run_by_model(
        parser, ",".join(names()), RESULTS, lambda model, asked: [share(model, asked.batch, asked.budget)], table,
        slice(-1, None), "batch", "budget",
    )  # fmt: skip


if __name__ == "__main__":
    main()
