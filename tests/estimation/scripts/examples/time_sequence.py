"""Sine waves continued by two LSTM cells in double precision, trained by LBFGS, drawn after each step."""
# ruff: noqa: T201, NPY002

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn, optim

waves, length, width = 10, 16, 51


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, width), nn.LSTMCell(width, width), nn.Linear(width, 1)

    def forward(self, values, future=0):
        outputs = []
        h_t, c_t, h_t2, c_t2 = (
            torch.zeros(values.size(0), width, dtype=torch.double, device=values.device) for _ in range(4)
        )
        for input_t in values.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        for _ in range(future):
            h_t, c_t = self.lstm1(output, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        return torch.cat(outputs, dim=1)


np.random.seed(0)
x = np.arange(length)[None] + np.random.randint(-4 * 20, 4 * 20, waves)[:, None]
data = np.sin(x / 20).astype("float64")
source, target = torch.from_numpy(data[3:, :-1]).cuda(), torch.from_numpy(data[3:, 1:]).cuda()
test_source, test_target = torch.from_numpy(data[:3, :-1]).cuda(), torch.from_numpy(data[:3, 1:]).cuda()
seq = Sequence().double().cuda()
criterion = nn.MSELoss()
optimizer = optim.LBFGS(seq.parameters(), lr=0.8, max_iter=4)
for step in range(5):
    print("STEP:", step)

    def closure():
        optimizer.zero_grad()
        loss = criterion(seq(source), target)
        print("loss:", loss.item())
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        pred = seq(test_source, future=8)
        loss = criterion(pred[:, :-8], test_target)
        print("test loss:", loss.item())
        y = pred.detach().cpu().numpy()
    plt.figure(figsize=(4, 2))
    for row, colour in zip(y, "rgb", strict=True):
        plt.plot(np.arange(source.size(1)), row[: source.size(1)], colour, linewidth=2.0)
    plt.savefig(f"predict{step}.pdf")
    plt.close()
