"""The estimate of when a full queue has room, and the order of the checks."""

from typing import Any

import msgspec
import pytest

from ingress.admission import RETRY_AFTER_MAX_S, RETRY_AFTER_UNKNOWN_S, Admission, QueueRate
from ingress.schemas import CompletionBody
from shared.errors import BadRequest, QueueFull
from shared.settings import Settings


class Dispatcher:
    def __init__(self, queued: int) -> None:
        self.now = queued

    def queued(self, tenant: str) -> int:
        return self.now


def admit(dispatcher: Dispatcher, admission: Admission, make: Any, body: dict[str, Any], now: float = 0.0) -> Any:
    decoded = msgspec.convert({"model": "m"} | body, CompletionBody)
    requests = admission.admit("rid", decoded, 10, make.version())
    admission.check_queue("local", len(requests), now)
    return requests


def test_a_request_for_each_prompt_with_a_seed_of_its_own(make: Any) -> None:
    admission = Admission(Settings(tenant_queue_max=3), Dispatcher(0))
    first, second, third = admit(Dispatcher(0), admission, make, {"prompt": ["a", [1, 2], "b"], "n": 2})
    assert first.rid == "rid"
    assert len({each.rid for each in (first, second, third)}) == 3
    assert len({each.sampling.seed for each in (first, second, third)}) == 3
    assert [first.input.prompt, second.input.token_ids, third.input.prompt] == ["a", [1, 2], "b"]
    assert {each.sampling.n for each in (first, second, third)} == {2}
    seeded = admit(Dispatcher(0), admission, make, {"prompt": ["a", "a"], "seed": 9})
    assert [each.sampling.seed for each in seeded] == [9, 9]


def test_prompts_count_one_by_one(make: Any) -> None:
    admission = Admission(Settings(tenant_queue_max=3, prompts_max=4), Dispatcher(1))
    assert len(admit(Dispatcher(1), admission, make, {"prompt": ["a", "b"]})) == 2
    with pytest.raises(QueueFull):
        admit(Dispatcher(1), admission, make, {"prompt": ["a", "b", "c"]})
    with pytest.raises(BadRequest, match="at most 4 prompts, got 5"):
        admit(Dispatcher(1), admission, make, {"prompt": ["a"] * 5})


def test_a_full_queue_refuses_with_a_computed_retry_after(make: Any) -> None:
    dispatcher = Dispatcher(0)
    admission = Admission(Settings(tenant_queue_max=91), dispatcher)
    for second in range(10):  # ten published a second, one of them taken
        for _ in range(10):
            admit(dispatcher, admission, make, {"prompt": "x"}, float(second))
            dispatcher.now += 1
        dispatcher.now -= 1
    admit(dispatcher, admission, make, {"prompt": "x"}, 10.0)
    dispatcher.now += 1
    with pytest.raises(QueueFull, match="91 requests wait for a worker, the limit is 91") as caught:
        admit(dispatcher, admission, make, {"prompt": "x"}, 10.0)
    assert caught.value.retry_after == pytest.approx(9.0)  # for a tenth of the queue, at one a second


def test_a_tenant_may_have_a_queue_limit_of_its_own() -> None:
    admission = Admission(Settings(tenant_queue_max=1), Dispatcher(5))
    admission.check_queue("a", 1, 0.0, 6)
    with pytest.raises(QueueFull, match="the limit is 6"):
        admission.check_queue("a", 2, 0.0, 6)
    with pytest.raises(QueueFull, match="the limit is 1"):
        admission.check_queue("b", 1, 0.0)


def test_validity_comes_before_the_queue(make: Any) -> None:
    admission = Admission(Settings(tenant_queue_max=0), Dispatcher(0))
    with pytest.raises(BadRequest):
        admit(Dispatcher(0), admission, make, {"prompt": ""})
    with pytest.raises(QueueFull):
        admit(Dispatcher(0), admission, make, {"prompt": "x"})


def test_queue_rate_of_a_burst() -> None:
    assert QueueRate().retry_after(10, 10, 0.0) == RETRY_AFTER_UNKNOWN_S
    rate = QueueRate()
    for queued in range(1, 101):
        rate.published(queued, 0.0)
    assert rate.retry_after(80, 80, 10.0) == pytest.approx(8 / 2)  # 20 left in 10 s
    assert rate.retry_after(10, 100, 10.0) == 1.0  # room already
    assert rate.retry_after(99, 10, 10.0) == RETRY_AFTER_MAX_S  # 90 at one in 10 s


def test_an_old_rate_is_forgotten() -> None:
    rate = QueueRate()
    rate.published(1, 0.0)
    rate.published(1, 10.0)
    assert rate.retry_after(1, 1, 100.0) == RETRY_AFTER_UNKNOWN_S
