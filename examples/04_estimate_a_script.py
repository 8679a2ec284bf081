"""How much memory an unmodified training script takes, as `overspill estimate --script train_digits.py` tells it."""

from pathlib import Path

from overspill.core.units import format_bytes
from overspill.estimation.api import Setting, of_recording
from overspill.estimation.script import record_script

SCRIPT = Path(__file__).with_name("train_digits.py")
for batch in (256, 1024, 4096):
    run = record_script(SCRIPT, ["--batch-size", str(batch), "--epochs", "3"])
    estimate = of_recording(run.recording, run.name, Setting.of("rtx3060"))
    verdict = "fits" if estimate.fits() else "does not fit"
    print(
        f"batch {batch}: {format_bytes(estimate.total_bytes)} after {run.steps} steps of {run.optimizers[0]}, {verdict}"
    )
largest = max(estimate.breakdown.items(), key=lambda item: item[1])
print(f"most of it: {largest[0]} with {format_bytes(largest[1])}")
