"""The body of /v1/embeddings, as OpenAI has it.

It is a body like those of the other inference routes, so that all that is common to them is served here too. On the bus it
is a request for each pack of inputs: a request for each input would cost more than a short text's vector, and one for all
of them could not be shared by several workers.
"""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from ingress.schemas import Body, TokenId
from shared import encoders
from shared.encoders import Encoder
from shared.errors import BadRequest, ContextLength
from shared.records import Version
from shared.settings import Settings
from shared.wire import Embedding, Input

PACK_INPUTS_MAX = 64
PACK_TOKENS_MAX = 8192  # by BYTES_PER_TOKEN, where the tokens are not known
BYTES_PER_TOKEN = 4


class EmbeddingsBody(Body, kw_only=True):
    """POST /v1/embeddings. `to_inputs` is its packs."""

    EMBEDS, SEVERAL = True, "input"
    TAKEN: ClassVar[frozenset[str]] = frozenset(
        {"model", "input", "encoding_format", "dimensions", "user", "prompt_cache_key"}
    )

    model: str
    input: str | list[str | TokenId | list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=encoders.DIMENSIONS_MAX)] | None = None

    @classmethod
    def not_served(cls) -> list[str]:
        return [name for name in cls.__struct_fields__ if name not in cls.TAKEN]

    def to_inputs(self) -> list[Input]:
        packs: list[list[str | list[int]]] = []
        tokens = 0  # of the last pack
        for each in self._inputs():
            estimated = _estimated_tokens(each)
            tokens += estimated
            if not packs or len(packs[-1]) == PACK_INPUTS_MAX or tokens > PACK_TOKENS_MAX:
                packs.append([])
                tokens = estimated
            packs[-1].append(each)
        first = 0
        found = []
        for pack in packs:
            found.append(Input(embedding=Embedding(pack, first, self.dimensions or 0)))
            first += len(pack)
        return found

    def to_input(self) -> Input:
        """All in one: when it is one pack, or when a caller can take but one request."""
        return Input(embedding=Embedding(list(self._inputs()), 0, self.dimensions or 0))

    def output_tokens_max(self) -> int | None:
        return 0

    def logprobs_wanted(self) -> int | None:
        return None

    def in_base64(self) -> bool:
        return self.encoding_format == "base64"

    def _inputs(self) -> Iterator[str | list[int]]:
        given = self.input
        if not given:
            raise BadRequest("input: must not be empty", param="input")
        if isinstance(given, list) and isinstance(given[0], int):
            if not all(isinstance(each, int) for each in given):
                raise BadRequest("input: token ids and other items do not mix", param="input")
            yield [each for each in given if isinstance(each, int)]
            return
        for number, each in enumerate([given] if isinstance(given, str) else given):
            where = f"input[{number}]"
            if isinstance(each, int):
                raise BadRequest(f"{where}: token ids and other items do not mix", param=where)
            if not each:
                raise BadRequest(f"{where}: must not be empty", param=where)
            yield each


def check_embedding(embedding: Embedding, body_bytes: int, version: Version, settings: Settings) -> None:
    """What depends on the model: the length of vectors, and of the inputs as far as it shows. Raises BadRequest."""
    encoder: Encoder | None = version.encoder
    if encoder is not None:
        encoders.check_dimensions(encoder, embedding.dimensions)
    length = version.max_model_len
    limit = settings.prompt_bytes_per_token_max * length
    if not length:
        return
    for number, each in enumerate(embedding.inputs, embedding.first):
        where = f"input[{number}]"
        if not isinstance(each, str):
            if len(each) > length:
                raise ContextLength(
                    f"This model's maximum input length is {length} tokens. However, {where} has {len(each)} tokens.",
                    param=where,
                )
        elif body_bytes > limit and (size := len(each.encode())) > limit:  # the text is part of the body
            raise ContextLength(
                f"{where} has {size} bytes of text; the model's length of {length} tokens holds at most {limit} bytes",
                param=where,
            )


def _estimated_tokens(given: str | list[int]) -> int:
    return len(given) if isinstance(given, list) else len(given) // BYTES_PER_TOKEN + 1
