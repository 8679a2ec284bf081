"""Models of any size: the built-in decoder by its sizes, and causal language models of transformers by configuration."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from overspill.core.errors import RequestError
from overspill.models import check_name, load
from overspill.runtime.options import Options
from overspill.runtime.training import Training, train, train_plain

TINY = "decoder:width=32,depth=2,heads=4,vocabulary=50,seq_len=8"
LAYERS = "num_hidden_layers=2,hidden_size=32,num_attention_heads=4,vocab_size=97"
HUGGING_FACE = (
    "hf:gpt2,n_layer=2,n_embd=32,n_head=4,vocab_size=97,n_positions=32",
    f"hf:llama,{LAYERS},num_key_value_heads=2,intermediate_size=64",
    f"hf:opt,{LAYERS},ffn_dim=64,word_embed_proj_dim=32,max_position_embeddings=32",
)


def parameters(name: str) -> int:
    with FakeTensorMode():
        return sum(p.numel() for p in load(name).module.parameters())


def test_the_decoder_has_the_parameters_of_its_sizes() -> None:
    assert parameters("decoder") == parameters("gpt2") == 124_439_808
    for heads in (16, 32):
        assert parameters(f"decoder:width=2048,depth=24,heads={heads}") == 1_313_626_112


def test_a_decoder_reads_as_many_tokens_as_asked() -> None:
    job = load(TINY)
    tokens, targets = job.make_batch(3)
    assert tokens.shape == targets.shape == (3, 8)
    assert tokens.max() < 50
    assert job.loss(job.module, tokens, targets).isfinite()
    assert load("decoder:width=8,depth=1,heads=1,vocabulary=5", seq_len=1100).make_batch(1)[0].shape == (1, 1100)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("decoder:with=3", "a decoder has no 'with'; it has 'width', 'depth', 'heads', 'vocabulary', 'seq_len'"),
        ("decoder:width=3.5", "width must be a positive whole number, not 3.5"),
        ("decoder:depth=0", "depth must be a positive whole number, not 0"),
        ("decoder:width=8,4", "cannot read '4'; write key=value, with commas between"),
        ("hf:", "write hf:PATH/config.json or hf:gpt2,n_layer=6"),
        ("hf:gpt2,n_layer", "cannot read 'n_layer'"),
        ("decoders", "unknown model 'decoders'"),
    ],
)
def test_a_name_that_cannot_be_read_is_refused_before_torch_is_needed(name: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_name(name)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("decoder:width=32,heads=3", {}, "width 32 is no multiple of 3 heads"),
        ("decoder:seq_len=8", {"seq_len": 4}, "leave seq_len=4 out"),
        ("decoder", {"small": True}, "small= does not apply to decoder"),
        ("decoder", {"image_size": 8}, "image_size= does not apply to decoder"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(name: str, options: dict[str, int], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        load(name, **options)  # type: ignore[arg-type]


def test_without_transformers_hf_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RequestError, match="pip install transformers"):
        load("hf:gpt2")


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_a_causal_language_model_trains_by_its_own_loss_with_the_numbers_of_plain_pytorch(name: str) -> None:
    pytest.importorskip("transformers")
    training = Training(lambda: load(name, seq_len=8), 2, "adamw", 2, whole_step=True)
    options = Options(0.9, store="host")
    run = train(training, options)
    assert run.identical_to(train_plain(training, options))


def test_a_configuration_file_names_a_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 31, "n_positions": 24}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(sizes), encoding="utf-8")
    job = load(f"hf:{path}")
    tokens, labels = job.make_batch(2)
    assert tokens.shape == (2, 24)
    assert torch.equal(tokens, labels)
    assert job.loss(job.module, tokens, labels).isfinite()


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("hf:gpt22", {}, r"no model type 'gpt22'; did you mean 'gpt2"),
        ("hf:gpt2,layers=3", {}, "the configuration of gpt2 has no layers"),
        ("hf:gpt2,n_embd=10,n_head=3", {}, "cannot make a causal language model of it"),
        ("hf:absent.json", {}, "there is no file absent.json"),
        ("hf:gpt2,n_positions=16", {"seq_len": 17}, "seq_len=17 is too large"),
    ],
)
def test_what_transformers_cannot_make_is_one_line(name: str, options: dict[str, int], said: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(RequestError, match=said) as caught:
        load(name, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
