"""A whole forward computation as one module, so that what is captured and compiled includes the loss."""

from __future__ import annotations

from torch import Tensor, nn

from .job import Job


class TrainingStep(nn.Module):
    """The job's model (`self.model`) with its `loss`: called on a batch, returns the scalar loss."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model = job.module
        self.loss = job.loss

    def forward(self, *batch: Tensor) -> Tensor:
        """Returns the loss of the model on `batch`, the tensors that the job's `make_batch` returned."""
        return self.loss(self.model, *batch)
