"""Settings of a fine-tune that nobody gave: they widen the interval, and giving them narrows it; and advice of fine-tunes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from overspill.estimation.advice import Price, advice
from overspill.estimation.api import Setting, of_job
from overspill.job import Job, NamedModel
from overspill.job.prepare.model import prepare
from overspill.report.estimate import open_settings

pytest.importorskip("transformers")
TOKENS, WORDS = 4 * 32, 1 << 16
MODEL = NamedModel(
    f"hf:llama,hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=32,vocab_size={WORDS}",
    seq_len=TOKENS // 4,
)


def test_what_is_not_said_widens_the_interval_and_is_named() -> None:
    made = of_job(Job(MODEL, 4, "sgd"), Setting.of("t4"))
    assert made.unspecified is not None
    assert made.unspecified.options == ("--keep-outputs", "--shift-logits")
    assert made.unspecified.more >= 4 * TOKENS * WORDS  # the logits of a step
    assert " more: give --keep-outputs" in open_settings(made.unspecified)
    assert "--keep-outputs, --shift-logits" in " ".join(made.explain().split())
    said = of_job(Job(MODEL, 4, "sgd", keep_outputs=False, shift_logits=False), Setting.of("t4"))
    assert said.unspecified is None
    assert said.total_bytes == made.total_bytes
    assert said.total.high + made.unspecified.more == made.total.high


@pytest.mark.long
def test_checkpoints_of_layers_of_8_bits_are_reentrant_or_not() -> None:
    deep = "hf:llama,hidden_size=256,num_hidden_layers=4,num_attention_heads=2,intermediate_size=1024,vocab_size=64"
    said = Job(
        NamedModel(deep, seq_len=128), 4, "sgd", lora=4, quantize="8bit", checkpointing=True, attention="math",
        keep_outputs=False, shift_logits=False,
    )  # fmt: skip
    made, without, reentrant = (
        of_job(replace(said, reentrant=value), Setting.of("t4")) for value in (None, False, True)
    )
    assert made.unspecified is not None
    assert made.unspecified.options == ("--reentrant",)
    assert without.unspecified is None
    assert without.total_bytes == made.total_bytes
    assert made.unspecified.less == made.total_bytes - reentrant.total_bytes > 0
    assert "may make it 0 B" not in open_settings(made.unspecified)
    assert made.total.low == without.total.low - made.unspecified.less
    assert of_job(replace(said, quantize="4bit-double"), Setting.of("t4")).unspecified is None


def test_a_loss_in_chunks_is_the_same_loss_and_advice_has_it_beside_packed_sequences() -> None:
    values = []
    for job in (Job(MODEL, 4, "sgd"), Job(MODEL, 4, "sgd", loss_chunks=3)):
        torch.manual_seed(0)
        built = job.build()
        prepare(built.module, job)
        tokens = torch.arange(TOKENS).view(4, -1)
        value = built.loss(built.module, tokens, tokens)
        value.backward()
        values.append((value.detach(), *(parameter.grad for parameter in built.module.parameters())))
    torch.testing.assert_close(*values)
    made = of_job(Job(MODEL, 4, "sgd", keep_outputs=False), Setting.of("t4"))
    vain: dict[str, str] = {}
    packed, *_, chunked = (one for one in advice(made, vain=vain.setdefault) if "tokens" in one.what + one.cost)
    assert packed.price is Price.NOTHING
    assert "--seq-len the mean length" in packed.cost
    assert (
        chunked.minimum_capacity_bytes
        == of_job(Job(MODEL, 4, "sgd", loss_chunks=8), Setting.of("t4")).minimum_capacity_bytes
    )
    assert {why for what, why in vain.items() if "fused" in what} == {"saves less than one percent"}
