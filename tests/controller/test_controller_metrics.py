"""The exposition: gauges of the last tick, counters, cold starts; served over HTTP."""

import urllib.error
import urllib.request

import pytest
from prometheus_client import generate_latest

from controller.autoscaler import Decision, Lag
from controller.fleet import Member
from controller.metrics import Metrics, VersionView
from shared.records import Lease


def view(model: str, desired: int = 1, lag: Lag | None = None, states: tuple[str, ...] = ()) -> VersionView:
    members = tuple(
        Member(worker=f"w{number}", model=model, version="v", state=state, since=0.0)
        for number, state in enumerate(states)
    )
    decision = Decision(model=model, version="v", desired=desired, reasons=("no_work", "idle"))
    return VersionView(decision=decision, members=members, lag=lag)


def lines(metrics: Metrics) -> list[str]:
    return generate_latest(metrics.registry).decode().splitlines()


def test_gauges_show_the_last_tick_and_drop_what_is_gone() -> None:
    metrics = Metrics()
    metrics.show([view("a", 2, Lag(3, 1), ("active", "active", "starting", "loaded")), view("b", 0)])
    text = lines(metrics)
    assert 'headrace_replicas_desired{model="a",version="v"} 2.0' in text
    assert 'headrace_replicas{model="a",state="active",version="v"} 2.0' in text
    assert 'headrace_replicas{model="a",state="loaded",version="v"} 1.0' in text
    assert 'headrace_replicas{model="a",state="draining",version="v"} 0.0' in text
    assert 'headrace_lag_messages{kind="pending",model="a",version="v"} 3.0' in text
    assert 'headrace_lag_messages{kind="claimed",model="a",version="v"} 1.0' in text
    assert not [line for line in text if "lag" in line and 'model="b"' in line]
    metrics.show([view("b", 0)])
    assert not [line for line in lines(metrics) if 'model="a"' in line]


def test_decisions_count_by_what_decided_and_failures_by_kind() -> None:
    metrics = Metrics()
    metrics.decided(view("a").decision)
    metrics.start_failed("a", "v", "crash")
    text = lines(metrics)
    assert 'headrace_scaling_decisions_total{model="a",reason="idle",version="v"} 1.0' in text
    assert 'headrace_start_failures_total{kind="crash",model="a",version="v"} 1.0' in text


def test_each_phase_of_a_cold_start_counts_once_per_worker_even_if_it_is_told_late() -> None:
    metrics = Metrics()
    lease = Lease(worker="w", model="a", version="v", state="active", pid=1, host="h", started=0.0)
    lease.cold_start = {"load": 0.7}
    metrics.cold_start(lease, 4.2)
    lease.cold_start = {"load": 0.7, "first_token": 0.1}
    metrics.cold_start(lease, None)
    metrics.cold_start(lease, None)
    text = lines(metrics)
    for phase, seconds in (("active", 4.2), ("load", 0.7), ("first_token", 0.1)):
        labels = f'{{model="a",phase="{phase}",version="v"}}'
        assert f"headrace_cold_start_seconds_count{labels} 1.0" in text
        assert f"headrace_cold_start_seconds_sum{labels} {seconds}" in text
    metrics.forget([], [("a", "v")])
    metrics.cold_start(lease, None)
    assert 'headrace_cold_start_seconds_count{model="a",phase="load",version="v"} 2.0' in lines(metrics)


def test_a_version_that_is_gone_takes_its_series_with_it() -> None:
    metrics = Metrics()
    lease = Lease(worker="w", model="a", version="v", state="active", pid=1, host="h", started=0.0)
    lease.cold_start = {"load": 0.7}
    for model in ("a", "b"):
        metrics.decided(view(model).decision)
        metrics.start_failed(model, "v", "crash")
    metrics.cold_start(lease, 4.2)
    metrics.forget(["w"], [("a", "v"), ("b", "v")])
    metrics.forget([], [("b", "v")])
    assert not [line for line in lines(metrics) if 'model="a"' in line]
    assert len([line for line in lines(metrics) if 'model="b"' in line and "_total{" in line]) == 2


def test_it_is_served_on_a_free_port_until_it_is_closed() -> None:
    metrics = Metrics()
    metrics.serve("127.0.0.1", 0)
    url = f"http://127.0.0.1:{metrics.port}/metrics"
    try:
        metrics.show([view("a")])
        with urllib.request.urlopen(url, timeout=5) as answer:
            assert b"headrace_replicas_desired" in answer.read()
    finally:
        metrics.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=5)
