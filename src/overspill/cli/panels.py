"""How `--help` shows options: ten or so that most people need, and with `--help-all` all of them in panels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from overspill.job import Job
from overspill.job.ways import ways_of

HELP_ALL = "--help-all"
_REST = "Output"
PANELS: Mapping[str, str] = {
    "Model": "batch optimizer dtype seq-len image-size small",
    "Scripts, inference, other frameworks": "script iterations time-limit allow-writes inference generate mxnet "
    "tensorflow onnx input",
    "Training": "steps accumulate clip-norm clip-value set-to-none checkpointing reentrant attention channels-last "
    "shift-logits loss-chunks objective keep-outputs offload-optimizer cudnn-benchmark check checksum",
    "Fine-tuning": "lora lora-targets lora-dropout quantize upcast",
    "Several GPUs": "gpus parallel param-dtype reduce-dtype cpu-offload micro-batches",
    "Device": "gpu device torch cuda allocator allocator-config store store-dir host-budget disk-bandwidth",
    "Budget and plan": "budget max most-slowdown capacity policy policies placement placers points whole-step update "
    "backend partition compiled times solver seed",
}
"""The options of each panel in their order, without dashes; those of no panel are about output."""
FIRST = frozenset(
    ("batch", "optimizer", "dtype", "seq-len", "script", "lora", "checkpointing", "gpu", "budget", "most-slowdown",
     "policies", "steps", "check", "report", "json")
)  # fmt: skip
"""The options that `--help` shows where a command has more than a dozen."""
NEVER: Mapping[str, frozenset[str]] = {
    "train": frozenset(
        " ".join((PANELS["Scripts, inference, other frameworks"], PANELS["Several GPUs"])).split()
    ) | {name.replace("_", "-") for name, way in ways_of(Job).items() if not way.trained}
}  # fmt: skip
"""Options that a command refuses whatever their value, with a line that says why: no help shows them."""
_MANY = 12
COMMAND_PANELS: Mapping[str, str] = {
    "Check before the run": "estimate advise plan",
    "Train": "demo train run doctor",
    "Compare": "compare sweep policies reproduce",
    "Look up and measure": "models devices calibrate snapshot pack",
}
"""The commands of each panel."""
_PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names.split()}
_ORDER = {name: at for at, name in enumerate(name for names in PANELS.values() for name in names.split())}


def arrange(commands: Mapping[str, Any], *, everything: bool) -> None:
    """Set the panel, order and visibility of the options of `commands`; `everything` shows all that they take."""
    for name, command in commands.items():
        options = [one for one in command.params if isinstance(one, typer.core.TyperOption)]
        short = not everything and len(options) > _MANY
        never = NEVER.get(name, frozenset())
        for option in options:
            word = _word(option)
            if option.is_flag:
                option.metavar = " "  # else it says <bool>
            option.hidden = word in never or (short and word not in FIRST)
            option.rich_help_panel = _PANEL_OF.get(word, _REST) if everything and len(options) > _MANY else None
        others = [one for one in command.params if one not in options]
        command.params[:] = [*others, *sorted(options, key=lambda one: _ORDER.get(_word(one), len(_ORDER)))]
        command.epilog = f"{HELP_ALL} shows all {len(options) - len(never)} options." if short else None


def _word(option: typer.core.TyperOption) -> str:
    return next(name for name in option.opts if name.startswith("--"))[2:]
