"""The torch.compile backend: from Dynamo's graph through AOTAutograd to lowered graphs that run.

Names private to PyTorch that this file relies on (2.11 to 2.13): `_BoxedCodeGen`, `aot_autograd`'s `partition_fn`,
`CustomPartitionerFn`, `gm.compile_subgraph_reason`, the compile id, and `torch._C._DisableAutocast`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import torch
import torch._functorch.config
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._guards import CompileContext
from torch.fx.graph import _BoxedCodeGen
from torch.utils._pytree import tree_leaves

from overspill.capture.compiled.joint import JointGraph
from overspill.capture.compiled.kernels import eager_kernels
from overspill.capture.compiled.trace import describe_inputs, leaves_told
from overspill.core.errors import RequestError
from overspill.runtime.lower import lower, lower_inference
from overspill.runtime.options import Options
from overspill.runtime.parallel import refuse_split
from overspill.runtime.profile import OpTimer

from .session import Frame, Session, torch_device

Compiled = Callable[..., Any]


def compile_graph(module: fx.GraphModule, examples: Sequence[Any], session: Session) -> Compiled:
    """The callable that runs Dynamo's `module` by the session's plan."""
    compiler = _GraphCompiler(module, examples, session)
    try:
        return compiler.compile()
    finally:
        compiler.examples.clear()  # what is compiled keeps the compiler, which would keep the first batch


class _GraphCompiler:
    """Compiles one Dynamo graph: plans it when AOTAutograd asks for a partition, and lowers it."""

    def __init__(self, module: fx.GraphModule, examples: Sequence[Any], session: Session) -> None:
        self.module = module
        self.examples = list(examples)
        self.session = session
        self.inputs = describe_inputs(module, examples)
        self.frame = _frame(module)

    def compile(self) -> Compiled:
        # Backward may run twice with retain_graph=True, so AOTAutograd must not give saved tensors away. It is that of a
        # user who calls it outside of autocast's region.
        with torch._functorch.config.patch({"donated_buffer": False, "backward_pass_autocast": "off"}):
            if self.session.options.backend == "inductor":
                from .inductor import compile_with_inductor  # noqa: PLC0415 - seconds to import, and rarely needed

                return compile_with_inductor(self.module, self.examples, self.partition)
            with eager_kernels() as casts, leaves_told(self.module, self.examples, casts):
                return aot_autograd(
                    fw_compiler=self._boxed,
                    bw_compiler=self._boxed,
                    inference_compiler=self._infer,
                    partition_fn=self.partition,
                )(self.module, self.examples)

    def partition(
        self, joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """AOTAutograd's hook: the forward and backward graphs, lowered from the plan."""
        graph = JointGraph(joint, num_fwd_outputs)
        captured, plan = self.session.plan(graph, self.inputs, self.examples, self.frame)
        device = torch_device(self.examples)
        engine = self.session.engine_for(plan, device)
        lowered = lower(captured, plan.schedule, engine, transfers=self.session.options.transfers)
        if self.session.options.profile:
            self.session.timer = OpTimer(captured.graph, device)
            for module in lowered:
                self.session.timer.instrument(module)
        return lowered

    def _infer(self, module: fx.GraphModule, _inputs: Any) -> Compiled:
        """A forward without a backward (evaluation under no_grad) is planned and lowered alone."""
        graph = JointGraph(module, len(tree_leaves(module.graph.find_nodes(op="output")[0].args)))
        captured, plan = self.session.plan(graph, self.inputs, self.examples, self.frame)
        engine = self.session.engine_for(plan, torch_device(self.examples))
        return self._boxed(lower_inference(captured, plan.schedule, engine), _inputs)

    def _boxed(self, module: fx.GraphModule, _inputs: Any) -> Compiled:
        """`module` as a callable that takes its arguments in a list and empties it: else the frame would hold them all."""
        module.graph.set_codegen(_BoxedCodeGen())
        module.recompile()
        session = self.session

        def run(args: list[Any]) -> Any:
            tracker = session.tracker
            if tracker is not None:
                tracker.add(args)
            # What autocast casts, it has cast in the graph.
            with torch._C._DisableAutocast(), tracker or nullcontext():
                return module.forward(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def overspill_backend(
    module: fx.GraphModule,
    examples: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """`torch.compile(model, backend="overspill", options={"budget": "8GiB", "policy": "auto", …})`.

    All graphs of one `torch.compile` call share one budget. Options are those of `overspill.compile`.
    """
    if mode is not None:
        raise RequestError("the overspill backend has no modes; pass options={...}")
    refuse_split(module)
    return compile_graph(module, examples, _session_of(options if options is not None else {}))


_SESSIONS: dict[int, tuple[Mapping[str, Any], Session]] = {}


def _session_of(options: Mapping[str, Any]) -> Session:
    """The session of one torch.compile call, which hands us the same options object for each of its graphs."""
    key = id(options)
    if key not in _SESSIONS or _SESSIONS[key][0] is not options:
        known = {field.name for field in fields(Options) if field.init}
        if unknown := set(options) - known:
            raise RequestError(f"unknown option {min(unknown)!r}; options: {', '.join(sorted(known))}")
        _SESSIONS[key] = (options, Session(Options(**options)))
    return _SESSIONS[key][1]


def _frame(module: fx.GraphModule) -> Frame:
    compile_id = CompileContext.current_compile_id()
    reason = getattr(module, "compile_subgraph_reason", None)
    number = getattr(compile_id, "frame_id", None)
    return Frame(number if number is not None else id(module), bool(reason is not None and reason.graph_break))
