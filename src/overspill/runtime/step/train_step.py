"""`overspill.train_step`: forward, loss, backward and update as one planned step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from overspill.capture.compiled.backward import check_saved_hooks
from overspill.capture.compiled.chosen_rows import OtherRows
from overspill.capture.compiled.whole_step import CapturedStep
from overspill.capture.programs.allocations import allocations, peak_of
from overspill.core import Device, Graph
from overspill.core.errors import InfeasibleBudgetError, RequestError, UnsupportedError
from overspill.costs import MeasuredTimes
from overspill.job import GradientOptions
from overspill.models.drawing import set_randomness
from overspill.models.step import StepLoss
from overspill.plans.plan import Plan
from overspill.policies import with_update
from overspill.pytorch.dynamo import OptimizedModule
from overspill.pytorch.dynamo_stand_in import uncompiled
from overspill.pytorch.modules import ORIGINAL
from overspill.pytorch.optimizers import note_step
from overspill.pytorch.trees import tree_flatten
from overspill.runtime import allocator, batches
from overspill.runtime.compiled.partitions import Partitioned
from overspill.runtime.hardware import gpu_named, planned_for
from overspill.runtime.options import Options
from overspill.runtime.parallel import OneProcess
from overspill.runtime.parking import Parked
from overspill.runtime.peaks import PlannedPeaks
from overspill.runtime.recording.recorder import RunRecorder
from overspill.runtime.reserved import ReservedWatch
from overspill.runtime.sharding import processes_of
from overspill.runtime.tracker import LiveBytes
from overspill.runtime.transfer.engine import TransferEngine
from overspill.runtime.transfer.tiers import Directories, directories_of

from .call import StepCall, Underway, dropped, give_back_arena, let_go
from .captures import StepCaptures
from .checks import check_inputs, check_optimizer, step_post_hooks
from .from_host import move_buffers
from .microbatch import MicrobatchRunner
from .optimizer_hooks import optimizer_hooks
from .plans import StepPlans
from .shared_memory import check_inputs_apart
from .state import StepState
from .unpacked import unpacked
from .updates import NormClipping, OptimizerUpdates

if TYPE_CHECKING:
    from overspill.runtime.compiled.session import Session

__all__ = ["TrainStep", "train_step"]


class TrainStep(PlannedPeaks):
    """One training step within a budget: `step(*inputs) -> loss`.

    It is planned at the first call with inputs of these shapes.

    Between two calls, parameters and optimizer state may be in the store. Reads through the model or the optimizer
    (`state_dict()`, evaluation, `torch.save`) bring them back and get their current values. One thread at a time steps
    or reads. Signal handlers wait for the end of a step. A read in the middle of a step raises an OverspillError; so
    does a read in a forked child of values that it does not have.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        optimizers: Sequence[Optimizer],
        options: Options,
        gradients: GradientOptions,
        processes: OneProcess | None = None,
        *,
        from_host_to: torch.device | None = None,
        allow_untrained: bool = False,
    ) -> None:
        """Create a step, of a model in host memory if it steps on the device `from_host_to`.

        Raises RequestError or UnsupportedError for what cannot be part of a planned step.
        """
        for optimizer in optimizers:
            check_optimizer(optimizer)
        self.gradients = gradients
        processes = processes or OneProcess()
        self.tracker: LiveBytes | None = None
        self.recorder: RunRecorder | None = None
        """The recorder of the running `overspill.record`, or None."""
        self._underway = Underway()
        self._reserved = ReservedWatch()
        # The state that outlives steps, and the plans over it.
        clips = gradients.clip_norm is not None
        updates = [OptimizerUpdates(o, clip_value=gradients.clip_value, scales=clips) for o in optimizers]
        self._state = StepState(
            StepLoss(model, loss_fn), updates, from_host_to=from_host_to, allow_untrained=allow_untrained
        )
        sharding = self._state.sharding
        if sharding is not None and options.backend != "eager":
            raise UnsupportedError(
                f"backend={options.backend!r} of a model that fully_shard has sharded; leave the eager backend"
            )
        sums = None if sharding is None else sharding.sum_over_ranks
        clipping = None if gradients.clip_norm is None else NormClipping(gradients.clip_norm, sums)
        captures = StepCaptures(self._state, options, gradients, clipping, processes, self._underway.add_up)
        self._plans = StepPlans(captures)
        self._parked = Parked(directories_of(options.store_dir)[0])
        self._runner = MicrobatchRunner(self._state, self._plans)
        self._state.advice = self._underway.advice
        self._state.holders.in_arena = self._plans.arena.holds
        # All ranks start with the same values, which are guarded from now on.
        processes.begin_alike(self._state.parameters, self._state.buffers)
        self._state.take_hold()
        # Model and optimizer must not reference this object: when the user drops it, the weights come back.
        self._hooks = [hook for optimizer in optimizers for hook in optimizer_hooks(optimizer, self._state)]
        self._end = weakref.finalize(self, dropped, self._underway, self._state, self._plans, self._hooks)
        self._end.atexit = False

    def __call__(self, *inputs: Any) -> Any:
        """Run one step on `inputs` and return its loss, a scalar without gradient.

        A loss function may return other tensors too, after its loss in a tuple or next to `loss` in a dictionary or
        dataclass. Then the step returns the same structure, without gradients.

        With `accumulate=k` the inputs are split into k micro-batches along their first dimension, and the loss is their
        mean. Raises InfeasibleBudgetError, UnsupportedError, RequestError or StoreError. An error that leaves the step
        unfinished says so. Then only the same inputs are accepted, and the call finishes the step.
        """
        return self._state.gate.alone(lambda: self._step(inputs), steps=True)

    def _step(self, inputs: tuple[Any, ...]) -> Any:
        self._state.gate.check_process()
        if (call := self._underway.call) is not None:
            if not batches.same(call.inputs, unpacked(inputs)):
                raise RequestError(f"these are other inputs: {call.advice}")
            return self._resume()
        self._parked.bring()
        rows = self._plans.rows
        rows.begin()
        while True:
            call = self._prepared(inputs)
            try:
                return self._go_on(call)
            except OtherRows as error:
                assert call.compiled is not None
                assert call.compiled.rows is not None
                if self._state.engine is not None:
                    self._state.engine.settle()  # while its tensors live: else a copy's thread is the last to hold them
                rows.stopped(error, call.compiled.rows)
            except InfeasibleBudgetError as error:
                if not rows.is_over:
                    raise
                rows.give_up()
                raise error.with_help(
                    "; values of this batch choose more rows than those before, and nothing of its step has been done; "
                    "smaller batches would do too"
                ) from None
            gc.collect()  # the error holds what the run had made in cycles
            set_randomness(call.drawn)

    def _prepared(self, inputs: tuple[Any, ...]) -> StepCall:
        with self.processes.announcing():
            self._state.check_model()
            given = unpacked(inputs)
            check_inputs(leaves := tree_flatten(given)[0], self._state.where)
            check_saved_hooks()
            check_inputs_apart(leaves, self._state.parameters.values())
            self._state.adopt_parameters()
            self._state.adopt_optimizers()
            return StepCall(given, list(batches.split(given, self.gradients.accumulate)))

    def resume(self) -> Any:
        """Finish a step that an error stopped, and return its loss.

        It goes on from the instruction that failed, as if nothing had happened.
        """
        return self._state.gate.alone(self._resume, steps=True)

    def _resume(self) -> Any:
        self._state.gate.check_process()
        call = self._underway.call
        if call is None:
            raise RequestError("no step is unfinished; call the step with inputs")
        if call.run is not None and call.run.lost:
            raise RequestError(call.advice)
        if self._state.engine is not None:
            self._state.engine.settle()
        return self._go_on(call)

    def abandon(self) -> None:
        """Give up a step that an error stopped, if any.

        Model and optimizer stay as far as it got: parameters that it had updated are updated. Load a checkpoint next.
        """
        self._state.gate.alone(lambda: self._underway.abandon(self._state), steps=True)

    def _go_on(self, call: StepCall) -> Any:
        self._underway.call = call
        if self.recorder is not None:
            self.recorder.begin_step(self._state.where)
        # Run the micro-batches; an error leaves an unfinished step, or undoes it.
        try:
            while not call.is_done:
                self._runner.carry_on(call, self.tracker, self.recorder)
        except BaseException as error:
            self.processes.tell(error)
            self._underway.stopped(error, self._state)
            raise
        finally:
            self._state.arm()
        self._underway.call = None
        if self.recorder is not None:
            self.recorder.end_step()
        self._reserved.look(lambda: self.reserved_bytes, self._state.where)
        allocator.step()
        # What follows an optimizer step elsewhere: schedulers' flag and step post-hooks.
        for updates in self._state.updates:
            updates.finish()
            optimizer = updates.optimizer
            note_step(optimizer)  # else schedulers warn that it never stepped
            if hooks := step_post_hooks(optimizer):
                self._state.synchronize()
                with self._state.gate.opened():
                    for hook in hooks:
                        hook(optimizer, (optimizer,), {})
        return call.returned

    def join(self, beside: Callable[[], int]) -> None:
        """Reserve the bytes that the session's other models keep on the device; `beside` returns them."""
        self._plans.beside = beside

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise RequestError(
            "a train step is not copied or pickled; copy its model and optimizer, and make another with train_step"
        )

    # -- what a user may ask

    @property
    def processes(self) -> OneProcess:
        """The processes that step together."""
        return self._plans.processes

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that the step was made with."""
        return self._state.optimizers

    @property
    def options(self) -> Options:
        """The options that the step was made with."""
        return self._plans.options

    @property
    def plans(self) -> list[Plan]:
        """The current plans, in the order they were made."""
        return self._plans.plans

    @property
    def partitions(self) -> list[float | None]:
        """The `activation_memory_budget` of each plan's partition; None with eager kernels."""
        return self._plans.partitions

    @property
    def one_by_one(self) -> str:
        """Why the last step to be planned runs its micro-batches one after another; empty if it does not."""
        return self._plans.one_by_one

    @property
    def steps_over(self) -> int:
        """How many steps chose more rows by values than their plans knew; each warned, and began again by a larger."""
        return self._plans.rows.steps_over

    @property
    def is_unfinished(self) -> bool:
        """Whether an error stopped a step that `resume` or `abandon` must end."""
        return self._underway.call is not None

    @property
    def engine(self) -> TransferEngine | None:
        """The transfer engine, once a plan has needed one."""
        return self._state.engine

    @property
    def device(self) -> torch.device:
        """The device that the model is on."""
        return self._state.where

    @property
    def measured_times(self) -> MeasuredTimes | None:
        """Measured op times so far, if the step profiles."""
        return self._plans.measured_times

    def plan(self, *inputs: Any) -> Plan:
        """Return the plan of a step on `inputs`, without running it.

        With several micro-batches, return that of the last, or that of all if they run beside one another. Raises the
        errors of a step before it begins, above all InfeasibleBudgetError.
        """

        def planned() -> Plan:
            call = self._prepared(inputs)
            made = self._plans.compile_all(call.parts, call.inputs)
            return (made or self._plans.compile(call.parts[-1], call.inputs, last=True)).plan

        return self._state.gate.alone(planned)

    def smallest_budget(self, *inputs: Any) -> int:
        """Return the smallest feasible budget in bytes for `inputs`, without running a step.

        Raises RequestError or UnsupportedError.
        """

        def found() -> int:
            return self._plans.smallest_budget(self._prepared(inputs).inputs)

        return self._state.gate.alone(found)

    def kept_bytes(self) -> int:
        """Return the bytes of model and optimizer state between steps, if all are on the device."""
        return self._state.whole_bytes()

    def present(self) -> list[Tensor]:
        """Return the tensors of model and optimizer state that are on the device now."""
        return self._state.gate.alone(self._state.present)

    @contextmanager
    def counted(self, inputs: tuple[Any, ...]) -> Iterator[list[int]]:
        """Measure the peak bytes of PyTorch's CPU allocator within the context.

        They include the model, its state, `inputs`, and the allocations of the step. The yielded list has the peak at
        the end. A dispatch mode could not see the memory that compiled kernels allocate.
        """
        found: list[int] = []
        arena = self._plans.arena
        present = self._state.gate.alone(self._state.present_bytes) + arena.nbytes
        with allocations() as allocated:
            renewed = self._state.gate.alone(lambda: self._state.renew(arena.holds))
            yield found
        found.append(present - renewed + batches.bytes_outside(unpacked(inputs), ()) + peak_of(allocated.changes)[0])

    def graph(self, *inputs: Any) -> Graph:
        """Return the Graph of a step on `inputs`, which may be fake; with several micro-batches, of the last."""
        return self.captures(*inputs).graph

    def captures(self, *inputs: Any) -> Partitioned[CapturedStep]:
        """Return the captures of a step on `inputs`, among which a plan may choose."""
        return self._state.gate.alone(lambda: self._plans.captures(unpacked(inputs)))

    def synchronize(self) -> None:
        """Bring all parameters and optimizer state back to the device, or to the CPU if the model began there.

        They stay there until the next step.
        """
        self._state.gate.alone(self._state.synchronize)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hold all tensors where `synchronize` brings them and let no other thread step, within the context.

        Use it in a thread that does more with model or optimizer than call their `state_dict()`. Examples: evaluate,
        copy, fork, or save several things that belong together.
        """
        reading = self._state.gate.reading(for_long=True)
        self.synchronize()
        try:
            yield
        finally:
            del reading

    def park(self) -> int:
        """Give the device to another program, as an inference engine between two phases of training.

        Parameters and optimizer state go to the store, buffers to host memory, and the arena is given back. The next
        step brings back what its plan has on the device.

        Returns:
            The bytes that have left the device.

        Raises:
            RequestError: If an error has left a step unfinished.
            StoreError: If there is no room. What has not moved is still on the device.
        """
        return self._state.gate.alone(self._park, steps=True)

    def _park(self) -> int:
        if self._underway.call is not None:
            raise RequestError("park() in an unfinished step; finish it, or abandon() it")
        sent = self._state.park(self._plans.engine())
        self._plans.arena.renew(0, self._state.where)
        return sent + self._parked.send(self._state.buffers.values(), self._state.where)

    def unpark(self, budget: str | float | None = None) -> None:
        """Bring back everything that `park` has moved; with `budget`, plan for another one from now on.

        Weights and optimizer state come with the next step, or when they are read. Raises RequestError for a budget
        that cannot be right; the next step raises what a step raises if it cannot be met.
        """
        self._state.gate.alone(lambda: self._unpark(budget), steps=True)

    def _unpark(self, budget: str | float | None) -> None:
        self._parked.bring()
        if budget is not None:
            self._plans.ask(replace(self.options, budget=budget))

    def close(self, *, bring_back: bool = True) -> None:
        """Bring everything back, remove the guards, and release the store.

        Model and optimizer are then as without Overspill. Without `bring_back`, bytes in the store are lost and read as
        NaN.
        """
        self._state.gate.alone(lambda: self._close(bring_back), steps=True)

    def _close(self, bring_back: bool) -> None:
        self._parked.bring()
        if bring_back:
            give_back_arena(self._state, self._plans)  # first, for there may be no room for both
            self._state.synchronize()
            if self._state.from_host:
                move_buffers(self._state.module, torch.device("cpu"))
        self._end.detach()
        let_go(self._state, self._plans, self._hooks)


def train_step(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    budget: str | float | None = None,
    policy: str = "auto",
    update: str = "device",
    store: str | None = None,
    store_dir: Directories = None,
    host_budget: str | int | None = None,
    disk_bandwidth: str | None = None,
    backend: str = "eager",
    device: str | torch.device | Device | None = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    times: MeasuredTimes | None = None,
    placement: str | None = None,
    process_group: torch.distributed.ProcessGroup | Literal[False] | None = None,
    checksum: bool = False,
    partition: float | None = None,
    session: Session | None = None,
    allow_untrained: bool = False,
) -> TrainStep:
    """Return a callable `step(*inputs) -> loss` that trains `model` within `budget` bytes of device memory.

    Forward, loss, backward and the update of the optimizer are one plan. Parameters, gradients and optimizer state move
    as activations do. The numbers are those of `loss.backward(); optimizer.step()`, to the last bit.

    Args:
        model: The module, not compiled and not inside DDP.
        loss_fn: A criterion of torch.nn, called with the model's output and the last input; or a function of the model
            and all inputs. None for a model that returns its own loss. A function may return a tuple `(loss, ...)`, or
            a dictionary or dataclass with a `loss`. The step then returns the same, with tensors without gradients.
        optimizer: Your own, of any class; or several, each with its own parameters, which step in that order.
        budget: As for `overspill.compile`, here for all memory of the step.
        policy: A name that `overspill policies` lists.
        update: Where the optimizer's updates run: `"device"`; `"host"`, all that can; or `"auto"`, wherever the step is
            faster (docs/howto/state_in_host_memory.md).
        store: `disk` or `host` on the CPU, `pinned` on CUDA; `host+disk` or `pinned+disk` have both, the disk for what
            host memory does not hold.
        store_dir: The directory of the disk store's file; with `+disk` also several, one for each drive.
        host_budget: With `+disk`, the host memory that the store may take; by default nine tenths of what is free.
        disk_bandwidth: With `+disk`, the rates to plan for, as `"7GB/s"`, `"7GB/s,5GB/s"` for reads and writes, or
            `"nvme-pcie4"`; with several drives, those of each.
        accumulate: Number of micro-batches that each call's inputs are split into. Their mean loss is trained on.
        clip_norm: Clip the norm of all gradients, as `torch.nn.utils.clip_grad_norm_` does.
        clip_value: Clip each gradient's values, as `torch.nn.utils.clip_grad_value_` does.
        process_group: The ranks that train together. Each gives its own part of the batch and gets its own loss;
            gradients are averaged. None: all ranks if torch.distributed is initialised; they must begin with the same
            parameters. A group given here begins with the parameters of its rank 0. False: this process alone.
        backend: With `inductor`, forward and backward are the programs that Inductor writes of the loss function. The
            numbers are those of a loop with `torch.compile(loss_fn)` and the optimizer, with the chosen partition
            (docs/compiled.md).
        device: The GPU to train on, as `"cuda"`, of a model that is on the CPU, in memory or mapped from its files.
            Its weights come when the plan needs them, so it may be larger than the GPU; frozen ones are read from where
            they are. Or the device to plan for; by default the one that the tensors are on.
        times: Op times that were measured before.
        placement: An allocator or solver within whose peak the plan must stay. `planned`, the default on CUDA, puts
            weights, state and blocks in an arena (docs/placement.md).
        checksum: Compare bytes that come back from the store with those written; a difference raises a StoreError.
        partition: With `inductor`, the `activation_memory_budget` to use; None: several are tried.
        session: Share this session's budget: while one model runs, the others keep their parameters and optimizer
            states.
        allow_untrained: Accept parameters that require a gradient and have no optimizer; they stay as they are.

    Returns:
        The TrainStep.

    Raises:
        RequestError: For a request that cannot be right, here or at the first call.
        UnsupportedError: For an unsupported model or optimizer, here or at the first call.
        InfeasibleBudgetError: At the first call with inputs of a kind, with the smallest budget that works.
        StoreError: In a step, if the store failed; `step.resume()` finishes the step.
    """
    if torch.compile is uncompiled:
        raise UnsupportedError(
            "an estimate of a script runs plain PyTorch, not overspill.train_step; write its step out (zero_grad, "
            "loss, backward, optimizer.step), or ask `overspill plan --whole-step`"
        )
    from_host_to = gpu_named(device, model)
    options = Options(
        budget, with_update(policy, update), store, store_dir, backend, planned_for(device), times=times,
        placement=placement, checksum=checksum, partition=partition,
        host_budget=host_budget, disk_bandwidth=disk_bandwidth,
    )  # fmt: skip
    gradients = GradientOptions(accumulate, clip_norm, clip_value)
    optimizers = [*optimizer] if isinstance(optimizer, (list, tuple)) else [optimizer]
    if isinstance(model, OptimizedModule):  # the whole step is one graph already
        model = getattr(model, ORIGINAL)
    if session is None:
        return TrainStep(
            model, loss_fn, optimizers, options, gradients, processes_of(model, process_group),
            from_host_to=from_host_to, allow_untrained=allow_untrained,
        )  # fmt: skip
    options.check_unset()
    # A step of a session shares its budget.
    step = TrainStep(
        model, loss_fn, optimizers, session.options, gradients, processes_of(model, process_group),
        from_host_to=from_host_to, allow_untrained=allow_untrained,
    )  # fmt: skip
    session.add_step(step)
    return step
