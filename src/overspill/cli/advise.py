"""`overspill advise`: what to change so that a model trains on a GPU, and what each change costs."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from overspill import models
from overspill.estimation.recipe import Recipe

from . import complete
from .common import (
    AsJson,
    ImageSize,
    ModelChoice,
    ModelName,
    Outcome,
    SeqLen,
    Small,
    narrate,
    quiet_torch,
)
from .recipe import with_recipe
from .software import Cuda, Torch

Samples = Annotated[int, typer.Option(min=1, help="Samples in a step, on each GPU.")]
TrainedOn = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="A name that `overspill devices` lists, or a device file.",
        show_default=False,
        autocompletion=complete.device,
    ),
]


@with_recipe("generate")
def advise(
    model: ModelName,
    gpu: TrainedOn,
    *,
    batch: Samples = 1,
    small: Small = False,
    image_size: ImageSize = None,
    seq_len: SeqLen = None,
    recipe: Recipe,
    torch: Torch = None,
    cuda: Cuda = None,
    json: AsJson = False,
) -> Outcome:
    """Try what would make a model fit on a GPU, or take less of it: what each change saves and costs, the cheapest first."""
    del json  # `main` reads it from the arguments
    begun = time.perf_counter()
    models.check_name(model)
    with narrate() as narrator:
        quiet_torch()
        from overspill.estimation.api import Setting, of_job
        from overspill.report.advice import advise_answer, advise_report
        from overspill.runtime.advise import advise as advise_on

        setting = Setting.of(gpu, torch=torch, cuda=cuda)
        choice = ModelChoice(model, small, image_size, seq_len)
        narrator.now(f"tracing {model}")
        made = of_job(choice.build, model, batch, recipe, setting)
        tried: list[str] = []
        found = list(advise_on(made, choice.build, narrator.now, tried.append))
        helpful = {advice.what for advice in found}
        left_out = [what for what in dict.fromkeys(tried) if what not in helpful]
        fits = made.fits() or any(advice.fits for advice in found)
        request = {"model": model, "batch": batch, "optimizer": recipe.optimizer, "dtype": recipe.dtype}
        request["gpus"] = 1 if recipe.parallel is None else recipe.parallel.gpus
        answer = advise_answer(request, made, found, left_out, time.perf_counter() - begun)
        return Outcome(answer, advise_report(made, found, left_out), 0 if fits else 1)
