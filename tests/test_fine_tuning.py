"""Fine-tuning as docs/howto/fine_tune.md has it: after every step of the optimizer all is as in plain training, to the last bit.

With the real libraries, which `make test-all` installs (the extra `recipes`).
"""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill.runtime.training import same_bits

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("forget_compiled_code")]
EXAMPLE = Path(__file__).parents[1] / "examples" / "16_fine_tune.py"
Batch = dict[str, Tensor]


def test_the_example_trains_evaluates_writes_and_resumes_with_the_same_bits(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, EXAMPLE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"identical: (\w+)$", done.stdout, re.MULTILINE) == ["True"] * 4
    assert list(tmp_path.iterdir()) == []


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, attention_dropout=0.1,
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=4))
    model.loss_type = "ForCausalLM"
    return model


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_labels=3,
        )
    )  # fmt: skip


TARGETS: dict[Callable[[], nn.Module], list[str]] = {
    llama: ["q_proj", "v_proj"],
    gpt2: ["c_attn"],
    bert: ["query", "value"],
}


@dataclass(frozen=True)
class Job:
    """What is trained and how; of its groups of micro-batches the last is short, and so is its last batch."""

    base: Callable[[], nn.Module] = llama
    adapters: bool = True
    checkpoints: str = ""
    mixed: bool = True
    clip_norm: float | None = 1.0
    accumulate: int = 2
    looks: bool = True

    def model(self) -> Any:
        torch.manual_seed(0)
        model: Any = self.base()
        if self.checkpoints:
            reentrant = self.checkpoints == "reentrant"
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.config.use_cache = False
            if self.adapters:
                model.enable_input_require_grads()
        if self.adapters:
            from peft import LoraConfig, get_peft_model

            kinds = {"task_type": "SEQ_CLS" if self.base is bert else "CAUSAL_LM", "fan_in_fan_out": self.base is gpt2}
            model = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.1, target_modules=TARGETS[self.base], **kinds))
        return model.train()

    def batches(self, sizes: tuple[int, ...]) -> list[Batch]:
        drawn = torch.Generator().manual_seed(1)
        return [self._batch(size, drawn) for size in sizes]

    def _batch(self, size: int, drawn: torch.Generator) -> Batch:
        ids = torch.randint(5, 128, (size, 24), generator=drawn)
        lengths = torch.randint(8, 25, (size, 1), generator=drawn)
        mask = (torch.arange(24) < lengths).long()
        labels = ids.masked_fill(mask == 0, -100)
        if self.base is bert:
            labels = torch.randint(0, 3, (size,), generator=drawn)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def loss(self, model: Any, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if self.mixed else nullcontext():
            return model(**batch).loss


class Training:
    """A model with its optimizer and schedule, and what a look at them finds."""

    def __init__(self, job: Job) -> None:
        self.job, self.model = job, job.model()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 4)
        self.seen: list[Any] = []
        torch.manual_seed(5)

    def state(self) -> dict[str, Any]:
        """All that goes on from step to step, copied."""
        owners = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        found = {name: owner.state_dict() for name, owner in owners.items()}
        return copy.deepcopy(found | {"random": torch.get_rng_state()})

    def load(self, state: dict[str, Any]) -> None:
        state = copy.deepcopy(state)
        for name in ("model", "optimizer", "scheduler"):
            getattr(self, name).load_state_dict(state[name])
        torch.set_rng_state(state["random"])

    def ended(self, loss: Tensor, batch: Batch) -> None:
        """The optimizer has stepped: look at everything, evaluate, and let the model write."""
        self.scheduler.step()
        self.seen.append((loss.detach().clone(), self.state()))
        if not self.job.looks:
            return
        self.model.eval()
        with torch.no_grad():
            self.seen.append(self.job.loss(self.model, batch))
        if self.job.base is not bert:
            words = batch["input_ids"][:2, :8]
            written = {"attention_mask": torch.ones_like(words), "do_sample": True, "pad_token_id": 0}
            self.seen.append(self.model.generate(input_ids=words, max_new_tokens=3, **written))
        self.model.train()
        self.seen.append(self.state())


def plainly(training: Training, groups: list[list[Batch]], call: Any = None) -> Training:
    """The loop of accelerate's examples and TRL's: gradients of a group's micro-batches add up."""
    job = training.job
    for group in groups:
        total = torch.zeros(())
        for batch in group:
            loss = job.loss(call or training.model, batch) / len(group)
            loss.backward()
            total = total + loss.detach()
        if job.clip_norm is not None:
            nn.utils.clip_grad_norm_(training.trained, job.clip_norm)
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.ended(total, group[0])
    return training


