"""Draws the pictures of the docs: what the transcripts of the pages write by `--plot NAME.png` and `--report NAME.html`.

python tools/docs_pictures.py                    # all, into docs/pictures/; about two minutes
python tools/docs_pictures.py docs/tutorial.md   # those of one page

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

from PIL import Image
from transcripts import ROOT, Page, read_page, run

PICTURES = ROOT / "docs" / "pictures"
MOST_BYTES = 150_000
"""A picture in the repository is at most so large."""


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


def main(arguments: Sequence[str]) -> int:
    """The exit code: 1 where a picture is too large for the repository."""
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
