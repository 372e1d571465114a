"""Judging exits, backing off, giving up."""

from controller.starts import Exit, Failure, Starts, judge
from shared.records import Lease
from shared.settings import Settings

SETTINGS = Settings(start_failures_max=3, start_backoff_s=1.0, start_backoff_max_s=30.0)


def ended(**given: object) -> Exit:
    defaults: dict[str, object] = {"code": 1, "asked": False, "killed_because": "", "last_line": ""}
    return Exit(worker="w1", model="m", version="v", **(defaults | given))  # type: ignore[arg-type]


def failed_lease(permanent: bool) -> Lease:
    lease = Lease(worker="w1", model="m", version="v", state="failed", pid=1, host="h", started=0.0)
    lease.reason, lease.permanent = "why", permanent
    return lease


def test_a_worker_that_was_active_or_was_told_to_end_has_not_failed_to_start() -> None:
    assert judge(ended(code=-9), None, was_active=True) is None
    assert judge(ended(code=-15, asked=True), None, was_active=False) is None


def test_a_warm_worker_that_ends_before_it_says_that_it_has_its_version_has_crashed_with_it() -> None:
    warm = Lease(worker="w1", model="", version="", state="warm", pid=1, host="h", started=0.0)
    assert judge(ended(code=-11), warm, was_active=True) is not None
    assert judge(ended(code=-9, killed_because="silent"), warm, was_active=True) is None  # it hung before


def test_what_the_worker_says_goes_before_how_it_ended() -> None:
    permanent = judge(ended(code=3), failed_lease(True), was_active=False)
    assert permanent == Failure(kind="permanent", reason="why")
    transient = judge(ended(code=-15, asked=True), failed_lease(False), was_active=False)
    assert transient == Failure(kind="transient", reason="why")


def test_an_exit_without_a_word_is_a_crash_that_names_signal_or_code_and_the_last_line() -> None:
    crash = judge(ended(code=-11, last_line="Fatal: x"), None, was_active=False)
    assert crash == Failure(kind="crash", reason="the worker was ended by signal 11 (Segmentation fault): Fatal: x")
    assert judge(ended(code=None), None, was_active=False) == Failure(kind="crash", reason="the worker ended")
    timeout = judge(ended(code=-9, killed_because="too slow"), None, was_active=False)
    assert timeout == Failure(kind="timeout", reason="too slow")


def test_passing_failures_back_off_to_a_limit_and_never_give_up() -> None:
    starts, waits = Starts(), []
    for _ in range(8):
        starts.failed(Failure(kind="transient", reason="away"), False, 100.0, SETTINGS)
        waits.append(starts.retry_at - 100.0)
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]
    assert (starts.hopeless, starts.reason) == (False, "away")
    starts.succeeded()
    assert starts == Starts()


def test_crashes_in_a_row_and_what_is_permanent_give_up_unless_another_worker_serves() -> None:
    starts = Starts()
    for expected in (False, False, True):
        starts.failed(Failure(kind="crash", reason="boom"), False, 0.0, SETTINGS)
        assert starts.hopeless is expected
    for served in (True, False):
        starts = Starts()
        starts.failed(Failure(kind="permanent", reason="corrupt"), served, 0.0, SETTINGS)
        assert starts.hopeless is not served
