"""Whose turn it is to be told: nobody who is slow, dead or busy keeps the others from theirs."""

from controller.webhook_queue import Entry, Limits, WebhookQueue


def queue(overall: int = 100, per_tenant: int = 100, per_host: int = 100) -> WebhookQueue:
    return WebhookQueue(Limits(overall=overall, per_tenant=per_tenant, per_host=per_host))


def put(to: WebhookQueue, *keys: str, tenant: str = "acme", host: str = "a", due: float = 0.0) -> None:
    for key in keys:
        to.put(Entry(key=key, tenant=tenant, host=host, due=due))


def test_what_is_due_is_taken_once_and_the_rest_waits() -> None:
    waiting = queue()
    put(waiting, "1", due=1.0)
    put(waiting, "3", due=3.0)
    put(waiting, "2", due=2.0)
    assert (waiting.take(0.5), waiting.next_due(), len(waiting)) == ([], 1.0, 3)
    assert waiting.take(2.0) == ["1", "2"]
    assert waiting.take(2.0) == []
    assert (waiting.next_due(), len(waiting), waiting.known("acme")) == (3.0, 3, 3)
    waiting.done("1")
    waiting.done("2")
    assert waiting.take(3.0) == ["3"]
    waiting.done("3")
    assert (waiting.next_due(), len(waiting), waiting.known("acme")) == (None, 0, 0)


def test_the_last_word_on_one_counts() -> None:
    waiting = queue(overall=1)
    put(waiting, "x", "y")
    assert waiting.take(0.0) == ["x"]  # y is ready
    put(waiting, "y", due=5.0)
    put(waiting, "z", due=1.0)
    put(waiting, "z", due=2.0)
    waiting.done("x")
    assert waiting.take(1.0) == []
    assert waiting.next_due() == 2.0
    waiting.drop("z")
    waiting.drop("z")
    assert waiting.next_due() == 5.0
    assert waiting.take(9.0) == ["y"]


def test_one_that_is_given_back_can_be_taken_again() -> None:
    waiting = queue()
    put(waiting, "x")
    assert waiting.take(0.0) == ["x"]
    assert waiting.is_running("x")
    waiting.done("x")
    assert not waiting.is_running("x")
    put(waiting, "x", due=1.0)
    assert waiting.take(1.0) == ["x"]


def test_a_host_that_does_not_answer_holds_up_its_own_only() -> None:
    waiting = queue(overall=4, per_host=2)
    put(waiting, *(f"dead-{n}" for n in range(50)), host="dead")
    put(waiting, "alive-1", "alive-2", "alive-3", host="alive")
    assert sorted(waiting.take(0.0)) == ["alive-1", "alive-2", "dead-0", "dead-1"]
    waiting.done("alive-1")
    assert waiting.take(0.0) == ["alive-3"]
    waiting.done("alive-2")
    assert waiting.take(0.0) == []
    waiting.done("dead-1")
    assert waiting.take(0.0) == ["dead-2"]


def test_a_host_is_one_whoever_names_it() -> None:
    waiting = queue(per_host=1)
    put(waiting, "1", tenant="acme")
    put(waiting, "2", tenant="other")
    assert waiting.take(0.0) == ["1"]
    waiting.done("1")
    assert waiting.take(0.0) == ["2"]


def test_a_tenant_with_many_hosts_leaves_room_for_others() -> None:
    waiting = queue(overall=4, per_tenant=3)
    for n in range(50):
        put(waiting, f"much-{n}", tenant="much", host=f"{n}.evil.example")
    assert len(waiting.take(0.0)) == 3
    put(waiting, "little", tenant="little", host="good")
    assert waiting.take(0.0) == ["little"]


def test_tenants_and_hosts_take_turns() -> None:
    waiting = queue(overall=1)
    for host in ("a", "b"):
        put(waiting, *(f"much-{host}-{n}" for n in range(3)), tenant="much", host=host)
    put(waiting, "little-1", "little-2", tenant="little")
    order = []
    while taken := waiting.take(0.0):
        order += taken
        waiting.done(taken[0])
    assert order[:4] == ["much-a-0", "little-1", "much-b-0", "little-2"]
    assert order[4:] == ["much-a-1", "much-b-1", "much-a-2", "much-b-2"]
