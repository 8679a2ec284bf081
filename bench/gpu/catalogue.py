"""All experiments in the order in which they run: what each asks and decides, and how long it should take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .experiment import Experiment, Topic

INSTALL = Topic(
    0, "Install", "Does what was installed import, and does the command line train here?",
    "anything but yes ends the campaign: nothing else would be worth its time",
)  # fmt: skip
COSTS = Topic(
    1, "Costs", "What do context, workspaces, pinned memory, the link, an op, a swap and an update cost?",
    "the device file's figures; more than 10 small ops of host time a swap: transfers need native code first",
)  # fmt: skip
ROUND_TRIPS = Topic(
    2, "Round trips", "Do bytes come back as they left, while kernels are late and freed memory is written again?",
    "one wrong tensor: a wait is missing, and no other figure counts",
)  # fmt: skip
BITS = Topic(
    3, "Bits", "Are losses, weights and buffers those of plain training? Does plain training repeat itself?",
    "unequal where plain training equals itself: to be mended before any speed is quoted",
)  # fmt: skip
PEAKS = Topic(
    5, "Peaks", "What do the allocator and the driver count within a budget, and is a card of that size enough?",
    "a retry or an error where the allocator may have the budget: the README must say that a budget is live bytes",
)  # fmt: skip
SPEED = Topic(
    6, "Step times", "How fast are steps at the memory that other ways to save it take? Host and GPU time apart.",
    "host time above GPU time: transfers need native code first; slower than a peer on a card as the peer took: not to be claimed",
)  # fmt: skip
KERNELS = Topic(
    7, "Profile", "How long are kernels and copies at work in a managed step, and how much of it at once? Does a recording say so?",
    "less than half of the copies beside kernels: the lanes do not overlap as simulated; a recording says otherwise: to be mended",
)  # fmt: skip
AGAIN = Topic(
    8, "Plans by measured times", "Are plans better by op times that were measured here?",
    "over 5 % faster: the device file's rates or efficiencies are to be mended",
)  # fmt: skip
ESTIMATES = Topic(
    9, "Estimates", "How far are estimates from plain training here?",
    "a median error above 3 %, or one above 15 %: the workspace and context models are to be mended",
)  # fmt: skip
LARGER = Topic(
    10, "Larger than memory", "Does a decoder train whose weights and state are three times its budget?",
    "losses other than plain training's, or a peak above the budget: not to be claimed",
)  # fmt: skip
SHARING = Topic(
    12, "A shared GPU", "What does park give back between two steps, and how fast?",
    "other losses than without it, or over a twentieth still reserved: not to be claimed",
)  # fmt: skip
ALLOCATORS = Topic(
    13, "Allocators", "What does plain training reserve on Overspill's allocators, what does a step cost, and do graphs replay?",
    "other losses than on PyTorch's: nothing of them is to be used; steps over 1 % slower on `planned`, or more reserved than by"
    " expandable segments: it stays an experiment",
)  # fmt: skip
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
PARTITIONS = (0.7, 0.5, 0.3)

# Model, batch and optimizer of plain training that is estimated beforehand.
ESTIMATED = (
    ("resnet50", 64, "sgd"), ("resnet50", 128, "adamw"), ("resnet152", 32, "momentum"), ("vgg16", 64, "sgd"),
    ("vgg16", 128, "adam"), ("alexnet", 512, "momentum"), ("densenet121", 64, "sgd"), ("densenet201", 32, "adamw"),
    ("googlenet", 128, "adam"), ("inception-v3", 64, "momentum"), ("inception-v4", 32, "rmsprop"), ("unet", 8, "sgd"),
    ("unet", 16, "adamw"), ("deeplabv3plus", 4, "momentum"), ("overfeat", 128, "sgd"), ("resnet32-cifar", 512, "adam"),
    ("gpt2", 4, "adamw"), ("gpt2", 8, "sgd"), ("gpt2", 16, "adafactor"), ("bert-base", 16, "adamw"),
    ("bert-base", 32, "adam"), ("lstm", 64, "adam"), ("lstm", 128, "sgd"), ("seq2seq", 64, "adam"),
)  # fmt: skip


def _costs() -> Iterator[Experiment]:
    yield Experiment("0-imports", INSTALL, "gpu.topics.install:imports", seconds=8, on_cpu=True)
    yield Experiment("0-command-line", INSTALL, "gpu.topics.install:command_line", seconds=20, on_cpu=True)
    yield Experiment("1-context", COSTS, "gpu.topics.link:context", seconds=8)
    yield Experiment("1-pinned", COSTS, "gpu.topics.link:pinned", seconds=8)
    yield Experiment("1-bandwidth", COSTS, "gpu.topics.link:bandwidth", seconds=8)
    yield Experiment("1-host-time", COSTS, "gpu.topics.link:host_time", seconds=10, on_cpu=True)


def _correctness() -> Iterator[Experiment]:
    for name, late in (("2-round-trips", False), ("2-round-trips-late", True)):
        yield Experiment(name, ROUND_TRIPS, "gpu.topics.round_trips:trips", {"late": late}, seconds=10, on_cpu=True)
    for model, batch, optimizer in (
        ("resnet50", 32, "momentum"), ("gpt2", 8, "adamw"), ("unet", 4, "momentum"), ("vgg16", 16, "momentum"),
        ("bert-base", 8, "adamw"), ("lstm", 32, "adam"),
    ):  # fmt: skip
        asked = {"model": model, "batch": batch, "optimizer": optimizer}
        yield Experiment(
            f"3-bits-{model}", BITS, "gpu.topics.bits:eager", asked, seconds=20, environment=DETERMINISTIC, on_cpu=True
        )
    for name, model, batch, optimizer in (
        ("gpt2", "gpt2", 8, "adamw"), ("gpt2-deterministic", "gpt2", 8, "adamw"), ("resnet50", "resnet50", 32, "momentum"),
    ):  # fmt: skip
        asked = {"model": model, "batch": batch, "optimizer": optimizer, "deterministic": name != "gpt2"}
        yield Experiment(
            f"3-bits-inductor-{name}", BITS, "gpu.topics.bits:inductor", asked, seconds=60, environment=DETERMINISTIC,
            on_cpu=name == "gpt2",
        )  # fmt: skip


_PEAK_WAYS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "default": ({}, {}), "expandable": ({}, EXPANDABLE), "planned": ({"placement": "planned"}, {}),
}  # fmt: skip
_PEAK_JOBS = ("resnet50", "gpt2")


def _peak(job: str, budget: str, way: str) -> Experiment:
    more, environment = _PEAK_WAYS[way]
    asked = {"job": job, "budget": budget} | more
    return Experiment(
        f"5-peak-{job}-{budget}-{way}", PEAKS, "gpu.topics.peaks:peak", asked, seconds=9, environment=environment,
        on_cpu=way == "default" and budget == "70%",
    )  # fmt: skip


def _peaks() -> Iterator[Experiment]:
    for job in _PEAK_JOBS:
        yield from (_peak(job, budget, way) for budget in ("100%", "50%") for way in _PEAK_WAYS)
        yield from (_peak(job, budget, "default") for budget in ("70%", "smallest"))
        asked = {"job": job, "budget": "60%", "door": "step"}
        yield Experiment(f"5-peak-{job}-60%-step", PEAKS, "gpu.topics.peaks:peak", asked, seconds=10, on_cpu=True)
        for budget in ("100%", "50%"):
            of = f"5-peak-{job}-{budget}-default"
            for factor in (1.0, 1.05, 1.15):
                limited = {"job": job, "of": of, "factor": factor}
                name = f"5-survives-{job}-{budget}-x{factor}"
                yield Experiment(name, PEAKS, "gpu.topics.peaks:survives", limited, seconds=9, needs=(of,))
        yield Experiment(f"5-whole-device-{job}", PEAKS, "gpu.topics.peaks:whole_device", {"job": job}, seconds=9)


# Of each way to train: the way's name, its arguments, seconds, whether a CPU can, and for `at` whose peak is the budget.
_Arm = tuple[str, dict[str, Any], float, bool, str | None]
ARMS: dict[str, _Arm] = {
    "eager": ("eager", {}, 9, True, None),
    "eager-again": ("eager", {}, 9, True, None),
    "compile": ("compile", {}, 40, True, None),
    **{f"compile-{p}": ("compile", {"partition": p}, 30, p == 0.5, None) for p in PARTITIONS},
    "checkpoint": ("checkpoint", {}, 9, True, None),
    "save-on-cpu": ("save-on-cpu", {}, 30, False, None),
    "offload-hooks": ("offload-hooks", {}, 25, False, None),
    "checkpoint-offload": ("offload-hooks", {"with_checkpoints": True}, 10, False, None),
    "host-optimizer": ("host-optimizer", {}, 25, False, None),
    "overspill-nothing-moved": ("overspill", {"budget": None}, 14, True, None),
    "overspill-at-checkpoint": ("overspill", {}, 16, True, "checkpoint"),
    "overspill-at-save-on-cpu": ("overspill", {}, 16, False, "save-on-cpu"),
    "overspill-at-offload-hooks": ("overspill", {}, 16, False, "offload-hooks"),
    "overspill-at-checkpoint-offload": ("overspill", {}, 16, False, "checkpoint-offload"),
    "inductor-nothing-moved": ("overspill", {"budget": None, "backend": "inductor"}, 30, True, None),
    **{f"inductor-at-compile-{p}": ("overspill", {"backend": "inductor"}, 40, p == 0.5, f"compile-{p}") for p in PARTITIONS},
    "step-at-host-optimizer": ("overspill-step", {}, 20, False, "host-optimizer"),
    "step-at-checkpoint": ("overspill-step", {}, 70, False, "checkpoint"),
    "step-40%": ("overspill-step", {"budget": "40%"}, 70, False, None),
    "step-60%": ("overspill-step", {"budget": "60%"}, 20, True, None),
    "inductor-step-60%": ("overspill-step", {"budget": "60%", "backend": "inductor"}, 40, True, None),
}  # fmt: skip
LARGE = ("llama-1b", "llama-8b")
"""Whole: there is no more to ask of them than `FIRST` has."""
# What is asked first of each job; the rest of the table comes at the very end.
_LATER = ("compile-0.7", "compile-0.3", "inductor-at-compile-0.7", "inductor-at-compile-0.3")
FIRST = {
    "gpt2": tuple(name for name in ARMS if name not in _LATER),
    "resnet50": (
        "eager", "compile", "compile-0.5", "checkpoint", "save-on-cpu", "offload-hooks", "overspill-nothing-moved",
        "overspill-at-checkpoint", "overspill-at-save-on-cpu", "overspill-at-offload-hooks", "inductor-at-compile-0.5",
    ),
    "decoder": (
        "eager", "compile", "compile-0.5", "checkpoint", "checkpoint-offload", "host-optimizer", "overspill-nothing-moved",
        "overspill-at-checkpoint", "overspill-at-checkpoint-offload", "inductor-at-compile-0.5", "step-at-host-optimizer",
    ),
    **dict.fromkeys(LARGE, ("eager", "checkpoint", "step-at-checkpoint", "step-60%", "step-40%")),
}  # fmt: skip


def _arm(job: str, name: str) -> Experiment:
    way, arguments, seconds, on_cpu, at = ARMS[name]
    asked: dict[str, Any] = {"job": job, "way": way, **arguments}
    needs: tuple[str, ...] = ()
    if at is not None:
        needs = (f"6-{job}-{at}",)
        asked["at"] = needs[0]
    in_small = on_cpu and job not in LARGE and (job == "gpt2" or name == "step-60%")
    return Experiment(
        f"6-{job}-{name}", SPEED, "gpu.topics.steps:step_time", asked, seconds=seconds, needs=needs, on_cpu=in_small
    )


def _speed() -> Iterator[Experiment]:
    for job, names in FIRST.items():
        yield from (_arm(job, name) for name in names)


def _kernels() -> Iterator[Experiment]:
    for job in ("gpt2", "resnet50"):
        asked: dict[str, Any] = {"job": job, "way": "overspill", "budget": "60%"}
        cpu = job == "gpt2"
        yield Experiment(f"7-profile-{job}-60%", KERNELS, "gpu.topics.kernels:profiled", asked, seconds=18, on_cpu=cpu)
    yield Experiment(
        "7-profile-gpt2-eager", KERNELS, "gpu.topics.kernels:profiled", {"job": "gpt2", "way": "eager"}, seconds=12
    )
    asked = {"job": "gpt2", "way": "overspill-step", "budget": "60%"}
    yield Experiment("7-profile-gpt2-step-60%", KERNELS, "gpu.topics.kernels:profiled", asked, seconds=20)
    for job, way, backend in (
        ("gpt2", "overspill", "eager"),
        ("gpt2", "overspill", "inductor"),
        ("resnet50", "overspill-step", "eager"),
    ):
        asked = {"job": job, "way": way, "budget": "60%", "backend": backend}
        name = f"7-recorded-{job}{'-step' * (way == 'overspill-step')}{'-inductor' * (backend == 'inductor')}-60%"
        cpu = job == "gpt2" and backend == "eager"
        seconds = 40 if backend == "inductor" else 25
        yield Experiment(name, KERNELS, "gpu.topics.recorded:recorded", asked, seconds=seconds, on_cpu=cpu)
    for model, batch, optimizer in (("resnet50", 128, "momentum"), ("gpt2", 8, "adamw")):
        asked = {"model": model, "batch": batch, "optimizer": optimizer}
        yield Experiment(
            f"8-again-{model}", AGAIN, "gpu.topics.kernels:planned_again", asked, seconds=25, on_cpu=model == "gpt2"
        )


def _estimate(model: str, batch: int, optimizer: str) -> Experiment:
    asked = {"model": model, "batch": batch, "optimizer": optimizer}
    name = f"9-estimate-{model}-{batch}-{optimizer}"
    cpu = name == "9-estimate-lstm-64-adam"
    return Experiment(name, ESTIMATES, "gpu.topics.estimates:estimated", asked, seconds=9, on_cpu=cpu)


def _rest() -> Iterator[Experiment]:
    yield from (_estimate(*job) for job in ESTIMATED[::2])
    for name, plain in (("10-decoder-plain", True), ("10-decoder-6GiB", False)):
        yield Experiment(name, LARGER, "gpu.topics.larger:decoder", {"plain": plain}, seconds=30, on_cpu=True)
    for door, budget in (("compile", "100%"), ("compile", "60%"), ("step", "60%")):
        asked = {"door": door, "budget": budget}
        yield Experiment(
            f"12-parked-{door}-{budget}", SHARING, "gpu.topics.sharing:parked", asked, seconds=30,
            on_cpu=door == "compile",
        )  # fmt: skip
    for job in ("gpt2", "resnet50"):
        for name, allocator, environment in (
            ("pytorch", "pytorch", {}), ("expandable", "pytorch", EXPANDABLE), ("planned", "planned", {}),
            ("chunked", "chunked", {}), ("gtbm", "gtbm", {}),
        ):  # fmt: skip
            yield Experiment(
                f"13-{job}-{name}", ALLOCATORS, "gpu.topics.allocators:step_time", {"job": job, "allocator": allocator},
                seconds=12, environment=environment, on_cpu=(job, name) == ("gpt2", "pytorch"),
            )  # fmt: skip
    yield Experiment(
        "13-graphs-planned",
        ALLOCATORS,
        "gpu.topics.allocators:graphs",
        {"job": "gpt2", "allocator": "planned"},
        seconds=12,
    )


def _more() -> Iterator[Experiment]:
    """What fills the tables of topics 5, 6 and 9, once every question has an answer."""
    for job, names in FIRST.items():
        yield from (_arm(job, name) for name in ARMS if name not in names and job not in LARGE)
    yield from (_estimate(*job) for job in ESTIMATED[1::2])
    for job in _PEAK_JOBS:
        yield from (_peak(job, budget, way) for budget in ("70%", "smallest") for way in ("expandable", "planned"))


EXPERIMENTS = {
    experiment.name: experiment
    for part in (_costs, _correctness, _peaks, _speed, _kernels, _rest, _more)
    for experiment in part()
}
TOPICS = {experiment.topic.number: experiment.topic for experiment in EXPERIMENTS.values()}
