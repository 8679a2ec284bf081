"""Cases of models that `fully_shard` has sharded, which `ranks.py` runs and `test_sharding.py` looks at."""

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.optim import SGD, Adafactor, AdamW, Optimizer

import overspill
from overspill.core.errors import OverspillError, StoreError, UnsupportedError
from overspill.runtime.collectives import reduce_scatter
from overspill.runtime.step.captures import StepCaptures
from overspill.runtime.tracker import LiveBytes

STEPS, WIDTH, DRAWN = 2, 30, 6
LENGTHS = ((9, 6), (6, 9), (9, 9), (9, 6), (6, 9))
"""Of the batches of even and odd ranks, by step."""
ONE = (None, True, None, WIDTH, 1)
"""How to shard the smallest model: one block."""
Make = Callable[[nn.Module], Optimizer]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Words(nn.Module):
    """Rows that the ranks cannot share evenly, a weight that is used twice, and statistics of each rank's own."""

    def __init__(self, width: int = WIDTH, words: int = 23, depth: int = 3, *, half: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width) if half else nn.BatchNorm1d(width)  # statistics stay float32
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.flatten(0, 1)))

    def logits(self, x: Tensor) -> Tensor:
        return self.forward(x)


def sharded(
    policy: MixedPrecisionPolicy | None = None,
    reshard: bool = True,
    mesh: DeviceMesh | None = None,
    width: int = WIDTH,
    depth: int = 2,
    *,
    frozen: bool = False,
    around: Any = (id, id),
) -> nn.Module:
    torch.manual_seed(0)
    model = Words(width, depth=depth, half=policy is not None)
    around[0](model)
    for parameter in model.blocks[depth // 2].up.parameters() if frozen else ():
        parameter.requires_grad_(False)
    given = {"mp_policy": policy} if policy is not None else {}
    within = {"mp_policy": replace(policy, output_dtype=None)} if policy is not None else {}
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, **within)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, **given)
    around[1](model)
    return model


def loss(model: nn.Module, words: Tensor) -> Tensor:
    call = vars(model).get("logits", model)  # where it is registered as a forward
    return F.cross_entropy(call(words[:, :-1]).float(), words[:, 1:].flatten())


def batch(step: int, length: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(0, 23, (4, length), generator=generator)


def batch_of_any_length(step: int) -> Tensor:
    return batch(step, LENGTHS[step][dist.get_rank() % 2])


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2)


def local(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor).detach().clone() if isinstance(tensor, Tensor) else tensor


def everything(model: nn.Module, optimizer: Optimizer, losses: list[Tensor]) -> dict[str, Any]:
    """This rank's part of what training has made."""
    found = {name: local(tensor) for name, tensor in model.state_dict().items()}
    for group in optimizer.state_dict()["state"].items():
        found |= {f"{group[0]}.{key}": local(value) for key, value in group[1].items()}
    return {"losses": torch.tensor([value.item() for value in losses])} | found


def by_hand(
    model: nn.Module, optimizer: Optimizer, accumulate: int = 1, clip_norm: float | None = None, call: Any = None,
    steps: int = STEPS, data: Callable[[int], Tensor] = batch,
) -> dict[str, Any]:  # fmt: skip
    losses = []
    for number in range(steps):
        total = torch.zeros(())
        for part in data(number).chunk(accumulate):
            value = loss(model if call is None else call, part) / accumulate
            value.backward()
            total = total + value.detach()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return everything(model, optimizer, losses)


def planned(
    model: nn.Module, optimizer: Optimizer, steps: int = STEPS, data: Callable[[int], Tensor] = batch, **options: Any
) -> dict[str, Any]:
    step = overspill.train_step(model, loss, optimizer, **{"store": "host", "budget": "smallest"} | options)
    losses = [step(data(number)) for number in range(steps)]
    result = everything(model, optimizer, losses)
    for plan in step.plans:
        gathered = {tensor.id for tensor in plan.graph.tensors if tensor.name.endswith(" gathered")}
        assert plan.places is None or gathered <= {tensor for tensor, _ in plan.places.offsets}
    step.close()
    return result


