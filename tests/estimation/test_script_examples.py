"""Scripts in the style of those that people learn from, unmodified: what they read of values is invented, and noted."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.estimation.small_script import MODEL, STEP

from overspill.core import Phase, TensorKind
from overspill.estimation.script import ScriptRun, record_script

pytestmark = pytest.mark.usefixtures("own_folder")
EXAMPLES = Path(__file__).parent / "scripts" / "examples"


def run(name: str, *arguments: str, iterations: int = 3) -> ScriptRun:
    return record_script(EXAMPLES / f"{name}.py", arguments, iterations=iterations)


def note(found: ScriptRun, words: str) -> str:
    return next((text for text in found.notes if words in text), "")


def test_an_example_trains_through_its_evaluations_and_checkpoints() -> None:
    found = run("early_stopping", iterations=6)  # more than an epoch has batches
    assert found.iterations == found.recording.iterations == 6
    assert found.trains
    assert list(Path.cwd().iterdir()) == []


def test_what_people_make_of_values_between_steps_can_be_made(write: Callable[..., str]) -> None:
    pytest.importorskip("PIL")
    pytest.importorskip("matplotlib")
    script = """
import math
import matplotlib; matplotlib.use("Agg")
from matplotlib import pyplot
from PIL import Image
classes = torch.arange(64) % 10
of_class = {number: torch.where(classes == number)[0] for number in range(10)}
assert of_class[3][1].item() == 13
rows = torch.randperm(32).to("cuda")
total = torch.sparse_coo_tensor(torch.randint(0, 8, (2, 20)), torch.ones(20), (8, 8)).to_dense().cuda()
best, kept = None, model
for step in range(20):
    x, target = torch.randn(32, 64).cuda(non_blocking=True), torch.arange(32).remainder(8).cuda(0)
    model.train()
    out = model(x) @ torch.softmax(torch.where(total > 0, total, -9e16 * torch.ones_like(total)), -1)
    loss = nn.functional.cross_entropy(out[rows[8:]], target[rows[8:]])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        pred = model(x).topk(5, 1, True, True)[1].t()
        correct = pred.eq(target.view(1, -1).expand_as(pred))[:5].reshape(-1).float().sum(0, keepdim=True).mul_(100 / 32)
        grid = torch.cat(list(model(x)[:4].view(4, 2, 4)), 1).mul(255).clamp_(0, 255).to("cpu", torch.uint8).numpy()
    Image.fromarray(grid).save("sample.png")
    pyplot.plot(out.detach().cpu().numpy()[0], linewidth=2.0)
    pyplot.savefig("drawn.png")
    print(f"{correct[0]} {math.exp(loss.item()):8.2f} {10 * math.log10(1 / loss.item()):.4f}")
    if not best or correct[0] > best:
        best = max(correct[0], best or 0)
        torch.save(model, "model.pt")
        kept = torch.load("model.pt", weights_only=False)
"""
    assert record_script(write(MODEL + script), iterations=4).iterations == 4
    assert {path.name for path in Path.cwd().iterdir()} == {"train.py"}


@pytest.mark.long
def test_descent_until_a_loss_is_small_goes_on() -> None:
    found = run("regression")
    assert found.iterations == 3
    assert not found.finished


@pytest.mark.long
@pytest.mark.parametrize(
    ("package", "name"),
    [("transformers", "trainer"), ("lightning", "with_lightning"), ("accelerate", "with_accelerate")],
)
def test_a_script_of_a_training_library(package: str, name: str) -> None:
    for needed in (package, "accelerate" if package == "transformers" else package):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    found = run(name)
    assert found.iterations == found.recording.iterations == 3
    assert found.trains
    assert "AdamW" in " ".join(found.optimizers)
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.long
def test_a_trainer_in_fp16_has_weights_in_float32_and_logits_that_its_evaluation_keeps(
    write: Callable[..., str],
) -> None:
    pytest.importorskip("accelerate")
    fine_tune = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=4096, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 4096, (40, 32))]
arguments = TrainingArguments(
    "out", fp16=True, per_device_train_batch_size=1, per_device_eval_batch_size=4, eval_strategy="steps", eval_steps=2,
    report_to=[], save_strategy="no",
)
Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, compute_metrics=lambda made: {"seen": len(made.predictions)}).train()
"""
    recording = record_script(write(fine_tune)).recording
    elements = 2 * 4096 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
    held: dict[TensorKind, int] = {}
    for allocation in recording.allocations:
        if allocation.start < recording.starts[1] and allocation.end == recording.events:
            held[allocation.kind] = held.get(allocation.kind, 0) + allocation.nbytes
    assert held[TensorKind.PARAMETER] == 4 * elements
    assert held[TensorKind.OPTIMIZER_STATE] == pytest.approx(2 * 4 * elements, rel=0.01)
    # The logits of all batches in float32, and once more as the last ones are joined to them.
    logits = 4 * 40 * 32 * 4096
    assert recording.peak_requested_bytes == pytest.approx(3 * 4 * elements + 2 * logits, rel=0.03)


