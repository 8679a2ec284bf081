"""Plants a dozen defects, one at a time, and shows that tests of `make test` catch each.

    python bench/mutations.py [NAME ...]

Each defect is one changed line of a source file, which is put back at once. The tests that are run are those of `make test`
in a few folders, until the first failure. Exits with 1 if a defect goes unnoticed; takes a few minutes.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutation:
    """`old` in `file` becomes `new`, and one of `tests` has to fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        "a dropped wait: compute reads a tensor that is still on its way back",
        "planning/assemble.py",
        "self.made.append(Instruction(Verb.AWAIT_PREFETCH, transfer.gap.tensor))",
        "pass",
        ("tests/policies",),
    ),
    Mutation(
        "the engine does not wait for a prefetch",
        "runtime/transfer/engine.py",
        "(ticket or self._read(stored, tensor)).wait()",
        "(ticket or self._read(stored, tensor))",
        ("tests/runtime/transfer", "tests/runtime/compiled"),
    ),
    Mutation(
        "a wrong free: the checker lets a caller's tensor go",
        "simulate/check.py",
        "if not tensor.movable:",
        "if False:",
        ("tests/simulate",),
    ),
    Mutation(
        "a tensor is freed although an op still reads it",
        "simulate/check.py",
        "if self.state[tensor] not in (_State.PRESENT, _State.LEAVING):",
        "if False:",
        ("tests/simulate",),
    ),
    Mutation(
        "an off-by-one in a size: a block of exactly 512 bytes is rounded to the next",
        "placement/allocators/caching.py",
        "return round_up(nbytes, MIN_BLOCK_BYTES)",
        "return round_up(nbytes + 1, MIN_BLOCK_BYTES)",
        ("tests/placement",),
    ),
    Mutation(
        "a workspace is left out of the peak",
        "simulate/check.py",
        "self._note_peak(self._workspace(op, algorithm), index)",
        "self._note_peak(0, index)",
        ("tests/simulate", "tests/policies"),
    ),
    Mutation(
        "a slot of the store is given to two tensors",
        "runtime/transfer/stores.py",
        "self._tails[chunk] = (used + nbytes, size)",
        "self._tails[chunk] = (used, size)",
        ("tests/runtime/transfer",),
    ),
    Mutation(
        "what a step updated is not brought back before it is read",
        "runtime/step/residency.py",
        "            self._bring()\n",
        "            pass\n",
        ("tests/runtime/step",),
    ),
    Mutation(
        "the optimizer's state is left out of the budget",
        "runtime/surroundings.py",
        "optimizer_state_bytes=needs.state_bytes,",
        "optimizer_state_bytes=0,",
        ("tests/runtime/compiled/test_call_patterns.py", "tests/runtime/compiled/test_exactness.py"),
    ),
    Mutation(
        "a copy does not queue behind the one before it",
        "simulate/clock.py",
        "start = max(self.now, free)",
        "start = self.now",
        ("tests/simulate",),
    ),
    Mutation(
        "a slice of a parameter is updated with the state of another",
        "runtime/step/updates.py",
        "given = {key: tensor[rows] for",
        "given = {key: tensor.flip(0)[rows] if tensor.dim() else tensor[rows] for",
        ("tests/runtime/step",),
    ),
    Mutation(
        "a death in a recording is missed",
        "capture/recording/recorder.py",
        "lambda _: self._death(key, position)",
        "lambda _: None",
        ("tests/capture/recording",),
    ),
)


def caught(mutation: Mutation) -> str | None:
    """The test that failed with the defect in place; None when none did."""
    path = ROOT / "src/overspill" / mutation.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        raise SystemExit(
            f"{mutation.file} has {text.count(mutation.old)} places like {mutation.old!r}: mend mutations.py"
        )
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "2", "-m", "not long", "--tb=no", *mutation.tests]
    try:
        path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    finally:
        path.write_text(text, encoding="utf-8")
    if done.returncode not in (0, 1, 2):
        raise SystemExit(done.stdout + done.stderr)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" ")[1] if failed else None


def main() -> int:
    """Plant all defects, or those whose names contain one of the arguments."""
    chosen = [m for m in MUTATIONS if not sys.argv[1:] or any(word in m.name for word in sys.argv[1:])]
    unnoticed = 0
    for mutation in chosen:
        begun = time.monotonic()
        test = caught(mutation)
        unnoticed += test is None
        print(
            f"{'caught' if test else 'NOT CAUGHT'}: {mutation.name}: {test} ({time.monotonic() - begun:.0f} s)",
            flush=True,
        )
    print(f"{len(chosen) - unnoticed} of {len(chosen)} defects were caught")
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main())
