"""`overspill doctor`: what is installed, missing, and possible here, and how to get what is missing."""

from __future__ import annotations

import importlib
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import overspill
from overspill.core.text import pip_install
from overspill.core.units import format_bytes

from .common import AsJson, Outcome, narrate, quiet_torch

EXTENSIONS = {
    "overspill.placement.allocators._native": "simulated allocators",
    "overspill.placement.packing._packing": "solvers",
    "overspill.policies.auto._search": "the policy auto",
    "overspill.runtime.transfer._copies": "transfers of a GPU",
}
TESTED_TORCH = ((2, 11), (2, 14))
"""The first and the last release of PyTorch that Overspill is tested with."""
LIBRARIES = (
    "accelerate", "bitsandbytes", "datasets", "diffusers", "lightning", "peft", "pytorch_optimizer", "schedulefree",
    "sentence_transformers", "torchvision", "transformers", "trl",
)  # fmt: skip
"""Libraries whose models and loops train within a budget."""
MOST_NAMES = 3
"""The number of shown names that a release has moved."""
EXTRAS = {
    "plot": (("matplotlib",), "plots: --plot"),
    "bert": (("transformers",), "models of transformers: bert-base, hf:config.json"),
    "onnx": (("onnx", "overspill_papers"), "estimate --onnx"),
    "tensorflow": (("overspill_papers", "tensorflow"), "estimate --tensorflow"),
    "papers": (
        ("overspill_papers",),
        "reproduce, estimate --mxnet, policies such as window, allocators such as tensorflow, models such as googlenet",
    ),
    "recipes": (
        ("accelerate", "lightning", "peft", "transformers"),
        "Trainer, Lightning, accelerate, LoRA and QLoRA of peft",
    ),
}


@dataclass(frozen=True)
class Finding:
    """One checked item."""

    what: str
    state: str
    """`works`; `missing`, if only some features need it; or `broken`, if all of Overspill needs it."""
    found: str
    """The state in words."""
    meaning: str
    """The consequence of the state."""
    help: str = ""
    """The remedy, if any."""


def doctor(json: AsJson = False) -> Outcome:
    """Say what is installed, what it can do on this machine, what is missing and how to get it."""
    del json  # `main` reads it from the arguments
    from overspill.report.listing import listing

    with narrate() as narrator:
        quiet_torch()
        findings: list[Finding] = []
        for look in (_package, _torch, _gpu, _memory, _disk, _compiler, _scripts, _extras, _libraries):
            narrator.now(f"looking at {look.__name__.strip('_')}", lasting=False)
            findings += look()
    columns = ("what", "state", "found", "what it means", "what would help")
    rows = [(f.what, f.state, f.found, f.meaning, f.help) for f in findings]
    broken = [f for f in findings if f.state == "broken"]
    answer = {"version": overspill.__version__, "works": not broken, "findings": [asdict(f) for f in findings]}
    complaint = "; ".join(f"{f.what}: {f.found}; {f.help}" for f in broken)
    return Outcome(answer, listing(columns, rows), exit_code=1 if broken else 0, complaint=complaint)


def build_facts() -> str:
    """Return the Python and machine that this Overspill was built for.

    `--version` prints them after the number.
    """
    machine = f"{platform.system()} {platform.machine()}"
    return f"CPython {platform.python_version()}, {machine}, torch {_release('torch')}"


def _package() -> Iterable[Finding]:
    """Check Overspill itself: whether each compiled part loads."""
    failed = []
    for name, serves in EXTENSIONS.items():
        try:
            importlib.import_module(name)
        except ImportError as error:
            failed.append(f"{serves} ({error})")
    # One that does not load needs another installation.
    where = f"{overspill.__version__} in {Path(overspill.__file__).parent}"
    if failed:
        yield Finding(
            "overspill", "broken", f"cannot load {', '.join(failed)}", "it was not built for this Python",
            "install it again: make install in a clone, or pip install --force-reinstall of its wheel",
        )  # fmt: skip
    else:
        yield Finding("overspill", "works", where, build_facts())


def _torch() -> Iterable[Finding]:
    """Check the release of PyTorch."""
    import torch

    from overspill.costs.releases import release_of
    from overspill.pytorch.names import moved

    found = str(torch.__version__)
    release = release_of(found, "PyTorch", "2.13")
    first, last = (".".join(map(str, end)) for end in TESTED_TORCH)
    if gone := moved():
        others = f", and {len(gone) - MOST_NAMES} more" if len(gone) > MOST_NAMES else ""
        yield Finding(
            "torch", "broken", found,
            f"it has moved {', '.join(map(str, gone[:MOST_NAMES]))}{others}, which Overspill uses",
            f'pip install "torch>={first},<={last}.*"',
        )  # fmt: skip
    elif TESTED_TORCH[0] <= release <= TESTED_TORCH[1]:
        yield Finding("torch", "works", found, f"tested with {first} to {last}")
    else:
        state = "broken" if release < TESTED_TORCH[0] else "works"
        yield Finding(
            "torch", state, found, f"Overspill is tested with {first} to {last} alone",
            f'pip install "torch>={first},<={last}.*"',
        )  # fmt: skip


