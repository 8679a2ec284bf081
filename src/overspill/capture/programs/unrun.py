"""Let Inductor write a step's programs without compiling or running a kernel.

Inductor compiles kernels when it imports a program (`uncompiled.py`). Here that import is replaced by one in which
every kernel does nothing. Allocations and frees of the step are in the program itself, so running it on fake tensors
shows them (`StepPrograms.step`).

Names private to PyTorch that this file relies on (2.11 to 2.14): `PyCodeCache.load_by_key_path` of its code cache,
through which every program is imported, and `config.cpp.vec_isa_ok`, which else runs the compiler to know the
processor; `compile_fx` with its `inner_compile`; `current_callable` of what that returns; of AOTAutograd
`force_non_lazy_backward_lowering` and, in its metadata, `num_forward_returns` and `mutated_inp_runtime_indices`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor, fx, nn
from torch._guards import TracingContext
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

from overspill.core.errors import UnsupportedError

from .failures import inductor_failures
from .program import namespace_of
from .storages import FAKES, storage_key
from .uncompiled import KERNEL, import_uncompiled
from .workspaces import nothing_measured

Around = Callable[[], AbstractContextManager[Any]]


class Written(BaseException):
    """Ends a backend once all programs are written; Dynamo would catch an Exception."""


class UnrunKernel:
    """A kernel that does nothing when called (or `run`, as Triton's are)."""

    def __init__(self, _name: str) -> None: ...

    def __call__(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: a kernel writes to its arguments, and fake tensors have no values."""

    run = __call__


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Let Inductor write programs without compiling kernels or touching its caches, inside the block.

    No workspace of a library call is measured either. Applies to the whole process.
    """
    settings = {"fx_graph_cache": False, "fx_graph_remote_cache": False, "cpp.vec_isa_ok": True}
    with (
        patch.object(PyCodeCache, "load_by_key_path", _load),
        torch._inductor.config.patch(settings),
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._dynamo.config.patch(allow_rnn=True),
        nothing_measured(),
    ):
        try:
            yield
        finally:
            torch._dynamo.reset()  # Dynamo keeps what it compiled, and refuses the same class after some of them


def write(step: Callable[..., Any], batch: Sequence[Any], backend: Callable[..., Any]) -> None:
    """Call `step`, compiled by `backend`, on `batch` until it raises `Written`.

    Both use fake tensors, inside their mode. Raises UnsupportedError if Inductor cannot compile the step, and Dynamo's
    errors if it is not a single graph.
    """
    with nothing_compiled(), inductor_failures():
        try:
            torch.compile(step, backend=backend, dynamic=False, fullgraph=True)(*batch)
        except Written:
            return
    raise UnsupportedError("torch.compile found nothing to compile in the step")


def _load(
    key: str,
    path: str,
    linemap: Any = None,  # noqa: ARG001 - PyTorch passes it
    attrs: dict[str, Any] | None = None,
    **_: Any,
) -> ModuleType:
    """Import the program at `path` as a module without compiled kernels; its constants are `attrs`."""
    if (module := import_uncompiled(key, path, attrs, UnrunKernel)) is None:
        raise UnsupportedError("Inductor wrote no Python program (cpp_wrapper, perhaps), of which nothing can be read")
    return module


@dataclass(frozen=True)
class StepPrograms:
    """The programs of one step, as `call(args)`; `backward` is None without gradients.

    `results` is how many of forward's outputs go to the caller; the others are saved for backward. The first of them
    are new values of the inputs at `updated`. `given` says what each input is: the name of a parameter or buffer, the
    position of a tensor in the batch, or a tensor of Dynamo's own.
    """

    given: Sequence[str | int | Tensor]
    forward: Callable[[list[Any]], Sequence[Any]]
    backward: Callable[[list[Any]], Sequence[Any]] | None
    results: int
    updated: Sequence[int] = ()

    def step(
        self,
        module: nn.Module,
        batch: Sequence[Any],
        around: Around = nullcontext,
        on_saved: Callable[[Tensor], object] = lambda _: None,
    ) -> Any:
        """Run the step on fake tensors; returns what the compiled step returns.

        `module` and `batch` must be like those that it was written for. Memory is allocated and freed in their mode as
        the programs do it; `around` is entered while one of them runs, and `on_saved` called with each tensor that
        forward saves for backward.
        """
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        inputs = [named[g] if isinstance(g, str) else batch[g] if isinstance(g, int) else g for g in self.given]
        call = _Call(self, around, on_saved)
        found = call.forward(inputs) if self.backward is None else _Step.apply(call, *inputs)
        return found[0] if len(found) == 1 else found


@dataclass
class _Call:
    """One call of the step, which keeps saved tensors until its backward."""

    programs: StepPrograms
    around: Around
    on_saved: Callable[[Tensor], object]
    saved: list[Any] = field(default_factory=list)

    def forward(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Run forward; the caller's results."""
        programs = self.programs
        there = {storage_key(v) for v in inputs if isinstance(v, Tensor)}
        with self.around():
            outputs = list(programs.forward(list(inputs)))
            for position, value in zip(programs.updated, outputs, strict=False):
                inputs[position].detach().copy_(value)
            # A result that is saved too would hold this call through its grad_fn.
            self.saved = [v.detach() if isinstance(v, Tensor) else v for v in outputs[programs.results :]]
        for value in self.saved:
            if isinstance(value, Tensor) and storage_key(value) not in there:
                self.on_saved(value)
        return tuple(outputs[len(programs.updated) : programs.results])

    def backward(self, tangents: Sequence[Any]) -> tuple[Any, ...]:
        """Gradients of the inputs, given those of the results."""
        args, self.saved = [*self.saved, *tangents], []
        del tangents
        assert self.programs.backward is not None
        with self.around():
            return tuple(self.programs.backward(args))


class _Step(torch.autograd.Function):
    """Runs forward and backward of a call under autograd, as AOTAutograd does."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: Any) -> tuple[Any, ...]:
        ctx.call = call
        return call.forward(inputs)

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        return None, *ctx.call.backward(tangents)


def write_programs(step: Callable[..., Any], module: nn.Module, batch: Sequence[Any]) -> StepPrograms:
    """The programs that `torch.compile` would run for `step(*batch)`, which calls `module`; see `write`."""
    writer = _Writer(module, batch)
    write(step, batch, writer.compile)
    return writer.found()


class _Writer:
    def __init__(self, module: nn.Module, batch: Sequence[Any]) -> None:
        named = [*module.named_parameters(), *module.named_buffers()]
        self._known: dict[int, str | int] = {id(v): i for i, v in enumerate(batch)} | {id(v): n for n, v in named}
        self._given: list[str | int | Tensor] = []
        self._calls: list[Callable[..., Any]] = []
        self._results = 0
        self._updated: Sequence[int] = ()

    def compile(self, module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """Dynamo's backend: has forward and backward written, then raises Written."""
        self._given = [self._known.get(id(e), e) for e in examples]
        with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
            compile_fx(module, examples, inner_compile=self._compile_inner)
        raise Written

    def _compile_inner(self, module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        compiled = compile_fx_inner(module, inputs, **options)
        namespace = namespace_of(compiled)
        if KERNEL not in namespace:
            raise UnsupportedError("Inductor gave no Python program to run (CUDA graphs, perhaps)")
        namespace.update(FAKES)
        self._calls.append(namespace["call"])
        if not options.get("is_backward"):
            metadata = TracingContext.get().fw_metadata
            assert metadata is not None
            self._results, self._updated = metadata.num_forward_returns, metadata.mutated_inp_runtime_indices
        return compiled

    def found(self) -> StepPrograms:
        """The programs written. Raises UnsupportedError if there are none."""
        if not self._calls:
            raise UnsupportedError("torch.compile found nothing to compile in the step")
        forward, *backward = self._calls
        return StepPrograms(self._given, forward, next(iter(backward), None), self._results, self._updated)
