"""How long a report takes to open and to draw a frame, in headless Chromium, and how long plotly takes for the same step.

A made-up step of 20 000 ops and 100 000 blocks: `python bench/report_page.py` takes about two minutes. It needs Chromium, its
driver and selenium; for the comparison plotly. Frames are of a zoom, one after another, drawn in software: with no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from overspill.core import Block, Layout, Trace
from overspill.placement.replay import layout_of
from overspill.report.page import Frames, Mark, Ops, Page, Run, Step, Tensors, Verdict, write_page

KINDS = ("parameter", "gradient", "activation", "temporary", "optimizer_state")
STACKS, DEPTH = 2000, 8
FRAMES = {"report": 30, "plotly": 2}
"""So few of plotly, for it takes seconds for each."""
MOST_SECONDS = 600
# Draws frame after frame, each with another window, and calls back with the milliseconds that each took.
OURS = """
const done = arguments[arguments.length - 1], area = document.querySelector('.view'), took = [];
const box = area.getBoundingClientRect();
const turn = (left) => {
  const began = performance.now();
  const x = box.left + box.width * (0.3 + 0.4 * Math.random());
  area.dispatchEvent(new WheelEvent('wheel', {deltaY: left % 2 ? -160 : 150, ctrlKey: true, clientX: x, clientY: 100, cancelable: true}));
  requestAnimationFrame(() => setTimeout(() => {
    took.push(performance.now() - began);
    if (left) turn(left - 1); else done(took);
  }));
};
turn(FRAMES);
"""
PLOTLY = """
const done = arguments[arguments.length - 1], plot = document.querySelector('.plotly-graph-div'), took = [];
const turn = (left) => {
  const began = performance.now(), from = 20000 * Math.random(), until = from + 5000 + 60000 * Math.random();
  Plotly.relayout(plot, {'xaxis.range': [from, until]}).then(() => requestAnimationFrame(() => setTimeout(() => {
    took.push(performance.now() - began);
    if (left) turn(left - 1); else done(took);
  })));
};
turn(FRAMES);
"""


def chromium() -> Any:
    """A driver of headless Chromium. Raises FileNotFoundError where it or its driver is missing."""
    from selenium import webdriver  # noqa: PLC0415 - a tool of development

    browser, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if browser is None or driver is None:
        raise FileNotFoundError("needs Chromium and its driver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))


def made_up_step(ops: int, blocks: int) -> tuple[Step, Trace, Layout]:
    """A step in which each op makes as many tensors, that live for a while: most shortly, some until backward."""
    draw = random.Random(0)
    each = blocks // ops
    found: list[Block] = []
    maker: list[int] = []
    kinds: list[str] = []
    for op in range(ops):
        for _ in range(each):
            long = draw.random() < 0.2
            end = max(op + 1, ops - op) if long else min(ops, op + 1 + int(draw.expovariate(0.1)))
            nbytes = 512 * int(draw.lognormvariate(9, 2))
            found.append(Block(len(found), op, end, nbytes, f"tensor_{len(found)}"))
            maker.append(op)
            kinds.append(draw.choice(KINDS) if not long else "activation")
    trace = Trace(tuple(found))
    layout = layout_of(trace)
    clock = np.cumsum(np.array([draw.expovariate(1e4) for _ in range(ops)]))
    layers = tuple(
        f"model.layers.{i}.{part}" for i in range(50) for part in ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
    )
    counts, nothing = np.arange(blocks + 1)[::each], np.zeros(0, np.int64)
    layer = np.arange(ops) * len(layers) // ops
    run = Run(
        name="plan", seconds=clock, positions=ops,
        start=np.array([b.start for b in found]), end=np.array([b.end for b in found]), tensor=np.arange(blocks),
        nbytes=np.array([b.nbytes for b in found]), offset=np.array(layout.offsets), streams=("compute", "offload", "prefetch"),
        verbs=("run",), stream=np.zeros(ops, np.int64), verb=np.zeros(ops, np.int64), target=np.arange(ops),
        begun=np.concatenate([[0.0], clock[:-1]]), ended=clock, event_at=np.arange(ops), placer="pytorch",
        reserved_bytes=layout.peak_bytes,
    )  # fmt: skip
    tensors = Tensors(
        name=[b.name for b in found], kind=kinds, shape=["1024x1024 float32"] * blocks,
        nbytes=run.nbytes, maker=np.array(maker), layer=layer[np.array(maker)],
    )  # fmt: skip
    names = Ops(
        [f"op_{i}" for i in range(ops)], ["forward"] * (ops // 2) + ["backward"] * (ops - ops // 2), layer,
        np.zeros(ops, np.int64), np.zeros(ops + 1, np.int64), nothing, counts, np.arange(blocks),
        np.arange(ops + 1), np.arange(ops) * STACKS // ops * DEPTH + DEPTH - 1,
    )  # fmt: skip
    marks = (Mark("budget", trace.lower_bound_bytes),)
    return Step("made up", layers, tensors, names, (run,), marks, frames=made_up_lines()), trace, layout


def made_up_lines() -> Frames:
    """The lines of as many stacks, none of which has a line of another."""
    count = STACKS * DEPTH
    number = np.arange(count)
    files = [f"a_library/models/of_{i}/modeling.py" for i in range(50)]
    return Frames(
        files, number % 50, number % 3000, ["forward"] * count, np.where(number % DEPTH, number - 1, -1), number % 2
    )


def timed(driver: Any, path: Path, frames: str, count: int, is_there: str) -> tuple[float, list[float]]:
    """Seconds until the page at `path` has been drawn, and milliseconds of each frame."""
    driver.set_script_timeout(MOST_SECONDS)
    driver.set_page_load_timeout(MOST_SECONDS)
    driver.command_executor.client_config.timeout = MOST_SECONDS
    began = time.perf_counter()
    driver.get(path.as_uri())
    while not driver.execute_script(f"return Boolean({is_there})"):
        time.sleep(0.02)
    driver.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0]))")
    opened = time.perf_counter() - began
    return opened, driver.execute_async_script(frames.replace("FRAMES", str(count)))


def report(name: str, path: Path, found: tuple[float, list[float]]) -> None:
    opened, frames = found
    median, worst = float(np.median(frames)), max(frames)
    size = path.stat().st_size / 2**20
    print(
        f"{name:<10} {size:6.1f} MiB   opens in {opened:5.2f} s   a frame takes {median:7.1f} ms, at most {worst:7.1f} ms"
    )


def draw_by_plotly(step: Step, path: Path) -> None:
    """The same in plotly: stacked memory, and the blocks as shapes of one colour each, as its fastest way to draw them."""
    from plotly import graph_objects  # noqa: PLC0415 - an optional library
    from plotly.subplots import make_subplots  # noqa: PLC0415

    run = step.runs[0]
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True)
    kinds = np.array(step.tensors.kind)
    for kind in KINDS:
        some = kinds == kind
        change = np.zeros(run.positions + 1)
        np.add.at(change, run.start[some], run.nbytes[some])
        np.add.at(change, run.end[some], -run.nbytes[some])
        figure.add_trace(
            graph_objects.Scatter(y=np.cumsum(change), stackgroup="memory", name=kind, mode="lines"), row=1, col=1
        )
        left, right, low = run.start[some], run.end[some], run.offset[some]
        high, apart = low + run.nbytes[some], np.full(some.sum(), np.nan)
        x = np.stack([left, left, right, right, left, apart], axis=1).ravel()
        y = np.stack([low, high, high, low, low, apart], axis=1).ravel()
        figure.add_trace(
            graph_objects.Scatter(x=x, y=y, fill="toself", mode="lines", line={"width": 0}, name=kind), row=2, col=1
        )
    figure.write_html(path, include_plotlyjs=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", type=int, default=20_000)
    parser.add_argument("--blocks", type=int, default=100_000)
    asked = parser.parse_args()
    step, trace, _ = made_up_step(asked.ops, asked.blocks)
    print(f"{asked.ops} ops, {len(trace.blocks)} blocks, {driver_name()}")
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder) / "ours.html", Path(folder) / "plotly.html"
        write_page(ours, Page("made up", Verdict("made up", None), (step,)))
        measure("report", ours, OURS, "document.querySelector('footer')")
        if importlib.util.find_spec("plotly") is None:
            print("plotly is not installed: pip install plotly")
            return
        draw_by_plotly(step, theirs)
        measure("plotly", theirs, PLOTLY, "document.querySelector('.main-svg .trace, .gl-canvas')")


def measure(name: str, path: Path, frames: str, is_there: str) -> None:
    driver = chromium()
    try:
        report(name, path, timed(driver, path, frames, FRAMES[name], is_there))
    finally:
        driver.quit()


def driver_name() -> str:
    driver = chromium()
    try:
        return f"Chromium {driver.capabilities['browserVersion']}, no GPU"
    finally:
        driver.quit()


if __name__ == "__main__":
    main()
