"""Dymem's two-ended pool (GTBM): blocks at either end by mobility; rules in native/allocators/two_ended.hpp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from overspill.core.errors import RequestError

from .native_allocator import NativeAllocator
from .result import Replay

STEP_BYTES = 512
"""CNMEM_GRANULARITY of src/cnmem.cpp (NVIDIA/cnmem 09c27531)."""
BETA_BYTES = 300 << 20
"""β of Table 2 at which training failed in 0.9 % of the cases, "the optimal configuration"."""
FIRST_POOL_BYTES = 10 << 30
"""The main space of the first iteration: of 12 GB "10G (another 2GB for incremental space)" (§5.5)."""
TRIAL_POOL_BYTES = 1 << 46


@dataclass(frozen=True)
class TwoEndedConfig:
    """The sizes of Dymem's pool.

    Without `pool_bytes` a replay finds the smallest main space in which the first run fits, plus `beta_bytes`. Call by
    call no first run exists. The main space is then that of the paper's first iteration, ten twelfths of the device or
    10 GiB.
    """

    pool_bytes: int | None = None
    """The main space; a smaller device gives all its memory."""
    beta_bytes: int = BETA_BYTES
    grows: bool = True
    """Whether blocks that do not fit the main space go to the incremental space; otherwise they fail."""
    learns: bool = False
    """As under a running job: mobilities and sizes are those of the step before, and each stream has a main space."""

    def __post_init__(self) -> None:
        if self.pool_bytes is not None and self.pool_bytes < 0:
            raise RequestError(f"pool_bytes must not be negative, not {self.pool_bytes}")
        if self.beta_bytes < 0:
            raise RequestError(f"beta_bytes must not be negative, not {self.beta_bytes}")
        if self.learns and (self.pool_bytes is not None or not self.grows):
            raise RequestError(
                "a pool that learns its size has none to begin with, and grows: leave pool_bytes and grows out"
            )


LEARNING = TwoEndedConfig(learns=True)
"""As under a running job."""


class TwoEndedAllocator(NativeAllocator):
    """Movable blocks from the low end, temporary ones from the high end.

    Reclaimed ones get segments of their own. Each end serves itself by best fit from its own holes, then from the gap.
    Only when both are full it uses the other end's holes, since the guarantee is "soft". The incremental space is
    cudaMalloc's, and blocks freed there return to the device. A reclaimed block that does not fit the device goes to
    the low end.
    """

    name = core = "gtbm"
    coalesces: ClassVar = False  # where it learns, parts of a free block have memory and others have none
    summary: ClassVar = "Dymem's pool with two ends, blocks grouped by mobility (GTBM)"
    source: ClassVar = "Dymem (Yang and Cheng, HPDC'20, doi:10.1145/3369583.3392684), section 3.3, Algorithm 3"
    config_type: ClassVar = TwoEndedConfig
    by_references: ClassVar = True
    config: TwoEndedConfig

    @classmethod
    def settled(cls, config: TwoEndedConfig | None, trial: Callable[[Any], Replay]) -> TwoEndedConfig | None:
        if config is not None and (
            not isinstance(config, cls.config_type) or config.pool_bytes is not None or config.learns
        ):
            return config
        config = config or TwoEndedConfig()
        needed = needed_pool_bytes(trial(replace(config, pool_bytes=TRIAL_POOL_BYTES)))
        return replace(config, pool_bytes=needed + config.beta_bytes)


def needed_pool_bytes(run: Replay) -> int:
    """Return the main space bytes that `run` used, without its smallest gap.

    `run` is a replay in a larger space with its curves: init - squeeze_gap of §3.3.3. Raises RequestError without those
    curves.
    """
    if run.spread is None or run.reserved is None:
        raise RequestError("the squeeze gap is found in a replay with request_bytes")
    if not len(run.segment_table):
        return 0
    pool_bytes = int(run.segment_table[0, 3])
    opened = run.reserved >= pool_bytes
    return pool_bytes - int((run.reserved - run.spread)[opened].min(initial=pool_bytes))
