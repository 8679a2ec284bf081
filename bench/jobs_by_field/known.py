"""What is known of jobs that do not simply train; all others have the same bits."""

from __future__ import annotations

from typing import NamedTuple

REFUSED, OTHER_BITS, CRASH, PLAIN_FAILS = "refused", "other bits", "crash", "plain fails too"
UNSUPPORTED, UNPLANNED = "UnsupportedError", "UnplannedError"


class Known(NamedTuple):
    """The kind of the outcome, the name of the error, and why it is so; whether it `varies`, and may be identical too."""

    kind: str
    error: str
    reason: str
    varies: bool = False


READS = Known(REFUSED, UNSUPPORTED, "the step asks for values that follow from its parameters")
NESTED = Known(REFUSED, UNSUPPORTED, "sizes of a nested tensor follow from values")
SPARSE = Known(REFUSED, UNSUPPORTED, "a plan holds dense tensors")
DERIVED = Known(PLAIN_FAILS, "RuntimeError", "stock torch.compile's gradients cannot be differentiated again")
NO_SPARSE = Known(PLAIN_FAILS, "InductorError", "stock torch.compile does not take sparse gradients")
ROWS = Known(REFUSED, UNPLANNED, "how many rows an expert gets follows from values")
TWICE = Known(
    OTHER_BITS,
    "",
    "plain PyTorch moves running statistics a second time where it computes a checkpoint again, Overspill once",
)

KNOWN: dict[tuple[str, str], Known] = {
    **{
        (name, f"train_step{kernels}"): READS
        for name in ("branch-on-loss", "detr", "triplets")
        for kernels in ("", "-inductor")
    },
    ("experts-loop", "train_step-inductor"): READS,
    **{("nested", f"{way}{kernels}"): NESTED for way in ("compile", "train_step") for kernels in ("", "-inductor")},
    **{("dlrm-sparse", way): SPARSE for way in ("compile", "train_step")},
    **{("checkpoint-batch-norm", way): TWICE for way in ("compile", "train_step")},
    ("wav2vec2", "train_step"): Known(REFUSED, UNSUPPORTED, "it draws its masks in time by NumPy"),
    ("wav2vec2", "compile"): Known(
        OTHER_BITS, "", "a tensor is read on both sides of a graph break, and its gradients add up in another order"
    ),
    **{("experts-loop", f"compile{k}"): ROWS for k in ("", "-inductor")},
    ("gradient-hooks", "compile"): Known(
        OTHER_BITS, "", "hooks on weights run in another order, and draw other numbers"
    ),
    ("gradient-hooks", "train_step-inductor"): Known(
        REFUSED, UNSUPPORTED, "torch.compile calls hooks on weights beside its kernels"
    ),
    **{
        ("cumulative-batch-norm", f"compile{k}"): Known(
            REFUSED, UNPLANNED, "its batch norm reads how many batches there were"
        )
        for k in ("", "-inductor")
    },
    ("mamba", "compile"): Known(
        OTHER_BITS, "", "told that it is compiled, the model scans in another way than in eager"
    ),
    ("qwen3-next", "compile-inductor"): Known(
        OTHER_BITS, "", "stock torch.compile's own bits differ from run to run, in one process too", varies=True
    ),
    ("retinanet", "train_step-inductor"): Known(
        REFUSED, UNSUPPORTED, "it reads random numbers, which Inductor's kernels draw"
    ),
    **{
        (name, f"{way}-inductor"): DERIVED
        for name in ("forces", "gradient-penalty", "maml", "pinn")
        for way in ("compile", "train_step")
    },
    **{("dlrm-sparse", f"{way}-inductor"): NO_SPARSE for way in ("compile", "train_step")},
    ("wav2vec2", "train_step-inductor"): Known(
        REFUSED,
        UNSUPPORTED,
        "its LayerDrop reads random numbers, which Inductor's kernels draw; and it draws its masks by NumPy",
    ),
    ("gat", "train_step-inductor"): Known(
        OTHER_BITS,
        "",
        "stock torch.compile breaks the graph where self loops are taken out, and so has other kernels; without that it has the same bits",
    ),
    **{
        (name, "train_step-inductor"): Known(
            OTHER_BITS, "", "stock torch.compile breaks the graph at the CTC loss, and so has other kernels"
        )
        for name in ("ctc-gru", "ctc-lstm")
    },
    ("conformer", "train_step-inductor"): Known(
        OTHER_BITS,
        "",
        "as of the other jobs with CTC, the last bit of the loss, on some CPUs (a Xeon with AVX-512, not an EPYC)",
        varies=True,
    ),
    ("cumulative-batch-norm", "train_step-inductor"): Known(
        OTHER_BITS,
        "",
        "stock torch.compile breaks the graph where a batch norm reads how many batches there were, and so has other kernels",
    ),
    ("segformer", "train_step-inductor"): Known(
        OTHER_BITS,
        "",
        "stock torch.compile breaks the graph in two at a lock, and so has other kernels; whole it has the same bits",
    ),
}
"""By job and way."""

OVER: dict[tuple[str, str], str] = {
    (
        "branch",
        "train_step",
    ): "the state of the layer that a step leaves out stays where the comparison has just read it",
    ("dqn", "compile"): "the loss calls a target network, which lies beside the budget",
    ("soft-actor-critic", "compile"): "the loss calls target networks, which lie beside the budget",
}
"""Why the measured peak may be over the budget, by job and way; all others are within."""
