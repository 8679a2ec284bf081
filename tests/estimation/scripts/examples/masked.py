"""A masked language model and a detector's head: what is computed depends on where the labels are."""

import torch
from torch import nn

vocabulary, width = 200, 32
encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 4, 64, batch_first=True), 2)
embedding, head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
model = nn.ModuleDict({"embedding": embedding, "encoder": encoder, "head": head}).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(10):
    tokens = torch.randint(0, vocabulary, (8, 24)).cuda()
    masked = torch.rand(tokens.shape, device="cuda") < 0.15
    labels = torch.where(masked, tokens, -100)
    hidden = encoder(embedding(tokens.masked_fill(masked, 0)))
    chosen = hidden[labels != -100]
    loss = nn.functional.cross_entropy(head(chosen), labels[labels != -100])
    rows, columns = torch.nonzero(masked, as_tuple=True)
    loss = loss + hidden[rows, columns].square().mean() + hidden.masked_select(masked[..., None]).mean()
    if masked.any():
        loss = loss * len(torch.unique(tokens)) / vocabulary
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
