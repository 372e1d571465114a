"""The manifest of a version: every file with its size and sha256, and where both lie in the object store.

    blobs/<sha256>                              a file, or a manifest: whoever writes it writes these bytes
    models/<model>/<version>/manifest.json      the manifest once more, under the version's name

A version's record names the sha256 of its manifest; that and the files are read from `blobs/`. The copy under the version's
name is for people and other tools: what `POST /v1/models/{model}/versions` registers.
"""

import hashlib

import msgspec

from shared import encoders, subjects
from shared.encoders import Encoder
from shared.errors import BadRequest
from shared.records import EngineSettings

MANIFEST_NAME = "manifest.json"
CONFIG_NAME = "config.json"
TEMPLATE_BYTES_MAX = 16 << 20  # of a file that may hold a chat template: a tokenizer's configuration is far smaller
BLOBS = "blobs/"
MODELS = "models/"


class ManifestFile(msgspec.Struct, frozen=True):
    """One file of a version. `name` is a plain file name, `size` in bytes, `sha256` in 64 hex digits."""

    name: str
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a version consists of. The same files and settings always encode to the same bytes."""

    model: str
    version: str
    files: list[ManifestFile]  # sorted by name
    engine: EngineSettings
    max_model_len: int  # tokens
    memory_bytes: int  # the weights alone; the KV cache comes on top
    encoder: Encoder | None = None  # of a model that makes vectors

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


def of_simulated(model: str, version: str, engine: EngineSettings, encoder: Encoder | None = None) -> Manifest:
    """What stands for a simulated model, which has no files: its sha256 is the version's identity."""
    length = engine.max_model_len or 0
    return Manifest(
        model=model, version=version, files=[], engine=engine, max_model_len=length, memory_bytes=0, encoder=encoder
    )


def blob_key(sha256: str) -> str:
    """Where the bytes of that sha256 lie."""
    return BLOBS + sha256


def manifest_key(model: str, version: str) -> str:
    """Where a version's manifest lies under its name: the names encoded as in subjects."""
    return f"{MODELS}{subjects.encode_token(model)}/{subjects.encode_token(version)}/{MANIFEST_NAME}"


def model_length(config: bytes, where: str, engine: EngineSettings, encoder: Encoder | None = None) -> int:
    """Tokens that a model was made for by its config.json, or fewer if the engine settings say so. Raises BadRequest."""
    if encoder is not None:
        return encoders.length(encoder, engine.max_model_len)
    try:
        values = msgspec.json.decode(config)
        text = values.get("text_config", values)
        own = next(
            int(text[name]) for name in ("max_position_embeddings", "n_positions", "max_seq_len") if text.get(name)
        )
    except (msgspec.DecodeError, AttributeError, TypeError, ValueError) as error:
        raise BadRequest(f"{where} is not a model's configuration: {error}", param="source") from error
    except StopIteration:
        if engine.max_model_len is None:
            raise BadRequest(f"{where} does not say the model's length: set max_model_len", param="engine") from None
        return engine.max_model_len
    if engine.max_model_len is not None and not 0 < engine.max_model_len <= own:
        raise BadRequest(f"max_model_len {engine.max_model_len} is not within the model's {own} tokens", param="engine")
    return engine.max_model_len or own
