"""Compiled models that `fully_shard` has sharded: gathers and scatters are ops of their planned graphs.

In a call, a module has whole parameters without memory in place of its shards, and FSDP's hooks only cast. A planned
graph takes the shards instead, and gathers them where it reads them. Its backward gives the shards their gradients. In
between, model and optimizer have FSDP's own DTensors, which stay on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from overspill.capture.compiled.gathers import with_gathers
from overspill.capture.compiled.graph import Captured, InputInfo, Surroundings
from overspill.capture.compiled.joint import JointGraph
from overspill.capture.compiled.sharded_step import CaptureOfShardedStep
from overspill.core import Graph
from overspill.core.errors import UnsupportedError
from overspill.plans.plan import Plan
from overspill.pytorch.autograd import current_backward
from overspill.pytorch.dispatch import disable_current_modes
from overspill.pytorch.distributed import local_tensor, set_on_modules, whole_size, whole_stride
from overspill.pytorch.trees import tree_leaves
from overspill.runtime import batches
from overspill.runtime.sharding import ModelSharding, gathered_group, is_called_inside, processes_of, sharding_of
from overspill.runtime.step.away import GUARDS, hide, watch
from overspill.runtime.step.residency import Spec

_PLANS = 0
"""The key by which ranks agree that they plan now; when they run a plan, it is its number."""


class Whole:
    """The guard of a whole parameter: a trace finds its layout here, and nobody its values."""

    def __init__(self, name: str, spec: Spec) -> None:
        self.name = name
        self.spec = spec
        self.parameter = nn.Parameter(spec.placeholder())
        watch(self.parameter, self)
        hide(self.parameter)

    def fetch(self, **_: bool) -> None:
        """Raise UnsupportedError, because the values are only in planned graphs."""
        raise UnsupportedError(
            f"{self.name} is read where no graph is compiled, and there the parameters of a sharded model are not "
            "gathered; fullgraph=True says where that is: write it otherwise, or use overspill.train_step"
        )


def wholes() -> list[Whole]:
    """Return all guards of whole parameters that there are."""
    return [guard for ref in GUARDS.valuerefs() if isinstance(guard := ref(), Whole)]


class ShardedModel:
    """One sharded model of a session."""

    def __init__(self, module: nn.Module, sharding: ModelSharding) -> None:
        """Read its sharding; all ranks do this together."""
        self._sharding = sharding
        self._module = weakref.ref(module)
        self._processes = processes_of(module, None)
        self._wholes = {name: Whole(name, _whole(p)) for name, p in sharding.parameters.items()}
        self._names = {id(whole.parameter): name for name, whole in self._wholes.items()}
        self._agreed = 0
        """How many plans the ranks have agreed on."""
        self._plans_alone = False
        self._given: dict[str, int] = {}
        """The number of the last backward that gave a shard its gradient, by name."""

    @classmethod
    def of(cls, module: nn.Module) -> ShardedModel | None:
        """Return the model, which is about to be called, or None if it is not sharded. Raises UnsupportedError."""
        if is_called_inside(module):
            raise UnsupportedError(
                f"{type(module).__name__} is sharded by fully_shard, and FSDP gathers its parameters around a compiled "
                "forward or a compiled part; compile the sharded model itself (model = overspill.compile(model)), or "
                "use overspill.train_step"
            )
        sharding = sharding_of(module)
        return None if sharding is None else cls(module, sharding)

    def is_of(self, module: nn.Module) -> bool:
        """Return whether this is the sharded `module`."""
        return self._module() is module

    def shard(self, parameter: Any) -> Any:
        """Return FSDP's parameter for a whole one; any other itself."""
        name = self._names.get(id(parameter))
        return parameter if name is None else self._sharding.parameters[name].sharded_param

    def begin_call(self, given: Any, *, accumulates: bool, is_due: bool) -> bool:
        """Return whether any rank must plan again before it calls a model of the session with `given`.

        Raises RequestError on all ranks if their calls differ, and UnsupportedError for FSDP's settings.
        """
        module = self._module()
        assert module is not None
        with self._processes.announcing():
            self._sharding.reshard()
        for name, parameter in self._sharding.parameters.items():
            self._wholes[name].parameter.requires_grad_(parameter.sharded_param.requires_grad)
        leaves = tuple(batches.kind(leaf) for leaf in tree_leaves(given) if isinstance(leaf, Tensor))
        trained = tuple(whole.parameter.requires_grad for whole in self._wholes.values())
        key = leaves, trained, torch.is_grad_enabled(), module.training, accumulates
        return not self._processes.agree(key, known=not is_due)

    @contextmanager
    def called(self) -> Iterator[None]:
        """Let the model have whole parameters within the context, in which it is called.

        An error is noted for ranks that wait for this one.
        """
        parameters = self._sharding.parameters
        with self._sharding.casting():
            for name, parameter in parameters.items():
                set_on_modules(parameter, self._wholes[name].parameter)
            try:
                yield
            except Exception as error:
                self._processes.tell(error)
                raise
            finally:
                for parameter in parameters.values():
                    set_on_modules(parameter, parameter.sharded_param)

    def positions(self, inputs: Mapping[int, weakref.ref[Any]], joint: JointGraph) -> dict[str, int]:
        """Return the positions of whole parameters among the primals of `joint`, by name."""
        names = {number: self._names.get(id(of())) for number, of in inputs.items()}
        numbers = {i: desc.idx for i, n in enumerate(joint.primals) if hasattr(desc := n.meta.get("desc"), "idx")}
        return {name: i for i, number in numbers.items() if (name := names.get(number)) is not None}

    def captured(
        self, positions: Mapping[str, int], joint: JointGraph, inputs: Sequence[InputInfo], around: Surroundings
    ) -> Captured:
        """Return the graph with its gathers and scatters. Raises UnsupportedError."""
        groups = []
        mode = next(n.meta["val"].fake_mode for n in joint.primals if isinstance(n.meta.get("val"), Tensor))
        for group in self._sharding.groups:
            there = [name for name in group.parameters if name in positions]
            if not there:
                continue
            if missing := sorted(group.parameters.keys() - positions.keys()):
                raise UnsupportedError(
                    f"a graph reads {there[0]} and not {missing[0]}, which fully_shard gathers together; "
                    "apply fully_shard to each alone, or use overspill.train_step"
                )
            with mode:
                groups.append(gathered_group(group, positions, lambda n: _shard(self._sharding.parameters[n]).empty()))
        return CaptureOfShardedStep(with_gathers(joint, groups), list(inputs), tuple(groups), around).build()

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Raise an error of the context on all ranks, also one before they plan together."""
        self._plans_alone = True
        try:
            yield
        except Exception:
            if self._plans_alone:
                with disable_current_modes(), self._processes.announcing():
                    raise
            raise

    def agreed(self, graph: Graph, budget_bytes: int, make: Callable[[int], Plan]) -> Plan:
        """Return the plan that rank 0 makes, on all ranks. Raises RequestError, and the errors of `make`."""
        with disable_current_modes():  # AOTAutograd calls us in its fake mode; what ranks exchange is real
            self._plans_alone = False  # from here on all know of an error
            self._processes.agree(_PLANS, known=True)
            plan = self._processes.plan(graph, budget_bytes, make)
        self._agreed += 1
        return plan

    def begin_run(self, number: int) -> None:
        """Raise RequestError on all ranks if one of them runs another plan now, or makes one."""
        self._processes.agree(number, known=True)

    @property
    def number(self) -> int:
        """The number of the last plan, the same on all ranks."""
        return self._agreed

    def give(self, positions: Mapping[str, int], args: list[Any]) -> None:
        """Put the shards in the places of the whole parameters among the arguments of a graph."""
        for name, position in positions.items():
            args[position] = local_tensor(self._sharding.parameters[name].sharded_param)

    def take(self, made: Sequence[Any], names: Mapping[int, str]) -> list[Any]:
        """Give the shards their gradients; return the others of those that backward has `made`.

        `names` are those of the shards by position.
        """
        found = list(made)
        for position, name in names.items():
            gradient, found[position] = found[position], None
            if gradient is None:
                continue
            if self._given.get(name) == (backward := current_backward()):
                raise UnsupportedError(
                    f"one backward gives {name} gradients of several calls or graphs, which fully_shard adds up before "
                    "ranks average them, and planned graphs behind it; call backward for each, or use "
                    "overspill.train_step"
                )
            self._given[name] = backward
            self._sharding.accumulate(name, gradient)
        return found


def gradients_of(positions: Mapping[str, int], joint: JointGraph) -> dict[int, str]:
    """Return the names of the parameters whose gradients `joint` returns, by the position among these."""
    names = {joint.primals[position]: name for name, position in positions.items()}
    found = {made: names[primal] for primal, made in joint.gradients.items() if primal in names}
    outputs = enumerate(joint.backward_outputs)
    return {i: found[node] for i, node in outputs if isinstance(node, fx.Node) and node in found}


def _whole(parameter: Any) -> Spec:
    dtype = parameter.param_dtype or parameter.orig_dtype
    return Spec(whole_size(parameter), whole_stride(parameter), dtype, parameter.sharded_param.device)


def _shard(parameter: Any) -> Spec:
    """Return the spec of the rank's part that has the most rows."""
    size = parameter.padded_sharded_param_size
    device = parameter.sharded_param.device
    return Spec(size, torch.empty(size, device="meta").stride(), parameter.orig_dtype, device)
