"""Fine-tuning: adapters, checkpoints, mixed precision, gradients that are accumulated and clipped."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .job import job
from .language import HF, VOCABULARY, llama, next_token, own_loss, sizes, texts, tokens
from .ways import Steps, Way

PEFT = (*HF, "peft")


def with_lora(model: nn.Module, dropout: float = 0.0, targets: str | list[str] = "all-linear") -> nn.Module:
    """`model` with adapters of rank 4."""
    import peft

    config = peft.LoraConfig(r=4, target_modules=targets, lora_dropout=dropout)
    return peft.get_peft_model(model, config)


@job("Llama with LoRA", needs=PEFT)
def llama_lora(way: Way) -> Steps:
    return way.train(with_lora(llama()), own_loss, texts())


@job("Llama with LoRA and its dropout, gradient checkpointing, a padding mask", needs=PEFT, deep=16)
def llama_lora_checkpointed(way: Way, layers: int = 2) -> Steps:
    model = llama(layers, use_cache=False)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    return way.train(with_lora(model, 0.05, ["q_proj", "v_proj"]), own_loss, texts("padded"))


@job("Llama, gradient checkpointing", needs=HF)
def llama_checkpointed(way: Way) -> Steps:
    model = llama(use_cache=False)
    model.gradient_checkpointing_enable()
    return way.train(model, own_loss, texts())


@job("Llama in bfloat16 by autocast", needs=HF)
def llama_autocast(way: Way) -> Steps:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return own_loss(model, batch)

    return way.train(llama(), loss, texts())


@job("Llama, gradients accumulated over two micro-batches and clipped", needs=HF)
def llama_accumulated(way: Way) -> Steps:
    step = way.step(llama(), own_loss, clip=0.5, accumulate=2)
    for batch in texts():
        yield step(batch)


@job("BERT with LoRA, reentrant checkpoints behind frozen embeddings", needs=PEFT)
def bert_lora_reentrant(way: Way) -> Steps:
    import transformers

    config = transformers.BertConfig(**sizes(), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = transformers.BertForMaskedLM(config)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    return way.train(with_lora(model, targets=["query", "value"]), own_loss, texts("padded"))


class CheckpointedBlocks(nn.Module):
    """Blocks with dropout, each in a checkpoint."""

    def __init__(self, *, reentrant: bool, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.into = nn.Linear(16, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), norm(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32), nn.Dropout(0.2))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    """A loss that needs no labels."""
    return model(x).square().mean()


@job("dropouts in checkpoints")
def checkpoint_dropout(way: Way) -> Steps:
    return way.train(CheckpointedBlocks(reentrant=False), mean_square, [torch.randn(32, 16) for _ in range(3)])


@job("dropouts in reentrant checkpoints")
def checkpoint_reentrant(way: Way) -> Steps:
    return way.train(CheckpointedBlocks(reentrant=True), mean_square, [torch.randn(32, 16) for _ in range(3)])


@job("batch norm in checkpoints")
def checkpoint_batch_norm(way: Way) -> Steps:
    model = CheckpointedBlocks(reentrant=False, norm=nn.BatchNorm1d)
    return way.train(model, mean_square, [torch.randn(32, 16) for _ in range(3)])


class MixedTypes(nn.Module):
    """Weights in bfloat16 with norms in float32 between, and the embedding's weight as the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32).to(torch.bfloat16)
        self.norms = nn.ModuleList(nn.RMSNorm(32) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(32, 32, dtype=torch.bfloat16) for _ in range(2))
        self.head = nn.Linear(32, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).float()
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + F.silu(layer(norm(x).to(torch.bfloat16))).float()
        return self.head(x.to(torch.bfloat16)).float()


@job("weights in bfloat16, norms in float32, tied weights")
def mixed_types(way: Way) -> Steps:
    return way.train(MixedTypes(), next_token, [tokens(4, 16) for _ in range(3)])


@job("Llama of which only the last layer and the head train", needs=HF)
def llama_frozen(way: Way) -> Steps:
    model = llama().requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)
    model.lm_head.requires_grad_(True)
    return way.train(model, own_loss, texts())


@job("DPO: a policy and a frozen reference", needs=HF)
def dpo(way: Way) -> Steps:
    policy = llama()
    frozen = copy.deepcopy(policy).requires_grad_(False).eval()
    way.together(policy, frozen)
    reference = way.called(frozen)

    def log_probability(model: nn.Module, ids: Tensor) -> Tensor:
        logs = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        return logs.gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)

    def loss(model: nn.Module, chosen: Tensor, rejected: Tensor) -> Tensor:
        with torch.no_grad():
            before = log_probability(reference, chosen) - log_probability(reference, rejected)
        now = log_probability(model, chosen) - log_probability(model, rejected)
        return -F.logsigmoid(0.1 * (now - before)).mean()

    return way.train(policy, loss, [(tokens(2, 12), tokens(2, 12)) for _ in range(3)])


@job("distillation: a frozen teacher in the loss")
def distillation(way: Way) -> Steps:
    teacher = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).requires_grad_(False)
    student = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10))
    way.together(student, teacher)
    teaches = way.called(teacher)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return F.kl_div(model(x).log_softmax(-1), teaches(x).softmax(-1), reduction="batchmean")

    return way.train(student, loss, [torch.randn(64, 32) for _ in range(3)])


@job("an average of the weights beside, warm-up, and a soft prompt before a frozen Llama", needs=HF)
def soft_prompt(way: Way) -> Steps:
    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = llama().requires_grad_(False)
            self.prompt = nn.Parameter(torch.randn(4, sizes()["hidden_size"]))

        def forward(self, ids: Tensor) -> Tensor:
            words = self.base.get_input_embeddings()(ids)
            embeds = torch.cat([self.prompt.expand(len(ids), -1, -1), words], 1)
            return self.base(inputs_embeds=embeds).logits[:, 4:]

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids)[:, :-1].reshape(-1, VOCABULARY), ids[:, 1:].flatten())

    model = Prompted()
    optimizer = torch.optim.AdamW([model.prompt], 1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4)
    step, average = way.step(model, loss, optimizer), model.prompt.detach().clone()
    for _ in range(3):
        yield step(tokens(4, 12)), average
        average.lerp_(model.prompt.detach(), 0.1)
        schedule.step()
