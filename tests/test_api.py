"""The public API: its names, and verbs that answer for a user's own model without touching it."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill import errors
from overspill.core import Block, Schedule, Trace
from overspill.core.errors import OverspillError, RequestError
from overspill.devices import load_device
from overspill.job import Job
from overspill.models.registry import load
from overspill.placement import allocator_named
from overspill.placement.packing import solver_named
from overspill.policies import policy_named
from overspill.runtime.options import Options
from overspill.runtime.preview import preview
from overspill.runtime.transfer.registry import make_store


def test_the_public_names_are_these() -> None:
    assert overspill.__all__ == [
        "Session", "advise", "allocator", "compare", "compile", "errors", "estimate", "load_device", "pack", "plan",
        "plan_graph", "record", "step", "sweep", "train_step",
    ]  # fmt: skip
    assert all(getattr(overspill, name) is not None for name in overspill.__all__)
    assert all(issubclass(getattr(errors, name), OverspillError) for name in errors.__all__)
    with pytest.raises(AttributeError, match="no attribute 'estimat'"):
        _ = overspill.estimat
    with pytest.raises(AttributeError, match="it is overspill"):
        _ = overspill.OverspillError


def test_results_errors_and_arguments_are_as_users_of_python_expect() -> None:
    assert {*dir(overspill)} >= {*overspill.__all__}
    model, inputs = nn.Linear(64, 64), torch.empty(8, 64)
    made = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
    found = overspill.estimate(model, inputs, None, made, device="t4", dtype=torch.bfloat16)
    named = overspill.estimate(model, inputs, None, "AdamW", device="t4", dtype="bf16")
    assert repr(found) == str(found)
    assert found.breakdown["optimizer_state"] > named.breakdown["optimizer_state"] > 0
    split = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.0}], lr=0.1)
    with pytest.raises(ValueError, match="several groups"):
        overspill.estimate(model, inputs, None, split, device="t4")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no GPU here"):
            overspill.plan(model, inputs, device=torch.device("cuda"))
    assert overspill.plan(model, inputs, device=torch.device("cpu")).unmanaged_peak_bytes > 0
    with pytest.raises(RuntimeError, match="infeasible"):
        overspill.plan(model, inputs, device="cpu", budget="1KiB")
    with pytest.raises(ValueError, match="write 8GiB"):
        overspill.plan(model, inputs, device="cpu", budget=8)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), *(m for _ in range(4) for m in (nn.ReLU(), nn.Linear(256, 256))))


class Batch(NamedTuple):
    images: Tensor
    labels: Tensor


BATCH = torch.randn(512, 64), torch.randint(0, 256, (512,))
LARGE = torch.randn(1 << 16, 64), torch.randint(0, 256, (1 << 16,))


def test_plan_of_a_module_leaves_it_as_it_is_and_is_that_of_the_function_that_makes_it() -> None:
    model = mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    one = overspill.plan(model, LARGE, nn.CrossEntropyLoss(), "adamw", budget=1.0, device="t4")
    other = overspill.plan(mlp, lambda: LARGE, nn.CrossEntropyLoss(), "adamw", budget=1.0, device="t4")
    assert one.graph == other.graph
    assert one.needed_bytes == one.device_bytes <= one.asked_bytes
    assert one.unmanaged_bytes <= one.asked_bytes  # what the step takes in the worst case
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.long
def test_plan_of_a_built_in_model_is_that_of_its_job() -> None:
    made = overspill.plan("alexnet", batch=8, budget="1.5GiB", device="titan-x", optimizer="momentum")
    job = Job(lambda: load("alexnet"), 8, "momentum")
    expected = preview(job, Options("1.5GiB", device="titan-x"))
    assert (made.graph, made.schedule) == (expected.graph, expected.schedule)


@pytest.mark.long
def test_inputs_take_another_batch_size_and_losses_of_each_kind() -> None:
    def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(images), labels)

    own = overspill.plan(mlp(), Batch(*BATCH), loss, batch=128)
    criterion = overspill.plan(mlp(), lambda size: (torch.zeros(size, 64), torch.zeros(size, dtype=torch.long)),
                               nn.CrossEntropyLoss(), batch=128)  # fmt: skip
    assert own.unmanaged_peak_bytes == criterion.unmanaged_peak_bytes


def test_compare_gives_a_row_a_policy_the_fastest_that_fits_first() -> None:
    rows = overspill.compare(mlp(), BATCH, nn.CrossEntropyLoss(), budget=0.8, policies=("in-core", "auto"))
    assert [(row.policy, row.fits) for row in rows] == [("auto", True), ("in-core", False)]


@pytest.mark.long
def test_sweep_goes_from_the_unmanaged_peak_to_the_smallest_budget() -> None:
    found = overspill.sweep(mlp(), LARGE, nn.CrossEntropyLoss(), points=3, device="t4")
    budgets = [point.budget_bytes for point in found.points]
    assert (
        0.98 * found.unmanaged_device_bytes
        < found.unmanaged_bytes
        == found.unmanaged_device_bytes
        <= budgets[0]
        == found.whole_bytes
        > found.unmanaged_peak_bytes
    )
    assert budgets[-1] >= found.floors["auto"].nbytes
    with pytest.raises(RequestError, match="too few"):
        overspill.sweep(mlp(), BATCH, points=1)


def test_pack_takes_a_trace_or_a_file(tmp_path: Path) -> None:
    trace = Trace((Block(0, 0, 4, 100, "a"), Block(1, 2, 6, 50, "b")))
    path = tmp_path / "blocks.csv"
    path.write_text("id,lower,upper,size\na,0,4,100\nb,2,6,50\n")
    for blocks in (trace, path, str(path)):
        solution = overspill.pack(blocks)
        assert solution.layout is not None
        assert (solution.layout.peak_bytes, solution.optimal) == (150, True)
    with pytest.raises(RequestError, match="positive size"):
        overspill.pack(trace, capacity=0)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: overspill.plan("resnet18"), "pass batch="),
        (lambda: overspill.plan("resnet18", BATCH, batch=2), "own inputs"),
        (lambda: overspill.plan(mlp()), "pass inputs"),
        (lambda: overspill.plan(mlp(), 3), "no tensor"),
        (lambda: overspill.plan(list, BATCH), "returned list"),
        (lambda: overspill.compare("resnet18", batch=2, policies=("aut",)), "'auto'"),
        (lambda: overspill.pack(Trace(()), time_limit=0), "no time"),
    ],
)
def test_a_wrong_request_is_one_line(ask: object, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        ask()  # type: ignore[operator]


def test_a_plan_says_what_it_takes_in_a_terminal() -> None:
    plan = overspill.plan(mlp(), BATCH, nn.CrossEntropyLoss(), budget=1.0)
    assert str(plan).startswith("Fits in ")
    assert "slowdown: 1.000 (simulated" in str(plan)


def test_a_policy_that_gives_no_schedule_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_named("liveness").__class__, "_plan", lambda *_: None)
    with pytest.raises(RequestError, match="liveness gave None"):
        overspill.plan(mlp(), BATCH, nn.CrossEntropyLoss(), policy="liveness")


PLUGIN = """
from pathlib import Path
from overspill.models import Entry
from dataclasses import dataclass
from overspill.placement.allocators.base import Allocator as BaseAllocator
from overspill.placement.packing.solvers.skyline import Skyline
from overspill.policies.in_core import Liveness
from overspill.runtime.transfer.host_store import HostStore

