"""How a job is trained or run, apart from the model, its batch and the GPU: the one place where that is said."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from overspill import models
from overspill.core.errors import RequestError

from .parallel import Parallel

if TYPE_CHECKING:  # the command line checks a recipe before it pays for torch
    from torch import Tensor
    from torch.optim import Optimizer

DTYPES = ("float32", "bfloat16", "float16", "amp", "amp-bfloat16")
EIGHT_BIT = {
    "adam8bit": (2, False), "adamw8bit": (2, False), "paged-adam8bit": (2, True), "paged-adamw8bit": (2, True),
    "lion8bit": (1, False), "paged-lion8bit": (1, True),
}  # fmt: skip
"""Optimizers of bitsandbytes: how many states an element has, and whether they are paged."""
QUANTIZED = ("4bit", "8bit")
ATTENTION = ("flash", "efficient", "math", "cudnn")

MakeOptimizer = Callable[[Iterable["Tensor"]], "Optimizer"]


@dataclass(frozen=True)
class Recipe:
    """How a job is trained; without an `optimizer` (a name, or a function of the parameters), how its model is run.

    `dtype` is float32, bfloat16, float16, amp (autocast in float16 with a GradScaler) or amp-bfloat16. `accumulate`
    micro-batches make a step. `set_to_none` is `zero_grad`'s. `parallel` says how several GPUs share the work.
    `checkpointing`: the repeated blocks of the model, or the modules of the classes named, are computed again in
    backward. `attention`: the only kernel that scaled_dot_product_attention may choose, one of ATTENTION.
    `channels_last`: model and images are in that memory format. `lora`: the rank of adapters beside linear layers, all
    else being frozen. `quantize`: linear layers have weights of 4bit or 8bit, as in bitsandbytes. `offload_optimizer`:
    its states are on the host. `cudnn_benchmark`: cuDNN tries its engines. `generate`: how many tokens a causal language
    model makes, with a cache of keys and values.
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
            _check_optimizer(self.optimizer)
        if self.dtype not in DTYPES:
            raise RequestError(f"unknown dtype {self.dtype!r}; dtypes: {', '.join(DTYPES)}")
        if self.accumulate < 1:
            raise RequestError(f"accumulate={self.accumulate} is not a positive number; give 1 or more")
        if self.attention is not None and self.attention not in ATTENTION:
            raise RequestError(f"unknown attention {self.attention!r}; kernels: {', '.join(ATTENTION)}")

        if self.lora is not None and self.lora < 1:
            raise RequestError(f"lora={self.lora} is not a positive rank; give one as 8 or 16")
        if self.quantize is not None and self.quantize not in QUANTIZED:
            raise RequestError(f"unknown bits quantize={self.quantize}; choices: {', '.join(QUANTIZED)}")
        if self.generate < 0:
            raise RequestError(f"generate={self.generate} is not a number of tokens; give 1 or more")
        self._check_together()

    def _check_together(self) -> None:
        """Refuse what no program does at once."""
        eight_bit = isinstance(self.optimizer, str) and self.optimizer in EIGHT_BIT
        sharded = self.parallel is not None and (self.parallel.kind == "fsdp" or self.parallel.shard_optimizer)
        if self.optimizer is not None and self.quantize and self.lora is None:
            raise RequestError(
                f"weights of {self.quantize} are not trained themselves; add lora=, or leave quantize= out"
            )
        if self.optimizer is not None and self.generate:
            raise RequestError("generate= is for inference; leave the optimizer out")
        if eight_bit and sharded:
            raise RequestError(
                f"{self.optimizer} keeps whole parameters' states, not those of shards; take adamw, or parameters that are not sharded"
            )
        if self.quantize and self.parallel is not None and self.parallel.kind == "fsdp":
            raise RequestError(f"weights of {self.quantize} are not sharded by fsdp here; take ddp, or leave one out")
        if self.parallel is not None and self.parallel.kind == "tp" and (self.quantize or self.lora):
            raise RequestError(
                "tp does not cut adapters and quantised weights here; leave lora= and quantize= out, or take ddp"
            )
        if self.parallel is not None and self.parallel.kind == "pp":
            self._check_pipeline(eight_bit=eight_bit)
        if self.offload_optimizer and sharded:
            raise RequestError("offload_optimizer= is for whole parameters; fsdp has cpu_offload= for sharded ones")
        if self.offload_optimizer and eight_bit:
            raise RequestError(f"{self.optimizer} runs on the GPU alone; take adamw, or leave offload_optimizer= out")
        if self.offload_optimizer and self.dtype == "amp":
            raise RequestError("offload_optimizer= has no GradScaler; take amp-bfloat16, or leave one out")

    def _check_pipeline(self, *, eight_bit: bool) -> None:
        changed = self._changed(
            "accumulate", "channels_last", "lora", "quantize", "offload_optimizer", "cudnn_benchmark"
        )
        self._refuse("not with pp here; leave that or pp out", changed)
        if eight_bit:
            raise RequestError(f"{self.optimizer} does not go with pp here; take adamw, or leave pp out")

    def micro_batch(self, batch: int) -> int:
        """How many samples the model reads at once of `batch`; what does not come out even is rounded up."""
        return batch if self.parallel is None else -(-batch // self.parallel.pieces)

    def check_batch(self, batch: int | None) -> None:
        """Raise RequestError for a batch that is not to be read in equal micro-batches."""
        pieces = 1 if self.parallel is None else self.parallel.pieces
        if pieces == 1:
            return
        if batch is None:
            raise RequestError(f"pass batch=: it is what {pieces} micro-batches have together")
        if batch % pieces:
            even = pieces * self.micro_batch(batch)
            raise RequestError(
                f"a batch of {batch} is no multiple of {pieces} micro-batches, as many as there are GPUs unless said; take "
                f"{even}, or another micro_batches="
            )

    def stages(self) -> list[Recipe]:
        """This recipe for each GPU that may need most: of a pipeline the first two stages and the last, else this alone.

        Between them is no stage that needs more than the second, which has more micro-batches under way.
        """
        parallel = self.parallel
        if parallel is None or parallel.kind != "pp":
            return [self]
        asked = sorted({0, min(1, parallel.gpus - 1), parallel.gpus - 1})
        return [replace(self, parallel=replace(parallel, stage=stage)) for stage in asked]

    def check_inference(self) -> None:
        """Raise RequestError where the model is only run, and the recipe has what only training has."""
        if self.parallel is not None and self.parallel.kind != "tp":
            raise RequestError(
                f"{self.parallel.kind} is for training; pass an optimizer, or estimate inference on one GPU"
            )
        changed = self._changed("accumulate", "set_to_none", "checkpointing", "lora", "offload_optimizer")
        self._refuse("only for training, and this is inference; leave one of the two out", changed)

    def check_compiled(self) -> None:
        """Raise RequestError for what is only estimated of eager PyTorch."""
        if self.parallel is not None:
            raise RequestError(
                f"a compiled step is estimated on one GPU, not with {self.parallel.kind}; leave one of the two out"
            )
        if self.dtype.startswith("amp"):
            raise RequestError(
                f"a compiled step is estimated in float32, bfloat16 or float16, not with autocast ({self.dtype}); take one of these"
            )
        changed = self._changed(
            "checkpointing", "attention", "channels_last", "lora", "quantize", "cudnn_benchmark", "generate"
        )
        self._refuse("estimated of eager PyTorch alone; leave out that or the compiled step", changed)

    def ways(self) -> list[str]:
        """The fields in which training differs from the plain loop, optimizer, dtype and number of GPUs left aside."""
        return self._changed(*(f.name for f in fields(self) if f.name not in {"optimizer", "dtype", "parallel"}))

    def said(self) -> str:
        """All of it in words, and what batch and bytes are of where several GPUs take part."""
        by = self.optimizer if isinstance(self.optimizer, str) else getattr(self.optimizer, "__name__", "an optimizer")
        parts = ["run without gradients" if self.optimizer is None else f"trained by {by}", f"in {self.dtype}"]
        for name in self.ways():
            value = getattr(self, name)
            word = name.replace("_", " ")
            parts.append(f"no {word}" if value is False else word if value is True else f"{word} {value}")
        if self.parallel is not None:
            kind, of = self.parallel.kind, "batch and bytes are of each GPU"
            if kind == "pp":
                of = "the batch is of all, bytes are of the GPU that needs most"
            parts.append(f"{kind} over {self.parallel.gpus} GPUs: {of}")
        return ", ".join(parts)

    def _changed(self, *names: str) -> list[str]:
        """Those of `names` that are not as they are by default."""
        defaults: dict[str, Any] = {f.name: f.default for f in fields(self)}
        return [name for name in names if getattr(self, name) != defaults[name]]

    @staticmethod
    def _refuse(why: str, names: list[str]) -> None:
        if names:
            raise RequestError(f"{', '.join(f'{name}=' for name in names)}: {why}")


def _check_optimizer(name: str) -> None:
    known = (*models.optimizer_names(), *EIGHT_BIT)
    if name not in known:
        raise RequestError(f"unknown optimizer {name!r}; optimizers: {', '.join(known)}")
