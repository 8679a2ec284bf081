"""Public functions that answer questions without running anything: plan, compare, sweep, advise and pack."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .core import Device, Trace
from .core.budget import Budget
from .core.errors import RequestError
from .core.units import parse_bytes

if TYPE_CHECKING:  # torch is imported when a model is planned, and not for `pack`
    from torch import Tensor, nn

    from .costs import MeasuredTimes
    from .estimation.advice import Advice
    from .job import Job, MakeOptimizer
    from .placement.packing import Solution
    from .plans.comparison import Comparison
    from .plans.plan import Plan
    from .plans.sweep import Sweep
    from .policies import Policy


def plan(
    build: str | nn.Module | Callable[[], nn.Module],
    inputs: Any = None,
    loss: Callable[..., Tensor] | None = None,
    optimizer: str | MakeOptimizer = "sgd",
    *,
    budget: str | float | Budget | None = None,
    device: str | Device = "cpu",
    policy: str | Policy = "auto",
    batch: int | None = None,
    whole_step: bool = False,
    update: str = "device",
    store: str | None = None,
    host_budget: str | int | None = None,
    disk_bandwidth: str | None = None,
    placement: str | None = None,
    times: MeasuredTimes | None = None,
    backend: str = "eager",
    torch: str | None = None,
    cuda: str | None = None,
    **how: Any,
) -> Plan:
    """Plan one training step within `budget` on `device`; nothing is run.

    Args:
        build: A built-in model or `package.module:callable` by name, a module (left as it is), or a function. The
            function returns a module, or (module, make_batch, loss). A name and a function that returns three need
            `batch`.
        inputs: The inputs of the model, see `overspill.estimate`.
        loss: A criterion of torch.nn, a function of the model and all inputs, or None for a model that returns its
            own loss.
        optimizer: Its name, or a function of the parameters; its state counts.
        budget: A size (`"8GiB"`), a share of what the step takes unmanaged (`0.5`), `"smallest"`, or None for all
            of the device, less 2 % of a GPU that is not here.
        device: By name, by file, or as a Device; `cpu` is this machine.
        policy: A name that `overspill policies` lists, with parameters as `"window:window=1GiB"`, or a policy.
        batch: Samples in a step; by default the first dimension of `inputs`.
        whole_step: Whether parameters, gradients and optimizer state may move too, as in `overspill.train_step`.
        update: Where the optimizer's updates run: `"device"`; `"host"`, all that can; or `"auto"`, wherever the step is
            faster (docs/howto/state_in_host_memory.md).
        store: `pinned+disk` for a disk below host memory, on a CPU `host+disk`, as for `overspill.train_step`.
        host_budget: Host memory for that store.
        disk_bandwidth: The rates of its disk.
        placement: An allocator or solver within whose peak the plan must stay.
        times: Op times that were measured on the device, in place of estimates.
        backend: `inductor`: the step as `torch.compile` runs it, from the program that Inductor writes for the CPU.
        torch: The PyTorch release that a GPU runs it with, see `overspill.estimate`.
        cuda: The CUDA release, likewise.
        **how: How it is trained: `dtype` and the other such arguments of `overspill.estimate`.

    Returns:
        The Plan, checked and simulated.

    Raises:
        InfeasibleBudgetError: With the smallest budget that works.
        RequestError: For a wrong or impossible argument.
    """
    from .costs.releases import software_named  # noqa: PLC0415
    from .policies import with_update  # noqa: PLC0415 - needs numpy and HiGHS
    from .runtime.options import Options  # noqa: PLC0415 - imports torch
    from .runtime.preview import preview  # noqa: PLC0415

    policy = with_update(policy, update)
    options = Options(
        budget, policy, store, device=_device(device), placement=placement, times=times, backend=backend,
        whole_step=whole_step, host_budget=host_budget, disk_bandwidth=disk_bandwidth,
    )  # fmt: skip
    return preview(_job(build, inputs, loss, batch, optimizer, how), options, software_named(torch, cuda))


def compare(
    build: str | nn.Module | Callable[[], nn.Module],
    inputs: Any = None,
    loss: Callable[..., Tensor] | None = None,
    optimizer: str | MakeOptimizer = "sgd",
    *,
    budget: str | float | Budget | None = None,
    device: str | Device = "cpu",
    policies: Iterable[str | Policy] | None = None,
    batch: int | None = None,
    whole_step: bool = False,
    update: str = "device",
    placement: str | None = None,
    times: MeasuredTimes | None = None,
    backend: str = "eager",
    torch: str | None = None,
    cuda: str | None = None,
    **how: Any,
) -> Comparison:
    """Plan one training step by each of `policies`, and compare the plans.

    Args:
        build: The model, see `overspill.plan`.
        inputs: The inputs of the model, see `overspill.plan`.
        loss: The criterion, or the function of the model and all inputs.
        optimizer: Its name, or a function of the parameters.
        budget: A size, a share, or None for all of the device, less 2 % of a GPU that is not here.
        device: By name, by file, or as a Device.
        policies: Names that `overspill policies` lists, or policies; by default all of them.
        batch: Samples in a step.
        whole_step: Whether parameters, gradients and optimizer state may move too.
        update: Where updates run in the plans of `auto`, see `overspill.plan`.
        placement: An allocator or solver that places all plans, or `"own"`: for each policy that of its paper.
        times: Op times that were measured on the device.
        backend: `inductor`: the step as stock `torch.compile` runs it.
        torch: The PyTorch release that a GPU runs it with.
        cuda: The CUDA release.
        **how: How it is trained, see `overspill.plan`.

    Returns:
        A row for each policy: its plan, or why it has none. The fastest that fits comes first, then those that do not
        fit, the least bytes first.

    Raises:
        RequestError: For a wrong or impossible argument.
    """
    from .costs.releases import software_named  # noqa: PLC0415
    from .policies import POLICIES, policy_named, with_updates  # noqa: PLC0415 - needs numpy and HiGHS
    from .runtime.options import Options  # noqa: PLC0415 - imports torch
    from .runtime.preview import compare_job  # noqa: PLC0415

    asked = POLICIES.loaded()[0] if policies is None else policies
    names = tuple(map(policy_named, with_updates(asked, update)))
    options = Options(
        budget, device=_device(device), placement=placement, times=times, whole_step=whole_step, backend=backend
    )
    software = software_named(torch, cuda)
    return compare_job(_job(build, inputs, loss, batch, optimizer, how), options, names, software=software)


def sweep(
    build: str | nn.Module | Callable[[], nn.Module],
    inputs: Any = None,
    loss: Callable[..., Tensor] | None = None,
    optimizer: str | MakeOptimizer = "sgd",
    *,
    device: str | Device = "cpu",
    policies: Iterable[str | Policy] = ("auto",),
    points: int | None = None,
    batch: int | None = None,
    whole_step: bool = False,
    backend: str = "eager",
    torch: str | None = None,
    cuda: str | None = None,
    **how: Any,
) -> Sweep:
    """Plan one training step at up to `points` budgets, from all that it takes unmanaged to the smallest that works.

    Args:
        build: The model, see `overspill.plan`.
        inputs: The inputs of the model, see `overspill.plan`.
        loss: The criterion, or the function of the model and all inputs.
        optimizer: Its name, or a function of the parameters.
        device: By name, by file, or as a Device.
        policies: Names that `overspill policies` lists, or policies.
        points: The most budgets to plan for; None: 12.
        batch: Samples in a step.
        whole_step: Whether parameters, gradients and optimizer state may move too.
        backend: `inductor`: the step as stock `torch.compile` runs it.
        torch: The PyTorch release that a GPU runs it with.
        cuda: The CUDA release.
        **how: How it is trained, see `overspill.plan`.

    Returns:
        For each policy the memory against the simulated time, and at each budget the proven bound.

    Raises:
        RequestError: For a wrong or impossible argument.
    """
    from .costs.releases import software_named  # noqa: PLC0415
    from .plans.sweep import POINTS, check_points  # noqa: PLC0415 - needs numpy and HiGHS
    from .policies import policy_named  # noqa: PLC0415
    from .runtime.options import Options  # noqa: PLC0415 - imports torch
    from .runtime.preview import sweep_job  # noqa: PLC0415

    names, asked = tuple(map(policy_named, policies)), POINTS if points is None else points
    check_points(asked)
    options = Options(device=_device(device), whole_step=whole_step, backend=backend)
    software = software_named(torch, cuda)
    return sweep_job(_job(build, inputs, loss, batch, optimizer, how), options, names, asked, software=software)


def advise(
    build: str | nn.Module | Callable[[], nn.Module],
    inputs: Any = None,
    loss: Callable[..., Tensor] | None = None,
    optimizer: str | MakeOptimizer | None = None,
    *,
    device: str | Device,
    batch: int | None = None,
    **how: Any,
) -> list[Advice]:
    """Try common memory-saving changes to a job on `device` and rank those that help by cost, the cheapest first.

    Args:
        build: The model, see `overspill.estimate`.
        inputs: The inputs of the model, see `overspill.estimate`.
        loss: The criterion, or the function of the model and all inputs.
        optimizer: Its name, or a function of the parameters.
        device: The GPU that it should fit on.
        batch: Samples in a step.
        **how: How it is trained now: the other arguments of `overspill.estimate`.

    Returns:
        The changes. If the job fits already, only changes that cost neither results nor hardware are tried.

    Raises:
        RequestError: As `overspill.estimate` does.
        UnsupportedError: As `overspill.estimate` does.
    """
    from .estimation.api import estimate  # noqa: PLC0415 - imports torch
    from .runtime.advise import advise as advice_on  # noqa: PLC0415

    return list(advice_on(estimate(build, inputs, loss, optimizer, device=device, batch=batch, **how)))


def pack(
    blocks: Trace | str | Path,
    *,
    capacity: str | int | None = None,
    solver: str = "portfolio",
    time_limit: float | None = None,
    seed: int = 0,
) -> Solution:
    """Find an address for every block of a trace, in as few bytes as `solver` can.

    Args:
        blocks: A Trace, or the path of a CSV, of a saved trace or of a memory snapshot (docs/placement.md).
        capacity: The bytes that are enough, as a size; the search stops there.
        solver: `portfolio`, `exact`, or another that docs/placement.md names.
        time_limit: Seconds to search, unless the best possible layout is found earlier; None: as long as it gains,
            10 at most.
        seed: Of the random numbers.

    Returns:
        The Solution: the best layout found, and `bound_bytes`, which no layout is below. Its `peak_bytes` may be above
        the capacity.

    Raises:
        RequestError: For a file that cannot be read, or an unknown name.
    """
    from .placement.packing import LEAST_GAIN, Limits, solver_named  # noqa: PLC0415 - needs numpy
    from .placement.packing.files import read_trace  # noqa: PLC0415

    trace = blocks if isinstance(blocks, Trace) else read_trace(blocks).trace
    if time_limit is not None and not 0 < time_limit < float("inf"):
        raise RequestError(f"time_limit={time_limit:g} is no time to search in; give seconds above 0")
    within = None if capacity is None else parse_bytes(capacity)
    limits = Limits(within, seed=seed, least_gain=LEAST_GAIN)
    if time_limit is not None:
        limits = Limits(within, time_limit, seed)
    return solver_named(solver).solve(trace, limits)


def _device(device: str | Device) -> Device:
    from .devices import load_device  # noqa: PLC0415

    return device if isinstance(device, Device) else load_device(device)


def _job(
    build: str | nn.Module | Callable[[], nn.Module],
    inputs: Any,
    loss: Callable[..., Tensor] | None,
    batch: int | None,
    optimizer: str | MakeOptimizer,
    how: dict[str, Any],
) -> Job:
    """Return the job that the arguments describe. Raises RequestError."""
    from .job import job_of  # noqa: PLC0415

    if isinstance(build, str) and batch is None:
        raise RequestError(f"pass batch=, the samples in a step of {build}")
    return job_of(build, inputs, loss, batch, optimizer, **how)
