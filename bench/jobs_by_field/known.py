"""What is known of jobs that do not simply train; all others have the same bits."""

from __future__ import annotations

from typing import NamedTuple

REFUSED, OTHER_BITS, CRASH = "refused", "other bits", "crash"
UNSUPPORTED, UNPLANNED = "UnsupportedError", "UnplannedError"


class Known(NamedTuple):
    """The kind of the outcome, the name of the error, and why it is so."""

    kind: str
    error: str
    reason: str


READS = Known(REFUSED, UNSUPPORTED, "the step asks for values that follow from its parameters or from random numbers")
CHECKS = Known(REFUSED, UNSUPPORTED, "torch.distributions checks arguments by value: pass validate_args=False")
NESTED = Known(REFUSED, UNSUPPORTED, "sizes of a nested tensor follow from values")
SPARSE = Known(REFUSED, UNSUPPORTED, "a plan holds dense tensors")
VIEW_AS_COMPLEX = Known(REFUSED, UNSUPPORTED, "Inductor's program makes a view of its input by a library call")
TWICE = Known(
    OTHER_BITS,
    "",
    "plain PyTorch moves running statistics a second time where it computes a checkpoint again, Overspill once",
)

KNOWN: dict[tuple[str, str], Known] = {
    **{
        (name, "train_step"): READS
        for name in ("branch-on-loss", "detr", "experts-loop", "retinanet", "triplets", "wav2vec2")
    },
    **{(name, "train_step"): CHECKS for name in ("actor-critic", "normalizing-flow", "ppo", "soft-actor-critic")},
    **{("nested", way): NESTED for way in ("compile", "train_step")},
    **{("dlrm-sparse", way): SPARSE for way in ("compile", "train_step")},
    **{("checkpoint-batch-norm", way): TWICE for way in ("compile", "train_step")},
    ("experts-loop", "compile"): Known(REFUSED, UNPLANNED, "how many rows an expert gets follows from values"),
    ("gradient-hooks", "compile"): Known(
        OTHER_BITS, "", "hooks on weights run in another order, and draw other numbers"
    ),
    ("gradient-hooks", "train_step"): Known(REFUSED, UNSUPPORTED, "a planned step does not call hooks on weights"),
    ("gan", "train_step"): Known(
        CRASH, "RuntimeError", "buffers of a module outside of the step's model cannot be written"
    ),
}
"""By job and way."""
