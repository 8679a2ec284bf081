"""Inductor's own kernels within a budget, by a plan of its programs.

Inductor compiles a graph as `torch.compile` does, with the same partition and kernels, so the bits equal stock
`torch.compile`. Both programs are known before the first call, and one plan is made for both. PyTorch then calls a
graph of their calls that carries out the plan (`runtime/lower.py`).
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, fx

from overspill.capture.compiled.cut_step import Build, CapturedCutStep
from overspill.capture.compiled.effects import without_tokens
from overspill.capture.compiled.graph import Captured, InputInfo, Surroundings
from overspill.capture.compiled.joint import NO_VERSION_CHECK, JointGraph, copied, draws
from overspill.capture.compiled.whole_step import GradientOps
from overspill.capture.programs.failures import inductor_failures
from overspill.capture.programs.graph import capture_programs
from overspill.capture.programs.joint import JointOfPrograms, joint_of_call
from overspill.capture.programs.known_shapes import with_known_shapes
from overspill.capture.programs.program import Program, namespace_of
from overspill.capture.programs.storages import BACKWARD, FORWARD, Storages, follow
from overspill.capture.programs.uncompiled import kernels_later
from overspill.capture.programs.whole_step import capture_cut_step_of_programs
from overspill.core.errors import UnsupportedError
from overspill.pytorch.aot import min_cut_rematerialization_partition, traced_once
from overspill.pytorch.dynamo import TracingContext, count_calls
from overspill.pytorch.fake_tensors import FakeTensorMode, detect_fake_mode
from overspill.pytorch.functorch import functorch_config
from overspill.pytorch.inductor import (
    ALIGNMENT,
    CustomPartitionerFn,
    clone_preserve_strides,
    compile_fx,
    compile_fx_inner,
    work_kept,
)
from overspill.runtime.step.away import Away

from .calls import CallsOfPlan, Lowered
from .partitions import PARTITIONS, Partitioned

Captures = Callable[
    [JointGraph, list[InputInfo], Surroundings, Callable[[], Iterable[Captured]], Build], Iterable[Captured]
]
"""The captures of a step by one partition, of the plain ones and of how to build one that is cut: as
`LoopPlans.captures`."""
Capture = Callable[[JointGraph, list[InputInfo], Surroundings, Captures], Partitioned[Captured]]
Plan = Callable[[JointGraph, Capture], Lowered]
"""From a joint graph and how to capture it: the chosen capture, lowered by its plan."""


def compile_with_inductor(
    module: fx.GraphModule, examples: Sequence[Any], plan: Plan, partition: float | None = None
) -> Callable[..., Any]:
    """Return a callable that runs Dynamo's `module` by `plan` with Inductor's kernels.

    `partition` is that of Options.
    """
    by_partition = ByPartition(module, examples, partition)
    usual = by_partition.usual
    if usual.joint is None:  # no ops
        return by_partition.compiled[usual]
    return by_partition.lowered(plan(usual.joint, by_partition.capture))


class ByPartition:
    """`module` compiled by the usual partition, and by others on demand."""

    def __init__(self, module: fx.GraphModule, examples: Sequence[Any], partition: float | None) -> None:
        spare = copied(module)
        self._compile: Callable[[_Compiler], Callable[..., Any]] | None = lambda c: c.compiled(copied(spare), examples)
        self._tried: set[float] = set()
        self._trace: list[Any] = []
        self.usual = _Compiler(set(), partition, self._trace)
        self._chosen = partition is not None or self.usual.partition != PARTITIONS[0]
        self.compiled = {self.usual: self.usual.compiled(module, examples)}

    def capture(
        self, _: JointGraph, inputs: list[InputInfo], surroundings: Surroundings, captures: Captures
    ) -> Partitioned[Captured]:
        """Return the captured programs of each partition, made on demand."""
        return Partitioned(found for c in self._all() for found in c.captured(inputs, surroundings, captures))

    def lowered(self, lowered: Lowered) -> Callable[..., Any]:
        """Return the callable that runs by this plan.

        No other partition is made afterwards, because that would keep the examples, real tensors, alive.
        """
        self._compile = None
        self._trace.clear()
        chosen = next(c for c in self.compiled if c.partition == lowered.captured.partition)
        chosen.run_by(lowered)
        return self.compiled[chosen]

    def _all(self) -> Iterator[_Compiler]:
        """Yield the compilers of all known partitions, then of those that save less.

        The latter are made only if a backward can recompute and the user has chosen no partition.
        """
        yield from list(self.compiled)
        assert self.usual.joint is not None
        if self.usual.joint.tangents and not self._chosen:
            for partition in PARTITIONS[1:]:
                if self._compile is not None and (made := self._made(self._compile, partition)) is not None:
                    yield made

    def _made(self, compile_by: Callable[[_Compiler], Callable[..., Any]], partition: float) -> _Compiler | None:
        """Return the compiler for one more partition, or None if it equals an earlier one or cannot be planned."""
        if partition in self._tried:
            return None
        self._tried.add(partition)
        compiler = _Compiler(self.usual.seen, partition, self._trace)
        with _left_out(partition):
            self.compiled[compiler] = compile_by(compiler)
            return compiler
        return None


@contextmanager
def _left_out(partition: float) -> Iterator[None]:
    """Skip one more partition if its compilation in the context fails.

    Skipped are those equal to an earlier one, those that generate random numbers again, and those that Inductor cannot
    compile.
    """
    try:
        yield
    except (_SeenBefore, _DrawsAgain):
        pass
    except UnsupportedError as error:
        warnings.warn(f"the partition for activation_memory_budget={partition} is left out: {error}", stacklevel=4)


class PartitionPrograms(NamedTuple):
    """Inductor's programs of a step by one partition."""

    joint: JointGraph
    """The joint graph of the step."""
    programs: Storages
    partition: float
    """The `activation_memory_budget`."""


