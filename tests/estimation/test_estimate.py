"""Estimates of jobs whose memory can be worked out by hand, and the laws that every estimate obeys."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.turns import rest_long
from torch import nn

from overspill.capture.recording.recording import Recording
from overspill.core import Device
from overspill.core.errors import RequestError, UnsupportedError
from overspill.devices import load_device
from overspill.estimation.api import estimate
from overspill.estimation.demand import survives
from overspill.estimation.estimate import Estimate
from overspill.estimation.peak import CATEGORIES
from overspill.estimation.scaling import MOST_BATCH
from overspill.report.estimate import estimate_page

WIDE, DEEP, BATCH = 256, 4, 64
WEIGHTS = DEEP * (WIDE * WIDE + WIDE) * 4
FEATURES = BATCH * WIDE * 4
MIB = 1 << 20


def mlp() -> nn.Module:
    return nn.Sequential(*[layer for _ in range(DEEP) for layer in (nn.Linear(WIDE, WIDE), nn.ReLU())])


def mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).mean()


def small_gpu(mebibytes: int) -> Device:
    return replace(
        load_device("t4"), name="small", memory_bytes=mebibytes * MIB, context_bytes=MIB, context_low_bytes=0,
        context_high_bytes=2 * MIB,
    )  # fmt: skip


def trained(optimizer: str | None = "sgd", **options: object) -> Estimate:
    return estimate(mlp, torch.empty(BATCH, WIDE), mean if optimizer else None, optimizer, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("optimizer", "states"), [("sgd", 0), ("momentum", 1), ("adam", 2), ("adamw", 2), ("adagrad", 1), ("rmsprop", 1)]
)
def test_weights_gradients_and_state_have_the_bytes_that_they_must(optimizer: str, states: int) -> None:
    made = trained(optimizer)
    kinds: dict[str, int] = {}
    last = made.recording.starts[-1]
    for allocation in made.recording.allocations:
        if allocation.start < last <= allocation.end:  # alive when the last step begins
            kinds[allocation.kind.value] = kinds.get(allocation.kind.value, 0) + allocation.nbytes
    assert kinds["parameter"] == WEIGHTS
    assert kinds["gradient"] == WEIGHTS
    assert kinds.get("optimizer_state", 0) == states * WEIGHTS
    assert kinds["input"] == FEATURES
    assert made.recording.parameters == WEIGHTS // 4


def test_feature_maps_at_the_peak_of_forward_are_one_a_layer() -> None:
    made = trained()
    saved = [
        a for a in made.recording.allocations if a.kind.value == "activation" and a.start >= made.recording.starts[-1]
    ]
    # Each Linear saves its input (for the first one that is the batch itself), each ReLU its output.
    assert sum(a.nbytes for a in saved if a.nbytes > 4) == DEEP * FEATURES


def test_the_breakdown_adds_up_to_the_total() -> None:
    for optimizer in ("sgd", "adamw", None):
        made = trained(optimizer)
        assert set(made.breakdown) == set(CATEGORIES)
        assert sum(made.breakdown.values()) == made.total_bytes
        assert all(nbytes >= 0 for nbytes in made.breakdown.values())


def test_the_three_peaks_are_in_order_and_the_total_has_the_context_on_top() -> None:
    made = trained("adamw")
    assert 0 < made.peak_requested_bytes <= made.peak_allocated_bytes <= made.peak_reserved_bytes
    assert made.total_bytes == made.peak_reserved_bytes + made.context_bytes
    assert made.total.low <= made.total.central == made.total_bytes <= made.total.high


def test_inference_keeps_no_feature_maps_and_no_gradients() -> None:
    training, inference = trained(), trained(None)
    assert inference.peak_requested_bytes < training.peak_requested_bytes
    kinds = {a.kind.value for a in inference.recording.allocations}
    assert not kinds & {"gradient", "optimizer_state", "output_gradient", "activation"}


def test_half_precision_halves_the_weights() -> None:
    full, half = trained(), trained(dtype="bfloat16")
    assert half.peak.by_category["weights"] * 2 == full.peak.by_category["weights"] == WEIGHTS


def test_mixed_precision_keeps_float32_weights_and_casts_them_once_a_step() -> None:
    made = trained("adamw", dtype="amp")
    last = made.recording.starts[-1]
    casts = [
        a for a in made.recording.allocations
        if a.start >= last and a.nbytes == WIDE * WIDE * 2 and a.name == "_to_copy"
    ]  # fmt: skip
    assert len(casts) == DEEP
    assert made.peak.by_category["weights"] == WEIGHTS


def test_accumulation_runs_several_batches_a_step_and_keeps_one_set_of_gradients() -> None:
    once, twice = trained("adamw"), trained("adamw", accumulate=2)
    forwards = [sum(op.name == "addmm" and op.iteration == 1 for op in made.recording.ops) for made in (once, twice)]
    assert forwards == [DEEP, 2 * DEEP]
    assert twice.peak_requested_bytes < once.peak_requested_bytes + WEIGHTS + 2 * FEATURES


def test_overspill_estimate_stays_a_function() -> None:
    import overspill
    import overspill.estimation.api

    for _ in range(2):
        made = overspill.estimate(mlp, torch.empty(BATCH, WIDE), mean, "sgd", device="t4")
        assert made.fits()
        assert made.recording == trained().recording


def test_the_model_given_is_left_as_it_was() -> None:
    model = mlp()
    before = [(p.data_ptr(), p.device.type, p.requires_grad) for p in model.parameters()]
    estimate(model, torch.empty(BATCH, WIDE), mean, "adamw")
    assert [(p.data_ptr(), p.device.type, p.requires_grad) for p in model.parameters()] == before
    assert all(p.grad is None for p in model.parameters())
    assert model(torch.ones(2, WIDE)).shape == (2, WIDE)


def test_a_module_and_a_function_that_makes_it_come_to_the_same() -> None:
    assert trained().recording == estimate(mlp(), torch.empty(BATCH, WIDE), mean, "sgd").recording


def test_two_estimates_of_one_job_are_equal() -> None:
    assert trained("adamw", dtype="amp").recording == trained("adamw", dtype="amp").recording


@pytest.mark.parametrize(
    "inputs",
    [
        torch.empty(BATCH, WIDE),
        (torch.empty(BATCH, WIDE),),
        {"input": torch.empty(BATCH, WIDE)},
        lambda: torch.empty(BATCH, WIDE),
        torch.empty(BATCH, WIDE, device="meta"),
    ],
    ids=["tensor", "tuple", "dict", "function", "meta"],
)
def test_inputs_come_in_many_forms(inputs: object) -> None:
    made = estimate(mlp, inputs)
    assert made.peak_requested_bytes == trained(None).peak_requested_bytes


def test_inputs_may_be_a_function_of_the_batch_size() -> None:
    made = estimate(mlp, lambda batch: torch.empty(batch, WIDE), mean, "sgd", batch=BATCH)
    assert made.recording == trained().recording


class Lengths(nn.Module):
    """Packs what it reads by lengths that it is given, and asks no value of the numbers themselves, unless told to."""

    def __init__(self, *, looks: bool = False) -> None:
        super().__init__()
        self.lstm, self.looks = nn.LSTM(WIDE, WIDE, batch_first=True), looks

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        if self.looks and x.max() > 0:
            x = x * 2
        packed = nn.utils.rnn.pack_padded_sequence(x[:, : int(lengths.max())], lengths.cpu(), True, False)
        return self.lstm(packed)[0].data


def test_whole_numbers_that_are_given_are_known_and_fractions_are_not() -> None:
    x, loss = torch.ones(4, 9, WIDE), lambda model, x, lengths: model(x, lengths).sum()
    short, long = (estimate(Lengths, (x, torch.tensor([n, 1, 2, 1])), loss, "sgd") for n in (3, 9))
    assert short.peak_requested_bytes < long.peak_requested_bytes
    assert estimate(Lengths, (x, torch.tensor([3, 1, 2, 1])), loss, "sgd", batch=8).batch == 8
    with pytest.raises(UnsupportedError):
        estimate(lambda: Lengths(looks=True), (x, torch.tensor([3, 1, 2, 1])), loss, "sgd")


# What each asks of masks, positions or tokens before it runs; and experts in groups.
ASKING = (
    "hf:bart,d_model=32,encoder_layers=1,decoder_layers=1,encoder_attention_heads=2,decoder_attention_heads=2",
    "hf:gemma2,hidden_size=32,num_hidden_layers=1,num_attention_heads=2,num_key_value_heads=1,head_dim=16",
    "hf:big_bird,hidden_size=32,num_hidden_layers=1,num_attention_heads=2",
    "hf:xlm,emb_dim=32,n_layers=1,n_heads=2",
    "hf:xlnet,d_model=32,n_layer=1,n_head=2,d_inner=32",
    "hf:led,d_model=32,encoder_layers=1,decoder_layers=1,encoder_attention_heads=2,decoder_attention_heads=2",
    "hf:mixtral,hidden_size=32,intermediate_size=64,num_hidden_layers=1,num_attention_heads=2,num_key_value_heads=1",
    "hf:phimoe,hidden_size=32,intermediate_size=64,num_hidden_layers=1,num_attention_heads=2,num_key_value_heads=1",
    "hf:glm_moe_dsa,num_hidden_layers=1",
)


@pytest.mark.parametrize("name", rest_long(ASKING, [ASKING[6]]))
def test_models_that_ask_values_that_follow_are_estimated(name: str) -> None:
    pytest.importorskip("transformers")
    state = torch.random.get_rng_state()
    small, large = (estimate(name, optimizer="adamw", batch=batch) for batch in (1, 2))
    assert small.peak_requested_bytes < large.peak_requested_bytes
    assert small.recording == estimate(name, optimizer="adamw", batch=1).recording
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_model_that_asks_what_follows_from_weights_is_refused_at_its_line() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UnsupportedError) as refused:
        estimate("hf:switch_transformers,d_model=32,num_heads=2,d_kv=16", optimizer="adamw")
    assert "modeling_switch_transformers.py:" in str(refused.value)


def test_a_criterion_gets_the_output_and_the_last_input() -> None:
    inputs = (torch.empty(BATCH, WIDE), torch.zeros(BATCH, dtype=torch.long))
    by_module = estimate(mlp, inputs, nn.CrossEntropyLoss(), "sgd")
    by_function = estimate(mlp, inputs, nn.functional.cross_entropy, "sgd")
    spelled = estimate(mlp, inputs, lambda model, x, y: nn.functional.cross_entropy(model(x), y), "sgd")
    assert by_module.recording == by_function.recording
    said = {spelled.recording.source(a.frame) for a in spelled.recording.allocations}
    assert any(line.endswith(" <lambda>") for line in said), "all that it has and the others have not"
    assert without_lines(spelled.recording) == by_module.recording


def without_lines(recording: Recording) -> Recording:
    allocations = tuple(replace(a, frame=-1) for a in recording.allocations)
    return replace(
        recording, allocations=allocations, ops=tuple(replace(op, frame=-1) for op in recording.ops), frames=()
    )


class OwnLoss(nn.Linear):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": super().forward(x).pow(2).sum(), "logits": x}


def test_a_model_may_return_its_own_loss() -> None:
    made = estimate(lambda: OwnLoss(8, 8), torch.empty(4, 8), None, "sgd")
    assert any(a.kind.value == "gradient" for a in made.recording.allocations)


def test_it_survives_on_its_minimum_and_not_on_a_page_less() -> None:
    made = trained("adamw")
    enough = replace(made.device, memory_bytes=made.minimum_capacity_bytes)
    less = replace(made.device, memory_bytes=made.minimum_capacity_bytes - 2 * MIB)
    assert survives(made.demand, enough, made.outside_bytes, "pytorch", None)
    assert not survives(made.demand, less, made.outside_bytes, "pytorch", None)
    assert made.minimum_capacity_bytes <= made.total_bytes


def test_what_fits_on_a_gpu_fits_on_the_same_with_more_memory() -> None:
    made = trained("adamw")
    sizes = [made.fits(small_gpu(mebibytes)) for mebibytes in (1, 8, 16, 32, 64, 128, 4096)]
    assert sizes == sorted(sizes)
    assert sizes[0] is False
    assert sizes[-1] is True


@pytest.mark.long
def test_the_gpus_that_it_fits_on_are_those_that_it_fits_on() -> None:
    made = estimate("resnet152", optimizer="adamw", batch=96)
    assert "t4" not in made.gpus
    assert {"h200", "b200"} <= set(made.gpus)
    assert all(made.fits(name) for name in made.gpus)


@pytest.mark.long
@settings(max_examples=15, deadline=None)
@given(st.integers(18, 90), st.sampled_from(["sgd", "adam"]))
def test_the_largest_batch_fits_and_the_next_does_not(mebibytes: int, optimizer: str) -> None:
    device = small_gpu(mebibytes)
    made = estimate(mlp, torch.empty(8, WIDE), mean, optimizer, device=device)
    best = made.largest_batch
    assert best is not None

    def fits(batch: int) -> bool:
        return estimate(mlp, torch.empty(batch, WIDE), mean, optimizer, device=device).fits()

    assert best == 0 or fits(best)
    assert not fits(best + 1)


def test_larger_batches_than_anybody_would_train_are_not_tried() -> None:
    made = estimate(mlp, torch.empty(8, WIDE), mean, "sgd", device=small_gpu(4096))
    assert made.scaling is not None
    assert made.largest_batch == made.scaling.most == MOST_BATCH
    (figure,) = (one for one in estimate_page(made).verdict.figures if one.label == "largest batch")
    assert figure.value == f"{MOST_BATCH} or more"


def test_a_model_that_does_not_fit_at_all_has_a_largest_batch_of_none() -> None:
    made = estimate(mlp, torch.empty(8, WIDE), mean, "adamw", device=small_gpu(2))
    assert made.largest_batch == 0
    assert not made.fits()


@pytest.mark.long
def test_what_would_help_is_worked_out_where_it_does_not_fit() -> None:
    made = estimate("gpt2", optimizer="adamw", batch=64, device="rtx3060")
    assert not made.fits()
    worked_out = [change for change in made.changes if change.minimum_capacity_bytes is not None]
    assert any("mixed precision" in change.what for change in worked_out)
    assert any(change.fits and "accumulating" in change.what for change in worked_out)
    for change in worked_out:
        assert change.fits == (change.minimum_capacity_bytes <= made.device.memory_bytes)
    assert trained().changes == ()


def test_the_verdict_comes_first_and_every_large_category_has_a_bar() -> None:
    fitting = trained("adamw").explain().splitlines()
    assert fitting[2].startswith("Fits: mlp, batch 64, takes ")
    failing = estimate(mlp, torch.empty(8, WIDE), mean, "adamw", device=small_gpu(2))
    first = failing.explain().splitlines()[2]
    assert first.startswith("Does not fit: mlp, batch 8, needs ")
    assert "of small" in first
    assert any("█" in line for line in fitting)


def test_convolutions_are_uncertain_and_plain_products_are_not() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))

    made = estimate(net, torch.empty(32, 16, 64, 64), mean, "sgd")
    low, high = (made.total.low, made.total.high)
    assert high - low > 32 * 16 * 64 * 64 * 4
    workspaces = [
        a for a in made.recording.allocations if a.scratch is not None and a.scratch.family.startswith("conv_")
    ]
    assert {a.scratch.family for a in workspaces if a.scratch} == {
        "conv_forward",
        "conv_backward_data",
        "conv_backward_weight",
    }


def test_cublas_takes_a_workspace_a_thread_and_more_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    ampere, hopper = (trained(device=gpu, torch="2.13") for gpu in ("a100-80gb", "h100"))
    assert ampere.peak.by_category["workspaces"] == 2 * 8_519_680
    assert hopper.peak.by_category["workspaces"] == 2 * 32 * MIB
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    assert "workspaces" not in trained(device="h100", torch="2.13").peak.by_category


class Branching(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if y.sum() > 0 else -y


class Crashing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).view(-1, 7)


def test_control_flow_that_depends_on_data_is_refused_with_its_line() -> None:
    with pytest.raises(UnsupportedError, match=r"test_estimate\.py:\d+, .*`return"):
        estimate(lambda: Branching(8, 8), torch.empty(4, 8))


def test_a_model_that_fails_says_where_and_why() -> None:
    with pytest.raises((RequestError, UnsupportedError), match=r"test_estimate\.py, line \d+"):
        estimate(lambda: Crashing(8, 8), torch.empty(4, 8))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: trained(device="rtx409"), "did you mean 'rtx4090"),
        (lambda: trained(device="cpu"), "cpu is not a GPU"),
        (lambda: trained(dtype="float8"), "unknown dtype 'float8'; did you mean 'float32'"),
        (lambda: trained("sgdd"), "unknown optimizer 'sgdd'"),
        (lambda: trained(allocator="jemalloc"), "unknown allocator 'jemalloc'"),
        (lambda: trained(allocator_config="max_split_size_mb"), "max_split_size_mb"),
        (lambda: trained(allocator="chainer", allocator_config="a:b"), "no configuration text"),
        (lambda: estimate(mlp), "pass inputs"),
        (lambda: estimate(mlp, ()), "holds no tensor"),
        (lambda: estimate(lambda: 3, torch.empty(1)), "build returned int"),
        (lambda: estimate(mlp, torch.empty(4, WIDE), nn.MSELoss(), "sgd"), "a criterion needs inputs"),
        (lambda: estimate("resnet51", batch=2), "resnet50"),
        (lambda: estimate("resnet50", torch.empty(1), batch=2), "its own inputs"),
        (lambda: estimate("resnet50", batch=-1), "batch=-1"),
        (lambda: trained(accumulate=0), "accumulate=0"),
    ],
)
def test_a_request_that_cannot_be_met_gets_one_clear_line(call: object, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        call()  # type: ignore[operator]
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_fresh_estimate_leaves_torchs_compiler_and_its_shards_unimported() -> None:
    program = (
        "import sys\nfrom overspill.cli import main\nmain(['estimate', 'alexnet', '--small', '--batch', '2'])\n"
        "names = 'torch._dynamo', 'torch._inductor', 'torch.distributed.fsdp', 'transformers', 'overspill.runtime', 'scipy'\n"
        "print('imported:', [name for name in names if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("imported: []\n")
