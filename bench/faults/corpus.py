"""Questions whose answers are known: the simulated engine, run here without a service around it, says what must come out."""

import asyncio
import random
from typing import Any

import msgspec

from shared.records import EngineSettings
from shared.wire import ChatMessage, Input, Logprob, Sampling
from workers.engine.request import EngineRequest, TokenEvent
from workers.engine.sim import load_simulated

TOKENS_MAX = 160
KINDS = ("greedy", "seeded", "choices", "scored", "stop")
INFER, COMPLETIONS, CHAT = "/v1/models/{model}/infer", "/v1/completions", "/v1/chat/completions"


class Truth(msgspec.Struct):
    """What one choice of a question comes to: the text of each token and, where asked for, its log probability."""

    tokens: list[str]
    logprobs: list[Logprob] | None = None


class Question(msgspec.Struct, kw_only=True):
    """A request in everything but its length, and the truth about each of its choices up to TOKENS_MAX tokens."""

    kind: str
    route: str
    prompt: str
    sampling: Sampling
    truths: list[Truth] = []

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
        if self.route == INFER:
            return body | {"input": self.prompt} | ({} if given.logprobs is None else {"logprobs": given.logprobs})
        body |= {"model": model, "n": given.n}
        if self.route == COMPLETIONS:
            return body | {"prompt": self.prompt} | ({} if given.logprobs is None else {"logprobs": given.logprobs})
        scores = {} if given.logprobs is None else {"logprobs": True, "top_logprobs": given.logprobs}
        return body | {"messages": [{"role": "user", "content": self.prompt}]} | scores


async def make(seed: int, questions: int) -> list[Question]:
    """Questions of every kind and route, with their truths."""
    dice = random.Random(seed)
    made = [_question(dice, number) for number in range(questions)]
    await _answer(made)
    for question in made:
        if question.kind == "stop":  # ends somewhere inside, at a string that goes over the edge of two tokens
            cut = dice.randrange(20, TOKENS_MAX)
            tokens = question.truths[0].tokens
            question.sampling.stop = [tokens[cut - 1][-2:] + tokens[cut][:3]]
    return made


def _question(dice: random.Random, number: int) -> Question:
    kind = KINDS[number % len(KINDS)]
    routes = (COMPLETIONS, CHAT) if kind == "choices" else (INFER, COMPLETIONS, CHAT)
    sampling = Sampling(max_tokens=TOKENS_MAX, temperature=0.0)
    if kind in ("seeded", "choices"):
        sampling.temperature, sampling.seed = 0.8, dice.getrandbits(31)
    if kind == "choices":
        sampling.n = 2
    if kind == "scored":
        sampling.logprobs = 2
    prompt = " ".join(f"w{dice.getrandbits(20):x}" for _ in range(dice.randrange(3, 40)))
    return Question(kind=kind, route=dice.choice(routes), prompt=prompt, sampling=sampling)


async def _answer(questions: list[Question]) -> None:
    engine = load_simulated("zero", EngineSettings())
    waiting = {str(number): question for number, question in enumerate(questions)}
    done = asyncio.Event()
    for question in questions:
        question.truths = [Truth([]) for _ in range(question.sampling.n)]

    def on_events(events: list[TokenEvent]) -> None:
        for event in events:
            truth = waiting[event.key].truths[event.choice]
            truth.tokens += event.text
            if event.logprobs is not None:
                truth.logprobs = (truth.logprobs or []) + event.logprobs
            if event.usage is not None:
                del waiting[event.key]
        if not waiting:
            done.set()

    engine.start(asyncio.get_running_loop(), on_events)
    try:
        for key, question in list(waiting.items()):
            ids = engine.prepare(question.input(), question.sampling)
            engine.submit(EngineRequest(key=key, tenant="", prompt_ids=ids, sampling=question.sampling))
        await asyncio.wait_for(done.wait(), 60)
    finally:
        await asyncio.to_thread(engine.stop)
