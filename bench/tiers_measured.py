"""Training with state in host memory, measured here: updates on the host against updates on the device, in turns.

    python bench/tiers_measured.py [--turns 6] [--steps 4] [--share 40%] [--json FILE]

Two processes train one decoder with AdamW by `train_step`, in the same budget, with the `host` store: one updates on the
device, one on the host. They take turns of some steps, each turn until its last update is done. Losses are compared.

On a CPU device and host are one processor, so an update costs the same on either. CPU seconds say what the transfers
cost that updates on the host leave out. Seconds of the clock also say what runs next to compute, if another core is
free. Neither says what a GPU gains: `tiers.py` simulates that.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from paired import json_record
from torch import Tensor, nn

import overspill
from overspill.core import Verb
from overspill.core.units import format_bytes

SIDES = ("device", "host")
LAYERS, WIDTH, WORDS, BATCH, SEQ_LEN = 4, 512, 4096, 2, 64


class Decoder(nn.Module):
    """A small decoder, 17 million weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        layers = (nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, 0.0, batch_first=True) for _ in range(LAYERS))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """Return the logits."""
        hidden = self.embed(words)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def loss_of(model: nn.Module, words: Tensor, following: Tensor) -> Tensor:
    """Return the loss of the next words."""
    return nn.functional.cross_entropy(model(words).flatten(0, 1), following.flatten())


@dataclass(frozen=True)
class Turn:
    """Some steps of one side, until the last update is done."""

    seconds: float
    cpu_seconds: float
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Facts:
    """What a side's plan does in a step."""

    budget_bytes: int
    state_bytes: int
    offloaded_bytes: int
    prefetched_bytes: int
    updates_on_host: int


class Side:
    """The job with its updates in one place, in a process of its own."""

    def __init__(self, update: str, share: str) -> None:
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, update, share), daemon=True)
        self._process.start()
        theirs.close()

    def turn(self, steps: int) -> Turn:
        """Take `steps`."""
        self._connection.send(steps)
        found: Turn = self._connection.recv()
        return found

    def facts(self) -> Facts:
        """Return what its plan does, and end the process."""
        self._connection.send(0)
        found: Facts = self._connection.recv()
        self._process.join()
        return found


def _serve(connection: Connection, update: str, share: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Decoder()
    words = torch.randint(0, WORDS, (BATCH, SEQ_LEN + 1))
    inputs = words[:, :-1].contiguous(), words[:, 1:].contiguous()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    step = overspill.train_step(model, loss_of, optimizer, budget=share, store="host", update=update)
    while steps := connection.recv():
        begun, cpu_begun = time.perf_counter(), time.process_time()
        losses = tuple(step(*inputs).item() for _ in range(steps))
        assert step.engine is not None
        step.engine.updates.finish()
        connection.send(Turn(time.perf_counter() - begun, time.process_time() - cpu_begun, losses))
    (plan,) = step.plans
    updates = plan.schedule.counts[Verb.RUN_ON_HOST]
    connection.send(Facts(plan.budget_bytes, step.kept_bytes(), plan.offloaded_bytes, plan.prefetched_bytes, updates))


def updates_in_turn(turns: int = 6, steps: int = 4, share: str = "40%") -> dict[str, object]:
    """Return the record of both sides; a ratio is that of the host's turn over the device's before it."""
    sides = {update: Side(update, share) for update in SIDES}
    for side in sides.values():  # plans, and the first steps that make the state
        side.turn(2)
    rows = [{update: side.turn(steps) for update, side in sides.items()} for _ in range(turns)]
    facts = {update: asdict(side.facts()) for update, side in sides.items()}
    return {
        "turns": turns,
        "steps": steps,
        "plans": facts,
        "rows": [{update: asdict(turn) for update, turn in row.items()} for row in rows],
        "same_losses": all(row["device"].losses == row["host"].losses for row in rows),
        "cpu_ratio": statistics.median(row["host"].cpu_seconds / row["device"].cpu_seconds for row in rows),
        "clock_ratio": statistics.median(row["host"].seconds / row["device"].seconds for row in rows),
    }


def shown(record: dict[str, object]) -> str:
    """Return the figures of a record as lines of text."""
    lines = []
    plans = record["plans"]
    assert isinstance(plans, dict)
    for update, plan in plans.items():
        moved = format_bytes(plan["offloaded_bytes"]), format_bytes(plan["prefetched_bytes"])
        lines.append(
            f"update={update}: budget {format_bytes(plan['budget_bytes'])} of {format_bytes(plan['state_bytes'])} of "
            f"weights and state; a step moves {moved[0]} out, {moved[1]} in; {plan['updates_on_host']} updates on the host"
        )
    rows = record["rows"]
    assert isinstance(rows, list)
    for update in SIDES:
        cpu = statistics.median(row[update]["cpu_seconds"] for row in rows)
        lines.append(f"update={update}: {cpu:.3f} CPU seconds for {record['steps']} steps")
    lines.append(f"host/device: {record['cpu_ratio']:.3f} of the CPU seconds, {record['clock_ratio']:.3f} of the clock")
    lines.append(f"losses the same to the last bit: {record['same_losses']}")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--share", default="40%", help="budget, as a share of the step's memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the record to write")
    asked = parser.parse_args()
    record = updates_in_turn(asked.turns, asked.steps, asked.share)
    print(shown(record))
    if asked.json is not None:
        asked.json.write_text(json_record(torch.device("cpu"), **record), encoding="utf-8")


if __name__ == "__main__":
    main()
