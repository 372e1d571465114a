"""The simulated encoder, `sim:embedder`: deterministic vectors in no time. Everything but the vectors is the real engine."""

import hashlib
import math
import struct
from array import array

from shared import encoders
from shared.encoders import Encoder
from shared.errors import BadRequest
from shared.records import EngineSettings
from shared.wire import Input
from workers.engine.encoder_engine import EncoderEngine
from workers.engine.load import LoadRefused
from workers.engine.request import EngineInfo
from workers.engine.rounds import RoundLimits
from workers.engine.sim import VOCABULARY_SIZE, SimulatedText

SLOTS = 64
LIMITS = RoundLimits(batch=4096, round=16_384)


class SimulatedVectors:
    """A vector is a hash of the input's ids, scaled to length 1."""

    vocabulary_size = VOCABULARY_SIZE

    def __init__(self, dimensions: int) -> None:
        self._dimensions = dimensions
        self._text = SimulatedText()

    def tokenise(self, texts: list[str]) -> list[list[int]]:
        if not all(text.split() for text in texts):
            raise BadRequest("input: a simulated model needs a word in each", param="input")
        return [self._text.encode(Input(prompt=text)) for text in texts]

    def embed(self, inputs: list[list[int]], dimensions: list[int]) -> list[bytes]:
        return [self._vector(ids, count) for ids, count in zip(inputs, dimensions, strict=True)]

    def _vector(self, ids: list[int], dimensions: int) -> bytes:
        seed = hashlib.shake_128(array("q", ids).tobytes()).digest(self._dimensions)
        numbers = [each - 127.5 for each in seed][: dimensions or None]
        norm = math.sqrt(sum(each * each for each in numbers))
        return struct.pack(f"<{len(numbers)}f", *(each / norm for each in numbers))


def simulated_encoder_info(settings: EngineSettings) -> EngineInfo:
    """What the engine can hold. Raises LoadRefused."""
    encoder = encoders.simulated(encoders.SIMULATED)
    assert encoder is not None
    try:
        length = encoders.length(encoder, settings.max_model_len)
    except BadRequest as error:
        raise LoadRefused(error.message) from error
    return EngineInfo(
        max_model_len=length, slots=settings.slots or SLOTS, blocks_total=0, device="simulated", dtype="none"
    )


def load_simulated_encoder(settings: EngineSettings, encoder: Encoder) -> EncoderEngine:
    """The engine of `sim:embedder`. Raises LoadRefused."""
    return EncoderEngine(SimulatedVectors(encoder.dimensions), encoder, simulated_encoder_info(settings), LIMITS)
