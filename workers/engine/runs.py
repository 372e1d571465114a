"""A run: one request in the engine, with its choices, from submit to the last finish."""

from dataclasses import dataclass

from shared.wire import Logprob, Usage
from workers.engine.request import EngineRequest, TokenEvent
from workers.engine.scheduler import Sequence
from workers.engine.text import OutputText, TextSide


@dataclass(slots=True, eq=False, kw_only=True)
class Choice(Sequence):
    """A sequence with its run and its text."""

    run: "Run"
    text: OutputText
    before: list[str]  # the text of the prefix, one for each of its ids


class Run:
    """The choices of a request. A resumed one begins with its prefixes: they are computed like a prompt, not sampled."""

    def __init__(self, request: EngineRequest, length_max: int, text: TextSide) -> None:
        self.key = request.key
        self._prompt_length = len(request.prompt_ids)
        self.choices = [self._choice(request, index, length_max, text) for index in range(request.sampling.n)]
        self.open = len(self.choices)  # choices whose finish was not handed out

    def told(self, choice: Choice) -> TokenEvent:
        """The text of a prefix, so that whoever keeps the choice's history can serve all of it."""
        return TokenEvent(key=self.key, choice=choice.choice, before=choice.before)

    def event(self, choice: Choice, ids: list[int], text: list[str], logprobs: list[Logprob] | None) -> TokenEvent:
        """What a step added to `choice`. With the finish of the last choice comes the usage."""
        finish = choice.text.finish
        usage = None
        if finish is not None:
            self.open -= 1
            if self.open == 0:
                completion = sum(each.output_index for each in self.choices)
                usage = Usage(prompt_tokens=self._prompt_length, completion_tokens=completion)
        return TokenEvent(
            key=self.key, choice=choice.choice, ids=ids, text=text, logprobs=logprobs, finish=finish, usage=usage
        )

    def _choice(self, request: EngineRequest, index: int, length_max: int, text: TextSide) -> Choice:
        prefix = request.prefix[index] if index < len(request.prefix) else []
        prompt_length = len(request.prompt_ids)
        output = OutputText(text.stream(request.prompt_ids), request.sampling, text.end_ids, length_max - prompt_length)
        before = [output.push(token) if output.finish is None else "" for token in prefix]
        return Choice(
            key=request.key,
            tenant=request.tenant,
            choice=index,
            sampling=request.sampling,
            tokens=request.prompt_ids + prefix,
            prompt_length=prompt_length,
            length_max=length_max,
            run=self,
            text=output,
            before=before,
        )
