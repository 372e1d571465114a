"""What a request may ask of an engine. The ingress checks too, but not every publisher comes through one."""

import math
from collections.abc import Sequence

from shared.errors import BadRequest, ContextLength, WrongTask
from shared.wire import Embedding, Sampling

CHOICES_MAX = 128
LOGPROBS_MAX = 20
GRAMMAR_LENGTH_MAX = 1 << 18


class Generates:
    """The part of the protocol that an engine which generates refuses."""

    def prepare_inputs(self, embedding: Embedding) -> list[list[int]]:
        raise WrongTask("this model generates text and makes no embeddings", param="model")


def check_sampling(sampling: Sampling, vocabulary_size: int) -> None:
    """Raise BadRequest, naming the parameter, for a value that no sampler can use."""
    limits: list[tuple[str, float, float, float]] = [
        ("n", sampling.n, 1, CHOICES_MAX),
        ("temperature", sampling.temperature, 0, 1e4),
        ("top_k", sampling.top_k, 0, math.inf),
        ("min_p", sampling.min_p, 0, 1),
        ("repetition_penalty", sampling.repetition_penalty, 1e-4, 1e4),
        ("presence_penalty", sampling.presence_penalty, -1e4, 1e4),
        ("frequency_penalty", sampling.frequency_penalty, -1e4, 1e4),
        ("min_tokens", sampling.min_tokens, 0, math.inf),
    ]
    if sampling.max_tokens is not None:
        limits.append(("max_tokens", sampling.max_tokens, 0, math.inf))
    if sampling.logprobs is not None:
        limits.append(("logprobs", sampling.logprobs, 0, min(LOGPROBS_MAX, vocabulary_size)))
    for name, value, least, most in limits:
        if not least <= value <= most:
            bounds = f"at least {least:g}" if most == math.inf else f"between {least:g} and {most:g}"
            raise BadRequest(f"{name} must be {bounds}, not {value}", param=name)
    if not 0 < sampling.top_p <= 1:
        raise BadRequest(f"top_p must be above 0 and at most 1, not {sampling.top_p}", param="top_p")
    if any(not stop for stop in sampling.stop):
        raise BadRequest("a stop string must not be empty", param="stop")
    if sampling.grammar is not None and len(sampling.grammar.body) > GRAMMAR_LENGTH_MAX:
        raise BadRequest(f"a grammar has at most {GRAMMAR_LENGTH_MAX} characters", param="response_format")
    check_ids(sampling.stop_token_ids, vocabulary_size, "stop_token_ids")
    check_ids(list(sampling.logit_bias), vocabulary_size, "logit_bias")
    if not all(math.isfinite(bias) for bias in sampling.logit_bias.values()):
        raise BadRequest("logit_bias must be finite", param="logit_bias")


def check_ids(ids: Sequence[int], vocabulary_size: int, param: str) -> None:
    """Raise BadRequest if one of `ids` is no token of the model."""
    if ids and not (min(ids) >= 0 and max(ids) < vocabulary_size):
        wrong = next(token for token in ids if not 0 <= token < vocabulary_size)
        raise BadRequest(f"{wrong} is not a token id of this model (0 to {vocabulary_size - 1})", param=param)


def check_length(prompt_tokens: int, max_tokens: int | None, length_max: int) -> None:
    """Raise ContextLength if a prompt, with the output asked for, is longer than the model takes."""
    limit = f"This model's maximum context length is {length_max} tokens."
    if prompt_tokens >= length_max:
        raise ContextLength(f"{limit} However, your prompt has {prompt_tokens} tokens.", param="messages")
    if max_tokens is not None and prompt_tokens + max_tokens > length_max:
        raise ContextLength(
            f"{limit} However, you requested {prompt_tokens + max_tokens} tokens ({prompt_tokens} in the prompt,"
            f" {max_tokens} in the completion).",
            param="max_tokens",
        )
