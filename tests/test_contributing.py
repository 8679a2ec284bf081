"""Every sample in CONTRIBUTING.md works: found as a file of its folder would be, and put to use."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import overspill
from overspill.core import Block, Trace, Verb
from overspill.core.errors import InfeasibleBudgetError, RequestError
from overspill.core.registry import Registry, classes_in
from overspill.costs.context import budget_bytes
from overspill.costs.interval import NOTHING
from overspill.devices.loader import DEVICES
from overspill.job import Job, NamedModel
from overspill.job.ways import way
from overspill.models.registry import MODELS, Entry
from overspill.placement import ALLOCATORS, Events, allocator_named, layout_of, replay
from overspill.placement.allocators.base import Allocator
from overspill.placement.packing import SOLVERS
from overspill.policies import POLICIES, Policy, policy_named
from overspill.runtime.transfer.registry import STORES, make_store
from overspill.simulate import check

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SAMPLES = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
TRACE = Trace(tuple(Block(i, i, i + 3, 1000 * (1 + i % 2), alignment=8) for i in range(12)))
Add = Callable[[str, str], ModuleType]


def sample(what: str, language: str = "python") -> str:
    """The one sample in `language` that has `what` in it."""
    (found,) = (code for kind, code in SAMPLES if kind == language and what in code)
    return found


@pytest.fixture(autouse=True)
def registries_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (POLICIES, ALLOCATORS, STORES, MODELS, SOLVERS, DEVICES):
        monkeypatch.setattr(registry, "_known", dict(registry._known))


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Add]:
    """`add(folder, what)` puts the sample that has `what` in it among the modules of one of our packages."""
    added: list[tuple[ModuleType, str]] = []

    def put(folder: str, what: str) -> ModuleType:
        package = importlib.import_module(folder)
        (tmp_path / "contributed.py").write_text(sample(what), encoding="utf-8")
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
        importlib.invalidate_caches()
        added.append((package, "contributed"))
        return importlib.import_module(f"{folder}.contributed")

    yield put
    for package, name in added:
        del sys.modules[f"{package.__name__}.{name}"]
        delattr(package, name)


def test_the_policy_is_found_in_its_folder_and_plans_a_step(add: Add) -> None:
    add("overspill.policies", "(Policy)")
    found = classes_in("overspill.policies", Policy)
    assert found.keys() - POLICIES.keys() == {"largest-first"}
    POLICIES.register("largest-first", found["largest-first"])
    layers = [m for _ in range(4) for m in (nn.Linear(128, 128), nn.Tanh())]
    batch = torch.zeros(512, 128), torch.zeros(512, dtype=torch.long)
    made = overspill.plan(nn.Sequential(*layers), batch, nn.CrossEntropyLoss(), budget=0.8, policy="largest-first")
    assert check(made.graph, made.schedule).peak_bytes <= made.budget_bytes < made.unmanaged_peak_bytes
    assert made.schedule.counts[Verb.OFFLOAD] > 0
    policy = policy_named("largest-first")
    with pytest.raises(InfeasibleBudgetError) as refused:
        policy.plan(made.graph, made.device, 1024)
    floor = refused.value.floor_bytes
    assert check(made.graph, policy.plan(made.graph, made.device, floor)).peak_bytes == floor


def test_the_way_to_train_is_checked_and_freezes() -> None:
    declared, does = sample(" = way(").split("\n\n")
    made = {"way": way, "Job": Job, "dataclass": dataclass, "__annotations__": {}, "__name__": __name__}
    exec(f"@dataclass(frozen=True)\nclass More(Job):\n    {declared}", made)
    model, more = NamedModel("resnet18"), made["More"]
    for wrong in ({"train_last": 0}, {"train_last": 2, "optimizer": None}):
        with pytest.raises(RequestError) as refused:
            more(model, **wrong).check_inference()
        assert refused.value.fields == ("train_last",)
    module, job = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), more(model, train_last=2)
    assert (job.ways(), more(model).ways()) == (["train_last"], [])
    exec(does, {"module": module, "job": job})
    assert [parameter.requires_grad for parameter in module.parameters()] == [False, False, True, True]


def test_the_allocator_is_found_in_its_folder_and_replays_a_trace(add: Add) -> None:
    add("overspill.placement.allocators", "(Allocator)")
    found = classes_in("overspill.placement.allocators", Allocator)
    assert found.keys() - ALLOCATORS.keys() == {"same-size"}
    ALLOCATORS.register("same-size", found["same-size"])
    replayed = replay(Events.of(TRACE), "same-size")
    assert replayed.fits
    assert (
        replayed.peak_reserved_bytes == replayed.peak_requested_bytes + 1000
    )  # three are live at once, two of either size in turn
    layout_of(TRACE, "same-size").validate(TRACE)
    allocator = allocator_named("same-size")
    kept = allocator.allocate(512)
    allocator.free(kept)
    assert allocator.allocate(512) == kept
    allocator.check_integrity()


MAIN = """
#include "same_size.hpp"

