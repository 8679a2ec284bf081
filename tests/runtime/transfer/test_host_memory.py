"""Memory is scarce by the tightest of the limits that the process lives under."""

import subprocess
import sys
import textwrap

from overspill.runtime.transfer.host_memory import available_bytes, economise

SCRIPT = """
import resource
from overspill.runtime.transfer.host_memory import available_bytes, economise
resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
print(available_bytes() < 4 * 2**30, economise(2**20), economise(3 * 2**30))
"""


def test_the_address_space_limit_counts_and_only_large_steps_are_scarce() -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, check=True)
    assert done.stdout.split()[:2] == ["True", "False"]
    assert done.stdout.split()[2] == "True", "glibc can set the threshold"


def test_a_small_step_changes_nothing_here() -> None:
    assert available_bytes() > 0
    assert not economise(1)