@pytest.mark.long
def test_what_values_select_is_taken_to_be_all_and_named() -> None:
    found = run("masked")
    assert found.iterations == 3
    assert "masked.py" in note(found, "runs nonzero, whose shape depends on values")
    chosen = [op for op in found.recording.ops if op.name == "nonzero"]
    assert len(chosen) == 3 * 4


def test_the_lines_that_values_were_invented_for_are_noted(write: Callable[..., str]) -> None:
    script = MODEL + "best = 9\nfor step in range(20):" + STEP + (
        "    print(f'{loss.item():.3f}')\n"
        "    if loss.item() < best:\n"
        "        best = loss.item()\n"
        "    names = ['a', 'b'][model(x).argmax().item() % 2:]\n"
    )  # fmt: skip
    found = record_script(write(script))
    assert found.iterations == 3
    assert note(found, "values were invented").endswith(": train.py:14, train.py:16")
    plain = record_script(write(MODEL + "for step in range(20):" + STEP))
    assert plain.notes == ()
    assert plain.recording.peak_requested_bytes <= found.recording.peak_requested_bytes


@pytest.mark.long
def test_invented_counts_are_named_for_memory_may_depend_on_them(write: Callable[..., str]) -> None:
    count = "    n = (model(x) > 0).sum().item()\n    kept = x[:n]\n    rows = torch.zeros(int(n))\n"
    found = record_script(write(MODEL + "for step in range(20):" + STEP + count))
    assert "train.py:13 counted or indexed by an invented 1" in note(found, "counted")


def test_values_that_the_script_put_there_itself_are_known(write: Callable[..., str]) -> None:
    lengths = (
        "    lengths = torch.tensor([3, 5, 2], device='cuda')\n"
        "    assert lengths.max().item() == 5 and lengths.tolist() == [3, 5, 2] and int(lengths[1]) == 5\n"
        "    assert x[:, : lengths.max()].shape[1] == 5 and (lengths > 2).nonzero().shape == (2, 1)\n"
        "    assert lengths[lengths > 2].sum() == 8 and len(torch.unique(lengths % 2)) == 2\n"
        "    view = lengths[:1]\n"
        "    lengths.add_((model(x) > 0).sum())\n"
        "    assert str(view.sum().item()) == 'unknown'\n"
    )
    found = record_script(write(MODEL + "for step in range(20):" + STEP + lengths))
    assert found.iterations == 3
    assert found.notes == ()


@pytest.mark.long
def test_conditions_that_errors_follow_are_as_they_must_be(write: Callable[..., str]) -> None:
    checks = (
        "    x = model(x)\n"
        "    assert (x > 100).all(), 'small'\n"
        "    assert not (x < 100).any()\n"
        "    if not (x > 100).any():\n        raise ValueError\n"
        "    if loss < 7 or \\\n            loss.item() < 8:\n        raise ValueError\n"
        "    assert loss.item() > 9\n"
        "    while loss > 0.1:\n        break\n    else:\n        raise ValueError\n"
    )
    found = record_script(write(MODEL + "for step in range(20):" + STEP + checks))
    assert found.iterations == 3


def test_a_network_is_as_large_as_the_data_that_the_script_reads_makes_it(write: Callable[..., str]) -> None:
    Path("graph.txt").write_text("".join(f"{node} {node % 7} {(node * 3) % 2000}\n" for node in range(2000)))
    script = """
import numpy as np, torch
table = np.loadtxt("graph.txt", dtype=np.int64)
labels, edges = torch.from_numpy(table[:, 1]).cuda(), torch.from_numpy(table[:, [0, 2]].T).cuda()
train = torch.zeros(2000, dtype=torch.bool, device="cuda")
train[:140] = True
model = torch.nn.Linear(8, 2 * (labels.max().item() + 1)).cuda()
assert model.out_features == 14
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(20):
    far = edges[:, edges[0] != edges[1]]
    assert far.shape == (2, 1998)
    out = model(torch.ones(2000, 8, device="cuda")[far[1]])[train[far[0]]]
    assert len(out) == 139
    out.sum().backward()
    optimizer.step()
"""
    found = record_script(write(script))
    assert (found.iterations, found.notes) == (3, ())


