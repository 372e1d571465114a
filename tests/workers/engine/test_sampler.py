"""Sampling: the meaning of each parameter, and the same draw in whatever batch."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from shared.wire import Sampling
from workers.engine.counts import Counts
from workers.engine.draws import uniform
from workers.engine.engine import Drawn
from workers.engine.grammar import GrammarFailed
from workers.engine.sampler import NUCLEUS_HEADS, SCORED_ROWS, NotFinite, Sampler, Scored
from workers.engine.scheduler import Sequence

END = 7
PROBABILITIES = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(11)


def sampler() -> Sampler:
    return Sampler(frozenset({END}), lambda token: bytes([token % 256]))


def sequence(
    prompt: list[int] | None = None, output: list[int] | None = None, choice: int = 0, **sampling: Any
) -> Sequence:
    prompt = prompt or [0]
    return Sequence("k", "t", choice, Sampling(**sampling), prompt + (output or []), len(prompt), 10_000)


def draw(logits: torch.Tensor, *sequences: Sequence) -> Drawn:
    return sampler().draw(logits.clone(), list(sequences))


def frequencies(count: int, logits: torch.Tensor, **sampling: Any) -> Counter[int]:
    """Token counts over `count` seeds, all in one batch."""
    rows = [sequence(seed=seed, **sampling) for seed in range(count)]
    return Counter(draw(logits.expand(count, -1), *rows).tokens)


def test_uniforms_depend_on_seed_choice_and_index_only() -> None:
    # fixed for all time: a request must be reproducible by a later release
    assert (uniform(0, 0, 0), uniform(12345, 1, 77)) == (0.0564663990004608, 0.7354509367088802)
    assert uniform(1, 0, 0) == uniform(1 + 2**64, 0, 0)
    assert len({uniform(seed, choice, index) for seed in (1, 2) for choice in (0, 1) for index in (0, 1)}) == 8
    values = [uniform(3, 0, index) for index in range(2000)]
    assert all(0 <= value < 1 for value in values)
    assert abs(sum(values) / len(values) - 0.5) < 0.02


def test_temperature_zero_takes_the_likeliest() -> None:
    logits = torch.randn(4, 100)
    rows = [sequence(temperature=0.0, seed=seed) for seed in range(4)]
    assert draw(logits, *rows).tokens == logits.argmax(-1).tolist()


def test_draws_follow_the_distribution() -> None:
    counts = frequencies(4000, PROBABILITIES.log())
    for token, probability in enumerate(PROBABILITIES.tolist()):
        assert counts[token] / 4000 == pytest.approx(probability, abs=4 * math.sqrt(probability / 4000))


def test_temperature_sharpens_and_flattens() -> None:
    logits = PROBABILITIES.log()
    sharp, plain, flat = (frequencies(1000, logits, temperature=each)[0] for each in (0.3, 1.0, 3.0))
    assert sharp > plain + 200
    assert plain > flat + 80


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 100}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.39}, {0}),
        ({"top_p": 0.41}, {0, 1}),
        ({"top_p": 0.86}, {0, 1, 2, 3}),
        ({"min_p": 0.3}, {0, 1, 2}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "top_p": 0.8}, {0, 1}),  # 0.4 and 0.3 of the 0.85 that top-k left
        ({"min_p": 0.2, "top_k": 4, "top_p": 0.99}, {0, 1, 2, 3}),
    ],
)
def test_filters_keep_exactly_what_they_should(sampling: dict[str, Any], allowed: set[int]) -> None:
    counts = frequencies(600, PROBABILITIES.log(), **sampling)
    assert set(counts) == allowed


@pytest.mark.parametrize("width", [NUCLEUS_HEADS[0] * 2, NUCLEUS_HEADS[1] + 300])
def test_top_p_over_more_tokens_than_are_looked_at_first(width: int) -> None:
    kept = int(width * 0.97)
    counts = frequencies(500, torch.linspace(0.001, 0, width), top_p=0.97)
    assert NUCLEUS_HEADS[0] < max(counts) < kept + 2


def test_draws_are_the_inverse_of_the_cumulated_weights() -> None:
    logits = torch.randn(40, 1000) * 2
    rows = [sequence(seed=seed) for seed in range(40)]
    cumulative = logits.double().softmax(-1).cumsum(-1)
    for row, token in enumerate(draw(logits, *rows).tokens):
        below = cumulative[row, token - 1].item() if token else 0.0
        assert below - 1e-6 <= uniform(row, 0, 0) <= cumulative[row, token].item() + 1e-6


def test_tokens_without_probability_are_never_drawn() -> None:
    logits = torch.full((1, 700), -math.inf)
    logits[0, [3, 255, 256, 699]] = 0.0
    assert set(frequencies(400, logits)) == {3, 255, 256, 699}


def test_a_row_is_drawn_the_same_alone_and_in_any_batch() -> None:
    logits = torch.randn(6, 500) * 3
    rows = [
        sequence(seed=5),
        sequence(temperature=0.0),
        sequence(seed=6, top_p=0.7, choice=2),
        sequence(seed=7, top_k=20, temperature=0.6, output=[1, 2], frequency_penalty=0.5),
        sequence(seed=8, min_p=0.1, logprobs=3),
        sequence(seed=9, repetition_penalty=1.4, output=[4]),
    ]
    together = draw(logits, *rows).tokens
    alone = [draw(logits[index : index + 1], row).tokens[0] for index, row in enumerate(rows)]
    backwards = draw(logits.flip(0), *reversed(rows)).tokens[::-1]
    assert together == alone == backwards


def test_choices_and_positions_draw_differently() -> None:
    logits = torch.zeros(1, 1000)
    drawn = [
        draw(logits, sequence(seed=1, choice=choice, output=[0] * index)).tokens[0]
        for choice, index in ((0, 0), (1, 0), (0, 1))
    ]
    assert len(set(drawn)) == 3


def test_logit_bias_adds_to_the_logits() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 3] = 1
    assert draw(logits, sequence(temperature=0.0, logit_bias={5: 2.0})).tokens == [5]
    assert draw(logits, sequence(temperature=0.0, logit_bias={3: -100.0, 8: 0.5})).tokens == [8]


def test_min_tokens_masks_every_way_to_stop() -> None:
    logits = torch.zeros(1, 10)
    logits[0, END], logits[0, 2], logits[0, 4] = 9, 8, 7
    assert draw(logits, sequence(temperature=0.0, min_tokens=2, stop_token_ids=[2])).tokens == [4]
    assert draw(logits, sequence(temperature=0.0, min_tokens=2, stop_token_ids=[2], output=[1, 1])).tokens == [END]
    assert draw(logits, sequence(temperature=0.0, min_tokens=2, ignore_eos=True)).tokens == [END]


def test_repetition_penalty_counts_prompt_and_output_and_scales_by_sign() -> None:
    logits = torch.tensor([[4.0, 3.0, -1.0, -1.5, 0.0]])
    assert draw(logits, sequence(prompt=[0], temperature=0.0, repetition_penalty=2.0)).tokens == [1]
    assert draw(logits, sequence(prompt=[0], output=[1], temperature=0.0, repetition_penalty=10.0)).tokens == [0]
    negative = torch.tensor([[-1.0, -1.5, -9.0]])
    assert draw(negative, sequence(prompt=[0], temperature=0.0, repetition_penalty=2.0)).tokens == [1]


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0]])
    for name in ("presence_penalty", "frequency_penalty"):
        assert draw(logits, sequence(prompt=[0, 0], temperature=0.0, **{name: 2.0})).tokens == [0]
        assert draw(logits, sequence(prompt=[0], output=[0], temperature=0.0, **{name: 1.5})).tokens == [1]
    assert draw(logits, sequence(output=[0, 0, 0], temperature=0.0, presence_penalty=0.9)).tokens == [0]
    assert draw(logits, sequence(output=[0, 0, 0], temperature=0.0, frequency_penalty=0.9)).tokens == [1]


def test_penalties_follow_the_output_as_it_grows() -> None:
    it, row = sampler(), sequence(temperature=0.0, presence_penalty=10.0)
    drawn = []
    for _ in range(4):
        drawn += it.draw(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), [row]).tokens
        row.tokens.append(drawn[-1])
    assert drawn == [0, 1, 2, 3]


def test_logprobs_are_of_the_raw_logits_with_bytes_and_ranks() -> None:
    logits = PROBABILITIES.log().expand(2, -1).clone()
    rows = [sequence(temperature=0.0, logprobs=2, logit_bias={4: 50.0}), sequence(temperature=0.5)]
    drawn = draw(logits, *rows)
    assert drawn.logprobs is not None
    first, second = drawn.logprobs
    assert second is None
    assert first is not None
    assert (first.id, first.bytes) == (4, b"\x04")
    assert first.logprob == pytest.approx(math.log(0.05), abs=1e-5)
    assert [top.id for top in first.top] == [0, 1]
    assert [math.exp(top.logprob) for top in first.top] == pytest.approx([0.4, 0.3], abs=1e-5)


def test_no_logprobs_where_nobody_asks_and_none_at_the_top_for_zero() -> None:
    assert draw(torch.zeros(1, 5), sequence(temperature=0.0)).logprobs is None
    logprobs = draw(torch.zeros(1, 5), sequence(temperature=0.0, logprobs=0)).logprobs
    assert logprobs is not None
    assert logprobs[0] is not None
    assert logprobs[0].top == []


def test_impossible_tokens_have_finite_logprobs() -> None:
    logits = torch.tensor([[0.0, -math.inf]])
    logprobs = draw(logits, sequence(temperature=0.0, logprobs=2)).logprobs
    assert logprobs is not None
    assert logprobs[0] is not None
    assert logprobs[0].top[1].logprob == -9999.0


def test_half_precision_logits_are_sampled_in_single() -> None:
    logits = torch.randn(3, 200).bfloat16()
    rows = [sequence(seed=seed, logprobs=1) for seed in range(3)]
    assert draw(logits, *rows) == draw(logits.float(), *rows)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_row_that_is_no_number_fails_alone(wrong: float) -> None:
    logits = torch.randn(5, 300)
    rows = [
        sequence(seed=1),
        sequence(temperature=0.0),
        sequence(seed=3, top_p=0.9),
        sequence(seed=4),
        sequence(seed=5),
    ]
    whole = draw(logits, *rows)
    assert whole.failed == []
    broken = logits.clone()
    broken[1, 17], broken[3, 200] = wrong, wrong
    drawn = draw(broken, *rows)
    assert [(rows.index(row), str(error)) for row, error in drawn.failed] == [
        (1, "the model's logits are not finite"),
        (3, "the model's logits are not finite"),
    ]
    assert [drawn.tokens[row] for row in (0, 2, 4)] == [whole.tokens[row] for row in (0, 2, 4)]


class Allowing:
    """Stands for a grammar's matcher."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens

    def forbidden(self, width: int) -> np.ndarray:
        if not self.tokens:
            raise GrammarFailed("nothing may follow")
        return ~np.isin(np.arange(width), self.tokens)