def in_a_loop(
    model: nn.Module, optimizer: Optimizer, accumulate: int = 1, clip_norm: float | None = None, **options: Any
) -> dict[str, Any]:
    """Train a compiled model by the loop that FSDP's own is trained by."""
    torch._dynamo.reset()
    called = overspill.compile(model, **{"store": "host", "budget": "smallest"} | options)
    session = called.overspill
    session.tracker = LiveBytes(torch.device("cpu"))
    found = by_hand(model, optimizer, accumulate, clip_norm, call=called)
    state = sum(value.nbytes for name, value in found.items() if name[0].isdigit())
    plan, *_ = session.plans
    assert session.tracker.peak_bytes + state <= plan.peak_bytes <= plan.budget_bytes
    schedules = [plan.schedule] * dist.get_world_size()
    dist.all_gather_object(schedules, plan.schedule)
    assert all(schedule == plan.schedule for schedule in schedules)
    with torch.no_grad():
        evaluated = loss(called if accumulate > 1 else model, batch(9))
        assert torch.equal(evaluated, loss(model, batch(9)))  # FSDP's own hooks gather
    session.close()
    return found


def both(
    make: Make = adamw, *how: Any, frozen: bool = False, ways: Any = None, around: Any = (id, id),
    train: Any = planned, **options: Any,
) -> Any:  # fmt: skip
    """What training by plans, made in these `ways`, and FSDP make; with what is done `around` sharding."""
    ours, theirs = (sharded(*how, frozen=frozen, around=around) for _ in range(2))
    return train(ours, make(ours), **(ways or {}), **options), by_hand(theirs, make(theirs), **options)


def compiled(model: nn.Module) -> None:
    """Compile blocks one by one, in place and as wrappers."""
    model.blocks[0].compile(backend="eager")
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")


