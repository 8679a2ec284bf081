"""Models of any size: the built-in decoder by its sizes, and models of transformers by their configuration."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar, cast

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from overspill.core.errors import RequestError
from overspill.job import Job, NamedModel
from overspill.job.prepare import prepare
from overspill.models import checked_name, load
from overspill.runtime.options import Options
from overspill.runtime.preview import preview
from overspill.runtime.training import train, train_plain

pytestmark = pytest.mark.usefixtures("forget_compiled_code")

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


def test_weights_are_float32_whatever_a_configuration_says(tmp_path: Path) -> None:
    text = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "torch_dtype": "bfloat16",
    }  # fmt: skip
    images = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    both = {
        "model_type": "llava", "text_config": text, "torch_dtype": "bfloat16",
        "vision_config": {"model_type": "clip_vision_model", "dtype": "bfloat16", **images},
    }  # fmt: skip
    for number, config in enumerate((text, both)):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(config))
        with FakeTensorMode():
            module = load(f"hf:{path}").module
            assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
            prepare(module, Job(NamedModel("gpt2"), 1, None, dtype="bfloat16"))
            assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}


def test_the_decoder_has_the_parameters_of_its_sizes() -> None:
    assert parameters("decoder") == parameters("gpt2") == 124_439_808
    for heads in (16, 32):
        assert parameters(f"decoder:width=2048,depth=24,heads={heads}") == 1_313_626_112


@pytest.mark.short(
    "llama-3.2-1b-1235814400",
    "Qwen/Qwen3-0.6B-596049920",
    "qwen2.5-0.5b-494032768",
    "mistral-7b-v0.3,num_hidden_layers=1-486551552",
)
@pytest.mark.parametrize(
    ("name", "count"),  # as published with the weights
    [
        ("llama-3.2-1b", 1_235_814_400), ("meta-llama/Llama-3.2-3B-Instruct", 3_212_749_824),
        ("meta-llama/Meta-Llama-3.1-8B", 8_030_261_248), ("llama-3.1-70b-instruct", 70_553_706_496),
        ("Qwen/Qwen3-0.6B", 596_049_920), ("qwen3-1.7b", 1_720_574_976), ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360), ("qwen3-14b", 14_768_307_200), ("Qwen/Qwen3-32B", 32_762_123_264),
        ("qwen2.5-0.5b", 494_032_768), ("qwen2.5-1.5b", 1_543_714_304), ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("mistralai/Mistral-7B-Instruct-v0.3", 7_248_023_552),
        ("mistral-7b-v0.3,num_hidden_layers=1", 486_551_552),
    ],
)  # fmt: skip
def test_a_published_model_needs_no_network_and_has_its_parameters(
    name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket.socket, "connect", None)
    assert parameters(checked_name(name)) == count


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
        ("decoder:with=3", "no 'with'; .*'width',"),
        ("decoder:width=3.5", r"width .*not 3\.5"),
        ("decoder:depth=0", "depth .*not 0"),
        ("decoder:depth=1000000000", "depth=1000000000"),
        ("decoder:width=8,4", "read '4'; .*key=value"),
        ("hf:", "hf:gpt2,n_layer=6"),
        ("hf:gpt2,n_layer", "cannot read 'n_layer'"),
        ("decoders", "unknown model 'decoders'"),
    ],
)
def test_a_name_that_cannot_be_read_is_refused_before_torch_is_needed(name: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        checked_name(name)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("decoder:width=32,heads=3", {}, "width 32"),
        ("decoder:seq_len=8", {"seq_len": 4}, "leave seq_len=4 out"),
        ("decoder", {"small": True}, "small="),
        ("decoder", {"image_size": 8}, "image_size="),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(name: str, options: dict[str, int], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        load(name, **options)  # type: ignore[arg-type]


def test_without_transformers_hf_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RequestError, match="pip install transformers"):
        load("hf:gpt2")


@pytest.mark.parametrize(
    "name", [HUGGING_FACE[1], *(pytest.param(n, marks=pytest.mark.long) for n in HUGGING_FACE[::2])]
)
def test_a_causal_language_model_trains_by_its_own_loss_with_the_numbers_of_plain_pytorch(name: str) -> None:
    pytest.importorskip("transformers")
    job = Job(lambda: load(name, seq_len=8), 2, "adamw")
    options = Options(0.9, store="host", whole_step=True)
    run = train(job, options, steps=2)
    assert run.identical_to(train_plain(job, options, steps=2))


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
        ("hf:gpt22", {}, "'gpt22'; .*'gpt2"),
        ("hf:gpt2,layers=3", {}, "gpt2 .*no layers"),
        ("hf:gpt2,n_embd=10,n_head=3", {}, "causal language model"),
        ("hf:absent.json", {}, r"absent\.json"),
        ("hf:gpt2,n_positions=16", {"seq_len": 17}, "seq_len=17"),
        ("hf:sam", {}, "no model of"),
        ("hf:vit", {"seq_len": 4}, "hf:vit"),
        ("hf:./absent", {}, "cannot be had"),
    ],
)
def test_what_transformers_cannot_make_is_one_line(name: str, options: dict[str, int], said: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(RequestError, match=said) as caught:
        load(name, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


SMALL_BERT = {
    "vocab_size": 97,
    "max_position_embeddings": 32,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
KINDS = {
    "hf:bert,hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64,vocab_size=97": "ForMaskedLM",
    "hf:t5,d_model=32,d_kv=16,d_ff=64,num_layers=1,num_heads=2,vocab_size=97": "ForConditionalGeneration",
    "hf:vit,hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64,image_size=16,patch_size=8": (
        "ForImageClassification"
    ),
    "hf:deit,hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64,image_size=16,patch_size=8": (
        "ForImageClassification"
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n[3:7] != "bert" else n for n in KINDS])
def test_what_is_no_causal_language_model_is_made_and_trained_as_what_it_is(name: str) -> None:
    pytest.importorskip("transformers")
    job = load(name)
    assert type(job.module).__name__.endswith(KINDS[name])
    job = Job(lambda: load(name), 2, "adamw")
    options = Options(0.9, store="host", whole_step=True)
    run = train(job, options, steps=2)
    assert run.identical_to(train_plain(job, options, steps=2))
    assert preview(job, options).schedule == run.plan.schedule


def test_a_configuration_says_of_which_kind_it_is(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for architecture in ("BertForMaskedLM", "BertLMHeadModel"):
        text = json.dumps(
            {"model_type": "bert", "architectures": [architecture], **SMALL_BERT, "intermediate_size": 32}
        )
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        for name in (f"hf:{tmp_path}", f"hf:{tmp_path}/config.json", f"hf:{tmp_path},num_hidden_layers=2"):
            module = load(name).module
            assert type(module).__name__ == architecture
            assert module.config.num_hidden_layers == 1 + name.endswith("=2")


class Hub(BaseHTTPRequestHandler):
    """One model: its configuration alone, and with code of its own in another."""

    config = json.dumps(
        {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 3, "vocab_size": 31, "n_positions": 8}
    )
    coded = json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}})
    files: ClassVar = {"/owner/tiny/resolve/main/config.json": config, "/owner/coded/resolve/main/config.json": coded}

    def do_HEAD(self) -> None:
        text = self.files.get(self.path)
        self.send_response(404 if text is None else 200)
        self.send_header("ETag", '"1"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", str(len(text or "")))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(self.files.get(self.path, "").encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.long
def test_of_a_name_on_the_hub_the_configuration_alone_is_read(tmp_path: Path) -> None:
    """A hub on this machine, in a process of its own that knows no other."""
    pytest.importorskip("transformers")
    hub = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=hub.serve_forever, daemon=True).start()
    where = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}

    def estimate(name: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "overspill", "estimate", name, "--batch", "2", "--json"]
        done = subprocess.run(command, env=os.environ | where, capture_output=True, text=True, check=False)
        return cast("dict[str, Any]", json.loads(done.stdout))

    try:
        assert (
            estimate("hf:owner/tiny")["peak_requested_bytes"]
            > estimate("hf:owner/tiny,n_layer=1")["peak_requested_bytes"]
        )
        assert "its configuration cannot be had" in estimate("hf:owner/absent")["error"]
        assert "code that comes with a model is not run" in estimate("hf:owner/coded")["error"]
    finally:
        hub.shutdown()


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 97,
}  # fmt: skip
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.mark.parametrize(
    ("how", "nbytes"),
    [  # 16384 values in 4 layers of attention, 24576 in 3 of the rest; scales of 64 values, and of 256 scales
        ({**BITSANDBYTES, "bnb_4bit_use_double_quant": True}, 40960 // 2 + 640 + 7 * (4 + 4 + 64)),
        ({**BITSANDBYTES, "llm_int8_skip_modules": ["lm_head", "model.layers.*.mlp"]}, 8192 + 4 * (256 + 64) + 2 * 24576),
        ({**BITSANDBYTES, "llm_int8_skip_modules": []}, 47168 // 2 + 4 * 737 + 8 * 64 - 2 * 6208),
        ({"load_in_8bit": True}, 40960 + 4 * 576),
    ],
)  # fmt: skip
def test_a_quantized_configuration_has_the_bytes_that_it_says(how: dict[str, Any], nbytes: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": how}), encoding="utf-8")
    sizes = []
    for name in (f"hf:{tmp_path}", f"hf:{tmp_path},quantization_config=false"):
        job = Job(NamedModel(name), 2, None, "float16")
        module = job.build().module
        prepare(module, job)
        sizes.append(sum(parameter.nbytes for parameter in module.parameters()))
    assert sizes[0] == sizes[1] - 2 * 40960 + nbytes


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, r"\(mxfp4\) is not"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, r"\(awq\) is not"),
        ({"quantization_config": {**BITSANDBYTES, "llm_int8_skip_modules": ["*"]}}, r"\(bitsandbytes\) is not"),
        ({"quantization_config": {"load_in_8bit": True}}, "or quantization_config"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
        ({"model_type": "swin", "depths": [2, 10**9]}, "depths=1000000000"),
        ({"text_config": {"n_layer": -3}}, "n_layer=-3"),
    ],
)
def test_a_configuration_that_is_not_followed_is_refused_before_it_is_made(
    changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changed), encoding="utf-8")
    began = time.process_time()
    with pytest.raises(RequestError, match=said):
        Job(NamedModel(f"hf:{tmp_path}/config.json"), 2)
    assert time.process_time() - began < 1


def test_nobody_is_asked_to_run_code_and_the_hub_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    calls: list[object] = []
    monkeypatch.setattr("builtins.input", calls.append)
    monkeypatch.setattr(socket.socket, "connect", lambda _, where: calls.append(where))
    (tmp_path / "config.json").write_text(Hub.coded, encoding="utf-8")
    (tmp_path / "code.py").write_text("print('run')", encoding="utf-8")
    for name in (f"hf:{tmp_path}/config.json", f"hf:{tmp_path}"):
        with pytest.raises(RequestError, match="is not run"):
            load(name)
    assert (calls, capfd.readouterr()) == ([], ("", ""))
    monkeypatch.undo()
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RequestError, match="cannot be had"):
        load("hf:nobody/nothing")
    assert capfd.readouterr() == ("", "")
    assert not hub.constants.HF_HUB_OFFLINE
