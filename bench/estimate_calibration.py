"""The constants that estimates have from measurements: which engines cuDNN takes, the kernels that a job loads, the rest.

They are fitted to the jobs of `ground_truth/xmem.csv`: SHARES and UNEXPLAINED of `costs/engines.py`, `kernels` and
`cudnn_kernels` of `costs/context.toml`. For the table of accuracy, `estimate_accuracy.py` fits them anew without the
networks that it judges.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np
from ground_truth import jobs

from overspill.capture.recording.recorder import Recorder
from overspill.capture.virtual_gpu.record import record
from overspill.core import Device
from overspill.costs import Interval, capability_of, kernel_image_bytes
from overspill.costs.engines import SHARES, UNEXPLAINED, Shares
from overspill.costs.scratch import Software
from overspill.devices import load_device
from overspill.estimation import Estimate
from overspill.estimation.demand import served
from overspill.estimation.engine_samples import EngineSamples, interval

_GPUS = {"NVIDIA GeForce RTX 3060": "rtx3060", "NVIDIA GeForce RTX 4060": "rtx4060"}
_FAMILIES = ("ConvNeXt", "MnasNet", "Mob", "RegNet", "ResNet", "VGG", "distilgpt2", "gpt-neo", "opt", "T5")

_NEW_CODE, _OLD_CODE = Software("2.6", "12.4", {}), Software("2.6", "12.4", {"CUBLAS_WORKSPACE_CONFIG": ":0:0"})
"""What jobs whose mode was not recorded ran with: the code that did not record it leaves cuBLAS no workspace."""
_COVERED = 0.9
_UNKNOWN = 0.3  # the chance of mode 1 where nothing is recorded: one of three modes
_PARTS = 20
_FORWARD, _BACKWARD, _UNEXPLAINED = (
    (0.5, 0.7, 0.9, 0.95, 0.99),
    (0.9, 0.95, 0.98, 0.99),
    tuple(i / 200 for i in range(25)),
)


@dataclass(frozen=True)
class Constants:
    """What is fitted: shares of engines, bytes of kernels, and what stays unexplained of jobs with convolutions.

    `freed_late` is by experiment the chance that a job whose mode was not recorded frees its gradients after forward.
    """

    shares: Shares
    kernels: Interval
    cudnn_kernels: Interval
    unexplained: float
    freed_late: dict[str, float]


class Reading:
    """A job as a row can be read: its draws, and their peaks on the row's GPU."""

    def __init__(self, row: jobs.Row, device: Device) -> None:
        def job(recorder: Recorder) -> None:
            jobs.run(row, "cuda", jobs.ITERATIONS, recorder.start_iteration)

        started = time.perf_counter()
        recording = record(job, capability=capability_of(device.compute_capability))
        estimate = Estimate("", recording, device, software=_NEW_CODE if row.zero_grad_recorded else _OLD_CODE)
        self._demand, self._draws = estimate.demand, EngineSamples(recording, device, estimate.demand)
        self.fits = estimate.fits()
        self.seconds = time.perf_counter() - started
        self._room = device.memory_bytes - estimate.outside_bytes
        self._drawn: dict[Shares, tuple[int, ...]] = {}

    @cached_property
    def peak(self) -> int:
        """The most device memory behind reserved bytes, with the likeliest engines."""
        return served(self._demand, self._room).peak_device_bytes

    def drawn(self, shares: Shares) -> tuple[int, ...]:
        """The same in each draw."""
        if shares not in self._drawn:
            demands = self._draws.demands(shares)
            self._drawn[shares] = tuple(served(demand, self._room).peak_device_bytes for demand in demands)
        return self._drawn[shares]


