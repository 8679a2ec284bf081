"""Tags of a joint graph from the planner alone: PyTorch's own passes obey them, with the same bits and within the budget."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch._activation_checkpointing.remat_using_tags_for_fwd_loss_bwd_graph_pass import (
    remat_using_tags_for_fwd_loss_bwd_graph,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import _set_autograd_backward, preserve_node_meta
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import overspill
from overspill.errors import InfeasibleBudgetError, RequestError, UnsupportedError
from overspill.runtime.graph_plan import GraphPlan
from overspill.runtime.node_tags import Tag
from overspill.runtime.reachable import same_bits
from overspill.runtime.tracker import LiveBytes

pytestmark = pytest.mark.usefixtures("forget_compiled_code")
CPU = torch.device("cpu")
Batch = tuple[Tensor, Tensor]
Ran = list[Tensor]


class Dropouts(nn.Module):
    """An MLP with dropout and batch norm, whose statistics forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(F.gelu(layer(x)), 0.1)
        return F.mse_loss(self.norm(x), targets)


class Transformer(nn.Module):
    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        block = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(2))
        self.head = nn.Linear(32, 100)
        self.checkpoints = checkpoints

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def mlp() -> tuple[nn.Module, Batch]:
    return Dropouts(), (torch.randn(256, 64), torch.randn(256, 64))


def transformer(*, checkpoints: bool = False) -> tuple[nn.Module, Batch]:
    words = torch.randint(0, 100, (4, 64))
    return Transformer(checkpoints=checkpoints), (words, words.roll(1))


def made(build: Callable[[], tuple[nn.Module, Batch]]) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    return build()