class Policy(Liveness):
    name = "other-policy"

@dataclass(frozen=True)
class Config:
    pass

class Allocator(BaseAllocator):
    name = "other-allocator"
    config_type = Config

    def _find_block(self, nbytes, stream):
        return self._segment_malloc(nbytes, stream)

    def _return_block(self, block):
        self._segment_free(block)

class Store(HostStore):
    name = "other-store"

solver = Skyline()
model = Entry("other-model", "Other", "one of others", "images 3x224x224", "overspill.models.alexnet:build", "image_size")
device = Path(__file__).with_name("other.toml")
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that brings one of everything."""
    (tmp_path / "other_package.py").write_text(PLUGIN)
    t4 = Path(sys.modules["overspill.devices"].__file__ or "").with_name("t4.toml").read_text()
    (tmp_path / "other.toml").write_text(t4.replace('name = "t4"', 'name = "other-device"'))
    info = tmp_path / "other_package-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-package\nVersion: 1\n")
    kinds = {
        "policies": "Policy",
        "allocators": "Allocator",
        "stores": "Store",
        "solvers": "solver",
        "models": "model",
        "devices": "device",
    }
    groups = (f"[overspill.{plural}]\nother-{what.lower()} = other_package:{what}\n" for plural, what in kinds.items())
    (info / "entry_points.txt").write_text("".join(groups))
    monkeypatch.syspath_prepend(str(tmp_path))
    for module, registry in (
        ("overspill.policies", "POLICIES"), ("overspill.placement.allocators.registry", "ALLOCATORS"),
        ("overspill.runtime.transfer.registry", "STORES"), ("overspill.placement.packing.registry", "SOLVERS"),
        ("overspill.models.registry", "MODELS"), ("overspill.devices.loader", "DEVICES"),
    ):  # fmt: skip
        ours = getattr(sys.modules[module], registry)
        monkeypatch.setattr(ours, "_known", dict(ours._known))
        found = {point.name: point for point in entry_points(group=f"overspill.{ours.plural}")}
        monkeypatch.setitem(ours.__dict__, "_entry_points", found)


@pytest.mark.usefixtures("plugin")
def test_an_installed_package_brings_policies_allocators_stores_solvers_models_and_devices() -> None:
    assert policy_named("other-policy").name == "other-policy"
    assert policy_named("other-policy:m").memory_optimal
    assert allocator_named("other-allocator").allocate(100) is not None
    assert make_store("other-store", torch.device("cpu")).name == "other-store"
    assert solver_named("other-solver").solve(Trace((Block(0, 0, 1, 8, "a"),))).layout is not None
    assert load_device("Other Device").name == "other-device"
    plan = overspill.plan("other-model", batch=2, policy="other-policy", device="other-device")
    assert isinstance(plan.schedule, Schedule)


@pytest.mark.long
def test_advice_on_a_users_own_model_has_a_plan_of_it() -> None:
    model, batch = (
        mlp(),
        (torch.empty(200_000, 64, device="meta"), torch.empty(200_000, dtype=torch.long, device="meta")),
    )
    everything = overspill.estimate(model, batch, nn.CrossEntropyLoss(), "adamw", device="t4")
    small = replace(everything.device, memory_bytes=int(0.8 * everything.minimum_capacity_bytes))
    found = overspill.advise(model, batch, nn.CrossEntropyLoss(), "adamw", device=small)
    planned = next(one for one in found if one.what.startswith("overspill.compile"))
    assert planned.fits
    assert planned.slowdown is not None
    assert planned.slowdown >= 1
    assert planned.minimum_capacity_bytes <= small.memory_bytes  # type: ignore[operator]
