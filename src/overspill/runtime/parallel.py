"""Data parallel steps on the collectives of torch.distributed.

Each rank trains on its own batch, and gradients are averaged as in DistributedDataParallel (Li et al., "PyTorch
Distributed", VLDB 2020, §3.2): divided by the number of ranks, then summed, in buckets. A planned step adds one rule:
all ranks run the same schedule, that of the rank with the largest inputs. An error on one rank before the step begins
is raised on all ranks.
"""

from __future__ import annotations

import ast
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel

from overspill.capture.compiled.graph import Captured
from overspill.capture.programs.functions import ProgramFunction
from overspill.capture.programs.workspaces import FUNCTIONAL
from overspill.core import Graph
from overspill.core.errors import InvalidScheduleError, RequestError
from overspill.plans.plan import Plan
from overspill.pytorch.dispatch import OpOverload
from overspill.pytorch.distributed import default_store, group_names
from overspill.simulate import check

from .agreement import RankFailure, Told, difference, different_graphs, digest_of, raise_first, shapes_of, text_of
from .collectives import FAILURE, WAITED, in_one_call, lent, others_needed, whole_storage

BROADCAST_BYTES = 1 << 20
"""Most bytes packed into one broadcast of parameters and buffers."""
_FAILED = -1


_NOT_ALIKE = (
    "the plan of the rank with the largest batch does not fit this rank's: pad to one length that all ranks know "
    "(padding='max_length')"
)


class Meeting(NamedTuple):
    """What ranks know of one another before a step."""

    leader: int
    """The rank with the largest inputs."""
    shapes: int
    """The digest of their shapes."""
    number: int
    """Of the plan that all ranks have; 0 if they have different ones."""
    leaders: int
    """Of the leader's plan; 0 if it has none."""
    alike: bool
    """Whether all ranks have inputs of the same shapes."""


