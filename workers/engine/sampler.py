"""From logits to tokens, for a batch in which each row has its own parameters.

The order: raw log probabilities, logit bias and min_tokens, penalties; greedy rows end here; temperature, min-p, top-k,
top-p, draw. The meaning of each is vLLM's. Each of the three filters is a threshold on the logits, so that no row is sorted:
what ties with the last logit that passes, passes too.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from shared.wire import Logprob, Sampling, TopLogprob
from workers.engine.draws import uniform
from workers.engine.engine import Drawn
from workers.engine.scheduler import Sequence
from workers.engine.text import stop_ids

GREEDY_TEMPERATURE = 1e-5  # below it
NUCLEUS_HEAD = 512  # the most likely tokens among which top-p is usually decided


@dataclass(slots=True)
class Counts:
    """How often each token occurs in a sequence, kept up to date token by token."""

    prompt: set[int]
    output: Counter[int] = field(default_factory=Counter)
    counted: int = 0  # output tokens in `output`


class Sampler:
    """Draws one token for each row of logits."""

    def __init__(self, end_ids: frozenset[int], token_bytes: Callable[[int], bytes]) -> None:
        self._end_ids = end_ids
        self._token_bytes = token_bytes

    def draw(self, logits: torch.Tensor, sequences: list[Sequence]) -> Drawn:
        """`logits` [n, vocabulary] of any float dtype, overwritten; one row for each of `sequences`."""
        samplings = [sequence.sampling for sequence in sequences]
        logits = logits.float()
        raw = self._raw_logprobs(logits, samplings)
        for row, sequence in enumerate(sequences):
            self._adjust(logits[row], sequence)
        tokens = logits.argmax(-1)
        drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature >= GREEDY_TEMPERATURE]
        if drawn:
            all_drawn = len(drawn) == len(sequences)
            chosen = self._draw_rows(logits if all_drawn else logits[drawn], [sequences[row] for row in drawn])
            if all_drawn:
                tokens = chosen
            else:
                tokens[torch.tensor(drawn, device=tokens.device)] = chosen
        ids = tokens.tolist()
        return Drawn(ids, None if raw is None else self._logprobs(raw, ids, samplings))

    def _adjust(self, logits: torch.Tensor, sequence: Sequence) -> None:
        """Bias, min_tokens and penalties on one row, in place."""
        sampling = sequence.sampling
        if sampling.logit_bias:
            ids = torch.tensor(list(sampling.logit_bias), device=logits.device)
            logits[ids] += torch.tensor(list(sampling.logit_bias.values()), device=logits.device)
        if sequence.output_index < sampling.min_tokens:
            ends = [token for token in stop_ids(sampling, self._end_ids) if token < len(logits)]
            logits[torch.tensor(ends, dtype=torch.int64, device=logits.device)] = -math.inf
        if sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty:
            _penalise(logits, sampling, _counts(sequence))

    def _draw_rows(self, logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
        samplings = [sequence.sampling for sequence in sequences]
        if any(sampling.temperature != 1 for sampling in samplings):
            temperatures = [sampling.temperature for sampling in samplings]
            logits = logits / torch.tensor(temperatures, device=logits.device).unsqueeze(1)
        _filter(logits, samplings)
        weights = torch.softmax(logits, -1)
        uniforms = [uniform(each.sampling.seed, each.choice, each.output_index) for each in sequences]
        return _inverse_cdf(weights, torch.tensor(uniforms, dtype=torch.float64, device=logits.device))

    def _raw_logprobs(self, logits: torch.Tensor, samplings: list[Sampling]) -> torch.Tensor | None:
        """[n, vocabulary] log probabilities before anything is changed, if a row asks for them."""
        if all(sampling.logprobs is None for sampling in samplings):
            return None
        return torch.log_softmax(logits, -1)

    def _logprobs(self, raw: torch.Tensor, ids: list[int], samplings: list[Sampling]) -> list[Logprob | None]:
        result: list[Logprob | None] = []
        for row, (token, sampling) in enumerate(zip(ids, samplings, strict=True)):
            if sampling.logprobs is None:
                result.append(None)
                continue
            values, top = raw[row].topk(sampling.logprobs)
            result.append(
                Logprob(
                    id=token,
                    logprob=_finite(raw[row, token].item()),
                    bytes=self._token_bytes(token),
                    top=[
                        TopLogprob(id=each, logprob=_finite(value), bytes=self._token_bytes(each))
                        for each, value in zip(top.tolist(), values.tolist(), strict=True)
                    ],
                )
            )
        return result


def _penalise(logits: torch.Tensor, sampling: Sampling, counts: Counts) -> None:
    output = torch.tensor(list(counts.output), dtype=torch.int64, device=logits.device)
    if sampling.repetition_penalty != 1:
        both = torch.tensor(list(counts.prompt | counts.output.keys()), dtype=torch.int64, device=logits.device)
        both = both[both < len(logits)]
        values = logits[both]
        penalty = sampling.repetition_penalty
        logits[both] = torch.where(values > 0, values / penalty, values * penalty)
    if len(output):
        times = torch.tensor(list(counts.output.values()), dtype=torch.float32, device=logits.device)
        logits[output] -= sampling.frequency_penalty * times + sampling.presence_penalty


def _counts(sequence: Sequence) -> Counts:
    """The counts of a sequence: they are kept with it, so that each token is counted once."""
    counts = sequence.memo
    if counts is None:
        counts = sequence.memo = Counts(set(sequence.tokens[: sequence.prompt_length]))
    assert isinstance(counts, Counts)
    for token in sequence.tokens[sequence.prompt_length + counts.counted :]:
        counts.output[token] += 1
    counts.counted = sequence.output_index
    return counts


def _filter(logits: torch.Tensor, samplings: list[Sampling]) -> None:
    """min-p, then top-k, then top-p of what is left; what does not pass becomes -inf, in place."""
    width = logits.shape[-1]
    for row, sampling in enumerate(samplings):
        values = logits[row]
        if sampling.min_p > 0:
            values.masked_fill_(values < values.max() + math.log(sampling.min_p), -math.inf)
        if 0 < sampling.top_k < width:
            values.masked_fill_(values < values.topk(sampling.top_k).values[-1], -math.inf)
        if sampling.top_p < 1:
            values.masked_fill_(values < _nucleus_threshold(values, sampling.top_p), -math.inf)


def _nucleus_threshold(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest logit of the fewest most likely tokens whose probabilities reach `top_p` together."""
    total = torch.logsumexp(logits, -1)
    for count in (min(NUCLEUS_HEAD, len(logits)), len(logits)):
        head = logits.topk(count).values
        probabilities = torch.exp(head - total).double()
        before = probabilities.cumsum(-1) - probabilities
        kept = int((before < top_p).sum())
        if kept < count:
            return head[kept - 1]
    return head[-1]


def _inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """[n] indices: in each row of `weights` the first whose cumulative weight exceeds the row's share of the total."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = (uniforms * cumulative[:, -1]).unsqueeze(1)
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=weights.shape[-1] - 1)


def _finite(value: float) -> float:
    """JSON has no infinity: OpenAI writes a probability of zero as -9999."""
    return max(value, -9999.0)
