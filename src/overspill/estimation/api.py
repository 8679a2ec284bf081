"""`overspill.estimate`: from a model, its inputs and its optimizer to an Estimate."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from overspill.capture.recording.recording import Recording
from overspill.capture.virtual_gpu.gpu import VirtualGpu
from overspill.capture.virtual_gpu.record import record
from overspill.core import Device
from overspill.core.errors import RequestError
from overspill.costs import capability_of
from overspill.costs.releases import software_named
from overspill.costs.scratch import Software
from overspill.devices import load_device
from overspill.job import Job, MakeOptimizer, Parallel, job_of
from overspill.placement.allocators.caching_config import CachingConfig, text_of_environment
from overspill.placement.allocators.registry import allocator_type

from .advice import Retrace
from .estimate import Estimate
from .programs import ITERATIONS, program_of, recorded
from .scaling import Scaling

DEFAULT_DEVICE = "a100-80gb"


@dataclass(frozen=True)
class Setting:
    """The device, allocator and software of an estimate."""

    device: Device
    allocator: str = "pytorch"
    allocator_config: Any = None
    software: Software = field(default_factory=Software)

    @classmethod
    def of(
        cls, device: str | Device = DEFAULT_DEVICE, allocator: str = "pytorch", allocator_config: Any = None,
        torch: str | None = None, cuda: str | None = None,
    ) -> Setting:  # fmt: skip
        """Return the setting named by the user, with the releases `torch` and `cuda` (default: the installed ones).

        PyTorch's allocator reads `PYTORCH_CUDA_ALLOC_CONF` as PyTorch does. Raises RequestError for unknown names and
        releases, malformed configurations, and a device that is no GPU.
        """
        software = software_named(torch, cuda)
        allocator_type(allocator)
        text = allocator_config
        if text is None and allocator == "pytorch":
            text = text_of_environment() or None
        if isinstance(text, str):
            if allocator != "pytorch":
                raise RequestError(f"the {allocator} allocator has no configuration text; pytorch's has")
            allocator_config = CachingConfig.parse(text)
        found = device if isinstance(device, Device) else load_device(device)
        if found.kind != "cuda":
            raise RequestError(f"{found.name} is not a GPU; `overspill devices` lists those that are known")
        return cls(found, allocator, allocator_config, software)

    @property
    def capability(self) -> tuple[int, int]:
        """The device's compute capability, or 8.0 if the device states none."""
        return capability_of(self.device.compute_capability or "8.0")


def estimate(
    build: str | nn.Module | Callable[[], nn.Module],
    inputs: Any = None,
    loss: Callable[..., Tensor] | None = None,
    optimizer: str | MakeOptimizer | None = None,
    *,
    device: str | Device = DEFAULT_DEVICE,
    batch: int | None = None,
    dtype: str = "float32",
    accumulate: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    set_to_none: bool = True,
    parallel: Parallel | None = None,
    checkpointing: bool | tuple[str, ...] = False,
    reentrant: bool | None = None,
    attention: str | None = None,
    channels_last: bool = False,
    lora: int | None = None,
    lora_targets: str | None = None,
    lora_dropout: float = 0.0,
    quantize: str | None = None,
    upcast: bool | None = None,
    shift_logits: bool | None = None,
    loss_chunks: int | None = None,
    objective: str | None = None,
    keep_outputs: bool | None = None,
    offload_optimizer: bool = False,
    cudnn_benchmark: bool = False,
    generate: int = 0,
    allocator: str = "pytorch",
    allocator_config: Any = None,
    torch: str | None = None,
    cuda: str | None = None,
    compiled: bool = False,
) -> Estimate:
    """Estimate the device memory of training or inference.

    It is inference without `loss` and `optimizer`; nothing is computed.

    Args:
        build: The model: a function that makes it, a module (left unchanged), or the name of a built-in model.
        inputs: The model's input: tensors, a tuple or dict of them, or a function that makes them, given the batch
            size if it takes one. Of float tensors only shapes and dtypes count. A built-in model has its own.
        loss: A criterion of torch.nn, given the model's output and the last of `inputs`. Or a function of the model
            and all `inputs`; a dict, which gives the model keywords, is one argument of it. Without it a model that is
            trained returns its own loss.
        optimizer: A name such as `adamw`, or a function of the parameters. None: the model is only run.
        device: The GPU, by a name that `overspill devices` lists, by a file, or as a Device.
        batch: Samples in a step; for a pipeline, in all its micro-batches. By default the first dimension of `inputs`,
            or 1.
        dtype: `float32`, `bfloat16`, `float16`, `amp` (autocast in float16, with a GradScaler) or `amp-bfloat16`.
        accumulate: Micro-batches in a step; `batch` is the size of each.
        clip_norm: The norm of all gradients is clipped to this.
        clip_value: Each element of gradients is clipped to ± this.
        set_to_none: As in `zero_grad`.
        parallel: How several GPUs share the work (`overspill.job.Parallel`). The answer is for the GPU that needs
            most.
        checkpointing: The blocks that the model repeats are recomputed in backward; or modules of the classes named.
        reentrant: Whether these checkpoints are torch's older ones, as in transformers before 5. None: they are not.
        attention: The only kernel of scaled_dot_product_attention: `flash`, `efficient`, `math` or `cudnn`; in
            transformers also `eager`.
        channels_last: Whether model and images have this memory format.
        lora: The rank of adapters next to linear layers; all other weights are frozen.
        lora_targets: The layers with adapters: ends of their names, with commas between, or `all-linear`.
        lora_dropout: The dropout of the adapters' input.
        quantize: Linear layers have weights of `4bit-double` (`4bit` for short), `4bit-single` (scales in float32) or
            `8bit`, as in bitsandbytes.
        upcast: Whether all weights that are not quantised are float32, as after peft's
            `prepare_model_for_kbit_training`. None: they are.
        shift_logits: Whether the loss of a causal model of transformers copies logits, as before 4.50. None: it does
            not.
        loss_chunks: Output layer and loss of such a model run in so many chunks of tokens, each recomputed in
            backward.
        objective: `dpo`, whose samples are pairs of texts, or `grpo`: a causal model of transformers is trained against
            a frozen copy of it, or with `lora` against itself without adapters.
        keep_outputs: Whether a step's outputs live until the next ones exist. None: they do not.
        offload_optimizer: Whether the optimizer's state is on the host.
        cudnn_benchmark: Whether cuDNN benchmarks its engines.
        generate: The number of tokens that a causal language model generates, with a cache of keys and values.
        allocator: `pytorch`, or another that `placement` has.
        allocator_config: As in `PYTORCH_CUDA_ALLOC_CONF`, which is read if this is None.
        torch: The PyTorch release that the job will run with, as "2.6"; by default the installed one. Ops are those of
            the installed PyTorch in any case.
        cuda: The CUDA release, as "12.4".
        compiled: Also estimate the same step under stock `torch.compile`, by the program that Inductor writes for the
            CPU: the result's `compiled`.

    Returns:
        The Estimate. `print(estimate.explain())` prints all of it.

    Raises:
        RequestError: For a request that cannot be met.
        UnsupportedError: If the model needs computed values.
    """
    setting = Setting.of(device, allocator, allocator_config, torch, cuda)
    job = job_of(
        build, inputs, loss, batch, optimizer, dtype=dtype, accumulate=accumulate, clip_norm=clip_norm,
        clip_value=clip_value,
        set_to_none=set_to_none, parallel=parallel, checkpointing=checkpointing, reentrant=reentrant,
        attention=attention,
        channels_last=channels_last, lora=lora, lora_targets=lora_targets, lora_dropout=lora_dropout, quantize=quantize,
        upcast=upcast, shift_logits=shift_logits, loss_chunks=loss_chunks, objective=objective,
        keep_outputs=keep_outputs, offload_optimizer=offload_optimizer,
        cudnn_benchmark=cudnn_benchmark, generate=generate,
    )  # fmt: skip
    return of_job(
        replace(job, batch=1) if isinstance(build, str) and batch is None else job, setting, compiled=compiled
    )