def test_a_saved_checkpoint_can_be_copied_and_loaded_again_and_nothing_stays(write: Callable[..., str]) -> None:
    saving = (
        "    torch.save({'model': model.state_dict(), 'step': step, 'seen': torch.arange(3).cuda()}, 'last.pt')\n"
        "    import shutil; shutil.copyfile('last.pt', 'best.pt')\n"
        "    state = torch.load('best.pt', map_location='cpu')\n"
        "    assert state['seen'].tolist() == [0, 1, 2] and state['step'] == step and state['model']['0.weight'].shape == (256, 64)\n"
        "    model.load_state_dict(state['model'])\n"
    )
    found = record_script(write(MODEL + "for step in range(20):" + STEP + saving))
    assert found.iterations == 3
    assert {path.name for path in Path.cwd().iterdir()} == {"train.py"}


def test_evaluation_that_repeats_itself_before_training_is_cut_short(write: Callable[..., str]) -> None:
    evaluation = """
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(320, 64)), batch_size=4)
class Stream(torch.utils.data.IterableDataset):
    __iter__ = lambda self: iter(torch.randn(20, 4, 64))
stream = iter(torch.utils.data.DataLoader(Stream(), batch_size=None))
seen = 0
with torch.no_grad():
    for (x,) in data:
        seen += model(x.cuda()).argmax(1).sum().item() >= 0
    for _ in range(50):
        with torch.autocast("cuda"):  # which keeps casts of the weights
            model(torch.randn(4, 64).cuda())
    for _ in range(20):
        model(next(stream).cuda())  # of which no end is expected
    text = torch.zeros(1, 64).cuda()
    for _ in range(120):  # as text that grows, of which the model sees a window
        model(text[:, -64:])
        text = torch.cat((text, text[:, :1]), 1)
    del text
print('batches', seen)
"""
    found = record_script(write(MODEL + evaluation + "for step in range(20):" + STEP))
    plain = record_script(write(MODEL + "for step in range(20):" + STEP))
    forward = [op for op in found.recording.ops if op.phase is Phase.FORWARD and op.name == "addmm"]
    assert found.iterations == 3
    assert len(forward) < 2 * (12 + 3 + 15)
    assert note(found, "cut short")
    assert found.recording.peak_requested_bytes == plain.recording.peak_requested_bytes


MICRO_STEPS = """
for step in range(20):
    for micro in range(12):
        {before}
        loss = model(torch.randn(32, 64).cuda()).square().mean() {loss}
        loss.backward()
        total = sum(p.grad.norm() for p in model.parameters())
    optimizer.step()
    optimizer.zero_grad()
"""
AUX = """
class Aux(nn.Sequential):
    def forward(self, x):
        y = super().forward(x)
        self.aux = y.mean()
        return y
model = Aux(*model)
"""


@pytest.mark.parametrize(
    ("model", "before", "loss"),
    [
        ("", "pass", "/ 12"),
        ("", "kept = []", "; optimizer.zero_grad()"),
        (AUX, "pass", "+ model.aux"),
        ("kept = []", "kept.append(step)", "; kept.append(loss)"),
    ],
    ids=["plain", "cleared", "other-loss", "kept"],
)
def test_micro_steps_that_repeat_themselves_are_cut_short(
    write: Callable[..., str], model: str, before: str, loss: str
) -> None:
    script = write(MODEL + model + MICRO_STEPS.format(before=before, loss=loss))
    found, whole = (record_script(script, whole_steps=whole_steps) for whole_steps in (False, True))
    repeats = model == ""
    assert bool(note(found, "cut short")) == repeats
    run_again, run = ([op.name for op in one.recording.ops].count("addmm") for one in (found, whole))
    assert run_again == (run // 4 if repeats else run)
    assert note(whole, "cut short") == ""
    for recording in (found.recording, whole.recording):
        assert recording.iterations == 3
        assert recording.peak_requested_bytes == whole.recording.peak_requested_bytes


@pytest.mark.long
def test_a_cache_that_grows_is_not_cut_short(write: Callable[..., str]) -> None:
    evaluation = "kept = []\nwith torch.no_grad():\n    for _ in range(30):\n        kept.append(model(torch.randn(4, 64).cuda()))\n"
    found = record_script(write(MODEL + evaluation + "for step in range(20):" + STEP))
    outputs = [a for a in found.recording.allocations if a.nbytes == 4 * 8 * 4 and a.end == found.recording.events]
    assert len(outputs) >= 30
    assert note(found, "cut short") == ""
