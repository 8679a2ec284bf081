"""Topic 0: does what was installed import, and does the command line train on this device?"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from importlib.metadata import entry_points

import overspill
from gpu.experiment import Figures, Setting
from overspill.devices import load_device

NATIVE = (
    "overspill.placement.allocators._native",
    "overspill.placement.packing._packing",
    "overspill.policies.auto._search",
    "overspill.runtime.transfer._copies",
)


def imports(setting: Setting) -> Figures:
    """Modules, entry point and the data file of this device."""
    for name in NATIVE:
        import_module(name)
    backends = [e.name for e in entry_points(group="torch_dynamo_backends")]
    found: Figures = {"version": overspill.__version__, "torch_compile_knows_us": "overspill" in backends}
    if setting.is_cuda:
        import torch  # noqa: PLC0415

        name = torch.cuda.get_device_name()
        try:
            found["device_file"] = load_device(name).name
        except overspill.errors.RequestError as error:
            found |= {"device_file": None, "device_file_error": str(error)}
    return found


def command_line(setting: Setting) -> Figures:
    """A small model trained under a budget, and proved equal, by the command that the README has."""
    words = [
        "train",
        "resnet18",
        "--small",
        "--batch",
        "8",
        "--budget",
        "smallest",
        "--steps",
        "3",
        "--check",
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "overspill", *words, "--device", setting.device],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    setting.note(exit_code=done.returncode, standard_error=done.stderr[-2000:])
    answer = json.loads(done.stdout) if done.stdout else {}
    keys = ("identical", "budget_bytes", "planned_peak_bytes", "measured_peak_bytes", "offloaded_bytes")
    return {key: answer.get(key) for key in keys}
