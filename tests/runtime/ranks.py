"""What `test_parallel.py` looks at, done by several processes: `python -m tests.runtime.ranks RANKS DIRECTORY [CASE …]`.

Each case runs on all ranks and returns what it saw; all of it is saved in the directory, one file a rank.
"""

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import overspill
from overspill.devices import this_cpu
from overspill.runtime import calibrate as calibration
from overspill.runtime.parallel import DataParallel
from overspill.runtime.step.away import Away
from overspill.runtime.tracker import LiveBytes

from . import sharded_ranks
from .sharded_ranks import failure

STEPS, BATCH = 2, 8
of_ranks = torch.ops._c10d_functional
RANK = 0
"""That of this process, which is forked."""


def convolutions() -> nn.Module:
    """Batch norms, whose statistics are rank 0's, and dropout, whose numbers are each rank's own."""
    torch.manual_seed(RANK)  # the ranks begin with rank 0's parameters all the same
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(0.1),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def images(step: int, rank: int | None = None, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + (RANK if rank is None else rank))
    return torch.randn(batch, 3, 16, 16, generator=generator), torch.randint(0, 10, (batch,), generator=generator)


def momentum(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2)


def everything(model: nn.Module, losses: list[Tensor]) -> dict[str, Tensor]:
    """Losses, parameters and buffers after training."""
    return {"losses": torch.stack(losses).detach(), **{k: v.detach().clone() for k, v in model.state_dict().items()}}


def planned(
    model: nn.Module, optimizer: Optimizer, loss: Any = None, data: Callable[..., Any] = images, **options: Any
) -> dict[str, Tensor]:
    options = {"process_group": dist.group.WORLD} | options
    step = overspill.train_step(model, loss or nn.CrossEntropyLoss(), optimizer, **options)
    torch.manual_seed(RANK)
    result = everything(model, [step(*data(number)) for number in range(STEPS)])
    step.close()
    return result


def plain(model: nn.Module, optimizer: Optimizer, *args: Any, **options: Any) -> dict[str, Tensor]:
    """The same by hand, with DistributedDataParallel."""
    return by_hand(DistributedDataParallel(model), model, optimizer, *args, **options)


def by_hand(
    ddp: Any,
    model: nn.Module,
    optimizer: Optimizer,
    loss: Any = None,
    data: Callable[..., Any] = images,
    accumulate: int = 1,
    clip_norm: float | None = None,
) -> dict[str, Tensor]:
    torch.manual_seed(RANK)
    losses = []
    for number in range(STEPS):
        total = torch.zeros(())
        for part in range(accumulate):
            batch = [x.chunk(accumulate)[part] for x in data(number)]
            with ddp.no_sync() if part < accumulate - 1 else nullcontext():
                value = loss(ddp, *batch) if loss else F.cross_entropy(ddp(batch[0]), batch[1])
                (value / accumulate).backward()
                total = total + value.detach() / accumulate
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return everything(model, losses)


def both(make: Callable[[nn.Module], Optimizer], budget: Any = 0.8, **options: Any) -> Any:
    first, second = convolutions(), convolutions()
    return planned(first, make(first), budget=budget, policy="window", store="host", **options), plain(
        second, make(second), **options
    )


class _GivesItsInput(torch.autograd.Function):
    """The gradient of the weight is the input itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * weight).sum()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, Tensor]:
        return None, ctx.saved_tensors[0]


class Odd(nn.Module):
    """Gradients that are views, transposed, expanded, one storage for two parameters, or the caller's own tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(RANK)
        self.joined = nn.Parameter(torch.randn(6, 4))
        self.transposed = nn.Parameter(torch.randn(4, 6))
        self.first, self.second = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.expanded, self.own = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 4))
        self.twice = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k = F.linear(x, torch.cat([self.joined, self.transposed.t()])).split(6, 1)
        sums = ((self.first + self.second) * x).tanh().sum()
        return (
            (q * k).sum()
            + sums
            + self.expanded.sum()
            + _GivesItsInput.apply(x, self.own)
            + self.twice(self.twice(x)).sum()
        )


