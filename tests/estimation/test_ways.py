"""Ways to train, each against bytes that can be worked out by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.estimation.by_hand import (
    BIASES,
    CUT,
    DEPTH,
    EIGHT_BITS,
    FEATURES,
    FOUR_BITS,
    HEAD_WIDTH,
    HEADS,
    LINEAR,
    NETWORK,
    POSITIONS,
    TOKENS,
    UNCUT,
    WEIGHTS,
    alive,
    gpt2,
    kept_for_backward,
    llama,
    trained,
)
from torch import nn

from overspill import models
from overspill.capture.recording.recording import Recording
from overspill.capture.virtual_gpu.record import record
from overspill.core import TensorKind
from overspill.core.errors import RequestError
from overspill.estimation.programs import ITERATIONS, program_of
from overspill.job import Job, Parallel
from overspill.job.parallel import parallel_of

# Contradictions


@pytest.mark.parametrize(
    ("fields", "beside"),
    [
        ({"batch": 0}, {}),
        ({"optimizer": "adamm"}, {}),
        ({"dtype": "int8"}, {}),
        ({"accumulate": 0}, {}),
        ({"attention": "fast"}, {}),
        ({"quantize": "3bit"}, {}),
        ({"lora": 0}, {}),
        ({"generate": -1}, {}),
        ({"quantize": "4bit", "lora": None}, {}),
        ({"optimizer": "sgd", "generate": 4}, {}),
        ({"optimizer": "adamw8bit", "parallel": Parallel("fsdp", 2)}, {}),
        ({"quantize": "4bit", "parallel": Parallel("fsdp", 2)}, {"lora": 2}),
        ({"lora": 2, "parallel": Parallel("tp", 2)}, {}),
        ({"offload_optimizer": True, "parallel": Parallel("fsdp", 2)}, {}),
        ({"offload_optimizer": True, "optimizer": "adamw8bit"}, {}),
        ({"offload_optimizer": True, "dtype": "amp"}, {}),
        ({"accumulate": 2}, {"parallel": Parallel("pp", 2)}),
        ({"lora": 2, "channels_last": True}, {"parallel": Parallel("pp", 2)}),
        ({"optimizer": "adamw8bit", "parallel": Parallel("pp", 2)}, {}),
    ],
)
def test_what_contradicts_itself_is_refused_by_the_names_of_its_fields(
    fields: dict[str, Any], beside: dict[str, Any]
) -> None:
    with pytest.raises(RequestError) as refused:
        Job(NETWORK, **fields, **beside)
    assert {*refused.value.fields} == fields.keys()
    assert "\n" not in str(refused.value)


def test_inference_refuses_what_only_training_has() -> None:
    with pytest.raises(RequestError) as refused:
        gpt2(checkpointing=True, lora=2)
    assert refused.value.fields == ("checkpointing", "lora")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention": "math"}, "calls no scaled_dot_product_attention"),
        ({"channels_last": True}, "convolutions"),
        ({"parallel": Parallel("tp", 2)}, "no tensor-parallel plan"),
        ({"checkpointing": ("Attention",)}, "class Attention"),
    ],
)
def test_what_a_model_has_nothing_for_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        trained(**fields)


# The loop


def test_accumulated_gradients_live_through_the_next_forward() -> None:
    recording = trained(accumulate=2)
    begins = [a.start for a in recording.allocations if a.kind is TensorKind.INPUT and a.start >= recording.starts[-1]]
    assert len(begins) == 2
    # set_to_none: none at the first micro-batch, all at the second.
    assert [alive(recording, at + 1)[TensorKind.GRADIENT] for at in begins] == [0, 4 * (WEIGHTS + BIASES)]


def test_zeroed_gradients_stay() -> None:
    end = {none: trained(set_to_none=none) for none in (True, False)}
    for none, recording in end.items():
        second = next(a.start for a in recording.allocations if a.start > recording.starts[-1] and a.nbytes == FEATURES)
        assert alive(recording, second)[TensorKind.GRADIENT] == (0 if none else 4 * (WEIGHTS + BIASES))


def test_checkpointed_blocks_keep_their_inputs_alone() -> None:
    # Each layer's output, for its ReLU and for the next layer; with checkpointing the output of all blocks but the last.
    assert kept_for_backward(trained()) == 2 * DEPTH * FEATURES
    assert kept_for_backward(trained(checkpointing=True)) == (DEPTH - 1) * FEATURES
    assert trained(checkpointing=("Block",)) == trained(checkpointing=True)


@pytest.mark.parametrize(
    ("attention", "op"),
    [
        ("flash", "_scaled_dot_product_flash_attention"),
        ("cudnn", "_scaled_dot_product_flash_attention"),
        ("efficient", "_scaled_dot_product_efficient_attention"),
        ("math", "_safe_softmax"),
    ],
)
def test_attention_is_the_kernel_that_was_named(attention: str, op: str) -> None:
    ran = {
        o.name for o in gpt2(dtype="bfloat16", attention=attention).ops if "attention" in o.name or "softmax" in o.name
    }
    assert ran == {op}


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))


def scratch(recording: Recording, family: str) -> list[tuple[int, ...]]:
    return [a.scratch.sizes for a in recording.allocations if a.scratch and a.scratch.family.startswith(family)]


def test_channels_last_reaches_the_convolutions() -> None:
    shape = (2, 8, 16, 16)
    plain = scratch(trained(build=convolutions, shape=shape), "conv_forward")
    last = scratch(trained(build=convolutions, shape=shape, channels_last=True), "conv_forward")
    assert [sizes[9] for sizes in plain] == [0] * len(plain)
    assert [sizes[9] for sizes in last] == [1] * len(last) != []


def test_cudnn_tries_its_engines_once_for_each_convolution() -> None:
    shape = (2, 8, 16, 16)
    plain = trained(build=convolutions, shape=shape)
    tried = scratch(trained(build=convolutions, shape=shape, cudnn_benchmark=True), "conv_trial")
    pixels = 2 * 16 * 16
    first, second = 8 * pixels + 9 * 8 * 16 + 16 * pixels, 2 * 16 * pixels + 9 * 16 * 16
    # Forward of both; backward of the second for data and weight, of the first for the weight alone.
    assert Counter(tried) == Counter({(4 * first,): 2, (4 * second,): 3})
    assert scratch(plain, "conv_trial") == []


# Optimizers


@pytest.mark.long
def test_states_of_8_bits_have_a_scale_for_256_elements() -> None:
    states = alive(trained("adamw8bit"))[TensorKind.OPTIMIZER_STATE]
    assert states == 2 * (WEIGHTS + 4 * WEIGHTS // 256) + 2 * 4 * BIASES
    assert alive(trained("lion8bit"))[TensorKind.OPTIMIZER_STATE] == states // 2


def test_paged_states_of_large_parameters_are_not_of_the_allocator() -> None:
    wide = 512
    recording = trained("paged-adamw8bit", build=lambda: nn.Linear(wide, wide), shape=(4, wide))
    assert alive(recording)[TensorKind.OPTIMIZER_STATE] == 2 * 4 * wide * wide // 256 + 2 * 4 * wide


def test_an_offloaded_optimizer_keeps_states_of_small_parameters() -> None:
    recording = trained("adamw", offload_optimizer=True)
    assert alive(recording)[TensorKind.OPTIMIZER_STATE] == 2 * 4 * BIASES
    assert alive(recording)[TensorKind.GRADIENT] == 4 * (WEIGHTS + BIASES)
    assert recording.host_bytes == (2 + 2) * 4 * WEIGHTS  # a copy, its gradient, and two states
    assert trained("sgd", offload_optimizer=True).host_bytes == 2 * 4 * WEIGHTS
    assert not trained("adamw").host_bytes


@pytest.mark.long
def test_zero_1_divides_the_states() -> None:
    whole = 2 * 4 * (WEIGHTS + BIASES)
    recording = trained("adamw", parallel=parallel_of("zero1", 4))
    assert alive(recording)[TensorKind.OPTIMIZER_STATE] == whole / 4
    assert alive(recording)[TensorKind.PARAMETER] == 4 * (WEIGHTS + BIASES)


def test_zero_2_and_3_are_torchs_own() -> None:
    assert parallel_of("zero2", 4) == Parallel("fsdp", 4, reshard_after_forward=False)
    assert parallel_of("zero3", 4, param_dtype="bfloat16") == Parallel("fsdp", 4, param_dtype="bfloat16")


@pytest.mark.long
def test_shards_on_the_host_leave_the_gpu_between_steps() -> None:
    runs = [trained("adamw", parallel=Parallel("fsdp", 4, cpu_offload=o)) for o in (False, True)]
    kept, moved = map(alive, runs)
    model = 4 * (WEIGHTS + BIASES)
    assert [run.host_bytes for run in runs] == [0, 4 * model / 4]
    assert kept[TensorKind.PARAMETER] == model / 4
    assert kept[TensorKind.OPTIMIZER_STATE] == 2 * model / 4
    assert moved[TensorKind.PARAMETER] == moved[TensorKind.OPTIMIZER_STATE] == 0


# Adapters and weights in few bits


def test_adapters_are_trained_and_the_rest_is_frozen() -> None:
    rank = 4
    adapters = 2 * 4 * rank * sum(map(sum, LINEAR))  # float32, in both layers
    recording = gpt2("adamw", lora=rank, dtype="bfloat16")
    assert alive(recording)[TensorKind.GRADIENT] == adapters
    assert alive(recording)[TensorKind.OPTIMIZER_STATE] == 2 * adapters
    plain = alive(gpt2(dtype="bfloat16"))[TensorKind.PARAMETER]
    assert alive(recording)[TensorKind.PARAMETER] == plain + adapters


def quantized_bytes(bits: str) -> int:
    """All weights of the linear layers of both blocks."""
    found = 0
    for read, made in LINEAR:
        values = read * made
        blocks = values // 64
        four = values // 2 + blocks + 4 * -(-blocks // 256) + 4 + 4 * 16
        found += four if bits == FOUR_BITS else values + 4 * made
    return 2 * found


@pytest.mark.parametrize("bits", [FOUR_BITS, EIGHT_BITS])
def test_weights_in_few_bits_have_the_bytes_of_their_format(bits: str) -> None:
    plain = alive(gpt2(dtype="bfloat16"))[TensorKind.PARAMETER]
    replaced = 2 * 2 * sum(read * made for read, made in LINEAR)
    assert alive(gpt2(dtype="bfloat16", quantize=bits))[TensorKind.PARAMETER] == plain - replaced + quantized_bytes(
        bits
    )


@pytest.mark.parametrize("bits", [FOUR_BITS, pytest.param(EIGHT_BITS, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", *(pytest.param(dtype, marks=pytest.mark.long) for dtype in ("float32", "amp", "amp-bfloat16"))],
)
def test_adapters_beside_weights_in_few_bits_are_trained(bits: str, dtype: str) -> None:
    recording = gpt2("paged-adamw8bit", lora=4, quantize=bits, dtype=dtype, checkpointing=True, accumulate=2)
    assert alive(recording)[TensorKind.GRADIENT] == 2 * 4 * 4 * sum(map(sum, LINEAR))


@pytest.mark.short("True")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_layer_of_8_bits_keeps_its_input_and_one_of_4_bits_does_not(checkpointing: bool) -> None:
    how: dict[str, Any] = {"lora": 4, "lora_targets": "qkv", "upcast": False, "dtype": "bfloat16"}
    four, eight = (
        kept_for_backward(gpt2("sgd", quantize=q, checkpointing=checkpointing, **how)) for q in (FOUR_BITS, EIGHT_BITS)
    )
    # Of attention and the first layer of the MLP the normalised stream, of its last the hidden values; attention's
    # output is kept anyway unless blocks are checkpointed, and nothing before the first adapter has a gradient.
    stream, hidden = (2 * 2 * TOKENS * width for width in (64, 256))
    assert eight - four == 2 * (stream + hidden) + stream + (2 * stream if checkpointing else 0)


@pytest.mark.long
def test_reentrant_checkpoints_keep_no_input_of_layers_of_8_bits() -> None:
    kept = [
        kept_for_backward(gpt2("sgd", quantize=q, lora=4, checkpointing=True, reentrant=True))
        for q in (FOUR_BITS, EIGHT_BITS)
    ]
    assert kept[0] == kept[1] < kept_for_backward(gpt2("sgd", quantize=EIGHT_BITS, lora=4, checkpointing=True))


@pytest.mark.long
def test_adapters_are_trained_on_several_gpus() -> None:
    for parallel in (Parallel("ddp", 2), Parallel("fsdp", 2)):
        assert gpt2("adamw", lora=4, parallel=parallel).iterations == ITERATIONS


# Generation


def test_keys_and_values_have_their_full_length_from_the_start() -> None:
    made = 8
    recording = gpt2(generate=made, dtype="bfloat16")
    layer = 2 * 2 * HEADS * (TOKENS + made) * HEAD_WIDTH  # bfloat16, two samples
    caches = [a for a in recording.allocations if a.nbytes == layer]
    assert len(caches) == 2 * 2 * recording.iterations
    assert "argmax" in {op.name for op in recording.ops}


def test_generation_refuses_models_that_read_no_tokens_and_texts_that_are_too_long() -> None:
    with pytest.raises(RequestError, match="reads tokens"):
        record(program_of(Job(lambda: models.load("resnet18", small=True), 2, None, generate=4)))
    with pytest.raises(RequestError, match=f"{TOKENS + POSITIONS} tokens"):
        gpt2(generate=POSITIONS)


# All at once


@pytest.mark.long
def test_the_public_function_takes_every_way() -> None:
    from overspill import estimate

    made = estimate(
        "decoder:width=64,depth=2,heads=4,vocabulary=211,seq_len=32", optimizer="paged-adamw8bit", dtype="bfloat16",
        accumulate=2, set_to_none=False, checkpointing=True, attention="flash", lora=4, quantize="4bit", upcast=False, batch=2,
    )  # fmt: skip
    assert made.fits()
    assert sum(made.breakdown.values()) == made.total_bytes


# Layers that are cut


@pytest.mark.short("True")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_attention_spelt_out_keeps_its_scores(checkpointing: bool) -> None:
    pytest.importorskip("transformers")
    scores = 4 * 2 * 4 * 64 * 64  # of a block, in float32
    spelt = llama("sgd", 64, checkpointing=checkpointing, attention="eager")
    assert sum(made.nbytes == scores for made in spelt.allocations) >= 2 * ITERATIONS


@pytest.mark.short("falcon,hidden_size=64,num_hidden_layers=1,num_attention_heads=4,vocab_size=200-fields1")
@pytest.mark.parametrize(
    ("model", "fields"),
    [
        # It turns what it computes into the type of a layer's weight, which no library quantises.
        ("t5,d_model=64,d_kv=16,d_ff=64,num_layers=1,num_heads=4,vocab_size=200", {"quantize": "4bit", "lora": 4}),
        # It adds in place to what a layer returns.
        (
            "falcon,hidden_size=64,num_hidden_layers=1,num_attention_heads=4,vocab_size=200",
            {"quantize": "8bit", "lora": 4},
        ),
    ],
)
def test_models_that_ask_more_of_layers_that_are_quantised_are_recorded(model: str, fields: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    job = Job(lambda: models.load(f"hf:{model}", seq_len=16), 2, "sgd", **fields)
    assert record(program_of(job)).starts


def test_the_decoder_s_blocks_are_cut() -> None:
    whole, half = (alive(gpt2("sgd", parallel=p))[TensorKind.PARAMETER] for p in (None, Parallel("tp", 2)))
    weights, biases = sum(read * made for read, made in LINEAR), 192 + 256  # biases of what is cut by columns
    assert whole - half == 2 * 4 * (weights + biases) // 2


@pytest.mark.long
def test_layers_that_are_cut_are_on_all_gpus_together_once() -> None:
    pytest.importorskip("transformers")
    recording = llama("adamw", parallel=Parallel("tp", 2))
    assert alive(recording)[TensorKind.PARAMETER] == UNCUT + CUT // 2
    assert alive(recording)[TensorKind.OPTIMIZER_STATE] == 2 * (UNCUT + CUT // 2)
    generated = llama(generate=4, parallel=Parallel("tp", 2))
    one_head = 4 * 2 * (16 + 4) * 16  # of two
    assert len([a for a in generated.allocations if a.nbytes == one_head]) == 2 * 2 * generated.iterations


@pytest.mark.long
def test_layers_are_cut_evenly_or_not_at_all() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(RequestError, match=r"3 GPUs .*evenly"):
        llama("sgd", parallel=Parallel("tp", 3))
