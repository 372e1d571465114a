"""One form for what an answer says, whichever API it is of and whether it came plain or as a stream."""

import json
from dataclasses import dataclass, field
from typing import Any

from anthropic import types as anthropic_types
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from .documented import CompletionChunk, EchoedCompletion, documented

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"


@dataclass
class Said:
    """One choice."""

    text: str | None = None
    calls: list[tuple[str, str]] = field(default_factory=list)  # name and arguments, as they were written
    finish: str | None = None
    tokens: list[Any] = field(default_factory=list)  # of the log probabilities: token and place, or bytes
    scores: list[float | None] = field(default_factory=list)  # of the tokens and of their alternatives, in order

    def say(self, text: str | None) -> None:
        if text is not None:
            self.text = (self.text or "") + text

    def score_chat(self, logprobs: Any) -> None:
        for one in logprobs.content if logprobs else ():
            for each in (one, *one.top_logprobs):
                self.tokens.append(tuple(each.bytes))
                self.scores.append(each.logprob)

    def score_text(self, logprobs: Any) -> None:
        if logprobs is None:
            return
        tops = [None] * len(logprobs.tokens) if logprobs.top_logprobs is None else logprobs.top_logprobs
        lists = (logprobs.tokens, logprobs.text_offset, logprobs.token_logprobs, tops)
        for token, offset, score, top in zip(*lists, strict=True):
            self.tokens.append((token, offset, *(top or ())))
            self.scores += (score, *(top or {}).values())

    def score_native(self, score: Any) -> None:
        for each in (score, *score["top"]) if score else ():
            self.tokens.append(each["id"])
            self.scores.append(each["logprob"])


@dataclass
class Gathered:
    """All of an answer. Usage is prompt and completion: how much of the prompt was cached depends on what came before."""

    choices: list[Said]
    usage: tuple[int, int]


def events_of(raw: str) -> list[str]:
    """The data of a stream's events; that it ends as it should is checked."""
    events = [part.split("data: ", 1)[1] for part in raw.split("\n\n") if "data: " in part]
    if events[-1] == "[DONE]":
        return events[:-1]
    assert "message_stop" in events[-1] or "finish_reason" in events[-1], events[-1]
    return events


def plain(path: str, raw: str) -> Gathered:
    """A plain answer."""
    if path == CHAT:
        return _chat(documented(ChatCompletion, raw))
    if path == COMPLETIONS:
        return _completion(documented(EchoedCompletion, raw))
    if path == MESSAGES:
        return _message(documented(anthropic_types.Message, raw))
    answer = json.loads(raw)
    said = Said(answer["text"], finish=answer["finish_reason"])
    for score in answer.get("scores") or ():
        said.score_native(score)
    return Gathered([said], _usage(answer["usage"]))


def streamed(path: str, raw: str) -> Gathered:
    """A stream that asked for its usage, where that has to be asked for."""
    events = events_of(raw)
    if path == CHAT:
        return _chat_chunks([documented(ChatCompletionChunk, each) for each in events])
    if path == COMPLETIONS:
        return _completion_chunks([documented(CompletionChunk, each) for each in events])
    if path == MESSAGES:
        return _message_events([documented(anthropic_types.RawMessageStreamEvent, each) for each in events])
    told = [json.loads(each) for each in events]
    assert [each["index"] for each in told[:-1]] == list(range(len(told) - 1))
    said = Said("".join(each["token"] for each in told[:-1]), finish=told[-1]["finish_reason"])
    for each in told[:-1]:
        said.score_native(each.get("score"))
    return Gathered([said], _usage(told[-1]["usage"]))


def _usage(given: Any) -> tuple[int, int]:
    given = given if isinstance(given, dict) else given.model_dump()
    assert given["total_tokens"] == given["prompt_tokens"] + given["completion_tokens"]
    return given["prompt_tokens"], given["completion_tokens"]


