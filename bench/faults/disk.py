"""A small disk, to be filled: a tmpfs of its own. Mounting one takes the right to, which a container may not have."""

import contextlib
import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path

CHUNK = bytes(64 * 1024)


class SmallDisk:
    """A file system of its own at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def fill(self) -> None:
        """Leave no room."""
        with open(self._ballast, "ab", buffering=0) as ballast:
            for size in (len(CHUNK), 1):
                try:
                    while True:
                        ballast.write(CHUNK[:size])
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def free(self) -> None:
        """Give back the room that `fill` took."""
        self._ballast.unlink()


@contextlib.contextmanager
def small_disk(path: Path, mebibytes: int) -> Iterator[SmallDisk]:
    """Mount one. Raises PermissionError where that is not allowed."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(path)]
    ran = subprocess.run(mount, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise PermissionError(ran.stderr.strip())
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
