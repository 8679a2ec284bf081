"""The campaign loses nothing: it goes on where it stopped, keeps deadlines, and an experiment that fails fails alone."""

import ast
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

import overspill

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"

# Experiments of a fraction of a second; none of them needs torch.
FAKES = """
import os, sys, time
from gpu.experiment import Experiment, Topic

TOPIC = Topic(0, "Fakes", "does it work?", "nothing")

def good(setting, value=1):
    return {"value": value, "device": setting.device, "small": setting.small}

def bad(setting):
    setting.note(half=1)
    raise RuntimeError("as planned")

def killed(setting):
    setting.note(half=2)
    print("its last words", flush=True)
    os._exit(7)

def slow(setting):
    setting.note(half=3)
    time.sleep(60)

def reads(setting):
    return {"twice": 2 * setting.figures_of("good")["value"]}

def unwritable(setting):
    return {"value": object()}

def environment(setting):
    return {"word": os.environ["CAMPAIGN_WORD"]}

EXPERIMENTS = {e.name: e for e in (
    Experiment("reads-too-soon", TOPIC, "fakes:reads", needs=("good",), seconds=1, on_cpu=True),
    Experiment("good", TOPIC, "fakes:good", {"value": 21}, seconds=1, on_cpu=True),
    Experiment("bad", TOPIC, "fakes:bad", seconds=1, on_cpu=True),
    Experiment("killed", TOPIC, "fakes:killed", seconds=1, on_cpu=True),
    Experiment("reads", TOPIC, "fakes:reads", needs=("good",), seconds=1, on_cpu=True),
    Experiment("unwritable", TOPIC, "fakes:unwritable", seconds=1, on_cpu=True),
    Experiment("environment", TOPIC, "fakes:environment", seconds=1, environment={"CAMPAIGN_WORD": "here"}, on_cpu=True),
    Experiment("slow", TOPIC, "fakes:slow", seconds=1, on_cpu=True),
    Experiment("cuda-only", TOPIC, "fakes:good", seconds=1),
)}
"""


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """bench/gpu, and a module `fakes` that its children can import too."""
    (tmp_path / "fakes.py").write_text(FAKES)
    monkeypatch.syspath_prepend(BENCH)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in [n for n in sys.modules if n == "fakes" or n.split(".")[0] == "gpu"]:
        monkeypatch.delitem(sys.modules, name)
    importlib.import_module("gpu.campaign")
    return importlib.import_module("gpu")


MACHINE = {"device": {"kind": "cpu"}, "versions": {"torch": "0"}}


def campaign(gpu: ModuleType, out: Path, *only: str, **more):
    fakes = importlib.import_module("fakes").EXPERIMENTS
    settings = {"device": "cpu", "machine": MACHINE} | more
    return gpu.campaign.Campaign("fakes", fakes, out, only=only, **settings)


def run(gpu: ModuleType, out: Path, *only: str, **more) -> dict[str, object]:
    return {line.experiment: line for line in campaign(gpu, out, *only, **more).run(lambda _: None)}


def test_every_experiment_has_its_line_however_it_ends(gpu: ModuleType, tmp_path: Path) -> None:
    names = ("good", "bad", "killed", "reads", "unwritable", "environment")
    found = run(gpu, tmp_path / "out", *names, small=True)
    assert {name: line.status for name, line in found.items()} == {
        "good": "ok", "bad": "failed", "killed": "failed", "reads": "ok", "unwritable": "failed",
        "environment": "ok",
    }  # fmt: skip
    assert found["good"].figures == {"value": 21, "device": "cpu", "small": True}
    assert found["reads"].figures == {"twice": 42}
    assert found["environment"].figures == {"word": "here"}
    assert "RuntimeError: as planned" in found["bad"].error
    assert found["bad"].figures == {"half": 1}
    assert "ended with 7" in found["killed"].error
    assert "its last words" in found["killed"].error
    assert found["killed"].figures == {"half": 2}
    assert "not JSON serializable" in found["unwritable"].error


