"""`overspill calibrate`: measure this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from overspill.core.errors import RequestError

from .common import AsJson, Outcome, StoreDir, check_writable, narrate, optional, quiet_torch

ProfileFile = Annotated[Path | None, optional("FILE.json", "Write there instead of to the cache.", "--out")]


def calibrate(out: ProfileFile = None, store_dir: StoreDir = None, json: AsJson = False) -> Outcome:
    """Measure this CPU, its memory and its disk store, for plans that fit this machine. Takes some seconds.

    Under torchrun it adds the link between the ranks to what is known.
    """
    del json  # `main` reads it from the arguments
    import torch.distributed as dist

    from overspill.devices import calibrated_path, this_cpu
    from overspill.report.devices import profile_table

    if out is not None and out.suffix != ".json":
        raise RequestError(
            f"cannot write a profile to {out}: its name must end in .json, as a device file's; name another"
        )
    check_writable(out)
    # Measure, and save where plans find it.
    path = out or _ready(calibrated_path())
    with narrate() as narrator:
        quiet_torch()
        from overspill.runtime.calibrate import calibrate as measure
        from overspill.runtime.calibrate import calibrate_link

        if dist.is_available() and dist.is_torchelastic_launched():
            dist.init_process_group("gloo")
            device, rank = calibrate_link(this_cpu(), narrator.now), dist.get_rank()
            dist.destroy_process_group()
            if rank:
                raise typer.Exit
        else:
            device = measure(store_dir, narrator.now)
    device.save(path)
    answer = {**msgspec.to_builtins(device), "path": str(path)}
    return Outcome(answer, profile_table(device, f"written to {path}"))


def _ready(path: Path) -> Path:
    """Return `path`, with its directory made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"cannot make {path.parent}: {error.strerror}; name a file with --out") from None
    check_writable(path)
    return path