def replicated(ranks: int, policy: MixedPrecisionPolicy | None = None, **options: Any) -> Any:
    """The same on a mesh of two dimensions: so many replicas of a model that is sharded."""
    mesh = init_device_mesh("cpu", (ranks, dist.get_world_size() // ranks), mesh_dim_names=("replicate", "shard"))
    return both(adamw, policy, True, mesh, **options)


def drawn() -> list[Any]:
    """The same of models, meshes, precisions and options that are drawn at random, alike on all ranks."""
    draw = random.Random(0)
    found = []
    for _ in range(DRAWN):
        across = draw.choice([1, 2, dist.get_world_size()])
        mesh = init_device_mesh("cpu", (across, dist.get_world_size() // across), mesh_dim_names=("replicate", "shard"))
        half = draw.choice([None, HALF, MixedPrecisionPolicy(param_dtype=torch.bfloat16)])
        options = {"accumulate": draw.choice([1, 2, 4]), "clip_norm": draw.choice([None, 0.1])}
        ways = {"budget": draw.choice(["smallest", "1GiB"])}
        if draw.random() < 0.5:
            ways["placement"] = "planned"
        how = half, draw.random() < 0.7, mesh, draw.randint(3, 40), draw.randint(1, 4)
        options["train"] = in_a_loop if draw.random() < 0.3 and "placement" not in ways else planned
        found.append(both(draw.choice([adamw, sgd]), *how, frozen=draw.random() < 0.3, ways=ways, **options))
    return found


@contextmanager
def saved() -> Iterator[tuple[str, Any, nn.Module, Optimizer]]:
    """A checkpoint's path, and the planned step that took it after its first batch, with its model and optimizer."""
    with tempfile.TemporaryDirectory() if dist.get_rank() == 0 else nullcontext("") as directory:
        paths = [directory]
        dist.broadcast_object_list(paths)
        model = sharded(*ONE)
        optimizer = adamw(model)
        step = overspill.train_step(model, loss, optimizer, budget="smallest", store="host")
        step(batch(0))
        dcp.save(in_state(model, optimizer), checkpoint_id=paths[0])
        yield paths[0], step, model, optimizer
        dist.barrier()


def fewer_ranks() -> Any:
    """A checkpoint of four ranks, gone on with by half of them: by FSDP and by a planned step."""
    half = dist.new_group([0, 1])
    with saved() as (path, step, *_):
        step.close()
        found = []
        for plans in (False, True) if dist.get_rank() < 2 else ():
            other = sharded(None, True, DeviceMesh.from_group(half, "cpu"), *ONE[3:])
            others = adamw(other)
            state = in_state(other, others)
            dcp.load(state, checkpoint_id=path, process_group=half)
            set_state_dict(other, others, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            found.append(planned(other, others) if plans else by_hand(other, others))
    return found


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def budgets() -> Any:
    """A budget of its own on each rank: the one in force, the peak planned and measured; what evaluation between steps gives."""
    torch.manual_seed(0)
    model = Words(64, 64)
    for block in model.blocks:
        fully_shard(block)
    optimizer = adamw(fully_shard(model))
    budget = 270_000 if dist.get_rank() else "1GiB"
    step = overspill.train_step(model, loss, optimizer, budget=budget)
    words = batch(0)
    step(words)
    with step.counted((words,)) as found:
        step(words)
    with torch.no_grad():
        before, again = loss(model, words), loss(model, words)  # FSDP's own hooks gather
    step(words)
    plan = step.plans[0]
    verbs = {i.verb.value for i in plan.schedule.instructions}
    step.close()
    after = loss(model, words)
    return plan.budget_bytes, plan.peak_bytes, found[0], verbs, before.item() == again.item() > after.item()


def failure(work: Callable[[], Any]) -> str:
    try:
        work()
    except OverspillError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def said(shard: Callable[[nn.Module], Any], make: Make = adamw, **options: Any) -> str:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    shard(model)
    return failure(lambda: overspill.train_step(model, nn.MSELoss(), make(model), budget="1MiB", **options).close())


def integer() -> dict[str, str]:
    """The same of parameters that stay with half of four ranks."""
    return {"integer": said(lambda model: [fully_shard(part, reshard_after_forward=2) for part in (model[0], model)])}


FOLLOWED = {
    "set_force_sum_reduction_for_comms": (True,), "set_gradient_divide_factor": (3.0,), "set_reduce_scatter_divide_factor": (3.0,),
}  # fmt: skip
WITHOUT_EFFECT: dict[str, Any] = {
    "set_allocate_memory_from_process_group_for_comm": (False,), "set_is_last_backward": (True,),
    "set_modules_to_backward_prefetch": ([],), "set_modules_to_forward_prefetch": ([],), "set_post_optim_event": (None,),
    "set_reduce_scatter_max_input_buffers": (2,), "set_requires_all_reduce": (False,),
    "set_reshard_after_forward": (False,), "set_separate_reduce_scatter_group": (), "set_unshard_in_backward": (True,),
}  # fmt: skip
"""Setters that say only when FSDP gathers, waits and from where memory comes; all-reducing is of replicas."""
REFUSED: dict[str, Any] = {
    "set_all_reduce_hook": (id,), "set_custom_all_gather": (object(),), "set_custom_reduce_scatter": (object(),),
    "set_reduce_scatter_unused_params": (True,), "set_requires_all_reduce": (False,), "set_requires_gradient_sync": (False,),
    "set_reshard_after_backward": (False,), "set_symm_mem_for_comm": (),
}  # fmt: skip


def tell(model: nn.Module, setters: dict[str, Any]) -> None:
    """Call these setters of all modules that are sharded."""
    for module in model.modules():
        for name, given in setters.items() if isinstance(module, FSDPModule) else ():
            if hasattr(module, name):  # not in all releases
                getattr(module, name)(*given)


def lengths() -> Any:
    """Batches of other lengths on each rank, and how many steps were captured for them."""
    ours, theirs = (sharded(*ONE) for _ in range(2))
    how, captures = {"steps": len(LENGTHS), "data": batch_of_any_length, "accumulate": 2}, StepCaptures.capture
    calls: list[Any] = []
    StepCaptures.capture = lambda *given, **more: calls.append(None) or captures(*given, **more)  # type: ignore[assignment]
    try:
        found = planned(ours, adamw(ours), budget="80KiB", **how)
    finally:
        StepCaptures.capture = captures  # type: ignore[method-assign]
    return found, by_hand(theirs, adamw(theirs), **how), len(calls)


class Premultiplied:
    """Scatters gradients as NCCL does with a divide factor: multiplied by its inverse, then summed. Gloo has no such sum."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        assert not async_op
        assert op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        reduce_scatter(output_tensor, input_tensor.mul_(1 / self.factor), group=group)


def divided(*how: Any, factor: float = 3.0, **options: Any) -> Any:
    """Both with a divide factor, as torchtitan sets it, and with setters that numbers do not depend on."""
    ours, theirs = sharded(*how), sharded(*how)
    for model in (ours, theirs):
        tell(model, WITHOUT_EFFECT | {"set_gradient_divide_factor": (factor,)})
        fsdp.register_fsdp_forward_method(model, "logits")
    tell(theirs, {"set_custom_reduce_scatter": (Premultiplied(factor),)})
    return planned(ours, adamw(ours), **options), by_hand(theirs, adamw(theirs), **options)


def settings() -> tuple[set[str], dict[str, str]]:
    """The setters that FSDP's modules have, and what is said of some, when a step is made and of one between steps."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    heard = {
        name: said(lambda model, told=dict([one]): tell(fully_shard(model, mesh=mesh), told))
        for one in REFUSED.items()
        if (name := one[0]) != "set_symm_mem_for_comm"  # needs NCCL
    }
    model = sharded(*ONE)
    step = overspill.train_step(model, loss, adamw(model), budget="smallest", store="host")
    step(batch(0))
    model.set_requires_gradient_sync(False)
    with suppress(UnsupportedError):
        heard["between steps"] = step(batch(0))
    model.set_requires_gradient_sync(True)
    step(batch(0))
    step.close()
    return {name for name in dir(FSDPModule) if name.startswith("set_")}, heard


def refusals() -> dict[str, str]:
    """What is said of what a planned step does not shard."""

    def forward() -> str:
        model = fully_shard(nn.Linear(8, 8))
        model.forward = overspill.compile(model.forward, budget="1MiB")
        return failure(lambda: model(torch.ones(2, 8)))

    def by_name() -> str:
        call = torch.compile(fully_shard(Parts()), backend="overspill", options={"budget": "1MiB"})
        return failure(lambda: call(torch.ones(2, 8)))

    def split(model: nn.Module) -> None:
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})

    return {
        "tensor parallel": said(split),
        "offload": said(lambda model: fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))),
        "ignored": said(lambda model: fully_shard(model, ignored_params={model[0].weight})),
        "parts only": said(lambda model: fully_shard(model[0])),
        "optimizer": said(fully_shard, lambda model: Adafactor(model.parameters())),
        "inductor": said(fully_shard, backend="inductor"),
        "group": said(fully_shard, process_group=False),
        "compiled forward": forward(),
        "compiled by name": by_name(),
        "compiled by inductor": called(fully_shard(nn.Linear(8, 8)), {"backend": "inductor"}),
    }


