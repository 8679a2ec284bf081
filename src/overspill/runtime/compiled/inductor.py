"""Inductor's own kernels within a budget: its programs of forward and backward are planned and written again.

Inductor compiles a graph as `torch.compile` has it, partition and kernels alike; the bits are those of stock
`torch.compile`. Both programs are known before the first call, so one plan is made for both, and what PyTorch calls is
then the text that carries it out (`runtime/lower_programs.py`).

Names private to PyTorch that this file relies on (2.11 to 2.13): `compile_fx` and its `inner_compile`, `CompiledFxGraph`
with `source_code` and `current_callable`, `CustomPartitionerFn`, `min_cut_rematerialization_partition`, the node
metadata `saved_tensor_with_no_vc_check`, and `bw_donated_idxs` of AOTAutograd's metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch._functorch.config
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._subclasses.fake_tensor import FakeTensor

from overspill.capture.compiled.joint import JointGraph
from overspill.capture.programs.graph import CapturedPrograms, capture_programs
from overspill.capture.programs.program import Program
from overspill.capture.programs.storages import BACKWARD, FORWARD, follow
from overspill.core import Schedule
from overspill.core.errors import UnsupportedError
from overspill.runtime.arena import Places
from overspill.runtime.lower import NO_VERSION_CHECK
from overspill.runtime.lower_programs import Lowered, lower_programs

Plan = Callable[[JointGraph, Callable[..., CapturedPrograms]], tuple[CapturedPrograms, Schedule, Places, int]]
"""Given a joint graph, and how to make a Graph of it: the graph, the schedule, the places of buffers, the number of the engine."""


def compile_with_inductor(
    module: fx.GraphModule, examples: Sequence[Any], plan: Plan, ran: Callable[[], None]
) -> Callable[..., Any]:
    """The callable that runs Dynamo's `module` by `plan` with Inductor's kernels; `ran` is called by each graph that runs."""
    compiler = _Compiler(plan, ran)
    settings = {
        "custom_partitioner_fn": _Partitioner(compiler),
        # A buffer that is used again for other contents would be one tensor with a hole in its life.
        "allow_buffer_reuse": False,
    }
    # Its cache of whole graphs knows nothing of plans; that of compiled programs, which is slow to fill, stays in use.
    functorch = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True, "donated_buffer": False}
    with torch._functorch.config.patch(functorch):
        return compile_fx(module, examples, inner_compile=compiler.compile, config_patches=settings)


class _Partitioner(CustomPartitionerFn):
    """The usual partition, of which we hear."""

    def __init__(self, compiler: _Compiler) -> None:
        self._compiler = compiler

    def __call__(
        self, module: fx.GraphModule, inputs: Sequence[Any], **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self._compiler.joint = _copied(module, options["num_fwd_outputs"])
        options.setdefault("compiler", "inductor")
        return min_cut_rematerialization_partition(module, inputs, **options)

    def __deepcopy__(self, memo: Any) -> _Partitioner:
        """Itself: Inductor copies its configuration, and our session must stay one."""
        return self

    def uuid(self) -> str:
        """The identity of the usual partition, under which programs are found in a cache."""
        return "overspill: min-cut"


def _copied(module: fx.GraphModule, num_forward_outputs: int) -> JointGraph:
    """The joint graph as it is before it is partitioned, for us alone."""
    graph = fx.Graph()
    output = graph.output(graph.graph_copy(module.graph, {}))
    output.meta = dict(module.graph.find_nodes(op="output")[0].meta)
    return JointGraph(fx.GraphModule(module, graph), num_forward_outputs)


class _Compiler:
    """Compiles the graphs of one call of `compile_fx`, and plans when the last of them is there."""

    def __init__(self, plan: Plan, ran: Callable[[], None]) -> None:
        self._plan = plan
        self._ran = ran
        self.joint: JointGraph | None = None
        self._forward: Program | None = None
        self._unchecked = 0
        self._lowered: tuple[Lowered | None, Lowered | None] = (None, None)

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """What PyTorch calls for each graph: Inductor's result, which runs by the plan."""
        is_backward, is_inference = options.get("is_backward", False), options.get("is_inference", False)
        outputs = [n for n in module.graph.find_nodes(op="output")[0].args[0] if isinstance(n, fx.Node)]
        compiled = compile_fx_inner(module, inputs, **options)
        program = _program_of(compiled, BACKWARD if is_backward else FORWARD)
        if is_backward:
            assert self._forward is not None
            if (context := TracingContext.try_get()) is not None and context.fw_metadata is not None:
                context.fw_metadata.bw_donated_idxs = []  # None would be taken for some, and retain_graph=True refused
            self._finish(self._forward, program)
        else:
            self._forward = program
            self._unchecked = sum(bool(n.meta.get(NO_VERSION_CHECK)) for n in outputs)
            if is_inference:
                self.joint = JointGraph(module, len(program.outputs))
                self._finish(program, None)
        part = int(is_backward)

        def run(args: list[Any]) -> Any:
            self._ran()
            lowered = self._lowered[part]
            assert lowered is not None  # both programs are compiled before the first call
            return lowered(args)

        compiled.current_callable = run
        return compiled

    def _finish(self, forward: Program, backward: Program | None) -> None:
        joint = self.joint
        assert joint is not None
        values = [n.meta["val"] for n in (*joint.primals, *joint.tangents)]
        mode = next(v.fake_mode for v in values if isinstance(v, FakeTensor))
        primals, tangents = values[: len(joint.primals)], values[len(joint.primals) :]
        outputs = len(joint.forward_outputs)
        programs = follow(forward, backward, primals, tangents, outputs, mode)
        captured, schedule, places, engine = self._plan(joint, partial(capture_programs, programs))
        self._lowered = lower_programs(captured, schedule, places, engine, self._unchecked)


def _program_of(compiled: Any, prefix: str) -> Program:
    """The program that Inductor wrote. Raises UnsupportedError where it wrote none in Python."""
    call = getattr(compiled, "current_callable", None)
    source = getattr(compiled, "source_code", None)
    namespace = getattr(getattr(call, "__func__", call), "__globals__", None)
    if source is None or namespace is None or "async_compile" not in source:
        raise UnsupportedError(
            'Inductor wrote no Python program (cpp_wrapper, or CUDA graphs, perhaps); use backend="eager"'
        )
    return Program.read(source, namespace, prefix)