int main() {
    using namespace overspill;
    struct None final : Settings {
        bool flag(const char*) const override { return false; }
        Bytes bytes(const char*) const override { return 0; }
        std::optional<Bytes> maybe_bytes(const char*) const override { return {}; }
        double number(const char*) const override { return 0; }
        std::string text(const char*) const override { return {}; }
        std::vector<std::int64_t> integers(const char*) const override { return {}; }
    };
    Device device(Bytes{1} << 30);
    const auto made = allocators().at("same-size")(device, None());
    PoolBlock* first = made->allocate_block(512, 0);
    const Address address = first->address;
    made->free_block(first);
    return made->allocate_block(512, 0)->address == address ? 0 : 1;
}
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_native_allocator_registers_itself_and_serves(tmp_path: Path) -> None:
    (tmp_path / "same_size.hpp").write_text(sample("Registered", "cpp"), encoding="utf-8")
    (tmp_path / "main.cpp").write_text(MAIN, encoding="utf-8")
    flags = ["-std=c++20", "-O0", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{ROOT / 'native' / 'allocators'}"]
    subprocess.run(["g++", *flags, "main.cpp", "-o", "serve"], cwd=tmp_path, check=True)
    assert subprocess.run([tmp_path / "serve"], check=False).returncode == 0


def test_the_store_keeps_bytes_and_gives_them_back(add: Add) -> None:
    STORES.register("shared", add("overspill.runtime.transfer", "Store)").SharedStore)
    store = make_store("shared", torch.device("cpu"))
    written = [torch.randint(256, (size,), dtype=torch.uint8) for size in (1, 4096, 100_003)]
    slots = [store.allocate(tensor.numel()) for tensor in written]
    for slot, tensor in zip(slots, written, strict=True):
        store.write(slot, tensor)
    for slot, tensor in zip(slots, written, strict=True):
        read = torch.empty_like(tensor)
        store.read(slot, read)
        assert torch.equal(read, tensor)
    store.close()


def test_the_model_is_planned_for_the_device(add: Add, tmp_path: Path) -> None:
    add("overspill.models", "BuiltModel(name")
    MODELS.register("mlp", Entry("mlp", "MLP", "two layers", "images 3x28x28", "contributed:build", "image_size"))
    (tmp_path / "my-gpu.toml").write_text(sample("memory_bytes", "toml"), encoding="utf-8")
    DEVICES.register("my-gpu", tmp_path / "my-gpu.toml")
    device = overspill.load_device("my-gpu")
    assert (device.name, device.kind) == ("my-gpu", "cuda")
    made = overspill.plan("mlp", batch=4, device=device)
    assert made.step_seconds > 0
    assert made.asked_bytes == budget_bytes(device, NOTHING)


def test_the_solver_packs_a_trace(add: Add) -> None:
    solver = add("overspill.placement.packing.solvers", "(Solver)").InOrder()
    SOLVERS.register("in-order", solver)
    solution = overspill.pack(TRACE, solver="in-order")
    assert solution.layout is not None  # which `solve` has validated
    assert solution.layout.peak_bytes >= solution.bound_bytes > 0


def test_the_entry_point_is_that_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = re.search(r"`(largest-first = \S+)` among a package's entry points `(overspill\.\w+)`", TEXT)
    assert line is not None
    point, group = line.groups()
    ((name, value),) = tomllib.loads(point).items()
    (tmp_path / f"{value.split(':')[0]}.py").write_text(sample("(Policy)"), encoding="utf-8")
    info = tmp_path / "my_package-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    policies: Registry[type[Policy]] = Registry("policy", "policies", {})
    assert policies.named("largest-first")().name == "largest-first"


def test_the_files_and_folders_that_are_named_are_there() -> None:
    named = re.findall(r"[`(]((?:src|tests|native|docs|examples|\.ci)/[\w./-]+)[`)]", TEXT)
    assert len(named) > 15
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_modules_that_the_recipes_name_are_there() -> None:
    named = re.findall(
        r"`((?:capture|cli|core|costs|models|placement|planning|plans|pytorch|runtime)/[\w/{},]+\.py)`", TEXT
    )
    assert len(named) > 15
    source = ROOT / "src/overspill"
    for path in named:
        before, _, rest = path.partition("{")
        names, _, after = rest.partition("}")
        for name in names.split(","):
            assert (source / f"{before}{name}{after}").exists(), path