class Case:
    """One measured row, as mode 0 of `zero_grad` and, where that was not recorded, as mode 1 too."""

    def __init__(self, row: jobs.Row) -> None:
        device = replace(load_device(_GPUS[row.gpu]), memory_bytes=row.total_gpu_memory_bytes)
        self.row = row
        self.family = next((name for name in _FAMILIES if row.model.split("/")[-1].startswith(name)), row.model)
        self.experiment = row.source_path.split("/")[2]  # plot/data/001-Anova/...
        modes = (row.zero_grad_mode,) if row.zero_grad_recorded else (0, 1)
        self.readings = tuple(Reading(replace(row, zero_grad_mode=mode), device) for mode in modes)
        if len({reading.peak for reading in self.readings}) == 1:
            self.readings = self.readings[:1]
        self.convolves = row.family == "CNN"

    def outside(self, constants: Constants) -> Interval:
        """The kernels that it loads."""
        return constants.kernels + constants.cudnn_kernels if self.convolves else constants.kernels

    def interval(self, constants: Constants) -> Interval:
        """What it is predicted to take above the bare context; the likelier reading, and the interval of both."""
        late = constants.freed_late.get(self.experiment, _UNKNOWN) if len(self.readings) == 2 else 0.0
        others = round(late * _PARTS)
        pool: list[int] = []
        for reading, count in zip(self.readings, (_PARTS - others, others), strict=False):
            pool += (*(reading.drawn(constants.shares) or (reading.peak,)),) * count
        beside = constants.unexplained if self.convolves else 0.0
        return interval(self.readings[0].peak, pool, self.outside(constants), beside)

    @property
    def predicted(self) -> tuple[int, ...]:
        """The likeliest peak of reserved memory of each reading."""
        return tuple(reading.peak for reading in self.readings)

    @property
    def inside_bytes(self) -> int:
        """What it was measured to take, less the likeliest peak of reserved memory."""
        return self.row.ground_bytes - self.readings[0].peak


def fit(cases: Sequence[Case]) -> Constants:
    """The constants that fit `cases`: medians of bytes, and the narrowest intervals that nine of ten lie in."""
    measured = [case for case in cases if not case.row.real_oom]
    late = {experiment: _late(cases, experiment) for experiment in {case.experiment for case in cases}}
    kernels = _spread([case.inside_bytes for case in measured if not case.convolves])
    cudnn = max(0, int(np.median([case.inside_bytes for case in measured if case.convolves])) - kernels.central)
    choices = (
        Constants(Shares(forward, backward), kernels, Interval(0, cudnn, 2 * cudnn), unexplained, late)
        for forward, backward, unexplained in product(_FORWARD, _BACKWARD, _UNEXPLAINED)
    )
    return min(choices, key=lambda choice: _width(measured, choice))


def _width(cases: Sequence[Case], constants: Constants) -> tuple[bool, float]:
    """Whether too few of `cases` lie in their intervals; and the mean width of these, as a share of what was measured."""
    found = [(case, case.interval(constants)) for case in cases]
    covered = np.mean([inside(case, interval) for case, interval in found])
    width = np.mean([(interval.high - interval.low) / case.row.ground_bytes for case, interval in found])
    return bool(covered < _COVERED), float(width)


def _late(cases: Sequence[Case], experiment: str) -> float:
    """The share of an experiment's jobs that free gradients after forward, by those whose mode was recorded."""
    modes = [c.row.zero_grad_mode for c in cases if c.experiment == experiment and c.row.zero_grad_recorded]
    return (modes.count(1) + _UNKNOWN) / (len(modes) + 1)


def _spread(values: Sequence[int]) -> Interval:
    """The median of `values`, and how far nine tenths of them or more are from it at most."""
    central = max(0, int(np.median(values)))
    away = int(np.quantile(np.abs(np.array(values) - central), _COVERED, method="higher"))
    return Interval(max(0, central - away), central, central + away)


def of_code() -> Constants:
    """The constants as the code has them."""
    gpu = load_device(next(iter(_GPUS.values())))
    kernels, both = (kernel_image_bytes(gpu, _NEW_CODE.cuda_version, cudnn=cudnn) for cudnn in (False, True))
    cudnn = Interval(both.low - kernels.low, both.central - kernels.central, both.high - kernels.high)
    return Constants(SHARES, kernels, cudnn, UNEXPLAINED, {})


def inside(case: Case, found: Interval) -> bool:
    """Whether what was measured lies in an interval."""
    return found.low <= case.row.ground_bytes <= found.high


def left_out(cases: Sequence[Case]) -> Iterator[tuple[Case, Constants]]:
    """Every case, with the constants that fit those of other families of networks."""
    for family in dict.fromkeys(case.family for case in cases):
        constants = fit([case for case in cases if case.family != family])
        for case in cases:
            if case.family == family:
                yield case, constants


def print_constants() -> None:
    """Print the constants that fit all rows, and how they vary as a family is left out."""
    cases = [Case(row) for row in jobs.load()]
    for family in ("", *dict.fromkeys(case.family for case in cases)):
        found = fit([case for case in cases if case.family != family])
        print(f"{f'without {family}' if family else 'all rows'}: {found.shares}, UNEXPLAINED {found.unexplained:.3f}")
        for name, bytes_ in (("kernels", found.kernels), ("cudnn_kernels", found.cudnn_kernels)):
            print(f"    {name}: {bytes_.low >> 20}, {bytes_.central >> 20}, {bytes_.high >> 20} MiB")
        print(f"    freed late: {found.freed_late}")
