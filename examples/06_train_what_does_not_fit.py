"""A decoder whose parameters and AdamW state alone exceed the budget several times over, trained all the same.

With `overspill.train_step` the whole step is one plan: parameters, gradients and optimizer state are in the store until
an op needs them. Larger ones: `--width 768 --depth 12 --heads 12 --vocabulary 50257 --seq-len 512 --budget 1GiB`.
"""

import argparse

import torch

import overspill
from overspill.core.units import format_bytes
from overspill.models.gpt2 import Gpt2, Shape, next_token_batches, next_token_loss

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--width", type=int, default=192)
parser.add_argument("--depth", type=int, default=6)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--vocabulary", type=int, default=512)
parser.add_argument("--seq-len", type=int, default=32)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--budget", default="7MiB")
parser.add_argument("--store", help="disk (the default) or host; on CUDA pinned")
args = parser.parse_args()

torch.manual_seed(0)
shape = Shape(args.width, args.depth, args.heads, args.vocabulary, positions=args.seq_len)
model = Gpt2(shape)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens, targets = next_token_batches(args.vocabulary, args.seq_len)(args.batch)

step = overspill.train_step(model, next_token_loss, optimizer, budget=args.budget, store=args.store)
for number in range(args.steps):
    print(f"step {number}: loss {step(tokens, targets):.4f}")

parameters = sum(p.numel() * p.element_size() for p in model.parameters())
plan = step.plans[0]
print(f"parameters and AdamW state {format_bytes(3 * parameters)}, budget {format_bytes(plan.budget_bytes)}")
print(f"planned peak {format_bytes(plan.peak_bytes)}; unmanaged {format_bytes(plan.unmanaged_peak_bytes)}")
step.close()