def test_a_line_is_complete_by_itself(gpu: ModuleType, tmp_path: Path) -> None:
    run(gpu, tmp_path / "out", "good")
    (text,) = (tmp_path / "out").read_text().splitlines()
    line = json.loads(text)
    assert set(line) == {
        "experiment", "status", "seconds", "figures", "error", "device", "versions", "command", "date",
    }  # fmt: skip
    assert (line["device"], line["versions"]) == (MACHINE["device"], MACHINE["versions"])
    assert line["seconds"] > 0
    assert line["command"].startswith("python ")


def test_it_goes_on_where_it_stopped(gpu: ModuleType, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert list(run(gpu, first, "good", "bad")) == ["good", "bad"]
    assert list(run(gpu, first, "good", "bad", "killed")) == ["killed"]
    # Lines of another file count too, and their figures can be read.
    assert list(run(gpu, second, "good", "bad", "reads", done=(first,))) == ["reads"]
    assert list(run(gpu, second, "good", "bad", done=(first,), retry=True)) == ["bad"]


def test_what_waits_for_another_is_run_again(gpu: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = run(gpu, out, "reads-too-soon", "good")
    assert found["reads-too-soon"].status == "waiting"
    assert run(gpu, out, "reads-too-soon")["reads-too-soon"].status == "ok"


def test_an_experiment_is_stopped_after_its_limit_and_keeps_what_it_had(gpu: ModuleType, tmp_path: Path) -> None:
    found = run(gpu, tmp_path / "out", "slow", "good", patience=1 / 90)
    assert (found["slow"].status, found["slow"].figures) == ("timeout", {"half": 3})
    assert found["slow"].seconds < 10
    assert found["good"].status == "ok"


def test_nothing_is_started_that_does_not_fit(gpu: ModuleType, tmp_path: Path) -> None:
    said: list[str] = []
    job = campaign(gpu, tmp_path / "out", "good", "killed", deadline_seconds=0.9)
    assert job.run(said.append) == []
    assert said == ["good: not started, 1 s are left", "killed: not started, 1 s are left"]
    assert len(job.left()) == 2


def test_what_the_deadline_stops_is_run_again(gpu: ModuleType, tmp_path: Path) -> None:
    found = run(gpu, tmp_path / "out", "slow", deadline_seconds=1.5)
    assert {name: line.status for name, line in found.items()} == {"slow": "cut"}
    assert [e.name for e in campaign(gpu, tmp_path / "out", "slow").left()] == ["slow"]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("Traceback\n  File: x\na.B: it broke\n\nSet THIS=1 for more\n", "a.B: it broke"),
        ("the campaign's deadline came", "the campaign's deadline came"),
        ("", ""),
    ],
)
def test_the_reason_is_the_line_that_names_the_error(gpu: ModuleType, error: str, told: str) -> None:
    assert gpu.lines.reason(error) == told


def test_a_half_line_of_a_killed_campaign_is_no_line_and_does_no_harm(gpu: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(gpu, out, "good")
    with out.open("a") as file:
        file.write('{"experiment": "ba')
    assert [line.experiment for line in gpu.lines.read([out])] == ["good"]
    run(gpu, out, "killed")
    assert [line.experiment for line in gpu.lines.read([out])] == ["good", "killed"]


def test_a_file_that_is_something_else_is_refused_with_its_place(gpu: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("{}\n")
    with pytest.raises(ValueError, match="out:1"):
        gpu.lines.read([tmp_path / "out"])


def test_without_a_gpu_only_what_means_something_there_is_run(gpu: ModuleType, tmp_path: Path) -> None:
    assert "cuda-only" not in [e.name for e in campaign(gpu, tmp_path / "out").left()]
    assert "cuda-only" in [e.name for e in campaign(gpu, tmp_path / "out", device="cuda").left()]


def test_a_signal_ends_the_campaign_and_what_it_has_started(gpu: ModuleType, tmp_path: Path) -> None:
    code = (
        "from gpu.campaign import Campaign; from fakes import EXPERIMENTS; from pathlib import Path; "
        f"Campaign('fakes', EXPERIMENTS, Path('out'), 'cpu', only=('slow',), machine={MACHINE!r}).run(print)"
    )
    path = os.pathsep.join([str(BENCH), str(tmp_path)])
    started = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path})
    deadline = time.monotonic() + 120
    while not list_of_children(started.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    (child,) = list_of_children(started.pid)
    started.send_signal(signal.SIGTERM)
    assert started.wait(120) == 0
    (line,) = gpu.lines.read([tmp_path / "out"])
    assert (line.experiment, line.status) == ("slow", "cut")
    assert not Path(f"/proc/{child}").exists()


def list_of_children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# -- the catalogue and the command


def command(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCH / "gpu_campaign.py"), *words], cwd=cwd, capture_output=True, text=True, check=False
    )


