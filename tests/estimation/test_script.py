"""Scripts as people write them, run as they are; each is held against the same job given as a model, or against sums."""

import copy
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.estimation.small_script import MODEL, STEP
from tests.turns import rest_long
from torch import nn

from overspill.capture.recording.recording import Recording
from overspill.capture.virtual_gpu.gpu import VirtualGpu
from overspill.capture.virtual_gpu.record import record
from overspill.core import Phase, TensorKind
from overspill.core.errors import OverspillError, RequestError
from overspill.estimation.programs import program_of
from overspill.estimation.script import ScriptRun, record_script
from overspill.job import Job
from overspill.models import BuiltModel

pytestmark = pytest.mark.usefixtures("own_folder")
SCRIPTS = Path(__file__).parent / "scripts"
LOOP = "for step in range(20):" + STEP
INSIDE = "".join(f"    {line}\n" for line in LOOP.splitlines())
TRAINING = MODEL + LOOP


def run(name: str, *arguments: str, iterations: int = 3) -> ScriptRun:
    return record_script(SCRIPTS / f"{name}.py", arguments, iterations=iterations)


def loaded(name: str) -> ModuleType:
    """The sample as a module, for those that do nothing when imported."""
    spec = importlib.util.spec_from_file_location(f"sample_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kept(recording: Recording, kind: TensorKind) -> int:
    """Bytes of a kind that are still there when the recording ends."""
    return sum(a.nbytes for a in recording.allocations if a.kind is kind and a.end == recording.events)


def size(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


_HELD: list[torch.Tensor] = []


def held(output: torch.Tensor) -> torch.Tensor:
    """`output`, which a script's variable keeps until the next one is there."""
    _HELD[:] = [output]
    return output


def expected(
    build: Callable[[], nn.Module], inputs: Callable[[], object], loss: Callable[..., torch.Tensor], optimizer: Callable[..., object],
    **options: object,
) -> Recording:  # fmt: skip
    try:

        def made() -> BuiltModel:
            return BuiltModel("script", build(), lambda _: (inputs(),), loss)

        return record(program_of(Job(made, None, optimizer, **options)))
    finally:
        _HELD.clear()


# --- Sample scripts ---------------------------------------------------------------------------------------------------


def test_the_peak_of_the_first_example_of_pytorch_is_that_of_its_model(capfd: pytest.CaptureFixture[str]) -> None:
    found = run("mnist", "--batch-size", "100")
    net = loaded("mnist").Net
    alike = expected(
        net,
        lambda: (torch.randn(100, 1, 28, 28), torch.zeros(100, dtype=torch.long)),
        lambda model, batch: nn.functional.nll_loss(held(model(batch[0])), batch[1]),
        torch.optim.Adadelta,
    )
    assert found.recording.peak_requested_bytes == alike.peak_requested_bytes
    assert (found.iterations, found.steps, found.trains, found.finished) == (3, 3, True, False)
    assert found.recording.iterations == 3
    assert found.optimizers == ("Adadelta",)
    assert kept(found.recording, TensorKind.PARAMETER) == size(net())
    assert capfd.readouterr().out.count("Train Epoch") == 3
    assert not Path("mnist_cnn.pt").exists()


def test_the_validation_belongs_to_a_run_that_is_long_enough_and_nothing_is_saved(
    capfd: pytest.CaptureFixture[str],
) -> None:
    found = run("mnist", "--batch-size", "64", "--samples", "128", "--epochs", "1", iterations=5)
    assert found.finished
    assert found.iterations == 2
    assert found.notes == ("the script ended after 2 of 5 iterations",)
    printed = capfd.readouterr()
    assert "Accuracy: unknown/128" in printed.out
    assert "torch.save" not in printed.err, "on the overlay there is a file, for the script alone"
    assert not Path("mnist_cnn.pt").exists()


def test_mixed_precision_with_a_scaler_clipping_and_meters() -> None:
    found = run("cifar_amp")
    build = loaded("cifar_amp").build
    torch.backends.cudnn.benchmark = False
    alike = expected(
        lambda: build().to(memory_format=torch.channels_last),
        lambda: (
            torch.randn(64, 3, 32, 32).contiguous(memory_format=torch.channels_last),
            torch.zeros(64, dtype=torch.long),
        ),
        lambda model, batch: nn.functional.cross_entropy(held(model(batch[0])), batch[1], label_smoothing=0.1),
        lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=1e-4),
        dtype="amp",
    )
    # The script's top-5 accuracy and its last batch are small change beside the activations.
    assert found.recording.peak_requested_bytes == pytest.approx(alike.peak_requested_bytes, rel=0.02)
    assert kept(found.recording, TensorKind.OPTIMIZER_STATE) == size(build())
    assert "cudnn.benchmark" in found.notes[0]
    assert torch.backends.cudnn.benchmark is False


def test_a_gpt_with_accumulation_counts_steps_not_backward_passes() -> None:
    found = run("nano_gpt")
    assert found.iterations == found.steps == 3
    assert found.calls == 3 * 5 + 3, "three forward passes without gradients come before"
    backward = {op.iteration for op in found.recording.ops if op.phase is Phase.BACKWARD}
    assert backward == {0, 1, 2}
    weights = kept(found.recording, TensorKind.PARAMETER)
    state = kept(found.recording, TensorKind.OPTIMIZER_STATE)
    assert 2 * weights < state < 2.01 * weights, "AdamW: two moments, and a counter for each parameter"
    assert not Path("ckpt.pt").exists()


@pytest.mark.parametrize("critic_steps", rest_long([1, 5], [1]))
def test_a_round_of_a_gan_is_a_step_of_both(critic_steps: int) -> None:
    found = run("dcgan", str(critic_steps))
    assert found.iterations == found.recording.iterations == 3
    assert found.steps == 3 * (critic_steps + 1)
    weights = kept(found.recording, TensorKind.PARAMETER)
    assert kept(found.recording, TensorKind.OPTIMIZER_STATE) == 2 * weights


@pytest.mark.parametrize("search", rest_long([(), ("strong_wolfe",)], [("strong_wolfe",)]))
def test_lbfgs_takes_all_its_inner_steps(search: tuple[str, ...]) -> None:
    found = run("lbfgs", *search)
    assert found.iterations == found.steps == 3
    assert found.calls >= 3 * 4
    history = [a for a in found.recording.allocations if a.kind is TensorKind.OPTIMIZER_STATE]
    weights = kept(found.recording, TensorKind.PARAMETER)
    assert sum(a.nbytes for a in history if a.end == found.recording.events) >= 10 * weights
    assert {op.phase for op in found.recording.ops} == {Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE}


def test_a_moving_average_lies_beside_the_weights() -> None:
    found = run("ema")
    model = nn.Sequential(nn.Linear(128, 512), nn.BatchNorm1d(512), nn.GELU(), nn.Linear(512, 8))
    copies = [a for a in found.recording.allocations if a.nbytes == 128 * 512 * 4 and a.end == found.recording.events]
    assert len(copies) == 5, "weight, average, gradient and two moments"
    assert kept(found.recording, TensorKind.OPTIMIZER_STATE) >= 2 * size(model)
    averaging = [op for op in found.recording.ops if op.name == "add_" and op.phase is Phase.FORWARD]
    assert len({op.iteration for op in averaging}) == 3, "what follows the last step is in the recording"


def test_a_checkpoint_is_loaded_onto_the_gpu_and_left_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(128, 512), nn.BatchNorm1d(512), nn.GELU(), nn.Linear(512, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    nn.functional.cross_entropy(model(torch.randn(4, 128)), torch.zeros(4, dtype=torch.long)).backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
    before = Path("last.pt").read_bytes()
    resumed = run("ema")
    assert Path("last.pt").read_bytes() == before
    Path("last.pt").unlink()
    fresh = run("ema")
    assert resumed.recording.peak_requested_bytes >= fresh.recording.peak_requested_bytes + size(model)


def test_the_accelerator_is_the_gpu() -> None:
    found = run("quickstart")
    alike = expected(
        lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        ),
        lambda: (torch.rand(64, 1, 28, 28), torch.zeros(64, dtype=torch.long)),
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    )
    assert found.recording.peak_requested_bytes == pytest.approx(alike.peak_requested_bytes, rel=0.01)


def test_training_without_an_optimizer_counts_calls_of_the_model() -> None:
    found = run("lstm")
    assert found.trains
    assert (found.steps, found.iterations, found.recording.iterations) == (0, 3, 3)
    assert found.optimizers == ()
    assert kept(found.recording, TensorKind.OPTIMIZER_STATE) == 0


def test_inference_counts_calls_of_the_model(capfd: pytest.CaptureFixture[str]) -> None:
    found = run("evaluate")
    assert not found.trains
    assert found.iterations == found.recording.iterations == 3
    assert {op.phase for op in found.recording.ops} == {Phase.FORWARD}
    weights = 4 * (3 * 32 * 9 + 32 + 32 * 256 * 10 + 10)
    feature_map = 4 * 40 * 32 * 16 * 16
    assert found.recording.peak_requested_bytes == pytest.approx(weights + 2 * feature_map + 4 * 40 * 3 * 256, rel=0.01)
    assert capfd.readouterr().out == "accuracy unknown\n" * 3


def test_a_default_device_with_its_own_generator_and_recomputed_layers() -> None:
    found = run("default_device")
    assert found.iterations == 3
    weights = 2 * 6 * (256 * 256 + 256)
    assert kept(found.recording, TensorKind.PARAMETER) == weights
    assert kept(found.recording, TensorKind.OPTIMIZER_STATE) == pytest.approx(weights, rel=0.01)
    assert torch.get_default_device() == torch.device("cpu")
    assert torch.get_default_dtype() is torch.float32


def test_the_first_of_spawned_processes_runs_here_and_data_parallel_has_one_gpu() -> None:
    found = run("spawned")
    weights = 4 * (64 * 128 + 128 + 128 * 4 + 4)
    assert found.iterations == 3
    assert kept(found.recording, TensorKind.PARAMETER) == weights


@pytest.mark.long
def test_a_transformers_model_with_a_frozen_part() -> None:
    pytest.importorskip("transformers")
    found = run("finetune")
    assert found.iterations == 3
    weights, state = (kept(found.recording, kind) for kind in (TensorKind.PARAMETER, TensorKind.OPTIMIZER_STATE))
    embeddings = 4 * 64 * (500 + 512 + 2 + 2)
    assert state == 2 * (weights - embeddings)


# --- How it is run ----------------------------------------------------------------------------------------------------


def test_it_runs_as_main_with_its_arguments_and_its_folder_first(
    write: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    write("NAME = 'beside'", "deep/beside.py")
    script = write(
        "import json, os, sys\nimport beside\n"
        "print(json.dumps([__name__, __file__, sys.argv, sys.path[0], beside.NAME, os.getcwd(), sys.modules['__main__'].__name__]))\n"
        + TRAINING,
        "deep/train.py",
    )
    record_script(script, ["--lr", "1"])
    here = str(Path.cwd())
    assert json.loads(capfd.readouterr().out) == [
        "__main__", f"{here}/deep/train.py", ["deep/train.py", "--lr", "1"], f"{here}/deep", "beside", here, "__main__",
    ]  # fmt: skip
    assert "beside" not in sys.modules


def test_a_module_is_run_as_python_m_does(write: Callable[..., str]) -> None:
    write("", "package/__init__.py")
    write("WIDTH = 64", "package/sizes.py")
    write("from .sizes import WIDTH\nassert __name__ == '__main__'\n" + TRAINING, "package/train.py")
    assert record_script("package.train").iterations == 3
    assert not [name for name in sys.modules if name.split(".")[0] == "package"]


def test_a_folder_with_a_main_is_run(write: Callable[..., str]) -> None:
    write(TRAINING, "job/__main__.py")
    assert record_script("job").iterations == 3


@pytest.mark.parametrize("named", rest_long(["train.py", "train"], ["train"]))
def test_each_op_has_its_line_of_the_script_and_none_of_what_runs_it(write: Callable[..., str], named: str) -> None:
    write(TRAINING)
    recording = record_script(named).recording
    lines = TRAINING.splitlines()
    said = {
        phase: {
            (recording.source(op.frame), len(recording.stack(op.frame))) for op in recording.ops if op.phase is phase
        }
        for phase in Phase
    }
    of = {text: number for number, text in enumerate(lines, 1)}
    loss, backward = of["    loss = model(x).square().mean()"], of["    loss.backward()"]
    assert (f"train.py:{loss} <module>", 1) in said[Phase.FORWARD]
    assert said[Phase.BACKWARD] == {(f"backward of train.py:{loss} <module>", 1), (f"train.py:{backward} <module>", 1)}
    assert said[Phase.UPDATE] == {(f"train.py:{of['    optimizer.step()']} <module>", 1)}
    assert {frame.file for frame in recording.frames} == {"train.py"}


def test_the_peak_of_a_few_iterations_is_that_of_many(write: Callable[..., str]) -> None:
    peaks = {record_script(write(TRAINING), iterations=n).recording.peak_requested_bytes for n in (2, 3, 8)}
    assert len(peaks) == 1
    with pytest.raises(RequestError, match="iterations=0"):
        record_script("train.py", iterations=0)


def test_a_script_changes_nothing_in_the_process_that_asks(write: Callable[..., str]) -> None:
    change = (
        "import os, sys, torch\nos.environ['WORLD'] = '1'; sys.path.append('x'); sys.modules['json'] = None\n"
        "os.chdir('/'); torch.set_default_dtype(torch.float64); torch.manual_seed(3); torch.set_num_threads(2)\n"
    )

    def state() -> list[object]:
        return [
            list(sys.argv), list(sys.path), Path.cwd(), dict(os.environ), set(sys.modules), sys.modules["__main__"],
            sys.modules["json"], torch.get_default_dtype(), torch.get_rng_state().tolist(), torch.get_num_threads(),
            torch.cuda.is_available, torch.save, torch.utils.data.DataLoader.__init__, torch.Tensor.to,
        ]  # fmt: skip

    before = state()
    record_script(write(change + TRAINING))
    assert state() == before
    with pytest.raises(KeyboardInterrupt):
        record_script(write(change + "raise KeyboardInterrupt"))
    assert state() == before


def test_a_deep_copy_belongs_to_the_same_mode_as_its_original() -> None:
    with VirtualGpu():
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).cuda()
        model[0].weight.grad = torch.ones(4, 4, device="cuda")
        copied = copy.deepcopy(model)
        for mine, theirs in zip(copied.state_dict().values(), model.state_dict().values(), strict=True):
            assert mine.fake_mode is theirs.fake_mode
            assert mine.is_cuda
        assert isinstance(copied[0].weight, nn.Parameter)
        assert copied[0].weight.requires_grad
        assert copied[0].weight.grad is None


def test_a_process_of_torchrun_is_one_of_its_group(write: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    plain = record_script(write(TRAINING))
    wrapped = (
        "import os\nimport torch.distributed as dist\ndist.init_process_group('nccl')\n"
        + TRAINING.replace(
            "optimizer =", "model = nn.parallel.DistributedDataParallel(model, device_ids=[int(os.environ['LOCAL_RANK'])])\noptimizer ="
        )
    )  # fmt: skip
    found = record_script(write(wrapped))
    assert found.iterations == 3
    assert found.recording.peak_requested_bytes > plain.recording.peak_requested_bytes
    assert not torch.distributed.is_initialized()


@pytest.mark.long
def test_what_it_prints_can_go_to_standard_error_also_that_of_children(write: Callable[..., str]) -> None:
    write("import os\nprint('said')\nos.system('echo child')\n" + TRAINING)
    program = (
        "from overspill.estimation.script import record_script\n"
        "record_script('train.py', output_to_stderr=True)\nprint('{}')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "{}\n"
    assert "said" in done.stderr
    assert "child" in done.stderr


def test_it_is_ended_even_where_everything_is_caught(write: Callable[..., str]) -> None:
    for rest in (
        "except:\n    pass\nmodel(x)\n",
        "except BaseException:\n    raise SystemExit(1)\n",
        "finally:\n    1 / 0\n",
    ):
        found = record_script(write(f"{MODEL}try:\n{INSIDE}{rest}"))
        assert (found.iterations, found.steps, found.finished) == (3, 3, False)


def test_saved_values_of_the_host_are_saved(write: Callable[..., str]) -> None:
    script = "import torch\ntorch.save({'split': torch.arange(3)}, 'split.pt')\n" + TRAINING
    record_script(write(script), allow_writes=True)
    assert torch.load("split.pt")["split"].tolist() == [0, 1, 2]


def test_memory_that_grows_from_call_to_call_is_followed_to_its_end(write: Callable[..., str]) -> None:
    found = record_script(
        write(
            "import torch\nmodel = torch.nn.Linear(8, 256).cuda()\noutputs = []\n"
            "with torch.no_grad():\n    for _ in range(30):\n        outputs.append(model(torch.randn(64, 8, device='cuda')))\n"
        )
    )
    assert found.iterations == 30
    assert found.finished
    assert found.recording.peak_requested_bytes > 30 * 64 * 256 * 4
    assert "grew" in found.notes[0]


def test_a_script_that_trains_within_a_budget_is_estimated_without(write: Callable[..., str]) -> None:
    compiled = 'import overspill\nmodel = overspill.compile(model, budget="60%")\n'
    found, plain = (record_script(write(MODEL + line + LOOP)) for line in (compiled, ""))
    assert found.recording.peak_requested_bytes == plain.recording.peak_requested_bytes
    assert "plain PyTorch" in found.notes[0]
    assert not plain.notes
    with pytest.raises(OverspillError, match="train_step"):
        record_script(write(MODEL + 'import overspill\noverspill.train_step(model, None, optimizer, budget="1GiB")\n'))


def test_an_optimizer_that_never_steps_is_not_waited_for_forever(write: Callable[..., str]) -> None:
    found = record_script(write(MODEL + "spare = torch.optim.Adam(model.parameters())\nfor step in range(500):" + STEP))
    assert found.steps < 30
    assert "Adam took no step while SGD took many" in found.notes[0]


CHECKS = """
    import math
    assert torch.isfinite(loss) and not torch.isnan(loss) and not torch.isinf(loss).item()
    assert not torch.isnan(x).any() and torch.isfinite(model[0].weight.grad).all()
    assert (~torch.isnan(x)).all(dim=1).all() and torch.isnan(x).sum() == 0
    assert loss == loss and not (loss != loss) and math.isfinite(loss.item())
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
"""
ENDLESS = """
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
data = TensorDataset(torch.randn(100, 64))
sampler = RandomSampler(data, replacement=True, num_samples=int(1e10))
loader = DataLoader(data, 32, sampler=sampler, num_workers=4, persistent_workers=True, prefetch_factor=2)
"""
TRAINS: dict[str, str] = {
    "checks for numbers that are none find none": (
        f"{MODEL}torch.autograd.set_detect_anomaly(True)\n{LOOP}{CHECKS}"
    ),
    "a sampler without an end is asked for what is taken alone": f"{MODEL}{ENDLESS}for (x,) in loader:{STEP}",
    "profilers see nothing": (
        "from torch.profiler import ProfilerActivity, profile, record_function, schedule\n" + MODEL
        + "x = torch.ones(2, 64, device='cuda')\ntraced = torch.jit.trace(model, x)\n"
        + "assert not [*traced.graph.nodes()] and torch.jit.trace(traced, ())(x).is_cuda\n"
        + "with profile(activities=[ProfilerActivity.CUDA], schedule=schedule(wait=1, warmup=1, active=1)) as prof:\n"
        + INSIDE + "        prof.step()\nprint(prof.key_averages().table(sort_by='x'))\n"
    ),
    "safetensors has no weight that has no value": (
        "from safetensors.torch import load, save\n" + MODEL
        + "rows = torch.ones(3)\nassert load(save({**model.bfloat16().state_dict(), 'rows': rows})).keys() == {'rows'}\nmodel.float()\n"
        + LOOP
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINS)
def test_a_script_that_does_more_than_train_is_followed(write: Callable[..., str], name: str) -> None:
    if "safetensors" in name:
        pytest.importorskip("safetensors")
    assert record_script(write(TRAINS[name]), time_limit=300).iterations == 3
