"""The disk store among the troubles of a real disk: short transfers, no space, bad directories, and sudden death."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from overspill.core.errors import RequestError, StoreError
from overspill.runtime.transfer.disk_store import DiskStore
from overspill.runtime.transfer.stores import PAGE_BYTES

SOURCE = Path(__file__).parents[3] / "src"
NBYTES = 3 * PAGE_BYTES + 17


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    made = DiskStore(tmp_path)
    yield made
    made.close()


def some_bytes() -> Tensor:
    return torch.arange(NBYTES).remainder(251).to(torch.uint8)


def test_the_directory_stays_empty_and_the_file_is_private(store: DiskStore, tmp_path: Path) -> None:
    store.write(store.allocate(NBYTES), some_bytes())
    status = os.fstat(store._file)
    assert list(tmp_path.iterdir()) == []
    assert (status.st_mode & 0o777, status.st_nlink) == (0o600, 0)


def test_space_is_taken_when_the_store_grows_not_when_it_writes(store: DiskStore) -> None:
    store.reserve(10 * PAGE_BYTES)
    status = os.fstat(store._file)
    assert (status.st_size, status.st_blocks * 512 >= status.st_size) == (10 * PAGE_BYTES, True)


def test_the_default_directory_is_the_systems_temporary_one() -> None:
    store = DiskStore()
    assert store.directory == Path(tempfile.gettempdir())
    store.close()


def test_closing_gives_the_file_back_and_can_be_done_twice(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    file = store._file
    store.close()
    store.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_short_writes_and_short_reads_are_continued(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:1000], at))
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: preadv(file, [buffers[0][:777]], at))
    store.allocate(PAGE_BYTES)
    slot = store.allocate(NBYTES)
    store.write(slot, some_bytes())
    target = torch.zeros(NBYTES, dtype=torch.uint8)
    store.read(slot, target)
    assert torch.equal(target, some_bytes())


def test_a_disk_that_takes_no_more_is_a_store_error(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:1000], at) if at < 2000 else 0)
    with pytest.raises(StoreError, match="only 2000"):
        store.write(store.allocate(NBYTES), some_bytes())


def test_a_file_that_ends_early_is_a_store_error(store: DiskStore) -> None:
    slot = store.allocate(NBYTES)
    os.ftruncate(store._file, PAGE_BYTES)
    with pytest.raises(StoreError, match=f"only {PAGE_BYTES}"):
        store.read(slot, torch.empty(NBYTES, dtype=torch.uint8))


@pytest.mark.parametrize(("action", "function"), [("write", "pwrite"), ("read", "preadv")])
def test_an_error_of_the_device_is_a_store_error(
    store: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str, function: str
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(StoreError) as caught:
        getattr(store, action)(store.allocate(NBYTES), some_bytes())
    assert str(caught.value) == f"the disk store in {tmp_path} failed to {action}: Input/output error"


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_names_the_directory_and_what_would_help(
    store: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.reserve(PAGE_BYTES)
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(StoreError) as caught:
        store.reserve(2**20)
    message = str(caught.value)
    assert all(part in message for part in (str(tmp_path), "No space left", "--store-dir", "--store host", " free "))
    assert store.capacity_bytes == os.fstat(store._file).st_size == PAGE_BYTES


def test_a_store_works_on_after_a_full_disk(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", no_space)
        with pytest.raises(StoreError):
            store.allocate(NBYTES)
    slot = store.allocate(NBYTES)
    store.write(slot, some_bytes())
    target = torch.zeros(NBYTES, dtype=torch.uint8)
    store.read(slot, target)
    assert torch.equal(target, some_bytes())


def test_a_full_disk_is_a_store_error_even_when_the_directory_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "gone"
    directory.mkdir()
    store = DiskStore(directory)
    directory.rmdir()
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(StoreError):
        store.reserve(PAGE_BYTES)


def test_a_directory_that_is_missing_is_a_wrong_request(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"missing: .*--store-dir"):
        DiskStore(tmp_path / "missing")


def test_where_files_without_a_name_are_unknown_the_name_goes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system_open = os.open

    def without_tmpfile(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return system_open(path, flags, *rest)

    monkeypatch.setattr(os, "open", without_tmpfile)
    store = DiskStore(tmp_path)
    status = os.fstat(store._file)
    assert list(tmp_path.iterdir()) == []
    assert (status.st_mode & 0o777, status.st_nlink) == (0o600, 0)
    store.close()


def test_the_file_never_has_a_name_where_that_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def named(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(tempfile, "mkstemp", named)
    DiskStore(tmp_path).close()


def test_a_file_in_the_place_of_the_directory_is_a_wrong_request(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="Not a directory"):
        DiskStore(tmp_path / "file")


def test_a_directory_that_may_not_be_written_is_a_wrong_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(RequestError, match="Permission denied"):
        DiskStore(tmp_path)


def in_child(program: str, directory: Path) -> subprocess.Popen[str]:
    """A process that runs `program` with a store module and `directory` at hand."""
    head = f"import os, resource, sys, torch\nfrom overspill.core.errors import *\nfrom overspill.runtime.transfer.stores import *\nfrom overspill.runtime.transfer.disk_store import *\nfrom overspill.runtime.transfer.host_store import *\ndirectory = {str(directory)!r}\n"
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    return subprocess.Popen(
        [sys.executable, "-c", head + program],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


LIMITS = """
store = DiskStore(directory)
store.allocate(PAGE_BYTES)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    store.reserve(1 << 24)
except StoreError as error:
    print("disk", error, store.capacity_bytes == PAGE_BYTES)
host = HostStore()
with open("/proc/self/statm") as statm:
    taken = int(statm.read().split()[0]) * PAGE_BYTES
resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 28), taken + (1 << 28)))
try:
    host.reserve(1 << 32)
except StoreError as error:
    print("host", error, host.capacity_bytes == 0)
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_real_limits_of_file_size_and_of_memory_are_store_errors(tmp_path: Path) -> None:
    child = in_child(LIMITS, tmp_path)
    output, _ = child.communicate(timeout=300)
    disk, host = output.splitlines()
    assert disk.startswith(f"disk the disk store needs 16.0 MiB more in {tmp_path}")
    assert host.startswith("host the host store needs 4.0 GiB more of host memory")
    assert disk.endswith(" True")
    assert host.endswith(" True")


def test_a_killed_process_leaves_nothing_behind(tmp_path: Path) -> None:
    hold = (
        "store = DiskStore(directory)\nstore.write(store.allocate(1 << 20), torch.zeros(1 << 20, dtype=torch.uint8))\n"
        "print('ready', flush=True)\nsys.stdin.read()\nimport time; time.sleep(60)\n"
    )
    child = in_child(hold, tmp_path)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