class OneProcess:
    """The process group of a step that a process trains alone."""

    size = 1
    average: Callable[..., None] | None = None
    """Averages gradients of one dtype and device over all ranks, in place; None with one process."""

    def begin_alike(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Give all ranks the values of rank 0. Raises RequestError on all ranks if their models differ."""

    def share_buffers(self, buffers: Iterable[Tensor]) -> None:
        """Give all ranks the buffers of rank 0, as DDP does before each forward."""

    @contextmanager
    def announcing(self) -> Iterator[None]:
        """Raise errors of the context in the next `agree` of the other ranks too."""
        yield

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise an error of the context on any rank on all ranks."""
        yield

    def tell(self, error: BaseException) -> None:
        """Record why this rank stops within a step, for other ranks that wait for it.

        They wait until this rank ends, or until their timeout is over.
        """

    def agree(self, key: Any, *, known: bool) -> bool:
        """Return whether `key` is known on all ranks. Raises RequestError on all ranks if their keys differ."""
        del key
        return known

    def digest(self, key: Any) -> int:
        """Return a number by which ranks compare keys."""
        del key
        return 0

    def meet(self, key: Any, shapes: int, elements: int, number: int) -> Meeting:
        """Return whose inputs are the largest, and which plan all ranks have for them.

        `key` leaves out the shapes of the inputs, whose digest is `shapes` and which have so many `elements`. `number`
        is that of this rank's plan, or 0. Raises RequestError on all ranks if their keys differ.
        """
        del key, elements
        return Meeting(0, shapes, number, number, True)

    def shared(self, value: Any, leader: int) -> Any:
        """Return the `value` that the rank `leader` has."""
        del leader
        return value

    def plan(
        self, graph: Graph, budget_bytes: int, make: Callable[[int], Plan], *, leader: int = 0, own: bool = False
    ) -> Plan:
        """Return the plan that the rank `leader` gets from `make(budget)`, the same on all ranks.

        The budget is the smallest of all ranks, or the leader's `own`. Raises RequestError, and the errors of `make`.
        """
        del graph, leader, own
        return make(budget_bytes)

    def check_plan(self, plan: Plan, graph: Graph) -> Plan:
        """Return another rank's plan for the graph of this one. Raises RequestError if it does not fit."""
        if plan.graph.structure != graph.structure:
            raise RequestError(different_graphs([[op.name for op in g.ops] for g in (plan.graph, graph)]))
        try:
            peak = check(graph, plan.schedule).peak_bytes
        except InvalidScheduleError as error:
            raise RequestError(f"{_NOT_ALIKE} ({error})") from None
        if (places := plan.places) is not None:
            larger = any(graph.tensors[t].nbytes > plan.graph.tensors[t].nbytes for t, _ in places.offsets)
            if larger:
                raise RequestError(_NOT_ALIKE)
        return replace(plan, graph=graph, peak_bytes=peak)

    def check_schedule(self, plan: Plan) -> None:
        """Raise RequestError on all ranks if one is about to run other instructions."""


class DataParallel(OneProcess):
    """The ranks of a process group that train one model, each on its own part of the batch."""

    has_told = False
    """Whether this process has reported an error to others since they last agreed."""

    def __init__(self, group: dist.ProcessGroup, *, implied: bool = False) -> None:
        """Join the group; all ranks do this together.

        `implied` means that the user named no group, so different parameters at the start are refused. Raises
        RequestError in a process outside the group.
        """
        self.group = group
        self._implied = implied
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise RequestError("this process is not in the process group; pass process_group=False to train alone")
        self._control = group
        if "cpu:gloo" not in str(dist.get_backend_config(group)):  # what ranks agree on is in host memory
            ranks = dist.get_process_group_ranks(group)
            self._control = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self.average = self._average

    # -- tensors

    def _average(self, *gradients: Tensor) -> None:
        in_one_call([whole_storage(gradient) for gradient in gradients], self._average_flat)

    def _average_flat(self, flat: Tensor) -> None:
        flat.mul_(1 / self.size)
        dist.all_reduce(flat, group=self.group)

    def _broadcast_flat(self, flat: Tensor) -> None:
        dist.broadcast(flat, group=self.group, group_src=0)

    def begin_alike(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        tensors = {**parameters, **buffers}
        self._check_described(tensors)
        if self._implied:
            self._check_same_values(parameters)
        self.share_buffers(tensor.detach() for tensor in tensors.values())

    def _check_described(self, tensors: Mapping[str, Tensor]) -> None:
        described = {name: f"{tuple(t.shape)} {t.dtype}" for name, t in tensors.items()}
        for rank, other in enumerate(self._gather(described)):
            if other != described:
                name = next(n for n in [*described, *other] if described.get(n) != other.get(n))
                raise RequestError(
                    f"the ranks have different models: {name} is {described.get(name, 'missing')} on rank {self.rank} "
                    f"and {other.get(name, 'missing')} on rank {rank}"
                )

    def _check_same_values(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise RequestError on all ranks if the bits of a tensor differ from rank 0's."""
        unlike = [name for name, tensor in tensors.items() if not self._is_alike(tensor)]  # all ranks compare all
        found = self._gather(next(iter(unlike), ""))
        if other := next((rank for rank, name in enumerate(found) if name), 0):
            raise RequestError(
                f"{found[other].removeprefix('model.')} on rank {other} differs from rank 0's: pass "
                "process_group=torch.distributed.group.WORLD to begin with rank 0's parameters, as DDP does; where "
                "each rank has a part of the model, shard it by fully_shard, or pass process_group=False"
            )

    def _is_alike(self, tensor: Tensor) -> bool:
        """Return whether `tensor` has the bits of rank 0's."""
        alike = True
        for mine in tensor.detach().reshape(-1).split(max(1, BROADCAST_BYTES // tensor.element_size())):
            lent((theirs := mine.clone(),), self._broadcast_flat)
            alike = alike and torch.equal(theirs.view(torch.uint8), mine.view(torch.uint8))
        return alike

    def share_buffers(self, buffers: Iterable[Tensor]) -> None:
        alike: dict[Any, list[Tensor]] = defaultdict(list)
        for tensor in buffers:
            packed = alike[tensor.dtype, tensor.device]
            if packed and sum(t.nbytes for t in packed) + tensor.nbytes > BROADCAST_BYTES:
                in_one_call(packed, self._broadcast_flat)
                packed.clear()
            packed.append(tensor)
        for packed in alike.values():
            in_one_call(packed, self._broadcast_flat)

    # -- agreement

    @contextmanager
    def announcing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._exchange(_FAILED)
            self._gather(Told(failure=RankFailure.of(error)))
            raise

    @contextmanager
    def together(self) -> Iterator[None]:
        error = None
        try:
            yield
        except Exception as raised:  # noqa: BLE001 - raised again below
            error = raised
        failures = self._gather(None if error is None else RankFailure.of(error))
        if error is not None:
            raise error
        raise_first(failures)

    def tell(self, error: BaseException) -> None:
        said = (str(error).splitlines() or [""])[0]
        if WAITED not in said:
            DataParallel.has_told = True
            with suppress(RuntimeError):  # the store is gone: nobody to tell
                default_store().set(FAILURE, f"rank {dist.get_rank()} failed ({type(error).__name__}: {said})")

    def agree(self, key: Any, *, known: bool) -> bool:
        return all(known for _, known, *_ in self._agreed(key, int(known)))

    def digest(self, key: Any) -> int:
        return digest_of(text_of(key))

    def meet(self, key: Any, shapes: int, elements: int, number: int) -> Meeting:
        found = self._agreed(key, number, shapes, elements)
        leader = max(range(self.size), key=lambda rank: (found[rank][3], -rank))
        numbers = {number for _, number, *_ in found}
        return Meeting(
            leader, found[leader][2], numbers.pop() if len(numbers) == 1 else 0, found[leader][1],
            len({shapes for _, _, shapes, _ in found}) == 1,
        )  # fmt: skip

    def _agreed(self, key: Any, *given: int) -> list[list[int]]:
        """Return the digest of `key`, and what is given, of all ranks. Raises RequestError if their keys differ."""
        text = text_of(key)
        mine = digest_of(text)
        found = self._exchange(mine, *given)
        if any(digest != mine for digest, *_ in found):
            told = self._gather(Told(text, shapes_of(key)))
            raise_first([one.failure for one in told])
            other = next(rank for rank, one in enumerate(told) if one.text != text)
            raise RequestError(difference(self.rank, Told(text, shapes_of(key)), other, told[other]))
        if DataParallel.has_told:  # all go on
            DataParallel.has_told = False
            default_store().set(FAILURE, "")
        return found

    def plan(
        self, graph: Graph, budget_bytes: int, make: Callable[[int], Plan], *, leader: int = 0, own: bool = False
    ) -> Plan:
        # All ranks must have the same ops on the same tensors, whose sizes may differ.
        digest = digest_of(graph.structure)
        found = self._gather((digest, budget_bytes))
        if any(other != digest for other, _ in found):
            raise RequestError(different_graphs(self._gather([op.name for op in graph.ops])))
        made: Plan | None = None
        with self.together():
            if self.rank == leader:
                made = make(budget_bytes if own else min(budget for _, budget in found))
        # Each rank checks the plan against its own graph.
        plan: Plan = self.shared(made, leader)
        with self.together():
            return self.check_plan(plan, graph)

    def shared(self, value: Any, leader: int) -> Any:
        values = [value]
        with others_needed():
            dist.broadcast_object_list(values, group=self._control, group_src=leader)
        return values[0]

    def check_schedule(self, plan: Plan) -> None:
        digest = hashlib.blake2b(repr((plan.schedule.instructions, plan.groups)).encode()).hexdigest()
        found = self._gather(digest)
        if other := next((rank for rank, theirs in enumerate(found) if theirs != found[0]), 0):
            raise RequestError(
                f"the ranks have different schedules of one plan: rank {other}'s is not rank 0's; run the same "
                "Overspill, options and machine on all"
            )

    def _exchange(self, *given: int) -> list[list[int]]:
        """Return four numbers of each rank, of which those that are not given are 0."""
        mine = torch.tensor([*given, *[0] * (4 - len(given))], device="cpu")
        found = [torch.empty_like(mine) for _ in range(self.size)]
        lent((mine, *found), lambda one, *each: dist.all_gather([*each], one, group=self._control))
        return [one.tolist() for one in found]

    def _gather(self, value: Any) -> list[Any]:
        found = [None] * self.size
        with others_needed():
            dist.all_gather_object(found, value, group=self._control)
        return found


class Agreeing(DataParallel):
    """The ranks of a step with its own collectives.

    They run one schedule; gradients and buffers are left to the step.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Join the group; all ranks do this together."""
        super().__init__(group)
        self.average = None

    def begin_alike(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        self._check_described({**parameters, **buffers})

    def share_buffers(self, buffers: Iterable[Tensor]) -> None:
        """Do nothing: each rank keeps its own buffers."""


def processes_of(model: nn.Module, process_group: dist.ProcessGroup | Literal[False] | None) -> OneProcess:
    """Return the processes that train `model`: those of `process_group`.

    None means the default group, if any. Raises RequestError for a model that already averages its gradients.
    """
    if process_group is False or not (dist.is_available() and dist.is_initialized()):
        return OneProcess()
    if isinstance(model, DistributedDataParallel):
        raise RequestError("train_step averages gradients itself; pass the model that is inside (model.module)")
    group = dist.group.WORLD if process_group is None else process_group
    return DataParallel(group, implied=process_group is None) if dist.get_world_size(group) != 1 else OneProcess()


def processes_of_collectives(captured: Captured) -> OneProcess:
    """Return the ranks that a step's own collectives work with; OneProcess if it has none.

    These ranks then agree on one schedule.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return OneProcess()
    called = {name for node in captured.joint.module.graph.nodes for name in _texts_of(node)}
    groups = [group for group, name in group_names().items() if name in called and group.size() > 1]
    if not groups:
        return OneProcess()
    return Agreeing(groups[0] if len(groups) == 1 else dist.group.WORLD)


def _texts_of(node: fx.Node) -> Iterable[str]:
    """Return the texts among the arguments of a collective; one is the name of its group."""
    op = node.target
    if isinstance(op, ProgramFunction):
        if op.call is not None and op.call.name.startswith(FUNCTIONAL):
            constants = (n.value for line in op.call.lines for n in ast.walk(line) if isinstance(n, ast.Constant))
            return [value for value in constants if isinstance(value, str)]
    elif isinstance(op, OpOverload) and op.namespace == FUNCTIONAL:
        return [value for value in node.args if isinstance(value, str)]
    return ()
