#!/usr/bin/env python3
"""Train with optimizers of PyTorch, of libraries and of users' habits, plainly and within a budget, and compare the bits.

By `train_step`, or by `compile` in the plain loop. Weights, buffers and `state_dict()` after each of 9 steps, at 60 % of
what the step takes, or at the smallest budget where that is more; and whether measured bytes stayed within it. Libraries:
`make jobs-libraries`.

    python bench/optimizers.py --json bench/results/optimizers.json      # some minutes
    python bench/optimizers.py --only habits,schedulefree                # prints the rows
    python bench/optimizers.py --way compile                             # as long again
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import importlib.machinery
import inspect
import io
import json
import logging
import signal
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import overspill
from overspill.errors import InfeasibleBudgetError, OverspillError
from overspill.runtime.reachable import same
from overspill.runtime.tracker import LiveBytes

sys.path.insert(0, str(Path(__file__).parent))

from optimizer_habits import HABITS

LIBRARIES = Path(__file__).parents[1] / "build" / "definitions" / "jobs"
STEPS = 9
WAYS = "train_step", "compile"
PLAIN_SECONDS = 60
Make = Callable[[nn.Module], Optimizer]


class Net(nn.Module):
    """Parameters of one, two and four dimensions, a tied one, and several of one shape."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.first = nn.Linear(8 * 16, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.drop, self.last = nn.Dropout(0.1), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.norm(self.conv(x)).relu().flatten(1)).tanh()
        for layer in self.layers:
            x = x + self.drop(layer(x).tanh())
        return self.last(x)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


class Row(NamedTuple):
    """What became of one optimizer: `outcome` is identical, other numbers, refused, or plain fails."""

    library: str
    name: str
    outcome: str
    how: str
    note: str
    budget_bytes: int
    over_bytes: int


def batches() -> list[tuple[Tensor, Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 3, 4, 4, generator=drawn), torch.randint(0, 10, (8,), generator=drawn)) for _ in range(STEPS)
    ]


def snapshot(model: nn.Module, optimizer: Optimizer) -> Any:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))


