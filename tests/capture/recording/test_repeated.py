"""A step that is repeated without a run is the step that runs."""

from dataclasses import replace

import pytest

from overspill.capture.recording.recording import Recording
from overspill.capture.recording.repeated import repeated
from overspill.capture.virtual_gpu.record import record
from overspill.estimation.programs import program_of, recorded
from overspill.job import Job, NamedModel

GPT2 = "decoder:width=32,depth=2,heads=2,vocabulary=64,seq_len=16"


@pytest.mark.short("job0", "job2", "job4")
@pytest.mark.parametrize(
    "job",
    [
        Job(NamedModel(GPT2), 2, "adamw"),
        Job(NamedModel(GPT2), 2, "sgd", set_to_none=False, keep_outputs=True),
        Job(NamedModel(GPT2), 2, "momentum", accumulate=2, clip_norm=1.0, dtype="amp"),
        Job(NamedModel(GPT2), 2, "adamw", checkpointing=True, lora=2, dtype="bfloat16"),
        Job(NamedModel(GPT2), 2, "adamw8bit", quantize="4bit", lora=2),
        Job(NamedModel("resnet18"), 2, "adafactor"),
    ],
)
def test_three_steps_are_two_of_which_the_second_is_repeated(job: Job) -> None:
    three = until_its_last_op(record(program_of(job)))
    found = repeated(record(program_of(job, iterations=2, marks_end=True)))
    assert found is not None
    assert until_its_last_op(found) == three
    assert until_its_last_op(recorded(job, (8, 0), 3, lines=True)) == three


def until_its_last_op(recording: Recording) -> Recording:
    """Return the recording without an order of the frees behind it, when the program ends."""
    last = max(a.start for a in recording.allocations) + 1
    return replace(recording, allocations=tuple(replace(a, end=min(a.end, last)) for a in recording.allocations))


def test_a_step_that_does_other_work_than_the_first_is_not_repeated() -> None:
    job = Job(NamedModel(GPT2), 2, "adamw")
    two = record(program_of(job, iterations=2, marks_end=True))
    other = next(op for op in two.ops if op.iteration == 1 and op.name == "gelu")
    changed = tuple(replace(op, name="relu") if op is other else op for op in two.ops)
    assert repeated(replace(two, ops=changed)) is None
