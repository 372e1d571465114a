"""The smallest fleet that holds an SLA: by search over the simulator, with the estimate of a closed form beside it."""

import math
from collections.abc import Callable

import msgspec
from msgspec import Struct

from headrace.fleet.profiles import Profile
from headrace.fleet.report import Result
from headrace.fleet.scenario import Length, Scenario
from headrace.fleet.simulation import simulate
from shared.errors import BadRequest
from workers.engine.blocks import blocks_for
from workers.engine.pacer import MARGIN_MIN
from workers.engine.sequence import Load

PROBE_S = 60.0  # of a run of the search; its answer is then held for the scenario's whole time
MISS_S = 0.01  # of the requests may wait too long
WORKERS_MAX = 20_000

OnRun = Callable[[Result], None]


class Estimate(Struct, frozen=True, kw_only=True):
    """What arithmetic says, of a batch that is as full as memory, slots and the target for a token allow."""

    batch: int
    bound: str  # what the batch is limited by: slots | memory | tpot
    step_ms: float
    requests_per_s: float  # of a worker
    saturated: int  # workers with no place free
    queueing: int  # workers with which 99 of 100 wait less than the target (Erlang C)
    utilised: int  # workers at the autoscaler's target utilisation


class Found(Struct, frozen=True, kw_only=True):
    """`workers` is None where no fleet holds: a larger one would not help. `result` is of the whole time."""

    workers: int | None
    estimate: Estimate | None
    result: Result
    reason: str


def estimate(scenario: Scenario) -> Estimate | None:
    """None where the traffic has no rate of its own, as a closed loop or a trace has none."""
    rates = [each for each in scenario.traffic if each.kind == "poisson" and each.rate > 0]
    rate = sum(each.rate for each in rates)
    if not rate:
        return None
    prompt = sum(each.rate * _mean(each.prompt) for each in rates) / rate
    output = sum(each.rate * _mean(each.output) for each in rates) / rate
    profile, engine = scenario.profile(), scenario.engine
    blocks = engine.kv_blocks or profile.blocks
    fits = int(blocks / (blocks_for(math.ceil(prompt + output / 2)) + 1))
    slots = engine.slots or profile.slots
    batch, bound = (slots, "slots") if slots <= fits else (fits, "memory")
    target = scenario.sla.tpot_ms
    if engine.tpot_ms_target is not None:
        target = min(target, engine.tpot_ms_target / (1 + MARGIN_MIN))  # the pacer keeps a margin
    while batch > 1 and _step_ms(profile, batch, prompt, output) > target:
        batch, bound = batch - 1, "tpot"
    step_ms = _step_ms(profile, batch, prompt, output)
    each = batch / (output * step_ms / 1e3)
    saturated = math.ceil(rate / each)
    wait_s = max(0.0, scenario.sla.ttft_ms - step_ms * 2) / 1e3
    queueing = next(
        count
        for count in range(saturated, WORKERS_MAX)
        if _waits_longer(count * batch, rate, output * step_ms / 1e3, wait_s) <= MISS_S
    )
    return Estimate(
        batch=batch,
        bound=bound,
        step_ms=round(step_ms, 2),
        requests_per_s=round(each, 2),
        saturated=saturated,
        queueing=queueing,
        utilised=math.ceil(rate / each / scenario.settings.target_utilisation),
    )


def smallest(scenario: Scenario, on_run: OnRun = lambda result: None, probe_s: float = PROBE_S) -> Found:
    """Search with runs of `probe_s`, then hold what was found for the scenario's time: one more worker until it does."""
    if scenario.fleet.autoscale:
        raise BadRequest("a plan is for a fixed fleet: autoscale = false")
    guess = estimate(scenario)
    short = msgspec.structs.replace(scenario, seconds=min(probe_s, scenario.seconds))

    def holds(workers: int) -> bool:
        found = simulate(short.with_fleet(workers=workers))
        on_run(found)
        return found.holds

    high = guess.queueing if guess else scenario.fleet.workers
    low, step = high, max(1, high // 50)
    if holds(high):  # gallop from there: the estimate is near, mostly
        while (low := low - step) > 0 and holds(low):
            high, step = low, 2 * step
        low = max(0, low)
    else:
        most = 8 * (guess.utilised if guess else high) + 8
        while not holds(high := low + step):
            low, step = high, 2 * step
            if high > most:
                result = simulate(short.with_fleet(workers=high))
                return Found(workers=None, estimate=guess, result=result, reason=_why_never(scenario, result))
    while high - low > max(1, high // 100):
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    while True:
        result = simulate(scenario.with_fleet(workers=high))
        on_run(result)
        if result.holds:
            return Found(workers=high, estimate=guess, result=result, reason=_why(scenario, guess, high, result))
        high += max(1, high // 100)


def _why(scenario: Scenario, guess: Estimate | None, workers: int, result: Result) -> str:
    if guess is None:
        return "there is no closed form for this traffic"
    said = f"a batch of {guess.batch} is bound by {guess.bound}, a step then takes {guess.step_ms:g} ms"
    if workers > guess.utilised:
        less = f"the batch stays at {result.batch:g} on average" if result.batch < 0.9 * guess.batch else "tails decide"
        return f"{said}; more workers than at {scenario.settings.target_utilisation:.0%} of that: {less}"
    if workers > guess.queueing:
        return (
            f"{said}; {workers - guess.queueing} more than if all workers shared one batch: places are pulled by each"
            " worker in turn, and some stay reserved"
        )
    return (
        f"{said}; so many requests in flight even each other out: {workers / guess.saturated - 1:.0%} over saturation"
        f" is enough, not {guess.utilised / guess.saturated - 1:.0%}"
    )


def _why_never(scenario: Scenario, result: Result) -> str:
    if result.refused:
        return f"requests are refused: {result.refused}"
    if result.tpot_ms.p99 > scenario.sla.tpot_ms:
        return f"a token takes {result.tpot_ms.p99:g} ms (p99) however many workers there are"
    return f"a first token takes {result.ttft_ms.p99:g} ms (p99) however many workers there are"


def _step_ms(profile: Profile, batch: int, prompt: float, output: float) -> float:
    """Of a full batch in its steady state: with each `output` steps of a sequence comes one prompt."""
    load = Load(
        batch,
        batch,
        round(batch * (prompt + output / 2)),
        round(batch * prompt / output),
        round(batch / output * prompt * prompt / 2),
    )
    return profile.step_ms(load)


def _waits_longer(places: int, rate: float, service_s: float, wait_s: float) -> float:
    """The share of requests that wait longer than `wait_s` for one of `places` (M/M/c, a little worse than it is)."""
    offered = rate * service_s
    if places <= offered:
        return 1.0
    inverse = 1.0  # of Erlang B, by its recursion
    for place in range(1, places + 1):
        inverse = 1 + inverse * place / offered
        if inverse > 1e12:
            return 0.0
    blocked = 1 / inverse
    waits = blocked / (1 - offered / places * (1 - blocked))
    return waits * math.exp(-(places / service_s - rate) * wait_s)


def _mean(length: int | Length) -> float:
    return float(length) if isinstance(length, int) else length.mean
