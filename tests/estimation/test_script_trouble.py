"""What is wrong with a script is one line that names the place."""

from collections.abc import Callable

import pytest
from tests.estimation.small_script import MODEL, STEP

from overspill.core.errors import RequestError, UnsupportedError
from overspill.estimation.script import record_script

LOOP = "for step in range(20):" + STEP

TRAINING = MODEL + LOOP
pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f():\n    raise ValueError('no\\n data')\nf()", r"^train\.py:2 .*: no data$"),
        ("raise ValueError", r"^train\.py:1 raised ValueError$"),
        ("import torch\ntorch.zeros(2) @ torch.zeros(3)", r"^train\.py:2 raised RuntimeError: "),
        ("def f(:\n    pass", r"^train\.py:1 .*valid Python"),
        ("import there_is_no_such_module", r"^train\.py:1 .*'there_is"),
        ("import sys\nsys.exit(3)", r"^train\.py:2 .*code 3"),
        ("raise SystemExit('no data')", r"^train\.py:1 .*message: no"),
        ("import sys\nsys.exit(0)", r"^train\.py .*using cuda"),
        ("print('done')", "without using cuda"),
        (TRAINING.replace(".cuda()", ""), r"^train\.py trains on"),
        ("import torch\ntorch.nn.Linear(2, 2)(torch.ones(1, 2))", r"^train\.py runs its"),
        ("import torch\nx = torch.ones(1 << 18).cuda()", r"1\.0 MiB there"),
    ],
)  # fmt: skip
def test_a_script_that_fails_is_one_line_that_names_the_place(
    write: Callable[..., str], text: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as found:
        record_script(write(text))
    assert "\n" not in str(found.value)


def test_an_error_says_which_values_were_invented_and_nothing_else_is_logged(
    write: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    text = "    n = model(x).argmax(1).max().item()\n    x.new_empty(1, n, 4) @ x.new_empty(1, 5, 1)\n"
    with pytest.raises(RequestError, match=r"^train\.py:13 .*; values .*train\.py:13$"):
        record_script(write(TRAINING + text))
    assert capfd.readouterr().err == ""


def test_what_is_no_script_is_said(write: Callable[..., str]) -> None:
    for name, message in (
        ("none.py", r"script none\.py"), (".", "directory, .*__main__.py"), ("no.such.module", "nor a module"),
        (write("{}", "book.ipynb"), "is a notebook"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=message):
            record_script(name)


def test_a_shape_that_no_rule_gives_names_the_line(write: Callable[..., str]) -> None:
    decision, line = "torch.bincount(model(x).argmax(1))", r"bincount\(model"
    with pytest.raises(UnsupportedError, match=line):
        record_script(write(TRAINING + "    " + decision + "\n"))
    inside = "".join(f"    {text}\n" for text in (TRAINING + "    " + decision).splitlines())
    with pytest.raises(UnsupportedError, match=line):
        record_script(write(f"try:\n{inside}except Exception as e:\n    raise SystemExit(1)\n"))


def test_the_gpu_in_another_thread_is_refused(write: Callable[..., str]) -> None:
    with pytest.raises(UnsupportedError, match="thread"):
        record_script(
            write(
                "import threading, torch\nout = []\nt = threading.Thread(target=lambda: out.append(torch.ones(3).cuda()))\n"
                "t.start(); t.join(); out.pop()\n"
            )
        )


@pytest.mark.long
def test_what_a_thread_may_not_do_ends_the_script_that_waits_for_it(write: Callable[..., str]) -> None:
    script = (
        "import queue, threading, torch\nq = queue.Queue()\n"
        "threading.Thread(target=lambda: q.put(torch.ones(3).cuda()), daemon=True).start()\nq.get()\n"
    )
    with pytest.raises(UnsupportedError, match=r"train\.py:3, .* thread"):
        record_script(write(script), time_limit=20)


GRAPHED = (
    "import torch\nfrom torch import nn\nmodel = nn.Linear(512, 512).cuda()\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nbatch = torch.ones(2048, 512, device='cuda')\n"
    "def step():\n    optimizer.zero_grad()\n    model(batch).relu().sum().backward()\n    optimizer.step()\n"
    "step()\ngraph = torch.cuda.CUDAGraph()\n"
    "with torch.cuda.graph(graph):\n    step()\n"
    "graph.replay()\nstep()\n"
)


def test_what_a_graph_of_cuda_captures_lies_apart(write: Callable[..., str]) -> None:
    captured, eager = (
        record_script(write(text)).recording
        for text in (GRAPHED, GRAPHED.replace("with torch.cuda.graph(graph)", "if True"))
    )
    assert not any(allocation.stream for allocation in eager.allocations)
    apart = [allocation for allocation in captured.allocations if allocation.stream]
    assert sum(allocation.nbytes for allocation in apart) > 2048 * 512 * 4
