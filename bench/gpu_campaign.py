"""Everything that has to be asked of a GPU, in one command that can be cut off at any time and goes on where it stopped.

    python bench/gpu_campaign.py --out campaign.jsonl [--done FILE…] [--deadline SECONDS] [--only '6-gpt2-*'] [--retry]
    python bench/gpu_campaign.py --list
    python bench/gpu_campaign.py --rehearse --out rehearsal.jsonl      # on the CPU, in small: it proves the code, no figure

One process an experiment, with a time limit of its own, and one JSON line each, written as soon as it is known; an
experiment that fails has its error in its line. `bench/gpu_report.py` makes tables and decisions of the lines. About three
quarters of an hour on a large GPU; bench/gpu_campaign.md says how to run it there and how to send the result.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gpu import lines
from gpu.campaign import Campaign
from gpu.catalogue import EXPERIMENTS, TOPICS
from gpu.experiment import Experiment

PATIENCE_IN_SMALL = 5.0


def listing(experiments: list[Experiment]) -> str:
    """Each topic with its question, what its answer decides, and its experiments with the seconds expected of each."""
    rows = []
    for number, topic in TOPICS.items():
        of_topic = [e for e in experiments if e.topic.number == number]
        if of_topic:
            rows += [f"{number} {topic.title}: {topic.question}", f"  decides: {topic.decides}"]
            rows += [f"  {e.seconds:5.0f} s  {e.name}" for e in of_topic]
    total = sum(e.seconds for e in experiments)
    return "\n".join([*rows, f"{len(experiments)} experiments, about {total / 60:.0f} minutes on a GPU"])


def main() -> None:
    """Run what is left. The exit code is 1 where an experiment failed, 2 where the request was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("campaign.jsonl"), help="where lines are appended")
    parser.add_argument(
        "--done", type=Path, nargs="*", default=[], help="lines of runs before: what they have is skipped"
    )
    parser.add_argument("--deadline", type=float, metavar="SECONDS", help="start nothing that would not end by then")
    parser.add_argument("--only", nargs="*", default=[], metavar="PATTERN", help="names, with * for anything")
    parser.add_argument("--retry", action="store_true", help="run again what failed or took too long")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--small", action="store_true", help="small models and sizes")
    parser.add_argument(
        "--patience", type=float, metavar="FACTOR", help="on each one's time limit  [default: 1, in small 5]"
    )
    parser.add_argument("--rehearse", action="store_true", help="the same as --device cpu --small")
    parser.add_argument("--list", action="store_true", help="say what is left, how long it takes and what it decides")
    asked = parser.parse_args()
    if missing := [str(path) for path in asked.done if not path.exists()]:
        parser.error(f"there is no file {', '.join(missing)}")
    device, small = "cpu" if asked.rehearse else asked.device, asked.small or asked.rehearse
    patience = asked.patience or (PATIENCE_IN_SMALL if small else 1.0)  # who runs in small often has a small machine
    campaign = Campaign(
        "gpu.catalogue", EXPERIMENTS, asked.out, device, small, tuple(asked.done), asked.deadline, tuple(asked.only),
        asked.retry, patience,
    )  # fmt: skip
    if asked.only and not campaign.chosen():
        parser.error(f"no experiment is called {' or '.join(asked.only)}; --list names them")
    try:
        left = campaign.left()
    except ValueError as error:
        parser.error(str(error))
    if asked.list:
        print(listing(left))
        return
    if device != "cpu":
        _check_device(parser)
    try:
        written = campaign.run(lambda text: print(text, flush=True))
    except KeyboardInterrupt:
        sys.exit("stopped between two experiments")
    counted = [sum(line.status == status for line in written) for status in lines.STATUSES]
    told = ", ".join(f"{n} {status}" for n, status in zip(counted, lines.STATUSES, strict=True) if n)
    print(f"{told or 'nothing was run'}; {len(campaign.left())} left; lines in {asked.out}")
    sys.exit(any(line.status in (lines.FAILED, lines.TIMEOUT) for line in written))


def _check_device(parser: argparse.ArgumentParser) -> None:
    """Refuse to begin where PyTorch sees no GPU; this process makes no context, which would count as used memory."""
    import torch  # noqa: PLC0415 - --list and --help do without

    if not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; --rehearse runs on the CPU, in small")


if __name__ == "__main__":
    main()
