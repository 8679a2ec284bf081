"""Inductor's programs of a loss function, for a plan of the whole step.

The function is traced twice. The first trace is watched, as for the eager backend, so that a change of the model is
noticed. The second is for Inductor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn

from overspill.capture.compiled.backward import Backward
from overspill.capture.compiled.checks import Check, Checks
from overspill.capture.compiled.compiling import answering_is_compiling
from overspill.capture.compiled.step_joint import joint_of_step, returned
from overspill.capture.programs.checkpoints import checkpoints_marked
from overspill.pytorch.fake_tensors import FakeTensor

from .python_state import PythonState
from .watching import watched

if TYPE_CHECKING:  # Inductor takes seconds to import
    from overspill.runtime.compiled.inductor import PartitionPrograms

Step = Callable[..., tuple[Tensor, ...]]


def step_programs(
    step: Step,
    module: nn.Module,
    values: Sequence[FakeTensor],
    lasting: int,
    partition: float | None,
    backward: Backward,
) -> tuple[Iterator[PartitionPrograms], PythonState, tuple[Check, ...]]:
    """Return programs of `step(*values)` by each partition, the Python state read, and the checks of its last results.

    Programs are made on demand. `step` is a function of `module`, and the first `lasting` values are parameters and
    buffers. `partition` is that of Options. `backward` checks which values get gradients. Raises UnsupportedError.
    """
    # First trace: what the model's Python depends on.
    checks = Checks(returned=True)
    with answering_is_compiling(compiles=True):
        watched_joint, python = watched(
            lambda begin: joint_of_step(after(begin, step), module, values, backward, checks=checks),
            lambda joint: joint.module.code,
        )
    # Second trace, by Inductor, each partition on demand.
    count = len(returned(watched_joint.module.graph))
    traced = backward.traced(partial(checks.followed, step))
    from overspill.runtime.compiled.inductor import programs_of  # noqa: PLC0415 - as above

    made = programs_of(lambda: _graph_of(traced, len(values), count), values, range(lasting), partition)

    def by_partition() -> Iterator[PartitionPrograms]:
        while True:
            with answering_is_compiling(compiles=True), backward.followed(), checkpoints_marked():
                if (found := next(made, None)) is None:
                    return
            backward.check(found.joint)
            yield found

    return by_partition(), python, tuple(checks.made)


def after(begin: Callable[[], None], step: Step) -> Step:
    """Return `step` as a function that calls `begin` first."""

    def beginning(*values: Tensor) -> tuple[Tensor, ...]:
        begin()
        return step(*values)

    return beginning


def _graph_of(step: Step, takes: int, returns: int) -> fx.GraphModule:
    """Return a graph that calls `step`, for AOTAutograd to trace through."""

    def step_of_overspill(*values: Any) -> tuple[Tensor, ...]:
        return step(*values)

    graph = fx.Graph()
    values = tuple(graph.placeholder(f"value_{i}") for i in range(takes))
    called = graph.call_function(step_of_overspill, values)
    graph.output(tuple(graph.call_function(operator.getitem, (called, i)) for i in range(returns)))
    return fx.GraphModule(nn.Module(), graph)