def programs_of(
    make_module: Callable[[], fx.GraphModule], examples: Sequence[Any], lasting: Sequence[int], partition: float | None
) -> Iterator[PartitionPrograms]:
    """Yield Inductor's programs of a training module, one set per partition, on fake `examples`.

    The usual partition comes first. `make_module` makes the module, which is changed. Inputs at the positions `lasting`
    stay from step to step, as parameters and buffers do: saving them for backward costs nothing. `partition` is that of
    Options. If it or the user's own setting has chosen, no others follow. The caller runs the programs. Raises
    UnsupportedError.
    """
    seen: set[Any] = set()
    trace: list[Any] = []

    def programs(partition: float | None) -> PartitionPrograms:
        compiler = _Compiler(seen, partition, trace, list(lasting))
        compiler.compiled(make_module(), examples)
        # Without a program of exactly these inputs there is nothing to plan.
        if compiler.joint is None or compiler.programs is None:
            raise UnsupportedError('Inductor wrote no program of the step; use backend="eager"')
        if len(compiler.joint.primals) != len(examples):
            raise UnsupportedError(
                f"Inductor compiled the step for {len(compiler.joint.primals)} inputs, not {len(examples)}; "
                'use backend="eager"'
            )
        return PartitionPrograms(compiler.joint, compiler.programs, compiler.partition)

    # The usual partition, then the others.
    usual = programs(partition)
    yield usual
    for other in PARTITIONS[1:] if partition is None and usual.partition == PARTITIONS[0] else ():
        found = None
        with _left_out(other):
            found = programs(other)
        if found is not None:
            yield found


def align(args: list[Any], positions: Iterable[int]) -> dict[int, tuple[Tensor, Tensor]]:
    """Replace GPU tensors that lack the alignment Inductor's kernels assume by copies.

    Only `args` at `positions` are replaced. Returns those tensors and their copies, by position. What is in the store
    comes back to memory of its own.
    """
    found = {}
    for i in positions:
        if not isinstance(tensor := args[i], Tensor) or isinstance(tensor, Away):
            continue
        if tensor.is_cuda and tensor.data_ptr() % ALIGNMENT:
            args[i] = clone_preserve_strides(tensor)
            found[i] = tensor, args[i]
    return found


