"""Kernels of Triton that a program launches itself: with a stand-in for Triton's launcher, which is not installed without CUDA."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo.utils  # asks for Triton when it is imported

from overspill.capture.virtual_gpu.gpu import VirtualGpu
from overspill.capture.virtual_gpu.values.invented import Invented
from overspill.capture.virtual_gpu.values.real_values import values_of

LAUNCHER = """
class KernelInterface:
    def __getitem__(self, grid):
        raise AssertionError("libcuda.so cannot found!")
"""


@pytest.mark.parametrize("early", [False, True])
def test_a_launch_allocates_nothing_and_what_it_is_given_is_unknown_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("triton", "triton.runtime", "triton.runtime.jit"):
        monkeypatch.setitem(sys.modules, name, None)  # so that they are gone again at the end
        del sys.modules[name]
    folder = tmp_path / "triton" / "runtime"
    folder.mkdir(parents=True)
    for file, text in (
        (folder.parent / "__init__.py", ""),
        (folder / "__init__.py", ""),
        (folder / "jit.py", LAUNCHER),
    ):
        file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    if early:
        importlib.import_module("triton.runtime.jit")
    with VirtualGpu(invented=Invented()) as gpu:
        kernel = importlib.import_module("triton.runtime.jit").KernelInterface()
        seen = torch.tensor([1, 2]).cuda()
        assert values_of(seen) is not None
        before = gpu.recorder.live_bytes
        kernel[(1,)](seen, 2, BLOCK=16)
        assert gpu.recorder.live_bytes == gpu.recorder.peak_bytes == before
        assert values_of(seen) is None
    with pytest.raises(AssertionError):
        kernel[(1,)]