def constrained(matcher: Allowing, **sampling: Any) -> Sequence:
    row = sequence(**sampling)
    row.matcher = matcher
    return row


def test_a_grammar_masks_its_own_row_before_all_else() -> None:
    logits = torch.zeros(3, 50)
    logits[:, 9] = 5
    rows = [
        constrained(Allowing(3, 4), temperature=0.0, logit_bias={4: 1.0, 9: 90.0}, logprobs=1),
        sequence(temperature=0.0),
        constrained(Allowing(6), seed=1, top_k=1),
    ]
    drawn = draw(logits, *rows)
    assert drawn.tokens == [4, 9, 6]
    assert drawn.logprobs is not None
    assert drawn.logprobs[0] is not None
    assert drawn.logprobs[0].top[0].id == 9  # log probabilities are the model's own
    counts = Counter(
        token for seed in range(20) for token in draw(logits[:1], constrained(Allowing(3, 4, 30), seed=seed)).tokens
    )
    assert set(counts) == {3, 4, 30}


def test_a_grammar_neither_hides_broken_logits_nor_fails_others() -> None:
    logits = torch.zeros(3, 50)
    logits[0, 7] = math.nan
    rows = [constrained(Allowing(3)), constrained(Allowing()), constrained(Allowing(8))]
    drawn = draw(logits, *rows)
    assert [(rows.index(row), type(error)) for row, error in drawn.failed] == [(1, GrammarFailed), (0, NotFinite)]
    assert drawn.tokens[2] == 8


