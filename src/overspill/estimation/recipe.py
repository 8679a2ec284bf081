"""How a job is trained or run, apart from the model, its batch and the GPU: the one place where that is said."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from overspill import models
from overspill.core.errors import RequestError

from .parallel import Parallel

if TYPE_CHECKING:  # the command line checks a recipe before it pays for torch
    from torch import Tensor
    from torch.optim import Optimizer

DTYPES = ("float32", "bfloat16", "float16", "amp", "amp-bfloat16")
ATTENTION = ("flash", "efficient", "math", "cudnn")

MakeOptimizer = Callable[[Iterable["Tensor"]], "Optimizer"]


@dataclass(frozen=True)
class Recipe:
    """How a job is trained; without an `optimizer` (a name, or a function of the parameters), how its model is run.

    `dtype` is float32, bfloat16, float16, amp (autocast in float16 with a GradScaler) or amp-bfloat16. `accumulate`
    micro-batches make a step. `set_to_none` is `zero_grad`'s. `parallel` says how several GPUs share the work.
    `checkpointing`: the repeated blocks of the model, or the modules of the classes named, are computed again in
    backward. `attention`: the only kernel that scaled_dot_product_attention may choose, one of ATTENTION.
    `channels_last`: model and images are in that memory format.
    """

    optimizer: str | MakeOptimizer | None = None
    dtype: str = "float32"
    accumulate: int = 1
    set_to_none: bool = True
    parallel: Parallel | None = None
    checkpointing: bool | tuple[str, ...] = False
    attention: str | None = None
    channels_last: bool = False
    lora: int | None = None
    quantize: str | None = None
    offload_optimizer: bool = False
    cudnn_benchmark: bool = False
    generate: int = 0

    def __post_init__(self) -> None:
        """Refuse, in one line each, what does not exist or contradicts itself."""
        if isinstance(self.optimizer, str):
            models.check_optimizer(self.optimizer)
        if self.dtype not in DTYPES:
            raise RequestError(f"unknown dtype {self.dtype!r}; dtypes: {', '.join(DTYPES)}")
        if self.accumulate < 1:
            raise RequestError(f"accumulate={self.accumulate} is not a positive number")
        if self.attention is not None and self.attention not in ATTENTION:
            raise RequestError(f"unknown attention {self.attention!r}; kernels: {', '.join(ATTENTION)}")

        missing = self._changed("lora", "quantize", "offload_optimizer", "cudnn_benchmark", "generate")
        self._refuse("cannot be estimated yet", missing)

    @property
    def make_optimizer(self) -> MakeOptimizer | None:
        """The optimizer as a function of the parameters; None: there is none."""
        return models.optimizer_named(self.optimizer) if isinstance(self.optimizer, str) else self.optimizer

    def check_inference(self) -> None:
        """Raise RequestError where the model is only run, and the recipe has what only training has."""
        if self.parallel is not None:
            raise RequestError(
                f"{self.parallel.kind} is for training; pass an optimizer, or estimate inference on one GPU"
            )
        self._refuse(
            "is for training, and this is inference", self._changed("accumulate", "set_to_none", "checkpointing")
        )

    def check_compiled(self) -> None:
        """Raise RequestError for what is only estimated of eager PyTorch."""
        if self.parallel is not None:
            raise RequestError(
                f"a compiled step is estimated on one GPU, not with {self.parallel.kind}; leave one of the two out"
            )
        if self.dtype.startswith("amp"):
            raise RequestError(
                f"a compiled step is estimated in float32, bfloat16 or float16, not with autocast ({self.dtype})"
            )
        changed = self._changed("checkpointing", "attention", "channels_last")
        self._refuse("is estimated of eager PyTorch alone; leave --compiled or it out", changed)

    def ways(self) -> list[str]:
        """The fields in which training differs from the plain loop, optimizer, dtype and number of GPUs left aside."""
        return self._changed(*(f.name for f in fields(self) if f.name not in {"optimizer", "dtype", "parallel"}))

    def _changed(self, *names: str) -> list[str]:
        """Those of `names` that are not as they are by default."""
        defaults: dict[str, Any] = {f.name: f.default for f in fields(self)}
        return [name for name in names if getattr(self, name) != defaults[name]]

    @staticmethod
    def _refuse(why: str, names: list[str]) -> None:
        if names:
            raise RequestError(f"{', '.join(names)} {why}")
