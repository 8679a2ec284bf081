"""A recurrent language model on long columns of words: its own SGD, perplexity, annealing, and the best model reloaded."""
# ruff: noqa: T201, PTH123

import math
import time

import torch
from torch import nn

batch_size, eval_batch_size, bptt, ntokens, emsize, nhid, nlayers, lr, clip = 20, 10, 12, 300, 64, 64, 2, 20.0, 0.25
torch.manual_seed(1111)
device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
corpus = torch.randint(0, ntokens, (20 * 60,))


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous().to(device)


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(ntokens, emsize)
        self.rnn, self.decoder = nn.LSTM(emsize, nhid, nlayers, dropout=0.2), nn.Linear(nhid, ntokens)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def forward(self, words, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(words)), hidden)
        decoded = self.decoder(self.drop(output)).view(-1, ntokens)
        return torch.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(nlayers, bsz, nhid), weight.new_zeros(nlayers, bsz, nhid)


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


def get_batch(source, i):
    seq_len = min(bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


train_data, val_data = batchify(corpus, batch_size), batchify(corpus, eval_batch_size)
model, criterion = RNNModel().to(device), nn.NLLLoss()


def evaluate(data_source):
    model.eval()
    total_loss = 0.0
    hidden = model.init_hidden(eval_batch_size)
    with torch.no_grad():
        for i in range(0, data_source.size(0) - 1, bptt):
            data, targets = get_batch(data_source, i)
            output, hidden = model(data, hidden)
            hidden = repackage_hidden(hidden)
            total_loss += len(data) * criterion(output, targets).item()
    return total_loss / (len(data_source) - 1)


def train(epoch):
    model.train()
    total_loss, start_time = 0.0, time.time()
    hidden = model.init_hidden(batch_size)
    for batch, i in enumerate(range(0, train_data.size(0) - 1, bptt)):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        total_loss += loss.item()
        if batch % 2 == 0 and batch > 0:
            cur_loss, elapsed = total_loss / 2, time.time() - start_time
            print(
                f"| epoch {epoch:3d} | lr {lr:02.2f} | {elapsed * 500:5.2f} ms | loss {cur_loss:5.2f} | ppl {math.exp(cur_loss):8.2f}"
            )
            total_loss, start_time = 0, time.time()


best_val_loss = None
for epoch in range(1, 3):
    train(epoch)
    val_loss = evaluate(val_data)
    print(f"| end of epoch {epoch:3d} | valid loss {val_loss:5.2f} | valid ppl {math.exp(val_loss):8.2f}")
    if not best_val_loss or val_loss < best_val_loss:
        with open("model.pt", "wb") as f:
            torch.save(model, f)
        best_val_loss = val_loss
    else:
        lr /= 4.0
with open("model.pt", "rb") as f:
    model = torch.load(f, weights_only=False)
    model.rnn.flatten_parameters()
print(f"| End of training | test loss {evaluate(val_data):5.2f}")
