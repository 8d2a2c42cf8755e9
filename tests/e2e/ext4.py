"""Mounts an ext4 file system from a file through a loop device. Tests can make the file system
read-only, frozen or full.

This module requires root and loop devices.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class Ext4:
    """A file system mounted at ``path``. Every method is idempotent."""

    def __init__(self, image: Path, path: Path) -> None:
        self._image = image
        self.path = path
        self._is_frozen = False

    def read_only(self) -> None:
        """Remount the file system read-only while files are open for writing, as the kernel does
        after an error (``errors=remount-ro``).

        Earlier writes reach the device. The file system remains read-only until `mount_again`.
        """
        os.sync()
        subprocess.run(
            ["mount", "-o", "remount,abort", str(self.path)], capture_output=True, check=True
        )

    def mount_again(self) -> None:
        """Mount the file system again for writing. All files on it must be closed."""
        subprocess.run(["umount", str(self.path)], check=True)
        subprocess.run(
            ["mount", "-o", "loop", str(self._image), str(self.path)],
            check=True,
            capture_output=True,
        )

    def freeze(self) -> None:
        """Freeze the file system so that writes hang until `thaw`."""
        if not self._is_frozen:
            subprocess.run(["fsfreeze", "--freeze", str(self.path)], check=True)
            self._is_frozen = True

    def thaw(self) -> None:
        if self._is_frozen:
            subprocess.run(["fsfreeze", "--unfreeze", str(self.path)], check=True)
            self._is_frozen = False

    def fill(self) -> None:
        """Fill the file system until no block is free."""
        with open(self.path / "filler", "wb") as file:
            block = bytes(1 << 20)
            while True:
                try:
                    file.write(block)
                    file.flush()
                except OSError:
                    if len(block) == 4096:
                        break
                    block = bytes(4096)

    def make_room(self) -> None:
        (self.path / "filler").unlink(missing_ok=True)


def can_mount() -> bool:
    """Return True if this process can mount file systems."""
    return os.geteuid() == 0 and Path("/dev/loop-control").exists()


@contextmanager
def mounted(folder: Path, size_mib: int = 64) -> Iterator[Ext4]:
    """Create and mount a file system under ``folder``.

    Raises OSError or CalledProcessError on failure.
    """
    image, path = folder / "image", folder / "mount"
    path.mkdir(parents=True)
    with open(image, "wb") as file:
        file.truncate(size_mib << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, capture_output=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(path)], check=True, capture_output=True)
    disk = Ext4(image, path)
    try:
        yield disk
    finally:
        disk.thaw()
        subprocess.run(["umount", "--lazy", str(path)], check=False, capture_output=True)


BLKIO = Path("/sys/fs/cgroup/blkio")
LIMITS = ("blkio.throttle.read_bps_device", "blkio.throttle.write_bps_device")


@contextmanager
def throttled(disk: Ext4, pid: int, mib_s: float) -> Iterator[None]:
    """Limit the rate at which process ``pid`` reads from and writes to the device of ``disk``.

    Each direction is limited to ``mib_s`` MiB/s, with blkio (cgroup v1) or io.max (cgroup v2).
    """
    number = os.stat(disk.path).st_dev
    device, rate = f"{os.major(number)}:{os.minor(number)}", int(mib_s * 2**20)
    is_v1 = BLKIO.is_dir()
    group = (BLKIO if is_v1 else Path("/sys/fs/cgroup")) / f"kvloft-test-{pid}"
    group.mkdir()
    try:
        if is_v1:
            for limit in LIMITS:
                (group / limit).write_text(f"{device} {rate}")
        else:
            (group / "io.max").write_text(f"{device} rbps={rate} wbps={rate}")
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with suppress(ProcessLookupError):
            (group.parent / "cgroup.procs").write_text(str(pid))
        group.rmdir()
