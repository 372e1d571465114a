"""A decoded body -> what goes on the wire, with the checks that depend on settings and on the model."""

import secrets

from ingress.constraints import to_grammar
from ingress.schemas import INSTEAD, NEUTRAL, Body
from ingress.tool_schemas import dialect
from shared.errors import BadRequest, ContextLength, Unsupported, WrongTask
from shared.records import Version
from shared.settings import Settings
from shared.tools import MARKS
from shared.wire import Input, Sampling

SEED_BITS = 64
TOP_P_MIN = 1e-9  # what 0 stands for: the likeliest token alone


def check_task(body: Body, version: Version) -> None:
    """Raises WrongTask when a version is asked for what it does not do."""
    if body.EMBEDS and version.encoder is None:
        raise WrongTask(f"{version.model} generates text and makes no embeddings", param="model")
    if not body.EMBEDS and version.encoder is not None:
        raise WrongTask(f"{version.model} makes embeddings, by /v1/embeddings, and generates no text", param="model")


def refuse_not_served(body: Body) -> None:
    """Raises Unsupported for a field that would change the answer and that is not served."""
    for name in body.not_served():
        value = getattr(body, name)
        if value is not None and value not in NEUTRAL.get(name, ()):
            instead = f"; {INSTEAD[name]}" if name in INSTEAD else ""
            raise Unsupported(f"{name}: not supported{instead}", param=name)


def to_sampling(body: Body, version: Version, settings: Settings) -> Sampling:
    """How to choose tokens, the seed fixed. Raises BadRequest, Unsupported or ContextLength."""
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options: only with `stream: true`", param="stream_options")
    choices = 1 if body.n is None else body.n
    if choices > settings.choices_max:
        raise BadRequest(f"n: at most {settings.choices_max}, got {choices}", param="n")
    max_tokens = body.output_tokens_max()
    _check_output_length(max_tokens, body.min_tokens, version)
    use = body.tool_use()
    stop = _stop(getattr(body, body.STOP), body.STOP, settings.stop_strings_max)
    return Sampling(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else max(body.top_p, TOP_P_MIN),
        top_k=max(body.top_k or 0, 0),  # -1 is off, too
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=body.logit_bias or {},
        seed=_seed(body.seed),
        n=choices,
        stop=stop,
        include_stop=body.INCLUDES_STOP and bool(stop),
        stop_token_ids=body.stop_token_ids or [],
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
        logprobs=body.logprobs_wanted(),
        echo=body.echoes(),
        grammar=to_grammar(body, use, dialect(version)),
        shown=[] if use is None else list(MARKS[dialect(version)]),
    )


def check_prompt_length(prompt: Input, body_bytes: int, version: Version, settings: Settings) -> None:
    """Refuse what cannot fit before any work is done; the exact check is the worker's. Raises ContextLength."""
    if not version.max_model_len:
        return
    if prompt.token_ids is not None and len(prompt.token_ids) > version.max_model_len:
        raise ContextLength(
            f"the prompt has {len(prompt.token_ids)} tokens, the model's length is {version.max_model_len} tokens"
        )
    limit = settings.prompt_bytes_per_token_max * version.max_model_len
    if body_bytes <= limit:  # the text is part of the body
        return
    size = _text_bytes(prompt)
    if size > limit:
        raise ContextLength(
            f"the prompt has {size} bytes of text; the model's length of {version.max_model_len} tokens holds at most "
            f"{limit} bytes"
        )


def _text_bytes(prompt: Input) -> int:
    if prompt.messages is not None:
        return sum(len((message.content or "").encode()) for message in prompt.messages)
    return len((prompt.prompt or "").encode())


def _check_output_length(max_tokens: int | None, min_tokens: int | None, version: Version) -> None:
    if max_tokens is None:
        return
    if version.max_model_len and max_tokens > version.max_model_len:
        raise ContextLength(
            f"max_tokens: {max_tokens} is over the model's length of {version.max_model_len} tokens",
            param="max_tokens",
        )
    if min_tokens and min_tokens > max_tokens:
        raise BadRequest(f"min_tokens: {min_tokens} is over max_tokens, {max_tokens}", param="min_tokens")


def _seed(given: int | None) -> int:
    if given is None:
        return secrets.randbits(SEED_BITS - 1)
    if not -(1 << SEED_BITS - 1) <= given < 1 << SEED_BITS:
        raise BadRequest(f"seed: must fit into {SEED_BITS} bits", param="seed")
    return given % (1 << SEED_BITS)


def _stop(given: str | list[str] | None, name: str, count_max: int) -> list[str]:
    if given is None:
        return []
    strings = [given] if isinstance(given, str) else given
    if len(strings) > count_max:
        raise BadRequest(f"{name}: at most {count_max} strings, got {len(strings)}", param=name)
    if "" in strings:
        raise BadRequest(f"{name}: an empty string stops nothing", param=name)
    return strings
