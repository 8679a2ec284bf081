"""Names lead to models, and a wrong name or size to one line that says what would work."""

from __future__ import annotations

import subprocess
import sys

import pytest

from overspill.core.errors import RequestError
from overspill.models import describe, load, names


def test_listing_the_models_does_not_import_torch() -> None:
    program = "import sys, overspill.models as m; m.describe(); m.names(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_name_is_described_once() -> None:
    assert [entry.name for entry in describe()] == list(names())
    assert len(set(names())) == len(names())
    assert all(entry.family and entry.summary and entry.batch_input for entry in describe())


@pytest.mark.parametrize(("wrong", "meant"), [("resnet5", "resnet50"), ("VGG-E", "vgg-e"), ("bert", "bert-base")])
def test_an_unknown_name_names_what_was_meant(wrong: str, meant: str) -> None:
    with pytest.raises(RequestError) as caught:
        load(wrong)
    text = str(caught.value)
    assert wrong in text
    assert meant in text
    assert "`overspill models`" in text
    assert "package.module:callable" in text
    assert "\n" not in text


def test_a_name_like_no_other_still_says_where_to_look() -> None:
    with pytest.raises(RequestError, match=r"'qqq'\. `overspill models`"):
        load("qqq")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("alexnet", {"image_size": 32}, ["image_size=32", "alexnet", "63"]),
        ("vgg416", {"image_size": 31}, ["image_size=31", "vgg416", "32"]),
        ("resnet50", {"image_size": 0}, ["image_size=0 is not a size"]),
        ("unet", {"image_size": 100}, ["image_size=100", "unet", "multiple of 16"]),
        ("lstm", {"image_size": 64}, ["image_size= does not apply to lstm", "seq_len"]),
        ("resnet50", {"seq_len": 8}, ["seq_len= does not apply to resnet50", "image_size"]),
        ("gpt2", {"image_size": 64}, ["image_size= does not apply to gpt2", "seq_len"]),
        ("gpt2", {"seq_len": -1}, ["seq_len=-1 is not a size"]),
        ("gpt2", {"seq_len": 1025}, ["seq_len=1025", "1024"]),
        ("bert-base", {"seq_len": 513}, ["seq_len=513", "512"]),
    ],
)
def test_a_size_that_the_model_cannot_take_is_refused(name: str, options: dict[str, int], words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        load(name, **options)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("name", "image_size"), [("resnet18", 32), ("densenet121", 60), ("inception-v3", 106), ("inception-v4", 106)]
)
def test_batch_norm_refuses_a_batch_of_one_when_the_last_maps_have_one_pixel(name: str, image_size: int) -> None:
    job = load(name, small=True, image_size=image_size)
    assert len(job.make_batch(2)) == 2
    with pytest.raises(RequestError, match=f"or image_size {image_size + 1}"):
        job.make_batch(1)
    larger = load(name, small=True, image_size=image_size + 1)
    assert larger.loss(larger.module, *larger.make_batch(1)).isfinite()


def test_a_size_error_of_an_alias_names_the_alias() -> None:
    with pytest.raises(RequestError, match="vgg16"):
        load("vgg16", image_size=8)


def test_without_transformers_bert_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RequestError, match=r"pip install .*\[bert\]"):
        load("bert-base")