class Parts(nn.Module):
    """Two layers, with a graph break between them, or one that reads a weight where nothing is compiled."""

    def __init__(self, *, reads: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.reads = nn.Linear(8, 8), nn.Linear(8, 8), reads

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.reads:
            x = self.read(x)
        torch._dynamo.graph_break()
        return self.second(x)

    @torch._dynamo.disable
    def read(self, x: Tensor) -> Tensor:
        return F.linear(x, self.first.weight)


def called(model: nn.Module, options: Any = None) -> str:
    """What is said where a compiled model is called and its backward runs."""
    torch._dynamo.reset()
    call = overspill.compile(model, **{"budget": "1MiB", "store": "host"} | (options or {}))
    return failure(lambda: call(torch.ones(2, 8)).sum().backward())


def in_two(**how: Any) -> nn.Module:
    model = Parts(**how)
    for part in (model.first, model.second, model):
        fully_shard(part)
    return model


def loop_refusals() -> dict[str, str]:
    """What is said of loops that a planned graph of a sharded model does not follow; the first one is right."""
    model = sharded(*ONE)
    call = overspill.compile(model, budget="1MiB", store="host")
    return {
        "parts": called(in_two()),
        "one group": called(fully_shard(Parts())),
        "read outside": called(in_two(reads=True)),
        "budget": called(fully_shard(nn.Linear(8, 8)), {"budget": "200B" if dist.get_rank() else "1GiB"}),
        "together": failure((loss(call, batch(0)) * loss(call, batch(1))).backward),
    }


def one_rank_plans() -> Any:
    """A loop in which one rank wants other plans after the first step; and what is said where it alone compiles again."""
    torch._dynamo.reset()
    models = [sharded(*ONE) for _ in range(2)]
    call, found = overspill.compile(models[0], budget="1MiB", store="host"), []
    for model, runs in zip(models, (call, models[1]), strict=True):
        optimizer, losses = adamw(model), []
        for number in range(STEPS):
            losses.append(loss(runs, batch(number)))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
            call.overspill.renewal.is_asked = dist.get_rank() == 1 and not number
        found.append(everything(model, optimizer, losses))
    if dist.get_rank():
        torch._dynamo.reset()
    return *found, failure(lambda: loss(call, batch(0)))


def checkpoints() -> Any:
    """A planned step's checkpoint, gone on with by FSDP and by another planned step; and FSDP's by a planned step."""
    with saved() as (path, step, model, optimizer):
        step(batch(1))
        want = everything(model, optimizer, [])
        step.close()
        found = []
        for plans in (False, True):
            other = sharded(*ONE)
            others = adamw(other)
            takes = overspill.train_step(other, loss, others, budget="smallest", store="host") if plans else None
            if takes is not None:
                takes(batch(7))  # so that there is state to load into
            else:
                by_hand(other, others)
            state = in_state(other, others)
            dcp.load(state, checkpoint_id=path)
            set_state_dict(other, others, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            if takes is not None:
                takes(batch(1))
            else:
                loss(other, batch(1)).backward()
                others.step()
            found.append(everything(other, others, []))
    return want, *found


def in_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def full_disk() -> Any:
    """What each rank hears where the store of one is full in the middle of a step, how long it waited, and whether the parameters are there."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    torch.manual_seed(0)
    model = fully_shard(Words(64, 64, 2), mesh=DeviceMesh.from_group(group, "cpu"))
    step = overspill.train_step(model, loss, adamw(model), budget="smallest", store="host")
    step(batch(0))
    if dist.get_rank():

        def full(*_: Any) -> None:
            raise StoreError("the store is full")

        step.engine.offload = full  # type: ignore[union-attr,method-assign]
    begun = time.monotonic()
    try:
        step(batch(1))
        said = "no error"
    except OverspillError as error:
        said = f"{type(error).__name__}: {error}"
    waited = time.monotonic() - begun
    if step.is_unfinished:
        step.abandon()
    there = all(bool(torch.isfinite(local(tensor)).all()) for tensor in model.state_dict().values())
    step.close()
    return said, waited, there


CASES: dict[str, Callable[[], Any]] = {
    "looped": lambda: both(adamw, HALF, True, None, WIDTH, 1, train=in_a_loop, clip_norm=0.1),
    "looped, accumulated": lambda: both(adamw, HALF, train=in_a_loop, accumulate=2, clip_norm=0.1),
    "looped, roomy": lambda: both(sgd, None, False, frozen=True, train=in_a_loop, ways={"budget": "1GiB"}),
    "loop refusals": loop_refusals,
    "one rank plans": one_rank_plans,
    "sharded": both,
    "sharded, divided": lambda: divided(*ONE),
    "lengths": lengths,
    "sharded, half divided": lambda: divided(HALF, accumulate=2, clip_norm=0.1),
    "sharded, compiled": lambda: both(around=(compiled, id)),
    "sharded, roomy": lambda: both(sgd, None, False, frozen=True, ways={"budget": "1GiB"}),
    "sharded, accumulated": lambda: both(adamw, accumulate=2, clip_norm=0.1),
    "sharded, accumulated half": lambda: both(adamw, HALF, accumulate=2, clip_norm=0.1),
    "sharded, all half": lambda: both(adamw, MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "sharded, replicated": lambda: replicated(2, accumulate=2, clip_norm=0.1),
    "sharded, replicated half": lambda: replicated(2, HALF),
    "drawn": drawn,
    "fewer ranks": fewer_ranks,
    "budgets": budgets,
    "refusals": refusals,
    "full disk": full_disk,
    "integer": integer,
    "settings": settings,
    "sharded, replicated and divided": lambda: replicated(2, around=(id, lambda model: tell(model, FOLLOWED))),
    "checkpoints": checkpoints,
    "sharded, placed": lambda: both(adamw, ways={"placement": "planned"}),
}
