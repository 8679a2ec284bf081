"""A recurrent language model that is trained without torch.optim, as the old example does it."""
# ruff: noqa: A002, T201

import math

import torch
from torch import nn

torch.manual_seed(1111)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
tokens, bptt, batch_size = 200, 35, 20


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.drop = nn.Embedding(tokens, 64), nn.Dropout(0.2)
        self.rnn, self.decoder = nn.LSTM(64, 64, 2, dropout=0.2), nn.Linear(64, tokens)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        return torch.nn.functional.log_softmax(self.decoder(self.drop(output)).view(-1, tokens), dim=1), hidden

    def init_hidden(self, size):
        weight = next(self.parameters())
        return weight.new_zeros(2, size, 64), weight.new_zeros(2, size, 64)


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


data = torch.randint(0, tokens, (20000,)).narrow(0, 0, 20000 // batch_size * batch_size)
train_data = data.view(batch_size, -1).t().contiguous().to(device)
model, criterion, lr = RNNModel().to(device), nn.NLLLoss(), 20
hidden, total_loss = model.init_hidden(batch_size), 0.0
for batch, i in enumerate(range(0, train_data.size(0) - 1, bptt)):
    length = min(bptt, len(train_data) - 1 - i)
    x, y = train_data[i : i + length], train_data[i + 1 : i + 1 + length].view(-1)
    model.zero_grad()
    hidden = repackage_hidden(hidden)
    output, hidden = model(x, hidden)
    loss = criterion(output, y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-lr)
    total_loss += loss.item()
    print(f"| {batch:5d} batches | lr {lr:02.2f} | loss {total_loss:5.2f} | ppl {math.exp(total_loss):8.2f}")
