"""A run: one request in the engine, with its choices, from submit to the last finish."""

from dataclasses import dataclass

from shared.wire import Logprob, Usage
from workers.engine.request import EngineRequest, TokenEvent
from workers.engine.scheduler import Sequence
from workers.engine.text import INCOMPLETE, OutputText, TextSide


@dataclass(slots=True, eq=False, kw_only=True)
class Choice(Sequence):
    """A sequence with its run and its text."""

    run: "Run"
    text: OutputText
    before: list[str]  # the text of the prefix, one for each of its ids
    echoed: int  # tokens of the prompt that were handed out
    ended: bool = False  # its finish was handed out


class Run:
    """The choices of a request. A resumed one begins with its prefixes: they are computed like a prompt, not sampled."""

    def __init__(self, request: EngineRequest, length_max: int, text: TextSide) -> None:
        self.key = request.key
        self._prompt_length = len(request.prompt_ids)
        self._text = text
        self.choices = [self._choice(request, index, length_max, text) for index in range(request.sampling.n)]
        self.open = len(self.choices)  # choices whose finish was not handed out

    def opening(self, choice: Choice) -> list[TokenEvent]:
        """What is known of a choice before any step.

        The text of its prefix, so that whoever keeps its history can serve all of it; the echo of the prompt, or only its
        first token where each of the others waits for its log probability.
        """
        events = []
        if choice.before:
            events.append(TokenEvent(key=self.key, choice=choice.choice, before=choice.before))
        if choice.score_from is None:
            if choice.echoed < self._prompt_length:
                events.append(self.echo(choice, self._prompt_length, None))
        elif choice.echoed == 0:
            first = choice.tokens[0]
            unscored = Logprob(first, None, self._text.token_bytes(first), special=first in self._text.special_ids)
            events.append(self.echo(choice, 1, [unscored]))
        return events

    def echo(self, choice: Choice, end: int, logprobs: list[Logprob] | None) -> TokenEvent:
        """The tokens of the prompt up to `end` that were not handed out yet. All its text comes with the first."""
        start = choice.echoed
        ids = choice.tokens[start:end]
        text = [""] * len(ids)
        if start == 0:
            text[0] = self._prompt_text(choice.tokens[: self._prompt_length])
        choice.echoed = end
        if choice.score_from is not None:
            choice.score_from = end if end < self._prompt_length else None
        return TokenEvent(key=self.key, choice=choice.choice, ids=ids, text=text, logprobs=logprobs, echo=True)

    def event(self, choice: Choice, ids: list[int], text: list[str], logprobs: list[Logprob] | None) -> TokenEvent:
        """What a step added to `choice`. With the finish of the last choice comes the usage."""
        finish = choice.text.finish
        usage = None
        if finish is not None:
            choice.ended = True
            self.open -= 1
            if self.open == 0:
                completion = sum(each.output_index for each in self.choices)
                usage = Usage(prompt_tokens=self._prompt_length, completion_tokens=completion)
        return TokenEvent(
            key=self.key, choice=choice.choice, ids=ids, text=text, logprobs=logprobs, finish=finish, usage=usage
        )

    def _prompt_text(self, ids: list[int]) -> str:
        return self._text.decode(ids).rstrip(INCOMPLETE)  # the output completes a character that is left open

    def _choice(self, request: EngineRequest, index: int, length_max: int, text: TextSide) -> Choice:
        prefix = request.prefix[index] if index < len(request.prefix) else []
        sampling, prompt_length = request.sampling, len(request.prompt_ids)
        echoed = min(len(prefix), prompt_length) if sampling.echo else prompt_length
        before: list[str] = []
        if sampling.echo and prefix:
            if prefix[:echoed] != request.prompt_ids[:echoed]:
                raise ValueError("the prefix does not begin with the prompt")
            before = [self._prompt_text(request.prompt_ids), *[""] * (echoed - 1)]
            prefix = prefix[echoed:]
        matcher = text.matcher(sampling.grammar) if sampling.grammar is not None else None
        count_max = 0 if sampling.max_tokens == 0 else length_max - prompt_length
        output = OutputText(text.stream(request.prompt_ids), sampling, text.end_ids, count_max, matcher)
        before += [output.push(token) if output.finish is None else "" for token in prefix]
        unscored = echoed < prompt_length and sampling.logprobs is not None
        return Choice(
            key=request.key,
            tenant=request.tenant,
            choice=index,
            sampling=sampling,
            tokens=request.prompt_ids + prefix,
            prompt_length=prompt_length,
            length_max=length_max,
            matcher=matcher,
            score_from=max(1, echoed) if unscored else None,
            run=self,
            text=output,
            before=before,
            echoed=echoed,
        )
