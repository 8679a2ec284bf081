"""`overspill advise`: changes with which a model trains on a GPU, and the cost of each."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

from overspill.devices import device_names, load_device
from overspill.job import Job

from . import complete
from .common import AsJson, Outcome, narrate, of_page, optional, quiet_torch, same_job
from .estimate import estimated
from .job import with_job
from .software import Cuda, Torch

TrainedOn = Annotated[
    str,
    optional(
        "NAME", "A name that `overspill devices` lists, or a device file; A,B,… or all.", autocompletion=complete.device
    ),
]
ALL = "all"


@with_job(batch=1)
def advise(*, job: Job, gpu: TrainedOn, torch: Torch = None, cuda: Cuda = None, json: AsJson = False) -> Outcome:
    """Try what would make a model fit on a GPU: what each change saves and costs, the cheapest first."""
    begun = time.perf_counter()
    with narrate() as narrator:
        quiet_torch()
        from overspill.estimation.api import Setting
        from overspill.report.advice import advise_answer, advise_page, cards_page
        from overspill.report.estimate import estimate_sentence
        from overspill.report.page import PasteLine
        from overspill.runtime.advise import advise as advise_on
        from overspill.runtime.advise import cards, planning

        names = [device for device in device_names() if device != "cpu"] if gpu == ALL else gpu.split(",")
        devices = [load_device(name) for name in names]
        setting = Setting.of(names[0], job.allocator, None, torch, cuda)
        if len(devices) > 1:
            made, request = estimated(job, setting, narrator, compiled=False, quiet=json)
            found_on = cards(made, devices, narrator.detail)
            answer = request | {"cards": [asdict(card) for card in found_on], "seconds": time.perf_counter() - begun}
            page = cards_page(
                made,
                found_on,
                lambda gpu: PasteLine(same_job("plan", "--gpu", gpu), "What a plan costs on the smallest:"),
            )
            return of_page(answer, page, {}, 0 if any(card.fits or card.fits_planned for card in found_on) else 1)
        left_out: dict[str, str] = {}  # what was tried in vain, and why
        with planning(job, setting.device, setting.software) as under_way:
            made, request = estimated(job, setting, narrator, compiled=False, quiet=json)
            found = list(advise_on(made, narrator.now, left_out.setdefault, under_way))
        fits = made.fits() or any(advice.fits for advice in found)
        request |= {"gpus": 1 if job.parallel is None else job.parallel.gpus}
        answer = advise_answer(request, made, found, left_out, time.perf_counter() - begun)
        page = advise_page(made, estimate_sentence(made), found, left_out)
        return of_page(answer, page, {}, 0 if fits else 1)
