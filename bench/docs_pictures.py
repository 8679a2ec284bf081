"""Draws the pictures of the docs: those that the transcripts of the pages draw with `--plot NAME.png`.

python bench/docs_pictures.py                    # all, into docs/pictures/; about two minutes
python bench/docs_pictures.py docs/tutorial.md   # those of one page

All transcripts of a page that draws are run in order, in one empty folder, as `bench/transcripts.py` runs them.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from transcripts import ROOT, Page, read_page, run

PICTURES = ROOT / "docs" / "pictures"
MOST_BYTES = 150_000
"""A picture in the repository is at most so large."""


def draw(page: Page) -> list[Path]:
    """The pictures that the commands of `page` drew, in docs/pictures/."""
    with tempfile.TemporaryDirectory(prefix="pictures-") as name:
        folder = Path(name)
        for file, text in page.files.items():
            (folder / file).write_text(text, encoding="utf-8")
        for transcript in page.transcripts:
            if (found := run(transcript, folder)).failure:
                raise SystemExit(f"{page.path}:{transcript.start + 1}: {found.failure}")
        return [shutil.copy(picture, PICTURES / picture.name) for picture in sorted(folder.glob("*.png"))]


def main(arguments: Sequence[str]) -> int:
    """The exit code: 1 where a picture is too large for the repository."""
    pages = [Path(name).resolve() for name in arguments] or sorted((ROOT / "docs").rglob("*.md"))
    too_large = 0
    for page in map(read_page, pages):
        if not any(".png" in command.shell for transcript in page.transcripts for command in transcript.commands):
            continue
        for picture in draw(page):
            size = picture.stat().st_size
            print(f"{picture.relative_to(ROOT)}: {size} bytes", flush=True)
            too_large += size > MOST_BYTES
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