def test_the_list_has_every_experiment_with_its_seconds_and_every_topic_with_what_it_decides(
    gpu: ModuleType, tmp_path: Path
) -> None:
    catalogue = importlib.import_module("gpu.catalogue")
    said = command("--list", "--out", str(tmp_path / "out"))
    assert said.returncode == 0, said.stderr
    for experiment in catalogue.EXPERIMENTS.values():
        assert f"{experiment.seconds:.0f} s  {experiment.name}\n" in said.stdout
        assert f"  decides: {experiment.topic.decides}\n" in said.stdout
    assert sorted(catalogue.TOPICS) == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 12, 13]


def test_the_page_has_every_topic_as_it_is(gpu: ModuleType) -> None:
    page = (ROOT / "bench" / "gpu_campaign.md").read_text(encoding="utf-8")
    for number, topic in importlib.import_module("gpu.catalogue").TOPICS.items():
        assert f"| {number} {topic.title} | {topic.question} | {topic.decides} |\n" in page


def test_every_experiment_names_a_function_and_needs_only_earlier_ones(gpu: ModuleType) -> None:
    before: set[str] = set()
    for experiment in importlib.import_module("gpu.catalogue").EXPERIMENTS.values():
        module, _, name = experiment.function.partition(":")
        text = (BENCH / f"{module.replace('.', '/')}.py").read_text()
        assert name in [n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)], experiment
        assert before.issuperset(experiment.needs), experiment
        before.add(experiment.name)


def test_the_driver_imports_no_torch(gpu: ModuleType) -> None:
    code = "import sys; import gpu.campaign, gpu.catalogue; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=BENCH, check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--only", "no-such"), "no experiment is called no-such; --list names them"),
        (("--done", "nowhere.jsonl"), "there is no file nowhere.jsonl"),
    ],
)
def test_a_wrong_request_is_one_line(words: tuple[str, ...], told: str, tmp_path: Path) -> None:
    said = command(*words, cwd=tmp_path)
    assert said.returncode == 2
    assert told in said.stderr.splitlines()[-1]


def test_the_native_modules_that_it_looks_for_are_there(gpu: ModuleType) -> None:
    named = re.findall(r"overspill\.[a-z.]+\._\w+", (BENCH / "gpu_install.sh").read_text())
    install = importlib.import_module("gpu.topics.install")
    assert {*named} <= {*install.NATIVE}
    assert install.imports(gpu.experiment.Setting("cpu"))["version"] == overspill.__version__


@pytest.mark.long
def test_the_rehearsal_on_the_cpu_runs_to_its_end(gpu: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "rehearsal.jsonl"
    said = command("--rehearse", "--out", str(out))
    known = gpu.lines.latest(gpu.lines.read([out]))
    assert {name: line.error for name, line in known.items() if line.status != "ok"} == {}, said.stdout
    catalogue = importlib.import_module("gpu.catalogue")
    assert list(known) == [e.name for e in catalogue.EXPERIMENTS.values() if e.on_cpu]
    report = subprocess.run(
        [sys.executable, str(BENCH / "gpu_report.py"), str(out)], capture_output=True, text=True, check=False
    )
    assert "A rehearsal on the CPU" in report.stdout, report.stderr
