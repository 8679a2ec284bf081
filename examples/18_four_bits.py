"""QLoRA within a budget: weights of 4 bits as bitsandbytes loads them, on the CPU too, and adapters of peft.

Needs `pip install -c constraints.txt -e ".[recipes]" bitsandbytes`.
"""

import copy
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import overspill
from overspill.core.units import format_bytes


def load() -> nn.Module:
    """A checkpoint, loaded with linear layers of 4 bits, and adapters next to them."""
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, **shape)).save_pretrained(folder)
        four_bits = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
        model = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=four_bits, dtype=torch.bfloat16, device_map="cpu"
        ).train()  # it is loaded to be evaluated, and bitsandbytes would pack its weights anew for that on a CPU
    return get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def train(model: nn.Module) -> list[float]:
    """The loop, the same for both."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    ids = torch.randint(256, (4, 128), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


plain = load()
budgeted = copy.deepcopy(plain)
within = overspill.compile(budgeted, budget="60%")
plain_losses, losses = train(plain), train(within)
plan = within.overspill.plans[0]
print(f"losses {', '.join(f'{loss:.4f}' for loss in losses)}")
print(f"planned peak {format_bytes(plan.peak_bytes)}; unmanaged {format_bytes(plan.unmanaged_peak_bytes)}")
weights = zip(plain.parameters(), budgeted.parameters(), strict=True)
print(f"identical: {losses == plain_losses and all(torch.equal(one, other) for one, other in weights)}")
