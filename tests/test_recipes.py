"""The recipes of docs/recipes.md with the real libraries, which `make test-all` installs (the extra `recipes`)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import overspill
import overspill.callbacks
from overspill.core.units import parse_bytes
from overspill.errors import OverspillError
from overspill.runtime.compiled.named_backend import session_with
from overspill.runtime.reachable import same_bits

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("forget_compiled_code")]
EXAMPLES = Path(__file__).parents[1] / "examples"
Ran = tuple[list[float], dict[str, Tensor]]


def same(one: Ran, other: Ran) -> bool:
    (losses, state), (others, other_state) = one, other
    return (
        len(losses) > 0
        and losses == others
        and state.keys() == other_state.keys()
        and all(same_bits(value, other_state[name]) for name, value in state.items())
    )


@pytest.mark.parametrize("recipe", ["09_hf_trainer", "10_lightning", "11_accelerate"])
def test_a_recipe_keeps_the_bits_the_budget_and_the_checkpoints(recipe: str, tmp_path: Path) -> None:
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{recipe}.py"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    plain = re.search(r"^plain peak (.+)$", done.stdout, re.MULTILINE)
    within = re.search(r"^budgeted peak (.+) within (.+): True$", done.stdout, re.MULTILINE)
    assert plain is not None, done.stdout
    assert within is not None, done.stdout
    assert parse_bytes(plain[1]) > parse_bytes(within[2]) >= parse_bytes(within[1])
    assert re.findall(r"identical: (\w+)$", done.stdout, re.MULTILINE) == ["True"] * 4
    assert list(tmp_path.iterdir()) == []


def test_a_fine_tuning_trains_evaluates_writes_and_resumes_with_the_same_bits(tmp_path: Path) -> None:
    example = EXAMPLES / "16_fine_tune.py"
    done = subprocess.run([sys.executable, example], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"identical: (\w+)$", done.stdout, re.MULTILINE) == ["True"] * 4
    assert list(tmp_path.iterdir()) == []


def test_the_program_of_the_page_trains_in_less_memory_than_its_weights_take(tmp_path: Path) -> None:
    page = (EXAMPLES.parent / "docs" / "howto" / "fine_tune.md").read_text(encoding="utf-8")
    program = re.search(r"<!-- file fine_tune\.py -->\n```python\n(.+?)^```", page, re.MULTILINE | re.DOTALL)
    assert program is not None
    (tmp_path / "fine_tune.py").write_text(program[1], encoding="utf-8")
    # Plain training, by the same program without the line.
    lines = program[1].partition("\nweights = ")[0].replace("callbacks=[budget]", "callbacks=[]")
    (tmp_path / "plain.py").write_text(lines, encoding="utf-8")
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    told = {
        name: subprocess.run(
            [sys.executable, name], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
        ).stdout
        for name in ("fine_tune.py", "plain.py")
    }
    logged = {name: re.findall(r"'(?:loss|grad_norm)': '([^']+)'", text) for name, text in told.items()}
    assert logged["fine_tune.py"] == logged["plain.py"]
    assert len(logged["plain.py"]) == 8
    plans = re.findall(r"^weights (\d+), budget (\d+), peak (\d+)$", told["fine_tune.py"], re.MULTILINE)
    assert plans
    assert all(int(weights) > int(budget) >= int(peak) for weights, budget, peak in plans)


def hf_train(folder: Path, *, how: str | None, budget: str | float, lora: bool = False, **arguments: Any) -> Ran:
    """Six steps and two evaluations by Trainer, the last batch a partial one; `how`: what is compiled."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    set_seed(0)
    model = inner = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=4))
    inner.loss_type = "ForCausalLM"
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(inner, LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True))
    session = None
    if how == "forward":
        model.forward = overspill.compile(model.forward, budget=budget, store="host")
        session = model.forward.overspill
    elif how == "module":
        model = overspill.compile(model, budget=budget, store="host")
        session = model.overspill
    elif how == "door":
        model.compile(backend="overspill", options={"budget": budget, "store": "host"})
    rows = torch.randint(0, 128, (56, 32), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in rows]
    settings = TrainingArguments(
        str(folder), num_train_epochs=1, per_device_train_batch_size=8, per_device_eval_batch_size=8, logging_steps=1,
        eval_strategy="steps", eval_steps=3, save_strategy="no", use_cpu=True, report_to=[], disable_tqdm=True,
        label_names=["labels"], **arguments,
    )  # fmt: skip
    trainer = Trainer(model=model, args=settings, train_dataset=data[:44], eval_dataset=data[44:])
    trainer.train()
    if session is not None:
        assert len(session.plans) >= 2, "training and evaluation ran by plans"
        assert not any(planned.frame.broken for planned in session._plans.planned), "model and loss are one graph"
        assert all(plan.peak_bytes <= plan.budget_bytes for plan in session.plans)
        assert session.engine is not None
        assert session.engine.offloaded_bytes > 0 or any(p.peak_bytes < p.unmanaged_peak_bytes for p in session.plans)
    losses = [entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry]
    return losses, dict(inner.state_dict())


