"""What a step costs in the user's own loop, which cuts it where user code runs, against `train_step` at the same budget.

    python bench/in_a_loop.py [--jobs nanogpt,…] [--large llama-1b=8GiB,llama-8b=40GiB]

`overspill.compile` plans forward | loss | backward | optimizer, `overspill.train_step` the same without cuts. All step
times are simulated. The jobs are those of `jobs_by_field/`, two steps of each on this CPU within 60 % of what `train_step`
counts unmanaged; the large ones are those of `llm.py`, as `overspill plan` plans them for their GPU. Of a large job there is
a row for a card of that size, and one for its live bytes alone, which no allocator has placed. `bound` is what no
plan of the step in a loop beats, over `train_step`. Some minutes for the jobs, and as long for each large one.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from jobs_by_field import JOBS
from jobs_by_field.job import Job
from jobs_by_field.ways import Compiled, Managed, Stepped
from llm import JOBS as LARGE

from overspill.core.errors import InfeasibleBudgetError
from overspill.core.units import format_bytes, parse_bytes
from overspill.devices import load_device
from overspill.plans.plan import Plan
from overspill.pytorch.dynamo import reset_dynamo
from overspill.runtime.options import Options
from overspill.runtime.preview import JobStep, step_of

SHARE = 0.6
STEPS = 2
SMALL = (
    "llama-plain", "gpt2", "t5", "transformer", "llama-lora", "bert", "diffusion-transformer", "vit", "whisper", "dlrm",
)  # fmt: skip
"""Jobs of several fields that both ways train."""
HEADER = "| job | budget | `train_step` | in a loop | ratio | bound |\n|---|---|---|---|---|---|"
Planned = Plan | InfeasibleBudgetError


@dataclass(frozen=True)
class Pair:
    """The plans of one job within one budget."""

    job: str
    budget: str
    whole: Planned
    loop: Planned

    def line(self) -> str:
        """The row of the table."""
        cells = [_told(self.whole), _told(self.loop), "", ""]
        if isinstance(self.whole, Plan) and isinstance(self.loop, Plan):
            of = self.whole.step_seconds
            cells[2:] = [f"{self.loop.step_seconds / of:.3f}", f"{self.loop.lower_bound_seconds / of:.3f}"]
        return f"| `{self.job}` | {self.budget} | {' | '.join(cells)} |"


def _told(plan: Planned) -> str:
    if isinstance(plan, Plan):
        return f"{1e3 * plan.step_seconds:.4g} ms"
    return f"from {format_bytes(plan.floor_bytes)} on"


def small(job: Job) -> Pair:
    """The plans by which a job of a field trains here."""
    whole = _trained(job, Stepped(SHARE, "eager"))
    nbytes = whole.asked_bytes if isinstance(whole, Plan) else whole.budget_bytes
    return Pair(job.name, format_bytes(nbytes), whole, _trained(job, Compiled(nbytes, "eager")))


def _trained(job: Job, way: Managed) -> Planned:
    try:
        for _ in islice(job.trains(way), STEPS):
            pass
        return max(way.plans, key=lambda plan: len(plan.graph.ops))
    except InfeasibleBudgetError as error:
        return error
    finally:
        way.close()
        reset_dynamo()


def large(name: str, budget: str) -> Iterator[Pair]:
    """The plans of a large job for a card, and for as many live bytes as that has beside its context."""
    trained, nbytes = LARGE[name], parse_bytes(budget)
    device = load_device(trained.gpu)
    whole = step_of(trained.job(), Options(device=device, whole_step=True))
    loop = step_of(trained.job(), Options(device=device), moves=True)
    yield Pair(name, f"a card of {budget}", *(_tried(step.planner, nbytes) for step in (whole, loop)))
    free = nbytes - whole.account.context_bytes
    yield Pair(name, f"{format_bytes(free)} live", *(_tried(_live(step), free) for step in (whole, loop)))


def _live(step: JobStep) -> Callable[[int], Plan]:
    return step.captures.planner(step.options, step.account.of_tensors)


def _tried(planned: Callable[[int], Plan], nbytes: int) -> Planned:
    try:
        return planned(nbytes)
    except InfeasibleBudgetError as error:
        return error


def main() -> None:
    """Plan each job by both ways, and print the rows as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(SMALL))
    parser.add_argument("--large", default="llama-1b=8GiB,llama-8b=40GiB", metavar="NAME=SIZE,…")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(HEADER)
    for pair in _pairs([*filter(None, arguments.jobs.split(","))], [*filter(None, arguments.large.split(","))]):
        print(pair.line(), flush=True)


def _pairs(names: Sequence[str], sizes: Sequence[str]) -> Iterator[Pair]:
    for name in names:
        JOBS[name].load()
        yield small(JOBS[name])
    for name, _, budget in (size.partition("=") for size in sizes):
        yield from large(name, budget)


if __name__ == "__main__":
    main()
