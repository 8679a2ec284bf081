"""The C library's heap suits the step: its free end stays, or where memory is scarce large blocks go back at once."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from overspill.runtime.transfer import host_memory
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


V1, V2 = "9:cpu:/\n4:memory:{}\n0::/", "0::{}"
STAT = "inactive_file 300\nactive_file 200\nslab_reclaimable 50\nanon 99\ntotal_inactive_file 30\ntotal_active_file 20"


@pytest.mark.parametrize(
    ("member", "files", "left"),
    [
        (V2.format("/"), {"memory.max": "1000", "memory.current": "900"}, 650),
        (V2.format("/a/b"), {"memory.max": "9000", "memory.current": "900", "a/memory.max": "2000", "a/memory.current": "1900",
                             "a/memory.stat": "file 7", "a/b/memory.max": "max", "a/b/memory.current": "7"}, 100),
        (V2.format("/elsewhere"), {"memory.max": "1000", "memory.current": "300"}, 1000),
        (V1.format("/docker/x"), {"memory/memory.limit_in_bytes": "1000", "memory/memory.usage_in_bytes": "900",
                                  "memory/memory.stat": STAT}, 150),
    ],
)  # fmt: skip
def test_file_pages_of_a_container_are_not_taken(
    member: str, files: dict[str, str], left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"memory.stat": STAT, "member": member, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(host_memory, "_GROUPS", tmp_path)
    monkeypatch.setattr(host_memory, "_GROUPS_OF_PROCESS", tmp_path / "member")
    assert available_bytes() == left


def test_a_small_step_is_never_scarce_here() -> None:
    assert available_bytes() > 0
    assert not suit_heap(1)
