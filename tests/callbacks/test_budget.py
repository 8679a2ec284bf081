"""A trainer's callback trains within a budget with plain's bits, and notices a step that ran without a plan.

The trainers are the real ones; a test whose library is not installed is skipped. Lightning and TRL are in no environment
of `make install`: Lightning comes with the extra `recipes`, TRL by `pip install trl`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill import callbacks
from overspill.errors import RequestError, UnplannedError, UnsupportedError
from overspill.runtime.reachable import same_bits

pytestmark = pytest.mark.usefixtures("forget_compiled_code")
Ran = tuple[list[float], list[Tensor]]
ROWS = torch.randint(2, 64, (20, 16), generator=torch.Generator().manual_seed(1))


def same(one: Ran, other: Ran) -> bool:
    return (
        len(one[0]) > 0
        and one[0] == other[0]
        and len(one[1]) == len(other[1])
        and all(map(same_bits, one[1], other[1]))
    )


def llama(*, lora: bool = False) -> Any:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    if not lora:
        return model
    peft = pytest.importorskip("peft", reason="needs peft")
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]))


def arguments(folder: Path, **more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
        "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no", "use_cpu": True,
        "report_to": [], "disable_tqdm": True,
    }  # fmt: skip
    return given | more


def hf_trainer(folder: Path, callback: Any, *, model: Any = None, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("accelerate", reason="needs accelerate")
    data = [{"input_ids": row, "labels": row} for row in ROWS]
    return transformers.Trainer(
        model=llama() if model is None else model,
        args=transformers.TrainingArguments(**arguments(folder, label_names=["labels"], **more)),
        train_dataset=data[:16], eval_dataset=data[16:], callbacks=[callback] if callback else [],
    )  # fmt: skip


def ran(trainer: Any) -> Ran:
    trainer.train()
    losses = [entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry]
    return losses, [p.detach().clone() for p in trainer.model.parameters()]


def budgeted(make: Callable[[Any], Any], budget: str | float = 0.95) -> Ran:
    """Run a trainer within a budget; check that training and evaluation had plans, and what is left behind."""
    callback = callbacks.Budget(budget, store="host")
    trainer = make(callback)
    found = ran(trainer)
    session = callback.session
    assert session is not None
    assert {bool(planned.kind.inputs[0]) for planned in session._plans.planned} == {True, False}
    assert all(plan.peak_bytes <= plan.budget_bytes for plan in session.plans)
    assert session.engine is None, "its store is given back"
    assert getattr(trainer.model.forward, "overspill", None) is None
    return found


# -- Hugging Face Trainer


@pytest.mark.parametrize(
    "more",
    [
        {"gradient_accumulation_steps": 2},
        pytest.param({"bf16": True}, marks=pytest.mark.long),
        pytest.param({"gradient_checkpointing": True, "bf16": True}, marks=pytest.mark.long),
    ],
    ids="-".join,
)
def test_trainer_has_plains_bits_and_its_log_finds_the_session(more: dict[str, Any], tmp_path: Path) -> None:
    trainers: list[Any] = []

    def logged(budget: Any) -> Any:
        trainer = hf_trainer(tmp_path, budget, **more)
        trainer.add_callback(callbacks.TrainerCallback(trainer))
        trainers.append(trainer)
        return trainer

    assert same(ran(hf_trainer(tmp_path, None, **more)), budgeted(logged))
    assert any("overspill/planned_peak_bytes" in entry for entry in trainers[0].state.log_history)


@pytest.mark.long
def test_trainer_has_plains_bits_with_adapters_in_mixed_precision(tmp_path: Path) -> None:
    plain = ran(hf_trainer(tmp_path, None, model=llama(lora=True), bf16=True))
    assert same(plain, budgeted(lambda budget: hf_trainer(tmp_path, budget, model=llama(lora=True), bf16=True)))


@pytest.mark.long
def test_a_forward_that_is_replaced_in_training_is_named_before_the_update(tmp_path: Path) -> None:
    budget = callbacks.Budget("1GiB", store="host")
    trainer = hf_trainer(tmp_path, budget, eval_strategy="no")
    plain = type(trainer.model).forward
    updates = []

    def patched(*args: Any, **kwargs: Any) -> Any:
        return plain(trainer.model, *args, **kwargs)

    class Patch(type(budget).__mro__[1]):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            updates.append(1)
            trainer.model.forward = patched

    trainer.add_callback(Patch())
    with pytest.raises(UnplannedError, match="patched replaced") as error:
        trainer.train()
    assert f"{__name__}.test_a_forward" in str(error.value)
    assert len(updates) == 1, "the second step is not taken"
    # The next training begins anew.
    del trainer.model.forward
    trainer.callback_handler.pop_callback(Patch)
    trainer.train()
    assert budget.session is not None
    assert budget.session.plans


def test_a_loss_by_a_part_of_the_model_is_noticed(tmp_path: Path) -> None:
    budget = callbacks.Budget("1GiB", store="host")
    trainer = hf_trainer(tmp_path, budget)
    trainer.compute_loss = lambda model, inputs, **_: model.model(inputs["input_ids"]).last_hidden_state.square().mean()
    with pytest.raises(UnplannedError, match="called a part"):
        trainer.train()


@pytest.mark.filterwarnings("ignore")
def test_who_wants_no_error_is_warned(tmp_path: Path) -> None:
    budget = callbacks.Budget("1GiB", store="host", on_unplanned="warn")
    trainer = hf_trainer(tmp_path, budget, eval_strategy="no")
    trainer.compute_loss = lambda model, inputs, **_: model.model(inputs["input_ids"]).last_hidden_state.square().mean()
    with pytest.warns(UserWarning, match="without a plan") as warned:
        trainer.train()
    assert sum("without a plan" in str(w.message) for w in warned) == 1
    assert trainer.state.global_step == 3


def test_a_model_that_is_compiled_already_is_refused(tmp_path: Path) -> None:
    trainer = hf_trainer(tmp_path, callbacks.Budget("1GiB", store="host"))
    trainer.model.forward = overspill.compile(trainer.model.forward, budget="1GiB", store="host")
    with pytest.raises(RequestError, match="compiled already"):
        trainer.train()


def test_options_are_checked_at_once_and_data_parallel_is_refused() -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    with pytest.raises(RequestError, match="on_unplanned='ignore'"):
        callbacks.Budget("1GiB", on_unplanned="ignore")
    with pytest.raises(UnsupportedError, match="torchrun"):
        callbacks.Budget("1GiB").on_train_begin(SimpleNamespace(n_gpu=2), None, None, nn.Linear(2, 2))


# -- TRL


def sft_trainer(folder: Path, callback: Any, *, lora: bool = False, **more: Any) -> Any:
    trl = pytest.importorskip("trl", reason="needs trl")
    datasets = pytest.importorskip("datasets", reason="needs datasets")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers")
    data = datasets.Dataset.from_dict({"input_ids": ROWS.tolist(), "labels": ROWS.tolist()})
    words = tokenizers.models.WordLevel({str(i): i for i in range(64)}, unk_token="0")
    tokens = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="0", eos_token="1", unk_token="0"
    )
    settings = trl.SFTConfig(
        **arguments(folder, max_length=16, dataset_kwargs={"skip_prepare_dataset": True}, bf16=False, **more)
    )
    return trl.SFTTrainer(
        model=llama(lora=lora), args=settings, processing_class=tokens, train_dataset=data.select(range(16)),
        eval_dataset=data.select(range(16, 20)), callbacks=[callback] if callback else [],
    )  # fmt: skip


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.long)], ids=["full", "lora"])
def test_trls_own_forward_is_planned_too(lora: bool, tmp_path: Path) -> None:
    plain = ran(sft_trainer(tmp_path, None, lora=lora))
    assert same(plain, budgeted(lambda budget: sft_trainer(tmp_path, budget, lora=lora), "64MiB"))


def test_a_forward_compiled_before_trl_puts_its_own_over_it_is_an_error(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("trl", reason="needs trl")
    build = llama

    def compiled(*, lora: bool = False) -> Any:
        model = build(lora=lora)
        model.forward = overspill.compile(model.forward, budget="1GiB", store="host")
        return model

    monkeypatch.setattr(f"{__name__}.llama", compiled)
    with pytest.raises(UnplannedError, match="replaced its compiled") as error:
        sft_trainer(tmp_path, None, eval_strategy="no").train()
    assert "trl.trainer.utils.add_fused_lm_head.<locals>._fused_forward" in str(error.value)


# -- Lightning


def fit(callback: Any, *, patch: bool = False, heads: int = 0, **settings: Any) -> Ran:
    lightning = pytest.importorskip("lightning", reason="needs lightning")
    from torch.utils.data import DataLoader, TensorDataset

    class Module(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
            self.loss = nn.MSELoss()
            self.heads = nn.ModuleList(nn.Linear(32, 32) for _ in range(heads))
            self.losses: list[Tensor] = []

        def training_step(self, batch: list[Tensor], index: int) -> Tensor | None:
            if index == 1:
                return None
            out = self.net(batch[0]) if not patch else self.net[1](self.net[0](batch[0]))
            self.losses.append(loss := self.loss(out, batch[0]))
            return loss

        def validation_step(self, batch: list[Tensor], _: int) -> None:
            self.losses.append(self.loss(self.net(batch[0]), batch[0]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    torch.manual_seed(0)
    module = Module()
    data = DataLoader(TensorDataset(torch.randn(512, 32)), 128)
    lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback] if callback else [], **settings,
    ).fit(module, data, data)  # fmt: skip
    assert "forward" not in module.net.__dict__
    return [loss.item() for loss in module.losses], [p.detach().clone() for p in module.parameters()]


def test_lightning_has_plains_bits_and_evaluations_have_plans() -> None:
    pytest.importorskip("lightning", reason="needs lightning")
    budget = callbacks.LightningBudget("1MiB", store="host")
    assert same(fit(None, accumulate_grad_batches=2), fit(budget, accumulate_grad_batches=2))
    assert budget.session is not None
    assert {bool(planned.kind.inputs[0]) for planned in budget.session._plans.planned} == {True, False}


@pytest.mark.long
def test_lightnings_steps_without_a_plan_are_noticed_and_parts_must_be_clear() -> None:
    pytest.importorskip("lightning", reason="needs lightning")
    with pytest.raises(UnplannedError, match="called a part"):
        fit(callbacks.LightningBudget("1MiB", store="host"), patch=True)
    with pytest.raises(RequestError, match=r"parts=\['net', 'heads'\]"):
        fit(callbacks.LightningBudget("1MiB", store="host"), heads=1)
    with pytest.raises(RequestError, match="nothing"):
        fit(callbacks.LightningBudget("1MiB", store="host", parts="nothing"))
    fit(callbacks.LightningBudget("1MiB", store="host", parts="net"), heads=1)
