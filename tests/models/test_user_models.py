"""A user's own callable becomes a job, and every mistake in it one clear line."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from overspill.core.errors import RequestError
from overspill.job import Job, NamedModel
from overspill.models import load
from overspill.models.drawing import python_randomness
from overspill.models.step import TrainingStep
from overspill.runtime.capture_job import prepared_step

pytestmark = pytest.mark.usefixtures("forget_compiled_code")

HEADER = """
import torch
from torch import nn
from torch.nn import functional as F
"""
fresh = itertools.count()

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a module into the current directory and returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # undoes what loading adds to sys.path

    def write(source: str) -> str:
        name = f"user_models_{next(fresh)}"
        (tmp_path / f"{name}.py").write_text(HEADER + source)
        return name

    return write


def step_of(spec: str, batch_size: int = 3) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The loss of one step of the user's job, and its batch; gradients must reach the parameters."""
    job = load(spec)
    batch = job.make_batch(batch_size)
    loss = TrainingStep(job)(*batch)
    loss.backward()
    assert all(parameter.grad is not None for parameter in job.module.parameters())
    return loss, batch


@pytest.mark.parametrize(
    ("layers", "shape", "dtype"),
    [
        ("nn.Conv2d(5, 2, 3)", (3, 5, 224, 224), torch.float32),
        ("nn.ReLU(), nn.Linear(7, 2)", (3, 7), torch.float32),
        ("nn.Linear(7, 2).double()", (3, 7), torch.float64),
        ("nn.Embedding(11, 4), nn.Linear(4, 2)", (3, 128), torch.int64),
    ],
)
def test_inputs_follow_from_the_first_layer(
    write: Write, layers: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    module = write(f"def make(): return nn.Sequential({layers})")
    loss, (inputs,) = step_of(f"{module}:make")
    assert inputs.shape == shape
    assert inputs.dtype == dtype
    assert loss.shape == ()


def test_sizes_reach_derived_inputs(write: Write) -> None:
    module = write(
        "def images(): return nn.Conv2d(3, 2, 3)\ndef tokens(): return nn.Embedding(9, 2)\ndef flat(): return nn.Linear(9, 2)"
    )
    assert load(f"{module}:images", image_size=40).make_batch(2)[0].shape == (2, 3, 40, 40)
    assert load(f"{module}:tokens", seq_len=6).make_batch(2)[0].shape == (2, 6)
    with pytest.raises(RequestError, match="seq_len="):
        load(f"{module}:images", seq_len=6)
    with pytest.raises(RequestError, match="image_size="):
        load(f"{module}:flat", image_size=6)


def test_the_default_loss_is_the_mean_of_squares(write: Write) -> None:
    module = write("def make(): return nn.Linear(4, 2)")
    job = load(f"{module}:make")
    (x,) = job.make_batch(3)
    assert torch.equal(job.loss(job.module, x), job.module(x).square().mean())


def test_a_class_is_a_callable_and_its_scalar_output_is_the_loss(write: Write) -> None:
    module = write(
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.fc = nn.Linear(4, 2)\n"
        "    def forward(self, x): return self.fc(x).abs().sum()\n"
    )
    job = load(f"{module}:Net")
    batch = job.make_batch(3)
    assert torch.equal(job.loss(job.module, *batch), job.module(*batch))


@pytest.mark.parametrize("wrap", ["{'loss': loss, 'logits': out}", "types.SimpleNamespace(loss=loss)"])
@pytest.mark.parametrize("batch", ["(x, y)", "[x, y]", "{'features': x, 'labels': y}"])
def test_the_loss_in_the_output_is_minimised(write: Write, wrap: str, batch: str) -> None:
    module = write(
        "import types\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.fc = nn.Linear(4, 2)\n"
        "    def forward(self, features, labels=None):\n"
        f"        out = self.fc(features); loss = F.cross_entropy(out, labels); return {wrap}\n"
        "def batch(n):\n"
        f"    x, y = torch.randn(n, 4), torch.randint(2, (n,)); return {batch}\n"
        "def make(): return Net(), batch\n"
    )
    loss, tensors = step_of(f"{module}:make")
    assert [tensor.shape for tensor in tensors] == [(3, 4), (3,)]
    assert loss.shape == ()


@pytest.mark.parametrize("batch", ["(x, y)", "{'input': x, 'labels': y}"])
def test_a_users_loss_reads_the_labels_and_the_module_does_not(write: Write, batch: str) -> None:
    module = write(
        "def batch(n):\n"
        f"    x, y = torch.randn(n, 4), torch.randint(2, (n,)); return {batch}\n"
        "def make(): return nn.Sequential(nn.Linear(4, 2)), batch, lambda out, x, y: F.cross_entropy(out, y)\n"
    )
    loss, (x, y) = step_of(f"{module}:make")
    job = load(f"{module}:make")
    job.make_batch(1)  # tells the names of a dict
    assert torch.equal(job.loss(job.module, x, y), torch.nn.functional.cross_entropy(job.module(x), y))
    assert loss.shape == ()


def test_a_users_job_compiles_into_one_graph(write: Write) -> None:
    module = write(
        "def batch(n): return {'input': torch.randn(n, 4), 'labels': torch.randint(2, (n,))}\n"
        "def make(): return nn.Sequential(nn.Linear(4, 2)), batch, lambda out, x, y: F.cross_entropy(out, y)\n"
    )
    job = load(f"{module}:make")
    batch = job.make_batch(3)
    step = TrainingStep(job)
    compiled = torch.compile(TrainingStep(job), fullgraph=True, dynamic=False, backend="aot_eager")
    assert torch.equal(compiled(*batch), step(*batch))


def test_a_nested_callable_is_found(write: Write) -> None:
    module = write("class Nets:\n    @staticmethod\n    def make(): return nn.Linear(4, 2)\n")
    step_of(f"{module}:Nets.make")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise ValueError('first\\nsecond')", ["cannot import", "ValueError: first second"]),
        ("import no_such_package_at_all", ["cannot import", "ModuleNotFoundError", "no_such_package_at_all"]),
        ("import sys; sys.exit(4)", ["cannot import", "SystemExit: 4"]),
        ("def make(:", ["cannot import", "SyntaxError"]),
        ("other = 1", ["no attribute make"]),
        ("make = 3", ["is a int, not a callable"]),
        ("make = nn.Linear(2, 2)", ["is a module already"]),
        ("def make(): raise KeyError('gone')", ["raised KeyError: 'gone'"]),
        ("def make(width): return nn.Linear(2, 2)", ["raised TypeError", "width"]),
        ("def make(): return None", ["returned NoneType", "make_batch"]),
        ("def make(): return ()", ["tuple of 0"]),
        ("def make(): return 1, 2", ["returned int as first in its tuple"]),
        ("def make(): return nn.Linear(2, 2), 5", ["int as make_batch"]),
        ("def make(): return nn.Linear(2, 2), (lambda n: torch.zeros(n, 2)), 5", ["int as loss"]),
        ("def make(): return nn.ReLU()", ["cannot tell what ReLU reads", "no layer with parameters", "make_batch"]),
        ("def make(): return nn.LSTM(2, 2)", ["cannot tell what LSTM reads", "first layer LSTM"]),
        ("def make(): return nn.LazyLinear(2)", ["first layer LazyLinear"]),
    ],
)
def test_a_callable_that_is_wrong_is_refused_in_one_line(write: Write, source: str, words: list[str]) -> None:
    spec = f"{write(source)}:make"
    with pytest.raises(RequestError) as caught:
        load(spec)
    text = str(caught.value)
    assert spec in text
    assert all(word in text for word in words)
    assert "\n" not in text


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ("1 / 0", ["make_batch", "raised ZeroDivisionError: division by zero"]),
        ("'text'", ["returned str; it must return a tensor"]),
        ("()", ["it must return a tensor"]),
        ("(torch.zeros(n, 2), 3)", ["returned int among its tensors"]),
        ("(torch.zeros(n, 2), torch.zeros(n))", ["does not suit its forward", "too many positional arguments"]),
        ("{'x': torch.zeros(n, 2)}", ["does not suit its forward", "input"]),
    ],
)
def test_a_batch_that_is_wrong_is_refused_in_one_line(write: Write, batch: str, words: list[str]) -> None:
    spec = f"{write(f'def make(): return nn.Linear(2, 2), lambda n: {batch}')}:make"
    job = load(spec)
    with pytest.raises(RequestError) as caught:
        job.make_batch(2)
    assert all(word in str(caught.value) for word in [spec, *words])


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("nn.LSTM(2, 2), lambda n: torch.zeros(n, 5, 2)", ["gives no loss in its tuple"]),
        ("nn.Linear(2, 2), lambda n: torch.zeros(n, 2), lambda out, x: out", ["tensor of shape (3, 2), not a scalar"]),
        ("nn.Linear(2, 2), lambda n: torch.zeros(n, 2), lambda out, x: 1.0", ["is float, not a scalar tensor"]),
    ],
)
def test_a_loss_that_is_no_scalar_is_refused(write: Write, made: str, words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        step_of(f"{write(f'def make(): return {made}')}:make")
    assert all(word in str(caught.value) for word in words)


def test_a_loss_of_torch_is_given_the_output_and_the_target(write: Write) -> None:
    source = "nn.Linear(2, 2), lambda n: (torch.ones(n, 2), torch.zeros(n, dtype=torch.long)), nn.CrossEntropyLoss()"
    spec = f"{write(f'def make(): torch.manual_seed(0); return {source}')}:make"
    loss, batch = step_of(spec)
    torch.manual_seed(0)
    assert torch.equal(loss, torch.nn.CrossEntropyLoss()(torch.nn.Linear(2, 2)(batch[0]), batch[1]))


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (
            "lambda n: (torch.zeros(n, 2), torch.zeros(n)), lambda out, y: out",
            ["loss(output, tensor, tensor)", "(out, y)"],
        ),
        (
            "lambda n: {'input': torch.zeros(n, 2)}, lambda out: out",
            ["loss(output, input)", "every tensor of the batch"],
        ),
        ("nn.MSELoss(), lambda n: torch.zeros(n, 2)", ["MSELoss as make_batch", "(module, make_batch, loss)"]),
        ("lambda n: torch.zeros(n, 2), nn.MSELoss()", ["MSELoss", "needs a target"]),
        ("lambda n: (torch.zeros(n, 2), torch.zeros(n))", ["with labels", "(module, make_batch, loss)"]),
    ],
)
def test_what_is_returned_in_another_order_or_form_is_told_how_to_be(write: Write, made: str, words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        step_of(f"{write(f'def make(): return nn.Linear(2, 2), {made}')}:make")
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("spec", [":make", "module:", "a:b:c", "a/b.py:make", "a..b:make"])
def test_a_name_of_the_wrong_form_is_refused(spec: str) -> None:
    with pytest.raises(RequestError, match=r"write package\.module:callable"):
        load(spec)


def test_a_module_that_does_not_exist_is_named() -> None:
    with pytest.raises(RequestError, match="no_such_module:make: ModuleNotFoundError"):
        load("no_such_module:make")


def test_options_that_do_not_apply_to_a_users_model_are_refused(write: Write) -> None:
    spec = f"{write('def make(): return nn.Linear(2, 2), lambda n: torch.zeros(n, 2)')}:make"
    with pytest.raises(RequestError, match="image_size="):
        load(spec, image_size=8)
    with pytest.raises(RequestError, match="small"):
        load(spec, small=True)


def test_who_has_a_file_of_a_built_in_name_is_told_which_model_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load("unet", small=True).assumed == ""
    Path("unet.py").write_text("", encoding="utf-8")
    assert load("unet", small=True).assumed == "unet is the built-in model; one of your unet.py is unet:FUNCTION"


def test_the_job_is_the_same_each_time_though_its_module_and_its_batches_draw(write: Write) -> None:
    name = write(
        "import random, numpy\n"
        "at_import = torch.randn(3), random.random(), numpy.random.rand()\n"
        "def job(): return nn.Linear(4, 2), lambda n: torch.full((n, 4), random.random() + numpy.random.rand())\n"
    )
    before = torch.get_rng_state(), python_randomness()
    (step, (batch,)), (other, (other_batch,)) = (prepared_step(Job(NamedModel(f"{name}:job"), 3)) for _ in range(2))
    assert all(torch.equal(one, two) for one, two in zip(step.parameters(), other.parameters(), strict=True))
    assert torch.equal(batch[0], other_batch[0])
    assert torch.equal(before[0], torch.get_rng_state())
    assert repr(before[1]) == repr(python_randomness())


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("nn.Linear(4, 2).requires_grad_(False)", "Linear has no parameter that requires a gradient"),
        (
            "nn.Linear(4, 2), lambda n: torch.zeros(n, 4), lambda out, x: out.detach().mean()",
            "follows from no parameter",
        ),
    ],
)
def test_a_job_with_nothing_to_train_is_refused(write: Write, returned: str, words: str) -> None:
    name = write(f"def job(): return {returned}\n")

    def run() -> None:
        step, (batch,) = prepared_step(Job(NamedModel(f"{name}:job"), 3))
        step(*batch)

    with pytest.raises(RequestError) as caught:
        run()
    assert words in str(caught.value)
