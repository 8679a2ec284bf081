"""A polynomial fitted by hand-written descent until the loss is small, as the smallest example of all does."""
# ruff: noqa: T201, B007

from itertools import count

import torch
import torch.nn.functional as F

POLY_DEGREE = 4
W_target, b_target = torch.randn(POLY_DEGREE, 1) * 5, torch.randn(1) * 5


def make_features(x):
    x = x.unsqueeze(1)
    return torch.cat([x**i for i in range(1, POLY_DEGREE + 1)], 1)


def poly_desc(weights, bias):
    result = "y = "
    for i, w in enumerate(weights):
        result += f"{w:+.2f} x^{i + 1} "
    return result + f"{bias[0]:+.2f}"


def get_batch(batch_size=32):
    x = make_features(torch.randn(batch_size))
    return x.cuda(), (x.mm(W_target) + b_target.item()).cuda()


fc = torch.nn.Linear(W_target.size(0), 1).cuda()
for batch_idx in count(1):
    batch_x, batch_y = get_batch()
    fc.zero_grad()
    output = F.smooth_l1_loss(fc(batch_x), batch_y)
    loss = output.item()
    output.backward()
    for param in fc.parameters():
        param.data.add_(-0.1 * param.grad)
    if loss < 1e-3:
        break

print(f"Loss: {loss:.6f} after {batch_idx} batches")
print("==> Learned function:\t" + poly_desc(fc.weight.view(-1), fc.bias))
print("==> Actual function:\t" + poly_desc(W_target.view(-1), b_target))
