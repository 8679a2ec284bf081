"""Ways to train, each against bytes that can be worked out by hand."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overspill import models
from overspill.capture.recording.recording import Recording
from overspill.capture.virtual_gpu.record import record
from overspill.core import Phase, TensorKind
from overspill.core.errors import RequestError
from overspill.estimation.programs import ITERATIONS, program_of
from overspill.job import GivenModel, Job, NamedModel, Parallel
from overspill.job.parallel import parallel_of

WIDTH, DEPTH, BATCH = 256, 4, 64
FEATURES = 4 * BATCH * WIDTH
LAYERS = 2 * DEPTH
WEIGHTS, BIASES = LAYERS * WIDTH * WIDTH, LAYERS * WIDTH  # elements
FOUR_BITS, EIGHT_BITS = "4bit", "8bit"
# The small GPT-2: features read and made by the linear layers of one of its two blocks, its heads, tokens and positions.
LINEAR = ((64, 192), (64, 64), (64, 256), (256, 64))
HEADS, HEAD_WIDTH, TOKENS, POSITIONS = 4, 16, 32, 1024


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))))


def network() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(DEPTH)))


def trained(optimizer: Any = "sgd", build: Any = network, shape: Any = (BATCH, WIDTH), **fields: Any) -> Recording:
    model = GivenModel(build, torch.zeros(shape), lambda m, x: m(x).mean())
    return record(program_of(Job(model, shape[0], optimizer, **fields)))


@cache
def gpt2(optimizer: str | None = None, **fields: Any) -> Recording:
    return record(program_of(Job(lambda: models.load("gpt2", small=True), 2, optimizer, **fields)))


def alive(recording: Recording, at: int | None = None) -> Counter[TensorKind]:
    """Bytes by kind when the last step begins, or at another event."""
    moment = recording.starts[-1] if at is None else at
    found: Counter[TensorKind] = Counter()
    for a in recording.allocations:
        if a.start < moment <= a.end:
            found[a.kind] += a.nbytes
    return found


def kept_for_backward(recording: Recording) -> int:
    """Bytes that the last forward has left when its backward begins, the batch and the loss aside."""
    made = [a for a in recording.allocations if a.start > recording.starts[-1] and a.kind is not TensorKind.INPUT]
    begins = next(a.start for a in made if a.phase is Phase.BACKWARD)
    return sum(a.nbytes for a in made if a.start < begins <= a.end and a.nbytes > 4)


NETWORK = GivenModel(network, torch.zeros(BATCH, WIDTH))

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

LLAMA = (
    "hf:llama,hidden_size=64,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,intermediate_size=128,"
    "vocab_size=200,max_position_embeddings=64"
)
UNCUT = 4 * 5 * 64  # the norms, in float32
CUT = 4 * (2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 2 * 200 * 64)  # both blocks, the embedding and the output


def llama(optimizer: str | None = None, seq_len: int = 16, **fields: Any) -> Recording:
    return record(program_of(Job(lambda: models.load(LLAMA, seq_len=seq_len), 2, optimizer, **fields)))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_attention_spelt_out_keeps_its_scores(checkpointing: bool) -> None:
    pytest.importorskip("transformers")
    scores = 4 * 2 * 4 * 64 * 64  # of a block, in float32
    spelt = llama("sgd", 64, checkpointing=checkpointing, attention="eager")
    assert sum(made.nbytes == scores for made in spelt.allocations) >= 2 * ITERATIONS


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


# Stages of a pipeline

DECODER = "decoder:width=64,depth=4,heads=4,vocabulary=211,seq_len=32"
BLOCK = 4 * (sum(read * made + made for read, made in LINEAR) + 4 * 64)  # weights, biases and both norms
TOKEN_WEIGHTS, POSITION_WEIGHTS, LAST_NORM = 4 * 211 * 64, 4 * POSITIONS * 64, 4 * 2 * 64


@cache
def stage(at: int, gpus: int = 4, micro_batches: int | None = None, **fields: Any) -> Recording:
    """A step of two samples each micro-batch, in four stages of a block each."""
    parallel = Parallel("pp", gpus, micro_batches=micro_batches, stage=at)
    model = NamedModel(DECODER)
    return record(program_of(Job(model, 2 * parallel.pieces, "adamw", parallel=parallel, **fields)))


def test_a_stage_has_its_blocks_and_what_is_at_its_end() -> None:
    weights = [alive(stage(at))[TensorKind.PARAMETER] for at in range(4)]
    assert weights == [BLOCK + TOKEN_WEIGHTS + POSITION_WEIGHTS, BLOCK, BLOCK, BLOCK + LAST_NORM + TOKEN_WEIGHTS]
    for at, own in enumerate(weights):
        assert alive(stage(at))[TensorKind.OPTIMIZER_STATE] == 2 * own


def test_of_stages_each_has_a_micro_batch_more_under_way_than_the_next() -> None:
    hidden = 4 * 2 * TOKENS * 64
    second, third = (stage(at, checkpointing=True).peak_requested_bytes for at in (1, 2))
    assert second - third == 2 * hidden  # what was received, and what was sent


@pytest.mark.long
def test_a_pipeline_of_one_stage_accumulates() -> None:
    accumulated = record(program_of(Job(NamedModel(DECODER), 2, "adamw", accumulate=2)))
    alone = [op.name for op in stage(0, gpus=1, micro_batches=2).ops]
    assert Counter(alone) == Counter(op.name for op in accumulated.ops)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["amp", "amp-bfloat16", "bfloat16"])
def test_stages_are_trained_in_every_dtype(dtype: str) -> None:
    own = BLOCK // (2 if dtype == "bfloat16" else 1)
    assert alive(stage(1, dtype=dtype, checkpointing=True))[TensorKind.GRADIENT] == own


@pytest.mark.long
def test_the_answer_is_of_the_stage_that_needs_most() -> None:
    from overspill import estimate

    made = estimate(DECODER, optimizer="adamw", batch=8, parallel=Parallel("pp", 4))
    assert made.stages == {at: stage(at).peak_requested_bytes for at in (0, 1, 3)}
    assert made.recording == stage(0)
    assert "stage 1 of 4 of the pipeline needs most" in made.explain()


@pytest.mark.long
def test_stages_of_transformers_have_its_layers() -> None:
    pytest.importorskip("transformers")
    stages = [Parallel("pp", 2, stage=at) for at in (0, 1)]
    first, last = (alive(llama("adamw", parallel=stage))[TensorKind.PARAMETER] for stage in stages)
    assert first + last == UNCUT + CUT
    assert last - first == 4 * 64  # the last norm


@pytest.mark.long
def test_the_first_stage_has_no_more_under_way_than_there_are_micro_batches() -> None:
    assert [most_at_once(stage(0, micro_batches=m)) for m in (1, 2, 4, 8)] == [1, 2, 4, 4]
    assert [most_at_once(stage(at, micro_batches=8)) for at in range(4)] == [4, 3, 2, 1]


@pytest.mark.long
def test_weights_that_no_stage_runs_are_refused() -> None:
    def load() -> models.BuiltModel:
        job = models.load(DECODER)
        job.module.spare = nn.Linear(2, 2)
        return job

    with pytest.raises(RequestError, match="no stage"):
        record(program_of(Job(load, 4, parallel=Parallel("pp", 2))))


def most_at_once(recording: Recording) -> int:
    """Of how many micro-batches there are the hidden values of the MLP at once."""
    wide = [a for a in recording.allocations if a.nbytes == 4 * 2 * TOKENS * 256 and a.kind is TensorKind.ACTIVATION]
    return max(sum(b.start <= a.start < b.end for b in wide if b.layer == a.layer and b.op == b.op) for a in wide)


def test_stages_have_blocks_evenly_and_are_of_decoders() -> None:
    with pytest.raises(RequestError, match=r"4 blocks, .*evenly"):
        stage(0, gpus=3)
    with pytest.raises(RequestError, match="Sequential"):
        trained(parallel=Parallel("pp", 2))
    with pytest.raises(RequestError, match="of 4 micro-batches"):
        Job(NETWORK, 6, parallel=Parallel("pp", 2, micro_batches=4)).check_batch()
