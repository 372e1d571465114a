"""POST /v1/embeddings."""

import base64
import struct

import msgspec

from ingress.embeddings_body import EmbeddingsBody
from ingress.error_shapes import OPENAI, ErrorShape
from ingress.family import Admitted, Choice, OnePath
from ingress.sse import Events, encode
from shared.errors import Unsupported
from shared.wire import Usage

PATH = "/v1/embeddings"
FLOAT_BYTES = 4


class EmbeddingItem(msgspec.Struct):
    """`embedding`: numbers, or the base64 of them as float32, little-endian."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingsUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(msgspec.Struct):
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingsUsage
    object: str = "list"


class Embeddings(OnePath):
    """The embeddings family: vectors. Never streamed."""

    route, summary = PATH, "Embeddings, as OpenAI has them"
    decoder, answer_type = msgspec.json.Decoder(EmbeddingsBody), EmbeddingsAnswer
    errors: ErrorShape = OPENAI

    def events(self, admitted: Admitted) -> Events:
        raise Unsupported("stream: embeddings are not streamed", param="stream")

    def plain(self, admitted: Admitted, choices: list[Choice], usage: Usage, claims: int) -> bytes:
        show = encoded if admitted.framing.base64 else numbers
        items = [EmbeddingItem(index, show(choice.vector)) for index, choice in enumerate(choices)]
        total = EmbeddingsUsage(usage.prompt_tokens, usage.prompt_tokens + usage.completion_tokens)
        return encode(EmbeddingsAnswer(items, admitted.reference, total))


def numbers(vector: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(vector) // FLOAT_BYTES}f", vector))


def encoded(vector: bytes) -> str:
    return base64.b64encode(vector).decode()
