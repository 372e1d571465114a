"""An encoder's weights in plain torch: load, try, and then a batch of token ids becomes vectors.

Any model that transformers has and that takes an attention mask: BERT and its kin, and decoders that were trained for it.
One whose vectors depend on what else is in the batch is refused when it is loaded.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel
from transformers.utils.logging import disable_progress_bar

from shared import encoders
from shared.encoders import Encoder
from shared.errors import BadRequest
from shared.records import EngineSettings
from workers.engine import sizing
from workers.engine.encoder_engine import EncoderEngine
from workers.engine.load import LoadRefused
from workers.engine.memory import available
from workers.engine.model import DTYPES, Phases, set_threads
from workers.engine.request import EngineInfo
from workers.engine.rounds import RoundLimits
from workers.engine.tokenizer import load_tokenizer

SLOTS = 64  # requests that are held at a time, of up to 128 inputs each
LIMITS_CPU = RoundLimits(batch=2048, round=8192)
LIMITS_CUDA = RoundLimits(batch=16_384, round=65_536)
PROBE_LENGTHS = (3, 17, 5)
COSINE_MIN = 0.999  # of a vector that was computed in a batch with the one computed alone

log = logging.getLogger(__name__)


@torch.inference_mode()
def load(directory: Path, settings: EngineSettings, threads: int, encoder: Encoder) -> EncoderEngine:
    """The engine of the model in `directory` (Hugging Face layout, safetensors). Raises LoadRefused with the reason."""
    set_threads(threads)
    disable_progress_bar()
    phases = Phases()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # vectors are stored and compared for years: they are as exact as they were trained, unless fewer bits are asked for
    dtype = torch.float32 if settings.dtype == "auto" else DTYPES[settings.dtype]
    try:
        length = encoders.length(encoder, settings.max_model_len)
    except BadRequest as error:
        raise LoadRefused(error.message) from error
    with phases("tokenizer"):
        tokenizer = load_tokenizer(directory)
    with phases("weights"):
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available()
        sizing.refuse_weights(sizing.weight_bytes(directory, dtype.itemsize), free, "memory")
        model = _weights(directory, dtype, device).eval()
    vectors = TorchVectors(model, tokenizer, encoder, device)
    with phases("check"):
        _check(vectors, encoder)
    info = EngineInfo(
        max_model_len=length,
        slots=settings.slots or SLOTS,
        blocks_total=0,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        load_seconds=phases.seconds,
    )
    log.info("loaded %s: %s", directory.name, info)
    return EncoderEngine(vectors, encoder, info, LIMITS_CPU if device.type == "cpu" else LIMITS_CUDA)


class TorchVectors:
    """The `VectorModel` of a model of transformers."""

    def __init__(self, model: Any, tokenizer: Any, encoder: Encoder, device: torch.device) -> None:
        self.vocabulary_size: int = model.get_input_embeddings().num_embeddings
        self._model, self._encoder, self._device = model, encoder, device
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._padding: int = tokenizer.pad_token_id or 0

    def tokenise(self, texts: list[str]) -> list[list[int]]:
        try:
            return [each.ids for each in self._backend.encode_batch_fast(texts, add_special_tokens=True)]
        except (UnicodeError, TypeError) as error:
            raise BadRequest(f"input: the text cannot be tokenised: {error}", param="input") from error

    @torch.inference_mode()
    def embed(self, inputs: list[list[int]], dimensions: list[int]) -> list[bytes]:
        lengths = torch.tensor([len(ids) for ids in inputs])
        longest = int(lengths.max())
        padded = torch.tensor([ids + [self._padding] * (longest - len(ids)) for ids in inputs])
        mask = torch.arange(longest) < lengths[:, None]
        outputs = self._model(
            input_ids=padded.to(self._device),
            attention_mask=None if mask.all() else mask.long().to(self._device),
        ).last_hidden_state.float()
        pooled = pool(outputs, mask.to(self._device), self._encoder.pooling).cpu()
        return [self._bytes(vector, count) for vector, count in zip(pooled, dimensions, strict=True)]

    def _bytes(self, vector: torch.Tensor, dimensions: int) -> bytes:
        """A vector as it goes to the caller: cut, then scaled."""
        vector = vector[: dimensions or None]
        if self._encoder.normalized:
            vector = vector / vector.norm().clamp(min=torch.finfo(torch.float32).tiny)
        return vector.numpy().astype("<f4").tobytes() if bool(vector.isfinite().all()) else b""


def pool(outputs: torch.Tensor, mask: torch.Tensor, pooling: encoders.Pooling) -> torch.Tensor:
    """One vector of each text, [B, D], of the outputs of its tokens, [B, T, D]; `mask` [B, T] is false for padding."""
    if pooling == "cls_token":
        return outputs[:, 0]
    if pooling == "lasttoken":
        return outputs[torch.arange(len(outputs), device=outputs.device), mask.sum(1) - 1]
    kept = mask[:, :, None]
    if pooling == "max_tokens":
        return outputs.masked_fill(~kept, -torch.inf).amax(1)
    total, count = (outputs * kept).sum(1), mask.sum(1, keepdim=True)
    return total / (count if pooling == "mean_tokens" else count.sqrt())


def _weights(directory: Path, dtype: torch.dtype, device: torch.device) -> Any:
    where = {"local_files_only": True, "trust_remote_code": False}
    try:
        model, said = AutoModel.from_pretrained(
            directory,
            config=AutoConfig.from_pretrained(directory, **where),
            dtype=dtype,
            device_map=None if device.type == "cpu" else {"": device},
            use_safetensors=True,
            output_loading_info=True,
            **where,
        )
    except Exception as error:  # a library's errors over files of any origin
        raise LoadRefused(f"the weights cannot be loaded: {type(error).__name__}: {error}") from error
    if missing := sorted(name for name in said["missing_keys"] if not name.startswith("pooler.")):
        raise LoadRefused(f"the weights lack {', '.join(missing[:5])}" + (", ..." if len(missing) > 5 else ""))
    return model


def _check(vectors: TorchVectors, encoder: Encoder) -> None:
    """Raises LoadRefused for a model whose vectors are not what its files say, or depend on their neighbours."""
    generator = torch.Generator().manual_seed(0)
    inputs: list[list[int]] = [
        torch.randint(vectors.vocabulary_size, (length,), generator=generator).tolist() for length in PROBE_LENGTHS
    ]
    try:
        together = vectors.embed(inputs, [0] * len(inputs))
        alone = [vectors.embed([ids], [0])[0] for ids in inputs]
    except Exception as error:  # whatever a model raises
        raise LoadRefused(f"a first batch raised {type(error).__name__}: {error}") from error
    for one, other in zip(together, alone, strict=True):
        if not one or not other:
            raise LoadRefused("its vectors have numbers that are not finite")
        first, second = (torch.frombuffer(bytearray(each), dtype=torch.float32) for each in (one, other))
        if len(first) != encoder.dimensions:
            raise LoadRefused(f"its vectors have {len(first)} numbers, and its files say {encoder.dimensions}")
        if float(torch.cosine_similarity(first, second, dim=0)) < COSINE_MIN:
            raise LoadRefused("its vectors depend on what else is in the batch")
