"""Options that describe what is trained and how, and the Job that they make.

They are the same for every command. Nothing here imports torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from overspill import models
from overspill.core.errors import RequestError
from overspill.job import Job, NamedModel, Script
from overspill.job.parallel import KINDS, Parallel, parallel_of
from overspill.job.source import Source
from overspill.job.ways import Way, ways_of
from overspill.models import DTYPES

from . import complete
from .common import Outcome, optional
from .narrator import tell_once

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL",
        help="A name of `overspill models` or the Hub, hf:config.json, or package.module:callable.",
        show_default=False,
        autocompletion=complete.model,
    ),
]
Batch = Annotated[int | None, optional("N", "Samples in a step (in a micro-batch; on each GPU).", min=1)]
ScriptFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Your training script as it is; its arguments behind `--`.",
        show_default=False,
    ),
]  # fmt: skip
Iterations = Annotated[int | None, optional("N", "Steps of the script to run.  [default: 3]", min=1)]
TimeLimit = Annotated[float | None, optional("SECONDS", "When the script is ended at the latest.  [default: 600]")]
AllowWrites = Annotated[
    bool, typer.Option("--allow-writes", help="Let the script change files; else changes are thrown away.")
]
Small = Annotated[bool, typer.Option("--small", help="A small configuration: few channels, small inputs.")]
ImageSize = Annotated[int | None, optional("N", "Height and width of the images.", min=1)]
SeqLen = Annotated[int | None, optional("N", "Tokens in a sequence.", min=1)]
MxnetFile = Annotated[Path | None, optional("FILE", "A symbol file of MXNet, as MXNet trains it.", "--mxnet")]
TensorflowCallable = Annotated[
    str | None, optional("MODULE:CALLABLE", "Returns a Keras model, or a step and its tf.TensorSpecs.", "--tensorflow")
]
OnnxFile = Annotated[Path | None, optional("FILE", "A model of ONNX, run and trained as MXNet would.", "--onnx")]
InputShapes = Annotated[
    list[str] | None, optional("NAME=SHAPE", "An input of --mxnet or --onnx: data=N,3,224,224. Repeatable.", "--input")
]
Dtype = Annotated[
    str | None,
    optional(
        "NAME",
        "float32, bfloat16, float16, or autocast: amp, amp-bfloat16.  [default: float32]",
        autocompletion=complete.constants(*DTYPES),
    ),
]
Inference = Annotated[bool, typer.Option("--inference", help="Run the model without gradients.")]
Gpus = Annotated[int | None, optional("N", "GPUs that train together.", min=1)]
Kind = Annotated[
    str | None,
    optional(
        "NAME",
        ("ddp, fsdp, horovod, tp, pp, zero1, zero2 or zero3.  [default: ddp with --gpus]"),
        "--parallel",
        autocompletion=complete.constants(*KINDS, "zero1", "zero2", "zero3"),
    ),
]
Optimizer = Annotated[
    str | None,
    optional(
        "NAME",
        f"{', '.join(models.optimizer_names())}.  [default: sgd]",
        autocompletion=complete.constants(*models.optimizer_names()),
    ),
]
ParamDtype = Annotated[str | None, optional("NAME", "Of fsdp: the dtype of gathered parameters.")]
ReduceDtype = Annotated[str | None, optional("NAME", "Of fsdp: the dtype in which gradients are reduced.")]
CpuOffload = Annotated[
    bool, typer.Option("--cpu-offload", help="Of fsdp: shards, gradients and optimizer on the host.")
]
MicroBatches = Annotated[int | None, optional("M", "Of pp: micro-batches of --batch.  [default: one per GPU]", min=1)]


def _option(name: str, said: Way) -> inspect.Parameter:
    """Return the option of a training setting."""
    option = typer.Option(
        said.flag or f"--{name.replace('_', '-')}", metavar=said.metavar, help=said.help,
        show_default=bool(said.default),
        min=1 if said.positive and said.kind is int else None,
        autocompletion=complete.constants(*said.choices) if said.choices else None,
    )  # fmt: skip
    kind = said.kind | None if said.default is None else said.kind
    annotation = Annotated[kind, option]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=said.default, annotation=annotation)


def _with_ways(function: Callable[..., Job]) -> Callable[..., Job]:
    """Replace the last argument of `function` by one argument for each training setting."""
    own = inspect.signature(function, eval_str=True)
    ways = [_option(name, said) for name, said in ways_of(Job).items()]
    function.__signature__ = own.replace(parameters=[*own.parameters.values()][:-1] + ways)  # type: ignore[attr-defined]
    return function


@_with_ways
def job_of(
    *,
    words: Words = None,
    batch: Batch = None,
    optimizer: Optimizer = None,
    dtype: Dtype = None,
    small: Small = False,
    image_size: ImageSize = None,
    seq_len: SeqLen = None,
    script: ScriptFile = None,
    iterations: Iterations = None,
    time_limit: TimeLimit = None,
    allow_writes: AllowWrites = False,
    mxnet: MxnetFile = None,
    tensorflow: TensorflowCallable = None,
    onnx: OnnxFile = None,
    shapes: InputShapes = None,
    inference: Inference = False,
    gpus: Gpus = None,
    parallel: Kind = None,
    param_dtype: ParamDtype = None,
    reduce_dtype: ReduceDtype = None,
    cpu_offload: CpuOffload = False,
    micro_batches: MicroBatches = None,
    **ways: Any,
) -> Job:
    """Return the job that the options request. Raises RequestError."""
    # What stands on the command line, with the default's value too: it is refused where it says nothing.
    said = _given(optimizer=optimizer, dtype=dtype)
    how_long = _given(iterations=iterations, time_limit=time_limit, allow_writes=allow_writes or None)
    fields: dict[str, Any] = {
        "parallel": _parallel(
            parallel, gpus, param_dtype=param_dtype, reduce_dtype=reduce_dtype, cpu_offload=cpu_offload,
            micro_batches=micro_batches,
        ),
    } | said | _trained_by(optimizer, inference=inference) | ways  # fmt: skip
    if ways.get("generate") and not inference:
        raise RequestError("--generate is for --inference; add that")
    sized = small or image_size is not None or seq_len is not None
    source = Source.of({"mxnet": mxnet, "tensorflow": tensorflow, "onnx": onnx}, shapes or ())
    if script is not None:
        if source is not None:
            raise RequestError(f"one job at a time, not --script and --{source.framework}; leave one out")
        if inference or sized:
            raise RequestError(
                "--inference, --small, --image-size and --seq-len are a model's, and a script has its own; leave them "
                "out"
            )
        if said:
            raise RequestError(f"--{next(iter(said))}: {Script.refusal}")
        return Job(Script(str(script), tuple(words or ()), tell=_note, **how_long), batch, **fields)
    if how_long:
        raise RequestError("--iterations, --time-limit and --allow-writes are for --script; leave them out")
    if source is not None:
        if words or sized:
            raise RequestError(
                f"--{source.framework} is a job of its own: leave out MODEL, --small, --image-size and --seq-len"
            )
        return Job(source, _batch(batch), **fields)
    typed = _one_model(words)
    return Job(
        NamedModel(models.checked_name(typed), small, image_size, seq_len, tell_once, typed), _batch(batch), **fields
    )


def _trained_by(optimizer: str | None, *, inference: bool) -> dict[str, Any]:
    """Return the job's optimizer, if it is not the default.

    Raises RequestError for an unknown optimizer, or one next to `inference`.
    """
    if optimizer is not None:
        models.check_optimizer(optimizer)
        if inference:
            raise RequestError(
                f"--inference runs a model without gradients, and --optimizer {optimizer} trains it; leave one of the "
                "two out"
            )
    return {"optimizer": None} if inference else _given(optimizer=optimizer)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _batch(batch: int | None) -> int:
    if batch is None:
        raise RequestError("say how many samples make a step; for instance --batch 32")
    return batch


def _note(text: str) -> None:
    tell_once(f"note: {text}")


def _one_model(words: list[str] | None) -> str:
    if not words:
        raise RequestError("name a model, as `overspill models` lists them; or a script with --script")
    if len(words) > 1:
        raise RequestError(f"one model at a time, not {' '.join(words)}; name one, and options with -- before them")
    return words[0]


def _parallel(kind: str | None, gpus: int | None, **options: Any) -> Parallel | None:
    """Return how several GPUs share the work."""
    given = {name: value for name, value in options.items() if value}
    together = parallel_of(kind, gpus, **given)
    if together is None and given:
        first = next(iter(given))
        of = "pp" if first == "micro_batches" else "fsdp"
        raise RequestError(f"--{first.replace('_', '-')} is for {of} on several GPUs; pass --parallel {of} --gpus N")
    return together


def with_job(*without: str, **defaults: Any) -> Callable[[Callable[..., Outcome]], Callable[..., Outcome]]:
    """Replace the argument `job` of a command by the options of `job_of`, except those `without`.

    `defaults` are values of options that the user may leave out here.
    """

    def decorate(command: Callable[..., Outcome]) -> Callable[..., Outcome]:
        options = {
            name: option
            for name, option in inspect.signature(job_of, eval_str=True).parameters.items()
            if name not in without
        }

        @wraps(command)
        def run(**given: Any) -> Outcome:
            said = {name: given.pop(name) for name in options}
            if said["script"] is None:
                said |= {name: value for name, value in defaults.items() if said[name] is None}
            return command(job=job_of(**said), **given)

        # Typer reads the options off the signature.
        own = inspect.signature(command, eval_str=True)
        parameters = [
            each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in own.parameters.values()
            for each in (options.values() if parameter.name == "job" else [parameter])
        ]
        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate
