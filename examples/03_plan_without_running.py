"""A plan for another machine, made here without a GPU and without the model's memory, and some policies beside it."""

from overspill.core.units import format_bytes
from overspill.models import load
from overspill.runtime.compiled.session import Options
from overspill.runtime.training import Training, preview

job = Training(lambda: load("resnet18", small=True), batch=32, optimizer="momentum")
for policy in ("in-core", "vdnn-all", "superneurons", "auto"):
    budget = 0.7 if policy == "auto" else "24GiB"
    plan = preview(job, Options(budget=budget, policy=policy, device="rtx4090"))
    print(
        f"{policy:11s} peak {format_bytes(plan.peak_bytes):>10s} of {format_bytes(plan.unmanaged_peak_bytes)}, "
        f"moves {format_bytes(plan.offloaded_bytes):>10s}, simulated slowdown {plan.slowdown:.3f}"
    )
