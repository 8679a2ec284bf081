"""The Job: what is trained and how, for every command and function.

Importing this does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import partial, update_wrapper
from inspect import signature
from typing import TYPE_CHECKING, Any

from overspill import models
from overspill.core.errors import RequestError
from overspill.core.registry import did_you_mean
from overspill.models import DTYPES, BuiltModel, is_eight_bit

from .model import GivenModel, NamedModel, Script
from .parallel import Parallel
from .source import Source
from .ways import COMPILED, INFERENCE, PIPELINE, check_values, refused_in, way, ways_of

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
"""What people write for a dtype."""
_OF_WEIGHTS = ("lora", "lora_targets", "lora_dropout", "quantize", "upcast")
"""Options that say which weights a model has."""
MakeOptimizer = Callable[[Iterable["Tensor"]], "Optimizer"]


@dataclass(frozen=True)
class GradientOptions:
    """Gradient accumulation and gradient clipping of one training step."""

    accumulate: int = 1
    """The number of micro-batches."""
    clip_norm: float | None = None
    """The norm that all gradients together are clipped to; None: no clipping."""
    clip_value: float | None = None
    """The largest absolute value that each gradient element is clipped to; None: no clipping."""

    def __post_init__(self) -> None:
        """Raise RequestError for values out of range."""
        ways = ways_of(Job)
        check_values({f.name: ways[f.name] for f in fields(self)}, self)


@dataclass(frozen=True)
class Job:
    """A model, its batch, and how it is trained or run.

    Each `way` describes itself.
    """

    model: Callable[[], BuiltModel] | NamedModel | GivenModel | Script | Source
    """Builds the model again, with weights and data that follow from the seed.

    Or it is a Script or a Source (another framework's file), which themselves determine all that is not in their
    `fields`.
    """
    batch: int | None = None
    """Samples that are read at once; `accumulate` such micro-batches make a step.

    For a pipeline it is all that its stages read in a step.
    """
    optimizer: str | MakeOptimizer | None = "sgd"
    """Its name, or a function of the parameters; None: the model is only run."""
    dtype: str = "float32"
    """float32, bfloat16, float16, amp (autocast in float16 with a GradScaler) or amp-bfloat16."""
    parallel: Parallel | None = None
    """How several GPUs share the work; None: one GPU."""
    accumulate: int = way(
        int, 1, "Micro-batches, of --batch samples each, that make a step.", COMPILED, metavar="N", positive=True
    )
    clip_norm: float | None = way(
        float, None, "Clip gradients to this norm of all.", COMPILED, metavar="X", positive=True
    )
    clip_value: float | None = way(
        float, None, "Clip each number of gradients to ±X.", COMPILED, metavar="X", positive=True
    )
    set_to_none: bool = way(
        bool, True, "zero_grad frees gradients, or fills them with zeros.", PIPELINE, COMPILED,
        flag="--set-to-none/--no-set-to-none",
    )  # fmt: skip
    checkpointing: bool | tuple[str, ...] = way(
        bool, False, "Recompute the model's repeated blocks in backward.", PIPELINE
    )
    """Or the names of the classes whose modules are computed again."""
    reentrant: bool | None = way(
        bool, None, "Of --checkpointing: as in transformers before 5.  [default: not reentrant]",
        flag="--reentrant/--no-reentrant",
    )  # fmt: skip
    attention: str | None = way(
        str, None,
        "Attention's kernel: flash, efficient, math, cudnn or (transformers) eager.  [default: as CUDA chooses]",
        INFERENCE, PIPELINE, metavar="NAME", choices=("flash", "efficient", "math", "cudnn", "eager"),
    )  # fmt: skip
    channels_last: bool = way(bool, False, "Model and images in torch.channels_last.", INFERENCE)
    lora: int | None = way(
        int, None,
        "LoRA: train adapters of this rank, as by peft.",
        metavar="RANK", positive=True
    )  # fmt: skip
    lora_targets: str | None = way(
        str, None,
        "Layers that --lora adapts: q_proj,v_proj or all-linear.  [default: peft's]",
        metavar="NAMES",
    )  # fmt: skip
    lora_dropout: float = way(float, 0.0, "Dropout of --lora.", metavar="P")
    quantize: str | None = way(
        str, None,
        "bitsandbytes' weights: 4bit (as QLoRA), 4bit-single, 8bit.  [default: as the model's configuration says]",
        INFERENCE, metavar="BITS", choices=("4bit", "4bit-double", "4bit-single", "8bit"), trained=False,
    )  # fmt: skip
    upcast: bool | None = way(
        bool, None,
        "Of --quantize: all else is float32, as by peft.  [default: it is]",
        flag="--upcast/--no-upcast", trained=False,
    )  # fmt: skip
    shift_logits: bool | None = way(
        bool, None,
        "The loss copies logits, as in transformers before 4.50.  [default: it does not]",
        flag="--shift-logits/--no-shift-logits",
    )  # fmt: skip
    loss_chunks: int | None = way(
        int, None,
        "Output layer and loss in N chunks of tokens.",
        metavar="N", positive=True,
    )  # fmt: skip
    objective: str | None = way(
        str, None,
        "Train by preferences, with a frozen reference: dpo (a sample is a pair) or grpo.",
        metavar="NAME", choices=("dpo", "grpo"),
    )  # fmt: skip
    keep_outputs: bool | None = way(
        bool, None,
        "Outputs live until the next step, as in `out = model(…)`.  [default: they do not]",
        flag="--keep-outputs/--no-keep-outputs", trained=False,
    )  # fmt: skip
    offload_optimizer: bool = way(bool, False, "Optimizer, state and update on the host.", COMPILED, trained=False)
    cudnn_benchmark: bool = way(
        bool, False, "cuDNN tries its engines, as with torch.backends.cudnn.benchmark.", INFERENCE, trained=False
    )
    generate: int = way(
        int,
        0,
        "With --inference: make N tokens, with a cache of keys and values.",
        INFERENCE,
        metavar="N",
        trained=False,
    )

    def __post_init__(self) -> None:
        """Raise RequestError, in one line, for unknown or contradictory options."""
        if (said := self._configured) and self.quantize is None:
            object.__setattr__(self, "quantize", said.kind)
        # Each option by itself.
        if self.batch is not None and self.batch < 1:
            raise RequestError(f"batch={self.batch} is not a positive number; give 1 or more", fields=["batch"])
        if (groups := getattr(self.optimizer, "param_groups", None)) is not None:
            object.__setattr__(self, "optimizer", _as_maker(self.optimizer, groups))
        if isinstance(self.optimizer, str):
            object.__setattr__(self, "optimizer", models.check_optimizer(self.optimizer))
        dtype = str(self.dtype).lower().removeprefix("torch.")  # it may be torch's own
        object.__setattr__(self, "dtype", _SHORT.get(dtype, dtype))
        if self.dtype not in DTYPES:
            hint = did_you_mean(self.dtype, DTYPES)
            raise RequestError(f"unknown dtype {self.dtype!r}{hint} Dtypes: {', '.join(DTYPES)}", fields=["dtype"])
        check_values(ways_of(self), self)
        if self.generate < 0:
            raise RequestError(
                f"generate={self.generate} is not a number of tokens; give 1 or more", fields=["generate"]
            )
        # Options together, and those that a script or another framework decides.
        self._check_together()
        if isinstance(self.model, (Script, Source)):
            others = (f.name for f in fields(self) if f.name not in self.model.fields | {"model"})
            refuse(self.model.refusal, self.changed(*others))

    @property
    def name(self) -> str:
        """The model's name, as the user gave it."""
        return getattr(self.model, "typed", "") or getattr(self.model, "name", "model")

    @property
    def allocator(self) -> str:
        """The name of its framework's own allocator."""
        return self.model.allocator if isinstance(self.model, Source) else "pytorch"

    def request(self) -> dict[str, Any]:
        """Return the requested model, batch, optimizer and dtype, for JSON output."""
        own = isinstance(self.model, Script)  # which says neither
        return {
            "model": self.name,
            "batch": self.batch,
            "optimizer": None if own else self.optimizer,
            "dtype": None if own else self.dtype,
        }

    @property
    def trains(self) -> bool:
        """Whether it has a backward pass: with an optimizer, or with a loss that the user gave."""
        return self.optimizer is not None or getattr(self.model, "loss", None) is not None

    @property
    def fine_tunes(self) -> bool:
        """Whether it trains a model of transformers."""
        return self.trains and isinstance(self.model, NamedModel) and self.model.name.startswith("hf:")

    @property
    def gradients(self) -> GradientOptions:
        """How a step accumulates and clips gradients."""
        return GradientOptions(self.accumulate, self.clip_norm, self.clip_value)

    @property
    def eight_bit(self) -> bool:
        """Whether the optimizer is one of bitsandbytes."""
        return isinstance(self.optimizer, str) and is_eight_bit(self.optimizer)

    @property
    def _configured(self) -> models.Quantization | None:
        return (
            models.quantization_of(self.model.name)
            if isinstance(self.model, NamedModel) and self.model.name[:3] == "hf:"
            else None
        )

    @property
    def quantization(self) -> models.Quantization | None:
        """How weights are quantised, by `quantize` or by the model's configuration."""
        return self._configured or (models.Quantization(self.quantize) if self.quantize else None)

    def build(self) -> BuiltModel:
        """Return a new model with its batches and its loss."""
        assert not isinstance(self.model, (Script, Source))
        if self.objective is None:
            return self.model()
        from .prepare.objectives import with_objective  # noqa: PLC0415 - it imports torch

        return with_objective(self.model(), self.objective)

    def make_optimizer(self, parameters: Iterable[Tensor]) -> Optimizer:
        """Return the optimizer for `parameters`; a job for inference has none."""
        make = self.optimizer
        assert make is not None
        return (models.optimizer_named(make) if isinstance(make, str) else make)(parameters)

    def _check_together(self) -> None:
        """Raise RequestError for options that do not work together."""
        parallel, said = self.parallel, self._configured
        kind = None if parallel is None else parallel.kind
        sharded = parallel is not None and (kind == "fsdp" or parallel.shard_optimizer)
        first_of(
            # Training or inference.
            (said and self.quantize != said.kind, ["quantize", "model"],
             (f"quantize={self.quantize}: the model's quantization_config says {said and said.kind}; leave quantize= "
              "out")),
            (self.trains and self.quantize and self.lora is None, ["quantize", "lora"],
             (f"weights of {self.quantize} are not trained themselves; add lora=, or leave quantize= out (or "
              "quantization_config)")),
            (self.lora is None and (self.lora_targets or self.lora_dropout),
             ["lora", *self.changed("lora_targets", "lora_dropout")],
             (f"{' and '.join(f'{name}=' for name in self.changed('lora_targets', 'lora_dropout'))}: of adapters; add "
              "lora=")),
            (self.reentrant is not None and not self.checkpointing, ["reentrant", "checkpointing"],
             "reentrant= is of checkpoints; add checkpointing=, or leave it out"),
            (self.quantize is None and self.upcast is not None, ["upcast", "quantize"],
             "upcast= is of what is not quantised; add quantize=, or leave it out"),
            (self.loss_chunks and self.shift_logits, ["loss_chunks", "shift_logits"],
             "a loss in chunks never has all logits, which the other copies; leave one of the two out"),
            (self.objective and (self.parallel is not None or self.loss_chunks),
             ["objective", *self.changed("parallel", "loss_chunks")],
             "objective= is of one GPU here, with all logits at once; leave parallel= and loss_chunks= out"),
            (not 0 <= self.lora_dropout < 1, ["lora_dropout"],
             f"lora_dropout={self.lora_dropout} is no probability; give 0 or more, and less than 1"),
            (self.trains and self.generate, ["generate", "optimizer"],
             "generate= is for inference; leave the optimizer out"),
            # Optimizers and weights on several GPUs.
            (self.eight_bit and sharded, ["optimizer", "parallel"],
             (f"{self.optimizer} keeps whole parameters' states, not those of shards; take adamw, or parameters that "
              "are not sharded")),
            (self.quantize and kind == "fsdp", ["quantize", "parallel"],
             f"weights of {self.quantize} are not sharded by fsdp here; take ddp, or leave one out"),
            (kind == "tp" and (self.quantize or self.lora or self.loss_chunks),
             ["parallel", *self.changed("quantize", "lora", "loss_chunks")],
             "tp does not cut adapters, quantised weights and losses in chunks here; leave these out, or take ddp"),
        )  # fmt: skip
        if kind == "pp":
            refuse("not with pp here; leave that or pp out", self.changed(*refused_in(PIPELINE, self)))
        first_of(
            (kind == "pp" and self.eight_bit, ["optimizer", "parallel"],
             f"{self.optimizer} does not go with pp here; take adamw, or leave pp out"),
            # An optimizer on the host.
            (self.offload_optimizer and sharded, ["offload_optimizer", "parallel"],
             "offload_optimizer= is for whole parameters; fsdp has cpu_offload= for sharded ones"),
            (self.offload_optimizer and self.eight_bit, ["offload_optimizer", "optimizer"],
             f"{self.optimizer} runs on the GPU alone; take adamw, or leave offload_optimizer= out"),
            (self.offload_optimizer and self.dtype == "amp", ["offload_optimizer", "dtype"],
             "offload_optimizer= has no GradScaler; take amp-bfloat16, or leave one out"),
        )  # fmt: skip

    def micro_batch(self, batch: int | None) -> int | None:
        """Return the samples of `batch` that the model reads at once, rounded up."""
        return batch if batch is None or self.parallel is None else -(-batch // self.parallel.pieces)

    def check_batch(self) -> None:
        """Raise RequestError if micro-batches do not divide the batch."""
        pieces = 1 if self.parallel is None else self.parallel.pieces
        if pieces == 1:
            return
        if self.batch is None:
            raise RequestError(f"pass batch=: it is what {pieces} micro-batches have together", fields=["batch"])
        if self.batch % pieces:
            even = pieces * -(-self.batch // pieces)
            raise RequestError(
                f"a batch of {self.batch} is no multiple of {pieces} micro-batches, as many as there are GPUs unless "
                "said; take "
                f"{even}, or another micro_batches=",
                fields=["batch", "parallel"],
            )

    def stages(self) -> list[Job]:
        """Return this job for each GPU that may need most memory.

        For a pipeline these are the first two stages and the last, otherwise this job alone. No stage between them
        needs more than the second, which has more micro-batches in flight.
        """
        parallel = self.parallel
        if parallel is None or parallel.kind != "pp":
            return [self]
        asked = sorted({0, min(1, parallel.gpus - 1), parallel.gpus - 1})
        return [replace(self, parallel=replace(parallel, stage=stage)) for stage in asked]

    def check_inference(self) -> None:
        """Raise RequestError for training options in a job for inference."""
        if self.parallel is not None and self.parallel.kind != "tp":
            raise RequestError(
                f"{self.parallel.kind} is for training; pass an optimizer, or estimate inference on one GPU",
                fields=["parallel", "optimizer"],
            )
        changed = self.changed(*refused_in(INFERENCE, self))
        refuse("only for training, and this is inference; leave one of the two out", changed)

    def check_compiled(self) -> None:
        """Raise RequestError for options that only eager estimates support."""
        if self.parallel is not None:
            raise RequestError(
                f"a compiled step is estimated on one GPU, not with {self.parallel.kind}; leave one of the two out",
                fields=["parallel"],
            )
        if self.dtype.startswith("amp"):
            raise RequestError(
                f"a compiled step is estimated in float32, bfloat16 or float16, not with autocast ({self.dtype}); take "
                "one of these",
                fields=["dtype"],
            )
        changed = self.changed(*refused_in(COMPILED, self))
        refuse("estimated of eager PyTorch alone; leave out that or the compiled step", changed)

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped."""
        return self.clip_norm is not None or self.clip_value is not None

    @property
    def keeps_gradients(self) -> bool:
        """Whether backward adds to gradients that exist already."""
        return self.accumulate > 1 or not self.set_to_none

    def check_planned(self, *, whole_step: bool = False) -> None:
        """Raise RequestError for a job that Overspill cannot plan."""
        several = self.parallel
        kind = None if several is None else several.kind
        first_of(
            (isinstance(self.model, Source), ["model"],
             f"{self.name}: a job of another framework is estimated and not planned; name a model"),
            # A plan is of one GPU's training step in a steady state.
            (not self.trains or self.optimizer is None, ["optimizer"],
             "a plan is of a training step, and this is inference; give an optimizer in place of it"),
            (self.dtype == "amp", ["dtype"],
             "amp scales the loss by a GradScaler, which is not planned; amp-bfloat16 takes the same bytes beside it"),
            (kind not in (None, "fsdp"), ["parallel"],
             (f"parallel={kind}: plans are of one GPU's step, alone or with fsdp; take fsdp, leave it out, or estimate "
              "it")),
            (several is not None and several.replicas > 1, ["parallel"],
             "replicas=: a plan has one group of shards; leave replicas out, or estimate it"),
            (several is not None and several.cpu_offload, ["parallel"],
             "cpu_offload=: a plan offloads what the budget asks for; leave cpu_offload out"),
            (several is not None and self.accumulate > 1, ["parallel", "accumulate"],
             "accumulate=: a step with fsdp is planned with one micro-batch; leave accumulate out"),
            (self.offload_optimizer, ["offload_optimizer"],
             "offload_optimizer=: a plan moves the optimizer's state with whole_step=; take that in its place"),
            (self.keep_outputs, ["keep_outputs"],
             "keep_outputs=: a planned loop gives a step's outputs up; leave it out, or estimate it"),
            (self.reentrant, ["reentrant"],
             "reentrant=: what a plan computes again, it does without reentrance; leave it out"),
            (self.cudnn_benchmark, ["cudnn_benchmark"],
             "cudnn_benchmark=: its trials are in the first step, and a plan is of a later one; leave it out"),
            # A plan of the whole step also runs the updates.
            (whole_step and not self.set_to_none, ["set_to_none"],
             "set_to_none=False: a step with whole_step= gives gradients back; leave one of the two out"),
            (whole_step and self.eight_bit, ["optimizer"],
             f"optimizer={self.optimizer}: whole_step= runs updates of torch.optim alone; leave one of the two out"),
        )  # fmt: skip

    def check_trained(self, *, whole_step: bool = False) -> None:
        """Raise RequestError for a job that cannot be trained here.

        A job with 4-bit or 8-bit weights or optimizers, which bitsandbytes computes, is planned but not trained.
        """
        first_of(
            (self.parallel is not None, ["parallel"],
             ("one GPU trains here; several train by your script with overspill.train_step, of a model in "
              "fully_shard")),
        )  # fmt: skip
        self.check_planned(whole_step=whole_step)
        first_of(
            (isinstance(self.model, Script), ["model"],
             f"script='{self.name}': estimated and planned, not trained; run it by python, or name a model"),
            (self.quantize, ["quantize"],
             (f"quantize={self.quantize}: estimated and planned, not trained, for its values are bitsandbytes'; leave "
              "it (or quantization_config) out")),
            (self.eight_bit, ["optimizer"],
             (f"optimizer={self.optimizer}: estimated and planned, not trained, for its updates are bitsandbytes'; "
              "take adamw")),
        )  # fmt: skip

    def titled(self, *, whole_step: bool = False, of_last: bool = False) -> str:
        """Return the job in words, for the title of whatever is said of it.

        It names the model as the user gave it, its batch and tokens, dtype, adapters, quantisation and optimizer, then
        several GPUs, the whole step if that is planned, and what else differs from the plain loop; also whether figures
        are `of_last` micro-batch, if there are several.
        """
        if isinstance(self.model, Script):
            parts = [
                f"{self.name}, a recorded step that is not run so: tensors are swapped, nothing is computed again,"
            ]
        else:
            by = self.optimizer if isinstance(self.optimizer, str) else getattr(self.optimizer, "__name__", "optimizer")
            parts = [self.name, *([] if self.batch is None else [f"batch {self.batch}"])]
            parts += self.model.sizes if isinstance(self.model, NamedModel) else []
            first = [name for name in self.ways() if name in _OF_WEIGHTS]
            parts += [self.dtype, *map(self._way, first), "inference" if self.optimizer is None else by]
        if self.parallel is not None:
            parts.append(str(self.parallel))
        if whole_step:
            parts.append("whole step")
        worded = {
            "accumulate": f"{self.accumulate} micro-batches",
            "clip_norm": f"gradients clipped to norm {self.clip_norm:g}" if self.clip_norm else "",
            "clip_value": f"gradients clipped to ±{self.clip_value:g}" if self.clip_value else "",
        }
        parts += [worded.get(name) or self._way(name) for name in self.ways() if name not in _OF_WEIGHTS]
        parts += ["figures of the last micro-batch"] * (of_last and self.accumulate > 1)
        return ", ".join(parts)

    @property
    def planned_part(self) -> str:
        """What the figures of one planned step are of, in words."""
        return "a step" if self.accumulate == 1 else f"the last of {self.accumulate} micro-batches"

    def ways(self) -> list[str]:
        """Return the fields that differ from the plain loop, without optimizer, dtype and number of GPUs."""
        plain = {"model", "batch", "optimizer", "dtype", "parallel"}
        return self.changed(*(f.name for f in fields(self) if f.name not in plain))

    def _way(self, name: str) -> str:
        """Return an option that differs from the plain loop, in words."""
        value, word = getattr(self, name), name.replace("_", " ")
        return f"no {word}" if value is False else word if value is True else f"{word} {value}"

    def changed(self, *names: str) -> list[str]:
        """Return those of `names` whose fields differ from their defaults."""
        defaults: dict[str, Any] = {f.name: f.default for f in fields(self)}
        return [name for name in names if getattr(self, name) != defaults[name]]


def refuse(why: str, names: list[str]) -> None:
    """Raise RequestError with the reason `why` if `names` of fields are given."""
    if names:
        raise RequestError(f"{', '.join(f'{name}=' for name in names)}: {why}", fields=names)


def first_of(*rules: tuple[object, Iterable[str], str]) -> None:
    """Raise RequestError for the first of `rules` that holds: whether it does, its fields, and its message."""
    for holds, names, why in rules:
        if holds:
            raise RequestError(why, fields=names)


def _as_maker(optimizer: Any, groups: list[dict[str, Any]]) -> MakeOptimizer:
    """Return a function that makes an optimizer as the instance `optimizer` is. Raises RequestError."""
    if len(groups) > 1:
        raise RequestError(
            "the optimizer has several groups of parameters, and which are which is not known here; pass a function of "
            "the parameters that makes it",
            fields=["optimizer"],
        )
    kind: Callable[..., Optimizer] = type(optimizer)
    settings = {key: groups[0][key] for key in optimizer.defaults if key in groups[0]}
    accepted = signature(kind).parameters
    made: MakeOptimizer = partial(kind, **{key: value for key, value in settings.items() if key in accepted})
    update_wrapper(made, kind, ("__name__",), ())
    return made


def job_of(
    build: str | nn.Module | Callable[[], nn.Module],
    inputs: Any,
    loss: Callable[..., Tensor] | None,
    batch: int | None,
    optimizer: str | MakeOptimizer | None, **how: Any,
) -> Job:  # fmt: skip
    """Return the job of a built-in model's name or of a module. Raises RequestError.

    If `batch` is None, it is that of the inputs.
    """
    if not isinstance(build, str):
        given = GivenModel(build, inputs, loss)
        if inputs is None and batch is None:
            raise RequestError(
                f"pass inputs: the tensors that the model reads; or batch=, where {given.name} returns what makes them"
            )
        return Job(given, batch or given.batch, optimizer, **how)
    if inputs is not None or loss is not None:
        raise RequestError(f"{build} has its own inputs and loss; pass a module or a function to choose them")
    return Job(NamedModel(models.checked_name(build), typed=build), batch, optimizer, **how)