def gradients(call: Callable[..., Tensor], model: nn.Module, batch: Batch) -> Ran:
    """The loss, the gradients and the buffers after one step."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = call(*batch)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


def same(one: Ran, other: Ran) -> bool:
    return len(one) == len(other) and all(map(same_bits, one, other))


class Runtime:
    """PyTorch's `aot_eager` with its own partitioner, which obeys the tags of a plan; live bytes are counted."""

    def __init__(self, model: nn.Module, **asked: Any) -> None:
        self.plans: list[GraphPlan] = []
        self.live = LiveBytes(CPU)
        self.live.add(model.parameters())
        self.saved_bytes = 0

        def partition(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **how: Any) -> Any:
            plan = overspill.plan_graph(joint, num_fwd_outputs=num_fwd_outputs, offload=False, **asked)
            self.plans.append(plan)
            return plan.partition(inputs, **how)

        backend = aot_autograd(fw_compiler=self._counted, partition_fn=partition)
        self.call = torch.compile(model, backend=backend, dynamic=False, fullgraph=True)

    def __call__(self, *batch: Tensor) -> Tensor:
        """Run forward, and count what autograd saves besides parameters and inputs."""
        self.live.add(batch)
        known, saved = {key for key, _ in self.live.there()}, dict[int, int]()

        def note(value: Tensor) -> Tensor:
            storage = value.untyped_storage()
            if storage._cdata not in known:
                saved[storage._cdata] = storage.nbytes()
            return value

        with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
            loss: Tensor = self.call(*batch)
        self.saved_bytes = sum(saved.values())
        return loss

    def _counted(self, module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(args: list[Any]) -> Any:
            self.live.add(args)
            with self.live:
                return fx.Interpreter(module).boxed_run(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


BUILDS = {"mlp": mlp, "transformer": transformer, "checkpoints": lambda: transformer(checkpoints=True)}


@pytest.mark.parametrize(
    "build", [pytest.param(b, id=n, marks=[] if n == "mlp" else [pytest.mark.long]) for n, b in BUILDS.items()]
)
def test_pytorchs_partitioner_obeys_the_tags_with_the_bits_of_eager(
    build: Callable[[], tuple[nn.Module, Batch]],
) -> None:
    model, batch = made(build)
    expected = gradients(model, model, batch)
    saved, peaks = [], []
    for budget in (1.0, 0.85, "smallest"):
        model, batch = made(build)
        runtime = Runtime(model, budget=budget)
        assert same(gradients(runtime, model, batch), expected)
        (plan,) = runtime.plans
        assert 0 < runtime.saved_bytes <= plan.saved_bytes
        assert runtime.live.peak_bytes <= plan.peak_bytes <= plan.budget_bytes
        assert plan.offloaded_bytes == 0
        saved.append(runtime.saved_bytes)
        peaks.append(runtime.live.peak_bytes)
        torch.compiler.reset()
    assert saved[0] > saved[1] > saved[2]
    assert peaks[0] > peaks[1] > peaks[2]
    assert plan.saved_bytes < plan.unmanaged_saved_bytes
    assert plan.slowdown > 1


def test_an_infeasible_budget_reaches_the_caller_of_a_compiled_model() -> None:
    model, batch = made(mlp)
    with pytest.raises(BackendCompilerFailed) as error:
        Runtime(model, budget=1000)(*batch)
    assert isinstance(error.value.inner_exception, InfeasibleBudgetError)


def traced(model: nn.Module, batch: Batch) -> tuple[fx.GraphModule, list[Tensor]]:
    """Loss and gradients in one graph, as torchtitan's graph trainer traces them, and its inputs."""
    parameters = dict(model.named_parameters())

    def step(*flat: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(parameters, flat, strict=False))
        loss = functional_call(model, named, flat[len(named) :])
        with _set_autograd_backward():
            found = torch.autograd.grad(loss, list(named.values()))
        return (loss, *found)

    flat = [*parameters.values(), *batch]
    with preserve_node_meta():
        return make_fx(step, tracing_mode="fake")(*flat), flat


def ran(module: fx.GraphModule, flat: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    return list(fx.Interpreter(module).run(*flat))


@pytest.fixture(scope="module")
def step() -> tuple[fx.GraphModule, list[Tensor]]:
    return traced(*made(transformer))


Step = tuple[fx.GraphModule, list[Tensor]]


@pytest.mark.long
def test_rematerialization_by_tags_keeps_the_bits_of_a_graph_with_its_loss(step: Step) -> None:
    module, flat = step
    plan = overspill.plan_graph(module, 0.7, num_fwd_outputs=1, offload=False)
    tagged = remat_using_tags_for_fwd_loss_bwd_graph(plan.tag(copy.deepcopy(module)))
    again = [node.name for node in tagged.graph.nodes if node.name.endswith("_recomputed")]
    wanted = {name for name, tag in plan.tags.items() if tag is Tag.RECOMPUTE}
    assert {name.removesuffix("_recomputed") for name in again} == wanted
    assert same(ran(tagged, flat), ran(module, flat))


def test_tags_with_transfers_name_tensors_that_other_runtimes_can_offload(step: Step) -> None:
    module, _ = step
    plan = overspill.plan_graph(module, 0.5, "t4", num_fwd_outputs=1)
    assert plan.peak_bytes <= plan.budget_bytes == plan.unmanaged_peak_bytes // 2
    nodes = {node.name: node for node in module.graph.nodes}
    leaving = [nodes[name] for name, tag in plan.tags.items() if tag is Tag.OFFLOAD]
    assert sum(node.meta["val"].untyped_storage().nbytes() for node in leaving) == plan.offloaded_bytes > 0
    for node in leaving:
        assert node.meta["val"].is_contiguous()
        assert not any(key in {"view", "t", "transpose"} for key in str(node.target).split("."))
    tagged = plan.tag(copy.deepcopy(module))
    policies = {name: node.meta.get("recompute") for name, node in zip(nodes, tagged.graph.nodes, strict=True)}
    kinds = {
        Tag.SAVE: CheckpointPolicy.MUST_SAVE,
        Tag.RECOMPUTE: CheckpointPolicy.MUST_RECOMPUTE,
        Tag.OFFLOAD: CheckpointPolicy.MUST_CPU_OFFLOAD,
    }
    assert policies == {name: kinds[plan.tags[name]] if name in plan.tags else None for name in nodes}
    backward = {node.name for node in module.graph.nodes if node.meta.get("autograd_backward")}
    assert backward.isdisjoint(plan.tags)


def test_a_plan_changes_nothing_in_the_graph(step: Step) -> None:
    module, _ = step
    before = [(node.name, node.target, node.args, dict(node.meta)) for node in module.graph.nodes]
    overspill.plan_graph(module, 0.8, num_fwd_outputs=1)
    assert [(node.name, node.target, node.args, dict(node.meta)) for node in module.graph.nodes] == before


@pytest.mark.short("True")
@pytest.mark.parametrize("offload", [False, True])
def test_an_infeasible_budget_names_the_smallest_one_that_works(*, offload: bool) -> None:
    class Small(nn.Sequential):
        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            return F.mse_loss(super().forward(x), targets)

    torch.manual_seed(0)
    layers = (layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)))
    module, _ = traced(Small(*layers), (torch.randn(256, 64), torch.randn(256, 64)))
    with pytest.raises(InfeasibleBudgetError, match="by tags") as error:
        overspill.plan_graph(module, 1000, num_fwd_outputs=1, offload=offload)
    floor = error.value.floor_bytes
    plan = overspill.plan_graph(module, floor, num_fwd_outputs=1, offload=offload)
    assert plan.peak_bytes == floor == plan.budget_bytes
    assert (plan.offloaded_bytes > 0) is offload
    with pytest.raises(InfeasibleBudgetError):
        overspill.plan_graph(module, floor - 1, num_fwd_outputs=1, offload=offload)


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="one request needs a machine without a GPU")
def test_a_wrong_request_is_one_line(step: Step) -> None:
    module, _ = step
    with pytest.raises(RequestError, match="num_fwd_outputs=0"):
        overspill.plan_graph(module, 0.8, num_fwd_outputs=0)
    with pytest.raises(RequestError, match="not a Linear"):
        overspill.plan_graph(nn.Linear(2, 2), 0.8, num_fwd_outputs=1)
    unmarked = copy.deepcopy(module)
    for node in unmarked.graph.nodes:
        node.meta.pop("autograd_backward", None)
    with pytest.raises(RequestError, match="autograd_backward"):
        overspill.plan_graph(unmarked, 0.8, num_fwd_outputs=1)
    bare = copy.deepcopy(module)
    bare.graph.find_nodes(op="placeholder")[0].meta.clear()
    with pytest.raises(RequestError, match="fake tensors"):
        overspill.plan_graph(bare, 0.8, num_fwd_outputs=1)
    elsewhere = copy.deepcopy(module)
    with FakeTensorMode():
        elsewhere.graph.find_nodes(op="placeholder")[0].meta["val"] = torch.empty(4, device="cuda")
    with pytest.raises(UnsupportedError, match="on a GPU"):
        overspill.plan_graph(elsewhere, 0.8, "t4", num_fwd_outputs=1)
    other = fx.symbolic_trace(nn.ReLU())
    plan = overspill.plan_graph(module, 0.8, num_fwd_outputs=1)
    with pytest.raises(RequestError, match="has no node"):
        plan.tag(other)
    with pytest.raises(RequestError, match="does not offload"):
        overspill.plan_graph(module, 0.5, "t4", num_fwd_outputs=1).partition()