def in_a_loop(model: nn.Module, optimizer: Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    """A step of a plain loop."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def plainly(make: Make) -> list[Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = make(model)
    step = in_a_loop(model, optimizer)
    return [(step(x, y), snapshot(model, optimizer)) for x, y in batches()]


def planned(make: Make, way: str, budget: str) -> tuple[list[Any], str, int, int]:
    """As `plainly`, how it was updated, the budget, and the most bytes over it in a step that did not warn of it."""
    torch.manual_seed(0)
    model = Net()
    optimizer, found = make(model), []
    held: Any
    if way == "compile":
        held = overspill.Session(budget=budget, store="host")
        torch._dynamo.reset()
        step = in_a_loop(overspill.compile(model, session=held), optimizer)
    else:
        held = step = overspill.train_step(model, loss_of, optimizer, budget=budget, store="host")
    over, told = 0, _Told()
    logging.getLogger("overspill").addHandler(told)
    for x, y in batches():
        held.tracker, told.steps = LiveBytes(held.device), 0
        loss = step(x, y)
        allowed = max(plan.budget_bytes for plan in held.plans)
        over = max(over, 0 if told.steps else held.tracker.peak_bytes - allowed)
        found.append((loss, snapshot(model, optimizer)))
    logging.getLogger("overspill").removeHandler(told)
    state = held.loop.state if way == "compile" else held._state
    if state is None or (way == "compile" and not state.in_force):
        how = f"on the device {held.loop.why_not}"
    else:
        how = "all at once" if any(u.at_once for u in state.updates) else "each by itself"
        how = "in slices" if all(u.groups for u in state.updates) else how
    held.close()
    return found, how, allowed, over


class _Told(logging.Handler):
    """Counts warnings that an update took more than planned."""

    steps = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.steps += "more than planned" in record.msg


def tried(library: str, name: str, makes: list[Make], way: str = "train_step") -> Row:
    """The row of one optimizer, made in the first way that trains plainly."""
    why = ""
    for make in makes:
        with _quiet():
            try:
                with _limited():
                    expected, again = plainly(make), plainly(make)
            except Exception as error:  # noqa: BLE001 - whatever a library raises
                why = why or _line(error)
                continue
        if not same(expected, again):
            return Row(library, name, "plain fails", "", "two plain runs differ", 0, 0)
        for budget in ("60%", "smallest"):
            with _quiet():
                try:
                    found, how, allowed, over = planned(make, way, budget)
                except InfeasibleBudgetError as error:
                    why = _line(error)
                    continue
                except OverspillError as error:
                    return Row(library, name, "refused", "", _line(error), 0, 0)
                except Exception as error:  # noqa: BLE001 - a defect, to be seen in the table
                    return Row(library, name, "other numbers", "", f"raw error: {_line(error)}", 0, 0)
            differs = [n for n, (one, other) in enumerate(zip(expected, found, strict=True)) if not same(one, other)]
            outcome = "other numbers" if differs else "identical"
            return Row(library, name, outcome, how, f"from step {differs[0]} on" if differs else "", allowed, over)
        return Row(library, name, "refused", "", why, 0, 0)
    return Row(library, name, "plain fails", "", why, 0, 0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Context that raises TimeoutError after `PLAIN_SECONDS`: some take minutes for a small step."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"no answer in {PLAIN_SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(PLAIN_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


# -- what there is


def of_torch() -> dict[str, list[Make]]:
    """Each class of torch.optim, with its forms."""
    found: dict[str, list[Make]] = {}
    forms: list[dict[str, Any]] = [
        {},
        {"foreach": True},
        {"maximize": True},
        {"fused": True},
        {"lr": torch.tensor(1e-2)},
    ]
    for name, kind in vars(torch.optim).items():
        if not (isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer):
            continue
        for how in (how for how in forms if how.keys() <= inspect.signature(kind).parameters.keys()):
            label = f"{name} {', '.join(how)}".strip()
            found[label] = [partial(_made, kind, how), partial(_of_matrices, kind, how)]
    return found


def _made(kind: Any, how: dict[str, Any], model: nn.Module) -> Any:
    return kind(model.parameters(), **{"lr": 1e-2, **how})


def _of_matrices(kind: Any, how: dict[str, Any], model: nn.Module) -> Any:
    """Of parameters that are matrices, with the others frozen, as Muon takes them."""
    for p in model.parameters():
        p.requires_grad_(p.dim() == 2)
    return kind([p for p in model.parameters() if p.requires_grad], **{"lr": 1e-2, **how})


def of_timm() -> dict[str, list[Make]]:
    """Each name of timm's. Its models, of which the optimizers' package asks for two names, are left out."""
    for name in ("timm", "timm.models", "timm.models._manipulate"):
        module = sys.modules.setdefault(name, types.ModuleType(name))
        if not hasattr(module, "__path__"):
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            module.__path__ = [str(Path(p) / name.replace(".", "/")) for p in sys.path]
        module.__dict__.setdefault("group_parameters", None)
    optim = importlib.import_module("timm.optim")

    def make(name: str, model: nn.Module) -> Any:
        return optim.create_optimizer_v2(model, name, lr=1e-3)

    return {name: [partial(make, name)] for name in optim.list_optimizers()}


def of_pytorch_optimizer() -> dict[str, list[Make]]:
    """Each name of pytorch_optimizer's, made in the first way that trains."""
    library = importlib.import_module("pytorch_optimizer")

    def grouped(model: nn.Module) -> list[dict[str, Any]]:
        parts = [[p for p in model.parameters() if (p.dim() == 2) is matrix] for matrix in (True, False)]
        return [{"params": part, "use_muon": matrix} for part, matrix in zip(parts, (True, False), strict=True)]

    def ways(kind: Any) -> list[Make]:
        of_model: Make = kind
        return [
            lambda m: kind(m.parameters()), lambda m: kind(m.parameters(), lr=1e-2), lambda m: kind(grouped(m)),
            of_model, lambda m: kind(torch.optim.AdamW(m.parameters(), 1e-2)),
            lambda m: kind(m.parameters(), num_data=8),
        ]  # fmt: skip

    names = (name for name in library.get_supported_optimizers() if name != "kron")  # which takes minutes for a step
    return {name: ways(library.load_optimizer(name)) for name in names}


def of_schedulefree() -> dict[str, list[Make]]:
    """Its three classes, in training."""
    library = importlib.import_module("schedulefree")

    def make(name: str, how: dict[str, Any], model: nn.Module) -> Any:
        optimizer = getattr(library, f"{name}ScheduleFree")(model.parameters(), lr=1e-2, **how)
        optimizer.train()
        return optimizer

    makes: dict[str, list[Make]] = {name: [partial(make, name, {})] for name in ("AdamW", "SGD", "RAdam")}
    return makes | {"AdamW, warm-up": [partial(make, "AdamW", {"warmup_steps": 3})]}


def of_others() -> dict[str, list[Make]]:
    """Lion and Prodigy, with settings that each keeps elsewhere."""
    lion = importlib.import_module("lion_pytorch").Lion
    prodigy = importlib.import_module("prodigyopt").Prodigy
    decayed = {"lr": 1e-3, "weight_decay": 1e-2, "decoupled_weight_decay": True}
    return {
        "Lion": [partial(_made, lion, {"lr": 1e-3})],
        "Lion, decoupled": [partial(_made, lion, decayed)],
        "Prodigy": [partial(_made, prodigy, {"lr": 1.0})],
        "Prodigy, slices": [partial(_made, prodigy, {"lr": 1.0, "slice_p": 11})],
    }


SOURCES: dict[str, Callable[[], dict[str, list[Make]]]] = {
    "torch.optim": of_torch,
    "habits": lambda: {name: [make] for name, make in HABITS.items()},
    "schedulefree": of_schedulefree,
    "lion-pytorch, prodigyopt": of_others,
    "timm.optim": of_timm,
    "pytorch_optimizer": of_pytorch_optimizer,
}
OUTCOMES = "identical", "refused", "other numbers", "plain fails"


def rows_of(libraries: list[str], names: str = "", way: str = "train_step") -> Iterator[Row]:
    if str(LIBRARIES) not in sys.path:
        sys.path.append(str(LIBRARIES))
    for library in libraries:
        for name, makes in SOURCES[library]().items():
            if names in name:
                yield tried(library, name, makes, way)


def table(rows: list[Row]) -> str:
    """The counts of each library, as Markdown."""
    lines = ["| library | " + " | ".join(OUTCOMES) + " | over the budget |", "|---|" + "---|" * (len(OUTCOMES) + 1)]
    for library in dict.fromkeys(row.library for row in rows):
        of = [row for row in rows if row.library == library]
        counts = Counter(row.outcome for row in of)
        over = sum(row.over_bytes > 0 for row in of)
        lines.append(f"| {library} | " + " | ".join(str(counts[o]) for o in OUTCOMES) + f" | {over} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="libraries, by the begin of their names, separated by commas")
    parser.add_argument("--name", default="", help="those whose names have this in them")
    parser.add_argument("--way", choices=WAYS, default=WAYS[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help="print the table of such a file")
    given = parser.parse_args()
    if given.table:
        print(table([Row(**row) for row in json.loads(given.table.read_text())["rows"]]))
        return
    wanted = [] if given.only is None else given.only.split(",")
    libraries = [name for name in SOURCES if not wanted or name.startswith(tuple(wanted))]
    torch.set_num_threads(1)
    rows = []
    for row in rows_of(libraries, given.name, given.way):
        rows.append(row)
        over = f"OVER by {row.over_bytes} " if row.over_bytes > 0 else ""
        print(f"{row.library:18} {row.name:40} {row.outcome:14} {row.how:15} {over}{row.note}", flush=True)
    print(table(rows))
    if given.json:
        lines = ",\n".join(json.dumps(row._asdict()) for row in rows)
        given.json.write_text(f'{{"torch": "{torch.__version__}", "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
