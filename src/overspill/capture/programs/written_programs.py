"""Let Inductor write a step's programs without compiling or running a kernel.

Inductor compiles kernels when it imports a program (`uncompiled.py`). Here that import is replaced by one in which
every kernel does nothing. Allocations and frees of the step are in the program itself, so running it on fake tensors
shows them (`WrittenStep`).

Relies on the setting `cpp.vec_isa_ok`, without which Inductor runs the compiler to know the processor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any
from unittest.mock import patch

from torch import Tensor, fx, nn

from overspill.capture.compiled.trace import DynamoGraph, dynamo_graph
from overspill.core.errors import UnsupportedError
from overspill.pytorch.aot import boxed
from overspill.pytorch.dynamo import TracingContext
from overspill.pytorch.functorch import functorch_config
from overspill.pytorch.inductor import PyCodeCache, compile_fx, compile_fx_inner
from overspill.pytorch.inductor_settings import inductor_config
from overspill.pytorch.storages import storage_key

from .failures import inductor_failures
from .program import namespace_of
from .storages import FAKES
from .uncompiled import KERNEL, import_uncompiled
from .workspaces import nothing_measured

Around = Callable[[], AbstractContextManager[Any]]


class SkippedKernel:
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
        inductor_config.patch(settings),
        functorch_config.patch(enable_autograd_cache=False),
        nothing_measured(),
    ):
        yield


def traced(step: Callable[..., Any], batch: Sequence[Any]) -> DynamoGraph:
    """Return Dynamo's graph of `step(*batch)`; see `dynamo_graph`. Raises UnsupportedError if it has no ops."""
    with inductor_failures():
        found = dynamo_graph(step, batch)
    if found is None:
        raise UnsupportedError("torch.compile found nothing to compile in the step")
    return found


def _load(
    key: str,
    path: str,
    linemap: Any = None,  # noqa: ARG001 - PyTorch passes it
    attrs: dict[str, Any] | None = None,
    **_: Any,
) -> ModuleType:
    """Import the program at `path` as a module without compiled kernels; its constants are `attrs`."""
    if (module := import_uncompiled(key, path, attrs, SkippedKernel)) is None:
        raise UnsupportedError("Inductor wrote no Python program (cpp_wrapper, perhaps), of which nothing can be read")
    return module


class WrittenStep:
    """A step as the programs that `torch.compile` would run for `step(*batch)`, which calls `module`.

    AOTAutograd's own function runs them: on fake tensors, with kernels that do nothing.
    """

    def __init__(self, step: Callable[..., Any], module: nn.Module, batch: Sequence[Any]) -> None:
        named = [*module.named_parameters(), *module.named_buffers()]
        known: dict[int, str | int] = {id(v): i for i, v in enumerate(batch)} | {id(v): n for n, v in named}
        self._around: Around = nullcontext
        self._on_saved: Callable[[Tensor], object] = lambda _: None

        with nothing_compiled():
            graph, examples, _ = traced(step, batch)
            self._given = [known.get(id(example), example) for example in examples]
            """The name of a parameter or buffer, the position of a tensor in the batch, or a tensor of Dynamo's own."""
            with functorch_config.patch(force_non_lazy_backward_lowering=True), inductor_failures():
                self._run = compile_fx(graph, examples, inner_compile=self._compile_inner)

    def _compile_inner(self, module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Have one program written; return it as a function that runs on fake tensors."""
        namespace = namespace_of(compile_fx_inner(module, inputs, **options))
        if KERNEL not in namespace:
            raise UnsupportedError("Inductor gave no Python program to run (CUDA graphs, perhaps)")
        namespace.update(FAKES)
        call, results = namespace["call"], None
        if not options.get("is_backward"):
            metadata = TracingContext.get().fw_metadata
            assert metadata is not None
            results = metadata.num_forward_returns

        def run(args: list[Any]) -> Sequence[Any]:
            there = {storage_key(value) for value in args if isinstance(value, Tensor)}
            with self._around():
                outputs: Sequence[Any] = call(args)
            for value in outputs[len(outputs) if results is None else results :]:
                if isinstance(value, Tensor) and storage_key(value) not in there:
                    self._on_saved(value)
            return outputs

        return boxed(run)

    def __call__(
        self,
        module: nn.Module,
        batch: Sequence[Any],
        around: Around = nullcontext,
        on_saved: Callable[[Tensor], object] = lambda _: None,
    ) -> Any:
        """Run the step on fake tensors; return the results of the compiled step.

        `module` and `batch` must be like those that it was written for. `around` is entered while a program runs, and
        `on_saved` called with each tensor that forward saves for backward.
        """
        self._around, self._on_saved = around, on_saved
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        found = self._run(
            *(named[g] if isinstance(g, str) else batch[g] if isinstance(g, int) else g for g in self._given)
        )
        return found[0] if len(found) == 1 else found
