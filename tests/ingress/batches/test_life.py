"""The life of a batch, in any order of what may happen to it."""

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ingress.batches import life
from ingress.batches.record import ENDED, BatchRecord, Problem, Segment
from ingress.batches.views import entry
from shared.errors import BatchState

ALLOWED = {
    "validating": {"in_progress", "failed", "cancelling", "expired"},
    "in_progress": {"finalizing", "cancelling"},
    "finalizing": {"completed", "failed", "expired"},
    "cancelling": {"cancelled"},
}
EVENTS = (
    "validate",
    "reject",
    "cancel",
    "expire",
    "break",
    "intend",
    "count",
    "write",
    "finalize",
    "finish",
    "stop",
    "tidy",
)


def new() -> BatchRecord:
    return BatchRecord(
        id="batch_1", tenant="t", endpoint="/e", input_file_id="f", completion_window="24h", created_at=1, expires_at=9
    )


def happen(record: BatchRecord, event: str, number: int) -> BatchRecord:
    """What becomes of the record; the same where the runner would not let it happen."""
    open_ = not record.ended and not record.finalizing_at
    running = open_ and record.total > 0
    left = record.total - record.cursor
    match event:
        case "validate" if record.status == "validating" and record.end is None:
            return life.validated(record, 1 + number, ("m",), 2)
        case "reject" if record.status == "validating" and record.end is None:
            return life.rejected(record, [Problem("c", "m")], 2)
        case "cancel":
            try:
                return life.cancelled(record, 3)
            except BatchState:
                return record
        case "expire" if open_:
            return life.expired(record)
        case "break" if running:
            return life.broken(record, Problem("c", "m"))
        case "intend" if running and record.end is None:
            return life.intending(record, min(record.total, record.intent + number))
        case "count" if running:
            done = min(left, number)
            return life.counted(record, done // 2, done - done // 2)
        case "write" if running and left:
            lines = min(left, 1 + number)
            segment = Segment("o", 1, "e", 1)
            return life.written(record, lines, record.offset + lines, min(lines, number // 2), segment)
        case "finalize" if running and (not left or record.end == "failed"):
            return life.finalizing(record, "out", "err", 4)
        case "finish" if record.finalizing_at and not record.ended:
            return life.finished(record, 5)
        case "tidy" if record.ended:
            return life.tidied(record)
        case "stop" if open_ and record.end in ("cancelled", "expired") and not record.total:
            return life.stopped_before(record, 5)
    return record


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 6)), max_size=60))
def test_any_life(events: list[tuple[str, int]]) -> None:
    record = new()
    for event, number in events:
        after = happen(record, event, number)
        if after.status != record.status:
            assert after.status in ALLOWED[record.status], f"{record.status} -> {after.status}"
        if record.ended:
            assert after == replace(record, segments=after.segments)
        assert after.completed + after.failed == after.cursor <= after.total
        assert after.cursor <= after.intent <= after.total or not after.total
        counts = entry(after).request_counts
        assert counts.completed + counts.failed <= counts.total
        if after.ended:
            assert getattr(after, f"{after.status}_at")
            assert after.end == after.status
            assert after.total == after.cursor or after.end == "failed"
        record = after


def test_all_failed_is_no_success() -> None:
    record = life.written(life.validated(new(), 3, (), 2), 3, 10, 3, Segment("", 0, "e", 1))
    failed = life.finished(life.finalizing(record, "", "err", 4), 5)
    assert (failed.status, failed.errors[0].code) == ("failed", "all_requests_failed")
    one = life.written(life.validated(new(), 3, (), 2), 3, 10, 2, Segment("o", 1, "e", 1))
    assert life.finished(life.finalizing(one, "out", "err", 4), 5).status == "completed"


def test_files_are_named_once_they_can_be_read() -> None:
    record = life.written(life.validated(new(), 1, (), 2), 1, 10, 0, Segment("o", 1, "", 0))
    made = life.finalizing(record, "out", "", 4)
    assert entry(made).output_file_id is None
    done = entry(life.finished(made, 5))
    assert (done.output_file_id, done.error_file_id) == ("out", None)


def test_no_status_is_forgotten() -> None:
    assert {*ALLOWED, *ENDED} == {"cancelling", "finalizing", "in_progress", "validating", *ENDED}
    assert [replace(new(), status=status).ended for status in ENDED] == [True] * 4