def test_prompts_are_scored_in_pieces_and_broken_ones_named() -> None:
    count = SCORED_ROWS + 5
    row = sequence(prompt=[token % 50 for token in range(count + 1)], logprobs=2, echo=True)
    logits = torch.randn(count + 3, 50)
    other = sequence(prompt=[1, 2, 3, 4], logprobs=0, echo=True)
    scores, failed = sampler().score(logits, [Scored(row, range(1, count + 1)), Scored(other, range(1, 4))])
    assert failed == []
    expected = logits.log_softmax(-1)
    assert [each.id for each in scores[0]] == row.tokens[1:]
    assert [each.logprob for each in scores[0]] == pytest.approx(
        [expected[index, token].item() for index, token in enumerate(row.tokens[1:])], abs=1e-5
    )
    assert scores[0][-1].top[0].id == logits[count - 1].argmax().item()
    assert [(each.id, each.top) for each in scores[1]] == [(2, []), (3, []), (4, [])]
    logits[count + 1, 3] = math.nan
    _, failed = sampler().score(logits, [Scored(row, range(1, count + 1)), Scored(other, range(1, 4))])
    assert [each for each, _ in failed] == [other]


def test_special_tokens_are_marked() -> None:
    it = Sampler(frozenset({END}), lambda token: b"<end>", frozenset({END}))
    logits = torch.zeros(1, 10)
    logits[0, END] = 3
    logprobs = it.draw(logits, [sequence(temperature=0.0, logprobs=0)]).logprobs
    assert logprobs is not None
    assert logprobs[0] is not None
    assert (logprobs[0].special, logprobs[0].bytes) == (True, b"<end>")