def rows(step: int) -> tuple[Tensor]:
    return (images(step)[0][0, 0, :4, :4].contiguous(),)


def odd_gradients() -> Any:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)

    def data(step: int) -> tuple[Tensor]:
        given.append(rows(step)[0])
        return (given[-1],)

    given: list[Tensor] = []
    first, second = Odd(), Odd()
    results = planned(first, momentum(first), loss, data), plain(second, momentum(second), loss, rows)
    untouched = all(torch.equal(x, rows(step)[0]) for step, x in enumerate(given))
    return *results, untouched


def combined() -> Any:
    """Two ranks with half the batch each, and one process with all of it; no batch norm."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(768, 64), nn.GELU(), nn.Linear(64, 10))

    def whole(step: int) -> tuple[Tensor, ...]:
        return tuple(torch.cat(pair) for pair in zip(images(step, 0), images(step, 1), strict=True))

    first, second = model(), model()
    return planned(first, momentum(first)), planned(second, momentum(second), data=whole, process_group=False)


def errors() -> dict[str, Any]:
    """What both ranks hear of one's trouble, and that they can go on together after it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 10))
    step = overspill.train_step(model, nn.CrossEntropyLoss(), momentum(model), budget="1GiB", accumulate=2)
    x, y = images(0)
    heard = {"kinds": failure(lambda: step(x.double() if RANK else x, y))}
    heard["split"] = failure(lambda: step(*images(0, batch=BATCH + RANK)))
    step(*images(0))
    loss = step(*images(1))
    step.close()
    small = overspill.train_step(model, nn.CrossEntropyLoss(), momentum(model), budget="50KiB" if RANK else "1GiB")
    heard["budget"] = failure(lambda: small(*images(0)))
    small.close()
    store = overspill.train_step(
        model, nn.CrossEntropyLoss(), momentum(model), budget="1GiB", store_dir="/nowhere" if RANK else None
    )
    heard["store"] = failure(lambda: store(*images(0)))
    store.close()
    other = nn.Sequential(nn.Flatten(), nn.Linear(768, 10 + RANK))
    heard["models"] = failure(lambda: overspill.train_step(other, nn.CrossEntropyLoss(), momentum(other)))
    torch.manual_seed(0)
    tree = nn.Sequential(nn.Flatten(), nn.Linear(768, 10), nn.GELU() if RANK else nn.ReLU())
    graphs = overspill.train_step(tree, nn.CrossEntropyLoss(), momentum(tree))
    heard["graphs"] = failure(lambda: graphs(*images(0)))
    asked = nn.Sequential(nn.Flatten(), nn.Linear(768, 10))
    values = overspill.train_step(asked, asks_values, momentum(asked), budget="1GiB")
    values(*images(0))
    heard["answers"] = failure(lambda: values(images(0)[0] + 9 * RANK, images(0)[1]))
    values(*(9 + i for i in images(1)[:1]), images(1)[1])
    heard["wrapped"] = failure(
        lambda: overspill.train_step(DistributedDataParallel(model), nn.CrossEntropyLoss(), momentum(model))
    )
    torch.manual_seed(RANK)
    unlike = nn.Sequential(nn.Flatten(), nn.Linear(768, 10))
    heard["values"] = failure(lambda: overspill.train_step(unlike, nn.CrossEntropyLoss(), momentum(unlike)))
    parts = nn.Sequential(nn.Flatten(), Parts())
    clipped = overspill.train_step(
        parts, nn.CrossEntropyLoss(), momentum(parts), process_group=False, budget="1GiB", clip_norm=1.0
    )
    heard["parts"] = failure(lambda: clipped(*images(0)))
    return heard | {"finite": bool(torch.isfinite(loss))}


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, part: Tensor) -> Tensor:
        return of_ranks.wait_tensor(of_ranks.all_gather_into_tensor(part, 2, dist.group.WORLD.group_name))

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        given = gradient.contiguous()
        return of_ranks.wait_tensor(of_ranks.reduce_scatter_tensor(given, "avg", 2, dist.group.WORLD.group_name))


