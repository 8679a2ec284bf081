"""torch's compiler stays out of a recording that does not use it, and is whole for one that does, and after."""

import subprocess
import sys

import pytest

BEGIN = """
import sys
import torch
from overspill.capture.virtual_gpu.gpu import VirtualGpu

def trained():
    with VirtualGpu():
        model = torch.nn.Linear(4, 4).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        torch.utils.checkpoint.checkpoint(model, torch.ones(2, 4, device="cuda"), use_reentrant=False).sum().backward()
        optimizer.step()
        {inside}

trained()
"""
CASES = {
    "nobody": ("pass", "assert 'torch._dynamo' not in sys.modules and 'torch._inductor' not in sys.modules"),
    "after": ("pass", "assert torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2)).tolist() == [2, 2]"),
    "its settings": ("import torch._dynamo.config as c; c.suppress_errors = True", "assert torch._dynamo.config.suppress_errors"),
    "a module": ("from torch._dynamo.utils import counters; assert counters is not None", "import torch._dynamo.utils as u; assert u is sys.modules['torch._dynamo.utils']"),
    "a function": ("assert torch._dynamo.disable(lambda: 3)() == 3; torch._dynamo.reset()", "assert torch._dynamo.disable(lambda: 3)() == 3"),
    "an optimizer made before": ("pass", "m = torch.nn.Linear(2, 2); o = torch.optim.SGD(m.parameters(), 0.1); torch.compile(m, backend='eager')(torch.ones(1, 2)).sum().backward(); o.step()"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_the_compiler_is_there_for_those_who_use_it(case: str) -> None:
    inside, after = CASES[case]
    program = f"{BEGIN.format(inside=inside)}\n{after}\ntrained()\nassert torch.cuda.is_available.__module__ == 'torch.cuda'\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
