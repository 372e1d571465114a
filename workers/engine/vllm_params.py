"""Our requests in vLLM's words, and its answers in ours."""

import hashlib
from collections.abc import Mapping
from typing import Any

from shared.errors import Unsupported
from shared.wire import Logprob, Sampling, TopLogprob
from workers.engine.text import TextSide

PROBABILITY_ZERO = -9999.0  # JSON has no infinity


def refuse_what_differs(sampling: Sampling) -> None:
    """Raise Unsupported for what vLLM cannot do as our own engine does."""
    if sampling.grammar is not None:
        what = "tools" if sampling.grammar.kind == "tools" else "response_format"
        raise Unsupported(f"{what}: output is not held to a grammar by a version with engine=vllm", param=what)
    if sampling.echo and sampling.logprobs is not None:
        raise Unsupported("a prompt is not scored by a version with engine=vllm", param="echo")


def parameters(sampling: Sampling, choice: int, done: int, length_left: int) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams for the rest of a choice of which `done` tokens exist already.

    Text and stop strings are ours. The seed goes in with the position: a resumed choice goes on with fresh draws.
    """
    return {
        "max_tokens": length_left,
        "min_tokens": min(max(0, sampling.min_tokens - done), length_left),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": dict(sampling.logit_bias) or None,
        "seed": _seed(sampling.seed, choice, done),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "logprobs": sampling.logprobs,
        "detokenize": False,
    }


def logprob(token: int, known: Mapping[int, Any], count: int, text: TextSide) -> Logprob:
    """vLLM's log probabilities at one position: of the sampled token, and of the `count` most likely."""
    ranked = sorted((each for each in known.items() if each[1].rank is not None), key=lambda each: each[1].rank)
    top = [TopLogprob(id=each, logprob=_finite(value.logprob), bytes=text.token_bytes(each)) for each, value in ranked]
    return Logprob(
        id=token,
        logprob=_finite(known[token].logprob),
        bytes=text.token_bytes(token),
        top=top[:count],
        special=token in text.special_ids,
    )


def _seed(seed: int, choice: int, done: int) -> int:
    """63 bits, for vLLM's generators take no more."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {choice} {done}".encode(), digest_size=8).digest(), "little") >> 1


def _finite(value: float) -> float:
    return max(value, PROBABILITY_ZERO)