class Parts(nn.Module):
    """A linear layer whose rows are shared out by hand among the ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.part = nn.Parameter(torch.randn(10, 768).chunk(2)[RANK].clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, _Gather.apply(self.part))


def parts() -> Any:
    """A model whose collectives are its own, under another budget on each rank: the losses, and the budget in force."""
    model = nn.Sequential(nn.Flatten(), Parts())
    budget = "1MiB" if RANK else "1GiB"
    step = overspill.train_step(model, nn.CrossEntropyLoss(), momentum(model), process_group=False, budget=budget)
    losses = [step(*images(number)) for number in range(STEPS)]
    result = torch.stack(losses), model[1].part.detach().clone(), step.plans[0].budget_bytes
    step.close()
    by_hand, again = [], nn.Sequential(nn.Flatten(), Parts())
    optimizer = momentum(again)
    for number in range(STEPS):
        x, y = images(number)
        by_hand.append(F.cross_entropy(again(x), y))
        by_hand[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return result, (torch.stack(by_hand).detach(), again[1].part.detach())


def asks_values(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y) if x.mean() > 1 else model(x).square().mean()


class Counted(nn.Module):
    """Its forward asks for a buffer, of which rank 0's counts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(768, 10)
        self.register_buffer("running_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.running_calls += 1 + RANK
        return self.linear(x.flatten(1)) * (2 if self.running_calls % 2 else 1)


def buffers_asked() -> Any:
    first, second = Counted(), Counted()
    second.load_state_dict(first.state_dict())
    return planned(first, momentum(first)), plain(second, momentum(second))


def schedules() -> Any:
    """A plan, and the bytes that were there at its peak."""
    model = convolutions()
    group = dist.group.WORLD
    step = overspill.train_step(
        model, nn.CrossEntropyLoss(), momentum(model), budget=0.7, store="host", process_group=group
    )
    step.tracker = LiveBytes(torch.device("cpu"))
    step(*images(0))
    (plan,) = step.plans
    result = plan.graph, plan.schedule, plan.peak_bytes, step.tracker.peak_bytes
    step.close()
    return result


def compiled(outside: bool, **options: Any) -> Any:
    """A compiled model in DistributedDataParallel, or the other way round; what is planned and measured, and eager."""

    def data(step: int) -> tuple[Tensor, Tensor]:
        return images(step, batch=1024)

    def perceptron() -> nn.Module:
        """Gradients of more than DDP's first bucket of 1 MiB, at which Dynamo would split the model."""
        torch.manual_seed(RANK)
        layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)]
        return nn.Sequential(
            nn.AvgPool2d(2), nn.Flatten(), nn.Linear(192, 256), *layers, nn.Dropout(0.1), nn.Linear(256, 10)
        )

    torch._dynamo.reset()
    model, eager = perceptron(), perceptron()
    if outside:
        ddp = overspill.compile(DistributedDataParallel(model, bucket_cap_mb=1, **options), budget=0.9, store="host")
        session = ddp.overspill
    else:
        inside = overspill.compile(model, budget=0.9, store="host")
        ddp, session = DistributedDataParallel(inside, bucket_cap_mb=1, **options), inside.overspill
    session.tracker = LiveBytes(torch.device("cpu"))
    results = by_hand(ddp, model, momentum(model), data=data), plain(eager, momentum(eager), data=data)
    return *results, session.plans, session.tracker.peak_bytes


