"""What a client got, and how it differs from what it should have got."""

import math
from typing import Any

import msgspec

from faults.corpus import CHAT, COMPLETIONS, INFER, Question, Truth

SCORE_NEAR = 0.01


class Got(msgspec.Struct):
    """One choice as it arrived: its pieces of text, the scores of its tokens, its finish."""

    pieces: list[str] = []
    scores: list[float] = []
    finish: str | None = None


class Answer:
    """An answer while it arrives. `add` takes the events of a stream, `whole` a plain answer."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.choices = [Got([], []) for _ in question.truths]
        self.error: str | None = None  # its code
        self.usage: dict[str, Any] | None = None
        self.claims = 0
        self.done = False
        self._index = 0
        self.gaps_in_index = 0

    @property
    def pieces(self) -> int:
        return sum(len(choice.pieces) for choice in self.choices)

    def add(self, data: bytes) -> bool:
        """Take one event; whether it brought text."""
        if data == b"[DONE]":
            self.done = True
            return False
        event = msgspec.json.decode(data)
        if "error" in event:
            self.error = str(event["error"]["code"])
            return False
        if event.get("usage"):
            self.usage = event["usage"]
            self.claims = event["claims"] if "claims" in event else event["headrace"]["claims"]
        if self.question.route == INFER:
            return self._add_native(event)
        fresh = False
        for part in event["choices"]:
            choice = self.choices[part["index"]]
            text = part["text"] if self.question.route == COMPLETIONS else part.get("delta", {}).get("content")
            if text:
                choice.pieces.append(text)
                fresh = True
            if part.get("logprobs"):
                choice.scores += _scores(self.question.route, part["logprobs"])
            if part["finish_reason"]:
                choice.finish = part["finish_reason"]
        return fresh

    def _add_native(self, event: dict[str, Any]) -> bool:
        choice = self.choices[0]
        if "finish_reason" in event:
            choice.finish, self.done = event["finish_reason"], True
            return False
        self.gaps_in_index += event["index"] != self._index
        self._index = event["index"] + 1
        choice.pieces.append(event["token"])
        if "score" in event:
            choice.scores.append(event["score"]["logprob"])
        return True

    def whole(self, raw: bytes) -> None:
        """Take a plain answer."""
        body = msgspec.json.decode(raw)
        if "error" in body:
            self.error = str(body["error"]["code"])
            return
        self.usage, self.done = body["usage"], True
        if self.question.route == INFER:
            scores = [each["logprob"] for each in body.get("scores") or []]
            self.choices[0] = Got([body["text"]], scores, body["finish_reason"])
            self.claims = body["claims"]
            return
        for part in body["choices"]:
            text = part["text"] if self.question.route == COMPLETIONS else part["message"]["content"]
            scores = _scores(self.question.route, part["logprobs"]) if part.get("logprobs") else []
            self.choices[part["index"]] = Got([text], scores, part["finish_reason"])

    def fault(self, max_tokens: int) -> str | None:
        """How a complete answer differs from the truth; None: in nothing."""
        if self.gaps_in_index:
            return f"the index jumped {self.gaps_in_index} times"
        used = 0
        for number, (got, truth) in enumerate(zip(self.choices, self.question.truths, strict=True)):
            stops = self.question.sampling.stop
            wanted = truth.tokens[:max_tokens]
            text, finish, used_here = "".join(wanted), "length", len(wanted)
            if len(wanted) == len(truth.tokens):
                finish = truth.finish
            if stops and (cut := text.find(stops[0])) >= 0:
                used_here = _tokens_until(wanted, cut + len(stops[0]))
                text, finish = text[:cut], "stop"
            used += used_here
            if (said := "".join(got.pieces)) != text:
                return f"choice {number}: {_difference(got.pieces, said, wanted, text)}"
            if got.finish != finish:
                return f"choice {number}: finish {got.finish}, not {finish}"
            scores = [each.logprob for each in truth.logprobs or ()][:used_here]
            if len(got.scores) != len(scores) or not all(map(self._near, got.scores, scores)):
                return f"choice {number}: {len(got.scores)} log probabilities, not those of {used_here} tokens"
            if self.question.sampling.grammar is not None and not isinstance(msgspec.json.decode(text), dict):
                return f"choice {number}: {text} is not of the schema"
        used = self.question.used if self.question.length else used
        if self.usage is None or self.usage["completion_tokens"] != used:
            return f"usage {self.usage}, not of {used} tokens"
        return None

    def _near(self, one: float, other: float) -> bool:
        """Whether two scores are the same: a real model's depend on their batch in the last digits."""
        return one == other or (self.question.length > 0 and math.isclose(one, other, abs_tol=SCORE_NEAR))

    def fault_so_far(self, max_tokens: int) -> str | None:
        """How an answer that was left unfinished differs from the beginning of the truth."""
        for number, (got, truth) in enumerate(zip(self.choices, self.question.truths, strict=True)):
            wanted = truth.tokens[:max_tokens]
            said, text = "".join(got.pieces), "".join(wanted)
            if not text.startswith(said):
                return f"choice {number}: {_difference(got.pieces, said, wanted, text)}"
        return None


def _scores(route: str, logprobs: dict[str, Any]) -> list[float]:
    if route == CHAT:
        return [each["logprob"] for each in logprobs["content"]]
    return list(logprobs["token_logprobs"])


def _tokens_until(tokens: list[str], end: int) -> int:
    """How many tokens it takes to release `end` characters."""
    length = 0
    for number, token in enumerate(tokens, 1):
        length += len(token)
        if length >= end:
            return number
    return len(tokens)


def _difference(pieces: list[str], said: str, wanted: list[str], text: str) -> str:
    """Whether something was lost, doubled or reordered, and where."""
    if text.startswith(said):
        return f"lost: ends after {len(said)} of {len(text)} characters"
    if said.startswith(text):
        return f"duplicated: {len(said) - len(text)} characters too many"
    at = next((at for at, (one, other) in enumerate(zip(pieces, wanted, strict=False)) if one != other), len(pieces))
    around = f"at token {at}: {pieces[at : at + 4]} instead of {wanted[at : at + 4]}"
    rest = pieces[at:]
    if rest and rest[0] in wanted[:at] and rest[: len(wanted) - at] != wanted[at:]:
        return f"duplicated {around}"
    if rest and rest[0] in wanted[at:]:
        return f"lost {around}"
    return f"reordered or mixed {around}"


__all__ = ["Answer", "Got", "Truth"]
