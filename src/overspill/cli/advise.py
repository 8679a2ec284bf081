"""`overspill advise`: changes with which a model trains on a GPU, and the cost of each."""

from __future__ import annotations

import time
from typing import Annotated

from overspill.job import Job

from . import complete
from .common import AsJson, Outcome, narrate, of_page, optional, quiet_torch
from .estimate import estimated
from .job import with_job
from .software import Cuda, Torch

TrainedOn = Annotated[
    str, optional("NAME", "A name that `overspill devices` lists, or a device file.", autocompletion=complete.device)
]


@with_job(batch=1)
def advise(*, job: Job, gpu: TrainedOn, torch: Torch = None, cuda: Cuda = None, json: AsJson = False) -> Outcome:
    """Try what would make a model fit on a GPU: what each change saves and costs, the cheapest first."""
    begun = time.perf_counter()
    with narrate() as narrator:
        quiet_torch()
        from overspill.estimation.api import Setting
        from overspill.report.advice import advise_answer, advise_page
        from overspill.report.estimate import estimate_verdict
        from overspill.runtime.advise import advise as advise_on

        setting = Setting.of(gpu, job.allocator, None, torch, cuda)
        made, request = estimated(job, setting, narrator, compiled=False, quiet=json)
        left_out: dict[str, str] = {}  # what was tried in vain, and why
        found = list(advise_on(made, narrator.now, left_out.setdefault))
        fits = made.fits() or any(advice.fits for advice in found)
        request |= {"gpus": 1 if job.parallel is None else job.parallel.gpus}
        answer = advise_answer(request, made, found, left_out, time.perf_counter() - begun)
        page = advise_page(made, estimate_verdict(made), found, left_out)
        return of_page(answer, page, {}, 0 if fits else 1)