def moving(**options: Any) -> Any:
    """A compiled model in DistributedDataParallel whose weights and state move; which ones were away, and eager."""

    def data(step: int) -> tuple[Tensor, Tensor]:
        x, y = images(step)
        return x.flatten(1), y

    def perceptron() -> nn.Module:
        torch.manual_seed(RANK)
        layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(6)]
        return nn.Sequential(nn.Linear(768, 256), *layers, nn.Linear(256, 10))

    torch._dynamo.reset()
    model, eager = perceptron(), perceptron()
    ddp = overspill.compile(DistributedDataParallel(model, **options), budget="7MiB", store="host")
    ddp.overspill.tracker = LiveBytes(torch.device("cpu"))
    ours = by_hand(ddp, model, optimizer := adamw(model), data=data, accumulate=2, clip_norm=0.1)
    away = [name for name, p in model.named_parameters() if isinstance(p, Away)]
    state = sum(t.nbytes for of in optimizer.state.values() for t in of.values())
    theirs = plain(eager, adamw(eager), data=data, accumulate=2, clip_norm=0.1)
    return ours, theirs, away, state, ddp.overspill.plans, ddp.overspill.tracker.peak_bytes


class Own(nn.Module):
    """A forward that is not torch's own, so that torch.compile finds it inside DistributedDataParallel."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def split() -> str:
    """The backend by name, on a model that Dynamo splits at DDP's buckets."""
    torch._dynamo.reset()
    model = DistributedDataParallel(Own(), bucket_cap_mb=1)
    call = torch.compile(model, backend="overspill", options={"budget": "32MiB"}, dynamic=False)
    try:
        call(torch.zeros(4, 512))
    except Exception as error:  # noqa: BLE001 - torch wraps it
        return str(error)
    return "no error"


def link() -> Any:
    """The link as the ranks find it together."""
    calibration.COPY_BYTES = 1 << 20
    return calibration.calibrate_link(this_cpu())


def gathers() -> int:
    """What ranks exchange while AOTAutograd traces, many times over; without its care a few dozen hang."""
    group = dist.group.WORLD
    assert group is not None
    processes, found = DataParallel(group), 0
    with enable_python_dispatcher():
        for number in range(200):
            with processes.together():
                found += processes.agree(number, known=True)
            found += processes.shared(number if RANK == 0 else None, 0) == number
    return found


CASES: dict[str, Callable[[], Any]] = {
    "gathers": gathers,
    "momentum": lambda: both(momentum, data=lambda step: images(step, batch=BATCH - 2 * RANK * step)),
    "adamw": lambda: both(adamw),
    "accumulated": lambda: both(momentum, accumulate=2, clip_norm=0.5),
    "odd": odd_gradients,
    "buffers asked": buffers_asked,
    "combined": combined,
    "errors": errors,
    "schedules": schedules,
    "parts": parts,
    "compiled outside": lambda: compiled(True),
    "compiled inside": lambda: compiled(False, gradient_as_bucket_view=True),
    "moving": moving,
    "moving, views": lambda: moving(gradient_as_bucket_view=True),
    "split": split,
    **sharded_ranks.CASES,
    "link": link,
}


def run(ranks: int, directory: Path, cases: list[str]) -> None:
    """Run the cases as `RANK`; one that fails leaves its traceback as its result."""
    torch.set_num_threads(1)
    store, wait = f"file://{directory / 'rendezvous'}", timedelta(seconds=30)
    dist.init_process_group("gloo", store, rank=RANK, world_size=ranks, timeout=wait)
    found = {}
    for name in cases or CASES:
        try:
            found[name] = CASES[name]()
        except Exception:  # noqa: BLE001
            found[name] = traceback.format_exc()
    torch.save(found, directory / f"{RANK}.pt")
    dist.destroy_process_group()


def main() -> None:
    """Fork the ranks, which so import everything once, and wait for them."""
    global RANK  # noqa: PLW0603
    ranks, directory, cases = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    for rank in range(ranks):
        if not os.fork():
            RANK = rank
            run(ranks, directory, cases)
            return
    sys.exit(any(list(map(os.waitstatus_to_exitcode, (os.wait()[1] for _ in range(ranks))))))


if __name__ == "__main__":
    main()