def _gpu() -> Iterable[Finding]:
    """Check for GPUs to train on; plans and estimates need none."""
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            seen = torch.cuda.get_device_properties(index)
            yield Finding("GPU", "works", f"{seen.name}, {format_bytes(seen.total_memory)}", "trains there")
        import resource

        locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if locked != resource.RLIM_INFINITY:
            yield Finding(
                "pinned memory", "works", f"at most {format_bytes(locked)} locked",
                "PyTorch pins by CUDA, which may have more",
                "ulimit -l unlimited",
            )  # fmt: skip
        return
    # No GPU: what PyTorch was built for.
    built = torch.version.cuda or torch.version.hip
    found = (
        f"none; PyTorch is built for {'CUDA' if torch.version.cuda else 'ROCm'} {built}"
        if built
        else "none; PyTorch is built without CUDA"
    )
    help_ = "a GPU, and its driver" if built else "a build of PyTorch for your GPU: https://pytorch.org/get-started"
    yield Finding("GPU", "missing", found, "estimates and plans for any GPU; training on this CPU", help_)


def _memory() -> Iterable[Finding]:
    """Check host memory, from which the host store allocates."""
    from overspill.runtime.transfer.host_memory import available_bytes

    yield Finding("host memory", "works", f"{format_bytes(available_bytes())} available", "what --store host can hold")


def _disk() -> Iterable[Finding]:
    """Check the directory that the disk store uses by default."""
    directory = tempfile.gettempdir()
    free = shutil.disk_usage(directory).free
    yield Finding(
        "disk", "works", f"{format_bytes(free)} free in {directory}", "what --store disk can hold", "--store-dir DIR"
    )


def _compiler() -> Iterable[Finding]:
    """Check the compiler that Inductor uses on the CPU."""
    found = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
    if found:
        yield Finding("C++ compiler", "works", found, "--backend inductor on the CPU")
    else:
        yield Finding(
            "C++ compiler",
            "missing",
            "none",
            "no --backend inductor on the CPU",
            "apt install g++, or dnf install gcc-c++",
        )


def _scripts() -> Iterable[Finding]:
    """Check how `estimate --script` keeps a script's writes from the disk, in a separate process."""
    code = (
        "import sys, pathlib; from overspill.estimation.script_process.confine import confine; "
        "print(confine(pathlib.Path(sys.argv[1])))"
    )
    with tempfile.TemporaryDirectory() as scratch:
        # S603: our own interpreter.
        done = subprocess.run([sys.executable, "-c", code, scratch], capture_output=True, text=True, check=False)  # noqa: S603
    # From the strongest way to the weakest.
    meaning = {
        "overlay": "a script's files are as it wrote them, and gone when it ends",
        "landlock": "what a script writes outside the temporary directory is refused",
        "audit": "what Python writes outside the temporary directory is refused; C code is not watched",
    }
    way = done.stdout.strip()
    if way in meaning:
        yield Finding("scripts", "works", way, meaning[way])
    else:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        yield Finding("scripts", "missing", last, "estimate --script needs --allow-writes", "Linux 5.13 or later")


def _extras() -> Iterable[Finding]:
    """Check the packages that only some features need."""
    for extra, (packages, serves) in EXTRAS.items():
        absent = [name for name in packages if not _is_installed(name)]
        if absent:
            there = [f"{name} {_release(name)}" for name in packages if name not in absent]
            found = "; ".join(filter(None, (f"no {', '.join(absent)}", ", ".join(there))))
            what = f"{extra}: {', '.join(absent)}" if there and absent != [extra] else extra
            yield Finding(what, "missing", found, serves, f"in a clone: {pip_install(extra)}")
        else:
            yield Finding(extra, "works", ", ".join(f"{name} {_release(name)}" for name in packages), serves)


def _libraries() -> Iterable[Finding]:
    """Check the libraries that users have; Overspill itself does without them."""
    there = [name for name in LIBRARIES if _is_installed(name)]
    absent = [name for name in LIBRARIES if name not in there]
    parts = (", ".join(f"{name} {_release(name)}" for name in there), f"no {', '.join(absent)}" if absent else "")
    yield Finding(
        "libraries", "works" if there else "missing", "; ".join(filter(None, parts)),
        "models and loops of theirs train within a budget", "pip install NAME" if absent else "",
    )  # fmt: skip


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # a part of one, as some leave behind
        return False


def _release(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(no release named)"
