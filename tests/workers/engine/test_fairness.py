"""Who is served next: the ledger, and what it promises when a scheduler serves by it."""

import random

import pytest
from virtual_engine import Life, VirtualEngine

from workers.engine import fairness
from workers.engine.fairness import NOBODY, OTHERS, Account, TenantLedger
from workers.engine.pacer import Cost
from workers.engine.request import TenantLimits

A100 = Cost(step=18.4, decode=0.08)


class Entry:
    def __init__(self, detached: bool = False) -> None:
        self.account: Account[Entry] = NOBODY
        self.detached = detached


def add(ledger: TenantLedger[Entry], tenant: str, weight: float = 1.0) -> Entry:
    entry = Entry()
    ledger.add(entry, tenant, TenantLimits(weight=weight))
    return entry


def admit(ledger: TenantLedger[Entry], tokens: int) -> Entry:
    """Admit the next in order and charge it."""
    entry = next(iter(ledger.order()[0].waiting))
    ledger.admit(entry, tokens)
    return entry


def tenants(ledger: TenantLedger[Entry]) -> list[str]:
    return [account.tenant for account in ledger.order()]


def test_the_tenant_with_the_smallest_counter_comes_first_and_its_requests_in_their_order() -> None:
    ledger: TenantLedger[Entry] = TenantLedger(99)
    a, b = [add(ledger, "A") for _ in range(2)], [add(ledger, "B") for _ in range(3)]
    assert [admit(ledger, tokens) for tokens in (100, 30, 50, 30, 1)] == [a[0], b[0], b[1], b[2], a[1]]
    assert ledger.waiting == 0


def test_output_tokens_cost_twice_as_much_and_weights_divide() -> None:
    ledger: TenantLedger[Entry] = TenantLedger(99)
    light, heavy = add(ledger, "light"), add(ledger, "heavy", weight=4.0)
    ledger.admit(light, 10)
    ledger.admit(heavy, 10)
    light.account.output += 5
    heavy.account.output += 5
    assert (light.account.service, heavy.account.service) == (20, 20)
    assert (light.account.counter, heavy.account.counter) == (20, 5)


def test_of_two_with_the_same_counter_the_one_that_holds_less_comes_first() -> None:
    ledger: TenantLedger[Entry] = TenantLedger(99)
    add(ledger, "A")
    ledger.admit(add(ledger, "A"), 0)
    add(ledger, "B")
    assert tenants(ledger) == ["B", "A"]


@pytest.mark.parametrize("a_still_runs", [True, False])
def test_a_tenant_that_comes_later_is_lifted_to_the_others_though_nobody_waits(a_still_runs: bool) -> None:
    ledger: TenantLedger[Entry] = TenantLedger(99)
    served = add(ledger, "A")
    ledger.admit(served, 1000)
    served.account.output += 500
    if not a_still_runs:  # what was reached is remembered when all are idle
        ledger.leave(served)
        ledger.remove(served)
    assert add(ledger, "B").account.counter == 2000
    assert add(ledger, "A").account.counter == 2000


def test_idleness_earns_no_credit_and_debts_are_not_forgiven() -> None:
    ledger: TenantLedger[Entry] = TenantLedger(99)
    modest, greedy = add(ledger, "modest"), add(ledger, "greedy")
    ledger.admit(modest, 10)
    ledger.admit(greedy, 500)
    ledger.leave(modest)
    ledger.remove(modest)
    again = add(ledger, "modest")
    assert again.account.counter == 500  # of the one that was active all the time
    ledger.leave(greedy)
    ledger.remove(greedy)
    again.account.output += 1000
    assert add(ledger, "greedy").account.counter == 2500
    third = add(ledger, "third")
    assert third.account.counter == 2500


