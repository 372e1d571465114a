"""What a puller knows of its credit at the server. The pulls themselves: test_bus."""

from shared.pull import PULLS_MAX, Credit


def credit() -> Credit:
    return Credit(heartbeat_s=1.0, expires_s=3.0)


def test_no_more_is_pulled_than_is_free() -> None:
    known = credit()
    assert known.next(10, 0.0) == 10
    known.pulled("a", 10, 0.0)
    assert known.next(12, 0.1) == 2
    assert not known.is_worth_a_pull(12)
    assert known.is_worth_a_pull(13)
    for _ in range(4):
        known.message(0.2)
    assert (known.outstanding, known.open) == (6, 1)


def test_a_pull_that_is_not_heard_of_is_forgotten() -> None:
    known = credit()
    known.pulled("a", 4, 0.0)
    known.heartbeat("a", 1.0)
    assert known.next(4, 3.4) == 0
    assert known.next(4, 3.6) == 4
    assert not known.ended("a", 4)


def test_pulls_are_few() -> None:
    known = credit()
    for number in range(PULLS_MAX):
        known.pulled(str(number), 1, 0.0)
    assert known.next(99, 0.1) == 0
    assert known.message(0.2)
    assert known.next(99, 0.3) == 99 - (PULLS_MAX - 1)


def test_after_a_rest_and_a_reset_it_goes_on() -> None:
    known = credit()
    known.pulled("a", 4, 0.0)
    known.rest(0.5)
    assert known.next(9, 0.4) == 0
    known.reset()
    assert known.next(9, 0.4) == 9


def test_an_end_leaves_no_credit_that_the_server_does_not_have() -> None:
    """The server serves pulls in turn, here the oldest is debited: at its end the difference is found."""
    known = credit()
    known.pulled("old", 10, 0.0)
    known.pulled("new", 3, 1.0)
    for _ in range(6):
        known.message(1.5)  # three of each
    assert known.outstanding == 7
    assert known.ended("old", 7)
    assert known.outstanding == 0
    assert known.next(10, 3.0) == 10
