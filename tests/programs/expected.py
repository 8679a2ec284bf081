"""What is known of programs that do not simply train."""

from __future__ import annotations

REFUSALS = {
    ("cumulative-batch-norm", "compile"): "ran without a plan",
    ("layer-drop", "compile"): "ran without a plan",
    ("vae", "compile"): "it is set aside for the loss outside of the model",
    ("tied-autoencoder", "compile"): "it is set aside for the loss outside of the model",
    ("cumulative-batch-norm", "inductor"): "ran without a plan",
    ("vae", "inductor"): "it is set aside for the loss outside of the model",
    ("tied-autoencoder", "inductor"): "it is set aside for the loss outside of the model",
    ("layer-drop", "inductor"): "ran without a plan",
    ("seq2seq", "inductor"): "set it aside with reserve=",
    ("routed-experts", "inductor"): "ran without a plan",
    ("seq2seq", "compile"): "set it aside with reserve=",
    ("routed-experts", "compile"): "ran without a plan",
    ("routed-experts", "train_step"): "shapes that follow from parameters",
}
"""Programs that are refused, by name and way, and words of the refusal; all others train."""
