"""A run: one request in the engine, with its choices, from submit to the last finish."""

import time
from dataclasses import dataclass

from shared.wire import Logprob, Usage
from workers.engine.request import EngineRequest, TokenEvent
from workers.engine.sequence import Sequence
from workers.engine.text import INCOMPLETE, OutputText, TextSide


@dataclass(slots=True, eq=False, kw_only=True)
class Choice(Sequence):
    """A sequence with its run and its text."""

    run: "Run"
    text: OutputText
    before: list[str]  # the text of the prefix, one for each of its ids
    echo: "Echo | None"
    ended: bool = False  # its finish was handed out


class Echo:
    """The prompt, handed out before the output.

    `texts` gives one text for each id from where it stands: piece by piece where each id waits for its log probability,
    else all with the first.
    """

    def __init__(self, ids: list[int], text: TextSide, scored: bool) -> None:
        self.done = 0  # ids handed out
        self._ids = ids
        self._decode = text.decode
        self._stream = text.stream([]) if scored else None

    def texts(self, end: int) -> list[str]:
        start, self.done = self.done, end
        if self._stream is None:
            texts = [""] * (end - start)
            if start == 0 and texts:
                texts[0] = self._decode(self._ids).rstrip(INCOMPLETE)
            return texts
        texts = [self._stream.step(token) for token in self._ids[start:end]]
        if end == len(self._ids) and texts:
            # The output completes a character that is left open.
            texts[-1] += self._stream.flush().rstrip(INCOMPLETE)
        return texts


class Run:
    """The choices of a request. A resumed one begins with its prefixes: they are computed like a prompt, not sampled."""

    def __init__(self, request: EngineRequest, length_max: int, text: TextSide) -> None:
        self.key = request.key
        self._prompt_length = len(request.prompt_ids)
        self._text = text
        self.choices = [self._choice(request, index, length_max, text) for index in range(request.sampling.n)]
        self.open = len(self.choices)  # choices whose finish was not handed out
        self.begun = time.monotonic()
        self.admit_by = request.admit_by

    @property
    def entered(self) -> bool:
        """Whether a choice has ever been in the batch, or none is left to be."""
        return not self.choices or any(choice.cached >= 0 for choice in self.choices)

    def let_go(self) -> None:
        self.choices = []

    def opening(self, choice: Choice) -> list[TokenEvent]:
        """What is known of a choice before any step.

        The text of its prefix, so that whoever keeps its history can serve all of it; the echo of the prompt, or only its
        first token where each of the others waits for its log probability.
        """
        events = []
        if choice.before:
            events.append(TokenEvent(key=self.key, choice=choice.choice, before=choice.before))
        if choice.echo is None:
            return events
        if choice.score_from is None:
            if choice.echo.done < self._prompt_length:
                events.append(self._echo(choice, choice.echo, self._prompt_length, None))
        elif choice.echo.done == 0:
            first = choice.tokens[0]
            unscored = Logprob(first, None, self._text.token_bytes(first), special=first in self._text.special_ids)
            events.append(self._echo(choice, choice.echo, 1, [unscored]))
        return events

    def scored(self, choice: Choice, end: int, logprobs: list[Logprob]) -> TokenEvent:
        """The tokens of the prompt up to `end` that were not handed out yet, with their log probabilities."""
        assert choice.echo is not None
        return self._echo(choice, choice.echo, end, logprobs)

    def _echo(self, choice: Choice, echo: Echo, end: int, logprobs: list[Logprob] | None) -> TokenEvent:
        ids = choice.tokens[echo.done : end]
        if choice.score_from is not None:
            choice.score_from = end if end < self._prompt_length else None
        text = echo.texts(end)
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
                usage = Usage(self._prompt_length, completion, self._cached_tokens())
        return TokenEvent(
            key=self.key, choice=choice.choice, ids=ids, text=text, logprobs=logprobs, finish=finish, usage=usage
        )

    def _cached_tokens(self) -> int:
        """Prompt tokens that were not computed for any choice: choices that share what another computed do not count."""
        found = [choice.cached for choice in self.choices if choice.cached >= 0]
        return min(self._prompt_length, *found) if found else 0

    def _choice(self, request: EngineRequest, index: int, length_max: int, text: TextSide) -> Choice:
        prefix = request.prefix[index] if index < len(request.prefix) else []
        sampling, prompt = request.sampling, request.prompt_ids
        echo = Echo(prompt, text, sampling.logprobs is not None) if sampling.echo else None
        before: list[str] = []
        score_from = None
        if echo is not None:
            echoed, prefix = prefix[: len(prompt)], prefix[len(prompt) :]
            if echoed != prompt[: len(echoed)]:
                raise ValueError("the prefix does not begin with the prompt")
            before = echo.texts(len(echoed))
            if sampling.logprobs is not None and len(echoed) < len(prompt):
                score_from = max(1, len(echoed))
        matcher = text.matcher(sampling.grammar) if sampling.grammar is not None else None
        count_max = 0 if sampling.max_tokens == 0 else length_max - len(prompt)
        output = OutputText(text.stream(prompt, sampling.shown), sampling, text.end_ids, count_max, matcher)
        before += [output.push(token) if output.finish is None else "" for token in prefix]
        return Choice(
            key=request.key,
            tenant=request.tenant,
            choice=index,
            sampling=sampling,
            tokens=prompt + prefix,
            prompt_length=len(prompt),
            length_max=length_max,
            detached=request.detached,
            matcher=matcher,
            score_from=score_from,
            fresh=score_from is not None,
            run=self,
            text=output,
            before=before,
            echo=echo,
        )
