"""Draws the pictures of the docs: what the transcripts of the pages write by `--plot NAME.png` and `--report NAME.html`.

python tools/docs_pictures.py                    # all, into docs/pictures/; about two minutes
python tools/docs_pictures.py docs/tutorial.md   # those of one page
python tools/docs_pictures.py README.md          # the first picture of README.md, light and dark: the tutorial's plan

All transcripts of a page that draws are run in order, in one empty folder, as `tools/transcripts.py` runs them. Of a report
Chromium takes a picture.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image
from transcripts import ROOT, Page, read_page, run

import overspill
from overspill.report.page import Step
from overspill.report.picture import memory_over_time
from overspill.report.plan import plan_page

PICTURES = ROOT / "docs" / "pictures"
MOST_BYTES = 150_000
"""A picture in the repository is at most so large."""


INK = {"memory": "#24292f", "memory_dark": "#d1d7e0"}
"""The first picture's names, and the colour of its text: it has no background."""
GIB = 2**30
WINDOW = "1180,1330"
"""What of a report is on its picture, in pixels."""


def photographed(report: Path) -> Path:
    """A picture of the report, beside it."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit(
            f"{report.name} is to be photographed, and there is no chromium; install it, or name other pages"
        )
    picture = report.with_suffix(".png")
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000")
    subprocess.run(
        [chromium, *options, f"--window-size={WINDOW}", f"--screenshot={picture}", report.as_uri()],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    with Image.open(picture) as seen:
        seen.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(picture, optimize=True)
    return picture


def draw(page: Page) -> list[Path]:
    """The pictures that the commands of `page` drew, in docs/pictures/."""
    with tempfile.TemporaryDirectory(prefix="pictures-") as name:
        folder = Path(name)
        for file, text in page.files.items():
            (folder / file).write_text(text, encoding="utf-8")
        for transcript in page.transcripts:
            if (found := run(transcript, folder)).failure:
                raise SystemExit(f"{page.path}:{transcript.start + 1}: {found.failure}")
        for report in folder.glob("*.html"):
            photographed(report)
        return [Path(shutil.copy(picture, PICTURES / picture.name)) for picture in sorted(folder.glob("*.png"))]


def draw_first() -> list[Path]:
    """The memory of one step with and without a plan, each curve with its name, on a light and on a dark page."""
    title = "ResNet-50, 192 images a step, AdamW, on an RTX 3060: simulated"
    plan = overspill.plan("resnet50", batch=192, optimizer="adamw", device="rtx3060")
    (step,) = (section for section in plan_page(plan, title).sections if isinstance(section, Step))
    unmanaged, planned = sorted((memory_over_time(run) for run in step.runs), key=lambda run: -run[1].max())
    room = plan.device.usable_bytes
    for name, ink in INK.items():
        figure = Figure(figsize=(9, 4), layout="constrained")
        axes = figure.add_subplot()
        curves = (
            ("PyTorch", "#D55E00", 14, unmanaged),
            ("Overspill", "#0072B2" if name == "memory" else "#56B4E9", -60, planned),
        )
        for who, colour, above, (seconds, nbytes) in curves:
            axes.fill_between(seconds * 1e3, nbytes / GIB, step="post", color=colour, alpha=0.2, linewidth=0)
            axes.step(seconds * 1e3, nbytes / GIB, where="post", color=colour)
            top = nbytes.argmax()
            words = f"{who}: {nbytes[top] / GIB:.1f} GiB, {seconds[-1]:.2f} s a step"
            style: dict[str, Any] = {
                "textcoords": "offset points",
                "ha": "center",
                "va": "center",
                "color": colour,
                "weight": "bold",
            }
            axes.annotate(words, (seconds[top] * 1e3, nbytes[top] / GIB), (0, above), **style)
        axes.axhline(room / GIB, color=ink, linestyle="--", linewidth=1)
        words = f"free memory of the GPU: {room / GIB:.1f} GiB"
        axes.annotate(
            words, (seconds[-1] * 1e3, room / GIB), (-4, 5), textcoords="offset points", ha="right", color=ink
        )
        axes.set(xlim=(0, seconds[-1] * 1e3), ylim=(0, unmanaged[1].max() / GIB * 1.12))
        axes.set_title(title, color=ink)
        axes.set_xlabel("time in one training step, ms", color=ink)
        axes.set_ylabel("memory of tensors, GiB", color=ink)
        axes.tick_params(colors=ink)
        for edge, line in axes.spines.items():
            line.set(color=ink, visible=edge in {"left", "bottom"})
        figure.savefig(ROOT / "docs" / f"{name}.png", dpi=120, transparent=True)
    return [ROOT / "docs" / f"{name}.png" for name in INK]


def main(arguments: Sequence[str]) -> int:
    """The exit code: 1 where a picture is too large for the repository."""
    if arguments == ["README.md"]:
        return 1 if any(picture.stat().st_size > MOST_BYTES for picture in draw_first()) else 0
    pages = [Path(name).resolve() for name in arguments] or sorted((ROOT / "docs").rglob("*.md"))
    too_large = 0
    for page in map(read_page, pages):
        if not any(
            re.search(r"--(plot|report) ", command.shell)
            for transcript in page.transcripts
            for command in transcript.commands
        ):
            continue
        for picture in draw(page):
            size = picture.stat().st_size
            print(f"{picture.relative_to(ROOT)}: {size} bytes", flush=True)
            too_large += size > MOST_BYTES
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