@pytest.mark.parametrize(
    "arguments",
    [{"bf16": True}, {"gradient_checkpointing": True}, {"gradient_accumulation_steps": 2}, {"lora": True}],
    ids=lambda arguments: next(iter(arguments)),
)
def test_what_trainer_is_told_to_do_gives_the_same_bits(arguments: dict[str, Any], tmp_path: Path) -> None:
    plain = hf_train(tmp_path, how=None, budget=1.0, **arguments)
    assert same(plain, hf_train(tmp_path, how="forward", budget=0.9, **arguments))


def test_trainer_takes_a_compiled_module_too_if_it_is_told_the_labels(tmp_path: Path) -> None:
    assert same(hf_train(tmp_path, how=None, budget=1.0), hf_train(tmp_path, how="module", budget=0.9))


def test_trainer_takes_a_model_that_pytorchs_own_door_has_compiled(tmp_path: Path) -> None:
    arguments = {"lora": True, "gradient_accumulation_steps": 2}
    plain = hf_train(tmp_path, how=None, budget=1.0, **arguments)
    assert same(plain, hf_train(tmp_path, how="door", budget="64MiB", **arguments))


def test_what_pytorchs_own_door_has_compiled_stays_in_force_where_a_trainer_replaces_the_forward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    options = {"budget": "64MiB", "store": "host"}
    model.compile(backend="overspill", options=options)
    before = model.forward
    model.forward = lambda x: before(x).square().mean()
    inputs = torch.randn(512, 64)
    loss = model(inputs)
    loss.backward()
    session = session_with(options)
    assert session is not None
    assert [plan.budget_bytes for plan in session.plans] == [64 << 20]
    assert torch.equal(loss, model.forward(inputs))


def test_accelerates_list_of_backends_does_not_have_ours(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="OVERSPILL"):
        hf_train(tmp_path, how=None, budget=1.0, torch_compile_backend="overspill")


def lightning_train(*, how: str | None, manual: bool = False, budget: str | float = 0.8, **settings: Any) -> Ran:
    """Two epochs with evaluation, which Lightning begins with, and a partial batch; `how`: what is compiled."""
    import lightning
    from torch.utils.data import DataLoader, TensorDataset

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(6)]
            self.net = nn.Sequential(*blocks, nn.Linear(64, 4))
            self.losses: list[float] = []
            self.automatic_optimization = not manual

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor | None:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            self.losses.append(loss.detach())
            if not manual:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None

        def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
            self.losses.append(F.cross_entropy(self.net(batch[0]), batch[1]).detach())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    torch.manual_seed(0)
    given = module = Module()
    session = None
    if how == "forward":
        module.net.forward = overspill.compile(module.net.forward, budget=budget, store="host")
        session = module.net.forward.overspill
    elif how == "module":
        given = overspill.compile(module, budget=budget, store="host")
        session = given.overspill
    data = TensorDataset(torch.randn(600, 64), torch.randint(0, 4, (600,)))
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **settings,
    )  # fmt: skip
    trainer.fit(given, DataLoader(data, 256), DataLoader(data, 400))
    if session is not None:
        assert len(session.plans) >= 2, "training and evaluation ran by plans"
        assert all(plan.peak_bytes <= plan.budget_bytes for plan in session.plans)
        assert session.accumulates, "gradients of the step before are there in forward, and planned for"
    return [float(loss) for loss in module.losses], dict(module.state_dict())


