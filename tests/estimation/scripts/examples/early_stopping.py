"""A classifier as a careful user trains it: metrics in NumPy, a plateau schedule, early stopping, guards and a progress bar."""
# ruff: noqa: T201, SIM115, PT018

import copy
import csv
import json
import math
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm


class EarlyStopping:
    def __init__(self, patience=3, delta=1e-4):
        self.patience, self.delta, self.best, self.waited, self.weights = patience, delta, math.inf, 0, None

    def __call__(self, loss, model):
        if loss < self.best - self.delta:
            self.best, self.waited = loss, 0
            self.weights = copy.deepcopy(model.state_dict())
        else:
            self.waited += 1
        return self.waited >= self.patience


class Writer:
    """What a logger of experiments does with a number: it has to be one."""

    def __init__(self, folder):
        Path(folder).mkdir(exist_ok=True)
        self.file = Path(folder, "events.jsonl").open("w")

    def add_scalar(self, tag, value, step):
        value = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        self.file.write(json.dumps({"tag": tag, "value": float(value.squeeze()), "step": step}) + "\n")

    def add_histogram(self, tag, values, step):
        counts, edges = np.histogram(values.detach().cpu().numpy(), bins=8)
        self.file.write(
            json.dumps({"tag": tag, "counts": counts.tolist(), "edges": edges.tolist(), "step": step}) + "\n"
        )


def confusion(truth, predicted, classes):
    return np.bincount(classes * np.asarray(truth) + np.asarray(predicted), minlength=classes**2).reshape(
        classes, classes
    )


device, classes = "cuda", 5
data = TensorDataset(torch.randn(96, 32), torch.randint(0, classes, (96,)))
train_loader, val_loader = DataLoader(data, batch_size=48, shuffle=True), DataLoader(data, batch_size=32)
model = nn.Sequential(nn.Linear(32, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, classes)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
stopping, writer, step = EarlyStopping(), Writer("runs"), 0
for epoch in range(20):
    model.train()
    bar = tqdm(train_loader, desc=f"epoch {epoch}")
    for x, y in bar:
        x, y = x.to(device), y.to(device)  # noqa: PLW2901
        assert y.min() >= 0 and y.max() < classes, "labels out of range"
        loss = nn.functional.cross_entropy(model(x), y)
        if torch.isnan(loss).any() or not torch.isfinite(loss):
            raise ValueError("the loss is not finite")
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norm > 100:
            print(f"large gradients at step {step}: {norm.item():.1f}")
        optimizer.step()
        writer.add_scalar("loss", loss, step)
        writer.add_scalar("norm", float(norm), step)
        writer.add_histogram("weights", model[0].weight, step)
        bar.set_postfix(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
        step += 1
    model.eval()
    truth, predicted, probabilities, val_loss = [], [], [], 0.0
    with torch.no_grad():
        for x, y in val_loader:
            logits = model(x.to(device))
            val_loss += nn.functional.cross_entropy(logits, y.to(device)).item() / len(val_loader)
            truth += y.tolist()
            predicted.extend(logits.argmax(1).cpu().tolist())
            probabilities.append(logits.softmax(1).cpu().numpy())
    table = confusion(truth, predicted, classes)
    assert table.sum() == len(data)
    precision = table.diagonal() / np.maximum(table.sum(0), 1)
    positive = (torch.cat([torch.tensor(p) for p in probabilities]).argmax(1) == torch.tensor(truth)).float().mean()
    tp = int((model(data.tensors[0].to(device)).argmax(1) == data.tensors[1].to(device)).sum())
    print(
        f"epoch {epoch}: loss {val_loss:.3f}, precision {precision.mean():.3f}, accuracy {positive:.3f}, {tp / (tp + 1):.2f}"
    )
    with Path("log.csv").open("a", newline="") as file:
        csv.writer(file).writerow([epoch, val_loss, precision.mean()])
    scheduler.step(val_loss)
    if stopping(val_loss, model):
        break
