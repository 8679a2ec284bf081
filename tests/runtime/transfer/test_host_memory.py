"""The C library's heap suits the step: its free end stays, or where memory is scarce large blocks go back at once."""

import subprocess
import sys
import textwrap

import pytest

from overspill.runtime.transfer.host_memory import available_bytes, suit_heap

SCARCE = """
import resource
from overspill.runtime.transfer.host_memory import available_bytes, suit_heap
resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
print(available_bytes() < 4 * 2**30, suit_heap(2**20), suit_heap(3 * 2**30), suit_heap(2**20))
"""
FAULTS = """
import resource, torch
from overspill.runtime.transfer.host_memory import return_freed_blocks, suit_heap
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(20 << 18) for _ in range(6)]
    del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
found = {chosen}
for _ in range(5):  # blocks find their places in the heap
    faults()
print(found, faults())
"""


def answers(script: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.long
def test_the_address_space_limit_counts_and_what_was_scarce_once_stays_so() -> None:
    assert answers(SCARCE) == ["True", "False", "True", "True"], "glibc can set the threshold"


@pytest.mark.long
def test_where_memory_is_ample_freed_blocks_are_used_again_without_page_faults() -> None:
    """120 MiB in blocks of 20 MiB, of which glibc by itself would give most back."""
    ample, kept = answers(FAULTS.format(chosen="suit_heap(2**20)"))
    _, returned = answers(FAULTS.format(chosen="return_freed_blocks()"))
    assert ample == "False"
    assert int(kept) < 100
    assert int(returned) > 10_000


def test_a_small_step_is_never_scarce_here() -> None:
    assert available_bytes() > 0
    assert not suit_heap(1)
