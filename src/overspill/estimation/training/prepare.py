"""Prepare a job's model on the device, and set torch's global settings while it runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from overspill.capture.recording.recorder import Recorder
from overspill.job import Job
from overspill.job.prepare import EAGER, attention_kernel, no_attention, prepare

from .tensor_parallel import split_layers
from .wrappers import data_parallel

_ATTENTION_OPS = (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention", "_safe_softmax"
)  # fmt: skip


def prepared(module: nn.Module, job: Job, recorder: Recorder) -> nn.Module:
    """Return `module` with the job's settings, on the device.

    A module for pipeline parallelism stays on the host. Raises RequestError if a setting cannot be applied to it.
    """
    kind = None if job.parallel is None else job.parallel.kind
    if job.parallel is not None and kind == "tp":
        split_layers(module, job.parallel.gpus)
    prepare(module, job)
    if kind == "pp":
        return module
    if job.parallel is None or kind == "tp":
        module = module.to("cuda")
    else:
        module = data_parallel(module, job.parallel, recorder)
    recorder.mark_module(module)
    return module


def surroundings(program: Callable[[Recorder], None], job: Job) -> Callable[[Recorder], None]:
    """Return `program` under the global settings of torch that the job needs throughout."""
    if job.attention is None and not job.cudnn_benchmark:
        return program

    def surrounded(recorder: Recorder) -> None:
        cudnn = torch.backends.cudnn.flags(enabled=True, benchmark=job.cudnn_benchmark)
        with attention_kernel(job), cudnn, _unpacked() if job.attention == EAGER else nullcontext():
            program(recorder)
        if job.attention not in (None, EAGER) and not recorder.has_run(*_ATTENTION_OPS):
            raise no_attention(job)

    return surrounded


def _unpacked() -> AbstractContextManager[Any]:
    """Return a context in which transformers does not look for packed texts.

    It does so with its own attention code, from positions that it makes itself, and that have no values here.
    """
    try:
        from transformers.masking_utils import find_packed_sequence_indices as looks  # noqa: PLC0415 - optional
    except ImportError:  # before 4.53
        return nullcontext()
    return patch(f"{looks.__module__}.{looks.__name__}", lambda _: None)
