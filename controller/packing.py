"""A model's directory as a version: read into a manifest, uploaded, and checked in the object store. All of it blocks."""

import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from shared import manifests
from shared.errors import BadRequest, NotFound, ObjectsUnavailable, VersionFailed
from shared.manifests import MANIFEST_NAME, Manifest, ManifestFile
from shared.objects import ObjectStore
from shared.records import EngineSettings, Version
from shared.settings import MIB, Settings

log = logging.getLogger(__name__)

UPLOAD_PAUSES_S = (0.5, 2.0, 5.0)
FILE_SUFFIXES = {".safetensors", ".json", ".txt", ".model", ".jinja", ".tiktoken"}

OnProgress = Callable[[int, int], None]  # (bytes done, bytes in all): each byte is hashed once and uploaded once


def read_directory(directory: Path, record: Version, on_progress: OnProgress) -> Manifest:
    """The manifest of a model's directory. Blocking: it hashes every file. Raises BadRequest for what is no model."""
    if not directory.is_dir():
        what = "a GGUF file; convert it to safetensors first" if directory.suffix == ".gguf" else "no directory"
        raise BadRequest(f"{directory} is {what}", param="path")
    paths = sorted(
        path for path in directory.iterdir() if path.suffix in FILE_SUFFIXES and path.is_file() and path.name[0] != "."
    )
    names = {path.name for path in paths} - {MANIFEST_NAME}
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        raise BadRequest(f"{directory} has no config.json with *.safetensors beside it", param="path")
    paths = [path for path in paths if path.name in names]
    total = sum(path.stat().st_size for path in paths)
    done = 0
    files = []
    for path in paths:
        digest = hashlib.sha256()
        size = 0
        with open(path, "rb") as file:
            while data := file.read(4 * MIB):
                digest.update(data)
                size += len(data)
                on_progress(done + size, 2 * total)
        done += size
        files.append(ManifestFile(path.name, size, digest.hexdigest()))
    return Manifest(
        model=record.model,
        version=record.version,
        files=files,
        engine=record.engine,
        max_model_len=_max_model_len(directory / "config.json", record.engine),
        memory_bytes=sum(file.size for file in files if file.name.endswith(".safetensors")),
    )


def upload(objects: ObjectStore, directory: Path, manifest: Manifest, on_progress: OnProgress) -> None:
    """Write a version's files, then its manifest. Blocking."""
    objects.ensure_bucket()
    done = manifest.size
    for file in manifest.files:
        key = manifests.object_key(manifest.model, manifest.version, file.name)
        _put_file(objects, key, directory / file.name, file)
        done += file.size
        on_progress(done, 2 * manifest.size)
    objects.put(manifests.object_key(manifest.model, manifest.version, MANIFEST_NAME), manifests.encode(manifest))


def _put_file(objects: ObjectStore, key: str, path: Path, file: ManifestFile) -> None:
    """Write one file; a store that drops the connection in the middle is asked again, from the file's first byte."""
    for pause_s in UPLOAD_PAUSES_S:
        try:
            return objects.put_file(key, path, file.size, file.sha256)
        except ObjectsUnavailable as error:
            log.warning("%s is sent again in %g s: %s", file.name, pause_s, error.message)
            time.sleep(pause_s)
    return objects.put_file(key, path, file.size, file.sha256)


def verifier(settings: Settings) -> Callable[[Version], None]:
    """What the controller checks before a version becomes available: its manifest, and each file's presence and size.

    The function raises ObjectsUnavailable when it cannot tell, VersionFailed when something is not as the record says.
    The bytes themselves are verified by each worker as it reads them.
    """

    def verify(version: Version) -> None:
        objects = ObjectStore(settings)
        name = f"{version.model}@{version.version}"
        try:
            raw = objects.get(manifests.object_key(version.model, version.version, MANIFEST_NAME))
            if manifests.sha256_of(raw) != version.manifest_sha256:
                raise VersionFailed(f"the manifest of {name} is not the one that was registered")
            for file in manifests.decode(raw).files:
                size = objects.stat(manifests.object_key(version.model, version.version, file.name)).size
                if size != file.size:
                    raise VersionFailed(f"{file.name} of {name} has {size} of {file.size} bytes in the object store")
        except NotFound as error:
            raise VersionFailed(f"{name} is incomplete: {error}") from error

    return verify


def _max_model_len(config: Path, engine: EngineSettings) -> int:
    """Tokens that the model was made for, or fewer if the engine settings say so. Raises BadRequest."""
    try:
        values = msgspec.json.decode(config.read_bytes())
        text = values.get("text_config", values)
        own = next(
            int(text[name]) for name in ("max_position_embeddings", "n_positions", "max_seq_len") if text.get(name)
        )
    except (msgspec.DecodeError, AttributeError, TypeError, ValueError) as error:
        raise BadRequest(f"{config} is not a model's configuration: {error}", param="path") from error
    except StopIteration:
        if engine.max_model_len is None:
            raise BadRequest(f"{config} does not say the model's length: --set max_model_len=N", param="path") from None
        return engine.max_model_len
    if engine.max_model_len is not None and not 0 < engine.max_model_len <= own:
        raise BadRequest(f"max_model_len {engine.max_model_len} is not within the model's {own} tokens", param="engine")
    return engine.max_model_len or own
