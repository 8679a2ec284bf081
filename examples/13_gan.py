"""A generator and a critic within one budget, and the same bits as without: docs/howto/several_models.md explains it.

python examples/13_gan.py
"""

import copy
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import overspill


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers of these widths, with LeakyReLU between."""
    layers = [(nn.Linear(a, b), nn.LeakyReLU(0.2)) for a, b in pairwise(widths)]
    return nn.Sequential(*[layer for pair in layers for layer in pair][:-1])


def train(generator: nn.Module, critic: nn.Module, steps: int = 4) -> Tensor:
    """The last loss of the generator. An ordinary loop: it knows nothing of Overspill."""
    torch.manual_seed(1)
    ours, theirs = (torch.optim.Adam(m.parameters(), lr=2e-4, betas=(0.5, 0.99)) for m in (generator, critic))
    loss = torch.tensor(0.0)
    for _ in range(steps):
        real, noise = torch.rand(1024, 256), torch.randn(1024, 32)
        fake = generator(noise)
        theirs.zero_grad()
        (F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()).backward()
        theirs.step()
        ours.zero_grad()
        loss = F.softplus(-critic(fake)).mean()
        loss.backward()
        ours.step()
    return loss.detach()


torch.manual_seed(0)
models = mlp(32, 512, 512, 512, 256), mlp(256, 512, 512, 512, 1)
plain = copy.deepcopy(models)
session = overspill.Session(budget="smallest", store="host")
generator, critic = (overspill.compile(model, session=session) for model in models)

loss, reference = train(generator, critic), train(*plain)
print(f"loss {loss:.4f}, without Overspill {reference:.4f}")
pairs = [
    (a, b) for m, p in zip(models, plain, strict=True) for a, b in zip(m.parameters(), p.parameters(), strict=True)
]
print("weights identical" if all(torch.equal(a, b) for a, b in pairs) else "weights differ")
unmanaged = max(plan.unmanaged_peak_bytes for plan in session.plans)
print(f"planned peak {session.peak_bytes / 2**20:.1f} MiB of all together, unmanaged {unmanaged / 2**20:.1f} MiB")
