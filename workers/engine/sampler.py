"""From logits to tokens, for a batch in which each row has its own parameters.

The order: raw log probabilities, grammar, logit bias and min_tokens, penalties; greedy rows end here; temperature, min-p,
top-k, top-p, draw. The meaning of each is vLLM's. Each of the three filters is a threshold on the logits, so that no row is
sorted: what ties with the last logit that passes, passes too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from shared.wire import Logprob, Sampling, TopLogprob
from workers.engine.counts import Counts, penalises
from workers.engine.draws import uniform
from workers.engine.engine import Drawn
from workers.engine.grammar import GrammarFailed
from workers.engine.scheduler import Sequence
from workers.engine.text import stop_ids

GREEDY_TEMPERATURE = 1e-5  # below it
NUCLEUS_HEADS = (512, 8192)  # how many of the likeliest tokens usually decide top-p
CDF_CHUNK = 256
NO_GUESS = -1
SCORED_ROWS = 64  # of a prompt at once: their log probabilities are in float32


class NotFinite(ArithmeticError):
    """The model computed logits that are no numbers."""

    def __init__(self) -> None:
        super().__init__("the model's logits are not finite")


@dataclass(slots=True)
class Scored:
    """Positions of a prompt whose tokens' log probabilities are wanted."""

    sequence: Sequence
    positions: range


@dataclass(slots=True)
class Rows:
    """What each row of logits is for."""

    sequences: list[Sequence]
    indices: list[int]  # of its token, in the output
    guesses: list[int]  # what its token has to be for the next row to count; NO_GUESS: that is of another sequence

    def is_first(self, row: int) -> bool:
        """Whether it is the first row of its sequence."""
        return row == 0 or self.guesses[row - 1] == NO_GUESS


