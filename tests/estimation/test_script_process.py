"""What becomes of a script's files, processes and time: nothing stays, and every end is an answer or one line."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from overspill.core.errors import OverspillError, RequestError, UnsupportedError
from overspill.estimation import script as scripts
from overspill.estimation.script import ScriptRun, record_script
from overspill.estimation.script_process import client
from overspill.estimation.script_process.confine import WAYS
from overspill.estimation.script_process.places import whereabouts

MODEL = """
import contextlib, os, pathlib, shutil, signal, subprocess, sys, tempfile, threading, time
import torch
model = torch.nn.Linear(64, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    loss = model(torch.randn(32, 64).cuda()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
TRAIN = "for _ in range(20): step()\n"
CHANGES = """
shutil.rmtree("runs")
os.makedirs("runs/new/deep")
pathlib.Path("runs/new/log.txt").write_text("loss")
with open("kept.txt", "a") as file: file.write(" and more")
with open("kept.txt", "r+") as file: file.write("READ")
os.replace("kept.txt", "moved.txt")
torch.save({"step": torch.ones(3)}, "checkpoint.pt")
os.symlink("moved.txt", "link.txt")
os.system("echo said > said.txt")
pathlib.Path("said.txt").chmod(0o600)
os.utime("data.txt", (1, 1))
"""
READS_BACK = """
assert sorted(os.listdir("runs")) == ["new"] and os.listdir("runs/new/deep") == []
assert not os.path.exists("kept.txt") and open("link.txt").read() == "READ and more"
assert torch.load("checkpoint.pt")["step"].tolist() == [1, 1, 1] and open("said.txt").read() == "said\\n"
"""
REFUSED = r"^train\.py:\d+ .*\(.+\).*; --allow-writes"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with things to lose."""
    monkeypatch.chdir(tmp_path)
    Path("runs/old").mkdir(parents=True)
    for name, content in {
        "runs/old/log.txt": "1",
        "kept.txt": "read",
        "checkpoint.pt": "best",
        "data.txt": "x",
    }.items():
        Path(name).write_text(content)


def run(text: str, **options: object) -> ScriptRun:
    Path("train.py").write_text(MODEL + text)
    return record_script("train.py", **options)  # type: ignore[arg-type]


def disk() -> dict[str, object]:
    """All that is in the directory but the script."""
    return {
        str(path): (path.is_dir() or path.read_bytes(), path.lstat().st_mtime_ns, path.lstat().st_mode)
        for path in Path().rglob("*")
        if path.name != "train.py"
    }


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def only(way: str) -> None:
        monkeypatch.setattr(scripts, "WAYS", (way,))
        try:
            run(TRAIN)
        except PermissionError as error:
            pytest.skip(f"this system does not allow {way}: {error}")

    return only


# --- Files ------------------------------------------------------------------------------------------------------------


def test_a_script_changes_no_real_files_whatever_the_system_has() -> None:
    before = disk()
    with contextlib.suppress(UnsupportedError):
        run(CHANGES + TRAIN)
    assert disk() == before


def test_in_an_overlay_it_reads_what_it_wrote(only: Callable[[str], None]) -> None:
    only("overlay")
    before = disk()
    assert run(CHANGES + READS_BACK + TRAIN).iterations == 3
    assert disk() == before


@pytest.mark.long
def test_the_scratch_directory_goes_with_the_script(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    program = (
        "from overspill.estimation.script import record_script\nassert record_script('train.py').iterations == 3\n"
    )
    Path("train.py").write_text(MODEL + "with contextlib.suppress(OSError): shutil.rmtree('runs')\n" + TRAIN)
    environment = os.environ | {"TMPDIR": str(tmp_path / "temporary")}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    assert list((tmp_path / "temporary").glob("overspill*")) == []


@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize(
    "change",
    [
        "shutil.rmtree('runs')", "open('kept.txt', 'a')", "open('new.txt', 'w')", "os.makedirs('runs/new')",
        "os.rename('kept.txt', 'moved.txt')", "os.symlink('kept.txt', 'link')", "os.chmod('kept.txt', 0)",
        "os.utime('data.txt', (1, 1))", "os.truncate('data.txt', 0)", "pathlib.Path('data.txt').unlink()",
    ],
)  # fmt: skip
def test_otherwise_a_change_is_refused_in_one_line(only: Callable[[str], None], way: str, change: str) -> None:
    only(way)
    before = disk()
    with pytest.raises(UnsupportedError, match=REFUSED):
        run(change + "\n" + TRAIN)
    assert disk() == before


def test_what_other_programs_and_c_code_would_change_is_refused_too(only: Callable[[str], None]) -> None:
    before = disk()
    for way in ("audit", "landlock"):
        only(way)
        with contextlib.suppress(OverspillError):
            run("torch.save({'step': torch.ones(3)}, 'checkpoint.pt')\n" + TRAIN)
        with contextlib.suppress(OverspillError):
            run("os.system('rm data.txt')\n" + TRAIN)
    assert disk() == before


@pytest.mark.parametrize("way", WAYS)
def test_temporary_files_and_devices_can_be_written_everywhere(only: Callable[[str], None], way: str) -> None:
    only(way)
    temporary = (
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    pathlib.Path(folder, 'part').mkdir()\n    pathlib.Path(folder, 'part', 'x').write_text('1')\n"
        "with tempfile.NamedTemporaryFile('w') as file: file.write('1')\n"
        "open('/dev/null', 'w').write('1')\n"
        "import socket; one, other = socket.socketpair(); one.send(b'1')\n"
        "try: open('cache', 'w')\nexcept OSError: pass\n"
    )
    assert run(temporary + TRAIN).iterations == 3
    assert not Path("cache").exists()


def test_it_may_change_files_where_that_is_allowed() -> None:
    run(CHANGES + READS_BACK + TRAIN, allow_writes=True)
    assert Path("runs/new/log.txt").read_text() == "loss"
    assert Path("said.txt").read_text() == "said\n"
    assert not Path("kept.txt").exists()


# --- Ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("step(); step(); os._exit(0)", (2, True)),
        ("os.fork()\n" + TRAIN, (3, False)),
        ("if os.fork() == 0: step(); sys.exit(3)\n" + TRAIN, (3, False)),
        ("if os.fork() == 0: os._exit(3)\nos.wait()\n" + TRAIN, (3, False)),
        ("threading.Thread(target=time.sleep, args=(1000,)).start()\nstep()", (1, True)),
        ("while True:\n    try: step()\n    except BaseException: pass", (3, False)),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + TRAIN, (3, False)),
        (TRAIN + "os._exit(9)", (3, False)),
        (
            "import torch.utils.data as data\nfor _ in data.DataLoader(range(64), num_workers=2, persistent_workers=True): step()",
            (3, False),
        ),
        (
            "import multiprocessing\nassert multiprocessing.get_context('fork').Pool(2).map(abs, [-1]) == [1]\n" + TRAIN,
            (3, False),
        ),
    ],
)  # fmt: skip
def test_it_ends_with_an_answer(text: str, found: tuple[int, bool]) -> None:
    started = time.monotonic()
    recorded = run(text, time_limit=300)
    assert (recorded.iterations, recorded.finished) == found
    assert time.monotonic() - started < 200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("os._exit(0)", r"^train\.py .*training step"),
        ("\nos._exit(7)", r"^train\.py:12 .*code 7"),
        ("os.kill(os.getpid(), signal.SIGTERM)", r"^train\.py .*SIGTERM"),
        ("import ctypes; ctypes.string_at(0)", r"^train\.py .*SIGSEGV"),
        (
            "os.execv(sys.executable, [sys.executable, '-c', ''])",
            r"^train\.py .*another program",
        ),
    ],
)  # fmt: skip
def test_it_ends_with_one_line(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        run(text)


@pytest.mark.long
def test_when_its_time_is_over_it_says_where_it_was() -> None:
    where = r"^train\.py:12 .*after 1"
    with pytest.raises(RequestError, match=where):
        run("while True:\n    time.sleep(0.01)", time_limit=1)
    found = run("step()\nwhile True: pass", time_limit=3)
    assert (found.iterations, found.finished) == (1, False)
    assert found.notes == ("the script was ended after 3 seconds (--time-limit), after 1 of 3 iterations",)


@pytest.mark.long
def test_c_code_that_keeps_python_waiting_is_ended_too() -> None:
    with pytest.raises(RequestError, match=r"^train\.py:11 \(`sum.*Python"):
        run("sum(iter(int, 1))", time_limit=1)


@pytest.mark.long
def test_where_it_takes_long_it_is_said_what_is_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    with pytest.raises(RequestError, match="after 21 seconds"):
        run("print('50%', end='', flush=True)\nsubprocess.run(['sleep', '100'])", time_limit=21, tell=said.append)
    place = "train.py:12 (`subprocess.run(['sleep', '100'])`, which waits for a program that it started)"
    assert said == [f"after 20 seconds the script is still at {place}"]
    assert capfd.readouterr().out == "50%\n"


def test_what_a_script_waits_for_is_told_by_the_library_that_it_calls(tmp_path: Path) -> None:
    script, library = tmp_path / "train.py", "/env/lib/python3.11/site-packages/downloads/get.py"
    script.write_text("import downloads\ndata = downloads.get()\n")
    lines = [(socket.__file__, 706), (library, 12), (str(script), 2), (runpy.__file__, 1)]
    place = "train.py:2 (`data = downloads.get()`, which waits for the network)"
    assert whereabouts(lines, "train.py", str(tmp_path)) == place
    assert whereabouts(lines[1:], "train.py", str(tmp_path)) == "train.py:2 (`data = downloads.get()`)"
    assert whereabouts(lines[:2], "train.py") == "train.py"


def test_a_line_that_the_script_leaves_open_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RequestError, match="raised ValueError"):
        run("print('5%\\r50%', end='')\nprint('log', file=sys.stderr)\nraise ValueError")
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("5%\r50%\n", "log\n")


@pytest.mark.long
def test_a_script_that_goes_on_after_it_has_shown_enough_is_ended() -> None:
    assert run("try:\n    for _ in range(20): step()\nfinally:\n    while True: pass").iterations == 3


def test_a_time_limit_is_a_positive_number() -> None:
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(RequestError, match="positive number"):
            record_script("train.py", time_limit=wrong)


@pytest.mark.long
def test_whoever_interrupts_an_estimate_ends_all_of_it() -> None:
    marker = f"overspill-test-{os.getpid()}"
    Path("train.py").write_text(
        MODEL + f"subprocess.Popen(['sh', '-c', 'sleep 1000; : {marker}'], start_new_session=True)\n"
        "print('ready', flush=True)\nwhile True: time.sleep(1)\n"
    )
    # What starts the tests may ignore Ctrl-C, and its children would too.
    command = [
        "env",
        "--default-signal=INT",
        sys.executable,
        "-m",
        "overspill",
        "estimate",
        "--script",
        "train.py",
        "--json",
    ]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)
        assert process.stderr is not None
        while process.stderr.readline() != "ready\n":
            assert process.poll() is None
        while not _with(marker):  # between two programs a process has no arguments
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert json.loads(out) == {"error": "interrupted", "exit_code": 130}
    assert err.endswith("error: interrupted\n")
    assert _with(marker) == []


def _with(marker: str) -> list[str]:
    """The processes that have `marker` among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if arguments[0] == b"sh" and marker.encode() in arguments[-2]:
            found.append(path.parent.name)
    return found


@pytest.mark.long
def test_the_next_script_runs_also_after_its_server_was_killed() -> None:
    run(TRAIN)
    assert client._server is not None
    client._server._process.kill()
    with pytest.raises(OverspillError, match="ended unexpectedly"):
        run(TRAIN)
    assert run(TRAIN).iterations == 3


@pytest.mark.long
def test_the_command_takes_both_options_and_prints_one_object() -> None:
    Path("train.py").write_text(
        MODEL + "print('{}')\npathlib.Path('written').touch()\nos.fork()\nstep()\nwhile True: pass\n"
    )
    done = estimate("--json", "--time-limit", "3", "--allow-writes")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["iterations"] == 1
    assert "after 3 seconds" in answer["notes"][0]
    assert Path("written").exists()


@pytest.mark.long
def test_a_script_that_asks_where_nobody_answers_is_one_line() -> None:
    Path("train.py").write_text(MODEL + "input('overwrite? ')\n")
    done = estimate()
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "error: train.py:11 raised EOFError: EOF when reading a line"


def estimate(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "overspill", "estimate", *options, "--script", "train.py"]
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
