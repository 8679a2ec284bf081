"""A view of the file system whose changes stay in scratch.

Every change goes to a scratch directory, and real files stay unchanged. Linux allows it to ordinary users where user
namespaces are allowed. The process gets mounts of its own, and an overlay on every directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

from .kernel import call, drop_capabilities, mount

_NEW_USERS, _NEW_MOUNTS = 0x10000000, 0x20000
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000
_MOUNT_SETATTR, _HERE, _READ_ONLY = 442, -100, 1
_THE_KERNELS = ("/proc", "/dev", "/sys")  # no files of anybody's


def cover_with_overlay(scratch: Path) -> None:
    """Make changes to files visible to this process and its future children alone.

    Changes are stored below `scratch`. Files that cannot have an overlay (single mounted files, some file systems) are
    read-only. The process must have one thread. Raises OSError if the kernel refuses it.
    """
    user, group, folder = os.getuid(), os.getgid(), Path.cwd()
    call("unshare", _NEW_USERS | _NEW_MOUNTS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    mount("", "/", "", _RECURSIVE | _PRIVATE)
    view = _View(scratch)
    view.show("/")
    os.chroot(view.root)
    os.chdir(folder)
    if user != 0:
        drop_capabilities()


class _View:
    """The new root directory, and the layers of its overlays."""

    def __init__(self, scratch: Path) -> None:
        self._layers = scratch / "layers"
        self._layers.mkdir()
        try:
            self._check()
        except OSError:  # the disk of `scratch` is itself an overlay, as in a container: memory will do
            mount("tmpfs", str(self._layers), "tmpfs", 0)
            self._check()
        self.root = str(self._layers / "root")
        Path(self.root).mkdir()
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        self._mounted = [line.split()[4].replace("\\040", " ") for line in mounts]

    def _check(self) -> None:
        """Raise OSError if no overlay is possible."""
        there = self._layers / "check"
        there.mkdir()
        self._overlay(str(there), str(there))
        call("umount2", os.fsencode(there), 0)

    def show(self, path: str) -> None:
        """Show all of `path` in the new root.

        A directory with other mounts below has no overlay of its own, since the kernel does not expose the paths under
        mounts. Each of its entries has one.
        """
        there = self.root + path
        if path == str(self._layers):
            return
        # Kernel file systems, links and single files are shown as they are.
        if path in _THE_KERNELS:
            Path(there).mkdir()
            mount(path, there, "", _BIND | _RECURSIVE)
        elif Path(path).is_symlink():
            Path(there).symlink_to(Path(path).readlink())
        elif not Path(path).is_dir():
            Path(there).touch()
            self._read_only(path)
        # A directory with mounts inside is shown entry by entry.
        elif any(point.startswith(path.rstrip("/") + "/") for point in self._mounted):
            Path(there).mkdir(exist_ok=True)
            with contextlib.suppress(PermissionError):  # what this user cannot list stays hidden
                for entry in os.scandir(path):
                    self.show(entry.path)
            Path(there).chmod(Path(path).stat().st_mode & 0o7777)
        else:
            Path(there).mkdir()
            try:
                self._overlay(path, there)
            except OSError:
                self._read_only(path)

    def _overlay(self, lower: str, there: str) -> None:
        number = len(list(self._layers.iterdir()))
        upper, work = self._layers / f"upper{number}", self._layers / f"work{number}"
        upper.mkdir()
        work.mkdir()
        with contextlib.suppress(OSError):  # of other users' directories: the mode matters for /tmp alone
            upper.chmod(Path(lower).stat().st_mode & 0o7777)
        lower = lower.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")
        mount("overlay", there, "overlay", 0, f"lowerdir={lower},upperdir={upper},workdir={work},userxattr")

    def _read_only(self, path: str) -> None:
        there = self.root + path
        mount(path, there, "", _BIND | _RECURSIVE)
        attributes = (ctypes.c_uint64 * 4)(_READ_ONLY)
        call("syscall", _MOUNT_SETATTR, _HERE, os.fsencode(there), 0x8000, attributes, ctypes.sizeof(attributes))
