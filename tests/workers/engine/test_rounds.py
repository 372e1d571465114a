"""What an encoder computes next: fair order, similar lengths, bounded batches."""

import random

import pytest

from shared.wire import Sampling
from workers.engine.request import EngineRequest, TenantLimits
from workers.engine.rounds import PADDING_FREE, PADDING_PART, EncoderInput, EncoderRun, RoundLimits, Rounds, batches_of

LIMITS = RoundLimits(batch=256, round=1024)


def run(key: str, lengths: list[int], tenant: str = "t", weight: float = 1.0, detached: bool = False) -> EncoderRun:
    inputs = [[7] * length for length in lengths]
    limits = TenantLimits(weight=weight)
    return EncoderRun(
        EngineRequest(
            key=key,
            tenant=tenant,
            prompt_ids=[],
            sampling=Sampling(n=len(inputs)),
            inputs=inputs,
            limits=limits,
            detached=detached,
        )
    )


def take(rounds: Rounds) -> list[EncoderInput]:
    """The next batch, done."""
    batch = rounds.next()
    for each in batch:
        rounds.done(each)
    rounds.check()
    return batch


@pytest.mark.parametrize("seed", range(20))
def test_batches_hold_each_input_once_and_little_padding(seed: int) -> None:
    chosen = random.Random(seed)
    lengths = [chosen.choice([1, 2, 3, 20, 40, 200, 255, 256, 300]) for _ in range(chosen.randrange(1, 80))]
    lengths += [chosen.randrange(1, 400) for _ in range(40)]
    inputs = run("k", lengths).inputs
    batches = batches_of(inputs, LIMITS.batch)
    assert sorted(each.number for batch in batches for each in batch) == list(range(len(inputs)))
    for batch in batches:
        longest = max(len(each.ids) for each in batch)
        padded = longest * len(batch)
        assert padded <= LIMITS.batch or len(batch) == 1
        assert padded - sum(len(each.ids) for each in batch) <= max(padded // PADDING_PART, PADDING_FREE)
    assert len(batches_of(run("k", [8] * 32).inputs, LIMITS.batch)) == 1  # 256 tokens: exactly full
    assert [len(batch) for batch in batches_of(run("k", [8] * 33).inputs, LIMITS.batch)] == [32, 1]


def test_a_tenant_with_one_input_waits_for_one_round_of_another_with_thousands() -> None:
    rounds = Rounds(LIMITS, LIMITS.round)
    rounds.add(run("flood", [32] * 500, "flooder"))
    first = take(rounds)
    assert {each.run.key for each in first} == {"flood"}
    rounds.add(run("one", [30], "other"))
    tokens = 0
    while (batch := take(rounds)) and all(each.run.key == "flood" for each in batch):
        tokens += sum(len(each.ids) for each in batch)
    assert batch
    assert tokens <= 2 * LIMITS.round


def test_tenants_that_wait_share_by_weight() -> None:
    rounds = Rounds(LIMITS, LIMITS.round)
    rounds.add(run("a", [16] * 2000, "one", 1.0))
    rounds.add(run("b", [16] * 2000, "three", 3.0))
    served = {"a": 0, "b": 0}
    for _ in range(60):
        for each in take(rounds):
            served[each.run.key] += 1
    assert served["b"] / sum(served.values()) == pytest.approx(0.75, abs=0.03)


def test_what_is_detached_has_what_the_others_leave() -> None:
    rounds = Rounds(LIMITS, LIMITS.round)
    rounds.add(run("job", [32] * 100, detached=True))
    rounds.add(run("asked", [32] * 64))
    order = [each.run.key for _ in range(20) for each in take(rounds)]
    assert order == ["asked"] * 64 + ["job"] * (len(order) - 64)
    while take(rounds):
        pass
    assert rounds.idle


def test_inputs_can_leave_while_they_wait_and_while_they_are_in_the_round() -> None:
    rounds = Rounds(LIMITS, LIMITS.round)
    leaves, stays = run("leaves", [64] * 40), run("stays", [64] * 4, "other")
    rounds.add(leaves)
    rounds.add(stays)
    assert rounds.next()
    for each in leaves.inputs:
        rounds.done(each)
        rounds.done(each)
    rounds.check()
    rest = []
    while batch := take(rounds):
        rest += batch
    assert {each.run.key for each in rest} == {"stays"}
    assert rounds.idle
    assert rounds.tokens == 0


def test_a_suspected_batch_is_computed_one_by_one_before_all_others() -> None:
    rounds = Rounds(LIMITS, LIMITS.round)
    rounds.add(run("k", [64] * 12))
    batch = rounds.next()
    assert len(batch) == 4
    rounds.suspect(batch)
    again = [take(rounds) for _ in range(4)]
    assert again == [[each] for each in batch]
    assert all(each.alone for each in batch)
    assert len(take(rounds)) == 4
