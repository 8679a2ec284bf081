"""Files are written whole or not at all, and nothing that has no end is read."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from overspill.core import files
from overspill.core.errors import RequestError
from overspill.core.files import read_whole, write_whole


def test_a_file_is_written_and_read(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "grün\n")
    assert read_whole(tmp_path / "a") == "grün\n".encode()
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o666 & ~_umask()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_file_that_is_there_keeps_its_rights_and_its_links(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    real.chmod(0o600)
    link.symlink_to(real)
    write_whole(link, "new")
    assert link.is_symlink()
    assert (real.read_text(), real.stat().st_mode & 0o777) == ("new", 0o600)


def test_a_link_that_lies_where_the_file_is_begun_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "guessed")
    for name in ("guessed", str(os.getpid())):
        (tmp_path / f".overspill-{name}.part").symlink_to(victim)
    with pytest.raises(RequestError, match="out: File exists"):
        write_whole(tmp_path / "out", "new")
    monkeypatch.undo()
    write_whole(tmp_path / "out", "new")
    assert victim.read_text() == "precious"
    assert not (tmp_path / "out").is_symlink()


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, limits[1]))
    try:
        with pytest.raises(RequestError, match="File too large"):
            write_whole(tmp_path / "out", "x" * (1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "out").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_cannot_be_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for path, why in ((tmp_path / "loop", "Too many levels"), (tmp_path / ("n" * 300), "File name too long")):
        with pytest.raises(RequestError, match=rf"cannot read .*: {why}"):
            read_whole(path)
        with pytest.raises(RequestError, match=rf"cannot write .*: {why}"):
            write_whole(path, "new")


def test_a_device_is_read_to_its_end_if_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_whole("/dev/null") == b""
    monkeypatch.setattr(files, "MOST_STREAMED_BYTES", 1 << 20)
    with pytest.raises(RequestError, match=r"more than 1.0"):
        read_whole("/dev/zero")
    write_whole("/dev/null", "gone")


def _umask() -> int:
    now = os.umask(0o22)
    os.umask(now)
    return now