def _chat(answer: ChatCompletion) -> Gathered:
    choices = []
    for index, choice in enumerate(answer.choices):
        assert choice.index == index
        calls = [(each.function.name, each.function.arguments) for each in choice.message.tool_calls or ()]
        said = Said(choice.message.content, calls, choice.finish_reason)
        said.score_chat(choice.logprobs)
        choices.append(said)
    return Gathered(choices, _usage(answer.usage))


def _completion(answer: EchoedCompletion) -> Gathered:
    choices = []
    for index, choice in enumerate(answer.choices):
        assert choice.index == index
        said = Said(choice.text, finish=choice.finish_reason)
        said.score_text(choice.logprobs)
        choices.append(said)
    return Gathered(choices, _usage(answer.usage))


def _chat_chunks(chunks: list[ChatCompletionChunk]) -> Gathered:
    found: dict[int, Said] = {}
    for chunk in _framed(chunks):
        for choice in chunk.choices:
            if choice.index not in found:
                assert choice.delta.role == "assistant", "a choice begins with its role"
                found[choice.index] = Said()
            else:
                assert choice.delta.role is None
            said = found[choice.index]
            assert said.finish is None, "a choice ends once"
            said.say(choice.delta.content)
            said.score_chat(choice.logprobs)
            for call in choice.delta.tool_calls or ():
                if call.index == len(said.calls):
                    assert call.id
                    assert call.type == "function"
                    said.calls.append((call.function.name, call.function.arguments))
                    continue
                assert (call.id, call.type, call.function.name) == (None, None, None), "they are told once"
                name, arguments = said.calls[call.index]
                said.calls[call.index] = (name, arguments + call.function.arguments)
            said.finish = choice.finish_reason
    return Gathered([found[index] for index in range(len(found))], _usage(chunks[-1].usage))


def _completion_chunks(chunks: list[CompletionChunk]) -> Gathered:
    found: dict[int, Said] = {}
    for chunk in _framed(chunks):
        for choice in chunk.choices:
            said = found.setdefault(choice.index, Said())
            assert said.finish is None, "a choice ends once"
            said.say(choice.text)
            said.score_text(choice.logprobs)
            said.finish = choice.finish_reason
    return Gathered([found[index] for index in range(len(found))], _usage(chunks[-1].usage))


def _framed(chunks: list[Any]) -> list[Any]:
    """The chunks before the one with the usage; that they are of one answer is checked."""
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert [bool(chunk.choices) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert all("usage" in chunk.model_fields_set for chunk in chunks), "it is null until it is known"
    return chunks[:-1]


def _message(answer: anthropic_types.Message) -> Gathered:
    said = Said(finish=f"{answer.stop_reason} {answer.stop_sequence}")
    for block in answer.content:
        if block.type == "text":
            said.say(block.text)
        else:
            assert block.type == "tool_use"
            said.calls.append((block.name, json.dumps(block.input)))
    used = answer.usage
    return Gathered([said], (used.input_tokens + (used.cache_read_input_tokens or 0), used.output_tokens))


def _message_events(events: list[Any]) -> Gathered:
    assert [events[0].type, events[-2].type, events[-1].type] == ["message_start", "message_delta", "message_stop"]
    said, written = Said(), ""
    for event in events[1:-2]:
        if event.type == "content_block_start" and event.content_block.type == "tool_use":
            said.calls.append((event.content_block.name, ""))
            written = ""
        elif event.type == "content_block_delta" and event.delta.type == "text_delta":
            said.say(event.delta.text)
        elif event.type == "content_block_delta":
            written += event.delta.partial_json
            said.calls[-1] = (said.calls[-1][0], json.dumps(json.loads(written)) if written.endswith("}") else written)
    delta, used = events[-2].delta, events[-2].usage
    said.finish = f"{delta.stop_reason} {delta.stop_sequence}"
    return Gathered([said], (used.input_tokens + (used.cache_read_input_tokens or 0), used.output_tokens))
