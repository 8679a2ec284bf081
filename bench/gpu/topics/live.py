"""Topics 4 and 11: PyTorch's CUDA memory from the live allocator. PyTorch takes an allocator once: one process each.

`python -m gpu.topics.live POOL` trains alone, for a program around it such as compute-sanitizer.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict

import torch
from torch import Tensor

from gpu.experiment import Figures, NotHere, Setting
from overspill.runtime.live.allocator import LiveAllocator
from overspill.runtime.live.steps import LiveSteps

NONE = "none"
STEPS = 8
WIDTH = 1024
MAIN_BYTES = 256 << 20
CHUNK_BYTES = 2 << 20
BLOCK_BYTES = 64 << 20
BLOCKS = 32
SANITIZER_SECONDS = 240


def losses(_: Setting, pool: str) -> Figures:
    """The losses of a network with a copy on a second stream, with memory from `pool`."""
    steps = _serving(pool)
    found = _trained(WIDTH, steps)
    if steps is None:
        return {"losses": found}
    return {"losses": found, **asdict(steps.allocator.statistics())}


def compared(setting: Setting, pool: str) -> Figures:
    """The same, and whether it is what PyTorch's own allocator gave."""
    found = losses(setting, pool)
    plain = setting.figures_of(f"4-live-{NONE}")["losses"]
    return found | {"identical": found["losses"] == plain}


def mapping_costs(setting: Setting) -> Figures:
    """Seconds for a block of the virtual pool: from the driver, from chunks that are there, and freed."""
    if not torch.cuda.is_available():
        raise NotHere("no CUDA device")
    torch.cuda.init()
    torch.cuda.current_stream().synchronize()  # the context that the allocator works in
    nbytes = BLOCK_BYTES // 16 if setting.small else BLOCK_BYTES
    allocator = LiveAllocator("cuda", "virtual", chunk_bytes=CHUNK_BYTES)
    found: Figures = {"block_bytes": nbytes, "chunk_bytes": CHUNK_BYTES}
    for what in ("from_driver", "from_chunks"):
        took, addresses = [], []
        for _ in range(BLOCKS):
            begun = time.perf_counter()
            addresses.append(allocator.allocate(nbytes))
            took.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        for address in addresses:
            allocator.free(address)
        found[f"allocate_{what}_seconds"] = statistics.median(took)
        found["free_seconds"] = (time.perf_counter() - begun) / BLOCKS
    return found


def out_of_memory(_: Setting, pool: str) -> Figures:
    """What an allocation that cannot succeed raises, and that the process goes on."""
    _serving(pool)
    try:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    except Exception as error:  # noqa: BLE001 - of which type it is, is the question
        kind, message = type(error).__name__, str(error).splitlines()[0][:300]
    else:
        return {"raised": None}
    goes_on = torch.ones(4, device="cuda").sum().item() == 4
    return {"raised": kind, "message": message, "goes_on": goes_on}


def exits_with_blocks(_: Setting, pool: str) -> Figures:
    """Exit code and standard error of a process that ends with live tensors of the pool."""
    code = f"from gpu.topics.live import _serving, _trained; _serving({pool!r}); kept = _trained(64, None, keep=True)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return {"exit_code": done.returncode, "standard_error": done.stderr[-2000:]}


def sanitized(_: Setting, pool: str) -> Figures:
    """What compute-sanitizer says of training on the pool."""
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if tool is None:
        raise NotHere("compute-sanitizer is not installed")
    words = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "gpu.topics.live", pool]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=SANITIZER_SECONDS)
    lines = (done.stdout + done.stderr).splitlines()
    summary = [line.strip() for line in lines if "ERROR SUMMARY" in line]
    return {"exit_code": done.returncode, "summary": summary[-1:], "tail": "\n".join(lines[-15:])}


def _serving(pool: str) -> LiveSteps | None:
    """PyTorch's memory from `pool` from now on; None for PyTorch's own allocator."""
    if pool == NONE:
        return None
    allocator = LiveAllocator("cuda", pool, main_bytes=MAIN_BYTES, chunk_bytes=CHUNK_BYTES)
    allocator.serve_pytorch()
    return LiveSteps(allocator)


def _trained(width: int, steps: LiveSteps | None, *, keep: bool = False) -> list[float]:
    """The losses of a small network whose inputs are copied to the host on a second stream."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    layers = [m for _ in range(4) for m in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    side = torch.cuda.Stream()
    found, copies = [], list[Tensor]()
    for _ in range(STEPS):
        if steps is not None:
            steps.begin_step()
        optimizer.zero_grad()
        x = torch.randn(width, width, device="cuda")
        loss = model(x).square().mean()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            copies.append(x.to("cpu", non_blocking=True))
        x.record_stream(side)
        del x
        loss.backward()
        optimizer.step()
        found.append(loss.item())
        del loss
    if keep:
        _KEPT.extend([model, optimizer])
    return found


_KEPT: list[object] = []


def _alone(pool: str) -> None:
    """Print the losses of training on `pool`, which must have served PyTorch."""
    steps = _serving(pool)
    print(_trained(WIDTH, steps))
    if steps is not None and not steps.allocator.statistics().requests:
        sys.exit(f"nothing was asked of the pool {pool}")


if __name__ == "__main__":
    _alone(sys.argv[1])
