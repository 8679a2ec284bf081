"""Prepare a job's model on the device.

And what is set in torch while it runs.
"""

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
    """`module` as `job` has it, on the device.

    But for pp. Raises RequestError where that cannot be done to it.
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
    """`program` under what the job sets in torch for the whole of it."""
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
    """Keeps transformers from looking for packed texts, as it does where attention is spelt out.

    It reads positions for that, which it makes itself, and which have no values here.
    """
    try:
        from transformers.masking_utils import find_packed_sequence_indices as looks  # noqa: PLC0415 - optional
    except ImportError:  # before 4.53
        return nullcontext()
    return patch(f"{looks.__module__}.{looks.__name__}", lambda _: None)
