"""The fetch of a model's files beside the plain tools on the same path: 8 ranged `curl -o` and `sha256sum`.

    python bench/weights.py [--mib 2048] [--rounds 3] [--directory DIR]

A SeaweedFS of its own under DIR holds one object of random bytes. In turn: curl reads it in 8 ranges into 8 files on DIR's disk
and sha256sum reads these; a process fetches it, as a worker does, into an empty cache on the same disk. Medians, and their
ratio: 1.00 is the bandwidth of the plain tools. Before each run what is to be written to the disk is waited for.
"""

import argparse
import asyncio
import hashlib
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from headrace.stack import ports, servers
from shared import manifests
from shared.lifeline import die_with_parent
from shared.manifests import Manifest, ManifestFile
from shared.objects import ObjectStore
from shared.records import EngineSettings, Version
from shared.settings import GIB, MIB, Settings, to_environment

PARTS = 8
READY_WITHIN_S = 30.0

FETCH = """
import re, sys, time
from pathlib import Path
from shared.objects import ObjectStore
from shared import records, settings
from workers import weights
settings = settings.load()
version = records.decode_version(sys.stdin.buffer.read())
def kib(what):
    return int(re.search(what + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before_kib = kib("VmRSS")
begin = time.monotonic()
weights.fetch(version, ObjectStore(settings), settings)
seconds = time.monotonic() - begin
grown_mib = (kib("VmHWM") - before_kib) / 1024
print(seconds, grown_mib)
"""


def publish(store: ObjectStore, directory: Path, size: int) -> tuple[Version, str, list[str]]:
    """A version of one file of random bytes in the store, its key, and the sha256 of each of its parts."""
    path = directory / "model"
    digest, parts = hashlib.sha256(), []
    with open(path, "wb") as out:
        for _ in range(PARTS):
            part = hashlib.sha256()
            for _ in range(size // PARTS // MIB):
                data = os.urandom(MIB)
                digest.update(data)
                part.update(data)
                out.write(data)
            parts.append(part.hexdigest())
    file = ManifestFile("model.safetensors", size, digest.hexdigest())
    store.ensure_bucket()
    store.put_file(manifests.blob_key(file.sha256), path, size, file.sha256)
    path.unlink()
    manifest = Manifest(
        model="bench", version="v1", files=[file], engine=EngineSettings(), max_model_len=1, memory_bytes=size
    )
    raw = manifests.encode(manifest)
    store.put(manifests.blob_key(manifests.sha256_of(raw)), raw)
    version = Version(
        model="bench", version="v1", state="available", source="s3", manifest_sha256=manifests.sha256_of(raw)
    )
    return version, manifests.blob_key(file.sha256), parts


def by_curl(url: str, directory: Path, size: int, sha256s: list[str]) -> float:
    """Seconds."""
    os.sync()
    begin = time.monotonic()
    parts = [directory / f"part-{number}" for number in range(PARTS)]
    step = size // PARTS
    reads = [
        subprocess.Popen(["curl", "-sf", "-r", f"{number * step}-{(number + 1) * step - 1}", "-o", str(part), url])
        for number, part in enumerate(parts)
    ]
    if any(code != 0 for code in [read.wait() for read in reads]):
        raise SystemExit("curl failed")
    summed = subprocess.run(["sha256sum", *parts], capture_output=True, text=True, check=True)
    seconds = time.monotonic() - begin
    for part in parts:
        part.unlink()
    if summed.stdout.split()[::2] != sha256s:
        raise SystemExit("curl read other bytes")
    return seconds


def by_us(version: Version, settings: Settings) -> tuple[float, float]:
    """Seconds, and MiB by which the process grew."""
    os.sync()
    ran = subprocess.run(
        [sys.executable, "-c", FETCH],
        input=msgspec.json.encode(version),
        env=os.environ | to_environment(settings) | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=True,
    )
    shutil.rmtree(settings.cache_path)
    seconds, grown_mib = map(float, ran.stdout.split())
    return seconds, grown_mib


def start_store(directory: Path) -> tuple[subprocess.Popen[bytes], Settings]:
    """A SeaweedFS that anybody may read, so that curl need not sign."""
    server = servers.objects(directory, servers.ObjectPorts(*ports.free_ports(5)), "", "")
    process = subprocess.Popen(
        server.argv,
        cwd=server.directory,
        env=servers.environment(server),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=die_with_parent(),
    )
    deadline = time.monotonic() + READY_WITHIN_S
    while not asyncio.run(servers.s3_ready(server.url)):
        if time.monotonic() > deadline:
            raise SystemExit("SeaweedFS does not answer")
        time.sleep(0.1)
    return process, Settings(s3_endpoint=server.url, s3_bucket=f"bench-{secrets.token_hex(4)}")


def measure(directory: Path, size: int, rounds: int) -> None:
    process, settings = start_store(directory / "objects")
    try:
        settings = msgspec.structs.replace(settings, data_dir=str(directory / "data"), cache_bytes_max=size + GIB)
        version, key, sha256s = publish(ObjectStore(settings), directory, size)
        url = f"{settings.s3_endpoint}/{settings.s3_bucket}/{key}"
        plain, ours, grown = [], [], []
        for number in range(rounds):
            plain.append(by_curl(url, directory, size, sha256s))
            seconds, grown_mib = by_us(version, settings)
            ours.append(seconds)
            grown.append(grown_mib)
            print(f"round {number + 1}: curl and sha256sum {plain[-1]:.2f} s, fetch {seconds:.2f} s", flush=True)
        rates = [size / MIB / statistics.median(each) for each in (plain, ours)]
        print(f"medians: curl and sha256sum {rates[0]:.0f} MiB/s, fetch {rates[1]:.0f} MiB/s")
        print(f"ratio {rates[1] / rates[0]:.2f}; the process grew by {max(grown):.0f} MiB at most")
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=2048, help="of the object")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: where temporary files go")
    arguments = parser.parse_args()
    if arguments.mib < PARTS or arguments.mib % PARTS:
        parser.error(f"--mib is a multiple of {PARTS}")
    with tempfile.TemporaryDirectory(prefix="weights-", dir=arguments.directory) as directory:
        measure(Path(directory), arguments.mib * MIB, arguments.rounds)


if __name__ == "__main__":
    main()