DRAFTED: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 5, "temperature": 0.9, "top_p": 0.9}, {"seed": 6}]


def test_a_draft_gives_what_one_row_after_the_other_would() -> None:
    logits = torch.randn(12, 40)
    expected = [
        [
            draw(logits[row : row + 1], sequence(output=[1] * (row % 4), **each)).tokens[0]
            for row in range(first, first + 4)
        ]
        for first, each in zip((0, 4, 8), DRAFTED, strict=True)
    ]
    for wrong in range(4):
        drafts = [
            tuple(token if place != wrong else 39 - token for place, token in enumerate(each[:3])) for each in expected
        ]
        rows = [sequence(logprobs=0, **each) for each in DRAFTED]
        drawn = sampler().draw(logits.clone(), rows, drafts)
        assert drawn.counts == [wrong + 1] * 3
        assert drawn.tokens == [token for each in expected for token in each[: wrong + 1]]
        assert drawn.logprobs is not None
        assert [each.id for each in drawn.logprobs if each is not None] == drawn.tokens


def test_a_draft_ends_before_a_row_that_is_no_number() -> None:
    logits = torch.randn(8, 40)
    greedy = logits.argmax(-1).tolist()
    for row in (2, 4):
        logits[row, 3] = math.nan
    rows = [sequence(temperature=0.0), sequence(seed=1), sequence(temperature=0.0)]
    drawn = sampler().draw(logits, rows, [tuple(greedy[:3]), (7,), (greedy[6],)])
    assert drawn.counts == [2, 1, 2]
    assert drawn.tokens[:2] == greedy[:2]
    assert drawn.tokens[3:] == greedy[6:]
    assert [(each, type(error)) for each, error in drawn.failed] == [(rows[1], NotFinite)]


def test_counts_are_those_of_a_counter_however_they_grow() -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 400, (900,), generator=generator).tolist()
    counts = Counts(tokens[:100])
    for start, end in ((100, 101), (101, 500), (500, 900)):
        counts.add(tokens[start:end])
    assert counts.counted == 800
    assert dict(zip(counts.output.tolist(), counts.times.tolist(), strict=True)) == Counter(tokens[100:])
    assert sorted(counts.seen.tolist()) == sorted(set(tokens))
    assert len(set(counts.seen.tolist())) == len(counts.seen)
