"""The functions that a DataLoader runs in its workers."""

from __future__ import annotations

from torch.utils.data import dataloader
from torch.utils.data._utils import fetch, worker

from .patching import Target

WorkerInfo = worker.WorkerInfo
"""What a worker knows of itself."""
BATCHES = dataloader._SingleProcessDataLoaderIter
"""The iterator of a loader without workers."""
NEXT = Target(BATCHES, "_next_data")
"""Its next batch."""
FETCH = Target(fetch._MapDatasetFetcher, "fetch")
"""The samples of one batch from a data set with numbers."""
WORKER = Target(worker, "_worker_info")
"""The worker that this process is, or None."""
