"""The C functions that PyTorch calls, as it meets them: its own error where memory is out, all devices served, no throw from a free."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.runtime.live.driver import COMPILER, build_driver

from overspill.core.errors import RequestError
from overspill.runtime.live import _live
from overspill.runtime.live.allocator import LiveAllocator, check_benchmark

MIB = 1 << 20

CALLER = r"""
#include <c10/util/Exception.h>
#include <cstring>

extern "C" int failure(void* (*allocate)(ssize_t, int, void*), ssize_t nbytes, int device, char* message) {
    try {
        allocate(nbytes, device, nullptr);
    } catch (const c10::OutOfMemoryError& error) {
        std::strncpy(message, error.what_without_backtrace(), 999);
        return 1;
    } catch (const std::exception& error) {
        std::strncpy(message, error.what(), 999);
        return 2;
    }
    return 0;
}
"""


def library() -> ctypes.CDLL:
    found = ctypes.CDLL(_live.__file__)
    found.overspill_malloc.restype = ctypes.c_void_p
    found.overspill_malloc.argtypes = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    found.overspill_free.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    return found


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_out_of_memory_is_the_error_that_pytorch_and_cudnn_recognise(tmp_path: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    (tmp_path / "caller.cpp").write_text(CALLER)
    subprocess.run(
        [COMPILER, "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder}/include", "-o", tmp_path / "caller.so",
         tmp_path / "caller.cpp", f"-L{torch_folder}/lib", "-lc10", f"-Wl,-rpath,{torch_folder}/lib"],
        check=True,
    )  # fmt: skip
    allocator = LiveAllocator("host", capacity_bytes=64 * MIB)
    assert allocator._core.install(60)
    caller, message = ctypes.CDLL(tmp_path / "caller.so"), ctypes.create_string_buffer(1000)
    caller.failure.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_char_p)
    malloc = ctypes.cast(library().overspill_malloc, ctypes.c_void_p)
    for _ in range(2):
        assert caller.failure(malloc, 1 << 40, 60, message) == 1, message.value
    assert (
        b"CUDA out of memory: Overspill's allocator finds no room for 1099511627776 bytes on device 60" in message.value
    )
    assert caller.failure(malloc, MIB, 60, message) == 0


def test_one_allocator_serves_all_devices() -> None:
    """CUDAPluggableAllocator is asked for tensors on `cuda:1` too."""
    LiveAllocator("host")._core.install(61)
    found = library()
    address = found.overspill_malloc(3 * MIB, 59, None)
    assert address
    found.overspill_free(address, 3 * MIB, 59, None)
    assert not LiveAllocator("host")._core.install(59)


ON_A_BROKEN_DEVICE = """
import ctypes
from overspill.runtime.live import _live
from overspill.runtime.live.allocator import LiveAllocator

allocator = LiveAllocator("cuda", "two-ended", main_bytes=32 << 20)
assert allocator._core.install(0)
library = ctypes.CDLL(_live.__file__)
library.overspill_malloc.restype = ctypes.c_void_p
library.overspill_malloc.argtypes = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
library.overspill_free.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
first, second = (library.overspill_malloc(1000, 0, stream) for stream in (0, 1))
ctypes.CDLL("libcuda.so.1").stand_in_break()
library.overspill_free(first, 1000, 0, 0)
library.overspill_free(second, 1000, 0, 1)
print("went on")
"""


@pytest.mark.long
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_a_free_after_an_error_of_the_device_does_not_end_the_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ON_A_BROKEN_DEVICE],
        cwd=Path(__file__).parents[3], env=build_driver(tmp_path), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "went on\n"
    assert done.stderr.count("overspill: a block could not be freed") == 1
    assert "leaked" not in done.stderr


def test_what_asks_pytorchs_own_allocator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_benchmark()
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with pytest.raises(RequestError, match=r"torch\.backends\.cudnn\.benchmark"):
        check_benchmark()
