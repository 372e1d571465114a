"""The queue of the simulation."""

from headrace.fleet.broker import Broker
from headrace.fleet.clock import Clock
from headrace.fleet.workload import Request
from workers.engine.request import TenantLimits


class Puller:
    def __init__(self) -> None:
        self.listens = True
        self.got: list[int] = []
        self.ended: list[str] = []

    def message(self, request: Request) -> None:
        self.got.append(request.number)

    def pull_ended(self, name: str, left: int) -> None:
        self.ended.append(f"{name} {left}")


def request(number: int) -> Request:
    return Request(number, "tenant", TenantLimits(), 10, 10, 0, 0, 0.0)


def test_open_pulls_are_served_in_turn() -> None:
    broker, one, two = Broker(Clock()), Puller(), Puller()
    broker.pull(one, "a", 3, 3.0)
    broker.pull(two, "b", 1, 3.0)
    for number in range(6):
        broker.publish(request(number))
    assert (one.got, two.got) == ([0, 2, 3], [1])
    assert (broker.pending, broker.claimed) == (2, 4)
    broker.acknowledge(request(0))
    assert broker.info().num_ack_pending == 3


def test_what_comes_back_goes_before_what_waits() -> None:
    broker, one = Broker(Clock()), Puller()
    first = request(0)
    broker.pull(one, "a", 1, 3.0)
    broker.publish(first)
    broker.publish(request(1))
    broker.give_back(first)
    broker.pull(one, "b", 2, 3.0)
    assert one.got == [0, 0, 1]


def test_a_pull_ends_and_nobody_is_served_who_does_not_listen() -> None:
    clock = Clock()
    broker, gone, here = Broker(clock), Puller(), Puller()
    broker.pull(here, "short", 5, 1.0)
    broker.pull(gone, "b", 5, 9.0)
    clock.run(2.0)
    assert here.ended == ["short 5"]
    broker.pull(here, "c", 5, 9.0)
    gone.listens = False
    assert broker.info().num_waiting == 1
    broker.publish(request(0))
    assert (gone.got, here.got) == ([], [0])


def test_a_pause_and_a_withdrawal() -> None:
    broker, one = Broker(Clock()), Puller()
    broker.pull(one, "a", 5, 9.0)
    broker.paused = True
    unwanted = request(1)
    broker.publish(request(0))
    broker.publish(unwanted)
    assert broker.withdraw(unwanted)
    assert not broker.withdraw(unwanted)
    assert one.got == []
    broker.resume()
    assert one.got == [0]
