"""Try changes of a job, alone and together, and turn those that help into advice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from overspill.core import Phase, TensorKind
from overspill.core.errors import OverspillError
from overspill.core.units import format_bytes
from overspill.job import Job, Parallel
from overspill.job.parallel import MOST_GPUS
from overspill.placement.allocators.caching_config import CachingConfig

from .change import CALLBACK, COMPILED, Advice, Change, Price, Retrace
from .changes import averages_over_batch, changes

if TYPE_CHECKING:
    from overspill.estimation.figures import Figures

SHOWN = 5
"""The number of pieces of advice that `overspill estimate` shows."""
_LITTLE, _NOT_ENOUGH = "saves less than one percent", "does not fit yet"
_LEAST_SAVING = 0.01  # of what the job needs; what saves less is told only where it decides
_QUICK_TRIALS, _QUICK_OPS = 8, 60_000  # how many changes, and of how many recorded ops in all, a quick answer tries
_GPUS_TRIED = 3  # numbers of GPUs, each double the one before, from the fewest that could do
_SPLITS_TRIED = 4  # sizes of micro-batches
_LATER = (Price.TIME, Price.RESULTS)
_EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"

Planner = Callable[[], Sequence[Advice]]
Progress = Callable[[str], None]
Vain = Callable[[str, str], object]
"""A callback with a change, and the reason why it does not help."""


def advice(
    estimate: Figures,
    planner: Planner | None = None,
    progress: Progress | None = None,
    *,
    vain: Vain | None = None,
    quick: bool = False,
) -> Iterator[Advice]:
    """Yield changes that save at least one percent, cheapest first.

    Each is tried; the last ones are combinations. Where the job surely fits unchanged, only changes that cost neither
    results nor hardware are tried. `planner` plans the job within the device by Overspill; without it that advice has
    no figures. `progress` is called with the current task. `vain` is called with each change that did not help, and the
    reason. With `quick`, a fixed number of changes is tried, which takes a few seconds, and more GPUs are not tried.
    Nor are they where the job fits with the same results.
    """
    yield from _Trials(estimate, progress or _nobody, vain or _nobody, quick).run(planner)


def _nobody(*_: str) -> None:
    """Ignore the message."""


@dataclass
class _Trials:
    """The unchanged job, and the changes found to help it."""

    estimate: Figures
    progress: Progress
    vain: Vain
    quick: bool

    def __post_init__(self) -> None:
        """Set up the choice of changes that are worth a try.

        `sure`: the job fits even at the upper end of its interval. `solved`: it fits, or fits with a change already
        found.
        """
        self.fits = self.estimate.fits()
        self.sure = self.fits and self.estimate.total.high <= self.estimate.device.memory_bytes
        self.weights, self.state = _persistent(self.estimate)
        self.helpful: list[Change] = []
        self.expandable = False
        self.solved = self.fits
        ops = max(len(self.estimate.recording.ops), 1)
        self.left = max(1, min(_QUICK_TRIALS, _QUICK_OPS // ops)) if self.quick else None

    def run(self, planner: Planner | None) -> Iterator[Advice]:
        """Yield all advice, in order."""
        yield from self._segments()
        retrace = self.estimate.retrace
        options = [] if retrace is None else list(changes(self.estimate, retrace.job))
        fits_here = False
        ahead: dict[Price, tuple[list[Advice], bool]] = {}
        for price in Price:
            if self.sure and price > Price.TIME:
                return
            if price is Price.NOTHING:
                yield from self._packed()
            if price is Price.TIME and not self.sure:
                yield from self._smaller_batch()
                if planner is not None:  # it works meanwhile
                    ahead = {later: self._ahead([c for c in options if c.price is later]) for later in _LATER}
                yield from self._planned(planner)
            if price in ahead:
                found, solved = ahead[price]
                self.solved |= solved
                yield from found
            else:
                yield from self._alone([change for change in options if change.price is price])
            if price in (Price.TIME, Price.RESULTS) and retrace is not None and not self.solved:
                yield from self._together(price)
            if price is Price.TIME:
                fits_here = self.solved  # with the same results
        if self.quick or not fits_here:
            yield from self._more_gpus()
        yield from self._another_gpu()

    # One change

    def _packed(self) -> Iterator[Advice]:
        """Yield the advice to pack sequences, with the bytes of padding, whose share is unknown."""
        retrace, scaling, batch = self.estimate.retrace, self.estimate.scaling, self.estimate.batch
        if retrace is None or scaling is None or not batch or batch == 1 or not retrace.job.fine_tunes:
            return
        if not any(op.name == "embedding" for op in self.estimate.recording.ops):  # it reads images
            return
        twice = scaling.minimum_capacity_bytes(2 * batch, self.estimate.outside_bytes)
        tenth = (twice - self.estimate.minimum_capacity_bytes) // 10
        if tenth > 0:
            cost = (
                f"nothing: faster. Each tenth of the tokens that is padding takes {format_bytes(tenth)}; give "
                "--seq-len the mean length"
            )
            yield Advice(
                "sequences packed without padding, if texts differ in length", cost, Price.NOTHING,
                unsimulated="the share of padding is not known",
            )  # fmt: skip

    def _segments(self) -> Iterator[Advice]:
        """Yield the advice to use PyTorch's expandable segments, if they leave less fragmentation."""
        changed = _expanding(self.estimate)
        if changed is None:
            return
        found = self._advice(changed, _EXPANDABLE, "nothing: less fragmentation", Price.NOTHING)
        if found is not None:
            self.expandable = True
            yield found

    def _alone(self, options: Sequence[Change]) -> Iterator[Advice]:
        for change in options:
            if change.of_update and self._updates_little():
                self.vain(change.what, _LITTLE)
            elif not self._hopeless([change]) and (found := self._tried(change)) is not None:
                self.helpful.append(change)
                yield found

    def _ahead(self, options: Sequence[Change]) -> tuple[list[Advice], bool]:
        """Return the advice of these options before its turn, and whether one of them makes the job fit."""
        before, self.solved = self.solved, False
        found = list(self._alone(options))
        solved, self.solved = self.solved, before
        return found, solved

    def _tried(self, change: Change) -> Advice | None:
        assert self.estimate.retrace is not None
        changed = self._changed(self.estimate.batch, change.edit, change.what)
        if changed is None:
            return None
        return self._advice(changed, change.what, change.cost, change.price, change.trainer)

    def _changed(
        self, batch: int | None, edit: Callable[[Job], Job], what: str, *, expandable: bool = False
    ) -> Figures | None:
        """Return the estimate of the edited job, or None if it cannot be recorded or no trial is left."""
        retrace = self.estimate.retrace
        assert retrace is not None
        if self.left is not None:
            if not self.left:
                return None
            self.left -= 1
        # Record the changed job.
        self.progress(f"trying {what}")
        try:
            job = replace(edit(retrace.job), batch=batch)
            recording = retrace.record(job)
        except OverspillError as error:  # the model has nothing of the kind, or does not bear it
            self.vain(what, f"not here: {error}")
            return None
        changed = replace(
            self.estimate, recording=recording, batch=batch, parallel=job.parallel, scaling=None,
            retrace=Retrace(job, retrace.record),
        )  # fmt: skip
        return (_expanding(changed) or changed) if expandable else changed

    def _advice(
        self, changed: Figures, what: str, cost: str, price: Price, trainer: str = "", repeats: float = 1.0
    ) -> Advice | None:
        """Return `changed` as advice, if the job needs less with it.

        It has `repeats` times the micro-batches that were recorded.
        """
        needed = changed.minimum_capacity_bytes
        if needed > (1 - _LEAST_SAVING) * self.estimate.minimum_capacity_bytes and (self.fits or not changed.fits()):
            self.vain(what, _LITTLE)
            return None
        gpus = 1 if changed.parallel is None else changed.parallel.gpus
        self.solved |= changed.fits()
        host = changed.recording.host_bytes or None
        return Advice(
            what, cost, price, needed, changed.total_bytes, changed.fits(), changed.step_seconds(repeats),
            changed.unsimulated, gpus=gpus, host_bytes=host, trainer=trainer,
        )  # fmt: skip

    def _updates_little(self) -> bool:
        """Return whether no other update of the weights saves enough to count: known without a trial, as with LoRA."""
        made, needed = self.estimate, self.estimate.minimum_capacity_bytes
        decides = not self.fits and needed - self.state <= made.device.memory_bytes
        return not decides and self.state < _LEAST_SAVING * needed and made.peak.phase is not Phase.UPDATE

    def _hopeless(self, chosen: Sequence[Change], gpus: float = 1) -> bool:
        """Return whether weights and optimizer state alone are too large, so that no trial can help."""
        weights, state = float(self.weights), float(self.state)
        for change in chosen:
            weights, state = weights * change.weights, state * change.state
        room = self.estimate.device.memory_bytes - self.estimate.outside_bytes
        return (weights + state) / gpus > room

    # Several at once

    def _smaller_batch(self) -> Iterator[Advice]:
        """Yield the advice to split the batch into micro-batches, as large as fit."""
        batch, scaling, retrace = self.estimate.batch, self.estimate.scaling, self.estimate.retrace
        if not batch or batch == 1 or scaling is None or scaling.is_far_too_large(self.estimate.outside_bytes):
            return
        largest = self.estimate.largest_batch
        if not largest or largest >= batch:
            return
        if retrace is None or retrace.job.optimizer is None:
            needed = scaling.minimum_capacity_bytes(largest, self.estimate.outside_bytes)
            over = "" if retrace is not None else f", accumulating gradients over {-(-batch // largest)} of them"
            yield Advice(
                f"batch {largest} instead of {batch}{over}", "more steps", Price.TIME, needed, fits=True,
                unsimulated="a batch that was not traced",
            )  # fmt: skip
            return
        cost = "the same gradients; many small micro-batches take longer"
        if averages_over_batch(self.estimate):
            cost = "batch normalization sees micro-batches alone; else the same gradients"
        split = -(-batch // largest)
        for _ in range(_SPLITS_TRIED):
            micro = -(-batch // split)
            parts = split * retrace.job.accumulate
            what = f"batch {micro} instead of {batch}, accumulating gradients over {parts} of them"
            trainer = f"per_device_train_batch_size={micro}, gradient_accumulation_steps={parts}"
            # Two micro-batches have all that more have: the first meets no gradients, the second does.
            changed = self._changed(micro, partial(replace, accumulate=2), what)
            found = None if changed is None else self._advice(changed, what, cost, Price.TIME, trainer, parts / 2)
            if found is not None and found.fits:
                yield found
                return
            if found is not None:
                self.vain(what, _NOT_ENOUGH)
            if micro == 1:
                return
            split = min(2 * split, batch)

    def _planned(self, planner: Planner | None) -> Iterator[Advice]:
        """Yield the advice to use Overspill itself."""
        trains = self.estimate.retrace is None or self.estimate.retrace.job.optimizer is not None
        parallel = self.estimate.parallel
        if self.estimate.framework != "pytorch" or not trains or (parallel is not None and parallel.kind != "fsdp"):
            return
        if planner is not None:
            self.progress("planning within the device's memory")
            for found in planner():
                if (found.minimum_capacity_bytes or 0) < self.estimate.minimum_capacity_bytes:
                    self.solved |= bool(found.fits)
                    yield found
            return
        if parallel is not None:
            return
        if self._hopeless([]):
            # Without a planner, only what it could do.
            cost = "parameters and optimizer state may leave the device too"
        else:
            saved = sum(self.estimate.breakdown[name] for name in ("forward_outputs", "output_gradients"))
            if not saved:  # the peak is in the update
                return
            cost = f"up to {format_bytes(saved)} can leave the device or be recomputed"
        cost = f"time, by `overspill plan`; the same numbers: {cost}"
        unsimulated = "`overspill plan` simulates it"
        yield Advice(
            COMPILED,
            cost,
            Price.TIME,
            unsimulated=unsimulated,
            budget_bytes=self.estimate.budget_bytes,
            trainer=CALLBACK,
            python=f"model = {COMPILED}",
        )

    def _together(self, price: Price) -> Iterator[Advice]:
        """Yield the cheapest changes together, as many as the job needs.

        They are combined only if no single change suffices. At most one of them changes results.
        """
        keeping = [change for change in self.helpful if change.price < Price.RESULTS]
        # All that keep results, one after the other; else one that changes them, on top of all.
        if price is Price.TIME:
            chosen: list[Change] = []
            for change in keeping:
                chosen = [*_beside(change, chosen), change]
                if (len(chosen) > 1 or self.expandable) and (found := self._all_of(chosen)) is not None:
                    yield found
                    return
            candidates = [chosen]
        else:
            changing = [change for change in self.helpful if change.price is price]
            candidates = [[*_beside(change, keeping), change] for change in changing]
        for chosen in candidates:
            if (found := self._all_of(chosen) or self._in_micro_batches(chosen)) is not None:
                yield found
                return

    def _in_micro_batches(self, chosen: Sequence[Change]) -> Advice | None:
        """Return the job with all of `chosen` in the fewest micro-batches that fit, a power of two."""
        most = (self.estimate.batch or 1).bit_length() - 1
        found = self._all_of(chosen, 2**most) if most else None
        low, high = 0, most
        while found is not None and high - low > 1:
            middle = (low + high) // 2
            fewer = self._all_of(chosen, 2**middle)
            low, high, found = (low, middle, fewer) if fewer is not None else (middle, high, found)
        return found

    def _all_of(self, chosen: Sequence[Change], split: int = 1) -> Advice | None:
        """Return the job with all of `chosen`, in `split` micro-batches, if it then fits."""
        if self._hopeless(chosen):
            return None

        def edit(job: Job) -> Job:
            for change in chosen:
                job = change.edit(job)
            return replace(job, accumulate=2) if split > 1 else job

        batch = self.estimate.batch
        # Try them all at once, in micro-batches if asked.
        micro = batch if split == 1 or not batch else -(-batch // split)
        names = [_EXPANDABLE] if self.expandable else []
        names += [change.what for change in chosen]
        names += [f"batch {micro} {split} times"] if split > 1 else []
        what = f"together: {'; '.join(names)}"
        changed = self._changed(micro, edit, what, expandable=self.expandable)
        price = max((change.price for change in chosen), default=Price.TIME)
        arguments = [change.trainer for change in chosen]
        trainer = ", ".join(arguments) if all(arguments) and split == 1 and not self.expandable else ""
        parts = split * (1 if self.estimate.retrace is None else self.estimate.retrace.job.accumulate)
        repeats = parts / 2 if split > 1 else 1.0
        found = None if changed is None else self._advice(changed, what, "that of each", price, trainer, repeats)
        if found is not None and not found.fits:
            self.vain(what, _NOT_ENOUGH)
            return None
        return found

    # Other hardware

    def _more_gpus(self) -> Iterator[Advice]:
        """Yield the advice to split the batch over the fewest GPUs that suffice.

        Their number is a power of two. Weights and state are split too where necessary.
        """
        retrace, batch = self.estimate.retrace, self.estimate.batch
        if retrace is None or retrace.job.optimizer is None or not batch:
            return
        have = self.estimate.parallel
        gpus = 2 if have is None else 2 * have.gpus
        # Gradients are as large as weights, and all three must fit beside one another on each.
        whole = 2 * self.weights + self.state < self.estimate.device.memory_bytes - self.estimate.outside_bytes
        for kind in ("ddp", "fsdp") if have is None and batch > 1 and whole else ("fsdp",):
            if (found := self._over_gpus(kind, gpus)) is not None:
                yield found
                return

    def _over_gpus(self, kind: str, gpus: int) -> Advice | None:
        """Return the job over the fewest GPUs, from `gpus` on, on which it fits."""
        have, batch, device = self.estimate.parallel, self.estimate.batch or 1, self.estimate.device
        shards = 1 if have is None or have.kind != "fsdp" else have.gpus
        # Skip numbers of GPUs whose shards are too large by themselves.
        while kind == "fsdp" and gpus <= MOST_GPUS and self._hopeless([], gpus / shards):
            gpus *= 2
        how = "FSDP (ZeRO-3)" if kind == "fsdp" else "DistributedDataParallel"
        if self.quick:
            return Advice(
                f"{how} over {gpus} GPUs or more", "that hardware; `overspill advise` tries it", Price.HARDWARE,
                unsimulated="collectives",
            )  # fmt: skip
        # Double them until it fits.
        for _ in range(_GPUS_TRIED):
            if gpus > MOST_GPUS:
                break
            each = -(-batch // gpus) if have is None or have.kind == "pp" else batch  # a pipeline's is of all its GPUs
            other = Parallel(kind, gpus) if have is None or have.kind != kind else replace(have, gpus=gpus)
            what = f"{how} over {gpus} GPUs, batch {each} on each"
            changed = self._changed(each, partial(replace, parallel=other), what)
            if changed is None:  # a model that cannot be wrapped so
                break
            found = self._advice(changed, what, f"{gpus} of {device.name}", Price.HARDWARE)
            if found is not None and found.fits:
                return found
            if found is not None:
                self.vain(what, _NOT_ENOUGH)
            gpus *= 2
        return None

    def _another_gpu(self) -> Iterator[Advice]:
        fitting = self.estimate.gpus
        if not fitting:
            return
        on = self.estimate.on(fitting[0])
        several = f"another GPU: {', '.join(fitting[:6])}{' and more' if len(fitting) > 6 else ''}"
        yield Advice(
            several, "another card", Price.HARDWARE, on.minimum_capacity_bytes, on.total_bytes, True, on.step_seconds(),
            on.unsimulated, gpus=1 if on.parallel is None else on.parallel.gpus,
        )  # fmt: skip


def _beside(change: Change, chosen: Sequence[Change]) -> list[Change]:
    """Return those of `chosen` that `change` does not undo."""
    return [other for other in chosen if not other.fields.keys() & change.fields.keys()]


def _persistent(estimate: Figures) -> tuple[int, int]:
    """Return the bytes of weights and buffers, and of optimizer state, that exist when the last step begins."""
    recording = estimate.recording
    begin = recording.starts[-1] if recording.starts else 0
    weights = state = 0
    for allocation in recording.allocations:
        if allocation.start < begin <= allocation.end:
            if allocation.kind in (TensorKind.PARAMETER, TensorKind.BUFFER):
                weights += allocation.nbytes
            elif allocation.kind is TensorKind.OPTIMIZER_STATE:
                state += allocation.nbytes
    return weights, state


def _expanding(estimate: Figures) -> Figures | None:
    """Return the same job with expandable segments, or None.

    None means that it has them already, or an allocator without them.
    """
    config = estimate.allocator_config or CachingConfig()
    if estimate.allocator != "pytorch" or not isinstance(config, CachingConfig) or config.expandable_segments:
        return None
    return replace(estimate, allocator_config=replace(config, expandable_segments=True), scaling=None)