def test_a_tenant_that_always_runs_a_little_saves_up_no_credit_either() -> None:
    """It never waits and is never idle, while another takes the rest; then it floods."""
    ledger: TenantLedger[Entry] = TenantLedger(99)
    trickle, other_trickle = add(ledger, "trickle"), add(ledger, "other trickle")
    ledger.admit(trickle, 1)
    ledger.admit(other_trickle, 1)
    for _ in range(10):
        admit_now = add(ledger, "flood")
        ledger.admit(admit_now, 1000)
    waiting = add(ledger, "flood")
    flooding_too = add(ledger, "trickle")
    assert waiting.account.counter - flooding_too.account.counter <= 1000  # one request, not ten


def test_recompute_and_resume_cost_nothing_twice() -> None:
    ledger: TenantLedger[Entry] = TenantLedger(99)
    entry, later = add(ledger, "A"), add(ledger, "A")
    ledger.admit(entry, 100)
    ledger.leave(entry)
    ledger.put_back(entry)
    assert next(iter(ledger.order()[0].waiting)) is entry
    ledger.admit(entry, 0)
    assert entry.account.service == 100
    assert next(iter(ledger.order()[0].waiting)) is later


def test_a_new_weight_counts_for_what_comes() -> None:
    ledger: TenantLedger[Entry] = TenantLedger(99)
    account = add(ledger, "A").account
    account.prompt += 1000
    add(ledger, "A", weight=10.0)
    assert account.counter == 1000
    account.prompt += 1000
    assert account.counter == 1100


def test_the_victim_is_the_newest_of_the_tenant_that_holds_most_for_its_weight() -> None:
    ledger: TenantLedger[Entry] = TenantLedger(99)
    old, new, other, light = add(ledger, "A"), add(ledger, "A"), add(ledger, "B"), add(ledger, "C", weight=0.1)
    running = [old, new, other, light]
    old.account.blocks, other.account.blocks, light.account.blocks = 10, 9, 0
    assert ledger.victim(running) is new
    other.account.blocks = 11
    assert ledger.victim(running) is other
    light.account.blocks = 2
    assert ledger.victim(running) is light


def test_accounts_of_tenants_that_never_come_back_are_closed_and_their_service_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fairness, "ACCOUNTS_MAX", 80)
    ledger: TenantLedger[Entry] = TenantLedger(99)
    for number in range(500):
        entry = add(ledger, f"t{number}")
        ledger.admit(entry, 10)
        ledger.leave(entry)
        ledger.remove(entry)
    ledger.check([])
    assert len(ledger._accounts) == 80
    ledger.publish()
    assert len(ledger.service) == fairness.NAMED_MAX + 1
    assert ledger.service["t0"] == 10
    assert ledger.service[OTHERS] == 4500


def test_jains_index_is_of_those_that_wait_all_the_time() -> None:
    ledger: TenantLedger[Entry] = TenantLedger(99)
    accounts = [add(ledger, tenant).account for tenant in "ABC"]
    ledger.judge()
    accounts[0].prompt += 300
    accounts[1].prompt += 100
    ledger.remove(next(iter(accounts[2].waiting)))
    ledger.judge()
    assert ledger.jain == pytest.approx(400**2 / (2 * (300**2 + 100**2)))
    accounts[0].prompt += 100
    accounts[1].prompt += 100
    ledger.judge()
    assert ledger.jain == 1.0


# -- what a scheduler makes of it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_service_of_two_backlogged_tenants_differs_by_less_than_the_bound_at_every_moment(seed: int) -> None:
    """The bound of VTC: a tenant is admitted only when it is not ahead, and then is charged what it has in flight at most."""
    rng = random.Random(seed)
    slots, blocks = rng.choice([(4, 40), (8, 400), (16, 120)])
    prompts, outputs = (rng.randint(1, 40), rng.randint(100, 300)), (rng.randint(1, 20), rng.randint(30, 100))
    weights = {"A": 1.0, "B": rng.choice([1.0, 2.0])}
    engine = VirtualEngine(A100, blocks, slots, chunk=rng.choice([16, 64, 512]), prefix_cache="off")
    bound = prompts[1] / min(weights.values()) + slots * 2 * outputs[1] / min(weights.values())

    def refill() -> dict[str, Account[object]]:
        accounts = {}
        for tenant, weight in weights.items():
            while True:
                waiting = [life.sequence for life in engine.lives.values() if life.sequence.tenant == tenant]
                if waiting and len(waiting[0].account.waiting) >= 3:
                    accounts[tenant] = waiting[0].account
                    break
                limits = TenantLimits(weight=weight)
                engine.submit(tenant, rng.randint(*prompts), rng.randint(*outputs), limits)
        return accounts

    accounts = refill()
    worst = 0.0
    for _ in range(1500):
        engine.step()
        refill()
        got = [account.service / weights[tenant] for tenant, account in accounts.items()]
        worst = max(worst, abs(got[0] - got[1]))
        assert worst <= bound, f"seed {seed}: {got} differ by more than {bound}"
    assert min(got) > 3 * bound, "too short to show anything"


