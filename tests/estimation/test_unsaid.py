"""Settings of a fine-tune that nobody gave: they widen the interval, and giving them narrows it."""

from __future__ import annotations

import pytest

from overspill.estimation.api import Setting, of_job
from overspill.job import Job, NamedModel

pytest.importorskip("transformers")
TOKENS, WORDS = 4 * 32, 1 << 16
MODEL = NamedModel(
    f"hf:llama,hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=32,vocab_size={WORDS}",
    seq_len=TOKENS // 4,
)


def test_what_is_not_said_widens_the_interval_and_is_named() -> None:
    made = of_job(Job(MODEL, 4, "sgd"), Setting.of("t4"))
    assert made.unsaid is not None
    assert made.unsaid.options == ("--keep-outputs", "--shift-logits")
    assert made.unsaid.more >= 4 * TOKENS * WORDS  # the logits of a step
    assert "--keep-outputs, --shift-logits" in made.explain()
    said = of_job(Job(MODEL, 4, "sgd", keep_outputs=False, shift_logits=False), Setting.of("t4"))
    assert said.unsaid is None
    assert said.total_bytes == made.total_bytes
    assert said.total.high + made.unsaid.more == made.total.high
