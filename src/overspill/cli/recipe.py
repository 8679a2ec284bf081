"""Options that say how a model is trained, and the recipe that they make; torch is not imported for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from overspill import models
from overspill.core.errors import RequestError
from overspill.estimation.parallel import KINDS, parallel_of
from overspill.estimation.recipe import ATTENTION, DTYPES, EIGHT_BIT, QUANTIZED, Recipe

from . import complete
from .common import Outcome

Dtype = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="float32, bfloat16, float16, amp (autocast in float16) or amp-bfloat16.",
        autocompletion=complete.constants(*DTYPES),
    ),
]
Inference = Annotated[bool, typer.Option("--inference", help="Run the model without gradients instead of training it.")]
Gpus = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="GPUs that train together; --batch is of each, but of pp of all.", show_default=False
    ),
]
Kind = Annotated[
    str | None,
    typer.Option(
        "--parallel",
        metavar="NAME",
        help="ddp, fsdp, horovod, tp (layers are cut), pp (stages of a pipeline), or zero1 to zero3 by torch's means.  [default: ddp with --gpus]",
        show_default=False,
        autocompletion=complete.constants(*KINDS, "zero1", "zero2", "zero3"),
    ),
]
Accumulate = Annotated[
    int, typer.Option(min=1, metavar="N", help="Micro-batches, of --batch samples each, that make a step.")
]
SetToNone = Annotated[
    bool,
    typer.Option("--set-to-none/--no-set-to-none", help="zero_grad gives gradients back, or fills them with zeros."),
]
Checkpointing = Annotated[
    bool, typer.Option("--checkpointing", help="Compute the blocks that the model repeats again in backward.")
]
Attention = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The only kernel of scaled_dot_product_attention: flash, efficient, math or cudnn.  [default: as CUDA chooses]",
        show_default=False,
        autocompletion=complete.constants(*ATTENTION),
    ),
]
ChannelsLast = Annotated[
    bool, typer.Option("--channels-last", help="Model and images in the memory format of that name.")
]

Optimizer = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="sgd, momentum, adam, adamw, adagrad, rmsprop, adafactor; of bitsandbytes adam8bit, adamw8bit and lion8bit, each "
        "also as paged-adam8bit.",
        autocompletion=complete.constants(*models.optimizer_names(), *EIGHT_BIT),
    ),
]
ParamDtype = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Of fsdp: the dtype of gathered parameters, as bfloat16.", show_default=False),
]
ReduceDtype = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Of fsdp: the dtype in which gradients are reduced.", show_default=False),
]
CpuOffload = Annotated[
    bool, typer.Option("--cpu-offload", help="Of fsdp: shards, their gradients and the optimizer are on the host.")
]
MicroBatches = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="M", help="Of pp: how many --batch is read in.  [default: as many as GPUs]", show_default=False
    ),
]
OffloadOptimizer = Annotated[
    bool, typer.Option("--offload-optimizer", help="The optimizer and its states are on the host.")
]
Lora = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="RANK", help="Train adapters beside linear layers, as peft has them; all else is frozen.",
        show_default=False,
    ),
]  # fmt: skip
Quantize = Annotated[
    str | None,
    typer.Option(
        metavar="BITS",
        help="4bit or 8bit: weights of linear layers as bitsandbytes has them.",
        show_default=False,
        autocompletion=complete.constants(*QUANTIZED),
    ),
]
CudnnBenchmark = Annotated[
    bool, typer.Option("--cudnn-benchmark", help="cuDNN tries its engines, as with torch.backends.cudnn.benchmark.")
]
Generate = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="With --inference: make N tokens, with a cache of keys and values.", show_default=False
    ),
]


def recipe_of(
    *,
    optimizer: Optimizer = "sgd",
    dtype: Dtype = "float32",
    inference: Inference = False,
    gpus: Gpus = None,
    parallel: Kind = None,
    accumulate: Accumulate = 1,
    set_to_none: SetToNone = True,
    checkpointing: Checkpointing = False,
    attention: Attention = None,
    channels_last: ChannelsLast = False,
    lora: Lora = None,
    quantize: Quantize = None,
    offload_optimizer: OffloadOptimizer = False,
    cudnn_benchmark: CudnnBenchmark = False,
    generate: Generate = None,
    param_dtype: ParamDtype = None,
    reduce_dtype: ReduceDtype = None,
    cpu_offload: CpuOffload = False,
    micro_batches: MicroBatches = None,
) -> Recipe:
    """What the options ask for. Raises RequestError."""
    if inference:  # which reads the name of an optimizer that it does not use
        Recipe(optimizer)
    shared = {
        "param_dtype": param_dtype, "reduce_dtype": reduce_dtype, "cpu_offload": cpu_offload, "micro_batches": micro_batches,
    }  # fmt: skip
    given = {name: value for name, value in shared.items() if value}
    together = parallel_of(parallel, gpus, **given)
    if generate and not inference:
        raise RequestError("--generate is for --inference; add that")
    if together is None and given:
        first = next(iter(given))
        kind = "pp" if first == "micro_batches" else "fsdp"
        raise RequestError(
            f"--{first.replace('_', '-')} is for {kind} on several GPUs; pass --parallel {kind} --gpus N"
        )
    return Recipe(
        None if inference else optimizer, dtype, accumulate, set_to_none, together, checkpointing, attention, channels_last,
        lora, quantize, offload_optimizer, cudnn_benchmark, generate or 0,
    )  # fmt: skip


def with_recipe(*without: str) -> Callable[[Callable[..., Outcome]], Callable[..., Outcome]]:
    """Give a command the options of `recipe_of`, those `without` aside, in the place of its argument `recipe`."""

    def decorate(command: Callable[..., Outcome]) -> Callable[..., Outcome]:
        options = {
            name: option
            for name, option in inspect.signature(recipe_of, eval_str=True).parameters.items()
            if name not in without
        }

        @wraps(command)
        def run(**given: Any) -> Outcome:
            recipe = recipe_of(**{name: given.pop(name) for name in options})
            return command(recipe=recipe, **given)

        # Typer reads the options off the signature.
        own = inspect.signature(command, eval_str=True)
        parameters = [
            each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in own.parameters.values()
            for each in (options.values() if parameter.name == "recipe" else [parameter])
        ]
        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def check_as_it_is(recipe: Recipe, whose: str) -> None:
    """Raise RequestError where a job that says by itself how it trains was asked to do so otherwise."""
    if ways := recipe.ways():
        options = ", ".join(f"--{name.replace('_', '-')}" for name in ways)
        raise RequestError(f"{options}: for a model, and {whose}; leave that out")