def of_job(job: Job, setting: Setting, *, compiled: bool = False) -> Estimate:
    """Return the estimate of a job; if it has no batch, of the job without one."""
    job.check_batch()
    stages: dict[int | None, dict[int, int]] = {}

    def trace(size: int | None, iterations: int | None = None) -> Recording:
        # Of other batch sizes only bytes are asked.
        found, peaks = _needing_most(
            replace(job, batch=size), setting, iterations or ITERATIONS, lines=size == job.batch
        )
        stages.setdefault(size, peaks)
        return found

    VirtualGpu()  # what torch imports for it is not part of the estimate's time

    def trace_compiled() -> Recording:
        return record(program_of(job, compiled=True), capability=setting.capability)

    def trace_otherwise(other: Job) -> Recording:
        return _needing_most(other, setting, lines=False)[0]

    made = traced(
        trace, job.name, job.batch, setting, retrace=Retrace(job, trace_otherwise), parallel=job.parallel,
        under_compile=trace_compiled if compiled else None,
    )  # fmt: skip
    if len(stages[job.batch]) > 1:
        object.__setattr__(made, "stages", stages[job.batch])
    return made


def _needing_most(
    job: Job, setting: Setting, iterations: int = ITERATIONS, *, lines: bool
) -> tuple[Recording, dict[int, int]]:
    """Return the recording of the GPU that needs most memory.

    For a pipeline, also return the peaks of requested bytes by stage, for the stages that may need most.
    """
    recordings = {
        0 if one.parallel is None else one.parallel.stage: recorded(one, setting.capability, iterations, lines=lines)
        for one in job.stages()
    }
    peaks = {stage: found.peak_requested_bytes for stage, found in recordings.items()}
    return recordings[max(peaks, key=lambda stage: peaks[stage])], peaks


def traced(
    trace: Callable[[int | None, int | None], Recording], name: str, batch: int | None, setting: Setting,
    *, retrace: Retrace | None = None, parallel: Parallel | None = None,
    framework: str = "pytorch", under_compile: Callable[[], Recording] | None = None,
) -> Estimate:  # fmt: skip
    """Return the estimate of the recording that `trace` makes for a batch size, with the seconds that this took.

    A batch of None is that of a job without one.
    """
    started = time.perf_counter()
    recording = trace(batch, None)
    scaling = None
    if batch is not None:
        scaling = Scaling(
            trace, setting.device, batch, setting.allocator, setting.allocator_config, setting.software,
            traces={batch: recording},
        )  # fmt: skip
    made = of_recording(
        recording, name, setting, batch=batch, scaling=scaling, retrace=retrace, parallel=parallel, framework=framework
    )
    if under_compile is not None:
        made = replace(made, compiled_recording=under_compile())
    # Work out the verdict now, for it is part of the time.
    made.fits()
    object.__setattr__(made, "seconds", time.perf_counter() - started)
    return made


def of_recording(
    recording: Recording, name: str, setting: Setting, *, batch: int | None = None, scaling: Scaling | None = None,
    retrace: Retrace | None = None, parallel: Parallel | None = None,
    framework: str = "pytorch",
) -> Estimate:  # fmt: skip
    """Return the estimate of a recording."""
    return Estimate(
        name, recording, setting.device, batch, setting.allocator, setting.allocator_config, setting.software,
        parallel=parallel, scaling=scaling, retrace=retrace, framework=framework,
    )  # fmt: skip