class Sampler:
    """Draws one token for each row of logits."""

    def __init__(
        self,
        end_ids: frozenset[int],
        token_bytes: Callable[[int], bytes],
        special_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._end_ids = end_ids
        self._token_bytes = token_bytes
        self._special_ids = special_ids

    def draw(
        self, logits: torch.Tensor, sequences: list[Sequence], drafts: list[tuple[int, ...]] | None = None
    ) -> Drawn:
        """`logits` [n, vocabulary] of any float dtype, overwritten; one row for each of `sequences`, and behind it one for
        each token of its draft.

        A sequence that has no token to give is in `failed`; the others are drawn as if it were not there.
        """
        rows = _rows_of(sequences, drafts)
        samplings = [sequence.sampling for sequence in rows.sequences]
        failed: dict[int, Exception] = {}
        forbidden = _forbidden(rows.sequences, logits.shape[-1], failed)  # before anything that waits for the device
        logits = logits.float()
        raw = self._raw_logprobs(logits, samplings)
        for row, mask in forbidden.items():
            if not bool(logits[row].max().isfinite()):  # the mask may hide it
                failed[row] = NotFinite()
            logits[row].masked_fill_(torch.from_numpy(mask).to(logits.device), -math.inf)
        for row, sequence in enumerate(rows.sequences):
            self._adjust(logits[row], sequence, rows.indices[row])
        tokens = _argmax(logits)
        best = logits.gather(1, tokens.unsqueeze(1))  # NaN is the largest number to an argmax
        for row in (~best.isfinite()).nonzero()[:, 0].tolist():
            failed.setdefault(row, NotFinite())
        ids, kept = self._choose(logits, tokens.tolist(), rows, failed)
        counts = None
        if len(logits) > len(sequences):
            counts = [len(list(own)) for _, own in groupby(rows.sequences[row] for row in kept)]
            ids, samplings = [ids[row] for row in kept], [samplings[row] for row in kept]
            raw = None if raw is None else raw[kept]
        logprobs = None if raw is None else self._logprobs(raw, ids, [each.logprobs for each in samplings])
        ended = [(rows.sequences[row], error) for row, error in failed.items() if rows.is_first(row)]
        return Drawn(ids, logprobs, failed=ended, counts=counts)

    def _choose(
        self, logits: torch.Tensor, likeliest: list[int], rows: Rows, failed: dict[int, Exception]
    ) -> tuple[list[int], list[int]]:
        """The token of each row, and the rows that count: the first of each sequence, and those behind a right guess.

        A draw costs much, so that none is made for a row before it is known to count. A draft ends before a row that failed,
        which will be the first of a later step.
        """
        ids, kept = likeliest, list[int]()
        reached = [row for row in range(len(ids)) if rows.is_first(row)]
        while reached:
            kept += reached
            drawn = [
                row
                for row in reached
                if rows.sequences[row].sampling.temperature >= GREEDY_TEMPERATURE and row not in failed
            ]
            if drawn:
                those = [rows.sequences[row] for row in drawn]
                chosen = self._draw_rows(
                    logits if len(drawn) == len(logits) else logits[drawn], those, [rows.indices[row] for row in drawn]
                )
                for row, token in zip(drawn, chosen.tolist(), strict=True):
                    ids[row] = token
            reached = [row + 1 for row in reached if ids[row] == rows.guesses[row] and row + 1 not in failed]
        return ids, sorted(kept)

    def score(
        self, logits: torch.Tensor, prompts: list[Scored]
    ) -> tuple[list[list[Logprob]], list[tuple[Sequence, Exception]]]:
        """Log probabilities of tokens that are there already, and whose are no numbers.

        `logits` [n, vocabulary]: a row for each position of each of `prompts`, in their order.
        """
        result: list[list[Logprob]] = []
        failed: list[tuple[Sequence, Exception]] = []
        row = 0
        for prompt in prompts:
            sequence, scores = prompt.sequence, []
            for start in range(prompt.positions.start, prompt.positions.stop, SCORED_ROWS):
                ids = sequence.tokens[start : min(start + SCORED_ROWS, prompt.positions.stop)]
                raw = torch.log_softmax(logits[row : row + len(ids)].float(), -1)
                row += len(ids)
                if bool(raw.isnan().any()):
                    failed.append((sequence, NotFinite()))
                scores += self._logprobs(raw, ids, [sequence.sampling.logprobs or 0] * len(ids))
            result.append([each for each in scores if each is not None])
        return result, failed

    def _adjust(self, logits: torch.Tensor, sequence: Sequence, index: int) -> None:
        """Bias, min_tokens and penalties on one row, that of the output's token `index`, in place."""
        sampling = sequence.sampling
        if sampling.logit_bias:
            ids = torch.tensor(list(sampling.logit_bias), device=logits.device)
            logits[ids] += torch.tensor(list(sampling.logit_bias.values()), device=logits.device)
        if index < sampling.min_tokens:
            ends = [token for token in stop_ids(sampling, self._end_ids) if token < len(logits)]
            logits[torch.tensor(ends, dtype=torch.int64, device=logits.device)] = -math.inf
        if penalises(sampling):
            _penalise(logits, sampling, _counts(sequence))

    def _draw_rows(self, logits: torch.Tensor, sequences: list[Sequence], indices: list[int]) -> torch.Tensor:
        samplings = [sequence.sampling for sequence in sequences]
        if any(sampling.temperature != 1 for sampling in samplings):
            temperatures = [sampling.temperature for sampling in samplings]
            logits = logits / torch.tensor(temperatures, device=logits.device).unsqueeze(1)
        _filter(logits, samplings)
        weights = torch.softmax(logits, -1)
        pairs = zip(sequences, indices, strict=True)
        uniforms = [uniform(each.sampling.seed, each.choice, index) for each, index in pairs]
        return _inverse_cdf(weights, torch.tensor(uniforms, dtype=torch.float64, device=logits.device))

    def _raw_logprobs(self, logits: torch.Tensor, samplings: list[Sampling]) -> torch.Tensor | None:
        """[n, vocabulary] log probabilities before anything is changed, if a row asks for them."""
        if all(sampling.logprobs is None for sampling in samplings):
            return None
        return torch.log_softmax(logits, -1)

    def _logprobs(self, raw: torch.Tensor, ids: list[int], wanted: list[int | None]) -> list[Logprob | None]:
        """Of `ids`, one in each row of `raw`, with the likeliest where a number of them is wanted."""
        result: list[Logprob | None] = []
        for row, (token, top) in enumerate(zip(ids, wanted, strict=True)):
            if top is None:
                result.append(None)
                continue
            values, likeliest = raw[row].topk(top)
            result.append(
                Logprob(
                    id=token,
                    logprob=_finite(raw[row, token].item()),
                    bytes=self._token_bytes(token),
                    top=[
                        TopLogprob(id=each, logprob=_finite(value), bytes=self._token_bytes(each))
                        for each, value in zip(likeliest.tolist(), values.tolist(), strict=True)
                    ],
                    special=token in self._special_ids,
                )
            )
        return result


def _rows_of(sequences: list[Sequence], drafts: list[tuple[int, ...]] | None) -> Rows:
    """One row for each of `sequences`, and behind it one for each token of its draft."""
    if drafts is None or not any(drafts):
        return Rows(sequences, [each.output_index for each in sequences], [NO_GUESS] * len(sequences))
    pairs = list(zip(sequences, drafts, strict=True))
    return Rows(
        [each for each, draft in pairs for _ in range(1 + len(draft))],
        [each.output_index + ahead for each, draft in pairs for ahead in range(1 + len(draft))],
        [guess for draft in drafts for guess in (*draft, NO_GUESS)],
    )


def _forbidden(sequences: list[Sequence], width: int, failed: dict[int, Exception]) -> dict[int, np.ndarray]:
    """By row, the tokens that a grammar does not let come next: [width] bool."""
    masks: dict[int, np.ndarray] = {}
    for row, sequence in enumerate(sequences):
        if sequence.matcher is not None:
            try:
                masks[row] = sequence.matcher.forbidden(width)
            except GrammarFailed as error:
                failed[row] = error
    return masks


def _penalise(logits: torch.Tensor, sampling: Sampling, counts: Counts) -> None:
    if sampling.repetition_penalty != 1:
        both = torch.from_numpy(counts.seen).to(logits.device)
        values = logits[both]
        penalty = sampling.repetition_penalty
        logits[both] = torch.where(values > 0, values / penalty, values * penalty)
    if len(counts.output):
        output = torch.from_numpy(counts.output).to(logits.device)
        times = torch.from_numpy(counts.times).to(logits.device)
        logits[output] -= sampling.frequency_penalty * times + sampling.presence_penalty


def _counts(sequence: Sequence) -> Counts:
    """The counts of a sequence: they are kept with it, so that each token is counted once."""
    counts = sequence.memo
    if counts is None:
        counts = sequence.memo = Counts(sequence.tokens[: sequence.prompt_length])
    assert isinstance(counts, Counts)
    counts.add(sequence.tokens[sequence.prompt_length + counts.counted :])
    return counts


def _filter(logits: torch.Tensor, samplings: list[Sampling]) -> None:
    """min-p, then top-k, then top-p of what is left; what does not pass becomes -inf, in place."""
    width = logits.shape[-1]
    thresholds = logits.new_full((len(samplings), 1), -math.inf)
    rows = [row for row, sampling in enumerate(samplings) if sampling.min_p > 0]
    if rows:
        shares = [[math.log(samplings[row].min_p)] for row in rows]
        thresholds[rows] = logits[rows].amax(-1, keepdim=True) + torch.tensor(shares, device=logits.device)
    rows = [row for row, sampling in enumerate(samplings) if 0 < sampling.top_k < width]
    if rows:
        ranks = torch.tensor([[samplings[row].top_k - 1] for row in rows], device=logits.device)
        highest = _rows(logits, rows).topk(int(ranks.max()) + 1).values
        thresholds[rows] = torch.maximum(thresholds[rows], highest.gather(1, ranks))
    if rows or any(sampling.min_p > 0 for sampling in samplings):
        logits.masked_fill_(logits < thresholds, -math.inf)
    rows = [row for row, sampling in enumerate(samplings) if sampling.top_p < 1]
    if rows:
        nuclei = torch.tensor([[samplings[row].top_p] for row in rows], dtype=torch.float64, device=logits.device)
        thresholds.fill_(-math.inf)
        thresholds[rows] = _nucleus_thresholds(_rows(logits, rows), nuclei)
        logits.masked_fill_(logits < thresholds, -math.inf)


def _rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return logits if len(rows) == len(logits) else logits[rows]


def _nucleus_thresholds(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """[n, 1]: in each row the smallest logit of the fewest likeliest tokens whose probabilities reach `top_p` [n, 1]."""
    width = logits.shape[-1]
    total = torch.logsumexp(logits, -1, keepdim=True)
    for count in (*(head for head in NUCLEUS_HEADS if head < width), width):
        head = logits.topk(count).values
        probabilities = torch.exp(head - total).double()
        before = probabilities.cumsum(-1) - probabilities
        kept = (before < top_p).sum(-1, keepdim=True)
        if count == width or bool((kept < count).all()):
            break
    return head.gather(1, kept - 1)


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """[n] int64; the first of equals. On the CPU by numpy, which is ten times faster."""
    return torch.from_numpy(logits.numpy().argmax(-1)) if logits.device.type == "cpu" else logits.argmax(-1)


def _inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """[n] indices: in each row of `weights` the first whose cumulative weight exceeds the row's share of the total.

    In float64, and in two levels, chunks first: summing is far faster than accumulating.
    """
    weights = torch.nn.functional.pad(weights, (0, -weights.shape[-1] % CDF_CHUNK))
    chunks = weights.view(len(weights), -1, CDF_CHUNK)
    cumulative = chunks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = uniforms.unsqueeze(1) * cumulative[:, -1:]
    chunk = _first_above(cumulative, target)
    before = torch.where(chunk > 0, cumulative.gather(1, (chunk - 1).clamp(min=0)), 0.0)
    inner = chunks[torch.arange(len(weights), device=weights.device), chunk.squeeze(1)].cumsum(-1, dtype=torch.float64)
    return (chunk * CDF_CHUNK + _first_above(inner, target - before)).squeeze(1)


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """[n, 1]: the first index whose value exceeds `target` [n, 1]; rounding never leads beyond the last positive weight."""
    below_total = torch.nextafter(cumulative[:, -1:], torch.zeros_like(target))
    return torch.searchsorted(cumulative, torch.minimum(target, below_total), right=True)


def _finite(value: float) -> float:
    """JSON has no infinity: OpenAI writes a probability of zero as -9999."""
    return max(value, -9999.0)
