"""Changes to how a job is trained, on the same GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from overspill.job import Job, MakeOptimizer
from overspill.models import is_eight_bit, optimizer_named

from .change import Change, Price

if TYPE_CHECKING:  # the command line knows jobs before it pays for torch
    from torch.optim import Optimizer

    from overspill.estimation.figures import Figures

RANK = 16
"""The rank of the recommended adapters: LoRA's papers and peft's examples have 8 to 64."""
LOSS_CHUNKS = 8
"""Chunks of tokens of the recommended loss: as many as torchtune's losses have (`num_output_chunks`)."""
_FUSED = "torch.optim.{}(…, fused=True)"
_CONVOLUTIONS = frozenset({"convolution", "cudnn_convolution"})
_NORMS_OF_BATCH = frozenset({"native_batch_norm", "cudnn_batch_norm", "_batch_norm_with_update"})


def changes(estimate: Figures, job: Job) -> Iterator[Change]:
    """Yield the changes that apply to `job` and its GPU, cheapest first."""
    yield from _for_nothing(estimate, job)
    yield from _precision(estimate, job)
    if job.optimizer is None:
        if job.quantize is None:
            yield Change(
                "linear layers with weights of 4 bits, as bitsandbytes has them", "rounded weights: other results",
                Price.RESULTS, {"quantize": "4bit"}, 0.12,
            )  # fmt: skip
        return
    if not job.checkpointing:
        yield Change(
            "activation checkpointing of the repeated blocks",
            "their forward runs twice: up to a third more time, the same numbers", Price.TIME, {"checkpointing": True},
            trainer="gradient_checkpointing=True",
        )  # fmt: skip
    if job.fine_tunes and job.loss_chunks is None:
        yield Change(
            f"the loss in {LOSS_CHUNKS} chunks of tokens (--loss-chunks)",
            "the output layer runs twice; a sum in another order", Price.TIME,
            {"loss_chunks": LOSS_CHUNKS, "shift_logits": None},
        )  # fmt: skip
    yield from _another_method(job)


def _for_nothing(estimate: Figures, job: Job) -> Iterator[Change]:
    """Yield changes that cost no time and change no results except last bits."""
    if not job.set_to_none:
        yield Change(
            "optimizer.zero_grad(set_to_none=True)", "nothing: the same numbers", Price.NOTHING, {"set_to_none": True}
        )
    if (named := _fused(job)) is not None:
        what, fused = named
        trainer = 'optim="adamw_torch_fused"' if what == _FUSED.format("AdamW") else ""
        yield Change(
            what, "nothing: a faster update", Price.NOTHING, {"optimizer": fused}, of_update=True, trainer=trainer
        )
    if job.attention == "math":
        yield Change("the attention kernel that PyTorch chooses", "nothing: faster", Price.NOTHING, {"attention": None})
    names = {op.name for op in estimate.recording.ops}
    if not job.channels_last and names & _CONVOLUTIONS:
        yield Change(
            "model and images in channels_last", "nothing: on tensor cores faster", Price.NOTHING,
            {"channels_last": True},
        )  # fmt: skip


def _precision(estimate: Figures, job: Job) -> Iterator[Change]:
    """Yield lower precisions, for a job in float32 on a GPU that computes in fewer bits."""
    major = int(estimate.device.compute_capability.split(".")[0] or 0)
    if job.dtype != "float32" or major < 7:
        return
    parallel = job.parallel
    # Mixed precision, by the means of FSDP or by autocast.
    if parallel is not None and parallel.kind == "fsdp":
        if parallel.param_dtype is None and major >= 8:
            policy = replace(parallel, param_dtype="bfloat16", reduce_dtype="float32")
            yield Change(
                "MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)",
                "faster; computes in bfloat16", Price.PRECISION, {"parallel": policy},
            )  # fmt: skip
    elif major >= 8:
        yield Change(
            "mixed precision: torch.autocast in bfloat16", "faster; products in bfloat16", Price.PRECISION,
            {"dtype": "amp-bfloat16"}, trainer="bf16=True",
        )  # fmt: skip
    else:
        yield Change(
            "mixed precision: torch.autocast in float16, with a GradScaler", "faster; products in float16",
            Price.PRECISION, {"dtype": "amp"}, trainer="fp16=True",
        )  # fmt: skip
    if major >= 8:
        yield Change(
            "the whole model in bfloat16", "faster; weights of 8 significant bits lose small updates", Price.RESULTS,
            {"dtype": "bfloat16"}, 0.5, 0.5,
        )  # fmt: skip


def _another_method(job: Job) -> Iterator[Change]:
    """Yield smaller optimizers, state on the host, and training of few weights."""
    parallel = job.parallel
    if parallel is not None and parallel.kind == "fsdp":
        if not parallel.cpu_offload:
            yield Change(
                "CPUOffloadPolicy: shards and their update on the host",
                "gradients and weights cross the link at each step",
                Price.TIME, {"parallel": replace(parallel, cpu_offload=True)}, 0.0, 0.0,
            )  # fmt: skip
    elif not job.offload_optimizer:
        yield Change(
            "optimizer state and update on the host", "gradients and weights cross the link at each step", Price.TIME,
            {"offload_optimizer": True}, state=0.0, of_update=True,
        )  # fmt: skip
    # Methods whose results differ.
    eight = f"{job.optimizer}8bit".replace("-fused", "")
    if is_eight_bit(eight):
        yield Change(
            f"{eight} of bitsandbytes", "state of 8 bits: nearly the same results", Price.RESULTS, {"optimizer": eight},
            state=0.2, of_update=True, trainer='optim="adamw_bnb_8bit"' if eight == "adamw8bit" else "",
        )  # fmt: skip
    if job.lora is None:
        yield Change(
            f"LoRA: adapters of rank {RANK} alone are trained", "another training: the rest stays as it is",
            Price.RESULTS, {"lora": RANK}, state=0.0,
        )  # fmt: skip
    if job.quantize is None:
        rank, cost = job.lora or RANK, "rounded weights" if job.lora else "another training, on rounded weights"
        # As peft's `prepare_model_for_kbit_training` has it: without checkpointing, float32 of what is not quantised
        # takes more than 4 bits save.
        yield Change(
            f"QLoRA: adapters of rank {rank} on weights of 4 bits, with checkpointing", cost, Price.RESULTS,
            {"lora": rank, "quantize": "4bit", "checkpointing": True}, 0.12, 0.0,
        )  # fmt: skip


def averages_over_batch(estimate: Figures) -> bool:
    """Return whether a layer's results depend on the number of samples in a batch."""
    return any(op.name in _NORMS_OF_BATCH for op in estimate.recording.ops)


def _fused(job: Job) -> tuple[str, MakeOptimizer] | None:
    """Return the job's optimizer as one fused kernel, with its name, or None if it has no such kernel."""
    from torch import nn, zeros  # noqa: PLC0415

    make = job.optimizer
    if isinstance(make, str):
        make = None if is_eight_bit(make) else optimizer_named(make)
    if make is None:
        return None
    try:
        # Whether it is one of torch.optim that is not fused yet.
        tried = make([nn.Parameter(zeros(1))])
    except Exception:  # noqa: BLE001 - a function of the user's, which may want its own parameters
        return None
    group = tried.param_groups[0]
    if type(tried).__module__.split(".")[0] != "torch" or group.get("fused", True) or group.get("differentiable"):
        return None

    def fused(parameters: Any) -> Optimizer:
        made = make(parameters)
        for group in made.param_groups:
            group["fused"], group["foreach"] = True, False
        return made

    return _FUSED.format(type(tried).__name__), fused