@pytest.fixture
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*all_gather_tensor_autograd:FutureWarning")  # its new name is since 2.13
@pytest.mark.usefixtures("two_ranks")
def test_parameters_that_are_gathered_may_be_gathered_again() -> None:
    def sharded(*flat: Tensor) -> tuple[Tensor, ...]:
        *weights, x = flat
        for weight in weights:
            x = (x @ all_gather_tensor_autograd(weight, 0, dist.group.WORLD)).relu()
        loss = x.sum()
        with _set_autograd_backward():
            return (loss, *torch.autograd.grad(loss, weights))

    shards = [torch.randn(64, 128, requires_grad=True) for _ in range(6)]
    with preserve_node_meta():
        module = make_fx(sharded, tracing_mode="fake")(*shards, torch.randn(16, 128))
    plan = overspill.plan_graph(module, "smallest", num_fwd_outputs=1, offload=False)
    again = {name for name, tag in plan.tags.items() if tag is Tag.RECOMPUTE}
    gathers = {node.name for node in module.graph.nodes if "all_gather" in str(node.target)}
    assert gathers & again
    reduced = {node.name for node in module.graph.nodes if "reduce_scatter" in str(node.target)}
    assert reduced
    assert reduced.isdisjoint(plan.tags)


def test_losses_in_chunks_are_refused() -> None:
    weight = torch.randn(8, 8, requires_grad=True)

    def chunks(weight: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        total, found = torch.zeros(()), torch.zeros_like(weight)
        for part in x.chunk(2):
            loss = (part @ weight).relu().sum()
            with _set_autograd_backward():
                (more,) = torch.autograd.grad(loss, weight)
                found = found + more
            total = total + loss
        return total, found

    with preserve_node_meta():
        module = make_fx(chunks, tracing_mode="fake")(weight, torch.randn(4, 8))
    with pytest.raises(UnsupportedError, match="alternate"):
        overspill.plan_graph(module, 0.8, num_fwd_outputs=1)


PAGE = Path(__file__).parents[2] / "docs" / "howto" / "plan_a_graph.md"


def test_the_examples_of_the_page_run(
    step: Step, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The registry of torchtitan, which is not installed here, is a dictionary by name."""
    short, partitioner, titan = re.findall(r"^```python\n(.+?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    module = copy.deepcopy(step[0])
    registry: dict[str, Callable[..., Any]] = {}
    stand_in = ModuleType("torchtitan.experiments.graph_trainer.registry")
    stand_in.__dict__["register_memory_policy"] = lambda name: lambda made: registry.setdefault(name, made)
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    exec(partitioner, {})
    assert "0 B offloaded" in capsys.readouterr().out
    exec(titan, {})
    registry["overspill"](module, config=None)
    assert CheckpointPolicy.MUST_SAVE in {node.meta.get("recompute") for node in module.graph.nodes}
    with pytest.raises(KeyError, match="relu_3"):  # a node of another graph
        exec(short, {"overspill": overspill, "joint_graph": module})
