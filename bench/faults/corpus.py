"""Questions whose answers are known: the engine, run here without a service around it, says what must come out."""

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec

from shared.records import EngineSettings
from shared.wire import ChatMessage, Grammar, Input, Logprob, Sampling
from workers.engine.load import load_engine
from workers.engine.request import Engine, EngineRequest, TokenEvent
from workers.engine.sim import load_simulated

TOKENS_MAX = 160
WORDS = (3, 39)  # of a prompt, each of which is a token to the simulated engine
KINDS = ("greedy", "seeded", "choices", "scored", "stop")
TOPICS = ("rivers", "mills", "turbines", "salt", "trains", "bees", "clouds", "maps")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "uses": {"type": "array", "items": {"type": "string", "maxLength": 24}, "minItems": 2, "maxItems": 2},
        "old": {"type": "boolean"},
    },
    "required": ["name", "uses", "old"],
    "additionalProperties": False,
}
MODEL_TOKENS = 48
SCHEMA_TOKENS = 120  # enough for any text of the schema
MODEL_ENGINE = EngineSettings(dtype="float32", max_model_len=512, slots=16, kv_blocks=512)
MODEL_THREADS = 1  # the same here and in the workers: another number adds in another order
INFER, COMPLETIONS, CHAT = "/v1/models/{model}/infer", "/v1/completions", "/v1/chat/completions"


class Truth(msgspec.Struct):
    """What one choice of a question comes to: the text of each token and, where asked for, its log probability."""

    tokens: list[str]
    finish: str = "length"
    logprobs: list[Logprob] | None = None


class Question(msgspec.Struct, kw_only=True):
    """A request in everything but its length, and the truth about each of its choices up to TOKENS_MAX tokens.

    One to a real model has a `length`, since what a cut leaves of a character is not known, and what it `used` of it.
    """

    kind: str
    route: str
    prompt: str
    sampling: Sampling
    truths: list[Truth] = []
    length: int = 0  # 0: any
    used: int = 0

    def input(self) -> Input:
        if self.route == CHAT:
            return Input(messages=[ChatMessage(role="user", content=self.prompt)])
        return Input(prompt=self.prompt)

    def body(self, model: str, max_tokens: int, stream: bool) -> dict[str, Any]:
        """The JSON of a request for the first `max_tokens` tokens."""
        given = self.sampling
        body: dict[str, Any] = {"max_tokens": max_tokens, "temperature": given.temperature, "seed": given.seed}
        body["stream"] = stream
        if stream:
            body["stream_options"] = {"include_usage": True}
        if given.stop:
            body["stop"] = given.stop
        if given.grammar is not None:
            schema = {"name": "answer", "schema": SCHEMA, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.route == INFER:
            return body | {"input": self.prompt} | ({} if given.logprobs is None else {"logprobs": given.logprobs})
        body |= {"model": model, "n": given.n}
        if self.route == COMPLETIONS:
            return body | {"prompt": self.prompt} | ({} if given.logprobs is None else {"logprobs": given.logprobs})
        scores = {} if given.logprobs is None else {"logprobs": True, "top_logprobs": given.logprobs}
        return body | {"messages": [{"role": "user", "content": self.prompt}]} | scores


async def make(seed: int, questions: int, words: tuple[int, int] = WORDS) -> list[Question]:
    """Questions of every kind and route with prompts of so many words, and their truths."""
    dice = random.Random(seed)
    made = [_question(dice, number, words) for number in range(questions)]
    await _answer(made, load_simulated("zero", EngineSettings()))
    for question in made:
        if question.kind == "stop":  # ends somewhere inside, at a string that goes over the edge of two tokens
            cut = dice.randrange(20, TOKENS_MAX)
            tokens = question.truths[0].tokens
            question.sampling.stop = [tokens[cut - 1][-2:] + tokens[cut][:3]]
    return made


def _sampling(dice: random.Random, kind: str, max_tokens: int) -> Sampling:
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0)
    if kind in ("seeded", "choices"):
        sampling.temperature, sampling.seed = 0.8, dice.getrandbits(31)
    if kind == "choices":
        sampling.n = 2
    if kind == "scored":
        sampling.logprobs = 2
    return sampling


def _question(dice: random.Random, number: int, words: tuple[int, int]) -> Question:
    kind = KINDS[number % len(KINDS)]
    routes = (COMPLETIONS, CHAT) if kind == "choices" else (INFER, COMPLETIONS, CHAT)
    sampling = _sampling(dice, kind, TOKENS_MAX)
    prompt = " ".join(f"w{dice.getrandbits(20):x}" for _ in range(dice.randint(*words)))
    return Question(kind=kind, route=dice.choice(routes), prompt=prompt, sampling=sampling)


async def of_model(seed: int, directory: Path, questions: int) -> list[Question]:
    """Questions to the real model in `directory`, some for JSON of a schema, with their truths."""
    dice = random.Random(seed)
    made = [_question_to_model(dice, number) for number in range(questions)]
    await _answer(made, await asyncio.to_thread(load_engine, "s3", directory, MODEL_ENGINE, MODEL_THREADS))
    return made


def _question_to_model(dice: random.Random, number: int) -> Question:
    kind = ("greedy", "schema", "seeded", "choices", "scored")[number % 5]
    sampling = _sampling(dice, kind, MODEL_TOKENS)
    if kind == "schema":
        sampling.max_tokens, sampling.grammar = (
            SCHEMA_TOKENS,
            Grammar("json_schema", msgspec.json.encode(SCHEMA).decode()),
        )
    return Question(
        kind=kind,
        route=COMPLETIONS if kind == "seeded" else CHAT,
        prompt=f"Fact number {dice.randrange(1000)} about {dice.choice(TOPICS)}:",
        sampling=sampling,
        length=sampling.max_tokens or 0,
    )


async def _answer(questions: list[Question], engine: Engine) -> None:
    waiting = {str(number): question for number, question in enumerate(questions)}
    done = asyncio.Event()
    for question in questions:
        question.truths = [Truth([]) for _ in range(question.sampling.n)]

    def on_events(events: list[TokenEvent]) -> None:
        for event in events:
            truth = waiting[event.key].truths[event.choice]
            assert event.error is None, f"the reference failed: {event.error}"
            truth.tokens += event.text
            truth.finish = event.finish or truth.finish
            if event.logprobs is not None:
                truth.logprobs = (truth.logprobs or []) + event.logprobs
            if event.usage is not None:
                waiting.pop(event.key).used = event.usage.completion_tokens
        if not waiting:
            done.set()

    engine.start(asyncio.get_running_loop(), on_events)
    try:
        for key, question in list(waiting.items()):
            ids = engine.prepare(question.input(), question.sampling)
            engine.submit(EngineRequest(key=key, tenant="", prompt_ids=ids, sampling=question.sampling))
        await asyncio.wait_for(done.wait(), 180)
    finally:
        await asyncio.to_thread(engine.stop)