def by_whole_steps(training: Training, groups: list[list[Batch]]) -> Training:
    """The same by `train_step`, which splits what is given as one batch."""
    job = training.job
    step = overspill.train_step(
        training.model, job.loss, training.optimizer, budget=0.75, store="host", accumulate=job.accumulate,
        clip_norm=job.clip_norm,
    )  # fmt: skip
    for group in groups:
        training.ended(step({key: torch.cat([batch[key] for batch in group]) for key in group[0]}), group[0])
    assert step.engine is not None
    assert step.engine.offloaded_bytes > 0
    assert all(plan.peak_bytes <= plan.budget_bytes for plan in step.plans)
    return training


def assert_alike(one: Any, other: Any, where: str = "") -> None:
    """Both hold the same values to the last bit."""
    if isinstance(one, Tensor):
        assert same_bits(one, other), where
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_alike(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_alike(a, b, f"{where}[{number}]")
    else:
        assert one == other, where


def groups_of(job: Job, *sizes: int) -> list[list[Batch]]:
    batches = job.batches(sizes)
    return [batches[i : i + job.accumulate] for i in range(0, len(batches), job.accumulate)]


JOBS = {
    "Llama, all of it": Job(),
    "Llama, checkpoints": Job(checkpoints="plain"),
    "Llama, reentrant checkpoints": Job(checkpoints="reentrant", looks=False),
    "Llama, all weights in float32": Job(adapters=False, mixed=False, clip_norm=None, accumulate=1),
    "GPT-2, checkpoints": Job(gpt2, checkpoints="plain", looks=False),
    "BERT": Job(bert, clip_norm=0.1),
    "BERT, reentrant checkpoints": Job(bert, checkpoints="reentrant"),
}


# What a reentrant checkpoint is given, `compile` casts once for each that reads it (docs/exactness.md).
COMPILED = {name: job for name, job in JOBS.items() if name != "BERT, reentrant checkpoints"}


@pytest.mark.parametrize("job", COMPILED.values(), ids=COMPILED.keys())
def test_a_loop_with_a_compiled_forward_is_the_plain_loop(job: Job) -> None:
    groups = groups_of(job, 4, 4, 3)  # the last group is one micro-batch, and that a smaller one
    expected = plainly(Training(job), groups)
    training = Training(job)
    training.model.forward = overspill.compile(training.model.forward, budget=0.9, store="host")
    session = training.model.forward.overspill
    plainly(training, groups)
    assert_alike(expected.seen, training.seen)
    assert len(session.plans) >= 2, "each shape has its own"
    assert all(plan.peak_bytes <= plan.budget_bytes for plan in session.plans)


def test_pytorchs_own_door_is_the_plain_loop_too() -> None:
    job = JOBS["Llama, all of it"]
    groups = groups_of(job, 4, 4, 3)
    expected = plainly(Training(job), groups)
    training = Training(job)
    training.model.compile(backend="overspill", options={"budget": "64MiB", "store": "host"})
    assert_alike(expected.seen, plainly(training, groups).seen)


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())
def test_whole_steps_are_the_plain_loop(job: Job) -> None:
    parts = [3, 3] if job.accumulate > 1 else [3]
    groups = groups_of(job, *([4, 4] if job.accumulate > 1 else [4]), *parts)  # the last batch is smaller
    assert_alike(plainly(Training(job), groups).seen, by_whole_steps(Training(job), groups).seen)


@pytest.mark.parametrize("train", [plainly, by_whole_steps])
def test_a_training_that_is_loaded_goes_on_with_the_same_bits(train: Callable[..., Training]) -> None:
    job = Job(looks=False)
    groups = groups_of(job, 4, 4, 4, 4)
    expected = plainly(Training(job), groups)

    def compiled() -> Training:
        training = Training(job)
        if train is plainly:
            training.model.forward = overspill.compile(training.model.forward, budget=0.9, store="host")
        return training

    saved = train(compiled(), groups[:1]).state()
    assert_alike(saved, expected.seen[0][1])
    resumed = compiled()
    resumed.load(saved)
    train(resumed, groups[1:])
    assert_alike(resumed.seen, expected.seen[1:])
