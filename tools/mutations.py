"""Plants defects in the source, one at a time, and shows that tests of `make test` catch each.

    python tools/mutations.py [NAME ...]

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
        "(ticket or self._read(stored, storage)).wait()",
        "(ticket or self._read(stored, storage))",
        ("tests/runtime/transfer", "tests/runtime/compiled"),
    ),
    Mutation(
        "a prefetch does not wait for the update on the host that writes it",
        "runtime/transfer/engine.py",
        "if (updating := stored.update_under_way()) is not None:\n            return",
        "if (updating := None) is not None:\n            return",
        ("tests/runtime/step/test_host_updates.py",),
    ),
    Mutation(
        "updates on the host go by the settings of later",
        "runtime/step/host_updates.py",
        "{of: as_of_now(of.optimizer) for of in optimizers if of.groups}",
        "{of: of.optimizer for of in optimizers if of.groups}",
        ("tests/runtime/step/test_host_updates.py", "tests/runtime/compiled/test_host_updates.py"),
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
        "an off-by-one in a size: a whole number of pages is rounded to the next",
        "placement/simulated_device.py",
        "return -(-nbytes // step) * step",
        "return -(-(nbytes + 1) // step) * step",
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
        ("tests/runtime/compiled/test_call_patterns.py", "tests/runtime/test_models.py"),
    ),
    Mutation(
        "a copy does not queue behind the one before it",
        "simulate/clock.py",
        "start = max(self.now, self.host, free)",
        "start = max(self.now, self.host)",
        ("tests/simulate",),
    ),
    Mutation(
        "compute does not wait for a gradient on its way to the host where memory is short",
        "planning/on_host.py",
        "while self.limit is not None and self.held and",
        "while False and",
        ("tests/policies/test_updates_on_host.py",),
    ),
    Mutation(
        "a weight comes back before the host has updated it",
        "simulate/clock.py",
        "self.held[stream, instruction.target] = start = updated",
        "pass",
        ("tests/simulate",),
    ),
    Mutation(
        "a slice of a parameter is updated with the state of another",
        "runtime/step/updates.py",
        "sliced = {key: tensor[rows] for",
        "sliced = {key: tensor.flip(0)[rows] if tensor.dim() else tensor[rows] for",
        ("tests/runtime/step",),
    ),
    Mutation(
        "a death in a recording is missed",
        "capture/recording/recorder.py",
        "lambda _: self._death(key, position)",
        "lambda _: None",
        ("tests/capture/recording",),
    ),
    Mutation(
        "a step does not look at what the model's Python has become",
        "runtime/step/python_state.py",
        "            if changed := one.changed():\n                return changed\n",
        "",
        ("tests/runtime/step/test_python_state.py", "tests/runtime/step/test_edits.py"),
    ),
    Mutation(
        "an empty list or dictionary that is filled later goes unnoticed",
        "runtime/step/python_state.py",
        "if any(self._empty_values):",
        "if False:",
        ("tests/runtime/step/test_python_state.py", "tests/runtime/step/test_edits.py"),
    ),
    Mutation(
        "lists and dictionaries that forward reads are compared by identity only",
        "runtime/step/tracked_values.py",
        "BY_IDENTITY = (\n",
        "BY_IDENTITY = (list, dict,\n",
        ("tests/runtime/step/test_python_state.py", "tests/runtime/step/test_edits.py"),
    ),
    Mutation(
        "a forward that draws from Python's random numbers is captured",
        "runtime/step/python_state.py",
        "if not _same_randomness(self._randomness, python_randomness()):",
        "if False:",
        ("tests/runtime/step/test_python_state.py",),
    ),
    Mutation(
        "zero and minus zero are the same to a step's guards",
        "runtime/step/compared.py",
        "        return repr(one) == repr(other)\n",
        "        return one == other\n",
        ("tests/runtime/step/test_followed_losses.py",),
    ),
    Mutation(
        "a model's layers and parameters are always where they were",
        "runtime/step/structure.py",
        "all(map(is_, _entries(table), entries))",
        "True",
        ("tests/runtime/step/test_edits.py", "tests/runtime/step/test_changed_from_outside.py"),
    ),
    Mutation(
        "a use of a weight that is in the store, by another reference, goes unnoticed",
        "runtime/step/away.py",
        "if function not in _WITHOUT_VALUES:",
        "if False:",
        ("tests/runtime/step/test_changed_from_outside.py",),
    ),
    Mutation(
        "data that a parameter was given while it was away is not taken over",
        "runtime/step/residency.py",
        " and not _is_placeholder(resident.tensor):",
        " and False:",
        ("tests/runtime/step/test_changed_from_outside.py",),
    ),
    Mutation(
        "a parameter that the optimizer let go of is trained on",
        "runtime/step/state.py",
        "                self._disown(name)\n                continue\n",
        "                continue\n",
        ("tests/runtime/step/test_edits.py", "tests/runtime/step/test_changed_from_outside.py"),
    ),
    Mutation(
        "a step does not take the lock that keeps others out",
        "runtime/step/gate.py",
        "if is_mine := lock.acquire(blocking=False):",
        "if is_mine := lock.acquire(blocking=False) or True:",
        ("tests/runtime/step/test_observers.py",),
    ),
    Mutation(
        "a step does not wait for threads that read",
        "runtime/step/gate.py",
        "if not (steps and self._others_read()):",
        "if True:",
        ("tests/runtime/step/test_observers.py",),
    ),
    Mutation(
        "who reads from within a step sees half of it",
        "runtime/step/gate.py",
        "            if self.is_busy:\n                raise RequestError(WITHIN)\n",
        "",
        ("tests/runtime/step/test_observers.py",),
    ),
    Mutation(
        "signal handlers run in the middle of a step",
        "runtime/step/gate.py",
        "            signal.signal(number, note)\n",
        "            pass\n",
        ("tests/runtime/step/test_observers.py", "tests/runtime/step/test_faults.py"),
    ),
    Mutation(
        "a child that was forked goes on writing to its parent's file",
        "runtime/transfer/disk_store.py",
        "        if self.is_forked:\n            raise StoreError(",
        "        if False:\n            raise StoreError(",
        ("tests/runtime/step/test_forks.py",),
    ),
    Mutation(
        "a step that ran out of memory is undone, though buffers have changed",
        "runtime/step/call.py",
        "run, is_short = call.run, is_out_of_memory(error)",
        "run, is_short = call.run, False",
        ("tests/runtime/step/test_faults.py",),
    ),
    Mutation(
        "an update that was stopped half-way is done again",
        "runtime/generated.py",
        '            before.append(f"    progress.lost = {str(mutation)!r}")\n',
        "            pass\n",
        ("tests/runtime/step/test_faults.py",),
    ),
    Mutation(
        "a file is written in place",
        "core/files.py",
        "            part.replace(target)\n",
        "            target.write_bytes(content)\n            part.unlink()\n",
        ("tests/runtime/step/test_crash.py",),
    ),
    Mutation(
        "what Dynamo keeps of a model keeps its session",
        "runtime/compiled/backend.py",
        "self._session = weakref.ref(session)",
        "self._session = lambda: session",
        ("tests/runtime/compiled/test_soak.py",),
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
