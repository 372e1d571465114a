"""Traffic: rates, lengths, days, bursts and traces, all of them a function of the seed."""

from pathlib import Path

import pytest

from headrace.fleet.scenario import Burst, Length, Traffic
from headrace.fleet.workload import Request, Source, read_trace
from shared.errors import BadRequest

WARMUP_S = 10.0


def requests(traffic: Traffic, seed: int = 1, seconds: float = 100.0) -> list[Request]:
    return list(Source(traffic, 0, seed, WARMUP_S, WARMUP_S + seconds).open())


def within(found: list[Request], begin: float, end: float) -> int:
    return sum(begin <= request.at - WARMUP_S < end for request in found)


def test_poisson_traffic_has_its_rate_and_is_a_function_of_the_seed() -> None:
    traffic = Traffic(rate=50, tenants=4)
    found = requests(traffic)
    assert len(found) == pytest.approx(50 * 110, rel=0.05)
    assert [each.at for each in found] == sorted(each.at for each in found)
    assert [(each.at, each.tenant) for each in requests(traffic)] == [(each.at, each.tenant) for each in found]
    assert [each.at for each in requests(traffic, seed=2)] != [each.at for each in found]
    assert {each.tenant for each in found} == {"tenant-0", "tenant-1", "tenant-2", "tenant-3"}


def test_a_burst_multiplies_the_rate_while_it_lasts() -> None:
    found = requests(Traffic(rate=40, bursts=[Burst(at_s=50, seconds=10, times=3)]))
    assert within(found, 50, 60) == pytest.approx(1200, rel=0.15)
    assert within(found, 60, 100) == pytest.approx(1600, rel=0.15)


def test_a_day_begins_at_night() -> None:
    found = requests(Traffic(rate=100, day_s=100, night=0.2))
    assert within(found, 0, 10) == pytest.approx(10 * 100 * 0.23, rel=0.3)
    assert within(found, 45, 55) == pytest.approx(10 * 100, rel=0.15)


@pytest.mark.parametrize("kind", ["lognormal", "exponential", "uniform"])
def test_lengths_have_their_mean_and_their_limit(kind: str) -> None:
    length = Length(kind=kind, mean=200, spread=0.5, max=900)  # type: ignore[arg-type]
    outputs = [each.output for each in requests(Traffic(rate=100, output=length))]
    assert sum(outputs) / len(outputs) == pytest.approx(200, rel=0.06)
    assert min(outputs) >= 1
    assert max(outputs) <= 900
    assert len(set(outputs)) > 50


def test_clients_give_up_as_often_as_it_says() -> None:
    found = requests(Traffic(rate=100, cancelled=0.25, cancelled_after_s=3))
    waits = [each.given_up_at - each.at for each in found if each.given_up_at < float("inf")]
    assert len(waits) / len(found) == pytest.approx(0.25, rel=0.1)
    assert sum(waits) / len(waits) == pytest.approx(3, rel=0.1)


def test_a_flood_comes_at_once() -> None:
    found = requests(Traffic(kind="flood", name="flooder", count=500, at_s=20, output=1000))
    assert [each.at for each in found] == [WARMUP_S + 20] * 500
    assert {each.tenant for each in found} == {"flooder"}


@pytest.mark.parametrize(
    "lines",
    [
        [
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            "2023-11-16 18:17:03.9799600,4808,10",
            "2023-11-16 18:17:05.9799600,9,8",
        ],
        [
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
            "5,ChatGPT,4808,10,1,x",
            "7,GPT-4,9,8,1,x",
        ],
        ["time,tokens_in,tokens_out", "0.5,4808,10", "2.5,9,8"],
    ],
)
def test_public_traces_are_read(tmp_path: Path, lines: list[str]) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("\n".join(lines))
    assert list(read_trace(file)) == [(0.0, 4808, 10), (2.0, 9, 8)]
    found = requests(Traffic(kind="trace", file=str(file), speed=2.0))
    assert [(each.at, each.prompt, each.output) for each in found] == [(0.0, 4808, 10), (1.0, 9, 8)]


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("a,b\n1,2\n")
    with pytest.raises(BadRequest, match="none of these columns"):
        list(read_trace(file))