@pytest.mark.parametrize(
    "settings",
    [{"manual": True}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2}],
    ids=lambda settings: next(iter(settings)),
)
@pytest.mark.filterwarnings("error:.*could not be tried:UserWarning", "error:.*several models:UserWarning")
def test_what_lightning_is_told_to_do_gives_the_same_bits(settings: dict[str, Any]) -> None:
    assert same(lightning_train(how=None, **settings), lightning_train(how="forward", **settings))


def test_lightning_takes_a_compiled_module_too() -> None:
    assert same(lightning_train(how=None), lightning_train(how="module", budget="8MiB"))


def test_a_compiled_module_that_lightning_takes_apart_is_still_held_to_its_budget() -> None:
    with pytest.raises(OverspillError, match="below"):
        lightning_train(how="module", budget="300KiB")


DATA_PARALLEL = """
import os, torch, overspill
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

def train(budget):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    if budget is not None:
        model.forward = overspill.compile(model.forward, budget=budget, store="host")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    own = torch.Generator().manual_seed(accelerator.process_index)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(256, 64, generator=own)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert type(model) is nn.parallel.DistributedDataParallel
    inner = accelerator.unwrap_model(model)
    assert budget is None or len(inner.forward.overspill.plans) == 1
    return losses, inner.state_dict()

losses, state = train(None)
others, other_state = train("2MiB")
same = losses == others and all(torch.equal(state[k], other_state[k]) for k in state)
os.write(1, f"identical: {same}\\n".encode())  # at once: both processes write here
"""


def test_accelerate_trains_data_parallel_with_the_same_bits(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(DATA_PARALLEL, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    done = subprocess.run(torchrun, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"identical: (\w+)", done.stdout) == ["True", "True"]


def test_trainers_log_has_what_overspill_did(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    heard: list[dict[str, float]] = []

    class Board(TrainerCallback):
        """Stands for those of TensorBoard and the like, which Trainer has before it has ours."""

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            heard.append(dict(logs))

    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=4))
    model.loss_type = "ForCausalLM"
    model.forward = overspill.compile(model.forward, budget=0.9, store="host")
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 128, (32, 32))]
    settings = TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=8, logging_steps=2, save_strategy="no", use_cpu=True,
        report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=settings, train_dataset=data, callbacks=[Board()])
    trainer.add_callback(overspill.callbacks.TrainerCallback(trainer))
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "overspill/offloaded_bytes" in entry]
    assert [entry["step"] for entry in logged] == [2, 4]
    session = model.forward.overspill
    moved = session.engine.offloaded_bytes if session.engine else 0
    assert sum(2 * entry["overspill/offloaded_bytes"] for entry in logged) == moved
    assert logged[-1]["overspill/planned_peak_bytes"] == session.peak_bytes > 0
    assert sum("overspill/wait_seconds" in logs for logs in heard) == 2


def test_lightnings_log_has_what_overspill_did(tmp_path: Path) -> None:
    import lightning
    from lightning.pytorch.loggers import CSVLogger
    from torch.utils.data import DataLoader, TensorDataset

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
            self.net.forward = overspill.compile(self.net.forward, budget=0.9, store="host", policy="vdnn-all")

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    module = Module()
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=CSVLogger(tmp_path, name="run", version="1"), log_every_n_steps=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[overspill.callbacks.LightningCallback()],
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(1024, 64)), 256))
    rows = (tmp_path / "run" / "1" / "metrics.csv").read_text(encoding="utf-8").splitlines()
    column = rows[0].split(",").index("overspill/offloaded_bytes")
    moved = [float(row.split(",")[column]) for row in rows[1:]]
    assert len(moved) == 4
    assert sum(moved) == module.net.forward.overspill.engine.offloaded_bytes > 0
