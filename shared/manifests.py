"""The manifest of a version: every file with its size and sha256, and where both lie in the object store."""

import hashlib

import msgspec

from shared import subjects
from shared.records import EngineSettings

MANIFEST_NAME = "manifest.json"


class ManifestFile(msgspec.Struct, frozen=True):
    """One file of a version. `name` is a plain file name, `size` in bytes, `sha256` in 64 hex digits."""

    name: str
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a version consists of. The same files and settings always encode to the same bytes."""

    model: str
    version: str
    files: list[ManifestFile]  # sorted by name
    engine: EngineSettings
    max_model_len: int  # tokens
    memory_bytes: int  # the weights alone; the KV cache comes on top

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(file.size for file in self.files)


def encode(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2)


def decode(raw: bytes) -> Manifest:
    """Raises msgspec.DecodeError or msgspec.ValidationError when `raw` is no manifest, or names a path outside it."""
    manifest = msgspec.json.decode(raw, type=Manifest)
    for file in manifest.files:
        if "/" in file.name or file.name in ("", ".", "..", MANIFEST_NAME):
            raise msgspec.ValidationError(f"not a plain file name: {file.name!r}")
        if len(file.sha256) != 64 or set(file.sha256) - set("0123456789abcdef"):
            raise msgspec.ValidationError(f"not a sha256: {file.sha256!r}")
    return manifest


def sha256_of(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def object_key(model: str, version: str, name: str) -> str:
    """Where a file of a version lies: `models/<model>/<version>/<name>`, the names encoded as in subjects."""
    return f"models/{subjects.encode_token(model)}/{subjects.encode_token(version)}/{name}"
