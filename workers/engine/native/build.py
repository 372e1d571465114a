"""The kernels' shared object: compiled for this very CPU by the compiler that is here, once, and kept for later starts.

    python -m workers.engine.native.build     compile now, unless it is there already

It lies in `$XDG_CACHE_HOME/headrace/native` (default ~/.cache), under a name made from the sources, the flags and the CPU:
anything else is compiled anew. Compiling takes some ten seconds of one core, at the lowest priority.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = ("simd.h", "team.h", "product.h", "attention.h", "decoder.cpp")
# No contraction: which products are fused with which sums is then the source's decision and not each inlining's.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC", "-shared", "-w")
CPU_NEEDED = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"})
COMPILE_SECONDS_MAX = 600.0


class CannotBuild(Exception):
    """There is no compiler, no place to keep what it makes, or it failed; the message says which."""


def cpu_flags() -> frozenset[str]:
    """The instruction sets of this CPU, as Linux names them; none on other systems and other architectures."""
    if platform.machine() != "x86_64":
        return frozenset()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


def find() -> Path | None:
    """The shared object, if it has been compiled."""
    path = _path()
    return path if path.exists() else None


def can_build() -> bool:
    return _compiler() is not None


def build() -> Path:
    """The shared object; compiled now if it is not there. Blocking. Raises CannotBuild."""
    path = _path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one process of the host compiles, the others wait for it
            if not path.exists():
                _compile(path)
    except OSError as error:
        raise CannotBuild(f"the kernels cannot be kept in {path.parent}: {error}") from error
    return path


def _compile(path: Path) -> None:
    compiler = _compiler()
    if compiler is None:
        raise CannotBuild("no C++ compiler: g++ is not on the path, and CXX names none")
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        made = Path(directory, path.name)
        command = [compiler, *FLAGS, str(Path(__file__).with_name("decoder.cpp")), "-o", str(made)]
        try:
            done = subprocess.run(
                ["nice", "-n", "19", *command], capture_output=True, text=True, timeout=COMPILE_SECONDS_MAX
            )
        except subprocess.TimeoutExpired as error:
            raise CannotBuild(f"{compiler} took more than {COMPILE_SECONDS_MAX:.0f} s") from error
        if done.returncode != 0:
            raise CannotBuild(f"{compiler} failed: {done.stderr[-500:]}")
        try:
            ctypes.CDLL(str(made))
        except OSError as error:
            raise CannotBuild(f"what {compiler} made cannot be loaded: {error}") from error
        made.replace(path)


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX") or "g++")


def _path() -> Path:
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    digest.update(" ".join((*FLAGS, *sorted(cpu_flags()))).encode())
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "headrace", "native", f"{digest.hexdigest()[:32]}.so")


if __name__ == "__main__":
    if not cpu_flags() >= CPU_NEEDED:
        sys.exit("no kernels for this CPU: they need AVX-512")
    try:
        print(build())
    except CannotBuild as error:
        sys.exit(str(error))
