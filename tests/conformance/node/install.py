"""Installs the npm packages of the tests beside this file, as package-lock.json pins them.

They go into the user's cache, once for each lockfile, and are shared by all checkouts of the machine. scripts/bootstrap does
it where npm is found, as it does everything that needs a network; a test run on a machine that has them needs none.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
MANIFESTS = ("package.json", "package-lock.json")
NPM = "npm"


def place() -> Path:
    """Where the packages of the present lockfile are, or will be."""
    digest = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in MANIFESTS)).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "headrace" / f"node-{digest[:16]}"


def install() -> Path:
    """The directory with `node_modules`, installed if need be. Raises CalledProcessError with what npm said."""
    found = place()
    if found.exists():
        return found
    found.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=found.parent) as directory:
        for name in MANIFESTS:
            shutil.copy(HERE / name, directory)
        command = [NPM, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        subprocess.run(command, cwd=directory, check=True, capture_output=True, text=True)
        try:
            Path(directory).rename(found)
        except OSError:  # somebody else was faster
            if not found.exists():
                raise
    return found


if __name__ == "__main__":
    if shutil.which(NPM) is None:
        sys.exit("npm is not installed: the tests that need Node.js will be skipped")
    try:
        print(install())
    except subprocess.CalledProcessError as error:
        sys.exit(error.stderr)
