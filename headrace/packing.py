"""A model's directory as the manifest of a version."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from shared import encoders, tools
from shared.errors import BadRequest
from shared.manifests import CONFIG_NAME, MANIFEST_NAME, TEMPLATE_BYTES_MAX, Manifest, ManifestFile, model_length
from shared.records import EngineSettings
from shared.settings import MIB

FILE_SUFFIXES = {".safetensors", ".json", ".txt", ".model", ".jinja", ".tiktoken"}

INDEX_SUFFIX = ".safetensors.index.json"

OnProgress = Callable[[int, int], None]  # (bytes done, bytes in all): each byte is hashed once and uploaded once


class _Index(msgspec.Struct):
    weight_map: dict[str, str]  # the file of each tensor


def read_directory(
    directory: Path, model: str, version: str, engine: EngineSettings, on_progress: OnProgress
) -> Manifest:
    """The manifest of a model's directory. Blocking: it hashes every file. Raises BadRequest for what is no model."""
    if not directory.is_dir():
        problem = "is no directory, GGUF file or sim:PROFILE" if directory.exists() else "does not exist"
        raise BadRequest(f"{directory} {problem}", param="path")
    paths = sorted(
        path for path in directory.iterdir() if path.suffix in FILE_SUFFIXES and path.is_file() and path.name[0] != "."
    )
    names = {path.name for path in paths} - {MANIFEST_NAME}
    if CONFIG_NAME not in names or not any(name.endswith(".safetensors") for name in names):
        raise BadRequest(f"{directory} has no {CONFIG_NAME} with *.safetensors beside it", param="path")
    _check_shards(directory, names)
    config = directory / CONFIG_NAME
    raw = config.read_bytes()
    encoder = encoders.find(raw, _reader(directory))
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
        model=model,
        version=version,
        files=files,
        engine=engine,
        max_model_len=model_length(raw, str(config), engine, encoder),
        memory_bytes=sum(file.size for file in files if file.name.endswith(".safetensors")),
        encoder=encoder,
    )


def _reader(directory: Path) -> encoders.Read:
    """Reads small files of a model's directory."""

    def read(name: str) -> bytes | None:
        path = directory / name
        return path.read_bytes() if path.is_file() and path.stat().st_size <= encoders.FILE_BYTES_MAX else None

    return read


def tool_dialect(directory: Path) -> str:
    """How the model of a directory writes tool calls, by its chat template."""
    paths = [directory / name for name in tools.TEMPLATE_FILES]
    found = {
        path.name: path.read_bytes() for path in paths if path.is_file() and path.stat().st_size <= TEMPLATE_BYTES_MAX
    }
    return tools.dialect_of(tools.template_of(found))


def _check_shards(directory: Path, names: set[str]) -> None:
    """Raises BadRequest when an index names a shard that is not there."""
    for index in sorted(name for name in names if name.endswith(INDEX_SUFFIX)):
        try:
            shards = set(msgspec.json.decode((directory / index).read_bytes(), type=_Index).weight_map.values())
        except msgspec.MsgspecError as error:
            raise BadRequest(f"{directory / index} is no index of shards: {error}", param="path") from error
        if lacking := sorted(shards - names):
            raise BadRequest(f"{directory / index} names {', '.join(lacking)}, and there is no such file", param="path")
