"""Models that turn texts into vectors: how one does it, as the files of a sentence-transformers model say.

`modules.json` lists its steps: a transformer, the pooling of its outputs, and maybe the scaling of the result to length 1.
What none of these files says is not guessed at: a model of which it is not known how its outputs become a vector is refused.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from shared.errors import BadRequest, Unsupported

MODULES_NAME = "modules.json"
LIMITS_NAME = "sentence_bert_config.json"
PROMPTS_NAME = "config_sentence_transformers.json"
FILE_BYTES_MAX = 1 << 20  # of each of these: they have some hundred
DIMENSIONS_MAX = 65_536
OFFSET_TYPES = ("roberta", "xlm-roberta", "camembert")  # their first position is behind that of the padding

SIMULATED = "sim:embedder"
SIMULATED_DIMENSIONS = 64
SIMULATED_LENGTH = 8192

Pooling = Literal["cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken"]
POOLINGS: tuple[str, ...] = get_args(Pooling)

Read = Callable[[str], bytes | None]
"""The contents of a file of the model by its path, None: there is no such file."""


class Encoder(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How a model turns a text into a vector."""

    dimensions: Annotated[int, Meta(ge=1, le=DIMENSIONS_MAX)]
    length: Annotated[int, Meta(ge=1)]  # tokens of an input that it was made for
    positions: Annotated[int, Meta(ge=1)]  # tokens that it has room for
    pooling: Pooling  # sentence-transformers' name of it
    normalized: bool  # vectors have length 1
    lower_case: bool = False  # texts are
    shorter: tuple[int, ...] | None = None  # it was trained so that vectors can be cut: to these lengths; (): to any


class _Module(msgspec.Struct):
    type: str
    path: str = ""

    @property
    def name(self) -> str:
        return self.type.rpartition(".")[2]


def length(encoder: Encoder, wanted: int | None) -> int:
    """Tokens of the longest input: what was set, else what the model was made for. Raises BadRequest."""
    if wanted is not None and not 0 < wanted <= encoder.positions:
        raise BadRequest(f"max_model_len {wanted} is not within the model's {encoder.positions} tokens", param="engine")
    return wanted or encoder.length


def check_dimensions(encoder: Encoder, wanted: int) -> None:
    """Raises BadRequest or Unsupported for vectors of a length that the model does not give. 0: its own."""
    own, shorter = encoder.dimensions, encoder.shorter
    if wanted in (0, own):
        return
    if wanted > own:
        raise BadRequest(f"dimensions: the model's vectors have {own}, not {wanted}", param="dimensions")
    if shorter is None:
        raise Unsupported(
            f"dimensions: the model was not trained for vectors that are cut to {wanted}: they have {own}",
            param="dimensions",
        )
    if shorter and wanted not in shorter:
        lengths = ", ".join(map(str, sorted({*shorter, own})))
        raise Unsupported(
            f"dimensions: the model's vectors can be cut to {lengths}, not to {wanted}", param="dimensions"
        )


def simulated(source: str) -> Encoder | None:
    """What a simulated model does; None: it generates."""
    if source != SIMULATED:
        return None
    return Encoder(
        dimensions=SIMULATED_DIMENSIONS,
        length=SIMULATED_LENGTH,
        positions=SIMULATED_LENGTH,
        pooling="mean_tokens",
        normalized=True,
        shorter=(),
    )


def find(config: bytes, read: Read) -> Encoder | None:
    """How the model with this config.json makes vectors; None: it is none of those. Raises BadRequest for one not served."""
    raw = read(MODULES_NAME)
    if raw is None:
        return None
    modules = _decoded(raw, MODULES_NAME, list[_Module])
    names = [module.name for module in modules]
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise _refused(
            f"its modules are {', '.join(names)}: Transformer, Pooling and Normalize are served, in that order"
        )
    if modules[0].path:
        raise _refused(f"its transformer is in the directory {modules[0].path}, and not beside {MODULES_NAME}")
    values = _values(config, "config.json")
    if (prompt := _values(read(PROMPTS_NAME), PROMPTS_NAME).get("default_prompt_name")) is not None:
        raise _refused(f"it puts the prompt {prompt!r} before each text: put it there and remove `default_prompt_name`")
    positions = _positions(values)
    limits = _values(read(LIMITS_NAME), LIMITS_NAME)
    made_for = limits.get("max_seq_length")
    dimensions, pooling = _pooling(read, modules[1].path)
    shorter = values.get("matryoshka_dimensions") or ([] if values.get("is_matryoshka") else None)
    return _converted(
        {
            "dimensions": dimensions,
            "length": min(made_for, positions) if isinstance(made_for, int) else positions,
            "positions": positions,
            "pooling": pooling,
            "normalized": len(modules) == 3,
            "lower_case": bool(limits.get("do_lower_case")),
            "shorter": shorter,
        }
    )


def _positions(config: dict[str, Any]) -> int:
    own = config.get("max_position_embeddings")
    if not isinstance(own, int):
        raise _refused("its config.json does not say the model's length, max_position_embeddings")
    padding = config.get("pad_token_id")
    taken = 1 + (padding if isinstance(padding, int) else 0) if config.get("model_type") in OFFSET_TYPES else 0
    return own - taken


def _pooling(read: Read, path: str) -> tuple[Any, str]:
    """How many numbers an output has, and what becomes of the outputs of a text's tokens."""
    where = f"{path}/config.json"
    values = _values(read(where), where)
    found = [
        name.removeprefix("pooling_mode_") for name, on in values.items() if on is True and name != "include_prompt"
    ]
    mode = values.get("pooling_mode")  # as newer releases write it
    if isinstance(mode, str):
        found = [next((each for each in POOLINGS if each.removesuffix("_tokens").removesuffix("_token") == mode), mode)]
    if len(found) != 1 or found[0] not in POOLINGS:
        raise _refused(
            f"it pools by {' and '.join(found) or 'nothing that is known'}: one of {', '.join(POOLINGS)} is served"
        )
    return values.get("word_embedding_dimension") or values.get("embedding_dimension"), found[0]


def _converted(values: dict[str, Any]) -> Encoder:
    try:
        return msgspec.convert(values, Encoder)
    except msgspec.ValidationError as error:
        raise _refused(str(error)) from error


def _values(raw: bytes | None, where: str) -> dict[str, Any]:
    return {} if raw is None else _decoded(raw, where, dict[str, Any])


def _decoded(raw: bytes, where: str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _refused(f"{where} cannot be read: {error}") from error


def _refused(reason: str) -> BadRequest:
    return BadRequest(f"this model of vectors is not served: {reason}", param="source")
