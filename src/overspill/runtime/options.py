"""Options of a plan or a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from overspill.core import Device
from overspill.core.budget import Budget
from overspill.core.errors import RequestError
from overspill.core.units import parse_bytes, parse_with_unit
from overspill.costs import MeasuredTimes
from overspill.devices.disks import rates_of
from overspill.placement.allocators.caching import CachingAllocator
from overspill.placement.packing import DEFAULT
from overspill.placement.place import check_placer
from overspill.policies import Policy, policy_named
from overspill.policies.auto.host_updates import DEVICE, HOST

from .transfer.registry import STORES, has_tiers
from .transfer.tiers import Directories, default_host_bytes

BACKENDS = ("eager", "inductor")
ON_UNPLANNED = ("error", "warn")
"""Responses to a call that runs without a plan."""
PLANNED, PYTORCH, OWN = "planned", CachingAllocator.name, "own"
"""Placements: addresses in an arena, the default on CUDA; PyTorch's caching allocator alone; that of a policy's
paper."""


@dataclass(frozen=True)
class Options:
    """Options as the user gave them, unchanged by any machine."""

    budget: str | float | Budget | None = None
    """A size, a share of the step's memory without Overspill, `smallest`, or None for all of the device's memory,
    less what others take of a GPU that is not here."""
    policy: str | Policy = "auto"
    """The policy that plans, by name or itself."""
    store: str | None = None
    """The store for offloaded tensors, by name; None: the first that the device has."""
    store_dir: Directories = None
    """The directory of a store on disk; below host memory several, one for each drive."""
    backend: str = "eager"
    """The kernels that run: `eager` or `inductor`."""
    device: str | Device | None = None
    """The device to plan for, by name or itself; None: the one that tensors are on."""
    reserve: str | float | None = None
    """Bytes for computation between the model's forward and backward; None: they are worked out (`LossOutside`)."""
    times: MeasuredTimes | None = None
    """Op times measured before, in place of estimates."""
    profile: bool = False
    """Whether to measure op times, on the eager backend."""
    placement: str | None = None
    """The allocator or solver within whose peak a plan has to stay, `planned`, or `own`. None: `planned` on CUDA if it
    is faster; on a CPU live bytes count."""
    checksum: bool = False
    """Whether to compare bytes that come back from the store with those written."""
    on_unplanned: str = "error"
    """Whether a call that runs without a plan is an error or a warning."""
    partition: float | None = None
    """The `activation_memory_budget` (0 to 1) by which Inductor parts forward and backward; None: the best of
    several."""
    host_budget: str | int | None = None
    """Host memory that a store may take which has a disk below it; None: nine tenths of what is free."""
    disk_bandwidth: str | None = None
    """The rates of that disk, as `"7GB/s"` or `"7GB/s,5GB/s"` for reads and writes, or the name of a kind of drive."""
    whole_step: bool = False
    """Whether the update of a job is part of its plan, as in `overspill.train_step`."""
    limit: Budget = field(init=False)
    """The budget, parsed."""

    def __post_init__(self) -> None:
        """Check at once for values that could only fail later. Raises RequestError."""
        policy_named(self.policy)
        object.__setattr__(self, "limit", Budget.parse(self.budget))
        if self.reserve is not None:
            parse_bytes(self.reserve)
        if self.on_unplanned not in ON_UNPLANNED:
            raise RequestError(f"on_unplanned={self.on_unplanned!r}: it is {' or '.join(map(repr, ON_UNPLANNED))}")
        if self.store is not None:
            STORES.named(self.store)
        self._check_tiers()
        if self.backend not in BACKENDS:
            raise RequestError(f"unknown backend {self.backend!r}; backends: {', '.join(BACKENDS)}")
        if self.profile and self.backend != "eager":
            raise RequestError("op times are measured on the eager backend; Inductor fuses ops")
        if self.partition is not None and self.backend != "inductor":
            raise RequestError("a partition is for Inductor's programs; give backend='inductor' with it")
        if self.partition is not None and not 0 <= self.partition <= 1:
            raise RequestError(f"partition={self.partition} is no activation_memory_budget, which goes from 0 to 1")
        if self.placer is not None:
            check_placer(self.placer, PLANNED, OWN)

    def _check_tiers(self) -> None:
        """Raise RequestError for wrong options of a disk below host memory, or without a store that has one."""
        for name in ("host_budget", "disk_bandwidth"):
            if getattr(self, name) is not None and not has_tiers(self.store):
                tiers = " or ".join(f"store={store!r}" for store in STORES if has_tiers(store))
                raise RequestError(f"{name}= is for a store with a disk below host memory; add {tiers}")
        if self.host_budget is not None:
            parse_with_unit(self.host_budget, 1 << 20)
        _ = self.disk_rates

    def check_unset(self) -> None:
        """Raise RequestError for options given together with a session, which has its own."""
        if self != Options():
            raise RequestError("a session has its own budget, policy and store; give these to overspill.Session")

    @cached_property
    def host_bytes(self) -> int | None:
        """The bytes of the host budget, as found when first asked for; None if the store has no disk below."""
        if not has_tiers(self.store):
            return None
        return default_host_bytes() if self.host_budget is None else parse_bytes(self.host_budget)

    @cached_property
    def disk_rates(self) -> tuple[float, float] | None:
        """Bytes a second that the disk below the store reads and writes; None: those of the device's host."""
        return None if self.disk_bandwidth is None else rates_of(self.disk_bandwidth)

    @property
    def updates_on_host(self) -> bool:
        """Whether each update that can is to run on the host."""
        return getattr(policy_named(self.policy), "update", DEVICE) == HOST

    @property
    def in_pieces(self) -> bool:
        """Whether large row-wise chains may be planned in pieces of rows."""
        return policy_named(self.policy).in_pieces

    @property
    def placer(self) -> str | None:
        """The allocator or solver that places plans without real addresses."""
        if self.placement == OWN:
            return policy_named(self.policy).placement
        return DEFAULT if self.placement == PLANNED else self.placement
