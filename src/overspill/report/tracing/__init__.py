"""Write plans and runs as Perfetto traces and PyTorch memory snapshots."""

from .memory_viz import write_plan_snapshot as write_plan_snapshot
from .memory_viz import write_run_snapshot as write_run_snapshot
from .plan_trace import write_plan_trace as write_plan_trace
from .run_trace import write_run_trace as write_run_trace