class _Partitioner(CustomPartitionerFn):
    """The usual partitioner, which also records its result."""

    def __init__(self, compiler: _Compiler) -> None:
        self._compiler = compiler

    def __call__(
        self, module: fx.GraphModule, inputs: Sequence[Any], **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        with_known_shapes(module.graph)
        joint = copied(module)
        self._compiler.joint = JointGraph(joint, without_tokens(joint.graph, options["num_fwd_outputs"]))
        options.setdefault("compiler", "inductor")
        if self._compiler.lasting is not None:
            options["static_lifetime_input_indices"] = self._compiler.lasting
        parts = min_cut_rematerialization_partition(module, inputs, **options)
        self._compiler.see(parts)
        return parts

    def __deepcopy__(self, memo: Any) -> _Partitioner:
        """Return the partitioner itself: Inductor copies its configuration, but the session must stay one."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return its identity: Inductor's cache pickles the configuration as a key."""
        return str, (self.uuid(),)

    def uuid(self) -> str:
        """Return its identity for Inductor's cache.

        It includes a setting that the cache omits: whether backward may overwrite saved tensors.
        """
        return f"overspill: min-cut, donated_buffer={functorch_config.donated_buffer}"


class _SeenBefore(UnsupportedError):
    """This partition has been compiled already."""


class _DrawsAgain(UnsupportedError):
    """Backward would generate forward's random numbers again, with other values.

    The gradients would be wrong (PyTorch's issue 190717).
    """


class _Compiler:
    """Compiles by one partition, and keeps the programs.

    `partition` is an `activation_memory_budget`, None for the user's setting. `seen` are the partitions compiled
    before, and `trace` the joint graph that the first of them traced. `lasting` are the inputs that stay from step to
    step, if Dynamo does not know them.
    """

    def __init__(
        self, seen: set[Any], partition: float | None, trace: list[Any], lasting: list[int] | None = None
    ) -> None:
        self.seen = seen
        self._trace = trace
        set_by_user = float(functorch_config.activation_memory_budget)
        self.partition = set_by_user if partition is None else partition
        self.lasting = lasting
        self.joint: JointGraph | None = None
        self.programs: Storages | None = None
        self._forward: Program | None = None
        self._unchecked = 0
        self._calls: JointOfPrograms | None = None
        self._lowered: CallsOfPlan | None = None

    def compiled(self, module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """Return Dynamo's `module`, compiled; it runs once a plan exists.

        `module` is changed.
        """
        settings = {
            "custom_partitioner_fn": _Partitioner(self),
            # A buffer that is used again for other contents would be one tensor with a hole in its life.
            "allow_buffer_reuse": False,
            # Where Dynamo has not made them inputs, tensors from outside of the model are read where they are, and not
            # written into the program as the numbers that they have now.
            "always_keep_tensor_constants": self.lasting is not None,
        }
        # Its cache of whole graphs knows nothing of plans; that of compiled programs, which is slow to fill, stays in
        # use.
        functorch = {
            "enable_autograd_cache": False,
            "force_non_lazy_backward_lowering": True,
            "activation_memory_budget": self.partition,
            "backward_pass_autocast": "off",  # users call backward outside of autocast's region
        }
        failures = inductor_failures('; use backend="eager"')
        with failures, functorch_config.patch(functorch), work_kept(), traced_once(self._trace, copied):
            return compile_fx(module, examples, inner_compile=self._compile, config_patches=settings)

    def see(self, parts: tuple[fx.GraphModule, fx.GraphModule]) -> None:
        """Record this partition.

        Raises _SeenBefore for one equal to an earlier one, _DrawsAgain for one that trains wrongly.
        """
        names = tuple(tuple(node.name for node in part.graph.nodes) for part in parts)
        if names in self.seen:
            raise _SeenBefore
        forward, backward = ({node.name for node in part.graph.nodes if draws(node)} for part in parts)
        if again := sorted(forward & backward):
            raise _DrawsAgain(
                f"with activation_memory_budget={self.partition} Inductor's backward draws random numbers of forward "
                f"again ({', '.join(again)}), and they are others; give a larger partition=, or none"
            )
        self.seen.add(names)

    def _compile(self, module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """Return Inductor's compiled graph, changed to run by the plan; PyTorch calls this for forward and backward."""
        is_backward, is_inference = options.get("is_backward", False), options.get("is_inference", False)
        outputs = [n for n in module.graph.find_nodes(op="output")[0].args[0] if isinstance(n, fx.Node)]
        # Of a graph without ops Inductor writes a program only for this cache, which is off.
        with kernels_later(), functorch_config.patch(bundled_autograd_cache=not count_calls(module.graph)):
            compiled = compile_fx_inner(module, inputs, **options)
        traced = module if self.joint is None else self.joint.module
        program = _program_of(compiled, BACKWARD if is_backward else FORWARD, traced)
        # Keep the program; with the second one of a pair the step is known.
        if is_backward:
            assert self._forward is not None
            if (context := TracingContext.try_get()) is not None and context.fw_metadata is not None:
                context.fw_metadata.bw_donated_idxs = []  # None would be taken for some, and retain_graph=True refused
                # Of what the partition saved, which is not what the plan saves: dynamic sizes, and by 2.14 inputs.
                context.fw_metadata.dynamic_saved_tensors_idxs = {}
                context.fw_metadata.saved_tensor_is_graph_input = defaultdict(bool)
            self._follow(self._forward, program)
        else:
            self._forward = program
            self._unchecked = sum(bool(n.meta.get(NO_VERSION_CHECK)) for n in outputs)
            if is_inference:
                self.joint = JointGraph(module, len(program.outputs))
                self._follow(program, None)

        # Run the lowered graphs in place of the program. What forward has saved is aligned, other inputs may not be.
        tangents = 0 if self.joint is None else len(self.joint.tangents)

        def run(args: list[Any]) -> Any:
            lowered = self._lowered
            assert lowered is not None  # both programs are planned before the first call
            if is_backward:
                align(args, range(len(args) - tangents, len(args)))
                return lowered.backward(args)
            copied = align(args, compiled.inputs_to_check)
            found = lowered.forward(args)
            for tensor, copy in (copied[i] for i in copied.keys() & compiled.mutated_input_idxs):
                tensor.copy_(copy)
            return found

        compiled.current_callable = run
        return compiled

    def _follow(self, forward: Program, backward: Program | None) -> None:
        joint = self.joint
        assert joint is not None
        values = [n.meta["val"] for n in (*joint.primals, *joint.tangents)]
        mode = detect_fake_mode(values) or FakeTensorMode()
        primals, tangents = values[: len(joint.primals)], values[len(joint.primals) :]
        self.programs = follow(forward, backward, primals, tangents, len(joint.forward_outputs), mode)

    def captured(self, inputs: list[InputInfo], surroundings: Surroundings, captures: Captures) -> Iterable[Captured]:
        """Return the captured Graphs of the programs, without or with parameters that move."""
        assert self.programs is not None
        assert self.joint is not None
        programs, traced = self.programs, self.joint
        if self._calls is None:
            self._calls = joint_of_call(programs, traced, self._unchecked)
        calls, partition = self._calls, self.partition

        def plain() -> list[Captured]:
            return [replace(capture_programs(programs, traced, calls, inputs, surroundings), partition=partition)]

        def build(joint: JointGraph, infos: list[InputInfo], ops: GradientOps, around: Surroundings) -> CapturedCutStep:
            found = capture_cut_step_of_programs(programs, traced, joint, infos, ops, around)
            return replace(found, partition=partition)

        return captures(calls, inputs, surroundings, plain, build)

    def run_by(self, lowered: Lowered) -> None:
        """Run by this plan from now on."""
        self._lowered = CallsOfPlan(lowered, self._unchecked)


def _program_of(compiled: Any, prefix: str, traced: fx.GraphModule) -> Program:
    """Return the program that Inductor wrote, which reads the tensors of `traced` where they are.

    AOTAutograd compiles a copy of backward, with copies of these tensors. Raises UnsupportedError if Inductor wrote no
    Python program.
    """
    source, namespace = getattr(compiled, "source_code", None), namespace_of(compiled)
    if source is None or not namespace or "async_compile" not in source:
        raise UnsupportedError(
            'Inductor wrote no Python program (cpp_wrapper, or CUDA graphs, perhaps); use backend="eager"'
        )
    names = [name for name, value in namespace.items() if isinstance(value, Tensor) and hasattr(traced, name)]
    return Program.read(source, namespace | {name: getattr(traced, name) for name in names}, prefix)