def flooded(second: bool, tenant: str = "flood") -> tuple[VirtualEngine, list[Life]]:
    """500 long requests at once, and of another tenant, if `second`, one of 100 + 40 tokens every second, for 60 s."""
    engine = VirtualEngine(A100, 16_250 // 16, 45, reserved_fraction=0.1, prefix_cache="off")
    rng = random.Random(1)
    for number in range(500):
        name = tenant if tenant == "flood" or number % 2 else "other half"
        engine.submit(name, rng.randint(100, 900), rng.randint(100, 300))
    lives = []
    for moment in range(60):
        engine.run_until(1000.0 * (moment + 1))
        if second:
            lives.append(engine.submit("second", 100, 40))
    return engine, lives


def test_a_flood_of_one_tenant_does_not_keep_another_waiting() -> None:
    _, lives = flooded(second=True)
    for life in lives[:-1]:
        assert life.admitted_step is not None
        assert life.admissions_between <= 1
        assert life.admitted_step - life.arrived_step <= 2


def test_fairness_costs_less_than_a_twentieth_of_the_throughput() -> None:
    served = {}
    for name, reserved, split in (("first come first served", 0.0, False), ("fair", 0.1, True)):
        engine = VirtualEngine(A100, 16_250 // 16, 45, reserved_fraction=reserved, prefix_cache="off")
        rng = random.Random(1)
        for number in range(300):
            engine.submit("AB"[split and number % 2], rng.randint(100, 900), rng.randint(100, 300))
        engine.run_until(60_000)
        served[name] = engine.output_tokens
    assert served["fair"] >= 0.95 * served["first come first served"], served


def test_a_capped_tenant_blocks_nobody() -> None:
    engine = VirtualEngine(A100, 100, 8)
    capped = [engine.submit("capped", 20, 100, TenantLimits(slots_max=2)) for _ in range(10)]
    other = [engine.submit("other", 20, 100) for _ in range(6)]
    engine.step()
    assert [life.admitted_step for life in capped].count(1) == 2
    assert all(life.admitted_step == 1 for life in other)


def test_a_tenant_alone_leaves_the_reserved_slots_and_blocks_free() -> None:
    engine = VirtualEngine(A100, 100, 20, reserved_fraction=0.1)
    lives = [engine.submit("A", 16, 60) for _ in range(30)]
    for _ in range(50):
        engine.step()
        assert len(engine.scheduler.running) <= 18
        assert engine.scheduler.pool.used <= 90
    late = engine.submit("B", 16, 60)
    engine.step()
    assert late.admitted_step == engine.steps
    assert sum(life.admitted_step is not None for life in lives) < 30


def test_one_tenants_long_prompt_leaves_anothers_half_of_the_step() -> None:
    engine = VirtualEngine(A100, 1000, 8, chunk=64)
    engine.submit("A", 5000, 10)
    engine.step()
    engine.submit("A", 100, 10)
    other = engine.submit("B", 60, 10)
    plan = engine.step()
    assert [(part.sequence.tenant, part.count) for part in plan.slices] == [("A", 32), ("B", 32)]
    plan = engine.step()
    assert [(part.sequence.tenant, part.count) for part in plan.slices] == [("A", 36), ("B", 28)]
    assert len(other.token_times) == 1
