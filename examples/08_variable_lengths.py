"""Text of any length within one budget: lengths fall into four buckets, and each bucket has a plan.

python examples/08_variable_lengths.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import overspill

BUCKETS = (16, 32, 64)


def padded(batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Token ids and targets of the shortest bucket that holds the batch; -100 is what cross_entropy ignores."""
    length = next(n for n in BUCKETS if n >= max(len(tokens) for tokens in batch))
    ids = torch.stack([F.pad(tokens, (0, length - len(tokens))) for tokens in batch])
    targets = torch.stack([F.pad(tokens[1:], (0, length - len(tokens) + 1), value=-100) for tokens in batch])
    return ids, targets


class LanguageModel(nn.Module):
    """A causal transformer that returns its loss."""

    def __init__(self, vocabulary: int = 256, width: int = 64, longest: int = BUCKETS[-1]) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.tokens(ids) + self.places.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), ignore_index=-100)


def main() -> None:
    torch.manual_seed(0)
    model = overspill.compile(LanguageModel(), budget="9MiB", store="host")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = torch.tensor(0.0)
    for _ in range(12):
        longest = int(torch.randint(8, BUCKETS[-1], ()))
        lengths = torch.randint(5, longest + 1, (8,)).tolist()
        batch = [torch.randint(0, 256, (length,)) for length in lengths]
        optimizer.zero_grad()
        loss = model(*padded(batch))
        loss.backward()
        optimizer.step()
    session = model.overspill
    print(f"loss {loss.item():.4f} after 12 batches of any length")
    print(f"plans: {len(session.plans)}, each within {session.plans[0].budget_bytes / 2**20:.1f} MiB")
    for plan in session.plans:
        print(f"  peak {plan.peak_bytes / 2**20:.1f} MiB, unmanaged {plan.unmanaged_peak_bytes / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
